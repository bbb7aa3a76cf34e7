"""Models of timm that no search and no seed of this project has seen, for the zoo's command.

    PYTHONPATH=docs/results cudnngraph bench zoo --registry outsiders:OUTSIDERS --json FILE.json

float16, 32 images each, random weights.
"""

from __future__ import annotations

import torch
from torch import nn

from cudnngraph.bench.zoo.entries import Entry, Input, Size

IMAGES = 32
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

    size = Size(build, (Input("images", (IMAGES, 3, side, side)),))
    return Entry(name, "timm", torch.float16, 0.0, size, size)


OUTSIDERS = tuple(_entry(name, side) for name, side in SIZES.items())
