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
