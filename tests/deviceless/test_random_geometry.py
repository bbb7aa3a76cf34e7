"""Convolutions of random geometry, as cuDNN would run them: each step has plans or is torch's with
a reason, and where it has plans cuDNN's own formula gives the sizes that are declared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.lowering.conv import _cropped
from cudnngraph.ir.spec import GraphSpec, Node
from tests.geometry import Convolution, convolution, numbers

TARGET = "nvidia-h200"
F16 = torch.float16


def declared(case: Convolution) -> GraphSpec:
    """In float16; of several channels where the case has one, so that engines offer themselves."""
    layout = "channels_last" if case.channels_last else "contiguous"
    g = cg.Graph("conv")
    x, weight = (
        g.input(name, shape, F16, layout=layout)
        for name, shape in (("x", case.x), ("weight", case.weight))
    )
    g.output("y", getattr(g, case.op)(x, weight, **case.options))
    return g.spec()


def wide(case: Convolution) -> Convolution:
    (n, c, *pixels), (first, second, *kernel) = case.x, case.weight
    return replace(case, x=(n, 8 * c, *pixels), weight=(8 * first, 8 * second, *kernel))


def sizes_agree(spec: GraphSpec, node: Node) -> bool:
    """Whether image, kernel and result are of one convolution, as cuDNN counts."""
    shapes = {name: spec.tensors[name].shape[2:] for name in (*node.operands, *node.results)}
    if node.op == "conv":
        image, kernel, result = (shapes[name] for name in (*node.operands, node.results[0]))
    elif node.op == "conv_transpose":
        result, kernel, image = (shapes[name] for name in (*node.operands, node.results[0]))
    else:
        result, image, kernel = (shapes[name] for name in (*node.operands, node.results[0]))
    padding = _cropped(node) if node.op == "conv_transpose" else node.attr("padding")
    many = zip(
        image, kernel, result, padding, node.attr("stride"), node.attr("dilation"), strict=True
    )
    return all((n + sum(p) - d * (k - 1) - 1) // s + 1 == m for n, k, m, p, s, d in many)


def check(spec: GraphSpec, what: str) -> int:
    """Return how many steps cuDNN has plans for."""
    found = cg.explain(spec, TARGET, allow_tf32=False)
    planned = 0
    for step in found.steps:
        if step.runs_on != "cuDNN":
            assert step.runs_on == "torch", what
            continue
        assert step.plans and step.first is not None, what
        planned += 1
        for node in step.spec.nodes:
            if node.op in ("conv", "conv_transpose", "conv_wgrad"):
                assert sizes_agree(step.spec, node), f"{what}: {node}"
    return planned


@pytest.mark.usefixtures("driver")
def test_convolutions_are_planned_forward_and_backward() -> None:
    planned = total = 0
    for number in numbers(40):
        case = wide(convolution(number))
        if case.sizes() is None:
            continue
        what = f"case {number}, {case}"
        try:
            spec = declared(case)
            planned += check(spec, what)
            planned += check(cg.differentiate(spec, ("x", "weight")).backward, what)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(what) from error
        total += 1
    assert planned > total  # of three a case
