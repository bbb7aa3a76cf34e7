"""Times of the tiles that cuDNN compiles at run time, over products and convolutions of many sizes.

    python docs/results/h200_tiles.py --json TIMES.json

Sizes are drawn at random, operands are float16 or bfloat16, images channels_last. Of every plan
that cuDNN ranks for one, those of engines that compile at run time are built and timed side by
side. Several processes build, one at a time measures. ``docs/results/tile_model.py`` makes of the
times what :mod:`cudnngraph.backend.tiles` reads. ``--plain`` draws what engines of the library run
in place of these, with plans of all engines: convolutions with at most a bias, a residual and ReLU,
products alone, and gradients of convolutions.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.backend import env
from cudnngraph.backend.candidates import Proposals
from cudnngraph.backend.tiles import work_of
from cudnngraph.errors import NotSupported
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select.bench import GpuBench
from cudnngraph.select.config import FINAL_ROUNDS
from cudnngraph.select.worker import from_choice

Case = dict[str, Any]
WIDE: tuple[int, ...] = (
    64,
    96,
    128,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
    1152,
    1536,
    2048,
    2304,
    3072,
    4096,
)
ROWS: tuple[int, ...] = (
    154,
    256,
    392,
    512,
    1024,
    1568,
    2048,
    2464,
    4096,
    4112,
    6272,
    8192,
    12608,
    16384,
    25088,
)
ROWS += (32768, 65536, 100352)
CHANNELS: tuple[int, ...] = (
    16,
    24,
    32,
    40,
    48,
    64,
    72,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    240,
    256,
    320,
    384,
    448,
)
CHANNELS += (512, 576, 672, 768, 960, 1024, 1280, 1536)
SIDES = (7, 8, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
PATIENCE_S = 15.0  # for what has begun when the time is over
ACTS = ("", "gelu", "silu", "gelu_tanh", "add")
PLAIN_ACTS = ("bare", "", "relu", "add relu")


def cases(count: int, seed: int = 0) -> list[Case]:
    """Products and convolutions of 0.1 to 80 GFLOP that move at most 400 MB."""
    rng = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        kind = rng.choice(("product", "product", "1x1", "3x3"))
        act = rng.choice(ACTS)
        if kind == "product":
            m, n, k = rng.choice(ROWS), rng.choice(WIDE), rng.choice(WIDE)
            case: Case = {"m": m, "n": n, "k": k}
        else:
            batch, side = rng.choice((1, 2, 4, 8, 16, 32, 64)), rng.choice(SIDES)
            n, k = rng.choice(CHANNELS), rng.choice(CHANNELS)
            act = act or "silu"
            case = {"batch": batch, "side": side, "n": n, "k": k}
            m = batch * side * side
        case |= {"kind": kind, "act": act, "dtype": rng.choice(("float16", "bfloat16"))}
        work = 2 * m * n * k * (9 if kind == "3x3" else 1)
        if 1e8 < work < 8e10 and 2 * m * (n + k) < 4e8:
            found.append(case)
    return found


def plain_cases(count: int, seed: int = 0) -> list[Case]:
    """The same for what is not compiled at run time."""
    rng = random.Random(seed)
    found: list[Case] = []
    for case in cases(4 * count, seed):
        if case["kind"] == "product" and rng.random() < 0.8:
            continue  # they are half of all
        op = "forward" if case["kind"] == "product" else rng.choice(("forward", "data", "weight"))
        act = rng.choice(PLAIN_ACTS if case["kind"] != "product" else ("bare",))
        found.append(case | {"op": op, "act": act if op == "forward" else "bare"})
    return found[:count]


def gradient_of(case: Case) -> GraphSpec:
    """The graph of a convolution's gradient, of the image ("data") or of the weight."""
    g, dtype = cg.Graph("case"), getattr(torch, case["dtype"])
    batch, side, window = case["batch"], case["side"], int(case["kind"][0])
    n, k, padding = case["n"], case["k"], window // 2
    dy = g.input("dy", (batch, n, side, side), dtype, layout="channels_last")
    if case["op"] == "data":
        w = g.input("w", (n, k, window, window), dtype, layout="channels_last")
        g.output("dx", g.conv_transpose(dy, w, padding=padding))
    else:
        x = g.input("x", (batch, k, side, side), dtype, layout="channels_last")
        g.output("dw", g.conv_wgrad(dy, x, kernel=window, padding=padding))
    return legalize(g.spec(), cg.Policy())


def spec_of(case: Case) -> GraphSpec:
    """The legalized graph of a case."""
    if case.get("op", "forward") != "forward":
        return gradient_of(case)
    acts = [] if case["act"] in ("", "bare") else case["act"].split()
    g, dtype = cg.Graph("case"), getattr(torch, case["dtype"])
    n, k = case["n"], case["k"]
    if case["kind"] == "product":
        x = g.input("x", (case["m"], k), dtype)
        w = g.input("w", (k, n), dtype, stride=(1, k))
        y = g.matmul(x, w)
        y = y if case["act"] == "bare" else g.add(y, g.input("b", (n,), dtype))
        shape: tuple[int, ...] = (case["m"], n)
        lies: dict[str, Any] = {}
    else:
        lies = {"layout": "channels_last"}
        side, window = case["side"], int(case["kind"][0])
        x = g.input("x", (case["batch"], k, side, side), dtype, **lies)
        w = g.input("w", (n, k, window, window), dtype, **lies)
        y = g.conv(x, w, padding=window // 2)
        y = y if case["act"] == "bare" else g.bias(y, g.input("b", (n,), dtype))
        shape = (case["batch"], n, side, side)
    for act in acts:
        residual = act == "add"
        y = g.add(y, g.input("r", shape, dtype, **lies)) if residual else getattr(g, act)(y)
    g.output("y", y)
    return legalize(g.spec(), cg.Policy())


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """The GPU for this process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(case: Case, lock: Path) -> Case:
    """The times of a case, by plan, in the order of cuDNN's ranking."""
    spec, device = spec_of(case), torch.device("cuda", 0)
    try:
        proposals = Proposals(spec, cg.Policy(), 0, more=True)
    except NotSupported as refusal:
        return {"of": "drawn", "case": case, "refused": refusal.reasons[0]}
    plain = "op" in case
    ranked = [each for each in proposals.candidates if plain or each.runtime_compiled]
    built = [proposals.build(each, launch=False)[1] for each in ranked]
    plans = [plan for plan in built if plan is not None]
    bench = GpuBench(cg.Policy(), device, lambda: alone(lock))
    times = bench.times_us(spec, plans, FINAL_ROUNDS) if plans else []
    rows = []
    for plan, took in zip(plans, times, strict=True):
        if not isinstance(took, str):
            rows.append([*from_choice(plan.choice), round(took, 3)])
    first = min(proposals.candidates, key=lambda each: each.index).choice
    found, work = {"of": "drawn", "case": case}, work_of(spec)
    found |= {} if work is None else {"work": asdict(work)}
    return found | {"first": from_choice(first), "times": rows}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--seconds", type=float, default=240.0, help="end then, with what there is")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        place, jobs = map(int, args.part.split("/"))
        end = time.monotonic() + args.seconds
        drawn = plain_cases(args.count) if args.plain else cases(args.count)
        for case in drawn[place::jobs]:
            if time.monotonic() > end:
                break
            print(json.dumps(measure(case, args.lock)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--json", str(args.json), "--count", str(args.count)]
        words += ["--seconds", str(args.seconds), "--lock", f"{folder}/lock"]
        words += ["--plain"] * args.plain
        started = []
        for place in range(args.jobs):
            out = (Path(folder) / f"{place}.jsonl").open("w+")
            part = [*words, "--part", f"{place}/{args.jobs}"]
            started.append((subprocess.Popen(part, stdout=out), out))
        rows: list[Case] = []
        end = time.monotonic() + args.seconds + PATIENCE_S
        for process, out in started:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:  # what it has measured is there
                process.kill()
                process.wait()
            out.seek(0)
            rows += [json.loads(line) for line in out if line.endswith("}\n")]
    head = {"gpu": torch.cuda.get_device_name(), "cudnn": env.cudnn_version()}
    head |= {"sms": env.device_identity(0).sm_count, "capability": env.capability(0)}
    args.json.write_text(json.dumps(head | {"rows": rows}))
    print(head, len(rows), "cases", sum(len(row.get("times", ())) for row in rows), "times")


if __name__ == "__main__":
    main()
