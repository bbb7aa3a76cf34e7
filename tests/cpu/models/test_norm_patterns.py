"""Norms that models write out: one op, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cudnngraph.models.convert import Imported, import_model
from tests import numerics
from tests.cpu.models.test_attention_patterns import exact
from tests.cpu.rewrite.test_views_behind import ops

F16, F32 = torch.float16, torch.float32


class Of(nn.Module):
    """A function of a module that has a weight."""

    def __init__(self, function: Any = None, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.function, self.weight = function, weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)  # type: ignore[no-any-return]


def as_llama(m: Any, x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)
    return m.weight * wide.to(x.dtype)


def as_gemma(m: Any, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(2, keepdim=True) + 1e-3)
    return (wide * (1.0 + m.weight.float())).type_as(x)


def by_division(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * m.weight


def of_float32(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * x


def as_a_row(m: Any, x: torch.Tensor) -> torch.Tensor:
    return as_llama(m, x) * 1.0 + as_llama(Of(weight=m.weight.view(1, 1, -1)), x + 1)


NORMS = {
    as_llama: (F16, 1),
    as_gemma: (F16, 1),
    by_division: (F32, 1),
    of_float32: (F32, 1),
    as_a_row: (F16, 2),
}


def normed(function: Any, dtype: torch.dtype) -> Imported:
    """A norm of rows as one graph, whose numbers are those of the model."""
    gen = torch.Generator().manual_seed(0)
    model = nn.Module.eval(Of(function, (torch.rand(16, generator=gen) + 0.5).to(dtype)))
    x = (torch.randn(16, 16, 16, generator=gen) * 0.1).to(dtype)
    made = import_model(model, (x,))
    (y,) = exact(made, x)
    want = model(x)
    numerics.check(want, y, dtype, None, terms=16)
    return made


@pytest.mark.parametrize("function", NORMS, ids=lambda function: function.__name__)
def test_an_rms_norm_that_is_written_out_is_one_op(function: Any) -> None:
    dtype, count = NORMS[function]
    found = normed(function, dtype)
    assert found.spec is not None and found.opaque == ()
    assert set(ops(found.spec)) <= {"rms_norm", "mul", "add"}
    nodes = [node for node in found.spec.nodes if node.op == "rms_norm"]
    assert len(nodes) == count and all(node.attr("eps") == 1e-3 for node in nodes)


def unlike(x: torch.Tensor, power: int = 2, dim: Any = -1, alpha: int = 1) -> torch.Tensor:
    """An RMS norm, but for one thing."""
    mean = x.pow(power).mean(dim, keepdim=True)
    return x * torch.rsqrt(torch.add(mean, 1e-3, alpha=alpha))


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """An RMS norm of numbers that are rounded first."""
    return unlike(x.half().float())


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: unlike(x, power=4),
        lambda m, x: unlike(x, dim=1),
        lambda m, x: unlike(x, dim=(1, 2)),
        lambda m, x: unlike(x, alpha=2),
        lambda m, x: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-3),
        lambda m, x: (z := x.abs()) * torch.rsqrt((z * (x.abs() + 1)).mean(-1, keepdim=True) + 1),
        lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-3),  # rows by columns
        lambda m, x: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3),
        lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.weight),
        lambda m, x: (x + 1) * (r := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)) + x * r,
    ],
)
def test_what_is_no_rms_norm_stays_as_it_is_written(function: Any) -> None:
    assert "rms_norm" not in ops(normed(function, F32).spec)


def test_what_is_nearly_an_rms_norm_is_one_but_for_one_thing() -> None:
    assert ops(normed(lambda m, x: unlike(x), F32).spec) == ["rms_norm"]


def test_an_rms_norm_is_of_what_a_conversion_rounds_and_of_whole_numbers() -> None:
    """The norm reads the rounded tensor, not the one before the rounding."""
    for function in (
        lambda m, x: narrowed(x),
        lambda m, x: unlike((x * 90).int().float()),
    ):
        spec = normed(function, F32).spec
        assert spec is not None and "rms_norm" not in {
            node.op for node in spec.nodes if set(node.operands) & {"x"}
        }


def test_a_norm_of_no_dims_is_no_row() -> None:
    imported = import_model(Of(lambda m, x: unlike(x)).eval(), (torch.tensor(2.0),))
    assert imported.spec is None or "rms_norm" not in ops(imported.spec)


def test_a_norm_whose_root_is_wanted_too_is_not_computed_twice() -> None:
    """As torch.compile traces the forward of a model that learns."""

    def with_root(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
        return x * root * m.weight, root

    imported = import_model(Of(with_root, torch.ones(16)).eval(), (torch.randn(4, 16),))
    assert ops(imported.spec) and "rms_norm" not in ops(imported.spec)


def test_a_weight_that_is_a_column_is_no_weight_of_an_rms_norm() -> None:
    def by_column(m: Any, x: torch.Tensor) -> torch.Tensor:
        return of_float32(m, x) * m.weight[:, None]

    found = normed(by_column, F32)
    assert ops(found.spec) == ["rms_norm", "mul"]
