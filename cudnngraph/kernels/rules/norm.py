"""Norms in kernels: of rows, of groups and of images, with their statistics and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...ir.spec import Node, TensorSpec
from ..scalars import number
from ..tape import Value, add, along, count_of, mapped, mean, mul, reduced, reshape, sub, times
from ..tape import variance as variance_of
from .pointwise import Operands


def _inverse(variance: Value, eps: float) -> Value:
    return mapped(lambda v: f"inverse_root({v} + {number(eps)})", variance)


def _normal(x: Value, dims: Sequence[int], eps: float) -> tuple[Value, Value, Value]:
    """x with mean 0 and variance 1 over dims, its mean, and one over its deviation."""
    middle = mean(x, dims)
    inverse = _inverse(variance_of(x, middle), eps)
    return mul(sub(x, middle), inverse), middle, inverse


def _scaled(y: Value, weight: Value | None, bias: Value | None) -> Value:
    y = y if weight is None else mul(y, weight)
    return y if bias is None else add(y, bias)


def _trailing(x: Value, weight: Value) -> tuple[int, ...]:
    """The dims that a norm over the dims of its weight reduces."""
    rank = len(x.shape)
    return tuple(range(rank - len(weight.shape), rank))


def layer_norm(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Results y, mean and inv_std."""
    x, weight, bias = operands
    assert x is not None and weight is not None
    y, *statistics = _normal(x, _trailing(x, weight), node.attr("eps"))
    return (_scaled(y, weight, bias), *statistics)


def rms_norm(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Results y and inv_std."""
    x, weight, bias = operands
    assert x is not None and weight is not None
    inverse = _inverse(mean(mul(x, x), _trailing(x, weight)), node.attr("eps"))
    return _scaled(mul(x, inverse), weight, bias), inverse


def normalize(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """x by the length of its rows, which is at least eps."""
    (x,) = operands
    assert x is not None
    squares = reduced("sum", mul(x, x), (len(x.shape) - 1,))
    eps = number(node.attr("eps"))
    length = mapped(lambda s: f"larger(sqrtf({s}), {eps})", squares)
    return (mapped(lambda a, b: f"divided({a}, {b})", x, length),)


def instance_norm(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Results y, mean and inv_std."""
    x, weight, bias = operands
    assert x is not None
    rank = len(x.shape)
    y, *statistics = _normal(x, tuple(range(2, rank)), node.attr("eps"))
    vectors = (_column(each, rank) for each in (weight, bias))
    return (_scaled(y, *vectors), *statistics)


def _column(vector: Value | None, rank: int) -> Value | None:
    return along(vector, 1, rank) if vector is not None and len(vector.shape) == 1 else vector


def instance_norm_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Results dx, dweight and dbias; the sums of an image serve all three."""
    dy, x, middle, inverse = _all(operands[:4])
    rank, weight = len(x.shape), operands[4]
    dims = tuple(range(2, rank))
    normal = mul(sub(x, middle), inverse)
    total, product = reduced("sum", dy, dims), reduced("sum", mul(dy, normal), dims)
    count = count_of(x, dims)
    pull = add(times(total, 1.0 / count), mul(normal, times(product, 1.0 / count)))
    dx = mul(inverse, sub(dy, pull))
    if weight is None:
        return (dx,)
    sums = (
        (product, total)
        if x.shape[0] == 1
        else (reduced("sum", each, (0,)) for each in (product, total))
    )
    return (mul(dx, _channels(weight, rank)), *(reshape(each, weight.shape) for each in sums))


def batch_norm_train(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Results y, mean, inv_std, and the running statistics that follow."""
    x, weight, bias, running_mean, running_var = operands
    assert x is not None and weight is not None and bias is not None
    rank = len(x.shape)
    dims = tuple(dim for dim in range(rank) if dim != 1)
    middle = mean(x, dims)
    variance = variance_of(x, middle)
    inverse = _inverse(variance, node.attr("eps"))
    factor = mul(inverse, _channels(weight, rank))  # of a channel: one register instead of two
    y = add(mul(sub(x, middle), factor), _channels(bias, rank))
    vector = (x.shape[1],)
    found = (y, reshape(middle, vector), reshape(inverse, vector))
    if running_mean is None or running_var is None:
        return found
    count, momentum = count_of(x, dims), node.attr("momentum")
    unbiased = times(variance, count / (count - 1))
    following = (
        add(times(old, 1.0 - momentum), times(reshape(now, old.shape), momentum))
        for old, now in ((running_mean, middle), (running_var, unbiased))
    )
    return (*found, *following)


def batch_norm_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Results dx, dweight and dbias."""
    dy, x, *vectors = _all(operands)
    rank, shape = len(x.shape), vectors[0].shape
    weight, middle, inverse = (_channels(each, rank) for each in vectors)
    dims = tuple(dim for dim in range(rank) if dim != 1)
    # What is one number for a channel stays out of the loops over its elements.
    centred = sub(x, middle)
    dbias = reduced("sum", dy, dims)
    dweight = mul(reduced("sum", mul(dy, centred), dims), inverse)
    share, factor = -1.0 / count_of(x, dims), mul(weight, inverse)
    slope = mul(mul(factor, inverse), times(dweight, share))
    dx = add(mul(dy, factor), add(mul(centred, slope), mul(factor, times(dbias, share))))
    return dx, reshape(dweight, shape), reshape(dbias, shape)


def _channels(vector: Value, rank: int) -> Value:
    """A number for each channel, along dim 1 of a rank."""
    return reshape(
        vector, [count_of(vector, range(len(vector.shape))) if at == 1 else 1 for at in range(rank)]
    )


def group_affine(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Results shift and factor of each channel of each image."""
    x, weight = operands
    assert x is not None
    n, c, *pixels = x.shape
    groups = node.attr("num_groups")
    rows = reshape(x, (n, groups, c // groups, *pixels))
    _, middle, inverse = _normal(rows, tuple(range(2, len(rows.shape))), node.attr("eps"))
    wide = (n, groups, c // groups, *(1,) * len(pixels))
    ones = _ones(wide)
    shift, factor = mapped(lambda a, b: f"(-{a})", middle, ones), mul(inverse, ones)
    if weight is not None:
        column = reshape(weight, (1, groups, c // groups, *(1,) * len(pixels)))
        factor = mul(factor, column)
    to = (n, c, *(1,) * len(pixels))
    return reshape(shift, to), reshape(factor, to)


def _ones(shape: tuple[int, ...]) -> Value:
    """1 in a shape: what it is multiplied with is broadcast."""
    from ..tape import Map

    return Map(shape, (), lambda args: "1.0f")


def layer_norm_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Results dx, dweight and dbias."""
    dy, x, weight, middle, inverse = _all(operands)
    return _backward(dy, mul(sub(x, middle), inverse), weight, inverse, centred=True)


def rms_norm_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Results dx, dweight and dbias."""
    dy, x, weight, inverse = _all(operands)
    return _backward(dy, mul(x, inverse), weight, inverse, centred=False)


def _backward(
    dy: Value, normal: Value, weight: Value, inverse: Value, *, centred: bool
) -> tuple[Value, ...]:
    dims, lead = _trailing(dy, weight), tuple(range(len(dy.shape) - len(weight.shape)))
    scaled = mul(dy, weight)
    pull = mul(normal, mean(mul(scaled, normal), dims))
    if centred:
        pull = add(pull, mean(scaled, dims))
    sums = (reduced("sum", each, lead) for each in (mul(dy, normal), dy))
    vectors = (reshape(each, weight.shape) for each in sums)
    return (mul(inverse, sub(scaled, pull)), *vectors)


def _all(operands: Operands) -> list[Value]:
    found = [value for value in operands if value is not None]
    assert len(found) == len(operands)
    return found


def pixels_of(x: Value) -> int:
    """How many elements a channel of an image has."""
    return math.prod(x.shape[2:])
