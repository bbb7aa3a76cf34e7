"""What scales and shifts the channels of a convolution behind it, to be folded into its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...ops import meta as forms
from .norm import Norm, norm_of

if TYPE_CHECKING:
    from ..convert import Importer

Following = tuple[tuple[torch.fx.Node, ...], Norm]


def following_norm(c: Importer) -> Following | None:
    """The batch norm that alone reads the convolution at hand, its parameters constant."""
    user = _only_user(c.node)
    if user is None or user.args[0] is not c.node or c.node in _nodes(user.args[1:], user.kwargs):
        return None
    if any(each is not c.node and each not in c.env for each in user.all_input_nodes):
        return None
    target: Any = user.target
    rest = c.filled((None, *user.args[1:]))
    given = forms.bind_arguments(target, rest, c.filled(dict(user.kwargs)))
    norm = norm_of(target.overloadpacket, given)
    return None if norm is None else ((user,), norm)


def following_affine(c: Importer, rank: int) -> Following | None:
    """A product with a constant of each channel, or a sum with one, or the sum behind the product,
    that alone read the convolution at hand: a norm with frozen statistics that is written out."""
    scale = _operand(c, c.node, torch.ops.aten.mul.Tensor, rank)
    last = c.node if scale is None else scale[0]
    shift = _operand(c, last, torch.ops.aten.add.Tensor, rank)
    if scale is None and shift is None:
        return None
    channels = c.node.meta["val"].shape[1]
    made = (scale or shift)[1]  # type: ignore[index]
    one, zero = made.new_ones(channels), made.new_zeros(channels)
    by = one if scale is None else scale[1].expand(channels)
    offset = zero if shift is None else shift[1].expand(channels)
    nodes = tuple(found[0] for found in (scale, shift) if found is not None)
    return nodes, Norm(zero, by, offset, by)


def _operand(
    c: Importer, node: torch.fx.Node, target: Any, rank: int
) -> tuple[torch.fx.Node, torch.Tensor] | None:
    """The op that alone reads a node, and its other operand, in float64: one number of each
    channel, or one of all."""
    user = _only_user(node)
    if user is None or user.target is not target or len(user.args) != 2 or user.kwargs:
        return None
    x, seen = (user.meta.get("val"), node.meta["val"])
    if not isinstance(x, torch.Tensor) or (x.dtype, x.shape) != (seen.dtype, seen.shape):
        return None
    other: Any = user.args[1] if user.args[0] is node else user.args[0]
    if other is node:
        return None
    found = torch.tensor(other) if isinstance(other, float) else _known(c, other)
    if found is None or not found.dtype.is_floating_point or found.dim() > rank + 2:
        return None
    form = (1,) * (rank + 2 - found.dim()) + tuple(found.shape)
    if form[1] not in (1, seen.shape[1]) or any(n != 1 for n in (form[0], *form[2:])):
        return None
    if not bool(found.isfinite().all()):
        return None
    return user, found.to(c.device, torch.float64).flatten()


def _known(c: Importer, given: Any) -> torch.Tensor | None:
    """The tensor of an argument that constants alone make, though it may come later in the graph;
    None for another."""
    if not isinstance(given, torch.fx.Node):
        return None
    if given not in c.env and given.op == "get_attr":
        c.env[given] = c.attribute(given)
    elif given not in c.env:
        target: Any = given.target
        sources = given.all_input_nodes
        if not sources or not _is_plain(given) or any(_known(c, each) is None for each in sources):
            return None
        with torch.no_grad():
            c.env[given] = target(*c.filled(given.args), **c.filled(dict(given.kwargs)))
    found = c.env[given]
    return found if isinstance(found, torch.Tensor) and not found.is_meta else None


def _is_plain(node: torch.fx.Node) -> bool:
    """Whether a node is an op of torch that does nothing but give a result of its operands."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return not (target._schema.is_mutable or forms.is_random(target, node.args, node.kwargs))


def _only_user(node: torch.fx.Node) -> torch.fx.Node | None:
    """The op of torch that alone reads a node; None for several, or for another kind of node."""
    users = list(node.users)
    if len(users) != 1 or users[0].op != "call_function":
        return None
    return users[0] if isinstance(users[0].target, torch._ops.OpOverload) else None


def _nodes(*given: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(given, found.append)
    return found
