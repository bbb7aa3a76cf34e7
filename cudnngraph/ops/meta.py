"""The form of an op's result from those of its operands, on torch's meta device.

torch's own meta kernels say it of every op. But many are written in Python, and the first of them
imports torch's compiler, which takes a second: here are those of the ops that models are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..ir.spec import is_dense
from .pooling import UPSAMPLE

Form = Callable[[Mapping[str, Any]], torch.Tensor | None]

#: ATen ops that change no number (in evaluation), and those that change no more than the shape.
IDENTITIES = (
    *("alias", "clone", "contiguous", "detach", "detach_", "dropout", "feature_dropout"),
    *("alpha_dropout", "lift_fresh_copy", "lift_fresh", "_to_copy"),
)
RESHAPES = (
    *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("_reshape_alias", "view_as", "reshape_as"),
)


def bind_arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an op by name."""
    names, defaults = _schema_of(op)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _schema_of(op: Any) -> tuple[list[str], dict[str, Any]]:
    """The names of an op's arguments, and the values of those that may be left out."""
    arguments = op._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return [each.name for each in arguments], defaults


def op_name(node: Any) -> str:
    """ "softmax" of a graph's node of aten.softmax.int, "users::softmax" of another's op of that
    name, "" of what is no op."""
    op = node.target
    return op._schema.name.removeprefix("aten::") if isinstance(op, torch._ops.OpOverload) else ""


def is_random(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op draws random numbers, given these arguments: attention and recurrent layers do
    so for dropout alone, and the latter in training alone."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = bind_arguments(op, args, kwargs)
    chances = ("dropout_p", "dropout", "train", "training")
    return all(given[name] for name in chances if name in given)


def _like(a: Mapping[str, Any]) -> torch.Tensor | None:
    return empty_like_meta(a["input"]) if is_dense(a["input"].shape, a["input"].stride()) else None


def empty_like_meta(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _pointwise(a: Mapping[str, Any]) -> torch.Tensor | None:
    """The result for operands of one floating dtype, laid out as the first of its shape."""
    given = [each for each in a.values() if isinstance(each, torch.Tensor)]
    x = max(given, key=lambda each: (each.numel(), each.dim()))
    if not x.is_floating_point() or any(each.dtype != x.dtype for each in given):
        return None
    if any(isinstance(each, complex) for each in a.values()):
        return None
    if not all(_spreads(each.shape, x.shape) for each in given):
        return None
    for each in given:
        if each.shape == x.shape:
            return empty_like_meta(each) if is_dense(each.shape, each.stride()) else None
        if sum(size > 1 for size in each.shape) > 1:  # then it has a say in the layout too
            return None
    return None


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
    if x.dim() not in (4, 5) or all(each.is_contiguous() for each in given):
        return torch.empty(shape, dtype=x.dtype, device="meta")
    if any(each.is_contiguous() for each in given):
        return None
    lie_last = all(_image(each.shape, each).stride() == each.stride() for each in given)
    return _image(shape, x) if lie_last else None


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


def _of_mean(a: Mapping[str, Any]) -> torch.Tensor | None:
    x, dims = a["self"], a.get("dim")
    if x.dim() < 3 or not x.is_floating_point() or a.get("dtype") not in (None, x.dtype):
        return None
    if sorted(dim % x.dim() for dim in dims or ()) != list(range(2, x.dim())):
        return None
    shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if a.get("keepdim") else x.shape[:2]
    return torch.empty(shape, dtype=x.dtype, device="meta")


def default_eps(dtype: torch.dtype) -> float:
    """The eps of torch's RMS norm if none is given: that of the dtype it computes in."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _image(shape: Sequence[int], *like: torch.Tensor) -> torch.Tensor:
    """An image that lies channels_last where any of ``like`` does."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
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
    "aten::mean": _of_mean,
    "aten::embedding": _of_embedding,
    "aten::scaled_dot_product_attention": _of_attention,
    "aten::batch_norm": _like,
    "aten::layer_norm": lambda a: torch.empty(
        a["input"].shape, dtype=a["input"].dtype, device="meta"
    ),
    **{f"aten::conv{rank}d": _of_conv(rank) for rank in (1, 2, 3)},
    **{f"aten::conv_transpose{rank}d": _of_conv_transpose(rank) for rank in (1, 2, 3)},
    "aten::cat": _of_cat,
    **{f"aten::max_pool{rank}d": _of_max(rank) for rank in (1, 2, 3)},
    **{f"aten::adaptive_avg_pool{rank}d": _of_adaptive(rank) for rank in (2, 3)},
    **{f"aten::{name}": _of_upsample for name in UPSAMPLE.values()},
}


def as_held(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its very numbers: no conjugates of them, and no negatives."""
    if not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg()


def infer(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an overload on meta tensors and return its results."""
    name = op._schema.name
    rule = FORMS.get(name)
    result = None if rule is None else rule(bind_arguments(op, args, kwargs))
    made = op(*args, **kwargs) if result is None else result
    if isinstance(made, torch.Tensor):
        return as_held(made)
    if not isinstance(made, tuple):
        return made
    given = [each.dtype for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    return tuple(
        each.to(dtype_made(op, number, each.dtype, given))
        if isinstance(each, torch.Tensor)
        else each
        for number, each in enumerate(made)
    )


#: Ops that give statistics behind their first result.
_GIVE_STATISTICS = frozenset(
    f"aten::{name}"
    for name in (
        *("native_layer_norm", "native_group_norm", "native_batch_norm"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        "_native_batch_norm_legit_no_training",
    )
)


def dtype_made(
    op: Any, number: int, traced: torch.dtype, given: Sequence[torch.dtype]
) -> torch.dtype:
    """The dtype of result ``number`` of an op of operands of the dtypes ``given``, where torch's
    meta kernels say ``traced``. They are wrong of the norms of a weight norm, float32 for float16
    weights, and of the statistics of 16-bit data, float32 beside weights of float32; gradients
    take no others."""
    norms = op is torch.ops.aten._weight_norm_interface.default and number == 1
    if norms and traced == torch.float16:
        return torch.float32
    statistics = op._schema.name in _GIVE_STATISTICS and number in (1, 2)
    return torch.float32 if statistics and torch.float32 in given else traced
