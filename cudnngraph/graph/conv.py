"""Convolutions: plain, transposed, their gradients, and the blocks that begin with one."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import Problem
from .linear import LinearMethods
from .norm import NormMethods
from .value import Ints, Padding, Value


def _of_one_dtype(*values: Value | None) -> bool:
    """Whether those that are given, and known, are."""
    return len({value.spec.dtype for value in values if value is not None and value.spec}) < 2


class ConvMethods(LinearMethods, NormMethods):
    """Convolutions, and convolutions with what follows them."""

    def conv(
        self,
        x: Value,
        weight: Value,
        *,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        name: str | None = None,
    ) -> Value:
        """Convolution in 1, 2 or 3 spatial dims (torch.nn.functional.conv2d without its bias).

        x (N, C, spatial...), weight (K, C/groups, kernel...) of one dtype → (N, K, out...), with
        ``out = floor((in + before + after - dilation * (kernel - 1) - 1) / stride) + 1``.
        ``padding`` is an int, one per dim, (before, after) pairs per dim, "valid" or "same".
        Of int8 the result is int32, of FP8 (either format, or one of each) float32.
        """
        return self._one(
            "conv",
            x,
            weight,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            name=name,
        )

    def conv_transpose(
        self,
        x: Value,
        weight: Value,
        *,
        stride: Ints = 1,
        padding: Padding = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
        name: str | None = None,
    ) -> Value:
        """Transposed convolution in 1, 2 or 3 spatial dims (F.conv_transpose2d without its bias).

        x (N, C, spatial...), weight (C, K/groups, kernel...) → (N, K, out...), with ``out =
        (in - 1) * stride - before - after + dilation * (kernel - 1) + output_padding + 1``.
        Of int8 the result is int32, of FP8 float32.
        """
        return self._one(
            "conv_transpose",
            x,
            weight,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            dilation=dilation,
            name=name,
        )

    def conv_wgrad(
        self,
        dy: Value,
        x: Value,
        *,
        kernel: Ints,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        name: str | None = None,
    ) -> Value:
        """Gradient of a convolution's weight, of ``conv(x, weight, ...)`` with the result's dy.

        dy (N, K, out...), x (N, C, spatial...) of one dtype → (K, C/groups, kernel...);
        ``kernel`` holds the weight's spatial sizes, which dy and x do not tell. The gradient of x
        is ``conv_transpose(dy, weight, ...)``.
        """
        return self._one(
            "conv_wgrad",
            dy,
            x,
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            name=name,
        )

    # -- blocks --------------------------------------------------------------------------------

    def _epilogue(
        self,
        y: Value,
        bias: Value | None,
        residual: Value | None,
        alpha1: float,
        alpha2: float,
        activation: str | None,
        attrs: dict[str, Any],
    ) -> Value:
        """act(alpha1 * y + alpha2 * residual + bias).

        The residual comes before the bias: cuDNN has precompiled engines for that order. With both
        factors the bias comes first, since the engines for that pattern crash (see known_bad.py);
        so it does where the residual is of a dtype of its own, which would become the sum's, or of
        more dims, among which the channels would be another's.
        """
        if alpha1 != 1:
            y = self.mul(y, alpha1)
        scaled = residual if residual is None or alpha2 == 1 else self.mul(residual, alpha2)
        terms = [(self.add, scaled), (self.bias, bias)]
        ranks = [len(v.spec.shape) for v in (y, residual) if v is not None and v.spec]
        wider = ranks != sorted(ranks, reverse=True)
        if (alpha1 != 1 and alpha2 != 1) or wider or not _of_one_dtype(bias, residual):
            terms.reverse()
        for add, term in terms:
            y = y if term is None else add(y, term)
        return self.activation(y, activation, **attrs)

    def conv_bias_act(
        self,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        *,
        activation: str | None = "relu",
        residual: Value | None = None,
        alpha1: float = 1.0,
        alpha2: float = 1.0,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        **activation_attrs: Any,
    ) -> Value:
        """act(alpha1 * conv(x, weight) + alpha2 * residual + bias)."""
        y = self.conv(x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
        return self._epilogue(y, bias, residual, alpha1, alpha2, activation, activation_attrs)

    def conv_bn_act(
        self,
        x: Value,
        weight: Value,
        running_mean: Value,
        running_var: Value,
        bn_weight: Value | None = None,
        bn_bias: Value | None = None,
        *,
        bias: Value | None = None,
        eps: float = 1e-5,
        activation: str | None = "relu",
        residual: Value | None = None,
        alpha1: float = 1.0,
        alpha2: float = 1.0,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        **activation_attrs: Any,
    ) -> Value:
        """act(alpha1 * batch_norm(conv(x, weight) + bias) + alpha2 * residual)."""
        y = self.conv(x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
        y = y if bias is None else self.bias(y, bias)
        y = self.batch_norm(y, running_mean, running_var, bn_weight, bn_bias, eps=eps)
        return self._epilogue(y, None, residual, alpha1, alpha2, activation, activation_attrs)

    def conv_transpose_bias_act(
        self,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        *,
        activation: str | None = "relu",
        residual: Value | None = None,
        alpha1: float = 1.0,
        alpha2: float = 1.0,
        stride: Ints = 1,
        padding: Padding = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
        **activation_attrs: Any,
    ) -> Value:
        """act(alpha1 * conv_transpose(x, weight) + alpha2 * residual + bias)."""
        y = self.conv_transpose(
            x,
            weight,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            dilation=dilation,
        )
        return self._epilogue(y, bias, residual, alpha1, alpha2, activation, activation_attrs)

    def depthwise_separable(
        self,
        x: Value,
        depthwise: Value,
        pointwise: Value,
        depthwise_bias: Value | None = None,
        pointwise_bias: Value | None = None,
        *,
        activation: str | None = "relu",
        pointwise_activation: str | None = "relu",
        residual: Value | None = None,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
    ) -> Value:
        """A convolution of each channel by itself, then one of 1 x 1 over the channels.

        x (N, C, spatial...), depthwise (C M, 1, kernel...), pointwise (K, C M, 1, ...) → (N, K,
        out...): ``act(conv(act(conv(x, depthwise) + bias), pointwise) + residual + bias)``.
        """
        groups = 1 if x.spec is None or len(x.spec.shape) < 2 else x.spec.shape[1]
        y = self.conv_bias_act(
            x,
            depthwise,
            depthwise_bias,
            activation=activation,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )
        return self.conv_bias_act(
            y, pointwise, pointwise_bias, activation=pointwise_activation, residual=residual
        )

    def quantized_conv_bias_act(
        self,
        x: Value,
        weight: Value,
        scale: Value,
        bias: Value | None = None,
        *,
        out_scale: Value | None = None,
        dtype: torch.dtype | None = None,
        activation: str | None = "relu",
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        **activation_attrs: Any,
    ) -> Value:
        """quantize(act(dequantize(conv(x, weight), scale) + bias), out_scale) of int8 or FP8 data.

        ``scale`` is the product of those of x and weight: () or (1,), or (K,) for a weight with a
        scale per channel. bias float32. ``dtype`` is the 8-bit dtype of the result; with None it
        stays float32, to be given another floating dtype by ``output(dtype=...)``.
        """
        y = self.conv(x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
        y = self.dequantize(y, scale)
        y = y if bias is None else self.bias(y, bias)
        y = self.activation(y, activation, **activation_attrs)
        if dtype is None:
            if out_scale is not None:
                self.problems.append(
                    Problem("quantized_conv_bias_act", "out_scale without dtype", "both or neither")
                )
            return y
        return self.quantize(y, out_scale, dtype=dtype)
