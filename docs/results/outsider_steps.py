"""Training steps of models that nobody here chose, beside eager and torch.compile, on a GPU.

    python docs/results/outsider_steps.py --json docs/results/outsider-steps.json --jobs 10

Random weights of timm, torchvision, transformers and diffusers; a step is that of h200_steps.py:
forward and loss in bf16 autocast, backward, fused SGD with momentum (AdamW for what is not of
images). Each model has a process of its own; ``--jobs`` of them build a way side by side and then
wait, and one after the other is timed while nothing else runs. First steps are therefore slower
than alone. ``--models`` takes patterns. Results are added to ``--json``; ``--page`` writes
its table alone.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import importlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from h200_masks import write
from h200_steps import classes, first_step, forward_of, images, labels, step_of
from torch import nn

import cudnngraph as cg
from cudnngraph.bench.measure import kernels_of
from cudnngraph.select import workers

WAYS = ("eager", "torch.compile reduce-overhead", "cudnngraph, captured")
BATCH = 32
WORDS = 32000


class Trained(nn.Module):
    """A model with its loss: ``loss_of`` is given the model, x and y."""

    def __init__(self, model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss_of(self.model, x, y)


@dataclass(frozen=True)
class Model:
    """A model to train: ``make`` gives it with its loss, and a batch. ``adam`` is the optimizer."""

    name: str
    make: Callable[[], tuple[Trained, tuple[torch.Tensor, torch.Tensor]]]
    adam: bool = False


def scores(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The cross entropy of a classifier or a segmenter, with an auxiliary head if it has one."""
    out = model(x)
    aux = getattr(out, "aux_logits", None)
    if aux is not None:  # Inception
        return classes(out.logits, y) + 0.4 * classes(aux, y)
    if isinstance(out, dict) and "aux" in out:
        return classes(out["out"], y) + 0.5 * classes(out["aux"], y)
    return classes(out, y)


def _timm(name: str, side: int = 224, batch: int = BATCH) -> Model:
    def make() -> tuple[Trained, tuple[torch.Tensor, torch.Tensor]]:
        import timm

        return Trained(timm.create_model(name), scores), (
            images(batch, side),
            labels(batch, words=1000),
        )

    return Model(name, make)


def _vision(
    name: str, place: str = "", side: int = 224, batch: int = BATCH, **options: Any
) -> Model:
    """Of torchvision; ``place`` is "segmentation" or "video"."""

    def make() -> tuple[Trained, tuple[torch.Tensor, torch.Tensor]]:
        kinds = importlib.import_module(f"torchvision.models{'.' + place if place else ''}")
        made = getattr(kinds, name)(weights=None, **options)
        if place == "segmentation":
            return Trained(made, scores), (images(batch, side), labels(batch, side, side, words=21))
        if place == "video":
            clips = torch.randn(batch, 3, 16, side, side, device="cuda")
            clips = clips.to(memory_format=torch.channels_last_3d)
            return Trained(made, scores), (clips, labels(batch, words=400))
        return Trained(made, scores), (images(batch, side), labels(batch, words=1000))

    return Model(name, make)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A transformer's own loss."""
    loss: torch.Tensor = model(x, labels=y).loss
    return loss


def _text(name: str, model: str, config: str, shape: tuple[int, int], **options: Any) -> Model:
    """Of transformers, words in and words out; the loss is the model's own."""

    def make() -> tuple[Trained, tuple[torch.Tensor, torch.Tensor]]:
        import transformers

        words = options.get("vocab_size", WORDS)
        of = getattr(transformers, config)(**{"vocab_size": words, **options})
        made = getattr(transformers, model)(of)
        x = labels(*shape, words=words)
        return Trained(made, _loss), (x, labels(*shape, words=words))

    return Model(name, make, adam=True)


def _other(
    name: str, model: str, config: str, x: tuple[int, ...], y: tuple[int, ...], words: int, **o: Any
) -> Model:
    """Of transformers, numbers in and classes of shape ``y`` out, by the model's own loss."""

    def make() -> tuple[Trained, tuple[torch.Tensor, torch.Tensor]]:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**o))
        given = torch.randn(x, device="cuda")
        return Trained(made, _loss), (given, labels(*y, words=words))

    return Model(name, make, adam=True)


def _noise(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """What a diffusion model is trained for: the noise that was added."""
    noise = torch.randn_like(x)
    keep = torch.cos(t * (math.pi / 2000)).reshape(-1, *(1,) * (x.dim() - 1))
    added = keep * x + (1 - keep * keep).sqrt() * noise
    return F.mse_loss(model(added, t, return_dict=False)[0].float(), noise)


def _diffusion(name: str, model: str, x: tuple[int, ...], **options: Any) -> Model:
    def make() -> tuple[Trained, tuple[torch.Tensor, torch.Tensor]]:
        import diffusers

        made = getattr(diffusers, model)(**options)
        given = torch.randn(x, device="cuda").contiguous(memory_format=torch.channels_last)
        return Trained(made, _noise), (given, labels(x[0], words=1000))

    return Model(name, make, adam=True)


_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
_LLAMA |= {"num_attention_heads": 16, "num_key_value_heads": 4}
MODELS = (
    _timm("efficientnet_b0"),
    _timm("mobilenetv3_large_100"),
    _timm("regnety_032"),
    _timm("densenet121"),
    _timm("resnest50d"),
    _timm("skresnet50"),
    _timm("res2net50_26w_4s"),
    _timm("hrnet_w18"),
    _timm("swin_tiny_patch4_window7_224"),
    _timm("convnextv2_tiny"),
    _timm("deit3_small_patch16_224"),
    _timm("xcit_small_12_p16_224"),
    _timm("poolformer_s12"),
    _timm("mixnet_l"),
    _timm("rexnet_150"),
    _timm("pvt_v2_b2"),
    _timm("maxvit_tiny_rw_224", batch=16),
    _timm("nfnet_l0"),
    _vision("vgg16_bn"),
    _vision("inception_v3", side=299, init_weights=False),
    _vision("shufflenet_v2_x1_0"),
    _vision("fcn_resnet50", "segmentation", 384, 8, weights_backbone=None, aux_loss=True),
    _vision("lraspp_mobilenet_v3_large", "segmentation", 512, 8, weights_backbone=None),
    _vision("r3d_18", "video", 112, 8),
    _text("bert-base", "BertForMaskedLM", "BertConfig", (8, 512)),
    _text("gpt2", "GPT2LMHeadModel", "GPT2Config", (8, 512), vocab_size=50257, use_cache=False),
    _text(
        *("t5-small", "T5ForConditionalGeneration", "T5Config", (8, 512)),
        decoder_start_token_id=0,
        use_cache=False,
    ),
    _text("llama", "LlamaForCausalLM", "LlamaConfig", (4, 1024), use_cache=False, **_LLAMA),
    _text("qwen3", "Qwen3ForCausalLM", "Qwen3Config", (4, 1024), use_cache=False, **_LLAMA),
    _text(
        *("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", (8, 512)),
        **{"num_hidden_layers": 8, "vocab_size": 50368},
    ),
    _text("deberta-v2", "DebertaV2ForMaskedLM", "DebertaV2Config", (8, 256), **_BASE),
    _other(
        *("wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config"),
        *((8, 80000), (8,), 2),
        apply_spec_augment=False,
    ),
    _other(
        "segformer-b0",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        (8, 3, 512, 512),
        (8, 512, 512),
        2,
    ),
    _other("vit-base", "ViTForImageClassification", "ViTConfig", (32, 3, 224, 224), (32,), 2),
    _diffusion(
        "ddpm-64",
        "UNet2DModel",
        (16, 3, 64, 64),
        sample_size=64,
        block_out_channels=(128, 256, 256, 512),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    ),
)
BY_NAME = {model.name: model for model in MODELS}


def build(model: Model, way: str, seed: int) -> tuple[Callable[[], torch.Tensor], dict[str, Any]]:
    """A step of a model in a way, after five of them, and what was found meanwhile."""
    torch.manual_seed(seed)
    made, batch = model.make()
    trained = made.cuda().train()
    if batch[0].dim() == 4:
        trained = trained.to(memory_format=torch.channels_last)
    step: Any
    step, optimizer = step_of(trained, forward_of(way, trained, "heuristic"), model.adam)
    if way.endswith("captured"):
        step = cg.capture_step(step, optimizers=optimizer, reuse_results=True)
    found = first_step(step, batch)
    before = torch.cuda.memory_allocated()
    state = sum(p.nbytes for p in trained.parameters())
    for _ in range(4):
        step(*batch)
    torch.cuda.synchronize()
    found["gib"] = (torch.cuda.max_memory_allocated() - before + state) / 2**30
    if way.startswith("cudnngraph"):
        found["torch_steps"] = [str(report) for report in cg.reports()]
    return lambda: step(*batch), found


def time_of(step: Callable[[], torch.Tensor], found: dict[str, Any], kernels: bool) -> None:
    """Time a step while nothing else runs."""
    times = []
    for _ in range(3):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(10):
            loss = step()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 10)
    found["ms"], found["loss"] = statistics.median(times), float(loss)
    if kernels:
        found["kernels"] = kernels_of(step, 40)


def one(model: Model, ways: list[str], out: Path) -> None:
    """Build each way of a model, say so, time it when told, and let go of it."""
    found: dict[str, Any] = {}
    for number, way in enumerate(ways):
        step = None
        try:
            step, found[way] = build(model, way, 0)
        except Exception as error:
            found[way] = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        print(model.name, way, str(found[way])[:300], file=sys.stderr, flush=True)
        torch.cuda.synchronize()
        out.with_suffix(f".{number}.ready").touch()
        while not out.with_suffix(f".{number}.go").exists():
            time.sleep(0.05)
        if step is not None:
            time_of(step, found[way], way != "eager")
        out.write_text(json.dumps(found))
        step = None
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        out.with_suffix(f".{number}.timed").touch()


def until(done: Callable[[], bool], limit_s: float) -> bool:
    """Wait for something, and say whether it came."""
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def batch_of(models: list[Model], args: Any, folder: Path) -> dict[str, Any]:
    """Measure some models: each way built side by side, then timed one model after the other."""
    running = []
    for model in models:
        out = folder / f"{model.name}.json"
        command = [sys.executable, __file__, "--one", str(out), "--models", model.name]
        command += ["--ways", ";".join(args.ways), "--jobs", str(len(models))]
        log = (args.logs / f"{model.name}.log").open("w")
        running.append((out, subprocess.Popen(command, stderr=log)))
    end = time.monotonic() + args.limit
    for number in range(len(args.ways)):

        def there(out: Path, process: Any, what: str, number: int = number) -> bool:
            return out.with_suffix(f".{number}.{what}").exists() or process.poll() is not None

        left = max(1.0, end - time.monotonic())
        until(lambda: all(there(*each, "ready") for each in running), left)
        for out, process in running:
            if not there(out, process, "ready"):
                process.kill()
                process.wait()
        for out, process in running:
            out.with_suffix(f".{number}.go").touch()
            if not until(lambda: there(out, process, "timed"), 30.0):  # noqa: B023
                process.kill()
                process.wait()
    results = {}
    for model, (out, process) in zip(models, running, strict=True):
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        results[model.name] = json.loads(out.read_text()) if out.exists() else {}
        if process.returncode:
            results[model.name]["process"] = {"error": f"ended with {process.returncode}"}
        shown = {way: round(row.get("ms", 0), 2) for way, row in results[model.name].items()}
        print(model.name, shown, flush=True)
    return results


def page(results: dict[str, Any]) -> list[str]:
    """The table."""
    lines = ["# Training steps of models that nobody here chose", ""]
    lines += [f"- {said}" for said in results["runs"]]
    lines += ["", *(__doc__ or "").split("\n\n", 2)[2].strip().split("\n"), ""]
    head = "| model | eager, ms | torch.compile, ms | ours, ms | torch.compile / ours "
    lines += [f"{head}| GiB of the three | first step, s: torch.compile, ours |"]
    lines += ["|---|---|---|---|---|---|---|"]
    ratios = []
    for name, rows in results["models"].items():
        got = [rows.get(way, {"error": "did not end in time"}) for way in WAYS]
        shown = [f"{row['ms']:.2f}" if "ms" in row else "-" for row in got]
        ratio = "-"
        if all("ms" in row for row in got[1:]):
            ratios.append(got[1]["ms"] / got[2]["ms"])
            ratio = f"{ratios[-1]:.2f}"
        gib = ", ".join(f"{row['gib']:.2f}" if "gib" in row else "-" for row in got)
        first = ", ".join(f"{row['first_s']:.0f}" if "first_s" in row else "-" for row in got[1:])
        lines.append(f"| {name} | {' | '.join(shown)} | {ratio} | {gib} | {first} |")
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        lines[2:2] = [
            f"torch.compile's reduce-overhead takes {mean:.2f} times as long as ours in a captured "
            f"step (geometric mean of {len(ratios)} models), {min(ratios):.2f} at worst.",
            "",
        ]
    errors = [
        f"- {name}, {way}: {row['error']}"
        for name, rows in results["models"].items()
        for way, row in rows.items()
        if "error" in row
    ]
    return [*lines, *(["", "What failed:", "", *errors] if errors else []), ""]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="*", help="patterns, by commas")
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=list(WAYS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a batch may build")
    parser.add_argument("--one", type=Path, help="measure here")
    parser.add_argument("--json", type=Path, default=Path("outsider-steps.json"))
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--page", type=Path, help="write the table of --json, and measure nothing")
    args = parser.parse_args()
    if args.one:
        workers.one_of(args.jobs)
        one(BY_NAME[args.models], args.ways, args.one)
        return
    results: dict[str, Any] = {"runs": [], "models": {}}
    if args.json.exists():
        results = json.loads(args.json.read_text())
    if args.page:
        write(page(results), args.page)
        return
    patterns = args.models.split(",")
    todo = [m for m in MODELS if any(fnmatch.fnmatch(m.name, each) for each in patterns)]
    results["runs"].append(
        f"{datetime.date.today()}: {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"cuDNN {torch.backends.cudnn.version()}; `--models '{args.models}' --jobs {args.jobs}`"
    )
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(todo), args.jobs):
            results["models"].update(batch_of(todo[first : first + args.jobs], args, Path(folder)))
            args.json.write_text(json.dumps(results, indent=1))
    print("\n".join(page(results)))


if __name__ == "__main__":
    main()
