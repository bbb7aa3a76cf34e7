"""Models that no search and no seed of this project has seen, for the zoo's command.

    PYTHONPATH=docs/results cudnngraph bench zoo --registry outsiders:OUTSIDERS --json FILE.json

``IMAGES`` are of timm, 32 images each, ``OTHERS`` of transformers and diffusers; float16, random
weights.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn

from cudnngraph.bench.zoo import registry
from cudnngraph.bench.zoo.entries import Entry, Input, Size, configured, tokens

BATCH = 32
SIZES = {
    "dla60": 224,
    "edgenext_small": 256,
    "ghostnetv3_100": 224,
    "inception_v4": 299,
    "mixnet_l": 224,
    "mobilenetv4_conv_medium": 256,
    "poolformer_s12": 224,
    "pvt_v2_b2": 224,
    "res2net50_26w_4s": 224,
    "resnest50d": 224,
    "rexnet_150": 224,
    "skresnet50": 224,
    "swin_tiny_patch4_window7_224": 224,
    "xcit_small_12_p16_224": 224,
}


def _entry(name: str, side: int) -> Entry:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name)
        return model

    size = Size(build, (Input("images", (BATCH, 3, side, side)),))
    return Entry(name, "timm", torch.float16, 0.0, size, size)


IMAGES = tuple(_entry(name, side) for name, side in SIZES.items())


def _text(
    name: str, model: str, config: str, tokens_: Input, results: str = "logits", **options: Any
) -> Entry:
    fixed = {"use_cache": False} if "CausalLM" in model or model.startswith("GPT2") else {}
    size = configured("transformers", model, config, options, (tokens_,), (results,), **fixed)
    return Entry(name, "transformers", torch.float16, 0.0, size, size)


def _diffusion(name: str, model: str, inputs: tuple[Input, ...], **options: Any) -> Entry:
    size = configured("diffusers", model, "", options, inputs, ("sample",))
    return Entry(name, "diffusers", torch.float16, 0.0, size, size)


_HIDDEN = "last_hidden_state"
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
OTHERS = (
    _text("gpt2", "GPT2LMHeadModel", "GPT2Config", tokens(8, 1024, 50257)),
    _text("opt-125m", "OPTForCausalLM", "OPTConfig", tokens(8, 1024, 50272)),
    _text(
        "deberta-v3-base",
        "DebertaV2Model",
        "DebertaV2Config",
        tokens(8, 512, 128100),
        _HIDDEN,
        **{**_BASE, "intermediate_size": 3072, "relative_attention": True},
        **{"position_buckets": 256, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"},
        **{"share_att_key": True, "max_relative_positions": -1, "position_biased_input": False},
    ),
    _text(
        "mistral-7b, 4 layers",
        "MistralForCausalLM",
        "MistralConfig",
        tokens(1, 2048, 32000),
        num_hidden_layers=4,
    ),
    _text(
        "bloom-560m, 12 layers",
        "BloomModel",
        "BloomConfig",
        tokens(4, 1024, 250880),
        _HIDDEN,
        **{"hidden_size": 1024, "n_layer": 12, "n_head": 16, "use_cache": False},
    ),
    _text(
        "phi-1.5, 6 layers",
        "PhiForCausalLM",
        "PhiConfig",
        tokens(2, 1024, 51200),
        num_hidden_layers=6,
    ),
    _text(
        "mpnet-base",
        "MPNetModel",
        "MPNetConfig",
        tokens(8, 512, 30527),
        _HIDDEN,
        max_position_embeddings=514,
    ),
    _text(
        "xlnet-base",
        "XLNetModel",
        "XLNetConfig",
        tokens(8, 512, 32000),
        _HIDDEN,
        **{"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072, "use_mems_eval": False},
    ),
    _diffusion(
        "ddpm-256",
        "UNet2DModel",
        (Input("sample", (8, 3, 256, 256)), Input("timestep", (8,), 1000)),
        **{"sample_size": 256, "block_out_channels": (128, 128, 256, 256, 512, 512)},
        down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
    ),
    _diffusion(
        "sana-1.6b, 8 layers",
        "SanaTransformer2DModel",
        (
            *(Input("hidden_states", (2, 32, 32, 32)), Input("timestep", (2,), 1000)),
            Input("encoder_hidden_states", (2, 300, 2304)),
        ),
        num_layers=8,
    ),
)
OUTSIDERS = IMAGES + OTHERS

#: What is asked for by name, and is no model of the zoo.
NAMED = (_entry("resnet50", 224),)


def every() -> tuple[Entry, ...]:
    """The zoo's models, those of this file, and what is asked for by name."""
    return (*registry.entries(), *OUTSIDERS, *NAMED)


def entry_of(name: str) -> Entry:
    """One of them."""
    return next(entry for entry in every() if entry.name == name)


def names_of(patterns: str) -> list[str]:
    """Those whose names match one of the patterns, between which are semicolons."""
    names = [entry.name for entry in every()]
    found = [name for each in patterns.split(";") for name in names if fnmatch.fnmatch(name, each)]
    return list(dict.fromkeys(found))
