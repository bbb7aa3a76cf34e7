"""Measure what checking every plan before its first use costs, in new processes; write the page.

    python docs/results/h200_guard.py --out docs/results/h200-guard.md

writes the page and, beside it, what it is made of as JSON; ``--rows FILE ...`` makes the page of
such files alone. Each line is a process of its own with empty caches, plans' and driver's alike,
but for the warm starts, which read what the line before has kept. Baselines are the same with
``verify="off"``. The memory is what the GPU has less while workers are there. ``--only NAME,NAME``
takes some lines alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

F16 = torch.float16


def graph(channels: int) -> Any:
    """A convolution with its epilogue."""
    import cudnngraph as cg

    g = cg.Graph(f"single_{channels}")
    x = g.input("x", (8, channels, 28, 28), F16, layout="channels_last")
    w = g.input("w", (channels, channels, 3, 3), F16, layout="channels_last")
    b = g.input("b", (1, channels, 1, 1), F16)
    g.output("y", g.relu(g.conv(x, w, padding=1) + b))
    return g


def resnet() -> tuple[torch.nn.Module, Any]:
    """ResNet-50, batch 32."""
    from cudnngraph.bench import models

    net = models.randomized(models.resnet50()).eval().cuda().half()
    x = torch.randn(32, 3, 224, 224, device="cuda", dtype=F16)
    return net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


def unet() -> tuple[torch.nn.Module, Any]:
    """The UNet of Stable Diffusion 1.5 with random weights, for two images of 512 x 512."""
    for name in ("transformers", "peft", "accelerate"):  # not needed, and slow
        sys.modules[name] = None  # type: ignore[assignment]
    from diffusers import UNet2DConditionModel

    net = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    net = net.eval().cuda().half().to(memory_format=torch.channels_last)
    sample = torch.randn(2, 4, 64, 64, device="cuda", dtype=F16)
    words = torch.randn(2, 77, 768, device="cuda", dtype=F16)
    time_step = torch.tensor(10, device="cuda")

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x, t, w, return_dict=False)[0]
            return out

    return Plain().eval(), (sample, time_step, words)


def child(name: str, verify: str) -> dict[str, Any]:
    """Seconds of one process, and what it saw."""
    import cudnngraph as cg
    from cudnngraph.select import guard, workers

    torch.manual_seed(0)
    tune: Any = "autotune" if name == "search" else "heuristic"
    policy = cg.Policy(tune=tune, verify=verify)  # type: ignore[arg-type]
    started = 0.0
    if name.endswith("again"):  # of a process whose workers are there
        start = time.perf_counter()
        graph(48).compile("cuda", policy=policy)
        started = time.perf_counter() - start
    build: Callable[[], Any]
    if name.startswith("single"):
        torch.zeros(1, device="cuda")
        build = lambda: graph(64).compile("cuda", policy=policy)  # noqa: E731
    else:
        model, inputs = unet() if name.startswith("unet") else resnet()
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        with torch.no_grad():
            model(*given)  # eager's own start is in no line
        build = lambda: cg.fuse(model, given, policy=policy, check=False)  # noqa: E731
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    mine = torch.cuda.memory_reserved()
    start = time.perf_counter()
    made = build()
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    torch.cuda.empty_cache()
    pools = list(workers._pools.values())
    count = sum(pool._threads for pool in pools)
    used = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - mine)
    steps = (made.report.steps if hasattr(made, "report") else made.steps) or ()
    plans = [step for step in steps if step.choice is not None]
    told = {
        "seconds": taken,
        "single_s": started,
        "plans": len(plans),
        "verified": sum(step.verified is not None for step in plans),
        "workers": count,
        "used_gib": used / 2**30,
        "how": guard.how(policy),
    }
    if count and name == "resnet":
        time.sleep(workers.IDLE_S + 5)
        torch.cuda.empty_cache()
        told["idle_gib"] = (free - torch.cuda.mem_get_info()[0]) / 2**30
    return told


LINES = {
    "single": "a graph of one convolution, cold",
    "single warm": "the same, from a warm cache",
    "resnet": "`fuse` of ResNet-50, batch 32, by heuristics, cold",
    "resnet again": "`fuse` of ResNet-50, cold, in a process that has compiled another graph",
    "resnet warm": "`fuse` of ResNet-50 from a warm cache",
    "unet": "`fuse` of the UNet of Stable Diffusion 1.5 by heuristics, cold",
    "unet again": "the UNet, cold, in a process that has compiled another graph",
    "search": "the search of ResNet-50 (`autotune`), cold",
}
RUNS = {"single": 2, "single warm": 2, "resnet warm": 2}


def run(name: str, verify: str, folder: str) -> dict[str, Any]:
    """A process of one line, whose caches are in ``folder``."""
    environ = {
        **os.environ,
        "CUDNNGRAPH_CACHE_DIR": os.path.join(folder, "plans"),
        "CUDA_CACHE_PATH": os.path.join(folder, "driver"),
    }
    told = subprocess.run(
        [sys.executable, __file__, "--child", name, "--verify", verify],
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
    )
    if told.returncode:
        return {"failed": (told.stderr.strip().splitlines() or ["?"])[-1]}
    found: dict[str, Any] = json.loads(told.stdout.strip().splitlines()[-1])
    return found


def measured(only: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Every line, with and without the check."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in LINES:
        if only and name not in only.split(","):
            continue
        rows[name] = {}
        for verify in ("off", "isolated"):
            warm = name.endswith("warm")
            made = []
            with tempfile.TemporaryDirectory() as folder:
                if warm:
                    run(name.replace(" warm", "_fill"), verify, folder)
                for _ in range(RUNS.get(name, 1)):
                    with tempfile.TemporaryDirectory() as fresh:
                        made.append(run(name.replace(" ", "_"), verify, folder if warm else fresh))
            rows[name][verify] = made
            print(name, verify, json.dumps(made), flush=True)
    return rows


def page(rows: dict[str, dict[str, list[dict[str, Any]]]], machine: str) -> str:
    """The results as Markdown."""

    def best(name: str, verify: str, field: str = "seconds") -> float:
        found = [each[field] for each in rows[name][verify] if "failed" not in each]
        return statistics.median(found) if found else float("nan")

    lines = [
        "# What the check of every plan costs",
        "",
        f"{machine}.",
        "",
        "```",
        "python docs/results/h200_guard.py --out docs/results/h200-guard.md",
        "```",
        "",
        "Seconds in a new process with empty caches, the driver's too; one run each, or the median "
        "of "
        + ", ".join(f"{count} ({name})" for name, count in RUNS.items() if name in rows)
        + ".",
        "",
        "| what | not checked | checked | times | s more | plans | workers |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in rows:
        off, on = best(name, "off"), best(name, "isolated")
        plans, verified = (best(name, "isolated", each) for each in ("plans", "verified"))
        lines.append(
            f"| {LINES[name]} | {off:.3f} | {on:.3f} | {on / off:.2f} | {on - off:+.3f} "
            f"| {verified:.0f} of {plans:.0f} checked | {best(name, 'isolated', 'workers'):.0f} |"
        )
    for name in ("single", "resnet"):
        for each in rows.get(name, {}).get("isolated", ())[:1]:
            many, idle = each["workers"], each.get("idle_gib")
            text = f"{each['used_gib'] / many:.2f} GiB for each of {many} workers after `{name}`"
            later = "" if idle is None else f", and {idle:.2f} GiB less in all after they had ended"
            lines += ["", f"The GPU had less memory free: {text}{later}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", type=Path, nargs="*", default=[])
    parser.add_argument("--child")
    parser.add_argument("--verify", default="off")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child.replace("_", " "), args.verify)))
        return
    if args.rows:
        found = [json.loads(path.read_text()) for path in args.rows]
        rows = {name: row for each in found for name, row in each["rows"].items()}
        rows, machine = {name: rows[name] for name in LINES if name in rows}, found[0]["machine"]
    else:
        cores = len(os.sched_getaffinity(0))
        machine = (
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {cores} cores; "
            f"{datetime.date.today()}"
        )
        rows = measured(args.only)
    text = page(rows, machine)
    print(text)
    if args.out:
        args.out.write_text(text)
        told = {"machine": machine, "rows": rows}
        args.out.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
