"""Kernels that are generated for sample graphs and for random ones, run on the CPU.

``KERNEL_SAMPLES=all`` runs every sample that has a kernel, not one for each combination of ops, and
each by every schedule;
``RANDOM_GRAPHS=2000`` runs so many random graphs, from ``RANDOM_FIRST`` on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import scalars
from cudnngraph.kernels.row_kernels import write
from cudnngraph.kernels.rows import Schedule, reads_plainly, rows_of, schedule_for
from cudnngraph.kernels.rules import RULES
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.tape import Refused
from cudnngraph.runtime.executable import Executable
from cudnngraph.select.decision import StepPlan
from tests import chunks, generated, host_kernels, numerics, random_graphs
from tests.samples import F64, Case, enumerate_cases, in_float64, make_inputs, torch_eager
from tests.samples.case import Tensors

EVERY = os.environ.get("KERNEL_SAMPLES") == "all"
FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_GRAPHS", "60"))
SEEDS = [range(at, min(FIRST + COUNT, at + 20)) for at in range(FIRST, FIRST + COUNT, 20)]
CASES = [case for case in enumerate_cases() if case.dtype != F64 and not case.drawn]
PARTS = 4  # items of a test of many samples: each compiles its kernels in one go
MARGIN = 64  # elements on both sides of an output that stay as they are


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are small, and threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def schedules(spec: GraphSpec) -> list[Schedule]:
    """Schedules for a region: by rule for a small GPU and a large one, without vectors, with some
    of a row read together, and of a row that is too long to be kept. Raises :class:`Refused`."""
    rows = rows_of(spec)
    by_rule = [schedule_for(rows, processors) for processors in (4, 132)]
    found = [*by_rule, Schedule(1, by_rule[0].team, by_rule[0].rows, 0)]
    if not rows.reductions:
        found = [*by_rule, Schedule(1, 32), Schedule(rows.lanes, 64)]
        found += [Schedule(rows.lanes, 32, 1, 3)] if reads_plainly(rows) else []
    elif by_rule[0].chunks:
        lanes, parts = rows.lanes, rows.inner.extent // rows.lanes
        found += [Schedule(lanes, 32, 2, 0), Schedule(lanes, 128, 1, -(-parts // 128))]
        found[2] = Schedule(1, 32, 4, -(-rows.inner.extent // 32))
    return list(dict.fromkeys(found))


@cache
def written() -> Mapping[str, Sequence[Source]]:
    """The kernels of the samples that are one region as a whole, by id."""
    found = {}
    for at, case in enumerate(CASES):
        spec = case.build().spec()
        try:
            first, *others = schedules(spec)
            if others and not EVERY:
                others = [others[at % len(others)]]
            found[case.id] = [write(spec, schedule) for schedule in (first, *others)]
        except Refused:
            continue
    return found


def wide_empty(spec: GraphSpec, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An output amid memory that is not its own, and that memory."""
    tensor = spec.tensors[name]
    memory = torch.empty(tensor.extent + 2 * MARGIN, dtype=tensor.dtype)
    memory.view(torch.uint8).fill_(1 if tensor.dtype == torch.bool else 0x5B)
    return memory.as_strided(tensor.shape, tensor.stride, MARGIN), memory


def run(
    source: Source, spec: GraphSpec, inputs: Tensors, *, backwards: bool = False
) -> dict[str, torch.Tensor]:
    """The outputs of a kernel, which writes nothing else."""
    made = {name: wide_empty(spec, name) for name in spec.outputs}
    before = {name: memory.clone() for name, (_, memory) in made.items()}
    given = [inputs[name] for name in spec.inputs]
    host_kernels.run(source, [*given, *(out for out, _ in made.values())], backwards=backwards)
    for name, (out, memory) in made.items():
        tensor = spec.tensors[name]
        before[name].as_strided(tensor.shape, tensor.stride, MARGIN).copy_(out)
        assert torch.equal(bits(memory), bits(before[name])), f"{name}: written beside it"
    return {name: out for name, (out, _) in made.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype != torch.bool else tensor


def judge(case: Case, inputs: Tensors, outputs: Tensors) -> None:
    """By the tolerance policy."""
    exact, theirs = torch_eager(case, in_float64(inputs)), torch_eager(case, inputs)
    assert set(outputs) == set(exact)
    for name, out in outputs.items():
        numerics.check(out, exact[name], case.dtype, theirs[name], terms=case.terms, what=name)


def parts(cases: Sequence[Case]) -> list[Sequence[Case]]:
    return [cases[first::PARTS] for first in range(PARTS)]


# -- one kernel for a whole graph --------------------------------------------------------------


@pytest.mark.parametrize("part", range(PARTS))
def test_samples_that_are_one_kernel(part: int) -> None:
    """By several schedules, and with the same bits whichever thread runs first."""
    whole = parts([case for case in CASES if case.id in written()])[part]
    for case in whole:
        for source in written()[case.id]:
            host_kernels.expect(source)

    def test(case: Case) -> None:
        spec, inputs = case.build().spec(), make_inputs(case)
        for source in written()[case.id]:
            outputs = run(source, spec, inputs)
            judge(case, inputs, outputs)
        again = run(source, spec, inputs, backwards=True)
        for name, out in outputs.items():
            assert torch.equal(out, again[name]) or bool(out.isnan().any()), name

    chunks.check(test, whole)


def test_many_samples_are_one_kernel() -> None:
    assert len(written()) >= 300


# -- kernels among the steps of a graph ------------------------------------------------------------


@cache
def kernels_of() -> Mapping[str, Sequence[StepPlan]]:
    """The kernels of all samples, cut as if cuDNN had no plans, by id."""
    made = {case.id: generated.selection(canonical(case.build().spec())) for case in CASES}
    kernels = {
        name: [step for step in found.steps if step.kind == "kernel"]
        for name, found in made.items()
    }
    return {name: steps for name, steps in kernels.items() if steps}


def picked() -> list[Case]:
    """The samples to run: one for each combination of kernels, by their ops."""
    seen, found = set(), []
    for case in CASES:
        steps = kernels_of().get(case.id, ())
        ops = tuple(tuple(node.op for node in step.spec.nodes) for step in steps)
        if ops and (EVERY or ops not in seen):
            seen.add(ops)
            found.append(case)
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_samples_whose_steps_are_kernels(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generated.install(monkeypatch)
    exes: dict[str, Executable] = {}
    for case in parts(picked())[part]:
        exes[case.id] = case.build().compile("cpu")
    assert made

    def test(case: Case) -> None:
        inputs, exe = make_inputs(case), exes[case.id]
        result = exe(**inputs)
        several = (result,) if isinstance(result, torch.Tensor) else result
        judge(case, inputs, dict(zip(exe.spec.outputs, several, strict=True)))

    chunks.check(test, parts(picked())[part])


def test_every_op_with_a_rule_is_in_a_kernel_that_is_run() -> None:
    ops = {
        node.op for case in picked() for step in kernels_of()[case.id] for node in step.spec.nodes
    }
    # Their other gradients are sums over rows of another length: the next test has the data's.
    alone = {"layer_norm_backward", "rms_norm_backward"}
    assert set(RULES) - ops <= alone


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_gradient_of_a_norm_by_its_data_alone(op: str, dtype: torch.dtype) -> None:
    g = cg.Graph(op)
    dy, x = (g.input(name, (12, 96), dtype) for name in ("dy", "x"))
    w = g.input("w", (96,), dtype)
    names = ("mean", "inv_std") if op == "layer_norm" else ("inv_std",)
    statistics = [g.input(name, (12, 1), torch.float32) for name in names]
    g.output("dx", getattr(g, op + "_backward")(dy, x, w, *statistics)[0])
    spec, gen = g.spec(), torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(spec.tensors[name].shape, generator=gen) for name in spec.inputs}
    inputs["inv_std"] = inputs["inv_std"].abs() + 0.5
    inputs = {name: each.to(spec.tensors[name].dtype) for name, each in inputs.items()}
    given = [inputs[name] for name in spec.inputs]
    theirs, exact = reference.run(spec, given)[0], reference.run(spec, given, F64)[0]
    for schedule in schedules(spec):
        made = run(write(spec, schedule), spec, inputs)
        numerics.check(made["dx"], exact, dtype, theirs, terms=96)


# -- parts of a concatenation ----------------------------------------------------------------------


def test_a_part_of_a_concatenation_reads_its_own_vectors() -> None:
    g = cg.Graph("part")
    x, z = g.input("x", (3, 5, 4), torch.float32), g.input("z", (3, 2, 4), torch.float32)
    vectors = [g.input(name, (5,), torch.float32) for name in "mvwb"]
    g.output("y", g.concat([g.batch_norm(x, *vectors), z], 1))
    spec, gen = g.spec(), torch.Generator().manual_seed(0)
    inputs = {
        name: torch.rand(spec.tensors[name].shape, generator=gen) + 0.5 for name in spec.inputs
    }
    exact = reference.run(spec, [inputs[name] for name in spec.inputs], F64)[0]
    for schedule in schedules(spec):
        numerics.check(run(write(spec, schedule), spec, inputs)["y"], exact, torch.float32)


def test_rows_of_a_part_of_a_concatenation_are_not_reduced_for_every_row() -> None:
    """Its first row would be read for each row before it, which is outside of its tensor."""
    g = cg.Graph("part")
    x, y = (g.input(name, (4, 48), torch.float32) for name in "xy")
    g.output(
        "z", g.rms_norm(g.concat([x, g.log_softmax(y, 1)], 0), g.input("w", (48,), torch.float32))
    )
    spec = g.spec()
    for schedule in schedules(spec):
        with pytest.raises(Refused, match="read in other rows, not all of which there are"):
            write(spec, schedule)


# -- random graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_random_graphs(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and forward and backward; kernels are compiled all at once, behind a first run in
    which the reference stands in for them."""
    made = generated.install(monkeypatch)
    cases = [random_graphs.case(seed) for seed in seeds]
    with generated.by_reference():
        for case in cases:
            random_graphs.judge(case)
    assert len(made) >= len(seeds)
    outcomes = {str(case): random_graphs.judge(case).outcome for case in cases}
    bad = [f"{case}\n  {outcome}" for case, outcome in outcomes.items() if outcome != "right"]
    assert not bad, "\n".join([f"{len(bad)} of {len(seeds)}", *bad])


# -- the tests themselves --------------------------------------------------------------------------


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scalars.RULES, "silu", lambda args, attrs: f"sigmoid({args[0]})")  # type: ignore[misc]
    generated.install(monkeypatch)
    cases = [case for case in CASES if "silu" in case.id and case.id in written()][:4]
    for case in cases:
        exe, inputs = case.build().compile("cpu"), make_inputs(case)
        with pytest.raises(AssertionError, match="relative error"):
            judge(case, inputs, {exe.spec.outputs[0]: exe(**inputs)})
    assert len(cases) == 4
