"""Forms of results that are found once for equal operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from cudnngraph.models import known_forms
from cudnngraph.models.known_forms import KnownForms, mapped
from cudnngraph.ops import meta

_aten: Any = torch.ops.aten


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that torch was asked for, in order."""
    asked: list[Any] = []
    infer = meta.infer

    def noted(op: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(op)
        return infer(op, *args, **kwargs)

    monkeypatch.setattr(known_forms.meta, "infer", noted)
    return asked


def made(known: KnownForms, op: Any, *args: Any, **kwargs: Any) -> Any:
    operands = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
    return known.infer(op, args, kwargs, operands)


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_equal_operands_are_asked_for_once(inferred: list[Any]) -> None:
    known = KnownForms()
    first, second = (made(known, _aten.exp.default, on_meta(4, 5).t()) for _ in range(2))
    assert inferred == [_aten.exp.default]
    assert first is not second
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert (second.shape, second.stride(), second.dtype) == ((5, 4), (1, 5), torch.float32)


@pytest.mark.parametrize(
    "args",
    [
        (on_meta(4, 5), 2),
        (on_meta(5, 4).t(), 1),
        (on_meta(4, 5, dtype=torch.float16), 1),
        (on_meta(4, 5), 1.0),
        (on_meta(4, 5, dtype=torch.int64), 1),
        (on_meta(4, 5, dtype=torch.int64), 1.0),
        (on_meta(4, 5, dtype=torch.bool), 1),
        (on_meta(4, 5, dtype=torch.bool), True),
    ],
    ids=str,
)
def test_other_arguments_have_their_own_form(args: tuple[Any, ...]) -> None:
    known = KnownForms()
    made(known, _aten.mul.Scalar, on_meta(4, 5), 1)
    made(known, _aten.mul.Scalar, on_meta(4, 5, dtype=torch.bool), 1)
    for _ in range(2):
        found, right = made(known, _aten.mul.Scalar, *args), _aten.mul.Scalar(*args)
        assert (found.shape, found.stride(), found.dtype) == (
            right.shape,
            right.stride(),
            right.dtype,
        )


@pytest.mark.parametrize(
    "op, args",
    [
        (_aten.transpose.int, (0, 1)),
        (_aten.view.default, ([20],)),
        (_aten.reshape.default, ([20],)),
        (_aten.contiguous.default, ()),
        (_aten.split.Tensor, (2,)),
    ],
    ids=str,
)
def test_a_result_in_the_memory_of_an_operand_is_made_of_each(op: Any, args: Any) -> None:
    known = KnownForms()
    for _ in range(2):
        x = on_meta(4, 5)
        found = made(known, op, x, *args)
        for each in found if isinstance(found, (list, tuple)) else [found]:
            assert each.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_the_default_dtype_has_a_say() -> None:
    known, x = KnownForms(), on_meta(3, dtype=torch.int64)
    assert made(known, _aten.true_divide.Scalar, x, 2).dtype == torch.float32
    before = torch.tensor(0.0).dtype
    torch.set_default_dtype(torch.float64)
    try:
        assert made(known, _aten.true_divide.Scalar, x, 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_arguments_are_mapped_as_torch_maps_them() -> None:
    value = (1, [on_meta(2), None, (2.0,)], {"a": torch.Size([3]), "b": slice(1, 2), "c": []})
    leaves: list[Any] = []

    def number(leaf: Any) -> int:
        leaves.append(leaf)
        return len(leaves)

    mine = mapped(number, value)
    seen, leaves = leaves, []
    assert mine == pytree.tree_map(number, value)
    assert all(a is b for a, b in zip(seen, leaves, strict=True))
