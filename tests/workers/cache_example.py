"""An example cache directory: what a machine with an H200, and others before it, left behind.

    PYTHONPATH=. python tests/workers/cache_example.py FOLDER

writes one to look at: ``cudnngraph plan-dump --dir FOLDER``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

import cudnngraph as cg
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import encode, graph_key
from cudnngraph.ir.spec import GraphSpec, print_spec
from cudnngraph.ops.table import is_default
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import cuts, subgraph_of
from plans_cache import Candidate, PlanRecord, PlanStore, StepRecord

F16, F32 = torch.float16, torch.float32
H200 = {
    "cudnn_version": 91900,
    "gpu_name": "NVIDIA H200",
    "compute_capability": (9, 0),
    "sm_count": 132,
    "schema": 2,
}
A100 = {**H200, "gpu_name": "NVIDIA A100-SXM4-80GB", "compute_capability": (8, 0), "sm_count": 108}
OLD_CUDNN = {**H200, "cudnn_version": 91002}
BLOB = b"not a plan, but as long as it says" * 10


def conv_bias_relu(padding: int = 1, name: str = "block") -> cg.Graph:
    """A convolution with its epilogue, float16, channels last."""
    g = cg.Graph(name)
    x = g.input("x", (8, 64, 56, 56), F16, layout="channels_last")
    w = g.input("w", (64, 64, 3, 3), F16, layout="channels_last")
    b = g.input("b", (64,), F16)
    g.output("y", g.relu(g.bias(g.conv(x, w, padding=padding), b)))
    return g


def conv_bias_gelu() -> cg.Graph:
    """A graph in float32 that is run as a convolution and its epilogue."""
    g = cg.Graph("cut")
    x, w = g.input("x", (2, 3, 8, 8), F32), g.input("w", (4, 3, 1, 1), F32)
    g.output("y", g.gelu(g.bias(g.conv(x, w), g.input("b", (4,), F32))))
    return g


def attention(dtype: torch.dtype) -> cg.Graph:
    """Attention over 2 sequences of 128 with 8 heads of 64."""
    g = cg.Graph("attention")
    q, k, v = (g.input(name, (2, 8, 128, 64), dtype) for name in "qkv")
    g.output("o", g.sdpa(q, k, v))
    return g


def _step(
    spec: GraphSpec,
    engine: int | None,
    knobs: Sequence[tuple[str, int]] = (),
    time_us: float | None = None,
    workspace_bytes: int = 0,
    candidates: Sequence[Candidate] = (),
) -> StepRecord:
    def types(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        return tuple((name, str(spec.tensors[name])) for name in names)

    return StepRecord(
        nodes=tuple(node.name for node in spec.nodes),
        ops=tuple(node.op for node in spec.nodes),
        inputs=types(spec.inputs),
        outputs=types(spec.outputs),
        kind="torch" if engine is None else "cudnn",
        engine=engine,
        knobs=tuple(knobs),
        workspace_bytes=workspace_bytes,
        time_us=time_us,
        candidates=tuple(candidates),
    )


def record(
    graph: cg.Graph, steps: Sequence[StepRecord], env: dict[str, object], created: float
) -> PlanRecord:
    """The record of ``graph`` in ``env``, under its real key."""
    policy = cg.Policy(allow_tf32=False, kernels=True)
    spec = canonical(graph.spec())
    ops = " → ".join(node.op for node in spec.nodes if node.op != "constant")
    ins, outs = (
        ", ".join(str(spec.tensors[name]) for name in names)
        for names in (spec.inputs, spec.outputs)
    )
    return PlanRecord(
        key=graph_key(spec, policy).components,
        env=tuple((name, json.dumps(encode(value))) for name, value in env.items()),
        summary=f"{ops}: {ins} → {outs}",
        graph=print_spec(spec, is_default),
        steps=tuple(steps),
        policy=json.loads(json.dumps(asdict(policy))),  # as it comes back
        versions={"frontend": "1.28.0", "torch": "2.11.0+cu130"},
        created=created,
    )


def _tuned(spec: GraphSpec) -> StepRecord:
    """A step with five candidates: three measured, one barred, one that did not build."""

    def candidate(
        tile: int, time_us: float | None, reason: str, accepted: bool = False
    ) -> Candidate:
        knobs = (("IDX_MODE", 0), ("TILE_SIZE", tile))
        subject = f"engine 44 (IDX_MODE=0 TILE_SIZE={tile})"
        return Candidate(subject, accepted, reason, 44, knobs, time_us, 2048 * tile)

    return _step(
        spec,
        44,
        (("IDX_MODE", 0), ("TILE_SIZE", 2)),
        time_us=10.0,
        workspace_bytes=4096,
        candidates=(
            candidate(4, 15.0, "slower by 50 %"),
            candidate(2, 10.0, "fastest of 3 measured", accepted=True),
            candidate(8, 30.0, "slower by 200 %"),
            Candidate("engine 26", False, "barred by the policy", 26),
            candidate(16, None, "does not build: CUDNN_STATUS_NOT_SUPPORTED"),
        ),
    )


def records(now: float) -> dict[str, PlanRecord]:
    """The example's records by a name for each."""
    conv, attend = canonical(conv_bias_relu().spec()), canonical(attention(F16).spec())
    whole = CutGraph(canonical(conv_bias_gelu().spec()))
    (cut_in_two,) = (cut for cut in cuts(whole, compute_nodes(whole.spec.nodes)) if len(cut) == 2)
    pieces = [subgraph_of(whole, group) for group in cut_in_two]
    refused = Candidate(
        "'conv_bias_gelu' as one plan", False, "no engine supports gelu behind a convolution"
    )
    cut = [
        replace(_step(pieces[0], 0, workspace_bytes=1536), candidates=(refused,)),
        _step(pieces[1], 3, (("TILE_SIZE", 1),)),
    ]
    day = 86400.0
    torch_step = _step(canonical(attention(F32).spec()), None, time_us=120.0)
    padded = canonical(conv_bias_relu(padding=0).spec())
    one = (("TILE_SIZE", 1),)
    return {
        "tuned": record(conv_bias_relu(), [_tuned(conv)], H200, now - 3600),
        "padded": record(conv_bias_relu(padding=0), [_step(padded, 44, one)], H200, now - 7200),
        "cut": record(conv_bias_gelu(), cut, H200, now - 2 * day),
        "torch": record(attention(F32), [torch_step], H200, now - 120),
        "sdpa": record(attention(F16), [_step(attend, 5, one, 40.5, 1 << 20)], H200, now - 5),
        "a100": record(conv_bias_relu(), [_step(conv, 1, one, 25.0)], A100, now - 40 * day),
        "old": record(conv_bias_relu(), [_step(conv, 44, one, 12.0)], OLD_CUDNN, now - 90 * day),
    }


WITH_BLOB = ("tuned", "sdpa")


def make(directory: Path, now: float | None = None, *, damaged: bool = False) -> dict[str, str]:
    """Write the example; the ids by name. ``damaged`` cuts the record of "old" in half."""
    made = records(time.time() if now is None else now)
    store = PlanStore(directory, seeds=None)
    for name, each in made.items():
        assert store.put(each, BLOB if name in WITH_BLOB else None)
        (file,) = directory.rglob(f"{each.id}.json")
        os.utime(file, (each.created, each.created))  # last used when it was made
    if damaged:
        (file,) = directory.rglob(f"{made['old'].id}.json")
        file.write_bytes(file.read_bytes()[:1000])
    return {name: each.id for name, each in made.items()}


if __name__ == "__main__":
    for name, id in make(Path(sys.argv[1]), damaged=True).items():
        print(id[:12], name)
