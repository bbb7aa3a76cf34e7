"""Ops that are taken apart before a graph is parted into forward and backward.

What is pointwise then is computed again in the backward, of what is kept in any case: logarithms of
a softmax of scores and two numbers for each row, a group norm of its images and two numbers for
each channel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ops.base import LOW_PRECISION
from . import group_norms, simplify

_aten: Any = torch.ops.aten
_ours: Any = torch.ops.cudnngraph


def take_apart(module: torch.fx.GraphModule) -> None:
    """Have logarithms of a softmax, their gradients, and group norms as pointwise ops and
    reductions; those of 16 bits in float32, as torch computes them."""
    graph = module.graph
    changed = False
    for node in list(graph.nodes):
        if node.target in _LOSSES:
            _without_scores(graph, node)
            changed = True
        if node.target is group_norms.FORWARD:
            _group_norm(graph, node)
            changed = True
        elif node.target is group_norms.BACKWARD:
            _of_narrow_images(node)
            changed = True
        parts = _PARTS.get(node.target) if node.op == "call_function" else None
        made = node.meta.get("val")
        if parts is None or not isinstance(made, torch.Tensor) or made.dim() == 0:
            continue
        empty = any(type(size) is int and size == 0 for size in made.shape)  # have no maximum
        if empty:
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(parts(graph, made, *node.args))
        graph.erase_node(node)
        changed = True
    if changed:
        module.recompile()


def _log_softmax(
    graph: torch.fx.Graph, made: torch.Tensor, x: torch.fx.Node, dim: int, half: bool
) -> torch.fx.Node:
    x = _cast(graph, x, wide(made.dtype))
    most = _called(graph, _aten.amax.default, x, [dim], True)
    shifted = _called(graph, _aten.sub.Tensor, x, most)
    powers = _called(graph, _aten.exp.default, shifted)
    total = _called(graph, _aten.sum.dim_IntList, powers, [dim], True)
    y = _called(graph, _aten.sub.Tensor, shifted, _called(graph, _aten.log.default, total))
    return _cast(graph, y, made.dtype)


def _log_softmax_backward(
    graph: torch.fx.Graph,
    made: torch.Tensor,
    dy: torch.fx.Node,
    y: torch.fx.Node,
    dim: int,
    dtype: torch.dtype,
) -> torch.fx.Node:
    while y.target is _aten.detach.default:  # which the partitioner would not compute again
        (y,) = y.all_input_nodes
    if (
        y.target is _aten._to_copy.default
    ):  # of ours: what is rounded would be saved, being as small
        (y,) = y.all_input_nodes
    dy, y = (_cast(graph, each, wide(each.meta["val"].dtype)) for each in (dy, y))
    total = _called(graph, _aten.sum.dim_IntList, dy, [dim], True)
    powers = _called(graph, _aten.exp.default, y)
    dx = _called(graph, _aten.sub.Tensor, dy, _called(graph, _aten.mul.Tensor, powers, total))
    return _cast(graph, dx, made.dtype)


def _group_norm(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Put a shift and a factor for each channel in the place of a group norm.

    What reads its statistics takes them of these.
    """
    x, weight, bias, groups, eps = node.args
    assert isinstance(x, torch.fx.Node)
    made = x.meta["val"]
    with graph.inserting_before(node):
        images, width = _size(graph, x, 0), _of_group(graph, x, groups)
        column = [1, -1, *(1 for _ in made.shape[2:])]
        dtype = wide(made.dtype)
        # What is read behind an op that fuses with none, as the statistics are, the partitioner has
        # kept: the images are read by another name, which comes before.
        given = _cast(graph, _called(graph, _aten.alias.default, x), dtype)
        read = _cast(graph, x, dtype)
        both = _called(graph, _ours.group_affine.default, read, groups, eps)
        shift, inverse = (_called(graph, operator.getitem, both, at) for at in (0, 1))

        def of_channels(vector: Any) -> torch.fx.Node:
            return _cast(graph, _called(graph, _aten.view.default, vector, column), dtype)

        factor = inverse
        if weight is not None:
            factor = _called(graph, _aten.mul.Tensor, inverse, of_channels(weight))
        moved = _called(graph, _aten.add.Tensor, given, shift)
        y = _called(graph, _aten.mul.Tensor, moved, factor)
        if bias is not None:
            y = _called(graph, _aten.add.Tensor, y, of_channels(bias))
        y = _cast(graph, y, made.dtype)

        def of_groups(statistic: torch.fx.Node) -> torch.fx.Node:
            shape = [images, groups, width]
            apart = _called(graph, _aten.view.default, statistic, shape)
            return _called(graph, _aten.select.int, apart, 2, 0)

        parts = (y, of_groups(_called(graph, _aten.neg.default, shift)), of_groups(inverse))
    _silu_in_parts(graph, node)
    for user in list(node.users):
        place: Any = user.args[1]
        user.replace_all_uses_with(parts[place])
        graph.erase_node(user)
    graph.erase_node(node)


def normalized(
    graph: torch.fx.Graph,
    reader: torch.fx.Node,
    x: torch.fx.Node,
    mean: torch.fx.Node,
    inverse: torch.fx.Node,
    weight: torch.fx.Node | None,
    bias: torch.fx.Node | None,
) -> torch.fx.Node:
    """What ``forward_backward.normalized`` computes as ops of torch's, for one reader alone."""
    made = x.meta["val"]
    column, dtype = [1, -1, *(1 for _ in made.shape[2:])], wide(made.dtype)

    def of_channels(vector: torch.fx.Node) -> torch.fx.Node:
        return _cast(graph, _called(graph, _aten.view.default, vector, column), dtype)

    parts = [_cast(graph, x, dtype)]
    parts.append(_called(graph, _aten.sub.Tensor, parts[-1], of_channels(mean)))
    parts.append(_called(graph, _aten.mul.Tensor, parts[-1], of_channels(inverse)))
    if weight is not None:
        parts.append(_called(graph, _aten.mul.Tensor, parts[-1], of_channels(weight)))
    if bias is not None:
        parts.append(_called(graph, _aten.add.Tensor, parts[-1], of_channels(bias)))
    parts.append(_cast(graph, parts[-1], made.dtype))
    for part in parts:
        if part is not x:
            part.meta[simplify.FOR] = reader.name
    return parts[-1]


def _silu_in_parts(graph: torch.fx.Graph, norm: torch.fx.Node) -> None:
    """Have the gradient of a SiLU behind a norm as pointwise ops, which torch's partitioner knows
    as such: it would keep what the norm gives for any other."""
    firsts = [user for user in norm.users if user.args[1] == 0]
    behind = [user for first in firsts for user in first.users]
    for node in behind:
        if node.target is not _aten.silu_backward.default or len(node.all_input_nodes) < 2:
            continue
        if node.args[1] not in firsts:
            continue
        made, given = node.meta["val"], list(node.all_input_nodes)
        with graph.inserting_before(node):
            dy, y = (_cast(graph, each, wide(made.dtype)) for each in given)
            share = _called(graph, _aten.sigmoid.default, y)
            rest = _called(graph, _aten.sub.Tensor, y, _called(graph, _aten.mul.Tensor, y, share))
            slope = _called(
                graph, _aten.mul.Tensor, share, _called(graph, _aten.add.Tensor, rest, 1)
            )
            dx = _cast(graph, _called(graph, _aten.mul.Tensor, dy, slope), made.dtype)
        node.replace_all_uses_with(dx)
        graph.erase_node(node)


def _of_narrow_images(node: torch.fx.Node) -> None:
    """Let the gradient of a group norm read images of 16 bits that are widened for it."""
    x: Any = node.args[1]
    if x.target is not _aten._to_copy.default or set(x.kwargs) != {"dtype"}:
        return
    source, made = x.args[0], x.meta["val"].dtype
    if source.meta["val"].dtype in LOW_PRECISION and made not in LOW_PRECISION:
        node.update_arg(1, source)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch computes a softmax, and the statistics of a norm."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def _cast(graph: torch.fx.Graph, x: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    if x.meta["val"].dtype == dtype:
        return x
    return _called(graph, _aten._to_copy.default, x, dtype=dtype)


def _without_scores(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Take the scores away from the gradient of a loss, which reads nothing but their shape."""
    given: Sequence[Any] = node.args
    like = given[1].meta["val"]
    with graph.inserting_before(node):
        zero = _called(graph, _aten.full.default, [], 0.0, dtype=like.dtype, device=like.device)
        sizes = [_size(graph, given[1], dim) for dim in range(like.dim())]
        shape = _called(graph, _aten.expand.default, zero, sizes)
    node.args = (given[0], shape, *given[2:])


def _size(graph: torch.fx.Graph, node: torch.fx.Node, dim: int) -> int | torch.fx.Node:
    """The extent of a dim, as a node if it is left open."""
    size = node.meta["val"].shape[dim]
    return size if type(size) is int else _called(graph, _aten.sym_size.int, node, dim)


def _of_group(graph: torch.fx.Graph, x: torch.fx.Node, groups: Any) -> int | torch.fx.Node:
    """How many of the channels of x a group has."""
    channels = _size(graph, x, 1)
    if not isinstance(channels, torch.fx.Node):
        return int(channels // groups)
    return _called(graph, operator.floordiv, channels, groups)


_LOSSES = (_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default)
_PARTS: dict[Any, Callable[..., torch.fx.Node]] = {
    _aten._log_softmax.default: _log_softmax,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
}


def _called(graph: torch.fx.Graph, op: Any, *args: Any, **options: Any) -> torch.fx.Node:
    """A call of an op, with what it makes of the values that are known of its arguments."""
    node = graph.call_function(op, args, options)
    seen = torch.fx.map_arg(args, lambda each: each.meta["val"])
    with torch.no_grad():
        node.meta["val"] = op(*seen, **options)
    return node
