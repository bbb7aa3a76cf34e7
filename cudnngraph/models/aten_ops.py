"""Torch's ops by what the conversion has to know of them: images, norms, layouts, memory.

An op is known by its packet, with all of its overloads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from ..ops import meta as forms
from ..ops.pooling import UPSAMPLE

_aten: Any = torch.ops.aten


def packets(*names: str) -> frozenset[Any]:
    """Ops of torch's, each with all of its overloads, as far as this torch has them. An op is known
    by itself alone: names that begin or end like its own are other ops'."""
    return frozenset(getattr(_aten, name) for name in names if hasattr(_aten, name))


ASSERTIONS = frozenset(
    getattr(packet, which)
    for packet in packets("_assert_tensor_metadata", "_assert_async", "_assert_scalar")
    for which in packet.overloads()
    if not getattr(packet, which)._schema.returns
)
CONVOLUTION_NAMES = (
    *("conv1d", "conv2d", "conv3d", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
CONVOLUTIONS = packets(*CONVOLUTION_NAMES)
UPSAMPLES = {name: mode for (mode, _), name in UPSAMPLE.items()}
MEANS = (
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
)
#: Ops whose results are images: they get the layout of images where nothing says otherwise.
MAKE_IMAGES = packets(*CONVOLUTION_NAMES, *UPSAMPLES, *MEANS)
OF_BATCHES = (
    *("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm"),
    "cudnn_batch_norm",
)
NORMS = packets(*OF_BATCHES)
#: Ops whose results go by the strides of their operands and by where those begin, which are the
#: graph's own: never called as they are.
OF_MEMORY = packets("as_strided", "as_strided_copy", "as_strided_scatter")
#: Inner ops of torch's that take operands of any strides.
_ANY_LAYOUT = packets(
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *(*MEANS, *(f"{name}_backward" for name in MEANS)),
    *(*UPSAMPLES, *(f"{name}_backward" for name in UPSAMPLES)),
    *("avg_pool2d_backward", "avg_pool3d_backward"),
    *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
    *("convolution", "convolution_backward"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("_native_batch_norm_legit_no_training", "native_batch_norm", "native_batch_norm_backward"),
    *("native_dropout", "native_dropout_backward"),
    *("_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index", "_unsafe_view", "_to_copy"),
    *("hardswish_backward", "hardsigmoid_backward", "hardtanh_backward", "leaky_relu_backward"),
    *("elu_backward", "softplus_backward", "log_sigmoid_backward", "mse_loss_backward"),
    *("_fft_r2c", "_fft_c2r", "_fft_c2c"),
)


def goes_by_layout(op: Any) -> bool:
    """Whether an op may read memory as it lay when the model was traced: torch's own inner ones
    (attention, weight norm, gradients, what norms have saved for theirs) often do not ask."""
    if op.namespace != "aten":
        return True
    if torch.Tag.pointwise in op.tags or op.overloadpacket in _ANY_LAYOUT:
        return False
    pairs = op in (_aten.view.dtype, _aten.view_as_complex.default)  # of numbers side by side
    return pairs or not _is_public(op.overloadpacket.__name__)


@cache
def _is_public(name: str) -> bool:
    """Whether an op is a function that torch documents: those take operands of any strides, all
    but two."""
    _, _, of_module = name.partition("_")  # as in linalg_qr
    places: tuple[tuple[Any, str], ...] = (
        *((torch, name), (torch.Tensor, name), (nn.functional, name), (torch.fft, name)),
        *((torch.linalg, of_module), (torch.special, of_module)),
    )
    known = (getattr(place, each, None) for place, each in places)
    return name != "pdist" and any(bool(getattr(each, "__doc__", None)) for each in known)


def meant(target: Any, args: Any) -> Any:
    """Arguments without the one of a group norm that torch ignores, which torch.export may set
    otherwise than the model, and that ask a gradient's op for its first result too: a graph has
    none without."""
    names = [argument.name for argument in target._schema.arguments]
    if target is _aten.group_norm.default:
        return args[: names.index("cudnn_enabled")]
    place = names.index("output_mask") if "output_mask" in names else len(args)
    if place >= len(args) or args[place][0]:
        return args
    return (*args[:place], [True, *args[place][1:]], *args[place + 1 :])


def is_laid_out(node: Any) -> bool:
    """Whether a result's strides are asked for, by ``contiguous`` or a copy of that form."""
    if not isinstance(node, torch.fx.Node):
        return False
    form = node.kwargs.get("memory_format")
    asked = form is not None and form != torch.preserve_format
    return node.target is _aten.contiguous.default or asked


def hands_on(node: torch.fx.Node) -> bool:
    """Whether torch gives the very tensor that a placeholder stands for, or its memory."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        name = forms.op_name(node)
        source = node.args[0] if node.args else None
        if name not in forms.IDENTITIES or name in _COPIES or not isinstance(source, torch.fx.Node):
            return False
        made, of = (each.meta.get("val") for each in (node, source))
        if made is None or of is None or made.stride() != of.stride():
            return False
        node = source
    return node.op in ("placeholder", "get_attr")


#: Identities that give memory of their own; lift_fresh is of a tensor made in the run, as by
#: `torch.tensor([1.0])`, which is another in each call of the model.
_COPIES = ("clone", "lift_fresh", "lift_fresh_copy", "_to_copy")
