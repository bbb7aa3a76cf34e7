"""Matrix products, the layers made of them, and 8-bit data."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import Problem
from .pointwise import PointwiseMethods
from .shape import ShapeMethods
from .value import Value


class LinearMethods(ShapeMethods, PointwiseMethods):
    """Matrix products, linear layers, quantisation."""

    # -- matrix product ------------------------------------------------------------------------

    def matmul(self, x: Value, y: Value, *, name: str | None = None) -> Value:
        """Matrix product, also ``x @ y`` (torch.matmul of 2 to 4 dims).

        x (..., M, K), y (..., K, N) of one dtype → (..., M, N), contiguous; the dims before the
        last two broadcast. A transposed operand is one of other strides. Of int8 the result is
        int32, of FP8 (either format, or one of each) float32.
        """
        return self._one("matmul", x, y, name=name)

    def grouped_matmul(self, x: Value, y: Value, ends: Value, *, name: str | None = None) -> Value:
        """Product of each group of rows with a matrix of its own (torch's grouped_mm).

        x (M, K), whose rows lie group behind group; y (G, K, N) of the same dtype; ends (G,) int32,
        the number of rows up to the end of each group → (M, N), contiguous. A group may be empty.
        Rows behind the last end are zeros. Ends that fall, or that go beyond M, are a mistake.
        """
        return self._one("grouped_matmul", x, y, ends, name=name)

    def grouped_matmul_wgrad(
        self, x: Value, dy: Value, ends: Value, *, name: str | None = None
    ) -> Value:
        """Gradient of the matrices of :meth:`grouped_matmul`: x^T dy of each group of rows.

        x (M, K) and dy (M, N) of one dtype; ends (G,) int32 → (G, K, N), contiguous. The matrix of
        an empty group is zeros.
        """
        return self._one("grouped_matmul_wgrad", x, dy, ends, name=name)

    # -- quantisation --------------------------------------------------------------------------

    def dequantize(
        self,
        x: Value,
        scale: Value,
        *,
        dim: int = 1,
        zero_point: int = 0,
        name: str | None = None,
    ) -> Value:
        """x * scale, in float32: the numbers that 8-bit data, or the sums of their products, mean.

        x int8 or FP8, the int32 that products of int8 give, or the float32 of FP8's; scale float32,
        () or (1,) for all of x, or a vector along ``dim``. ``zero_point`` can only be 0.
        """
        return self._one("dequantize", x, scale, dim=dim, zero_point=zero_point, name=name)

    def quantize(
        self,
        x: Value,
        scale: Value | None = None,
        *,
        dtype: torch.dtype,
        dim: int = 1,
        zero_point: int = 0,
        name: str | None = None,
    ) -> Value:
        """x / scale in an 8-bit dtype: rounded to nearest, ties to even, and saturated.

        x of a floating dtype; scale as in :meth:`dequantize`, or None for 1. ``dtype`` is
        torch.int8 (-128 to 127), float8_e4m3fn (up to 448) or float8_e5m2 (up to 57344), in which
        what is not finite is NaN. ``zero_point`` can only be 0.
        """
        return self._one(
            "quantize", x, scale, dtype=dtype, dim=dim, zero_point=zero_point, name=name
        )

    # -- layers --------------------------------------------------------------------------------

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """x weight^T + bias (F.linear): x (..., K), weight (N, K), bias (N,) → (..., N)."""
        spec = weight.spec
        if spec is not None and len(spec.shape) != 2:
            what = f"weight '{spec.name}' has shape {spec.shape}"
            self.problems.append(Problem("linear", what, "(N, K)"))
            return self._unknown(x, weight, bias)
        y = self.matmul(x, self.transpose(weight, 0, 1))
        if bias is None:
            return y
        z = self.add(y, bias)
        if y.spec is not None and z.spec is not None and z.spec.shape != y.spec.shape:
            what = f"bias '{bias.name.lstrip('%')}' has shape {bias.shape}"
            self.problems.append(Problem("linear", what, f"(N,) = {y.spec.shape[-1:]}"))
            return self._unknown(x, weight, bias)
        return z

    def swiglu(self, x: Value, w_gate: Value, w_up: Value) -> Value:
        """silu(x w_gate) * (x w_up): x (..., K), both weights (K, N) → (..., N)."""
        return self.mul(self.silu(self.matmul(x, w_gate)), self.matmul(x, w_up))

    def geglu(self, x: Value, w_gate: Value, w_up: Value, approximate: str = "none") -> Value:
        """gelu(x w_gate) * (x w_up): x (..., K), both weights (K, N) → (..., N)."""
        return self.mul(self.gelu(self.matmul(x, w_gate), approximate), self.matmul(x, w_up))

    def mlp(
        self,
        x: Value,
        up: Value,
        up_bias: Value | None,
        down: Value,
        down_bias: Value | None = None,
        *,
        gate: Value | None = None,
        gate_bias: Value | None = None,
        activation: str | None = "gelu",
        **activation_attrs: Any,
    ) -> Value:
        """Two linear layers, down(act(up(x))), or with a gate down(act(gate(x)) * up(x)).

        x (..., K); up and gate (F, K) and down (N, F) as F.linear has them, biases (F,) and (N,)
        → (..., N).
        """
        inner = self.linear(x, up, up_bias)
        if gate is None:
            inner = self.activation(inner, activation, **activation_attrs)
        else:
            opened = self.activation(
                self.linear(x, gate, gate_bias), activation, **activation_attrs
            )
            inner = self.mul(opened, inner)
        return self.linear(inner, down, down_bias)
