"""Mistakes in convolutions, ops per channel, and norms."""

from __future__ import annotations

import math

import torch

from tests.mistakes.declare import (
    BF16,
    F16,
    F32,
    F64,
    channel,
    conv,
    norm,
    pointwise,
    relu_of,
    trailing,
    transposed,
    whole,
)

LAYERS = [
    # -- convolution
    ("conv_x_rank_2", conv("x 'x' has 2 dims", "3, 4 or 5", x=(2, 16))),
    ("conv_x_rank_6", conv("x 'x' has 6 dims", "3, 4 or 5", x=(2, 16, 4, 4, 4, 4))),
    ("conv_weight_rank", conv("weight 'w' has 3 dims", "expected 4 dims", w=(32, 16, 3))),
    (
        "conv_channels",
        conv(
            "weight has 32 input channels per group, x has 64 channels / groups=1; expected 64",
            x=(2, 64, 8, 8),
            w=(32, 32, 3, 3),
        ),
    ),
    ("conv_channels_groups", conv("x has 16 channels", "groups=3", w=(33, 5, 3, 3), groups=3)),
    (
        "conv_filters_groups",
        conv("weight has 31 output channels", "groups=2", w=(31, 8, 3, 3), groups=2),
    ),
    ("conv_groups_0", conv("groups=0", "groups >= 1", groups=0)),
    ("conv_groups_negative", conv("groups=-2", "groups >= 1", groups=-2)),
    ("conv_groups_fraction", conv("groups=1.5 is not a positive whole number", groups=1.5)),
    ("conv_groups_bool", conv("groups=True is not a positive whole number", groups=True)),
    ("conv_stride_0", conv("stride=0 is not positive", "every stride >= 1", stride=0)),
    ("conv_stride_negative", conv("stride=(1, -1) is not positive", stride=(1, -1))),
    ("conv_stride_count", conv("stride=(1, 1, 1) has 3 numbers", "1 or 2", stride=(1, 1, 1))),
    ("conv_stride_float", conv("stride=1.0", "whole numbers", "an int", stride=1.0)),
    ("conv_stride_text", conv("stride='2'", "whole numbers", stride="2")),
    ("conv_stride_nan", conv("stride=nan", "whole numbers", stride=math.nan)),
    ("conv_stride_none", conv("stride=None", "whole numbers", stride=None)),
    ("conv_dilation_0", conv("dilation=0 is not positive", dilation=0)),
    ("conv_dilation_negative", conv("dilation=(-1, 1)", "dilation >= 1", dilation=(-1, 1))),
    ("conv_padding_negative", conv("padding=-1 is negative", "slice x", padding=-1)),
    (
        "conv_padding_pair_negative",
        conv("padding=((0, 1), (-1, 0)) is negative", padding=((0, 1), (-1, 0))),
    ),
    (
        "conv_padding_count",
        conv("padding=(1, 1, 1) has 3 entries", "1 or 2", padding=(1, 1, 1)),
    ),
    ("conv_padding_none", conv("padding=() has 0 entries", "1 or 2", padding=())),
    ("conv_stride_wide", conv("stride=2147483648 does not fit 32 bits", stride=2**31)),
    ("conv_padding_wide", conv("padding=4294967296 does not fit 32 bits", padding=2**32)),
    ("conv_stride_endless", conv("stride is an int that int64 does not hold", stride=10**5000)),
    ("conv_stride_set", conv("stride is a set", "an int, or several", stride={1})),
    ("conv_operand_none", pointwise(lambda g, x: g.conv(None, x), "x is missing")),
    (
        "group_norm_of_a_tensor",
        pointwise(
            lambda g, x: (g.output("z", g.relu(x)), g.group_norm(torch.ones(2, 4, 3), 2))[1],
            "group_norm: x is a Tensor",
            "declare it with g.input",
        ),
    ),
    (
        "elements_beyond_64_bits",
        whole(lambda g: relu_of(g, shape=(2**40, 2**40), dtype=F16), "fewer than 2^60 elements"),
    ),
    (
        "result_beyond_64_bits",
        pointwise(
            lambda g, x: g.expand(g.reduction(x), (2**31, 2**31)), "fewer than 2^60 elements"
        ),
    ),
    (
        "alpha_beyond_float32",
        pointwise(lambda g, x: x.elu(1e300), "alpha=1e+300 is no float32", "at most 3.402823e+38"),
    ),
    ("conv_padding_triple", conv("whole numbers", "pairs", padding=((0, 1, 2), (0, 1)))),
    ("conv_padding_float", conv("padding=0.5", "whole numbers", padding=0.5)),
    ("conv_padding_unknown", conv("padding='full' is unknown", "'same'", padding="full")),
    ("conv_same_stride", conv("padding='same' with stride", "stride 1", padding="same", stride=2)),
    (
        "conv_kernel_too_large",
        conv("kernel reaches 9", "spatial dim 0", "padded input is 8", w=(32, 16, 9, 3)),
    ),
    (
        "conv_dilated_kernel_too_large",
        conv("kernel reaches 11", "dilation 5", "padded input is 10", dilation=(5, 1), padding=1),
    ),
    ("conv_kernel_empty", conv("weight 'w' has an empty kernel (0, 3)", w=(32, 16, 0, 3))),
    ("conv_dtypes", conv("weight 'w' is float32", "x 'x' is float16", "same dtype", w_dtype=F32)),
    ("conv_int", conv("x 'x' is int32", "float16", x_dtype=torch.int32, w_dtype=torch.int32)),
    ("conv_bool", conv("x 'x' is bool", "float16", x_dtype=torch.bool, w_dtype=torch.bool)),
    # -- transposed convolution
    ("transposed_channels", transposed("weight has 8", "x has 16 channels", w=(8, 24, 3, 3))),
    ("transposed_groups", transposed("not a multiple of groups=5", groups=5)),
    (
        "transposed_output_padding",
        transposed(
            "output_padding=2", "max(stride=2, dilation=1)", stride=2, output_padding=(2, 0)
        ),
    ),
    (
        "transposed_output_padding_unit",
        transposed("output_padding=1", "< 1", output_padding=(0, 1)),
    ),
    (
        "transposed_output_padding_negative",
        transposed("output_padding=-1 is negative", stride=2, output_padding=-1),
    ),
    ("transposed_dilation_0", transposed("dilation=0 is not positive", dilation=0)),
    ("transposed_stride_0", transposed("stride=(0, 1) is not positive", stride=(0, 1))),
    ("transposed_padding_negative", transposed("padding=-1 is negative", padding=-1)),
    (
        "transposed_padding_too_large",
        transposed("output size over spatial dim 0 is 0", "at least 1", padding=(5, 0)),
    ),
    ("transposed_same", transposed("padding='same' is unknown", padding="same")),
    ("transposed_kernel_empty", transposed("empty kernel (3, 0)", w=(16, 24, 3, 0))),
    # -- per channel
    ("bias_shape", channel("bias", (8,), "bias 'p' has shape (8,)", "(16,), the channels of x")),
    ("bias_rank", channel("bias", (16, 1, 1), "bias 'p' has shape (16, 1, 1)", "(16,)")),
    (
        "bias_dtype",
        channel("bias", (16,), "bias 'p' is float16", "expected float32", x_dtype=F32),
    ),
    (
        "bias_dtype_16_bit",
        channel("bias", (16,), "bias 'p' is bfloat16", "float16 or float32", dtype=BF16),
    ),
    ("bias_vector", channel("bias", (16,), "x 'x' has 1 dims", "(N, C, ...)", x=(16,))),
    ("scale_shape", channel("scale", (32,), "scale 'p' has shape (32,)", "(16,)")),
    ("scale_dtype", channel("scale", (16,), "scale 'p' is float64", "convert", dtype=F64)),
    ("norm_mean_shape", norm("running_mean 'mean' has shape (3,)", "(16,)", mean=(3,))),
    ("norm_var_missing", norm("running_var is missing", "a value for running_var", var=None)),
    ("norm_eps_negative", norm("eps=-0.001 is negative", "eps >= 0", eps=-0.001)),
    ("norm_eps_nan", norm("eps=nan is not finite", eps=math.nan)),
    ("norm_eps_text", norm("eps='1e-5' is not a number", eps="1e-5")),
    # -- norms over trailing dims
    *(
        row
        for op in ("layer_norm", "rms_norm")
        for row in (
            (
                f"{op}_weight_shape",
                trailing(op, "weight 'w' has shape (24,)", "last dims of x 'x' (4, 24", w=(24,)),
            ),
            (f"{op}_weight_rank", trailing(op, "has shape (1, 4, 24, 64)", w=(1, 4, 24, 64))),
            (f"{op}_weight_empty", trailing(op, "weight 'w' has shape ()", w=())),
            (
                f"{op}_bias_shape",
                trailing(op, "bias 'b' has shape (24, 64)", "(64,), that of the", b=(24, 64)),
            ),
            (
                f"{op}_weight_dtype",
                trailing(op, "weight 'w' is bfloat16", "float16 or float32", w_dtype=BF16),
            ),
            (
                f"{op}_weight_narrow",
                trailing(op, "weight 'w' is float16", "expected float32", dtype=F32, w_dtype=F16),
            ),
            (f"{op}_int", trailing(op, "x 'x' is int32", "float16", dtype=torch.int32)),
            (f"{op}_eps_negative", trailing(op, "eps=-1.0 is negative", "eps >= 0", eps=-1.0)),
            (f"{op}_eps_nan", trailing(op, "eps=nan is not finite", eps=math.nan)),
            (f"{op}_eps_none", trailing(op, "eps=None is not a number", eps=None)),
            (
                f"{op}_stats_number",
                trailing(op, "return_stats=1 is not a bool", "True or False", return_stats=1),
            ),
        )
    ),
]
