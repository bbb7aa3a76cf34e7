"""Measure gradients of depthwise taps by threads' sums and by tensor cores, and write a table.

    python docs/results/h200_taps.py --out taps.md

float16, channels last, stride 1. Each of the two by its first schedule and by the fastest of its
first six, in CUDA graphs of twenty calls, in turns; a copy of one operand beside them, which reads
and writes as many bytes as a gradient reads. Every kernel is checked against the float64 reference
first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from h200_bands import CUDA, F16
from h200_kernels import captured, times_us

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import kernel, patterns
from cudnngraph.kernels.tap_products import TapProducts
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.trial import StepTrial

MOST = 6  # schedules of a kind
SHAPES = (  # N C H K
    (64, 96, 56, 7),
    (64, 192, 28, 7),
    (64, 384, 14, 7),
    (64, 768, 7, 7),
    (8, 96, 56, 7),
    (1, 96, 56, 7),
    (1, 384, 14, 7),
    (32, 144, 56, 3),
    (32, 672, 14, 5),
    (128, 240, 28, 5),
)


def graph(n: int, c: int, size: int, k: int) -> GraphSpec:
    """The gradient of the taps of a depthwise convolution."""
    g = cg.Graph("taps")
    dy, x = (g.input(name, (n, c, size, size), F16, layout="channels_last") for name in ("dy", "x"))
    g.output("dw", g.conv_wgrad(dy, x, kernel=(k, k), padding=k // 2, groups=c), dtype=F16)
    return g.spec()


def measure(spec: GraphSpec) -> dict[str, float]:
    """Microseconds: of both kinds, the first schedule and the fastest of six, and of a copy."""
    given, out = random_inputs(spec, CUDA), spec.tensors["dw"].empty(CUDA)
    trial, copied = StepTrial(spec, cg.Policy(), CUDA), torch.empty_like(given[0])
    calls: dict[str, Callable[[], object]] = {"copy": lambda: copied.copy_(given[0])}
    tried: dict[str, list[str]] = {"sums": [], "products": []}
    listed = patterns.choices(spec, kernel.processors(0))
    for choice in listed:
        kind = "products" if isinstance(patterns.schedule_of(choice), TapProducts) else "sums"
        if len(tried[kind]) == MOST:
            continue
        made = kernel.build(spec, choice, 0)
        wrong = trial.why_wrong(made)
        if wrong is not None:
            raise RuntimeError(f"{choice}: {wrong}")
        pointers = made.pointers([each.data_ptr() for each in (*given, out)])
        scratch = torch.empty(made.workspace_bytes, dtype=torch.uint8, device=CUDA)
        tried[kind].append(str(choice))
        calls[str(choice)] = partial(_launch, made, pointers, scratch)
    found = times_us({name: captured(call) for name, call in calls.items()})
    told = {"copy": found["copy"], "rule": found[str(listed[0])]}
    for kind, names in tried.items():
        told[f"{kind}, first"] = found[names[0]]
        told[f"{kind}, fastest"] = min(found[name] for name in names)
    return told


def _launch(made: kernel.Kernel, pointers: object, scratch: torch.Tensor) -> None:
    made.execute(pointers, scratch.data_ptr(), None)


def table(rows: Sequence[tuple[str, dict[str, float]]]) -> str:
    """All rows, and what the rule loses."""
    columns = ("sums, first", "sums, fastest", "products, first", "products, fastest")
    lines = [
        f"| case | {' | '.join(columns)} | by rule | copy | of a copy |",
        "|---" * (len(columns) + 4) + "|",
    ]
    lost = []
    for name, found in rows:
        lost.append(found["rule"] / min(found["sums, first"], found["products, first"]))
        shown = [f"{found[each]:.1f}" for each in (*columns, "rule", "copy")]
        lines.append(f"| {name} | {' | '.join(shown)} | {found['copy'] / found['rule']:.2f} |")
    mean = statistics.geometric_mean(lost)
    lines += ["", f"By rule over the better of both: mean {mean:.3f}, worst {max(lost):.2f}."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the table goes")
    args = parser.parse_args(arguments)
    rows = []
    for n, c, size, k in SHAPES:
        name = f"{k}x{k} {n}x{c}x{size}x{size}"
        rows.append((name, measure(graph(n, c, size, k))))
        print(name, {key: round(value, 1) for key, value in rows[-1][1].items()}, flush=True)
        args.out.write_text(f"{table(rows)}\n")


if __name__ == "__main__":
    main()
