"""Fused optimizers over the parameters of whole models: torch's kernels and generated ones.

    python docs/results/h200_updates.py --out docs/results/h200-updates.md

Each update is a CUDA graph, timed in turns; the bytes are those that it has to move, each once.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from h200_masks import write
from h200_whole import captured, times_ms

import cudnngraph as cg
from cudnngraph.device import rules
from cudnngraph.runtime import updates
from cudnngraph.settings import override

Sizes = Sequence[tuple[int, ...]]
Make = Callable[[Any], torch.optim.Optimizer]
BLOCKS = (4, 16, 1 << 20)  # of a region, for each multiprocessor
OPTIMIZERS: dict[str, tuple[Make, int]] = {  # and how often it moves a parameter's bytes
    "AdamW": (lambda p: torch.optim.AdamW(p, 1e-3, fused=True), 7),
    "SGD, momentum": (lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, fused=True), 5),
}


def gpt() -> Sizes:
    """12 blocks, 768 wide, 50,304 words."""
    block = [(768,)] * 2 + [(2304, 768), (2304,), (768, 768), (768,)]
    block += [(768,)] * 2 + [(3072, 768), (3072,), (768, 3072), (768,)]
    return [(50304, 768), (1024, 768), *block * 12, (768,), (768,)]


def resnet50() -> Sizes:
    """ResNet-50 of torchvision."""
    import torchvision

    return [tuple(p.shape) for p in torchvision.models.resnet50().parameters()]


MODELS: dict[str, Callable[[], Sizes]] = {"gpt": gpt, "resnet50": resnet50}


def stepped(sizes: Sizes, make: Make, *, ours: bool) -> Callable[[], object]:
    """A step of an optimizer as a CUDA graph."""
    params = [torch.nn.Parameter(torch.randn(size, device="cuda")) for size in sizes]
    optimizer = make(params)
    for param in params:
        param.grad = torch.randn_like(param)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True

    def step() -> None:
        with updates.by_kernels() if ours else nullcontext():
            optimizer.step()

    return captured(step)


def measure(model: str, name: str) -> list[str]:
    """The rows of an optimizer of a model."""
    sizes, (make, moves) = MODELS[model](), OPTIMIZERS[name]
    count = sum(torch.Size(size).numel() for size in sizes)
    calls = {"torch": stepped(sizes, make, ours=False)}
    for blocks in BLOCKS:
        updates._updates.clear()
        cg.cache_clear()
        with (
            tempfile.TemporaryDirectory() as folder,
            override(cache_dir=Path(folder)),
            rules.changed(kernel_region_blocks_per_sm=blocks),
        ):
            calls[f"ours, {blocks} blocks"] = stepped(sizes, make, ours=True)
        assert all(updates._updates.values()), "generated kernels alone"
    source = torch.empty(moves * count // 2, device="cuda")
    target = torch.empty_like(source)
    calls["a copy of as many bytes"] = captured(lambda: target.copy_(source))
    found = times_ms(calls)
    return [
        f"| {model}, {name} | {way} | {1000 * ms:.1f} | {ms / found['torch']:.2f} "
        f"| {4e-9 * moves * count / ms:.2f} |"
        for way, ms in found.items()
    ]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        "# Updates of optimizers",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {datetime.date.today()}.",
        "",
        "| | | us | of torch's | TB/s |",
        "|---|---|---|---|---|",
    ]
    for model in args.models.split(","):
        for name in OPTIMIZERS:
            made = measure(model, name)
            print("\n".join(made), flush=True)
            lines += made
    if args.out:
        write(lines, args.out)


if __name__ == "__main__":
    main()
