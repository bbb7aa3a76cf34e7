"""torch's flex attention as other ops of torch's: attention with a mask, or written-out scores.

``torch.nn.attention.flex_attention`` calls an op with functions of a score and its place, which no
graph takes. Called for all places at once, they are ops like any others. A mask that depends on
places alone is a constant, which may be found to be a band of keys. What would take a number for
each query and key is left to torch's own kernels where there are such: they skip blocks of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from . import bands

_LN_2 = math.log(2.0)
_broadcast: Any = torch.broadcast_shapes
Function = Callable[..., torch.Tensor]  # of a score, a place, and what it reads


def higher_name(op: Any) -> str:
    """The name of a higher-order op of torch's, "" of what is none."""
    return op._name if isinstance(op, torch._ops.HigherOrderOperator) else ""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Function,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any,
    score_operands: Sequence[torch.Tensor] = (),
    mask_operands: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What torch's op gives for the same arguments.

    query (B, H, S, D), key and value (B or 1, H_kv, T, D or D_v). The result (B, H, S, D_v) lies in
    memory in the order of ``query``. The logarithms of the sums of exponentials and the largest
    scores, (B, H, S) both and to base 2, are computed apart from it. Rows with no key are 0.
    """
    batch, heads = query.shape[:2]
    sizes = (*query.shape[:3], key.shape[2])
    places = _places(sizes, query.device)
    if key.shape[0] != batch:
        key, value = (each.expand(batch, -1, -1, -1) for each in (key, value))
    mask = None
    if not _is_none(block_mask[-1]):
        mask = _mask(block_mask[-1], (*places, *mask_operands), sizes)

    def scores() -> torch.Tensor:
        made = torch.matmul(query, _repeated(key, heads).transpose(-2, -1))
        made = made.to(torch.float64 if made.dtype == torch.float64 else torch.float32) * scale
        if not _is_same(score_mod):
            made = _everywhere(score_mod, (made,), (*places, *score_operands))
        return made if mask is None else torch.where(mask, made, -math.inf)

    if _is_same(score_mod):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=heads != key.shape[1]
        )
    else:
        weights = torch._safe_softmax(scores(), -1)
        out = torch.matmul(weights.to(value.dtype), _repeated(value, heads))
    apart = scores()
    lse = torch.logsumexp(apart, -1) / _LN_2
    return _in_order_of(query, out), lse, apart.amax(-1) / _LN_2


def _places(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """The places along each dim of scores (B, H, S, T)."""
    return [torch.arange(n, device=device) for n in sizes]


def _mask(mask_mod: Function, places: Sequence[Any], sizes: Sequence[int]) -> torch.Tensor:
    """Which scores are kept, (B or 1, H or 1, S, T)."""
    mask = _everywhere(mask_mod, (), places)
    return mask.expand(_broadcast(mask.shape, (1, 1, *sizes[2:])))


def has_kernels(device: torch.device) -> bool:
    """Whether torch.compile has kernels of flex attention for a device that are faster than scores
    in memory."""
    from torch.utils._triton import has_triton

    return device.type == "cuda" and has_triton()


def is_torchs(*args: Any, **kwargs: Any) -> bool:
    """Whether torch's own kernels should run what :func:`attention` is called with: where that
    would take a number for each query and key."""
    bound = signature(attention).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, score_mod, mask_mod = given["query"], given["score_mod"], given["block_mask"][-1]
    if not has_kernels(query.device):
        return False
    with unset_fake_temporarily():
        if not _is_same(score_mod) and (given["score_operands"] or not _is_cap(score_mod)):
            return True
        if _is_none(mask_mod):
            return False
        sizes = (*query.shape[:3], given["key"].shape[2])
        if given["mask_operands"] or math.prod(sizes[2:]) > bands.MOST_SCORES:
            return True
        mask = _mask(mask_mod, _places(sizes, query.device), sizes)
        return bands.band_of(mask) is None


def _is_cap(score_mod: Function) -> bool:
    """Whether scores are bent to stay below a number, as attention of ours can do."""
    if not isinstance(score_mod, torch.fx.GraphModule):
        return False
    place = torch.zeros((), dtype=torch.int64)
    if any(node.users for node in list(score_mod.graph.nodes)[1:5]):
        return False
    most = score_mod(torch.tensor(math.inf, dtype=torch.float64), *[place] * 4)
    if not 0.0 < float(most) < math.inf:
        return False
    scores = torch.linspace(-4, 4, 81, dtype=torch.float64) * most
    made = score_mod(scores, *[place] * 4)
    return torch.allclose(made, most * torch.tanh(scores / most), rtol=1e-6, atol=0.0)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values of groups of heads, (B, H_kv, T, D), for each of ``heads``."""
    batch, groups, columns, size = x.shape
    if groups == heads:
        return x
    shape = (batch, groups, heads // groups, columns, size)
    return x.unsqueeze(2).expand(shape).reshape(batch, heads, columns, size)


def _everywhere(function: Function, score: Sequence[Any], places: Sequence[Any]) -> torch.Tensor:
    """The results of a function of scores, if any, and their places, (B, H, S, T) or broadcast to
    that.

    Ops on single numbers do the same with tensors that are broadcast. A function that has other ops
    is called by vmap, which takes more of them.
    """
    shaped = [
        place.view([-1 if dim == own else 1 for dim in range(4)])
        for own, place in enumerate(places[:4])
    ]
    with suppress(_NotBroadcast), _Broadcast():
        return function(*score, *shaped, *places[4:])
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    of_all: Any = _torchs()._vmap_for_bhqkv(
        function, prefix=(0,) * len(score), suffix=(None,) * len(places[4:])
    )
    with TransformGetItemToIndex():
        made: torch.Tensor = of_all(*score, *places)
        return made


class _NotBroadcast(Exception):
    """A function does more than ops on single numbers."""


class _Broadcast(TorchFunctionMode):
    """Raises where a result has not the shape that its operands are broadcast to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            given = (args, kwargs)
            if func in _INDEXING:
                given = args[1]
                if len(leaves := pytree.tree_leaves(given)) != args[0].dim():
                    raise _NotBroadcast
                if not all(isinstance(each, (torch.Tensor, int)) for each in leaves):
                    raise _NotBroadcast
            shapes = [x.shape for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
            if made.shape != _broadcast(*shapes):
                raise _NotBroadcast
        return made


_INDEXING = (torch.Tensor.__getitem__, torch.ops.aten.index.Tensor)


def _is_same(score_mod: Function) -> bool:
    """Whether scores stay what they are."""
    if isinstance(score_mod, torch.fx.GraphModule):
        nodes = list(score_mod.graph.nodes)
        return bool(nodes[-1].args[0] in (nodes[0], (nodes[0],), [nodes[0]]))
    return score_mod is _torchs()._identity


def _is_none(mask_mod: Function) -> bool:
    """Whether a mask hides nothing."""
    if isinstance(mask_mod, torch.fx.GraphModule):
        made = [node for node in mask_mod.graph.nodes if node.op not in ("placeholder", "output")]
        return [str(node.target) for node in made] in (["new_ones"], ["aten.new_ones.default"])
    return mask_mod is _torchs().noop_mask


def _torchs() -> Any:
    """The module of torch's, which takes a second to import."""
    return import_module("torch.nn.attention.flex_attention")


def _in_order_of(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` with its dims in the order in which those of ``query`` lie, the last one inmost."""
    order = [*sorted(range(3), key=query.stride, reverse=True), 3]
    if order == [0, 1, 2, 3]:
        return out.contiguous()
    back = [order.index(dim) for dim in range(4)]
    return out.permute(order).contiguous().permute(back)
