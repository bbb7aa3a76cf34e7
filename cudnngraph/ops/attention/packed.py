"""Packed sequences in torch, as the reference rules of their attention define it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..base import Tensors
from ..operands import need
from .reference import PLAIN, sdpa, sdpa_backward


class _Packed:
    """Tokens of several sequences, one sequence behind the other, and the same padded.

    Nothing here asks the device for a number, so it may be captured in a CUDA graph.
    """

    def __init__(self, cu_seqlens: torch.Tensor, tokens: int, longest: int) -> None:
        self.lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        ends, token = cu_seqlens[1:].long(), torch.arange(tokens, device=cu_seqlens.device)
        self._sequence = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
        starts = cu_seqlens.long()[self._sequence]
        self._place = (token - starts).clamp(0, longest - 1)
        self._within = token < cu_seqlens[-1]
        places = torch.arange(longest, device=cu_seqlens.device)
        self._tokens = (cu_seqlens[:-1].long().view(-1, 1) + places).clamp(max=max(tokens - 1, 0))

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """(T, H, D) → (B, H, longest, D)"""
        if len(x) == 0:
            return x.new_zeros(len(self._tokens), x.shape[1], self._tokens.shape[1], x.shape[2])
        return x[self._tokens].transpose(1, 2)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, longest, D) → (T, H, D), zeros behind the last sequence."""
        chosen = x.transpose(1, 2)[self._sequence, self._place]
        return torch.where(self._within.view(-1, 1, 1), chosen, 0.0)


def _sequences(
    q: torch.Tensor, k: torch.Tensor, where: Tensors, attrs: Mapping[str, Any]
) -> tuple[_Packed, _Packed]:
    """The packing of q and of k; ``where`` are cu_seqlens_q, cu_seqlens_kv and ragged."""
    cu_seqlens = list(where[:2])
    if where[2] is not None:
        cu_seqlens = [F.pad(lengths[:-1].cumsum(0), (1, 0)) for lengths in where[2][:2]]
    rows, keys = (need(each) for each in cu_seqlens)
    return (
        _Packed(rows, len(q), attrs["max_seqlen_q"]),
        _Packed(keys, len(k), attrs["max_seqlen_kv"]),
    )


def sdpa_varlen(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = (need(value) for value in inputs[:3])
    rows, keys = _sequences(q, k, inputs[3:], attrs)
    data = (rows.padded(q), keys.padded(k), keys.padded(v))
    o, lse = sdpa((*data, None, rows.lengths, keys.lengths, *(None,) * 5), {**PLAIN, **attrs})
    return rows.packed(o), None if lse is None else rows.packed(lse.unsqueeze(-1)).squeeze(-1)


def sdpa_varlen_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    do, q, k, v, o, lse = (need(value) for value in inputs[:6])
    rows, keys = _sequences(q, k, inputs[6:], attrs)
    data = [
        *(rows.padded(do), rows.padded(q), keys.padded(k), keys.padded(v), rows.padded(o)),
        rows.padded(lse.unsqueeze(-1)).squeeze(-1),
    ]
    operands = (*data, None, rows.lengths, keys.lengths, *(None,) * 4)
    dq, dk, dv, _ = sdpa_backward(operands, {**PLAIN, **attrs})
    return rows.packed(need(dq)), keys.packed(need(dk)), keys.packed(need(dv))


def ragged_into(inputs: Tensors, attrs: Mapping[str, Any], out: torch.Tensor) -> torch.Tensor:
    """The lengths of the sequences of q and of k, then where each starts, in elements, for every
    width of a token: (rows, B + 1) int32."""
    rows, keys = need(inputs[0]), need(inputs[1])
    for row, cu_seqlens in enumerate((rows, keys)):
        torch.sub(cu_seqlens[1:], cu_seqlens[:-1], out=out[row, :-1])
    out[:2, -1].zero_()
    wide = [(rows, width) for width in attrs["widths_q"]]
    wide += [(keys, width) for width in attrs["widths_kv"]]
    for row, (cu_seqlens, width) in enumerate(wide, 2):
        torch.mul(cu_seqlens, width, out=out[row])
    return out


def ragged_offsets(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    rows = 2 + len(attrs["widths_q"]) + len(attrs["widths_kv"])
    cu_seqlens = need(inputs[0])
    return ragged_into(inputs, attrs, cu_seqlens.new_empty(rows, len(cu_seqlens)))
