"""Linear layers fused with bias, residual and activation, and pairs of them as an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..arguments import explained
from ..errors import GraphError, Problem
from ..policy import Policy
from ..runtime.specialize import intern_static
from .call import cast, product_options, run_graph, sorted_attrs
from .graphs import gated_mlp, linear_act

Tensor = torch.Tensor


def _rows(x: Tensor) -> Tensor:
    """x with 2 to 4 dims, as products of a graph have them."""
    if 2 <= x.dim() <= 4:
        return x
    return x.unsqueeze(0) if x.dim() < 2 else x.flatten(0, -2)


def _rows_of(x: Tensor, lead: Sequence[int]) -> Tensor:
    """The rows of x as it broadcasts to these dims and its last one; one where all are the same."""
    if x.shape[:-1].numel() == 1:
        return x.reshape(1, -1)
    return x.expand(*lead, x.shape[-1]).flatten(0, -2)


def _broadcast(
    x: Tensor, residual: Tensor, features: Sequence[int]
) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Rows of x and of a residual that broadcasts with the product, and the shape of the result."""
    made = (*x.shape[:-1], *features)
    try:
        shape: Sequence[int] = torch.broadcast_shapes(made, residual.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        what = f"has shape {tuple(residual.shape)}, which does not broadcast"
        problem = Problem("residual", what, f"the result's, {made}")
        raise GraphError("linear_act", [problem]) from None
    if len(shape) <= 4:
        return _rows(x), _rows(residual if residual.dim() else residual.unsqueeze(0)), shape
    lead = shape[:-1]
    return _rows_of(x, lead), _rows_of(residual, lead), shape


@explained
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """act(F.linear(input, weight, bias) + residual): input (..., K), weight (N, K) → (..., N)."""
    x, weight, bias, residual = cast(input, weight, bias, residual)
    static = intern_static(product_options, activation, sorted_attrs(activation_attrs))
    features = weight.shape[:1]  # of a weight that is no matrix the graph says so
    shape: Sequence[int] = (*x.shape[:-1], *features)
    if residual is None or residual.shape == shape or weight.dim() != 2:
        rows, added = _rows(x), None if residual is None else _rows(residual)
    else:
        rows, added, shape = _broadcast(x, residual, features)
    y: Tensor = run_graph(linear_act, policy, (rows, weight, bias, added), static)
    return y.view(shape)


@explained
def mlp(
    input: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    gate_bias: Tensor | None = None,
    activation: str | None = "gelu",
    policy: Policy | None = None,
    **activation_attrs: Any,
) -> Tensor:
    """Two linear layers with an activation between, gated where there is a gate.

    input (..., K), up and gate (F, K), down (N, F) → (..., N): down's of act(up's), or with a gate
    of act(gate's) * up's.
    """
    tensors = cast(input, up, up_bias, gate, gate_bias, down, down_bias)
    static = intern_static(product_options, activation, sorted_attrs(activation_attrs))
    y: Tensor = run_graph(gated_mlp, policy, (_rows(tensors[0]), *tensors[1:]), static)
    return y.view(*input.shape[:-1], *down.shape[:1])
