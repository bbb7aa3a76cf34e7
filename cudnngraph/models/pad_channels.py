"""Odd numbers of channels between convolutions become multiples of eight, the rest zero.

Engines with tensor cores move eight 16-bit numbers at a time. Where an image has another number of
channels, cuDNN takes slow engines that fuse nothing behind them, and generated kernels read single
numbers. The weights are padded once; an image is only where every op that makes or reads it can
have more channels, or reads the channels that there are as a view, so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ir.spec import channels_last_strides, contiguous_strides, same_layout
from ..ops import meta
from .channels import (
    BATCH_NORMS,
    BINARY,
    CONVOLUTIONS,
    SPLITS,
    VECTORS,
    Channels,
    Node,
    Parts,
    arguments_of,
    is_transposed,
    makes_odd_channels,
    value_of,
)
from .new_constants import add_constant

_aten: Any = torch.ops.aten


def pad_channels(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Pad the channels of a graph of ATen ops, in place; the constants with the padded weights."""
    if not any(map(makes_odd_channels, graph.nodes)):
        return constants
    walk = Channels(graph, constants)
    for node in graph.nodes:
        walk.visit(node)
    padded = walk.padded()
    if not padded:
        return constants
    made = _Padding(graph, padded, walk, dict(constants))
    for node in list(graph.nodes):
        made.pad(node)
    return made.constants


@dataclass
class _Padding:
    """A graph whose images get more channels."""

    graph: torch.fx.Graph
    padded: Mapping[Node, Parts]
    walk: Channels
    constants: dict[str, torch.Tensor]
    _made: dict[tuple[Any, ...], Node] = field(default_factory=dict)
    _views: dict[Node, Node] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    def pad(self, node: Node) -> None:
        """Give a node its padded operands, and what is known of it its new channels."""
        name = meta.op_name(node)
        if name in CONVOLUTIONS:
            self._convolution(node)
        if node not in self.padded:
            if name in BINARY or name in SPLITS or name in ("cat", "slice"):
                node.args = torch.fx.node.map_arg(node.args, lambda each: self._whole(node, each))
            return
        if name in BATCH_NORMS:
            self._vectors(node, {key: float(key == "running_var") for key in VECTORS})
        elif name == "prelu":
            self._vectors(node, {"weight": 0.0})
        elif name == "slice" and self.walk.joins(node):
            (x, dim), cut = node.args[:2], self.walk.cuts[node]
            assert isinstance(x, Node)
            node.args = (x, dim, _place(self.padded.get(x, ()), cut))
            node.kwargs = {}
        elif name in BINARY:
            node.args = tuple(self._operand(node, each) for each in node.args)
        seen, channels = node.meta["val"], sum(wide for _, wide in self.padded[node])
        several = isinstance(seen, (tuple, list))
        first = self._wider(seen[0] if several else seen, channels)
        node.meta["val"] = type(seen)((first, *seen[1:])) if several else first

    def _wider(self, seen: torch.Tensor, channels: int) -> torch.Tensor:
        """What is known of an image, for another number of channels."""
        shape, stride = (seen.shape[0], channels, *seen.shape[2:]), tuple(seen.stride())
        last = same_layout(tuple(seen.shape), stride, channels_last_strides(seen.shape))
        form = (shape, last, seen.dtype, seen.device)
        if form not in self._known:
            stride = (channels_last_strides if last else contiguous_strides)(shape)
            with FakeTensorMode():
                made = torch.empty_strided(shape, stride, dtype=seen.dtype, device=seen.device)
            self._known[form] = made
        return self._known[form]

    def _convolution(self, node: Node) -> None:
        given = arguments_of(node)
        before, behind = self.padded.get(given["input"]), self.padded.get(node)
        if before is None and behind is None:
            return
        if given["groups"] > 1:
            before = None
            given["groups"] = sum(wide for _, wide in behind or ())
        dims = (before, behind) if is_transposed(node) else (behind, before)
        for dim, parts in enumerate(dims):
            if parts is not None:
                given["weight"] = self._constant(given["weight"], dim, parts, 0.0)
        if behind is not None and given["bias"] is not None:
            given["bias"] = self._constant(given["bias"], 0, behind, 0.0)
        node.args, node.kwargs = tuple(given.values()), {}

    def _whole(self, node: Node, operand: Node) -> Node:
        """An operand without its zeros, of a node that takes channels as they are."""
        parts = self.padded.get(operand)
        if parts is None:
            return operand
        if operand not in self._views:
            channels = sum(channels for channels, _ in parts)
            with self.graph.inserting_before(node):
                made = self.graph.call_function(_aten.slice.Tensor, (operand, 1, 0, channels))
            made.meta["val"] = self._wider(operand.meta["val"], channels)
            self._views[operand] = made
        return self._views[operand]

    def _vectors(self, node: Node, values: Mapping[str, float]) -> None:
        """Give a node vectors with a value for each new channel, in the place of its own."""
        given, parts = arguments_of(node), self.padded[node]
        for key, value in values.items():
            if given[key] is not None and value_of(given[key]).numel() > 1:
                given[key] = self._constant(given[key], 0, parts, value)
        node.args, node.kwargs = tuple(given.values()), {}

    def _operand(self, node: Node, given: Any) -> Any:
        """An operand of a pointwise op; a constant has the channels of the result, or one."""
        if not isinstance(given, Node) or given not in self.walk.fixed:
            return given
        seen, rank = value_of(given), value_of(node).dim()
        dim = 1 - (rank - seen.dim())
        if dim < 0 or seen.shape[dim] == 1:
            return given
        return self._constant(given, dim, self.padded[node], 0.0)

    def _constant(self, node: Node, dim: int, parts: Parts, value: float) -> Node:
        """A constant with more channels along a dim."""
        key = (node, dim, parts, value)
        if key not in self._made:
            tensor, size = self._tensor(node), sum(wide for _, wide in parts)
            wider = tensor.new_full((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]), value)
            read = written = 0
            for channels, wide in parts:
                part = tensor.narrow(dim, read, channels)
                wider.narrow(dim, written, channels).copy_(part)
                read, written = read + channels, written + wide
            label = f"padded_{node.name}"
            self._made[key] = add_constant(self.graph, self.constants, label, wider)
        return self._made[key]

    def _tensor(self, node: Node) -> Any:
        """A constant, or what is computed of constants."""
        if node.op == "placeholder":
            return self.constants[node.name]
        given = torch.fx.node.map_arg((node.args, node.kwargs), self._tensor)
        with torch.no_grad():
            return node.target(*given[0], **given[1])  # type: ignore[operator]


def _place(parts: Parts, channel: int) -> int:
    """Where a channel lies among padded ones."""
    place = 0
    for channels, wide in parts:
        if channel < channels:
            break
        channel, place = channel - channels, place + wide
    return place + channel
