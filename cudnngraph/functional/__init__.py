"""Fused ops on tensors, with the signatures of torch.nn.functional and gradients.

Each is one graph, compiled for every new combination of shapes, strides, dtypes and options
(:func:`cudnngraph.specialize`). ``activation`` is a name of
:data:`~cudnngraph.graph.pointwise.ACTIVATIONS` or None, its attributes go as further keywords
(``activation="leaky_relu", negative_slope=0.2``); ``residual`` is added before it. ``out`` takes
the result and has no gradient; the ``…_into`` forms allocate nothing, which on a GPU is so once the
workspace has grown.

``policy`` is a :class:`~cudnngraph.Policy`. None stands for the default one, with ``deterministic``
as :func:`torch.use_deterministic_algorithms` says. Under ``torch.autocast`` x and the weights are
cast to its dtype, as for torch's own convolutions and attention.
"""

from __future__ import annotations

from .attention import (
    paged_attention,
    scaled_dot_product_attention,
    scaled_dot_product_attention_into,
    varlen_attention,
)
from .conv import (
    conv1d,
    conv2d,
    conv3d,
    conv_bias_act,
    conv_bias_act_into,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    conv_transpose_bias_act,
    conv_transpose_bias_act_into,
)
from .conv_bn import conv_bn_act, conv_bn_act_into, conv_transpose_bn_act
from .linear import linear, mlp
from .norm import group_norm, instance_norm, layer_norm, rms_norm

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_bias_act",
    "conv_bias_act_into",
    "conv_bn_act",
    "conv_bn_act_into",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_transpose_bias_act",
    "conv_transpose_bias_act_into",
    "conv_transpose_bn_act",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "mlp",
    "rms_norm",
    "scaled_dot_product_attention",
    "paged_attention",
    "scaled_dot_product_attention_into",
    "varlen_attention",
]
