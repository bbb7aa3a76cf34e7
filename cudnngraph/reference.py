"""The reference executor: what every op means, in torch.

It runs graphs on CPU tensors, and stands in for single ops on a GPU where cuDNN has no plan. Every
op is computed in the graph's compute dtype from operands converted to it; the result is then
rounded to the dtype of its tensor. With ``dtype=torch.float64`` nothing is rounded anywhere: the
yardstick for accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import aten, resample
from .ir import GraphSpec, Node

Tensors = Sequence["torch.Tensor | None"]
Rule = Callable[[Tensors, Mapping[str, Any]], "torch.Tensor | tuple[torch.Tensor | None, ...]"]

_CONV = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def _need(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


def _conv(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, weight = _need(inputs[0]), _need(inputs[1])
    padding = attrs["padding"]
    if x.numel() == 0 or weight.numel() == 0:  # torch refuses some; no tap meets an element
        many = zip(
            x.shape[2:], padding, attrs["dilation"], weight.shape[2:], attrs["stride"], strict=True
        )
        sizes = [(n + sum(pad) - d * (r - 1) - 1) // s + 1 for n, pad, d, r, s in many]
        return x.new_zeros((x.shape[0], weight.shape[0], *sizes))
    if all(before == after for before, after in padding):
        same = [before for before, _ in padding]
    else:
        x = F.pad(x, [side for pair in reversed(padding) for side in pair])
        same = [0] * len(padding)
    return _CONV[len(padding) - 1](
        x, weight, None, attrs["stride"], same, attrs["dilation"], attrs["groups"]
    )


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
    if all(before == after for before, after in padding):
        same = [before for before, _ in padding]
        return run(x, weight, None, stride, same, attrs["output_padding"], groups, dilation)
    # The whole result, then cut before and after; output_padding lengthens the far end.
    full = run(x, weight, None, stride, [0] * len(padding), [0] * len(padding), groups, dilation)
    cut = [
        side
        for (before, after), extra in zip(padding[::-1], attrs["output_padding"][::-1], strict=True)
        for side in (-before, extra - after)
    ]
    return F.pad(full, cut)


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
    x = F.pad(x, [side for pair in reversed(sides) for side in pair])
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


def _channel(value: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor:
    return _need(value).reshape(1, -1, *(1,) * (_need(x).dim() - 2))


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which (row, key) pairs may meet, which rows are valid and which keys, all of rank 4.

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
    if attrs["window"] is not None:
        left, right = attrs["window"]
        diagonal = row + band_offset(length_q, length_kv, attrs["diagonal_alignment"])
        if right is not None:
            keep = keep & (col <= diagonal + right)
        if left is not None:
            keep = keep & (col >= diagonal - left)
    return keep, valid_row, valid_key.transpose(-1, -2)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, keep: torch.Tensor, scale: float
) -> torch.Tensor:
    """scale * q k^T + mask, -inf where two may not meet. q and k have as many heads."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            keep = keep & mask
        else:
            scores = scores + mask
    return torch.where(keep, scores, -torch.inf)


def _sdpa(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = (_need(value) for value in inputs[:3])
    keep, _, valid_key = _kept(q, k, inputs[4:], attrs)
    if inputs[5] is not None:
        v = torch.where(valid_key, v, 0.0)  # padding may hold NaN
    repeat = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(repeat, dim=1)
    v = v.repeat_interleave(repeat, dim=1)
    scores = _scores(q, k, inputs[3], keep, attrs["scale"])
    top = (
        scores.amax(dim=-1, keepdim=True)
        if k.shape[2]
        else scores.new_full((*scores.shape[:3], 1), -torch.inf)
    )
    nothing = top == -torch.inf  # such a row attends to no key: zeros, not 0/0
    weights = torch.exp(scores - torch.where(nothing, 0.0, top))
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.matmul(weights, v) / torch.where(nothing, 1.0, total)
    out = torch.where(nothing, 0.0, out)
    if not attrs["return_lse"]:
        return out, None
    return out, torch.where(nothing, -torch.inf, top + torch.log(total)).squeeze(-1)


def _sdpa_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """With P the attention weights, exp(scores - lse), and D the row sums of do * o:

    dv = P^T do, dS = P * (do v^T - D), dq = scale * dS k, dk = scale * dS^T q, dmask = dS.
    """
    do, q, k, v, o, lse = (_need(value) for value in inputs[:6])
    mask = inputs[6]
    keep, valid_row, valid_key = _kept(q, k, inputs[7:], attrs)
    # Padding may hold NaN: select, never multiply by 0.
    do, q, o = (torch.where(valid_row, value, 0.0) for value in (do, q, o))
    k, v = (torch.where(valid_key, value, 0.0) for value in (k, v))
    heads, groups = q.shape[1], k.shape[1]
    k = k.repeat_interleave(heads // groups, dim=1)
    v = v.repeat_interleave(heads // groups, dim=1)
    lse = lse.unsqueeze(-1)
    scores = _scores(q, k, mask, keep & lse.isfinite(), attrs["scale"])
    weights = torch.exp(scores - torch.where(lse.isfinite(), lse, 0.0))  # 0 in rows without a key
    pull = (do * o).sum(dim=-1, keepdim=True)
    dscores = weights * (torch.matmul(do, v.transpose(-1, -2)) - pull)
    dq = torch.matmul(dscores, k) * attrs["scale"]
    dk = torch.matmul(dscores.transpose(-1, -2), q) * attrs["scale"]
    dv = torch.matmul(weights.transpose(-1, -2), do)
    dk, dv = (grad.unflatten(1, (groups, heads // groups)).sum(dim=2) for grad in (dk, dv))
    dmask = dscores.sum_to_size(_need(mask).shape) if attrs["mask_grad"] else None
    return dq, dk, dv, dmask


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


_REDUCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


def _reduction(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, dims, keep = _need(inputs[0]), attrs["dims"], attrs["keepdim"]
    if not dims:  # a number
        return x
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
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "conv_wgrad": _conv_wgrad,
    "matmul": _binary(torch.matmul),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm_backward": _rms_norm_backward,
    "sdpa": _sdpa,
    "sdpa_backward": _sdpa_backward,
    "batch_norm_train": _batch_norm_train,
    "batch_norm_backward": _batch_norm_backward,
    "reduction": _reduction,
    "expand": _expand,
    "batch_norm": _batch_norm,
    "batch_norm_apply": _batch_norm_apply,
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
    "aten": lambda inputs, attrs: aten.run(attrs, inputs),
    **resample.RULES,
    "constant": lambda inputs, attrs: torch.tensor(attrs["value"], dtype=torch.float64),
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
        steps.append((node.op, dict(node.attrs), operands, results, tuple(gone)))
    outputs = tuple(place[name] for name in spec.outputs)
    behind = [None] * (len(place) - 1 - len(spec.inputs))
    many = len(spec.inputs)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(inputs) != many:
            raise ValueError(f"{len(inputs)} tensors for {many} inputs")
        values: list[torch.Tensor | None] = [None, *inputs, *behind]
        device = inputs[0].device if inputs else torch.device("cpu")
        for op, attrs, operands, results, gone in steps:
            given = [values[at] for at in operands]
            if op == "expand" and _need(given[0]).dim() == 0:
                given = [torch.full((), _need(given[0]).item(), dtype=compute, device=device)]
            made = RULES[op](_widened(given, compute), attrs)
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


def run_into(
    spec: GraphSpec, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Like :func:`run`, but writes to given tensors of the declared strides and dtypes."""
    for result, output in zip(run(spec, inputs), outputs, strict=True):
        output.copy_(result)
