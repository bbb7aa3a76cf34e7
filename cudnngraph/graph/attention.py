"""Attention: dense, FP8, paged and packed, with gradients, rotary embeddings, block masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import Problem
from ..ops.base import dtype_name
from .pointwise import PointwiseMethods
from .shape import ShapeMethods
from .value import Value


class AttentionMethods(ShapeMethods, PointwiseMethods):
    """Scaled dot-product attention, and what is done to its operands."""

    _tables: dict[tuple[str, str, bool], tuple[Value, Value]]  # of rope

    def sdpa(
        self,
        q: Value,
        k: Value,
        v: Value,
        attn_mask: Value | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        seq_len_q: Value | None = None,
        seq_len_kv: Value | None = None,
        dropout_p: float = 0.0,
        dropout_seed: Value | None = None,
        dropout_offset: Value | None = None,
        dropout_mask: Value | None = None,
        alibi: bool = False,
        alibi_slopes: Value | None = None,
        softcap: float | None = None,
        sink: Value | None = None,
        finite_padding: bool = False,
        return_lse: bool = False,
        name: str | None = None,
    ) -> Any:
        """Scaled dot-product attention: softmax(scale * q k^T + mask) v.

        q (B, H, S_q, D), k (B, H_kv, S_kv, D), v (B, H_kv, S_kv, D_v) of one dtype; H is a multiple
        of H_kv (grouped query heads). → o (B, H, S_q, D_v) with q's dtype and order of strides;
        with ``return_lse=True`` the pair (o, lse), lse (B, H, S_q) float32: the natural logarithm
        of the sum of the exponentials of a row's scores.

        - ``attn_mask``: bool (True attends) or float (added to the scaled scores), any shape that
          broadcasts to (B, H, S_q, S_kv).
        - ``is_causal``: no key to the right of the diagonal. ``window=(left, right)``: at most that
          many keys to either side of it, None for no bound.
        - ``diagonal_alignment``: the diagonal starts at the "top_left" corner, or ends at the
          "bottom_right" one (of each sequence, where lengths are given).
        - ``seq_len_q``, ``seq_len_kv``: (B,) int32, the valid rows and keys of each sequence.
        - ``finite_padding=True`` is a promise: what lies past the lengths of a sequence, in q, k, v
          and the gradient of o, are finite numbers, and every sequence has a row and a key. Then
          cuDNN's faster kernels may run, which multiply it by 0, and its gradient.
        - ``scale`` defaults to 1 / sqrt(D).
        - ``softcap`` c > 0: scaled scores s become c tanh(s / c), before any mask is added.
        - ``alibi=True``: scores fall by slope * distance, how far a key stands from the row's place
          on the diagonal, with ALiBi's own slopes for H heads; ``alibi_slopes`` (H,) float32 gives
          others, which get no gradient.
        - ``sink`` (H,) float32: a score that every row has besides those of its keys, with a value
          of zero (attention sink). It is part of lse.
        - ``dropout_p``: each attention weight is dropped with that probability, and those kept are
          divided by 1 - dropout_p. Which, ``dropout_mask`` says, (B, H, S_q, S_kv) bool (True
          keeps), or ``dropout_seed`` and ``dropout_offset``, int64 of one element: the same two
          drop the same. cuDNN and the reference have a generator each, so they drop others.

        A row that may attend to no key gives zeros, and -inf in lse where there is no sink.
        """
        outputs = self._apply(
            "sdpa",
            (
                *(q, k, v, attn_mask, seq_len_q, seq_len_kv),
                *(dropout_seed, dropout_offset, dropout_mask, alibi_slopes, sink),
            ),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "finite_padding": finite_padding,
                "dropout_p": dropout_p,
                "alibi": alibi,
                "softcap": softcap,
                "return_lse": return_lse,
            },
            name,
        )
        return tuple(outputs) if return_lse is True else outputs[0]

    def sdpa_fp8(
        self,
        q: Value,
        k: Value,
        v: Value,
        descale_q: Value,
        descale_k: Value,
        descale_v: Value,
        descale_s: Value,
        scale_s: Value,
        scale_o: Value,
        *,
        seq_len_q: Value | None = None,
        seq_len_kv: Value | None = None,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        return_lse: bool = False,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Attention of FP8 data: softmax(scale * (q descale_q) (k descale_k)^T) v descale_v.

        q (B, H, S_q, D), k (B, H_kv, S_kv, D), v (B, H_kv, S_kv, D_v), all float8_e4m3fn or all
        float8_e5m2; scales and descales float32 on the GPU, one number each. The exponentials of a
        row's scores, at most 1, are multiplied by ``scale_s`` and rounded to FP8; what they are
        summed up to with v is multiplied by ``descale_s`` and ``descale_v``. → (o, amax_s, amax_o):
        o (B, H, S_q, D_v) in q's dtype (``dtype`` can say so), multiplied by ``scale_o``, rounded
        and saturated; the largest weight and the largest size in o before ``scale_o``, float32 ().
        With ``return_lse=True`` (o, lse, amax_s, amax_o). The rest as in :meth:`sdpa`.
        """
        outputs = self._apply(
            "sdpa_fp8",
            (
                *(q, k, v, descale_q, descale_k, descale_v),
                *(descale_s, scale_s, scale_o, seq_len_q, seq_len_kv),
            ),
            {
                "dtype": dtype,
                "scale": scale,
                "is_causal": is_causal,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "return_lse": return_lse,
            },
            name,
        )
        return tuple(outputs if return_lse is True else (outputs[0], *outputs[2:]))

    def sdpa_backward(
        self,
        do: Value,
        q: Value,
        k: Value,
        v: Value,
        o: Value,
        lse: Value,
        attn_mask: Value | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        seq_len_q: Value | None = None,
        seq_len_kv: Value | None = None,
        dropout_p: float = 0.0,
        dropout_seed: Value | None = None,
        dropout_offset: Value | None = None,
        dropout_mask: Value | None = None,
        alibi: bool = False,
        alibi_slopes: Value | None = None,
        softcap: float | None = None,
        finite_padding: bool = False,
        mask_grad: bool = False,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dq, dk, dv) of :meth:`sdpa` from its o's gradient ``do``.

        The other operands and keywords are those of the forward call, o and lse its results (a sink
        is in the lse, and no operand here). With
        ``mask_grad=True`` a fourth one, that of the additive mask, in the mask's shape. A row that
        may attend to no key gives zeros; its lse is infinite of either sign.
        """
        outputs = self._apply(
            "sdpa_backward",
            (
                *(do, q, k, v, o, lse, attn_mask, seq_len_q, seq_len_kv),
                *(dropout_seed, dropout_offset, dropout_mask, alibi_slopes),
            ),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "finite_padding": finite_padding,
                "dropout_p": dropout_p,
                "alibi": alibi,
                "softcap": softcap,
                "mask_grad": mask_grad,
            },
            name,
        )
        return tuple(outputs if mask_grad is True else outputs[:3])

    def sdpa_paged(
        self,
        q: Value,
        k_cache: Value,
        v_cache: Value,
        page_table: Value,
        seq_len_kv: Value,
        *,
        seq_len_q: Value | None = None,
        page_table_v: Value | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "bottom_right",
        window: tuple[int | None, int | None] | None = None,
        finite_padding: bool = False,
        return_lse: bool = False,
        name: str | None = None,
    ) -> Any:
        """Attention to keys and values that lie in the pages of a cache, as :meth:`sdpa` means it.

        q (B, H, S_q, D), k_cache (pages, H_kv, page, D), v_cache (pages, H_kv, page, D_v), of any
        strides, so (pages, page, H_kv, D) in memory too. ``page_table`` (B, P) int32: the pages of
        each sequence in order, of which ``seq_len_kv`` (B,) int32 keys are valid; what the table
        holds behind them is not used. ``page_table_v`` where those of v_cache are others. → o
        (B, H, S_q, D_v), with ``return_lse=True`` the pair (o, lse). No gradient.

        ``finite_padding`` promises the same as in :meth:`sdpa`, of the pages' keys too. Unlike
        :meth:`sdpa` the diagonal ends at the bottom right unless told otherwise: the last
        row of q is the last valid key's.
        """
        outputs = self._apply(
            "sdpa_paged",
            (q, k_cache, v_cache, page_table, seq_len_kv, seq_len_q, page_table_v),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "finite_padding": finite_padding,
                "return_lse": return_lse,
            },
            name,
        )
        return tuple(outputs) if return_lse is True else outputs[0]

    def sdpa_varlen(
        self,
        q: Value,
        k: Value,
        v: Value,
        cu_seqlens_q: Value,
        cu_seqlens_kv: Value,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        finite_padding: bool = False,
        return_lse: bool = False,
        name: str | None = None,
    ) -> Any:
        """Attention within each of several sequences that are packed one behind the other.

        q (T_q, H, D), k (T_kv, H_kv, D), v (T_kv, H_kv, D_v); ``cu_seqlens_q`` and
        ``cu_seqlens_kv`` (B + 1,) int32: 0, then where each sequence ends. ``max_seqlen_q`` and
        ``max_seqlen_kv``: no sequence is longer. ``finite_padding`` promises that all numbers are
        finite, those of other sequences too, and that every sequence has a key. The other keywords
        are those of :meth:`sdpa`, for each sequence by itself. → o (T_q, H, D_v), with
        ``return_lse=True`` the pair (o, lse), lse (T_q, H). Tokens behind the last sequence are no
        part of the result: what o holds for them is undefined, and so are their gradients.
        """
        outputs = self._apply(
            "sdpa_varlen",
            (q, k, v, cu_seqlens_q, cu_seqlens_kv, None),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "finite_padding": finite_padding,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_kv": max_seqlen_kv,
                "return_lse": return_lse,
            },
            name,
        )
        return tuple(outputs) if return_lse is True else outputs[0]

    def sdpa_varlen_backward(
        self,
        do: Value,
        q: Value,
        k: Value,
        v: Value,
        o: Value,
        lse: Value,
        cu_seqlens_q: Value,
        cu_seqlens_kv: Value,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dq, dk, dv) of :meth:`sdpa_varlen` from its o's gradient ``do``."""
        outputs = self._apply(
            "sdpa_varlen_backward",
            (do, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_kv, None),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_kv": max_seqlen_kv,
            },
            name,
        )
        return tuple(outputs)

    def ragged_offsets(
        self,
        cu_seqlens_q: Value,
        cu_seqlens_kv: Value,
        widths_q: Sequence[int],
        widths_kv: Sequence[int],
        *,
        name: str | None = None,
    ) -> Value:
        """Offsets of packed sequences in memory, as a plan of packed attention needs them.

        Both ``cu_seqlens`` (B + 1,) int32 → (2 + widths, B + 1) int32: the lengths of the sequences
        of q and of k, with a 0 behind them, then each ``cu_seqlens_q`` times a width
        of ``widths_q``, the elements of a token, then the same of k. Packed attention makes it
        itself.
        """
        widths = {"widths_q": widths_q, "widths_kv": widths_kv}
        return self._one("ragged_offsets", cu_seqlens_q, cu_seqlens_kv, name=name, **widths)

    # -- compositions --------------------------------------------------------------------------

    def rope(self, x: Value, cos: Value, sin: Value, *, interleaved: bool = False) -> Value:
        """Rotary position embedding (arXiv 2104.09864): x (..., S, D) turned by an angle per
        position and pair of columns.

        ``cos`` and ``sin`` (S, D/2), or of any shape that broadcasts to (..., S, D/2). A pair is
        the columns j and j + D/2 (rotate-half), or with ``interleaved=True`` 2j and 2j + 1:
        (a, b) → (a cos - b sin, b cos + a sin). Made of one copy of x with the pairs swapped, and
        pointwise ops on the whole of x.
        """
        if not self._all_known("rope", x=x, cos=cos, sin=sin):
            return self._unknown(x, cos, sin)
        depth = x.shape[-1] if x.shape else 0
        wanted = (depth // 2,)
        if depth % 2 or depth == 0 or cos.shape[-1:] != wanted or sin.shape != cos.shape:
            self.problems.append(
                Problem(
                    "rope",
                    f"x has shape {x.shape}, cos {cos.shape}, sin {sin.shape}",
                    "x (..., S, D) with an even D, cos and sin (S, D/2) alike",
                )
            )
            return self._unknown(x, cos, sin)
        last, pairs = len(x.shape) - 1, (*x.shape[:-1], depth // 2, 2)
        if interleaved:
            both = self.reshape(x, pairs)
            first, second = (self.slice(both, last + 1, at, at + 1) for at in (0, 1))
            swapped = self.reshape(self.concat([second, first], last + 1), x.shape)
        else:
            first, second = (self.slice(x, last, at, at + depth // 2) for at in (0, depth // 2))
            swapped = self.concat([second, first], last)

        def table(a: Value, b: Value) -> Value:
            rank = len(a.shape)
            if not interleaved:
                return self.concat([a, b], rank - 1)
            columns = [self.reshape(each, (*each.shape, 1)) for each in (a, b)]
            return self.reshape(self.concat(columns, rank), (*a.shape[:-1], depth))

        key = (cos.name, sin.name, interleaved)
        if key not in self._tables:  # made once for q and k
            self._tables[key] = table(cos, cos), table(self.neg(sin), sin)
        wide_cos, wide_sin = self._tables[key]
        return self.add(self.mul(x, wide_cos), self.mul(swapped, wide_sin))

    def block_mask(self, blocks: Value, rows: int, keys: int, block: int = 128) -> Value:
        """A mask for :meth:`sdpa` from one of blocks: block x block pairs of rows and keys each.

        ``blocks`` bool, (..., ceil(rows / block), ceil(keys / block)), True attends → bool
        (..., rows, keys). The whole mask is written out; cuDNN skips blocks by a mask on Blackwell
        alone.
        """
        if not self._all_known("block_mask", blocks=blocks):
            return self._unknown(blocks)
        many = [-(-rows // block), -(-keys // block)] if block > 0 else []
        if blocks.dtype != torch.bool or list(blocks.shape[-2:]) != many:
            self.problems.append(
                Problem(
                    "block_mask",
                    f"blocks '{blocks.name.lstrip('%')}' is {dtype_name(blocks.dtype)} "
                    f"{blocks.shape}",
                    f"bool (..., {', '.join(map(str, many))}), one for each {block} rows and keys",
                )
            )
            return self._unknown(blocks)
        lead, rank = blocks.shape[:-2], len(blocks.shape)
        full = (*lead, many[0], block, many[1], block)
        spread = self.expand(blocks, full, (*range(rank - 1), rank))
        whole = self.reshape(spread, (*lead, many[0] * block, many[1] * block))
        whole = self.slice(whole, rank - 2, 0, rows)
        return self.slice(whole, rank - 1, 0, keys)
