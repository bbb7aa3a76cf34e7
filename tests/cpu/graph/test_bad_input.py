"""Every mistake is reported before anything runs, in the words that mend it.

The table holds mistakes in a graph; each row declares one and names what its message must say.
Mistakes in policies have a shorter table below; those in bound tensors: runtime/test_bound.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cudnngraph as cg

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Bad:
    """A graph with one mistake and what the report must contain."""

    id: str
    declare: Callable[[cg.Graph], Any]
    says: tuple[str, ...]


def image(g: cg.Graph, *shape: int, dtype: torch.dtype = F16) -> cg.Value:
    return g.input("x", shape or (2, 16, 8, 8), dtype)


def weight(g: cg.Graph, *shape: int, dtype: torch.dtype = F16) -> cg.Value:
    return g.input("w", shape or (32, 16, 3, 3), dtype)


def conv(
    *says: str,
    x: tuple[int, ...] = (),
    w: tuple[int, ...] = (),
    x_dtype: torch.dtype = F16,
    w_dtype: torch.dtype = F16,
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A convolution named 'c1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        given = image(g, *x, dtype=x_dtype), weight(g, *w, dtype=w_dtype)
        g.output("y", g.conv(*given, name="c1", **options))

    return declare, ("conv 'c1'", *says)


def transposed(
    *says: str, w: tuple[int, ...] = (16, 24, 3, 3), **options: Any
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A transposed convolution named 't1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        g.output("y", g.conv_transpose(image(g), weight(g, *w), name="t1", **options))

    return declare, ("conv_transpose 't1'", *says)


def pointwise(
    apply: Callable[[cg.Graph, cg.Value], Any], *says: str, dtype: torch.dtype = F16
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """An op on x (2, 16, 8, 8)."""
    return lambda g: g.output("y", apply(g, image(g, dtype=dtype))), says


def channel(
    op: str,
    shape: tuple[int, ...],
    *says: str,
    dtype: torch.dtype = F16,
    x_dtype: torch.dtype = F16,
    x: tuple[int, ...] = (),
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A per-channel op on x with the vector 'p'."""

    def declare(g: cg.Graph) -> None:
        given = image(g, *x, dtype=x_dtype)
        g.output("y", getattr(g, op)(given, g.input("p", shape, dtype), name="p1"))

    return declare, (f"{op} 'p1'", *says)


def norm(*says: str, **options: Any) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A batch norm named 'n1' on 16 channels; ``mean`` and ``var`` are shapes."""

    def declare(g: cg.Graph) -> None:
        shapes = {"mean": (16,), "var": (16,)} | {
            name: options.pop(name) for name in ("mean", "var") if name in options
        }
        given = [
            None if shape is None else g.input(name, shape, F32) for name, shape in shapes.items()
        ]
        g.output("y", g.batch_norm(image(g), *given, name="n1", **options))

    return declare, ("batch_norm 'n1'", *says)


def product(
    *says: str,
    x: tuple[int, ...] = (4, 24, 64),
    y: tuple[int, ...] = (64, 40),
    dtype: torch.dtype = F16,
    y_dtype: torch.dtype | None = None,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A matrix product named 'm1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        given = g.input("x", x, dtype), g.input("y", y, y_dtype or dtype)
        g.output("z", g.matmul(*given, name="m1"))

    return declare, ("matmul 'm1'", *says)


def trailing(
    op: str,
    *says: str,
    w: tuple[int, ...] = (64,),
    b: tuple[int, ...] | None = None,
    dtype: torch.dtype = F16,
    w_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A norm named 'n1' of x (4, 24, 64) that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        given = [g.input("x", (4, 24, 64), dtype), g.input("w", w, w_dtype or dtype)]
        given += [] if b is None else [g.input("b", b, w_dtype or dtype)]
        result = getattr(g, op)(*given, name="n1", **options)
        g.output("y", result[0] if isinstance(result, tuple) else result)

    return declare, (f"{op} 'n1'", *says)


def attention(
    *says: str,
    q: tuple[int, ...] = (2, 4, 32, 64),
    k: tuple[int, ...] = (2, 4, 48, 64),
    v: tuple[int, ...] = (2, 4, 48, 64),
    dtype: torch.dtype = F16,
    v_dtype: torch.dtype | None = None,
    mask: tuple[tuple[int, ...], torch.dtype] | None = None,
    lengths: tuple[tuple[int, ...], torch.dtype] | None = None,
    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """An attention named 'a1' that is wrong somehow. ``inputs`` are further ones by keyword."""

    def declare(g: cg.Graph) -> None:
        given = [
            g.input("q", q, dtype),
            g.input("k", k, dtype),
            g.input("v", v, v_dtype or dtype),
        ]
        extra = dict(options)
        if mask is not None:
            extra["attn_mask"] = g.input("mask", *mask)
        if lengths is not None:
            extra["seq_len_kv"] = g.input("lengths", *lengths)
        extra |= {key: g.input(key, *form) for key, form in (inputs or {}).items()}
        result = g.sdpa(*given, name="a1", **extra)
        g.output("y", result[0] if isinstance(result, tuple) else result)

    return declare, ("sdpa 'a1'", *says)


def packed(
    *says: str,
    shapes: tuple[tuple[int, ...], ...] = ((96, 8, 64), (80, 2, 64), (80, 2, 64)),
    ends: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (((4,), torch.int32),) * 2,
    longest: tuple[Any, Any] = (40, 32),
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """Packed attention named 'p1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        data = [g.input(name, shape, F16) for name, shape in zip("qkv", shapes, strict=True)]
        where = [g.input(f"ends_{n}", *form) for n, form in zip(("q", "kv"), ends, strict=True)]
        g.output("o", g.sdpa_varlen(*data, *where, *longest, name="p1", **options))

    return declare, ("sdpa_varlen 'p1'", *says)


def paged(
    *says: str,
    q: tuple[int, ...] = (2, 8, 1, 64),
    k: tuple[int, ...] = (12, 2, 16, 64),
    v: tuple[int, ...] = (12, 2, 16, 64),
    table: tuple[tuple[int, ...], torch.dtype] = ((2, 4), torch.int32),
    lengths: tuple[tuple[int, ...], torch.dtype] = ((2,), torch.int32),
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """Paged attention named 'p1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        data = [g.input("q", q, F16), g.input("k", k, F16), g.input("v", v, F16)]
        where = [g.input("table", *table), g.input("lengths", *lengths)]
        g.output("o", g.sdpa_paged(*data, *where, name="p1", **options))

    return declare, ("sdpa_paged 'p1'", *says)


def whole(
    declare: Callable[[cg.Graph], Any], *says: str
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A mistake in the graph around the ops."""
    return declare, says


def _relu_of(g: cg.Graph, **options: Any) -> None:
    g.output("y", g.relu(g.input("x", **options)))


def _output_of(g: cg.Graph, **options: Any) -> None:
    g.output("y", g.relu(image(g)), **options)


def _unused(g: cg.Graph) -> None:
    g.input("spare", (4,), F16)
    _output_of(g)


def _twice(g: cg.Graph) -> None:
    y = image(g)
    g.input("x", (4,), F16)
    g.output("y", y.relu())


def _output_twice(g: cg.Graph) -> None:
    x = image(g)
    g.output("y", x.relu())
    g.output("y", x.neg())


def _one_value_twice(g: cg.Graph) -> None:
    y = image(g).relu()
    g.output("first", y)
    g.output("second", y)


def _named_twice(g: cg.Graph) -> None:
    g.output("y", image(g).relu(name="r").neg(name="r"))


def _foreign(g: cg.Graph) -> None:
    other = cg.Graph("other").input("z", (2, 16, 8, 8), F16)
    g.output("y", image(g) + other)


def _foreign_output(g: cg.Graph) -> None:
    g.output("y", cg.Graph("other").input("z", (4,), F16).relu())
    g.output("z", image(g).relu())


def _as_input(g: cg.Graph) -> None:
    g.output("y", image(g))


def _input_name(g: cg.Graph) -> None:
    g.output("x", image(g).relu())


TABLE = [
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
        whole(lambda g: _relu_of(g, shape=(2**40, 2**40), dtype=F16), "fewer than 2^60 elements"),
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
            lambda g: (_output_of(g), g.output("z", g.concat([]))),
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
    # -- attention
    ("sdpa_rank", attention("q 'q' has 3 dims", "(B, H, S, D)", q=(4, 32, 64))),
    ("sdpa_dtypes", attention("v 'v' is bfloat16, q 'q' is float16", v_dtype=BF16)),
    ("sdpa_int", attention("q 'q' is int8", dtype=torch.int8)),
    ("sdpa_batch", attention("k has batch 3, q has 2", k=(3, 4, 48, 64))),
    ("sdpa_kv_heads", attention("v has 2 heads, k has 4", v=(2, 2, 48, 64))),
    (
        "sdpa_groups",
        attention("q has 4 heads", "3 heads of k and v", k=(2, 3, 48, 64), v=(2, 3, 48, 64)),
    ),
    ("sdpa_lengths", attention("v has length 47, k has 48", v=(2, 4, 47, 64))),
    ("sdpa_head_dim", attention("k has head dim 32, q has 64", k=(2, 4, 48, 32))),
    ("sdpa_head_dim_0", attention("head dim 0", q=(2, 4, 32, 0), k=(2, 4, 48, 0))),
    (
        "sdpa_mask_dtype",
        attention("attn_mask 'mask' is int32", "bool (True attends)", mask=((32, 48), torch.int32)),
    ),
    (
        "sdpa_mask_other_16_bit",
        attention("attn_mask 'mask' is bfloat16", "float16 or float32", mask=((32, 48), BF16)),
    ),
    (
        "sdpa_mask_shape",
        attention("'mask' has shape (48, 32)", "(2, 4, 32, 48)", mask=((48, 32), torch.bool)),
    ),
    (
        "sdpa_mask_rank",
        attention("'mask' has shape (1, 1, 1, 32, 48)", mask=((1, 1, 1, 32, 48), torch.bool)),
    ),
    (
        "sdpa_length_dtype",
        attention("seq_len_kv 'lengths' is int64", "int32", lengths=((2,), torch.int64)),
    ),
    (
        "sdpa_length_shape",
        attention("'lengths' has shape (3,)", "(B,) = (2,)", lengths=((3,), torch.int32)),
    ),
    ("sdpa_window_number", attention("window=8 is not a pair", "(left, right)", window=8)),
    ("sdpa_window_negative", attention("window left=-1", ">= 0", window=(-1, 0))),
    ("sdpa_window_float", attention("window right=0.5", "whole number", window=(1, 0.5))),
    (
        "sdpa_alignment",
        attention("diagonal_alignment='bottom_left' is unknown", diagonal_alignment="bottom_left"),
    ),
    ("sdpa_causal_number", attention("is_causal=1 is not a bool", is_causal=1)),
    ("sdpa_lse_text", attention("return_lse='yes' is not a bool", return_lse="yes")),
    ("sdpa_scale_nan", attention("scale=nan is not finite", scale=math.nan)),
    ("sdpa_scale_text", attention("scale='auto' is not a number", scale="auto")),
    ("sdpa_dropout_1", attention("dropout_p=1.0", "from 0 to below 1", dropout_p=1.0)),
    ("sdpa_dropout_text", attention("dropout_p='some' is not a number", dropout_p="some")),
    (
        "sdpa_dropout_alone",
        attention("dropout_p=0.1 without anything that says", "or dropout_mask", dropout_p=0.1),
    ),
    (
        "sdpa_dropout_seed_alone",
        attention(
            "dropout_seed without dropout_offset",
            dropout_p=0.1,
            inputs={"dropout_seed": ((1,), torch.int64)},
        ),
    ),
    (
        "sdpa_dropout_twice",
        attention(
            "dropout_mask beside dropout_seed",
            dropout_p=0.1,
            inputs={
                "dropout_seed": ((1,), torch.int64),
                "dropout_offset": ((), torch.int64),
                "dropout_mask": ((2, 4, 32, 48), torch.bool),
            },
        ),
    ),
    (
        "sdpa_dropout_0_with_a_mask",
        attention(
            "dropout_p=0.0 with a seed or a mask",
            "leave them out",
            inputs={"dropout_mask": ((2, 4, 32, 48), torch.bool)},
        ),
    ),
    (
        "sdpa_dropout_seed_int32",
        attention(
            "dropout_seed 'dropout_seed' is int32 (2,)",
            "one int64, of shape () or (1,)",
            dropout_p=0.1,
            inputs={
                "dropout_seed": ((2,), torch.int32),
                "dropout_offset": ((), torch.int64),
            },
        ),
    ),
    (
        "sdpa_dropout_mask_shape",
        attention(
            "dropout_mask 'dropout_mask' is bool (32, 48)",
            "of shape (B, H, S_q, S_kv) = (2, 4, 32, 48)",
            dropout_p=0.1,
            inputs={"dropout_mask": ((32, 48), torch.bool)},
        ),
    ),
    (
        "sdpa_sink_dtype",
        attention(
            "sink 'sink' is float16 (4,)", "float32 (H,) = (4,)", inputs={"sink": ((4,), F16)}
        ),
    ),
    (
        "sdpa_slopes_shape",
        attention(
            "alibi_slopes 'alibi_slopes' is float32 (2, 4)",
            "float32 (H,) = (4,)",
            inputs={"alibi_slopes": ((2, 4), F32)},
        ),
    ),
    (
        "sdpa_alibi_twice",
        attention(
            "alibi=True beside alibi_slopes", alibi=True, inputs={"alibi_slopes": ((4,), F32)}
        ),
    ),
    ("sdpa_softcap_0", attention("softcap=0.0", "> 0, or None for no cap", softcap=0)),
    (
        "varlen_rank",
        packed(
            "q 'q' has 4 dims", "3: (T, H, D)", shapes=((1, 96, 8, 64), (80, 2, 64), (80, 2, 64))
        ),
    ),
    (
        "varlen_tokens",
        packed("v has 81 tokens, k has 80", shapes=((96, 8, 64), (80, 2, 64), (81, 2, 64))),
    ),
    (
        "varlen_heads",
        packed(
            "q has 8 heads, not a multiple of the 3 heads of k",
            shapes=((96, 8, 64), (80, 3, 64), (80, 3, 64)),
        ),
    ),
    (
        "varlen_head_dim",
        packed("k has head dim 32, q has 64", shapes=((96, 8, 64), (80, 2, 32), (80, 2, 64))),
    ),
    (
        "varlen_ends_dtype",
        packed(
            "cu_seqlens_q 'ends_q' is int64 (4,)",
            "int32 (B + 1,) = (4,)",
            ends=(((4,), torch.int64), ((4,), torch.int32)),
        ),
    ),
    (
        "varlen_ends_differ",
        packed(
            "cu_seqlens_kv 'ends_kv' is int32 (5,)",
            "int32 (B + 1,) = (4,)",
            ends=(((4,), torch.int32), ((5,), torch.int32)),
        ),
    ),
    (
        "varlen_no_sequence",
        packed(
            "cu_seqlens_q 'ends_q' has shape (1,)",
            "0, then the end of each sequence",
            ends=(((1,), torch.int32),) * 2,
        ),
    ),
    ("varlen_longest", packed("max_seqlen_kv=0", "the longest sequence", longest=(40, 0))),
    ("varlen_longest_float", packed("max_seqlen_q=4.5", "whole number", longest=(4.5, 9))),
    ("varlen_window", packed("window=8 is not a pair", window=8)),
    (
        "rope_odd",
        (
            lambda g: g.output(
                "y", g.rope(g.input("x", (2, 7), F16), *(g.input(n, (2, 3), F16) for n in "cs"))
            ),
            ("rope", "x has shape (2, 7), cos (2, 3), sin (2, 3)", "an even D"),
        ),
    ),
    (
        "rope_tensor",
        (
            lambda g: g.output(
                "y", g.rope(g.input("x", (2, 8), F16), torch.ones(2, 4), g.input("s", (2, 4), F16))
            ),
            ("rope", "cos is a Tensor", "declare it with g.input"),
        ),
    ),
    (
        "block_mask_shape",
        (
            lambda g: g.output("y", g.block_mask(g.input("b", (2, 3, 3), torch.bool), 400, 300)),
            ("block_mask", "blocks 'b' is bool (2, 3, 3)", "bool (..., 4, 3)"),
        ),
    ),
    ("paged_rank", paged("k_cache 'k' has 3 dims", "(pages, H_kv, page, D)", k=(12, 2, 64))),
    ("paged_page", paged("v_cache has pages of 8 keys, k_cache of 16", v=(12, 2, 8, 64))),
    (
        "paged_heads",
        paged("q has 8 heads, not a multiple of the 3", k=(12, 3, 16, 64), v=(12, 3, 16, 64)),
    ),
    (
        "paged_table_dtype",
        paged(
            "page_table 'table' is int64 (2, 4)",
            "int32 (B, pages of a sequence) = (2, 4)",
            table=((2, 4), torch.int64),
        ),
    ),
    (
        "paged_table_batch",
        paged("page_table 'table' is int32 (3, 4)", "= (2, 4)", table=((3, 4), torch.int32)),
    ),
    (
        "paged_lengths",
        paged("seq_len_kv 'lengths' is int32 (3,)", "(B,) = (2,)", lengths=((3,), torch.int32)),
    ),
    # -- the graph around the ops
    ("unused_input", whole(_unused, "input 'spare'", "not used by any output", "remove it")),
    ("no_output", whole(lambda g: image(g).relu(), "has no output", "g.output")),
    ("output_is_input", whole(_as_input, "output 'y': is the input 'x'", "the result of an op")),
    ("output_named_as_input", whole(_input_name, "output 'x': has the name of an input")),
    ("input_twice", whole(_twice, "input 'x': is declared twice", "a name of its own")),
    ("output_twice", whole(_output_twice, "output 'y': is declared twice")),
    ("one_value_twice", whole(_one_value_twice, "'second': is the same value as output 'first'")),
    ("op_named_twice", whole(_named_twice, "neg 'r'", "a name that is taken")),
    ("value_of_another_graph", whole(_foreign, "y 'z' belongs to another graph")),
    ("output_of_another_graph", whole(_foreign_output, "'relu' belongs to another graph")),
    (
        "output_no_value",
        whole(lambda g: (_output_of(g), g.output("z", torch.zeros(2))), "output 'z': is a Tensor"),
    ),
    (
        "input_name",
        whole(
            lambda g: g.output("y", g.input("my x", (4,), F16).relu()),
            "name 'my x' is not a Python identifier",
        ),
    ),
    (
        "output_name",
        whole(lambda g: g.output("2nd", image(g).relu()), "'2nd' is not a Python identifier"),
    ),
    (
        "output_underscore",
        whole(
            lambda g: g.output("_y", image(g).relu()),
            "output '_y': name starts with an underscore",
            "named tuple",
        ),
    ),
    (
        "op_name",
        whole(lambda g: g.output("y", image(g).relu(name="a-b")), "name 'a-b' is not a Python"),
    ),
    (
        "output_keyword",
        whole(lambda g: g.output("class", image(g).relu()), "'class' is not a Python identifier"),
    ),
    ("input_no_shape", whole(lambda g: _relu_of(g, dtype=F16), "has no shape", "or like=")),
    ("input_no_dtype", whole(lambda g: _relu_of(g, shape=(4,)), "input 'x': has no dtype")),
    ("input_like_list", whole(lambda g: _relu_of(g, like=[1, 2]), "like=list", "torch.Tensor")),
    (
        "input_shape_negative",
        whole(lambda g: _relu_of(g, shape=(4, -1), dtype=F16), "shape=(4, -1)", ">= 0"),
    ),
    (
        "input_shape_float",
        whole(lambda g: _relu_of(g, shape=(4.0,), dtype=F16), "shape=(4.0,)", "whole numbers"),
    ),
    (
        "input_shape_none",
        whole(lambda g: _relu_of(g, shape=1.5, dtype=F16), "shape=1.5 is not a sequence"),
    ),
    (
        "input_rank_9",
        whole(lambda g: _relu_of(g, shape=(1,) * 9, dtype=F16), "9 dims", "at most 8"),
    ),
    (
        "input_dtype_complex",
        whole(
            lambda g: _relu_of(g, shape=(4,), dtype=torch.complex64),
            "dtype=torch.complex64 is not supported",
        ),
    ),
    (
        "input_dtype_text",
        whole(lambda g: _relu_of(g, shape=(4,), dtype="float16"), "dtype='float16'", "torch's"),
    ),
    (
        "input_layout",
        whole(
            lambda g: _relu_of(g, shape=(1, 2, 3, 4), dtype=F16, layout="nhwc"),
            "layout='nhwc' is unknown",
            "'channels_last'",
        ),
    ),
    (
        "input_layout_and_stride",
        whole(
            lambda g: _relu_of(g, shape=(4,), dtype=F16, layout="contiguous", stride=(1,)),
            "both layout and stride",
        ),
    ),
    (
        "input_channels_last_of_rank_2",
        whole(
            lambda g: _relu_of(g, shape=(4, 4), dtype=F16, layout="channels_last"),
            "layout='channels_last' with 2 dims",
        ),
    ),
    (
        "input_stride_count",
        whole(
            lambda g: _relu_of(g, shape=(4, 4), dtype=F16, stride=(1,)), "stride has 1 entries", "2"
        ),
    ),
    (
        "input_stride_negative",
        whole(lambda g: _relu_of(g, shape=(4,), dtype=F16, stride=(-1,)), "stride=(-1,)", ">= 0"),
    ),
    (
        "output_stride_overlaps",
        whole(
            lambda g: _output_of(g, stride=(0, 64, 8, 1)), "output 'y'", "makes elements overlap"
        ),
    ),
    ("output_layout", whole(lambda g: _output_of(g, layout="any"), "layout='any' is unknown")),
    (
        "output_bool_of_number",
        whole(lambda g: _output_of(g, dtype=torch.bool), "dtype=bool of a number"),
    ),
    (
        "output_whole_number_of_number",
        whole(lambda g: _output_of(g, dtype=torch.int32), "output 'y': dtype=int32 of a"),
    ),
    (
        "output_number_of_bool",
        whole(
            lambda g: g.output("y", image(g) > 0.0, dtype=F16),
            "output 'y': dtype=float16 of a bool",
        ),
    ),
]

ROWS = [Bad(name, declare, says) for name, (declare, says) in TABLE]


def test_the_table_has_at_least_60_rows() -> None:
    assert len(ROWS) >= 60
    assert len({row.id for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_one_mistake_is_one_problem_in_the_right_words(row: Bad) -> None:
    g = cg.Graph("g")
    row.declare(g)
    with pytest.raises(cg.GraphError) as caught:
        g.compile("cpu")
    problems = [str(problem) for problem in caught.value.problems]
    assert len(problems) == 1, problems
    for part in row.says:
        assert part in problems[0]
    assert str(caught.value) == f"graph 'g' has 1 problem:\n  - {problems[0]}"


# -- several at once -------------------------------------------------------------------------------


def test_all_problems_of_a_graph_come_in_one_raise_in_order() -> None:
    g = cg.Graph("several")
    x = image(g)
    w = weight(g, 32, 8, 3, 3)
    first = g.conv(x, w, stride=0, name="c1")
    second = g.leaky_relu(first, math.nan, name="never_seen")
    g.input("spare", (4,), F16)
    g.output("y", second)
    g.output("z", g.add(x, g.input("r", (7,), F16), name="s"))
    with pytest.raises(cg.GraphError) as caught:
        g.spec()
    where = [problem.where for problem in caught.value.problems]
    assert where == ["conv 'c1'", "conv 'c1'", "add 's'", "input 'spare'"]
    message = str(caught.value)
    assert message.startswith("graph 'several' has 4 problems:\n  - conv 'c1': weight has 8")
    assert "stride=0 is not positive" in message


def test_an_unknown_result_causes_no_further_problems() -> None:
    g = cg.Graph("chain")
    y = g.conv(image(g), weight(g), padding=-1)
    for _ in range(5):
        y = g.relu(y + 1.0) * y
    y = g.where(y > 0.0, y, g.bias(y, g.input("b", (99,), F16)))
    g.output("y", y)
    with pytest.raises(cg.GraphError) as caught:
        g.spec()
    assert len(caught.value.problems) == 1
    assert "padding=-1" in str(caught.value)


def test_asking_an_unknown_value_for_its_shape_raises_the_cause() -> None:
    g = cg.Graph("early")
    y = g.conv(image(g), weight(g), dilation=0)
    with pytest.raises(cg.GraphError, match="dilation=0"):
        _ = y.shape


@pytest.mark.parametrize("name", ["two words", "", "9", "for"])
def test_a_graph_is_named_by_an_identifier(name: str) -> None:
    g = cg.Graph(name)
    _output_of(g)
    with pytest.raises(cg.GraphError, match="is not a Python identifier"):
        g.compile("cpu")


@pytest.mark.parametrize("option", ["compute_dtype", "intermediate_dtype"])
def test_arithmetic_is_in_a_floating_dtype(option: str) -> None:
    g = cg.Graph("g", **{option: torch.int32})
    _output_of(g)
    with pytest.raises(cg.GraphError, match=f"{option}=torch.int32; expected a floating-point"):
        g.compile("cpu")


def test_an_unknown_op_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute or op 'swish'"):
        image(cg.Graph("g")).swish()


# -- empty tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_an_empty_batch_gives_an_empty_result_of_the_right_shape(layout: str) -> None:
    g = cg.Graph("g")
    x = g.input("x", (0, 16, 8, 8), F16, layout=layout)
    g.output("y", g.conv_bias_act(x, weight(g), g.input("b", (32,), F16), padding=1))
    exe = g.compile("cpu")
    y = exe(
        x=torch.empty_strided((0, 16, 8, 8), exe.spec.tensors["x"].stride, dtype=F16),
        w=torch.ones(32, 16, 3, 3, dtype=F16),
        b=torch.ones(32, dtype=F16),
    )
    assert y.shape == (0, 32, 8, 8)
    assert y.dtype == F16


def test_an_empty_batch_of_attention_gives_empty_results() -> None:
    g = cg.Graph("g")
    q = g.input("q", (0, 4, 8, 16), F16)
    o, lse = g.sdpa(
        q, g.input("k", (0, 4, 9, 16), F16), g.input("v", (0, 4, 9, 24), F16), return_lse=True
    )
    g.output("o", o)
    g.output("lse", lse)
    empty = torch.empty
    result = g.compile("cpu")(
        q=empty(0, 4, 8, 16, dtype=F16),
        k=empty(0, 4, 9, 16, dtype=F16),
        v=empty(0, 4, 9, 24, dtype=F16),
    )
    assert result.o.shape == (0, 4, 8, 24)
    assert result.lse.shape == (0, 4, 8)


def test_attention_over_no_keys_gives_zeros() -> None:
    g = cg.Graph("g")
    q = g.input("q", (1, 2, 3, 8), F16)
    g.output("o", g.sdpa(q, g.input("k", (1, 2, 0, 8), F16), g.input("v", (1, 2, 0, 8), F16)))
    o = g.compile("cpu")(
        q=torch.ones(1, 2, 3, 8, dtype=F16),
        k=torch.ones(1, 2, 0, 8, dtype=F16),
        v=torch.ones(1, 2, 0, 8, dtype=F16),
    )
    assert torch.equal(o, torch.zeros(1, 2, 3, 8, dtype=F16))


def test_height_zero_with_padding_gives_the_bias() -> None:
    """The output is not empty: every tap falls on padding (pytorch#31425)."""
    g = cg.Graph("g")
    x = g.input("x", (2, 3, 0, 5), F32)
    w, b = g.input("w", (4, 3, 3, 3), F32), g.input("b", (4,), F32)
    g.output("y", g.bias(g.conv(x, w, padding=(2, 1)), b))
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = g.compile("cpu")(x=torch.empty(2, 3, 0, 5), w=torch.ones(4, 3, 3, 3), b=bias)
    assert torch.equal(y, bias.view(1, 4, 1, 1).expand(2, 4, 2, 5))


def test_no_input_channels_give_the_bias() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (2, 0, 6, 6), F32), g.input("w", (4, 0, 3, 3), F32)
    g.output("y", g.bias(g.conv(x, w), g.input("b", (4,), F32)))
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = g.compile("cpu")(x=torch.empty(2, 0, 6, 6), w=torch.empty(4, 0, 3, 3), b=bias)
    assert torch.equal(y, bias.view(1, 4, 1, 1).expand(2, 4, 4, 4))


# -- policy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tune": "fastest"}, "tune='fastest' is unknown"),
        ({"allow_tf32": "yes"}, "allow_tf32='yes'"),
        ({"allow_tf32": 1}, "allow_tf32=1; expected True, False or None"),
        ({"deterministic": None}, "deterministic=None"),
        ({"workspace_limit": -1}, "workspace_limit=-1"),
        ({"workspace_limit": 1.5}, "workspace_limit=1.5"),
        ({"workspace_limit": True}, "workspace_limit=True"),
        ({"fallback": "eager"}, "fallback='eager' is unknown"),
        ({"determinstic": True}, "unknown option determinstic; a policy has tune, allow_tf32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_policy_takes_no_value_without_a_meaning(options: dict[str, Any], says: str) -> None:
    g = cg.Graph("g")
    _output_of(g)
    with pytest.raises(cg.PolicyError) as caught:
        g.compile("cpu", **options)
    assert says in str(caught.value)


def test_a_device_that_is_neither_cpu_nor_cuda_is_refused() -> None:
    g = cg.Graph("g")
    _output_of(g)
    with pytest.raises(cg.PolicyError, match="device='meta'; expected a CPU or a CUDA device"):
        g.compile("meta")
