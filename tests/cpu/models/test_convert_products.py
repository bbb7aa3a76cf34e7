"""Rules of the conversion: attention and products of any rank, grouped heads, softmax, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.models.convert import import_model
from tests import numerics
from tests.converted import check, ops
from tests.models import Of, image

Tensor = torch.Tensor
attend = F.scaled_dot_product_attention


def _grouped(m: Any, x: Tensor) -> Tensor:
    """As transformers repeats the keys and values of grouped queries."""
    batch, heads, length, width = x.shape
    k, v = (
        each[:, :, None].expand(batch, 2, 2, length, width).reshape(batch, heads, length, width)
        for each in (x[:, :2] * 2, x[:, 2:] + 1)
    )
    return attend(x, k, v)


def _repeated_otherwise(m: Any, x: Tensor) -> Tensor:
    """All heads one behind another, which is no grouping."""
    k, v = (
        each[:, None].expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8) for each in (x[:, :2], x[:, 2:])
    )
    return attend(x, k, v)


def _tokens(x: Tensor, places: Tensor) -> Tensor:
    """A mask of tokens by the places of examples and keys, as transformers writes masks."""
    return (x[..., 0] > 0)[torch.arange(3).view(3, 1, 1), places.view(1, 5, 1)]


#: Each with the shape of its input, and ops that its graph has, and has not.
FORMS: Mapping[str, tuple[Callable[..., Any], tuple[int, ...], set[str], set[str]]] = {
    "rank 3": (lambda m, x: attend(x, x * 2, x + 1), (3, 5, 8), {"sdpa"}, {"aten"}),
    "rank 3, masked": (
        lambda m, x: attend(x, x * 2, x, x @ x.transpose(1, 2)),
        (3, 5, 8),
        {"sdpa"},
        {"aten"},
    ),
    "rank 3, one mask": (
        lambda m, x: attend(x, x * 2, x, torch.ones(5, 5).tril() > 0),
        (3, 5, 8),
        {"sdpa"},
        {"aten"},
    ),
    "rank 5": (lambda m, x: attend(x, x * 2, x), (2, 3, 2, 5, 8), {"sdpa"}, {"aten"}),
    "rank 5, causal": (
        lambda m, x: attend(x, x, x, is_causal=True),
        (2, 3, 2, 5, 8),
        {"sdpa"},
        {"aten"},
    ),
    "rank 5, a mask of heads": (
        lambda m, x: attend(x, x, x, x[0, 0, :, :, :5]),
        (2, 3, 2, 5, 8),
        {"sdpa"},
        {"aten"},
    ),
    "rank 5, masked": (
        lambda m, x: attend(x, x, x, x[..., :5]),
        (2, 3, 2, 5, 8),
        {"sdpa"},
        {"aten"},
    ),
    "rank 5, a mask of some": (
        lambda m, x: attend(x, x, x, x[:1, ..., :5]),
        (2, 3, 2, 5, 8),
        {"aten"},
        {"sdpa"},
    ),
    "grouped": (_grouped, (2, 4, 5, 8), {"sdpa"}, {"aten", "expand"}),
    "not grouped": (_repeated_otherwise, (2, 4, 5, 8), {"sdpa", "expand"}, {"aten"}),
    "product of 6 dims": (
        lambda m, x: F.linear(x, m.w, m.b),
        (2, 1, 3, 2, 5, 8),
        {"matmul"},
        {"aten"},
    ),
    "batches of 5 dims": (
        lambda m, x: x @ x.transpose(-1, -2),
        (2, 1, 3, 5, 8),
        {"matmul"},
        {"aten"},
    ),
    "spread batches": (lambda m, x: x @ x[:, :1].mT, (2, 2, 3, 5, 8), {"matmul"}, {"aten"}),
    "both spread": (
        lambda m, x: x[:, :1] @ x[0, :, :1].transpose(-1, -2),
        (2, 2, 3, 5, 8),
        {"matmul"},
        {"aten"},
    ),
    "softmax": (
        lambda m, x: (x.softmax(1), F.log_softmax(x, -1)),
        (3, 5, 8),
        {"softmax"},
        {"aten"},
    ),
    "a number where masked": (
        lambda m, x: x.masked_fill(x > 0.5, -math.inf).amax(-1),
        (3, 5, 8),
        {"where"},
        {"aten"},
    ),
    "largest": (
        lambda m, x: x - x.max(-1, keepdim=True).values + x.min(1, keepdim=True)[0],
        (3, 5, 8),
        {"reduction"},
        {"aten"},
    ),
    "where the largest are": (lambda m, x: x.max(-1), (3, 5, 8), {"aten"}, {"reduction"}),
    "two numbers": (
        lambda m, x: torch.where(x > 0, torch.zeros(()), torch.tensor(-2.0)) * x,
        (3, 5, 8),
        {"where"},
        {"aten"},
    ),
    "no bound": (lambda m, x: x.clamp(0.1, math.inf), (3, 5, 8), {"clamp"}, {"aten"}),
    "no bounds": (
        lambda m, x: x.clamp(-math.inf, math.inf) * 2,
        (3, 5, 8),
        {"mul"},
        {"clamp", "aten"},
    ),
    "all of a mask": (
        lambda m, x: torch.where(_tokens(x, torch.arange(5)), x, 1.0),
        (3, 5, 8),
        {"gt", "where"},
        {"aten"},
    ),
    "some of a mask": (
        lambda m, x: torch.where(_tokens(x, torch.arange(5).flip(0)), x, 1.0),
        (3, 5, 8),
        {"aten"},
        set(),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_ops_of_ours_and_right(name: str) -> None:
    function, shape, there, not_there = FORMS[name]
    model = Of(function, w=image(4, 8), b=image(4)).eval()
    found = set(ops(check(model, image(*shape)).spec))
    assert there <= found and not not_there & found, found


def test_keys_and_values_of_grouped_queries_are_read_once() -> None:
    spec = import_model(Of(_grouped).eval(), (image(2, 4, 5, 8),)).spec
    assert spec is not None
    (node,) = (node for node in spec.nodes if node.op == "sdpa")
    shapes = [spec.tensors[name].shape for name in node.operands[:3]]
    assert shapes == [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_in_another_dtype_and_norms_of_16_bits_are_kernels(dtype: torch.dtype) -> None:
    model = Of(
        lambda m, x: (
            F.softmax(x, dim=-1, dtype=torch.float32),
            torch.linalg.vector_norm(x, dim=1, keepdim=True),
            x.mean((-2, -1)),
        )
    ).eval()
    x = image(3, 5, 8).to(dtype)
    assert not import_model(model, (x,), kernels=True).opaque
    for mine, exact in zip(cg.fuse(model, x)(x), model(x.double()), strict=True):
        numerics.check(mine, exact.double(), dtype)


@pytest.mark.parametrize("order", [1, 2, math.inf])
@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float64),
    ],
)
def test_a_vector_norm_in_the_dtype_that_is_asked_for_is_ours(
    given: torch.dtype, asked: torch.dtype, order: float
) -> None:
    """As autocast on a GPU asks for float32."""
    model = Of(lambda m, x: torch.linalg.vector_norm(x, order, (1, 2), True, dtype=asked)).eval()
    x = image(3, 5, 8).to(given)
    assert not import_model(model, (x,), kernels=True).opaque
    found = cg.fuse(model, x)(x)
    assert found.dtype == asked
    numerics.check(found, torch.linalg.vector_norm(x.double(), order, (1, 2), True), asked)


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16, torch.bfloat16)],
)
def test_tensors_of_several_dtypes_are_joined(
    join: Callable[..., torch.Tensor], dtypes: tuple[torch.dtype, ...]
) -> None:
    """As a class token of float32 and what autocast makes of an image."""
    model = Of(lambda m, *parts: join([part.exp() for part in parts], 1)).eval()
    parts = tuple(image(3, 5, 8).to(dtype) for dtype in dtypes)
    assert not import_model(model, parts, kernels=True).opaque
    found, own = cg.fuse(model, parts)(*parts), model(*parts)
    assert found.dtype == own.dtype == torch.float32
    numerics.check(found, model(*(part.double() for part in parts)), dtypes[-1])


def test_an_rms_norm_of_a_wider_tensor_than_its_weight_is_ours() -> None:
    weight = image(8).to(torch.bfloat16)
    model = Of(lambda m, x: F.rms_norm(x, (8,), m.w, 1e-5), w=weight).eval()
    x = image(3, 8)
    fused = cg.fuse(model, x)
    assert fused.report is not None and fused.report.opaque == ()
    exact = F.rms_norm(x.double(), (8,), weight.double(), 1e-5)
    numerics.check(fused(x), exact, torch.float32, model(x), terms=8)


def _exchanged(m: Any, x: Tensor) -> Tensor:
    """As some rotary embeddings write float32 results into a tensor of 16 bits."""
    made, wide = torch.empty_like(x), x.float() * m.w
    made[..., 0::2], made[..., 1::2] = wide[..., 1::2], wide[..., 0::2]
    return made


def test_writes_of_another_dtype_are_casts() -> None:
    model, x = Of(_exchanged, w=image(8)).eval(), image(3, 8).to(torch.bfloat16)
    fused = cg.fuse(model, x)
    assert fused.report is not None and fused.report.opaque == ()
    assert torch.equal(fused(x), model(x))
