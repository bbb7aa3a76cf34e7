"""Zeros around an image that convolutions alone read: padding of their own, and no copy."""

from __future__ import annotations

from typing import Any

import torch

from ..ops import meta

Node = torch.fx.Node
Pairs = tuple[tuple[int, int], ...]  # of each spatial dim: how much before, and how much behind

_aten: Any = torch.ops.aten
_CONVOLUTIONS = {
    _aten.conv1d.default: 1,
    _aten.conv2d.default: 2,
    _aten.conv3d.default: 3,
    _aten.convolution.default: None,
}


def frame_of(node: Any) -> tuple[Node, Pairs] | None:
    """What a convolution reads beneath a frame of zeros, and the frame; None if there is none."""
    if not _convolves(node):
        return None
    pad: Any = _arguments(node)["input"]
    frame = _zeros(pad)
    return frame if frame is not None and all(_takes(user, pad) for user in pad.users) else None


def is_frame(node: Any) -> bool:
    """Whether a node only makes a frame of zeros, which every reader has as its own padding."""
    return bool(_zeros(node)) and all(frame_of(user) is not None for user in node.users)


def _arguments(node: Node) -> dict[str, Any]:
    return meta.bind_arguments(node.target, node.args, node.kwargs)


def _convolves(node: Any) -> bool:
    return isinstance(node, Node) and node.target in _CONVOLUTIONS


def _zeros(node: Any) -> tuple[Node, Pairs] | None:
    """The image and the frame of a node that sets zeros around an image; None for another node."""
    if not isinstance(node, Node) or meta.op_name(node) not in ("pad", "constant_pad_nd"):
        return None
    given, seen = _arguments(node), node.meta.get("val")
    if given.get("mode", "constant") != "constant" or given.get("value") not in (None, 0, 0.0):
        return None
    pads = list(given["pad"])
    if not isinstance(seen, torch.Tensor) or not all(type(each) is int for each in pads):
        return None
    rank = seen.dim() - 2
    if len(pads) > 2 * rank or min(pads, default=0) < 0 or not seen.is_floating_point():
        return None
    pads += [0] * (2 * rank - len(pads))
    return given["self"], tuple(zip(pads[::2], pads[1::2], strict=True))[::-1]


def _takes(user: Node, pad: Node) -> bool:
    """Whether a node is a convolution of the padded image whose window is larger than the frame."""
    frame = _zeros(pad)
    if frame is None or not _convolves(user) or user.all_input_nodes.count(pad) > 1:
        return False
    given, (_, pairs) = _arguments(user), frame
    weight = given["weight"].meta.get("val") if isinstance(given["weight"], Node) else None
    if given["input"] is not pad or given.get("transposed") or not isinstance(weight, torch.Tensor):
        return False
    if _CONVOLUTIONS[user.target] not in (None, len(pairs)):
        return False
    by = given["dilation"]
    dilation = list(by) * len(pairs) if len(by) == 1 else list(by)
    reach = [d * (r - 1) for d, r in zip(dilation, weight.shape[2:], strict=True)]
    return all(max(pair) <= most for pair, most in zip(pairs, reach, strict=True))
