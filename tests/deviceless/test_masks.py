"""Masks of attention whose rows are aligned on the way, as cuDNN lists their plans."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(193, 193), (1, 16, 193, 193), (16, 1, 193, 193)], ids=str)
def test_odd_masks_are_copied_in_front_of_attention(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """By torch, since no plan of pointwise ops writes rows with gaps."""
    g = cg.Graph("g")
    q, k, v = (g.input(name, (16, 16, 193, 64), torch.float16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, g.input("mask", shape, dtype)))
    steps = cg.explain(g, "nvidia-h200").steps
    made = [[node.op for node in step.spec.nodes if node.op != "constant"] for step in steps]
    assert made == [["where" if dtype == torch.bool else "identity"], ["sdpa"]]
    assert [step.runs_on for step in steps] == ["torch", "cuDNN"]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16], ids=str)
def test_what_a_graph_makes_for_attention_is_masked_by_a_plan(dtype: torch.dtype) -> None:
    g = cg.Graph("g")
    q, k, v = (g.input(name, (16, 16, 193, 64), torch.float16) for name in "qkv")
    mask = g.input("mask", (193, 193), dtype)
    if dtype != torch.bool:
        mask = g.add(mask, mask)
    g.output("o", g.sdpa(g.relu(q), k, v, mask))
    runs = {step.ops: step.runs_on for step in cg.explain(g, "nvidia-h200").steps}
    assert runs.pop(("sdpa",)) == "cuDNN"
    assert runs.pop(("relu",)) == "cuDNN"
    if dtype == torch.bool:
        assert runs == {("where",): "torch"}
    else:
        assert runs == {("add",): "cuDNN", ("identity",): "torch"}
