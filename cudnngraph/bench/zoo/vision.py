"""Entries on images and videos."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from .detector import Detector
from .entries import Entry, Input, Size, configured, images, vision

F16 = torch.float16


def _pixels(batch: int, high: int, wide: int) -> tuple[Input, ...]:
    return (Input("pixel_values", (batch, 3, high, wide)),)


def _video(options: Mapping[str, Any]) -> nn.Module:
    made: nn.Module = importlib.import_module("torchvision.models.video").r3d_18(
        weights=None, **options
    )
    return made


def _detr(options: Mapping[str, Any], inputs: tuple[Input, ...]) -> Size:
    backbone = {
        "use_timm_backbone": True,
        "backbone": "resnet50",
        "use_pretrained_backbone": False,
        "backbone_config": None,
    }
    results = ("logits", "pred_boxes")
    given = {**backbone, **options}
    return configured(
        "transformers", "DetrForObjectDetection", "DetrConfig", given, inputs, results
    )


def _segformer(options: Mapping[str, Any], inputs: tuple[Input, ...]) -> Size:
    model, config = "SegformerForSemanticSegmentation", "SegformerConfig"
    return configured("transformers", model, config, options, inputs, ("logits",))


def _dinov2(options: Mapping[str, Any], inputs: tuple[Input, ...]) -> Size:
    results = ("last_hidden_state",)
    return configured("transformers", "Dinov2Model", "Dinov2Config", options, inputs, results)


CONVOLUTIONAL = (
    vision("EfficientNet-B0", "timm", "efficientnet_b0", 5.289, 32, 224),
    vision("EfficientNetV2-S", "timm", "tf_efficientnetv2_s", 21.458, 32, 384),
    vision("MobileNetV3-L", "timm", "mobilenetv3_large_100", 5.483, 32, 224),
    vision("RegNetY-3.2GF", "torchvision", "regnet_y_3_2gf", 19.436, 32, 224),
    vision("DenseNet-121", "torchvision", "densenet121", 7.979, 32, 224),
    vision("VGG-16", "timm", "vgg16", 138.358, 32, 224, {"mlp_ratio": 0.0625, "num_classes": 10}),
    vision("HRNet-W18", "timm", "hrnet_w18", 21.299, 32, 224),
    vision(
        "NFNet-F0", "timm", "dm_nfnet_f0", 71.489, 32, 256, {"width_factor": 0.25, "group_size": 16}
    ),
    vision(
        "ConvNeXt-V2-T",
        "timm",
        "convnextv2_tiny",
        28.635,
        32,
        224,
        {"depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64)},
    ),
    Entry(
        "YOLO-like detector",
        "torch",
        F16,
        11.167,
        Size(Detector, images(16, 640)),
        Size(partial(Detector, (8, 16, 16, 32, 32), (1, 1, 1, 1), 5), images(2, 64)),
    ),
    Entry(
        "R3D-18",
        "torchvision",
        F16,
        33.372,
        Size(partial(_video, {}), (Input("video", (8, 3, 16, 112, 112)),)),
        Size(partial(_video, {"num_classes": 10}), (Input("video", (1, 3, 4, 32, 32)),)),
    ),
)

ATTENTIVE = (
    vision("CoAtNet-0", "timm", "coatnet_0_rw_224", 27.436, 32, 224, {"img_size": 64}),
    vision("MaxViT-T", "timm", "maxvit_tiny_tf_224", 30.917, 32, 224, {"img_size": 64}),
    vision("EfficientViT-B3", "timm", "efficientvit_b3", 48.646, 32, 224),
    vision(
        "DeiT-3-B",
        "timm",
        "deit3_base_patch16_224",
        86.585,
        32,
        224,
        {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4},
    ),
    vision(
        "EVA-02-B",
        "timm",
        "eva02_base_patch14_224",
        85.759,
        32,
        224,
        {"img_size": 56, "depth": 2, "embed_dim": 48, "num_heads": 4},
        tiny_side=56,
    ),
    vision(
        "Hiera-B",
        "timm",
        "hiera_base_224",
        51.525,
        32,
        224,
        {"embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1), "img_size": (64, 64)},
    ),
    vision(
        "SAM-B encoder",
        "timm",
        "samvit_base_patch16",
        89.671,
        1,
        1024,
        {
            **{"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4, "window_size": 3},
            **{"global_attn_indexes": (1,), "neck_chans": 16},
        },
        method="forward_features",
    ),
    Entry(
        "DETR-R50",
        "transformers",
        F16,
        41.5,
        _detr({"num_labels": 91}, _pixels(2, 800, 1088)),
        _detr(
            {
                **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 10},
                **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_labels": 5},
                **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "backbone": "resnet18"},
            },
            _pixels(2, 64, 96),
        ),
    ),
    Entry(
        "SegFormer-B2",
        "transformers",
        F16,
        27.462,
        _segformer(
            {
                **{"hidden_sizes": [64, 128, 320, 512], "depths": [3, 4, 6, 3]},
                **{"decoder_hidden_size": 768, "num_labels": 150},
            },
            _pixels(4, 512, 512),
        ),
        _segformer(
            {
                **{"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "num_labels": 10},
                **{"num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 32},
            },
            _pixels(2, 64, 64),
        ),
    ),
    Entry(
        "DINOv2-B",
        "transformers",
        F16,
        86.580,
        _dinov2({"image_size": 518}, _pixels(16, 224, 224)),
        _dinov2(
            {
                **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
                **{"image_size": 56, "patch_size": 14},
            },
            _pixels(2, 42, 42),
        ),
    ),
)
