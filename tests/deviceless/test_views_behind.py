"""Ops behind a view of a matmul are part of the matmul's plan, as cuDNN lists plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.models.convert import import_model
from tests.models import Attends


def products(model: nn.Module, x: torch.Tensor) -> list[str]:
    """The ops of each step that has a product."""
    spec = import_model(model.eval().half(), (x.half(),), channels_last=True).spec
    assert spec is not None
    steps = cg.explain(spec, "nvidia-h200", allow_tf32=False).steps
    of = [(step, [node.op for node in step.spec.nodes if node.op != "constant"]) for step in steps]
    assert all(step.runs_on == "cuDNN" for step, ops in of if "matmul" in ops)
    return [" ".join(ops) for _, ops in of if "matmul" in ops]


@pytest.mark.usefixtures("driver")
def test_attentions_projections_have_their_biases_and_residuals() -> None:
    made = products(Attends(), torch.randn(4, 6, 16))
    assert made == 2 * ["matmul add", "matmul add add"]


@pytest.mark.usefixtures("driver")
def test_a_block_of_a_convnext_is_scaled_and_added_to_in_its_last_product() -> None:
    made = products(models.ConvNeXt((16,), (1,), 10), torch.randn(2, 3, 32, 32))
    assert made[:2] == ["matmul add gelu", "matmul add mul add"]
