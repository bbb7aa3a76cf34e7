"""Convolutions, plain and transposed, fused with bias, residual and activation."""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import explained, number
from ..errors import GraphError, Problem
from ..graph.value import Ints, Padding
from ..policy import Policy
from ..runtime.executable import transforming
from ..runtime.specialize import LastCall, Static, intern_static
from .call import cast, needed_out, remember, run_graph, run_into, sorted_attrs
from .graphs import conv_act

Tensor = torch.Tensor

_GEOMETRY = {
    4: ("stride", "padding", "dilation", "groups"),
    5: ("stride", "padding", "output_padding", "groups", "dilation"),
}


def act_options(
    geometry: tuple[Any, ...],
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
    alpha1: float = 1.0,
    alpha2: float = 1.0,
) -> dict[str, Any]:
    """The options of :func:`conv_act`. ``geometry`` has the values in the order of torch's
    functional: four of a convolution, five of a transposed one."""
    made: dict[str, Any] = {
        "transposed": len(geometry) == 5,
        "geometry": tuple(zip(_GEOMETRY[len(geometry)], geometry, strict=True)),
        "activation": activation,
        "attrs": attrs,
    }
    if alpha1 != 1 or alpha2 != 1:
        made |= {"alpha1": number(alpha1), "alpha2": number(alpha2)}
    return made


def _ranked(name: str, x: Tensor, rank: int) -> None:
    if x.dim() not in (rank + 1, rank + 2):
        dims = ", ".join(("D", "H", "W")[3 - rank :])
        wanted = f"{rank + 2}: (N, C, {dims}), or {rank + 1}: (C, {dims})"
        problem = Problem(name, f"x has {x.dim()} dims {tuple(x.shape)}", wanted)
        raise GraphError(name, [problem])


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def one_layout(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both channels_last where either is, as torch's own convolutions do."""
    layout = _CHANNELS_LAST.get(x.dim())
    if layout is None or weight.dim() != x.dim() or transforming():  # which cannot tell
        return x, weight
    if x.is_contiguous(memory_format=layout) and weight.is_contiguous(memory_format=layout):
        return x, weight
    for tensor in (x, weight):
        if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout):
            return x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    return x, weight


def run_conv_act(
    static: Static,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    policy: Policy | None,
    out: Tensor | None = None,
    recent: LastCall | None = None,
) -> Tensor:
    """:func:`conv_act` on tensors; its options come of :func:`act_options`. ``recent`` is the
    caller's, to find again what served it."""
    if x.dim() == weight.dim() - 1:  # one image
        added, into = (each if each is None else each.unsqueeze(0) for each in (residual, out))
        made = run_conv_act(static, x.unsqueeze(0), weight, bias, added, policy, into)
        return made.squeeze(0) if out is None else out
    tensors = (x, weight, bias, residual)
    if recent is not None:
        found: Tensor | None = recent.serve(static, policy, tensors)
        if found is not None:
            return found
    x, weight, bias = cast(x, weight, bias)
    if out is not None:
        return run_into(conv_act, policy, out, (x, weight, bias, residual), static)
    x, weight = one_layout(x, weight)
    given = (x, weight, bias, residual)
    result: Tensor = run_graph(conv_act, policy, given, static)
    remember(recent, conv_act, policy, tensors, given, static)
    return result


@explained
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv(input, weight) + residual + bias), as F.conv1d where neither is given."""
    _ranked("conv1d", input, 1)
    geometry = (stride, padding, dilation, groups)
    static = intern_static(act_options, geometry, activation, sorted_attrs(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv(input, weight) + residual + bias), as F.conv2d where neither is given."""
    _ranked("conv2d", input, 2)
    geometry = (stride, padding, dilation, groups)
    static = intern_static(act_options, geometry, activation, sorted_attrs(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv(input, weight) + residual + bias), as F.conv3d where neither is given."""
    _ranked("conv3d", input, 3)
    geometry = (stride, padding, dilation, groups)
    static = intern_static(act_options, geometry, activation, sorted_attrs(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_bias_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    activation: str | None = "relu",
    residual: Tensor | None = None,
    alpha1: float = 1.0,
    alpha2: float = 1.0,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(alpha1 * conv(input, weight) + alpha2 * residual + bias) in 1, 2 or 3 spatial dims."""
    geometry = (stride, padding, dilation, groups)
    static = intern_static(
        act_options, geometry, activation, sorted_attrs(activation_attrs), alpha1, alpha2
    )
    return run_conv_act(static, input, weight, bias, residual, policy, out)


def conv_bias_act_into(
    out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """:func:`conv_bias_act` into ``out``, whose strides are those that the call would give."""
    out = needed_out(out, "conv_bias_act_into")
    return conv_bias_act(input, weight, bias, out=out, **options)


@explained
def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv_transpose(input, weight) + residual + bias), else F.conv_transpose1d."""
    _ranked("conv_transpose1d", input, 1)
    geometry = (stride, padding, output_padding, groups, dilation)
    static = intern_static(act_options, geometry, activation, sorted_attrs(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv_transpose(input, weight) + residual + bias), else F.conv_transpose2d."""
    _ranked("conv_transpose2d", input, 2)
    geometry = (stride, padding, output_padding, groups, dilation)
    static = intern_static(act_options, geometry, activation, sorted_attrs(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(conv_transpose(input, weight) + residual + bias), else F.conv_transpose3d."""
    _ranked("conv_transpose3d", input, 3)
    geometry = (stride, padding, output_padding, groups, dilation)
    static = intern_static(act_options, geometry, activation, sorted_attrs(activation_attrs))
    return run_conv_act(static, input, weight, bias, residual, policy, out)


@explained
def conv_transpose_bias_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    activation: str | None = "relu",
    residual: Tensor | None = None,
    alpha1: float = 1.0,
    alpha2: float = 1.0,
    out: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(alpha1 * conv_transpose(input, weight) + alpha2 * residual + bias), 1 to 3 dims."""
    geometry = (stride, padding, output_padding, groups, dilation)
    static = intern_static(
        act_options, geometry, activation, sorted_attrs(activation_attrs), alpha1, alpha2
    )
    return run_conv_act(static, input, weight, bias, residual, policy, out)


def conv_transpose_bias_act_into(
    out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """:func:`conv_transpose_bias_act` into ``out``, of the strides that the call would give."""
    out = needed_out(out, "conv_transpose_bias_act_into")
    return conv_transpose_bias_act(input, weight, bias, out=out, **options)
