"""Torch's own ops in kernels: exactly what torch gives, on operands that lie anyhow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.tape import Refused
from tests import generated, numerics
from tests.torch_ops import (
    BF16,
    BOOL,
    F16,
    F32,
    I8,
    I32,
    I64,
    U8,
    Given,
    X,
    Y,
    Z,
    graph,
    run,
    same,
    some,
    sources_of,
)


def moved(op: str, args: tuple[Any, ...], *inputs: Sequence[Any]) -> tuple[Any, ...]:
    """An op, its arguments, and operands: shape, dtype and maybe strides."""
    return f"aten.{op}", args, tuple((*each, None)[:3] for each in inputs)


MOVES = {
    "embedding": moved("embedding.default", (X, Y), ((5, 24), F16), ((3, 4), I64)),
    "odd_rows": moved("embedding.default", (X, Y), ((5, 7), F32, (9, 1)), ((3, 4), I32, (1, 3))),
    "one_row": moved("embedding.default", (X, Y), ((4, 1), BF16), ((), I64)),
    "select_0": moved("index_select.default", (X, 0, Y), ((5, 16), F16), ((9,), I64)),
    "select_1": moved("index_select.default", (X, 1, Y), ((3, 5, 8), I8), ((6,), I64, (2,))),
    "select_2": moved("index_select.default", (X, -1, Y), ((3, 5), F32, (1, 3)), ((8,), I32)),
    "gather": moved("gather.default", (X, 1, Y), ((3, 4, 8), F16), ((3, 6, 8), I64)),
    "gather_part": moved("gather.default", (X, 0, Y), ((4, 9), F32, (1, 5)), ((6, 7), I64)),
    "gather_last": moved("gather.default", (X, -1, Y), ((3, 4), I64), ((3, 9), I64)),
    "index": moved("index.Tensor", (X, ("list", Y)), ((4, 3, 8), F16), ((2, 5), I64)),
    "index_two": moved(
        *("index.Tensor", (X, ("list", Y, Z))),
        *(((4, 5, 8), BF16), ((2, 3), I64), ((3,), I64)),
    ),
    "index_behind": moved(
        *("index.Tensor", (X, ("list", None, Y, Z))),
        *(((3, 4, 4), BOOL), ((5, 1), I64), ((1, 2), I64)),
    ),
    "pad": moved("constant_pad_nd.default", (X, ("list", 1, 2, 0, 3), 0.25), ((2, 3, 5, 6), F32)),
    "pad_cut": moved("constant_pad_nd.default", (X, ("list", -1, 3, 2, -2), 7), ((4, 5), I32)),
    "pad_bool": moved("constant_pad_nd.default", (X, ("list", 3, 1), True), ((4, 8), BOOL)),
    "reflect_1": moved("reflection_pad1d.default", (X, ("list", 3, 2)), ((2, 3, 5), F16)),
    "reflect_2": moved(
        *("reflection_pad2d.default", (X, ("list", 1, 2, 3, 0))),
        ((2, 8, 5, 6), F16, (240, 1, 48, 8)),
    ),
    "nearest_2": moved("replication_pad2d.default", (X, ("list", 1, 2, 3, 0)), ((2, 3, 5, 6), F32)),
    "nearest_3": moved(
        "replication_pad3d.default", (X, ("list", 1, 0, 2, 1, 0, 4)), ((1, 2, 3, 2, 4), BF16)
    ),
    "flip": moved("flip.default", (X, ("list", 0, -1)), ((3, 4, 5), F16)),
    "flip_first": moved("flip.default", (X, ("list", 0)), ((3, 16), U8)),
    "roll": moved("roll.default", (X, ("list", 2, -1), ("list", 1, 2)), ((2, 5, 6), F32)),
    "roll_flat": moved("roll.default", (X, ("list", 7)), ((3, 5), I64)),
    "clone": moved("clone.default", (X,), ((3, 5), I32, (1, 3))),
}


@pytest.fixture(autouse=True, scope="module")
def _together() -> None:
    """Most kernels are compiled at once, with the first that is run."""
    specs = [graph(op, args, *inputs) for op, args, inputs in MOVES.values()]
    specs += [cast(*each) for each in CASTS]
    specs += [each for op in COMPARED for dtype in (I64, I32, F32) for each in compared(op, dtype)]
    specs += [function(op, dtype) for op in FUNCTIONS for dtype in (F32, F16)]
    specs += [pair(op) for op in (*PAIRS, *CHOICES)]
    for spec in specs:
        sources_of(spec)


@pytest.mark.parametrize("name", MOVES)
def test_elements_are_where_torch_has_them(name: str) -> None:
    op, args, inputs = MOVES[name]
    torch.manual_seed(0)
    same(graph(op, args, *inputs), [some(*each) for each in inputs])


def test_negative_indices_count_from_the_end_of_index_alone() -> None:
    spec = graph("aten.index.Tensor", (X, ("list", Y)), ((4, 3), F32, None), ((3,), I64, None))
    same(spec, [torch.randn(4, 3), torch.tensor([-1, 0, -4])])


OUTSIDE = [-9, -5, 4, 2**31, 2**32 + 1, -(2**63), 2**63 - 1]


@pytest.mark.parametrize("op", ["embedding", "index_select", "gather", "index"])
@pytest.mark.parametrize("dtype", [F16, I64])
def test_an_index_outside_reads_nothing(op: str, dtype: torch.dtype) -> None:
    """torch's kernels would abort; here floats are NaN, whole numbers 0."""
    count = len(OUTSIDE) + 1
    index = torch.tensor([1, *OUTSIDE])
    weight = torch.full((12, 8), 99).to(dtype)[4:8].copy_(torch.arange(32).view(4, 8))
    args: dict[str, Any] = {
        "embedding": (X, Y),
        "index_select": (X, 0, Y),
        "gather": (X, 0, Y),
        "index": (X, ("list", Y)),
    }
    shape, name = (count,), "Tensor" if op == "index" else "default"
    if op == "gather":
        shape, index = (count, 8), index.view(-1, 1).expand(-1, 8).contiguous()
    spec = graph(f"aten.{op}.{name}", args[op], ((4, 8), dtype, None), (shape, I64, None))
    for out in run(spec, [weight, index]):
        assert torch.equal(out[0], weight[1])
        none = out[1:].isnan() if dtype == F16 else out[1:] == 0
        assert bool(none.all()), out


CASTS = (
    *((F32, to) for to in (F16, BF16, I64, I32, BOOL)),
    *((F16, to) for to in (F32, I32, U8)),
    *((I64, to) for to in (F32, F16, I32, I8, U8, BOOL)),
    *((I32, to) for to in (I64, F32, I8)),
    *((U8, to) for to in (F32, I8, BOOL)),
    *((BOOL, to) for to in (F32, F16, I64, U8)),
)


def cast(dtype: torch.dtype, to: torch.dtype) -> GraphSpec:
    named = (("dtype", ("dtype", str(to).removeprefix("torch."))),)
    return graph("aten._to_copy.default", (X,), ((4, 8), dtype, None), kwargs=named)


@pytest.mark.parametrize("dtype, to", CASTS, ids=str)
def test_casts_are_torchs(dtype: torch.dtype, to: torch.dtype) -> None:
    spec = cast(dtype, to)
    x = (torch.randn(4, 8) * 40).to(dtype)
    if dtype == I64:
        x = torch.randint(-(2**62), 2**62, (4, 8)) >> torch.randint(0, 62, (4, 8))
    if to == U8 and dtype.is_floating_point:
        x = x.abs()
    if dtype == BOOL or to == BOOL:
        x = (torch.randn(4, 8) * 2).int().to(dtype)
    same(spec, [x])


def test_a_cast_to_16_bits_rounds_within_a_kernel() -> None:
    """As torch has it: what is added behind is added to the rounded number."""
    named = (("dtype", ("dtype", "bfloat16")),)
    g = cg.Graph("rounded")
    x = g.input("x", (4, 64), F32)
    back = (("dtype", ("dtype", "float32")),)
    narrow = g.aten([x], "aten._to_copy.default", (X,), named)
    g.output("y", g.sub(g.aten([narrow], "aten._to_copy.default", (X,), back), x))
    given = torch.randn(4, 64)
    (want,) = reference.run(g.spec(), [given])
    assert float(want.abs().max()) > 0.0
    for out in run(g.spec(), [given]):
        assert torch.equal(out, given.bfloat16().float() - given)


FUNCTIONS = (
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("expm1", "exp2", "log1p", "log2", "log10", "erfc", "floor", "ceil", "trunc", "round"),
    *("frac", "sign", "deg2rad", "rad2deg", "sinc"),
)
STRANGE = (math.inf, -math.inf, math.nan, 0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 1.0, -1.0)


def function(op: str, dtype: torch.dtype) -> GraphSpec:
    return graph(f"aten.{op}.default", (X,), ((8, 40), dtype, None))


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_functions_of_a_float(op: str, dtype: torch.dtype) -> None:
    spec = function(op, dtype)
    for scale in (0.3, 3.0, 20.0):
        x = (torch.randn(8, 40) * scale).to(dtype)
        x[0, : len(STRANGE)] = torch.tensor(STRANGE)
        (want,) = reference.run(spec, [x], torch.float64)
        theirs = getattr(torch, op)(x.float()).to(dtype)
        want[theirs.isinf()] = theirs.double()[theirs.isinf()]  # of 16 bits, beyond the largest
        for out in run(spec, [x]):
            numerics.check(out, want, dtype, theirs)


PAIRS = ("atan2.default", "hypot.default", "copysign.Tensor", "fmod.Tensor", "remainder.Tensor")
CHOICES = ("fmax.default", "fmin.default", "heaviside.default")  # of one of the two


def pair(op: str) -> GraphSpec:
    one: Given = ((len(STRANGE), 5, len(STRANGE)), F32, None)
    return graph(f"aten.{op}", (X, Y), one, one)


@pytest.mark.parametrize("op", PAIRS)
def test_functions_of_two_floats(op: str) -> None:
    spec = pair(op)
    (shape,) = {spec.tensors[name].shape for name in spec.inputs}
    x, y = torch.randn(shape) * 5, torch.randn(shape)
    x[:, 0], y[:, 0] = torch.tensor(STRANGE)[:, None], torch.tensor(STRANGE)
    (want,) = reference.run(spec, [x, y])
    for out in run(spec, [x, y]):
        torch.testing.assert_close(out, want, rtol=3e-7, atol=0, equal_nan=True)
        assert torch.equal(out.signbit() & ~out.isnan(), want.signbit() & ~want.isnan())


@pytest.mark.parametrize("op", CHOICES)
def test_one_of_two_floats(op: str) -> None:
    spec = pair(op)
    (shape,) = {spec.tensors[name].shape for name in spec.inputs}
    x, y = torch.randn(shape), torch.randn(shape)
    x[:, 0], y[:, 0] = torch.tensor(STRANGE)[:, None], torch.tensor(STRANGE)
    (want,) = reference.run(spec, [x, y])
    for out in run(spec, [x, y]):
        torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["fmod", "remainder"])
@pytest.mark.parametrize("by", [2.5, -3])
def test_what_a_division_by_a_number_leaves(op: str, by: float) -> None:
    spec = graph(f"aten.{op}.Scalar", (X, by), ((49,), F32, None))
    same(spec, [torch.randn(49) * 20])


@pytest.mark.parametrize("op", ["isnan", "isinf", "isfinite", "signbit"])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_strange_numbers_are_found(op: str, dtype: torch.dtype) -> None:
    spec = graph(f"aten.{op}.default", (X,), ((len(STRANGE) + 1,), dtype, None))
    same(spec, [torch.tensor([*STRANGE, torch.finfo(dtype).max]).to(dtype)])


def mixed(op: str) -> GraphSpec:
    some_rows: list[Given] = [((6, 40), F32, None), ((6, 40), F32, None), ((40,), F32, None)]
    if op == "lerp.Scalar":
        return graph("aten.lerp.Scalar", (X, Y, 0.7), *some_rows[:2])
    kwargs = () if "lerp" in op else (("value", -0.3),)
    return graph(f"aten.{op}", (X, Y, Z), *some_rows, kwargs=kwargs)


@pytest.mark.parametrize("op", ["lerp.Tensor", "lerp.Scalar", "addcmul.default", "addcdiv.default"])
def test_mixtures_of_three(op: str) -> None:
    spec = mixed(op)
    given = [torch.randn(spec.tensors[name].shape) for name in spec.inputs]
    given[1][0, 0], given[0][1, 1] = math.inf, math.nan
    (want,), (theirs,) = reference.run(spec, given, torch.float64), reference.run(spec, given)
    for out in run(spec, given):
        numerics.check(out, want, F32, theirs)


def test_a_product_overflows_where_torchs_does() -> None:
    spec = mixed("addcmul.default")
    given = [torch.ones(spec.tensors[name].shape) for name in spec.inputs]
    given[1][0], given[1][1], given[2][:20] = 1e38, 3e38, -5.0
    (want,) = reference.run(spec, given)
    assert want.isinf().any() and want[0].isfinite().all()
    for out in run(spec, given):
        numerics.check(out, want, F32, want)


@pytest.mark.parametrize("op", ["floor", "isnan", "fmod"])
def test_functions_of_whole_numbers_are_torchs(op: str) -> None:
    args = (X, Y) if op == "fmod" else (X,)
    inputs: list[Given] = [((4,), I64, None)] * len(args)
    name = f"aten.{op}.{'Tensor' if op == 'fmod' else 'default'}"
    with pytest.raises(Refused):
        patterns.by_rule(graph(name, args, *inputs), 4)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_rows_of_torchs_own_softmax(op: str) -> None:
    spec = graph(f"aten._{op}.default", (X, -1, False), ((6, 40), F16, None))
    x = torch.randn(6, 40).half()
    (want,) = reference.run(spec, [x], torch.float64)
    for out in run(spec, [x]):
        numerics.check(out, want, F16, terms=40)


COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


def compared(op: str, dtype: torch.dtype) -> list[GraphSpec]:
    """With another tensor, and with a number."""
    one, scalar = ((49,), dtype, None), 2.5 if dtype == F32 else 2**24 + 1
    with_tensor = graph(f"aten.{op}.Tensor", (X, Y), one, one)
    return [with_tensor, graph(f"aten.{op}.Scalar", (X, scalar), one)]


@pytest.mark.parametrize("op", COMPARED)
@pytest.mark.parametrize("dtype", [I64, I32, F32])
def test_comparisons_of_whole_numbers(op: str, dtype: torch.dtype) -> None:
    """Exactly: neighbours above 2^24 are no equal float32."""
    x = torch.tensor([0, 1, -1, 2**24, 2**24 + 1, 2**31 - 1, -(2**31)]).to(dtype)
    every = x.repeat(7), x.repeat_interleave(7)
    for spec, inputs in zip(compared(op, dtype), (every, every[:1]), strict=True):
        same(spec, inputs)


def test_a_choice_between_whole_numbers_and_bools() -> None:
    for dtype in (I64, BOOL, F16):
        inputs: list[Given] = [((3, 1), BOOL, None), ((3, 4), dtype, None), ((4,), dtype, None)]
        same(graph("aten.where.self", (X, Y, Z), *inputs), [some(*each) for each in inputs])
    for op in ("logical_and", "logical_or", "logical_xor"):
        inputs = [((3, 4), BOOL, None), ((4,), BOOL, None)]
        same(graph(f"aten.{op}.default", (X, Y), *inputs), [some(*each) for each in inputs])
    same(graph("aten.logical_not.default", (X,), ((5,), BOOL, None)), [some((5,), BOOL, None)])


@pytest.mark.parametrize("op", ["eq", "ne", "bitwise_xor"])
def test_bools_that_are_alike(op: str) -> None:
    inputs: list[Given] = [((3, 4), BOOL, None), ((4,), BOOL, None)]
    same(graph(f"aten.{op}.Tensor", (X, Y), *inputs), [some(*each) for each in inputs])


@pytest.mark.parametrize("dtype", [I64, I32])
def test_whole_numbers_are_filled_and_bounded(dtype: torch.dtype) -> None:
    inputs: list[Given] = [((3, 4), dtype, None), ((4,), BOOL, None)]
    given = [some(*each) for each in inputs]
    same(graph("aten.masked_fill.Scalar", (X, Y, -7), *inputs), given)
    for bounds in ((1, 2), (None, 1), (2,), (2, 1)):
        same(graph("aten.clamp.default", (X, *bounds), inputs[0]), given[:1])
    for other, why in ((U8, "whole ones"), (F32, "whole ones")):
        with pytest.raises(Refused, match=why):
            patterns.by_rule(graph("aten.clamp.default", (X, 0, 1), ((4,), other, None)), 4)


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_sums_of_whole_numbers(op: str) -> None:
    for dtype in (I64, I32):
        spec = graph(f"aten.{op}.Tensor", (X, Y), ((3, 4), dtype, None), ((4,), dtype, None))
        same(spec, [torch.randint(-40000, 40000, (3, 4)).to(dtype), torch.arange(4).to(dtype)])
    eight = graph(f"aten.{op}.Tensor", (X, Y), ((4,), U8, None), ((4,), U8, None))
    with pytest.raises(Refused, match="8 bits, which wrap"):
        patterns.by_rule(eight, 4)


@pytest.mark.parametrize("by", [1, 2, 7, 2**31 - 1])
def test_whole_numbers_divided(by: int) -> None:
    """Rounded down, those below zero too."""
    for dtype in (I64, I32):
        x = torch.tensor([0, 1, -1, 6, 7, 8, -6, -7, -8, 2**31 - 1, -(2**31)]).to(dtype)
        spec = graph("aten.floor_divide.default", (X, by), ((11,), dtype, None))
        same(spec, [x])


@pytest.mark.parametrize(
    ("dtype", "by", "why"),
    [(F32, 2, "other numbers than whole"), (U8, 2, "other numbers than whole"), (I64, -2, "by")],
)
def test_other_divisions_are_torchs(dtype: torch.dtype, by: int, why: str) -> None:
    spec = graph("aten.floor_divide.default", (X, by), ((4,), dtype, None))
    with pytest.raises(Refused, match=f"a division .*{why}"):
        patterns.by_rule(spec, 4)


def test_an_embedding_with_its_norm_is_one_kernel() -> None:
    g = cg.Graph("embedded")
    words, places = g.input("words", (50, 64), F16), g.input("places", (12, 64), F16)
    w, b = (g.input(name, (64,), F16) for name in "wb")
    index = g.input("index", (3, 12), I64)
    rows = g.aten([words, index], "aten.embedding.default", (X, Y))
    g.output("y", g.layer_norm(g.add(rows, places), w, b))
    spec = g.spec()
    assert [step.kind for step in generated.selection(spec).steps] == ["kernel"]
    inputs = [some(spec.tensors[n].shape, spec.tensors[n].dtype, None, 50) for n in spec.inputs]
    (want,), (theirs,) = reference.run(spec, inputs, torch.float64), reference.run(spec, inputs)
    for out in run(spec, inputs):
        numerics.check(out, want, F16, theirs, terms=64)


def test_ops_of_torch_without_a_rule_are_torchs() -> None:
    for name, args, dtype in (
        ("aten.cumprod.default", (X, 0), F32),
        ("aten._to_copy.default", (X,), torch.float64),
    ):
        spec = graph(name, args, ((4, 4), dtype, None))
        with pytest.raises(Refused):
            patterns.by_rule(spec, 4)
