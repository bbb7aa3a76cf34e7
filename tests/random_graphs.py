"""Random graphs: what nobody chose, of 1 to about 8 ops, forward or forward and backward.

A case is made by its seed alone. It is a list of steps on numbered values, and is read two ways: by
the graph builder, and by torch's own functions in float64 (:class:`Eager`), which know nothing of
the package. :func:`judge` compiles a case, runs it and compares every output and gradient.

What a result may be off by is :mod:`tests.numerics`': the bound of its dtype, or where more than
one op rounds, ``TORCH_FACTOR`` times what torch is off by that rounds behind each op. The latter is
the most of several measurements: rounded to nearest, and by random roundings of the size of
``floor``. What cancels shows in them all.

``RANDOM_GRAPHS=5000 pytest tests/cpu/test_random_graphs.py`` runs so many;
``RANDOM_FIRST=1234 RANDOM_GRAPHS=1`` that one. ``python -m tests.random_graphs 1234`` shows it.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.grad.differentiate import differentiable
from tests import numerics

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Shape = tuple[int, ...]
Tensor = torch.Tensor

CHANNELS = (1, 3, 7, 8, 16, 17, 32, 64, 209)
ELEMENTS = 24_000  # of a value, at most
PRODUCTS = 6_000_000  # multiplications of a step, at most
NO_DIGITS = 0.1  # torch off by more than this: nothing is left to compare
MORE_WAYS = 40  # of rounding, where a result is off by more than torch in a few ways
MIXED_WAYS = 16  # of reading operands in TF32, some of them rounded and some cut off
NO_DIGITS_FACTOR = 8.0  # then how much farther off than torch at most


# -- ops: by the builder, and by torch -------------------------------------------------------------


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
    """What torch rounds inside of an op: to the dtype of the data, or ``fine``, to float32.

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


def _sdpa_of_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """As a model calls it."""
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa, **options)


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


# -- a case ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """An input: numbers of about the size ``size``, bools where the dtype says so."""

    name: str
    shape: Shape
    dtype: torch.dtype
    kind: str
    layout: str
    dim: int
    size: float = 1.0
    positive: bool = False

    def tensor(self, seed: int) -> Tensor:
        """On the CPU. What lies between its elements is NaN."""
        gen = torch.Generator().manual_seed(1000 * seed + int(self.name[1:]))
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=gen) < 0.7
        values = torch.randn(self.shape, generator=gen, dtype=F32) * self.size
        if self.positive:
            values = values.abs() + 0.5
        values = values.to(self.dtype)
        rank, dim = len(self.shape), self.dim
        if self.layout == "channels_last" and rank >= 3:
            order = (0, *range(2, rank), 1)
            back = [order.index(place) for place in range(rank)]
            return values.permute(order).contiguous().permute(back)
        if self.layout == "permuted":
            order = (*range(dim, rank), *range(dim))
            back = [order.index(place) for place in range(rank)]
            return values.permute(order).contiguous().permute(back)
        if self.layout == "sliced":
            wide = list(self.shape)
            wide[dim] += 3
            memory = torch.full(wide, math.nan, dtype=self.dtype)
            part = memory.narrow(dim, 1, self.shape[dim])
            return part.copy_(values)
        if self.layout == "stepped":
            wide = list(self.shape)
            wide[dim] *= 2
            memory = torch.full(wide, math.nan, dtype=self.dtype)
            part = memory[(slice(None),) * dim + (slice(None, None, 2),)]
            return part.copy_(values)
        if self.layout == "expanded":
            return values.narrow(dim, 0, 1).contiguous().expand(self.shape)
        return values.contiguous()


@dataclass(frozen=True)
class Step:
    """An op of the table on values by their numbers."""

    op: str
    operands: tuple[int, ...]
    attrs: Mapping[str, Any]
    shape: Shape
    terms: int = 1


@dataclass(frozen=True)
class Result:
    """An output: a value, and the dtype and layout it is declared in, if any."""

    value: int
    dtype: torch.dtype | None = None
    layout: str | None = None


@dataclass
class Case:
    """Values are numbered: the inputs first, as they came, and the steps' results."""

    seed: int
    dtype: torch.dtype
    trained: bool
    fused: bool = False
    tf32: bool = False
    values: list[Given | Step] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def inputs(self) -> dict[int, Given]:
        return {at: v for at, v in enumerate(self.values) if isinstance(v, Given)}

    @property
    def steps(self) -> dict[int, Step]:
        return {at: v for at, v in enumerate(self.values) if isinstance(v, Step)}

    @property
    def families(self) -> set[str]:
        return {OPS[step.op].family for step in self.steps.values()}

    @property
    def terms(self) -> int:
        """The longest sum behind an element; a gradient may sum over all of a value."""
        longest = max((step.terms for step in self.steps.values()), default=1)
        if self.trained:
            longest = max(longest, *(math.prod(value.shape) for value in self.values))
        return longest

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("torch.")
        way = "trained" if self.trained else "fused" if self.fused else "forward"
        lines = [f"seed {self.seed}, {short}, {way}{', TF32' if self.tf32 else ''}"]
        for at, value in enumerate(self.values):
            if isinstance(value, Given):
                kind = str(value.dtype).removeprefix("torch.")
                lines.append(f"  {at}: {value.name} {value.shape} {kind} {value.layout}")
            else:
                attrs = "".join(f", {k}={v}" for k, v in value.attrs.items())
                operands = ", ".join(map(str, value.operands))
                lines.append(f"  {at}: {value.op}({operands}{attrs}) -> {value.shape}")
        return "\n".join([*lines, f"  results {[r.value for r in self.results]}"])

    def tensors(self) -> dict[str, Tensor]:
        return {given.name: given.tensor(self.seed) for given in self.inputs.values()}

    def graph(self, tensors: Mapping[str, Tensor]) -> cg.Graph:
        """Declared for inputs with the strides of ``tensors``."""
        g = cg.Graph(f"random_{self.seed}")
        made: list[Any] = []
        for value in self.values:
            if isinstance(value, Given):
                made.append(g.input(value.name, like=tensors[value.name]))
            else:
                operands = [made[at] for at in value.operands]
                made.append(OPS[value.op].build(g, *operands, **value.attrs))
        for place, result in enumerate(self.results):
            kept: dict[str, Any] = {"dtype": result.dtype} if result.dtype else {}
            kept |= {"layout": result.layout} if result.layout else {}
            g.output(f"y{place}", made[result.value], **kept)
        return g


# -- torch's own -----------------------------------------------------------------------------------


class _Rounded(torch.autograd.Function):
    """Rounds a value, and the gradient that comes back through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.rounded = rounded
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.rounded(dy), None


@dataclass(frozen=True)
class Tf32:
    """How tensor cores read the float32 operands of products, which have 11 bits for them: kernels
    round them, or leave the lower bits out, which has one sign. ``mixed`` is the seed of a choice
    for each operand; None is the same for all."""

    cut: bool = True
    mixed: int | None = None

    def cuts(self, number: int) -> bool:
        """Whether the lower bits of the operand of this number are left out."""
        if self.mixed is None:
            return self.cut
        return Random(f"{self.mixed} {number}").random() < 0.5


class _ReadAsTf32(torch.autograd.Function):
    """A value in TF32's bits, or the gradient that comes back to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: bool, gradient: bool) -> Tensor:
        ctx.cut, ctx.gradient = cut, gradient
        return x.clone() if gradient else _upper_bits(x, cut)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _upper_bits(dy, ctx.cut) if ctx.gradient else dy, None, None


def _read_as_tf32(x: Tensor, cut: bool, gradient: bool) -> Tensor:
    made: Tensor = _ReadAsTf32.apply(x, cut, gradient)  # type: ignore[no-untyped-call]
    return made


def _upper_bits(x: Tensor, cut: bool) -> Tensor:
    bits = x.float().contiguous().view(torch.int32)
    half = 0 if cut else 0xFFF + (bits >> 13 & 1)  # to the nearest, to even if between
    return (bits + half & ~0x1FFF).view(F32).to(F64)


@dataclass
class Eager:
    """A case by torch's functions in float64.

    ``rounding``: "none"; "torch" runs in float32 itself; "nearest" rounds to the dtype of the case
    behind each op; a number is the seed of random relative errors, of what an op of that dtype may
    always be off by; :class:`Tf32` has products read their operands as tensor cores do.
    """

    case: Case
    rounding: str | int | Tf32 = "none"
    doubtful: bool = False  # whether an element is so near a kink that rounding may switch it

    def __post_init__(self) -> None:
        self.coarsest = 0.0  # the unit of an op so far
        self.read = 0  # operands of products so far
        if isinstance(self.rounding, int):
            self.gen = torch.Generator().manual_seed(self.rounding)
        case = self.case
        # A graph that is cut hands 16 bits on, so that only what is one op may be better.
        alone = len(case.steps) == 1
        self.wide = {r.value for r in case.results if alone and r.dtype is not None}

    def rounded(self, x: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
        if self.rounding == "nearest":
            return x.to(dtype).to(F64)
        noise = torch.rand(x.shape, generator=self.gen, dtype=F64) * 2 - 1
        return x * (1.0 + unit * noise)

    def in_tf32(self, step: Step) -> bool:
        return self.case.tf32 and OPS[step.op].family in ("conv", "matmul", "sdpa")

    def unit(self, at: int, step: Step) -> tuple[torch.dtype, float]:
        dtype = F32 if at in self.wide else self.case.dtype
        unit = numerics.floor(self.case.dtype, dtype, terms=step.terms)
        if self.in_tf32(step):
            unit = max(unit, numerics.ROUNDOFF[F16])  # operands of 11 bits, as TF32's are
        return dtype, unit

    def __call__(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        made: list[Tensor] = []
        for at, value in enumerate(self.case.values):
            if isinstance(value, Given):
                made.append(given[value.name])
                if self.rounding == "torch" and made[-1].is_floating_point():
                    made[-1] = made[-1].float()
            else:
                made.append(self.step(at, value, [made[place] for place in value.operands]))
        return [made[result.value] for result in self.case.results]

    def cut(self) -> bool:
        """Whether the next operand is cut off; else it is rounded."""
        assert isinstance(self.rounding, Tf32)
        self.read += 1
        return self.rounding.cuts(self.read)

    def as_read(self, operand: Tensor) -> Tensor:
        """An operand of a product as tensor cores read it."""
        return _read_as_tf32(operand, self.cut(), False) if operand.is_floating_point() else operand

    def step(self, at: int, step: Step, operands: Sequence[Tensor]) -> Tensor:
        """The result of one step."""
        op, (dtype, unit) = OPS[step.op], self.unit(at, step)
        self.coarsest = max(self.coarsest, unit)
        if self.rounding == "none":
            if op.kink is not None:
                far = op.kink(*(o.detach() for o in operands), **step.attrs)
                size = max(float(o.detach().abs().max()) for o in operands)
                near = 16 * self.coarsest * size * math.sqrt(len(self.case.values))
                self.doubtful |= bool((far <= near).any())
            return op.run(*operands, **step.attrs)
        if self.rounding == "torch":
            return op.run(*operands, **step.attrs)
        if isinstance(self.rounding, Tf32):
            if not self.in_tf32(step):
                return op.run(*operands, **step.attrs)
            result = op.run(*map(self.as_read, operands), **step.attrs)
            return _read_as_tf32(result, self.cut(), True)
        if op.inside is None:
            result = op.run(*operands, **step.attrs)
        else:
            inside = _By(self, self.case.dtype, unit, step.terms)
            result = op.inside(inside, *operands, **step.attrs)
        return _By(self, dtype, unit, step.terms)(result)


@dataclass
class _By(Rounding):
    """As :class:`Eager` rounds, for one step."""

    eager: Eager
    dtype: torch.dtype
    unit: float
    terms: int

    def __call__(self, x: Tensor) -> Tensor:
        return self._applied(x, self.dtype, self.unit)

    def fine(self, x: Tensor) -> Tensor:
        return self._applied(x, F32, numerics.floor(F32, F32, terms=self.terms))

    def _applied(self, x: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
        made: Tensor = _Rounded.apply(  # type: ignore[no-untyped-call]
            x, lambda y: self.eager.rounded(y, dtype, unit)
        )
        return made


class Module(torch.nn.Module):
    """A case as a model: its weights are parameters, its data the arguments in order."""

    def __init__(self, case: Case, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.case = case
        for given in case.inputs.values():
            if given.kind == "weight":
                weight = torch.nn.Parameter(tensors[given.name], requires_grad=False)
                self.register_parameter(given.name, weight)

    def forward(self, *data: Tensor) -> tuple[Tensor, ...]:
        rest = list(data)
        made: list[Tensor] = []
        for value in self.case.values:
            if isinstance(value, Step):
                operands = [made[at] for at in value.operands]
                run = _sdpa_of_torch if value.op == "sdpa" else OPS[value.op].run
                made.append(run(*operands, **value.attrs))
            elif value.kind == "weight":
                made.append(getattr(self, value.name))
            else:
                made.append(rest.pop(0))
        return tuple(made[result.value] for result in self.case.results)


# -- making one ------------------------------------------------------------------------------------


class _Maker:
    """Grows a case. A value that an op may take is in ``pool``."""

    def __init__(self, seed: int) -> None:
        r = self.r = Random(f"graph {seed}")
        dtype = r.choice((F16, F16, BF16, F32, F32))
        way = r.random()
        self.case = Case(seed, dtype, trained=way < 0.36, fused=way > 0.88)
        self.case.tf32 = dtype == F32 and r.random() < 0.4
        self.pool: list[int] = []
        self.turn = 0
        self.made: list[Tensor] = []  # in float64
        self.exact: set[int] = set()  # values that no op has rounded
        self.last = r.random() < 0.5  # images of this case lie channels_last, mostly
        self.many = r.choice((1, 2, 3, 3, 4, 4, 5, 6, 7, 8))

    # values

    def next(self, of: Sequence[Any]) -> Any:
        """One after another from case to case, so that all of them occur."""
        self.turn += 1
        return of[(self.case.seed * 13 + self.turn) % len(of)]

    def shape(self, at: int) -> Shape:
        return self.case.values[at].shape

    def layout(self, shape: Shape, kind: str) -> tuple[str, int]:
        r, rank = self.r, len(shape)
        if rank == 0:
            return "contiguous", 0
        usual = "channels_last" if self.last and rank in (3, 4, 5) else "contiguous"
        ways = [usual] * (6 if kind == "data" else 10)
        ways += ["contiguous"] * 2
        ways += ["channels_last"] * (2 if rank in (3, 4, 5) else 0)
        if math.prod(shape) > 1 and not (self.case.fused and kind == "weight"):
            ways += ["sliced", "stepped", "permuted"]
            ways += ["expanded"] if kind == "data" else []
        way = r.choice(ways)
        dims = [d for d, n in enumerate(shape) if n > 1] if way in ("expanded", "stepped") else []
        return way, r.choice(dims or range(rank))

    def given(self, shape: Shape, kind: str = "data", **more: Any) -> int:
        dtype = more.pop("dtype", self.case.dtype)
        layout, dim = self.layout(shape, kind) if dtype != torch.bool else ("contiguous", 0)
        if more.pop("plain", False):
            layout = "contiguous"
        at = len(self.case.values)
        name = f"{'w' if kind == 'weight' else 'x'}{at}"
        given = Given(name, shape, dtype, kind, layout, dim, **more)
        self.case.values.append(given)
        self.made.append(_wide(given.tensor(self.case.seed)))
        self.exact.add(at)
        return at

    def step(self, op: str, *operands: int, terms: int = 1, **attrs: Any) -> int:
        """Its number; scaled by a power of 2 if its numbers are large or small."""
        at = len(self.case.values)
        made = OPS[op].run(*(self.made[place] for place in operands), **attrs)
        self.case.values.append(Step(op, operands, attrs, tuple(made.shape), terms))
        self.made.append(made)
        size = float(made.square().mean().sqrt())
        if size > 4.0 or 0.0 < size < 0.1:
            return self.step("scaled", at, by=2.0 ** -round(math.log2(size)))
        self.pool.append(at)
        return at

    def weight(self, shape: Shape, fan_in: int) -> int:
        return self.given(shape, "weight", size=1.0 / math.sqrt(max(1, fan_in)))

    def vector(self, n: int | Shape, *, wide: bool = False, positive: bool = False) -> int:
        """Of the channels or a row: a bias or a norm's weight, in float32 now and then."""
        shape = (n,) if isinstance(n, int) else n
        dtype = F32 if wide and not self.case.fused and self.r.random() < 0.5 else self.case.dtype
        return self.given(shape, "weight", dtype=dtype, positive=positive, plain=True)

    # beginnings

    def begin(self) -> int:
        r = self.r
        start = r.choice(("image",) * 5 + ("rows",) * 3 + ("heads",) * 2)
        if start == "image":
            rank = r.choice((3, 4, 4, 4, 4, 4, 5))
            n, c = r.choice((1, 1, 2, 3)), r.choice(CHANNELS)
            sizes = {3: (1, 5, 16, 33), 4: (1, 2, 5, 7, 8, 13, 16), 5: (1, 2, 3, 5, 8)}[rank]
            space = [r.choice(sizes) for _ in range(rank - 2)]
            while n * c * math.prod(space) > ELEMENTS:
                space = [max(1, s // 2) for s in space]
            shape: Shape = (n, c, *space)
        elif start == "rows":
            d = r.choice((*CHANNELS, 48, 128, 256))
            s = r.choice((1, 2, 7, 16, 33, 64))
            shape = (s, d) if r.random() < 0.5 else (r.choice((1, 2, 3)), s, d)
        else:
            d = r.choice((8, 16, 32, 64, 64, 128, 7, 17))
            shape = (r.choice((1, 2)), r.choice((1, 2, 3, 4)), r.choice((1, 7, 16, 33, 64)), d)
        at = self.given(shape)
        self.pool.append(at)
        return at

    # steps, each from the value x; None where it cannot be

    def grow(self) -> None:
        x = self.begin()
        r = self.r
        done = 0
        turns = 0
        while done < self.many and turns < 40:
            turns += 1
            rank = len(self.shape(x))
            ways: list[Callable[[int], int | None]] = []
            ways += [self.unary] * 4 + [self.binary] * 7 + [self.view] * 4
            if rank >= 3:
                ways += [self.conv] * 4 + [self.pool_] * 2 + [self.image_norm] * 2
                ways += [self.channelwise] * 2
            if rank in (2, 3, 4):
                ways += [self.matrix] * 2
            if rank >= 2:
                ways += [self.row_norm] * 2 + [self.reduced]
            if rank == 4:
                ways += [self.attention] * 2
            if done == 0:  # anchors first, mostly
                anchors: list[Callable[[int], int | None]] = []
                anchors += [w for w in ways if w in (self.conv, self.matrix, self.attention)]
                heads = rank == 4 and self.shape(x)[-1] >= self.shape(x)[1] * 2
                anchors += [self.attention] * (8 if heads else 0)
                if anchors and r.random() < 0.6:
                    ways = anchors
            made = r.choice(ways)(x)
            if made is None:
                continue
            if math.prod(self.shape(made)) > ELEMENTS:
                del self.case.values[made:], self.made[made:]
                self.pool = [at for at in self.pool if at < made]
                continue
            x, done = made, done + 1
            if r.random() < 0.12 and len(self.pool) > 2:
                x = r.choice(self.pool)
        if not isinstance(self.case.values[x], Step):
            x = self.step("relu", x)
        self.end(x)

    def conv(self, x: int) -> int | None:
        r = self.r
        n, c, *space = self.shape(x)
        way = r.choice(("conv", "conv", "conv", "depthwise", "conv_grouped", "conv_transpose"))
        k = r.choice(CHANNELS)
        groups = 1
        if way == "depthwise":
            groups, k = c, c * r.choice((1, 1, 1, 2))
        elif way == "conv_grouped":
            groups = r.choice([g for g in (2, 3, 4, 8, 11, 19) if c % g == 0] or [1])
            if groups == 1:
                way = "conv"
            k = groups * r.choice((1, 2, 3, 8))
        kernel = [r.choice((1, 1, 2, 3, 3, 5)) for _ in space]
        if r.random() < 0.7:
            kernel = kernel[:1] * len(space)
        stride = [r.choice((1, 1, 1, 2)) for _ in space]
        dilation = [r.choice((1, 1, 1, 2)) for _ in space]
        if way == "conv_transpose":
            if r.random() < 0.2:
                groups = r.choice([g for g in (1, 2, 4) if c % g == 0])
                k = groups * r.choice((1, 3, 8))
            options: dict[str, Any] = {
                "stride": tuple(stride),
                "padding": tuple(r.randint(0, (kern - 1) // 2) for kern in kernel),
                "groups": groups,
                "dilation": tuple(dilation),
                "output_padding": tuple(r.choice((0, s - 1)) for s in stride),
            }
            many = n * c * (k // groups) * math.prod(space) * math.prod(kernel)
            if many > PRODUCTS:
                return None
            fan = c // groups * math.prod(kernel)
            w = self.weight((c, k // groups, *kernel), fan)
            return self.step(way, x, w, terms=fan, **options)
        reach = [d * (kern - 1) + 1 for d, kern in zip(dilation, kernel, strict=True)]
        padding = []
        for full, size_ in zip(reach, space, strict=True):
            least = max(0, full - size_)
            before = max(r.choice((0, full // 2, full // 2)), -(-least // 2))
            after = before if r.random() < 0.9 else before + r.choice((1, 2))
            padding.append((before, after))
        out = [
            (n_ + sum(pad) - full) // s + 1
            for n_, pad, full, s in zip(space, padding, reach, stride, strict=True)
        ]
        fan = c // groups * math.prod(kernel)
        if n * k * math.prod(out) * fan > PRODUCTS:
            return None
        w = self.weight((k, c // groups, *kernel), fan)
        return self.step(
            *(way, x, w),
            terms=fan,
            padding=tuple(padding),
            stride=tuple(stride),
            dilation=tuple(dilation),
            groups=groups,
        )

    def pool_(self, x: int) -> int | None:
        r, space = self.r, self.shape(x)[2:]
        way = r.choice(("max_pool", "avg_pool", "adaptive_avg_pool", "interpolate"))
        if way == "adaptive_avg_pool":
            size = tuple(r.choice((1, 1, 2, 3)) for _ in space)
            return self.step(way, x, terms=math.prod(space), output_size=size)
        if way == "interpolate":
            linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(space)]
            mode = r.choice(("nearest", linear))
            size = tuple(n * 2 if r.random() < 0.7 else r.choice((1, 3, 8)) for n in space)
            return self.step(way, x, size=size, mode=mode)
        if way == "max_pool" and self.case.trained and x not in self.exact:
            return None  # rounding may choose another of two that are nearly equal
        kernel = tuple(min(n, r.choice((1, 2, 2, 3, 3))) for n in space)
        stride = tuple(r.choice((1, 2, 2, 3)) for _ in space)
        padding = tuple(r.randint(0, k // 2) for k in kernel)
        return self.step(
            *(way, x),
            terms=math.prod(kernel),
            kernel_size=kernel,
            stride=stride,
            padding=padding,
        )

    def image_norm(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        n, c, *space = shape
        way = r.choice(("batch_norm", "batch_norm_train", "instance_norm", "group_norm"))
        groups = r.choice([g for g in (1, 2, 4, 8, 11) if c % g == 0])
        count = {
            "batch_norm": 9,
            "batch_norm_train": n * math.prod(space),
            "instance_norm": math.prod(space),
            "group_norm": c // groups * math.prod(space),
        }[way]
        if count < 8 or (self.case.fused and way == "batch_norm_train"):
            return None
        parts = self.made[x].reshape(n, groups if way == "group_norm" else c, -1)
        if way != "batch_norm" and self.flat(parts, (0, 2) if "train" in way else (2,)):
            return None
        if way == "batch_norm":
            if self.case.fused:
                return None
            operands = [
                self.given((c,), "weight", plain=True, dtype=F32, positive=name == "v")
                for name in "mvwb"
            ]
        elif way == "batch_norm_train":
            operands = [self.given((c,), "weight", plain=True, dtype=F32) for _ in "wb"]
        else:
            wide = r.random() < 0.3 and not self.case.fused
            dtype = F32 if wide else self.case.dtype
            operands = [self.given((c,), "weight", plain=True, dtype=dtype) for _ in "wb"]
        more = {"num_groups": groups} if way == "group_norm" else {}
        return self.step(way, x, *operands, terms=count, **more)

    def flat(self, x: Tensor, dims: tuple[int, ...]) -> bool:
        """Whether some numbers of one norm are nearly equal: it makes 300 times their rounding."""
        variance = x.var(dims, unbiased=False)
        return bool((variance < 1e-2 * x.square().mean(dims)).any())

    def row_norm(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        way = r.choice(("layer_norm", "rms_norm", "softmax", "log_softmax", "normalize"))
        d = shape[-1]
        if way in ("softmax", "log_softmax"):
            dim = r.choice((len(shape) - 1, len(shape) - 1, r.randrange(len(shape))))
            if shape[dim] < 2:
                return None
            return self.step(way, x, terms=shape[dim], dim=dim)
        if d < 3 or (way == "layer_norm" and self.flat(self.made[x], (-1,))):
            return None
        if way == "normalize":
            least = float(self.made[x].square().sum(-1).min())
            if self.case.trained and least < 1e-2:  # of a row of zeros it is 1e12
                return None
            return self.step(way, x, terms=d)
        operands = [self.vector(d, wide=True)]
        if way == "layer_norm":
            dtype = self.case.values[operands[0]].dtype  # type: ignore[union-attr]
            operands.append(self.given((d,), "weight", plain=True, dtype=dtype))
        return self.step(way, x, *operands, terms=d)

    def matrix(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        *lead, _, k = shape
        n = r.choice((*CHANNELS, 48, 128))
        if math.prod(shape) * n > PRODUCTS:
            return None
        way = r.choice(("matmul", "matmul", "linear", "swiglu"))
        if way == "linear":
            operands = [self.weight((n, k), k), self.vector(n)]
        elif way == "swiglu":
            operands = [self.weight((k, n), k) for _ in "ab"]
        else:
            batch = [d if r.random() < 0.5 else 1 for d in lead]
            batch = batch if r.random() < 0.4 else []
            operands = [self.weight((*batch, k, n), k)]
        return self.step(way, x, *operands, terms=k)

    def attention(self, x: int) -> int | None:
        r = self.r
        b, h, s, d = self.shape(x)
        if d > 256 or b * h * s * s * d > PRODUCTS or d < 2:
            return None
        if d % 2 == 0 and r.random() < 0.25:
            tables = [self.given((s, d // 2), "weight", plain=True) for _ in "cs"]
            x = self.step("rope", x, *tables)
        keys = s if r.random() < 0.6 else r.choice((1, 5, 16, 40))
        kv = r.choice([g for g in (1, h) if h % g == 0])
        k, v = self.given((b, kv, keys, d)), self.given((b, kv, keys, d))
        options: dict[str, Any] = {}
        operands = [x, k, v]
        way = r.random()
        if way < 0.3:
            options["is_causal"] = True
        elif way < 0.6:
            of = (r.choice((1, b)), r.choice((1, h)), r.choice((1, s)), keys)
            dtype = torch.bool if r.random() < 0.5 else self.case.dtype
            operands.append(self.given(of, "mask", dtype=dtype))
        return self.step("sdpa", *operands, terms=max(keys, d), **options)

    def unary(self, x: int) -> int | None:
        op = self.next(UNARY)
        return self.step(op, x)

    def channelwise(self, x: int) -> int | None:
        op = self.r.choice(("bias", "bias", "scale"))
        return self.step(op, x, self.vector(self.shape(x)[1]))

    def binary(self, x: int) -> int | None:
        """With an operand that is repeated in any way, or an earlier value."""
        r, shape = self.r, self.shape(x)
        op = r.choice(("add", "add", "sub", "mul", "div", "maximum", "minimum", "where"))
        like = [at for at in self.pool if self.shape(at) == shape and at != x]
        other = r.choice(like) if like and r.random() < 0.2 else self.repeated(shape)
        if op == "where":
            condition = self.repeated(shape)
            return self.step(op, x, other, condition)
        swapped = op in ("sub", "maximum") and r.random() < 0.4
        return self.step(op, *((other, x) if swapped else (x, other)))

    def repeated(self, shape: Shape) -> int:
        r = self.r
        way = self.next(tuple(itertools.product((True, False), repeat=len(shape))))
        dims = [n if whole else 1 for n, whole in zip(shape, way, strict=True)]
        drop = r.randrange(len(shape)) if r.random() < 0.3 and len(shape) > 1 else 0
        return self.given(tuple(dims[drop:]))

    def view(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        rank = len(shape)
        op = r.choice(("slice", "concat", "concat", "reshape", "permute", "expand"))
        if op == "slice":
            dim = r.choice([d for d, n in enumerate(shape) if n > 2] or [-1])
            if dim < 0:
                return None
            start, stop = r.choice((0, 1, shape[dim] // 2)), shape[dim] - r.choice((0, 1))
            if stop <= start:
                return None
            step = r.choice((1, 1, 2))
            return self.step(op, x, dim=dim, start=start, stop=stop, step=step)
        if op == "concat":
            dim = r.randrange(rank)
            like = [
                at
                for at in self.pool
                if len(self.shape(at)) == rank
                and all(self.shape(at)[d] == n for d, n in enumerate(shape) if d != dim)
            ]
            more = list(shape)
            more[dim] = r.choice((1, 3, shape[dim]))
            other = r.choice(like) if r.random() < 0.5 else self.given(tuple(more))
            pair = (x, other) if r.random() < 0.5 else (other, x)
            return self.step(op, *pair, dim=dim)
        if op == "permute":
            dims = list(range(rank))
            r.shuffle(dims)
            return self.step(op, x, dims=tuple(dims))
        if op == "expand":
            if math.prod(shape) > 2000 or 1 not in shape:
                return None
            wide = tuple(3 if n == 1 and r.random() < 0.7 else n for n in shape)
            return self.step(op, x, shape=wide)
        if rank >= 3 and r.random() < 0.4:
            wanted: Shape = (*shape[:2], math.prod(shape[2:]))
        elif rank >= 2 and r.random() < 0.5:
            wanted = (math.prod(shape[:-1]), shape[-1])
        else:
            heads = r.choice([h for h in (2, 3, 4, 7) if shape[-1] % h == 0] or [1])
            wanted = (*shape[:-1], heads, shape[-1] // heads)
        if wanted == shape or len(wanted) > 5:
            return None
        return self.step(op, x, shape=wanted)

    def reduced(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        rank = len(shape)
        if rank >= 3 and r.random() < 0.5:
            dims = tuple(range(2, rank))
        else:
            dims = tuple(sorted(r.sample(range(rank), r.choice((1, 1, min(2, rank))))))
        keep = r.random() < 0.6
        left = math.prod(n for d, n in enumerate(shape) if d not in dims)
        if not keep and rank - len(dims) < 2:
            keep = True
        terms = math.prod(shape[d] for d in dims)
        mode = r.choice(("sum", "sum", "mean", "mean", "max", "min", "amax"))
        if self.case.trained and mode not in ("sum", "mean") and x not in self.exact:
            mode = "mean"
        if left < 16:  # few sums, that may all be nearly zero
            x = self.step("softplus", x)
        return self.step("reduction", x, terms=terms, dims=dims, mode=mode, keepdim=keep)

    def end(self, x: int) -> None:
        """What nothing reads is a result, and now and then another value; what no result needs is
        left out."""
        r, case = self.r, self.case
        ends = [x]
        steps = [at for at in case.steps if at != x]
        if steps and r.random() < 0.3:
            ends.append(r.choice(steps))
        needed = set(ends)
        for at in reversed(range(len(case.values))):
            value = case.values[at]
            if at in needed and isinstance(value, Step):
                needed |= set(value.operands)
        kept = sorted(needed)
        place = {at: new for new, at in enumerate(kept)}
        for end in ends:
            shape, dtype, layout = self.shape(end), None, None
            if case.dtype != F32 and not case.fused and r.random() < 0.15:
                dtype = F32
            if len(shape) == 4 and not case.fused and r.random() < 0.3:
                layout = r.choice(("contiguous", "channels_last"))
            case.results.append(Result(place[end], dtype, layout))
        values = []
        for at in kept:
            value = case.values[at]
            if isinstance(value, Step):
                operands = tuple(place[o] for o in value.operands)
                value = Step(value.op, operands, value.attrs, value.shape, value.terms)
            values.append(value)
        case.values = values


def case(seed: int) -> Case:
    """The case of this seed."""
    maker = _Maker(seed)
    maker.grow()
    return maker.case


# -- running one -----------------------------------------------------------------------------------


class Wrong(AssertionError):
    """A result that is not what it should be."""


@dataclass
class Verdict:
    """What became of a case: "right", "refused: ...", or "wrong: ..."; and how many of its results
    have no digits even by torch."""

    outcome: str
    without_digits: int = 0


def judge(of: Case, device: torch.device | str = "cpu", policy: cg.Policy | None = None) -> Verdict:
    """Compile the case, run it twice, compare all results, and gradients if it is trained.

    A CUDA error that does not end with the call goes through.
    """
    place = torch.device(device)
    of = of if place.type == "cuda" else replace(of, tf32=False)
    policy = policy or cg.Policy(verify="off", tune="heuristic")
    policy = replace(policy, allow_tf32=of.tf32)
    try:
        return Verdict("right", _judged(of, place, policy))
    except (cg.NotSupported, cg.GraphError, cg.FeatureMissing, cg.CannotImport) as refusal:
        return Verdict(f"refused: {type(refusal).__name__}: {refusal}")
    except Wrong as wrong:
        return Verdict(f"wrong: {wrong}")
    except Exception as error:
        if place.type == "cuda":
            torch.cuda.synchronize()  # raises again if the device is lost
        return Verdict(f"wrong: raises {type(error).__name__}: {error}")


def _there(value: Tensor, place: torch.device) -> Tensor:
    """The same elements in the same strides on a device, at an odd place if it lies at one."""
    if place.type == "cpu":
        return value
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    offset = value.storage_offset()
    whole = value.as_strided((offset + extent,), (1,), 0).to(place)
    return whole.as_strided(value.shape, value.stride(), offset)


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _judged(of: Case, place: torch.device, policy: cg.Policy) -> int:
    given = of.tensors()
    there = {name: _there(value, place) for name, value in given.items()}
    if of.trained:
        return _trained(of, given, there, place, policy)
    wide = {name: _wide(value) for name, value in given.items()}
    exact = Eager(of)(wide)
    yardstick = Yardstick(of, lambda eager: eager(wide))
    if of.fused:
        data = tuple(there[g.name] for g in of.inputs.values() if g.kind != "weight")
        run: Callable[[], Any] = _fused(of, there, data, policy)
    else:
        exe = of.graph(given).compile(place, policy=policy)
        run = lambda: exe(**there)  # noqa: E731
    none = 0
    before: list[Tensor] = []
    for turn in ("", " of the second run"):
        made = _several(run())
        assert len(made) == len(exact)
        if before and all(torch.equal(a, b) for a, b in zip(made, before, strict=True)):
            break
        none = 0
        for place_, out in enumerate(made):
            _declared_as(of, place_, out)
            none += _check(of, out, exact[place_], yardstick, place_, f"y{place_}{turn}")
        before = [out.clone() for out in made]
    return none


@dataclass
class Yardstick:
    """What torch makes of a case that rounds, in several ways; ``run`` makes the results of one.

    A few ways are enough where ours is close. Where it is not, and the numbers are few, those may
    all be close by luck, so there are more to ask for.
    """

    of: Case
    run: Callable[[Eager], list[Tensor]]
    made: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ways: list[str | int | Tf32] = ["nearest", 1, 2, 3, 4]
        if self.of.dtype == F32:
            ways.append("torch")
        if self.of.tf32:
            ways += [Tf32(), Tf32(cut=False)]
        self.made += [self.run(Eager(self.of, way)) for way in ways]

    def more(self) -> None:
        """More ways, once."""
        if len(self.made) < MORE_WAYS:
            ways: list[int | Tf32] = list(range(5, MORE_WAYS))
            if self.of.tf32:
                ways += [Tf32(mixed=way) for way in range(MIXED_WAYS)]
            self.made += [self.run(Eager(self.of, way)) for way in ways]

    def off(self, at: int, exact: Tensor) -> float:
        """The largest distance from ``exact``, relative to its size."""
        return max(numerics.relative_error(each[at], exact) for each in self.made)

    def distance(self, at: int, exact: Tensor) -> float:
        """The largest distance."""
        return max(float((each[at].double() - exact).norm()) for each in self.made)


def _several(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def _fused(
    of: Case, there: Mapping[str, Tensor], data: tuple[Tensor, ...], policy: cg.Policy
) -> Callable[[], Any]:
    fused = cg.fuse(Module(of, there).eval(), data, policy=policy, check=False)

    def run() -> Any:
        with torch.no_grad():
            return fused(*data)

    return run


def _declared_as(of: Case, at: int, out: Tensor) -> None:
    """Shape, dtype and strides of an output are those asked for."""
    result = of.results[at]
    shape = of.values[result.value].shape
    if tuple(out.shape) != shape:
        raise Wrong(f"y{at} has shape {tuple(out.shape)}, not {shape}")
    dtype = result.dtype or of.dtype
    mixed = any(given.dtype == F32 for given in of.inputs.values())
    if out.dtype != dtype and not mixed:
        raise Wrong(f"y{at} is {out.dtype}, not {dtype}")
    if result.layout:
        form = torch.channels_last if result.layout == "channels_last" else torch.contiguous_format
        if not out.is_contiguous(memory_format=form):
            raise Wrong(f"y{at} has strides {out.stride()}, not {result.layout}")


def _limit(of: Case, result: torch.dtype, theirs: float) -> float:
    """The largest relative error allowed where torch is off by ``theirs``."""
    bound = numerics.bound(of.dtype, result, tf32=of.tf32, terms=of.terms)
    return max(bound, numerics.TORCH_FACTOR * theirs)


def _check(of: Case, out: Tensor, exact: Tensor, yardstick: Yardstick, at: int, what: str) -> bool:
    """Whether torch has no digits of it either; raises :class:`Wrong` where ours is too far off."""
    error = numerics.relative_error(out, exact)
    if not error <= _limit(of, out.dtype, yardstick.off(at, exact)):
        yardstick.more()
    theirs = yardstick.off(at, exact)
    if theirs > NO_DIGITS:
        off, most = float((_wide(out.cpu()) - exact).norm()), yardstick.distance(at, exact)
        if not off <= NO_DIGITS_FACTOR * most:
            raise Wrong(f"{what} is all rounding and off by {off:.3g}, torch by {most:.3g}")
        return True
    limit = _limit(of, out.dtype, theirs)
    if not error <= limit:
        raise Wrong(f"{what} is off by {error:.3g}, torch by {theirs:.3g}, allowed {limit:.3g}")
    return False


def _trained(
    of: Case,
    given: Mapping[str, Tensor],
    there: Mapping[str, Tensor],
    place: torch.device,
    policy: cg.Policy,
) -> int:
    """Results and the gradients of all floating inputs."""
    names = [name for name, value in given.items() if value.is_floating_point()]
    fixed = {  # statistics, which no gradient reaches
        of.values[step.operands[at]].name  # type: ignore[union-attr]
        for step in of.steps.values()
        for at in (1, 2)
        if step.op == "batch_norm"
    }
    names = [name for name in names if name not in fixed]
    gen = torch.Generator().manual_seed(of.seed + 1)
    upstream: list[Tensor] = []

    def differentiated(run: Callable[..., Any], of_: Mapping[str, Tensor]) -> list[Tensor]:
        leaves = {n: v.detach().requires_grad_(n in names) for n, v in of_.items()}
        made = _several(run(leaves))
        if not upstream:
            upstream.extend(
                torch.randn(y.shape, generator=gen, dtype=F64).to(of.dtype) for y in made
            )
        dys = [dy.to(y.device, y.dtype) for dy, y in zip(upstream, made, strict=True)]
        grads = torch.autograd.grad(made, [leaves[n] for n in names], dys, allow_unused=True)
        zeros = [
            torch.zeros_like(leaves[n]) if g is None else g
            for n, g in zip(names, grads, strict=True)
        ]
        return [*(y.detach() for y in made), *zeros]

    wide = {name: _wide(value) for name, value in given.items()}
    eager = Eager(of)
    exact = differentiated(eager, wide)
    yardstick = Yardstick(of, lambda each: differentiated(each, wide))
    trainable = of.graph(given).compile(place, policy=policy, training=True)
    made = differentiated(lambda leaves: trainable(**leaves), there)
    count, none = len(of.results), 0
    for at, (out, want) in enumerate(zip(made, exact, strict=True)):
        if at < count:
            _declared_as(of, at, out)
            none += _check(of, out, want, yardstick, at, f"y{at}")
            continue
        name = names[at - count]
        if out.dtype != given[name].dtype or out.shape != given[name].shape:
            raise Wrong(f"gradient of {name} is {out.dtype} {tuple(out.shape)}")
        narrow = out.to(of.dtype)  # of float32 weights too: what comes back has 16 bits
        try:
            none += _check(of, narrow, want, yardstick, at, f"gradient of {name}")
        except Wrong:
            if not eager.doubtful:
                raise
            limit = _limit(of, of.dtype, yardstick.off(at, want))
            _check_from_saved(trainable, names, there, upstream, name, narrow, limit)
    return none


def _check_from_saved(
    trainable: cg.Trainable,
    names: Sequence[str],
    there: Mapping[str, Tensor],
    upstream: Sequence[Tensor],
    name: str,
    out: Tensor,
    limit: float,
) -> None:
    """The gradient where rounding may have switched a relu: from what the forward has saved, the
    backward graph in float64 makes the same."""
    able = differentiable(trainable.spec)
    pair = trainable.pair(tuple(n for n in able if n in names))
    gradient, forward = pair.gradient, pair.gradient.forward
    results = pair.forward.outputs_for([there[each] for each in forward.inputs])
    known = {n: _wide(v.detach().cpu()) for n, v in there.items()}
    known |= {n: _wide(v.cpu()) for n, v in zip(forward.outputs, results, strict=True)}
    known |= {
        gradient.incoming[f"y{at}"]: dy.double()
        for at, dy in enumerate(upstream)
        if f"y{at}" in gradient.incoming
    }
    backward = gradient.backward
    made = reference.run(backward, [known[each] for each in backward.inputs], F64)
    right = dict(zip(backward.outputs, made, strict=True))[gradient.outgoing[name]]
    error = numerics.relative_error(out, right)
    if not error <= limit:
        raise Wrong(
            f"gradient of {name} is off by {error:.3g} of what the saved tensors make, "
            f"allowed {limit:.3g}"
        )


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        print(case(seed), judge(case(seed)), sep="\n")
