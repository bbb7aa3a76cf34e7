"""Whole numbers and running sums in kernels: exactly what torch gives, by every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.tape import Refused
from tests import numerics
from tests.torch_ops import (
    BF16,
    BOOL,
    F16,
    F32,
    I8,
    I32,
    I64,
    U8,
    X,
    Y,
    graph,
    run,
    same,
    some,
    sources_of,
)


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers of all sizes, many of them extremes of the dtype."""
    bounds = torch.iinfo(dtype)
    found = torch.randint(bounds.min, bounds.max, shape, dtype=dtype)
    some_of = torch.tensor([bounds.min, bounds.max, 0, -1, 65535, 65536, -65536], dtype=dtype)
    picked = some_of[torch.randint(len(some_of), shape)]
    return torch.where(torch.rand(shape) < 0.5, picked, found)


def given_of(spec: GraphSpec, *, ties: bool = True) -> list[torch.Tensor]:
    forms = [spec.tensors[name] for name in spec.inputs]
    return [
        whole(form.shape, form.dtype)
        if form.dtype in (I32, I64) and not ties
        else some(form.shape, form.dtype, form.stride)
        for form in forms
    ]


# -- running sums ----------------------------------------------------------------------------------

SUMS: dict[str, tuple[Any, ...]] = {
    "floats": ((X, 1), ((3, 7), F32, None)),
    "first": ((X, 0), ((9, 4), F16, None)),
    "middle": ((X, -2), ((2, 12, 3), BF16, (36, 1, 12))),
    "mask": ((X, 1), ((2, 128), I32, None)),
    "mask_64": ((X, 1), ((2, 40), I64, None)),
    "bools": ((X, 0), ((20, 2), BOOL, None)),
    "vector": ((X, 0), ((8,), I64, None)),
    "row": ((X, 0), ((8,), F32, None)),
}


def summed(name: str) -> GraphSpec:
    args, given = SUMS[name]
    return graph("aten.cumsum.default", args, given)


@pytest.mark.parametrize("name", SUMS)
def test_running_sums_of_short_rows(name: str) -> None:
    spec = summed(name)
    if spec.tensors["y"].dtype.is_floating_point:
        inputs = given_of(spec)
        (want,) = reference.run(spec, inputs, torch.float64)
        (theirs,) = reference.run(spec, inputs)
        for out in run(spec, inputs):
            numerics.check(out, want, inputs[0].dtype, theirs, terms=12)
    else:  # what leaves the range wraps
        same(spec, given_of(spec, ties=False))
        same(spec, given_of(spec))


def test_running_sums_in_another_dtype_are_torchs() -> None:
    wide = graph("aten.cumsum.default", (X, 1), ((3, 4), I64, None), kwargs=to("float32"))
    with pytest.raises(Refused, match="another kind of numbers"):
        patterns.by_rule(wide, 4)
    with pytest.raises(Refused, match="long rows"):
        patterns.by_rule(graph("aten.cumsum.default", (X, 1), ((2, 300), F32, None)), 4)
    spec = graph("aten.cumsum.default", (X, 1), ((3, 4), I64, None), kwargs=to("int32"))
    same(spec, given_of(spec))


def to(dtype: str) -> tuple[tuple[str, Any], ...]:
    return (("dtype", ("dtype", dtype)),)


# -- whole numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [I32, I64])
@pytest.mark.parametrize("op", ["neg", "abs", "bitwise_not"])
def test_whole_numbers_by_themselves(op: str, dtype: torch.dtype) -> None:
    spec = graph(f"aten.{op}.default", (X,), ((3, 5), dtype, None))
    same(spec, [whole((3, 5), dtype)])
    with pytest.raises(Refused, match="32 bits or more"):
        patterns.by_rule(graph(f"aten.{op}.default", (X,), ((4,), I8, None)), 4)


@pytest.mark.parametrize("by", [1, 2, 7, 2**31 - 1])
@pytest.mark.parametrize("dtype", [I32, I64])
def test_what_is_left_of_a_division(by: int, dtype: torch.dtype) -> None:
    spec = graph("aten.remainder.Scalar", (X, by), ((4, 5), dtype, None))
    same(spec, [whole((4, 5), dtype)])


@pytest.mark.parametrize("op", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bits_of_whole_numbers(op: str) -> None:
    for a, b in ((I32, I32), (I64, I64), (U8, U8), (I8, I8), (BOOL, I32), (I32, I64), (I64, BOOL)):
        spec = graph(f"aten.{op}.Tensor", (X, Y), ((3, 4), a, None), ((4,), b, None))
        same(spec, given_of(spec, ties=False))
    same(graph(f"aten.{op}.Scalar", (X, 6), ((9,), I64, None)), [whole((9,), I64)])


@pytest.mark.parametrize("op", ["eq", "lt", "ge"])
def test_comparisons_of_two_kinds_of_whole_numbers(op: str) -> None:
    for a, b in ((I64, I32), (I32, I64), (BOOL, I64), (I32, BOOL)):
        spec = graph(f"aten.{op}.Tensor", (X, Y), ((3, 4), a, None), ((4,), b, None))
        same(spec, given_of(spec))
    spec = graph(f"aten.{op}.Tensor", (X, Y), ((3, 4), I32, None), ((), BOOL, None))
    same(spec, given_of(spec))
    spec = graph(f"aten.{op}.Tensor", (X, Y), ((3, 4), I32, None), ((), I64, None))
    with pytest.raises(Refused, match="a number without dims"):
        patterns.by_rule(spec, 4)


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_arithmetic_of_two_kinds_of_whole_numbers(op: str) -> None:
    for a, b in ((I64, I32), (I32, I64), (BOOL, I64), (I32, BOOL)):
        if op == "sub" and BOOL in (a, b):
            continue
        spec = graph(f"aten.{op}.Tensor", (X, Y), ((3, 4), a, None), ((4,), b, None))
        same(spec, given_of(spec))


def specs() -> Iterator[GraphSpec]:
    """Graphs of running sums, for other tests of kernels."""
    yield from map(summed, SUMS)


@pytest.fixture(autouse=True, scope="module")
def _together() -> None:
    """Most kernels are compiled at once, with the first that is run."""
    for spec in specs():
        sources_of(spec)
