"""Random graphs are right, forward and backward; and what makes, judges and runs them is.

``tests/random_graphs/`` says how to run many more, or one.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cudnngraph.executor import reference
from tests import random_graphs, random_runs
from tests.random_graphs import BF16, F16, F32, F64, OPS, Case, Rounding
from tests.scripts import loaded

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_GRAPHS", "150"))
PARTS = [range(FIRST + at, min(FIRST + COUNT, FIRST + at + 25)) for at in range(0, COUNT, 25)]
SCRIPT = Path(__file__).parents[2] / "docs" / "results" / "h200_random_graphs.py"
HERE = "tests.cpu.test_random_graphs"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are small, and threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [random_graphs.case(seed) for seed in range(500)]


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_random_graphs_are_right_forward_and_backward(seeds: range) -> None:
    bad = []
    for seed in seeds:
        case = random_graphs.case(seed)
        verdict = random_graphs.judge(case)
        if verdict.outcome != "right":
            bad.append(f"{case}\n  {verdict.outcome}")
    assert not bad, "\n".join([f"{len(bad)} of {len(seeds)}", *bad])


# -- the generator ---------------------------------------------------------------------------------


def test_every_op_occurs_forward_and_backward(cases: list[Case]) -> None:
    forward, backward = Counter[str](), Counter[str]()
    for case in cases:
        (backward if case.trained else forward).update({s.op for s in case.steps.values()})
    assert {op for op in OPS if not forward[op]} == set()
    assert {op for op in OPS if not backward[op]} == set()
    assert sum(case.trained for case in cases) > 0.3 * len(cases)
    assert sum(case.fused for case in cases) > 0.08 * len(cases)


def test_sizes_dtypes_and_layouts_of_every_kind_occur(cases: list[Case]) -> None:
    assert {case.dtype for case in cases} == {F16, BF16, F32}
    assert {case.tf32 for case in cases if case.dtype == F32} == {True, False}
    lengths = Counter(len(case.steps) for case in cases)
    assert min(lengths[n] for n in range(1, 9)) >= 10 and max(lengths) <= 20
    given = [(case, each) for case in cases for each in case.inputs.values()]
    channels = Counter(each.shape[1] for _, each in given if len(each.shape) == 4)
    assert min(channels[n] for n in (1, 3, 7, 17, 209)) >= 5
    layouts = Counter(each.layout for _, each in given)
    assert min(layouts[layout] for layout in random_graphs.LAYOUTS) >= 40
    assert {len(each.shape) for _, each in given} >= {1, 2, 3, 4, 5}
    assert any(each.dtype == F32 and case.dtype != F32 for case, each in given)
    mixed = sum({"contiguous", "channels_last"} <= layouts_of(case) for case in cases)
    assert mixed > 0.2 * len(cases)
    results = [result for case in cases for result in case.results]
    assert {result.layout for result in results} == {None, "contiguous", "channels_last"}
    assert {result.dtype for result in results} == {None, F32}
    assert sum(len(case.results) > 1 for case in cases) > 50


def layouts_of(case: Case) -> set[str]:
    return {each.layout for each in case.inputs.values() if len(each.shape) >= 3}


def test_operands_are_repeated_in_every_way(cases: list[Case]) -> None:
    """Along each set of dims of an image, or of rows; and with dims left out in front."""
    ways, shorter = set[str](), 0
    for case in (*cases, *map(random_graphs.case, range(len(cases), 1500))):
        for step in case.steps.values():
            if step.op not in ("add", "sub", "mul", "div", "maximum", "minimum", "where"):
                continue
            for shape in (case.values[at].shape for at in step.operands):
                shorter += len(shape) < len(step.shape)
                if len(shape) == len(step.shape) in (3, 4) and 1 not in step.shape:
                    ways.add("".join("1" if n == 1 else "w" for n in shape))
    for rank in (3, 4):
        every = {"".join(way) for way in itertools.product("w1", repeat=rank)}
        assert every <= ways, every - ways
    assert shorter > 10


def test_convolutions_and_attention_of_every_kind_occur(cases: list[Case]) -> None:
    steps = [step for case in cases for step in case.steps.values()]
    convs = [s for s in steps if OPS[s.op].family == "conv" and s.op != "conv_transpose"]
    assert {len(s.shape) for s in convs} == {3, 4, 5}
    assert any(a != b for s in convs for a, b in s.attrs["padding"])
    assert {n for s in convs for n in s.attrs["stride"]} == {1, 2}
    assert {n for s in convs for n in s.attrs["dilation"]} == {1, 2}
    attended = [(case, s) for case in cases for s in case.steps.values() if s.op == "sdpa"]
    assert any(s.attrs.get("is_causal") for _, s in attended)
    masks = {case.values[s.operands[3]].dtype for case, s in attended if len(s.operands) > 3}  # type: ignore[union-attr]
    assert torch.bool in masks and len(masks) > 2
    assert any(
        case.values[s.operands[1]].shape[1] < case.values[s.operands[0]].shape[1]
        for case, s in attended
    )


def test_a_seed_makes_the_same_case_and_numbers_again() -> None:
    for seed in range(20):
        first, second = random_graphs.case(seed), random_graphs.case(seed)
        assert first == second
        for name, tensor in first.tensors().items():
            again = second.tensors()[name]
            assert torch.equal(tensor.nan_to_num(7), again.nan_to_num(7))
            assert tensor.stride() == again.stride()


def test_cases_are_cheap(cases: list[Case]) -> None:
    assert max(math.prod(v.shape) for case in cases for v in case.values) < 1_000_000
    start = time.process_time()
    for case in cases[100:140]:
        random_graphs.judge(case)
    assert (time.process_time() - start) / 40 < 0.3  # core-seconds


# -- what judges -----------------------------------------------------------------------------------


def test_what_rounds_inside_of_an_op_is_the_op(cases: list[Case]) -> None:
    """If nothing is rounded, the results and gradients are those of the op itself."""
    seen = Counter[str]()
    for case in cases:
        made: list[torch.Tensor] = []
        given = {n: t.double() if t.is_floating_point() else t for n, t in case.tensors().items()}
        for value in case.values:
            if isinstance(value, random_graphs.Given):
                made.append(given[value.name])
                continue
            op = OPS[value.op]
            operands = [made[at] for at in value.operands]
            made.append(op.run(*operands, **value.attrs))
            if op.inside is None or seen[value.op] >= 8:
                continue
            seen[value.op] += 1
            leaves = [o.detach().requires_grad_() if o.is_floating_point() else o for o in operands]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = []
            for run in (op.run, lambda *o, inside=op.inside, **a: inside(Rounding(), *o, **a)):
                y = run(*leaves, **value.attrs)
                found.append((y, *torch.autograd.grad(y, wanted, torch.sin(y.detach() * 9))))
            for a, b in zip(*found, strict=True):
                assert a.shape == b.shape, value.op
                off, size = float((a - b).detach().norm()), float(b.detach().norm())
                assert off <= 1e-9 * (1.0 + size), (str(case), value.op)
    assert {name for name, op in OPS.items() if op.inside} == set(seen)


FAULTS: Mapping[str, tuple[str, bool]] = {
    "conv": ("conv", False),
    "matmul": ("matmul", False),
    "sdpa": ("sdpa", False),
    "slice": ("slice", False),
    "concat": ("concat", False),
    "conv_wgrad": ("conv", True),
    "sdpa_backward": ("sdpa", True),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_wrong_rule_is_found(
    rule: str, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results with their elements in reverse order are."""
    op, trained = FAULTS[rule]
    right = reference.RULES[rule]

    def reversed_(inputs: Any, attrs: Any) -> Any:
        made = right(inputs, attrs)
        if isinstance(made, torch.Tensor):
            return made.flip(tuple(range(made.dim())))
        return tuple(None if m is None else m.flip(tuple(range(m.dim()))) for m in made)

    monkeypatch.setitem(reference.RULES, rule, reversed_)  # type: ignore[arg-type]
    picked = [
        case
        for case in cases
        if case.trained == trained
        and not case.fused
        and any(step.op == op and math.prod(step.shape) > 20 for step in case.steps.values())
    ][:12]
    verdicts = [random_graphs.judge(case).outcome for case in picked]
    assert len(picked) >= 6
    assert sum(v.startswith("wrong") for v in verdicts) >= 0.75 * len(picked), verdicts


def test_a_result_that_is_off_by_little_is_found() -> None:
    """One part in a hundred of a convolution in float16, which rounds once."""
    case = Case(0, F16, trained=False)
    case.values = [
        random_graphs.Given("x0", (1, 8, 5, 5), F16, "data", "contiguous", 0),
        random_graphs.Given("w1", (8, 8, 1, 1), F16, "weight", "contiguous", 0),
    ]
    options = {"padding": 0, "stride": 1, "dilation": 1, "groups": 1}
    case.values.append(random_graphs.Step("conv", (0, 1), options, (1, 8, 5, 5), 8))
    case.results = [random_graphs.Result(2)]
    assert random_graphs.judge(case).outcome == "right"
    given = {name: tensor.double() for name, tensor in case.tensors().items()}
    (exact,) = random_graphs.Eager(case)(given)
    yardstick = random_graphs.Yardstick(case, lambda eager: eager(given))
    check = random_graphs.check_result
    assert check(case, exact.half(), exact, yardstick, 0, "y") is False
    with pytest.raises(random_graphs.Wrong, match=r"y is off by 0.00995"):
        check(case, (exact * 1.01).half(), exact, yardstick, 0, "y")
    with pytest.raises(random_graphs.Wrong, match="off by inf"):
        check(case, (exact / 0).half(), exact, yardstick, 0, "y")


def in_tf32(x: torch.Tensor, cut: bool) -> torch.Tensor:
    """11 bits of each value, by arithmetic: rounded to the nearest, or towards zero."""
    mantissa, exponent = torch.frexp(x.double())
    scaled = mantissa * 2.0**11
    return torch.ldexp(scaled.trunc() if cut else scaled.round(), exponent - 11)


@pytest.mark.parametrize("cuts", [*itertools.product((True, False), repeat=4)])
def test_two_products_that_read_tf32_in_any_way_are_right(cuts: tuple[bool, ...]) -> None:
    """On an H200 the operands of the first were rounded here, and those of the second cut off."""
    case = random_graphs.case(7670)
    wide = {name: tensor.double() for name, tensor in case.tensors().items()}
    exact = random_graphs.Eager(case)(wide)
    yardstick = random_graphs.Yardstick(case, lambda eager: eager(wide))
    x0, w1, w3, w6 = (wide[name] for name in ("x0", "w1", "w3", "w6"))
    first = F.conv_transpose1d(in_tf32(x0, cuts[0]), in_tf32(w1, cuts[1]))
    second = F.conv1d(in_tf32(first, cuts[2]), in_tf32(w3, cuts[3]), dilation=2)
    results = [F.max_pool1d(second * 8 + w6, 3, 2), second * 8]
    for at, (result, want) in enumerate(zip(results, exact, strict=True)):
        random_graphs.check_result(case, result.float(), want, yardstick, at, "y")
        with pytest.raises(random_graphs.Wrong, match="off by"):
            wrong = result + 0.02 * want.abs().max()
            random_graphs.check_result(case, wrong.float(), want, yardstick, at, "y")


def test_layouts_are_what_they_are_called() -> None:
    for layout in random_graphs.LAYOUTS:
        given = random_graphs.Given("x3", (2, 3, 4, 5), F64, "data", layout, 2)
        tensor = given.tensor(1)
        dense = layout in ("contiguous", "channels_last", "permuted")
        assert tensor.shape == given.shape and bool(tensor.isfinite().all())
        assert (tensor.stride(2) == 0) == (layout == "expanded")
        assert tensor.is_contiguous() == (layout == "contiguous")
        last = tensor.is_contiguous(memory_format=torch.channels_last)
        assert last == (layout == "channels_last")
        assert (tensor.untyped_storage().nbytes() == tensor.nbytes) == dense
        if layout in ("sliced", "stepped"):
            extent = tensor.untyped_storage().nbytes() // 8
            assert bool(tensor.as_strided((extent,), (1,), 0).isnan().any())


# -- what runs many --------------------------------------------------------------------------------


def misbehave(case: Mapping[str, Any], skip: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """As :func:`random_runs.work`, of seeds of which one aborts and one hangs."""

    def judged(of: Case, device: str, policy: Any) -> random_graphs.Verdict:
        if of.seed == 3:
            os.abort()
        if of.seed == 4:
            signal.pthread_sigmask(signal.SIG_BLOCK, [])
            while True:
                time.sleep(0.1)
        return random_graphs.Verdict("wrong: by a lot" if of.seed == 5 else "right")

    random_runs.random_graphs.judge = judged  # type: ignore[assignment]
    yield from random_runs.work({**case, "limit_s": 1.0}, skip)


def test_a_seed_that_dies_or_hangs_is_told_and_the_others_go_on() -> None:
    heard: list[random_runs.Outcome] = []
    outcomes = random_runs.run(
        range(9), device="cpu", processes=2, function=f"{HERE}:misbehave", heard=heard.append
    )
    assert [each.seed for each in outcomes] == list(range(9))
    assert {each.seed: each.text for each in outcomes if each.kind == "fatal"} == {
        3: "SIGABRT",
        4: "takes too long (SIGALRM)",
    }
    assert [each.seed for each in outcomes if each.kind == "wrong"] == [5]
    assert sorted(heard, key=lambda each: each.seed) == outcomes
    assert random_runs.table(outcomes)[2] == "| all | 9 | 6 | 0 | 1 | 2 |"
    assert random_runs.findings(outcomes)[1] == "- seed 4, fatal: takes too long (SIGALRM)"


def vanish(case: Mapping[str, Any], skip: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """As :func:`random_runs.work`, and ends behind the first seed."""
    work = random_runs.work(case, skip)
    yield from itertools.islice(work, 2)
    os._exit(3)


def test_a_process_that_dies_between_seeds_is_told_too() -> None:
    outcomes = random_runs.run(range(4), device="cpu", processes=2, function=f"{HERE}:vanish")
    assert [(each.seed, each.kind) for each in outcomes] == [
        *((-2, "fatal"), (-1, "fatal")),
        *((0, "right"), (1, "right")),
    ]
    assert random_runs.table(outcomes)[2] == "| all | 2 | 2 | 0 | 0 | 2 |"


def test_the_script_writes_its_page_and_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    page, log = tmp_path / "page.md", tmp_path / "log"
    given = ["--cases", "12", "--from", "30", "--processes", "2", "--device", "cpu"]
    assert loaded(SCRIPT).main([*given, "--out", str(page), "--log", str(log)]) == 0
    text = page.read_text()
    assert "| all | 12 | 12 | 0 | 0 | 0 |" in text and "12 of 12 graphs from seed 30" in text
    assert len(log.read_text().splitlines()) == 12
    assert "| all | 12 | 12 | 0 | 0 | 0 |" in capsys.readouterr().out
