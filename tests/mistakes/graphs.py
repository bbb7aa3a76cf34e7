"""Mistakes in the graph around the ops: inputs, outputs, names."""

from __future__ import annotations

import numpy
import torch

import cudnngraph as cg
from tests.mistakes.declare import F16, image, output_of, relu_of, whole


def _unused(g: cg.Graph) -> None:
    g.input("spare", (4,), F16)
    output_of(g)


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


GRAPHS = [
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
        whole(lambda g: (output_of(g), g.output("z", torch.zeros(2))), "output 'z': is a Tensor"),
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
        whole(
            lambda g: g.output("class", image(g).relu()),
            "'class' is not a Python identifier",
            "and no keyword",
        ),
    ),
    ("input_no_shape", whole(lambda g: relu_of(g, dtype=F16), "has no shape", "or like=")),
    ("input_no_dtype", whole(lambda g: relu_of(g, shape=(4,)), "input 'x': has no dtype")),
    ("input_like_list", whole(lambda g: relu_of(g, like=[1, 2]), "like=list", "torch.Tensor")),
    (
        "input_like_array",
        whole(
            lambda g: relu_of(g, like=numpy.zeros((2, 2))),
            "like=ndarray; expected a torch.Tensor (torch.from_numpy() it)",
        ),
    ),
    (
        "input_shape_negative",
        whole(lambda g: relu_of(g, shape=(4, -1), dtype=F16), "shape=(4, -1)", ">= 0"),
    ),
    (
        "input_shape_float",
        whole(lambda g: relu_of(g, shape=(4.0,), dtype=F16), "shape=(4.0,)", "whole numbers"),
    ),
    (
        "input_shape_none",
        whole(lambda g: relu_of(g, shape=1.5, dtype=F16), "shape=1.5 is not a sequence"),
    ),
    (
        "input_rank_9",
        whole(lambda g: relu_of(g, shape=(1,) * 9, dtype=F16), "9 dims", "at most 8"),
    ),
    (
        "input_dtype_complex",
        whole(
            lambda g: relu_of(g, shape=(4,), dtype=torch.complex32),
            "dtype=torch.complex32 is not supported",
        ),
    ),
    (
        "input_dtype_text",
        whole(
            lambda g: relu_of(g, shape=(4,), dtype="float16"), "dtype='float16'", "torch.float16"
        ),
    ),
    (
        "input_layout",
        whole(
            lambda g: relu_of(g, shape=(1, 2, 3, 4), dtype=F16, layout="nhwc"),
            "layout='nhwc' is unknown",
            "'channels_last'",
        ),
    ),
    (
        "input_layout_and_stride",
        whole(
            lambda g: relu_of(g, shape=(4,), dtype=F16, layout="contiguous", stride=(1,)),
            "both layout and stride",
        ),
    ),
    (
        "input_channels_last_of_rank_2",
        whole(
            lambda g: relu_of(g, shape=(4, 4), dtype=F16, layout="channels_last"),
            "layout='channels_last' with 2 dims",
        ),
    ),
    (
        "input_stride_count",
        whole(
            lambda g: relu_of(g, shape=(4, 4), dtype=F16, stride=(1,)), "stride has 1 entries", "2"
        ),
    ),
    (
        "input_stride_negative",
        whole(lambda g: relu_of(g, shape=(4,), dtype=F16, stride=(-1,)), "stride=(-1,)", ">= 0"),
    ),
    (
        "output_stride_overlaps",
        whole(lambda g: output_of(g, stride=(0, 64, 8, 1)), "output 'y'", "makes elements overlap"),
    ),
    ("output_layout", whole(lambda g: output_of(g, layout="any"), "layout='any' is unknown")),
    (
        "output_bool_of_number",
        whole(lambda g: output_of(g, dtype=torch.bool), "dtype=bool of a number"),
    ),
    (
        "output_whole_number_of_number",
        whole(lambda g: output_of(g, dtype=torch.int32), "output 'y': dtype=int32 of a"),
    ),
    (
        "output_number_of_bool",
        whole(
            lambda g: g.output("y", image(g) > 0.0, dtype=F16),
            "output 'y': dtype=float16 of a bool",
        ),
    ),
]
