"""Pointwise methods: activations, arithmetic, comparisons, vectors per channel."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import Problem
from ..ops.table import OPS
from .core import Core
from .value import Operand, Value

ACTIVATIONS = (
    "relu",
    "leaky_relu",
    "elu",
    "gelu",
    "gelu_tanh",
    "silu",
    "sigmoid",
    "tanh",
    "softplus",
    "mish",
    "clamp",
    "relu6",
    "hardswish",
    "identity",
)


def _is_float(x: Operand) -> bool:
    return isinstance(x, Value) and x.spec is not None and x.spec.dtype.is_floating_point


class PointwiseMethods(Core):
    """Ops on each element by itself."""

    # -- per channel ---------------------------------------------------------------------------

    def bias(self, x: Value, bias: Value, *, name: str | None = None) -> Value:
        """x + bias, bias (C,) along dim 1 of x (N, C, ...). bias has x's dtype, or float32.

        Also (1, C, 1, ...) and, for each image its own, (N, C, 1, ...).
        """
        return self._one("bias", x, bias, name=name)

    def scale(self, x: Value, scale: Value, *, name: str | None = None) -> Value:
        """x * scale, scale (C,) along dim 1 of x (N, C, ...). scale has x's dtype, or float32.

        Also (1, C, 1, ...) and, for each image its own, (N, C, 1, ...).
        """
        return self._one("scale", x, scale, name=name)

    # -- activations ---------------------------------------------------------------------------

    def relu(self, x: Value, *, name: str | None = None) -> Value:
        """max(x, 0)."""
        return self._one("relu", x, name=name)

    def leaky_relu(
        self, x: Value, negative_slope: float = 0.01, *, name: str | None = None
    ) -> Value:
        """x where x > 0, else negative_slope * x."""
        return self._one("leaky_relu", x, negative_slope=negative_slope, name=name)

    def elu(self, x: Value, alpha: float = 1.0, *, name: str | None = None) -> Value:
        """x where x > 0, else alpha * (exp(x) - 1)."""
        return self._one("elu", x, alpha=alpha, name=name)

    def gelu(self, x: Value, approximate: str = "none", *, name: str | None = None) -> Value:
        """x * Phi(x), by erf ("none") or by tanh ("tanh")."""
        if approximate not in ("none", "tanh"):
            self.problems.append(
                Problem(
                    f"gelu '{name or 'gelu'}'", f"approximate={approximate!r}", "'none' or 'tanh'"
                )
            )
        return self._one("gelu_tanh" if approximate == "tanh" else "gelu", x, name=name)

    def gelu_tanh(self, x: Value, *, name: str | None = None) -> Value:
        """GELU by its tanh approximation."""
        return self._one("gelu_tanh", x, name=name)

    def silu(self, x: Value, *, name: str | None = None) -> Value:
        """x * sigmoid(x), also called swish."""
        return self._one("silu", x, name=name)

    def sigmoid(self, x: Value, *, name: str | None = None) -> Value:
        """1 / (1 + exp(-x))."""
        return self._one("sigmoid", x, name=name)

    def tanh(self, x: Value, *, name: str | None = None) -> Value:
        """Hyperbolic tangent."""
        return self._one("tanh", x, name=name)

    def softplus(self, x: Value, beta: float = 1.0, *, name: str | None = None) -> Value:
        """log(1 + exp(beta * x)) / beta."""
        return self._one("softplus", x, beta=beta, name=name)

    def mish(self, x: Value, *, name: str | None = None) -> Value:
        """x * tanh(log(1 + exp(x))) (arXiv 1908.08681)."""
        return self._one("mish", x, name=name)

    def clamp(
        self,
        x: Value,
        min: float | None = None,
        max: float | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """x held within [min, max]; either bound may be None.

        The gradient at a bound is 0, whichever torch is installed, as of its relu, relu6 and
        hardtanh. torch.clamp's is 0 from 2.14 on, and was dy before.
        """
        return self._one("clamp", x, min=min, max=max, name=name)

    def relu_backward(
        self, dy: Value, y: Value, negative_slope: float = 0.0, *, name: str | None = None
    ) -> Value:
        """dy where y > 0, else negative_slope * dy; y is the relu's result, or what went in.

        Where y is NaN it is dy if the slope is 0, else negative_slope * dy, as in torch.
        """
        return self._one("relu_backward", dy, y, negative_slope=negative_slope, name=name)

    def gelu_backward(self, dy: Value, x: Value, *, name: str | None = None) -> Value:
        """dy times the slope of gelu at x."""
        return self._one("gelu_backward", dy, x, name=name)

    def gelu_tanh_backward(self, dy: Value, x: Value, *, name: str | None = None) -> Value:
        """dy times the slope of gelu_tanh at x."""
        return self._one("gelu_tanh_backward", dy, x, name=name)

    def silu_backward(self, dy: Value, x: Value, *, name: str | None = None) -> Value:
        """dy times the slope of silu at x."""
        return self._one("silu_backward", dy, x, name=name)

    def relu6(self, x: Value) -> Value:
        """x held within [0, 6]."""
        return self.clamp(x, 0.0, 6.0)

    def hardswish(self, x: Value) -> Value:
        """x * relu6(x + 3) / 6, as a composition."""
        return self.mul(x, self.mul(self.relu6(self.add(x, 3.0)), 1.0 / 6.0))

    def activation(self, x: Value, kind: str | None, **attrs: Any) -> Value:
        """Apply the activation named ``kind`` with its attributes; None leaves x as it is."""
        if kind is None or kind == "identity":
            return x
        if not isinstance(kind, str) or kind not in ACTIVATIONS:
            self.problems.append(
                Problem(
                    "activation", f"{kind!r} is unknown", f"one of {', '.join(ACTIVATIONS)}, None"
                )
            )
            return self._unknown(x)
        if kind in OPS:
            return self._one(kind, x, **attrs)
        if attrs:
            self.problems.append(
                Problem("activation", f"{kind} takes no attributes, got {', '.join(attrs)}")
            )
        return getattr(self, kind)(x)  # type: ignore[no-any-return]

    # -- arithmetic ----------------------------------------------------------------------------

    def add(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x + y, broadcasting as torch does; so for the other arithmetic.

        The result's dtype is torch's: operands with dims decide it, then those without, then
        numbers. Of those that decide, float32 may stand beside one 16-bit dtype, no others mix.
        """
        return self._one("add", x, y, name=name)

    def sub(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x - y."""
        return self._one("sub", x, y, name=name)

    def mul(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x * y."""
        return self._one("mul", x, y, name=name)

    def div(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x / y."""
        return self._one("div", x, y, name=name)

    def pow(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x to the power y.

        A number y of 0.5 or -0.5 gives ``sqrt`` or ``rsqrt``, as torch's does: NaN of -inf.
        """
        power = self._number(y)
        if power in (0.5, -0.5) and _is_float(x):
            return self._one("sqrt" if power == 0.5 else "rsqrt", x, name=name)
        return self._one("pow", x, y, name=name)

    def minimum(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """The smaller of x and y."""
        return self._one("minimum", x, y, name=name)

    def maximum(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """The larger of x and y."""
        return self._one("maximum", x, y, name=name)

    def identity(self, x: Value, *, name: str | None = None) -> Value:
        """x itself; with ``output(dtype=..., layout=...)`` a conversion."""
        return self._one("identity", x, name=name)

    def cast(self, x: Value, dtype: torch.dtype, *, name: str | None = None) -> Value:
        """x, of any floating dtype, as another: as an output, and where it is kept between steps.

        Within a plan or a kernel nothing is rounded: values there are of the intermediate dtype.
        """
        return self._one("cast", x, dtype=dtype, name=name)

    def to_float(self, x: Value, *, name: str | None = None) -> Value:
        """x (uint8, int8 or int32) as float32."""
        return self._one("to_float", x, name=name)

    def neg(self, x: Value, *, name: str | None = None) -> Value:
        """-x."""
        return self._one("neg", x, name=name)

    def abs(self, x: Value, *, name: str | None = None) -> Value:
        """|x|."""
        return self._one("abs", x, name=name)

    def exp(self, x: Value, *, name: str | None = None) -> Value:
        """e to the power x."""
        return self._one("exp", x, name=name)

    def log(self, x: Value, *, name: str | None = None) -> Value:
        """Natural logarithm."""
        return self._one("log", x, name=name)

    def sqrt(self, x: Value, *, name: str | None = None) -> Value:
        """Square root."""
        return self._one("sqrt", x, name=name)

    def rsqrt(self, x: Value, *, name: str | None = None) -> Value:
        """1 / sqrt(x)."""
        return self._one("rsqrt", x, name=name)

    def reciprocal(self, x: Value, *, name: str | None = None) -> Value:
        """1 / x."""
        return self._one("reciprocal", x, name=name)

    def erf(self, x: Value, *, name: str | None = None) -> Value:
        """Gauss error function."""
        return self._one("erf", x, name=name)

    # -- comparison and selection --------------------------------------------------------------

    def eq(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x == y, as bool; so for the other comparisons."""
        return self._one("eq", x, y, name=name)

    def ne(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x != y."""
        return self._one("ne", x, y, name=name)

    def lt(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x < y."""
        return self._one("lt", x, y, name=name)

    def le(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x <= y."""
        return self._one("le", x, y, name=name)

    def gt(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x > y."""
        return self._one("gt", x, y, name=name)

    def ge(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x >= y."""
        return self._one("ge", x, y, name=name)

    def logical_and(self, x: Value, y: Value, *, name: str | None = None) -> Value:
        """x and y, both bool."""
        return self._one("logical_and", x, y, name=name)

    def logical_or(self, x: Value, y: Value, *, name: str | None = None) -> Value:
        """x or y, both bool."""
        return self._one("logical_or", x, y, name=name)

    def logical_not(self, x: Value, *, name: str | None = None) -> Value:
        """not x, bool."""
        return self._one("logical_not", x, name=name)

    def where(self, condition: Value, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x where condition (bool) holds, else y; what is not selected may be NaN."""
        return self._one("where", condition, x, y, name=name)
