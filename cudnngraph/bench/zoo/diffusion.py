"""Entries of image generation: denoisers, and the decoders of their latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .entries import Called, Entry, Input, Size, configured

F16, BF16 = torch.float16, torch.bfloat16
_SAMPLE = ("sample",)


def _step(count: int, name: str = "timestep") -> Input:
    return Input(name, (count,), 1000)


def _unet(options: Mapping[str, Any], *inputs: Input) -> Size:
    return configured("diffusers", "UNet2DConditionModel", "", options, inputs, _SAMPLE)


def _denoised(n: int, side: int, length: int, width: int) -> tuple[Input, ...]:
    text = Input("encoder_hidden_states", (n, length, width))
    return (Input("sample", (n, 4, side, side)), _step(n), text)


def _sdxl(options: Mapping[str, Any], side: int, width: int, pooled: int) -> Size:
    sizes = Input("added_cond_kwargs.time_ids", (2, 6), 1024)
    whole = Input("added_cond_kwargs.text_embeds", (2, pooled))
    return _unet(options, *_denoised(2, side, 77, width), whole, sizes)


def _vae(widths: tuple[int, ...], layers: int, groups: int, latents: tuple[int, ...]) -> Size:
    options = {
        "block_out_channels": widths,
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "layers_per_block": layers,
        "norm_num_groups": groups,
        "latent_channels": latents[1],
    }
    given = (Input("z", latents),)
    size = configured("diffusers", "AutoencoderKL", "", options, given, _SAMPLE)

    def build() -> nn.Module:
        whole: Any = size.build()
        return Called(whole.model, ("z",), _SAMPLE, method="decode")

    return Size(build, given)


def _dit(options: Mapping[str, Any], n: int, side: int) -> Size:
    given = (Input("hidden_states", (n, 4, side, side)), _step(n), _step(n, "class_labels"))
    options = {"in_channels": 4, **options}
    return configured("diffusers", "DiTTransformer2DModel", "", options, given, _SAMPLE)


def _pixart(options: Mapping[str, Any], side: int, length: int, width: int) -> Size:
    text = Input("encoder_hidden_states", (2, length, width))
    given = (Input("hidden_states", (2, 4, side, side)), text, _step(2))
    options = {**options, "caption_channels": width}
    conditions = {"resolution": None, "aspect_ratio": None}
    model = "PixArtTransformer2DModel"
    return configured("diffusers", model, "", options, given, _SAMPLE, added_cond_kwargs=conditions)


def _sd3(options: Mapping[str, Any], side: int, length: int, width: int, pooled: int) -> Size:
    given = (
        Input("hidden_states", (2, 16, side, side)),
        Input("encoder_hidden_states", (2, length, width)),
        Input("pooled_projections", (2, pooled)),
        _step(2),
    )
    named = {"joint_attention_dim": width, "pooled_projection_dim": pooled, "in_channels": 16}
    options = {**named, "out_channels": 16, "patch_size": 2, **options}
    return configured("diffusers", "SD3Transformer2DModel", "", options, given, _SAMPLE)


class _Placed(nn.Module):
    """Flux with the places of a square image's patches, and of a text's tokens, as buffers."""

    def __init__(self, model: nn.Module, side: int, length: int) -> None:
        super().__init__()
        self.model = model
        places = torch.zeros(side, side, 3)
        places[..., 1] += torch.arange(side)[:, None]
        places[..., 2] += torch.arange(side)[None, :]
        self.register_buffer("places", places.view(-1, 3))
        self.register_buffer("of_text", torch.zeros(length, 3))

    def forward(self, **named: Any) -> Any:
        """As Flux, without its ``img_ids`` and ``txt_ids``."""
        return self.model(img_ids=self.places, txt_ids=self.of_text, **named)


def _flux(options: Mapping[str, Any], side: int, length: int, width: int, pooled: int) -> Size:
    channels = options["in_channels"]
    given = (
        Input("hidden_states", (1, side * side, channels)),
        Input("encoder_hidden_states", (1, length, width)),
        Input("pooled_projections", (1, pooled)),
        Input("timestep", (1,), 2),
        Input("guidance", (1,), 2),
    )
    named = {"joint_attention_dim": width, "pooled_projection_dim": pooled}
    options = {**named, "guidance_embeds": True, **options}
    size = configured("diffusers", "FluxTransformer2DModel", "", options, given, _SAMPLE)

    def build() -> nn.Module:
        whole: Any = size.build()
        placed = _Placed(whole.model, side, length)
        return Called(placed, [each.name for each in given], _SAMPLE)

    return Size(build, given)


_SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
_SMALL_SDXL = {
    **_SDXL,
    **{"sample_size": 16, "block_out_channels": (16, 32, 32), "norm_num_groups": 8},
    **{"transformer_layers_per_block": (1, 1, 2), "attention_head_dim": (2, 4, 4)},
    **{"cross_attention_dim": 24, "addition_time_embed_dim": 8, "layers_per_block": 1},
    "projection_class_embeddings_input_dim": 6 * 8 + 16,
}
_WIDTHS = (128, 256, 512, 512)

DIFFUSION = (
    Entry(
        "SD 1.5 UNet",
        "diffusers",
        F16,
        859.521,
        _unet({"sample_size": 64, "cross_attention_dim": 768}, *_denoised(2, 64, 77, 768)),
        _unet(
            {
                **{"sample_size": 16, "cross_attention_dim": 24, "layers_per_block": 1},
                **{"block_out_channels": (16, 16, 32, 32), "norm_num_groups": 8},
                "attention_head_dim": 2,
            },
            *_denoised(2, 16, 7, 24),
        ),
    ),
    Entry(
        "SDXL UNet",
        "diffusers",
        F16,
        2567.464,
        _sdxl(_SDXL, 128, 2048, 1280),
        _sdxl(_SMALL_SDXL, 16, 24, 16),
    ),
    Entry(
        "SD 1.5 VAE decoder, 512",
        "diffusers",
        F16,
        83.654,
        _vae(_WIDTHS, 2, 32, (1, 4, 64, 64)),
        _vae((16, 32), 1, 8, (1, 4, 8, 8)),
    ),
    Entry(
        "SDXL VAE decoder, 1024",
        "diffusers",
        BF16,
        83.654,
        _vae(_WIDTHS, 2, 32, (1, 4, 128, 128)),
        _vae((16, 16, 32), 1, 8, (1, 4, 8, 8)),
    ),
    Entry(
        "DiT-XL/2, 256",
        "diffusers",
        F16,
        749.826,
        _dit(
            {
                **{"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 28},
                **{"out_channels": 8, "sample_size": 32, "activation_fn": "gelu-approximate"},
            },
            *(8, 32),
        ),
        _dit(
            {
                **{"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2},
                **{"out_channels": 8, "sample_size": 8, "activation_fn": "gelu-approximate"},
            },
            *(2, 8),
        ),
    ),
    Entry(
        "PixArt-XL/2, 512",
        "diffusers",
        F16,
        610.856,
        _pixart({"sample_size": 64}, 64, 120, 4096),
        _pixart(
            {
                **{"sample_size": 8, "num_layers": 2, "num_attention_heads": 4},
                **{"attention_head_dim": 8, "cross_attention_dim": 32},
            },
            *(8, 7, 24),
        ),
    ),
    Entry(
        "SD3-medium",
        "diffusers",
        BF16,
        2028.328,
        _sd3(
            {
                **{"sample_size": 128, "num_layers": 24, "attention_head_dim": 64},
                **{"num_attention_heads": 24, "caption_projection_dim": 1536},
                "pos_embed_max_size": 192,
            },
            *(128, 333, 4096, 2048),
        ),
        _sd3(
            {
                **{"sample_size": 8, "num_layers": 2, "attention_head_dim": 8},
                **{"num_attention_heads": 4, "caption_projection_dim": 32},
                "pos_embed_max_size": 12,
            },
            *(8, 7, 24, 16),
        ),
    ),
    Entry(
        "Flux.1 blocks, 2 and 4",
        "diffusers",
        BF16,
        1310.155,
        _flux({"num_layers": 2, "num_single_layers": 4, "in_channels": 64}, *(64, 512, 4096, 768)),
        _flux(
            {
                **{"num_layers": 1, "num_single_layers": 2, "in_channels": 16},
                **{"attention_head_dim": 16, "num_attention_heads": 2},
                "axes_dims_rope": (4, 6, 6),
            },
            *(4, 7, 24, 16),
        ),
        cut="2 of 19 double blocks and 4 of 38 single ones, 1024 x 1024 pixels",
    ),
)
