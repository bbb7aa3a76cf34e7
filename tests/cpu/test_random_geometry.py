"""Spatial ops of random geometry: what is accepted is right, forward and backward, and what is not
valid is refused by its name. ``tests/geometry.py`` says how to run many more cases, or one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnngraph as cg
from tests import numerics
from tests.geometry import (
    F64,
    Convolution,
    Interpolation,
    Pool,
    convolution,
    interpolation,
    parts,
    pool,
)
from tests.gradients import ours


def random(like: torch.Tensor, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=gen, dtype=like.dtype)


def same(found: Any, right: Any, what: str) -> None:
    for place, (a, b) in enumerate(zip(found, right, strict=True)):
        numerics.check(a.detach(), b.detach(), F64, what=f"{what}: {place}")


def apply(case: Convolution, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By the function on tensors, which autograd differentiates."""
    run = getattr(cg.functional, f"{case.op}{case.rank}d")
    made: torch.Tensor = run(x, weight, **case.options)
    return made


def check_convolution(case: Convolution, what: str) -> None:
    x, weight = (tensor.requires_grad_() for tensor in case.tensors())
    try:
        y = apply(case, x, weight)
    except cg.GraphError as error:
        assert case.sizes() is None, f"{what} is refused: {error}"
        return
    except Exception as error:
        raise AssertionError(what) from error
    assert case.sizes() == y.shape, what
    want, dy = case.by_torch(x, weight), random(y, 1)
    try:
        found = torch.autograd.grad(y, (x, weight), dy)
    except Exception as error:
        raise AssertionError(f"{what}: the gradient") from error
    same((y, *found), (want, *torch.autograd.grad(want, (x, weight), dy)), what)


@pytest.mark.parametrize("numbers", parts(400), ids=str)
def test_convolutions_are_torchs_forward_and_backward(numbers: range) -> None:
    for number in numbers:
        case = convolution(number)
        check_convolution(case, f"case {number}, {case}")


def line(
    n: int,
    kernel: int,
    stride: int,
    padding: tuple[int, int],
    *,
    transposed: bool = False,
    dilation: int = 1,
    extra: int = 0,
) -> Convolution:
    """A convolution of one channel, in one dim."""
    geometry = ((stride,), (padding,), (dilation,), 1, (extra,), False)
    return Convolution((1, 1, n), (1, 1, kernel), transposed, *geometry)


LINES = {
    "output padding over all that is cut": line(1, 1, 3, (2, 0), transposed=True, extra=2),
    "the last window in the padding": line(1, 1, 3, (2, 0)),
    "of the padding alone": line(2, 1, 4, (2, 0)),
    "output padding alone": line(1, 1, 1, (2, 0), transposed=True, dilation=3, extra=2),
    "more before than taps reach": line(1, 4, 2, (5, 1), transposed=True, dilation=2),
    "of no elements, padded": line(0, 2, 1, (2, 1)),
    "of no elements, by a stride": line(0, 3, 3, (0, 5)),
    "to elements from none": line(0, 3, 1, (1, 0), transposed=True),
    "one after another": line(5, 1, 1, (3, 0), transposed=True),
}


@pytest.mark.parametrize("name", LINES)
def test_lopsided_lines_are_torchs(name: str) -> None:
    assert LINES[name].sizes() is not None
    check_convolution(LINES[name], name)


@pytest.mark.parametrize("last", [torch.channels_last, torch.channels_last_3d], ids=str)
def test_a_dim_of_one_window_takes_no_stride(last: torch.memory_format) -> None:
    """By one, oneDNN's float32 results of one channel are garbage (torch 2.13, AVX-512)."""
    lead = (1,) * (last == torch.channels_last_3d)
    gen = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=gen).to(memory_format=last)
        for shape in ((3, 1, *lead, 4, 5), (3, 1, *lead, 2, 4))
    )
    run = getattr(cg.functional, f"conv{2 + len(lead)}d")
    options = {"stride": (*lead, 1, 2)}
    exact = run(x.double(), weight.double(), **options)
    assert exact.shape[-1] == 1
    numerics.check(run(x, weight, **options), exact, torch.float32, terms=8)


def declared(case: Convolution, x: torch.Tensor, weight: torch.Tensor) -> cg.GraphSpec:
    g = cg.Graph("conv")
    given = g.input("x", like=x), g.input("weight", like=weight)
    g.output("y", getattr(g, case.op)(*given, **case.options))
    return g.spec()


@pytest.mark.parametrize("numbers", parts(80, 4), ids=str)
def test_gradients_of_gradients_of_convolutions_are_torchs(numbers: range) -> None:
    for number in numbers:
        case = convolution(number)
        if case.sizes() is None:
            continue
        what = f"case {number}, {case}"
        x, weight = (tensor.requires_grad_() for tensor in case.tensors())
        try:
            backward = cg.differentiate(declared(case, x, weight), ("x", "weight")).backward
            second = cg.differentiate(backward, backward.inputs)
            want = case.by_torch(x, weight)
            dy = random(want, 1).requires_grad_()
            leaves = {"x": x, "weight": weight, "grad_y": dy}
            first = torch.autograd.grad(want, (x, weight), dy, create_graph=True)
            given = {name: leaves[name].detach() for name in backward.inputs}
            grads = {f"grad_{name}": random(leaves[name], 2) for name in ("x", "weight")}
            found = ours(second, given, grads, F64)
        except Exception as error:
            raise AssertionError(what) from error
        right = torch.autograd.grad(
            first, list(leaves.values()), list(grads.values()), allow_unused=True
        )
        for (name, leaf), exact in zip(leaves.items(), right, strict=True):
            none = torch.zeros_like(leaf)
            same((found.get(name, none),), (none if exact is None else exact,), f"{what}, {name}")


def test_most_of_the_convolutions_are_valid_and_lopsided() -> None:
    cases = [convolution(number) for number in range(1000)]
    valid = [case for case in cases if case.sizes() is not None]
    assert len(valid) > 800
    assert sum(any(a != b for a, b in case.padding) for case in valid) > 500
    assert sum(0 in (*case.x, *case.weight) for case in valid) > 50
    assert sum(case.transposed for case in valid) > 300


def check_image(case: Pool | Interpolation, op: str, what: str) -> None:
    """The op of an image, its gradient, and that it is refused by one problem if not valid."""
    x = case.tensor()
    for last in (False, True)[: 1 + (x.dim() == 4)]:
        given = x.to(memory_format=torch.channels_last) if last else x
        g = cg.Graph("image")
        g.output("y", getattr(g, op)(g.input("x", like=given), **case.options))
        if case.sizes() is None:
            assert g.problems, f"{what} is taken"
            with pytest.raises(cg.GraphError):
                g.spec()
            return
        assert not g.problems, f"{what} is refused: {g.problems}"
        leaf, wide = given.clone().requires_grad_(), x.clone().requires_grad_()
        try:
            y = g.compile("cpu", training=True)(leaf)
            want = case.by_torch(wide)
            assert y.shape == want.shape == case.sizes()
            dy = random(want, 1)
            (found,), (right,) = (
                torch.autograd.grad(*each, dy) for each in ((y, leaf), (want, wide))
            )
        except Exception as error:
            raise AssertionError(what) from error
        same((y, found), (want, right), what)


@pytest.mark.parametrize("numbers", parts(400, 4), ids=str)
def test_poolings_are_torchs_and_every_window_holds_an_element(numbers: range) -> None:
    for number in numbers:
        case = pool(number)
        check_image(case, case.op, f"case {number}, {case}")


@pytest.mark.parametrize("numbers", parts(300, 4), ids=str)
def test_interpolations_are_torchs(numbers: range) -> None:
    for number in numbers:
        case = interpolation(number)
        check_image(case, "interpolate", f"case {number}, {case}")


def test_most_poolings_are_valid_and_some_are_of_padding_alone() -> None:
    cases = [pool(number) for number in range(1000)]
    assert sum(case.sizes() is not None for case in cases) > 650
    alone = 0
    for case in cases:
        g = cg.Graph("g")
        getattr(g, case.op)(g.input("x", case.x, F64), **case.options)
        alone += any("lies in the padding alone" in problem.what for problem in g.problems)
    assert alone > 10
    cases = [interpolation(number) for number in range(1000)]  # type: ignore[misc]
    assert sum(case.sizes() is not None for case in cases) > 700
