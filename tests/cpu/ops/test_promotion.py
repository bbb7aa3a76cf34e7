"""The dtype of an op on mixed operands is torch's: of dtypes, ranks, Python numbers and ops, all.

Two differences are meant. What no rule mixes is refused, where torch widens: float16 beside
bfloat16, and float64 beside another dtype of the same standing. A bool is no number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cudnngraph as cg
from tests import numerics

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (F16, BF16, F32, F64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (2, 1), (0, 3))

ARITHMETIC = ("add", "sub", "mul", "div", "pow", "minimum", "maximum")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

#: An operand: a Python number, or the dtype and the shape of a tensor.
Operand = Any
TENSORS: tuple[Operand, ...] = tuple(itertools.product(DTYPES, SHAPES))
NUMBERS: tuple[Operand, ...] = (0.5, 2, -1.0)


def by_torch(op: str, *operands: Operand) -> torch.Tensor:
    given = [torch.ones(o[1], dtype=o[0]) if isinstance(o, tuple) else o for o in operands]
    if op == "where":
        given.insert(0, torch.ones(2, 3, dtype=torch.bool))
    if op in ("minimum", "maximum"):  # torch's take no numbers
        op = "add"
    made = getattr(torch, op)(*given)
    assert isinstance(made, torch.Tensor)
    return made


def ours(op: str, *operands: Operand) -> tuple[cg.Graph, cg.Value]:
    g = cg.Graph("g")
    values = [
        g.input(f"x{place}", o[1], o[0]) if isinstance(o, tuple) else o
        for place, o in enumerate(operands)
    ]
    if op == "where":
        values.insert(0, g.input("c", (2, 3), torch.bool))
    result: cg.Value = getattr(g, op)(*values)
    return g, result


def mixes(operands: tuple[Operand, ...]) -> bool:
    """Whether the rule of the builder has a dtype for them."""
    tensors = [o for o in operands if isinstance(o, tuple)]
    decide = [o for o in tensors if o[1] != ()] or tensors
    dtypes = {dtype for dtype, _ in decide}
    return len(dtypes) < 2 or (len(dtypes) == 2 and F32 in dtypes and F64 not in dtypes)


def check(op: str, *operands: Operand) -> None:
    g, result = ours(op, *operands)
    if not mixes(operands):
        assert ["do not mix" in problem.what for problem in g.problems] == [True], operands
        return
    want = by_torch(op, *operands)
    assert not g.problems, (op, operands, g.problems)
    assert result.shape == want.shape, (op, operands)
    assert result.dtype == want.dtype, (op, operands)
    g.output("y", result)
    assert g.spec().tensors["y"].dtype == want.dtype


def broadcasts(op: str, *operands: Operand) -> bool:
    shapes = [o[1] for o in operands if isinstance(o, tuple)] + [(2, 3)] * (op == "where")
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("op", [*ARITHMETIC, *COMPARISONS, "where"])
def test_a_tensor_beside_a_number_has_torchs_dtype(op: str) -> None:
    for pair in itertools.product(TENSORS, NUMBERS):
        # torch compares no number with a tensor, only a tensor with a number.
        for operands in (pair,) if op in COMPARISONS else (pair, pair[::-1]):
            if broadcasts(op, *operands):
                check(op, *operands)


@pytest.mark.parametrize("op", [*ARITHMETIC, *COMPARISONS, "where"])
def test_two_tensors_have_torchs_dtype(op: str) -> None:
    for pair in itertools.product(TENSORS, TENSORS):
        if broadcasts(op, *pair):
            check(op, *pair)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "radd": lambda x, y: y + x,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: y - x,
    "mul": lambda x, y: x * y,
    "rmul": lambda x, y: y * x,
    "div": lambda x, y: x / y,
    "rdiv": lambda x, y: y / x,
    "pow": lambda x, y: x**y,
    "rpow": lambda x, y: y**x,
    "lt": lambda x, y: x < y,
    "ge": lambda x, y: x >= y,
    "chain": lambda x, y: ((x * y + 1) / 4 - y) * 0.125,
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_take_numbers_and_give_torchs_dtype_and_result(
    dtype: torch.dtype, shape: tuple[int, ...], name: str
) -> None:
    """The numbers fit in 16 bits, so that rounding between the ops changes nothing."""
    apply = OPERATORS[name]
    x = torch.full(shape, 4.0).to(dtype)
    g = cg.Graph("g")
    g.output("y", apply(g.input("x", shape, dtype), 2))
    found, want = g.compile("cpu")(x=x), apply(x, 2)
    assert found.dtype == want.dtype and torch.equal(found, want)


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_no_number(value: bool) -> None:
    g = cg.Graph("g")
    g.add(g.input("x", (), F64), value)
    assert [problem.what for problem in g.problems] == ["y is a bool"]


def test_two_numbers_alone_are_float32() -> None:
    g = cg.Graph("g")
    assert g.add(0.5, 2).dtype == F32
    assert g.where(g.input("c", (3,), torch.bool), 1, 0.0).dtype == F32


def test_a_number_taken_back_leaves_no_trace() -> None:
    """An op that is named as the number was is a value like others."""
    g = cg.Graph("g")
    x = g.input("x", (), F16)
    mark = g.mark()
    x * 2.0
    g.undo(mark)
    wide = g.identity(g.input("w", (), F32), name="constant")
    assert (x * wide).dtype == F32 and (x * 2.0).dtype == F16


def test_a_constant_is_exact_in_float64() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (), F64) * 0.1)
    assert g.compile("cpu")(x=torch.tensor(3.0, dtype=F64)).item() == 3.0 * 0.1


LOSSES: dict[str, Callable[[cg.Graph, cg.Value], cg.Value]] = {
    "mean": lambda g, y: g.reduction(y, None, "mean"),
    "sum": lambda g, y: g.reduction(y, None, "sum"),
    "half the mean": lambda g, y: g.reduction(y * y, None, "mean") * 0.5,
    "root of the mean": lambda g, y: g.sqrt(g.reduction(y * y, None, "mean") + 1e-3),
    "mean of means": lambda g, y: g.reduction(g.reduction(y, (1,), "mean"), None, "mean"),
    "scaled by a number of no dims": lambda g, y: y * (1.0 / (1 + g.reduction(y * y, None, "sum"))),
    "largest": lambda g, y: g.reduction(y, None, "max") * 2,
    "power": lambda g, y: (g.reduction(y * y, None, "mean") + 1) ** 1.5,
    "clamped": lambda g, y: g.clamp(g.reduction(y, None, "mean"), -1.0, 1.0) / 3,
    "chosen": lambda g, y: g.where(
        g.reduction(y, None, "sum") > 0.0, g.reduction(y, None, "mean"), 0.25
    ),
}


def loss_by_torch(name: str, y: torch.Tensor) -> torch.Tensor:
    return {
        "mean": lambda: y.mean(),
        "sum": lambda: y.sum(),
        "half the mean": lambda: (y * y).mean() * 0.5,
        "root of the mean": lambda: ((y * y).mean() + 1e-3).sqrt(),
        "mean of means": lambda: y.mean(1).mean(),
        "scaled by a number of no dims": lambda: y * (1.0 / (1 + (y * y).sum())),
        "largest": lambda: y.max() * 2,
        "power": lambda: ((y * y).mean() + 1) ** 1.5,
        "clamped": lambda: y.mean().clamp(-1.0, 1.0) / 3,
        "chosen": lambda: torch.where(y.sum() > 0, y.mean(), 0.25),
    }[name]()


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_no_dims_trains(name: str, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=gen, dtype=F64).to(dtype) for s in ((4, 5), (5, 3)))
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    wide = [t.double().requires_grad_() for t in (x, w)]
    g = cg.Graph("loss")
    y = g.matmul(g.input("x", like=x), g.input("w", like=w))
    g.output("loss", LOSSES[name](g, y))
    loss = g.compile("cpu", training=True)(*leaves)
    want = loss_by_torch(name, wide[0] @ wide[1])
    assert loss.dtype == dtype and loss.shape == want.shape
    found = torch.autograd.grad(loss.sum(), leaves)
    right = torch.autograd.grad(want.sum(), wide)
    for a, b in zip((loss, *found), (want, *right), strict=True):
        assert a.dtype == dtype
        numerics.check(a.detach(), b.detach(), dtype, terms=12, what=name)
