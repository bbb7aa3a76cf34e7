"""The tiers of the cache on a GPU, each tested by making the one above it fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.cache.lookup import store
from plans_cache.record import from_json
from tests.gpu.test_plans import conv, tensors

OTHER_GPU = '"NVIDIA B200"'


def only(folder: Path, suffix: str) -> Path:
    (path,) = folder.rglob(f"*.{suffix}")
    return path


def again(act: str = "silu", **options: object) -> cg.Executable:
    """Compile as a new process would: nothing is in memory."""
    cg.cache_clear()
    return conv(torch.float16, act).compile("cuda", **options)


@pytest.mark.parametrize("act", ["relu", "silu"])
def test_a_second_start_takes_the_serialized_plan_from_disk(folder: Path, act: str) -> None:
    first = conv(torch.float16, act).compile("cuda")
    assert first.tier == "built"
    given = tensors(first)
    want = first(**given)
    second = again(act)
    assert second.tier == "disk, serialized"
    assert [step.choice for step in second.steps] == [step.choice for step in first.steps]
    assert [step.decisions for step in second.steps] == [step.decisions for step in first.steps]
    assert torch.equal(second(**given), want)
    call = second.bind(**given, y=torch.empty_like(want))
    call()
    third = conv(torch.float16, act).compile("cuda")
    assert third._program is second._program


def test_a_norm_comes_back_with_its_numbers(folder: Path) -> None:
    def build() -> cg.Executable:
        g = cg.Graph("norm")
        x, w = g.input("x", (64, 256), torch.float16), g.input("w", (256,), torch.float16)
        g.output("y", g.layer_norm(x, w, eps=0.5))
        return g.compile("cuda")

    first = build()
    assert [step.choice is not None for step in first.steps] == [True]
    given = tensors(first)
    want = first(**given)
    cg.cache_clear()
    second = build()
    assert second.tier == "disk, serialized"
    assert torch.equal(second(**given), want)


def test_a_cut_graph_comes_back_step_by_step(folder: Path) -> None:
    def build() -> cg.Executable:
        g = cg.Graph("cut")
        q = g.input("q", (2, 4, 64, 64), torch.float16)
        mask = g.input("mask", (1, 1, 64, 64), torch.bool)
        g.output("o", g.relu(g.sdpa(q, q, q, mask)))
        return g.compile("cuda")

    first = build()
    assert len(first.steps) > 2
    q = torch.randn(2, 4, 64, 64, device="cuda").half()
    mask = torch.rand(1, 1, 64, 64, device="cuda") > 0.2
    want = first(q=q, mask=mask)
    cg.cache_clear()
    second = build()
    assert second.tier == "disk, serialized"
    assert torch.equal(second(q=q, mask=mask), want)


@pytest.mark.parametrize("damage", ["truncated", "removed", "noise", "another version"])
def test_a_damaged_blob_is_replayed(folder: Path, damage: str) -> None:
    first = conv(torch.float16, "silu").compile("cuda")
    given = tensors(first)
    want = first(**given)
    blob = only(folder, "blob")
    content = blob.read_bytes()
    if damage == "truncated":
        blob.write_bytes(content[: len(content) // 2])
    elif damage == "removed":
        blob.unlink()
    elif damage == "noise":
        blob.write_bytes(bytes(byte ^ 0x5A for byte in content))
    else:  # intact, with the right checksum, and not loadable here
        (entry,) = store().scan()
        assert entry.record is not None
        size = int.from_bytes(content[:8], "little")
        strange = content[8 : 8 + size].replace(b'"uids"', b'"ids!"')
        store().put(entry.record, len(strange).to_bytes(8, "little") + strange)
    second = again()
    assert second.tier == "disk, replayed"
    assert torch.equal(second(**given), want)


def rewrite(folder: Path, change: dict[str, object]) -> None:
    """Change fields of the first step of the only record, as a program that means it would."""
    import dataclasses

    path = only(folder, "json")
    record = from_json(path.read_text())
    step = dataclasses.replace(record.steps[0], **change)  # type: ignore[arg-type]
    changed = dataclasses.replace(record, steps=(step, *record.steps[1:]), blob=None)
    for blob in folder.rglob("*.blob"):
        blob.unlink()
    path.write_text(changed.to_json())


@pytest.mark.parametrize(
    "change",
    [{"engine": 9999}, {"knobs": (("NO_SUCH_KNOB", 1),)}, {"nodes": ("elsewhere",)}],
    ids=["engine", "knobs", "steps"],
)
def test_a_choice_that_is_gone_is_built_anew(folder: Path, change: dict[str, object]) -> None:
    first = conv(torch.float16, "silu").compile("cuda")
    given = tensors(first)
    want = first(**given)
    if "nodes" in change:
        change = {**change, "ops": ("relu",)}
    rewrite(folder, change)
    before = cg.cache_stats().misses.get("stale", 0)
    second = again()
    assert second.tier == "built"
    assert cg.cache_stats().misses["stale"] == before + 1
    assert torch.equal(second(**given), want)
    assert again().tier == "disk, serialized", "the stale record was not replaced"


def test_a_record_of_another_gpu_is_not_used(folder: Path) -> None:
    import dataclasses

    conv(torch.float16, "silu").compile("cuda")
    path = only(folder, "json")
    record = from_json(path.read_text())
    env = tuple((n, OTHER_GPU if n == "gpu_name" else v) for n, v in record.env)
    foreign = dataclasses.replace(record, env=env, blob=None)
    path.unlink()
    only(folder, "blob").unlink()
    store().put(foreign)
    with pytest.raises(cg.PlanNotCached, match="same graph is there for another"):
        again(tune="cached")
    assert again().tier == "built"


def test_cached_never_builds_and_names_the_nearest_entry(folder: Path) -> None:
    with pytest.raises(cg.PlanNotCached, match="the cache is empty"):
        again(tune="cached")
    conv(torch.float16, "silu").compile("cuda")
    with pytest.raises(cg.PlanNotCached) as raised:
        again("gelu", tune="cached")
    assert [name for name, _, _ in raised.value.differences] == ["ops"]
    built = cg.cache_stats().lookups["built"]
    assert again(tune="cached").tier == "disk, serialized"
    assert cg.cache_stats().lookups["built"] == built


def test_a_known_bad_plan_in_a_record_is_not_brought_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv(torch.float16, "silu").compile("cuda")
    asked: list[int] = []

    def bad_once(spec: object, choice: Choice, *args: object, **options: object) -> str | None:
        asked.append(choice.engine)
        return "found out later" if len(asked) == 1 else None

    monkeypatch.setattr("cudnngraph.cache.lookup.why_rejected", bad_once)
    assert again().tier == "built"


def test_a_new_process_builds_nothing(folder: Path) -> None:
    exe = conv(torch.float16, "silu").compile("cuda")
    code = (
        "import torch, json, cudnngraph as cg\n"
        "from tests.gpu.test_plans import conv\n"
        "exe = conv(torch.float16, 'silu').compile('cuda', tune='cached')\n"
        "stats = cg.cache_stats()\n"
        "print(json.dumps([exe.tier, stats.lookups, str(exe.steps[0].choice)]))\n"
    )
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDNNGRAPH_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    tier, lookups, choice = json.loads(done.stdout)
    assert tier == "disk, serialized" and lookups == {"disk": 1}
    assert choice == str(exe.steps[0].choice)


def test_the_pool_holds_the_largest_need_of_a_stream_not_the_sum(folder: Path) -> None:
    needs = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for act in ("relu", "gelu"):
            for batch in (2, 8, 16):
                g = cg.Graph("nchw")
                x = g.input("x", (batch, 64, 28, 28), torch.float16)
                w = g.input("w", (64, 64, 3, 3), torch.float16)
                b = g.input("b", (64,), torch.float16)
                g.output("y", g.conv_bias_act(x, w, b, padding=1, activation=act))
                exe = g.compile("cuda")
                exe(**tensors(exe))
                needs.append(exe.workspace_bytes)
    from cudnngraph.runtime.process import PROCESS

    held = PROCESS.workspace.size_bytes(0, stream.cuda_stream)
    assert min(needs) > 0 and held == max(needs) < sum(needs)
