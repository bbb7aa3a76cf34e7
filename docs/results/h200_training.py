"""Measure training steps on a GPU and write the results page.

    python docs/results/h200_training.py --out docs/results/h200-training.md

One step is a forward and the gradients of the input and of every parameter. Each case runs as a
user's torch modules and as fused ones that share their parameters: captured in CUDA graphs, which
gives the GPU's time, and called one step after the other, which gives what a training loop sees.
``--only TEXT`` takes the cases whose name has the text.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cudnngraph as cg
from cudnngraph.backend import env
from cudnngraph.device import timing

BF16, LAST = torch.bfloat16, torch.channels_last
POLICY = cg.Policy(tune="autotune")
STEPS, WALL_ROUNDS, ROUNDS = 50, 9, 15

Forward = Callable[..., torch.Tensor]


@dataclass
class Case:
    """A forward by each contender, the first of them torch eager, and the tensors to go with it."""

    name: str
    forwards: dict[str, Forward]
    inputs: tuple[torch.Tensor, ...]
    parameters: dict[str, tuple[torch.Tensor, ...]]

    def step(self, which: str, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One forward and backward."""
        y = self.forwards[which](*self.inputs)
        return y, *torch.autograd.grad(y, (*self.inputs, *self.parameters[which]), grad)


def normal(*shape: int, layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """A leaf of random bf16 numbers."""
    made = torch.randn(shape, device="cuda", dtype=BF16)
    return made.contiguous(memory_format=layout).requires_grad_()


def as_trained(model: nn.Module) -> nn.Module:
    """Weights in bf16 and channels_last, batch norms in float32, as mixed precision has them."""
    model = model.to("cuda", BF16).to(memory_format=LAST)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return model.train()


def of_modules(name: str, eager: nn.Module, fused: nn.Module, x: torch.Tensor) -> Case:
    """A case of two modules."""
    modules = {"eager": eager, "fused": fused}
    parameters = {key: tuple(module.parameters()) for key, module in modules.items()}
    return Case(name, dict(modules), (x,), parameters)


def block() -> Case:
    """Conv, batch norm, relu."""
    eager = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128))
    eager = as_trained(eager.append(nn.ReLU(inplace=True)))
    fused = cg.FusedConvBlock.from_torch(*copy.deepcopy(eager), policy=POLICY)
    x = normal(32, 128, 28, 28, layout=LAST)
    return of_modules("Conv-BN-ReLU (32,128,28,28)", eager, fused, x)


class Bottleneck(nn.Module):
    """ResNet's block, from torch's modules or from fused ones."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As torchvision's."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + x)


class FusedBottleneck(nn.Module):
    """The same of three fused blocks."""

    def __init__(self, of: Bottleneck) -> None:
        super().__init__()
        make = cg.FusedConvBlock.from_torch
        self.first = make(of.conv1, of.bn1, nn.ReLU(), policy=POLICY)
        self.second = make(of.conv2, of.bn2, nn.ReLU(), policy=POLICY)
        self.third = make(of.conv3, of.bn3, nn.ReLU(), policy=POLICY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, C, H, W), the residual too."""
        return self.third(self.second(self.first(x)), x)


def bottleneck() -> Case:
    """Three convolutions and a residual."""
    eager = as_trained(Bottleneck(256, 64))
    fused = FusedBottleneck(copy.deepcopy(eager))
    x = normal(32, 256, 56, 56, layout=LAST)
    return of_modules("bottleneck 256-64-256 (32,256,56,56)", eager, fused, x)


def transposed() -> Case:
    """Transposed convolution, batch norm, relu."""
    eager = nn.Sequential(nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False), nn.BatchNorm2d(128))
    eager = as_trained(eager.append(nn.ReLU(inplace=True)))
    fused = cg.FusedConvTransposeBlock.from_torch(*copy.deepcopy(eager), policy=POLICY)
    x = normal(8, 256, 64, 64, layout=LAST)
    return of_modules("ConvT k4 s2-BN-ReLU (8,256,64,64) to 128", eager, fused, x)


def transposed_bias() -> Case:
    """Transposed convolution, bias, relu."""
    eager = as_trained(nn.Sequential(nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.ReLU(inplace=True)))
    conv, act = copy.deepcopy(eager)
    fused = cg.FusedConvTransposeBlock.from_torch(conv, None, act, policy=POLICY)
    x = normal(8, 256, 64, 64, layout=LAST)
    return of_modules("ConvT k4 s2-bias-ReLU (8,256,64,64) to 128", eager, fused, x)


def attention() -> Case:
    """Causal attention by torch's backends and by ours."""

    def by(backend: SDPBackend) -> Forward:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

    fused = cg.FusedSDPA(causal=True, policy=POLICY)
    forwards: dict[str, Forward] = {
        "flash": by(SDPBackend.FLASH_ATTENTION),
        "torch cudnn": by(SDPBackend.CUDNN_ATTENTION),
        "fused": fused,
    }
    inputs = tuple(normal(4, 32, 4096, 128) for _ in range(3))
    return Case("SDPA causal B4 H32 S4096 D128", forwards, inputs, dict.fromkeys(forwards, ()))


CASES = (block, bottleneck, transposed, transposed_bias, attention)


def wall_us(case: Case, which: str, grad: torch.Tensor) -> float:
    """Microseconds a step, one after the other."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        case.step(which, grad)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS * 1e6


def walls(case: Case, grad: torch.Tensor) -> dict[str, float]:
    """Microseconds a step of each contender, called in turn."""
    for name in case.forwards:
        wall_us(case, name, grad)
    samples: dict[str, list[float]] = {name: [] for name in case.forwards}
    for _ in range(WALL_ROUNDS):
        for name in case.forwards:
            samples[name].append(wall_us(case, name, grad))
    return {name: statistics.median(each) for name, each in samples.items()}


def memory(case: Case, which: str, grad: torch.Tensor) -> tuple[int, int]:
    """Bytes that the forward keeps for the backward besides its result, and the step's peak."""

    def requested(when: str) -> int:
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])

    torch.cuda.synchronize()
    before = requested("current")
    y = case.forwards[which](*case.inputs)
    held = requested("current") - before - y.numel() * y.element_size()
    del y
    torch.cuda.reset_peak_memory_stats()
    case.step(which, grad)
    torch.cuda.synchronize()
    return held, requested("peak") - before


def as_it_is(make: Callable[[], Case]) -> dict[str, object]:
    """Wall time and memory of a step on the default stream."""
    case = make()
    y = case.forwards["fused"](*case.inputs)
    grad = torch.randn_like(y)
    del y
    start = time.perf_counter()
    case.step("fused", grad)
    torch.cuda.synchronize()
    search_s = time.perf_counter() - start
    wall = walls(case, grad)
    with torch.autograd.set_multithreading_enabled(False):
        in_thread = walls(case, grad)
    memories = {name: memory(case, name, grad) for name in case.forwards}
    return {
        "name": case.name,
        "wall_us": wall,
        "wall_in_thread_us": in_thread,
        "saved_bytes": {name: each[0] for name, each in memories.items()},
        "peak_bytes": {name: each[1] for name, each in memories.items()},
        "compile_s": search_s,
    }


def captured(make: Callable[[], Case]) -> dict[str, object]:
    """GPU time of a step, and the differences of results, on a stream of its own.

    autograd remembers a leaf's stream, and a capture must not touch another.
    """
    with torch.cuda.stream(torch.cuda.Stream()):
        case = make()
        y = case.forwards["fused"](*case.inputs)
        grad = torch.randn_like(y)
        del y
        first, *_ = case.forwards
        ours, theirs = case.step("fused", grad), case.step(first, grad)
        differences = [
            float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())
            for a, b in zip(ours, theirs, strict=True)
        ]
        del ours, theirs
        launches = [lambda name=name: case.step(name, grad) for name in case.forwards]
        stream = torch.cuda.current_stream()
        each = [timing.Captured([launch], stream) for launch in launches]
        for name, one in zip(case.forwards, each, strict=True):
            assert one.captured, f"{case.name}: {name} cannot be captured"
        samples, rounds = timing.samplers(each, ROUNDS)
        gpu = timing.interleave(samples, rounds=rounds, drop_over=math.inf)
    return {"gpu_us": dict(zip(case.forwards, gpu, strict=True)), "difference": differences}


def row_text(row: dict) -> str:
    """The lines of a row: one for each of torch's contenders."""

    def times(key: str, name: str, digits: int) -> str:
        theirs, ours = row[key][name], row[key]["fused"]
        return f"| {theirs:.{digits}f} | {ours:.{digits}f} | {ours / theirs:.2f} "

    def mib(key: str, name: str) -> str:
        return f"| {row[key][name] / 2**20:.1f} | {row[key]['fused'] / 2**20:.1f} "

    return "\n".join(
        f"| {row['name']} | {name} "
        + times("gpu_us", name, 1)
        + times("wall_us", name, 0)
        + times("wall_in_thread_us", name, 0)
        + mib("saved_bytes", name)
        + mib("peak_bytes", name)
        + "|"
        for name in row["gpu_us"]
        if name != "fused"
    )


def page(rows: list[dict], failed: list[str]) -> str:
    """The results page."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    lines = [
        "# Training steps",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
        f"{env.cudnn_version()}, frontend {env.frontend_version()}; {today}.",
        "",
        "```",
        "python docs/results/h200_training.py --out docs/results/h200-training.md",
        "```",
        "",
        "One step: forward, and the gradients of the input and of all parameters; bf16 data and "
        "weights, channels_last, batch norms in float32. GPU: µs of a CUDA graph of the step, "
        "median of interleaved replays. Wall: µs a step of a loop without capture on the default "
        f"stream, median of {WALL_ROUNDS} interleaved loops of {STEPS}; in thread: the same under "
        "`torch.autograd.set_multithreading_enabled(False)`, where autograd wakes no thread of its "
        "own. Saved: MiB that "
        "the forward keeps besides its result; peak: MiB allocated at most over a step. torch is "
        'eager with `cudnn.benchmark`; the fused modules run with `Policy(tune="autotune")`.',
        "",
        "| case | torch | GPU torch | GPU fused | ratio | wall torch | wall fused | ratio "
        "| in thread torch | in thread fused | ratio "
        "| saved torch | saved fused | peak torch | peak fused |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(row_text, rows),
        "",
    ]
    for row in rows:
        worst = max(row["difference"])
        lines.append(
            f"- {row['name']}: relative difference from torch at most {worst:.1e} over the result "
            f"and {len(row['difference']) - 1} gradients; the backward was tuned in "
            f"{row['compile_s']:.1f} s"
        )
    if failed:
        lines += ["", "## Failed", "", *(f"- {each}" for each in failed)]
    return "\n".join([*lines, ""])


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    data = args.json or (args.out.with_suffix(".json") if args.out else None)
    kept = json.loads(data.read_text()) if data and data.exists() else []
    rows, failed = {row["name"]: row for row in kept}, []
    for make in CASES:
        if args.only not in make().name:
            continue
        try:
            row = as_it_is(make)
            torch.cuda.empty_cache()
            row |= captured(make)
            rows[row["name"]] = row
            print(row_text(row), flush=True)
        except Exception as error:  # the other rows are worth having
            failed.append(f"{make.__name__}: {type(error).__name__}: {error}"[:1500])
            print(failed[-1], flush=True)
        torch.cuda.empty_cache()
    text = page(list(rows.values()), failed)
    if args.out:  # what a person wrote under "Notes" stays
        _, mark, notes = (args.out.read_text() if args.out.exists() else "").partition(
            "\n## Notes\n"
        )
        args.out.write_text(text + mark + notes)
    if data:
        data.write_text(json.dumps(list(rows.values()), indent=1))


if __name__ == "__main__":
    main()
