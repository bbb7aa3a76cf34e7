"""`cudnngraph plans …`: path, diff, explain-miss, verify, prune, export, import."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import cli
from cudnngraph.backend.env import EnvKey
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.cache import codec, lookup
from cudnngraph.cache.codec import to_record
from cudnngraph.cache.state import STATE
from cudnngraph.cli import compare, plans, records, transfer, verify
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference
from cudnngraph.explain import draw
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import Difference, graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select import guard, heuristic, workers
from cudnngraph.select.decision import StepPlan
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.workers import Answer
from plans_cache import Hit, PlanRecord, PlanStore
from plans_cache.record import MAX_CREATED
from tests.cpu.plans_cache.test_record import signed
from tests.fakes import builder
from tests.samples import enumerate_cases
from tests.workers import cache_example

CPU = torch.device("cpu")

ROOT = Path(__file__).parents[3]
Cli = Callable[..., tuple[int, str, str]]
SOURCE = """
from tests.workers.cache_example import conv_bias_relu

same = conv_bias_relu(name="under_another_name")
other = conv_bias_relu(padding=2)
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests are those of a machine without a GPU, wherever they run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "plans"


@pytest.fixture
def ids(folder: Path) -> dict[str, str]:
    """The ids of the example that is made in ``folder``, by name."""
    return cache_example.make(folder)


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs ``plans ACTION``: exit code, output, errors."""

    def call(action: str, *argv: object, at: Path | None = None) -> tuple[int, str, str]:
        code = cli.main(["plans", action, "--dir", str(at or folder), *map(str, argv)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "graphs.py"
    file.write_text(SOURCE)
    return file


def rows(text: str) -> list[list[str]]:
    """The rows of a plain table, cells divided by two spaces or more."""
    return [re.split(r" {2,}", line) for line in text.splitlines()]


# -- path ------------------------------------------------------------------------------------------


def test_path_prints_the_directory_and_makes_nothing(
    run: Cli, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("path") == (0, f"{folder}\n", "")
    assert not folder.exists()
    with records.settings.override(cache_dir=tmp_path / "of the settings"):
        assert cli.main(["plans", "path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'of the settings'}\n"


# -- diff ------------------------------------------------------------------------------------------


def test_diff_lists_what_differs_in_words(run: Cli, ids: dict[str, str]) -> None:
    code, out, _ = run("diff", ids["tuned"][:10], ids["padded"][:10])
    assert code == 0
    head, *lines = rows(out)
    assert head == ["component", ids["tuned"][:12], ids["padded"][:12]]
    f16, f32 = (f"{kind}[8, 64, {{0}}, {{0}}] channels_last" for kind in ("f16", "f32"))
    assert lines == [
        ["op 0 conv padding", "[[1, 1], [1, 1]]", "[[0, 0], [0, 0]]"],
        ["outputs %5", f16.format(56), f16.format(54)],
        ["intermediates %2", f32.format(56), f32.format(54)],
        ["intermediates %4", f32.format(56), f32.format(54)],
        ["step 1 plan", "engine 44 (IDX_MODE=0 TILE_SIZE=2)", "engine 44 (TILE_SIZE=1)"],
        ["step 1 time", "10.0 µs", "-"],
    ]


def test_diff_of_environments_names_the_gpu(run: Cli, ids: dict[str, str]) -> None:
    _, out, _ = run("diff", ids["tuned"], ids["a100"])
    assert ["env.gpu_name", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"] in rows(out)
    assert ["env.sm_count", "132", "108"] in rows(out)
    _, out, _ = run("diff", ids["tuned"], ids["old"])
    assert rows(out)[1] == ["env.cudnn_version", "91900", "91002"]


def test_diff_of_an_entry_with_itself_is_nothing(run: Cli, ids: dict[str, str]) -> None:
    short = ids["cut"][:12]
    assert run("diff", short, short) == (0, f"{short} and {short} do not differ\n", "")


def test_diff_with_an_id_that_is_not_there_is_one_line(run: Cli, ids: dict[str, str]) -> None:
    code, out, err = run("diff", ids["cut"], "0" * 20)
    assert (code, out, err) == (1, "", f"error: no entry's id begins with '{'0' * 20}'\n")


@pytest.mark.parametrize(
    ("difference", "wanted"),
    [
        (
            Difference("ops", '[["relu",["%0"],["%1"],{}]]', '[["elu",["%0"],["%1"],{}]]'),
            [("op 0", "relu(%0)", "elu(%0)")],
        ),
        (
            Difference(
                "ops",
                '[["elu",["%0"],["%1"],{"alpha":"0x1.8000000000000p+0"}]]',
                '[["elu",["%0"],["%1"],{"alpha":"0x1.0000000000000p+1"}],'
                '["relu",["%1"],["%2"],{}]]',
            ),
            [("op 0 elu alpha", "1.5", "2.0"), ("op 1", "-", "relu(%1)")],
        ),
        (
            Difference("ops", '[["add",["%0","%1"],["%2"],{}]]', '[["add",["%1","%0"],["%2"],{}]]'),
            [("op 0 add reads", '["%0", "%1"]', '["%1", "%0"]')],
        ),
        (Difference("policy.allow_tf32", "true", None), [("policy.allow_tf32", "true", "-")]),
        (
            Difference("alignment_bytes", '{"%0":16,"%1":16}', '{"%0":16,"%1":4}'),
            [("alignment_bytes %1", "16", "4")],
        ),
        (
            Difference("compute_dtype", '"torch.float32"', '"torch.float16"'),
            [("compute_dtype", "float32", "float16")],
        ),
        (Difference("ops", "[[", '[["relu"]]'), [("ops", "[[", '[["relu"]]')]),
        (Difference("x\x1b", '"\\u001b[2J"', "1"), [(r"x\x1b", r"\x1b[2J", "1")]),
    ],
)
def test_differences_are_told_in_words(difference: Difference, wanted: list[compare.Row]) -> None:
    assert compare.rows([difference]) == wanted


# -- explain-miss ----------------------------------------------------------------------------------


def test_a_graph_that_is_kept_is_a_hit_under_any_name(
    run: Cli, ids: dict[str, str], source: Path
) -> None:
    code, out, _ = run("explain-miss", f"{source}:same", "--no-tf32")
    assert code == 0
    assert re.match(r"graph 'under_another_name', key [0-9a-f]{16}: hit\n", out)
    for name in ("tuned", "a100", "old"):
        assert f"  {ids[name][:12]}: conv → bias → relu, " in out
    assert "there is no GPU here: environments were not compared" in out


def test_a_miss_shows_the_nearest_entry_and_what_differs(
    run: Cli, ids: dict[str, str], source: Path
) -> None:
    code, out, _ = run("explain-miss", f"{source}:other", "--no-tf32")
    assert code == 1
    assert ": miss\n" in out
    assert f"the nearest entry is {ids['tuned'][:12]} (conv → bias → relu, NVIDIA H200" in out
    assert "it differs in 3 components" in out
    assert ["op 0 conv padding", "[[2, 2], [2, 2]]", "[[1, 1], [1, 1]]"] in rows(out)


def test_a_policy_that_differs_is_a_miss_by_one_component(
    run: Cli, ids: dict[str, str], source: Path
) -> None:
    place = f"{source}:same"
    code, out, _ = run("explain-miss", place, "--no-tf32", "--deterministic")
    assert (code, "it differs in 1 component\n" in out) == (1, True)
    assert ["policy.deterministic", "true", "false"] in rows(out)
    code, out, _ = run("explain-miss", place, "--no-tf32", "--workspace-limit", "1024")
    assert (code, ["policy.workspace_limit", "1024", "null"] in rows(out)) == (1, True)


def test_on_a_gpu_the_environment_has_to_be_the_same(
    run: Cli, ids: dict[str, str], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cache_example.records(time.time())
    monkeypatch.setattr(plans, "here", lambda: made["a100"].env)
    code, out, _ = run("explain-miss", f"{source}:same", "--no-tf32")
    assert (code, ids["a100"][:12] in out, ids["tuned"][:12] in out) == (0, True, False)
    newer = {**dict(made["tuned"].env), "cudnn_version": "92000"}
    monkeypatch.setattr(plans, "here", lambda: tuple(newer.items()))
    code, out, _ = run("explain-miss", f"{source}:same", "--no-tf32")
    assert (code, rows(out)[-1]) == (1, ["env.cudnn_version", "92000", "91900"])


def test_every_graph_of_a_file_is_explained(run: Cli, ids: dict[str, str], source: Path) -> None:
    code, out, _ = run("explain-miss", source, "--no-tf32")
    assert (code, out.count(": hit\n"), out.count(": miss\n")) == (1, 1, 1)


def test_an_id_or_a_key_shows_the_nearest_other_entry(run: Cli, ids: dict[str, str]) -> None:
    code, out, _ = run("explain-miss", ids["tuned"][:8])
    assert code == 0
    assert out.startswith(f"{ids['tuned'][:12]} is in the cache: ")
    assert f"the nearest entry is {ids['old'][:12]}" in out
    assert "it differs in 1 component\n" in out
    key = cache_example.records(0.0 + 1e9)["cut"].key_digest
    assert run("explain-miss", key[:16])[1].startswith(f"{ids['cut'][:12]} is in the cache")


def test_a_key_that_is_not_there_asks_for_the_graph(run: Cli, ids: dict[str, str]) -> None:
    code, out, err = run("explain-miss", "0" * 16)
    assert (code, out) == (1, "")
    assert err.startswith("error: no entry's id or key begins with '0000") and "FILE.py" in err


def test_a_miss_in_an_empty_cache_says_so(run: Cli, source: Path) -> None:
    code, out, _ = run("explain-miss", f"{source}:same")
    assert (code, out.splitlines()[-1]) == (1, "there is no other entry")


@pytest.mark.parametrize("place", ["{}:nothing", "{}.missing"])
def test_a_file_without_that_graph_exits_with_2(place: str, run: Cli, source: Path) -> None:
    code, out, err = run("explain-miss", place.format(source))
    assert (code, out, err.startswith("error: ")) == (2, "", True)


# -- verify ----------------------------------------------------------------------------------------


def test_verify_without_a_gpu_checks_the_rest_and_says_what_it_left_out(
    run: Cli, ids: dict[str, str]
) -> None:
    code, out, _ = run("verify")
    assert code == 0
    table = {row[0]: row[1:5] for row in rows(out)}
    assert table["id"] == ["record", "blob", "graph", "replay"]
    assert table[ids["tuned"][:12]] == ["ok", "ok", "ok", "skipped"]
    assert table[ids["cut"][:12]] == ["ok", "none", "ok", "skipped"]
    assert out.splitlines()[-2:] == [
        "7 entries checked, 0 replayed, 0 problems",
        "nothing was replayed: torch sees no CUDA device",
    ]


def test_verify_finds_a_damaged_record_and_a_damaged_blob(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    (blob,) = folder.rglob(f"{ids['sdpa']}.*.blob")
    blob.write_bytes(b"X" + cache_example.BLOB[1:])
    (short,) = folder.rglob(f"{ids['tuned']}.*.blob")
    short.write_bytes(cache_example.BLOB[:-1])
    (text,) = folder.rglob(f"{ids['a100']}.json")
    text.write_bytes(text.read_bytes().replace(b'"engine": 1', b'"engine": 2'))
    code, out, _ = run("verify")
    assert code == 1
    failed = [line for line in out.splitlines() if line.startswith("failed")]
    assert failed == [
        f"failed {ids['a100']}: record: record.checksum: does not match the content",
        *sorted(
            [
                f"failed {ids['tuned'][:12]}: blob: blob has 339 bytes, the record says 340",
                f"failed {ids['sdpa'][:12]}: blob: blob does not match the record's sha256",
            ]
        ),
    ]
    assert "7 entries checked, 0 replayed, 3 problems" in out


def test_verify_reads_the_entry_on_disk_and_finds_what_others_may_write_to(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    (record,) = folder.rglob(f"{ids['cut']}.json")
    (blob,) = folder.rglob(f"{ids['sdpa']}.*.blob")
    record.chmod(0o666)
    blob.chmod(0o666)
    code, out, _ = run("verify")
    table = {row[0]: row[1:5] for row in rows(out)}
    assert (code, table[ids["cut"][:12]]) == (1, ["failed", "skipped", "ok", "skipped"])
    assert table[ids["sdpa"][:12]] == ["ok", "failed", "ok", "skipped"]
    why = "has mode 0666: others may write to it; chmod go-w it"
    assert f"failed {ids['cut'][:12]}: record: {record} {why}\n" in out
    assert f"failed {ids['sdpa'][:12]}: blob: blob: {blob} {why}\n" in out


def test_verify_finds_a_graph_that_is_not_the_keys(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    record = cache_example.records(time.time())["cut"]
    (first, second) = record.steps
    wrong = dataclasses.replace(record, steps=(second, first), policy={"note": "steps swapped"})
    PlanStore(folder, seeds=None).put(wrong)
    code, out, _ = run("verify", record.id[:12])
    assert (code, "graph: stale: " in out) == (1, True)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ops", "7", "ops are not a list"),
        ("ops", '[["conjure",[],[],{}]]', "op 0 is 'conjure', which is none"),
        ("ops", '[["relu",["%5"],["%5"],{}]]', "a tensor that is not there: '%5'"),
        ("ops", "[" * 15 + "]" * 15, "op 0 is not"),
        ("outputs", '[["%9",[1],[1],"torch.float16"]]', "another"),
        ("outputs", '[["../../x",[1],[1],"torch.float16"]]', "no number of its own"),
        ("inputs", "{}", "a tensor that is not there"),
        ("inputs", '{"%0":[[-1],[1],"torch.float16"]}', "no shape, strides and dtype"),
        ("compute_dtype", '"os.system"', "compute_dtype is 'os.system'"),
        ("schema", "1", "has another 'schema'"),
    ],
)
def test_a_key_that_is_no_graph_is_said_to_be_none(name: str, value: str, said: str) -> None:
    record = cache_example.records(time.time())["tuned"]
    key = tuple((n, value if n == name else v) for n, v in record.key)
    verdict, steps = verify.check_graph(dataclasses.replace(record, key=key))
    assert (verdict.status, steps) == ("failed", ())
    assert said in verdict.detail or name == "outputs"


def test_the_graph_of_every_sample_comes_back_from_its_key() -> None:
    """One case of each sequence of ops: the key alone describes the graph, and it can be run."""
    policy = cg.Policy(allow_tf32=False)
    seen = set()
    for case in enumerate_cases():
        spec = case.build().spec()
        ops = tuple(node.op for node in spec.nodes)
        if ops in seen:
            continue
        seen.add(ops)
        key = graph_key(spec, policy)
        record = dataclasses.replace(cache_example.records(1e9)["cut"], key=key.components)
        found = verify.graph_of(record)
        assert found == canonical(found)
        assert dataclasses.replace(found, name="") == dataclasses.replace(canonical(spec), name="")
        assert graph_key(found, policy) == key
        if sum(each.numel for each in found.tensors.values()) < 1 << 18:
            for out in reference.run(found, random_inputs(found, CPU), torch.float64):
                assert bool(out.isfinite().all()), case
    assert len(seen) > 20


def _steps(name: str) -> tuple[PlanRecord, tuple[StepPlan, ...]]:
    record = cache_example.records(time.time())[name]
    verdict, steps = verify.check_graph(record)
    assert verdict == verify.OK
    return record, steps


HERE = Verified(1e-4, "a GPU", 91900, "1.28.0", "2.13")
WRONG = "writes outside of its output 'y'"


def passes(step: StepPlan) -> tuple[str | None, Verified | None]:
    """Stands for a GPU on which every plan is right."""
    return None, HERE


@pytest.mark.parametrize(("name", "ran"), [("tuned", 1), ("cut", 2), ("sdpa", 1), ("torch", 0)])
def test_replay_checks_every_cudnn_step_and_the_record_says_what_that_found(
    name: str, ran: int
) -> None:
    seen: list[StepPlan] = []

    def check(step: StepPlan) -> tuple[str | None, Verified | None]:
        seen.append(step)
        return passes(step)

    record, steps = _steps(name)
    verdict, now = verify.check_plans(record, steps, check)
    assert (verdict.status, len(seen)) == ("ok" if ran else "none", ran)
    assert verdict.detail == ("off by 1.0e-04" if ran else "")
    assert all(step.choice is not None for step in seen)
    assert now is not None
    again = codec.steps_of(now, legalize(verify.graph_of(now), verify.policy_of(now)))
    assert [step.verified for step in again] == [
        None if step.choice is None else HERE for step in steps
    ]
    assert dataclasses.replace(now, steps=record.steps) == record


@pytest.mark.parametrize("likely", [0.0, 0.4, 1.0])
def test_what_selection_records_is_verified_and_drawn(likely: float) -> None:
    """Records as compile makes them, of graphs that cuDNN takes whole, in steps, and not at all."""
    policy, env = (
        cg.Policy(allow_tf32=False),
        EnvKey(91900, "1.28.0", "NVIDIA H200", (9, 0), 132, 1),
    )
    dice, seen = random.Random(1), set()
    for case in enumerate_cases():
        spec = canonical(case.build().spec())
        ops = tuple(node.op for node in spec.nodes)
        size = sum(each.numel for each in spec.tensors.values())
        if ops in seen or size > 1 << 17 or not case.on_gpu:
            continue
        seen.add(ops)
        made = heuristic.heuristic(spec, policy, builder(lambda part: dice.random() < likely))
        record = to_record(spec, graph_key(spec, policy), env, policy, made)
        verdict, steps = verify.check_graph(record)
        assert (verdict, steps) == (verify.OK, made.steps), case
        plans, now = verify.check_plans(record, steps, passes)
        assert plans.status in ("ok", "none") and now is not None, (case, plans)
        boxes = ET.fromstring(draw.svg(record)).iter("{http://www.w3.org/2000/svg}rect")
        assert sum(box.get("class") == "box" for box in boxes) == len(steps)
    assert len(seen) > 20


def test_steps_that_are_equal_are_checked_once() -> None:
    g = cg.Graph("g")
    x = g.input("x", (4, 6), torch.float16)
    for name in "ab":
        g.output(f"y{name}", g.matmul(x, g.input(name, (6, 6), torch.float16)))
    g.output("z", g.relu(x))
    spec, policy = canonical(g.spec()), cg.Policy(allow_tf32=False)
    made = heuristic.heuristic(spec, policy, builder(lambda part: len(part.nodes) > 1))
    steps = tuple(dataclasses.replace(step, choice=Choice(4, ())) for step in made.steps)
    made = dataclasses.replace(made, steps=steps)
    env = EnvKey(91900, "1.28.0", "NVIDIA H200", (9, 0), 132, 1)
    record = to_record(spec, graph_key(spec, policy), env, policy, made)
    seen: list[str] = []

    def check(step: StepPlan) -> tuple[str | None, Verified | None]:
        seen.append(step.spec.nodes[0].op)
        return passes(step)

    verdict, _ = verify.check_plans(record, made.steps, check)
    assert verdict.status == "ok" and len(made.steps) == 3
    assert sorted(seen) == ["matmul", "relu"]


def test_replay_finds_a_plan_that_does_not_pass() -> None:
    record, steps = _steps("cut")
    verdict, now = verify.check_plans(record, steps, lambda step: (WRONG, None))
    assert now is None
    assert (verdict.status, verdict.detail) == ("failed", f"step 1, {steps[0].choice}: {WRONG}")


def test_replay_says_why_a_plan_does_not_run() -> None:
    def refuse(step: StepPlan) -> tuple[str | None, Verified | None]:
        raise NotSupported(str(step.choice), ["the knob is gone"])

    record, steps = _steps("tuned")
    verdict, now = verify.check_plans(record, steps, refuse)
    assert now is record, "that says nothing of what it computes"
    assert verdict.status == "failed"
    assert verdict.detail.startswith("step 1 does not run: cuDNN has no plan for engine 44")


def test_without_memory_to_compare_replay_says_so() -> None:
    none = dataclasses.replace(HERE, error=None)
    verdict, _ = verify.check_plans(*_steps("tuned"), lambda step: (None, none))
    assert verdict == verify.Verdict("ok", "there was no memory to compare results")


class Gpu:
    """A GPU of the example's environment, and what its plans were found to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.env = cache_example.records(time.time())["tuned"].env
        self.wrong: dict[int, str] = {}
        self.asked: list[tuple[Choice, cg.Policy]] = []
        self.error = HERE.error
        monkeypatch.setattr(verify, "why_no_gpu", lambda: "")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(verify, "is_here", lambda record, device: record.env == self.env)
        monkeypatch.setattr(lookup, "env_components", lambda environment: self.env)
        monkeypatch.setattr(lookup.env, "env_key", lambda index: None)
        monkeypatch.setattr(STATE, "rejections", {})
        monkeypatch.setattr(STATE, "launches", {})
        monkeypatch.setattr(guard, "_in_process", "")
        monkeypatch.setattr(lookup.env, "uuid", lambda index: f"GPU {index}")
        monkeypatch.setattr(workers, "on", lambda index: self)
        monkeypatch.setattr(
            Verified,
            "here",
            classmethod(lambda cls, index, error: dataclasses.replace(HERE, error=error)),
        )

    def check(
        self, spec: GraphSpec, policy: cg.Policy, choice: Choice, gate: Path | None = None
    ) -> Future[Answer]:
        self.asked.append((choice, policy))
        future: Future[Answer] = Future()
        future.set_result(Answer(wrong=self.wrong.get(choice.engine), error=self.error))
        return future


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def _said(folder: Path, id: str) -> list[Any]:
    """What a record on disk says of each step's check."""
    found = PlanStore(folder, seeds=None).check(id)
    assert found.record is not None and not found.blob_problem
    return [step.extra.get(codec.VERIFIED) for step in found.record.steps]


def test_on_a_gpu_the_plans_of_its_environment_are_checked_and_their_records_renewed(
    run: Cli, folder: Path, ids: dict[str, str], gpu: Gpu
) -> None:
    code, out, _ = run("verify")
    assert code == 0
    table = {row[0]: row[4:] for row in rows(out)}
    assert table[ids["a100"][:12]] == ["skipped", "replay: it is of another environment"]
    assert table[ids["tuned"][:12]] == ["ok", "replay: off by 1.0e-04"]
    assert table[ids["torch"][:12]] == ["none"]
    assert out.splitlines()[-2:] == [
        "7 entries checked, 4 replayed, 0 problems",
        "4 renewed: what they say of their plans was found now",
    ]
    assert all(policy.verify == "isolated" for _, policy in gpu.asked), "whatever the settings say"
    assert _said(folder, ids["tuned"]) == [dataclasses.asdict(HERE)]
    assert _said(folder, ids["a100"]) == [None]
    kept = PlanStore(folder, seeds=None).get(ids["tuned"])
    assert isinstance(kept, Hit) and kept.blob == cache_example.BLOB
    assert "renewed" not in run("verify")[1], "nothing new was found"
    gpu.error = 2e-4
    assert "4 renewed" in run("verify")[1]
    assert _said(folder, ids["tuned"])[0]["error"] == 2e-4


def test_a_plan_that_does_not_pass_is_rejected_and_its_record_removed(
    run: Cli, folder: Path, ids: dict[str, str], gpu: Gpu
) -> None:
    gpu.wrong = {44: WRONG}
    code, out, _ = run("verify", ids["tuned"][:12])
    assert code == 1
    (step,) = cache_example.records(time.time())["tuned"].steps
    assert step.engine == 44
    choice = Choice(44, step.knobs)
    assert f"failed {ids['tuned'][:12]}: replay: step 1, {choice}: {WRONG}\n" in out
    assert out.splitlines()[-2:] == [
        "1 entries checked, 0 replayed, 1 problem",
        "1 removed: their plans are chosen anew when they are asked for",
    ]
    assert PlanStore(folder, seeds=None).check(ids["tuned"]).record is None
    (rejected,) = (folder / "rejected").iterdir()
    (entry,) = json.loads(rejected.read_text())
    assert (entry["engine"], entry["reason"]) == (44, WRONG)
    (lost,) = (folder / "launching").iterdir()
    assert lost.name == f"{rejected.stem}.lost", "other records with it are stale"
    assert len(gpu.asked) == 1


def test_a_plan_that_was_rejected_before_is_not_run_again(
    run: Cli, folder: Path, ids: dict[str, str], gpu: Gpu
) -> None:
    record = cache_example.records(time.time())["tuned"]
    gpu.wrong = {44: WRONG}
    run("verify", ids["tuned"][:12])
    PlanStore(folder, seeds=None).put(record)
    gpu.asked.clear()
    code, out, _ = run("verify", ids["tuned"][:12])
    assert (code, gpu.asked) == (1, []) and WRONG in out


def test_a_record_that_is_damaged_is_not_renewed(
    run: Cli, folder: Path, ids: dict[str, str], gpu: Gpu
) -> None:
    (blob,) = folder.rglob(f"{ids['tuned']}.*.blob")
    blob.write_bytes(b"X" + cache_example.BLOB[1:])
    (text,) = folder.rglob(f"{ids['tuned']}.json")
    before = text.read_bytes()
    code, out, _ = run("verify", ids["tuned"][:12])
    assert (code, "renewed" in out) == (1, False)
    assert text.read_bytes() == before


def test_a_policy_that_cannot_be_is_said_to_be_none(gpu: Gpu) -> None:
    record, steps = _steps("tuned")
    key = (*record.key, ("policy.workspace_limit", "-7"))
    hostile = dataclasses.replace(record, key=key)
    verdict, now = verify.check_plans(hostile, steps, verify.on_gpu(hostile, 0))
    assert (verdict.status, now, gpu.asked) == ("failed", hostile, [])
    assert "workspace_limit=-7" in verdict.detail


def test_random_inputs_have_the_declared_strides_and_repeat() -> None:
    g = cg.Graph("g")
    x = g.input("x", (4, 3), torch.float32, stride=(1, 4))
    b = g.input("b", (4, 3), torch.float32, stride=(0, 1))
    g.output("y", g.add(x, b))
    first, second = random_inputs(g.spec(), CPU), random_inputs(g.spec(), CPU)
    assert [each.stride() for each in first] == [(1, 4), (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert bool((first[0].abs() <= 1).all()) and first[0].unique().numel() == 12


# -- prune -----------------------------------------------------------------------------------------


def left(folder: Path, ids: dict[str, str]) -> set[str]:
    """The names of the entries that are still on disk."""
    on_disk = {path.stem for path in folder.rglob("*.json")}
    return {name for name, id in ids.items() if id in on_disk}


@pytest.mark.parametrize(
    ("argv", "gone"),
    [
        (["--dead-environments", "--gpu", "nvidia h200"], {"a100"}),
        (["--dead-environments", "--cudnn", "9.19.0"], {"old"}),
        (["--dead-environments", "--cudnn", "91900", "--gpu", "NVIDIA H200"], {"a100", "old"}),
        (["--dead-environments", "--frontend", "1.28.0"], set()),
        (["--older-than", "30"], {"a100", "old"}),
        (["--older-than", "0.05"], {"padded", "cut", "a100", "old"}),
        (["--older-than", "0"], {"tuned", "padded", "cut", "torch", "sdpa", "a100", "old"}),
        (["--max-size", "0"], {"tuned", "padded", "cut", "torch", "sdpa", "a100", "old"}),
        (["--max-size", "1G"], set()),
    ],
)
def test_prune_removes_what_it_was_told_to(
    argv: list[str], gone: set[str], run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    code, out, _ = run("prune", *argv, "--dry-run")
    assert (code, left(folder, ids)) == (0, set(ids))
    assert f"would remove {len(gone)} of 7 plans" in out
    assert {name for name in ids if ids[name][:12] in out} == gone
    code, out, _ = run("prune", *argv)
    assert (code, left(folder, ids)) == (0, set(ids) - gone)
    assert f"removed {len(gone)} of 7 plans" in out


def test_prune_goes_by_the_last_use_where_it_is_asked_to(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    store = PlanStore(folder, seeds=None)
    for name in ("old", "cut"):
        assert isinstance(store.get(ids[name]), Hit)
    code, out, _ = run("prune", "--unused-for", "30", "--dry-run")
    assert (code, "would remove 1 of 7 plans" in out) == (0, True)
    assert out.startswith(f"{ids['a100'][:12]}  unused: ")
    assert run("prune", "--unused-for", "30")[0] == 0
    assert left(folder, ids) == set(ids) - {"a100"}
    assert run("prune", "--older-than", "30")[0] == 0
    assert left(folder, ids) == set(ids) - {"a100", "old"}


def test_prune_removes_folders_of_other_schemas_only_when_asked(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    for name in ("v0", "v2"):
        (folder / name / "ab").mkdir(parents=True)
        (folder / name / "ab" / "plan.json").write_bytes(b"x" * 512)
    (folder / "mine").mkdir()
    assert run("prune", "--older-than", "1000")[0] == 0
    assert (folder / "v0").is_dir()
    tail = "0 of 7 plans, 0 B, and 2 folders of another schema, 1.0 KiB\n"
    code, out, _ = run("prune", "--other-schemas", "--dry-run")
    lines = [f"v{version}  another schema: 1 file, 512 B\n" for version in (0, 2)]
    assert (code, out) == (0, "".join(lines) + "would remove " + tail)
    assert (folder / "v0").is_dir() and (folder / "v2").is_dir()
    code, out, _ = run("prune", "--other-schemas")
    assert (code, out) == (0, "".join(lines) + "removed " + tail)
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "v1"]
    assert left(folder, ids) == set(ids)
    assert "and 0 folders of another schema, 0 B" in run("prune", "--other-schemas")[1]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root gives files away")
def test_a_folder_of_another_user_stays_and_the_exit_code_says_so(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    (folder / "v0").mkdir()
    (folder / "v2").mkdir()
    os.chown(folder / "v0", 12345, -1)
    code, out, err = run("prune", "--other-schemas")
    assert (code, err) == (1, "error: 1 could not be removed, v0 among them\n")
    assert f"v0  another schema: {folder / 'v0'} belongs to user 12345\n" in out
    assert (folder / "v0").is_dir() and not (folder / "v2").exists()


def test_a_dry_run_moves_nothing_and_says_what_is_damaged(run: Cli, tmp_path: Path) -> None:
    place = tmp_path / "damaged"
    ids = cache_example.make(place, damaged=True)
    before = sorted(place.rglob("*"))
    said = f"damaged: {ids['old']}: record: "
    code, out, err = run("prune", "--max-size", "1G", "--dry-run", at=place)
    assert (code, out) == (0, f"would remove 0 of {len(ids) - 1} plans, 0 B\n")
    assert err.startswith(said) and err.count("\n") == 1
    assert sorted(place.rglob("*")) == before
    assert run("prune", "--max-size", "1G", at=place)[2].startswith(said)
    assert len(list((place / "quarantine").iterdir())) == 1


def test_prune_by_size_takes_the_oldest_until_the_rest_fits(
    run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    by_age = ["sdpa", "torch", "tuned", "padded", "cut", "a100", "old"]
    files = {
        name: [*folder.rglob(f"{id}.json"), *folder.rglob(f"{id}.*.blob")]
        for name, id in ids.items()
    }
    size = {name: sum(file.stat().st_size for file in each) for name, each in files.items()}
    keep = sum(size[name] for name in by_age[:3])
    assert run("prune", "--max-size", keep + 10)[0] == 0
    assert left(folder, ids) == set(by_age[:3])
    assert not list(folder.rglob(f"{ids['padded']}.*"))


def test_prune_says_the_reason_for_each(run: Cli, ids: dict[str, str]) -> None:
    _, out, _ = run(
        "prune", "--dead-environments", "--cudnn", "9.19.0", "--older-than", "30", "--dry-run"
    )
    assert out.splitlines()[:2] == sorted(
        [
            f"{ids['old'][:12]}  dead environment: conv → bias → relu, NVIDIA H200, "
            "cuDNN 9.10.2, disk, 90 d old, used 90 d ago",
            f"{ids['a100'][:12]}  too old: conv → bias → relu, NVIDIA A100-SXM4-80GB, "
            "cuDNN 9.19.0, disk, 40 d old, used 40 d ago",
        ]
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "say what may go: --dead-environments, --older-than, --unused-for, --max-size, "),
        (["--dead-environments"], "there is no GPU here to compare environments with"),
        (["--gpu", "x"], "--gpu says what --dead-environments compares with"),
        (["--older-than", "-1"], "--older-than: expected days, 0 or more, got '-1'"),
        (["--older-than", "nan"], "--older-than: expected days, 0 or more, got 'nan'"),
        (["--unused-for", "a day"], "--unused-for: expected days, 0 or more, got 'a day'"),
        (["--max-size", "lots"], "--max-size: expected bytes, like 512K, 64M or 1G, got 'lots'"),
        (["--max-size", "1.2.3"], "--max-size: expected bytes, like 512K, 64M or 1G, got '1.2.3'"),
        (["--max-size", "9" * 308 + "G"], "expected bytes, like 512K, 64M or 1G, got '999"),
    ],
)
def test_a_prune_that_makes_no_sense_removes_nothing(
    argv: list[str], said: str, run: Cli, folder: Path, ids: dict[str, str]
) -> None:
    code, out, err = run("prune", *argv)
    assert (code, out, left(folder, ids)) == (2, "", set(ids))
    assert said in err


# -- seeds -----------------------------------------------------------------------------------------


def test_seeds_are_exported_as_they_ship_and_serve(
    run: Cli, ids: dict[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = tmp_path / "deep" / "seeds"
    code, out, _ = run("export", "--seeds", seeds)
    assert (code, out) == (0, f"7 seeds written to {seeds}\n")
    files = {path.relative_to(seeds).as_posix() for path in seeds.rglob("*") if path.is_file()}
    h200 = {f"nvidia-h200/{id}.json" for name, id in ids.items() if name != "a100"}
    assert files == {*h200, f"nvidia-a100-sxm4-80gb/{ids['a100']}.json"}
    store = PlanStore(None, seeds=seeds, strict=True)
    here = PlanStore(folder, seeds=None)
    for id in ids.values():
        seed, mine = store.get(id), here.get(id)
        assert isinstance(seed, Hit) and isinstance(mine, Hit)
        assert (seed.tier, seed.record) == ("seed", mine.record.with_blob(None))
    monkeypatch.setattr(records, "PACKAGED_SEEDS", seeds)
    code, out, _ = run("verify", at=tmp_path / "none")
    assert (code, "7 entries checked, 0 replayed, 0 problems" in out) == (0, True)
    before = {path: path.read_bytes() for path in seeds.rglob("*.json")}
    assert run("export", "--seeds", seeds)[0] == 0  # again, over itself
    assert {path: path.read_bytes() for path in seeds.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("../../etc", "etc"),
        ("/", "unknown"),
        ("NVIDIA GeForce RTX™ 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_a_seed_stands_in_a_folder_below_whatever_the_gpu_is_called(gpu: str, name: str) -> None:
    assert transfer.seed_folder(gpu) == name


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "export takes a FILE or --seeds FOLDER, one of them"),
        (["file", "--seeds", "folder"], "export takes a FILE or --seeds FOLDER, one of them"),
        (["--seeds", "folder", "--with-blobs"], "seeds have no serialized plans"),
    ],
)
def test_an_export_that_makes_no_sense_writes_nothing(
    argv: list[str],
    said: str,
    run: Cli,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, out, err = run("export", *argv)
    assert (code, out, err.startswith(f"error: {said}")) == (2, "", True)
    assert list((tmp_path / "empty").iterdir()) == []


def test_seeds_that_cannot_be_written_are_one_line(
    run: Cli, ids: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("export", "--seeds", tmp_path / "file")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "cannot be written" in err


# -- export, import --------------------------------------------------------------------------------


@pytest.fixture
def exported(run: Cli, ids: dict[str, str], tmp_path: Path) -> Path:
    """A file of the example with blobs."""
    file = tmp_path / "fleet.plans"
    code, out, _ = run("export", file, "--with-blobs")
    assert (code, out) == (0, f"7 records and 2 blobs written to {file}\n")
    return file


def test_records_travel_without_blobs(
    run: Cli, ids: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    file, there = tmp_path / "fleet.plans", tmp_path / "there"
    code, out, _ = run("export", file)
    assert (code, out) == (0, f"7 records and 0 blobs written to {file}, 2 blobs left out\n")
    assert base64.b64encode(cache_example.BLOB)[:40] not in file.read_bytes()
    assert [path.name for path in tmp_path.iterdir()].count(".tmp") == 0
    code, out, _ = run("import", file, at=there)
    assert (code, out) == (0, "7 new, 0 replaced, 0 the same, 0 kept, 0 refused\n")
    here, gone = PlanStore(folder, seeds=None), PlanStore(there, seeds=None)
    for id in ids.values():
        mine, theirs = here.get(id), gone.get(id)
        assert isinstance(mine, Hit) and isinstance(theirs, Hit)
        assert (theirs.record, theirs.blob) == (mine.record.with_blob(None), None)
    assert run("import", file, at=there)[1].startswith("0 new, 0 replaced, 7 the same")


def test_blobs_come_in_only_when_they_are_trusted(
    run: Cli, ids: dict[str, str], exported: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    code, out, _ = run("import", exported, at=there)
    assert (code, list(there.rglob("*.blob"))) == (0, [])
    assert "2 blobs dropped: they hold device code; --trust-blobs takes them" in out
    code, out, _ = run("import", exported, "--trust-blobs", at=there)
    assert (code, out) == (
        0,
        "0 new, 2 replaced, 5 the same, 0 kept, 0 refused\n2 blobs taken\n",
    )
    found = PlanStore(there, seeds=None).get(ids["tuned"])
    assert isinstance(found, Hit) and found.blob == cache_example.BLOB


def test_an_import_keeps_what_is_newer_here_and_says_so(
    run: Cli, ids: dict[str, str], exported: Path, folder: Path
) -> None:
    store = PlanStore(folder, seeds=None)
    made = cache_example.records(time.time())
    newer = dataclasses.replace(made["cut"], versions={"torch": "3.0"})
    older = dataclasses.replace(made["old"], created=5.0)
    store.put(newer)
    store.put(older)
    code, out, _ = run("import", exported)
    assert code == 0
    assert out.splitlines()[:2] == [
        f"kept, as new or newer here (--replace takes the file's): {ids['cut'][:12]}",
        "0 new, 1 replaced, 5 the same, 1 kept, 0 refused",
    ]
    found = PlanStore(folder, seeds=None).get(ids["cut"])
    assert isinstance(found, Hit) and found.record == newer
    assert "1 replaced, 6 the same, 0 kept" in run("import", exported, "--replace")[1]
    found = PlanStore(folder, seeds=None).get(ids["cut"])
    assert isinstance(found, Hit) and found.record.versions == {"torch": "2.11.0+cu130"}


@pytest.mark.parametrize(
    "created", [1e308, MAX_CREATED, time.time() + 1e9], ids=["1e308", "year 9999", "in 30 years"]
)
def test_a_record_of_a_time_to_come_blocks_no_import(
    created: float, run: Cli, ids: dict[str, str], exported: Path, folder: Path, tmp_path: Path
) -> None:
    id = ids["cut"]
    (file,) = folder.rglob(f"{id}.json")
    body = json.loads(file.read_bytes())
    body["created"] = created
    body["versions"] = {"torch": "0.0"}
    file.write_text(signed(body))
    head, *lines = exported.read_bytes().splitlines()
    code, out, err = run("import", exported)
    assert code == 0, err
    assert ", 6 the same, 0 kept, 0 refused" in out
    found = PlanStore(folder, seeds=None).get(id)
    assert isinstance(found, Hit) and found.record.versions == {"torch": "2.11.0+cu130"}
    # The other way round: it takes the place of nothing.
    exported.write_bytes(b"\n".join([head, signed(body).encode(), *lines]))
    code, out, err = run("import", exported)
    assert (code, created == 1e308) in ((0, False), (1, True)), err
    assert "0 new, 0 replaced" in out
    found = PlanStore(folder, seeds=None).get(id)
    assert isinstance(found, Hit) and found.record.versions == {"torch": "2.11.0+cu130"}


def _with(exported: Path, *lines: bytes) -> Path:
    """A file with a good head, then ``lines``, then a record that is right."""
    good = exported.read_bytes().splitlines()[-1]
    if good.startswith(b'{"blob"'):
        good = exported.read_bytes().splitlines()[-2]
    exported.write_bytes(b"\n".join([transfer.HEAD, *lines, good, b""]))
    return exported


def _record_line(exported: Path, **changes: object) -> bytes:
    """A record's line with some fields changed and the checksum left as it was."""
    body = json.loads(exported.read_bytes().splitlines()[1])
    return json.dumps({**body, **changes}).encode()


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (lambda file: _record_line(file, id="../../../etc/passwd"), "record.checksum: does not"),
        (lambda file: _record_line(file, summary="changed"), "record.checksum: does not match"),
        (lambda file: b'{"__class__": "os.system"}', "the field 'schema' is missing"),
        (lambda file: b"[" * 100_000, "nested more than"),
        (lambda file: b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested more than"),
        (lambda file: b'"' + b"x" * (5 << 20) + b'"', "bytes long"),
        (lambda file: b"\x80\x04\x95cos\nsystem\n", "not UTF-8"),
        (lambda file: b'{"schema": 1e999}', "too large"),
        (lambda file: b'{"schema": 1, "schema": 1}', "there twice"),
        (lambda file: b"null", "expected an object"),
        (lambda file: b'{"blob":"AAAA"}', "a blob without a record"),
    ],
)
def test_a_hostile_line_is_refused_and_the_rest_is_taken(
    hostile: Callable[[Path], bytes], said: str, run: Cli, exported: Path, tmp_path: Path
) -> None:
    there = tmp_path / "deep" / "there"
    before = {path for path in tmp_path.rglob("*") if "deep" not in path.parts}
    code, out, err = run("import", _with(exported, hostile(exported)), "--trust-blobs", at=there)
    assert code == 1
    assert err.startswith("refused line 2: ") and said in err
    assert len(err) < 2000
    assert out.startswith("1 new, ") and " kept, " in out
    assert len([*there.rglob("*.json")]) == 1
    assert {path for path in tmp_path.rglob("*") if "deep" not in path.parts} == before


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (base64.b64encode(b"other code"), "a blob that is not the one its record describes"),
        (b"!!!!", "a blob that is not in base64"),
        (base64.b64encode(b"x" * 5_000_000), "a blob that is not the one its record describes"),
    ],
)
def test_a_blob_that_is_not_the_records_is_refused_and_the_record_taken(
    blob: bytes, said: str, run: Cli, exported: Path, ids: dict[str, str], tmp_path: Path
) -> None:
    there = tmp_path / "there"
    lines = exported.read_bytes().splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith(b'{"blob"'))
    lines[at] = b'{"blob":"' + blob + b'"}'
    exported.write_bytes(b"\n".join(lines))
    code, out, err = run("import", exported, "--trust-blobs", at=there)
    assert (code, said in err) == (1, True)
    assert out.startswith("7 new, ")
    assert len([*there.rglob("*.blob")]) == 1


def test_a_blob_cut_short_by_the_end_of_the_file_is_refused(
    run: Cli, exported: Path, tmp_path: Path
) -> None:
    lines = exported.read_bytes().splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith(b'{"blob"'))
    exported.write_bytes(b"\n".join([*lines[:at], lines[at][:100]]))
    code, _, err = run("import", exported, "--trust-blobs", at=tmp_path / "there")
    assert (code, "cut short" in err) == (1, True)


def test_a_huge_line_is_skipped_without_being_held(
    run: Cli, exported: Path, tmp_path: Path
) -> None:
    import tracemalloc

    good = exported.read_bytes().splitlines()[1]
    with open(exported, "wb") as stream:
        stream.write(transfer.HEAD + b'\n{"blob":"')
        for _ in range(64):
            stream.write(b"A" * (1 << 20))
        stream.write(b'"}\n' + good + b"\n")
    tracemalloc.start()
    code, out, _ = run("import", exported, at=tmp_path / "there")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (code, out.startswith("1 new")) == (1, True)
    assert peak < 24 << 20


def test_a_file_that_is_too_long_ends_the_import(
    run: Cli, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_FILE_BYTES", 5000)
    code, _, err = run("import", exported, at=tmp_path / "there")
    assert (code, err.count("\n"), "GiB long" in err) == (1, 1, True)


@pytest.mark.parametrize("text", [b"", b"PK\x03\x04", b"[]\n", b'{"cudnngraph_plans":2}\n'])
def test_a_file_of_something_else_is_one_line(text: bytes, run: Cli, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(text)
    code, out, err = run("import", file)
    assert (code, out) == (1, "")
    assert err.startswith("error: not a file of plans") and err.count("\n") == 1


def test_files_that_cannot_be_read_or_written_are_one_line(
    run: Cli, ids: dict[str, str], tmp_path: Path
) -> None:
    for argv in (("import", tmp_path / "missing"), ("export", tmp_path / "no" / "file")):
        code, out, err = run(*argv)  # type: ignore[arg-type]
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert ("No such file" if argv[0] == "import" else "there is no folder") in err
    code, _, err = run("export", tmp_path / "file", at=tmp_path / "empty")
    assert (code, err) == (1, f"error: no plan is in {tmp_path / 'empty'}\n")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("name", "kind"), [("01", "link"), ("3a", "file"), ("00", "file"), ("00", "link")]
)
def test_a_stray_thing_among_the_folders_hides_no_entry(
    name: str, kind: str, run: Cli, folder: Path, ids: dict[str, str], tmp_path: Path
) -> None:
    stray = folder / "v1" / name
    if kind == "link":
        stray.symlink_to(tmp_path)
    else:
        stray.touch()
    said = f"damaged: {name}: {stray} is not a directory"
    code, out, _ = run("verify")
    assert code == 1
    assert f"failed {name}: record: {stray} is not a directory\n" in out
    assert f"{len(ids) + 1} entries checked, 0 replayed, 1 problem\n" in out
    code, out, err = run("export", tmp_path / "file")
    assert (code, err.splitlines()[-1]) == (1, said)
    assert out.startswith(f"{len(ids)} records and 0 blobs written")
    assert run("diff", ids["tuned"], ids["old"])[0] == 0
    code, out, err = run("prune", "--max-size", "1")
    assert code == 0 and out.splitlines()[-1].startswith(f"removed {len(ids)} of {len(ids)} plans")
    assert err.splitlines()[-1] == said


@pytest.mark.parametrize("place", [".", "/", ""])
def test_a_folder_is_no_file_to_export_to(
    place: str, ids: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plans", "export", place, "--dir", str(folder)]) == 2
    said = f"error: {place or '.'} is a folder; give the name of a file\n"
    assert capsys.readouterr() == ("", said)


def test_a_graphs_file_that_cannot_be_looked_at_is_one_line(run: Cli, ids: dict[str, str]) -> None:
    long = "x" * 5000
    said = f"error: {long} cannot be read: File name too long\n"
    assert run("explain-miss", long) == (2, "", said)
    assert run("explain-miss", f"{long}:g") == (2, "", said)


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("action", plans.ACTIONS)
def test_every_action_documents_its_exit_codes(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plans", action, "--help"]) == 0
    assert "Exit code: 0" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["conjure"], ["diff", "a"], ["import"]])
def test_a_wrong_call_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plans", *argv]) == 2
    assert "usage: cudnngraph plans" in capsys.readouterr().err


def test_the_directory_is_expanded_and_not_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["plans", "path", "--dir=~/x"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x'}\n"
    for bad in ("", " ", "~nosuchuser/x"):
        assert cli.main(["plans", "path", "--dir", bad]) == 2
        said = f"argument --dir: expected the path of a folder, got '{bad}'\n"
        assert capsys.readouterr().err.endswith(said)


def test_a_directory_that_cannot_be_used_is_one_line(run: Cli, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for argv in (["diff", "a", "b"], ["verify"], ["prune", "--older-than", "1"]):
        code, out, err = run(*argv, at=file)
        assert (code, out) == (1, "")
        assert err == f"error: the cache directory cannot be used: {file} is not a directory\n"


def test_no_action_imports_cudnn_on_a_machine_without_a_gpu(
    folder: Path, ids: dict[str, str], source: Path, tmp_path: Path
) -> None:
    code = f"""
import sys, torch
theirs = set(sys.modules)  # torch imports cuda from 2.15 on
from cudnngraph.cli import main
for argv in (["path"], ["diff", {ids["cut"]!r}, {ids["old"]!r}], ["verify"],
             ["explain-miss", {f"{source}:same"!r}, "--no-tf32"],
             ["export", {str(tmp_path / "x")!r}], ["import", {str(tmp_path / "x")!r}],
             ["prune", "--older-than", "30"]):
    assert main(["plans", *argv, "--dir", {str(folder)!r}]) == 0, argv
    print("==")
assert not {{"cudnn", "cuda"}} & (set(sys.modules) - theirs)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("==\n") == 7
