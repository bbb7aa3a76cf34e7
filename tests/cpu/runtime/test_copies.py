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


@cg.specialize
def both(g: cg.Graph, x: cg.Value, y: cg.Value) -> tuple[cg.Value, ...]:
    return x + y, x - y


@pytest.mark.parametrize("way", ["called", "training", "specialized"])
def test_results_are_pickled_by_their_names(way: str) -> None:
    g = graph()
    g.output("w", g.exp(g.input("v", (2, 3), torch.float32)))
    x, y, v = (torch.randn(2, 3) for _ in range(3))
    exe = g.compile("cpu", training=way == "training")
    made = both(x, y) if way == "specialized" else exe(x=x, y=y, v=v)
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert type(again).__name__ == type(made).__name__
        assert list(again._asdict()) == list(made._asdict())
        assert all(map(torch.equal, again, made))
