"""Kernels that find one place in each row, or write at one: exactly as torch does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.kernels import patterns
from cudnngraph.kernels.tape import Refused
from tests import generated, host_kernels
from tests.torch_ops import BF16, BOOL, F16, F32, I64, Given, X, Y, Z, graph, same, some, sources_of

#: An op's arguments behind x, and x: rows that lie in memory, or across it, or all of it.
ROWS: dict[str, tuple[tuple[Any, ...], Given]] = {
    "last": ((-1,), ((5, 40), F32, None)),
    "kept": ((-1, True), ((3, 4, 7), F16, None)),
    "first": ((0,), ((5, 48), BF16, None)),
    "middle": ((1,), ((2, 21, 8), F32, None)),
    "channels": ((1,), ((2, 8, 3, 5), F16, (120, 1, 40, 8))),
    "strided": ((1,), ((4, 9), F32, (1, 7))),
    "long": ((1,), ((2, 3000), F32, None)),
    "one": ((1,), ((4, 1), F32, None)),
}
ALL: dict[str, tuple[tuple[Any, ...], Given]] = {
    "all": ((), ((3, 5, 4), F32, None)),
    "all kept": ((None, True), ((3, 5), F16, None)),
    "a number": ((), ((), F32, None)),
}
WORST = (math.nan, math.inf, -math.inf, -0.0, 0.0)


def places(op: str, case: str) -> tuple[Any, ...]:
    args, given = {**ROWS, **ALL}[case]
    return f"aten.{op}", (X, *args), given


def both(op: str, case: str) -> cg.GraphSpec:
    """The elements and their places."""
    args, (shape, dtype, stride) = ROWS[case]
    g = cg.Graph("both")
    x = g.input("x0", shape, dtype, stride=stride)
    values, index = g.aten([x], f"aten.{op}.dim", (X, *args))
    g.output("values", values)
    g.output("index", index)
    return g.spec()


def written(name: str) -> tuple[Any, ...]:
    return WRITTEN[name]


def put(op: str, args: tuple[Any, ...], *inputs: Sequence[Any]) -> tuple[Any, ...]:
    return f"aten.{op}", args, *(tuple((*each, None)[:3]) for each in inputs)


WRITTEN = {
    "src": put("scatter.src", (X, 1, Y, Z), ((4, 7, 8), F16), ((4, 1, 8), I64), ((4, 1, 8), F16)),
    "wider": put("scatter.src", (X, 0, Y, Z), ((3, 8), F32), ((1, 8), I64), ((2, 9), F32)),
    "strided": put(
        *("scatter.src", (X, -1, Y, Z)),
        *(((4, 6), F32, (1, 5)), ((4, 1), I64, (3, 1)), ((4, 1), F32, (2, 2))),
    ),
    "number": put("scatter.value", (X, 1, Y, 1.5), ((5, 8), BF16), ((5, 1), I64)),
    "whole": put("scatter.value", (X, 1, Y, 3), ((5, 8), I64), ((5, 1), I64)),
    "bools": put("scatter.src", (X, 1, Y, Z), ((5, 8), BOOL), ((5, 1), I64), ((5, 1), BOOL)),
    "added": put("scatter_add.default", (X, 1, Y, Z), ((5, 8), F32), ((5, 1), I64), ((5, 1), F32)),
}


@pytest.fixture(autouse=True, scope="module")
def _together() -> None:
    """All kernels are compiled at once, with the first that is run."""
    for kind in ("max", "min"):
        for case in (*ROWS, *ALL):
            sources_of(graph(*places(f"arg{kind}.default", case)))
        for case in ROWS:
            sources_of(both(kind, case))
    for name in WRITTEN:
        sources_of(graph(*written(name)))


def of_rows(given: Given) -> list[torch.Tensor]:
    """Whole numbers, of which several are alike; and with the worst numbers among them."""
    shape, dtype, stride = given
    found = [some(shape, dtype, stride)]
    for first in range(len(WORST)):
        worst = some(shape, dtype, stride)
        at = torch.randperm(worst.numel())[: 2 * len(WORST)]
        kinds = torch.tensor((*WORST[first:], *WORST[first:])[: len(at)]).to(dtype)
        flat = worst.flatten()
        flat[at[: len(kinds)]] = kinds
        found.append(worst.copy_(flat.view(shape)))
    return found


@pytest.mark.parametrize("case", [*ROWS, *ALL])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_the_first_place_of_the_largest_is_found(kind: str, case: str) -> None:
    """The first of those that are alike, and the first NaN where there is one."""
    torch.manual_seed(0)
    spec = graph(*places(f"arg{kind}.default", case))
    for x in of_rows({**ROWS, **ALL}[case][1]):
        same(spec, [x])


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("kind", ["max", "min"])
def test_elements_with_their_places(kind: str, case: str) -> None:
    torch.manual_seed(0)
    spec = both(kind, case)
    assert [step.kind for step in generated.selection(spec).steps] == ["kernel"]
    for x in of_rows(ROWS[case][1]):
        wanted = reference.run(spec, [x])
        for source in sources_of(spec):
            outputs = [spec.tensors[name].empty("cpu") for name in spec.outputs]
            host_kernels.run(source, [x, *outputs])
            for out, want in zip(outputs, wanted, strict=True):
                torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", WRITTEN)
def test_one_element_of_each_row_is_written(name: str) -> None:
    torch.manual_seed(0)
    op, args, *inputs = written(name)
    same(graph(op, args, *inputs), [some(*each, most=3) for each in inputs])


def test_places_among_numbers_that_a_kernel_computes_are_not_its_own() -> None:
    """They might be others by a rounding. What is only moved or widened is not computed."""
    g = cg.Graph("computed")
    x = g.input("x", (4, 8), F16)
    g.output("y", g.aten([g.exp(x)], "aten.argmax.default", (X, 1)))
    with pytest.raises(Refused, match="numbers that a kernel computes"):
        patterns.by_rule(g.spec(), 4)
    g = cg.Graph("moved")
    x = g.input("x", (8, 4), F16)
    moved = g.cast(g.slice(g.transpose(x, 0, 1), 1, 1, 7), F32)
    g.output("y", g.aten([moved], "aten.argmax.default", (X, 1)))
    same(g.spec(), [some((8, 4), F16, None)])


@pytest.mark.parametrize("name", ["scatter.src", "scatter_add.default"])
def test_several_places_of_a_row_are_torchs(name: str) -> None:
    inputs: list[Given] = [((4, 8), F32, None), ((4, 2), I64, None), ((4, 2), F32, None)]
    with pytest.raises(Refused, match="several places of a row"):
        patterns.by_rule(graph(f"aten.{name}", (X, 1, Y, Z), *inputs), 4)


def test_a_place_outside_is_not_written() -> None:
    """torch's kernels would abort."""
    index = torch.tensor([1, -1, 8, 2**32 + 1, -(2**63), 2**63 - 1]).view(6, 1)
    inputs: list[Given] = [((6, 8), F32, None), ((6, 1), I64, None)]
    spec = graph("aten.scatter.value", (X, 1, Y, 5.0), *inputs)
    x = torch.randn(6, 8)
    want = x.clone()
    want[0, 1] = 5.0
    for source in sources_of(spec):
        out = torch.empty(6, 8)
        host_kernels.run(source, [x, index, out])
        assert torch.equal(out, want)


def test_whole_numbers_have_their_places_by_torch() -> None:
    with pytest.raises(Refused):
        patterns.by_rule(graph("aten.argmax.default", (X, 1), ((4, 8), I64, None)), 4)
