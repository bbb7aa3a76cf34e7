"""Measure generated kernels of reductions, by each schedule, and write the results page.

    python docs/results/h200_reductions.py --out docs/results/h200-reductions.md

Losses and softmax over vocabularies, norms in training, sums over columns. The ways of a
case: torch, the kernel by rule, by thresholds of other values, and by the schedules that tuning
measures. All are captured in CUDA graphs on data that no cache holds, and replayed in turn.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from h200_masks import write

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.device.rules import DeviceRules, changed
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import kernel, patterns
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.kernels import Kernels

BF16, F32 = torch.bfloat16, torch.float32
CUDA = torch.device("cuda", 0)
COLD_BYTES = 200 << 20  # of data in turn: four times the L2 cache
REPLAY_US = 3000.0  # about how long a replay is to take
ROUNDS = 7
MOST_CHOICES = 3
Call = Callable[[], object]
Tensors = list[torch.Tensor]

IMAGES = ((64, 256, 56), (64, 64, 112), (64, 512, 28), (64, 1024, 14), (64, 256, 14), (64, 2048, 7))
NORMS = ((8192, 768), (8192, 1024), (4096, 4096), (100352, 96), (1576, 768))
COLUMNS = ((8192, 768), (8192, 2304), (8192, 3072))

#: Thresholds to measure beside those by rule, by the kind of a case. Fields that are not there yet
#: are left out.
OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "row": (
        {"kernel_rows_online": False},
        {"kernel_rows_in_memory_form": False},
        {"kernel_rows_in_memory_form": False, "kernel_again_threads": 512},
        {"kernel_rows_in_memory_form": False, "kernel_again_threads": 256},
        {"kernel_rows_aligned": False},
        {"kernel_once_threads": 256},
        {"kernel_loads_ahead": 4},
        {"kernel_loads_ahead": 4, "kernel_once_threads": 256},
        {"kernel_loads_ahead": 16},
    ),
    "columns": (
        {"kernel_steps_untested": False},
        {"kernel_loads_ahead": 16},
        {"kernel_columns": 8},
        {"kernel_columns": 32},
        {"kernel_blocks_per_sm": 3},
        {"kernel_blocks_per_sm": 5},
        {"kernel_blocks_per_sm": 6},
        {"kernel_min_width_bytes": 64},
        {"kernel_min_width_bytes": 256},
        {"kernel_partials_again_bytes": 5 << 20},
    ),
    "rows and columns": ({"kernel_columns_with_rows": False},),
}


@dataclass
class Case:
    """A region, with torch's own version of it, whose results come in the region's order."""

    name: str
    kind: str
    spec: GraphSpec
    eager: Callable[..., Sequence[torch.Tensor]]
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)  # inputs that are not drawn

    @property
    def bytes(self) -> int:
        """What has to be moved: each input and output once."""
        names = (*self.spec.inputs, *self.spec.outputs)
        return sum(self.spec.tensors[n].numel * self.spec.tensors[n].dtype.itemsize for n in names)


@dataclass
class Way:
    """A way to compute a case: its name, its schedule, and what it came to."""

    name: str
    schedule: str = ""
    launches: int = 1
    us: float = math.nan
    each_us: tuple[float, ...] = ()  # of its launches
    error: float = math.nan
    failed: str = ""


# -- cases -----------------------------------------------------------------------------------------


def _losses(rows: int, words: int) -> Iterator[Case]:
    g = cg.Graph("loss")
    x, t = g.input("x", (rows, words), BF16), g.input("t", (rows,), torch.int64)
    g.output("y", g.cross_entropy(x, t))
    size = f"{rows}x{words}"
    yield Case(f"cross entropy {size}", "row", g.spec(), lambda x, t: [F.cross_entropy(x, t)])

    def kept(x: torch.Tensor, t: torch.Tensor) -> Tensors:
        logarithms = F.log_softmax(x, 1)
        return [F.nll_loss(logarithms, t), logarithms]

    parts = cg.differentiate(g.spec(), ["x"])
    yield Case(f"cross entropy, logarithms kept {size}", "row", parts.forward, kept)

    def gradient(dy: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> Tensors:
        aten = torch.ops.aten
        count = torch.full((), float(rows), device=dy.device, dtype=dy.dtype)
        made = aten.nll_loss_backward(dy, y, t, None, 1, -100, count)
        return [aten._log_softmax_backward_data(made, y, 1, y.dtype)]

    yield Case(f"gradient of cross entropy {size}", "row", parts.backward, gradient)


def _in_parts(rows: int, words: int) -> Iterator[Case]:
    """The same as training has it: the forward keeps two numbers for each row."""
    size = f"{rows}x{words}"
    g = cg.Graph("loss")
    x, t = g.input("x", (rows, words), BF16), g.input("t", (rows,), torch.int64)
    wide = g.cast(x, F32)
    most = g.reduction(wide, 1, "max", True)
    shifted = g.sub(wide, most)
    sums = g.log(g.reduction(g.exp(shifted), 1, "sum", True))
    for name, value in (("most", most), ("sums", sums)):
        g.output(name, value)
    g.output("y", g.nll_loss(g.cast(g.sub(shifted, sums), BF16), t))

    def forward(x: torch.Tensor, t: torch.Tensor) -> Tensors:
        wide = x.float() if x.dtype == BF16 else x
        most = wide.amax(1, True)
        sums = (wide - most).exp().sum(1, True).log()
        return [most, sums, F.nll_loss((wide - most - sums).to(x.dtype), t)]

    yield Case(f"cross entropy in parts {size}", "row", g.spec(), forward)

    g = cg.Graph("gradient")
    dy, x = g.input("dy", (), BF16), g.input("x", (rows, words), BF16)
    t = g.input("t", (rows,), torch.int64)
    most, sums = (g.input(name, (rows, 1), F32) for name in ("most", "sums"))
    y = g.cast(g.cast(g.sub(g.sub(g.cast(x, F32), most), sums), BF16), F32)
    dy = g.cast(g.nll_loss_backward(dy, t, (rows, words)), F32)
    dx = g.sub(dy, g.mul(g.exp(y), g.reduction(dy, 1, "sum", True)))
    g.output("dx", g.cast(dx, BF16))

    def backward(dy: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor) -> Tensors:
        aten = torch.ops.aten
        count = torch.full((), float(rows), device=dy.device, dtype=dy.dtype)
        t, most, sums = rest
        y = x - most - sums
        made = aten.nll_loss_backward(dy.to(y.dtype), y, t, None, 1, -100, count.to(y.dtype))
        return [(made - y.exp() * made.sum(1, True)).to(x.dtype)]

    yield Case(f"gradient of cross entropy in parts {size}", "row", g.spec(), backward)


def _softmax(rows: int, words: int) -> Case:
    g = cg.Graph("softmax")
    g.output("y", g.softmax(g.input("x", (rows, words), BF16), 1))
    return Case(f"softmax {rows}x{words}", "row", g.spec(), lambda x: [x.softmax(1)])


def _batch_norms(n: int, c: int, side: int) -> Iterator[Case]:
    shape, size = (n, c, side, side), f"{n}x{c}x{side}x{side}"
    g = cg.Graph("norm")
    x = g.input("x", shape, BF16, layout="channels_last")
    w, b = (g.input(name, (c,), F32) for name in "wb")
    y, mean, inverse = g.batch_norm_train(x, w, b)[:3]
    for name, value in (("y", g.relu(y)), ("mean", mean), ("inverse", inverse)):
        g.output(name, value)

    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Tensors:
        y, mean, inverse = torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)
        return [y.relu_(), mean, inverse]

    yield Case(f"batch norm, relu {size}", "columns", g.spec(), forward)

    g = cg.Graph("gradient")
    dy, x = (g.input(name, shape, BF16, layout="channels_last") for name in ("dy", "x"))
    vectors = [g.input(name, (c,), F32) for name in ("w", "mean", "inverse")]
    for name, value in zip("xwb", g.batch_norm_backward(dy, x, *vectors), strict=True):
        g.output(f"d{name}", value)

    def backward(dy: torch.Tensor, x: torch.Tensor, *v: torch.Tensor) -> Tensors:
        w, mean, inverse = v
        made = torch.ops.aten.native_batch_norm_backward(
            dy, x, w, None, None, mean, inverse, True, 1e-5, [True] * 3
        )
        return list(made)

    yield Case(f"batch norm backward {size}", "columns", g.spec(), backward)


def _sums(rows: int, columns: int) -> Case:
    g = cg.Graph("sums")
    g.output("y", g.reduction(g.input("x", (rows, columns), BF16), 0, "sum"), dtype=F32)
    return Case(
        f"sums of columns {rows}x{columns}",
        "columns",
        g.spec(),
        lambda x: [x.sum(0, dtype=F32 if x.dtype == BF16 else None)],
    )


def _layer_norm(rows: int, width: int) -> Case:
    """The gradient as a transformer's block has it: a residual's is added, a bias's is summed."""
    g = cg.Graph("gradient")
    dy, x, other = (g.input(name, (rows, width), BF16) for name in ("dy", "x", "other"))
    w = g.input("w", (width,), F32)
    mean, inverse = (g.input(name, (rows, 1), F32) for name in ("mean", "inverse"))
    dx, dw, db = g.layer_norm_backward(dy, x, w, mean, inverse)
    total = g.add(dx, other)
    for name, value in (("dx", total), ("dw", dw), ("db", db)):
        g.output(name, value)
    g.output("sums", g.reduction(total, (0,), "sum"))

    def backward(
        dy: torch.Tensor, x: torch.Tensor, other: torch.Tensor, w: torch.Tensor, *v: torch.Tensor
    ) -> Tensors:
        weight = w.to(x.dtype)
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            dy, x, [x.shape[1]], *v, weight, weight, [True] * 3
        )
        total = dx + other
        return [total, dw, db, total.sum(0)]

    name = f"layer norm backward, residual, bias {rows}x{width}"
    return Case(name, "rows and columns", g.spec(), backward)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _losses(8192, 50304)
    yield from _in_parts(8192, 50304)
    yield _softmax(512, 50257)
    yield _softmax(2048, 128256)
    for shape in COLUMNS:
        yield _sums(*shape)
    for shape in NORMS:
        yield _layer_norm(*shape)
    for image in IMAGES:
        yield from _batch_norms(*image)


# -- measuring -------------------------------------------------------------------------------------


def _given(case: Case, seed: int) -> Tensors:
    """Random inputs; classes are any."""
    given = random_inputs(case.spec, CUDA, seed)
    words = max(each.shape[-1] for each in given if each.dim() > 1)
    drawn = [
        torch.randint(words, each.shape, device=CUDA) if each.dtype == torch.int64 else each
        for each in given
    ]
    named = zip(case.spec.inputs, drawn, strict=True)
    return [case.fixed[name].to(CUDA) if name in case.fixed else each for name, each in named]


def _ways(case: Case, schedules: Sequence[Choice]) -> Iterator[tuple[Way, Any]]:
    """The ways by kernels, each with what builds it; those of one text are one way."""
    texts: set[tuple[str, tuple[Any, ...]]] = set()
    known = {field.name for field in fields(DeviceRules)}
    others = [each for each in OTHERS.get(case.kind, ()) if set(each) <= known]
    rule = patterns.by_rule(case.spec, kernel.processors(0))
    every = schedules or Kernels.on(0).choices(case.spec)[: MOST_CHOICES + 1]
    every = [choice for choice in every if choice != rule]
    given = [({}, None), *((each, None) for each in others), *(({}, choice) for choice in every)]
    for values, choice in given:
        name = ", ".join(f"{key}={value}" for key, value in values.items())
        way = Way(name or ("schedule" if choice else "rule"))
        try:
            with changed(**values):
                chosen = choice or patterns.by_rule(case.spec, kernel.processors(0))
                way.schedule = re.sub(r"^kernel \(|\)$", "", str(chosen))
                built = kernel.build(case.spec, chosen, 0)
        except Exception as error:
            way.failed = f"{type(error).__name__}: {str(error)[:120]}"
            yield way, None
            continue
        launches = tuple(map(tuple, built._head["launches"]))
        if (built.text, launches) not in texts:
            texts.add((built.text, launches))
            way.launches = len(launches)
            yield way, built


def _calls(case: Case, built: Any, sets: list[Tensors], outs: list[Tensors]) -> list[Call]:
    """A call for each set of inputs."""
    space = torch.empty(max(1, built.workspace_bytes), dtype=torch.uint8, device=CUDA)
    found: list[Call] = []
    for given, results in zip(sets, outs, strict=True):
        pointers = array("Q", [each.data_ptr() for each in (*given, *results)])
        found.append(
            lambda pointers=pointers: built.execute(pointers, space.data_ptr(), None)  # type: ignore[misc]
        )
    return found


def _captured(calls: Sequence[Call], many: int) -> torch.cuda.CUDAGraph:
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(many):
                calls[number % len(calls)]()
    torch.cuda.synchronize()
    return graph


def _us(graph: torch.cuda.CUDAGraph, many: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / many * 1e3


def _each_launch(ways: Sequence[Way], graphs: Sequence[Any], many: int) -> None:
    """Fill in the time of each launch of our ways, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
    found = sorted(
        (event.time_range.start, event.device_time)
        for event in seen.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and "cudnngraph" in event.name
    )
    if len(found) != many * sum(way.launches for way in ways):
        return
    at = 0
    for way in ways:
        times = [us for _, us in found[at : at + many * way.launches]]
        at += many * way.launches
        way.each_us = tuple(
            statistics.median(times[number :: way.launches]) for number in range(way.launches)
        )


def _error(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest relative error of all results, in norm."""
    worst = 0.0
    for a, b in zip(made, wanted, strict=True):
        off = float((a.reshape(b.shape).double() - b).norm() / b.norm().clamp_min(1e-30))
        worst = off if not off <= worst else worst
    return worst


def measure(case: Case, schedules: Sequence[Choice] = ()) -> list[Way]:
    """All ways of a case, that of a copy and torch's first; other schedules if they are given."""
    count = min(8, max(1, math.ceil(COLD_BYTES / case.bytes)))
    sets = [_given(case, seed) for seed in range(count)]
    outs = [[case.spec.tensors[n].empty(CUDA) for n in case.spec.outputs] for _ in range(count)]
    many = max(count, min(40, round(REPLAY_US / (case.bytes / 4e6))))
    halves = [
        (torch.ones(case.bytes // 8, device=CUDA), torch.empty(case.bytes // 8, device=CUDA))
        for _ in range(count)
    ]
    wanted = [
        each.double()
        for each in case.eager(*(t.double() if t.is_floating_point() else t for t in sets[0]))
    ]
    plain = [Way("copy"), Way("torch")]
    plain[1].error = _error(case.eager(*sets[0]), wanted)
    copies = [lambda a=a, b=b: torch.neg(a, out=b) for a, b in halves]
    eager = [lambda given=given: case.eager(*given) for given in sets]
    graphs = [_captured(copies, many), _captured(eager, many)]
    alive: list[list[Call]] = []  # what a graph replays writes to what its calls hold
    ways: list[Way] = []
    failed: list[Way] = []
    for way, kernel_ in _ways(case, schedules):
        if kernel_ is None:
            failed.append(way)
            continue
        calls = _calls(case, kernel_, sets, outs)
        alive.append(calls)
        for each in outs[0]:
            each.fill_(math.nan)
        calls[0]()
        way.error = _error(outs[0], wanted)
        graphs.append(_captured(calls, many))
        ways.append(way)
    del wanted
    taken: list[list[float]] = [[] for _ in graphs]
    for number in range(ROUNDS + 1):
        for place, graph in enumerate(graphs):
            us = _us(graph, many)
            if number:
                taken[place].append(us)
    for way, times in zip((*plain, *ways), taken, strict=True):
        way.us = statistics.median(times)
    _each_launch(ways, graphs[2:], many)
    return [*plain, *ways, *failed]


def lines_of(case: Case, ways: Sequence[Way]) -> Iterator[str]:
    """The rows of the table, those that take least first."""
    copy = ways[0].us
    for way in (*ways[:2], *sorted(ways[2:], key=lambda each: (each.us != each.us, each.us))):
        each = " + ".join(f"{us:.1f}" for us in way.each_us)
        cells = (case.name, way.name, way.schedule, f"{way.us:.1f}", each)
        cells += (f"{copy / way.us:.2f}", f"{way.error:.1e}", way.failed)
        yield f"| {' | '.join(cells)} |"


def report(
    arguments: Sequence[str] | None,
    cases: Iterable[Case],
    measured: Callable[[Case], list[Way]],
    title: str,
    said: str,
    script: str,
) -> None:
    """Measure cases, print a table, and write a page of a title and what is said in front of the
    table, with a JSON file beside it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name this pattern finds")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    head = ("case", "way", "schedule", "us", "its launches", "of a copy", "error", "failed")
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    print("\n".join(table), flush=True)
    kept: list[dict[str, Any]] = []
    start = time.perf_counter()
    for case in cases:
        if not re.search(args.only, case.name):
            continue
        try:
            ways = measured(case)
        except Exception as error:
            print(f"| {case.name} | {type(error).__name__}: {str(error)[:300]} |", flush=True)
            continue
        found = list(lines_of(case, ways))
        print("\n".join(found), flush=True)
        table += found
        kept.append(
            {"case": case.name, "bytes": case.bytes} | {"ways": [vars(way) for way in ways]}
        )
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    if args.out:
        where = (
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {datetime.date.today()}."
        )
        name = script.replace("_", "-")
        command = f"python docs/results/{script}.py --out docs/results/{name}.md"
        page = [f"# {title}", "", where, "", "```", command, "```", "", said, "", *table]
        write(page, args.out)
        args.out.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    said = (
        "Microseconds of a call within a CUDA graph, on data in turn that no cache holds, "
        "medians, in turns. `copy` copies as many bytes as the case has to move, each input "
        "and output once; `of a copy` is the share of its speed. `its launches` are the "
        "profiler's. Errors are relative to float64, of the worst result, in norm."
    )
    title = "Reductions over long rows and down columns"
    report(arguments, cases(), measure, title, said, "h200_reductions")


if __name__ == "__main__":
    main()
