"""Attention as modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..arguments import checked, explained
from ..errors import FeatureMissing, GraphError, Problem
from ..functional import scaled_dot_product_attention
from ..models.export import is_exporting
from ..ops.base import dtype_name
from ..policy import Policy

Window = tuple[int | None, int | None]


class FusedSDPA(nn.Module):
    """Scaled dot-product attention, softmax(scale * q k^T + mask) v, without parameters.

    ``causal``, ``window``, ``scale``, ``diagonal_alignment``, ``softcap`` and ``alibi`` are those
    of :meth:`cudnngraph.Graph.sdpa`. ``dropout`` drops attention weights with that probability
    while the module trains; torch's generator gives the seed. Raises :class:`GraphError` where that
    is no probability below 1.
    """

    @checked
    def __init__(
        self,
        *,
        causal: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        diagonal_alignment: str = "top_left",
        dropout: float = 0.0,
        softcap: float | None = None,
        alibi: bool = False,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            problem = Problem("attention", f"dropout={dropout!r}", "a number from 0 to below 1")
            raise GraphError(type(self).__name__, [problem])
        self.dropout = dropout
        self.softcap = softcap
        self.alibi = alibi
        self.causal = causal
        self.window = window
        self.scale = scale
        self.diagonal_alignment = diagonal_alignment
        self.policy = policy

    @explained
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *,
        seq_len_q: torch.Tensor | None = None,
        seq_len_kv: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        finite_padding: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """q (B, H, S_q, D), k (B, H_kv, S_kv, D), v (B, H_kv, S_kv, D_v) → (B, H, S_q, D_v).

        H is a multiple of H_kv. ``attn_mask`` is bool (True attends) or added to the scores;
        ``seq_len_q`` and ``seq_len_kv`` are (B,) int32, ``alibi_slopes`` and ``sink`` (H,)
        float32; ``finite_padding`` promises what :meth:`cudnngraph.Graph.sdpa` says. With
        ``return_lse=True`` the pair (o, lse).
        """
        more = (seq_len_q, seq_len_kv, alibi_slopes, sink, self.window, self.softcap)
        if is_exporting() and not (
            any(each is not None for each in more)
            or (self.causal and (attn_mask is not None or self.diagonal_alignment != "top_left"))
            or (self.dropout and self.training)
            or self.alibi
            or return_lse
        ):
            options: Any = {"is_causal": self.causal, "scale": self.scale}
            options["enable_gqa"] = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, attn_mask, **options)
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask,
            self.dropout if self.training else 0.0,
            is_causal=self.causal,
            scale=self.scale,
            window=self.window,
            diagonal_alignment=self.diagonal_alignment,
            seq_len_q=seq_len_q,
            seq_len_kv=seq_len_kv,
            alibi=self.alibi,
            alibi_slopes=alibi_slopes,
            softcap=self.softcap,
            sink=sink,
            finite_padding=finite_padding,
            return_lse=return_lse,
            policy=self.policy,
        )

    def extra_repr(self) -> str:
        """The options that are not at their defaults."""
        shown: dict[str, Any] = {"causal": False, "window": None, "scale": None}
        shown |= {"diagonal_alignment": "top_left", "dropout": 0.0, "softcap": None, "alibi": False}
        values = {name: getattr(self, name) for name in shown}
        return ", ".join(f"{name}={v!r}" for name, v in values.items() if v != shown[name])


class FusedMultiheadAttention(nn.Module):
    """Self-attention with its projections, batch first.

    Parameters have the names and shapes of ``nn.MultiheadAttention`` (``in_proj_weight``,
    ``in_proj_bias``, ``out_proj``); with fewer ``num_kv_heads`` than ``num_heads`` the rows of
    in_proj for k and v are fewer. q, k and v are slices of one product and are not copied.
    """

    @checked
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = True,
        *,
        causal: bool = False,
        window: Window | None = None,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()
        shared = num_heads if num_kv_heads is None else num_kv_heads
        problems = [
            Problem("attention", what, expected)
            for wrong, what, expected in (
                (
                    num_heads < 1 or embed_dim % max(num_heads, 1),
                    f"embed_dim={embed_dim} with num_heads={num_heads}",
                    "embed_dim % num_heads == 0",
                ),
                (
                    shared < 1 or num_heads % max(shared, 1),
                    f"num_heads={num_heads} with num_kv_heads={shared}",
                    "num_heads % num_kv_heads == 0",
                ),
            )
            if wrong
        ]
        if problems:
            raise GraphError(type(self).__name__, problems)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, shared
        self.head_dim = embed_dim // num_heads
        rows = (num_heads + 2 * shared) * self.head_dim
        place = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(rows, embed_dim, **place))
        self.in_proj_bias = nn.Parameter(torch.zeros(rows, **place)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **place)
        self.attend = FusedSDPA(causal=causal, window=window, dropout=dropout, policy=policy)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    @explained
    def forward(
        self,
        x: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *,
        seq_len: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (B, S, E) → (B, S, E). ``attn_mask`` broadcasts to (B, H, S, S): bool (True attends,
        as in scaled_dot_product_attention) or added to the scores. ``seq_len`` (B,) int32."""
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            wanted = f"(B, S, E) with E = {self.embed_dim}"
            problem = Problem("attention", f"x has shape {tuple(x.shape)}", wanted)
            raise GraphError(type(self).__name__, [problem])
        weight = self.in_proj_weight
        if x.dtype != weight.dtype and not torch._C._is_any_autocast_enabled():
            what = f"x is {dtype_name(x.dtype)}, in_proj_weight is {dtype_name(weight.dtype)}"
            problem = Problem("attention", what, "one dtype", "convert x")
            raise GraphError(type(self).__name__, [problem])
        batch, length, _ = x.shape
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = _heads(packed, self.num_heads, self.num_kv_heads)
        o = self.attend(q, k, v, attn_mask, seq_len_q=seq_len, seq_len_kv=seq_len)
        out: torch.Tensor = self.out_proj(o.transpose(1, 2).reshape(batch, length, self.embed_dim))
        return out

    @classmethod
    @checked
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        *,
        causal: bool = False,
        window: Window | None = None,
        policy: Policy | None = None,
    ) -> FusedMultiheadAttention:
        """The module that stands for torch's in self-attention; it takes over the parameters.

        Raises :class:`FeatureMissing` where torch's has what this one has not.
        """
        if missing := why_not_attention(module):
            raise FeatureMissing(f"nn.MultiheadAttention with {missing}")
        bias = module.in_proj_bias is not None
        made = cls(
            module.embed_dim,
            module.num_heads,
            bias=bias,
            causal=causal,
            window=window,
            dropout=module.dropout,
            device="meta",
            policy=policy,
        )
        made.in_proj_weight, made.in_proj_bias = module.in_proj_weight, module.in_proj_bias
        made.out_proj = module.out_proj
        made.train(module.training)
        return made


def why_not_attention(module: nn.MultiheadAttention) -> str:
    """What a module of torch's has that ours has not, "" if nothing."""
    missing = (
        (not module.batch_first, "batch_first=False"),
        (not module._qkv_same_embed_dim, "kdim or vdim other than embed_dim"),
        (module.bias_k is not None, "add_bias_kv=True"),
        (module.add_zero_attn, "add_zero_attn=True"),
    )
    return ", ".join(what for wrong, what in missing if wrong)


def _heads(packed: torch.Tensor, heads: int, shared: int) -> tuple[torch.Tensor, ...]:
    """The slices q, k and v, each (B, heads, S, D), of (B, S, heads of all three * D)."""
    batch, length, width = packed.shape
    every = heads + 2 * shared
    split = packed.view(batch, length, every, width // every).transpose(1, 2)
    return torch.split(split, [heads, shared, shared], dim=1)


def self_attention(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    out_weights: tuple[torch.Tensor, torch.Tensor | None],
    num_heads: int,
    attn_mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    policy: Policy | None,
) -> torch.Tensor:
    """Self-attention of x (B, S, E) by the parameters of ``nn.MultiheadAttention``: weight and bias
    of the projections to q, k and v, and of the one behind."""
    q, k, v = _heads(F.linear(x, *weights), num_heads, num_heads)
    o = scaled_dot_product_attention(q, k, v, attn_mask, dropout, causal, policy=policy)
    return F.linear(o.transpose(1, 2).reshape(x.shape), *out_weights)
