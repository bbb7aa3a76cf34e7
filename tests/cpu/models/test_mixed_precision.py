"""Training in mixed precision: casts are ops of ours, and what forward keeps is as little as can
be."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.models import bound, dynamo


@pytest.fixture(autouse=True)
def _new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    yield


class Block(nn.Module):
    """Attention by one projection, and an MLP."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, 2)
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        return x + self.down(F.silu(self.up(self.norm2(x))))


def _image_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def gradients(
    model: nn.Module, run: Callable[..., torch.Tensor], x: torch.Tensor, *, cast: bool
) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        y = run(x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    (y * weight).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(each is not None for each in found)
    return [y.detach(), *(each for each in found if each is not None)]


def near(model: nn.Module, run: Callable[..., torch.Tensor], x: torch.Tensor) -> None:
    """Results and gradients under autocast are at most twice as far from float64's as eager's."""
    made = gradients(model, run, x, cast=True)
    eager = gradients(model, model, x, cast=True)
    wide = copy.deepcopy(model).double()
    exact = gradients(wide, wide, x.double(), cast=False)
    for mine, torchs, wanted in zip(made, eager, exact, strict=True):
        assert mine.dtype == torchs.dtype and mine.stride() == torchs.stride()
        off, own = ((each.double() - wanted).norm() / wanted.norm() for each in (mine, torchs))
        assert off <= 2 * own + 1e-6, (tuple(wanted.shape), float(off), float(own))


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bound.Direct, list[Any]]]:
    """The graphs that run in a test, with their results."""
    seen: list[tuple[bound.Direct, list[Any]]] = []
    run = bound.Direct.results

    def watched(self: bound.Direct, tensors: Any) -> list[Any]:
        results = run(self, tensors)
        seen.append((self, results))
        return results

    monkeypatch.setattr(bound.Direct, "results", watched)
    return seen


@pytest.mark.parametrize("kind", ["attention", "images"])
def test_casts_and_sums_of_16_bits_are_ops_of_ours(kind: str) -> None:
    torch.manual_seed(0)
    model = Block() if kind == "attention" else _image_net()
    x = torch.randn(2, 16, 32) if kind == "attention" else torch.randn(4, 3, 8, 8)
    near(model, torch.compile(model, backend=dynamo.backend), x)
    reports = cg.reports()
    assert [name for report in reports for name, _ in report.opaque] == []
    ops = [node.op for report in reports for step in report.steps for node in step.spec.nodes]
    assert ops.count("cast") >= 10


def test_parts_of_a_projection_are_saved_as_views_of_it(
    forwards: list[tuple[bound.Direct, list[Any]]],
) -> None:
    torch.manual_seed(0)
    model = Block()
    near(model, torch.compile(model, backend=dynamo.backend), torch.randn(2, 16, 32))
    graph, results = forwards[0]
    places = [
        at
        for at, each in enumerate(graph.imported.results)
        if not isinstance(each, str) and each[0] == "view"
    ]
    shown = [results[at] for at in places if tuple(results[at].shape) == (2, 4, 16, 8)]
    assert len({each.untyped_storage().data_ptr() for each in shown}) < len(shown)
    whole = [each for each in shown if each.untyped_storage().nbytes() == 2 * 16 * 96 * 2]
    assert len(whole) == 3, "q, k and v, in what the projection made"


def test_running_statistics_are_not_given_twice(
    forwards: list[tuple[bound.Direct, list[Any]]],
) -> None:
    torch.manual_seed(0)
    model = _image_net()
    near(model, torch.compile(model, backend=dynamo.backend), torch.randn(4, 3, 8, 8))
    named = [each for each in forwards[0][0].imported.results if isinstance(each, str)]
    assert len(named) == len(set(named)), "of a batch norm's gradient no part reads them"


def _kept(results: list[Any]) -> int:
    """The bytes of results, each memory once."""
    places = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in results
        if isinstance(each, torch.Tensor)
    }
    return sum(places.values())


def test_a_budget_of_memory_has_the_backward_compute_again(
    forwards: list[tuple[bound.Direct, list[Any]]],
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 16, 32)
    kept = {}
    for budget in (None, 1, 0.5, 0):
        torch._dynamo.reset()
        options = {"activation_memory_budget": budget}
        forwards.clear()
        near(
            model,
            torch.compile(model, backend=lambda m, g, o=options: dynamo.backend(m, g, options=o)),
            x,
        )
        kept[budget] = _kept(forwards[0][1])
    assert kept[None] == kept[1] > kept[0.5] > kept[0]


def test_on_a_cpu_less_overhead_is_the_same() -> None:
    torch.manual_seed(0)
    model = Block()
    near(
        model,
        torch.compile(model, backend=lambda m, g: dynamo.backend(m, g, mode="reduce-overhead")),
        torch.randn(2, 16, 32),
    )
    assert not any(report.refused for report in cg.reports())


@pytest.mark.parametrize("budget", [-0.1, 1.5, "half", True])
def test_a_budget_that_is_none_is_refused(budget: Any) -> None:
    with pytest.raises(cg.PolicyError, match=r"activation_memory_budget=.*; expected 0 to 1"):
        dynamo.backend(
            torch.fx.symbolic_trace(nn.ReLU()),
            [torch.ones(2)],
            options={"activation_memory_budget": budget},
        )
