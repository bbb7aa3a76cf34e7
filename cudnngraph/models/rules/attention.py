"""Rules for attention, as an op or written out as matmuls and a softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from ...device.rules import rules, sm_count
from ...errors import GraphError
from ...graph.core import scalar
from ...graph.value import Value
from ...ir.spec import (
    aligned,
    odd_rows,
)
from ...ops.base import LOW_PRECISION
from ...rewrite.attention import has_few_scores, is_in_rows, transposed
from ..bands import Band, band_of
from ..patterns import LEAST, AttentionMatch, Term, match_attention, unrepeated_heads
from .base import Arguments, Rule, Skip, reads

if TYPE_CHECKING:
    from ..convert import Importer


def written(c: Importer) -> Value | None:
    """Fuse attention of 16-bit data that the model writes out and that ends in this product.

    None for any other product. cuDNN's attention keeps the scores to itself.
    """
    found = match_attention(c.node)
    if found is None:
        return None
    mark = c.g.mark()
    try:
        made = _attention(c, found)
    except (Skip, GraphError):
        made = None
    if made is None or len(c.g.problems) > mark[1]:
        c.g.undo(mark)
        return None
    return made


MAX_CONSTANT = 1 << 26  # elements of a constant that is made here


def _attention(c: Importer, found: AttentionMatch) -> Value | None:
    shape, rank = found.shape, len(found.shape)
    batch = shape[:-2]
    if rank < 3:
        return None
    qkv = [c.value(c.env[node]) for node in (found.query, found.key, found.value)]
    if any(math.prod(x.shape[:-2]) != math.prod(batch) for x in qkv):
        return None
    if any(x.shape[:-2] != batch and len(x.shape) != 3 for x in qkv):
        return None
    q, k, v = (x if x.shape[:-2] == batch else c.g.reshape(x, (*batch, *x.shape[-2:])) for x in qkv)
    if q.dtype not in LOW_PRECISION or any(x.dtype != q.dtype for x in (k, v)):
        return None
    if c.on_gpu and _is_best_written(q, k, v, found.key_transposed):
        return None

    def heads(x: Any) -> Any:
        """With a dim for the heads, one, where there is none, and one for all that is before."""
        shape = x.shape
        if rank == 4 or len(shape) < min(rank, 4):
            return x
        before = (shape[0], 1) if rank == 3 else (math.prod(shape[:-3]), shape[-3])
        shape = (*before, *shape[-2:])
        return x.reshape(shape) if isinstance(x, torch.Tensor) else c.g.reshape(x, shape)

    factors, scale = [], found.scale
    for node in found.head_scales:
        factor = c.env[node]
        if not isinstance(factor, torch.Tensor) or factor.dtype != q.dtype or factor.is_meta:
            return None
        most = float(factor.abs().max()) if factor.numel() else 0.0
        if not math.isfinite(most):
            return None
        power = math.ldexp(1.0, math.frexp(most)[1])  # so queries do not grow beyond 16 bits
        factors.append(factor / power)
        scale *= power
    terms = [(term, _framed(c, term, shape)) for term in found.terms]
    if rank > 4 and any(math.prod(each.shape[:-3]) != 1 for _, each in terms):
        return None  # a mask of some of what is before the heads is none of all
    masks: list[Any] = [heads(each) for term, each in terms if term.hidden is None]
    for node, (images, windows) in found.window_masks:
        mask = c.env[node]
        if not isinstance(mask, torch.Tensor):
            return None
        mask = mask.reshape((1,) * (5 - mask.dim()) + mask.shape)
        if images * windows * math.prod(mask.shape[2:]) > MAX_CONSTANT:
            return None
        masks.append(mask.expand(images, windows, -1, -1, -1).flatten(0, 1))
    if not all(each.dtype.is_floating_point for each in masks):
        return None
    hiding = [(term, each) for term, each in terms if term.hidden is not None]
    unknown = [(term, each) for term, each in hiding if not isinstance(each, torch.Tensor)]
    known = [
        (~each if term.hides else each, term)
        for term, each in hiding
        if (term, each) not in unknown
    ]
    left = reduce(torch.logical_and, (keeps for keeps, _ in known)) if known else None
    if left is not None and bool((~left.expand(shape).any(-1)).any()):
        return None  # where all is hidden the number makes it the mean
    causal = False
    beside = bool(masks or unknown)
    for keeps, term in known:
        lower = torch.ones(shape[-2:], dtype=torch.bool, device=keeps.device).tril()
        certain = not beside or term.hidden == -math.inf
        if certain and shape[-2] == shape[-1] and bool((keeps == lower).all()):
            causal = True
        elif masks or len(known) > 1 or beside:
            hidden = _least(term, q.dtype) if beside else -math.inf
            if hidden is None:
                return None
            zero = torch.zeros((), dtype=q.dtype, device=keeps.device)
            masks.append(torch.where(heads(keeps), zero, hidden))
        else:
            masks.append(heads(keeps))
    total = _sum(c, masks)
    if len(unknown) == 1 and total is None and not causal and unknown[0][0].hidden == -math.inf:
        term, mask = unknown[0]
        total = heads(c.g.logical_not(mask) if term.hides else mask)
    elif unknown:
        total = _hidden(c, total, [(term, heads(each)) for term, each in unknown], q.dtype)
        if total is None:
            return None
    if found.key_transposed:
        k = c.g.transpose(k, rank - 2, rank - 1)
    for factor in factors:
        form = (1,) * (rank - factor.dim()) + tuple(factor.shape)
        whole = factor.reshape(form).expand(*form[:-1], q.shape[-1])  # so a plan can have it
        q = c.g.mul(q, c.constant(whole.contiguous()))
    options: dict[str, Any] = {"scale": scale}
    if found.softcap is not None:
        options["softcap"] = found.softcap
    if found.sink is not None:
        options["sink"] = _sink(c, found.sink, shape)
    y = _attend(c, (heads(q), heads(k), heads(v)), total, causal=causal, **options)
    wanted = tuple(c.node.meta["val"].shape)
    return y if y.shape == wanted else c.g.reshape(y, wanted)


def _is_best_written(q: Value, k: Value, v: Value, key_transposed: bool) -> bool:
    """Whether attention is better left as the matmuls and the softmax that the model has.

    cuDNN has no engine that reads its operands as they lie, and it has few scores: attention over
    channels has. ``key_transposed``: k is (..., D, S).
    """
    if q.spec is None or k.spec is None or v.spec is None:
        return False
    forms = q.spec, transposed(k.spec) if key_transposed else k.spec, v.spec
    return not all(map(is_in_rows, forms)) and has_few_scores(*forms)


def _framed(c: Importer, term: Term, shape: Sequence[int]) -> Any:
    """What is added to scores of another shape, or hides some, in a shape that fits their own."""
    x, frame, rank = c.env[term.node], term.frame, len(shape)
    if tuple(frame) == tuple(shape):
        return x
    x = x if isinstance(x, torch.Tensor) else c.value(x)
    whole = (*(1,) * (len(frame) - len(x.shape)), *x.shape)
    if tuple(frame[-2:]) == tuple(shape[-2:]):  # other dims in front of rows and keys
        before = whole[:-2]
        if math.prod(before) not in (1, math.prod(frame[:-2])):
            raise Skip
        rows = (1,) * (rank - 2) if math.prod(before) == 1 else shape[:-2]
        form = (*rows, *whole[-2:])
        return x.reshape(form) if isinstance(x, torch.Tensor) else c.g.reshape(x, form)
    if isinstance(x, torch.Tensor):
        if math.prod(frame) > MAX_CONSTANT:
            raise Skip
        return x.expand(frame).reshape(shape)
    return c.g.reshape(c.g.expand(x, tuple(frame)), tuple(shape))


def _sum(c: Importer, masks: Sequence[Any]) -> Any:
    """The sum of what is added to scores, that of constants computed once; None for nothing."""
    fixed = [each for each in masks if isinstance(each, torch.Tensor)]
    if len(fixed) > 1:
        terms: tuple[torch.Tensor, ...]
        terms = torch.broadcast_tensors(*fixed)  # type: ignore[no-untyped-call]
        if terms[0].numel() <= MAX_CONSTANT:
            dtype = reduce(torch.promote_types, (each.dtype for each in fixed))
            whole = reduce(torch.add, (each.float() for each in terms)).to(dtype)
            masks = [whole, *(each for each in masks if not isinstance(each, torch.Tensor))]
    total: Any = masks[0] if masks else None
    for each in masks[1:]:
        total = c.g.add(c.value(total), c.value(each))
    return total


def _least(term: Term, dtype: torch.dtype) -> float | None:
    """The score that hides a key in ``dtype``; None if others would matter beside it."""
    least = torch.finfo(dtype).min
    if term.hidden == -math.inf or (term.hidden is not None and term.hidden >= least):
        return term.hidden
    return least if least < LEAST else None


def _hidden(
    c: Importer, total: Any, unknown: Sequence[tuple[Term, Value]], dtype: torch.dtype
) -> Value | None:
    """What is added to scores, with the scores of what masks of the caller's hide in their places:
    where all is hidden the mean is taken."""
    if total is None:
        total = torch.zeros((), dtype=dtype, device=c.device)
    elif total.dtype == torch.bool:
        return None
    made = c.value(total)
    for term, mask in unknown:
        number = _least(term, made.dtype)
        if number is None or (number != -math.inf and number > LEAST):
            return None
        made = c.g.where(mask, number, made) if term.hides else c.g.where(mask, made, number)
    return made


def _sink(c: Importer, node: Any, shape: Sequence[int]) -> Value:
    """The score of each head besides those of its keys: a constant."""
    sink = c.env[node]
    if not isinstance(sink, torch.Tensor) or sink.is_meta or len(shape) != 4:
        raise Skip
    whole = sink.expand(*shape[:-1], 1)
    if not bool((whole == whole[:1, :, :1]).all()):
        raise Skip
    return c.constant(whole[0, :, 0, 0].float().contiguous(), "sink")


def _attend(
    c: Importer, qkv: Sequence[Value], mask: Any, *, causal: bool, scale: float | None, **more: Any
) -> Value:
    """Attention. Of the short sequences of one example that lie behind one another (the windows of
    a Swin transformer) several are one, whose tokens do not attend to each other's: a block of
    cuDNN's kernel takes as long for 98 rows as for 49."""
    q, k, v = qkv
    mask = _narrowed(mask) if isinstance(mask, torch.Tensor) else mask
    joined = 1 if causal or more else _joined(c, qkv, mask)
    if joined == 1:
        given, where = _masked(c, mask, q.dtype, causal)
        return c.g.sdpa(q, k, v, given, scale=scale, **where, **more)  # type: ignore[no-any-return]
    batch, _, length, _ = q.shape
    whole = _mask(c, mask, q.dtype, joined, length)

    def together(x: Value) -> Value:
        _, heads, _, width = x.shape
        apart = c.g.reshape(x, (batch // joined, joined, heads, length, width))
        beside = c.g.permute(apart, (0, 2, 1, 3, 4))
        return c.g.reshape(beside, (batch // joined, heads, joined * length, width))

    o = c.g.sdpa(together(q), together(k), together(v), whole, scale=scale)
    _, heads, _, width = o.shape
    apart = c.g.reshape(o, (batch // joined, heads, joined, length, width))
    return c.g.reshape(c.g.permute(apart, (0, 2, 1, 3, 4)), (batch, heads, length, width))


def _masked(
    c: Importer, mask: Any, dtype: torch.dtype, causal: bool
) -> tuple[Value | None, dict[str, Any]]:
    """A mask as attention takes it, and the keywords that take its place where it is a band."""
    if isinstance(mask, torch.Tensor) and not causal:
        mask = _narrowed(mask)
        band = _band(c, mask)
        if band is not None:
            return None, {"window": band}
    return None if mask is None else _mask(c, mask, dtype), {"is_causal": causal}


def _band(c: Importer, mask: torch.Tensor) -> Band | None:
    """The band of keys that a mask lets attend, which is looked for once for all layers."""
    form = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype)
    if form not in c.bands:
        c.bands[form] = mask, band_of(mask)
    return c.bands[form][1]


def _narrowed(mask: torch.Tensor) -> torch.Tensor:
    """A mask without what only repeats it for images or heads."""
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:
            mask = mask[(slice(None),) * dim + (slice(0, 1),)]
    return mask


def _joined(c: Importer, qkv: Sequence[Value], mask: torch.Tensor | Value | None) -> int:
    """Return how many sequences of a batch to take as one.

    What is not finite reaches the sequences beside it, so they are to be of one example: inputs
    that have a first dim in common count their examples by it, one behind another.
    """
    q, k, v = qkv
    if not c.on_gpu or not isinstance(mask, (torch.Tensor, NoneType)):
        return 1
    if q.dtype not in LOW_PRECISION or any(len(x.shape) != 4 for x in qkv):
        return 1
    batch, heads, length, width = q.shape
    if any(x.shape[0] != batch or x.shape[2] != length for x in (k, v)) or not length:
        return 1
    if any(x.spec is None or x.spec.stride[0] != length * x.spec.stride[2] for x in qkv):
        return 1
    examples = max(c.examples)
    if c.examples - {1, examples} or batch % examples:
        return 1
    images, planes = (1, 1, 1, 1, *(() if mask is None else mask.shape))[-4:-2]
    limits = rules()
    enough = limits.attention_blocks_per_sm * sm_count()
    joined = 1
    for count in range(2, limits.attention_block_rows // length + 1):
        blocks, rows = batch // count * heads, count * length
        numbers = -(-images // count) * planes * rows * rows
        if batch // examples % count or blocks < enough or numbers > MAX_CONSTANT:
            continue
        if numbers <= limits.attention_mask_per_query * batch * heads * length * width:
            joined = count
    return joined


def _mask(c: Importer, mask: Any, dtype: torch.dtype, joined: int = 1, length: int = 0) -> Value:
    """A mask of attention. A constant one, of 16-bit data on a GPU, is what is added, in aligned
    rows, and of ``joined`` sequences of ``length`` taken as one, what each has, if anything."""
    if joined == 1:
        known = c.on_gpu and isinstance(mask, torch.Tensor) and dtype in LOW_PRECISION
        if not known or not 0 < mask.numel() <= MAX_CONSTANT:
            return c.value(mask)
        if mask.dtype != torch.bool and not odd_rows(mask.shape, mask.stride()):
            return c.value(mask)
    form = None
    if mask is not None:
        form = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype)
    made_of = (form, dtype, joined, length)
    if made_of not in c.masks:
        added = mask
        if mask is None:
            added = torch.zeros((), dtype=dtype, device=c.device)
        elif mask.dtype == torch.bool:
            added = mask.new_zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
        if joined > 1:
            added = _block_diagonal(added, joined, length)
        if added.dim():
            memory = added.new_zeros((*added.shape[:-1], aligned(added.shape[-1])))
            added = memory[..., : added.shape[-1]].copy_(added)
        c.masks[made_of] = mask, added
    return c.constant(c.masks[made_of][1])


def _block_diagonal(mask: torch.Tensor, joined: int, length: int) -> torch.Tensor:
    """The mask of sequences that are taken as one, out of what each has: what is added."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    images = max(1, mask.shape[0] // joined)
    shape = (images, mask.shape[1], joined * length, joined * length)
    whole = torch.full(shape, -math.inf, dtype=mask.dtype, device=mask.device)
    for place in range(joined):
        part = slice(place * length, (place + 1) * length)
        whole[:, :, part, part] = mask[place::joined] if mask.shape[0] > 1 else mask
    return whole


def _sdpa(c: Importer, a: Arguments) -> Value:
    q, k, v = (c.value(a[name]) for name in ("query", "key", "value"))
    if a["dropout_p"]:
        raise Skip
    mask, scale = a["attn_mask"], None if a["scale"] is None else float(a["scale"])
    if len(q.shape) == 4:
        k, v = _unrepeated(c, q, k, v)
        return _attend(c, (q, k, v), mask, causal=a["is_causal"], scale=scale)
    batch = q.shape[:-2]
    if not batch or any(x.shape[:-2] != batch for x in (k, v)):
        raise Skip
    four = (batch[0], 1) if len(batch) == 1 else (math.prod(batch[:-1]), batch[-1])
    if mask is not None:
        mask = mask if isinstance(mask, torch.Tensor) else c.value(mask)
        before = (1,) * (len(q.shape) - len(mask.shape)) + tuple(mask.shape[:-2])
        if math.prod(before) == 1:
            form: tuple[int, ...] = (1, 1)
        elif math.prod(before[:-1]) == 1 and len(batch) > 1:
            form = (1, before[-1])
        elif before == batch:
            form = four
        else:
            raise Skip
        form = (*form, *mask.shape[-2:])
        mask = mask.reshape(form) if isinstance(mask, torch.Tensor) else c.g.reshape(mask, form)
    q, k, v = (c.g.reshape(x, (*four, *x.shape[-2:])) for x in (q, k, v))
    y = _attend(c, (q, k, v), mask, causal=a["is_causal"], scale=scale)
    return c.g.reshape(y, tuple(c.node.meta["val"].shape))


def _unrepeated(c: Importer, q: Value, k: Value, v: Value) -> tuple[Value, Value]:
    """Keys and values without what only repeats each head for several of the queries'."""
    found = [unrepeated_heads(node) for node in c.node.args[1:3]]
    if len(found) < 2 or any(each is None for each in found):
        return k, v
    one, two = (c.env[each] for each in found if each is not None)
    alike = all(isinstance(each, Value) and each.dtype == q.dtype for each in (one, two))
    if not alike or one.shape[:3] != two.shape[:3] or q.shape[1] % one.shape[1]:
        return k, v
    return one, two


def _attended(c: Importer, a: Arguments) -> tuple[Any, ...]:
    """The forms that attention is traced in behind torch.compile.

    Behind o and the lse are what torch's own kernels hand to their gradients: empty here.
    """
    q, k, v = (c.value(a[name]) for name in ("query", "key", "value"))
    if a.get("dropout_p") or not _is_fit(c, q):
        raise Skip
    given = a.get("attn_bias", a.get("attn_mask"))
    scale = None if a.get("scale") is None else float(a["scale"])
    many = c.node.meta["val"]
    rest = tuple(
        torch.zeros(each.shape, dtype=each.dtype, device=c.device)
        if isinstance(each, torch.Tensor) and reads(c.node, 2 + place)
        else None
        if isinstance(each, torch.Tensor)
        else each
        for place, each in enumerate(many[2:])
    )
    if not reads(c.node, 1):
        return (_attend(c, (q, k, v), given, causal=bool(a["is_causal"]), scale=scale), None, *rest)
    if _NAME_OF_MATH in c.node.target._schema.name:
        raise Skip  # its second result are the weights
    mask, where = _masked(c, given, q.dtype, bool(a["is_causal"]))
    o, lse = c.g.sdpa(q, k, v, mask, scale=scale, return_lse=True, **where)
    if mask is not None and c.node.target._schema.name.endswith("_for_cpu"):
        # torch's of a row that may attend to no key is 0, and its gradient is 0 all the same.
        lse = c.g.where(c.g.lt(lse, torch.finfo(torch.float32).min), 0.0, lse)
    return (o, _padded_lse(c, lse, many[1].shape), *rest)


_OF_GPUS = ("flash_attention", "efficient_attention", "cudnn_attention")


def _is_fit(c: Importer, q: Value) -> bool:
    """Whether attention is for a plan: cuDNN has none for float32, whose kernels of torch for GPUs
    keep the scores to themselves too."""
    name = c.node.target._schema.name.removesuffix("_backward")
    return not name.endswith(_OF_GPUS) or q.dtype in LOW_PRECISION


_NAME_OF_MATH = "_scaled_dot_product_attention_math"


def _padded_lse(c: Importer, lse: Value, shape: Sequence[int]) -> Value:
    """The lse in torch's form: with a dim behind it, or with more rows."""
    shape = tuple(shape)
    if math.prod(shape) == math.prod(lse.shape):
        return lse if shape == lse.shape else c.g.reshape(lse, shape)
    rows = shape[2] - lse.shape[2] if len(shape) == 3 else 0
    if rows <= 0 or shape[:2] != lse.shape[:2]:
        raise Skip
    zeros = c.g.expand(scalar(c.g, 0.0), (*shape[:2], rows), ())
    return c.g.concat([lse, zeros], 2)


def _attended_backward(c: Importer, a: Arguments) -> tuple[Any, ...]:
    do = c.value(a["grad_out"] if "grad_out" in a else a["grad_out_"])
    q, k, v, o, lse = (c.value(a[name]) for name in ("query", "key", "value", "out", "logsumexp"))
    if a["dropout_p"] or not _is_fit(c, q):
        raise Skip
    rows = q.shape[:3]
    if lse.shape[2] != rows[2]:
        lse = c.g.slice(lse, 2, 0, rows[2])
    lse = lse if lse.shape == rows else c.g.reshape(lse, rows)
    given = a.get("attn_bias", a.get("attn_mask"))
    mask, where = _masked(c, given, q.dtype, bool(a["is_causal"]))
    scale = None if a.get("scale") is None else float(a["scale"])
    wanted = a.get("grad_input_mask", [True, True, True, False])
    made = c.g.sdpa_backward(
        *(do, q, k, v, o, lse, mask), scale=scale, mask_grad=bool(wanted[3]), **where
    )
    found = [each if want else None for each, want in zip(made, wanted, strict=False)]
    return tuple([*found, None][: len(c.node.meta["val"])])


_ATTENTION = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention"),
    _NAME_OF_MATH,
)


RULES: dict[str, Rule] = {
    "scaled_dot_product_attention": _sdpa,
    **{f"{name}_backward": _attended_backward for name in _ATTENTION[:-1]},
    **dict.fromkeys(_ATTENTION, _attended),
}
