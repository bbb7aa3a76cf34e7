"""Products of vectors and of three operands, diagonals, quarter turns, group norms of rows: each is
ops of ours, in the place of a torch step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cudnngraph.models.convert import import_model
from tests import numerics
from tests.converted import check, ops, run
from tests.models import Of, image

Tensor = torch.Tensor

#: A function of the parts m and x, the parts, and the shape of x.
FORMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, nn.Module], tuple[int, ...]]] = {
    "bilinear": (lambda m, x: m.b(x, x * 2), {"b": nn.Bilinear(4, 4, 3)}, (2, 5, 4)),
    "bilinear of rows": (
        lambda m, x: m.b(x[0], x[1]),
        {"b": nn.Bilinear(4, 4, 3, bias=False)},
        (2, 4),
    ),
    "computed bilinear": (
        lambda m, x: F.bilinear(x[0], x[1, :, :3], x[..., :3] * 2),
        {},
        (4, 4, 4),
    ),
    "row @ matrix": (lambda m, x: x[0] @ x, {}, (4, 4)),
    "row @ matrices": (lambda m, x: x[0, 0] @ x, {}, (3, 4, 4)),
    "matrices @ column": (lambda m, x: x @ x[0, 0], {}, (3, 4, 4)),
    "five dims @ column": (lambda m, x: x @ x[0, 0, 0, 0], {}, (2, 2, 3, 2, 4)),
    "row @ column": (lambda m, x: torch.matmul(x[0], x[1]), {}, (2, 4)),
    "addmm": (lambda m, x: torch.addmm(x, x, x * 2, beta=0.5, alpha=2), {}, (4, 4)),
    "addmm of nothing": (lambda m, x: torch.addmm(x / 0, x, x, beta=0, alpha=0.25), {}, (4, 4)),
    "addmv": (lambda m, x: torch.addmv(x[0], x, x[1], alpha=3), {}, (4, 4)),
    "baddbmm": (lambda m, x: torch.baddbmm(x, x, x.mT, beta=2, alpha=0.5), {}, (2, 4, 4)),
    "group norm": (lambda m, x: m.g(x), {"g": nn.GroupNorm(2, 8)}, (6, 8)),
    "group norm without weights": (lambda m, x: F.group_norm(x, 4, eps=0.1), {}, (6, 8)),
    "diagonal": (lambda m, x: x.diagonal(), {}, (4, 3)),
    "diagonal above": (lambda m, x: x.diagonal(1, -1, 0), {}, (3, 4, 5)),
    "diagonal below": (lambda m, x: torch.diagonal(x, -2, 1, 2), {}, (3, 4, 5)),
    "einsum of a diagonal": (lambda m, x: torch.einsum("bii->bi", x).exp(), {}, (2, 4, 4)),
    "product of three": (lambda m, x: x.prod(-1), {}, (4, 3)),
    "product, kept": (lambda m, x: torch.prod(x, 0, keepdim=True) + x, {}, (8, 3)),
    "product of one": (lambda m, x: x.prod(1), {}, (4, 1)),
    "two quarter turns": (lambda m, x: torch.rot90(x, 4, (0, 1)) + 1, {}, (3, 4)),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_ops_of_ours(name: str) -> None:
    function, parts, shape = FORMS[name]
    model = Of(function, **copy.deepcopy(parts)).eval()
    check(model, image(*shape), terms=32)
    assert "aten" not in ops(import_model(model, (image(*shape),), kernels=True).spec)


@pytest.mark.parametrize("turns", range(-1, 4))
@pytest.mark.parametrize("dims", [(0, 1), (-1, 1), (2, 0)])
def test_quarter_turns_are_flips_and_views(turns: int, dims: tuple[int, int]) -> None:
    model = Of(lambda m, x: torch.rot90(x, turns, dims) * 2).eval()
    imported = check(model, image(2, 3, 4))
    assert ops(imported.spec).count("aten") == (turns != 0)
    assert imported.spec is not None
    named = [node.attr("overload") for node in imported.spec.nodes if node.op == "aten"]
    assert set(named) <= {"aten.flip.default"}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forms_of_16_bits_are_no_farther_off_than_torch(name: str, dtype: torch.dtype) -> None:
    function, parts, shape = FORMS[name]
    model = Of(function, **copy.deepcopy(parts)).eval().to(dtype)
    x = image(*shape).to(dtype)
    with torch.no_grad():
        own, exact = model(x), copy.deepcopy(model).double()(x.double())
    (made,) = run(import_model(model, (x,), kernels=True), (x,))
    assert made.dtype == own.dtype
    numerics.check(made, exact, dtype, own, terms=32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_product_is_of_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    x = (image(4, 3) * 300).to(dtype)  # products that float16 has not
    model = Of(lambda m, x: x.prod(1, dtype=torch.float32)).eval()
    imported = import_model(model, (x,), kernels=True)
    (made,) = run(imported, (x,))
    assert made.dtype == torch.float32 and "aten" not in ops(imported.spec)
    numerics.check(made, x.double().prod(1), dtype, model(x), terms=3)


def test_long_products_and_those_of_whole_numbers_are_torchs() -> None:
    for x in (image(4, 9), torch.randint(1, 5, (4, 3))):
        model = Of(lambda m, x: x.prod(1)).eval()
        imported = import_model(model, (x,), kernels=True)
        assert ops(imported.spec) == ["aten"]
        assert torch.equal(run(imported, (x,))[0], x.prod(1))
