"""Attention that a model writes out, found in its graph of ATen ops.

softmax(scale · q k^T + masks) v is attention whoever writes it: a product, numbers that scale it,
for all or each head, what is added to it or masked of it, softmax along the keys, and a product
with v. Where nobody reads what lies between, it is one op (:func:`match_attention`).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ..ops import meta

Node = torch.fx.Node
MASKED_BELOW = -3e4  # a score at most this has weight zero, whatever the other scores are
LEAST = -1e10  # beside this a score, and what is added to it, is nothing

_MATMULS = frozenset({"matmul", "bmm", "baddbmm"})
_SCALES = frozenset({"mul", "div"})
_SOFTMAX = frozenset({"softmax", "_softmax", "special_softmax", "_safe_softmax"})
SAME = frozenset({*meta.IDENTITIES, "to", "type_as"})  # but for the dtype


@dataclass(frozen=True)
class Term:
    """A tensor that is added to scores of the shape ``frame``; or one that is a boolean mask of
    them, with ``hidden``, the score where it hides: where it is True, if ``hides``, else False."""

    node: Node
    frame: tuple[int, ...]
    hides: bool = False
    hidden: float | None = None


@dataclass(frozen=True)
class AttentionMatch:
    """Attention as a model writes it, with q (..., S, D), k (..., T, D) and v (..., T, D), whose
    weights are (B, ..., S, T), their ``shape``; q, k and v may have the dims before S as one.

    - ``key_transposed``: k is (..., D, T).
    - ``terms``: what is added to the scores or hides some.
    - ``window_masks``: masks as (mask, (images, windows)), added to scores whose batch is both.
    - ``head_scales`` (..., 1, 1): factors of the scores, besides ``scale``.
    - ``softcap`` c: scaled scores s are c tanh(s / c).
    - ``sink`` (..., S, 1): a score besides those of the keys.
    """

    query: Node
    key: Node
    key_transposed: bool
    value: Node
    shape: tuple[int, ...]
    scale: float
    terms: tuple[Term, ...]
    window_masks: tuple[tuple[Node, tuple[int, int]], ...]
    head_scales: tuple[Node, ...]
    softcap: float | None
    sink: Node | None


def match_attention(node: Node) -> AttentionMatch | None:
    """The attention that ends with the product ``node``, None where there is none."""
    if len(node.args) < 2 or not all(isinstance(each, Node) for each in node.args[:2]):
        return None
    value: Any
    weights, value = _weights(_followers(node.args[0])), node.args[1]
    if weights is None:
        return None
    softmax, without_sink = weights
    given = meta.bind_arguments(softmax.target, softmax.args, softmax.kwargs)
    shape = tuple(softmax.meta["val"].shape)
    if given["dim"] not in (-1, len(shape) - 1) or not is_float(softmax):
        return None
    below, sink = softmax.args[0], None
    if without_sink:
        pair = _with_sink(below)
        if pair is None:
            return None
        below, sink = pair
        shape = (*shape[:-1], shape[-1] - 1)
    terms: list[Term] = []
    window_masks: list[tuple[Node, tuple[int, int]]] = []
    head_scales: list[Node] = []
    scale, softcap = 1.0, None
    scores, frame = _followers(below), shape
    while scores is not None and meta.op_name(scores) not in _MATMULS:
        if not is_call(scores) or tuple(scores.meta["val"].shape) != frame:
            return None
        kind, first = meta.op_name(scores), scores.args[0]
        given = meta.bind_arguments(scores.target, scores.args, scores.kwargs)
        scaled = scale != 1.0 or bool(head_scales) or softcap is not None
        if not scaled and (capped := _softcap(scores)) is not None:
            first, softcap, scale = capped
        elif (factor := _factor(scores)) is not None:
            scale *= factor
        elif kind == "mul" and frame == shape and (term := _of_heads(scores)) is not None:
            if softcap is not None:
                return None
            first, of_heads = term
            head_scales.append(of_heads)
        elif kind == "add" and not scaled and given.get("alpha", 1) == 1:
            pair = _split_sum(scores)
            if pair is None:
                return None
            first, other = pair
            terms.append(Term(other, frame))
        elif kind in meta.RESHAPES and not scaled and (window := _window_masks(scores)) is not None:
            first, mask, counts = window
            window_masks.append((mask, counts))
        elif kind in meta.RESHAPES and not head_scales and _is_shaped(first):
            frame = tuple(first.meta["val"].shape)
        elif kind in ("masked_fill", "where") and not scaled:
            names = ("self", "condition", "other") if kind == "where" else ("self", "mask", "value")
            first, mask, number = (given[name] for name in names)
            if not isinstance(mask, Node):
                return None
            terms.append(Term(mask, frame, kind == "masked_fill", _number(number)))
        else:
            return None
        scores = _followers(first)
    if scores is None or tuple(scores.meta["val"].shape) != frame:
        return None
    query: Any
    key: Any
    query, key = scores.args[:2]
    if meta.op_name(scores) == "baddbmm":
        bias, query, key = scores.args[:3]
        given = meta.bind_arguments(scores.target, scores.args, scores.kwargs)
        alone = scale == 1.0 and softcap is None and not head_scales and given["beta"] == 1
        if not alone or not isinstance(bias, Node) or not is_number(given["alpha"]):
            return None
        terms.append(Term(bias, frame))
        scale = float(given["alpha"])
    beside = any(term.hidden is None for term in terms) or bool(window_masks)
    if not all(_hides(term.hidden, beside) for term in terms if term.hidden is not None):
        return None
    if not isinstance(query, Node) or not isinstance(key, Node):
        return None
    if len(query.users) == 1 and (factor := _factor(query)) is not None:
        scale *= factor
        query = query.args[0]
    key, key_transposed, factor = _key(key)
    scale *= factor
    if not math.isfinite(scale):
        return None
    masks = (tuple(terms), tuple(window_masks), tuple(head_scales))
    query, key = _narrow(query), _narrow(key)
    return AttentionMatch(query, key, key_transposed, value, shape, scale, *masks, softcap, sink)


def _hides(number: float | None, beside: bool) -> bool:
    """Whether a score hides its key, whatever the others are; ``beside`` others are added to."""
    return number is not None and number <= (LEAST if beside else MASKED_BELOW)


def _weights(node: Node | None) -> tuple[Node, bool] | None:
    """The softmax below weights, and whether all but its last column are the weights."""
    if node is not None and meta.op_name(node) in meta.RESHAPES and _is_shaped(node.args[0]):
        source: Any = node.args[0]
        before, after = source.meta["val"].shape, node.meta["val"].shape
        node = _followers(source) if before[-2:] == after[-2:] else None
    sliced = node is not None and meta.op_name(node) == "slice"
    if node is not None and sliced:
        given = meta.bind_arguments(node.target, node.args, node.kwargs)
        below = _followers(given["self"])
        if below is None:
            return None
        size = below.meta["val"].shape[-1]
        taken = range(*slice(given["start"], given["end"], given["step"]).indices(size))
        if given["dim"] % below.meta["val"].dim() != below.meta["val"].dim() - 1:
            return None
        node = below if taken == range(size - 1) else None
    return None if node is None or meta.op_name(node) not in _SOFTMAX else (node, sliced)


def _is_shaped(node: Any) -> TypeGuard[Node]:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _with_sink(node: Any) -> tuple[Node, Node] | None:
    """Scores and the column behind them, of what may be less its largest."""
    whole = _followers(node)
    if whole is not None and meta.op_name(whole) == "sub":
        source, most = whole.args[0], whole.args[1]
        if not isinstance(source, Node) or len(source.users) != 2 or not _is_largest(most, source):
            return None
        whole = source
    if whole is None or not is_call(whole) or meta.op_name(whole) != "cat":
        return None
    given = meta.bind_arguments(whole.target, whole.args, whole.kwargs)
    last = whole.meta["val"].dim() - 1
    if given["dim"] not in (-1, last) or len(given["tensors"]) != 2:
        return None
    scores, sink = given["tensors"]
    return (scores, sink) if sink.meta["val"].shape[-1] == 1 else None


def _is_largest(node: Any, of: Node) -> bool:
    """Whether a node is the largest of each row, which changes no softmax if it is subtracted."""
    if isinstance(node, Node) and node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]
    if not isinstance(node, Node) or meta.op_name(node) not in ("max", "amax"):
        return False
    given = meta.bind_arguments(node.target, node.args, node.kwargs)
    dims = given.get("dim")
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    rows = dims in ([-1], [of.meta["val"].dim() - 1])
    return given["self"] is of and rows and bool(given["keepdim"])


def _softcap(node: Node) -> tuple[Any, float, float] | None:
    """s, c and the factor f of c tanh(f s / c)."""
    cap, tanh = _factor(node), _followers(node.args[0])
    if cap is None or cap <= 0 or tanh is None or meta.op_name(tanh) != "tanh":
        return None
    inner = _followers(tanh.args[0])
    factor = None if inner is None else _factor(inner)
    if inner is None or factor is None:
        return tanh.args[0], cap, cap
    return inner.args[0], cap, factor * cap


def _split_sum(node: Node) -> tuple[Node, Node] | None:
    """The scores of a sum and what is added to them."""
    pair, shape = [each for each in node.args[:2] if _is_shaped(each)], node.meta["val"].shape
    mains = [each for each in pair if each.meta["val"].shape == shape and _is_scores(each)]
    if len(pair) != 2 or len(mains) != 1:
        return None
    return mains[0], next(each for each in pair if each is not mains[0])


def _narrow(node: Node) -> Node:
    """The node that one is a wider float of: scores are computed in float32 all the same."""
    while is_call(node) and meta.op_name(node) in SAME and is_float(node):
        before = node.args[0]
        if not isinstance(before, Node) or not _is_shaped(before) or not is_float(before):
            return node
        if before.meta["val"].dtype.itemsize > node.meta["val"].dtype.itemsize:
            return node
        node = before
    return node


def _factor(node: Node) -> float | None:
    """The number that a node multiplies its first operand with, None if it does something else."""
    if meta.op_name(node) not in _SCALES or not isinstance(node.args[0], Node):
        return None
    number = node.args[1] if len(node.args) == 2 else None
    if not is_number(number) or not number or node.kwargs.get("rounding_mode") is not None:
        return None
    return float(number) if meta.op_name(node) == "mul" else 1.0 / float(number)  # type: ignore[arg-type]


def _key(node: Node) -> tuple[Node, bool, float]:
    """k of its transpose, whether it is that still, and the number that it was multiplied with:
    where nobody else reads what is scaled."""
    last = {node.meta["val"].dim() - 1, node.meta["val"].dim() - 2}
    if (
        meta.op_name(node) != "transpose"
        or len(node.users) > 1
        or not isinstance(node.args[0], Node)
    ):
        return node, True, 1.0
    scaled, dims = node.args[0], node.args[1:3]
    if {int(dim) % node.meta["val"].dim() for dim in dims} != last or len(scaled.users) > 1:  # type: ignore[arg-type]
        return node, True, 1.0
    if (factor := _factor(scaled)) is None:
        narrow = _narrow(scaled)
        return (node, True, 1.0) if narrow is scaled else (narrow, False, 1.0)
    return scaled.args[0], False, factor  # type: ignore[return-value]


def _of_heads(node: Node) -> tuple[Node, Node] | None:
    """Split a product into scores and a factor that is the same for all queries and keys."""
    pair = node.args[:2]
    for main, other in (pair, pair[::-1]):
        if isinstance(main, Node) and isinstance(other, Node) and _is_scores(main):
            seen = other.meta.get("val")
            alike = isinstance(seen, torch.Tensor) and tuple(seen.shape[-2:]) == (1, 1)
            return (main, other) if alike else None
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """A number, or that of a tensor which is made of one; else NaN."""
    while isinstance(value, Node) and meta.op_name(value) in SAME:
        value = value.args[0]
    if isinstance(value, Node) and meta.op_name(value) == "scalar_tensor":
        value = value.args[0]
    elif isinstance(value, Node) and meta.op_name(value) == "full" and not value.args[0]:
        value = value.args[1]
    return float(value) if is_number(value) else math.nan


def is_float(node: Node) -> bool:
    return node.meta["val"].dtype in (torch.float16, torch.bfloat16, torch.float32)


def _followers(node: Any) -> Node | None:
    """Return the node behind conversions to float dtypes, or None if others read the node too."""
    while isinstance(node, Node) and node.op == "call_function" and len(node.users) == 1:
        if not isinstance(node.meta.get("val"), torch.Tensor) or not is_float(node):
            return None
        if meta.op_name(node) not in SAME:
            return node
        node = node.args[0]
    return None


def _window_masks(node: Node) -> tuple[Node, Node, tuple[int, int]] | None:
    """Split a sum of windows into its scores, its other term, and (B, W).

    ``node`` is a view (B W, H, S, T) of the sum (B, W, H, S, T). The scores are (B W, H, S, T).
    None for another view.
    """
    inner, shape = _followers(node.args[0]), node.meta["val"].shape
    if (
        inner is None
        or meta.op_name(inner) != "add"
        or (len(shape), inner.meta["val"].dim()) != (4, 5)
    ):
        return None
    images, windows, *rest = inner.meta["val"].shape  # heads, queries and keys
    terms = inner.args[:2]
    given = meta.bind_arguments(inner.target, inner.args, inner.kwargs)
    if (images * windows, *rest) != tuple(shape) or given.get("alpha", 1) != 1:
        return None
    for place, term in enumerate(terms):
        view, other = _followers(term), terms[1 - place]
        if (
            view is not None
            and isinstance(other, Node)
            and meta.op_name(view) in meta.RESHAPES
            and view.meta["val"].shape == inner.meta["val"].shape
            and isinstance(view.args[0], Node)
            and view.args[0].meta["val"].shape == shape
        ):
            return view.args[0], other, (images, windows)
    return None


def _is_scores(node: Node) -> bool:
    """Whether a product is at the end of the ops that may stand between it and softmax."""
    at: Any = node
    while (found := _followers(at)) is not None:
        kind = meta.op_name(found)
        if kind in _MATMULS:
            return True
        if kind in ("add", "mul"):
            return any(_is_scores(each) for each in found.args[:2] if isinstance(each, Node))
        if kind not in {*_SCALES, *meta.RESHAPES, "masked_fill", "where", "tanh"}:
            return False
        at = found.args[1 if kind == "where" else 0]
    return False


def unrepeated_heads(node: Any) -> Node | None:
    """The tensor (B, H, S, D) of which a node has each head several times, one behind another, as
    grouped queries are written; None for another node."""
    if not is_call(node) or meta.op_name(node) not in meta.RESHAPES:
        return None
    wide = node.args[0]
    while is_call(wide) and meta.op_name(wide) in ("clone", "contiguous"):
        wide = wide.args[0]
    if not is_call(wide) or meta.op_name(wide) != "expand":
        return None
    apart = wide.args[0]
    if not is_call(apart) or apart.target is not torch.ops.aten.unsqueeze.default:
        return None
    source = apart.args[0]
    before, after = apart.meta["val"].shape, wide.meta["val"].shape
    if len(before) != 5 or before[2] != 1 or apart.args[1] not in (2, -3):
        return None
    heads = (before[0], before[1] * after[2], *before[3:])
    same = (*before[:2], after[2], *before[3:]) == tuple(after)
    return source if same and tuple(node.meta["val"].shape) == heads else None


def is_call(node: Any) -> bool:
    return (
        isinstance(node, Node)
        and isinstance(node.target, torch._ops.OpOverload)
        and isinstance(node.meta.get("val"), torch.Tensor)
    )
