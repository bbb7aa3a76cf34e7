"""Outputs of kernels that lie over inputs, as a program allows it for pointwise ops."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.tiling import Tiling
from tests import generated, host_kernels

SHAPE = (64, 96)


def crossed(turned: bool = False) -> GraphSpec:
    """The one output of the first input, the other one of both: either may lie over either."""
    g = cg.Graph("crossed")
    x = g.input("x", SHAPE, torch.float32)
    y = g.input("y", SHAPE, torch.float32)
    z = g.input("z", SHAPE, torch.float32, stride=(1, SHAPE[0]) if turned else None)
    g.output("u", g.relu(x))
    g.output("v", g.mul(g.sub(x, y), z))
    return g.spec()


def sources(turned: bool) -> list[Source]:
    spec = crossed(turned)
    choices = patterns.choices(spec, 4)
    kinds = {type(patterns.schedule_of(choice)) for choice in choices}
    assert (Tiling in kinds) == turned
    return [generated.source_of(spec, choice) for choice in choices]


@pytest.mark.parametrize("turned", [False, True])
def test_an_output_over_an_input_that_another_one_is_made_of(turned: bool) -> None:
    spec, every = crossed(turned), sources(turned)
    for source in every:
        host_kernels.expect(source)
    for source in every:
        for over in (("x", "y"), ("y", "x")):
            given = {name: torch.randn(SHAPE) for name in "xy"}
            given["z"] = spec.tensors["z"].empty("cpu").normal_()
            wanted = reference.run(spec, [given[name].clone() for name in spec.inputs])
            inputs = [given[name] for name in spec.inputs]
            host_kernels.run(source, [*inputs, *(given[name] for name in over)])
            for name, want in zip(over, wanted, strict=True):
                torch.testing.assert_close(given[name], want)
