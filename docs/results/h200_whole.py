"""Whole models with generated kernels and without, beside eager and torch.compile, on a GPU.

    python docs/results/h200_whole.py --models unet,efficientnet_b0 --out docs/results/h200-whole.md

Needs diffusers for the UNet and torchvision or timm for the others. Every contender runs as a CUDA
graph, in turns, and is built with an empty cache; the breakdown sums the kernels of one call by
name.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from h200_guard import unet
from h200_masks import write

import cudnngraph as cg
from cudnngraph.bench.measure import kernels_of
from cudnngraph.device import rules
from cudnngraph.device.import_rules import ANY
from cudnngraph.settings import override

Call = Callable[[], object]
CALLS = 20
#: Fields of the policy and thresholds of the device for each way.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kernels": ({}, {}),
    "slices in place": ({}, {"convolution_slices_in_place": True}),
    "parts in place": ({}, {"convolution_parts_in_place": True}),
    "odd channels": ({}, {"padded_channels_min": ANY}),
    "torch steps": ({"kernels": False}, {}),
}


def images(name: str, batch: int = 32) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A model of torchvision, or else of timm, channels_last in fp16."""
    import torchvision

    if hasattr(torchvision.models, name):
        net = getattr(torchvision.models, name)(num_classes=1000)
    else:
        import timm

        net = timm.create_model(name)
    net = net.eval().cuda().half()
    x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.float16)
    last = torch.channels_last
    return net.to(memory_format=last), (x.to(memory_format=last),)


def captured(call: Call) -> Call:
    """A call as a CUDA graph, which keeps the tensors of the call."""
    stream: Any = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.synchronize()

    def replay(kept: Call = call) -> object:
        return graph.replay()

    return replay


def times_ms(calls: dict[str, Call]) -> dict[str, float]:
    """The median time of a call of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(8):
        for name, call in calls.items():
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            for _ in range(CALLS):
                call()
            b.record()
            b.synchronize()
            if number:
                found[name].append(a.elapsed_time(b) / CALLS)
    return {name: statistics.median(each) for name, each in found.items()}


def breakdown(call: Call) -> list[str]:
    """Lines of a table: the kernels of one call by name, those that take longest first."""
    rows = [f"| {name} | {count} | {us:.0f} |" for name, count, us in kernels_of(call, 30)]
    return ["| kernel | launches | us |", "|---|---|---|", *rows]


def measure(name: str, tunes: Sequence[str], ways: Sequence[str], compiled: bool) -> list[str]:
    """The lines of a model."""
    torch.manual_seed(0)
    model, given = unet() if name == "unet" else images(name)
    said: dict[str, str] = {}
    with torch.no_grad():
        calls: dict[str, Call] = {"eager": captured(lambda: model(*given))}
        made: dict[str, Any] = {}
        for tune, way in ((tune, way) for tune in tunes for way in ways):
            label = f"{tune}, {way}"
            options, values = WAYS[way]
            cg.cache_clear()
            start = time.perf_counter()
            policy = cg.Policy(tune=tune, **options)  # type: ignore[arg-type]
            with (
                tempfile.TemporaryDirectory() as folder,
                override(cache_dir=Path(folder)),
                rules.changed(**values),
            ):
                fused = cg.fuse(model, given, policy=policy, check=False)
                calls[label] = captured(lambda fused=fused: fused(*given))  # type: ignore[misc]
            took = time.perf_counter() - start
            kinds = Counter(
                step.kind if "memory" not in step.decisions[-1].reason else "view"
                for step in fused.bound(*given).executable.steps
            )
            said[label] = f"{took:.1f} s, {dict(kinds)}"
            made[label] = fused
        if compiled:
            start = time.perf_counter()
            torch._inductor.config.freezing = True
            quick = torch.compile(model)
            quick(*given)
            said["torch.compile"] = f"{time.perf_counter() - start:.1f} s"
            calls["torch.compile"] = captured(lambda: quick(*given))
        found = times_ms(calls)
        lines = [f"## {name}", "", "| | ms | of eager | built |", "|---|---|---|---|"]
        lines += [
            f"| {label} | {ms:.3f} | {ms / found['eager']:.2f} | {said.get(label, '')} |"
            for label, ms in found.items()
        ]
        first = next(iter(made))
        lines += ["", f"Kernels of a call, {first}:", "", *breakdown(calls[first])]
    return lines


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="unet,efficientnet_b0,densenet121")
    parser.add_argument("--tunes", default="heuristic")
    parser.add_argument("--ways", default=";".join(WAYS), help="some of them, with ; between")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        "# Whole models with generated kernels",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}; {datetime.date.today()}.",
        "",
    ]
    for name in args.models.split(","):
        try:
            made = measure(name, args.tunes.split(","), args.ways.split(";"), args.compile)
        except Exception as error:
            made = [f"## {name}", "", f"{type(error).__name__}: {str(error)[:500]}"]
        print("\n".join(made), flush=True)
        lines += [*made, ""]
    if args.out:
        write(lines, args.out)


if __name__ == "__main__":
    main()
