"""Results that show the memory of one another in torch do so in a graph of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from cudnngraph.models.replay import copied
from tests.fused import compiled

Tensor = torch.Tensor

FORMS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "a tensor and views": lambda y: (y.view(-1), y, y.t()),
    "views alone": lambda y: (y[:, :2], y[:, 2:], y[0]),
    "parts": lambda y: y.chunk(2, dim=1),
    "rows": lambda y: y.unbind(0),
    "twice": lambda y: (y, y.contiguous()),
    "detached": lambda y: (y, y.detach()),
    "expanded": lambda y: (y, y[None].expand(3, -1, -1)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_write_over_one_shows_in_the_others(form: Callable[[Tensor], Sequence[Tensor]]) -> None:
    def run(x: Tensor) -> Sequence[Tensor]:
        return form(x * 2.0 + 1.0)

    x, step = torch.arange(8.0).reshape(2, 4), torch.ones((), requires_grad=True)
    mine, own = compiled(run)(x), run(x)
    assert [each.stride() for each in mine] == [each.stride() for each in own]
    for results in (mine, own):
        results[0].mul_(-3.0)
    assert all(torch.equal(a, b) for a, b in zip(mine, own, strict=True))
    added = compiled(run)(x)[0].add_(step)  # they are views of none, whose writes torch refuses
    added.sum().backward()
    assert step.grad == added.numel()


def test_results_apart_stay_apart() -> None:
    def run(x: Tensor) -> Sequence[Tensor]:
        y = x.relu()
        return y, y + 1.0, y.t().contiguous()

    x = torch.arange(8.0).reshape(2, 4)
    a, b, c = compiled(run)(x)
    a.zero_()
    assert torch.equal(b, x + 1.0) and torch.equal(c, x.t())


def test_copies_out_of_a_cuda_graph_show_one_memory() -> None:
    source = torch.arange(24.0).reshape(4, 6)
    views = [source[1:, 2:5], source[1:, 2:5].t(), source[3, 3], source[1][None].expand(3, 6)]
    made = copied(views)
    assert [each.stride() for each in made] == [each.stride() for each in views]
    assert all(torch.equal(a, b) for a, b in zip(made, views, strict=True))
    made[0].fill_(-1.0)
    assert float(made[2]) == -1.0 and bool((made[1] == -1.0).all())
    assert torch.equal(source, torch.arange(24.0).reshape(4, 6))
