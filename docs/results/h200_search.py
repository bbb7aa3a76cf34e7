"""Tune whole models, and measure them beside what heuristics choose.

    python docs/results/h200_search.py --out docs/results/h200-search.md

Models of the zoo and of ``outsiders.py`` by patterns, with random weights, one process each, and
without the choices that ship. The heuristic's form comes first, with an empty cache. Calls are CUDA
graph replays, in turns. The tuned plans go into ``--cache``, which ``cudnngraph plans export
--seeds FOLDER --steps-only`` makes seeds of; without it each model has an empty one. With
``--jobs`` some are tuned side by side, so that searches take longer; while one is timed no other
tunes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from h200_masks import write
from outsiders import entry_of, names_of

from cudnngraph import Policy, fuse
from cudnngraph.bench.zoo import one
from cudnngraph.cache import lookup
from cudnngraph.runtime.process import cache_clear
from cudnngraph.settings import override
from plans_cache.gate import Gate

ROUNDS, CALLS = 7, 10
SERVED: Any = {"capture": True, "reuse_results": True}
Found = dict[str, Any]


def us(call: Callable[[], object]) -> float:
    """The time of a call within a row of them."""
    make: Any = torch.cuda.Event
    begin, end = (make(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / CALLS * 1e3


def measure(name: str, cache: Path) -> Found:
    """A model by heuristics and tuned: seconds to the first result, and microseconds of a call."""
    model, inputs, _ = one._made(entry_of(name), False, torch.device("cuda", 0))
    found: Found = {"model": name}
    calls: dict[str, Callable[[], object]] = {}
    for tune in ("heuristic", "autotune"):
        torch.cuda.synchronize()
        start = time.perf_counter()
        policy = Policy(tune=tune)
        with tempfile.TemporaryDirectory() as own:
            place = cache if tune == "autotune" else Path(own)
            cache_clear()
            with override(cache_dir=place), torch.no_grad():
                fused: Any = fuse(model, tuple(inputs), policy=policy, **SERVED)
                fused(*inputs)
        torch.cuda.synchronize()
        found[f"{tune} s"] = time.perf_counter() - start
        calls[tune] = lambda fused=fused: fused(*inputs)  # type: ignore[misc]
    taken: dict[str, list[float]] = {tune: [] for tune in calls}
    with torch.no_grad(), Gate(lookup.Rejected(0).gate, 60.0).alone():
        for number in range(ROUNDS + 1):
            for tune, call in calls.items():
                made = us(call)
                if number:
                    taken[tune].append(made)
    return found | {f"{tune} us": statistics.median(each) for tune, each in taken.items()}


def apart(name: str, limit_s: float, cache: Path | None) -> Found:
    """The same in a process of its own; its last line of the log beside."""
    with tempfile.TemporaryDirectory() as folder:
        place = os.environ | {"CUDNNGRAPH_CACHE_DIR": str(cache or folder)}
        place["CUDNNGRAPH_LOG"] = "INFO"
        place["CUDNNGRAPH_SEEDS"] = "0"
        words = [sys.executable, __file__, "--one", name]
        try:
            made = subprocess.run(
                words, env=place, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return {"model": name, "error": f"over {limit_s:.0f} s"}
    told = [line for line in made.stderr.splitlines() if "search of " in line]
    print("\n".join(made.stderr.splitlines()[-3:]), flush=True)
    if made.returncode:
        return {"model": name, "error": made.stderr.splitlines()[-1][:300]}
    found: Found = json.loads(made.stdout.splitlines()[-1])
    return found | {"log": [line.split(": ", 1)[-1] for line in told]}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="EfficientNet-B0;SD 1.5 UNet;DenseNet-121;BERT-base")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds a model")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; the rest is left")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--cache", type=Path, help="the directory of the tuned plans")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, Path(os.environ["CUDNNGRAPH_CACHE_DIR"]))))
        return
    end = time.monotonic() + args.budget

    def found_of(name: str) -> Found:
        left = min(args.limit, end - time.monotonic())
        if left < 1:
            return {"model": name, "error": "not begun"}
        return apart(name, left, args.cache)

    rows = [
        "| model | heuristic, s | tuned, s | heuristic, us | tuned, us | of the time |",
        "|" + "---|" * 6,
    ]
    logs = []
    names = names_of(args.models)
    pool = ThreadPoolExecutor(args.jobs)
    for found in pool.map(found_of, names):
        name = found["model"]
        if "error" in found:
            rows.append(f"| {name} | {found['error']} |  |  |  |  |")
        else:
            first, last = found["heuristic us"], found["autotune us"]
            seconds = f"{found['heuristic s']:.1f} | {found['autotune s']:.1f}"
            rows.append(f"| {name} | {seconds} | {first:.1f} | {last:.1f} | {last / first:.3f} |")
            logs += [f"- {name}: {line}" for line in found["log"]]
        print(rows[-1], flush=True)
    head = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores"
    page = ["# Searches of whole models", "", f"{head}; {datetime.date.today()}.", "", "```"]
    page += [f"python docs/results/h200_search.py {shlex.join(sys.argv[1:])}".rstrip(), "```", ""]
    page += [*rows, "", "What searches told at INFO:", "", *logs]
    print("\n".join(rows))
    if args.out:
        write(page, args.out)


if __name__ == "__main__":
    main()
