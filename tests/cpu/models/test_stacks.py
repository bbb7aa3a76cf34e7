"""Stacks of images that are only added up: each reader has its own."""

from __future__ import annotations

import torch
from torch import nn

from cudnngraph.models import bound as bindings
from cudnngraph.models import export
from cudnngraph.models.convert import Imported, convert
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics
from tests.models import Of, image


def imported(model: nn.Module, *x: torch.Tensor, kernels: bool = True) -> Imported:
    made = export.export(model, x)
    return convert(
        *(made.module, made.constants, made.placeholders),
        channels_last=True,
        on_gpu=True,
        kernels=kernels,
    )


def stacks(found: Imported) -> int:
    assert found.spec is not None
    return sum(node.op == "concat" for node in found.spec.nodes)


def branches(m: Of, x: torch.Tensor) -> torch.Tensor:
    both = torch.stack([m.first(x), m.other(x)], dim=1)
    scores = both.sum(1).mean((2, 3), keepdim=True)
    weights = torch.softmax(torch.stack([scores, -scores], 1), 1)
    return (both * weights).sum(1)


def test_each_reader_has_its_own_stack() -> None:
    model, x = (
        Of(branches, first=nn.Conv2d(8, 8, 1), other=nn.Conv2d(8, 8, 3, padding=1)),
        image(2, 8, 6, 5),
    )
    found = imported(model, x)
    assert stacks(found) == 1 + stacks(imported(model, x, kernels=False))
    assert found.spec is not None
    ours = bindings.Bound(found, compile_spec(found.spec, "cpu"), torch.device("cpu"))
    with torch.no_grad():
        numerics.check(ours.run([x])[0], model.double()(x.double()), torch.float16, terms=512)


def test_a_stack_that_is_returned_is_one() -> None:
    def returned(m: Of, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack([m.first(x), x], dim=1)
        return both.sum(1), both

    assert stacks(imported(Of(returned, first=nn.Conv2d(8, 8, 1)), image(2, 8, 6, 5))) == 1


def test_what_is_not_reduced_along_the_stack_is_one() -> None:
    def wide(m: Of, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([m.first(x), x], dim=1)
        return both * both.mean((2, 3), keepdim=True)

    assert stacks(imported(Of(wide, first=nn.Conv2d(8, 8, 1)), image(2, 8, 6, 5))) == 1
