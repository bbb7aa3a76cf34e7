"""The reference executor: what every op means, in torch.

It runs graphs on CPU tensors, and stands in for single ops on a GPU where cuDNN has no plan. Every
op is computed in the graph's compute dtype from operands converted to it; the result is then
rounded to the dtype of its tensor. With ``dtype=torch.float64`` nothing is rounded anywhere: the
yardstick for accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

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


def _channel(value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return _need(value).reshape(1, -1, *(1,) * (x.dim() - 2))


def _batch_norm(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = _need(inputs[0])
    mean, var = _channel(inputs[1], x), _channel(inputs[2], x)
    y = (x - mean) * torch.rsqrt(var + attrs["eps"])
    if inputs[3] is not None:
        y = y * _channel(inputs[3], x)
    if inputs[4] is not None:
        y = y + _channel(inputs[4], x)
    return y


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


def band_offset(
    rows: torch.Tensor | int, keys: torch.Tensor | int, alignment: str
) -> torch.Tensor | int:
    """Column of the diagonal in row 0: 0 from the top left, keys - rows to the bottom right."""
    return 0 if alignment == "top_left" else keys - rows


def _sdpa(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = (_need(value) for value in inputs[:3])
    mask, seq_q, seq_kv = inputs[3:]
    batch, heads, rows, _ = q.shape
    keys, repeat = k.shape[2], heads // k.shape[1]
    k = k.repeat_interleave(repeat, dim=1)
    v = v.repeat_interleave(repeat, dim=1)
    row = torch.arange(rows, device=q.device).view(1, 1, rows, 1)
    col = torch.arange(keys, device=q.device).view(1, 1, 1, keys)
    keep = torch.ones((1, 1, rows, keys), dtype=torch.bool, device=q.device)
    length_q: torch.Tensor | int = rows
    length_kv: torch.Tensor | int = keys
    if seq_q is not None:
        length_q = seq_q.view(batch, 1, 1, 1)
        keep = keep & (row < length_q)
    if seq_kv is not None:
        length_kv = seq_kv.view(batch, 1, 1, 1)
        keep = keep & (col < length_kv)
        v = torch.where(col.view(1, 1, keys, 1) < length_kv, v, 0.0)  # padding may hold NaN
    if attrs["window"] is not None:
        left, right = attrs["window"]
        diagonal = row + band_offset(length_q, length_kv, attrs["diagonal_alignment"])
        if right is not None:
            keep = keep & (col <= diagonal + right)
        if left is not None:
            keep = keep & (col >= diagonal - left)
    scores = torch.matmul(q, k.transpose(-1, -2)) * attrs["scale"]
    if mask is not None:
        if mask.dtype == torch.bool:
            keep = keep & mask
        else:
            scores = scores + mask
    scores = torch.where(keep, scores, -torch.inf)
    top = (
        scores.amax(dim=-1, keepdim=True)
        if keys
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
    "matmul": _binary(torch.matmul),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "sdpa": _sdpa,
    "batch_norm": _batch_norm,
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
    "constant": lambda inputs, attrs: torch.tensor(attrs["value"], dtype=torch.float64),
}


def apply(node: Node, inputs: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    """Run one op in ``dtype``; results are not yet rounded to their tensors' dtypes."""
    wide = [
        value.to(dtype) if value is not None and value.dtype.is_floating_point else value
        for value in inputs
    ]
    result = RULES[node.op](wide, dict(node.attrs))
    results = result if isinstance(result, tuple) else (result,)
    return tuple(
        value.to(dtype) if value is not None and value.dtype.is_floating_point else value
        for value in results
    )


def run(
    spec: GraphSpec, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The outputs of ``spec`` for ``inputs``, both in the order of declaration.

    Results have the declared dtypes, or ``dtype`` throughout when one is given (float64 for the
    yardstick); their strides are torch's own.
    """
    values: dict[str, torch.Tensor] = dict(zip(spec.inputs, inputs, strict=True))
    last_use = {name: index for index, node in enumerate(spec.nodes) for name in node.operands}
    compute = spec.compute_dtype if dtype is None else dtype
    for index, node in enumerate(spec.nodes):
        operands = [None if name is None else values[name] for name in node.inputs]
        for name, result in zip(node.outputs, apply(node, operands, compute), strict=False):
            if name is None or result is None:
                continue
            kept = dtype if dtype is not None else spec.tensors[name].dtype
            values[name] = result.to(kept) if result.dtype.is_floating_point else result
        for name in node.operands:
            if last_use[name] == index and name not in spec.outputs:
                values.pop(name, None)
    return [values[name] for name in spec.outputs]


def run_into(
    spec: GraphSpec, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Like :func:`run`, but writes to given tensors of the declared strides and dtypes."""
    for result, output in zip(run(spec, inputs), outputs, strict=True):
        output.copy_(result)
