"""Norms: over trailing dims, over images, and batch norm in training, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from tests.samples.case import (
    BF16,
    F16,
    F32,
    F64,
    SHORT,
    Case,
    Fill,
    Inputs,
    Layout,
    Shape,
    Tensors,
    activate,
    at_layout,
    gradient_case,
    grads_of,
    normal,
    table_case,
    uniform,
)


def _norm_case(
    op: str,
    name: str,
    x: Shape,
    dtype: torch.dtype,
    x_at: Layout = None,
    over: int = 1,
    bias: bool = True,
    params: torch.dtype | None = None,
    w_at: Layout = None,
    eps: float = 1e-5,
    stats: bool = False,
    more: Inputs | None = None,
    after: Callable[[Any, Any], Any] = lambda y, v: y,
    note: str = "",
    **placed: Any,
) -> Case:
    """A norm over the last ``over`` dims; ``after`` works on graph values and tensors alike."""
    shape, kind = x[len(x) - over :], params or dtype
    inputs = {"x": (x, dtype, x_at), "w": (shape, kind, w_at)}
    inputs |= {"b": (shape, kind, w_at)} if bias else {}

    def declare(g: cg.Graph, v: dict[str, cg.Value]) -> dict[str, cg.Value]:
        made = getattr(g, op)(v["x"], v["w"], v.get("b"), eps=eps, return_stats=stats)
        y, *rest = made if stats else (made,)
        return {"y": after(y, v), **dict(zip(("inv_std", "mean"), reversed(rest), strict=False))}

    def eager(t: Tensors) -> Tensors:
        wide, w = t["x"], t["w"].to(t["x"].dtype)
        b = t["b"].to(wide.dtype) if bias else None
        if op == "layer_norm":
            y = F.layer_norm(wide, shape, w, b, eps)
        else:
            y = F.rms_norm(wide, shape, w, eps)
            y = y if b is None else y + b
        done = {"y": after(y, t)}
        if stats:
            dims = tuple(range(len(x) - over, len(x)))
            wide = wide if dtype == F64 or wide.dtype == F64 else wide.float()
            mean = wide.mean(dims, keepdim=True)
            centred = wide - mean if op == "layer_norm" else wide
            done["inv_std"] = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
            if op == "layer_norm":
                done["mean"] = mean
        return done

    fills = {"x": normal(1.5, 0.4), "w": uniform(0.5, 1.5)}
    inputs |= more or {}
    return table_case(
        op, name, inputs, declare, eager, fills, note, terms=math.prod(shape), **placed
    )


def norms() -> Iterator[Case]:
    for op in ("layer_norm", "rms_norm"):
        for dtype in (F16, BF16, F32):
            yield _norm_case(op, "rows", (64, 768), dtype)
            yield _norm_case(op, "sequence", (2, 24, 256), dtype, bias=False)
            yield _norm_case(op, "odd_sizes", (5, 7, 77), dtype)
            yield _norm_case(op, "stats", (4, 12, 128), dtype, stats=True)
        yield _norm_case(op, "stats", (3, 5, 16), F64, stats=True)
        for dtype in (F16, BF16):
            yield _norm_case(op, "float32_params", (48, 256), dtype, params=F32)
        yield _norm_case(op, "short_rows", (6, 3, 40, 32), F16)
        yield _norm_case(op, "short_rows", (6, 3, 40, 64), BF16, x_at=(40 * 576, 64, 576, 1))
        yield _norm_case(op, "short_rows_float32_params", (48, 128), F16, params=F32)
        yield _norm_case(op, "one_row", (512,), F16, note="rank 1: no dim before the weight's")
        yield _norm_case(op, "two_dims", (8, 12, 16, 32), F16, over=2)
        yield _norm_case(op, "three_dims", (6, 4, 8, 8), BF16, over=3)
        yield _norm_case(
            op,
            "three_dims_channels_last",
            (6, 4, 8, 8),
            F16,
            x_at="channels_last",
            w_at=(1, 32, 4),
            over=3,
            note="x and the weight in one order that is not the logical one",
        )
        yield _norm_case(
            op,
            "weight_in_another_order",
            (6, 4, 8, 8),
            F16,
            x_at="channels_last",
            over=3,
            note="x and the weight lie in different orders",
        )
        yield _norm_case(
            op, "sequence_first", (2, 24, 256), F16, x_at=(256, 512, 1), note="(S, B, D) in memory"
        )
        yield _norm_case(
            op, "columns", (24, 64), F16, x_at=(1, 24), note="the normalised dim is not the fastest"
        )
        yield _norm_case(
            op, "gaps", (24, 64), F16, x_at=(96, 1), note="a slice: gaps between the rows"
        )
        yield _norm_case(op, "eps", (24, 256), BF16, eps=0.5)
        yield _norm_case(op, "eps_0", (24, 256), F16, eps=0.0)
        yield _norm_case(op, "one_column", (24, 1), F32, note="a norm of one number")
        yield _norm_case(op, "no_rows", (0, 64), F16)
        yield _norm_case(op, "to_float16", (24, 256), F32, result=F16)
        yield _norm_case(
            op,
            "silu",
            (4, 12, 256),
            F16,
            after=lambda y, v: y.silu() if isinstance(y, cg.Value) else F.silu(y),
        )
        twice: dict[str, Callable[[Any, Any], Any]] = {
            "squared": lambda y, v: y * y,
            "doubled": lambda y, v: y + y,
            "squared_shifted": lambda y, v: y * y - 0.5,
        }
        for name, after in twice.items():
            yield _norm_case(op, name, (96, 256), F16, after=after)
        second: dict[str, Callable[[Any, Any], Any]] = {
            "taken_away": lambda y, v: v["r"] - y,
            "as_a_factor": lambda y, v: v["r"] * y,
            "behind_a_gate": lambda y, v: (
                (v["r"].silu() if isinstance(y, cg.Value) else F.silu(v["r"])) * y
            ),
        }
        for name, after in second.items():
            more: Inputs = {"r": ((96, 256), F16, None)}
            yield _norm_case(op, name, (96, 256), F16, more=more, after=after)
        yield _norm_case(
            op,
            "residual",
            (4, 12, 256),
            BF16,
            more={"r": ((4, 12, 256), BF16, None)},
            after=lambda y, v: y + v["r"],
        )
        yield _norm_case(
            op,
            "gate_per_row",
            (4, 12, 256),
            F16,
            more={"r": ((4, 12, 1), F16, None)},
            after=lambda y, v: y * v["r"],
        )
        yield _norm_case(
            op,
            "scale_per_sequence",
            (4, 12, 256),
            F16,
            more={"r": ((4, 1, 1), F16, None)},
            after=lambda y, v: y * v["r"],
            note="broadcasts within the rows",
        )


@dataclass(frozen=True)
class ImageNorm:
    """A norm over the elements of each channel, or of ``groups`` groups of channels, of an image.

    ``params`` is the dtype of weight and bias, None for none; ``residual`` is added in front.
    """

    x: Shape
    dtype: torch.dtype = F16
    groups: int = 0
    params: torch.dtype | None = F32
    at: Layout = None
    eps: float = 1e-5
    residual: bool = False
    act: str | None = None
    stats: bool = False
    affine: bool = False  # by a factor and a shift for each channel

    def declare(self, g: cg.Graph) -> dict[str, cg.Value]:
        """x, weight and bias, and the residual."""
        made = {"x": g.input("x", self.x, self.dtype, **at_layout(self.at))}
        if self.params is not None:
            made |= {key: g.input(key, (self.x[1],), self.params) for key in ("w", "b")}
        if self.residual:
            made["z"] = g.input("z", self.x, self.dtype, **at_layout(self.at))
        return made

    def build(self) -> cg.Graph:
        """The graph of the forward."""
        g = cg.Graph("norm")
        v = self.declare(g)
        x = v["x"] + v["z"] if self.residual else v["x"]
        params = (v.get("w"), v.get("b"))
        if self.stats:
            y, mean, inv_std = g.instance_norm(x, *params, eps=self.eps, return_stats=True)
            g.output("mean", mean)
            g.output("inv_std", inv_std)
        elif self.affine:
            shift, factor = g.group_affine(x, self.groups, *params[:1], eps=self.eps)
            y = g.scale(g.bias(x, shift), factor)
            if params[1] is not None:
                column = (*self.x[:2], *(1,) * (len(self.x) - 2))
                y = g.bias(y, g.reshape(g.expand(params[1], self.x[:2], (1,)), column))
        elif self.groups:
            y = g.group_norm(x, self.groups, *params, eps=self.eps)
        else:
            y = g.instance_norm(x, *params, eps=self.eps)
        g.output("y", g.activation(y, self.act))
        return g

    def forward(self, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        """torch's own norm, in the wider of the dtypes of x and the parameters."""
        wide = torch.promote_types(x.dtype, params[0].dtype) if params else x.dtype
        w, b = (p.to(wide) for p in params) if params else (None, None)
        groups = self.groups or self.x[1]
        return F.group_norm(x.to(wide), groups, w, b, self.eps).to(x.dtype)

    def eager(self, t: Tensors) -> Tensors:
        """Compute the norm as a user of torch would write it."""
        x = t["x"] + t["z"] if self.residual else t["x"]
        y = self.forward(x, *(t[key] for key in ("w", "b") if key in t))
        made = {"y": activate(y, self.act, {})}
        if self.stats:
            wide = x.to(torch.promote_types(x.dtype, F32))
            dims = tuple(range(2, x.dim()))
            var, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
            made |= {"mean": mean, "inv_std": torch.rsqrt(var + self.eps)}
        return made

    def backward(self) -> cg.Graph:
        """The gradient of instance norm, with the forward that gives its statistics."""
        g = cg.Graph("norm_gradient")
        v = self.declare(g)
        dy = g.input("dy", self.x, self.dtype, **at_layout(self.at))
        params = (v.get("w"), v.get("b"))
        y, mean, inv_std = g.instance_norm(v["x"], *params, eps=self.eps, return_stats=True)
        g.output("y", y)
        grads = g.instance_norm_backward(dy, v["x"], mean, inv_std, v.get("w"))
        many = grads if isinstance(grads, tuple) else (grads,)
        for key, grad in zip(("dx", "dw", "db"), many, strict=False):
            g.output(key, grad)
        return g

    def eager_backward(self, t: Tensors) -> Tensors:
        """torch autograd."""
        of = [t[key] for key in ("x", "w", "b") if key in t]
        grads = grads_of(self.forward, of, t["dy"])
        made = dict(zip(("dx", "dw", "db"), grads, strict=False))
        return {**made, "y": self.forward(*of)}


_IMAGE_FILLS: Mapping[str, Fill] = {"w": uniform(0.5, 1.5), "x": normal(2.0, 0.5)}


# Far from 0 beside their deviation, where what is added must not be rounded to 16 bits.
_FAR_FILLS: Mapping[str, Fill] = {"w": uniform(0.5, 1.5), "x": normal(1.0, 30.0)}


def _normalized(
    name: str,
    x: Shape,
    dtype: torch.dtype,
    x_at: Layout = None,
    eps: float = 1e-12,
    mean: float = 0.0,
    note: str = "",
    factor: Shape | None = None,
) -> Case:
    """Rows by their norms, and behind them a product with numbers of ``factor``'s shape."""
    inputs: dict[str, tuple[Shape, torch.dtype, Layout]] = {"x": (x, dtype, x_at)}
    inputs |= {} if factor is None else {"f": (factor, dtype, None)}

    def declare(g: cg.Graph, v: dict[str, cg.Value]) -> dict[str, cg.Value]:
        y = g.normalize(v["x"], eps=eps)
        return {"y": y if factor is None else g.mul(y, v["f"])}

    def eager(t: Tensors) -> Tensors:
        y = F.normalize(t["x"], dim=-1, eps=eps)
        return {"y": y if factor is None else y * t["f"]}

    fills = {"x": normal(1.5, mean), "f": uniform(0.5, 2.0)}
    return table_case("normalize", name, inputs, declare, eager, fills, note, terms=x[-1])


def normalize() -> Iterator[Case]:
    for dtype in (F16, BF16, F32):
        yield _normalized("rows", (48, 64), dtype)
        yield _normalized("one_row", (64,), dtype)
        yield _normalized("odd_sizes", (5, 7, 77), dtype)
    yield _normalized("rows", (5, 16), F64)
    for dtype in (F16, BF16):
        yield _normalized(
            "heads", (8, 3, 16, 32), dtype, x_at=(16 * 288, 32, 288, 1), factor=(1, 3, 1, 32)
        )
    yield _normalized("one_head", (8, 1, 16, 32), F16, x_at=(16 * 96, 32, 96, 1))
    yield _normalized("heads_first", (3, 40, 32), F16)
    yield _normalized("beyond_16_bits", (40, 32), F16, mean=400.0, note="squares over 65504")
    yield _normalized("large_eps", (40, 32), F16, eps=8.5, note="about half of the norms are less")
    yield _normalized("scaled", (2, 4, 24, 64), F16, factor=(64,))


def image_norms() -> Iterator[Case]:
    image, last = (3, 16, 12, 10), "channels_last"
    norms = {
        **{
            f"instance_{SHORT[dtype]}_{name}": ImageNorm(image, dtype, params=params, at=at)
            for dtype in (F16, BF16, F32)
            for name, params, at in (
                ("nchw", F32, None),
                ("nhwc", dtype, last),
                ("without_affine", None, last),
            )
        },
        "instance_relu": ImageNorm(image, act="relu", at=last),
        "instance_residual_silu": ImageNorm(image, residual=True, act="silu"),
        "instance_stats": ImageNorm(image, stats=True, at=last),
        "instance_stats_relu": ImageNorm(image, BF16, stats=True, act="relu"),
        "instance_line": ImageNorm((3, 16, 50)),
        "instance_volume": ImageNorm((2, 8, 5, 6, 7), at=last, eps=1e-3),
        "instance_gaps": ImageNorm(image, at=(4000, 200, 12, 1)),
        "instance_float64": ImageNorm(image, F64, params=F64),
        "instance_no_images": ImageNorm((0, 16, 12, 10)),
        **{
            f"group_{SHORT[dtype]}": ImageNorm(image, dtype, 4, params=params)
            for dtype, params in ((F16, F32), (BF16, BF16), (F32, F32))
        },
        "group_residual_silu": ImageNorm(image, BF16, 4, params=BF16, residual=True, act="silu"),
        "group_channels_last": ImageNorm(image, F16, 4, at=last),
        "group_one": ImageNorm(image, F16, 1),
        "group_each": ImageNorm(image, F16, 16),
        "group_without_affine": ImageNorm(image, F32, 4, params=None),
        "group_line": ImageNorm((3, 16, 50), F32, 4),
        "group_flat": ImageNorm((6, 64), F32, 4),
        "group_float64": ImageNorm(image, F64, 4, params=F64),
    }
    affine = {
        **{
            SHORT[dtype]: ImageNorm(image, dtype, 4, params=params, at=last)
            for dtype, params in ((F16, F16), (BF16, F32), (F32, F32), (F64, F64))
        },
        "silu": ImageNorm(image, F16, 8, params=F16, act="silu", at=last),
        "one": ImageNorm(image, BF16, 1, params=BF16, at=last),
        "each": ImageNorm(image, F16, 16, params=None, at=last),
        "bare": ImageNorm(image, F16, 4, params=None, at=last),
        "single": ImageNorm((1, 64, 6, 8), F16, 32, params=F16, at=last),
        "volume": ImageNorm((2, 8, 5, 6, 7), F16, 4, params=F16, at=last),
        "contiguous": ImageNorm(image, F16, 4, params=F16),
    }
    affine = {name: replace(norm, affine=True) for name, norm in affine.items()}
    for family, many in (("image_norm", norms), ("group_affine", affine)):
        for name, norm in many.items():
            terms = math.prod(norm.x) // max(norm.x[0], 1)
            far = norm.affine and norm.dtype in (F16, BF16)
            fills = _FAR_FILLS if far else _IMAGE_FILLS
            label = f"{family}-{name}"
            yield Case(label, family, norm.dtype, norm.build, norm.eager, fills, terms=terms)


def image_norm_gradients() -> Iterator[Case]:
    image, last = (3, 16, 12, 10), "channels_last"
    norms = {
        **{
            f"{SHORT[dtype]}_{name}": ImageNorm(image, dtype, params=params, at=at)
            for dtype in (F16, BF16, F32)
            for name, params, at in (("nchw", F32, None), ("nhwc", dtype, last))
        },
        "without_affine": ImageNorm(image, F16, params=None),
        "line": ImageNorm((3, 16, 50), F16),
        "volume": ImageNorm((2, 8, 5, 6, 7), BF16, at=last),
        "float64": ImageNorm(image, F64, params=F64, at=last),
    }
    for name, norm in norms.items():
        yield gradient_case(
            f"instance_norm_{name}",
            norm.dtype,
            norm.backward,
            norm.eager_backward,
            _IMAGE_FILLS,
            terms=math.prod(norm.x),
        )


@dataclass(frozen=True)
class TrainingNorm:
    """Batch normalisation in training; x (N, C, ...)."""

    x: Shape = (4, 16, 6, 10)
    dtype: torch.dtype = F32
    params: torch.dtype = F32
    running: bool = True
    statistics: bool = True  # mean and inv_std are outputs too
    relu: bool = False  # behind the norm
    shift: bool = False  # a number per channel added between the two
    layout: Layout = "channels_last"
    eps: float = 1e-5
    momentum: float = 0.1

    def forward(self) -> cg.Graph:
        g = cg.Graph("norm")
        x = g.input("x", self.x, self.dtype, **at_layout(self.layout))
        names = ["gamma", "beta"] + ["mean", "var"] * self.running
        given = [g.input(name, (self.x[1],), self.params) for name in names]
        y, *results = g.batch_norm_train(x, *given, eps=self.eps, momentum=self.momentum)
        if self.shift:
            y = y + g.input("shift", (1, self.x[1], *(1,) * (len(self.x) - 2)), self.dtype)
        g.output("y", g.relu(y) if self.relu else y)
        if self.statistics:
            g.output("batch_mean", results[0])
            g.output("inv_std", results[1])
        if self.running:
            g.output("next_mean", results[2])
            g.output("next_var", results[3])
        return g

    def eager(self, t: Tensors) -> Tensors:
        x = t["x"]
        running = [t[name].clone() for name in ("mean", "var")] if self.running else [None, None]
        wide = torch.promote_types(x.dtype, F32)
        gamma, beta = (t[name].to(t["gamma"].dtype) for name in ("gamma", "beta"))
        done = {"y": F.batch_norm(x, *running, gamma, beta, True, self.momentum, self.eps)}
        if self.shift:
            done["y"] = done["y"] + t["shift"]
        if self.relu:
            done["y"] = F.relu(done["y"])
        if self.statistics:
            dims = [dim for dim in range(x.dim()) if dim != 1]
            var, mean = torch.var_mean(x.to(wide), dims, correction=0)
            done |= {"batch_mean": mean, "inv_std": (var + self.eps).rsqrt()}
        if self.running:
            done |= dict(zip(("next_mean", "next_var"), running, strict=True))
        return done

    def backward(self) -> cg.Graph:
        g = cg.Graph("norm_backward")
        dy = g.input("dy", self.x, self.dtype, **at_layout(self.layout))
        x = g.input("x", self.x, self.dtype, **at_layout(self.layout))
        gamma, beta = (g.input(name, (self.x[1],), self.params) for name in ("gamma", "beta"))
        _, mean, inv_std = g.batch_norm_train(x, gamma, beta, eps=self.eps)[:3]
        grad = dy
        if self.relu:
            grad = g.relu_backward(dy, g.batch_norm_apply(x, mean, inv_std, gamma, beta))
        grads = g.batch_norm_backward(grad, x, gamma, mean, inv_std)
        for name, grad in zip(("dx", "dgamma", "dbeta"), grads, strict=True):
            g.output(name, grad)
        return g

    def eager_backward(self, t: Tensors) -> Tensors:
        def forward(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
            y = F.batch_norm(x, None, None, gamma, beta, True, 0.1, self.eps)
            return F.relu(y) if self.relu else y

        grads = grads_of(
            forward,
            [t["x"], t["gamma"], t["beta"]],
            t["dy"],
        )
        return dict(zip(("dx", "dgamma", "dbeta"), grads, strict=True))

    @property
    def terms(self) -> int:
        return math.prod(self.x) // self.x[1]


def training_norms() -> Iterator[Case]:
    norm = TrainingNorm()
    cases: dict[str, TrainingNorm] = {
        "plain": norm,
        "no_running": replace(norm, running=False),
        "y_alone": replace(norm, running=False, statistics=False),
        "contiguous": replace(norm, layout=None),
        "rows": replace(norm, x=(24, 16), layout=None),
        "1d": replace(norm, x=(4, 16, 20), layout=None),
        "3d": replace(norm, x=(2, 16, 3, 4, 5)),
        "momentum": replace(norm, momentum=0.3, eps=1e-3),
        "half": replace(norm, dtype=F16),
        "half_params": replace(norm, dtype=F16, params=F16),
        "bfloat": replace(norm, dtype=BF16),
        "double": replace(norm, dtype=F64, params=F64),
        "relu": replace(norm, relu=True),
        "relu_half": replace(norm, dtype=F16, relu=True),
        "relu_bfloat": replace(norm, dtype=BF16, relu=True),
        "relu_3d": replace(norm, x=(2, 16, 3, 4, 5), dtype=F16, relu=True),
        "shift_relu_half": replace(norm, dtype=F16, relu=True, shift=True),
        "relu_rows": replace(norm, x=(32, 16), layout=None, dtype=BF16, relu=True),
    }
    fills = {"gamma": uniform(0.5, 1.5), "var": uniform(0.5, 1.5), "x": normal(1.5, 0.5)}
    for name, one in cases.items():
        yield gradient_case(
            f"norm_{name}", one.dtype, one.forward, one.eager, fills, terms=one.terms
        )
        if one.statistics and one.running and not one.shift:
            yield gradient_case(
                f"norm_backward_{name}",
                one.dtype,
                one.backward,
                one.eager_backward,
                fills,
                terms=one.terms,
            )


def trailing_norm_gradients() -> Iterator[Case]:
    """The gradients of layer_norm and rms_norm, with the forward that gives their statistics."""
    shapes: dict[str, tuple[Shape, Shape, Layout]] = {
        "plain": ((4, 24, 64), (64,), None),
        "two_dims": ((6, 5, 8, 16), (8, 16), None),
        "flat": ((32, 128), (128,), None),
    }
    for kind in ("layer_norm", "rms_norm"):
        for name, (shape, last, layout) in shapes.items():
            for dtype, params, bias in (
                (F16, F32, True),
                (F16, F16, True),
                (BF16, F32, False),
                (F32, F32, True),
                (F64, F64, True),
            ):
                if name != "plain" and dtype in (BF16, F64):
                    continue

                def build(
                    kind: str = kind,
                    shape: Shape = shape,
                    last: Shape = last,
                    layout: Layout = layout,
                    dtype: torch.dtype = dtype,
                    params: torch.dtype = params,
                    bias: bool = bias,
                ) -> cg.Graph:
                    g = cg.Graph(f"{kind}_gradient")
                    dy, x = (g.input(key, shape, dtype, **at_layout(layout)) for key in ("dy", "x"))
                    w = g.input("w", last, params)
                    _, *stats = getattr(g, kind)(x, w, return_stats=True)
                    method = getattr(g, f"{kind}_backward")
                    grads = method(dy, x, w, *stats, bias_grad=bias)
                    for key, grad in zip(("dx", "dw", "db"), grads, strict=False):
                        g.output(key, grad)
                    return g

                def eager(t: Tensors, kind: str = kind, bias: bool = bias) -> Tensors:
                    w = t["w"].to(t["w"].dtype)
                    zero = torch.zeros_like(w)

                    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                        wide = torch.promote_types(x.dtype, w.dtype)
                        run = F.layer_norm if kind == "layer_norm" else F.rms_norm
                        y = run(x.to(wide), w.shape, w.to(wide), eps=1e-5)
                        return (y + b).to(x.dtype)

                    dx, dw, db = grads_of(forward, [t["x"], w, zero], t["dy"])
                    done = {"dx": dx, "dw": dw}
                    return {**done, "db": db} if bias else done

                vectors = "" if params == dtype else "_fp32_params"
                yield gradient_case(
                    f"{kind}_{name}{vectors}",
                    dtype,
                    build,
                    eager,
                    {"w": uniform(0.5, 1.5), "x": normal(1.0, 0.3)},
                    terms=math.prod(shape),
                )
