"""Attention in torch, as its reference rules define it: scores, bands, masks and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..base import Tensors
from ..operands import need
from ..quantize import saturated
from .dropout import dropout_factor


def band_offset(
    rows: torch.Tensor | int, keys: torch.Tensor | int, alignment: str
) -> torch.Tensor | int:
    """Column of the diagonal in row 0: 0 from the top left, keys - rows to the bottom right."""
    return 0 if alignment == "top_left" else keys - rows


def _kept(
    q: torch.Tensor, k: torch.Tensor, lengths: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Masks of pairs (row, key), rows and keys, and each key's distance from the diagonal.

    The distance counts keys to the right of the row's place on the diagonal. All are of rank 4.

    ``lengths`` are seq_len_q and seq_len_kv; boolean masks are not in it.
    """
    rows, keys = q.shape[2], k.shape[2]
    row = torch.arange(rows, device=q.device).view(1, 1, rows, 1)
    col = torch.arange(keys, device=q.device).view(1, 1, 1, keys)
    length_q, length_kv = (
        whole if given is None else given.view(-1, 1, 1, 1)
        for given, whole in zip(lengths, (rows, keys), strict=True)
    )
    valid_row, valid_key = row < length_q, col < length_kv
    keep = valid_row & valid_key
    distance = col - row - band_offset(length_q, length_kv, attrs["diagonal_alignment"])
    if attrs["window"] is not None:
        left, right = attrs["window"]
        if right is not None:
            keep = keep & (distance <= right)
        if left is not None:
            keep = keep & (distance >= -left)
    return keep, valid_row, valid_key.transpose(-1, -2), distance


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of ALiBi (arXiv 2108.12409): for a power of two of heads 2^(-8 i / heads), i from
    1; for other numbers those of the power below, then every second one of the power above."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * place / power) for place in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * place / power) for place in range(1, 2 * (heads - power), 2)]


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    slopes: torch.Tensor | None,
    keep: torch.Tensor,
    distance: torch.Tensor,
    attrs: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """cap(scale * q k^T) + mask - slopes * |distance|, -inf where two may not meet; and the cap's
    derivative, None without a cap. q and k have as many heads."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * attrs["scale"]
    derivative = None
    if attrs["softcap"] is not None:
        tanh = torch.tanh(scores / attrs["softcap"])
        scores, derivative = attrs["softcap"] * tanh, 1.0 - tanh * tanh
    if mask is not None:
        if mask.dtype == torch.bool:
            keep = keep & mask
        else:
            scores = scores + mask
    if attrs["alibi"]:
        slopes = torch.tensor(alibi_slopes(q.shape[1]), dtype=q.dtype, device=q.device)
    if slopes is not None:
        scores = scores - slopes.view(1, -1, 1, 1) * distance.abs()
    return torch.where(keep, scores, -torch.inf), derivative


def sdpa(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = (need(value) for value in inputs[:3])
    mask, lengths, dropout, (slopes, sink) = inputs[3], inputs[4:6], inputs[6:9], inputs[9:]
    keep, _, valid_key, distance = _kept(q, k, lengths, attrs)
    if lengths[1] is not None:
        v = torch.where(valid_key, v, 0.0)  # padding may hold NaN
    repeat = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(repeat, dim=1)
    v = v.repeat_interleave(repeat, dim=1)
    scores, _ = _scores(q, k, mask, slopes, keep, distance, attrs)
    top = (
        scores.amax(dim=-1, keepdim=True)
        if k.shape[2]
        else scores.new_full((*scores.shape[:3], 1), -torch.inf)
    )
    nothing = top == -torch.inf  # such a row attends to no key: zeros, not 0/0
    sunk = None if sink is None else sink.view(1, -1, 1, 1)
    if sunk is not None:
        top = torch.maximum(top, sunk)
    finite = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - finite)
    total = weights.sum(dim=-1, keepdim=True)
    if sunk is not None:
        total = total + torch.exp(sunk - finite)
    factor = dropout_factor(weights, dropout, attrs)
    weights = weights if factor is None else weights * factor
    out = torch.matmul(weights, v) / torch.where(total == 0.0, 1.0, total)
    out = torch.where(nothing, 0.0, out)
    if not attrs["return_lse"]:
        return out, None
    lse = finite + torch.log(total)  # log(0) is -inf
    if lengths[0] is not None:
        lse = torch.where(_valid_rows(q, lengths[0]), lse, -torch.inf)
    return out, lse.squeeze(-1)


def _valid_rows(q: torch.Tensor, length_q: torch.Tensor) -> torch.Tensor:
    """Mask of the rows that are no padding; of rank 4."""
    row = torch.arange(q.shape[2], device=q.device).view(1, 1, -1, 1)
    return row < length_q.view(-1, 1, 1, 1)


def sdpa_fp8(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """Attention of FP8 data: with P = exp(scores - their largest in the row), l its row sums,

    scores = (q descale_q) (k descale_k)^T scale, o = fp8(scale_o fp8(scale_s P) v descale_s
    descale_v / l). amax_s is the largest of P / l, amax_o that of |o| before scale_o.
    """
    q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o = (
        need(value) if place < 3 else need(value).reshape(())
        for place, value in enumerate(inputs[:9])
    )
    fp8 = getattr(torch, attrs["dtype"])
    keep, _, valid_key, _ = _kept(q, k, inputs[9:], attrs)
    if inputs[10] is not None:
        v = torch.where(valid_key, v, 0.0)  # padding may hold NaN
    repeat = q.shape[1] // k.shape[1]
    k, v = (value.repeat_interleave(repeat, dim=1) for value in (k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)) * (descale_q * descale_k * attrs["scale"])
    scores = torch.where(keep, scores, -torch.inf)
    floor = scores.new_full((*scores.shape[:3], 1), -torch.inf)
    top = torch.cat([scores, floor], -1).amax(dim=-1, keepdim=True)  # also of no key
    nothing = top == -torch.inf  # such a row attends to no key: zeros, not 0/0
    weights = torch.exp(scores - torch.where(nothing, 0.0, top))
    total = torch.where(nothing, 1.0, weights.sum(dim=-1, keepdim=True))
    rounded = saturated(weights * scale_s, fp8).to(weights.dtype)
    out = torch.matmul(rounded, v) * (descale_s * descale_v) / total
    out = torch.where(nothing, 0.0, out)
    amax_s, amax_o = (
        value.abs().amax() if value.numel() else value.new_zeros(())
        for value in (weights / total, out)
    )
    lse = torch.where(nothing, -torch.inf, top + torch.log(total)).squeeze(-1)
    return saturated(out * scale_o, fp8), lse if attrs["return_lse"] else None, amax_s, amax_o


def sdpa_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """With P the attention weights, exp(scores - lse), Z what dropout multiplies them by (or 1),
    and D the row sums of do * o:

    dv = (Z P)^T do, dS = P * (Z * (do v^T) - D), dmask = dS, and with the derivative of the soft
    cap in dS: dq = scale * dS k, dk = scale * dS^T q.
    """
    do, q, k, v, o, lse = (need(value) for value in inputs[:6])
    mask, lengths, dropout, slopes = inputs[6], inputs[7:9], inputs[9:12], inputs[12]
    keep, valid_row, valid_key, distance = _kept(q, k, lengths, attrs)
    # Padding may hold NaN: select, never multiply by 0.
    do, q, o = (torch.where(valid_row, value, 0.0) for value in (do, q, o))
    k, v = (torch.where(valid_key, value, 0.0) for value in (k, v))
    heads, groups = q.shape[1], k.shape[1]
    k = k.repeat_interleave(heads // groups, dim=1)
    v = v.repeat_interleave(heads // groups, dim=1)
    lse = lse.unsqueeze(-1)
    keep = keep & lse.isfinite()
    scores, derivative = _scores(q, k, mask, slopes, keep, distance, attrs)
    weights = torch.exp(scores - torch.where(lse.isfinite(), lse, 0.0))  # 0 in rows without a key
    pull = (do * o).sum(dim=-1, keepdim=True)
    dweights = torch.matmul(do, v.transpose(-1, -2))
    factor = dropout_factor(weights, dropout, attrs)
    dropped = weights if factor is None else weights * factor
    dscores = weights * ((dweights if factor is None else dweights * factor) - pull)
    dmask = dscores.sum_to_size(need(mask).shape) if attrs["mask_grad"] else None
    if derivative is not None:
        dscores = dscores * derivative
    dq = torch.matmul(dscores, k) * attrs["scale"]
    dk = torch.matmul(dscores.transpose(-1, -2), q) * attrs["scale"]
    dv = torch.matmul(dropped.transpose(-1, -2), do)
    dk, dv = (grad.unflatten(1, (groups, heads // groups)).sum(dim=2) for grad in (dk, dv))
    return dq, dk, dv, dmask


PLAIN: Mapping[str, Any] = {"dropout_p": 0.0, "alibi": False, "softcap": None, "mask_grad": False}


def sdpa_paged(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k_cache, v_cache, table, length_kv = (need(value) for value in inputs[:5])
    table_v = table if inputs[6] is None else inputs[6]

    def gathered(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """(B, H, keys, D); a table may hold anything behind the pages of a sequence."""
        chosen = cache[pages.long().clamp(0, max(len(cache) - 1, 0))]
        return chosen.transpose(1, 2).flatten(2, 3)

    k, v = gathered(k_cache, table), gathered(v_cache, table_v)
    operands = (q, k, v, None, inputs[5], length_kv, *(None,) * 5)
    return sdpa(operands, {**PLAIN, **attrs})
