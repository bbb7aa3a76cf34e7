"""Copies and pickles of graphs and of what is compiled from them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import cudnngraph as cg


def graph() -> cg.Graph:
    g = cg.Graph("squares")
    x, y = g.input("x", (2, 3), torch.float32), g.input("y", (2, 3), torch.float32)
    g.output("z", x * x + y)
    return g


@cg.specialize(training=True)
def squared(g: cg.Graph, x: cg.Value) -> cg.Value:
    return x * x


class Holds(nn.Module):
    """A module with a compiled graph and a function of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.run = graph().compile("cpu", training=True)
        self.square = squared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.run(x, self.square(self.weight))
        return made


def test_a_module_that_holds_a_compiled_graph_is_copied() -> None:
    module, x = Holds(), torch.randn(2, 3)
    other = copy.deepcopy(module)
    assert torch.equal(other(x), module(x))
    other(x).sum().backward()
    assert other.weight.grad is not None
    assert module.weight.grad is None


@pytest.mark.parametrize("training", [False, True])
def test_a_compiled_graph_is_pickled(training: bool) -> None:
    made = graph().compile("cpu", training=training, tune="cached")
    again = pickle.loads(pickle.dumps(made))
    x, y = torch.randn(2, 3, requires_grad=training), torch.randn(2, 3)
    assert type(again) is type(made)
    assert again.policy == made.policy
    assert torch.equal(again(x, y), made(x, y))
    assert again(x, y).requires_grad is training


def test_a_copied_graph_is_a_graph_of_its_own() -> None:
    first = graph()
    spec = first.spec()
    second = copy.deepcopy(first)
    second.output("w", second.exp(second.input("v", (2,), torch.float32)))
    assert first.spec() == spec
    assert len(second.spec().outputs) == 2
    for each in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert each == spec
        assert each.canonical_names() == spec.canonical_names()
