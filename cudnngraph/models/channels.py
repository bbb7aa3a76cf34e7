"""Which images of a graph have the same channels, and which of these may be more than there are.

An op may tie the channels of what it reads and makes, as pointwise ops do; make new ones, as
convolutions and concatenations do; read them as a view; or take them as they are, as softmax does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..device.rules import rules
from ..ir.spec import aligned
from ..ops import meta
from ..ops.base import LOW_PRECISION
from .simplify import is_pure

Node = torch.fx.Node
Parts = tuple[tuple[int, int], ...]  # of channels, in order: how many there are, and padded

RANKS = (4, 5)  # of images

_TRANSPOSED = frozenset({"conv_transpose2d", "conv_transpose3d"})
CONVOLUTIONS = frozenset({"conv2d", "conv3d", "convolution", *_TRANSPOSED})
VECTORS = ("weight", "bias", "running_mean", "running_var")  # of a batch norm
BATCH_NORMS = frozenset(
    {"batch_norm", "cudnn_batch_norm", "native_batch_norm"}
    | {"_native_batch_norm_legit_no_training"}
)
#: Ops of each channel by itself that make of zeros what is finite.
_UNARY = frozenset(
    {"relu", "relu6", "silu", "gelu", "mish", "sigmoid", "tanh", "elu", "selu", "celu", "softplus"}
    | {"leaky_relu", "hardswish", "hardsigmoid", "hardtanh", "clamp", "clamp_min", "clamp_max"}
    | {"clone", "contiguous", "alias", "detach", "dropout", "feature_dropout", "to", "_to_copy"}
    | {"abs", "neg", "exp", "square", "sqrt", "lift_fresh_copy"}
    | {"max_pool2d", "max_pool3d", "max_pool2d_with_indices", "avg_pool2d", "avg_pool3d"}
    | {"adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d"}
    | {"_adaptive_avg_pool3d", "upsample_nearest2d", "upsample_nearest3d"}
    | {"upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"}
)
_FRAMES = frozenset({"constant_pad_nd", "pad", "reflection_pad2d", "replication_pad2d"})
SPLITS = frozenset({"split", "split_with_sizes", "unsafe_split", "chunk", "unsafe_chunk"})
BINARY = frozenset({"add", "sub", "mul", "maximum", "minimum", "_prelu_kernel"})


@dataclass
class _Class:
    """Images that have the same channels."""

    nodes: list[Node] = field(default_factory=list)
    whole: bool = False  # whether something takes or makes the channels as they are
    sources: int = 0  # how many convolutions make them
    joins: list[Node] = field(default_factory=list)  # concatenations and slices that make them


class Channels:
    """Which images of a graph have the same channels, and what is done to these."""

    def __init__(self, graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self.constants = constants
        self.fixed: set[Node] = set()  # nodes that depend on constants alone
        self.cuts: dict[Node, int] = {}  # of slices of all the last channels, the first
        self._class_of: dict[Node, _Class] = {}
        self._operands: list[tuple[Node, Node]] = []  # of pointwise ops, each with the result
        self._viewed: list[Node] = []  # images of which an op takes a view

    # -- what each op says -------------------------------------------------------------------------

    def visit(self, node: Node) -> None:
        """Take in what a node does to the channels of the images that it reads and makes."""
        if self._is_fixed(node):
            self.fixed.add(node)
            return
        name = meta.op_name(node) if node.op == "call_function" else ""
        says = self._rule(node, name)
        if says is None or not says(node):
            for each in (node, *node.all_input_nodes):
                self._of(each).whole = True

    def _rule(self, node: Node, name: str) -> Callable[[Node], bool] | None:
        if node.op == "call_function" and name == "" and _first_result(node):
            return lambda node: self._tie(node, node.args[0])
        if name in SPLITS:
            return self._split
        if not _is_image(node) and not _several(node):
            return None
        if name in CONVOLUTIONS:
            return self._convolution
        if name in BATCH_NORMS:
            return self._batch_norm
        if name in _UNARY:
            return self._unary
        if name in BINARY:
            return self._binary
        if name in _FRAMES:
            return self._frame
        others = {"cat": self._cat, "slice": self._slice, "mean": self._mean, "prelu": self._prelu}
        return others.get(name)

    def _convolution(self, node: Node) -> bool:
        given = arguments_of(node)
        weight, bias = given["weight"], given["bias"]
        if not self._is_constant(weight) or not (bias is None or self._is_constant(bias)):
            return False
        x, shape = given["input"], value_of(weight).shape
        if not _is_image(x) or value_of(x).dim() != len(shape):
            return False
        if given["groups"] == 1:
            self._of(node).sources += 1
            return True
        each = not is_transposed(node) and shape[1] == 1 and shape[0] == _channels(x)
        return each and self._tie(node, x)

    def _batch_norm(self, node: Node) -> bool:
        given = arguments_of(node)
        vectors = (given[key] for key in VECTORS)
        fixed = all(each is None or self._is_constant(each) for each in vectors)
        trains = given.get("training") or given.get("train")
        return fixed and not trains and self._tie(node, given["input"])

    def _unary(self, node: Node) -> bool:
        return len(node.all_input_nodes) == 1 and self._tie(node, node.args[0])

    def _binary(self, node: Node) -> bool:
        if node.kwargs or len(node.args) != 2:
            return False
        given = [each for each in node.args if isinstance(each, Node)]
        values = [each for each in given if not self._is_constant(each)]
        rank = value_of(node).dim()
        if not all(_is_image(each) and value_of(each).dim() == rank for each in values):
            return False
        if len(values) == 1:
            return self._tie(node, values[0])
        for each in values:
            if _channels(each) == 1:  # it is broadcast, or all are
                self._of(each).whole = True
            else:
                self._operands.append((each, node))
        return any(_channels(each) != 1 for each in values)

    def _cat(self, node: Node) -> bool:
        given = arguments_of(node)
        parts = given["tensors"]
        if given["dim"] not in (1, 1 - value_of(node).dim()) or not all(map(_is_image, parts)):
            return False
        if any(self._is_constant(each) for each in parts):
            return False
        self._of(node).joins.append(node)
        return True

    def _slice(self, node: Node) -> bool:
        given = arguments_of(node)
        x = given["self"]
        if not _is_image(x):
            return False
        if given["dim"] % value_of(x).dim() != 1:
            return self._tie(node, x)
        cut = _first_of_last(given)
        if cut is None:
            self._viewed.append(x)
            self._of(node).whole = True
        else:
            self.cuts[node] = cut
            self._of(node).joins.append(node)
        return True

    def _split(self, node: Node) -> bool:
        given = arguments_of(node)
        x = given["self"]
        if not _is_image(x) or given["dim"] % value_of(x).dim() != 1:
            return False
        self._viewed.append(x)
        return True

    def _mean(self, node: Node) -> bool:
        given = arguments_of(node)
        x = given["self"]
        if not _is_image(x) or not given.get("keepdim") or not given.get("dim"):
            return False
        rank = value_of(x).dim()
        return all(dim % rank > 1 for dim in given["dim"]) and self._tie(node, x)

    def _frame(self, node: Node) -> bool:
        given = arguments_of(node)
        x, number = given["self"], given.get("value") or 0.0
        around = _is_image(x) and len(given.get("pad") or given["padding"]) <= 2 * (
            value_of(x).dim() - 2
        )
        return around and math.isfinite(number) and self._tie(node, x)

    def _prelu(self, node: Node) -> bool:
        x, weight = node.args
        assert isinstance(weight, Node)
        return self._is_constant(weight) and value_of(weight).dim() == 1 and self._tie(node, x)

    def _is_fixed(self, node: Node) -> bool:
        if node.op == "placeholder":
            return node.name in self.constants
        return is_pure(node) and self.fixed.issuperset(node.all_input_nodes)

    def _is_constant(self, node: Any) -> bool:
        return isinstance(node, Node) and node in self.fixed

    # -- classes -----------------------------------------------------------------------------------

    def _of(self, node: Node) -> _Class:
        return self._class_of.setdefault(node, _Class([node]))

    def _tie(self, node: Node, other: Any) -> bool:
        """Say that two nodes have the same channels."""
        if not isinstance(other, Node) or not (_is_image(other) or _several(other)):
            return False
        one, two = self._of(node), self._of(other)
        if one is not two:
            one.nodes += two.nodes
            one.joins += two.joins
            one.sources += two.sources
            one.whole |= two.whole
            self._class_of.update(dict.fromkeys(two.nodes, one))
        return True

    def padded(self) -> Mapping[Node, Parts]:
        """How the channels of images become more."""
        while True:
            self._settle()
            found: dict[Node, Parts] = {}
            for node in self.graph.nodes:
                own = self._class_of.get(node)
                if own is None or own.whole or node in found:
                    continue
                parts = self._parts(own, found)
                if any(size != wide for size, wide in parts):
                    found.update(dict.fromkeys(own.nodes, parts))
            odd = [each for each in self._views(found) if _gaps(found[each])]
            odd += [
                node
                for node, parts in found.items()
                if meta.op_name(node) == "cat" and _is_odd(sum(wide for _, wide in parts))
            ]
            if not odd:
                return found
            for each in odd:
                self._of(each).whole = True

    def _settle(self) -> None:
        """Let operands and results of pointwise ops have the same channels. A result has them as
        they are if an operand has."""
        again = True
        while again:
            self._keep_whole()
            again = False
            for operand, result in self._operands:
                one, two = self._of(operand), self._of(result)
                if one is not two and not (one.whole or two.whole):
                    again = self._tie(operand, result)

    def _keep_whole(self) -> None:
        for each in {id(each): each for each in self._class_of.values()}.values():
            if not each.whole:
                mixed = len(each.joins) > 1 or bool(each.joins and each.sources)
                each.whole = mixed or len({_channels(node) for node in each.nodes}) > 1
        again = True
        while again:
            again = False
            for operand, result in self._operands:
                if self._of(operand).whole and not self._of(result).whole:
                    self._of(result).whole = again = True

    def _views(self, found: Mapping[Node, Parts]) -> list[Node]:
        """The padded images that something reads without their zeros."""
        joins = (node for node in self._class_of if node not in found and self.joins(node))
        read = [part for node in joins for part in node.all_input_nodes]
        read += [operand for operand, result in self._operands if result not in found]
        return [each for each in (*read, *self._viewed) if each in found]

    def joins(self, node: Node) -> bool:
        """Whether a node is a concatenation, or a slice of the last channels."""
        return node in self._of(node).joins

    def _parts(self, own: _Class, found: Mapping[Node, Parts]) -> Parts:
        if own.joins:
            (join,) = own.joins
            given: Sequence[Node] = arguments_of(join).get("tensors") or join.all_input_nodes
            whole = [found.get(each, ((_channels(each),) * 2,)) for each in given]
            parts = [part for parts in whole for part in parts]
            return _behind(parts, self.cuts.get(join, 0))
        channels = _channels(own.nodes[0])
        low = all(value_of(node).dtype in LOW_PRECISION for node in own.nodes)
        pads = _is_odd(channels) and own.sources and low
        pads = pads and channels >= rules().padded_channels_min
        return ((channels, aligned(channels) if pads else channels),)


def _first_of_last(given: Mapping[str, Any]) -> int | None:
    """The first channel of a slice of all the last ones; None for another slice."""
    start, end, size = given["start"] or 0, given["end"], _channels(given["self"])
    if type(start) is not int or not (end is None or type(end) is int) or given["step"] != 1:
        return None
    start = start + size if start < 0 else start
    return start if 0 < start < size and (end is None or end >= size) else None


def _gaps(parts: Parts) -> bool:
    """Whether there are zeros between channels."""
    return any(channels != wide for channels, wide in parts[:-1])


def _behind(parts: Sequence[tuple[int, int]], channel: int) -> Parts:
    """The channels from one on."""
    found: list[tuple[int, int]] = []
    for channels, wide in parts:
        if channel < channels:
            found.append((channels - channel, wide - channel))
        channel = max(0, channel - channels)
    return tuple(found)


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of an op by name, in the order of its schema."""
    given = meta.bind_arguments(node.target, node.args, node.kwargs)
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    return {name: given[name] for name in names}


def makes_odd_channels(node: Node) -> bool:
    """Whether a node is a convolution whose result may be padded."""
    if node.op != "call_function" or meta.op_name(node) not in CONVOLUTIONS:
        return False
    return _is_image(node) and _is_odd(_channels(node))


def _is_odd(channels: int) -> bool:
    return channels != aligned(channels)


def is_transposed(node: Node) -> bool:
    """Whether a convolution is a transposed one."""
    return meta.op_name(node) in _TRANSPOSED or bool(arguments_of(node).get("transposed"))


def value_of(node: Node) -> torch.Tensor:
    """What is known of the tensor that a node gives, the first of several."""
    seen = node.meta["val"]
    found: torch.Tensor = seen[0] if isinstance(seen, (tuple, list)) else seen
    return found


def _channels(node: Node) -> int:
    return int(value_of(node).shape[1])


def _is_image(node: Any) -> bool:
    seen: Any = node.meta.get("val") if isinstance(node, Node) else None
    image = isinstance(seen, torch.Tensor) and seen.dim() in RANKS
    return bool(image) and all(isinstance(size, int) for size in seen.shape)


def _several(node: Any) -> bool:
    """Whether a node gives several results, of which the first is an image."""
    seen: Any = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(seen, (tuple, list)) or not seen or not isinstance(seen[0], torch.Tensor):
        return False
    return seen[0].dim() in RANKS and all(
        _first_result(user) or not user.users for user in node.users
    )


def _first_result(node: Node) -> bool:
    return node.target is operator.getitem and bool(node.args[1] == 0)
