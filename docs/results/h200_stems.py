"""Convolutions with channels that are no multiple of eight, as they are and with more.

    python docs/results/h200_stems.py

For images of three channels, and for results of few: the forward, the gradient of the weight, and
of the image where one is needed. Each with the channels that there are, with four and with eight;
a window that moves two pixels also over images of two pixels by two as channels (16, of half the
side). Plans that cuDNN ranks for each are timed side by side: cuDNN's first, the
one that heuristics take, and the fastest. Several processes build, one at a time measures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from h200_tiles import alone

import cudnngraph as cg
from cudnngraph.backend.candidates import Proposals
from cudnngraph.errors import NotSupported
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select.bench import GpuBench
from cudnngraph.select.config import FINAL_ROUNDS

Case = dict[str, Any]
PLANS = 16  # of a case that are timed
#: Batch, side, channels, channels of the result, window, stride, padding.
STEMS: tuple[tuple[str, int, int, int, int, int, int, int], ...] = (
    ("ResNet-50's stem", 64, 224, 3, 64, 7, 2, 3),
    ("the U-Net's stem", 8, 256, 3, 64, 3, 1, 1),
    ("EfficientNet-B0's stem", 32, 224, 3, 32, 3, 2, 1),
)
HEADS = (("the U-Net's head", 8, 256, 64, 4, 1, 1, 0), ("a head of 21", 8, 96, 256, 21, 1, 1, 0))


def cases() -> list[Case]:
    """All of them."""
    keys = ("of", "batch", "side", "k", "n", "window", "stride", "padding")
    found: list[Case] = []
    for stem in STEMS:
        case: Case = dict(zip(keys, stem, strict=True))
        forms = [case | {"k": k} for k in (3, 4, 8)]
        if case["stride"] == 2:
            blocks = -(-case["window"] // 2)  # of a window
            half = case["side"] // 2 + blocks - 1
            form = {"side": half, "k": 16, "window": blocks, "stride": 1, "padding": 0}
            forms.append(case | form)
        found += [form | {"op": op} for form in forms for op in ("forward", "weight")]
    for head in HEADS:
        case = dict(zip(keys, head, strict=True))
        wide = -(-case["n"] // 8) * 8
        for n in (case["n"], wide):
            found += [case | {"n": n, "op": op} for op in ("forward", "data", "weight")]
    return found


def spec_of(case: Case, dtype: torch.dtype = torch.bfloat16) -> GraphSpec:
    """The legalized graph of a case."""
    g = cg.Graph("case")
    side, window, stride, padding = (case[key] for key in ("side", "window", "stride", "padding"))
    after = (side + 2 * padding - window) // stride + 1
    lies: dict[str, Any] = {"layout": "channels_last"}
    image = (case["batch"], case["k"], side, side)
    made, weight = (case["batch"], case["n"], after, after), (case["n"], case["k"], window, window)
    window_of: dict[str, Any] = {"stride": stride, "padding": padding}
    if case["op"] == "forward":
        x, w = g.input("x", image, dtype, **lies), g.input("w", weight, dtype, **lies)
        g.output("y", g.conv(x, w, **window_of))
    elif case["op"] == "weight":
        dy, x = g.input("dy", made, dtype, **lies), g.input("x", image, dtype, **lies)
        g.output("dw", g.conv_wgrad(dy, x, kernel=window, **window_of))
    else:
        dy, w = g.input("dy", made, dtype, **lies), g.input("w", weight, dtype, **lies)
        g.output("dx", g.conv_transpose(dy, w, **window_of))
    return legalize(g.spec(), cg.Policy())


def measure(case: Case, lock: Path) -> Case:
    """Times of plans, in the order in which heuristics try them; whose place in cuDNN's is told."""
    spec, device = spec_of(case), torch.device("cuda", 0)
    try:
        proposals = Proposals(spec, cg.Policy(), 0, more=True)
    except NotSupported as refusal:
        return case | {"refused": refusal.reasons[0]}
    built = [
        (each.index, plan)
        for each in proposals.candidates[: 2 * PLANS]
        if (plan := proposals.build(each, launch=False)[1]) is not None
    ][:PLANS]
    bench = GpuBench(cg.Policy(), device, lambda: alone(lock))
    times = bench.times_us(spec, [plan for _, plan in built], FINAL_ROUNDS)
    rows = [
        [index, str(plan.choice), us if isinstance(us, str) else round(us, 2)]
        for (index, plan), us in zip(built, times, strict=True)
    ]
    return case | {"times": rows}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    listed = cases()
    if args.one is not None:
        print(json.dumps(measure(listed[args.one], args.lock)))
        return
    rows: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:

        def apart(number: int) -> Case:
            words = [sys.executable, __file__, "--one", str(number), "--lock", f"{folder}/lock"]
            made = subprocess.run(words, capture_output=True, text=True, check=False)
            if made.returncode:
                return listed[number] | {"refused": made.stderr.splitlines()[-1][:200]}
            row: Case = json.loads(made.stdout.splitlines()[-1])
            return row

        with ThreadPoolExecutor(args.jobs) as pool:
            rows += pool.map(apart, range(len(listed)))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| of | op | channels | side | us by heuristics | cuDNN's first | fastest | by |")
    print("|" + "---|" * 8)
    for row in rows:
        told = f"| {row['of']} | {row['op']} | {row['k']} to {row['n']} | {row['side']} "
        timed = [each for each in row.get("times", ()) if not isinstance(each[2], str)]
        if not timed:
            print(f"{told}| {row.get('refused', 'no plan')} | | | |")
            continue
        best = min(timed, key=lambda each: each[2])
        first = min(timed, key=lambda each: each[0])
        print(f"{told}| {timed[0][2]} | {first[2]} | {best[2]} | {best[1]} |")
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
