"""Measure what a call costs the host, and a training step by the clock; write the results page.

    python docs/results/h200_host.py --out docs/results/h200-host.md

On a GPU the host is measured on data so small that the GPU waits for it, and a training step on
(32, 128, 28, 28) in bfloat16 by the clock. Without a GPU the same calls run on the CPU, where the
reference executor's own work is in the numbers. A time is the least of several loops, ours and
torch's in turn.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cudnngraph.bench.host import BESIDE, inference, training

Call = Callable[[], object]
LOOPS, SECONDS = 15, 0.05


def least_us(calls: dict[str, Call], device: torch.device, *, wait: bool) -> dict[str, float]:
    """Microseconds of each call: the least of the loops, taken in turn.

    ``wait`` has the GPU's work finished within the time; else only the host's part is in it.
    """

    def sync() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    counts = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        sync()
        start = time.perf_counter()
        for _ in range(20):
            call()
        sync()
        # On a GPU few enough that the queue of launches never fills and holds the host up.
        most = 50 if device.type == "cuda" and not wait else 10_000
        counts[name] = max(5, min(most, int(20 * SECONDS / (time.perf_counter() - start))))
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(LOOPS):
        for name, call in calls.items():
            sync()
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            if wait:
                sync()
            took = (time.perf_counter() - start) / counts[name] * 1e6
            best[name] = min(best[name], took)
            sync()
    return best


def training_calls(
    device: torch.device, shape: tuple[int, ...], *, backward: bool = True
) -> dict[str, Call]:
    """Ours and torch's, with the norm and without."""
    calls: dict[str, Call] = {}
    for name, norm in (("Conv-BN-ReLU", True), ("Conv-ReLU", False)):
        ours, theirs, _ = training(device, shape, norm=norm, backward=backward)
        calls |= {name: ours, f"torch: {name}": theirs}
    return calls


def rows(device: torch.device) -> dict[str, dict[str, float]]:
    """Every table."""
    tables = {
        "inference": least_us(inference(device), device, wait=False),
        "training, forward": least_us(
            training_calls(device, (1, 8, 4, 4), backward=False), device, wait=False
        ),
        "training, forward and backward": least_us(
            training_calls(device, (1, 8, 4, 4)), device, wait=False
        ),
    }
    if device.type == "cuda":
        big = training_calls(device, (32, 128, 28, 28))
        tables["training step by the clock, (32, 128, 28, 28)"] = least_us(big, device, wait=True)
    return tables


TARGETS_US = {"bound": 8.0, "exe(...)": 12.0, "module eval": 16.0}


def page(answer: dict) -> str:
    """The results page."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    lines = [
        "# The host's part",
        "",
        f"{answer['device']}, torch {answer['torch']}; {today}.",
        "",
        "```",
        "python docs/results/h200_host.py --out docs/results/h200-host.md",
        "```",
        "",
        "µs a call: the least of several loops, ours and torch's in turn. Except for the training "
        "step by the clock the data are so small that the GPU waits for the host.",
    ]
    for title, times in answer["tables"].items():
        lines += [
            "",
            f"## {title[0].upper()}{title[1:]}",
            "",
            "| call | µs | / torch's |",
            "|---|---|---|",
        ]
        for name, us in times.items():
            other = times.get(BESIDE.get(name, f"torch: {name}"))
            ratio = "" if other is None else f"{us / other:.2f}"
            wanted = TARGETS_US.get(name) if answer["gpu"] and title == "inference" else None
            limit = "" if wanted is None else f" (wanted: {wanted:g} at most)"
            lines.append(f"| {name} | {us:.1f}{limit} | {ratio} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True
    gpu = device.type == "cuda"
    if not gpu:
        torch.set_num_threads(1)
    answer = {
        "device": torch.cuda.get_device_name() if gpu else "CPU, the reference executor",
        "gpu": gpu,
        "torch": torch.__version__,
        "tables": rows(device),
    }
    text = page(answer)
    if args.out:  # what a person wrote under "Notes" stays
        _, mark, notes = (args.out.read_text() if args.out.exists() else "").partition(
            "\n## Notes\n"
        )
        args.out.write_text(text + mark + notes)
    if args.json:
        args.json.write_text(json.dumps(answer, indent=1))
    print(text)


if __name__ == "__main__":
    main()
