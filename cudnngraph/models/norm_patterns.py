"""Norms that a model writes out, found in its graph of ATen ops.

Rows by the roots of their mean squares, times a weight, are one op if nobody else reads what lies
between (:func:`match_rms_norm`); so are rows by their norms (:func:`match_normalize`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..ops import meta
from .patterns import SAME, is_call, is_float, is_number

Node = torch.fx.Node


@dataclass(frozen=True)
class NormMatch:
    """x / sqrt(mean(x * x) + eps) along the last dim, times ``weight`` if that is not None."""

    x: Node
    weight: Node | None
    eps: float


def match_rms_norm(node: Node) -> NormMatch | None:
    """The RMS norm that ends with ``node``: with its weight, or with what it is converted to."""
    end = _alone(node)
    plain = _by_root(end)
    if plain is not None:
        return NormMatch(plain[0], None, plain[1])
    if not is_call(end) or meta.op_name(end) != "mul":
        return None
    for main, weight in (end.args[:2], end.args[1::-1]):
        if isinstance(main, Node) and isinstance(weight, Node) and len(main.users) == 1:
            normed = _by_root(_alone(main))
            if normed is not None:
                return NormMatch(normed[0], weight, normed[1])
    return None


def _alone(node: Any) -> Any:
    """The node below conversions between float dtypes; None if others read it."""
    while is_call(node) and meta.op_name(node) in SAME and is_float(node):
        node = node.args[0]
        if isinstance(node, Node) and len(node.users) != 1:
            return None
    return node


def _source(node: Any) -> Any:
    """The node below conversions between float dtypes that keep every bit."""
    while is_call(node) and meta.op_name(node) in SAME and is_float(node):
        before = node.args[0]
        seen = before.meta.get("val") if isinstance(before, Node) else None
        if not isinstance(seen, torch.Tensor):
            return node
        if seen.dtype.itemsize > node.meta["val"].dtype.itemsize:
            return node
        node = before
    return node


def _by_root(node: Any) -> tuple[Node, float] | None:
    """x and eps of x / sqrt(mean(x * x) + eps), where nobody else reads the root."""
    if not is_call(node) or len(node.args) < 2:
        return None
    if meta.op_name(node) == "div" and node.kwargs.get("rounding_mode") is None:
        pairs = [(node.args[0], "sqrt", node.args[1])]
    elif meta.op_name(node) == "mul":
        pairs = [(main, "rsqrt", root) for main, root in (node.args[:2], node.args[1::-1])]
    else:
        return None
    for main, kind, root in pairs:
        if not is_call(root) or meta.op_name(root) != kind or len(root.users) != 1:
            continue
        total = _source(root.args[0])
        if not is_call(total) or meta.op_name(total) != "add":
            continue
        mean, eps = _source(total.args[0]), total.args[1]
        alpha = meta.bind_arguments(total.target, total.args, total.kwargs).get("alpha", 1)
        if not is_number(eps) or not 0 <= eps < math.inf or alpha != 1:
            continue
        squared, x = _squared(mean), _source(main)
        if squared is not None and squared is x and is_float(x):
            return x, float(eps)
    return None


def _squared(mean: Any) -> Any:
    """The x in ``mean`` of x squared, along the last dim, which is kept; else None."""
    if not is_call(mean) or mean.target is not torch.ops.aten.mean.dim:
        return None
    given = meta.bind_arguments(mean.target, mean.args, mean.kwargs)
    square, dims = _source(given["self"]), given["dim"]
    if not is_call(square) or not given["keepdim"]:
        return None
    if list(dims or ()) not in ([-1], [square.meta["val"].dim() - 1]):
        return None
    kind, args = meta.op_name(square), square.args
    if kind == "square" or (kind == "pow" and args[1:] == (2,)):
        return _source(args[0])
    return _source(args[0]) if kind == "mul" and args[0] is args[1] else None


def match_normalize(node: Node) -> float | None:
    """The least norm by which a quotient divides, if it is of rows by their norms (F.normalize
    over the last dim); else None."""
    given = meta.bind_arguments(node.target, node.args, node.kwargs)
    x, clamped = given["self"], given["other"]
    if is_call(clamped) and meta.op_name(clamped) == "expand":
        clamped = clamped.args[0]
    if not is_call(clamped) or meta.op_name(clamped) not in ("clamp_min", "clamp"):
        return None
    clamp = meta.bind_arguments(clamped.target, clamped.args, clamped.kwargs)
    norms, floor = clamp["self"], clamp["min"]
    if not is_call(norms) or meta.op_name(norms) != "linalg_vector_norm" or not is_number(floor):
        return None
    norm = meta.bind_arguments(norms.target, norms.args, norms.kwargs)
    if norm["self"] is not x:
        return None
    rows = list(norm["dim"] or ()) in ([-1], [x.meta["val"].dim() - 1]) and norm["keepdim"]
    plain = norm["ord"] == 2 and norm["dtype"] is None
    unbound = clamp.get("max") is None and given.get("rounding_mode") is None
    return float(floor) if rows and plain and unbound and 0 <= floor < math.inf else None
