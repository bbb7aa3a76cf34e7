"""Measure the way from a model on the GPU to its first result, in new processes; write the page.

    python docs/results/h200_startup.py --out docs/results/h200-startup.md

Each contender runs in a process of its own, once to fill its caches on disk and then ``RUNS`` times
with them. The clock starts when the model and the input are on the GPU, and stops when the first
result is there. ``--plans`` takes a folder that has the plans already: then there is no search, and
no cold time of ours. ``--quick`` takes a small model, ``--device cpu`` runs without a GPU.
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
from pathlib import Path

import torch

RUNS = 2
WAYS = {
    "fused": "a new process, plans from the cache",
    "fused, captured": "the same, and captured in a CUDA graph",
    "torch.compile": "reduce-overhead with freezing, its caches warm",
    "eager": "no compilation",
}
ASKED_S, ASKED_TIMES = 3.0, 5.0


def child(way: str, device: str, quick: bool) -> dict:
    """The times of one process, in seconds."""
    begun = time.perf_counter()
    gpu = device == "cuda"
    if way.startswith("fused"):
        import cudnngraph as cg
    from cudnngraph.bench import models

    torch.manual_seed(0)
    make = (lambda: models.ResNet((1, 1), 16, 10)) if quick else models.resnet50
    net = models.randomized(make()).eval().to(device, torch.float16 if gpu else torch.float32)
    net = net.to(memory_format=torch.channels_last)
    shape = (2, 3, 64, 64) if quick else (32, 3, 224, 224)
    x = torch.randn(shape, device=device).to(next(net.parameters()).dtype)
    x = x.to(memory_format=torch.channels_last)
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        if way.startswith("fused"):
            policy = cg.Policy(tune="autotune" if gpu else None)
            run = cg.fuse(net, x, policy=policy, capture=gpu and "captured" in way, check=False)
        elif way == "torch.compile":
            import torch._inductor.config as inductor

            inductor.freezing = True
            run = torch.compile(net, mode="reduce-overhead" if gpu else "default")
        else:
            run = net
        y = run(x)
        if gpu:
            torch.cuda.synchronize()
    assert bool(y.isfinite().all())
    return {"first_s": time.perf_counter() - start, "import_s": start - begun}


def run(way: str, folder: str, args: argparse.Namespace) -> dict:
    """A process of one contender, whose caches are in ``folder``."""
    environ = {
        **os.environ,
        "CUDNNGRAPH_CACHE_DIR": args.plans or os.path.join(folder, "plans"),
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    command = [sys.executable, __file__, "--child", way, "--device", args.device]
    start = time.perf_counter()
    done = subprocess.run(
        command + ["--quick"] * args.quick, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-2000:]}")
    made = json.loads(done.stdout.strip().splitlines()[-1])
    return {**made, "process_s": time.perf_counter() - start}


def page(rows: dict[str, dict], device: str, *, searched: bool) -> str:
    """The results page."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    lines = [
        "# Start-up",
        "",
        f"{device}, torch {torch.__version__}; {today}.",
        "",
        "```",
        "python docs/results/h200_startup.py --out docs/results/h200-startup.md",
        "```",
        "",
        "ResNet-50, batch 32, 224 x 224, fp16: seconds in a new process from the model on the GPU "
        f"to its first result, mean of {RUNS}; with cold caches (the first process of all), and "
        "with warm ones.",
        "",
        "| way | cold | warm | whole process, warm | |",
        "|---|---|---|---|---|",
    ]
    for way, row in rows.items():
        cold = "-" if way.startswith("fused") and not searched else f"{row['cold']['first_s']:.2f}"
        lines.append(
            f"| {way} | {cold} | {row['first_s']:.2f} | {row['process_s']:.2f} | {WAYS[way]} |"
        )
    ours, theirs = rows["fused"]["first_s"], rows["torch.compile"]["first_s"]
    verdict = "met" if ours <= ASKED_S and theirs / ours >= ASKED_TIMES else "not met"
    lines += [
        "",
        f"Asked: at most {ASKED_S:g} s, and {ASKED_TIMES:g} times faster than torch.compile's warm "
        f"start. Measured: {ours:.2f} s, {theirs / ours:.1f} times: {verdict}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plans", type=os.path.abspath)
    parser.add_argument("--child", choices=WAYS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.device, args.quick)))
        return
    rows: dict[str, dict] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            cold = run(way, folder, args)
            warm = [run(way, folder, args) for _ in range(RUNS)]
        means = {key: statistics.mean(each[key] for each in warm) for key in cold}
        rows[way] = {**means, "cold": cold, "warm": warm}
        print(way, json.dumps(rows[way]), flush=True)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU (reference)"
    text = page(rows, name, searched=args.plans is None)
    if args.out:
        args.out.write_text(text)
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
