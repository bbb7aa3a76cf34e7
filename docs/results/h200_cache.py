"""Measure what the plan cache saves: 50 plans, cold and from a warm cache, each in a new process.

    python docs/results/h200_cache.py --out docs/results/h200-cache.md

The set: the 24 unique convolutions of ResNet-50 (batch 32, 224 x 224) with bias, residual and ReLU,
6 of them once more in bfloat16, 10 attentions, 10 transposed convolutions. Both processes get an
empty folder for the driver's own JIT cache, so the warm one has nothing but the plan cache.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

import torch

import cudnngraph as cg
from cudnngraph.runtime.compile import compile as compile_spec

REPO = Path(__file__).resolve().parents[2]
F16, BF16 = torch.float16, torch.bfloat16
BATCH = 32


def convolution(
    c: int,
    k: int,
    size: int,
    kernel: int,
    stride: int = 1,
    *,
    residual: bool = False,
    act: str | None = "relu",
    dtype: torch.dtype = F16,
) -> cg.Graph:
    g = cg.Graph(f"conv{kernel}x{kernel}_{c}_{k}_{size}")
    x = g.input("x", (BATCH, c, size, size), dtype, layout="channels_last")
    w = g.input("w", (k, c, kernel, kernel), dtype, layout="channels_last")
    b = g.input("b", (k,), dtype)
    out = (BATCH, k, size // stride, size // stride)
    z = g.input("z", out, dtype, layout="channels_last") if residual else None
    y = g.conv_bias_act(x, w, b, residual=z, activation=act, stride=stride, padding=kernel // 2)
    g.output("y", y)
    return g


def resnet50(dtype: torch.dtype = F16) -> list[cg.Graph]:
    graphs = [convolution(3, 64, 224, 7, 2, dtype=dtype)]
    width_in, size = 64, 56
    for stage, width in enumerate((64, 128, 256, 512)):
        stride = 1 if stage == 0 else 2
        small = size // stride
        graphs.append(convolution(width_in, width, size, 1, dtype=dtype))
        graphs.append(convolution(width, width, size, 3, stride, dtype=dtype))
        graphs.append(convolution(width, 4 * width, small, 1, residual=True, dtype=dtype))
        graphs.append(convolution(width_in, 4 * width, size, 1, stride, act=None, dtype=dtype))
        graphs.append(convolution(4 * width, width, small, 1, dtype=dtype))
        if stage:
            graphs.append(convolution(width, width, small, 3, dtype=dtype))
        width_in, size = 4 * width, small
    return graphs


def attention(heads: int, length: int, depth: int, causal: bool) -> cg.Graph:
    g = cg.Graph(f"sdpa_{heads}_{length}_{depth}")
    q, k, v = (g.input(name, (2, heads, length, depth), BF16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, is_causal=causal))
    return g


def transposed(c: int, k: int, size: int, kernel: int, stride: int, padding: int) -> cg.Graph:
    g = cg.Graph(f"up_{c}_{k}_{size}")
    x = g.input("x", (8, c, size, size), F16, layout="channels_last")
    w = g.input("w", (c, k, kernel, kernel), F16, layout="channels_last")
    b = g.input("b", (k,), F16)
    g.output("y", g.conv_transpose_bias_act(x, w, b, stride=stride, padding=padding))
    return g


def graphs() -> list[cg.Graph]:
    """The set of 50."""
    made = [*resnet50(), *resnet50(BF16)[:6]]
    made += [
        attention(16, n, d, causal)
        for n in (512, 1024)
        for d in (64, 128)
        for causal in (False, True)
    ]
    made += [attention(12, 197, 64, False), attention(8, 2048, 128, True)]
    shapes = [(256, 128, 16), (128, 64, 32), (64, 32, 64), (512, 256, 8), (64, 64, 56)]
    made += [transposed(*shape, 2, 2, 0) for shape in shapes]
    made += [transposed(*shape, 4, 2, 1) for shape in shapes]
    assert len(made) == 50, len(made)
    return made


def lookup_us() -> dict[str, float]:
    """Host time from tensors to the executable, on a hit in memory; the best of 5 loops."""

    @cg.specialize
    def block(g: cg.Graph, x: cg.Value, w: cg.Value, b: cg.Value) -> cg.Value:
        return g.conv_bias_act(x, w, b, padding=1)

    found = {}
    for dtype in (F16, torch.float32):
        x = torch.zeros(8, 64, 28, 28, device="cuda", dtype=dtype)
        w, b = x.new_zeros(64, 64, 3, 3), x.new_zeros(64)
        block.lookup(x, w, b)
        loops = timeit.repeat(lambda t=(x, w, b): block.lookup(*t), number=20_000, repeat=5)
        found[str(dtype)] = min(loops) / 20_000 * 1e6
    return found


def child() -> None:
    """Compile the set and print what it took, as JSON."""
    from cudnngraph.backend import env, handles
    from cudnngraph.runtime.process import PROCESS

    specs = [graph.spec() for graph in graphs()]
    native = env.frontend().pygraph
    inside = [0.0]
    deserialize = native.deserialize

    def timed(self: object, data: object) -> object:
        begin = time.perf_counter()
        try:
            return deserialize(self, data)
        finally:
            inside[0] += (time.perf_counter() - begin) * 1e3

    native.deserialize = timed
    start = time.perf_counter()
    torch.zeros(1, device="cuda")
    handles.handle(0)
    setup_ms = (time.perf_counter() - start) * 1e3
    times, library, executables = [], [], []
    for spec in specs:
        start, before = time.perf_counter(), inside[0]
        executables.append(compile_spec(spec, "cuda", allow_tf32=False))
        times.append((time.perf_counter() - start) * 1e3)
        library.append(inside[0] - before)
    for exe in executables:
        ins = {
            name: torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device="cuda").normal_()
            for name, t in ((name, exe.spec.tensors[name]) for name in exe.spec.inputs)
        }
        exe(**ins)
    torch.cuda.synchronize()
    needs = [exe.workspace_bytes for exe in executables]
    tiers: dict[str, int] = {}
    for exe in executables:
        tiers[exe.tier] = tiers.get(exe.tier, 0) + 1
    print(
        json.dumps(
            {
                "setup_ms": setup_ms,
                "times_ms": times,
                "deserialize_ms": library,
                "lookup_us": lookup_us(),
                "tiers": tiers,
                "steps": sum(len(exe.steps) for exe in executables),
                "workspace_largest_bytes": max(needs),
                "workspace_sum_bytes": sum(needs),
                "workspace_held_bytes": PROCESS.workspace.held_bytes,
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "cudnn": env.cudnn_version(),
                "frontend": env.frontend_version(),
            }
        )
    )


def run(cache: Path) -> dict[str, object]:
    """One new process with an empty JIT cache of the driver."""
    with tempfile.TemporaryDirectory() as jit:
        done = subprocess.run(
            [sys.executable, __file__, "--child"],
            cwd=REPO,
            env={**os.environ, "CUDNNGRAPH_CACHE_DIR": str(cache), "CUDA_CACHE_PATH": jit},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _slowest(warm: dict) -> str:
    named = sorted(zip(warm["deserialize_ms"], (g.name for g in graphs()), strict=True))[-8:]
    return ", ".join(f"{name} {ms:.0f}" for ms, name in reversed(named))


def page(cold: dict, warm: dict, disk_bytes: int) -> str:
    """The results page."""
    total = {name: sum(each["times_ms"]) for name, each in (("cold", cold), ("warm", warm))}
    today = datetime.datetime.now(datetime.timezone.utc).date()
    mib = 1 << 20
    rows = [
        (name, total[name], each["times_ms"], each["setup_ms"], each["tiers"])
        for name, each in (("cold", cold), ("warm", warm))
    ]
    lines = [
        "# What the plan cache saves",
        "",
        f"{cold['gpu']}, torch {cold['torch']}, cuDNN {cold['cudnn']}, frontend "
        f"{cold['frontend']}; {today}. 50 graphs, {cold['steps']} steps.",
        "",
        "```",
        "python docs/results/h200_cache.py --out docs/results/h200-cache.md",
        "```",
        "",
        "Each row is a new process with an empty folder for the driver's own JIT cache. Set-up "
        "(CUDA, cuDNN, one handle) is timed apart.",
        "",
        "| start | compile 50, ms | a plan, mean ms | median | worst | set-up, ms | tiers |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {ms:.0f} | {ms / 50:.2f} | {statistics.median(times):.2f} "
        f"| {max(times):.1f} | {setup:.0f} | {tiers} |"
        for name, ms, times, setup, tiers in rows
    ]
    ratio = total["cold"] / total["warm"]
    lines += [
        "",
        f"The warm start is {ratio:.1f} times faster (asked: 20) at {total['warm'] / 50:.2f} ms a "
        "plan (asked: at most 10).",
        "",
        f"Of the warm start {sum(warm['deserialize_ms']):.0f} ms are cuDNN's own deserialization, "
        f"{max(warm['deserialize_ms']):.0f} ms of them in the slowest plan: {_slowest(warm)}. The "
        f"rest, {total['warm'] - sum(warm['deserialize_ms']):.0f} ms, is "
        f"{(total['warm'] - sum(warm['deserialize_ms'])) / 50:.2f} ms a plan for key, record and "
        "checks.",
        "",
        "From tensors to the executable, in memory (`cg.specialize(...).lookup`), host time: "
        + ", ".join(
            f"{us:.2f} µs ({dtype.removeprefix('torch.')})"
            for dtype, us in warm["lookup_us"].items()
        )
        + " (asked: at most 3).",
        "",
        f"On disk: {disk_bytes / mib:.2f} MiB for 50 entries with their serialized plans.",
        "",
        f"Workspace of the 50 on one stream: held {warm['workspace_held_bytes'] / mib:.2f} MiB, "
        f"the largest single need {warm['workspace_largest_bytes'] / mib:.2f} MiB, their sum "
        f"{warm['workspace_sum_bytes'] / mib:.2f} MiB.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run both processes; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        child()
        return
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cold, warm = run(cache), run(cache)
        disk_bytes = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    text = page(cold, warm, disk_bytes)
    if args.out:  # what a person wrote under "Notes" stays
        _, mark, notes = (args.out.read_text() if args.out.exists() else "").partition(
            "\n## Notes\n"
        )
        args.out.write_text(text + mark + notes)
    slowest = sorted(zip(warm["times_ms"], (g.name for g in graphs()), strict=True))[-12:]
    print("slowest, warm:", *(f"{name} {ms:.1f} ms" for ms, name in reversed(slowest)), sep="\n  ")
    print(text)


if __name__ == "__main__":
    main()
