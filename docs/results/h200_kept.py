"""Measure a product with a bias and GELU as one plan that makes both results, as for a gradient,
beside a plan of the product and its bias, and write the results page.

    python docs/results/h200_kept.py --out docs/results/h200-kept.md

Calls are replays of a CUDA graph of twenty. ``--steps`` has training steps too, with such plans and
with kernels of the activation, each in a process of its own with an empty cache.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from h200_masks import write

import cudnngraph as cg
from cudnngraph.device.import_rules import ANY
from cudnngraph.device.rules import changed
from cudnngraph.select.inputs import random_inputs

BF16 = torch.bfloat16
CALLS, ROUNDS = 20, 9
PRODUCTS = (
    (8192, 768, 3072, "gelu_tanh"),
    (8192, 768, 3072, "gelu"),
    (4096, 768, 3072, "gelu"),
    (12544, 384, 1536, "gelu"),
    (50176, 192, 768, "gelu"),
    (200704, 96, 384, "gelu"),
)
ONE_PLAN = cg.Policy(fallback="error")
TUNED = cg.Policy(fallback="error", tune="autotune", max_candidates=5, budget_s=4)


def graph(rows: int, depth: int, columns: int, gelu: str | None) -> cg.Graph:
    """A product with a bias, and behind it an activation."""
    g = cg.Graph("kept")
    x, b = g.input("x", (rows, depth), BF16), g.input("b", (columns,), BF16)
    u = g.add(g.matmul(x, g.input("w", (depth, columns), BF16, stride=(1, depth))), b)
    g.output("u", u)
    if gelu is not None:
        g.output("y", getattr(g, gelu)(u))
    return g


def us(g: cg.Graph, policy: cg.Policy) -> float:
    """Microseconds of a call."""
    exe = g.compile("cuda", policy=policy)
    inputs = random_inputs(g.spec(), torch.device("cuda", 0))
    call: Callable[[], object] = lambda: exe(*inputs)  # noqa: E731
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured, stream=stream):
        for _ in range(CALLS):
            call()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        captured.replay()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end) / CALLS)
    return statistics.median(found)


def rows() -> list[str]:
    """The table of products."""
    lines = ["| product | activation | product and bias | one plan | the fastest of five plans |"]
    lines += ["|---|---|---|---|---|"]
    for m, k, n, gelu in PRODUCTS:
        alone = us(graph(m, k, n, None), ONE_PLAN)
        both, tuned = (us(graph(m, k, n, gelu), policy) for policy in (ONE_PLAN, TUNED))
        lines.append(f"| {m} x {k} -> {n} | {gelu} | {alone:.1f} | {both:.1f} | {tuned:.1f} |")
        print(lines[-1], flush=True)
    return lines


def step(name: str, kept: bool) -> None:
    """Print what a training step takes, as JSON."""
    import h200_steps

    torch.manual_seed(0)
    args = Namespace(tune="heuristic", rounds=3, breakdown="")
    made = h200_steps.MODELS[name]()
    with contextlib.nullcontext() if kept else changed(product_kept_min_depth=ANY):
        found = h200_steps.measure(name, "cudnngraph, captured", made, args)
    print(json.dumps({key: found[key] for key in ("ms", "gib")}))


def steps() -> list[str]:
    """The table of training steps."""
    lines = ["| step | kernels of the activation, ms | plans of both, ms |", "|---|---|---|"]
    for name in ("gpt", "convnext"):
        found = []
        for way in ("apart", "kept"):
            command = [sys.executable, __file__, "--one", name, way]
            with tempfile.TemporaryDirectory() as folder:
                own = {"CUDNNGRAPH_CACHE_DIR": folder, "CUDNNGRAPH_VERIFY": "inprocess"}
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, env={**os.environ, **own}
                )
            found.append(f"{json.loads(done.stdout.splitlines()[-1])['ms']:.2f}")
        lines.append(f"| {name} | {found[0]} | {found[1]} |")
        print(lines[-1], flush=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--one", nargs=2)
    args = parser.parse_args(arguments)
    if args.one:
        step(args.one[0], args.one[1] == "kept")
        return
    lines = [
        "# A product's plan with two results",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}; {datetime.date.today()}. Microseconds, bfloat16.",
        "",
        *rows(),
    ]
    if args.steps:
        lines += ["", *steps()]
    if args.out:
        write(lines, args.out)


if __name__ == "__main__":
    main()
