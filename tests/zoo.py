"""Architectures of timm and transformers, each trained for a step on a CPU: ``make zoo-training``.

For each it prints the graphs that are left to torch, the share of floating-point operations in
steps of ours, the seconds that importing took, how far the worst gradient is from float64 (as parts
of what eager is off by), and the ops that stay torch's own. Models are narrow and have random
weights; nothing is downloaded. Names of architectures as arguments choose among them.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import cudnngraph as cg
from cudnngraph.models import dynamo
from cudnngraph.ops import aten
from cudnngraph.ops.work import flops_of
from tests import architectures, numerics

Tensor = torch.Tensor
Gradients = dict[str, Any]
Built = tuple[nn.Module, Callable[[], Sequence[Tensor]], Callable[..., Tensor]]

#: A gradient may be off by so many times what eager is, or by a part of all gradients together.
SHARE = 0.5

#: Inputs that eager's own errors are taken of, if those of the first are doubtful.
DRAWS = 4


def _timm(name: str, size: int = 64, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        model = import_module("timm").create_model(name, num_classes=10, **options)
        return model, lambda: [torch.randn(2, 3, size, size)], lambda model, x: model(x)

    return build


_TEXT = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 32},
}
_SEEN = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
}
_GPT2 = {
    "vocab_size": 100,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "use_cache": False,
}
_T5 = {
    **{"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
}
_TWO = {
    "text_config": {**_TEXT, "eos_token_id": 99, "bos_token_id": 0, "pad_token_id": 1},
    "vision_config": _SEEN,
}
_SEGFORMER = {
    **{"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "num_attention_heads": [1, 2, 4, 4]},
    **{"decoder_hidden_size": 32, "num_labels": 10},
}


def _tokens(length: int = 16) -> Tensor:
    return torch.randint(2, 99, (2, length))


def _pixels(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size)


def _transformers(
    model: str,
    config: str,
    options: dict[str, Any],
    result: str = "logits",
    **inputs: Callable[[], Tensor],
) -> Callable[[], Built]:
    def build() -> Built:
        package = import_module("transformers")
        made = getattr(package, model)(getattr(package, config)(**options))
        given = {"use_cache": False} if "use_cache" in options else {}

        def call(model: nn.Module, *tensors: Tensor) -> Tensor:
            named = dict(zip(inputs, tensors, strict=True))
            found: Tensor = getattr(model(**named, **given), result)
            return found

        return made, lambda: [draw() for draw in inputs.values()], call

    return build


def _plain(name: str) -> Callable[[], Built]:
    architecture = architectures.ARCHITECTURES[name]
    return lambda: (
        architecture.built(),
        lambda: architecture.inputs(1),
        lambda model, *data: model(*data),
    )


def _encoder_and_decoder() -> Built:
    model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)
    data = [torch.randn(2, 12, 32), torch.randn(2, 7, 32)]
    return model, lambda: data, lambda model, *given: model(*given)


ZOO: dict[str, Callable[[], Built]] = {
    **{f"plain {name}": _plain(name) for name in architectures.ARCHITECTURES},
    "nn.Transformer": _encoder_and_decoder,
    **{
        name: _timm(name)
        for name in (
            *("resnet18", "resnet10t", "resnest14d", "regnety_002", "nf_resnet26"),
            *("efficientnet_b0", "mobilenetv3_small_100", "mobilevitv2_050"),
        )
    },
    "densenet121": _timm("densenet121", growth_rate=8),
    "efficientnet_b0, dropped": _timm("efficientnet_b0", drop_rate=0.2, drop_path_rate=0.2),
    "convnext": _timm(
        "convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64), drop_path_rate=0.1
    ),
    "vit": _timm("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48),
    "swin": _timm(
        *("swin_tiny_patch4_window7_224", 56),
        **{"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "maxvit": _timm("maxvit_rmlp_pico_rw_256", img_size=64, depths=(1, 1, 1, 1)),
    "xcit": _timm("xcit_nano_12_p16_224", img_size=64, depth=2, embed_dim=32),
    "coat": _timm("coat_lite_tiny", img_size=64),
    "mixer": _timm("mixer_s32_224", img_size=64),
    "beit": _timm("beit_base_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4),
    "eva02": _timm(
        *("eva02_tiny_patch14_224", 56), img_size=56, depth=2, embed_dim=48, num_heads=4
    ),
    "BERT": _transformers("BertForSequenceClassification", "BertConfig", _TEXT, input_ids=_tokens),
    "GPT-2": _transformers("GPT2LMHeadModel", "GPT2Config", _GPT2, input_ids=_tokens),
    "Llama": _transformers(
        *(
            "LlamaForCausalLM",
            "LlamaConfig",
            {**_TEXT, "num_key_value_heads": 2, "use_cache": False},
        ),
        input_ids=_tokens,
    ),
    "T5": _transformers(
        *("T5ForConditionalGeneration", "T5Config", _T5),
        input_ids=_tokens,
        decoder_input_ids=lambda: _tokens(8),
    ),
    **{
        name: _transformers(
            *(f"{kind}Model", f"{kind}Config", _TWO, "logits_per_image"),
            input_ids=_tokens,
            pixel_values=_pixels,
        )
        for name, kind in (("CLIP", "CLIP"), ("SigLIP", "Siglip"))
    },
    "ViT": _transformers(*("ViTForImageClassification", "ViTConfig", _SEEN), pixel_values=_pixels),
    "SegFormer": _transformers(
        *("SegformerForImageClassification", "SegformerConfig", _SEGFORMER),
        pixel_values=lambda: _pixels(64),
    ),
}


def step(model: nn.Module, call: Callable[..., Tensor], data: Sequence[Tensor]) -> Gradients:
    """The gradients of one step, with random numbers of a seed."""
    torch.manual_seed(7)
    y = call(*data)
    scale = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (y * scale.to(y.dtype)).mean().backward()
    return {name: each.grad for name, each in model.named_parameters()}


def worst(mine: Gradients, steps: Sequence[tuple[Gradients, Gradients]]) -> tuple[float, str]:
    """How far from float64 a gradient is, as parts of what it may be off by, and whose it is.

    ``steps`` are eager's gradients with those in float64, for the same inputs and then for others:
    of a small gradient, most of which cancels, what eager is off by once says little.
    """
    exact = steps[0][1]
    there = [name for name, each in exact.items() if each is not None]
    whole = float(torch.cat([exact[name].flatten() for name in there]).norm())
    terms = numerics.LONG_REDUCTION_TERMS
    least = SHARE * whole * numerics.floor(torch.float32, torch.float32, terms=terms)

    def off(found: Gradients, ref: Gradients, name: str) -> float:
        return float((found[name].double() - ref[name]).norm())

    found = (0.0, "")
    for name in there:
        if mine[name] is None or (not mine[name].any() and float(exact[name].norm()) > least):
            return float("inf"), f"{name}, which is 0,"
        limit = numerics.TORCH_FACTOR * max(off(own, ref, name) for own, ref in steps)
        found = max(found, (off(mine, exact, name) / max(limit, least), name))
    return found


def shares() -> tuple[int, int]:
    """Floating-point operations in steps of ours, and in those of torch."""
    ours = torchs = 0
    for report in cg.reports():
        spec = None if report.executable is None else report.executable.spec
        for node in () if spec is None else spec.nodes:
            if node.op == "sdpa_backward":
                (_, h, s, d), (_, _, keys, _) = (spec.tensors[n].shape for n in node.operands[1:3])
                ours += 10 * spec.tensors[node.operands[1]].shape[0] * h * s * d * keys
            elif node.op == "aten":
                like = [spec.tensors[name].empty("meta") for name in node.operands]
                with FlopCounterMode(display=False) as counter:
                    aten.run(dict(node.attrs), like)
                torchs += counter.get_total_flops()
        ours += 0 if spec is None else flops_of(spec)
    return ours, torchs


def trained(name: str) -> bool:
    """Train one architecture, print its row, and return whether it is as it should be."""
    torch.manual_seed(0)
    model, inputs, call = ZOO[name]()
    model.train()
    data = inputs()
    fresh = copy.deepcopy(model)

    def eager(data: Sequence[Tensor], *, wide: bool) -> Gradients:
        made = copy.deepcopy(fresh).double() if wide else copy.deepcopy(fresh)
        given = [x.double() if wide and x.is_floating_point() else x for x in data]
        return step(made, lambda *tensors: call(made, *tensors), given)

    seconds = [0.0]
    real = dynamo.retraced, dynamo.convert

    def timed(function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds[0] += time.perf_counter() - start

        return run

    dynamo.retraced, dynamo.convert = map(timed, real)
    try:
        run = torch.compile(lambda *given: call(model, *given), backend="cudnngraph")
        mine = step(model, run, data)
    finally:
        dynamo.retraced, dynamo.convert = real
    steps = [(eager(data, wide=False), eager(data, wide=True))]
    ratio, whose = worst(mine, steps)
    for draw in range(1, DRAWS if ratio > 1 else 1):
        torch.manual_seed(draw)
        other = inputs()
        steps.append((eager(other, wide=False), eager(other, wide=True)))
        ratio, whose = worst(mine, steps)
    refused = [report for report in cg.reports() if report.refused]
    left = Counter(op.split(".")[1] for report in cg.reports() for op, _ in report.opaque)
    ours, torchs = shares()
    share = ours / max(ours + torchs, 1)
    row = f"{len(refused)} | {100 * share:.1f} | {seconds[0]:.2f} | {ratio:.2f}"
    print(f"| {name} | {row} | {', '.join(f'{n} {op}' for op, n in left.items())} |", flush=True)
    for report in refused:
        print(f"  {report}")
    if ratio > 1:
        print(f"  {name}: the gradient of {whose} is off")
    return not refused and share > 0.9 and ratio <= 1


def main(names: Sequence[str]) -> int:
    """Return the number of architectures that are not as they should be."""
    print("| architecture | graphs left to torch | FLOPs of ours, % | import, s | worst gradient |")
    bad = 0
    for name in names or ZOO:
        torch._dynamo.reset()
        gc.collect()
        bad += not trained(name)
    print(f"{bad} of {len(names or ZOO)} are not as they should be")
    return bad


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(min(main(sys.argv[1:]), 1))
