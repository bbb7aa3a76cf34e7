"""Ops of random graphs: by the builder, and by torch's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Shape = tuple[int, ...]
Tensor = torch.Tensor


@dataclass(frozen=True)
class Op:
    """``build`` takes the graph, ``run`` torch's functions; both take operands and attributes.

    ``kink`` gives how far each element is from where the derivative jumps, if it does. ``inside``
    is ``run`` again of an op that rounds more than its result, with a :class:`Rounding` in front.
    """

    family: str
    build: Callable[..., Any]
    run: Callable[..., Tensor]
    kink: Callable[..., Tensor] | None = None
    inside: Callable[..., Tensor] | None = None


class Rounding:
    """Rounding inside of an op as torch does it: to the dtype of the data, or ``fine``, to float32.

    This one rounds nothing.
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def fine(self, x: Tensor) -> Tensor:
        return x


_CONV = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_MAX, _AVG = (F.max_pool1d, F.max_pool2d, F.max_pool3d), (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_ADAPTIVE = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


def _along(v: Tensor, x: Tensor) -> Tensor:
    """A vector of the channels beside x."""
    return v.view(1, -1, *(1,) * (x.dim() - 2))


def _conv(x: Tensor, w: Tensor, *, padding: Any, **options: Any) -> Tensor:
    if isinstance(padding, int):
        padding = ((padding, padding),) * (x.dim() - 2)
    x = F.pad(x, [side for pair in reversed(padding) for side in pair])
    return _CONV[x.dim() - 3](x, w, **options)


def _transposed(x: Tensor, w: Tensor, **options: Any) -> Tensor:
    return _TRANSPOSED[x.dim() - 3](x, w, **options)


def _batch_norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, False, 0.0, 1e-5)


def _batch_norm_train(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5)


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w


class _Standard(torch.autograd.Function):
    """x less its mean, over its deviation; the gradient reads the rounded mean and deviation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], centred: bool, r: Rounding) -> Tensor:
        mean = r.fine(x.mean(dims, keepdim=True)) if centred else torch.zeros_like(x)
        variance = r.fine((x - mean).square().mean(dims, keepdim=True))
        inverse = r.fine((variance + 1e-5).rsqrt())
        y = r.fine(r.fine(x - mean) * inverse)
        ctx.save_for_backward(y, inverse)
        ctx.more = dims, centred, r
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (y, inverse), (dims, centred, r) = ctx.saved_tensors, ctx.more
        dx = dy - y * r.fine((dy * y).mean(dims, keepdim=True))
        if centred:
            dx = dx - r.fine(dy.mean(dims, keepdim=True))
        return r.fine(dx) * inverse, None, None, None


def _normed(
    r: Rounding, x: Tensor, dims: tuple[int, ...], w: Tensor, b: Tensor | None, centred: bool = True
) -> Tensor:
    y: Tensor = _Standard.apply(x, dims, centred, r)  # type: ignore[no-untyped-call]
    return y * w if b is None else y * w + b


def _images_normed(r: Rounding, x: Tensor, w: Tensor, b: Tensor, first: bool) -> Tensor:
    dims = tuple(d for d in range(x.dim()) if d != 1 and (first or d != 0))
    return _normed(r, x, dims, _along(w, x), _along(b, x))


def _groups_normed(r: Rounding, x: Tensor, w: Tensor, b: Tensor, num_groups: int) -> Tensor:
    parts = x.reshape(x.shape[0], num_groups, -1)
    y = _normed(r, parts, (2,), parts.new_ones(()), None).reshape(x.shape)
    return y * _along(w, x) + _along(b, x)


class _Softmax(torch.autograd.Function):
    """Its gradient, or that of its logarithm, reads the rounded result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool, r: Rounding) -> Tensor:
        y = r(r.fine(x - x.logsumexp(dim, keepdim=True)) if log else x.softmax(dim))
        ctx.save_for_backward(y)
        ctx.more = dim, log
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (y,), (dim, log) = ctx.saved_tensors, ctx.more
        if log:
            return dy - y.exp() * dy.sum(dim, keepdim=True), None, None, None
        return y * (dy - (y * dy).sum(dim, keepdim=True)), None, None, None


def _softmax(r: Rounding, x: Tensor, dim: int, log: bool = False) -> Tensor:
    y: Tensor = _Softmax.apply(x, dim, log, r)  # type: ignore[no-untyped-call]
    return y


def _log_softmax(r: Rounding, x: Tensor, dim: int) -> Tensor:
    return _softmax(r, x, dim, True)


class _Attended(torch.autograd.Function):
    """softmax(scores) v, whose gradient reads the rounded result, as flash attention's does."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor, none: Tensor, r: Rounding) -> Tensor:
        weights = r(scores.softmax(-1)).masked_fill(none, 0.0)
        o = r(weights @ v)
        ctx.save_for_backward(weights, v, o)
        ctx.r = r
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        weights, v, o = ctx.saved_tensors
        inner = (o * do).sum(-1, keepdim=True)
        ds = weights * (ctx.r(do @ v.transpose(-1, -2)) - inner)
        return ds, weights.transpose(-1, -2) @ do, None, None


_REDUCED: Mapping[str, Callable[..., Tensor]] = {
    "sum": lambda x, dims, keep: x.sum(dims, keepdim=keep),
    "mean": lambda x, dims, keep: x.mean(dims, keepdim=keep),
    "max": lambda x, dims, keep: x.amax(dims, keepdim=keep),
    "min": lambda x, dims, keep: x.amin(dims, keepdim=keep),
    "amax": lambda x, dims, keep: x.abs().amax(dims, keepdim=keep),
}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """By its definition; a row of no key is zeros."""
    return _attention(None, q, k, v, mask, **options)


def _attention(
    r: Rounding | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    many = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(many, 1), v.repeat_interleave(many, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    keep = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    if options.get("is_causal"):
        keep = keep.tril()
    none = ~keep.any(-1, keepdim=True)
    scores = scores.masked_fill(~keep & ~none, -math.inf)
    if r is None:
        return scores.softmax(-1).masked_fill(none, 0.0) @ v
    made: Tensor = _Attended.apply(r(scores), v, none, r)  # type: ignore[no-untyped-call]
    return made


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _plain(name: str) -> Callable[..., Any]:
    return lambda g, *operands, **attrs: getattr(g, name)(*operands, **attrs)


def _first(name: str) -> Callable[..., Any]:
    return lambda g, *operands, **attrs: getattr(g, name)(*operands, **attrs)[0]


def _image(functions: Sequence[Callable[..., Tensor]], **fixed: Any) -> Callable[..., Tensor]:
    return lambda x, **attrs: functions[x.dim() - 3](x, **fixed, **attrs)


def _slice(x: Tensor, *, dim: int, start: int, stop: int, step: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _of_square(name: str, run: Callable[[Tensor], Tensor], *more: float) -> Op:
    """The op of x * x + 1, whose gradient is nowhere large."""
    return Op(
        "pointwise",
        lambda g, x: getattr(g, name)(x * x + 1.0, *more),
        lambda x: run(x * x + 1.0),
        inside=lambda r, x: run(r(r(x * x) + 1.0)),
    )


OPS: Mapping[str, Op] = {
    "conv": Op("conv", _plain("conv"), _conv),
    "conv_grouped": Op("conv", _plain("conv"), _conv),
    "depthwise": Op("conv", _plain("conv"), _conv),
    "conv_transpose": Op("conv", _plain("conv_transpose"), _transposed),
    "matmul": Op("matmul", _plain("matmul"), lambda x, y: x @ y),
    "linear": Op(
        "matmul",
        _plain("linear"),
        lambda x, w, b: F.linear(x, w, b),
        inside=lambda r, x, w, b: r(F.linear(x, w)) + b,
    ),
    "swiglu": Op(
        "matmul",
        _plain("swiglu"),
        lambda x, a, b: F.silu(x @ a) * (x @ b),
        inside=lambda r, x, a, b: r(F.silu(r(x @ a))) * r(x @ b),
    ),
    "sdpa": Op("sdpa", _plain("sdpa"), _sdpa, inside=_attention),
    "rope": Op("sdpa", _plain("rope"), _rope),
    "max_pool": Op("pool", _plain("max_pool"), _image(_MAX)),
    "avg_pool": Op("pool", _plain("avg_pool"), _image(_AVG)),
    "adaptive_avg_pool": Op("pool", _plain("adaptive_avg_pool"), _image(_ADAPTIVE)),
    "interpolate": Op("pool", _plain("interpolate"), lambda x, **a: F.interpolate(x, **a)),
    "batch_norm": Op("norm", _plain("batch_norm"), _batch_norm),
    "batch_norm_train": Op(
        "norm",
        _first("batch_norm_train"),
        _batch_norm_train,
        inside=lambda r, x, w, b: _images_normed(r, x, w, b, True),
    ),
    "instance_norm": Op(
        "norm",
        _plain("instance_norm"),
        lambda x, w, b: F.instance_norm(x, None, None, w, b, True, 0.1, 1e-5),
        inside=lambda r, x, w, b: _images_normed(r, x, w, b, False),
    ),
    "group_norm": Op(
        "norm",
        lambda g, x, w, b, num_groups: g.group_norm(x, num_groups, w, b),
        lambda x, w, b, num_groups: F.group_norm(x, num_groups, w, b),
        inside=_groups_normed,
    ),
    "layer_norm": Op(
        "norm",
        _plain("layer_norm"),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        inside=lambda r, x, w, b: _normed(r, x, (-1,), w, b),
    ),
    "rms_norm": Op(
        "norm",
        lambda g, x, w: g.rms_norm(x, w, eps=1e-5),
        _rms_norm,
        inside=lambda r, x, w: _normed(r, x, (-1,), w, None, False),
    ),
    "normalize": Op(
        "norm",
        _plain("normalize"),
        lambda x: F.normalize(x, dim=-1),
        inside=lambda r, x: (
            x / r.fine(r.fine(x.square().sum(-1, keepdim=True)).clamp(min=1e-24).sqrt())
        ),
    ),
    "softmax": Op("softmax", _plain("softmax"), lambda x, dim: x.softmax(dim), inside=_softmax),
    "log_softmax": Op(
        "softmax", _plain("log_softmax"), lambda x, dim: x.log_softmax(dim), inside=_log_softmax
    ),
    "reduction": Op(
        "reduction",
        _plain("reduction"),
        lambda x, dims, mode, keepdim: _REDUCED[mode](x, dims, keepdim),
    ),
    "reshape": Op("view", _plain("reshape"), lambda x, shape: x.reshape(shape)),
    "permute": Op("view", _plain("permute"), lambda x, dims: x.permute(dims)),
    "slice": Op("view", _plain("slice"), _slice),
    "concat": Op("view", lambda g, *o, dim: g.concat(o, dim), lambda *o, dim: torch.cat(o, dim)),
    "expand": Op("view", _plain("expand"), lambda x, shape: x.expand(shape)),
    "bias": Op("pointwise", _plain("bias"), lambda x, b: x + _along(b, x)),
    "scale": Op("pointwise", _plain("scale"), lambda x, s: x * _along(s, x)),
    "add": Op("pointwise", _plain("add"), lambda x, y: x + y),
    "sub": Op("pointwise", _plain("sub"), lambda x, y: x - y),
    "mul": Op("pointwise", _plain("mul"), lambda x, y: x * y),
    "div": Op(
        "pointwise",
        lambda g, x, y: x / (g.abs(y) + 1.0),
        lambda x, y: x / (y.abs() + 1.0),
        kink=lambda x, y: y.abs(),
        inside=lambda r, x, y: x / r(y.abs() + 1.0),
    ),
    "maximum": Op("pointwise", _plain("maximum"), torch.maximum, lambda x, y: (x - y).abs()),
    "minimum": Op("pointwise", _plain("minimum"), torch.minimum, lambda x, y: (x - y).abs()),
    "where": Op(
        "pointwise",
        lambda g, x, y, v: g.where(g.gt(v, 0.25), x, y),
        lambda x, y, v: torch.where(v > 0.25, x, y),
    ),
    "scaled": Op("pointwise", lambda g, x, by: x * by, lambda x, by: x * by),
    "relu": Op("pointwise", _plain("relu"), torch.relu, torch.abs),
    "leaky_relu": Op(
        "pointwise",
        lambda g, x: g.leaky_relu(x, 0.1),
        lambda x: F.leaky_relu(x, 0.1),
        torch.abs,
    ),
    "clamp": Op(
        "pointwise",
        lambda g, x: g.clamp(x, -0.5, 1.5),
        lambda x: x.clamp(-0.5, 1.5),
        lambda x: torch.minimum((x + 0.5).abs(), (x - 1.5).abs()),
    ),
    "elu": Op("pointwise", _plain("elu"), F.elu),
    "gelu": Op("pointwise", _plain("gelu"), F.gelu),
    "gelu_tanh": Op("pointwise", _plain("gelu_tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "silu": Op("pointwise", _plain("silu"), F.silu),
    "sigmoid": Op("pointwise", _plain("sigmoid"), torch.sigmoid),
    "tanh": Op("pointwise", _plain("tanh"), torch.tanh),
    "softplus": Op("pointwise", _plain("softplus"), F.softplus),
    "hardswish": Op(
        "pointwise",
        _plain("hardswish"),
        F.hardswish,
        lambda x: torch.minimum((x + 3).abs(), (x - 3).abs()),
    ),
    "exp": Op(
        "pointwise",
        lambda g, x: g.exp(g.tanh(x)),
        lambda x: x.tanh().exp(),
        inside=lambda r, x: r(x.tanh()).exp(),
    ),
    "log": _of_square("log", torch.log),
    "sqrt": _of_square("sqrt", torch.sqrt),
    "rsqrt": _of_square("rsqrt", torch.rsqrt),
    "pow": _of_square("pow", lambda x: x**0.75, 0.75),
    "erf": Op("pointwise", _plain("erf"), torch.erf),
    "neg": Op("pointwise", _plain("neg"), torch.neg),
    "abs": Op("pointwise", _plain("abs"), torch.abs, torch.abs),
    "shift": Op("pointwise", lambda g, x: x + 0.5, lambda x: x + 0.5),
}
UNARY: tuple[str, ...] = (
    "relu",
    "silu",
    "exp",
    "neg",
    "gelu",
    "log",
    "leaky_relu",
    "sqrt",
    "erf",
    "relu",
    "tanh",
)

UNARY += ("rsqrt", "clamp", "sigmoid", "shift", "hardswish", "gelu_tanh", "pow", "abs", "elu")

UNARY += ("softplus",)
FAMILIES = tuple(dict.fromkeys(op.family for op in OPS.values()))
LAYOUTS = ("contiguous", "channels_last", "sliced", "stepped", "permuted", "expanded")
