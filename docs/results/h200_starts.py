"""Time cold and warm starts of models of the zoo, one at a time, and write a table.

    PYTORCH_NVML_BASED_CUDA_CHECK=1 python docs/results/h200_starts.py \\
        --models "VGG-16;EfficientNet-B0" --out starts.md

Each start has a process of its own, forked from one that has imported the models' libraries and has
not touched the GPU: the variable keeps torch from that. It makes the model there, and then times
from the call of ``cg.fuse``, or of torch.compile (reduce-overhead, freezing), to the first result.
A cold one has empty caches; a warm one is the next process, with what the cold one kept. Nothing
else runs meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cudnngraph.bench.zoo.entries import Entry
from cudnngraph.bench.zoo.one import Job, _first, _made
from cudnngraph.bench.zoo.registry import ZOO
from cudnngraph.bench.zoo.ways import WAYS

STARTS = (("ours, cold", "heuristic"), ("ours, warm", "heuristic"), ("theirs", "reduce-overhead"))


def start(entry: Entry, way: str, folder: Path, told: Path) -> None:
    """Time one start, in a process of its own, and write down seconds and the peak of memory."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    device = torch.device("cuda", 0)
    torch.backends.cudnn.benchmark = True
    model, inputs, _ = _made(entry, False, device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plans = folder / "plans"
    plans.mkdir(mode=0o700, exist_ok=True)
    given = {"heuristic": str(plans)}
    job = Job("cold", "", entry.name, (way,), "cuda", False, str(told), given)
    seconds, _, _, fused = _first(WAYS[way], job, model, inputs)
    found: dict[str, Any] = {"s": seconds, "gib": torch.cuda.max_memory_allocated() / (1 << 30)}
    if fused is not None and fused.report is not None:
        found["plans"] = fused.report.tier
    told.write_text(json.dumps(found))
    os._exit(0)


def measure(entry: Entry, limit_s: float, *, ours: bool) -> dict[str, dict[str, Any]]:
    """All starts of a model, or only ``ours``; one that takes too long or fails has no entry."""
    found = {}
    with tempfile.TemporaryDirectory() as made:
        for name, way in STARTS:
            if ours and way != "heuristic":
                continue
            told = Path(made) / f"{name}.json"
            given = (entry, way, Path(made), told)
            process = multiprocessing.get_context("fork").Process(target=start, args=given)
            process.start()
            process.join(limit_s)
            if process.is_alive():
                process.kill()
                process.join()
            if told.exists():
                found[name] = json.loads(told.read_text())
            print(f"{entry.name}, {name}: {found.get(name, 'none')}", flush=True)
    return found


def table(rows: Sequence[tuple[str, dict[str, dict[str, Any]]]]) -> str:
    """Seconds of all starts, and the memory of ours."""
    lines = [
        "| model | cold, s | torch.compile cold, s | torch.compile / ours | warm, s | cold, GiB "
        "| warm, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in rows:
        cold, warm, theirs = (found.get(each, {}) for each, _ in STARTS)
        ratio = f"{theirs['s'] / cold['s']:.2f}" if cold and theirs else "-"
        shown = [_shown(cold, "s"), _shown(theirs, "s"), ratio, _shown(warm, "s")]
        shown += [_shown(cold, "gib"), _shown(warm, "gib")]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(found: dict[str, Any], key: str) -> str:
    return f"{found[key]:.1f}" if key in found else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models that are asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", required=True, help="names of the zoo, between semicolons")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a start")
    parser.add_argument("--ours", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, required=True, help="where the table goes")
    args = parser.parse_args(arguments)
    known = {entry.name: entry for entry in ZOO}
    entries = [known[name] for name in args.models.split(";")]
    for entry in entries:
        entry.load()
    rows = []
    for entry in entries:
        rows.append((entry.name, measure(entry, args.limit, ours=args.ours)))
        args.out.write_text(f"{table(rows)}\n")


if __name__ == "__main__":
    main()
