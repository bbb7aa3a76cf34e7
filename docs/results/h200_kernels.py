"""Measure generated kernels beside torch, torch.compile and a copy, and write the results page.

    python docs/results/h200_kernels.py --out docs/results/h200-kernels.md

Every contender is captured in a CUDA graph of twenty calls; rounds alternate between contenders.
With empty caches of ours: what was built is timed too. With ``--jobs`` that many processes have
torch.compile compile everything before anything is measured. ``--schedules`` measures all schedules
that autotuning may try, of the rows that are one kernel, and nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.device import files
from cudnngraph.errors import NotSupported
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import compile as compiler
from cudnngraph.kernels import kernel, patterns
from cudnngraph.kernels.tape import Refused
from cudnngraph.ops.row_sums import OVERLOAD
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.inputs import random_inputs
from cudnngraph.settings import override

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CALLS, ROUNDS = 20, 9
CUDA = torch.device("cuda", 0)
Eager = Callable[..., Any]


@dataclass
class Row:
    """A graph, and what torch is called with for it, in the order of the graph's inputs."""

    name: str
    graph: cg.Graph
    eager: Eager
    group: str
    times: dict[str, float] = field(default_factory=dict)
    steps: str = ""
    error: str = ""

    @property
    def spec(self) -> GraphSpec:
        return self.graph.spec()

    @property
    def bytes(self) -> int:
        """What has to be moved: each input and output once."""
        spec = self.spec
        names = (*spec.inputs, *spec.outputs)
        return sum(spec.tensors[n].numel * spec.tensors[n].dtype.itemsize for n in names)


# -- rows ------------------------------------------------------------------------------------------


def _memory() -> Iterator[Row]:
    group = "memory"
    g = cg.Graph("bias_gelu")
    x, b = g.input("x", (16384, 4096), BF16), g.input("b", (4096,), BF16)
    g.output("y", g.gelu_tanh(g.add(x, b)))
    eager: Eager = lambda x, b: F.gelu(x + b, approximate="tanh")  # noqa: E731
    yield Row("bias + gelu 16384x4096", g, eager, group)

    g = cg.Graph("residual")
    x, r = (g.input(n, (32, 256, 56, 56), F16, layout="channels_last") for n in "xr")
    g.output("y", g.relu(g.add(x, r)))
    yield Row("add + relu 32x256x56x56", g, lambda x, r: (x + r).relu(), group)

    for rows, width in ((16384, 1024), (8192, 4096), (4096, 16384), (512, 50257)):
        g = cg.Graph("softmax")
        g.output("y", g.softmax(g.input("x", (rows, width), BF16), -1))
        yield Row(f"softmax {rows}x{width}", g, lambda x: x.softmax(-1), group)

    for rows, width in ((16384, 4096), (25216, 768), (4096, 16384)):
        g = cg.Graph("layer_norm")
        x = g.input("x", (rows, width), BF16)
        w, b = (g.input(n, (width,), BF16) for n in "wb")
        g.output("y", g.layer_norm(x, w, b))
        eager = lambda x, w, b: F.layer_norm(x, w.shape, w, b)  # noqa: E731
        yield Row(f"layer_norm {rows}x{width}", g, eager, group)

    g = cg.Graph("add_rms_norm")
    x, r = (g.input(n, (16384, 4096), BF16) for n in "xr")
    total = g.add(x, r)
    g.output("s", total)
    g.output("y", g.rms_norm(total, g.input("w", (4096,), BF16)))

    def add_rms_norm(x: Any, r: Any, w: Any) -> Any:
        s = x + r
        return s, F.rms_norm(s, w.shape, w)

    yield Row("add + rms_norm 16384x4096", g, add_rms_norm, group)

    g = cg.Graph("geglu")
    x = g.input("x", (8192, 10240), F16)
    g.output("y", g.mul(g.slice(x, 1, 0, 5120), g.gelu(g.slice(x, 1, 5120, 10240))))
    yield Row("geglu gate 8192x10240", g, lambda x: x[:, :5120] * F.gelu(x[:, 5120:]), group)

    g = cg.Graph("adamw")
    given = [g.input(n, (8192, 8192), F32) for n in ("p", "d", "m", "v")]
    numbers = [g.input(n, (1,), F32) for n in ("rate", "c1", "c2")]
    for name, made in zip(("p1", "m1", "v1"), g.adamw(*given, *numbers), strict=True):
        g.output(name, made)

    def adamw(p: Any, d: Any, m: Any, v: Any, rate: Any, c1: Any, c2: Any) -> Any:
        p = p * (1.0 - rate * 0.01)
        m, v = 0.9 * m + 0.1 * d, 0.999 * v + 0.001 * d * d
        return p - rate / c1 * m / (v.sqrt() / c2.sqrt() + 1e-8), m, v

    yield Row("AdamW 64 M", g, adamw, group)

    g = cg.Graph("concat")
    x = g.input("x", (2, 320, 64, 64), F16, layout="channels_last")
    z = g.input("z", (2, 640, 64, 64), F16, layout="channels_last")
    g.output("y", g.concat([x, z], 1))
    yield Row("concat 2x(320+640)x64x64", g, lambda x, z: torch.cat([x, z], 1), group)

    g = cg.Graph("to_channels_last")
    g.output("y", g.identity(g.input("x", (32, 256, 56, 56), F16)), layout="channels_last")
    nhwc = torch.channels_last
    eager = lambda x: x.contiguous(memory_format=nhwc)  # noqa: E731
    yield Row("NCHW to NHWC 32x256x56x56", g, eager, group)

    g = cg.Graph("to_contiguous")
    x = g.input("x", (32, 256, 56, 56), F16, layout="channels_last")
    g.output("y", g.relu(x), layout="contiguous")
    yield Row("relu, NHWC to NCHW 32x256x56x56", g, lambda x: x.relu().contiguous(), group)

    g = cg.Graph("mean")
    x = g.input("x", (64, 2048, 7, 7), F16, layout="channels_last")
    g.output("y", g.reduction(x, (2, 3), "mean"))
    yield Row("mean 64x2048x7x7", g, lambda x: x.mean((2, 3)), group)

    g = cg.Graph("bias_gradient")
    g.output("y", g.reduction(g.input("x", (16384, 4096), BF16), 0, "sum"))
    yield Row("bias gradient 16384x4096", g, lambda x: x.sum(0), group)


def _group_norms() -> Iterator[Row]:
    for n, c, size in ((2, 320, 64), (8, 320, 64), (1, 128, 512), (2, 1280, 8)):
        g = cg.Graph("group_norm_silu")
        x = g.input("x", (n, c, size, size), F16, layout="channels_last")
        w, b = (g.input(name, (c,), F16) for name in "wb")
        shift, factor = g.group_affine(x, 32, w)
        g.output("y", g.silu(g.bias(g.scale(g.bias(x, shift), factor), b)))
        eager: Eager = lambda x, w, b: F.silu(F.group_norm(x, 32, w, b))  # noqa: E731
        yield Row(f"group_norm + silu {n}x{c}x{size}x{size}", g, eager, "group norms")


def _depthwise() -> Iterator[Row]:
    for n, c, size, k in ((32, 144, 56, 3), (32, 672, 14, 5), (64, 96, 56, 7)):
        g = cg.Graph("depthwise")
        x = g.input("x", (n, c, size, size), F16, layout="channels_last")
        w = g.input("w", (c, 1, k, k), F16, layout="channels_last")
        b = g.input("b", (c,), F16)
        y = g.silu(g.bias(g.conv(x, w, padding=k // 2, groups=c), b))
        g.output("y", y)
        eager: Eager = lambda x, w, b: F.silu(  # noqa: E731
            F.conv2d(x, w, b, padding=w.shape[2] // 2, groups=w.shape[0])
        )
        yield Row(f"depthwise {k}x{k} + bias + silu {n}x{c}x{size}x{size}", g, eager, "depthwise")
        yield from _gradients(n, c, size, k)


def _gradients(n: int, c: int, size: int, k: int) -> Iterator[Row]:
    forward = cg.Graph("depthwise")
    x = forward.input("x", (n, c, size, size), F16, layout="channels_last")
    w = forward.input("w", (c, 1, k, k), F16, layout="channels_last")
    forward.output("y", forward.conv(x, w, padding=k // 2, groups=c))
    for name, place in (("data", 0), ("weight", 1)):
        spec = cg.differentiate(forward.spec(), ["xw"[place]]).backward
        order = spec.inputs

        def eager(*given: Any, order: Any = order, place: int = place) -> Any:
            named = dict(zip(order, given, strict=True))
            (dy,) = (v for key, v in named.items() if key not in ("x", "w"))
            x, w = named.get("x"), named.get("w")
            x = torch.empty((n, c, size, size), dtype=F16, device=CUDA) if x is None else x
            w = torch.empty((c, 1, k, k), dtype=F16, device=CUDA) if w is None else w
            x = x.contiguous(memory_format=torch.channels_last)
            mask = [place == 0, place == 1, False]
            made = torch.ops.aten.convolution_backward(
                dy, x, w, None, [1, 1], [k // 2] * 2, [1, 1], False, [0, 0], c, mask
            )
            return made[place]

        yield Row(f"depthwise {k}x{k} {name} gradient {n}x{c}", Declared(spec), eager, "depthwise")


def _sums_by_row() -> Iterator[Row]:
    for name, index, rest, rows in (
        ("embedding gradient, a vocabulary", (8, 1024), (768,), 50304),
        ("embedding gradient, a long batch", (64, 1024), (512,), 32000),
        ("embedding gradient, places", (8, 1024), (768,), 1024),
        ("gradient of a table of relative places", (49, 49), (12,), 169),
    ):
        g = cg.Graph("sum_rows")
        given = [g.input("dy", (*index, *rest), F32), g.input("index", index, torch.int64)]
        g.output("dw", g.aten(given, OVERLOAD, (("tensor", 0), ("tensor", 1), rows, -1)))

        def eager(dy: Any, index: Any, rows: int = rows) -> Any:
            return torch.ops.aten.embedding_dense_backward(dy, index, rows, -1, False)

        size = f"{math.prod(index)}x{rest[0]} to {rows}"
        yield Row(f"{name}, {size}", g, eager, "sums by row")


class Declared:
    """A frozen graph, with the face of one that is declared."""

    def __init__(self, spec: GraphSpec) -> None:
        self._spec = spec

    def spec(self) -> GraphSpec:
        return self._spec

    def compile(self, device: Any, **options: Any) -> Any:
        return compile_spec(self._spec, device, **options)


def rows() -> Iterator[Row]:
    """All of them."""
    yield from _memory()
    yield from _group_norms()
    yield from _depthwise()
    yield from _sums_by_row()


# -- measuring -------------------------------------------------------------------------------------


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Twenty calls in a CUDA graph."""
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    torch.cuda.synchronize()
    return graph


def times_us(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """The median time of a call of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(ROUNDS + 1):
        for name, graph in graphs.items():
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            if number:
                found[name].append(a.elapsed_time(b) / CALLS * 1e3)
    return {name: statistics.median(each) for name, each in found.items()}


def measure(row: Row, tunes: Sequence[str], modes: Sequence[str]) -> None:
    """Fill in the row's times; what fails is said in its error."""
    given = random_inputs(row.spec, CUDA)
    if row.name.startswith("AdamW"):
        given = [each.abs() + 0.1 for each in given]
    half = row.bytes // 2
    source, target = (torch.ones(half // 4, device=CUDA) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {
        "copy by the driver": lambda: target.copy_(source),
        "copy by a kernel": lambda: torch.neg(source, out=target),
    }
    calls["eager"] = lambda: row.eager(*given)
    wanted = row.eager(*(each.double() if each.is_floating_point() else each for each in given))
    for tune in tunes:
        try:
            start = time.perf_counter()
            exe = row.graph.compile(CUDA, tune=tune, budget_s=4.0, kernels=True)
            row.times[f"{tune} built s"] = time.perf_counter() - start
            made = exe(*given)
            row.steps += f" {tune}: " + ", ".join(
                f"{step.choice or 'torch'}: "
                f"{' '.join(n.op for n in step.spec.nodes if n.op != 'constant')}"
                for step in exe.steps
            )
            for a, b in zip(_all(made), _all(wanted), strict=True):
                off = float((a.double() - b.double()).norm() / b.double().norm())
                if not off < 1e-2:
                    raise AssertionError(f"off by {off:.2g}")
            named = dict(zip(row.spec.inputs, given, strict=True))
            outs = {n: row.spec.tensors[n].empty(CUDA) for n in row.spec.outputs}
            calls[tune] = exe.bind(**named, **outs)
        except Exception as error:
            row.error += f"{tune}: {type(error).__name__}: {str(error)[:300]} "
    del wanted
    for mode in modes:
        torch._dynamo.reset()
        try:
            compiled = torch.compile(row.eager, mode=mode, dynamic=False)
            compiled(*given)
            calls[f"compile {mode}"] = lambda compiled=compiled: compiled(*given)
        except Exception as error:
            row.error += f"{mode}: {type(error).__name__} "
    row.times |= times_us({name: captured(call) for name, call in calls.items()})
    row.times["copy"] = min(row.times[f"copy by {each}"] for each in ("the driver", "a kernel"))


def schedules(row: Row) -> list[str]:
    """Lines with the time of the kernel of each schedule, the fastest first."""
    spec, given = row.spec, random_inputs(row.spec, CUDA)
    outs = [spec.tensors[name].empty(CUDA) for name in spec.outputs]
    calls: dict[str, Callable[[], object]] = {}
    try:
        choices = patterns.choices(spec, kernel.processors(0))
    except Refused as reason:
        return [f"{row.name}: {reason}"]
    for at, choice in enumerate(choices):
        name = f"{choice}{', by rule' if not at else ''}"
        try:
            made = kernel.build(spec, choice, 0)
        except NotSupported as reason:
            print(row.name, name, reason, flush=True)
            continue
        scratch = torch.empty(max(1, made.workspace_bytes), dtype=torch.uint8, device=CUDA)
        pointers = made.pointers([each.data_ptr() for each in (*given, *outs)])

        def call(made: Any = made, pointers: Any = pointers, scratch: Any = scratch) -> None:
            made.execute(pointers, scratch.data_ptr(), None)

        calls[name] = call
    found = times_us({name: captured(call) for name, call in calls.items()})
    row.times = dict(sorted(found.items(), key=lambda each: each[1]))
    return [f"{row.name}: {us:.1f} us, {name}" for name, us in row.times.items()]


def compile_before(row: Row, modes: Sequence[str]) -> None:
    """Fill torch.compile's caches."""
    given = random_inputs(row.spec, CUDA)
    for mode in modes:
        torch._dynamo.reset()
        try:
            torch.compile(row.eager, mode=mode, dynamic=False)(*given)
        except Exception as error:
            print(row.name, mode, type(error).__name__, flush=True)


def compile_in(jobs: int, arguments: Sequence[str]) -> None:
    """The same for all rows, in as many processes."""
    parts = [f"{number}/{jobs}" for number in range(jobs)]
    running = [
        subprocess.Popen([sys.executable, __file__, *arguments, "--part", part]) for part in parts
    ]
    for each in running:
        each.wait()


def _all(made: Any) -> list[torch.Tensor]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def line(row: Row, tunes: Sequence[str], modes: Sequence[str]) -> list[str]:
    """One line of the table."""
    t = row.times
    best = min((t[m] for m in (f"compile {mode}" for mode in modes) if m in t), default=math.nan)
    cells = [row.name]
    for name in (*tunes, *(f"compile {mode}" for mode in modes), "eager", "copy"):
        cells.append(f"{t[name]:.1f}" if name in t else "-")
    mine = min((t[tune] for tune in tunes if tune in t), default=math.nan)
    first = t.get(tunes[0], math.nan)
    cells += [f"{first / best:.2f}", f"{mine / best:.2f}", f"{t['copy'] / mine:.2f}"]
    return [*cells, row.steps + (f" **{row.error}**" if row.error else "")]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="rows whose name this pattern finds")
    parser.add_argument("--tunes", default="heuristic,autotune")
    parser.add_argument("--modes", default="default,max-autotune-no-cudagraphs")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--schedules", action="store_true", help="of each row that is one kernel")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    tunes, modes = args.tunes.split(","), [m for m in args.modes.split(",") if m]
    chosen = [row for row in rows() if re.search(args.only, row.name)]
    if args.part:
        place, jobs = map(int, args.part.split("/"))
        for row in chosen[place::jobs]:
            compile_before(row, modes)
        return
    if args.schedules:
        for row in chosen:
            print(*schedules(row), sep="\n", flush=True)
        return
    if args.jobs:
        compile_in(args.jobs, sys.argv[1:] if arguments is None else arguments)
    made = []
    head = ["case", *tunes, *(f"compile {m}" for m in modes), "eager", "copy"]
    head += [f"{tunes[0]} / compile", "best / compile", "of a copy", "steps"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in chosen:
        with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder), seeds=False):
            cg.cache_clear()
            try:
                measure(row, tunes, modes)
            except Exception as error:
                row.error += f"{type(error).__name__}: {str(error)[:300]}"
            if "copy" in row.times:
                lines.append(f"| {' | '.join(line(row, tunes, modes))} |")
                print(lines[-1], flush=True)
            else:
                print(row.name, row.error, flush=True)
        made.append(
            {"name": row.name, "group": row.group, "steps": row.steps, "error": row.error}
            | {"bytes": row.bytes, "times": row.times}
        )
        torch.cuda.empty_cache()
    costs = said_costs()
    print(costs, flush=True)
    if args.out:
        page = [
            "# Generated kernels",
            "",
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
            f"{torch.backends.cudnn.version()}, NVRTC {'.'.join(map(str, compiler.version()))}; "
            f"{datetime.date.today()}.",
            "",
            "```",
            f"python docs/results/h200_kernels.py {shlex.join(sys.argv[1:])}",
            "```",
            "",
            "Microseconds of a call within a CUDA graph of twenty, medians, in turns. `copy` "
            "copies as many bytes as the case has to move, each input and output once. Then the "
            "time by heuristics, and the better of ours, over the better of torch.compile's, and "
            "the share of a copy's speed.",
            "",
            *lines,
            "",
            costs,
            "",
        ]
        files.write(args.out, "\n".join(page))
        files.write(args.out.with_suffix(".json"), json.dumps(made, indent=1) + "\n")


def said_costs() -> str:
    """What building, loading and launching one kernel takes, as a sentence."""
    built: list[float] = []
    for number in range(9):
        g = cg.Graph("costs")
        x = g.input("x", (64, 64 + 8 * number), F16)
        g.output("y", g.add(g.relu(x), x))
        choice = patterns.by_rule(g.spec(), kernel.processors(0))
        start = time.perf_counter()
        made = kernel.build(g.spec(), choice, 0)
        built.append(1e3 * (time.perf_counter() - start))
    loaded = []
    for _ in range(9):
        blob = made.serialize()
        start = time.perf_counter()
        kernel.load(blob, choice, 0)
        loaded.append(1e3 * (time.perf_counter() - start))
    x = torch.randn(g.spec().tensors["x"].shape, device=CUDA).to(F16)
    y = torch.empty_like(x)
    call = g.compile(CUDA, tune="heuristic", kernels=True).bind(x=x, y=y)
    given = made.pointers([x.data_ptr(), y.data_ptr()])
    bound = made.bound(given, 0, torch.cuda.current_stream().cuda_stream)
    host = {
        "a bound call": call,
        "its launch by the driver": bound,
        "torch.add": lambda: torch.add(x, x, out=y),
    }
    told = []
    for name, each in host.items():
        best = math.inf
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(500):
                each()
            best = min(best, (time.perf_counter() - start) / 500 * 1e6)
        told.append(f"{name} {best:.1f} us")
    torch.cuda.synchronize()
    return (
        f"Of the host: building a kernel {statistics.median(built):.0f} ms (median of nine), "
        f"loading one {statistics.median(loaded):.2f} ms, {', '.join(told)}."
    )


if __name__ == "__main__":
    main()
