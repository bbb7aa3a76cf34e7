"""Mistakes in views, matmuls, pointwise ops and activations."""

from __future__ import annotations

import math

import torch

from tests.mistakes.declare import (
    BF16,
    F16,
    F32,
    F64,
    grouped,
    image,
    output_of,
    pointwise,
    product,
    weight,
    whole,
)

OPS = [
    # -- views and concatenation, of x (2, 16, 8, 8)
    (
        "reshape_elements",
        pointwise(
            lambda g, x: x.reshape((2, 16, 60), name="v"),
            "reshape 'v'",
            "shape=(2, 16, 60) does not hold the 2048 elements of x 'x' (2, 16, 8, 8)",
        ),
    ),
    ("reshape_rest", pointwise(lambda g, x: x.reshape((3, -1)), "shape=(3, -1) does not hold")),
    ("reshape_rest_of_0", pointwise(lambda g, x: x.reshape((0, -1)), "shape=(0, -1) does not")),
    ("reshape_two_rests", pointwise(lambda g, x: x.reshape((-1, -1)), "-1 for one of them")),
    ("reshape_negative", pointwise(lambda g, x: x.reshape((2, -16)), "has sizes below 0")),
    ("reshape_number", pointwise(lambda g, x: x.reshape(2048), "shape=2048", "a tuple of ints")),
    ("reshape_float", pointwise(lambda g, x: x.reshape((2, 1024.0)), "made of whole numbers")),
    (
        "reshape_rank_9",
        pointwise(lambda g, x: x.reshape((2048, *(1,) * 8)), "has 9 dims", "at most 8"),
    ),
    ("transpose_dim", pointwise(lambda g, x: x.transpose(1, 4), "dim1=4 is no dim", "-4 to 3")),
    (
        "transpose_float",
        pointwise(lambda g, x: x.transpose(0.5, 1), "dim0=0.5 is not a whole number", "4 in all"),
    ),
    (
        "permute_twice",
        pointwise(lambda g, x: x.permute((0, 1, 1, 2)), "dims=(0, 1, 1, 2) is no order", "each"),
    ),
    ("permute_few", pointwise(lambda g, x: x.permute((1, 0)), "dims=(1, 0) is no order of the")),
    ("permute_far", pointwise(lambda g, x: x.permute((0, 1, 2, 7)), "dims=(0, 1, 2, 7) is no")),
    ("permute_text", pointwise(lambda g, x: x.permute("0123"), "dims='0123'", "whole numbers")),
    ("slice_dim", pointwise(lambda g, x: x.slice(-5, 0, 1), "slice 's", "dim=-5 is no dim of x")),
    ("slice_start", pointwise(lambda g, x: x.slice(1, None), "start=None is not a whole number")),
    ("slice_stop", pointwise(lambda g, x: x.slice(1, 0, 2.0), "stop=2.0 is not a whole number")),
    ("slice_step_0", pointwise(lambda g, x: x.slice(1, 0, 8, 0), "step=0 is not positive", ">= 1")),
    ("slice_back", pointwise(lambda g, x: x.slice(1, 7, 0, -1), "step=-1 is not positive")),
    (
        "concat_shapes",
        pointwise(
            lambda g, x: g.concat([x, g.input("r", (2, 4, 8, 7), F16)], 1, name="c"),
            "concat 'c'",
            "x1 'r' has shape (2, 4, 8, 7), x0 'x' (2, 16, 8, 8)",
            "equal sizes but for dim 1",
        ),
    ),
    (
        "concat_ranks",
        pointwise(lambda g, x: g.concat([x, g.input("r", (2, 16), F16)]), "x1 'r' has shape"),
    ),
    (
        "concat_dtypes",
        pointwise(
            lambda g, x: g.concat([x, g.input("r", (2, 16, 8, 8), F32)]),
            "x1 'r' is float32, x0 'x' is float16",
            "convert x1",
        ),
    ),
    ("concat_dim", pointwise(lambda g, x: g.concat([x, x], 4), "dim=4 is no dim of x")),
    (
        "concat_none",
        pointwise(lambda g, x: g.concat([x, None]), "concat 'concat'", "x1 is missing"),
    ),
    (
        "concat_nothing",
        whole(
            lambda g: (output_of(g), g.output("z", g.concat([]))),
            "concat 'concat': x is []",
            "a list of one value or more",
        ),
    ),
    ("concat_tensor", pointwise(lambda g, x: g.concat([x, torch.zeros(2)]), "x1 is a Tensor")),
    # -- matrix product
    ("matmul_rank_1", product("x 'x' has 1 dims (64,)", "2, 3 or 4: (..., M, K)", x=(64,))),
    ("matmul_rank_5", product("y 'y' has 5 dims", "(..., K, N)", y=(1, 1, 1, 64, 40))),
    (
        "matmul_terms",
        product("y 'y' (40, 64) has 40 rows", "x 'x' (4, 24, 64) has 64 columns", y=(40, 64)),
    ),
    ("matmul_transposed", product("y (..., 64, N)", "transpose y", y=(40, 64))),
    (
        "matmul_batches",
        product(
            "batch dims do not broadcast", "y 'y' (3, 64, 40)", "before the last two", y=(3, 64, 40)
        ),
    ),
    ("matmul_dtypes", product("y 'y' is float32, x 'x' is float16", "same dtype", y_dtype=F32)),
    ("matmul_int", product("x 'x' is int32", "convert it first", dtype=torch.int32)),
    (
        "matmul_number",
        pointwise(lambda g, x: x @ 2.0, "matmul", "y '", "has 0 dims"),
    ),
    # -- products of groups of rows
    ("grouped_rank", grouped("x 'x' has 3 dims (2, 20, 24)", "2: (M, K)", x=(2, 20, 24))),
    ("grouped_matrix", grouped("y 'y' has 2 dims (24, 16)", "3: (G, K, N)", y=(24, 16))),
    (
        "grouped_terms",
        grouped(
            "y 'y' (4, 16, 24) has matrices of 16 rows, x 'x' (40, 24) has 24 columns",
            "y (G, 24, N)",
            "transpose the last two dims of y",
            y=(4, 16, 24),
        ),
    ),
    (
        "grouped_dtypes",
        grouped("y 'y' is float32, x 'x' is float16", "convert y", dtypes=(F16, F32, torch.int32)),
    ),
    (
        "grouped_ends_dtype",
        grouped("ends 'ends' is int64", "int32", dtypes=(F16, F16, torch.int64)),
    ),
    (
        "grouped_ends_shape",
        grouped(
            "ends 'ends' has shape (5,)", "(G,) = (4,), an end for each matrix of y", ends=(5,)
        ),
    ),
    # -- pointwise
    (
        "add_shapes",
        pointwise(
            lambda g, x: g.add(x, g.input("r", (7,), F16), name="s"),
            "add 's'",
            "do not broadcast",
            "x 'x' (2, 16, 8, 8)",
            "y 'r' (7,)",
        ),
    ),
    (
        "add_dtypes",
        pointwise(lambda g, x: g.add(x, g.input("r", (8,), BF16)), "do not mix", "y 'r' bfloat16"),
    ),
    (
        "mul_wide",
        pointwise(lambda g, x: x * g.input("r", (8,), F64), "mul", "do not mix", "y 'r' float64"),
    ),
    ("add_int", pointwise(lambda g, x: x + 1, "x 'x' is int32", dtype=torch.int32)),
    (
        "add_tensor",
        pointwise(
            lambda g, x: g.add(x, torch.zeros(8)), "y is a Tensor", "declare it with g.input"
        ),
    ),
    ("add_text", pointwise(lambda g, x: g.add(x, "one"), "add 'add': y is a str", "a value")),
    ("add_bool", pointwise(lambda g, x: g.add(x, True), "add 'add': y is a bool")),
    ("scalar_nan", pointwise(lambda g, x: x * math.nan, "value=nan is not finite")),
    ("scalar_inf", pointwise(lambda g, x: x + math.inf, "value=inf is not finite")),
    ("not_of_number", pointwise(lambda g, x: x.logical_not(), "x 'x' is float16", "expected bool")),
    (
        "and_of_numbers",
        pointwise(lambda g, x: g.logical_and(x, x > 0.0), "x 'x' is float16", "compare it first"),
    ),
    (
        "where_of_number",
        pointwise(lambda g, x: g.where(x, x, 0.0), "condition 'x' is float16", "expected bool"),
    ),
    ("relu_of_bool", pointwise(lambda g, x: g.relu(x > 0.0), "is bool", "float16, bfloat16")),
    # -- activations
    (
        "activation_unknown",
        pointwise(lambda g, x: g.activation(x, "swishy"), "'swishy' is unknown", "relu", "silu"),
    ),
    (
        "activation_in_composition",
        whole(
            lambda g: g.output("y", g.conv_bias_act(image(g), weight(g), activation="swishy")),
            "activation: 'swishy' is unknown",
        ),
    ),
    (
        "activation_attribute",
        pointwise(
            lambda g, x: g.activation(x, "elu", slope=0.1), "no attribute 'slope'", "one of: alpha"
        ),
    ),
    (
        "activation_of_composition_attribute",
        pointwise(lambda g, x: g.activation(x, "relu6", min=0.0), "relu6 takes no attributes"),
    ),
    (
        "leaky_slope_nan",
        pointwise(lambda g, x: x.leaky_relu(math.nan), "negative_slope=nan is not finite"),
    ),
    ("elu_text", pointwise(lambda g, x: x.elu("a"), "alpha='a' is not a number")),
    ("softplus_beta", pointwise(lambda g, x: x.softplus(-1.0), "beta=-1.0 is not positive")),
    ("clamp_nothing", pointwise(lambda g, x: x.clamp(), "min and max are both None")),
    ("clamp_text", pointwise(lambda g, x: x.clamp("0"), "min='0' is not a number")),
    (
        "gelu_unknown",
        pointwise(lambda g, x: x.gelu("fast"), "approximate='fast'", "'none' or 'tanh'"),
    ),
]
