"""Measure depthwise convolutions by strips and by bands on tensor cores, and write a table.

    python docs/results/h200_bands.py --out bands.md

float16, channels last, stride 1, with bias and SiLU behind, or the gradient of the image. Each of
the two by its first schedule and by the fastest of its first three, in CUDA graphs of twenty calls,
in turns; a copy of as many bytes beside them. Every kernel is checked against the float64 reference
first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from h200_kernels import captured, times_us

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import kernel, patterns
from cudnngraph.kernels.banded import Banded
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.trial import StepTrial

F16 = torch.float16
CUDA = torch.device("cuda", 0)
SHAPES = (  # N C H K
    (64, 96, 56, 7),
    (64, 192, 28, 7),
    (64, 384, 14, 7),
    (64, 768, 7, 7),
    (1, 96, 56, 7),
    (1, 384, 14, 7),
    (32, 144, 56, 3),
    (128, 672, 14, 5),
    (32, 672, 14, 5),
    (32, 240, 28, 5),
    (32, 24, 56, 5),
    (128, 1152, 7, 5),
)


def graph(n: int, c: int, size: int, k: int, *, gradient: bool) -> GraphSpec:
    """A convolution with bias and SiLU behind it, or the gradient of its image."""
    g = cg.Graph("depthwise")
    last: Any = {"layout": "channels_last"}
    x = g.input("x", (n, c, size, size), F16, **last)
    w = g.input("w", (c, 1, k, k), F16, **last)
    conv = g.conv_transpose if gradient else g.conv
    y = conv(x, w, padding=k // 2, groups=c)
    if not gradient:
        y = g.silu(g.bias(y, g.input("b", (c,), F16)))
    g.output("y", y, dtype=F16, **last)
    return g.spec()


def measure(spec: GraphSpec) -> dict[str, float]:
    """Microseconds: of strips and bands, the first schedule and the fastest of three, and of a
    copy."""
    given, out = random_inputs(spec, CUDA), spec.tensors["y"].empty(CUDA)
    trial = StepTrial(spec, cg.Policy(), CUDA)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(given[0])}
    tried: dict[str, list[str]] = {"strips": [], "bands": []}
    for choice in patterns.choices(spec, kernel.processors(0)):
        kind = "bands" if isinstance(patterns.schedule_of(choice), Banded) else "strips"
        if len(tried[kind]) == 3:
            continue
        made = kernel.build(spec, choice, 0)
        wrong = trial.why_wrong(made)
        if wrong is not None:
            raise RuntimeError(f"{choice}: {wrong}")
        pointers = made.pointers([each.data_ptr() for each in (*given, out)])
        tried[kind].append(str(choice))
        calls[str(choice)] = partial(made.execute, pointers, 0, None)
    found = times_us({name: captured(call) for name, call in calls.items()})
    by_rule = next(name for name in calls if name != "copy")
    told = {"copy": found["copy"], "by rule": found[by_rule]}
    for kind, names in tried.items():
        told[f"{kind}, first"] = found[names[0]]
        told[f"{kind}, fastest"] = min(found[name] for name in names)
        print(f"  {kind}: {min(names, key=lambda name: found[name])}", flush=True)
    return told


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    columns = (
        "strips, first",
        "strips, fastest",
        "bands, first",
        "bands, fastest",
        "by rule",
        "copy",
    )
    lines = [f"| case | {' | '.join(columns)} | of a copy |", "|---" * 8 + "|"]
    better = []
    for gradient in (False, True):
        for shape in SHAPES if not gradient else SHAPES[:4]:
            n, c, size, k = shape
            told = measure(graph(n, c, size, k, gradient=gradient))
            numbers = " | ".join(f"{told[name]:.1f}" for name in columns)
            name = f"{k}x{k} {'image gradient' if gradient else '+ bias + silu'}"
            share = told["copy"] / told["by rule"]
            lines.append(f"| {name} {n}x{c}x{size}x{size} | {numbers} | {share:.2f} |")
            print(lines[-1], flush=True)
            better.append(told["by rule"] / min(told["strips, first"], told["bands, first"]))
    lines += ["", f"By rule over the better of both: mean {statistics.fmean(better):.3f},"]
    lines[-1] += f" worst {max(better):.2f}."
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
