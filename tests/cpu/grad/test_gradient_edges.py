"""Gradients that are refused, and those at the edges: zeros, kinks, empty tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from tests.gradients import check_float64, declared, extra, random_inputs
from tests.samples import F16, F64


def test_wrt_is_checked_all_at_once() -> None:
    g = cg.Graph("attention")
    q, k, v = (g.input(name, (2, 2, 4, 4), F16) for name in "qkv")
    n = g.input("n", (2,), torch.int32)
    g.output("o", g.sdpa(q, k, v, seq_len_kv=n))
    with pytest.raises(cg.GraphError) as caught:
        cg.differentiate(g, ["q", "n", "o", "w"])
    text = str(caught.value)
    assert "has 3 problems" in text
    assert "wrt 'n': is int32; expected a floating input" in text
    assert "wrt 'o': is no input; expected one of: q, k, v, n" in text
    with pytest.raises(cg.GraphError, match="wrt: is empty; expected some of: q, k, v, n"):
        cg.differentiate(g, [])


def test_what_no_gradient_reaches_is_named() -> None:
    spec = declared(lambda g, x, y: {"z": g.where(x > 0.0, y, 2.0 * y)}, {"x": (3, 4), "y": (3, 4)})
    with pytest.raises(cg.GraphError, match="wrt 'x': has no gradient; expected a way to an"):
        cg.differentiate(spec, ["x", "y"])
    check_float64(spec, random_inputs(spec), ("y",))


def test_a_statistic_that_is_used_further_is_refused() -> None:
    g = cg.Graph("merge")
    q, k, v = (g.input(name, (1, 2, 4, 4), F64) for name in "qkv")
    o, lse = g.sdpa(q, k, v, return_lse=True)
    g.output("o", o)
    g.output("weight", g.exp(lse))
    with pytest.raises(cg.GraphError) as caught:
        cg.differentiate(g, ["q"])
    assert "exp 'exp': uses 'sdpa_lse', a statistic of sdpa 'sdpa'" in str(caught.value)


def test_statistics_are_outputs_without_a_gradient() -> None:
    g = cg.Graph("stats")
    q, k, v = (g.input(name, (1, 2, 4, 4), F64) for name in "qkv")
    o, lse = g.sdpa(q, k, v, return_lse=True)
    g.output("o", o)
    g.output("lse", lse)
    gradient = check_float64(g.spec(), random_inputs(g.spec()))
    assert gradient.incoming == {"o": "grad_o"}
    assert gradient.forward == g.spec()


def test_a_second_derivative_that_is_missing_is_named() -> None:
    spec = declared(lambda g, x: {"y": g.silu(x)}, {"x": (3, 4)})
    backward = cg.differentiate(spec, ["x"]).backward
    with pytest.raises(cg.GraphError, match="silu_backward has no gradient of its own"):
        cg.differentiate(backward, ["x"])


def test_names_of_the_graph_are_not_taken_twice() -> None:
    g = cg.Graph("names")
    x = g.input("grad_y", (2, 4, 5, 5), F64)
    w = g.input("w", (4, 4, 1, 1), F64)
    g.output("y", g.silu(g.conv(x, w, name="_hidden")))
    spec = g.spec()
    gradient = check_float64(spec, random_inputs(spec))
    assert gradient.incoming == {"y": "grad_y_"}
    assert gradient.outgoing == {"grad_y": "grad_grad_y", "w": "grad_w"}
    assert extra(gradient, spec) == ("saved_hidden",)


def test_the_largest_size_of_zeros_has_no_gradient() -> None:
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, -3.0, 3.0]], dtype=torch.float64, requires_grad=True)
    g = cg.Graph("g")
    g.output("y", g.reduction(g.input("x", (2, 3), torch.float64), (1,), "amax"))
    (found,) = torch.autograd.grad(g.compile("cpu", training=True)(x=x).sum(), x)
    (want,) = torch.autograd.grad(x.abs().amax(1).sum(), x)
    assert torch.equal(found, want)


def test_a_power_of_zero_has_no_gradient() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    g = cg.Graph("g")
    g.output("y", g.pow(g.input("x", (3,), torch.float64), 0.0))
    (found,) = torch.autograd.grad(g.compile("cpu", training=True)(x=x).sum(), x)
    assert torch.equal(found, torch.zeros(3, dtype=torch.float64))


KINKS: dict[str, tuple[Any, Any]] = {
    "relu6": (lambda g, x: g.relu6(x), F.relu6),
    "hardswish": (lambda g, x: g.hardswish(x), F.hardswish),
    "mish": (lambda g, x: g.mish(x), F.mish),
    "clamp": (lambda g, x: g.clamp(x, -1.0, 2.0), lambda x: F.hardtanh(x, -1.0, 2.0)),
    "clamp_low": (lambda g, x: g.clamp(x, 2.0), lambda x: F.threshold(x, 2.0, 2.0)),
    "clamp_high": (lambda g, x: g.clamp(x, max=2.0), lambda x: -F.threshold(-x, -2.0, -2.0)),
    "activation": (
        lambda g, x: g.activation(x, "clamp", min=-1.0, max=2.0),
        lambda x: F.hardtanh(x, -1.0, 2.0),
    ),
}


@pytest.mark.parametrize("name", KINKS)
def test_gradients_at_kinks_are_torchs(name: str) -> None:
    """Zeros are common: of padding, of channels that are dead."""
    declare, run = KINKS[name]
    x = torch.tensor([-3.0, -1, 0, 1, 2, 3, 6, 7], dtype=torch.float64, requires_grad=True)
    g = cg.Graph("g")
    g.output("y", declare(g, g.input("x", (8,), torch.float64)))
    dy = torch.arange(1.0, 9.0, dtype=torch.float64)
    (found,) = torch.autograd.grad(g.compile("cpu", training=True)(x=x), x, dy)
    (want,) = torch.autograd.grad(run(x), x, dy)
    torch.testing.assert_close(found, want)


NAN = math.nan


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_gradients_of_the_larger_and_smaller_of_two_are_torchs_at_nan(name: str) -> None:
    x = torch.tensor([NAN, 1.0, NAN, 2.0, 3.0, 1.0], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([1.0, NAN, NAN, 2.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    g = cg.Graph("g")
    g.output("z", getattr(g, name)(g.input("x", (6,), F64), g.input("y", (6,), F64)))
    dy = torch.arange(1.0, 7.0, dtype=torch.float64)
    found = torch.autograd.grad(g.compile("cpu", training=True)(x=x, y=y), (x, y), dy)
    wanted = torch.autograd.grad(getattr(torch, name)(x, y), (x, y), dy)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
    assert found[0].tolist()[:3] == found[1].tolist()[:3] == [1.0, 2.0, 3.0]


EXTREMES: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "amax": lambda x, dims: x.abs().amax(dims),
}


@pytest.mark.parametrize("dims", [(1,), (0, 1)], ids=str)
@pytest.mark.parametrize("mode", EXTREMES)
def test_gradients_of_extremes_are_torchs_at_nan(mode: str, dims: tuple[int, ...]) -> None:
    rows = [[NAN, 1.0, 0.0, -2.0], [-3.0, 3.0, 0.0, -3.0], [NAN, NAN, NAN, NAN]]
    x = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    g = cg.Graph("g")
    g.output("y", g.reduction(g.input("x", (3, 4), F64), dims, mode))
    want_y = EXTREMES[mode](x, dims)
    dy = torch.arange(1.0, want_y.numel() + 1, dtype=torch.float64).view(want_y.shape)
    (found,) = torch.autograd.grad(g.compile("cpu", training=True)(x=x), x, dy)
    (want,) = torch.autograd.grad(want_y, x, dy)
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    assert found[0].isnan().all()


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="its gradient at a bound was dy")
@pytest.mark.parametrize("bounds", [(-1.0, 2.0), (2.0, None), (None, 2.0)], ids=str)
def test_the_gradient_of_a_clamp_is_that_of_torchs_own_from_2_14_on(
    bounds: tuple[float | None, float | None],
) -> None:
    x = torch.tensor([-3.0, -1, 0, 1, 2, 3, 6, 7], dtype=torch.float64, requires_grad=True)
    g = cg.Graph("g")
    g.output("y", g.clamp(g.input("x", (8,), torch.float64), *bounds))
    (found,) = torch.autograd.grad(g.compile("cpu", training=True)(x=x).sum(), x)
    (want,) = torch.autograd.grad(x.clamp(*bounds).sum(), x)
    assert torch.equal(found, want)


@pytest.mark.parametrize("op", ["bias", "scale"])
def test_no_images_have_gradients_of_no_elements(op: str) -> None:
    x = torch.randn(0, 3, 2, dtype=torch.float64)
    for shape in ((0, 3, 1), (3,)):
        other = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        g = cg.Graph("empty")
        g.output("y", getattr(g, op)(g.input("x", like=x), g.input("other", like=other)))
        g.compile("cpu", training=True)(x, other).sum().backward()
        assert other.grad is not None and other.grad.shape == shape and not other.grad.any()


def test_the_gradient_of_a_group_norm_of_no_images_is_zero() -> None:
    weight = torch.randn(6, requires_grad=True)
    cg.functional.group_norm(torch.randn(0, 6, 4), 3, weight).sum().backward()
    assert weight.grad is not None and weight.grad.shape == (6,) and not weight.grad.any()


@pytest.mark.parametrize(("features", "results"), [(0, 3), (3, 0)])
def test_a_linear_layer_of_no_features_has_gradients(features: int, results: int) -> None:
    x = torch.randn(2, 2, features, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(results, features, dtype=torch.float64, requires_grad=True)
    cg.functional.linear(x, weight).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()
    assert weight.grad is not None and weight.grad.shape == weight.shape


def test_a_long_chain_has_a_gradient() -> None:
    """What is recomputed is followed without recursion, of which Python has a limited depth."""
    many, x = 350, torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    g = cg.Graph("chain")
    y, expected = g.input("x", (2,), torch.float64), x
    for _ in range(many):
        y, expected = y - y * y * 1e-3, expected - expected * expected * 1e-3
    g.output("y", y)
    wanted = torch.autograd.grad(expected.sum(), x)[0]
    (got,) = torch.autograd.grad(g.compile("cpu", training=True)(x).sum(), x)
    assert torch.allclose(got, wanted, rtol=1e-12)
