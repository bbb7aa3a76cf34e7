"""Whole models, planned for an H200 by the real cuDNN library."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.device.rules import changed
from cudnngraph.models.convert import import_model

FREE = ("reshape", "transpose", "permute", "slice")  # views, which nothing runs


def planned(model: nn.Module, *shape: int) -> cg.Explanation:
    """The plan of a model in float16, channels last."""
    model = models.randomized(model).half()
    imported = import_model(model, (torch.zeros(shape).half(),), channels_last=True)
    assert imported.spec is not None
    return cg.explain(imported.spec)


def kinds(found: cg.Explanation) -> Counter[tuple[str, str]]:
    """Steps by their ops and by what runs them; a view, which nothing runs, counts as such."""
    named: Counter[tuple[str, str]] = Counter()
    for step in found.steps:
        ops = " ".join(step.ops)
        free = ops in ("reshape", "concat") and not step.refusals
        named[ops, "view" if free else step.runs_on] += 1
    return named


def test_a_resnet_is_convolutions_with_all_that_follows_each(driver: None) -> None:
    found = planned(models.ResNet((2, 1, 1, 1), 64, 1000), 4, 3, 64, 64)
    assert kinds(found) == {
        ("conv bias relu", "cuDNN"): 11,
        ("conv add bias relu", "cuDNN"): 5,
        ("conv", "cuDNN"): 4,
        ("max_pool", "torch"): 1,
        ("aten", "torch"): 1,
        ("reshape", "view"): 1,
        ("matmul add", "cuDNN"): 1,
    }
    for step in found.steps:
        if step.ops[0] == "conv":  # in this order of the ops cuDNN has engines that are compiled
            assert step.first is not None and not step.first.runtime_compiled, step.ops


def test_a_deeplab_may_write_its_pyramid_where_it_is_read(driver: None) -> None:
    net = models.DeepLab(models.ResNet((1, 1, 1, 1), 32, dilated=True), 64, 21)
    assert ("concat", "view") not in kinds(planned(net, 2, 3, 128, 128))
    with changed(convolution_parts_in_place=True):
        found = kinds(planned(net, 2, 3, 128, 128))
    assert found["concat", "view"] == 1
    assert {ops: count for (ops, runs), count in found.items() if runs == "torch"} == {
        "max_pool": 1,
        "aten": 1,
        "expand": 1,
        "interpolate": 1,
    }


def test_a_u_net_may_join_without_a_copy(driver: None) -> None:
    assert ("concat", "view") not in kinds(planned(models.UNet(32, 3), 2, 3, 64, 64))
    with changed(convolution_parts_in_place=True):
        found = kinds(planned(models.UNet(32, 3), 2, 3, 64, 64))
    assert found["concat", "view"] == 3
    assert found["conv bias relu", "cuDNN"] == 14
    # With its bias as one plan from cuDNN 9.26 on; in 9.19 the bias is a plan of its own.
    assert sum(n for (ops, _), n in found.items() if ops.startswith("conv_transpose")) == 3
    assert {runs for ops, runs in found if ops.startswith("conv_transpose")} == {"cuDNN"}


@pytest.mark.parametrize("images", [1, 2])
def test_group_norms_of_a_decoder_are_statistics_and_a_plan_and_copy_nothing(
    images: int, driver: None
) -> None:
    found = kinds(planned(models.LatentDecoder((128, 64), 1, heads=2), images, 4, 64, 64))
    norms = found["group_affine", "torch"]
    assert norms == 10
    # Behind the statistics one pass over the images, with SiLU; without it in front of attention.
    assert found["bias scale bias silu", "cuDNN"] == norms - 1
    assert found["bias scale bias", "cuDNN"] == 1
    moving = {ops for ops, runs in found if runs == "torch" and ops.split()[0] not in FREE}
    assert moving == {"group_affine", "interpolate"}
    assert not any("identity" in ops or "expand" in ops for ops, _ in found)


@pytest.mark.parametrize("name", ["gpt", "vit", "convnext"])
def test_products_norms_and_attention_of_other_models_are_plans(name: str, driver: None) -> None:
    made: dict[str, Any] = {
        "gpt": (models.GPT(512, 128, 2, 64), torch.zeros(2, 64, dtype=torch.int64)),
        "vit": (models.ViT(64, 8, 128, 2, 10), torch.zeros(2, 3, 64, 64).half()),
        "convnext": (models.ConvNeXt((32, 64), (1, 2), 10), torch.zeros(2, 3, 64, 64).half()),
    }
    model, x = made[name]
    imported = import_model(models.randomized(model).half(), (x,), channels_last=True)
    assert imported.spec is not None
    for step in cg.explain(imported.spec).steps:
        if step.ops[0] in ("matmul", "layer_norm", "sdpa", "conv"):
            assert step.runs_on == "cuDNN", (step.ops, step.refusals)
