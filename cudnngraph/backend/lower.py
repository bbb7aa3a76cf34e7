"""Lowering: a GraphSpec becomes a graph of the cuDNN frontend, one rule per op.

Nothing is left to the frontend's inference: every tensor, virtual ones included, gets its dims,
strides and dtype here, and every graph input and output an explicit uid, in the order in which the
runtime passes pointers. The dims that cuDNN sees differ from the declared ones in four ways, none
of which moves data: convolutions in one spatial dim get a second one of extent 1; operands of lower
rank get leading ones; in a graph of pointwise ops alone the dims are put in the order of memory and
merged to three; and around a matrix product or a norm they are merged to batch, rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch

from ..errors import NotSupported
from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    channels_last_strides,
    contiguous_strides,
    dense_strides,
    is_channels_last,
    is_contiguous,
    memory_order,
    numel,
    same_layout,
)
from ..ops import pooling
from ..ops.base import FP8, QUANTIZED
from ..ops.infer import check_node
from ..ops.table import OPS
from ..rewrite.annotate import REPEATABLE
from ..rewrite.packed import ALIKE, by_flash, token_widths
from . import env

Shape = Sequence[int]
_Place = tuple[Shape, Shape]  # shape and stride

# Of the rules in this module. Serialized plans of another number are built again from their
# records: raise it where a rule refuses what it took, or makes other numbers of it.
LOWERING = 5
LOW_PRECISION = (torch.float16, torch.bfloat16)
FP8_CAPABILITY = (8, 9)
MIN_ROW, MAX_ROW = 32, 1024
# Anchors whose plans see merged dims.
_MERGED = (
    *("matmul", "layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"),
    "normalize",
)
# Anchors that cuDNN takes in two spatial dims at least.
_SPREAD = (
    *("conv", "conv_transpose", "conv_wgrad", "batch_norm_train", "batch_norm_backward"),
    "instance_norm",
)
_BATCH_NORMS = ("batch_norm", "batch_norm_train", "batch_norm_apply", "batch_norm_backward")


@dataclass(frozen=True)
class Constant:
    """A small tensor that the plan itself provides: ``numel`` elements of one value.

    Numbers baked into a graph are passed so too. The frontend's own way, ``tensor_scalar``, needs
    cuDNN 9.22 for compile-time constants, and gave wrong results for run-time ones (frontend 1.32).
    ``on_host``: in the memory of the host, where cuDNN reads the epsilon of a norm at each launch.
    It also stands for a result that nobody asked for, which the library writes all the same.
    """

    uid: int
    numel: int
    value: float
    dtype: torch.dtype
    on_host: bool = False

    def tensor(self, device: torch.device | str) -> torch.Tensor:
        """Itself, on ``device``."""
        return torch.full((self.numel,), self.value, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Alias:
    """A second tensor over the memory of the graph's input at ``position``, ``offset_bytes`` in.

    Attention of a tensor with itself needs it: cuDNN crashes where one tensor stands at several of
    q, k and v (seen on 9.19). So do the rows of what tells packed attention where sequences lie.
    """

    uid: int
    position: int
    offset_bytes: int = 0


Extra = Constant | Alias


@dataclass
class Lowered:
    """A frontend graph ready for planning.

    ``uids`` are those of the spec's inputs and outputs, in that order, ascending; ``extras``
    follow.
    """

    graph: Any
    uids: tuple[int, ...]
    extras: tuple[Extra, ...]

    def __del__(self) -> None:
        env.let_go(self.graph)


class _Refused(Exception):
    """A rule knows that cuDNN cannot take this op; the reason is the message."""


def _dtypes(frontend: Any) -> dict[torch.dtype, Any]:
    kinds = frontend.data_type
    return {
        torch.float32: kinds.FLOAT,
        torch.float16: kinds.HALF,
        torch.bfloat16: kinds.BFLOAT16,
        torch.float8_e4m3fn: kinds.FP8_E4M3,
        torch.float8_e5m2: kinds.FP8_E5M2,
        torch.int32: kinds.INT32,
        torch.int64: kinds.INT64,
        torch.int8: kinds.INT8,
        torch.uint8: kinds.UINT8,
        torch.bool: kinds.BOOLEAN,
    }


class _View(Protocol):
    """How the dims of the spec's tensors map to the dims that cuDNN sees."""

    @property
    def seen_rank(self) -> int:
        """How many dims cuDNN sees."""

    @property
    def spread(self) -> bool:
        """A convolution in one spatial dim, which gets a second one of extent 1."""

    def dims(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        """Shape and strides, as cuDNN sees them, of a tensor in memory."""

    def virtual(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        """The same for a tensor inside a fused graph, which lies nowhere."""


@dataclass(frozen=True)
class _AnchorView:
    """Graphs around a convolution or attention: dims stay, short shapes get leading ones."""

    rank: int
    spread: bool
    channels_last: bool  # which of two readings an ambiguous layout takes
    behind: int = 0  # dims of extent 1 behind the others

    @property
    def seen_rank(self) -> int:
        return self.rank + self.spread + self.behind

    def dims(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        lead = self.rank - len(shape)
        sizes, steps = [1] * lead + list(shape), [1] * lead + list(stride)
        if self.spread:
            sizes.insert(2, 1)
            steps.insert(2, 1)
        sizes += [1] * self.behind
        steps += [1] * self.behind
        return sizes, _settle(sizes, steps, self.channels_last)

    virtual = dims


@dataclass(frozen=True)
class _PackedView(_AnchorView):
    """Packed attention, whose sequences lie where offsets say: strides are taken as they are."""

    def dims(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        return list(shape), list(stride)

    virtual = dims


def _settle(shape: list[int], stride: list[int], channels_last: bool) -> list[int]:
    """Strides that say the layout also where an extent is 1, for engines that look there."""
    last = len(shape) >= 3 and is_channels_last(shape, stride)
    if last and (channels_last or not is_contiguous(shape, stride)):
        return list(channels_last_strides(shape))
    if is_contiguous(shape, stride):
        return list(contiguous_strides(shape))
    outer = max(stride, default=1)
    return [outer if n == 1 else s for n, s in zip(shape, stride, strict=True)]


@dataclass(frozen=True)
class _PointwiseView:
    """Graphs of pointwise ops alone: dims ordered slow to fast and merged to three.

    cuDNN takes a pointwise graph over [B, M, N], row-major, with operands broadcast over one or all
    of the three (over two only where B is 1); over four dims it takes far fewer. ``groups`` holds
    the dims that make up each of the three, slowest first. Where all dims merge into one, that is
    cut into rows of ``columns``: as a single row it runs up to 70 times slower (H200, cuDNN 9.19).
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]
    columns: int = 0
    spread: bool = False
    seen_rank: int = 3

    def dims(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        lead = self.rank - len(shape)
        sizes, steps = (1,) * lead + tuple(shape), (0,) * lead + tuple(stride)
        merged, strides = [], []
        for group in self.groups:
            merged.append(numel(sizes[dim] for dim in group))
            real = [dim for dim in group if sizes[dim] > 1]
            strides.append(steps[real[-1]] if real else 0)
        if self.columns and merged[-1] > 1:
            merged[1:] = merged[-1] // self.columns, self.columns
            strides[1:] = self.columns, 1
        dense = contiguous_strides(merged)
        return merged, [d if n == 1 else s for n, s, d in zip(merged, strides, dense, strict=True)]

    def virtual(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        merged, _ = self.dims(shape, stride)
        return merged, list(contiguous_strides(merged))


@dataclass(frozen=True)
class _ReductionView(_PointwiseView):
    """Graphs of reductions: a matrix, rows and columns, as cuDNN takes them channels_last."""

    seen_rank: int = 4

    def dims(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        merged, strides = super().dims(shape, stride)
        if not is_contiguous(merged, strides):
            raise _Refused("the operands lie in memory in different orders, or with gaps")
        image = [*merged, 1, 1]
        return image, list(channels_last_strides(image))

    def virtual(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        image = [*super().dims(shape, stride)[0], 1, 1]
        return image, list(channels_last_strides(image))


def _row_length(total: int) -> int:
    """Into rows of which length to cut ``total`` elements in one line; 0 to leave them so."""
    for length in range(min(MAX_ROW, total // 2), MIN_ROW - 1, -1):
        if total % length == 0 and (length % 8 == 0 or total % 8):
            return length
    return 0


@dataclass(frozen=True)
class _MergedView:
    """Graphs around a matrix product or a norm: groups of neighbouring dims become one dim each.

    ``groups`` holds the dims that make up each dim that cuDNN sees, slowest first.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]
    spread: bool = False

    @property
    def seen_rank(self) -> int:
        return len(self.groups)

    def dims(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        merged, strides = _merge(_padded(shape, stride, self.rank), self.groups)
        return merged, _with_unit_stride(merged, strides)

    def virtual(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        merged, strides = self.dims(shape, stride)
        return merged, list(dense_strides(merged, memory_order(merged, strides)))


def _padded(shape: Shape, stride: Shape, rank: int) -> _Place:
    """The same tensor at ``rank``, by leading dims of extent 1."""
    lead = rank - len(shape)
    return (1,) * lead + tuple(shape), (0,) * lead + tuple(stride)


def _merge(place: _Place, groups: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Shape and strides with each group of dims as one dim; the stride is that of its fastest."""
    shape, stride = place
    real = [[dim for dim in group if shape[dim] > 1] for group in groups]
    return (
        [numel(shape[dim] for dim in group) for group in groups],
        [stride[group[-1]] if group else 0 for group in real],
    )


def _merges(place: _Place, group: Sequence[int], space: Shape) -> bool:
    """Whether a group of dims is one dim of this tensor: all broadcast, or dense among them."""
    shape, stride = place
    real = [dim for dim in group if space[dim] > 1]
    if len(real) < 2 or all(shape[dim] == 1 for dim in real):
        return True
    return all(shape[dim] == space[dim] for dim in real) and all(
        stride[slow] == stride[fast] * shape[fast] for slow, fast in pairwise(real)
    )


def _with_unit_stride(shape: Shape, stride: Shape) -> list[int]:
    """Strides for extents of 1 that leave a unit stride in one of the last two dims."""
    dense = contiguous_strides(shape)
    steps = [d if n == 1 else s for n, s, d in zip(shape, stride, dense, strict=True)]
    if len(shape) >= 2 and shape[-2] == 1 and steps[-1] != 1:
        steps[-2] = 1  # a row whose elements lie apart is a column-major matrix
    return steps


def _view_of(spec: GraphSpec) -> _View:
    anchors = [node for node in spec.nodes if not OPS[node.op].pointwise]
    real = [_placed(spec, name) for name in (*spec.inputs, *spec.outputs)]
    rank = max(len(shape) for shape, _ in real)
    rank = max([rank, *(len(shape) for _, shape in _computed(spec))])
    if not anchors:
        return _pointwise_view(spec, rank, real)
    for node in anchors:
        if node.op in _MERGED:
            if any(other.op != "reduction" for other in anchors if other is not node) or (
                len(anchors) > 1 and node.op != "matmul"
            ):  # two products in one plan took 12 times as long as torch (9.19)
                raise _Refused(f"{node.op} shares a plan with pointwise ops alone")
            if node.op == "matmul":
                return _product_view(spec, node, rank)
            if node.op == "normalize":
                return _rows_view(spec, node, rank)
            return _norm_or_rows_view(spec, node, rank)
    if all(node.op == "reduction" for node in anchors):
        groups = _merged_dims(rank, [_padded(*place, rank) for place in real])
        if len(groups) > 2:
            raise _Refused("a reduction over dims between others")
        return _ReductionView(rank, tuple(map(tuple, [[]] * (2 - len(groups)) + groups)))
    if anchors[0].op in _VARLEN:
        return _PackedView(rank, spread=False, channels_last=False)
    spread = rank == 3 and anchors[0].op in _SPREAD
    images = [view for view in real if len(view[0]) >= 3]
    last, rows = ([test(*view) for view in images] for test in (is_channels_last, is_contiguous))
    strict = any(a and not b for a, b in zip(last, rows, strict=True))
    if anchors[0].op in _SPREAD and last == rows:
        strict = True  # all are of one pixel; read as rows, engines that fuse get them wrong (9.19)
    flat = rank == 2 and anchors[0].op in _BATCH_NORMS
    return _AnchorView(rank, spread, strict, behind=2 if flat else 0)


def _places(spec: GraphSpec, rank: int) -> dict[str, _Place]:
    """Every tensor at ``rank``: inputs and outputs as they lie, what is between them dense."""
    places = {name: _placed(spec, name) for name in (*spec.inputs, *spec.outputs)}
    for name, shape in _computed(spec):
        places.setdefault(name, (shape, contiguous_strides(shape)))
    return {name: _padded(*place, rank) for name, place in places.items()}


def _space(spec: GraphSpec, node: Node, rank: int) -> Shape:
    """The shape of an anchor's result at ``rank``; refused where what follows is larger."""
    name = node.results[0]
    shape = spec.tensors[name].shape
    after = {name}
    for each in spec.nodes:
        if after & set(each.operands):
            after |= set(each.results)
    if any(numel(spec.tensors[later].shape) > numel(shape) for later in after):
        raise _Refused(f"the result of {node.op} is broadcast")
    return (1,) * (rank - len(shape)) + shape


def _product_view(spec: GraphSpec, node: Node, rank: int) -> _MergedView:
    """[batch, M, N] of a matrix product; the batch dims become rows where y has none.

    Every tensor around it has to merge in the same way; y, with K where the others have M, has no
    say on the rows.
    """
    x, y = node.operands
    space = _space(spec, node, rank)
    lead = tuple(range(rank - 2))
    as_rows = ((), (*lead, rank - 2), (rank - 1,))
    as_batch = (lead, (rank - 2,), (rank - 1,))
    uses = [name for each in spec.nodes for name in each.operands].count(y)
    for groups in (as_rows, as_batch) if numel(spec.tensors[y].shape[:-2]) == 1 else (as_batch,):
        if all(
            _merges(place, group, space)
            for name, place in _places(spec, rank).items()
            for group in groups
            if not (name == y and uses == 1 and group is groups[1])
        ):
            return _MergedView(rank, groups)
    raise _Refused(f"the batch dims around '{x}' @ '{y}' do not merge into one")


def _norm_view(spec: GraphSpec, node: Node, rank: int) -> _MergedView:
    """[rows, columns, 1, 1] of a norm: the dims before those of the weight, and those.

    cuDNN wants rows without gaps between them, in x and in all that is as large.
    """
    space, places = _space(spec, node, rank), _places(spec, rank)
    weight = node.inputs[OPS[node.op].ports.index("weight")]
    first = rank - len(spec.tensors[str(weight)].shape)
    order = memory_order(*places[node.operands[0]])
    rows = tuple(dim for dim in order if dim < first)
    columns = tuple(dim for dim in order if dim >= first)
    view = _MergedView(rank, (rows, columns, (), ()))
    for name, place in places.items():
        if name in (*spec.inputs, *spec.outputs):
            if not all(_merges(place, group, space) for group in view.groups):
                raise _Refused(f"the dims of '{name}' do not merge into rows and columns")
            if not is_contiguous(*view.dims(*place)):
                raise _Refused(f"the rows of '{name}' lie in memory with gaps, or as columns")
        elif any(
            {place[0][dim] == 1 for dim in group if space[dim] > 1} == {True, False}
            for group in view.groups
        ):
            raise _Refused(f"'{name}' broadcasts within the rows or the columns")
    return view


# Rows that a product sums up, and those that it sums up faster than cuDNN's norm (an H200, 12.6
# million numbers in rows of 16: 63 and 242 us; of 32: 40, and cuDNN's does not build; of 64: 31 and
# 27; of 128: 38 and 18; a product of rows of 256 in float16 does not build).
LONGEST_SUMMED, FASTER_SUMMED = 128, 32


def _norm_or_rows_view(spec: GraphSpec, node: Node, rank: int) -> _MergedView:
    """For cuDNN's norm, or for a product that sums up squares: where rows are so short, or lie in a
    way that the norm does not take, or where more stands behind it, which a product takes."""
    if not _can_be_summed(spec, node):
        return _norm_view(spec, node, rank)
    short = spec.tensors[str(node.inputs[0])].shape[-1] <= FASTER_SUMMED
    more = any(each.op != "constant" for each in spec.nodes if each is not node)
    first, other = (_rows_view, _norm_view) if short or more else (_norm_view, _rows_view)
    try:
        return first(spec, node, rank)
    except _Refused:
        return other(spec, node, rank)


def _can_be_summed(spec: GraphSpec, node: Node) -> bool:
    """Whether a product can take the place of a norm, with nothing in front and no statistics."""
    if node.op != "rms_norm" or node.inputs[0] not in spec.inputs:
        return False
    x, weight = (spec.tensors[str(name)] for name in node.inputs[:2])
    used = {name for each in spec.nodes for name in each.operands} | set(spec.outputs)
    return (
        x.dtype in LOW_PRECISION
        and len(weight.shape) == 1
        and 8 <= weight.numel <= LONGEST_SUMMED
        and weight.numel % 8 == 0
        and node.outputs[1] not in used
    )


def _rows_view(spec: GraphSpec, node: Node, rank: int) -> _MergedView:
    """[batch, rows, columns] of what is done to each row by itself, in any strides that leave one
    dim beside the rows: the heads of a projection, say."""
    space, places = _space(spec, node, rank), _places(spec, rank)
    lead = tuple(dim for dim in memory_order(*places[node.operands[0]]) if dim < rank - 1)
    choices: list[tuple[tuple[int, ...], ...]] = [((), lead, (rank - 1,))]
    for dim in lead:
        if space[dim] > 1:
            choices.append(((dim,), tuple(d for d in lead if d != dim), (rank - 1,)))
    real = (*spec.inputs, *spec.outputs)
    for groups in choices:
        if all(
            _merges(place, group, space)
            if name in real
            else len({place[0][dim] == 1 for dim in group if space[dim] > 1}) < 2
            for name, place in places.items()
            for group in groups
        ):
            return _MergedView(rank, groups)
    raise _Refused(f"the rows of '{node.operands[0]}' lie in memory as no matrix, nor as several")


def _merged_dims(rank: int, full: Sequence[_Place]) -> list[list[int]]:
    """Groups of dims, slowest first in the largest tensor's memory, that all tensors can merge."""
    space = tuple(max(shape[dim] for shape, _ in full) for dim in range(rank))
    shape, stride = max(full, key=lambda view: numel(view[0]))
    order = [dim for dim in memory_order(shape, stride) if space[dim] > 1]

    def mergeable(slow: int, fast: int) -> bool:
        return all(
            (sizes[slow] == sizes[fast] == 1)
            or (
                sizes[slow] == space[slow]
                and sizes[fast] == space[fast]
                and steps[slow] == steps[fast] * sizes[fast]
            )
            for sizes, steps in full
        )

    groups: list[list[int]] = []
    for dim in order:
        if groups and mergeable(groups[-1][-1], dim):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    return groups


def _pointwise_view(spec: GraphSpec, rank: int, real: Sequence[_Place]) -> _PointwiseView:
    """Order the dims as the largest tensor lies in memory; merge neighbours where all allow it.

    cuDNN's pointwise engine takes more than it gets right (seen on 9.19, each as wrong results
    without an error): it reads every operand as row-major whatever its strides say, a vector that
    is broadcast over two dims of three from the wrong place, and computed columns too. Those are
    refused here.
    """
    full = [_padded(*place, rank) for place in real]
    space = tuple(max(shape[dim] for shape, _ in full) for dim in range(rank))
    groups = _merged_dims(rank, full)
    if len(groups) > 3:
        raise _Refused(f"the operands broadcast in a pattern of {len(groups)} dims, cuDNN takes 3")
    view = _PointwiseView(rank, tuple(map(tuple, [[]] * (3 - len(groups)) + groups)))
    for sizes, steps in full:
        merged, strides = view.dims(sizes, steps)
        if not is_contiguous(merged, strides):
            raise _Refused("the operands lie in memory in different orders, or with gaps")
        if len(groups) == 3 and sum(n > 1 for n in merged) == 1:
            raise _Refused("a vector broadcasts over two dims of three, which cuDNN gets wrong")
    last = view.dims(space, (0,) * rank)[0][-1]
    for _, computed in _computed(spec):
        merged = view.dims(computed, (0,) * len(computed))[0]
        if merged[-1] == 1 < last and numel(merged) > 1:
            raise _Refused("a computed column broadcasts over the rows, which cuDNN gets wrong")
    return replace(view, columns=_row_length(last)) if len(groups) == 1 else view


def _computed(spec: GraphSpec) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of what is computed in the graph, also of an op's temporaries."""
    for node in spec.nodes:
        for name in node.results:
            yield name, spec.tensors[name].shape
        if node.op == "batch_norm":
            x = spec.tensors[str(node.inputs[0])]
            yield f"{node.name} deviation", (1, x.shape[1], *(1,) * (len(x.shape) - 2))


@dataclass
class Context:
    """What a rule sees: the frontend graph, the spec, and the frontend's tensors by name."""

    frontend: Any
    graph: Any
    spec: GraphSpec
    view: _View
    values: dict[str, Any] = field(default_factory=dict)
    extras: list[Extra] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    as_is: set[str] = field(default_factory=set)  # results of expand that are its operand

    def dtype(self, dtype: torch.dtype) -> Any:
        """The frontend's name of a dtype."""
        try:
            return _dtypes(self.frontend)[dtype]
        except KeyError:
            raise _Refused(f"cuDNN graphs have no {str(dtype).removeprefix('torch.')}") from None

    def operands(self, node: Node) -> list[Any]:
        """The frontend's tensors at the ports of ``node``, None at open ones."""
        return [None if name is None else self.values[name] for name in node.inputs]

    def declare(self, tensor: Any, spec: TensorSpec) -> Any:
        """Give a result its dims, strides and dtype."""
        if spec.name not in self.spec.outputs:
            return self.virtual(tensor, spec)
        dims, strides = self.view.dims(spec.shape, spec.stride)
        return tensor.set_dim(dims).set_stride(strides).set_data_type(self.dtype(spec.dtype))

    def virtual(self, tensor: Any, spec: TensorSpec) -> Any:
        """Give a tensor inside the graph its dims, strides and dtype."""
        dims, strides = self.view.virtual(spec.shape, spec.stride)
        return tensor.set_dim(dims).set_stride(strides).set_data_type(self.dtype(spec.dtype))

    def temporary(self, tensor: Any, spec: TensorSpec) -> Any:
        """A value inside one op's lowering, shaped like ``spec``, in float32."""
        return self.virtual(tensor, replace(spec, dtype=torch.float32))

    def scalar(self, value: float) -> Any:
        """A number baked into the graph."""
        name = float(value).hex()  # 0.0 and -0.0 are two numbers
        if name not in self.scalars:
            self.scalars[name] = self.constant([1] * self.view.seen_rank, value, torch.float32)
        return self.scalars[name]

    def host_scalar(self, value: float) -> Any:
        """A number that cuDNN takes by value: it reads the host's memory."""
        uid = self._next_uid()
        self.extras.append(Constant(uid, 1, value, torch.float32, on_host=True))
        ones = [1] * self.view.seen_rank
        return self.graph.tensor(
            dim=ones,
            stride=ones,
            data_type=self.dtype(torch.float32),
            uid=uid,
            is_pass_by_value=True,
            name=f"number_{uid}",
        )

    def _next_uid(self) -> int:
        return len(self.spec.inputs) + len(self.spec.outputs) + len(self.extras) + 1

    def alias(self, name: str, place: _Place | None = None, offset_bytes: int = 0) -> Any:
        """Another tensor over the memory of input ``name``, of shape and stride ``place``."""
        uid, tensor = self._next_uid(), self.spec.tensors[name]
        self.extras.append(Alias(uid, self.spec.inputs.index(name), offset_bytes))
        dims, strides = self.view.dims(*(place or _placed(self.spec, name)))
        kind = self.dtype(tensor.dtype)
        return self.graph.tensor(
            dim=dims, stride=strides, data_type=kind, uid=uid, name=f"{name}_{uid}"
        )

    def constant(self, shape: list[int], value: float, dtype: torch.dtype) -> Any:
        """A tensor of one value that the plan provides."""
        uid = self._next_uid()
        self.extras.append(Constant(uid, numel(shape), value, dtype))
        return self.graph.tensor(
            dim=shape,
            stride=list(channels_last_strides(shape)),
            data_type=self.dtype(dtype),
            uid=uid,
            name=f"constant_{uid}",
        )

    def discard(self, tensor: Any, spec: TensorSpec) -> None:
        """A result that nobody asked for: cuDNN writes it into memory of the plan's own."""
        dims, strides = self.view.dims(spec.shape, spec.stride)
        uid = self._next_uid()
        self.extras.append(Constant(uid, spec.numel, 0.0, spec.dtype))
        tensor.set_dim(dims).set_stride(strides).set_data_type(self.dtype(spec.dtype))
        tensor.set_output(True).set_uid(uid)


Rule = Callable[[Context, Node], "Sequence[Any] | Any"]


def _sides(padding: Sequence[tuple[int, int]], spread: bool) -> tuple[list[int], list[int]]:
    pairs = [(0, 0), *padding] if spread else list(padding)
    return [before for before, _ in pairs], [after for _, after in pairs]


def _cropped(node: Node) -> list[tuple[int, int]]:
    """Padding of a transposed convolution, with output_padding taken out of the far side.

    The padding only crops the result, so the two cancel. cuDNN knows no output_padding; it finds it
    in the output's dims, but not where it reaches the stride.
    """
    return [
        (before, after - extra if stride <= extra <= after else after)
        for (before, after), extra, stride in zip(
            node.attr("padding"), node.attr("output_padding"), node.attr("stride"), strict=True
        )
    ]


def _spatial(values: Sequence[int], spread: bool) -> list[int]:
    return [1, *values] if spread else list(values)


def _convolution(transposed: bool) -> Rule:
    def rule(ctx: Context, node: Node) -> Any:
        x, weight = ctx.operands(node)
        spread = ctx.view.spread
        pre, post = _sides(_cropped(node) if transposed else node.attr("padding"), spread)
        options = {
            "pre_padding": pre,
            "post_padding": post,
            "stride": _spatial(node.attr("stride"), spread),
            "dilation": _spatial(node.attr("dilation"), spread),
            "name": node.name,
        }
        kind = _check_narrow(ctx, node)
        _check_weight(ctx.spec.tensors[node.operands[1]])
        if kind == torch.int8:
            if transposed:
                raise _Refused("cuDNN has no transposed convolution of int8")
            options["compute_data_type"] = ctx.dtype(torch.int32)
        if transposed:  # dx of the convolution whose filter is this weight
            return ctx.graph.conv_dgrad(loss=x, filter=weight, **options)
        y = ctx.graph.conv_fprop(image=x, weight=weight, **options)
        if kind == torch.int8 and node.results[0] in ctx.spec.outputs:
            # The engines of a convolution by itself get int32 wrong (known_bad.py); those that fuse
            # take it with an op behind.
            ctx.virtual(y, ctx.spec.tensors[node.results[0]])
            y = ctx.graph.identity(y, compute_data_type=ctx.dtype(torch.int32))
        return y

    return rule


def _check_narrow(ctx: Context, node: Node) -> torch.dtype:
    """Refuse layouts that cuDNN takes for no 8-bit convolution; the dtype of its data."""
    x, weight = (ctx.spec.tensors[name] for name in node.operands)
    if x.dtype not in QUANTIZED:
        return x.dtype
    names = [*node.operands[: 1 if node.op == "conv_transpose" else 2], *ctx.spec.outputs]
    for tensor in (ctx.spec.tensors[name] for name in names):
        if tensor.numel > 1 and not is_channels_last(tensor.shape, tensor.stride):
            raise _Refused(
                f"'{tensor.name}' is not channels_last, as 8-bit convolutions want it; "
                "declare it with layout='channels_last'"
            )
    groups = node.attr("groups")
    if groups > 1 and x.shape[1] // groups % 4:
        raise _Refused(
            f"{x.shape[1] // groups} channels in each of {groups} groups; 8-bit convolutions take "
            "a multiple of 4"
        )
    if x.dtype in FP8 and node.op == "conv_transpose":
        order = (*range(2, len(weight.shape)), 0)
        if weight.stride != dense_strides(weight.shape, (1, *order)):
            raise _Refused(
                f"the weight '{weight.name}' of a transposed convolution in FP8 has its first dim "
                f"fastest in memory; declare stride={dense_strides(weight.shape, (1, *order))}"
            )
    return x.dtype


def _check_weight(weight: TensorSpec) -> None:
    """Refuse a weight whose dims lie neither in their order nor with the channels last, gaps or
    not: engines misread it (a quarter of such random graphs were wrong on 9.19)."""
    if weight.dtype in QUANTIZED:
        return
    rank = len(weight.shape)
    for order in (range(rank), (0, *range(2, rank), 1)):
        steps = [weight.stride[dim] for dim in order if weight.shape[dim] > 1]
        steps = [step for step in steps if step]
        if steps == sorted(steps, reverse=True):
            return
    raise _Refused(
        f"the weight '{weight.name}' with strides {weight.stride} lies neither contiguous nor "
        "channels_last, which cuDNN's engines misread"
    )


def _conv_wgrad(ctx: Context, node: Node) -> Any:
    _check_weight(ctx.spec.tensors[node.results[0]])
    dy, x = ctx.operands(node)
    spread = ctx.view.spread
    pre, post = _sides(node.attr("padding"), spread)
    return ctx.graph.conv_wgrad(
        image=x,
        loss=dy,
        pre_padding=pre,
        post_padding=post,
        stride=_spatial(node.attr("stride"), spread),
        dilation=_spatial(node.attr("dilation"), spread),
        name=node.name,
    )


def _distinct(ctx: Context, node: Node, ports: Sequence[str]) -> list[Any]:
    """The graph inputs at ``ports``, each as a tensor of its own."""
    inputs = dict(zip(OPS[node.op].ports, node.inputs, strict=True))
    names = [str(inputs[port]) for port in ports]
    if any(name not in ctx.spec.inputs for name in names):
        raise _Refused("attention of what the same graph computes")
    return [
        ctx.alias(name) if name in names[:place] else ctx.values[name]
        for place, name in enumerate(names)
    ]


def _port(node: Node, port: str) -> str | None:
    """The name of the tensor at a port of a node."""
    return node.inputs[OPS[node.op].ports.index(port)]


def _has_lengths(node: Node) -> bool:
    return any(_port(node, f"seq_len_{of}") is not None for of in ("q", "kv"))


def _attention_options(ctx: Context, node: Node) -> dict[str, Any]:
    """The frontend's keywords that attention and its gradient share."""
    given = dict(zip(OPS[node.op].ports, ctx.operands(node), strict=True))
    q_spec = ctx.spec.tensors[str(_port(node, "q"))]
    if q_spec.dtype not in LOW_PRECISION:
        raise _Refused("cuDNN attention takes float16 and bfloat16 only")
    options: dict[str, Any] = {"attn_scale": node.attr("scale"), "name": node.name}
    if given["attn_mask"] is not None:
        mask_spec = ctx.spec.tensors[str(_port(node, "attn_mask"))]
        if mask_spec.dtype == torch.bool:
            raise _Refused("cuDNN attention takes additive masks, not boolean ones")
        options["bias"] = given["attn_mask"]
    options |= _dropout_options(ctx, node)
    if node.attr("softcap") is not None or given["alibi_slopes"] is not None:
        return options | _score_callbacks(ctx, node)
    seq_q, seq_kv = given["seq_len_q"], given["seq_len_kv"]
    if seq_q is not None or seq_kv is not None:
        options |= _lengths(ctx, node, seq_q, seq_kv)
    if node.attr("alibi"):
        right = (node.attr("window") or (None, None))[1]
        if right != 0 or node.attr("diagonal_alignment") != "top_left":
            raise _Refused("cuDNN's own ALiBi slopes are for the causal band from the top left")
        options["use_alibi_mask"] = True
    return options | _band_options(ctx, node)


def _lengths(ctx: Context, node: Node, seq_q: Any = None, seq_kv: Any = None) -> dict[str, Any]:
    """The frontend's keywords for lengths of the sequences; all of a tensor where none is given."""
    shapes = (ctx.spec.tensors[str(_port(node, port))].shape for port in ("q", "k"))
    (batch, _, rows, _), (_, _, keys, _) = shapes
    return {
        "use_padding_mask": True,
        "seq_len_q": seq_q or ctx.constant([batch, 1, 1, 1], rows, torch.int32),
        "seq_len_kv": seq_kv or ctx.constant([batch, 1, 1, 1], keys, torch.int32),
    }


def _band_options(ctx: Context, node: Node) -> dict[str, Any]:
    """The frontend's keywords for the band of keys around the diagonal."""
    options: dict[str, Any] = {}
    window = node.attr("window")
    if window is not None:
        left, right = window
        kinds = ctx.frontend.diagonal_alignment
        top_left = node.attr("diagonal_alignment") == "top_left"
        options["diagonal_alignment"] = kinds.TOP_LEFT if top_left else kinds.BOTTOM_RIGHT
        if left is not None:
            options["diagonal_band_left_bound"] = left + 1  # cuDNN counts the diagonal itself
        if right is not None:
            options["diagonal_band_right_bound"] = right
    return options


def _dropout_options(ctx: Context, node: Node) -> dict[str, Any]:
    """The frontend's dropout: by seed and offset, or by a mask."""
    p = node.attr("dropout_p")
    if p == 0.0:
        return {}
    name = _port(node, "dropout_mask")
    if name is None:
        _check_dropout(ctx.spec, node)
        seed, offset = (ctx.values[str(_port(node, f"dropout_{of}"))] for of in ("seed", "offset"))
        return {"dropout": (p, seed, offset)}
    if node.op == "sdpa_backward":
        # The row sums of do * o are not scaled by 1 - p, whether that is given on the device or by
        # value (measured on an H200 with cuDNN 9.19: dq off by 4 to 28 %).
        raise _Refused("cuDNN's gradient of dropout by a mask is wrong")
    if ctx.spec.tensors[name].dtype == torch.bool:
        raise _Refused("cuDNN attention takes dropout masks of numbers, not boolean ones")
    _check_dropped_band(node)
    return {"dropout": (ctx.values[name], ctx.scalar(1.0 / (1.0 - p)))}


def _check_dropped_band(node: Node) -> None:
    window, alignment = node.attr("window"), node.attr("diagonal_alignment")
    if alignment == "bottom_right" and window is not None and window[1] is not None:
        raise _Refused("cuDNN attention drops nothing along the bottom-right diagonal")


def _check_dropout(spec: GraphSpec, node: Node) -> None:
    """Refuse, forward and backward alike, what cuDNN has no gradient of.

    cuDNN's generator is its own: where the gradient is a torch step the forward has to be one too,
    or the two would drop different weights.
    """
    _check_dropped_band(node)
    if _has_lengths(node) and not node.attr("finite_padding"):
        raise _Refused("dropout by a seed with lengths, whose gradient is a torch step")
    name, q = _port(node, "attn_mask"), spec.tensors[str(_port(node, "q"))]
    if name is None:
        return
    mask = spec.tensors[name]
    changed = node.attr("softcap") is not None or _port(node, "alibi_slopes") is not None
    if mask.dtype != q.dtype or (1, *mask.shape)[-2] == 1 < q.shape[2] or changed:
        raise _Refused("dropout by a seed under a mask whose gradient is a torch step")


def _score_callbacks(ctx: Context, node: Node) -> dict[str, Any]:
    """A soft cap and given ALiBi slopes, as pointwise ops on the scores.

    cuDNN has no masks of its own beside them, so a band of keys is part of them; a row without a
    key would divide 0 by 0, and lengths have such rows.
    """
    q, k = (ctx.spec.tensors[str(_port(node, port))] for port in ("q", "k"))
    cap, name = node.attr("softcap"), _port(node, "alibi_slopes")
    if node.attr("alibi") or _has_lengths(node):
        raise _Refused("cuDNN attention changes scores beside no lengths, and no ALiBi of its own")
    rows, keys = q.shape[2], k.shape[2]
    shift = 0 if node.attr("diagonal_alignment") == "top_left" else keys - rows
    left, right = node.attr("window") or (None, None)
    first, last = shift, rows - 1 + shift  # the diagonal's keys in the first row and in the last
    if (right is not None and first + right < 0) or (left is not None and last - left >= keys):
        raise _Refused("cuDNN attention changes scores where every row has a key")
    numbers = {
        key: ctx.scalar(value)
        for key, value in (
            ("cap", cap),
            ("1 / cap", None if cap is None else 1.0 / cap),
            ("shift", -float(shift)),
            ("right", None if right is None else float(right)),
            ("left", None if left is None else -float(left)),
            ("nothing", -math.inf),
        )
        if value is not None
    }
    slopes = None if name is None else ctx.values[name]
    kinds, seen = ctx.frontend.data_type, {}

    def forward(g: Any, scores: Any) -> Any:
        if cap is not None:
            seen["tanh"] = g.tanh(input=g.mul(a=scores, b=numbers["1 / cap"]))
            scores = g.mul(a=seen["tanh"], b=numbers["cap"])
        if slopes is None and left is None and right is None:
            return scores
        row, col = (g.gen_index(input=scores, axis=axis) for axis in (2, 3))
        for index in (row, col):
            index.set_data_type(kinds.INT32)
        distance = g.sub(a=col, b=row, compute_data_type=kinds.INT32)
        distance.set_data_type(kinds.INT32)
        distance = g.add(a=distance, b=numbers["shift"], compute_data_type=kinds.FLOAT)
        distance.set_data_type(kinds.FLOAT)
        if slopes is not None:
            scores = g.sub(a=scores, b=g.mul(a=g.abs(input=distance), b=slopes))
        for bound, compare in (("right", g.cmp_le), ("left", g.cmp_ge)):
            if bound in numbers:
                inside = compare(input=distance, comparison=numbers[bound])
                inside.set_data_type(kinds.BOOLEAN)
                scores = g.binary_select(input0=scores, input1=numbers["nothing"], mask=inside)
        return scores

    def backward(g: Any, grad: Any) -> Any:
        square = g.mul(a=seen["tanh"], b=seen["tanh"])
        return g.sub(a=grad, b=g.mul(a=grad, b=square))

    callbacks: dict[str, Any] = {"score_mod": forward}
    if node.op == "sdpa_backward" and cap is not None:
        callbacks["score_mod_bprop"] = backward
    return callbacks


def _sdpa(ctx: Context, node: Node) -> Sequence[Any]:
    q, k, v = _distinct(ctx, node, ("q", "k", "v"))
    options = _attention_options(ctx, node)
    sink = _port(node, "sink")
    if sink is not None:
        if ctx.spec.tensors[str(_port(node, "q"))].shape[2] == 1:
            raise _Refused("cuDNN attention takes no sink where S_q is 1")
        options["sink_token"] = ctx.values[sink]
    out, stats = ctx.graph.sdpa(q=q, k=k, v=v, generate_stats=node.attr("return_lse"), **options)
    return out, stats


def _sdpa_fp8(ctx: Context, node: Node) -> Sequence[Any]:
    ports = OPS[node.op].ports
    depths = {ctx.spec.tensors[str(_port(node, port))].shape[3] for port in "qv"}
    if any(depth % 16 or depth > 256 for depth in depths):
        raise _Refused(
            f"head dims {sorted(depths)}; cuDNN's FP8 attention takes multiples of 16 up to 256"
        )
    options: dict[str, Any] = {"attn_scale": node.attr("scale"), "name": node.name}
    seq_q, seq_kv = (ctx.operands(node)[ports.index(f"seq_len_{of}")] for of in ("q", "kv"))
    if seq_q is not None or seq_kv is not None:
        options |= _lengths(ctx, node, seq_q, seq_kv)
    for name, value in _band_options(ctx, node).items():  # the frontend's names of them are shorter
        options[name.removeprefix("diagonal_band_")] = value
    data = dict(zip(ports[:9], _distinct(ctx, node, ports[:9]), strict=True))
    results = ctx.graph.sdpa_fp8(**data, generate_stats=node.attr("return_lse"), **options)
    return list(results)


def _order_of_sums(node: Node) -> dict[str, Any]:
    """The frontend's keyword for the gradient of attention: whether dq is added up in order."""
    return {"use_deterministic_algorithm": bool(dict(node.attrs).get(REPEATABLE))}


_TILE = 128  # rows and keys that a kernel for the gradient takes at once


def _ends_of_sequences(ctx: Context, node: Node) -> dict[str, Any]:
    """Lengths for the gradient of attention that has none, where a tile reaches past the end.

    cuDNN has 0 for a score there, and exp(0 - lse) is more than float32 holds where all scores of
    a row are below -88: gradients are NaN (pytorch#196678, keys; cudnn-frontend#1072, rows; both
    seen on an H200 with cuDNN 9.19). Lengths say where the end is. Where causality hides what is
    there, and where scores are changed by callbacks, it is not seen, and lengths would take 5 %.
    """
    rows, keys = (ctx.spec.tensors[str(_port(node, port))].shape[2] for port in ("q", "k"))
    changed = node.attr("softcap") is not None or _port(node, "alibi_slopes") is not None
    hidden = 1 < rows == keys and (node.attr("window") or (None, None))[1] == 0
    whole = rows % _TILE == 0 and keys % _TILE == 0
    if _has_lengths(node) or changed or hidden or whole:
        return {}
    return _lengths(ctx, node)


def _sdpa_backward(ctx: Context, node: Node) -> Sequence[Any]:
    if _has_lengths(node) and not node.attr("finite_padding"):
        raise _Refused("cuDNN lets NaN out of the padding into gradients, also of empty sequences")
    name = _port(node, "attn_mask")
    if name is not None:
        rows = (1, *ctx.spec.tensors[name].shape)[-2]
        if rows == 1 < ctx.spec.tensors[str(node.inputs[0])].shape[2]:
            raise _Refused("cuDNN gets the gradient wrong under a mask that is broadcast over rows")
    do, q, k, v, o, lse = _distinct(ctx, node, ("do", "q", "k", "v", "o", "lse"))
    options = _attention_options(ctx, node) | _ends_of_sequences(ctx, node) | _order_of_sums(node)
    dmask = None
    if node.outputs[3] is not None:
        if node.attr("softcap") is not None:
            raise _Refused("cuDNN attention has no gradient of a mask beside a soft cap")
        tensor = ctx.spec.tensors[node.outputs[3]]
        dims, strides = ctx.view.dims(tensor.shape, tensor.stride)
        dmask = options["dBias"] = ctx.graph.tensor(
            dim=dims, stride=strides, data_type=ctx.dtype(tensor.dtype), name=tensor.name
        )
    grads = ctx.graph.sdpa_backward(q=q, k=k, v=v, o=o, dO=do, stats=lse, **options)
    return *grads, dmask


def _sdpa_paged(ctx: Context, node: Node) -> Sequence[Any]:
    q, k, v = _distinct(ctx, node, ("q", "k_cache", "v_cache"))
    q_spec, table = (ctx.spec.tensors[str(_port(node, port))] for port in ("q", "page_table"))
    if q_spec.dtype not in LOW_PRECISION:
        raise _Refused("cuDNN attention takes float16 and bfloat16 only")
    batch, _, rows, _ = q_spec.shape
    pages, second = str(_port(node, "page_table")), _port(node, "page_table_v")
    lengths = _port(node, "seq_len_q")
    page = ctx.spec.tensors[str(_port(node, "k_cache"))].shape[2]
    out, stats = ctx.graph.sdpa(
        q=q,
        k=k,
        v=v,
        attn_scale=node.attr("scale"),
        generate_stats=node.attr("return_lse"),
        use_padding_mask=True,
        seq_len_q=ctx.constant([batch, 1, 1, 1], rows, torch.int32)
        if lengths is None
        else ctx.values[lengths],
        seq_len_kv=ctx.values[str(_port(node, "seq_len_kv"))],
        paged_attention_k_table=ctx.values[pages],
        paged_attention_v_table=ctx.alias(pages) if second in (None, pages) else ctx.values[second],
        paged_attention_max_seq_len_kv=table.shape[1] * page,
        name=node.name,
        **_band_options(ctx, node),
    )
    return out, stats


def _sequences(ctx: Context, node: Node) -> tuple[dict[str, Any], Callable[[Any, str, bool], None]]:
    """The lengths of packed sequences as keywords, and what gives a tensor its offsets.

    The latter takes the frontend's tensor, the name of ours, and whether its tokens are those of k.
    """
    name = str(_port(node, "ragged"))
    ragged = ctx.spec.tensors[name]
    rows, count = ragged.shape
    ones = (1, 1, 1)
    widths = token_widths(node, ctx.spec.tensors)
    if rows != 2 + len(widths[0]) + len(widths[1]):
        raise _Refused("packed attention with offsets for other strides")

    def row(number: int, length: int) -> Any:
        step = number * ragged.stride[0] * ragged.dtype.itemsize
        return ctx.alias(name, ((length, *ones), (1, *ones)), step)

    offsets = [row(number, count) for number in range(2, rows)]

    def place(tensor: Any, of: str, keys: bool) -> None:
        before = len(widths[0]) if keys else 0
        at = before + widths[keys].index(ctx.spec.tensors[of].stride[0])
        tensor.set_ragged_offset(offsets[at])

    lengths = {"seq_len_q": ctx.values[name], "seq_len_kv": row(1, count - 1)}
    return {"use_padding_mask": True, **lengths}, place


def _sdpa_varlen(ctx: Context, node: Node) -> Sequence[Any]:
    q, k, v = _distinct(ctx, node, ("q", "k", "v"))
    options, place = _sequences(ctx, node)
    for tensor, port in ((q, "q"), (k, "k"), (v, "v")):
        place(tensor, str(_port(node, port)), port != "q")
    out, stats = ctx.graph.sdpa(
        q=q,
        k=k,
        v=v,
        attn_scale=node.attr("scale"),
        generate_stats=node.attr("return_lse"),
        name=node.name,
        **options,
        **_band_options(ctx, node),
    )
    for tensor, result in zip((out, stats), node.outputs, strict=True):
        if result is not None:
            place(tensor, result, False)
    return out, stats


def _sdpa_varlen_backward(ctx: Context, node: Node) -> Sequence[Any]:
    ports = ("do", "q", "k", "v", "o", "lse")
    names = dict(zip(OPS[node.op].outputs, node.outputs, strict=True))
    for port, other in ALIKE:
        one, two = (ctx.spec.tensors[names.get(at) or str(_port(node, at))] for at in (port, other))
        if not same_layout(one.shape, one.stride, two.stride):
            raise _Refused(
                f"{port} and {other} of packed attention's gradient lie apart; cuDNN 9.19 reads a "
                "misaligned address there (measured on an H200)"
            )
    operands = _distinct(ctx, node, ports)
    q = ctx.spec.tensors[str(_port(node, "q"))]
    options, place = _sequences(ctx, node)
    for tensor, port in zip(operands, ports, strict=True):
        place(tensor, str(_port(node, port)), port in ("k", "v"))
    do, q_, k, v, o, lse = operands
    grads = ctx.graph.sdpa_backward(
        q=q_,
        k=k,
        v=v,
        o=o,
        dO=do,
        stats=lse,
        attn_scale=node.attr("scale"),
        max_total_seq_len_q=q.shape[0],
        max_total_seq_len_kv=ctx.spec.tensors[str(_port(node, "k"))].shape[0],
        name=node.name,
        **options,
        **_order_of_sums(node),
        **_band_options(ctx, node),
    )
    for tensor, result, keys in zip(grads, node.outputs, (False, True, True), strict=True):
        assert result is not None, "inference gives all three"
        place(tensor, result, keys)
    return grads  # type: ignore[no-any-return]


def _check_float32(ctx: Context, node: Node, *ports: int) -> None:
    for port in ports:
        name = node.inputs[port]
        if name is not None and ctx.spec.tensors[name].dtype != torch.float32:
            raise _Refused("cuDNN's batch norm takes parameters and statistics in float32")


def _batch_norm_train(ctx: Context, node: Node) -> Sequence[Any]:
    x, weight, bias, mean, var = ctx.operands(node)
    _check_float32(ctx, node, 1, 2, 3, 4)
    given = mean is not None
    if not given:  # the binding does not go without
        shape = [1] * ctx.view.seen_rank
        shape[1] = ctx.spec.tensors[str(node.inputs[0])].shape[1]
        mean = ctx.constant(shape, 0.0, torch.float32)
        var = ctx.constant(shape, 1.0, torch.float32)
    y, *statistics = ctx.graph.batchnorm(
        input=x,
        scale=weight,
        bias=bias,
        in_running_mean=mean,
        in_running_var=var,
        epsilon=ctx.host_scalar(node.attr("eps")),
        momentum=ctx.host_scalar(node.attr("momentum")),
        name=node.name,
    )
    if not given:
        vector = _vector(ctx.spec.tensors[str(node.inputs[0])])
        for unused in statistics[2:]:
            ctx.discard(unused, vector)
        statistics = statistics[:2]
    return y, *statistics


def _batch_norm_backward(ctx: Context, node: Node) -> Sequence[Any]:
    dy, x, weight, mean, inv_std = ctx.operands(node)
    _check_float32(ctx, node, 2, 3, 4)
    return ctx.graph.batchnorm_backward(  # type: ignore[no-any-return]
        grad=dy, input=x, scale=weight, mean=mean, inv_variance=inv_std, name=node.name
    )


# Added to a number below 2^22 and taken away again, this rounds it to the nearest whole one, ties
# to even: float32 has no fractions at 2^23.
_ROUNDER = 1.5 * 2.0**23


def _dequantize(ctx: Context, node: Node) -> Any:
    return ctx.graph.mul(*ctx.operands(node), name=node.name)


def _quantize(ctx: Context, node: Node) -> Any:
    """Saturates by arithmetic, and rounds to int8 so; conversions to FP8 round of themselves, but
    make NaN or infinity of what is beyond the largest number, and of some that round to it (9.19).
    cuDNN's minimum and maximum hide NaN, which a product with 0 brings back (a comparison and a
    selection would keep infinity apart too, and take 15 % longer at 28 x 28).
    """
    x, scale = ctx.operands(node)
    result, like = node.results[0], ctx.spec.tensors[str(node.inputs[0])]
    if any(result in each.operands for each in ctx.spec.nodes):
        raise _Refused("what is quantised is rounded where it leaves a plan, not within")
    g = ctx.graph
    if scale is not None:
        x = ctx.temporary(g.div(x, scale), like)
    if node.attr("dtype") != "int8":
        most = torch.finfo(ctx.spec.tensors[result].dtype).max
        within = ctx.temporary(g.max(x, ctx.scalar(-most)), like)
        within = ctx.temporary(g.min(within, ctx.scalar(most)), like)
        lost = ctx.temporary(g.mul(x, ctx.scalar(0.0)), like)
        return g.add(within, lost, name=node.name)
    x = ctx.temporary(g.max(x, ctx.scalar(-128.0)), like)
    x = ctx.temporary(g.min(x, ctx.scalar(127.0)), like)
    x = ctx.temporary(g.add(x, ctx.scalar(_ROUNDER)), like)
    return g.sub(x, ctx.scalar(_ROUNDER), name=node.name)


def _reduction(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    if ctx.spec.tensors[node.results[0]].dtype != torch.float32:
        raise _Refused("cuDNN reduces to float32 only")
    modes, mode = ctx.frontend.reduction_mode, node.attr("mode")
    if mode == "mean":  # cuDNN's own is refused (9.19)
        source = ctx.spec.tensors[str(node.inputs[0])]
        count = numel(source.shape[dim] for dim in node.attr("dims"))
        x = ctx.temporary(ctx.graph.mul(x, ctx.scalar(1.0 / count)), source)
    kind = {
        "sum": modes.ADD,
        "mean": modes.ADD,
        "max": modes.MAX,
        "min": modes.MIN,
        "amax": modes.AMAX,
    }[mode]
    return ctx.graph.reduction(input=x, mode=kind, name=node.name)


def _expand(ctx: Context, node: Node) -> Any:
    """Operands broadcast by themselves, so nothing is done: x takes part as it is."""
    (x,) = ctx.operands(node)
    source, (result,) = ctx.spec.tensors[str(node.inputs[0])], node.results
    larger = source.numel != ctx.spec.tensors[result].numel
    if result in ctx.spec.outputs and not larger:
        return ctx.graph.identity(x, name=node.name)
    ctx.as_is.add(result)
    users = [user for user in ctx.spec.nodes if result in user.operands]
    full = [_full_beside(ctx, user) for user in users]
    if larger and (result in ctx.spec.outputs or not all(full)):
        raise _Refused("a tensor is repeated, with nothing of the full shape beside it")
    return x


def _full_beside(ctx: Context, node: Node) -> bool:
    """Whether an operand has the shape of the result as it stands."""
    shape = ctx.spec.tensors[node.results[0]].shape
    operands = [name for name in node.operands if name not in ctx.as_is]
    return any(ctx.spec.tensors[name].shape == shape for name in operands)


def _relu_backward(ctx: Context, node: Node) -> Any:
    dy, y = ctx.operands(node)
    slope = node.attr("negative_slope")
    return ctx.graph.relu_backward(loss=dy, input=y, negative_slope=slope or None, name=node.name)


def _vector(x: TensorSpec) -> TensorSpec:
    """One float32 per channel of x, at its rank."""
    shape = (1, x.shape[1], *(1,) * (len(x.shape) - 2))
    return TensorSpec("", shape, channels_last_strides(shape), torch.float32)


def _batch_norm(ctx: Context, node: Node) -> Any:
    x, mean, var, weight, bias = ctx.operands(node)
    like = ctx.spec.tensors[str(node.inputs[0])]
    vector = _vector(like)
    inverse = ctx.temporary(ctx.graph.add(var, ctx.scalar(node.attr("eps"))), vector)
    inverse = ctx.temporary(ctx.graph.rsqrt(inverse), vector)
    y = ctx.temporary(ctx.graph.sub(x, mean), like)
    y = ctx.graph.mul(y, inverse)
    if weight is not None:
        y = ctx.graph.mul(ctx.temporary(y, like), weight)
    if bias is not None:
        y = ctx.graph.add(ctx.temporary(y, like), bias)
    return y


def _batch_norm_apply(ctx: Context, node: Node) -> Any:
    x, mean, inv_std, weight, bias = ctx.operands(node)
    if any(each.op == "batch_norm_backward" for each in ctx.spec.nodes):
        # In front of the norm's backward, behind a relu's, cuDNN has just this form of it.
        return ctx.graph.batchnorm_inference(
            input=x, mean=mean, inv_variance=inv_std, scale=weight, bias=bias, name=node.name
        )
    like = ctx.spec.tensors[str(node.inputs[0])]
    y = ctx.temporary(ctx.graph.sub(x, mean), like)
    y = ctx.temporary(ctx.graph.mul(y, inv_std), like)
    return ctx.graph.add(ctx.temporary(ctx.graph.mul(y, weight), like), bias)


def _matmul(ctx: Context, node: Node) -> Any:
    for tensor in (ctx.spec.tensors[name] for name in node.operands):
        if 0 in [
            step for n, step in zip(tensor.shape[-2:], tensor.stride[-2:], strict=True) if n > 1
        ]:
            # Two of three such random graphs in 16 bits or TF32 were wrong on 9.19.
            raise _Refused(
                f"'{tensor.name}' with strides {tensor.stride} repeats a row or a column of a "
                "matrix, which cuDNN's engines misread"
            )
    x, y = ctx.operands(node)
    if node.inputs[0] == node.inputs[1]:  # cuDNN gets a tensor times itself wrong
        y = ctx.alias(str(node.inputs[1]))
    if ctx.spec.tensors[str(node.inputs[0])].dtype == torch.int8:
        kind = ctx.dtype(torch.int32)
        return ctx.graph.matmul(A=x, B=y, compute_data_type=kind, name=node.name)
    return ctx.graph.matmul(A=x, B=y, name=node.name)


def _ones(ctx: Context, node: Node) -> Any:
    """A weight for an instance norm that has none: the frontend wants one."""
    vector = _vector(ctx.spec.tensors[str(node.inputs[OPS[node.op].ports.index("x")])])
    return ctx.constant(ctx.view.dims(vector.shape, vector.stride)[0], 1.0, torch.float32)


def _check_image_layout(ctx: Context, node: Node, *names: str | None) -> None:
    """Refuse an instance norm whose images lie with gaps, or in different orders."""
    shape = ctx.spec.tensors[str(names[0])].shape
    strides = [ctx.spec.tensors[name].stride for name in names if name is not None]
    if not any(
        all(lies(shape, stride) for stride in strides) for lies in (is_contiguous, is_channels_last)
    ):
        raise _Refused(f"{node.op} takes images of one layout, without gaps")


def _norm(method: str) -> Rule:
    """A norm; its statistics are made where somebody takes them."""

    def rule(ctx: Context, node: Node) -> Sequence[Any]:
        x, weight, bias = ctx.operands(node)
        if method == "instancenorm":
            _check_image_layout(ctx, node, node.inputs[0], node.outputs[0])
        if method == "instancenorm" and weight is None:
            weight = _ones(ctx, node)
            bias = ctx.constant(list(weight.get_dim()), 0.0, torch.float32)
        if bias is None and method == "layernorm":  # the frontend wants one
            spec = ctx.spec.tensors[str(node.inputs[1])]
            shape = ctx.view.dims(spec.shape, spec.stride)[0]
            bias = ctx.constant(shape, 0.0, spec.dtype)
        used = {name for each in ctx.spec.nodes for name in each.operands} | set(ctx.spec.outputs)
        phases = ctx.frontend.norm_forward_phase
        taken = [name in used for name in node.outputs[1:]]
        training = any(taken)
        if training and not all(taken):
            raise _Refused(f"{node.op} hands out all of its statistics or none")
        results = getattr(ctx.graph, method)(
            norm_forward_phase=phases.TRAINING if training else phases.INFERENCE,
            input=x,
            scale=weight,
            bias=bias,
            epsilon=ctx.host_scalar(node.attr("eps")),
            name=node.name,
        )
        return list(results) if training else list(results[:1])

    return rule


def _by_sums_of_squares(ctx: Context, x: Any, like: TensorSpec, mean: bool, least: float) -> Any:
    """x by the root of each row's sum of squares or of their mean: a product with ones has the sum
    in every column, so the rest of it stands behind that.

    Of float16 the squares are float32, which tensor cores round to TF32: as many bits as x has, and
    all of its range. Of bfloat16 they are bfloat16, and it is faster. Rounded alike they put a row
    off by half of what rounding its result may. ``mean``: ``least`` is added to it, else the
    sum is that at least.
    """
    if like.dtype not in LOW_PRECISION or like.shape[-1] > LONGEST_SUMMED:
        raise _Refused(f"products sum up rows of at most {LONGEST_SUMMED} numbers of 16 bits")
    width = like.shape[-1]
    kind = torch.float32 if like.dtype == torch.float16 else torch.bfloat16
    product = ctx.graph.matmul(
        A=ctx.virtual(ctx.graph.mul(x, x), replace(like, dtype=kind)),
        B=ctx.constant([1, width, width], 1.0, kind),
    )
    total, floor = ctx.temporary(product, like), ctx.scalar(least)
    if mean:
        total = ctx.temporary(ctx.graph.mul(total, ctx.scalar(1.0 / width)), like)
        total = ctx.temporary(ctx.graph.add(total, floor), like)
    else:  # total + relu(least - total): cuDNN's max of a number and NaN is the number
        less = ctx.temporary(ctx.graph.add(ctx.temporary(ctx.graph.neg(total), like), floor), like)
        total = ctx.temporary(ctx.graph.add(total, ctx.temporary(ctx.graph.relu(less), like)), like)
    return ctx.graph.mul(x, ctx.temporary(ctx.graph.rsqrt(total), like))


def _normalize(ctx: Context, node: Node) -> Any:
    eps = node.attr("eps")
    least = max(eps * eps, torch.finfo(torch.float32).tiny) if eps else 0.0
    like = ctx.spec.tensors[str(node.inputs[0])]
    return _by_sums_of_squares(ctx, ctx.operands(node)[0], like, False, least)


def _rms_norm(ctx: Context, node: Node) -> Any:
    if ctx.view.seen_rank > 3:  # [rows, columns, 1, 1]
        return _norm("rmsnorm")(ctx, node)
    x, weight, bias = ctx.operands(node)
    like = ctx.spec.tensors[str(node.inputs[0])]
    y = ctx.temporary(_by_sums_of_squares(ctx, x, like, True, node.attr("eps")), like)
    y = ctx.graph.mul(y, weight)
    return y if bias is None else ctx.graph.add(ctx.temporary(y, like), bias)


def _norm_backward(method: str) -> Rule:
    """The gradients of a norm."""

    def rule(ctx: Context, node: Node) -> Sequence[Any]:
        if len([each for each in ctx.spec.nodes if each.op != "constant"]) > 1:
            # cuDNN takes what follows and does not run it (seen on 9.19).
            raise _Refused("the gradient of a norm shares a plan with nothing")
        given = dict(zip(OPS[node.op].ports, ctx.operands(node), strict=True))
        options = {
            word: given[port]
            for word, port in (("mean", "mean"), ("inv_variance", "inv_std"))
            if port in given
        }
        with_bias = node.outputs[2] is not None
        if method == "rmsnorm_backward":
            options["has_dbias"] = with_bias
        dx, dweight, dbias = getattr(ctx.graph, method)(
            grad=given["dy"],
            input=given["x"],
            scale=given["weight"],
            name=node.name,
            **options,
        )
        if dbias is not None and not with_bias:
            ctx.discard(dbias, ctx.spec.tensors[str(node.inputs[2])])
        return dx, dweight, dbias if with_bias else None

    return rule


def _call(method: str) -> Rule:
    """An op that is one frontend op with the same operands."""

    def rule(ctx: Context, node: Node) -> Any:
        return getattr(ctx.graph, method)(*ctx.operands(node), name=node.name)

    return rule


def _computed_first(method: str) -> Rule:
    """An op whose operands may be exchanged; what is computed comes first: only so are the engines
    found that add a residual behind a convolution, of a tensor that is read."""

    def rule(ctx: Context, node: Node) -> Any:
        x, y = ctx.operands(node)
        read = [name in ctx.spec.inputs for name in node.operands]
        pair = (y, x) if read == [True, False] else (x, y)
        return getattr(ctx.graph, method)(*pair, name=node.name)

    return rule


_COMPUTED_FIRST = {"add": "add", "mul": "mul", "minimum": "min", "maximum": "max"}


def _gelu_tanh_backward(ctx: Context, node: Node) -> Any:
    if ctx.spec.tensors[node.results[0]].dtype == torch.float32 and all(
        ctx.spec.tensors[name].dtype == torch.float32 for name in ctx.spec.inputs
    ):
        raise _Refused("cuDNN's gradient of gelu_tanh is off by 2e-6, too far for float32")
    return ctx.graph.gelu_approx_tanh_backward(*ctx.operands(node), name=node.name)


def _logical(method: str) -> Rule:
    """Logic is computed in bool; in float32, the graph's default, cuDNN refuses it."""

    def rule(ctx: Context, node: Node) -> Any:
        kind = ctx.frontend.data_type.BOOLEAN
        operands = ctx.operands(node)
        return getattr(ctx.graph, method)(*operands, compute_data_type=kind, name=node.name)

    return rule


def _elu(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    alpha = node.attr("alpha")
    if alpha == 1.0:
        return ctx.graph.elu(x, name=node.name)
    # max(x, 0) + alpha * (exp(min(x, 0)) - 1)
    like, g = ctx.spec.tensors[str(node.inputs[0])], ctx.graph
    low = ctx.temporary(g.min(x, ctx.scalar(0.0)), like)
    low = ctx.temporary(g.sub(ctx.temporary(g.exp(low), like), ctx.scalar(1.0)), like)
    low = ctx.temporary(g.mul(low, ctx.scalar(alpha)), like)
    return g.add(ctx.temporary(g.relu(x), like), low)


def _softplus(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    beta = node.attr("beta")
    if beta == 1.0:
        return ctx.graph.softplus(x, name=node.name)
    like, g = ctx.spec.tensors[str(node.inputs[0])], ctx.graph
    y = ctx.temporary(g.mul(x, ctx.scalar(beta)), like)
    return g.mul(ctx.temporary(g.softplus(y), like), ctx.scalar(1.0 / beta))


def _clamp(ctx: Context, node: Node) -> Any:
    """A ReLU that is clipped, of which NaN is NaN, unlike the larger and the smaller of two. It
    has no lower clip that lets every number through: -inf becomes float32's smallest."""
    (x,) = ctx.operands(node)
    low, high = node.attr("min"), node.attr("max")
    if low is None:
        return ctx.graph.min(x, ctx.scalar(high))
    upper = {} if high is None else {"upper_clip": high}
    return ctx.graph.relu(x, lower_clip=low, **upper, name=node.name)


def _where(ctx: Context, node: Node) -> Any:
    condition, x, y = ctx.operands(node)
    return ctx.graph.binary_select(x, y, condition, name=node.name)


_PRODUCTS = frozenset({"conv", "conv_transpose", "matmul"})

#: gelu(x) is x Phi(x), and Phi(x) is (1 + tanh(x P(x^2))) / 2 with a smooth P: its coefficients,
#: such that a float16 result is off by at most 0.61 of its last place, and by 1.1e-5 before that,
#: but for what tanh itself is rounded by, which shows where results are next to nothing.
#: The last one is above 0, so that what is large stays so.
GELU_BY_TANH = (
    *(7.977496651417489e-1, 3.653034702793871e-2, -1.1874516818155519e-4, -3.905139694881279e-5),
    *(2.486155556973281e-6, -6.898024525715354e-8, 7.463564462897486e-10),
)


def _gelu(ctx: Context, node: Node) -> Any:
    """By erf, but behind a product that is rounded to 16 bits or less by tanh: erf there takes
    longer than the product of a transformer's layer (an H200, 6304 x 768 by 768 x 3072: 53 us with
    a bias alone, 86 with erf, 56 to 58 so)."""
    (x,) = ctx.operands(node)
    rounded = all(ctx.spec.tensors[name].dtype.itemsize < 4 for name in ctx.spec.outputs)
    if not rounded or _PRODUCTS.isdisjoint(each.op for each in ctx.spec.nodes):
        return ctx.graph.gelu(x, name=node.name)
    like, g = ctx.spec.tensors[str(node.inputs[0])], ctx.graph
    square = ctx.temporary(g.mul(x, x), like)
    first, *rest = map(ctx.scalar, reversed(GELU_BY_TANH))
    inner = first
    for each in rest:
        inner = ctx.temporary(g.add(ctx.temporary(g.mul(square, inner), like), each), like)
    inner = ctx.temporary(g.mul(x, inner), like)
    half = ctx.scalar(0.5)
    share = ctx.temporary(g.mul(ctx.temporary(g.tanh(inner), like), half), like)
    return g.mul(x, ctx.temporary(g.add(share, half), like))


def _gelu_tanh(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    like = ctx.spec.tensors[str(node.inputs[0])]
    if any(ctx.spec.tensors[name].dtype in LOW_PRECISION for name in ctx.spec.inputs):
        return ctx.graph.gelu_approx_tanh(x, name=node.name)
    # cuDNN's own is off by 2e-6 in float32. With u = sqrt(2/pi) (x + 0.044715 x^3), what it
    # approximates is x (1 + tanh(u)) / 2 = x sigmoid(2u).
    g, slope = ctx.graph, 2.0 * math.sqrt(2.0 / math.pi)
    cube = ctx.temporary(g.mul(ctx.temporary(g.mul(x, x), like), x), like)
    inner = ctx.temporary(g.mul(cube, ctx.scalar(0.044715 * slope)), like)
    inner = ctx.temporary(g.add(ctx.temporary(g.mul(x, ctx.scalar(slope)), like), inner), like)
    return g.mul(x, ctx.temporary(g.sigmoid(inner), like))


def _leaky_relu(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    slope = node.attr("negative_slope")
    if slope <= 1.0:
        return ctx.graph.leaky_relu(x, slope, name=node.name)
    # cuDNN's engines take the larger of x and its multiple, which is the other one from 1 on.
    like = ctx.spec.tensors[str(node.inputs[0])]
    steep = ctx.temporary(ctx.graph.mul(x, ctx.scalar(slope)), like)
    return ctx.graph.min(x, steep, name=node.name)


def _torch_only(ctx: Context | None, node: Node) -> Any:
    """An op that moves elements and computes nothing."""
    raise _Refused(f"{node.op} is no part of a cuDNN plan: a torch step, or strides of a tensor")


def _torchs_own(ctx: Context | None, node: Node) -> Any:
    """An op that only torch has."""
    raise _Refused(f"{node.attr('overload')} is torch's own op, no part of a plan: a torch step")


def _not_as_a_plan(ctx: Context | None, node: Node) -> Any:
    """cuDNN 9.19 on an H200: engine 0 adds up the gradients of weight and bias by a kernel on the
    default stream, whatever the handle's; engine 2 took longer than torch wherever it was tried."""
    raise _Refused(f"{node.op}: cuDNN leaves the stream of the call, or is slower; a torch step")


def _no_resample(ctx: Context | None, node: Node) -> Any:
    """Pooling and interpolation, which cuDNN has and its Python frontend has not."""
    why = f"{node.op}: cuDNN's Python frontend has no resampling; a torch step"
    raise _Refused(why + ", or behind a ReLU cuDNN's older call" * (node.op == "max_pool"))


def _no_softmax(ctx: Context | None, node: Node) -> Any:
    """By reductions and pointwise ops softmax passes over its data three times as often."""
    raise _Refused(f"{node.op}: cuDNN's Python frontend has it in attention alone; a torch step")


def _no_group_norm(ctx: Context | None, node: Node) -> Any:
    """cuDNN's norms are of channels or of rows; groups of images with channels last are neither."""
    raise _Refused(f"{node.op}: cuDNN's norms have no groups of channels; a torch step")


_REFUSALS: Sequence[Callable[[Context | None, Node], Any]] = (
    _torch_only,
    _torchs_own,
    _not_as_a_plan,
    _no_resample,
    _no_softmax,
    _no_group_norm,
)


RULES: Mapping[str, Rule] = {
    "conv": _convolution(transposed=False),
    "conv_transpose": _convolution(transposed=True),
    "conv_wgrad": _conv_wgrad,
    "matmul": _matmul,
    "layer_norm": _norm("layernorm"),
    "rms_norm": _rms_norm,
    "normalize": _normalize,
    "layer_norm_backward": _norm_backward("layernorm_backward"),
    "rms_norm_backward": _norm_backward("rmsnorm_backward"),
    "sdpa": _sdpa,
    "sdpa_fp8": _sdpa_fp8,
    "sdpa_backward": _sdpa_backward,
    "sdpa_paged": _sdpa_paged,
    "sdpa_varlen": _sdpa_varlen,
    "sdpa_varlen_backward": _sdpa_varlen_backward,
    "ragged_offsets": _torch_only,
    "batch_norm_train": _batch_norm_train,
    "batch_norm_backward": _batch_norm_backward,
    "instance_norm": _norm("instancenorm"),
    "instance_norm_backward": _not_as_a_plan,
    "group_affine": _no_group_norm,
    "reduction": _reduction,
    "expand": _expand,
    "batch_norm": _batch_norm,
    "batch_norm_apply": _batch_norm_apply,
    "dequantize": _dequantize,
    "quantize": _quantize,
    "bias": _call("bias"),
    "scale": _call("scale"),
    "relu": _call("relu"),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _call("swish"),
    "sigmoid": _call("sigmoid"),
    "tanh": _call("tanh"),
    "softplus": _softplus,
    "clamp": _clamp,
    "relu_backward": _relu_backward,
    "gelu_backward": _call("gelu_backward"),
    "gelu_tanh_backward": _gelu_tanh_backward,
    "silu_backward": _call("swish_backward"),
    "identity": _call("identity"),
    "to_float": _call("identity"),
    "neg": _call("neg"),
    "abs": _call("abs"),
    "exp": _call("exp"),
    "log": _call("log"),
    "sqrt": _call("sqrt"),
    "rsqrt": _call("rsqrt"),
    "reciprocal": _call("reciprocal"),
    "erf": _call("erf"),
    **{op: _computed_first(method) for op, method in _COMPUTED_FIRST.items()},
    "sub": _call("sub"),
    "div": _call("div"),
    "pow": _call("pow"),
    "eq": _call("cmp_eq"),
    "ne": _call("cmp_neq"),
    "lt": _call("cmp_lt"),
    "le": _call("cmp_le"),
    "gt": _call("cmp_gt"),
    "ge": _call("cmp_ge"),
    "logical_and": _logical("logical_and"),
    "logical_or": _logical("logical_or"),
    "logical_not": _logical("logical_not"),
    "where": _where,
    "constant": lambda ctx, node: ctx.scalar(node.attr("value")),
    "reshape": _torch_only,
    "transpose": _torch_only,
    "permute": _torch_only,
    "slice": _torch_only,
    "concat": _torch_only,
    "aten": _torchs_own,
    **{name: _no_resample for name in pooling.RULES},
    **{
        f"{name}{suffix}": _no_softmax
        for name in ("softmax", "log_softmax", "nll_loss")
        for suffix in ("", "_backward")
    },
}

_CHANNEL_PORTS = {
    "bias": ("bias",),
    "scale": ("scale",),
    "batch_norm": ("running_mean", "running_var", "weight", "bias"),
    "batch_norm_apply": ("mean", "inv_std", "weight", "bias"),
    "batch_norm_train": ("weight", "bias", "running_mean", "running_var"),
    "batch_norm_backward": ("weight", "mean", "inv_std"),
    "instance_norm": ("weight", "bias"),
}
_SCALED = ("dequantize", "quantize")
_ATTENTION = ("sdpa", "sdpa_backward")
_LENGTH_PORTS = {op: ("seq_len_q", "seq_len_kv") for op in (*_ATTENTION, "sdpa_paged", "sdpa_fp8")}
_VARLEN = ("sdpa_varlen", "sdpa_varlen_backward")
_HEAD_PORTS = {op: ("alibi_slopes", "sink") for op in _ATTENTION}
_NUMBER_PORTS = {op: ("dropout_seed", "dropout_offset") for op in _ATTENTION}


def _placed(spec: GraphSpec, name: str) -> tuple[Shape, Shape]:
    """Shape and stride of an input or output with its dims set out as its users take them."""
    tensor = spec.tensors[name]
    views: set[tuple[Shape, Shape]] = set()
    for node in spec.nodes:
        for port, operand in zip(OPS[node.op].ports_of(len(node.inputs)), node.inputs, strict=True):
            if operand != name:
                continue
            if port == "scale" and node.op in _SCALED:
                views.add(_scale_place(spec, node, tensor))
            elif len(tensor.shape) == 1 and port in _CHANNEL_PORTS.get(node.op, ()):
                tail = (1,) * (len(spec.tensors[str(node.inputs[0])].shape) - 2)
                views.add(((1, *tensor.shape, *tail), (1, *tensor.stride, *tail)))
            elif port in _LENGTH_PORTS.get(node.op, ()):
                views.add(((*tensor.shape, 1, 1, 1), (*tensor.stride, 1, 1, 1)))
            elif node.op == "sdpa_paged" and port.startswith("page_table"):
                count = tensor.shape[1]
                views.add(((tensor.shape[0], 1, count, 1), (tensor.stride[0], count, 1, 1)))
            elif node.op in _VARLEN and port == "ragged":  # its first row: the lengths of q
                views.add(((tensor.shape[1] - 1, 1, 1, 1), (1, 1, 1, 1)))
            elif node.op in _VARLEN:
                views.add(_spread_out(spec, node, tensor, port in ("k", "v")))
            elif port in _HEAD_PORTS.get(node.op, ()):
                views.add(((1, *tensor.shape, 1, 1), (*tensor.shape, *tensor.stride, 1, 1)))
            elif port in _NUMBER_PORTS.get(node.op, ()):
                views.add(((1, 1, 1, 1), (1, 1, 1, 1)))
            elif node.op == "sdpa_backward" and port == "lse":
                views.add(((*tensor.shape, 1), (*tensor.stride, 1)))
            elif node.op == "expand":
                views.add(_set_out(tensor, node.attr("dims"), len(node.attr("shape"))))
            else:
                views.add((_core(spec, tensor), tensor.stride))
        if name in node.results:
            result = _result_spec(spec, node, name)
            views.add((result.shape, result.stride))
    if len(views) > 1:
        raise _Refused(f"'{name}' is used with its dims in two different places")
    return views.pop() if views else (tensor.shape, tensor.stride)


def _spread_out(spec: GraphSpec, node: Node, tensor: TensorSpec, keys: bool) -> tuple[Shape, Shape]:
    """Shape and stride of packed tokens (T, H, D), or (T, H), as (B, H, longest, D)."""
    name = _port(node, "ragged")
    if name is None:  # cutting gives offsets to 16-bit data
        q = spec.tensors[str(_port(node, "q"))]
        if q.dtype in LOW_PRECISION and by_flash(node, spec.tensors):
            raise _Refused("torch's flash attention is faster where nothing is promised")
        raise _Refused("cuDNN attention takes float16 and bfloat16 only")
    batch = spec.tensors[name].shape[1] - 1
    longest = node.attr("max_seqlen_kv" if keys else "max_seqlen_q")
    _, heads, *rest = tensor.shape
    token, head, *steps = tensor.stride
    shape = (batch, heads, longest, *(rest or [1]))
    return shape, (longest * token, head, token, *(steps or [1]))


def _scale_place(spec: GraphSpec, node: Node, scale: TensorSpec) -> tuple[Shape, Shape]:
    """Shape and stride of a quantisation's scale: one for all of x, or along one of its dims."""
    rank = len(spec.tensors[str(node.inputs[0])].shape)
    if scale.numel == 1:
        return (1,) * rank, (1,) * rank
    return _set_out(scale, (node.attr("dim"),), rank)


def _set_out(tensor: TensorSpec, dims: Sequence[int], rank: int) -> tuple[Shape, Shape]:
    """Shape and stride with the tensor's dims at ``dims``, and ones elsewhere."""
    place = dict(zip(dims, zip(tensor.shape, tensor.stride, strict=True), strict=True))
    sizes, steps = zip(*(place.get(dim, (1, 1)) for dim in range(rank)), strict=True)
    return sizes, steps


def _check_places(spec: GraphSpec) -> None:
    """Refuse what is computed with its dims in one place and used with them in another."""
    producer = {name: node for node in spec.nodes for name in node.results}
    for node in spec.nodes:
        for port, name in zip(OPS[node.op].ports_of(len(node.inputs)), node.inputs, strict=True):
            if name not in producer:
                continue
            shape = spec.tensors[name].shape
            made = _result_spec(spec, producer[name], name).shape
            wanted: Shape = shape
            if port == "scale" and node.op in _SCALED:
                wanted = _scale_place(spec, node, spec.tensors[name])[0]
            elif len(shape) == 1 and port in _CHANNEL_PORTS.get(node.op, ()):
                wanted = (1, *shape, *(1,) * (len(spec.tensors[str(node.inputs[0])].shape) - 2))
            elif node.op == "expand":
                wanted = _set_out(spec.tensors[name], node.attr("dims"), len(node.attr("shape")))[0]
            rank = max(len(made), len(wanted))
            if (1,) * (rank - len(made)) + tuple(made) != (1,) * (rank - len(wanted)) + tuple(
                wanted
            ):
                raise _Refused(f"'{name}' is computed and used with its dims in different places")


_GRADIENTS = frozenset({"relu_backward", "gelu_backward", "gelu_tanh_backward", "silu_backward"})


def _check_beside_norms(spec: GraphSpec, view: _View) -> None:
    """Refuse ops in a norm's plan that cuDNN's engines take and get wrong (seen on 9.19)."""
    ops = {node.op for node in spec.nodes}
    fused = [node for node in spec.nodes if OPS[node.op].pointwise and node.operands]
    # An RMS norm by a product, which is of three dims, is right in all of them.
    if "layer_norm" in ops or ("rms_norm" in ops and view.seen_rank > 3):
        _check_beside_rows(spec, fused)
    elif "batch_norm_train" in ops:
        _check_behind_batch_norm(spec, fused)


def _check_beside_rows(spec: GraphSpec, fused: Sequence[Node]) -> None:
    """Beside a norm of rows they leave their memory in an op that reads one tensor twice, or takes
    what the norm made behind a tensor of its size; of gradients in float32 the build crashes."""
    behind = {name for node in spec.nodes if not OPS[node.op].pointwise for name in node.results}
    for node in fused:
        first, *others = node.operands
        full = spec.tensors[first].numel == spec.tensors[node.results[0]].numel
        second = full and first not in behind and not behind.isdisjoint(others)
        if not behind.isdisjoint(node.operands):
            behind.update(node.results)
        if len({*node.operands}) < len(node.operands):
            raise _Refused(f"{node.op} of a tensor and itself, where cuDNN crashes beside a norm")
        if second and not (node.op in _COMPUTED_FIRST and first in spec.inputs):
            raise _Refused(
                f"{node.op} with the norm's result second: cuDNN does not take it, or crashes"
            )
        if node.op in _GRADIENTS:
            raise _Refused(f"{node.op} beside a norm: cuDNN does not take it, or crashes")


def _check_behind_batch_norm(spec: GraphSpec, fused: Sequence[Node]) -> None:
    """What is added behind a batch norm is read as if it were of the images' shape, and so as they
    lie."""
    for node in fused:
        made = spec.tensors[node.results[0]]
        given = [spec.tensors[name] for name in node.operands]
        if any(x.numel < made.numel for x in given):
            raise _Refused("what broadcasts behind a batch norm, which cuDNN gets wrong")
        places = [_padded(x.shape, x.stride, len(made.shape)) for x in given]
        if not all(same_layout(made.shape, stride, made.stride) for _, stride in places):
            raise _Refused("what lies otherwise than the images behind a batch norm")


@dataclass(frozen=True)
class _Repeat:
    """An operand that a pointwise op in a plan repeats along some of its result's dims."""

    name: str
    dims: frozenset[int]  # along which it is repeated
    real: frozenset[int]  # of the result, of more than one element
    given: bool  # it is read from memory, not computed in the plan
    text: str


def _repeats(ctx: Context) -> Iterator[_Repeat]:
    """Every operand that is repeated along some dims and not along others, as cuDNN sees them."""
    for node in ctx.spec.nodes:
        if not OPS[node.op].pointwise or node.results[0] in ctx.as_is:
            continue
        made = ctx.values[node.results[0]].get_dim()
        real = frozenset(dim for dim, extent in enumerate(made) if extent > 1)
        for name in node.operands:
            seen = ctx.values[name].get_dim()
            dims = frozenset(dim for dim in real if seen[dim] == 1)
            if dims and dims != real:
                given = name in ctx.spec.inputs and ctx.spec.tensors[name].dtype != torch.bool
                yield _Repeat(name, dims, real, given, f"'{name}' of {seen} is {{}}over {made}")


def _check_beside_products(ctx: Context) -> None:
    """Refuse a column that a plan computes and that all of a batch of products share.

    It was read from the wrong place (seen on 9.19); one as large as a product, and a row, were not.
    """
    if all(node.op != "matmul" for node in ctx.spec.nodes):
        return
    for each in _repeats(ctx):
        if not each.given and each.dims >= {0, 2}:
            what = each.text.format("computed and repeated ")
            raise _Refused(f"{what} beside a product, which cuDNN gets wrong")


def _check_beside_convolutions(ctx: Context) -> None:
    """Refuse operands that cuDNN's engines repeat wrongly beside a convolution.

    They read them from the wrong place, or from an address that faults (seen on 9.19, whatever
    strides they are given). Right is what is as large as the result, one number a channel, one
    number for all, and behind a forward convolution one number a pixel, unless the plan itself
    computes it.
    """
    spec = ctx.spec
    ops = {node.op for node in spec.nodes} & {"conv", "conv_transpose"}
    if not ops:
        return
    fuses = any(OPS[node.op].pointwise and node.operands for node in spec.nodes)
    if fuses and any(_mistakes_the_weight(spec, node) for node in spec.nodes if node.op in ops):
        raise _Refused(
            "images of one pixel beside a weight that is not channels_last, which the engines that "
            "fuse read as if it were"
        )
    for each in _repeats(ctx):
        pixel = each.dims == {1} and each.given and "conv_transpose" not in ops
        if each.dims != each.real - {1} and not pixel:
            what = each.text.format("repeated ")
            raise _Refused(f"{what} beside a convolution, which cuDNN gets wrong")


def _mistakes_the_weight(spec: GraphSpec, node: Node) -> bool:
    """Whether a convolution's images lie both ways at once, so that only its weight tells how."""
    x, weight = (spec.tensors[name] for name in node.operands)
    images = (x, spec.tensors[node.results[0]])
    return not is_channels_last(weight.shape, weight.stride) and all(
        is_channels_last(shape, stride) and is_contiguous(shape, stride)
        for shape, stride in ((image.shape, image.stride) for image in images)
    )


def _core(spec: GraphSpec, tensor: TensorSpec) -> tuple[int, ...]:
    """The shape of a tensor; in a pointwise graph an expanded dim of an input counts as 1."""
    if tensor.name in spec.outputs or any(not OPS[node.op].pointwise for node in spec.nodes):
        return tensor.shape
    return tuple(1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride, strict=True))


def lower(spec: GraphSpec, frontend: Any, **graph_options: Any) -> Lowered:
    """Build the frontend's graph for ``spec`` and validate it.

    ``graph_options`` go to the frontend's graph: ``handle=`` on a GPU, ``device_property=`` and
    ``sm_version=`` without one. Raises :class:`NotSupported` where no rule applies or cuDNN's own
    validation refuses.
    """
    for name, tensor in spec.tensors.items():
        if tensor.dtype not in _dtypes(frontend):
            raise NotSupported(
                f"graph '{spec.name}'",
                [f"'{name}' is {tensor.dtype}, which cuDNN graphs do not take"],
            )
    if any(tensor.dtype in FP8 for tensor in spec.tensors.values()):
        major, minor = divmod(graph_options.get("sm_version") or _capability(), 10)
        if (major, minor) < FP8_CAPABILITY:
            reason = f"FP8 needs compute capability 8.9 or higher, this GPU has {major}.{minor}"
            raise NotSupported(f"graph '{spec.name}'", [f"{reason}; declare float16 data"])
    graph = frontend.pygraph(
        name=spec.name,
        io_data_type=frontend.data_type.FLOAT,
        intermediate_data_type=frontend.data_type.FLOAT,
        compute_data_type=frontend.data_type.FLOAT,
        **graph_options,
    )
    try:
        _check_places(spec)
        for node in spec.nodes:
            for refuse in _REFUSALS:
                if RULES[node.op] is refuse:
                    refuse(None, node)
        ctx = Context(frontend, graph, spec, _view_of(spec))
        _check_beside_norms(spec, ctx.view)
        for uid, name in enumerate(spec.inputs, 1):
            dims, strides = ctx.view.dims(*_placed(spec, name))
            kind = spec.tensors[name].dtype
            tensor = graph.tensor(
                dim=dims,
                stride=strides,
                data_type=ctx.dtype(torch.int8 if kind == torch.bool else kind),
                uid=uid,
                name=name,
            )
            if kind == torch.bool:  # cuDNN packs real bools 8 to a byte, torch does not
                tensor = graph.cmp_gt(tensor, ctx.scalar(0.5))
                ctx.virtual(tensor, spec.tensors[name])
            ctx.values[name] = tensor
        wanted = {name for node in spec.nodes for name in node.operands} | set(spec.outputs)
        for node in spec.nodes:
            result = RULES[node.op](ctx, node)
            results = result if isinstance(result, (tuple, list)) else (result,)
            for port, (result_name, tensor) in enumerate(zip(node.outputs, results, strict=False)):
                if result_name is None:
                    continue
                ctx.values[result_name] = tensor
                if node.op == "constant" or result_name in ctx.as_is:
                    continue
                declared = _result_spec(spec, node, result_name)
                if len(node.outputs) > 1 and result_name not in wanted:
                    ctx.discard(tensor, replace(declared, dtype=_own_dtype(spec, node, port)))
                else:
                    ctx.declare(tensor, declared)
        for uid, name in enumerate(spec.outputs, len(spec.inputs) + 1):
            tensor = ctx.values[name]
            if spec.tensors[name].dtype == torch.bool:
                ctx.virtual(tensor, spec.tensors[name])
                tensor = graph.binary_select(ctx.scalar(1.0), ctx.scalar(0.0), tensor)
                ctx.declare(tensor, replace(spec.tensors[name], dtype=torch.int8))
            tensor.set_output(True).set_uid(uid)
        _check_beside_convolutions(ctx)
        _check_beside_products(ctx)
        graph.validate()
        graph.build_operation_graph()
    except _Refused as refused:
        raise NotSupported(f"graph '{spec.name}'", [str(refused)]) from None
    except (frontend.cudnnGraphNotSupportedError, RuntimeError) as error:
        raise NotSupported(f"graph '{spec.name}'", [first_line(str(error))], str(error)) from None
    total = len(spec.inputs) + len(spec.outputs)
    return Lowered(graph, tuple(range(1, total + 1)), tuple(ctx.extras))


def _capability() -> int:
    """Of the current GPU, as 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _own_dtype(spec: GraphSpec, node: Node, port: int) -> torch.dtype:
    """The dtype that a result has of itself, whatever it is kept in."""
    ports = OPS[node.op].ports_of(len(node.inputs))
    operands = {
        name: None if operand is None else spec.tensors[operand]
        for name, operand in zip(ports, node.inputs, strict=True)
    }
    result = check_node(node.op, node.name, operands, dict(node.attrs)).results[port]
    return spec.tensors[str(node.outputs[port])].dtype if result is None else result.dtype


def _result_spec(spec: GraphSpec, node: Node, name: str) -> TensorSpec:
    """The tensor of a result with its dims where cuDNN wants them."""
    tensor = spec.tensors[name]
    shape, stride = tensor.shape, tensor.stride
    if node.op in _VARLEN:
        keys = node.op == "sdpa_varlen_backward" and name != node.outputs[0]
        shape, stride = _spread_out(spec, node, tensor, keys)  # type: ignore[assignment]
    if node.op in ("sdpa", "sdpa_fp8", "sdpa_paged") and name == node.outputs[1]:  # (B, H, S, 1)
        return TensorSpec(name, (*shape, 1), (*stride, 1), tensor.dtype)
    vectors = ("batch_norm_train", "batch_norm_backward")
    if node.op in vectors and len(shape) == 1:
        rank = len(spec.tensors[str(node.inputs[0])].shape)
        shape, stride = _set_out(tensor, (1,), rank)  # type: ignore[assignment]
    if node.op == "reduction":
        rank = len(spec.tensors[str(node.inputs[0])].shape)
        keep, dims = node.attr("keepdim"), node.attr("dims")
        dropped = () if keep is True else tuple(d for d in dims if d not in (keep or ()))
        left = [dim for dim in range(rank) if dim not in dropped]
        shape, stride = _set_out(tensor, left, rank) if rank else (shape, stride)  # type: ignore[assignment]
    return TensorSpec(name, shape, stride, tensor.dtype)


def first_line(message: str) -> str:
    """The sentence of a library message that says something."""
    for line in message.splitlines():
        text = line.strip(" _\t")
        if text:
            return text[:300]
    return "no reason given"
