"""Training steps of whole models, beside eager and torch.compile, on a GPU.

    python docs/results/h200_steps.py --out docs/results/h200-steps.md

A step is the forward in bf16 autocast, the loss, the backward and a fused SGD with momentum (AdamW
for the GPT), gradients set to none. Model and loss are compiled together. Each model runs in a
process of its own, its contenders one after the other on copies of the same weights. Each reports
its time a step, the most memory that was allocated after its first step (weights, gradients and
state with it, and what a capture allocates), how long its first step took, and its loss after the
last step. ``--models`` and ``--ways`` choose, of which "torch.compile max-autotune" takes minutes;
``--breakdown`` adds the kernels of a step. With ``--warm`` torch.compile compiles all models side
by side before, so its first steps take less.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from h200_masks import write
from h200_whole import breakdown
from torch import nn

import cudnngraph as cg
from cudnngraph.bench.models import UNet
from cudnngraph.models import dynamo

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
WAYS = (
    "eager",
    "eager, captured",
    "torch.compile",
    "torch.compile reduce-overhead",
    "cudnngraph",
    "cudnngraph reduce-overhead",
    "cudnngraph, captured",
)
ASKED_MS = {"resnet50": 9.3, "gpt": 15.0, "deeplab": 14.6}


class Block(nn.Module):
    """A transformer's block, norms in front."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, 2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT of 12 blocks, 768 wide, with a vocabulary of 50,304."""

    def __init__(self, blocks: int = 12, width: int = 768, words: int = 50304) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, 12) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        logits: torch.Tensor = self.head(self.norm(y))
        return logits


def classes(out: Any, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a model's logits, or of a segmentation model's."""
    out = out["out"] if isinstance(out, dict) else out
    if out.dim() == 3:  # words
        out, y = out.flatten(0, 1), y.flatten()
    return F.cross_entropy(out, y)


def images(batch: int, size: int) -> torch.Tensor:
    """Random images, channels_last."""
    made = torch.randn(batch, 3, size, size, device="cuda")
    return made.to(memory_format=torch.channels_last)


def labels(*shape: int, words: int) -> torch.Tensor:
    """Random classes."""
    return torch.randint(words, shape, device="cuda")


def resnet50() -> tuple[nn.Module, Batch, Loss]:
    """ResNet-50 of torchvision, batch 64, 224 x 224."""
    import torchvision

    return torchvision.models.resnet50(), (images(64, 224), labels(64, words=1000)), classes


def gpt() -> tuple[nn.Module, Batch, Loss]:
    """12 blocks, 768 wide, batch 8, 1,024 tokens."""
    return GPT(), (labels(8, 1024, words=50304), labels(8, 1024, words=50304)), classes


def deeplab() -> tuple[nn.Module, Batch, Loss]:
    """DeepLabV3 on a ResNet-50 of torchvision, batch 8, 384 x 384."""
    import torchvision

    model = torchvision.models.segmentation.deeplabv3_resnet50(
        weights=None, weights_backbone=None, num_classes=21
    )
    return model, (images(8, 384), labels(8, 384, 384, words=21)), classes


def unet() -> tuple[nn.Module, Batch, Loss]:
    """The project's U-Net, 64 to 1,024 channels, batch 8, 256 x 256."""
    return UNet(64, 4), (images(8, 256), labels(8, 256, 256, words=2)), classes


def convnext() -> tuple[nn.Module, Batch, Loss]:
    """ConvNeXt-T of torchvision, batch 64, 224 x 224."""
    import torchvision

    return torchvision.models.convnext_tiny(), (images(64, 224), labels(64, words=1000)), classes


MODELS = {f.__name__: f for f in (resnet50, gpt, deeplab, unet, convnext)}


class WithLoss(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module, loss_of: Loss) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss_of(self.model(x), y)


def step_of(
    model: nn.Module, forward: Callable[..., Any], adam: bool
) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    """A step of training, and its optimizer."""
    optimizer: torch.optim.Optimizer
    if adam:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer


def first_step(step: Callable[..., Any], batch: Batch) -> dict[str, Any]:
    """Take the first step: its seconds. Peaks of memory are counted from then on, after plans are
    built and before graphs are captured."""
    start = time.perf_counter()
    step(*batch)
    torch.cuda.synchronize()
    found = {"first_s": time.perf_counter() - start}
    torch.cuda.reset_peak_memory_stats()
    return found


def forward_of(way: str, model: nn.Module, tune: str) -> Callable[..., Any]:
    """The model, with its loss, as a way runs it."""
    if way.startswith("cudnngraph"):
        policy = cg.Policy(tune=tune)  # type: ignore[arg-type]

        def backend(module: Any, given: Any) -> Any:
            mode = "reduce-overhead" if "reduce-overhead" in way else None
            return dynamo.backend(module, given, options={"policy": policy}, mode=mode)

        return torch.compile(model, backend=backend)
    if way.startswith("torch.compile"):
        return torch.compile(model, mode=way.removeprefix("torch.compile").strip() or None)
    return model


def measure(name: str, way: str, made: tuple[nn.Module, Batch, Loss], args: Any) -> dict[str, Any]:
    """What a way of running a model's step takes."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    first, batch, loss_of = made
    model = copy.deepcopy(first).cuda().train()
    if name != "gpt":
        model = model.to(memory_format=torch.channels_last)
    step: Any
    forward = forward_of(way, WithLoss(model, loss_of), args.tune)
    step, optimizer = step_of(model, forward, name == "gpt")
    if way.endswith("captured"):
        step = cg.capture_step(step, optimizers=optimizer, reuse_results=True)
    found = first_step(step, batch)
    for _ in range(4):
        step(*batch)
    torch.cuda.synchronize()
    times, host = [], []
    for _ in range(args.rounds):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        start = time.perf_counter()
        for _ in range(10):
            loss = step(*batch)
        host.append((time.perf_counter() - start) * 100)
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 10)
    found["ms"], found["host_ms"] = statistics.median(times), statistics.median(host)
    found["gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    found["loss"] = float(loss)
    if args.breakdown and way == args.breakdown:
        found["breakdown"] = breakdown(lambda: step(*batch))
    if way == "cudnngraph":
        reports = cg.reports()
        found["reports"] = [str(each) for each in reports]
    return found


def of_model(name: str, args: Any) -> None:
    """Write what each way takes, for one model."""
    torch.manual_seed(0)
    made = MODELS[name]()
    found: dict[str, Any] = {}
    for way in args.ways:
        try:
            found[way] = measure(name, way, made, args)
        except Exception as error:
            found[way] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        shown = {k: v for k, v in found[way].items() if k not in ("reports", "breakdown")}
        print(name, way, json.dumps(shown), file=sys.stderr, flush=True)
        args.one.write_text(json.dumps(found))


def lines_of(name: str, found: dict[str, Any]) -> list[str]:
    """The table of a model."""
    doc = (MODELS[name].__doc__ or name).rstrip(".")
    asked = f" Asked: {ASKED_MS[name]} ms." if name in ASKED_MS else ""
    lines = [f"## {name}", "", f"{doc}.{asked}", ""]
    lines += ["| | ms | host, ms | GiB | first step, s | loss |", "|---|---|---|---|---|---|"]
    for way, row in found.items():
        if "error" in row:
            lines.append(f"| {way} | {row['error']} | | | | |")
        else:
            loss = f"{row['loss']:.4f}" if math.isfinite(row["loss"]) else str(row["loss"])
            lines.append(
                f"| {way} | {row['ms']:.2f} | {row['host_ms']:.2f} | {row['gib']:.2f} "
                f"| {row['first_s']:.1f} | {loss} |"
            )
    for way, row in found.items():
        if "breakdown" in row:
            lines += ["", f"Kernels of a step, {way}:", "", *row["breakdown"]]
    return [*lines, ""]


def warm(args: Any) -> None:
    """Fill torch.compile's cache with what it makes of all models, side by side."""
    ways = ";".join(way for way in args.ways if way.startswith("torch.compile"))
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for name in args.models:
            command = [sys.executable, __file__, "--one", str(Path(folder) / f"{name}.json")]
            command += ["--models", name, "--ways", ways, "--rounds", "1"]
            running.append(subprocess.Popen(command))
        until = time.monotonic() + args.limit
        for process in running:
            try:
                process.wait(max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=list(WAYS))
    parser.add_argument("--tune", default="heuristic")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--breakdown", default="")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a model")
    parser.add_argument("--one", type=Path, help="measure here, and write JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        of_model(args.models[0], args)
        return
    lines = [
        "# Training steps of whole models",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}; {datetime.date.today()}. Made by `python "
        f"docs/results/{Path(__file__).name} {' '.join(sys.argv[1:])}`.",
        "",
    ]
    if args.warm:
        warm(args)
    for name in args.models:
        one = (args.out or Path("steps.md")).with_suffix(f".{name}.json")
        command = [sys.executable, __file__, "--one", str(one), "--models", name]
        command += ["--ways", ";".join(args.ways), "--tune", args.tune]
        command += ["--rounds", str(args.rounds), "--breakdown", args.breakdown]
        found = {}
        try:
            subprocess.run(command, timeout=args.limit, check=True)
        except subprocess.SubprocessError as error:
            found = {"process": {"error": str(error)[-200:]}}
        made = lines_of(name, {**(json.loads(one.read_text()) if one.exists() else {}), **found})
        print("\n".join(made), flush=True)
        lines += made
    if args.out:
        write(lines, args.out)


if __name__ == "__main__":
    main()
