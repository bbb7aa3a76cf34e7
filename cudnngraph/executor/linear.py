"""Run a linear layer with its bias and activation as one call of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..ir.spec import GraphSpec, is_contiguous, view_strides
from ..ops.base import LOW_PRECISION

Tensors = Sequence[torch.Tensor]


def runs_whole(spec: GraphSpec) -> bool:
    """Whether torch has one call for a graph of several ops."""
    return _linear(spec) is not None


def _linear(spec: GraphSpec) -> tuple[str, str, str, str | None] | None:
    """The names of x, weight and bias of a linear layer, and the activation behind it.

    A product of two matrices, a vector added, ReLU or tanh-GELU if any: cuBLASLt has it as one.
    Dims before the rows of x are rows too, where they lie so.
    """
    ops = [node.op for node in spec.nodes]
    if ops[:2] != ["matmul", "add"] or ops[2:] not in ([], ["relu"], ["gelu_tanh"]):
        return None
    matmul, add, *rest = spec.nodes
    x, y = matmul.operands
    added = [name for name in add.operands if name != matmul.results[0]]
    if len(added) != 1 or len(spec.outputs) != 1 or added[0] not in spec.inputs:
        return None
    (bias,) = added
    if rest and rest[0].operands != add.results:
        return None
    tensors = spec.tensors
    kinds = {tensors[name].dtype for name in (x, y, bias, *spec.outputs)}
    ranks = [len(tensors[name].shape) for name in (x, y, bias)]
    if ranks[0] < 2 or ranks[1:] != [2, 1] or len(kinds) != 1:
        return None
    if not kinds <= {*LOW_PRECISION}:
        return None
    read, made = tensors[x], tensors[spec.outputs[0]]
    rows = (read.numel // max(read.shape[-1], 1), read.shape[-1])
    if view_strides(read.shape, read.stride, rows) is None:
        return None
    # Into rows that lie apart torch first copies the bias, and computes the activation behind.
    if not is_contiguous(made.shape, made.stride):
        return None
    if tensors[bias].shape[0] != tensors[y].shape[1]:
        return None
    return x, y, bias, rest[0].op if rest else None


def run_linear(spec: GraphSpec) -> Callable[[Tensors, Tensors], object] | None:
    found = _linear(spec)
    if found is None:
        return None
    x, y, bias = (spec.inputs.index(name) for name in found[:3])
    activation = found[3]
    if activation is None:
        return lambda given, out: torch.addmm(
            given[bias], _rows(given[x]), given[y], out=_rows(out[0])
        )
    gelu = activation == "gelu_tanh"
    return lambda given, out: torch.ops.aten._addmm_activation.out(
        given[bias], _rows(given[x]), given[y], use_gelu=gelu, out=_rows(out[0])
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])
