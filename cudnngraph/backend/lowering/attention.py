"""Lowering of attention: forward and backward, FP8, paged and packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ir.spec import GraphSpec, Node, same_layout
from ...ops.attention.dense import FP8_SCALES
from ...ops.base import LOW_PRECISION
from ...ops.table import OPS, tensor_at
from ...rewrite.annotate import REPEATABLE
from ...rewrite.packed import SAME_STRIDES, token_strides
from .base import Refused
from .context import Context


def _distinct(ctx: Context, node: Node, ports: Sequence[str]) -> list[Any]:
    """The graph inputs at ``ports``, each as a tensor of its own."""
    names = [str(tensor_at(node, port)) for port in ports]
    if any(name not in ctx.spec.inputs for name in names):
        raise Refused("attention of what the same graph computes")
    return [
        ctx.alias(name) if name in names[:place] else ctx.values[name]
        for place, name in enumerate(names)
    ]


def _has_lengths(node: Node) -> bool:
    return any(tensor_at(node, f"seq_len_{of}") is not None for of in ("q", "kv"))


def _attention_options(ctx: Context, node: Node) -> dict[str, Any]:
    """The frontend's keywords that attention and its gradient share."""
    given = ctx.by_port(node)
    q_spec = ctx.spec.tensors[str(tensor_at(node, "q"))]
    if q_spec.dtype not in LOW_PRECISION:
        raise Refused("cuDNN attention takes float16 and bfloat16 only")
    options: dict[str, Any] = {"attn_scale": node.attr("scale"), "name": node.name}
    if given["attn_mask"] is not None:
        mask_spec = ctx.spec.tensors[str(tensor_at(node, "attn_mask"))]
        if mask_spec.dtype == torch.bool:
            raise Refused("cuDNN attention takes additive masks, not boolean ones")
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
            raise Refused("cuDNN's own ALiBi slopes are for the causal band from the top left")
        options["use_alibi_mask"] = True
    return options | _band_options(ctx, node)


def _lengths(ctx: Context, node: Node, seq_q: Any = None, seq_kv: Any = None) -> dict[str, Any]:
    """The frontend's keywords for lengths of the sequences; all of a tensor where none is given."""
    shapes = (ctx.spec.tensors[str(tensor_at(node, port))].shape for port in ("q", "k"))
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
    name = tensor_at(node, "dropout_mask")
    if name is None:
        _check_dropout(ctx.spec, node)
        seed, offset = (
            ctx.values[str(tensor_at(node, f"dropout_{of}"))] for of in ("seed", "offset")
        )
        return {"dropout": (p, seed, offset)}
    if node.op == "sdpa_backward":
        # The row sums of do * o are not scaled by 1 - p, whether that is given on the device or by
        # value (measured on an H200 with cuDNN 9.19: dq off by 4 to 28 %).
        raise Refused("cuDNN's gradient of dropout by a mask is wrong")
    if ctx.spec.tensors[name].dtype == torch.bool:
        raise Refused("cuDNN attention takes dropout masks of numbers, not boolean ones")
    _check_dropped_band(node)
    return {"dropout": (ctx.values[name], ctx.scalar(1.0 / (1.0 - p)))}


def _check_dropped_band(node: Node) -> None:
    window, alignment = node.attr("window"), node.attr("diagonal_alignment")
    if alignment == "bottom_right" and window is not None and window[1] is not None:
        raise Refused("cuDNN attention drops nothing along the bottom-right diagonal")


def _check_dropout(spec: GraphSpec, node: Node) -> None:
    """Refuse, forward and backward alike, what cuDNN has no gradient of.

    cuDNN's generator is its own: where the gradient is a torch step the forward has to be one too,
    or the two would drop different weights.
    """
    _check_dropped_band(node)
    if _has_lengths(node) and not node.attr("finite_padding"):
        raise Refused("dropout by a seed with lengths, whose gradient is a torch step")
    name, q = tensor_at(node, "attn_mask"), spec.tensors[str(tensor_at(node, "q"))]
    if name is None:
        return
    mask = spec.tensors[name]
    changed = node.attr("softcap") is not None or tensor_at(node, "alibi_slopes") is not None
    if mask.dtype != q.dtype or (1, *mask.shape)[-2] == 1 < q.shape[2] or changed:
        raise Refused("dropout by a seed under a mask whose gradient is a torch step")


def _score_callbacks(ctx: Context, node: Node) -> dict[str, Any]:
    """A soft cap and given ALiBi slopes, as pointwise ops on the scores.

    cuDNN has no masks of its own beside them, so a band of keys is part of them; a row without a
    key would divide 0 by 0, and lengths have such rows.
    """
    q, k = (ctx.spec.tensors[str(tensor_at(node, port))] for port in ("q", "k"))
    cap, name = node.attr("softcap"), tensor_at(node, "alibi_slopes")
    if node.attr("alibi") or _has_lengths(node):
        raise Refused("cuDNN attention changes scores beside no lengths, and no ALiBi of its own")
    rows, keys = q.shape[2], k.shape[2]
    shift = 0 if node.attr("diagonal_alignment") == "top_left" else keys - rows
    left, right = node.attr("window") or (None, None)
    first, last = shift, rows - 1 + shift  # the diagonal's keys in the first row and in the last
    if (right is not None and first + right < 0) or (left is not None and last - left >= keys):
        raise Refused("cuDNN attention changes scores where every row has a key")
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


def sdpa(ctx: Context, node: Node) -> Sequence[Any]:
    q, k, v = _distinct(ctx, node, ("q", "k", "v"))
    options = _attention_options(ctx, node)
    sink = tensor_at(node, "sink")
    if sink is not None:
        if ctx.spec.tensors[str(tensor_at(node, "q"))].shape[2] == 1:
            raise Refused("cuDNN attention takes no sink where S_q is 1")
        options["sink_token"] = ctx.values[sink]
    out, stats = ctx.graph.sdpa(q=q, k=k, v=v, generate_stats=node.attr("return_lse"), **options)
    return out, stats


def sdpa_fp8(ctx: Context, node: Node) -> Sequence[Any]:
    depths = {ctx.spec.tensors[str(tensor_at(node, port))].shape[3] for port in "qv"}
    if any(depth % 16 or depth > 256 for depth in depths):
        raise Refused(
            f"head dims {sorted(depths)}; cuDNN's FP8 attention takes multiples of 16 up to 256"
        )
    options: dict[str, Any] = {"attn_scale": node.attr("scale"), "name": node.name}
    seq_q, seq_kv = (ctx.by_port(node)[f"seq_len_{of}"] for of in ("q", "kv"))
    if seq_q is not None or seq_kv is not None:
        options |= _lengths(ctx, node, seq_q, seq_kv)
    for name, value in _band_options(ctx, node).items():  # the frontend's names of them are shorter
        options[name.removeprefix("diagonal_band_")] = value
    ports = ("q", "k", "v", *FP8_SCALES)
    data = dict(zip(ports, _distinct(ctx, node, ports), strict=True))
    results = ctx.graph.sdpa_fp8(**data, generate_stats=node.attr("return_lse"), **options)
    return list(results)


def _order_of_sums(node: Node) -> dict[str, Any]:
    """The frontend's keyword for the gradient of attention: whether dq is added up in order."""
    return {"use_deterministic_algorithm": bool(dict(node.attrs).get(REPEATABLE))}


_TILE = 128  # rows and keys that a kernel for the gradient takes at once


def _ends_of_sequences(ctx: Context, node: Node) -> dict[str, Any]:
    """Return lengths for the gradient of attention without any, if a tile reaches past the end.

    cuDNN takes a score past the end as 0. If all scores of a row are below -88, exp(0 - lse)
    overflows float32 and gradients are NaN (pytorch#196678 for keys, cudnn-frontend#1072 for rows;
    both seen on an H200 with cuDNN 9.19). Lengths mark the end. Causal masks hide the tail and
    score callbacks are not affected, so they get none: lengths would cost 5 %.
    """
    rows, keys = (ctx.spec.tensors[str(tensor_at(node, port))].shape[2] for port in ("q", "k"))
    changed = node.attr("softcap") is not None or tensor_at(node, "alibi_slopes") is not None
    hidden = 1 < rows == keys and (node.attr("window") or (None, None))[1] == 0
    whole = rows % _TILE == 0 and keys % _TILE == 0
    if _has_lengths(node) or changed or hidden or whole:
        return {}
    return _lengths(ctx, node)


def sdpa_backward(ctx: Context, node: Node) -> Sequence[Any]:
    if _has_lengths(node) and not node.attr("finite_padding"):
        raise Refused("cuDNN lets NaN out of the padding into gradients, also of empty sequences")
    name = tensor_at(node, "attn_mask")
    if name is not None:
        rows = (1, *ctx.spec.tensors[name].shape)[-2]
        if rows == 1 < ctx.spec.tensors[str(node.inputs[0])].shape[2]:
            raise Refused("cuDNN gets the gradient wrong under a mask that is broadcast over rows")
    do, q, k, v, o, lse = _distinct(ctx, node, ("do", "q", "k", "v", "o", "lse"))
    options = _attention_options(ctx, node) | _ends_of_sequences(ctx, node) | _order_of_sums(node)
    dmask = None
    if node.outputs[3] is not None:
        if node.attr("softcap") is not None:
            raise Refused("cuDNN attention has no gradient of a mask beside a soft cap")
        tensor = ctx.spec.tensors[node.outputs[3]]
        dims, strides = ctx.view.dims(tensor.shape, tensor.stride)
        dmask = options["dBias"] = ctx.graph.tensor(
            dim=dims, stride=strides, data_type=ctx.dtype(tensor.dtype), name=tensor.name
        )
    grads = ctx.graph.sdpa_backward(q=q, k=k, v=v, o=o, dO=do, stats=lse, **options)
    return *grads, dmask


def sdpa_paged(ctx: Context, node: Node) -> Sequence[Any]:
    q, k, v = _distinct(ctx, node, ("q", "k_cache", "v_cache"))
    q_spec, table = (ctx.spec.tensors[str(tensor_at(node, port))] for port in ("q", "page_table"))
    if q_spec.dtype not in LOW_PRECISION:
        raise Refused("cuDNN attention takes float16 and bfloat16 only")
    batch, _, rows, _ = q_spec.shape
    pages, second = str(tensor_at(node, "page_table")), tensor_at(node, "page_table_v")
    lengths = tensor_at(node, "seq_len_q")
    page = ctx.spec.tensors[str(tensor_at(node, "k_cache"))].shape[2]
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
        seq_len_kv=ctx.values[str(tensor_at(node, "seq_len_kv"))],
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
    name = str(tensor_at(node, "ragged"))
    ragged = ctx.spec.tensors[name]
    rows, count = ragged.shape
    ones = (1, 1, 1)
    widths = token_strides(node, ctx.spec.tensors)
    if rows != 2 + len(widths[0]) + len(widths[1]):
        raise Refused("packed attention with offsets for other strides")

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


def sdpa_varlen(ctx: Context, node: Node) -> Sequence[Any]:
    q, k, v = _distinct(ctx, node, ("q", "k", "v"))
    options, place = _sequences(ctx, node)
    for tensor, port in ((q, "q"), (k, "k"), (v, "v")):
        place(tensor, str(tensor_at(node, port)), port != "q")
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


def sdpa_varlen_backward(ctx: Context, node: Node) -> Sequence[Any]:
    ports = ("do", "q", "k", "v", "o", "lse")
    names = dict(zip(OPS[node.op].outputs, node.outputs, strict=True))
    for port, other in SAME_STRIDES:
        one, two = (
            ctx.spec.tensors[names.get(at) or str(tensor_at(node, at))] for at in (port, other)
        )
        if not same_layout(one.shape, one.stride, two.stride):
            raise Refused(
                f"{port} and {other} of packed attention's gradient lie apart; cuDNN 9.19 reads a "
                "misaligned address there (measured on an H200)"
            )
    operands = _distinct(ctx, node, ports)
    q = ctx.spec.tensors[str(tensor_at(node, "q"))]
    options, place = _sequences(ctx, node)
    for tensor, port in zip(operands, ports, strict=True):
        place(tensor, str(tensor_at(node, port)), port in ("k", "v"))
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
        max_total_seq_len_kv=ctx.spec.tensors[str(tensor_at(node, "k"))].shape[0],
        name=node.name,
        **options,
        **_order_of_sums(node),
        **_band_options(ctx, node),
    )
    for tensor, result, keys in zip(grads, node.outputs, (False, True, True), strict=True):
        assert result is not None, "inference gives all three"
        place(tensor, result, keys)
    return grads  # type: ignore[no-any-return]
