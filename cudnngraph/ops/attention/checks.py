"""Checks that the inference rules of all kinds of attention share."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..base import InferContext, dtype_name
from ..checks import flag, is_int, number_attr, same_dtype, statistics_dtype

ALIGNMENTS = ("top_left", "bottom_right")


def sdpa_shapes(call: InferContext) -> bool:
    q, k, v = call["q"], call["k"], call["v"]
    for port in ("q", "k", "v"):
        if len(call[port].shape) != 4:
            call.problem(
                f"{port} '{call[port].name}' has {len(call[port].shape)} dims {call[port].shape}",
                "4: (B, H, S, D)",
            )
            return False
    before = len(call.problems)
    for port in ("k", "v"):
        if call[port].shape[0] != q.shape[0]:
            call.problem(
                f"{port} has batch {call[port].shape[0]}, q has {q.shape[0]}", "equal batches"
            )
    if k.shape[1] != v.shape[1]:
        call.problem(f"v has {v.shape[1]} heads, k has {k.shape[1]}", "equal heads of k and v")
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        call.problem(
            f"q has {q.shape[1]} heads, not a multiple of the {k.shape[1]} heads of k and v",
            "H_q % H_kv == 0",
        )
    if k.shape[2] != v.shape[2]:
        call.problem(f"v has length {v.shape[2]}, k has {k.shape[2]}", "equal lengths of k and v")
    if k.shape[3] != q.shape[3]:
        call.problem(
            f"k has head dim {k.shape[3]}, q has {q.shape[3]}", "equal head dims of q and k"
        )
    if q.shape[3] == 0:
        call.problem("q has head dim 0", "a head dim >= 1")
    return len(call.problems) == before


def _sdpa_mask(call: InferContext) -> None:
    mask, q, k = call.get("attn_mask"), call["q"], call["k"]
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) or (
        q.dtype == torch.float64 and mask.dtype == torch.float32
    ):
        call.problem(
            f"attn_mask '{mask.name}' is {dtype_name(mask.dtype)}, q is {dtype_name(q.dtype)}",
            f"bool (True attends), {dtype_name(q.dtype)} or float32 (added to the scores)",
        )
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    padded = (1,) * (4 - len(mask.shape)) + mask.shape
    if len(mask.shape) > 4 or any(m not in (1, n) for m, n in zip(padded, full, strict=True)):
        call.problem(
            f"attn_mask '{mask.name}' has shape {mask.shape}",
            f"one that broadcasts to (B, H, S_q, S_kv) = {full}",
        )


def sdpa_lengths(call: InferContext) -> None:
    q = call["q"]
    given = [port for port in ("seq_len_q", "seq_len_kv") if call.get(port) is not None]
    for port in given:
        spec = call[port]
        if spec.dtype != torch.int32:
            call.problem(f"{port} '{spec.name}' is {dtype_name(spec.dtype)}", "int32", "convert it")
        if spec.shape != (q.shape[0],):
            call.problem(f"{port} '{spec.name}' has shape {spec.shape}", f"(B,) = ({q.shape[0]},)")


def _sdpa_window(call: InferContext) -> None:
    window = call.attrs["window"]
    if window is None:
        return
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        call.problem(
            f"window={window!r} is not a pair", "(left, right), each a number of keys or None"
        )
        return
    for side, value in zip(("left", "right"), window, strict=True):
        if value is not None and (not is_int(value) or value < 0):
            call.problem(f"window {side}={value!r}", "a whole number >= 0, or None for no bound")
            return
    left, right = (None if value is None else int(value) for value in window)
    if call.attrs["is_causal"] is True:
        right = 0
    call.attrs["window"] = None if left is None and right is None else (left, right)


def per_head(call: InferContext, port: str) -> None:
    """A number for each head of q."""
    spec, q = call.get(port), call["q"]
    if spec is None:
        return
    kind = statistics_dtype(q)
    if spec.dtype != kind or spec.shape != (q.shape[1],):
        call.problem(
            f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
            f"{dtype_name(kind)} (H,) = ({q.shape[1]},)",
        )


def _sdpa_dropout(call: InferContext) -> None:
    q, k = call["q"], call["k"]
    seed, offset, mask = (call.get(f"dropout_{of}") for of in ("seed", "offset", "mask"))
    p = number_attr(call, "dropout_p")
    if p is None:
        return
    if not 0.0 <= p < 1.0:
        call.problem(f"dropout_p={p!r}", "a probability from 0 to below 1")
        return
    if (seed is None) != (offset is None):
        given, other = ("seed", "offset") if offset is None else ("offset", "seed")
        call.problem(f"dropout_{given} without dropout_{other}", "both, or neither")
    elif seed is not None and mask is not None:
        call.problem("dropout_mask beside dropout_seed", "one of the two: a mask needs no seed")
    elif p > 0.0 and seed is None and mask is None:
        call.problem(
            f"dropout_p={p!r} without anything that says what is dropped",
            "dropout_seed and dropout_offset, or dropout_mask",
        )
    elif p == 0.0 and (seed is not None or mask is not None):
        call.problem("dropout_p=0.0 with a seed or a mask", "dropout_p > 0", "leave them out")
    for port in ("dropout_seed", "dropout_offset"):
        spec = call.get(port)
        if spec is not None and (spec.dtype != torch.int64 or spec.numel != 1):
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
                "one int64, of shape () or (1,)",
            )
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask is not None and (mask.dtype not in (torch.bool, q.dtype) or mask.shape != full):
        call.problem(
            f"dropout_mask '{mask.name}' is {dtype_name(mask.dtype)} {mask.shape}",
            f"bool (True keeps), or 0 and 1 in {dtype_name(q.dtype)}, "
            f"of shape (B, H, S_q, S_kv) = {full}",
        )


def _sdpa_scores(call: InferContext) -> None:
    """Check the other options that change the scores: ALiBi and the soft cap."""
    if flag(call, "alibi") and call.get("alibi_slopes") is not None:
        call.problem("alibi=True beside alibi_slopes", "one of the two")
    per_head(call, "alibi_slopes")
    if call.attrs["softcap"] is not None:
        cap = number_attr(call, "softcap")
        if cap is not None and cap <= 0:
            call.problem(f"softcap={cap!r}", "a number > 0, or None for no cap")


def sdpa_band(call: InferContext, *, diagonal: bool = False) -> None:
    """One canonical form of the scale and of the band: causal is the band with no key to the right
    of the diagonal. ``diagonal``: where that lies matters without a band too."""
    causal = flag(call, "is_causal")
    if "finite_padding" in call.attrs:
        flag(call, "finite_padding")
    if call.attrs["diagonal_alignment"] not in ALIGNMENTS:
        call.problem(
            f"diagonal_alignment={call.attrs['diagonal_alignment']!r} is unknown",
            " or ".join(map(repr, ALIGNMENTS)),
        )
    _sdpa_window(call)
    if call.attrs["scale"] is not None:
        number_attr(call, "scale")
    elif call["q"].shape[-1]:
        call.attrs["scale"] = 1.0 / math.sqrt(call["q"].shape[-1])
    if causal and call.attrs["window"] is None:
        call.attrs["window"] = (None, 0)
    call.attrs["is_causal"] = False
    if call.attrs["window"] is None and not diagonal:
        call.attrs["diagonal_alignment"] = "top_left"


def sdpa_checked(call: InferContext, *data: str) -> bool:
    """The checks that both directions share; ``data`` are the operands of the dtype of q."""
    before = len(call.problems)
    same_dtype(call, "q", *data)
    if not sdpa_shapes(call):
        return False
    _sdpa_mask(call)
    sdpa_lengths(call)
    _sdpa_dropout(call)
    _sdpa_scores(call)
    distances = call.attrs["alibi"] is True or call.get("alibi_slopes") is not None
    sdpa_band(call, diagonal=distances)
    if call.get("seq_len_q") is None and call.get("seq_len_kv") is None:
        call.attrs["finite_padding"] = False
    return len(call.problems) == before


def has_rank(call: InferContext, port: str, dims: str) -> bool:
    spec, rank = call[port], dims.count(",") + 1
    if len(spec.shape) == rank:
        return True
    call.problem(
        f"{port} '{spec.name}' has {len(spec.shape)} dims {spec.shape}", f"{rank}: ({dims})"
    )
    return False


def int32_of(call: InferContext, port: str, shape: tuple[int, ...], letters: str) -> None:
    spec = call.get(port)
    if spec is not None and (spec.dtype != torch.int32 or spec.shape != shape):
        call.problem(
            f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
            f"int32 {letters} = {shape}",
        )


def check_heads(call: InferContext, k: str, v: str) -> None:
    """Check head dims and numbers of heads; heads are dim 1 and D is the last one."""
    q = call["q"]
    if call[k].shape[-1] != q.shape[-1] or q.shape[-1] == 0:
        call.problem(
            f"{k} has head dim {call[k].shape[-1]}, q has {q.shape[-1]}",
            "equal head dims of q and k, >= 1",
        )
    if call[v].shape[1] != call[k].shape[1]:
        call.problem(
            f"{v} has {call[v].shape[1]} heads, {k} has {call[k].shape[1]}", "equal heads of both"
        )
    elif call[k].shape[1] == 0 or q.shape[1] % call[k].shape[1]:
        call.problem(
            f"q has {q.shape[1]} heads, not a multiple of the {call[k].shape[1]} heads of {k}",
            "H_q % H_kv == 0",
        )


BAND: dict[str, Any] = {
    "scale": None,
    "is_causal": False,
    "diagonal_alignment": "top_left",
    "window": None,
}


PADDING: dict[str, Any] = {"finite_padding": False}
