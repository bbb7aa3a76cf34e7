"""Map the dims of a graph's tensors to the dims that cuDNN sees, without moving data.

They differ from the declared ones in four ways: convolutions in one spatial dim get a second one
of extent 1; operands of lower rank get leading ones; in a graph of pointwise ops alone the dims are
put in the order of memory and merged to three; and around a matrix product or a norm they are
merged to batch, rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from ...device.rules import rules
from ...ir.spec import (
    GraphSpec,
    Node,
    channels_last_strides,
    contiguous_strides,
    dense_strides,
    is_channels_last,
    is_contiguous,
    memory_order,
    numel,
)
from ...ops.base import LOW_PRECISION
from ...ops.table import OPS, tensor_at
from .base import Place, Refused, Shape
from .placement import cudnn_dims

# Quirks of cuDNN: anchors that it takes as matrices, so their plans see merged dims;
_AS_MATRIX = (
    *("matmul", "layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"),
    "normalize",
)

# anchors that it takes in two spatial dims at least;
_NEEDS_2D = (
    *("conv", "conv_transpose", "conv_wgrad", "batch_norm_train", "batch_norm_backward"),
    "instance_norm",
)

# and norms that it wants with a spatial dim, for rows of channels too.
_BATCH_NORMS = ("batch_norm", "batch_norm_train", "batch_norm_apply", "batch_norm_backward")


class DimMap(Protocol):
    """A map from the dims of the spec's tensors to the dims that cuDNN sees."""

    @property
    def seen_rank(self) -> int:
        """The number of dims that cuDNN sees."""

    @property
    def spread(self) -> bool:
        """A convolution in one spatial dim, which gets a second one of extent 1."""

    def dims(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        """Shape and strides, as cuDNN sees them, of a tensor in memory."""

    def virtual(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        """The same for a tensor inside a fused graph, which lies nowhere."""


@dataclass(frozen=True)
class _ImageDims:
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
        return sizes, _normalise_strides(sizes, steps, self.channels_last)

    virtual = dims


@dataclass(frozen=True)
class _PackedDims(_ImageDims):
    """Packed attention, whose sequences lie where offsets say: strides are taken as they are."""

    def dims(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        return list(shape), list(stride)

    virtual = dims


def _normalise_strides(shape: list[int], stride: list[int], channels_last: bool) -> list[int]:
    """Strides that say the layout also where an extent is 1, for engines that look there."""
    last = len(shape) >= 3 and is_channels_last(shape, stride)
    if last and (channels_last or not is_contiguous(shape, stride)):
        return list(channels_last_strides(shape))
    if is_contiguous(shape, stride):
        return list(contiguous_strides(shape))
    outer = max(stride, default=1)
    return [outer if n == 1 else s for n, s in zip(shape, stride, strict=True)]


@dataclass(frozen=True)
class _PointwiseDims:
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
class _ReductionDims(_PointwiseDims):
    """Graphs of reductions: a matrix, rows and columns, as cuDNN takes them channels_last."""

    seen_rank: int = 4

    def dims(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        merged, strides = super().dims(shape, stride)
        if not is_contiguous(merged, strides):
            raise Refused("the operands lie in memory in different orders, or with gaps")
        image = [*merged, 1, 1]
        return image, list(channels_last_strides(image))

    def virtual(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        image = [*super().dims(shape, stride)[0], 1, 1]
        return image, list(channels_last_strides(image))


def _row_length(total: int) -> int:
    """Into rows of which length to cut ``total`` elements in one line; 0 to leave them so."""
    longest = min(rules().pointwise_max_row, total // 2)
    for length in range(longest, rules().pointwise_min_row - 1, -1):
        if total % length == 0 and (length % 8 == 0 or total % 8):
            return length
    return 0


@dataclass(frozen=True)
class _MatrixDims:
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
        merged, strides = _merge(padded(shape, stride, self.rank), self.groups)
        return merged, _with_unit_stride(merged, strides)

    def virtual(self, shape: Shape, stride: Shape) -> tuple[list[int], list[int]]:
        merged, strides = self.dims(shape, stride)
        return merged, list(dense_strides(merged, memory_order(merged, strides)))


def padded(shape: Shape, stride: Shape, rank: int) -> Place:
    """The same tensor at ``rank``, by leading dims of extent 1."""
    lead = rank - len(shape)
    return (1,) * lead + tuple(shape), (0,) * lead + tuple(stride)


def _merge(place: Place, groups: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Shape and strides with each group of dims as one dim; the stride is that of its fastest."""
    shape, stride = place
    real = [[dim for dim in group if shape[dim] > 1] for group in groups]
    return (
        [numel(shape[dim] for dim in group) for group in groups],
        [stride[group[-1]] if group else 0 for group in real],
    )


def _merges(place: Place, group: Sequence[int], space: Shape) -> bool:
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


def view_of(spec: GraphSpec) -> DimMap:
    anchors = [node for node in spec.nodes if not OPS[node.op].pointwise]
    real = [cudnn_dims(spec, name) for name in (*spec.inputs, *spec.outputs)]
    rank = max(len(shape) for shape, _ in real)
    rank = max([rank, *(len(shape) for _, shape in _computed(spec))])
    if not anchors:
        return _pointwise_view(spec, rank, real)
    for node in anchors:
        if node.op in _AS_MATRIX:
            if any(other.op != "reduction" for other in anchors if other is not node) or (
                len(anchors) > 1 and node.op != "matmul"
            ):  # two products in one plan took 12 times as long as torch (9.19)
                raise Refused(f"{node.op} shares a plan with pointwise ops alone")
            if node.op == "matmul":
                return _product_view(spec, node, rank)
            if node.op == "normalize":
                return _rows_view(spec, node, rank)
            return _norm_or_rows_view(spec, node, rank)
    if all(node.op == "reduction" for node in anchors):
        groups = _merged_dims(rank, [padded(*place, rank) for place in real])
        if len(groups) > 2:
            raise Refused("a reduction over dims between others")
        return _ReductionDims(rank, tuple(map(tuple, [[]] * (2 - len(groups)) + groups)))
    if OPS[anchors[0].op].has("packed"):
        return _PackedDims(rank, spread=False, channels_last=False)
    spread = rank == 3 and anchors[0].op in _NEEDS_2D
    images = [view for view in real if len(view[0]) >= 3]
    last, rows = ([test(*view) for view in images] for test in (is_channels_last, is_contiguous))
    strict = any(a and not b for a, b in zip(last, rows, strict=True))
    if anchors[0].op in _NEEDS_2D and last == rows:
        strict = True  # all are of one pixel; read as rows, engines that fuse get them wrong (9.19)
    flat = rank == 2 and anchors[0].op in _BATCH_NORMS
    return _ImageDims(rank, spread, strict, behind=2 if flat else 0)


def _places(spec: GraphSpec, rank: int) -> dict[str, Place]:
    """Every tensor at ``rank``: inputs and outputs as they lie, what is between them dense."""
    places = {name: cudnn_dims(spec, name) for name in (*spec.inputs, *spec.outputs)}
    for name, shape in _computed(spec):
        places.setdefault(name, (shape, contiguous_strides(shape)))
    return {name: padded(*place, rank) for name, place in places.items()}


def _space(spec: GraphSpec, node: Node, rank: int) -> Shape:
    """The shape of an anchor's result at ``rank``; refused where what follows is larger."""
    name = node.results[0]
    shape = spec.tensors[name].shape
    after = {name}
    for each in spec.nodes:
        if after & set(each.operands):
            after |= set(each.results)
    if any(numel(spec.tensors[later].shape) > numel(shape) for later in after):
        raise Refused(f"the result of {node.op} is broadcast")
    return (1,) * (rank - len(shape)) + shape


def _product_view(spec: GraphSpec, node: Node, rank: int) -> _MatrixDims:
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
            return _MatrixDims(rank, groups)
    raise Refused(f"the batch dims around '{x}' @ '{y}' do not merge into one")


def _norm_view(spec: GraphSpec, node: Node, rank: int) -> _MatrixDims:
    """[rows, columns, 1, 1] of a norm: the dims before those of the weight, and those.

    cuDNN wants rows without gaps between them, in x and in all that is as large.
    """
    space, places = _space(spec, node, rank), _places(spec, rank)
    weight = tensor_at(node, "weight")
    first = rank - len(spec.tensors[str(weight)].shape)
    order = memory_order(*places[node.operands[0]])
    rows = tuple(dim for dim in order if dim < first)
    columns = tuple(dim for dim in order if dim >= first)
    view = _MatrixDims(rank, (rows, columns, (), ()))
    for name, place in places.items():
        if name in (*spec.inputs, *spec.outputs):
            if not all(_merges(place, group, space) for group in view.groups):
                raise Refused(f"the dims of '{name}' do not merge into rows and columns")
            if not is_contiguous(*view.dims(*place)):
                raise Refused(f"the rows of '{name}' lie in memory with gaps, or as columns")
        elif any(
            {place[0][dim] == 1 for dim in group if space[dim] > 1} == {True, False}
            for group in view.groups
        ):
            raise Refused(f"'{name}' broadcasts within the rows or the columns")
    return view


def _norm_or_rows_view(spec: GraphSpec, node: Node, rank: int) -> _MatrixDims:
    """For cuDNN's norm, or for a product that sums up squares: where rows are so short, or lie in a
    way that the norm does not take, or where more stands behind it, which a product takes."""
    if not _can_be_summed(spec, node):
        return _norm_view(spec, node, rank)
    short = spec.tensors[str(node.inputs[0])].shape[-1] <= rules().rms_norm_by_matmul_faster_row
    more = any(each.op != "constant" for each in spec.nodes if each is not node)
    first, other = (_rows_view, _norm_view) if short or more else (_norm_view, _rows_view)
    try:
        return first(spec, node, rank)
    except Refused:
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
        and 8 <= weight.numel <= rules().rms_norm_by_matmul_max_row
        and weight.numel % 8 == 0
        and node.outputs[1] not in used
    )


def _rows_view(spec: GraphSpec, node: Node, rank: int) -> _MatrixDims:
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
            return _MatrixDims(rank, groups)
    raise Refused(f"the rows of '{node.operands[0]}' lie in memory as no matrix, nor as several")


def _merged_dims(rank: int, full: Sequence[Place]) -> list[list[int]]:
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


def _pointwise_view(spec: GraphSpec, rank: int, real: Sequence[Place]) -> _PointwiseDims:
    """Order the dims as the largest tensor lies in memory; merge neighbours where all allow it.

    cuDNN's pointwise engine takes more than it gets right (seen on 9.19, each as wrong results
    without an error): it reads every operand as row-major whatever its strides say, a vector that
    is broadcast over two dims of three from the wrong place, and computed columns too. Those are
    refused here.
    """
    full = [padded(*place, rank) for place in real]
    space = tuple(max(shape[dim] for shape, _ in full) for dim in range(rank))
    groups = _merged_dims(rank, full)
    if len(groups) > 3:
        raise Refused(f"the operands broadcast in a pattern of {len(groups)} dims, cuDNN takes 3")
    view = _PointwiseDims(rank, tuple(map(tuple, [[]] * (3 - len(groups)) + groups)))
    for sizes, steps in full:
        merged, strides = view.dims(sizes, steps)
        if not is_contiguous(merged, strides):
            raise Refused("the operands lie in memory in different orders, or with gaps")
        if len(groups) == 3 and sum(n > 1 for n in merged) == 1:
            raise Refused("a vector broadcasts over two dims of three, which cuDNN gets wrong")
    last = view.dims(space, (0,) * rank)[0][-1]
    for _, computed in _computed(spec):
        merged = view.dims(computed, (0,) * len(computed))[0]
        if merged[-1] == 1 < last and numel(merged) > 1:
            raise Refused("a computed column broadcasts over the rows, which cuDNN gets wrong")
    return replace(view, columns=_row_length(last)) if len(groups) == 1 else view


def _computed(spec: GraphSpec) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of what is computed in the graph, also of an op's temporaries."""
    for node in spec.nodes:
        for name in node.results:
            yield name, spec.tensors[name].shape
        if node.op == "batch_norm":
            x = spec.tensors[str(node.inputs[0])]
            yield f"{node.name} deviation", (1, x.shape[1], *(1,) * (len(x.shape) - 2))
