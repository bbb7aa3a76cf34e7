"""What all rules of the lowering share: how one refuses, and how a tensor lies."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.spec import Node
from ...ops.table import OPS

Shape = Sequence[int]
Place = tuple[Shape, Shape]  # shape and stride


class Refused(Exception):
    """A rule knows that cuDNN cannot take this op; the reason is the message."""


def tensor_at(node: Node, port: str) -> str | None:
    """The name of the tensor at a port of a node."""
    return node.inputs[OPS[node.op].ports.index(port)]
