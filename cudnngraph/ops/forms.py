"""The form of an op's result from those of its operands.

torch's own meta kernels say it of every op. But many are written in Python, and the first of them
imports torch's compiler, which takes a second: here are those of pointwise ops, and of others that
models are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..ir.spec import contiguous_strides, dense_strides, is_dense
from .checks import broadcast_shapes
from .pooling import UPSAMPLE

Form = Callable[[Mapping[str, Any]], torch.Tensor | None]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dims


def _like(a: Mapping[str, Any]) -> torch.Tensor | None:
    return empty_like_meta(a["input"]) if is_dense(a["input"].shape, a["input"].stride()) else None


def empty_like_meta(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _pointwise(a: Mapping[str, Any]) -> torch.Tensor | None:
    """The result for operands of one floating dtype."""
    given = [each for each in a.values() if isinstance(each, torch.Tensor)]
    x = given[0]
    if not x.is_floating_point() or any(each.dtype != x.dtype for each in given):
        return None
    if any(isinstance(each, complex) for each in a.values()):
        return None
    laid = _laid_as(given)
    if laid is None:
        return None
    return torch.empty_strided(laid.shape, laid.stride(), dtype=x.dtype, device="meta")


def elementwise(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The result of an op that torch says is pointwise: its dtype is what the op makes of one
    number of each operand, on the CPU."""
    if not _is_pointwise(op) or any(isinstance(x, _PLACES) for x in (*args, *kwargs.values())):
        return None
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    strided = all(each.layout == torch.strided and not each.is_complex() for each in given)
    if not strided:
        return None
    laid = _laid_as(given)
    if laid is None or not (laid.is_contiguous() or _has_kernel(op)):
        return None
    ones = [torch.ones((1,) * each.dim(), dtype=each.dtype, device="cpu") for each in given]
    left = iter(ones)
    held = [next(left) if isinstance(each, torch.Tensor) else each for each in args]
    named = {
        name: next(left) if isinstance(each, torch.Tensor) else each
        for name, each in kwargs.items()
    }
    try:
        made = op(*held, **named)
    except RuntimeError:  # torch says why, or the CPU has no such kernel
        return None
    if type(made) is not torch.Tensor or any(made is each for each in ones):
        return None
    return torch.empty_strided(laid.shape, laid.stride(), dtype=made.dtype, device="meta")


_PLACES = (torch.device, torch.layout, torch.memory_format)  # that an operand is copied to


@cache
def _is_pointwise(op: Any) -> bool:
    drawn = torch.Tag.nondeterministic_seeded in op.tags
    return torch.Tag.pointwise in op.tags and not drawn and not op._schema.is_mutable


@cache
def _has_kernel(op: Any) -> bool:
    """Whether an op is no composite of others, any of which may lay out what it makes."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"))


def _laid_as(given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What a pointwise op's result lies like: the first operand of its shape, without gaps, if
    those before have no say in that; or its operands if all lie in rows."""
    x = max(given, key=lambda each: (each.numel(), each.dim()), default=None)
    if x is None or not all(_spreads(each.shape, x.shape) for each in given):
        return _in_rows(given)
    for each in given:
        if each.shape == x.shape:
            if is_dense(each.shape, each.stride()):
                return each
            others = [other for other in given if other is not each and _has_a_say(other)]
            return _without_gaps(each) if all(_lie_alike(each, x) for x in others) else None
        if _has_a_say(each):
            break
    return _in_rows(given)


def _in_rows(given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A tensor of the shape that operands are broadcast to, if all of them lie in rows."""
    if not given or any(each.stride() != contiguous_strides(each.shape) for each in given):
        return None
    try:
        return torch.empty(broadcast_shapes([tuple(x.shape) for x in given]), device="meta")
    except ValueError:
        return None


def _has_a_say(x: torch.Tensor) -> bool:
    """Whether an operand's layout may be that of a result."""
    return sum(size > 1 for size in x.shape) > 1


def _lie_alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and x.stride() == y.stride()


def _without_gaps(x: torch.Tensor) -> torch.Tensor | None:
    """A tensor whose dims lie in the order of another's, if that is plain."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    if 0 in strides or len(set(strides)) < len(strides):
        return None
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return torch.empty_strided(x.shape, dense_strides(x.shape, order), device="meta")


def _spreads(shape: Sequence[int], over: Sequence[int]) -> bool:
    """Whether what has ``shape`` is broadcast over all of ``over``."""
    ends = list(over[len(over) - len(shape) :])
    return len(shape) <= len(over) and all(n in (1, m) for n, m in zip(shape, ends, strict=True))


def _of_cat(a: Mapping[str, Any]) -> torch.Tensor | None:
    given, dim = list(a["tensors"]), a["dim"]
    x = given[0]
    if not -x.dim() <= dim < x.dim() or any(each.dtype != x.dtype for each in given):
        return None
    dim %= x.dim()
    if len({(*each.shape[:dim], *each.shape[dim + 1 :]) for each in given}) > 1:
        return None
    total = sum(each.shape[dim] for each in given)
    shape = (*x.shape[:dim], total, *x.shape[dim + 1 :])
    last = LAST.get(x.dim()) if all(map(_channels_lie_last, given)) else None
    form = last or torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device="meta", memory_format=form)


def _channels_lie_last(x: torch.Tensor) -> bool:
    """Whether torch takes strides, of what has gaps too, for those of channels_last."""
    if x.dim() not in LAST:
        return False
    least, channels = 0, x.stride(1)
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.shape[dim] == 0 or x.stride(dim) < least or (dim == 0 and least == channels):
            return False
        least = x.stride(dim) * max(x.shape[dim], 1)
    return channels > 0


def _of_stack(a: Mapping[str, Any]) -> torch.Tensor | None:
    given, dim = list(a["tensors"]), a["dim"]
    x = given[0]
    if not -x.dim() - 1 <= dim <= x.dim() or not all(each.is_contiguous() for each in given):
        return None
    if any(each.dtype != x.dtype or each.shape != x.shape for each in given):
        return None
    dim %= x.dim() + 1
    shape = (*x.shape[:dim], len(given), *x.shape[dim:])
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _of_embedding(a: Mapping[str, Any]) -> torch.Tensor:
    weight, indices = a["weight"], a["indices"]
    return torch.empty((*indices.shape, weight.shape[1]), dtype=weight.dtype, device="meta")


def _of_attention(a: Mapping[str, Any]) -> torch.Tensor | None:
    q, k, v = a["query"], a["key"], a["value"]
    if q.dim() != 4 or q.dtype != k.dtype or k.dtype != v.dtype:
        return None
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        return None
    return torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device="meta")


def _of_upsample(a: Mapping[str, Any]) -> torch.Tensor | None:
    x, sizes = a.get("self", a.get("input")), a["output_size"]
    if sizes is None:
        scales = a.get("scale_factors") or ()
        sizes = [int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=False)]
    return _image((*x.shape[:2], *sizes), x) if len(sizes) == x.dim() - 2 else None


def _of_conv(rank: int) -> Form:
    def rule(a: Mapping[str, Any]) -> torch.Tensor | None:
        x, weight, padding = a["input"], a["weight"], a["padding"]
        if isinstance(padding, str) or x.dim() != rank + 2 or weight.dim() != rank + 2:
            return None
        if x.dtype != weight.dtype or x.shape[1] != weight.shape[1] * a["groups"]:
            return None
        given = (a["stride"], padding, a["dilation"])
        rows = zip(x.shape[2:], weight.shape[2:], *(each * rank for each in given), strict=False)
        sizes = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows]
        if any(size < 1 for size in sizes):
            return None
        return _image((x.shape[0], weight.shape[0], *sizes), x, weight)

    return rule


def _of_conv_transpose(rank: int) -> Form:
    def rule(a: Mapping[str, Any]) -> torch.Tensor | None:
        x, weight = a["input"], a["weight"]
        if x.dim() != rank + 2 or weight.dim() != rank + 2:
            return None
        if x.dtype != weight.dtype or x.shape[1] != weight.shape[0]:
            return None
        given = (a["stride"], a["padding"], a["dilation"], a["output_padding"])
        rows = zip(x.shape[2:], weight.shape[2:], *(each * rank for each in given), strict=False)
        sizes = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in rows]
        if any(size < 1 for size in sizes):
            return None
        return _image((x.shape[0], weight.shape[1] * a["groups"], *sizes), x, weight)

    return rule


def _of_max(rank: int) -> Form:
    def rule(a: Mapping[str, Any]) -> torch.Tensor | None:
        x, kernel = a["self"], list(a["kernel_size"])
        if x.dim() != rank + 2 or a["ceil_mode"]:
            return None
        given = (kernel, a["stride"] or kernel, a["padding"], a["dilation"])
        rows = zip(x.shape[2:], *(list(each) * rank for each in given), strict=False)
        sizes = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows]
        return _image((*x.shape[:2], *sizes), x) if all(size > 0 for size in sizes) else None

    return rule


def _of_linear(a: Mapping[str, Any]) -> torch.Tensor | None:
    x, weight = a["input"], a["weight"]
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return None
    shape = (*x.shape[:-1], weight.shape[0])
    return torch.empty(shape, dtype=x.dtype, device="meta") if x.dtype == weight.dtype else None


def _of_grouped(a: Mapping[str, Any]) -> torch.Tensor | None:
    """The product of groups: of rows, of columns, of terms, or of whole matrices.

    In rows without gaps; torch's own pads them, and has no form for other dtypes than bfloat16."""
    x, y, ends = a["self"], a["mat2"], a["offs"]
    ranks = x.dim(), y.dim()
    if ranks not in ((2, 2), (2, 3), (3, 2), (3, 3)) or (ends is None) != (ranks == (3, 3)):
        return None
    if x.dtype != y.dtype or x.shape[-1] != y.shape[-2]:
        return None
    if a["bias"] is not None or a["out_dtype"] is not None:
        return None
    of = {(2, 2): ends, (3, 3): x}.get(ranks)
    groups = () if of is None else of.shape[:1]
    return torch.empty((*groups, x.shape[-2], y.shape[-1]), dtype=x.dtype, device="meta")


def _of_adaptive(rank: int) -> Form:
    def rule(a: Mapping[str, Any]) -> torch.Tensor | None:
        x, sizes = a["self"], list(a["output_size"])
        if x.dim() != rank + 2 or len(sizes) != rank or any(size < 1 for size in sizes):
            return None
        return _image((*x.shape[:2], *sizes), x)

    return rule


def _as_contiguous(takes: Callable[[torch.Tensor, Mapping[str, Any]], bool]) -> Form:
    """A rule of a result that is like a contiguous operand, if torch ``takes`` the others and
    nothing has another dtype."""

    def rule(a: Mapping[str, Any]) -> torch.Tensor | None:
        x = a.get("self", a.get("input"))
        if not x.is_contiguous() or not x.is_floating_point() or a.get("half_to_float"):
            return None
        tensors = (each for each in a.values() if isinstance(each, torch.Tensor))
        dtypes = {a.get("dtype") or x.dtype, *(each.dtype for each in tensors)}
        return empty_like_meta(x) if dtypes == {x.dtype} and takes(x, a) else None

    return rule


def _has_dim(x: torch.Tensor, a: Mapping[str, Any]) -> bool:
    dim: int = a["dim"]
    return -x.dim() <= dim < x.dim()


def _rolls(x: torch.Tensor, a: Mapping[str, Any]) -> bool:
    dims = a["dims"] or ()
    return len(dims) == len(a["shifts"]) and all(-x.dim() <= dim < x.dim() for dim in dims)


def _norms(x: torch.Tensor, a: Mapping[str, Any]) -> bool:
    """Whether torch takes the norm of groups, or of each channel."""
    names = ("weight", "bias", "running_mean", "running_var")
    held = (a[name] for name in names if a.get(name) is not None)
    if x.dim() < 2 or any(each.shape != x.shape[1:2] for each in held):
        return False
    groups = int(a.get("num_groups", 1))
    return groups > 0 and x.shape[1] % groups == 0


def _of_glu(a: Mapping[str, Any]) -> torch.Tensor | None:
    x, dim = a["self"], a["dim"]
    if not x.is_contiguous() or not -x.dim() <= dim < x.dim() or x.shape[dim] % 2:
        return None
    shape = list(x.shape)
    shape[dim] //= 2
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _of_any(a: Mapping[str, Any]) -> torch.Tensor | None:
    x, dim = a["self"], a.get("dim")
    if x.dtype != torch.bool:
        return None
    return _over(x, [dim] if isinstance(dim, int) else dim, a.get("keepdim"))


def _of_addmm(a: Mapping[str, Any]) -> torch.Tensor | None:
    added, x, y = a["self"], a["mat1"], a["mat2"]
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[0]:
        return None
    shape = (x.shape[0], y.shape[1])
    if not added.dtype == x.dtype == y.dtype or not _spreads(added.shape, shape):
        return None
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _of_rms_norm(a: Mapping[str, Any]) -> torch.Tensor | None:
    x, weight = a["input"], a["weight"]
    sizes = list(a["normalized_shape"])
    given = [x] if weight is None else [x, weight]
    if not x.is_contiguous() or any(each.dtype != x.dtype for each in given):
        return None
    if not sizes or list(x.shape[x.dim() - len(sizes) :]) != sizes:
        return None
    if weight is not None and list(weight.shape) != sizes:
        return None
    return empty_like_meta(x)


def _of_reduced(a: Mapping[str, Any]) -> torch.Tensor | None:
    """A mean, a deviation or a norm over some dims, or all, of its operand's dtype."""
    x = a["self"]
    if not x.is_floating_point() or a.get("dtype") not in (None, x.dtype):
        return None
    return _over(x, a.get("dim"), a.get("keepdim"))


def _over(x: torch.Tensor, dims: Sequence[int] | None, keepdim: Any) -> torch.Tensor | None:
    """What a reduction over dims, all for None, makes of a tensor. Of no dims ops differ."""
    if dims is not None and not dims:
        return None
    dims = range(x.dim()) if dims is None else dims
    over = {dim % x.dim() for dim in dims if -x.dim() <= dim < x.dim()}
    if len(over) != len(dims):
        return None
    sizes = [1 if at in over else size for at, size in enumerate(x.shape)]
    shape = sizes if keepdim else [size for at, size in enumerate(sizes) if at not in over]
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _image(shape: Sequence[int], *like: torch.Tensor) -> torch.Tensor:
    """An image that lies channels_last where any of ``like`` does."""
    last = LAST.get(len(shape))
    lies_last = (
        last is not None
        and not all(each.is_contiguous() for each in like)
        and any(each.is_contiguous(memory_format=last) for each in like)
    )
    form = last if lies_last else torch.contiguous_format
    return torch.empty(shape, dtype=like[0].dtype, device="meta", memory_format=form)


#: By the op's name; None of a rule leaves it to torch.
FORMS: Mapping[str, Form] = {
    **{
        f"aten::{name}": _pointwise
        for name in (
            *("relu", "sigmoid", "tanh", "silu", "gelu", "hardswish", "hardsigmoid", "leaky_relu"),
            *("elu", "hardtanh", "softplus", "mish", "add", "sub", "mul", "div"),
        )
    },
    "aten::linear": _of_linear,
    "aten::_grouped_mm": _of_grouped,
    "aten::addmm": _of_addmm,
    "aten::rms_norm": _of_rms_norm,
    **{
        f"aten::{name}": _as_contiguous(_has_dim)
        for name in ("cumsum", "cumprod", "log_softmax", "_log_softmax")
    },
    "aten::roll": _as_contiguous(_rolls),
    **{f"aten::{name}": _as_contiguous(lambda x, a: x.dim() > 1) for name in ("tril", "triu")},
    "aten::_prelu_kernel": _as_contiguous(lambda x, a: _spreads(a["weight"].shape, x.shape)),
    **{f"aten::{name}": _as_contiguous(_norms) for name in ("group_norm", "instance_norm")},
    "aten::glu": _of_glu,
    **{
        f"aten::{name}": _of_reduced
        for name in ("mean", "std", "var", "logsumexp", "linalg_vector_norm")
    },
    **{f"aten::{name}": _of_any for name in ("any", "all")},
    "aten::embedding": _of_embedding,
    "aten::scaled_dot_product_attention": _of_attention,
    "aten::batch_norm": _like,
    "aten::layer_norm": lambda a: torch.empty(
        a["input"].shape, dtype=a["input"].dtype, device="meta"
    ),
    **{f"aten::conv{rank}d": _of_conv(rank) for rank in (1, 2, 3)},
    **{f"aten::conv_transpose{rank}d": _of_conv_transpose(rank) for rank in (1, 2, 3)},
    "aten::cat": _of_cat,
    "aten::stack": _of_stack,
    **{f"aten::max_pool{rank}d": _of_max(rank) for rank in (1, 2, 3)},
    **{f"aten::adaptive_avg_pool{rank}d": _of_adaptive(rank) for rank in (2, 3)},
    **{f"aten::{name}": _of_upsample for name in UPSAMPLE.values()},
}
