"""Rules for reductions: sums, means, extremes, norms, variances, truths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ops.base import FLOATS, LOW_PRECISION
from . import pointwise
from .base import Arguments, Rule, Skip, cast_to, gives_many, in_kernels, reads, spread
from .contraction import contracted
from .shape import part

if TYPE_CHECKING:
    from ..convert import Importer


def _reduced(mode: str) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x, dtype = c.value(a["self"]), a.get("dtype")
        if mode == "sum" and x.dtype == torch.bool:
            return _count(c, a, x)
        if dtype not in (None, x.dtype):
            if not c.kernels or dtype not in FLOATS:
                raise Skip
            x = c.g.cast(x, dtype)
        dims = a.get("dim")
        dims = None if dims is None or dims == [] else tuple(spread(dims, 1))
        if x.dtype in FLOATS and dims and all(not x.shape or x.shape[dim] == 1 for dim in dims):
            made = c.node.meta["val"]  # of one number each
            return c.g.reshape(x, made[0].shape if gives_many(c.node) else made.shape)
        if mode == "sum" and dims is not None:
            product = contracted(c, dims, keepdim=bool(a.get("keepdim", False)))
            if product is not None:
                return product
        if x.dtype in LOW_PRECISION:  # of which a reduction of ours is float32
            if mode == "mean" and c.kernels and _of_images(x, dims):
                y = c.g.adaptive_avg_pool(x, (1,) * (len(x.shape) - 2))
                return y if a.get("keepdim", False) else c.g.reshape(y, x.shape[:2])
            if c.kernels:
                return c.g.cast(c.g.reduction(x, dims, mode, bool(a.get("keepdim"))), x.dtype)
            raise Skip  # torch's own returns 16 bits of 16 bits, in one kernel
        return c.g.reduction(x, dims, mode, bool(a.get("keepdim", False)))

    return rule


MOST_COUNTED = 1 << 24  # that float32 counts


def _count(c: Importer, a: Arguments, x: Value) -> Value:
    """How many of bools are true."""
    made = c.node.meta["val"]
    if not c.kernels or math.prod(x.shape) > MOST_COUNTED * max(1, made.numel()):
        raise Skip
    dims = a.get("dim")
    dims = None if dims is None or dims == [] else tuple(spread(dims, 1))
    ones = _ones(c, x)
    return cast_to(c, c.g.reduction(ones, dims, "sum", bool(a.get("keepdim", False))), made.dtype)


def _ones(c: Importer, x: Value, dtype: torch.dtype = torch.float32) -> Value:
    """1.0 where a bool is true, else 0.0."""
    return c.g.where(x, c.constant(torch.ones((), dtype=dtype, device=c.device), "one"), 0.0)


def _largest(mode: str) -> Rule:
    """The largest or least along a dim, if nobody reads where they are."""

    def rule(c: Importer, a: Arguments) -> Any:
        if "other" in a:  # of two tensors
            return pointwise.RULES[f"{mode}imum"](c, a)
        if not gives_many(c.node):  # of all elements
            return _reduced(mode)(c, a)
        if reads(c.node, 1):
            raise Skip
        return _reduced(mode)(c, a), None

    return rule


def _least_and_largest(c: Importer, a: Arguments) -> tuple[Value, Value]:
    return _reduced("min")(c, a), _reduced("max")(c, a)


def _truth(mode: str) -> Rule:
    """Whether any element is true, or all are: the largest or least of ones and zeros."""

    def rule(c: Importer, a: Arguments) -> Value:
        x, dims = c.value(a["self"]), a.get("dim")
        if not c.kernels or 0 in x.shape or not (x.dtype in FLOATS or x.dtype == torch.bool):
            raise Skip
        if x.dtype != torch.bool:
            x = c.g.ne(x, 0.0)
        dims = None if dims is None or dims == [] else tuple(spread(dims, 1))
        found = c.g.reduction(_ones(c, x), dims, mode, bool(a.get("keepdim", False)))
        return c.g.gt(found, 0.5)

    return rule


def _wide(c: Importer, a: Arguments) -> tuple[Value, tuple[int, ...] | None]:
    """The operand of a reduction in the dtype that torch computes it in, and its dims, None for
    all."""
    x, dims = c.value(a["self"]), a.get("dim")
    given = a.get("dtype") or x.dtype
    if x.dtype not in FLOATS or given not in FLOATS:
        raise Skip
    wide = torch.float32 if given in LOW_PRECISION else given
    if x.dtype != wide:
        if not c.kernels:
            raise Skip  # torch's own is one kernel, which rounds once
        x = c.g.cast(x, wide)
    return x, None if dims is None or dims == [] else tuple(spread(dims, 1))


def _narrowed(c: Importer, a: Arguments, y: Value) -> Value:
    """A result in the dtype that is asked for, or that of the operand."""
    dtype = a.get("dtype") or c.value(a["self"]).dtype
    return y if y.dtype == dtype else c.g.cast(y, dtype)


def _vector_norm(c: Importer, a: Arguments) -> Value:
    """The norm of any order; that of order 0 counts what is not 0."""
    order = a["ord"] if "ord" in a else a.get("p")
    x, dims = _wide(c, a)
    keepdim = bool(a.get("keepdim", False))
    if order in (2, None):
        y = c.g.sqrt(c.g.reduction(c.g.mul(x, x), dims, "sum", keepdim))
    elif order in (1, math.inf, -math.inf):
        mode = "sum" if order == 1 else "max" if order > 0 else "min"
        y = c.g.reduction(c.g.abs(x), dims, mode, keepdim)
    elif not in_kernels(c, x) or not isinstance(order, (int, float)):
        raise Skip  # torch's own is one kernel
    elif order == 0:
        y = c.g.reduction(_ones(c, c.g.ne(x, 0.0), x.dtype), dims, "sum", keepdim)
    else:
        powers = c.g.pow(c.g.abs(x), float(order))
        y = c.g.pow(c.g.reduction(powers, dims, "sum", keepdim), 1.0 / order)
    return _narrowed(c, a, y)


def _weight_norm(c: Importer, a: Arguments) -> tuple[Value, Value]:
    """Vectors of a weight with lengths of their own, and the lengths that they had."""
    v, g = c.value(a["v"]), c.value(a["g"])
    dims = _but(c, a, v, g)
    norms = c.g.sqrt(c.g.reduction(c.g.mul(v, v), dims, "sum", True))
    return c.g.mul(v, c.g.div(g, norms)), norms


def _weight_norm_backward(c: Importer, a: Arguments) -> tuple[Value, Value]:
    dw, v, g, norms = (c.value(a[name]) for name in ("grad_w", "saved_v", "saved_g", "saved_norms"))
    dims = _but(c, a, dw, v, g, norms)
    along = c.g.reduction(c.g.mul(dw, v), dims, "sum", True)
    across = c.g.sub(dw, c.g.mul(v, c.g.div(along, c.g.mul(norms, norms))))
    return c.g.mul(c.g.div(g, norms), across), c.g.div(along, norms)


def _but(c: Importer, a: Arguments, v: Value, *others: Value) -> tuple[int, ...]:
    """All dims but that of a weight's vectors."""
    if not in_kernels(c, v) or {each.dtype for each in (v, *others)} != {torch.float32}:
        raise Skip  # torch's own is one kernel
    rank = len(v.shape)
    return tuple(dim for dim in range(rank) if dim != a.get("dim", 0) % rank)


def _nan_sum(c: Importer, a: Arguments) -> Value:
    """The sum of what is a number."""
    x, dims = _wide(c, a)
    if not in_kernels(c, x):
        raise Skip  # torch's own is one kernel
    numbers = c.g.where(c.g.eq(x, x), x, 0.0)
    return _narrowed(c, a, c.g.reduction(numbers, dims, "sum", bool(a.get("keepdim", False))))


def _count_nonzero(c: Importer, a: Arguments) -> Value:
    x = c.value(a["self"])
    if x.dtype != torch.bool and x.dtype not in FLOATS:
        raise Skip
    return _count(c, a, x if x.dtype == torch.bool else c.g.ne(x, 0.0))


def _spread_of(root: bool, *, mean_too: bool = False) -> Rule:
    """The variance, or its root: the squares of what is off the mean, n - correction of them."""

    def rule(c: Importer, a: Arguments) -> Any:
        x, dims = _wide(c, a)
        if not c.kernels or "unbiased" in a:
            raise Skip  # torch's own is one kernel; or another overload, which torch takes apart
        correction = a.get("correction", 1)
        over = range(len(x.shape)) if dims is None else dims
        terms = math.prod(x.shape[dim] for dim in over) - (1 if correction is None else correction)
        if terms <= 0:
            raise Skip  # no number, as torch has it
        mean = c.g.reduction(x, dims, "mean", True)
        off = c.g.sub(x, mean)
        squares = c.g.reduction(c.g.mul(off, off), dims, "sum", bool(a.get("keepdim", False)))
        y = c.g.mul(squares, 1.0 / terms)
        y = _narrowed(c, a, c.g.sqrt(y) if root else y)
        return (y, _narrowed(c, a, c.g.reshape(mean, y.shape))) if mean_too else y

    return rule


def _logsumexp(c: Importer, a: Arguments) -> Value:
    """m + log(sum(exp(x - m))) with the maximum m of x, 0 in place of one that is infinite."""
    x, dims = _wide(c, a)
    if dims is None or 0 in x.shape or not c.kernels:
        raise Skip
    most = c.g.reduction(x, dims, "max", True)
    infinite = torch.full((), math.inf, dtype=x.dtype, device=c.device)
    finite = c.g.lt(c.g.abs(most), c.constant(infinite, "infinite"))
    most = c.g.where(finite, most, 0.0)
    total = c.g.reduction(c.g.exp(c.g.sub(x, most)), dims, "sum", True)
    y = c.g.add(c.g.log(total), most)
    return _narrowed(c, a, c.g.reshape(y, tuple(c.node.meta["val"].shape)))


#: How many factors along a dim are multiplied one by one.
MOST_FACTORS = 8


def _product(c: Importer, a: Arguments) -> Value:
    """A product along a dim of few elements, in float32 for 16 bits."""
    x, made = c.value(a["self"]), c.node.meta["val"]
    if "dim" not in a or not x.shape or not in_kernels(c, x):
        raise Skip
    dim = a["dim"] % len(x.shape)
    if not 0 < x.shape[dim] <= MOST_FACTORS or not {x.dtype, made.dtype} <= {*FLOATS}:
        raise Skip
    wide = torch.promote_types(torch.float32, made.dtype)
    x = x if x.dtype == wide else c.g.cast(x, wide)
    factors = (part(c, x, dim, place, place + 1) for place in range(x.shape[dim]))
    y = c.g.reshape(reduce(c.g.mul, factors), tuple(made.shape))
    return y if made.dtype == wide else c.g.cast(y, made.dtype)


def _of_images(x: Value, dims: Sequence[int] | None) -> bool:
    """Whether dims are all those behind the channels, of one to three."""
    rank = len(x.shape)
    return rank in (3, 4, 5) and {dim % rank for dim in dims or ()} == set(range(2, rank))


RULES: dict[str, Rule] = {
    "mean": _reduced("mean"),
    "sum": _reduced("sum"),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _vector_norm),
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm_backward,
    "prod": _product,
    "nansum": _nan_sum,
    "count_nonzero": _count_nonzero,
    "var": _spread_of(root=False),
    "std": _spread_of(root=True),
    "var_mean": _spread_of(root=False, mean_too=True),
    "std_mean": _spread_of(root=True, mean_too=True),
    "aminmax": _least_and_largest,
    "any": _truth("max"),
    "all": _truth("min"),
    **dict.fromkeys(("logsumexp", "special_logsumexp"), _logsumexp),
    "amax": _reduced("max"),
    "max": _largest("max"),
    "min": _largest("min"),
    "amin": _reduced("min"),
}
