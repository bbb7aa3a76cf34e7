"""The op table: the rows of all families in one order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..ir.spec import Node
from . import (
    aten,
    batch_norm,
    conv,
    image_norm,
    matmul,
    pointwise,
    quantize,
    reduction,
    resampling,
    row_norm,
    row_sums,
    shapes,
    softmax,
)
from .attention import dense, varlen
from .base import ROWS, Op

#: Importing a family registers its ops.
_FAMILIES = (
    aten,
    dense,
    varlen,
    batch_norm,
    conv,
    image_norm,
    matmul,
    pointwise,
    quantize,
    reduction,
    resampling,
    row_norm,
    row_sums,
    shapes,
    softmax,
)

#: The order of the documentation; an op that is not here follows behind.
_ORDER = (
    *("conv", "conv_transpose", "matmul", "grouped_matmul", "grouped_matmul_wgrad"),
    *("layer_norm", "rms_norm", "normalize", "sdpa"),
    *("sdpa_paged", "sdpa_varlen", "sdpa_varlen_backward", "ragged_offsets", "sdpa_fp8"),
    *("conv_wgrad", "layer_norm_backward", "rms_norm_backward", "sdpa_backward"),
    *("batch_norm_train", "batch_norm_backward", "instance_norm", "instance_norm_backward"),
    *("reduction", "expand", "batch_norm", "batch_norm_apply", "dequantize", "quantize", "bias"),
    *("scale", "relu", "leaky_relu", "elu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"),
    *("softplus", "mish", "clamp", "relu_backward", "gelu_backward", "gelu_tanh_backward"),
    *("silu_backward", "identity", "cast", "to_float", "neg", "abs", "exp", "log", "sqrt"),
    *(
        "rsqrt",
        "reciprocal",
        "erf",
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "minimum",
        "maximum",
        "eq",
        "ne",
    ),
    *("lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "where", "reshape"),
    *("transpose", "permute", "slice", "concat", "aten", "group_affine", "softmax"),
    *("softmax_backward", "log_softmax", "log_softmax_backward", "nll_loss", "nll_loss_backward"),
    *("max_pool", "max_pool_backward", "avg_pool", "avg_pool_backward", "adaptive_avg_pool"),
    *("adaptive_avg_pool_backward", "adaptive_max_pool", "adaptive_max_pool_backward"),
    *("interpolate", "interpolate_backward", "constant"),
)

OPS: Mapping[str, Op] = MappingProxyType({name: ROWS[name] for name in (*_ORDER, *ROWS)})


def by_port(node: Node) -> dict[str, str | None]:
    """Return the tensors that a node reads, by the names of its ports; None at an open port."""
    return dict(zip(OPS[node.op].ports_of(len(node.inputs)), node.inputs, strict=True))


def by_result(node: Node) -> dict[str, str | None]:
    """Return the tensors that a node makes, by the names of its results; None for one left out."""
    return dict(zip(OPS[node.op].outputs, node.outputs, strict=False))


def tensor_at(node: Node, port: str) -> str | None:
    """Return the name of the tensor at a port of a node, None if the port is open.

    Raises ValueError if the op has no such port.
    """
    return node.inputs[OPS[node.op].ports_of(len(node.inputs)).index(port)]


def is_default(op: str, attr: str, value: Any) -> bool:
    """Whether an attribute stands at a value that a reader need not see."""
    default = OPS[op].attrs.get(attr)
    if value == default:
        return True
    flat = value
    while isinstance(flat, tuple) and flat and all(item == flat[0] for item in flat):
        flat = flat[0]
    return bool(flat == default and not isinstance(default, bool))
