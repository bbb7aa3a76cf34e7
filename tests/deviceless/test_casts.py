"""Casts as the frontend is told of them: a dtype of a plan's result, or nothing."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.deviceless import propose_for
from cudnngraph.backend.lowering.casts import without_casts

TARGET = "nvidia-h200"
F16, F32 = torch.float16, torch.float32


def product(result: torch.dtype) -> cg.Graph:
    """A projection whose bias and result are cast, as autocast has it."""
    g = cg.Graph("casts")
    x, w = g.input("x", (64, 128), F16), g.input("w", (128, 64), F16)
    bias = g.cast(g.input("b", (64,), F32), F16)
    g.output("y", g.cast((x @ w) + bias, result))
    return g


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("result", [F16, F32], ids=str)
def test_a_plan_is_told_of_no_cast_within_it(result: torch.dtype) -> None:
    lowered, candidates = propose_for(product(result).spec(), TARGET)
    modes = [node.params.get("mode") for node in lowered.graph.nodes]
    assert len(modes) == 2 and not any("IDENTITY" in str(mode) for mode in modes)
    assert candidates


@pytest.mark.usefixtures("driver")
def test_gradients_of_weights_are_written_in_float32() -> None:
    g = cg.Graph("gradient")
    dy, x = g.input("dy", (256, 64), F16), g.input("x", (256, 128), F16)
    g.output("dw", g.cast(g.permute(g.permute(dy, (1, 0)) @ x, (0, 1)), F32))
    explained = cg.explain(g, TARGET, policy=cg.Policy(kernels=True))
    ran = [step for step in explained.steps if step.runs_on != "torch"]
    assert [step.runs_on for step in ran] == ["cuDNN"]
    assert [str(t.dtype) for t in map(ran[0].spec.tensors.get, ran[0].spec.outputs) if t] == [
        "torch.float32"
    ]


def test_a_cast_that_something_else_reads_or_that_stands_alone_is_kept() -> None:
    g = cg.Graph("kept")
    x = g.input("x", (8, 16), F32)
    y = g.relu(x)
    g.output("y", y)
    g.output("z", g.cast(y, F16))
    assert [node.op for node in without_casts(g.spec()).nodes] == ["relu", "cast"]
    g = cg.Graph("alone")
    g.output("y", g.cast(g.input("x", (8, 16), F32), F16))
    assert [node.op for node in without_casts(g.spec()).nodes] == ["cast"]
    g = cg.Graph("twice")
    y = g.cast(g.relu(g.input("x", (8, 16), F32)), F16)
    g.output("y", g.cast(y, F32))
    made = without_casts(g.spec())
    assert [node.op for node in made.nodes] == ["relu"]
    assert made.outputs == ("y",) and made.tensors["y"].dtype == F32
