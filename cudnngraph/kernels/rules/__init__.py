"""Rules of generated kernels by op: what an op computes, in the values of a tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...ir.spec import Node, TensorSpec
from ..scalars import RULES as POINTWISE
from ..tape import Value
from . import conv, interpolate, loss, norm, packed, shape, softmax, torch_ops, window
from .pointwise import Operands, pointwise

Rule = Callable[[Node, Operands, TensorSpec], tuple[Value, ...]]

#: For each op the values of its results, in order, from those of its operands (None at an open
#: port) and the form of its first result.
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(("reshape", "permute", "transpose", "slice"), shape.view),
    "expand": shape.expand,
    "concat": shape.concat,
    "conv": conv.depthwise,
    "conv_transpose": conv.depthwise,
    "layer_norm": norm.layer_norm,
    "rms_norm": norm.rms_norm,
    "normalize": norm.normalize,
    "instance_norm": norm.instance_norm,
    "instance_norm_backward": norm.instance_norm_backward,
    "batch_norm_train": norm.batch_norm_train,
    "batch_norm_backward": norm.batch_norm_backward,
    "group_affine": norm.group_affine,
    "layer_norm_backward": norm.layer_norm_backward,
    "rms_norm_backward": norm.rms_norm_backward,
    "softmax": softmax.softmax,
    "log_softmax": softmax.log_softmax,
    "softmax_backward": softmax.softmax_backward,
    "log_softmax_backward": softmax.log_softmax_backward,
    "reduction": softmax.reduction,
    "ragged_offsets": packed.ragged_offsets,
    "nll_loss": loss.nll_loss,
    "nll_loss_backward": loss.nll_loss_backward,
    "aten": torch_ops.aten_op,
    **dict.fromkeys(("max_pool", "adaptive_max_pool"), window.max_pool),
    **dict.fromkeys(("avg_pool", "adaptive_avg_pool"), window.avg_pool),
    **dict.fromkeys(("max_pool_backward", "adaptive_max_pool_backward"), window.max_pool_backward),
    **dict.fromkeys(("avg_pool_backward", "adaptive_avg_pool_backward"), window.avg_pool_backward),
    "interpolate": interpolate.interpolate,
    "interpolate_backward": interpolate.interpolate_backward,
}
