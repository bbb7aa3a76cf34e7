"""Layer, RMS, group and instance norm, fused with a residual and an activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..arguments import NotPlain, explained, items, number
from ..errors import GraphError, Problem
from ..ops.meta import default_eps
from ..policy import Policy
from ..runtime.specialize import intern_static
from .call import product_options, run_graph, sorted_attrs
from .graphs import summed_norm_act

Tensor = torch.Tensor


def summed_norm_options(
    kind: str,
    eps: float,
    num_groups: int,
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
) -> dict[str, Any]:
    """The options of :func:`summed_norm_act`."""
    made = {"kind": kind, "eps": number(eps), **product_options(activation, attrs)}
    return {**made, "num_groups": num_groups} if kind == "group_norm" else made


def _norm(
    kind: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    attrs: dict[str, Any],
    policy: Policy | None,
    num_groups: int = 0,
) -> Any:
    static = intern_static(
        summed_norm_options, kind, eps, num_groups, activation, sorted_attrs(attrs)
    )
    tensors = (x, residual, weight, bias)
    result = run_graph(summed_norm_act, policy, tensors, static, 1 if residual is None else 2)
    return result if residual is None else tuple(result)


def _trailing(name: str, x: Tensor, shape: Sequence[int], weight: Tensor | None) -> Tensor:
    """The weight of a norm over the last dims of x, ones where there is none."""
    try:
        sizes = tuple(items(shape))
    except NotPlain as reason:
        problem = Problem(name, f"normalized_shape {reason}", "a tuple of whole numbers")
        raise GraphError(name, [problem]) from None
    if weight is None:
        return x.new_ones(sizes)
    if tuple(weight.shape) != sizes:
        what = f"weight has shape {tuple(weight.shape)}"
        problem = Problem(name, what, f"{sizes}, the normalized_shape")
        raise GraphError(name, [problem])
    return weight


@explained
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Any:
    """act(F.layer_norm(input + residual)) over the last dims; with a residual the pair (y, sum).

    Parameters have the dtype of the input or are float32; y has the input's. The sum is what comes
    out of the addition, in the input's dtype. Autocast changes nothing here.
    """
    weight = _trailing("layer_norm", input, normalized_shape, weight)
    return _norm(
        "layer_norm", input, residual, weight, bias, eps, activation, activation_attrs, policy
    )


@explained
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Any:
    """act(F.rms_norm(input + residual)) over the last dims; with a residual the pair (y, sum).

    ``eps`` defaults to the smallest step at 1 in the dtype that torch's computes in, which is
    float32 for 16 bits. Parameters have the input's dtype or are float32; y has the input's.
    """
    weight = _trailing("rms_norm", input, normalized_shape, weight)
    eps = default_eps(input.dtype) if eps is None else eps
    return _norm(
        "rms_norm", input, residual, weight, bias, eps, activation, activation_attrs, policy
    )


@explained
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Any:
    """act(F.group_norm(input + residual)) of (N, C, ...); with a residual the pair (y, sum).

    Weight and bias (C,) have the dtype of the input or are float32. y is contiguous, also where the
    input is channels_last.
    """
    return _norm(
        "group_norm",
        input,
        residual,
        weight,
        bias,
        eps,
        activation,
        activation_attrs,
        policy,
        num_groups,
    )


@explained
def instance_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Any:
    """act(F.instance_norm(input + residual)) of (N, C, ...); with a residual the pair (y, sum).

    By the statistics of each channel of each image, never by running ones. y lies as the input.
    """
    return _norm(
        "instance_norm", input, residual, weight, bias, eps, activation, activation_attrs, policy
    )
