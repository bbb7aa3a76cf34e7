"""`cudnngraph plans verify`: records and blobs checked, plans run again on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import time
import xml.etree.ElementTree as ET
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.env import EnvKey
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.cache import codec, lookup
from cudnngraph.cache.codec import to_record
from cudnngraph.cache.state import STATE
from cudnngraph.cli import records, transfer, verify
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference
from cudnngraph.explain import draw
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select import guard, heuristic, workers
from cudnngraph.select.decision import StepPlan
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.workers import Answer
from plans_cache import Hit, PlanRecord, PlanStore
from tests.commands import Cli, rows
from tests.fakes import builder
from tests.samples import enumerate_cases
from tests.workers import cache_example

pytestmark = pytest.mark.usefixtures("no_gpu")


CPU = torch.device("cpu")


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


def test_verify_checks_what_ships_when_it_is_asked_for(
    run: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = cache_example.records(1e9)["a100"]
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds" / f"{seed.id}.json").write_text(seed.to_json())
    monkeypatch.setattr(records, "PACKAGED_SEEDS", tmp_path / "seeds")
    said = "entries checked, 0 replayed, 0 problems\n"
    assert run("verify")[1] == f"0 {said}no plan is in {folder}\n"
    assert f"1 {said}" in run("verify", "--seeds")[1]
    assert f"1 {said}" in run("verify", seed.id[:8])[1]
    code, _, err = run("verify", seed.id[:8], "--no-seeds")
    assert (code, err) == (1, f"error: no entry's id begins with '{seed.id[:8]}'\n")


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


def test_the_steps_of_a_record_are_listed_by_one_pass_of_rewrites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[GraphSpec] = []

    def counted(spec: GraphSpec, *args: Any) -> GraphSpec:
        passes.append(spec)
        return legalize(spec, *args)

    monkeypatch.setattr(codec, "legalize", counted)
    record = cache_example.records(time.time())["cut"]
    transfer._steps_of(record)
    assert len(passes) == 1


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
    """Return the check of each step as a record on disk has it."""
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
    assert _said(folder, ids["tuned"]) == [{**dataclasses.asdict(HERE), "also": []}]
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
