"""The reference executor: what every op means, in torch.

It runs graphs on CPU tensors, and stands in for single ops on a GPU where cuDNN has no plan. Every
op is computed in the graph's compute dtype from operands converted to it; the result is then
rounded to the dtype of its tensor. With ``dtype=torch.float64`` nothing is rounded anywhere but
where rounding is what an op means (``quantize``): the yardstick for accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..ir.spec import GraphSpec, Node, TensorSpec, overlaps_itself, same_layout
from ..ops import aten, pooling

# MKL's vector math looks up the CPU in its first call and keeps the raw answer for a moment before
# the one that it means, without a lock. If that call is a parallel one, another of its threads may
# take a kernel of low accuracy for it: exp, sqrt, tanh, erf, log, sin and cos off by 1e-4, in
# float64 by 3e-9 (pytorch#188792). A call on one element has one thread. The dtype and the device
# are given because a user may have set others, by which MKL would not be called.
torch.exp(torch.zeros(1, dtype=torch.float32, device="cpu"))

Tensors = Sequence["torch.Tensor | None"]
_Prepare = Callable[[Tensors], "list[torch.Tensor | None]"]
Rule = Callable[[Tensors, Mapping[str, Any]], "torch.Tensor | tuple[torch.Tensor | None, ...]"]

_CONV = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def _need(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


def _exactly(rule: Callable[[Tensors, Mapping[str, Any]], torch.Tensor]) -> Rule:
    """A rule of products, on int8 operands too: sums in float64, which holds them all, as int32.

    Rounded, since an algorithm that transforms its data (FFT) is a hair off the whole number.
    """

    def run(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
        if _need(inputs[0]).dtype != torch.int8:
            return rule(inputs, attrs)
        sums = rule([_need(value).double() for value in inputs], attrs)
        return sums.round().to(torch.int32)

    return run


def _framed(x: torch.Tensor, sides: Sequence[tuple[int, int]]) -> torch.Tensor:
    """x with so many zeros (before, after) each spatial dim; below 0, without so many elements.

    The zeros come first: what is cut at one end may be more than x has, and ``F.pad``, which cuts
    first, then fails.
    """
    added = [max(side, 0) for pair in reversed(sides) for side in pair]
    x = F.pad(x, added) if any(added) else x
    for dim, (before, after) in enumerate(sides, 2):
        start, stop = max(-before, 0), x.shape[dim] + min(after, 0)
        x = x.narrow(dim, start, stop - start)
    return x


def _conv(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, weight = _need(inputs[0]), _need(inputs[1])
    padding, stride, dilation = list(attrs["padding"]), list(attrs["stride"]), attrs["dilation"]
    sizes = []
    for dim, (before, after) in enumerate(padding):
        n, reach = x.shape[2 + dim], dilation[dim] * (weight.shape[2 + dim] - 1) + 1
        sizes.append((n + before + after - reach) // stride[dim] + 1)
        if sizes[dim] == 1 < stride[dim]:
            # No stride is taken; with one oneDNN's result is garbage (float32 of one channel, where
            # the last dim is such a one; of bfloat16 see pytorch#169688).
            padding[dim], stride[dim] = (before, reach - n - before), 1
    if x.numel() == 0 or weight.numel() == 0:  # torch refuses some; no tap meets an element
        return x.new_zeros((x.shape[0], weight.shape[0], *sizes))
    same = [before for before, _ in padding]
    if any(before != after for before, after in padding):
        x, same = _framed(x, padding), [0] * len(padding)
    return _CONV[len(padding) - 1](x, weight, None, stride, same, dilation, attrs["groups"])


def _conv_transpose(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, weight = _need(inputs[0]), _need(inputs[1])
    padding = attrs["padding"]
    run = _CONV_TRANSPOSE[len(padding) - 1]
    groups, dilation, stride = attrs["groups"], attrs["dilation"], attrs["stride"]
    if x.numel() == 0 or weight.numel() == 0:
        extra = attrs["output_padding"]
        many = zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, extra, strict=True)
        sizes = [(n - 1) * s - sum(pad) + d * (r - 1) + e + 1 for n, pad, d, r, s, e in many]
        return x.new_zeros((x.shape[0], weight.shape[1] * groups, *sizes))
    same = [min(pair) for pair in padding]
    y = run(x, weight, None, stride, same, attrs["output_padding"], groups, dilation)
    return _framed(
        y, [(n - before, n - after) for (before, after), n in zip(padding, same, strict=True)]
    )


def _conv_wgrad(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    dy, x = _need(inputs[0]), _need(inputs[1])
    kernel, stride, dilation = attrs["kernel"], attrs["stride"], attrs["dilation"]
    shape = (dy.shape[1], x.shape[1] // attrs["groups"], *kernel)
    if dy.numel() == 0 or x.numel() == 0:
        return x.new_zeros(shape)
    # What the kernel reaches of the padded x; rows behind that meet no tap.
    many = zip(dy.shape[2:], stride, dilation, kernel, x.shape[2:], attrs["padding"], strict=True)
    sides = [
        (before, (out - 1) * s + d * (r - 1) + 1 - n - before)
        for out, s, d, r, n, (before, _) in many
    ]
    x = _framed(x, sides)
    none = [0] * len(kernel)
    _, weight, _ = torch.ops.aten.convolution_backward(
        dy,
        x,
        x.new_zeros(()).expand(shape),
        None,
        stride,
        none,
        dilation,
        False,
        none,
        attrs["groups"],
        [False, True, False],
    )
    return _need(weight)


def _along(scale: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """A scale so that it broadcasts: one for all of x, or one for each index of ``dim``."""
    if scale.numel() == 1:
        return scale.reshape(())
    return scale.reshape([-1 if place == dim else 1 for place in range(x.dim())])


def _dequantize(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, scale = _need(inputs[0]), _need(inputs[1])
    return x.to(scale.dtype) * _along(scale, x, attrs["dim"])


def _quantize(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, scale = _need(inputs[0]), inputs[1]
    if scale is not None:
        x = x / _along(scale, x, attrs["dim"])
    return saturated(x, getattr(torch, attrs["dtype"]))


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to the nearest number of an 8-bit dtype, ties to even; its largest where x is
    beyond. In FP8 what is not finite is NaN."""
    if dtype == torch.int8:
        return x.round().clamp(-128, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return (x.clamp(-limit, limit) + x * 0.0).to(dtype)


def _channel(value: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor:
    """A per-channel operand at the rank of x."""
    vector, rank = _need(value), _need(x).dim()
    return vector.reshape(1, -1, *(1,) * (rank - 2)) if vector.dim() == 1 else vector


def _batch_norm(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = _need(inputs[0])
    mean, var = _channel(inputs[1], x), _channel(inputs[2], x)
    y = (x - mean) * torch.rsqrt(var + attrs["eps"])
    if inputs[3] is not None:
        y = y * _channel(inputs[3], x)
    if inputs[4] is not None:
        y = y + _channel(inputs[4], x)
    return y


def _batch_norm_apply(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = _need(inputs[0])
    mean, inv_std, weight, bias = (_channel(each, x) for each in inputs[1:])
    return (x - mean) * inv_std * weight + bias


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _batch_norm_train(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    x, weight, bias = _need(inputs[0]), _channel(inputs[1], inputs[0]), inputs[2]
    dims = _all_but_channels(x)
    mean, var = x.mean(dims), x.var(dims, unbiased=False)
    inv_std = torch.rsqrt(var + attrs["eps"])
    y = (x - _channel(mean, x)) * _channel(inv_std, x) * weight + _channel(bias, x)
    if inputs[3] is None or inputs[4] is None:
        return y, mean, inv_std, None, None
    momentum, count = attrs["momentum"], x.numel() // x.shape[1]
    unbiased = var * (count / (count - 1))
    following = [
        (1 - momentum) * running + momentum * now.view(running.shape)
        for running, now in ((inputs[3], mean), (inputs[4], unbiased))
    ]
    return y, mean, inv_std, *following


def _batch_norm_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dy, x, weight = _need(inputs[0]), _need(inputs[1]), _need(inputs[2])
    mean, inv_std = _channel(inputs[3], x), _channel(inputs[4], x)
    dims, count = _all_but_channels(x), x.numel() // max(x.shape[1], 1)
    normal = (x - mean) * inv_std
    dbias = dy.sum(dims)
    dweight = (dy * normal).sum(dims)
    pull = (_channel(dbias, x) + normal * _channel(dweight, x)) / count
    dx = _channel(weight, x) * inv_std * (dy - pull)
    return dx, dweight.view(weight.shape), dbias.view(weight.shape)


def _instance_norm(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    x, dims = _need(inputs[0]), list(range(2, _need(inputs[0]).dim()))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt(centred.square().mean(dims, keepdim=True) + attrs["eps"])
    y = centred * inverse
    if inputs[1] is not None:
        y = y * _channel(inputs[1], x) + _channel(inputs[2], x)
    return (y, mean, inverse) if attrs["return_stats"] else (y, None, None)


def _group_affine(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    x, weight, groups = _need(inputs[0]), inputs[1], attrs["num_groups"]
    n, c, *pixels = x.shape
    rows = x.reshape(n, groups, c // groups * math.prod(pixels))
    mean = rows.mean(-1, keepdim=True)
    inverse = torch.rsqrt((rows - mean).square().mean(-1, keepdim=True) + attrs["eps"])
    shift, factor = (each.expand(n, groups, c // groups) for each in (-mean, inverse))
    factor = factor if weight is None else factor * weight.view(groups, -1)
    column = (n, c, *(1,) * len(pixels))
    return shift.reshape(column), factor.reshape(column)


def _instance_norm_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    dy, x, mean, inverse = (_need(value) for value in inputs[:4])
    weight, dims = inputs[4], list(range(2, x.dim()))
    normal = (x - mean) * inverse
    scaled = dy if weight is None else dy * _channel(weight, x)
    pull = scaled.mean(dims, keepdim=True)
    pull = pull + normal * (scaled * normal).mean(dims, keepdim=True)
    dx = inverse * (scaled - pull)
    if weight is None:
        return dx, None, None
    over = _all_but_channels(x)
    return dx, (dy * normal).sum(over).view(weight.shape), dy.sum(over).view(weight.shape)


def _trailing(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    return tuple(range(x.dim() - weight.dim(), x.dim()))


def _layer_norm(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    x, weight = _need(inputs[0]), _need(inputs[1])
    dims = _trailing(x, weight)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt(centred.square().mean(dims, keepdim=True) + attrs["eps"])
    y = centred * inverse * weight
    y = y if inputs[2] is None else y + inputs[2]
    return (y, mean, inverse) if attrs["return_stats"] else (y, None, None)


def _rms_norm(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    x, weight = _need(inputs[0]), _need(inputs[1])
    inverse = torch.rsqrt(x.square().mean(_trailing(x, weight), keepdim=True) + attrs["eps"])
    y = x * inverse * weight
    y = y if inputs[2] is None else y + inputs[2]
    return (y, inverse) if attrs["return_stats"] else (y, None)


def _normalize(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = _need(inputs[0])
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(attrs["eps"])


def _layer_norm_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    dy, x, weight, mean, inverse = (_need(value) for value in inputs)
    dims, lead = _trailing(x, weight), tuple(range(x.dim() - weight.dim()))
    normal, scaled = (x - mean) * inverse, dy * weight
    pull = scaled.mean(dims, keepdim=True)
    pull = pull + normal * (scaled * normal).mean(dims, keepdim=True)
    dweight, dbias = _sum(dy * normal, lead), _sum(dy, lead)
    return inverse * (scaled - pull), dweight, dbias if attrs["bias_grad"] else None


def _rms_norm_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    dy, x, weight, inverse = (_need(value) for value in inputs)
    dims, lead = _trailing(x, weight), tuple(range(x.dim() - weight.dim()))
    normal, scaled = x * inverse, dy * weight
    pull = normal * (scaled * normal).mean(dims, keepdim=True)
    dweight, dbias = _sum(dy * normal, lead), _sum(dy, lead)
    return inverse * (scaled - pull), dweight, dbias if attrs["bias_grad"] else None


def _sum(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return x.sum(tuple(dims)) if dims else x  # torch's sum over no dim is one over all


def band_offset(
    rows: torch.Tensor | int, keys: torch.Tensor | int, alignment: str
) -> torch.Tensor | int:
    """Column of the diagonal in row 0: 0 from the top left, keys - rows to the bottom right."""
    return 0 if alignment == "top_left" else keys - rows


def _kept(
    q: torch.Tensor, k: torch.Tensor, lengths: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which (row, key) pairs may meet, which rows are valid and which keys, and how far right of
    the row's place on the diagonal a key stands; all of rank 4.

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


_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(counter: Tensors, key: Tensors) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words of 32 bits, each in an int64.

    ``counter`` are four such words and ``key`` two, of shapes that broadcast.
    """
    words, (low, high) = [_need(word) for word in counter], (_need(word) for word in key)
    for number in range(_ROUNDS):
        if number:
            low, high = (low + _WEYL[0]) & _LOW, (high + _WEYL[1]) & _LOW
        # A product of two words wraps around in int64; its bits are right.
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((second >> 32) & _LOW) ^ words[1] ^ low,
            second & _LOW,
            ((first >> 32) & _LOW) ^ words[3] ^ high,
            first & _LOW,
        ]
    return tuple(words)


def dropout_keep(
    shape: Sequence[int], p: float, seed: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Which elements of ``shape`` a dropout of probability ``p`` keeps; bool.

    Element i in row-major order is kept where the first word of Philox, of counter (i, offset) and
    key seed, is at least p * 2^32. cuDNN has another order of its own.
    """
    place = torch.arange(math.prod(shape), device=seed.device)
    seed, offset = seed.reshape(()), offset.reshape(())
    counter = (place & _LOW, place >> 32, offset & _LOW, (offset >> 32) & _LOW)
    first, *_ = philox(counter, (seed & _LOW, (seed >> 32) & _LOW))
    return (first >= round(p * 2.0**32)).view(tuple(shape))


def _dropout(
    weights: torch.Tensor, dropout: Tensors, attrs: Mapping[str, Any]
) -> torch.Tensor | None:
    """What dropout multiplies the attention weights by: 0, or 1 / (1 - p); None without one.

    ``dropout`` are seed, offset and mask.
    """
    p = attrs["dropout_p"]
    if p == 0.0:
        return None
    seed, offset, mask = dropout
    if mask is None:
        mask = dropout_keep(weights.shape, p, _need(seed), _need(offset))
    factor: torch.Tensor = mask.to(weights.dtype) / (1.0 - p)
    return factor


def _sdpa(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = (_need(value) for value in inputs[:3])
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
    factor = _dropout(weights, dropout, attrs)
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
    """Which rows are no padding; of rank 4."""
    row = torch.arange(q.shape[2], device=q.device).view(1, 1, -1, 1)
    return row < length_q.view(-1, 1, 1, 1)


def _sdpa_fp8(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """Attention of FP8 data: with P = exp(scores - their largest in the row), l its row sums,

    scores = (q descale_q) (k descale_k)^T scale, o = fp8(scale_o fp8(scale_s P) v descale_s
    descale_v / l). amax_s is the largest of P / l, amax_o that of |o| before scale_o.
    """
    q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o = (
        _need(value) if place < 3 else _need(value).reshape(())
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


def _sdpa_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """With P the attention weights, exp(scores - lse), Z what dropout multiplies them by (or 1),
    and D the row sums of do * o:

    dv = (Z P)^T do, dS = P * (Z * (do v^T) - D), dmask = dS, and with the derivative of the soft
    cap in dS: dq = scale * dS k, dk = scale * dS^T q.
    """
    do, q, k, v, o, lse = (_need(value) for value in inputs[:6])
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
    factor = _dropout(weights, dropout, attrs)
    dropped = weights if factor is None else weights * factor
    dscores = weights * ((dweights if factor is None else dweights * factor) - pull)
    dmask = dscores.sum_to_size(_need(mask).shape) if attrs["mask_grad"] else None
    if derivative is not None:
        dscores = dscores * derivative
    dq = torch.matmul(dscores, k) * attrs["scale"]
    dk = torch.matmul(dscores.transpose(-1, -2), q) * attrs["scale"]
    dv = torch.matmul(dropped.transpose(-1, -2), do)
    dk, dv = (grad.unflatten(1, (groups, heads // groups)).sum(dim=2) for grad in (dk, dv))
    return dq, dk, dv, dmask


_PLAIN: Mapping[str, Any] = {"dropout_p": 0.0, "alibi": False, "softcap": None, "mask_grad": False}


def _sdpa_paged(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k_cache, v_cache, table, length_kv = (_need(value) for value in inputs[:5])
    table_v = table if inputs[6] is None else inputs[6]

    def gathered(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """(B, H, keys, D); a table may hold anything behind the pages of a sequence."""
        chosen = cache[pages.long().clamp(0, max(len(cache) - 1, 0))]
        return chosen.transpose(1, 2).flatten(2, 3)

    k, v = gathered(k_cache, table), gathered(v_cache, table_v)
    operands = (q, k, v, None, inputs[5], length_kv, *(None,) * 5)
    return _sdpa(operands, {**_PLAIN, **attrs})


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
    """How q and k are packed; ``where`` are cu_seqlens_q, cu_seqlens_kv and ragged."""
    cu_seqlens = list(where[:2])
    if where[2] is not None:
        cu_seqlens = [F.pad(lengths[:-1].cumsum(0), (1, 0)) for lengths in where[2][:2]]
    rows, keys = (_need(each) for each in cu_seqlens)
    return (
        _Packed(rows, len(q), attrs["max_seqlen_q"]),
        _Packed(keys, len(k), attrs["max_seqlen_kv"]),
    )


def _sdpa_varlen(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = (_need(value) for value in inputs[:3])
    rows, keys = _sequences(q, k, inputs[3:], attrs)
    data = (rows.padded(q), keys.padded(k), keys.padded(v))
    o, lse = _sdpa((*data, None, rows.lengths, keys.lengths, *(None,) * 5), {**_PLAIN, **attrs})
    return rows.packed(o), None if lse is None else rows.packed(lse.unsqueeze(-1)).squeeze(-1)


def _sdpa_varlen_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    do, q, k, v, o, lse = (_need(value) for value in inputs[:6])
    rows, keys = _sequences(q, k, inputs[6:], attrs)
    data = [
        *(rows.padded(do), rows.padded(q), keys.padded(k), keys.padded(v), rows.padded(o)),
        rows.padded(lse.unsqueeze(-1)).squeeze(-1),
    ]
    operands = (*data, None, rows.lengths, keys.lengths, *(None,) * 4)
    dq, dk, dv, _ = _sdpa_backward(operands, {**_PLAIN, **attrs})
    return rows.packed(_need(dq)), keys.packed(_need(dk)), keys.packed(_need(dv))


def ragged_into(inputs: Tensors, attrs: Mapping[str, Any], out: torch.Tensor) -> torch.Tensor:
    """The lengths of the sequences of q and of k, then where each starts, in elements, for every
    width of a token: (rows, B + 1) int32."""
    rows, keys = _need(inputs[0]), _need(inputs[1])
    for row, cu_seqlens in enumerate((rows, keys)):
        torch.sub(cu_seqlens[1:], cu_seqlens[:-1], out=out[row, :-1])
    out[:2, -1].zero_()
    wide = [(rows, width) for width in attrs["widths_q"]]
    wide += [(keys, width) for width in attrs["widths_kv"]]
    for row, (cu_seqlens, width) in enumerate(wide, 2):
        torch.mul(cu_seqlens, width, out=out[row])
    return out


def _ragged_offsets(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    rows = 2 + len(attrs["widths_q"]) + len(attrs["widths_kv"])
    cu_seqlens = _need(inputs[0])
    return ragged_into(inputs, attrs, cu_seqlens.new_empty(rows, len(cu_seqlens)))


def _relu_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    dy, y = _need(inputs[0]), _need(inputs[1])
    slope = attrs["negative_slope"]
    return torch.where(y > 0, dy, slope * dy if slope else 0.0)


def _gelu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    normal = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return dy * (0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))) + x * normal)


def _gelu_tanh_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    slope = math.sqrt(2.0 / math.pi)
    tanh = torch.tanh(slope * (x + 0.044715 * x * x * x))
    inner = slope * (1.0 + 3.0 * 0.044715 * x * x)
    return dy * 0.5 * (1.0 + tanh + x * (1.0 - tanh * tanh) * inner)


def _silu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x)
    return dy * gate * (1.0 + x * (1.0 - gate))


def _softmax_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    dy, y = _need(inputs[0]), _need(inputs[1])
    return y * (dy - (dy * y).sum(attrs["dim"], keepdim=True))


def _log_softmax_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    dy, y = _need(inputs[0]), _need(inputs[1])
    return dy - torch.exp(y) * dy.sum(attrs["dim"], keepdim=True)


def _counted(target: torch.Tensor, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of a loss count, and each row's class, 0 where it does not."""
    counts = target != attrs["ignore_index"]
    return counts, torch.where(counts, target, torch.zeros_like(target)).unsqueeze(1)


def _nll_loss(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, target = _need(inputs[0]), _need(inputs[1])
    counts, place = _counted(target, attrs)
    each = -x.gather(1, place).squeeze(1)
    each = each.to(torch.promote_types(each.dtype, torch.float32))  # 16 bits hold no sum
    each = torch.where(counts, each, torch.zeros_like(each))
    if attrs["reduction"] == "none":
        return each
    return each.sum() / counts.sum() if attrs["reduction"] == "mean" else each.sum()


def _nll_loss_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """-dy at each row's class; over the number of rows that count for a mean."""
    dy, target = _need(inputs[0]), _need(inputs[1])
    counts, place = _counted(target, attrs)
    each = -dy / counts.sum() if attrs["reduction"] == "mean" else -dy
    each = torch.where(counts, each, torch.zeros_like(each))
    return dy.new_zeros(attrs["shape"]).scatter_(1, place, each.unsqueeze(1))


_REDUCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "amax": lambda x, dims, keepdim: torch.amax(x.abs(), dims, keepdim=keepdim),
}


def _reduction(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, dims, keep = _need(inputs[0]), attrs["dims"], attrs["keepdim"]
    if not dims:  # a number
        return x.abs() if attrs["mode"] == "amax" else x
    result = _REDUCTIONS[attrs["mode"]](x, dims, keepdim=True)
    kept = dims if keep is True else keep or ()
    return result.squeeze([dim for dim in dims if dim not in kept])


def _expand(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = _need(inputs[0])
    sizes = dict(zip(attrs["dims"], x.shape, strict=True))
    shape = attrs["shape"]
    return x.reshape([sizes.get(dim, 1) for dim in range(len(shape))]).expand(shape)


def _slice(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    taken = slice(attrs["start"], attrs["stop"], attrs["step"])
    return _need(inputs[0])[(slice(None),) * attrs["dim"] + (taken,)]


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    return lambda inputs, attrs: function(_need(inputs[0]))


def _binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Rule:
    return lambda inputs, attrs: function(_need(inputs[0]), _need(inputs[1]))


RULES: Mapping[str, Rule] = {
    "conv": _exactly(_conv),
    "conv_transpose": _exactly(_conv_transpose),
    "conv_wgrad": _conv_wgrad,
    "matmul": _exactly(lambda inputs, attrs: torch.matmul(_need(inputs[0]), _need(inputs[1]))),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_affine": _group_affine,
    "normalize": _normalize,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm_backward": _rms_norm_backward,
    "sdpa": _sdpa,
    "sdpa_fp8": _sdpa_fp8,
    "sdpa_backward": _sdpa_backward,
    "sdpa_paged": _sdpa_paged,
    "sdpa_varlen": _sdpa_varlen,
    "sdpa_varlen_backward": _sdpa_varlen_backward,
    "ragged_offsets": _ragged_offsets,
    "batch_norm_train": _batch_norm_train,
    "batch_norm_backward": _batch_norm_backward,
    "instance_norm": _instance_norm,
    "instance_norm_backward": _instance_norm_backward,
    "reduction": _reduction,
    "expand": _expand,
    "batch_norm": _batch_norm,
    "batch_norm_apply": _batch_norm_apply,
    "dequantize": _dequantize,
    "quantize": _quantize,
    "bias": lambda inputs, attrs: _need(inputs[0]) + _channel(inputs[1], _need(inputs[0])),
    "scale": lambda inputs, attrs: _need(inputs[0]) * _channel(inputs[1], _need(inputs[0])),
    "relu": _unary(F.relu),
    "leaky_relu": lambda inputs, attrs: F.leaky_relu(_need(inputs[0]), attrs["negative_slope"]),
    "elu": lambda inputs, attrs: F.elu(_need(inputs[0]), attrs["alpha"]),
    "gelu": _unary(F.gelu),
    "gelu_tanh": _unary(lambda x: F.gelu(x, approximate="tanh")),
    "silu": _unary(F.silu),
    "sigmoid": _unary(torch.sigmoid),
    "tanh": _unary(torch.tanh),
    "softplus": lambda inputs, attrs: F.softplus(_need(inputs[0]), attrs["beta"]),
    "clamp": lambda inputs, attrs: torch.clamp(_need(inputs[0]), attrs["min"], attrs["max"]),
    "relu_backward": _relu_backward,
    "gelu_backward": _binary(_gelu_backward),
    "gelu_tanh_backward": _binary(_gelu_tanh_backward),
    "silu_backward": _binary(_silu_backward),
    "identity": _unary(lambda x: x),
    "to_float": _unary(lambda x: x.to(torch.float32)),
    "neg": _unary(torch.neg),
    "abs": _unary(torch.abs),
    "exp": _unary(torch.exp),
    "log": _unary(torch.log),
    "sqrt": _unary(torch.sqrt),
    "rsqrt": _unary(torch.rsqrt),
    "reciprocal": _unary(torch.reciprocal),
    "erf": _unary(torch.erf),
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "div": _binary(torch.div),
    "pow": _binary(torch.pow),
    "minimum": _binary(torch.minimum),
    "maximum": _binary(torch.maximum),
    "eq": _binary(torch.eq),
    "ne": _binary(torch.ne),
    "lt": _binary(torch.lt),
    "le": _binary(torch.le),
    "gt": _binary(torch.gt),
    "ge": _binary(torch.ge),
    "logical_and": _binary(torch.logical_and),
    "logical_or": _binary(torch.logical_or),
    "logical_not": _unary(torch.logical_not),
    "where": lambda inputs, attrs: torch.where(
        _need(inputs[0]), _need(inputs[1]), _need(inputs[2])
    ),
    "reshape": lambda inputs, attrs: _need(inputs[0]).reshape(attrs["shape"]),
    "transpose": lambda inputs, attrs: _need(inputs[0]).transpose(attrs["dim0"], attrs["dim1"]),
    "permute": lambda inputs, attrs: _need(inputs[0]).permute(attrs["dims"]),
    "slice": _slice,
    "concat": lambda inputs, attrs: torch.cat([_need(value) for value in inputs], attrs["dim"]),
    "softmax": lambda inputs, attrs: torch.softmax(_need(inputs[0]), attrs["dim"]),
    "softmax_backward": _softmax_backward,
    "log_softmax": lambda inputs, attrs: torch.log_softmax(_need(inputs[0]), attrs["dim"]),
    "log_softmax_backward": _log_softmax_backward,
    "nll_loss": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "aten": lambda inputs, attrs: aten.run(attrs, inputs),
    **pooling.RULES,
    "constant": lambda inputs, attrs: torch.tensor(
        attrs["value"], dtype=torch.float64, device="cpu"
    ),
}


def _widened(values: Tensors, dtype: torch.dtype) -> list[torch.Tensor | None]:
    return [
        value.to(dtype)
        if value is not None and value.dtype is not dtype and value.dtype.is_floating_point
        else value
        for value in values
    ]


def apply(node: Node, inputs: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    """Run one op in ``dtype``; results are not yet rounded to their tensors' dtypes."""
    result = RULES[node.op](_widened(inputs, dtype), dict(node.attrs))
    return tuple(_widened(result if isinstance(result, tuple) else (result,), dtype))


def run(
    spec: GraphSpec, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The outputs of ``spec`` for ``inputs``, both in the order of declaration.

    Results have the declared dtypes, or ``dtype`` throughout when one is given (float64 for the
    yardstick); their strides are torch's own.
    """
    return prepared(spec, dtype)(inputs)


def prepared(
    spec: GraphSpec, dtype: torch.dtype | None = None
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """:func:`run` of one graph, whose names are looked up once and not at every call."""
    found = spec.derived.get(("reference", dtype))
    if found is None:
        found = spec.derived["reference", dtype] = _prepare(spec, dtype)
    return found


def _prepare(
    spec: GraphSpec, dtype: torch.dtype | None
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    compute = spec.compute_dtype if dtype is None else dtype
    last_use = {name: index for index, node in enumerate(spec.nodes) for name in node.operands}
    place: dict[str | None, int] = {None: 0}  # values[0] stands for what is not given
    for name in (*spec.inputs, *(name for node in spec.nodes for name in node.results)):
        place.setdefault(name, len(place))
    steps = []
    for index, node in enumerate(spec.nodes):
        results = [
            (number, place[name], dtype or spec.tensors[name].dtype)
            for number, name in enumerate(node.outputs)
            if name is not None
        ]
        gone = {
            place[name]
            for name in node.operands
            if last_use[name] == index and name not in spec.outputs
        }
        operands = tuple(place[name] for name in node.inputs)
        prepare: _Prepare | None = None
        if node.op == "aten":
            prepare = _for_torch(spec, node, compute, named_dtypes=dtype is None)
        steps.append((node.op, dict(node.attrs), operands, prepare, results, tuple(gone)))
    outputs = tuple(place[name] for name in spec.outputs)
    behind = [None] * (len(place) - 1 - len(spec.inputs))
    many = len(spec.inputs)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(inputs) != many:
            raise ValueError(f"{len(inputs)} tensors for {many} inputs")
        values: list[torch.Tensor | None] = [None, *inputs, *behind]
        device = inputs[0].device if inputs else torch.device("cpu")
        for op, attrs, operands, prepare, results, gone in steps:
            given = [values[at] for at in operands]
            if op == "expand" and _need(given[0]).dim() == 0:
                given = [torch.full((), _need(given[0]).item(), dtype=compute, device=device)]
            wide = _widened(given, compute) if prepare is None else prepare(given)
            made = RULES[op](wide, attrs)
            several = made if isinstance(made, tuple) else (made,)
            for number, at, kept in results:
                value = several[number]
                if value is not None:
                    if value.dtype.is_floating_point and value.dtype is not kept:
                        value = value.to(compute).to(kept)
                    values[at] = value
            for at in gone:
                values[at] = None
        return [_need(values[at]) for at in outputs]

    return run


_NARROW = (torch.float16, torch.bfloat16)


def _for_torch(
    spec: GraphSpec, node: Node, compute: torch.dtype, *, named_dtypes: bool
) -> _Prepare:
    """What makes operands those of an op of torch's own: widened, unless the op itself names the
    dtypes that it works in, and in memory as declared, since it may go by that. What lies between
    the ops of a graph is float32 then where torch has the 16 bits that the op names."""
    declared = [None if name is None else spec.tensors[name] for name in node.inputs]
    between = [name is not None and name not in spec.inputs for name in node.inputs]
    attrs = dict(node.attrs)
    named = aten.named_dtypes((attrs["args"], attrs["kwargs"])) if named_dtypes else frozenset()
    narrow = next(iter(named)) if len(named) == 1 and named <= {*_NARROW} else None

    def rounded(value: torch.Tensor | None, made: bool) -> torch.Tensor | None:
        if value is None or narrow is None or not made or value.dtype is not torch.float32:
            return value
        return value.to(narrow)

    def prepare(values: Tensors) -> list[torch.Tensor | None]:
        wide = list(map(rounded, values, between)) if named else _widened(values, compute)
        return [
            value if value is None or form is None else _laid_out(value, form)
            for value, form in zip(wide, declared, strict=True)
        ]

    return prepare


def _laid_out(value: torch.Tensor, form: TensorSpec) -> torch.Tensor:
    """The same in memory as ``form`` lies."""
    if value.shape != form.shape or same_layout(form.shape, value.stride(), form.stride):
        return value
    if overlaps_itself(form.shape, form.stride):
        return value
    made = torch.empty_strided(form.shape, form.stride, dtype=value.dtype, device=value.device)
    return made.copy_(value)


def run_into(
    spec: GraphSpec, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Like :func:`run`, but writes to given tensors of the declared strides and dtypes."""
    for result, output in zip(run(spec, inputs), outputs, strict=True):
        output.copy_(result)
