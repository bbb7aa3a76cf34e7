"""Heuristics without the choices that ship, with them, and tuned, over models of the zoo.

    python docs/results/h200_seeds.py --models "MobileNetV3-L;SD 1.5 UNet" --out PAGE.md

Each model has a process of its own and each way an empty cache; calls are CUDA graph replays, in
turns. Of ``--jobs`` processes none builds while another one is timed. ``--warm`` measures starts in
place of calls: seconds to the first result in a new process, with the caches filled by another.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
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
from h200_search import ROUNDS, SERVED, us

from cudnngraph import Policy, fuse
from cudnngraph.bench.zoo import one, registry
from cudnngraph.policy import Tune
from cudnngraph.runtime.process import cache_clear
from cudnngraph.settings import override

WAYS: dict[str, tuple[Tune, bool]] = {  # and whether seeds are taken
    "without": ("heuristic", False),
    "with": ("heuristic", True),
    "tuned": ("autotune", False),
}
Found = dict[str, Any]


def made(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A model of the zoo, which has run once, and its inputs."""
    (entry,) = (each for each in registry.entries() if each.name == name)
    model, inputs, _ = one._made(entry, False, torch.device("cuda", 0))
    with torch.no_grad():
        model(*inputs)
    torch.cuda.synchronize()
    return model, tuple(inputs)


def started(model: torch.nn.Module, inputs: Any, way: str, cache: Path) -> tuple[Any, float]:
    """A model fused one way, and the seconds until its first result."""
    tune, seeds = WAYS[way]
    cache_clear()
    start = time.perf_counter()
    with override(cache_dir=cache, seeds=seeds), torch.no_grad():
        fused = fuse(model, inputs, policy=Policy(tune=tune), **SERVED)
        fused(*inputs)
    torch.cuda.synchronize()
    return fused, time.perf_counter() - start


def measure(name: str, ways: list[str], lock: Path) -> Found:
    """Microseconds of a call each way, and how many steps are by seeds."""
    calls: dict[str, Callable[[], object]] = {}
    found: Found = {"model": name}
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        model, inputs = made(name)
        for way in ways:
            with tempfile.TemporaryDirectory() as folder:
                fused, _ = started(model, inputs, way, Path(folder))
            calls[way] = lambda fused=fused: fused(*inputs)  # type: ignore[misc]
            accepted = [[d.reason for d in s.decisions if d.accepted] for s in fused.report.steps]
            found[f"{way} seeds"] = sum(any("a seed" in each for each in r) for r in accepted)
            found["steps"] = len(accepted)
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.flock(file, fcntl.LOCK_EX)
        with torch.no_grad():
            rows = [[us(call) for call in calls.values()] for _ in range(ROUNDS + 1)][1:]
    return found | dict(zip(calls, map(statistics.median, zip(*rows, strict=True)), strict=True))


def row_of(found: Found, ways: list[str]) -> str:
    """A row of the table."""
    first = found[ways[0]]
    cells = [f"{found[way]:.1f} | {found[way] / first:.3f}" for way in ways]
    cells += [f"{found.get('with seeds', 0)} of {found['steps']}"]
    return f"| {found['model']} | {' | '.join(cells)} |"


def apart(*words: str) -> str:
    """The last line of this script in a process of its own."""
    made = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise RuntimeError(made.stderr.strip().splitlines()[-1])
    return made.stdout.strip().splitlines()[-1]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="EfficientNet-B0;SD 1.5 UNet;R3D-18;CLIP ViT-B/32")
    parser.add_argument("--ways", default="without,with")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ways, names = args.ways.split(","), args.models.split(";")
    if args.one:
        if args.warm:
            print(f"{started(*made(args.one), 'with', args.place)[1]:.2f}")
        else:
            print(json.dumps(measure(args.one, ways, args.place)))
        return
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {datetime.date.today()}"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        if args.warm:
            lines += ["", "| model | cold, s | warm, s |", "|---|---|---|"]
            for name in names:
                place = str(Path(folder) / str(len(lines)))
                both = [apart("--warm", "--one", name, "--place", place) for _ in range(2)]
                lines.append(f"| {name} | {' | '.join(both)} |")
        else:
            lock, chosen = str(Path(folder) / "lock"), ("--ways", args.ways)
            heads = [f"{way}, us | of {ways[0]}" for way in ways]
            lines += ["", f"| model | {' | '.join(heads)} | steps by seeds |"]
            lines += ["|" + "---|" * (2 + 2 * len(ways))]
            jobs = pool.map(lambda name: apart("--one", name, "--place", lock, *chosen), names)
            lines += [row_of(json.loads(each), ways) for each in jobs]
    print("\n".join(lines))
    if args.out:
        write(["# Seeds of steps in models of the zoo", "", *lines], args.out)


if __name__ == "__main__":
    main()
