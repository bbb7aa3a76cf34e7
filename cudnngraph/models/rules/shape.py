"""Rules for ops that move or copy elements: views, slices, joins, padding and constant fills."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from ...graph.core import scalar
from ...graph.value import Value, set_stride
from ...ir.spec import (
    dense_strides,
    overlaps_itself,
    same_layout,
    view_strides,
)
from ...ops import meta as forms
from ...ops.base import FLOATS
from ...ops.checks import like_order
from ...ops.views import order
from ..aten_ops import CONVOLUTION_NAMES, MEANS, OF_BATCHES, UPSAMPLES
from .base import Arguments, Rule, Skip, first
from .norm import written_norm

if TYPE_CHECKING:
    from ..convert import Importer


def _full(number: float | None) -> Rule:
    """A tensor of one number, of whatever operand it takes the form: a constant, unless large. It
    lies as it did when the model was traced, as those that are computed of it expect."""

    def rule(c: Importer, a: Arguments) -> torch.Tensor:
        seen = c.node.meta["val"]
        near = next((each for each in c.constants.values() if each.dim()), None)
        device = seen.device if near is None else near.device
        value = a.get("fill_value", a.get("value")) if number is None else number
        if isinstance(value, torch.Tensor) and not value.is_meta:
            value = value.item()
        if device.type == "meta" or seen.numel() > MOST_FILLED:
            raise Skip
        asked = {torch.device(each).type for each in (seen.device, a.get("device")) if each}
        if not asked <= {"meta", device.type} or not isinstance(value, (int, float)):
            raise Skip
        stride = tuple(seen.stride())
        made = torch.empty_strided(seen.shape, stride, dtype=seen.dtype, device=device)
        return made.fill_(value)

    return rule


def _filled(c: Importer, shape: Sequence[int], like: Value, number: float) -> Value:
    """A tensor of one number in the dtype of another of its rank, and laid out as that is."""
    one = scalar(c.g, number)
    if like.dtype != torch.float32:
        one = c.g.cast(one, like.dtype)
    made = c.g.expand(one, tuple(shape), ())
    if made.spec is not None and like.spec is not None:
        set_stride(made, dense_strides(tuple(shape), like_order(like.spec)))
    return made


def between(c: Importer, x: Value, dim: int, before: int, behind: int, number: float) -> Value:
    """x with so many slices of one number before and behind it; cut, if that is below zero."""
    size = x.shape[dim]
    if before < 0 or behind < 0:
        x = part(c, x, dim, max(0, -before), size - max(0, -behind))
    parts = [
        _filled(c, (*x.shape[:dim], count, *x.shape[dim + 1 :]), x, number) if count > 0 else None
        for count in (before, behind)
    ]
    given = [each for each in (parts[0], x, parts[1]) if each is not None]
    return c.g.concat(given, dim) if len(given) > 1 else x


def _pad(c: Importer, a: Arguments) -> Value:
    """A dim after another: of several, torch's own copies once, and so does a generated kernel."""
    x, pads = c.value(a["self"]), list(a["pad"])
    dims = sum(any(pads[at : at + 2]) for at in range(0, len(pads), 2))
    if a.get("mode", "constant") != "constant" or (dims > 1 and not c.kernels):
        raise Skip
    number = float(a.get("value") or 0.0)
    if any(pads) and (x.dtype not in FLOATS or not math.isfinite(number)):
        raise Skip
    for place in range(len(pads) // 2):
        before, behind = pads[2 * place : 2 * place + 2]
        x = between(c, x, len(x.shape) - 1 - place, before, behind, number)
    return x


def _slice_backward(c: Importer, a: Arguments) -> Value:
    dy, sizes = c.value(a["grad_output"]), list(a["input_sizes"])
    dim = a["dim"] % len(sizes)
    taken = range(*slice(a["start"], a["end"], a["step"]).indices(sizes[dim]))
    if not taken or dy.dtype not in FLOATS:
        raise Skip
    if taken.step > 1:  # zeros between the elements: a dim of its own, merged again
        apart = c.g.reshape(dy, (*dy.shape[: dim + 1], 1, *dy.shape[dim + 1 :]))
        apart = between(c, apart, dim + 1, 0, taken.step - 1, 0.0)
        dy = c.g.reshape(apart, (*dy.shape[:dim], len(taken) * taken.step, *dy.shape[dim + 1 :]))
    return between(c, dy, dim, taken.start, sizes[dim] - taken.start - dy.shape[dim], 0.0)


def _select_backward(c: Importer, a: Arguments) -> Value:
    dy, sizes = c.value(a["grad_output"]), list(a["input_sizes"])
    dim = a["dim"] % len(sizes)
    index = a["index"] % sizes[dim]
    if dy.dtype not in FLOATS:
        raise Skip
    apart = c.g.reshape(dy, (*sizes[:dim], 1, *sizes[dim + 1 :]))
    return between(c, apart, dim, index, sizes[dim] - index - 1, 0.0)


def _relabels(source: torch.Tensor, made: Any) -> bool:
    """Whether as_strided gives the tensor itself, but for the strides of dims of one element."""
    return (
        isinstance(made, torch.Tensor)
        and made.shape == source.shape
        and made.storage_offset() == source.storage_offset()
        and same_layout(tuple(source.shape), made.stride(), source.stride())
    )


MOST_PLACED = 1 << 24  # places in memory that are gone through


def _places(seen: torch.Tensor, a: Arguments) -> torch.Tensor:
    """The elements, counted in the tensor's order, at the places that ``as_strided`` reads."""
    start = seen.storage_offset() if a["storage_offset"] is None else int(a["storage_offset"])
    size, stride = list(a["size"]), list(a["stride"])
    first = min(start, seen.storage_offset())
    forms = (
        (list(seen.shape), list(seen.stride()), seen.storage_offset() - first),
        (size, stride, start - first),
    )
    extent = max(
        1 + begin + sum((n - 1) * step for n, step in zip(*form, strict=True))
        if all(form[0])
        else 0
        for *form, begin in forms
    )
    if extent > MOST_PLACED or not seen.numel():
        raise Skip
    elements = torch.full((extent,), -1)
    torch.as_strided(elements, *forms[0]).copy_(torch.arange(seen.numel()).view(seen.shape))
    found = torch.as_strided(elements, *forms[1])
    if bool((found < 0).any()):
        raise Skip  # it is memory of something else
    return found.clone(memory_format=torch.contiguous_format)


def in_order(places: torch.Tensor) -> bool:
    return bool((places.flatten() == torch.arange(places.numel())).all())


def _as_strided(c: Importer, a: Arguments) -> Any:
    """The elements that lay there when the model was traced."""
    seen, x = c.node.args[0].meta["val"], c.value(a["self"])
    if _relabels(seen, c.node.meta["val"]):
        return x
    places = _places(seen, a)
    if places.numel() == seen.numel() and in_order(places) and x.dtype in FLOATS:
        return c.g.reshape(x, tuple(places.shape))
    places = places.to(c.device)
    return c.left_to_torch("aten.take.default", [x, places], {}, c.node, image=False)


def _as_strided_scatter(c: Importer, a: Arguments) -> Any:
    """A copy in which others stand for the elements that lay there when the model was traced."""
    seen, x, others = c.node.args[0].meta["val"], a["self"], c.value(a["src"])
    places = _places(seen, a)
    twice = bool((places.flatten().bincount() > 1).any())
    if twice or overlaps_itself(tuple(seen.shape), tuple(seen.stride())):
        raise Skip  # what is written last is not said
    if others.shape != tuple(places.shape):
        raise Skip
    if places.numel() == seen.numel() and in_order(places) and others.dtype in FLOATS:
        return c.g.reshape(others, tuple(seen.shape))
    given = [c.value(x), places.to(c.device), others]
    return c.left_to_torch("aten.put.default", given, {}, c.node, image=False)


def _same(c: Importer, a: Arguments) -> Value:
    """Return the operand: the layout is the graph's own."""
    x = c.value(first(a))
    if a.get("dtype") in (None, x.dtype) and not a.get("train"):
        return x
    norm = written_norm(c)
    return _cast(c, x, a.get("dtype")) if norm is None else norm


def _cast(c: Importer, x: Value, dtype: torch.dtype | None) -> Value:
    """x in another dtype of floating-point numbers, where that is a kernel of ours."""
    if not c.kernels or x.dtype not in FLOATS or dtype not in FLOATS:
        raise Skip
    return c.g.cast(x, dtype)


MOST_FILLED = 1 << 20  # elements of a tensor of one number that is kept


def _reshape(c: Importer, a: Arguments) -> Value:
    shape = tuple(c.node.meta["val"].shape)
    x = c.value(first(a))
    if x.shape == shape:
        return x
    y = c.g.reshape(x, shape)
    order = None if y.spec is None else _order_of_copy(c, x, shape)
    if order is not None:
        set_stride(y, dense_strides(shape, order))
    return y


_READ_IMAGES = frozenset(
    (
        *(*CONVOLUTION_NAMES, *OF_BATCHES, *MEANS, *UPSAMPLES),
        *("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices"),
        *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    )
)
_READ_ALIKE = frozenset({"add", "sub", "mul", "relu", "gelu", "silu", "sigmoid", "tanh"})
_READ_ROWS = frozenset(
    ("layer_norm", "native_layer_norm", "rms_norm", "linear", "mm", "addmm", "matmul")
)


def _order_of_copy(c: Importer, x: Value, shape: tuple[int, ...]) -> Sequence[int] | None:
    """The order in memory of what a reshape has to copy; None for its own.

    Of what is transposed and then read by rows, which the transposition leaves as they are, it is
    that of the rows. What convolutions and the like read, or a reshape that cuts images into parts,
    beside pointwise ops at most, lies channels last, where channels lie beside each other in x.
    """
    spec, rank, users = x.spec, len(shape), list(c.node.users)
    if spec is None or not spec.numel or view_strides(spec.shape, spec.stride, shape) is not None:
        return None
    if len(users) == 1 and (packet := forms.op_name(users[0])) in ("permute", "transpose"):
        user = users[0]
        dims = order(packet, forms.bind_arguments(user.target, user.args, user.kwargs), rank)
        by_rows = any(forms.op_name(each) in _READ_ROWS for each in user.users)
        return dims if by_rows and dims is not None and dims[-1] == rank - 1 else None
    if not c.channels_last or rank not in (4, 5) or spec.dtype not in FLOATS:
        return None
    images = [user for user in users if _reads_image(user, shape)]
    others = {forms.op_name(user) for user in users if user not in images}
    if not images or not others <= _READ_ALIKE:
        return None
    fastest = [dim for dim, s in enumerate(spec.stride) if s == 1 < spec.shape[dim]]
    behind = math.prod(spec.shape[fastest[0] + 1 :]) if fastest else 0
    channels = math.prod(shape[2:]) <= behind < math.prod(shape[1:])
    return (0, *range(2, rank), 1) if channels else None


def _reads_image(user: torch.fx.Node, shape: tuple[int, ...]) -> bool:
    """Whether an op has its images channels last, or cuts them into parts."""
    seen, packet = user.meta.get("val"), forms.op_name(user)
    if packet in forms.RESHAPES and isinstance(seen, torch.Tensor):
        return seen.dim() > len(shape) and tuple(seen.shape[:2]) == shape[:2]
    return packet in _READ_IMAGES


def _expand(c: Importer, a: Arguments) -> Value:
    shape = tuple(c.node.meta["val"].shape)
    x = c.value(a["self"])
    return x if x.shape == shape else c.g.expand(x, shape)


def _copy(c: Importer, a: Arguments) -> Value:
    """What is written over all of a tensor, in the dtype of that."""
    x, shape = c.value(a["src"]), tuple(c.node.meta["val"].shape)
    dtype = first(a).dtype
    x = x if x.dtype == dtype else _cast(c, x, dtype)
    return x if x.shape == shape else c.g.expand(x, shape)


def _repeat(c: Importer, a: Arguments) -> Value:
    """Dims that are expanded, each before the one that it repeats, and merged with it."""
    x, times = c.value(a["self"]), list(a["repeats"])
    sizes = [1] * (len(times) - len(x.shape)) + list(x.shape)
    pairs = list(zip(times, sizes, strict=True))
    apart = [n for count, size in pairs for n in ((1, size) if count != 1 else (size,))]
    wide = [n for count, size in pairs for n in ((count, size) if count != 1 else (size,))]
    return c.g.reshape(c.g.expand(c.g.reshape(x, apart), wide), [n * m for n, m in pairs])


def _permute(c: Importer, a: Arguments) -> Value:
    return c.g.permute(c.value(a["self"]), tuple(a["dims"]))


def _transpose(c: Importer, a: Arguments) -> Value:
    x = c.value(a["self"])
    if len(x.shape) < 2:
        return x
    return c.g.transpose(x, a.get("dim0", 0), a.get("dim1", 1))


def part(c: Importer, x: Value, dim: int, start: Any, stop: Any, step: int = 1) -> Value:
    size = x.shape[dim]
    taken = range(*slice(start, stop, step).indices(size))
    if len(taken) == size:
        return x
    return c.g.slice(x, dim, taken.start, taken.stop, step)


def _slice(c: Importer, a: Arguments) -> Value:
    return part(c, c.value(a["self"]), a["dim"], a["start"], a["end"], a["step"])


def _narrow(c: Importer, a: Arguments) -> Value:
    if not isinstance(a["start"], int):
        raise Skip
    return part(c, c.value(a["self"]), a["dim"], a["start"], a["start"] + a["length"])


def _select(c: Importer, a: Arguments) -> Value:
    x = c.value(a["self"])
    dim, index = a["dim"] % len(x.shape), a["index"]
    index += x.shape[dim] if index < 0 else 0
    return c.g.reshape(part(c, x, dim, index, index + 1), (*x.shape[:dim], *x.shape[dim + 1 :]))


def _diagonal(c: Importer, a: Arguments) -> Value:
    """A slice of the elements of each matrix in a row."""
    x, offset, count = c.value(a["self"]), a["offset"], c.node.meta["val"].shape[-1]
    rank = len(x.shape)
    first, second = a["dim1"] % rank, a["dim2"] % rank
    if not count or not isinstance(offset, int):
        raise Skip
    before = [dim for dim in range(rank) if dim not in (first, second)]
    columns = x.shape[second]
    start = offset if offset >= 0 else -offset * columns
    shape = (*(x.shape[dim] for dim in before), x.shape[first] * columns)
    rows = c.g.reshape(c.g.permute(x, (*before, first, second)), shape)
    stop = start + (count - 1) * (columns + 1) + 1
    return part(c, rows, rank - 2, start, stop, columns + 1)


def last_pair(c: Importer, x: Value) -> tuple[Value, Value]:
    """The first and the second elements of pairs (..., 2), each (...)."""
    dim = len(x.shape) - 1
    first, second = (c.g.reshape(part(c, x, dim, at, at + 1), x.shape[:-1]) for at in (0, 1))
    return first, second


def _split(c: Importer, a: Arguments) -> tuple[Value, ...]:
    x, made, start = c.value(a["self"]), [], 0
    dim = a["dim"] % len(x.shape)
    for seen in c.node.meta["val"]:
        made.append(part(c, x, dim, start, start + seen.shape[dim]))
        start += seen.shape[dim]
    return tuple(made)


def _unfold(c: Importer, a: Arguments) -> Value:
    """Windows along a dim, each a last dim: dims taken apart if the windows lie side by side, else
    a choice of elements, which a generated kernel makes as it reads."""
    x, size, step = c.value(a["self"]), a["size"], a["step"]
    if not x.shape:
        raise Skip
    dim = a["dimension"] % len(x.shape)
    before, behind = x.shape[:dim], x.shape[dim + 1 :]
    count = (x.shape[dim] - size) // step + 1
    if size == step:
        taken = part(c, x, dim, 0, count * size)
    elif c.kernels and size:
        places = (torch.arange(count).view(-1, 1) * step + torch.arange(size)).flatten()
        given = [x, c.constant(places.to(c.device), "places")]
        arguments = (("tensor", 0), dim, ("tensor", 1))
        taken = c.g.aten(given, "aten.index_select.default", arguments)
    else:
        raise Skip
    apart = c.g.reshape(taken, (*before, count, size, *behind))
    rank = len(x.shape) + 1
    kept = [place for place in range(rank) if place != dim + 1]
    return c.g.permute(apart, (*kept, dim + 1))


def _unbind(c: Importer, a: Arguments) -> tuple[Value, ...]:
    count = len(c.node.meta["val"])
    return tuple(_select(c, {**a, "index": index}) for index in range(count))


def _of_one_dtype(c: Importer, tensors: Sequence[Any]) -> list[Value]:
    """Tensors in the dtype to which torch promotes them, as a class token beside what autocast has
    made of an image."""
    values = [c.value(each) for each in tensors]
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    if dtype not in FLOATS or any(value.dtype not in FLOATS for value in values):
        return values
    return [value if value.dtype == dtype else c.g.cast(value, dtype) for value in values]


def _cat(c: Importer, a: Arguments) -> Value:
    """Of what has elements: a model without register tokens has a tensor of none, and a cache of
    keys begins as one."""
    values = _of_one_dtype(c, a["tensors"])
    kept = [each for each in values if 0 not in each.shape] or values
    return c.g.concat(kept, a["dim"]) if len(kept) > 1 else kept[0]


def _stack(c: Importer, a: Arguments) -> Value:
    values = _of_one_dtype(c, a["tensors"])
    rank = len(values[0].shape) + 1
    dim = a["dim"] % rank
    apart = [c.g.reshape(v, (*v.shape[:dim], 1, *v.shape[dim:])) for v in values]
    return c.g.concat(apart, dim)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    **dict.fromkeys(("new_zeros", "zeros_like", "zero"), _full(0)),
    **dict.fromkeys(("new_empty", "empty_like"), _full(0)),  # whatever stands there
    **dict.fromkeys(("new_ones", "ones_like"), _full(1)),
    **dict.fromkeys(("new_full", "full_like", "fill"), _full(None)),
    **dict.fromkeys(forms.IDENTITIES, _same),
    **dict.fromkeys(forms.RESHAPES, _reshape),
    "expand": _expand,
    "copy": _copy,
    "repeat": _repeat,
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "diagonal": _diagonal,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"), _split),
    **dict.fromkeys(("split_copy", "split_with_sizes_copy"), _split),
    **dict.fromkeys(("unbind", "unbind_copy"), _unbind),
    **dict.fromkeys(("unfold", "unfold_copy"), _unfold),
    **dict.fromkeys(("as_strided", "as_strided_copy"), _as_strided),
    "as_strided_scatter": _as_strided_scatter,
    "slice_backward": _slice_backward,
    "select_backward": _select_backward,
    "cat": _cat,
    "stack": _stack,
}
