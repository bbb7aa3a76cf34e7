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
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg

Call = Callable[[], object]
LAST = torch.channels_last
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


def inference(device: torch.device) -> dict[str, Call]:
    """conv + bias + relu on little data, in every way to call it; batch norm where it says so."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    x = torch.randn(1, 8, 4, 4, device=device, dtype=dtype).to(memory_format=LAST)
    conv = nn.Conv2d(8, 8, 3, padding=1).to(device, dtype).to(memory_format=LAST)
    conv.requires_grad_(False)
    w, b = conv.weight, conv.bias
    g = cg.Graph("conv_bias_relu")
    given = [g.input(name, like=t) for name, t in (("x", x), ("w", w), ("b", b))]
    g.output("y", g.conv_bias_act(*given, padding=1))
    exe = g.compile(device)
    out = exe(x, w, b)
    bound = exe.bind(x, w, b, out)
    plain = cg.FusedConvBlock.from_torch(conv, None, nn.ReLU()).eval()
    bn = nn.BatchNorm2d(8).to(device, dtype)
    bn.requires_grad_(False)
    normed = cg.FusedConvBlock.from_torch(conv, bn, nn.ReLU()).eval()
    by_torch, normed_by_torch = nn.Sequential(conv, nn.ReLU()).eval(), normed.to_torch().eval()
    functional = cg.functional
    calls: dict[str, Call] = {
        "bound": bound,
        "exe(...)": lambda: exe(x, w, b),
        "exe.run(...)": lambda: exe.run(x, w, b, out),
        "functional": lambda: functional.conv_bias_act(x, w, b, padding=1),
        "functional, out=": lambda: functional.conv_bias_act_into(out, x, w, b, padding=1),
        "module eval": lambda: plain(x),
        "module eval, batch norm": lambda: normed(x),
        "torch: F.relu(F.conv2d(...))": lambda: F.relu(F.conv2d(x, w, b, padding=1)),
        "torch: modules": lambda: by_torch(x),
        "torch: modules, batch norm": lambda: normed_by_torch(x),
    }
    if device.type == "cuda":
        pairs = ((1, 1), (1, 1), (1, 1))
        calls["torch: cudnn_convolution_relu"] = lambda: torch.cudnn_convolution_relu(
            x, w, b, *pairs, 1
        )
    return calls


def training(
    device: torch.device, shape: tuple[int, ...], *, backward: bool = True
) -> dict[str, Call]:
    """Conv-BN-ReLU, and without the norm: forward and, where asked, backward."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    channels = shape[1]
    x = torch.randn(shape, device=device, dtype=dtype).to(memory_format=LAST).requires_grad_()
    grad = torch.randn(shape, device=device, dtype=dtype).to(memory_format=LAST)
    calls: dict[str, Call] = {}
    for name, norm in (("Conv-BN-ReLU", "batch"), ("Conv-ReLU", None)):
        blocks = [
            cg.FusedConvBlock(channels, channels, 3, padding=1, bias=norm is None, norm=norm)
            .to(device, dtype)
            .to(memory_format=LAST)
            for _ in range(2)
        ]
        for block in blocks:
            if norm is not None:
                block.norm.float()  # as under autocast
        ours, theirs = blocks[0].train(), blocks[1].to_torch().train()

        def step(model: nn.Module) -> Call:
            given = [x, *model.parameters()]
            if backward:
                return lambda: torch.autograd.grad(model(x), given, grad)
            return lambda: model(x)

        calls[name] = step(ours)
        calls[f"torch: {name}"] = step(theirs)
    return calls


def rows(device: torch.device) -> dict[str, dict[str, float]]:
    """Every table."""
    tables = {
        "inference": least_us(inference(device), device, wait=False),
        "training, forward": least_us(
            training(device, (1, 8, 4, 4), backward=False), device, wait=False
        ),
        "training, forward and backward": least_us(
            training(device, (1, 8, 4, 4)), device, wait=False
        ),
    }
    if device.type == "cuda":
        big = training(device, (32, 128, 28, 28))
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
            other = times.get(f"torch: {name}")
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
