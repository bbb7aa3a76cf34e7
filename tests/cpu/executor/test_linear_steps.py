"""Linear layers as one call of torch, and TF32 switches while a step runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.device import tf32
from cudnngraph.executor import reference, torch_steps
from cudnngraph.executor.linear import runs_whole
from cudnngraph.ir.spec import GraphSpec
from tests import numerics
from tests.steps import BF16, F16, F32, outputs_of, run, single

# -- a linear layer --------------------------------------------------------------------------------


def linear(
    act: str | None = None,
    dtype: torch.dtype = F16,
    bias: tuple[int, ...] = (24,),
    bias_first: bool = False,
    out: torch.dtype | None = None,
) -> GraphSpec:
    g = cg.Graph("linear")
    x, w = g.input("x", (16, 32), dtype), g.input("w", (32, 24), dtype)
    b = g.input("b", bias, dtype)
    y = b + x @ w if bias_first else x @ w + b
    g.output("y", y if act is None else getattr(g, act)(y), dtype=out or dtype)
    return g.spec()


@pytest.mark.parametrize("act", [None, "relu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("bias_first", [False, True])
def test_a_linear_layer_is_one_call_of_torch(
    act: str | None, dtype: torch.dtype, bias_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = linear(act, dtype, bias_first=bias_first)
    assert runs_whole(spec)
    gen = torch.Generator().manual_seed(5)
    values = {n: torch.randn(spec.tensors[n].shape, generator=gen).to(dtype) for n in spec.inputs}
    inputs, (out,) = [values[name] for name in spec.inputs], outputs_of(spec)
    launch = torch_steps.launcher(spec, inputs, [out], allow_tf32=False)
    monkeypatch.setattr(reference, "run_into", None)  # it is not the reference that runs
    launch()
    want = reference.run(spec, inputs, torch.float64)[0]
    plain = values["x"] @ values["w"] + values["b"]
    theirs = {"relu": torch.relu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh")}
    numerics.check(out, want, dtype, theirs[act](plain) if act else plain, terms=32)


@pytest.mark.parametrize(
    "spec",
    [
        linear("silu"),
        linear("gelu"),
        linear(dtype=F32),
        linear(bias=(16, 24)),
        linear(bias=(1,)),
        linear("relu", out=F32),
    ],
    ids=["silu", "gelu", "float32", "residual", "number", "wide"],
)
def test_what_is_no_linear_layer_is_none(spec: GraphSpec) -> None:
    assert not runs_whole(spec)


# -- TF32 ------------------------------------------------------------------------------------------


@pytest.fixture
def switches() -> Any:
    """torch's own TF32 switches, put back after the test."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def stands() -> tuple[bool, bool]:
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("outside", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("allowed", [True, False])
def test_the_switches_stand_as_the_policy_says_while_a_step_runs_and_then_as_before(
    outside: tuple[bool, bool], allowed: bool, switches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = outside
    seen = []
    real = reference.RULES["conv"]

    def conv(inputs: Any, attrs: Any) -> Any:
        seen.append(stands())
        return real(inputs, attrs)

    monkeypatch.setattr(torch_steps, "NATIVE", {**torch_steps.NATIVE, "conv": conv})
    spec = single("conv", ((1, 2, 5, 5), F32), ((2, 2, 3, 3), F32))
    x, w = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    launch = torch_steps.launcher(spec, [x, w], outputs_of(spec), allow_tf32=allowed)
    assert stands() == outside
    launch()
    assert seen == [(allowed, allowed)]
    assert stands() == outside


@pytest.mark.parametrize("outside", [True, False])
def test_the_switches_are_put_back_when_a_step_fails(outside: bool, switches: None) -> None:
    torch.backends.cudnn.allow_tf32 = outside
    before = stands()
    with pytest.raises(ZeroDivisionError), tf32.scope(not outside):
        assert torch.backends.cudnn.allow_tf32 is not outside
        raise ZeroDivisionError
    assert stands() == before


def test_a_step_that_multiplies_nothing_touches_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(allowed: bool) -> Any:
        raise AssertionError("the switches were touched")

    monkeypatch.setattr(torch_steps.tf32, "scope", refuse)
    x = torch.ones(4)
    assert run(single("relu", ((4,), F32)), x).tolist() == [1.0] * 4
    half = torch.ones(1, 2, 5, 5).half(), torch.ones(2, 2, 3, 3).half()
    spec = single("conv", ((1, 2, 5, 5), F16), ((2, 2, 3, 3), F16), dtype=F16)
    assert float(run(spec, *half)[0, 0, 0, 0]) == 18.0


@pytest.mark.parametrize("act", [None, "relu", "gelu_tanh"])
def test_a_linear_layer_of_tokens_is_one_call_of_torch(
    act: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(B, S, K) as rows; the reference, which would run it in several, is not asked."""
    g = cg.Graph("g")
    x = g.input("x", (2, 5, 16), F16)
    w, b = g.input("w", (16, 8), F16, stride=(1, 16)), g.input("b", (8,), F16)
    g.output("y", g.activation(g.add(g.matmul(x, w), b), act))
    spec = g.spec()
    assert runs_whole(spec)
    gen = torch.Generator().manual_seed(2)
    given = [
        torch.empty_strided(t.shape, t.stride, dtype=t.dtype).copy_(
            0.5 * torch.randn(t.shape, generator=gen)
        )
        for t in (spec.tensors[name] for name in spec.inputs)
    ]
    (want,) = reference.run(spec, given, torch.float64)
    monkeypatch.setattr(reference, "run_into", None)
    numerics.check(run(spec, *given), want, F16)


def test_rows_of_a_result_that_lie_apart_are_no_call_of_torch() -> None:
    """For which it copies the bias there, and computes the activation behind the product."""
    for stride, whole in (((40, 8, 1), True), ((80, 16, 1), False)):
        g = cg.Graph("g")
        x, b = g.input("x", (2, 5, 16), F16), g.input("b", (8,), F16)
        y = g.gelu(g.matmul(x, g.input("w", (16, 8), F16)) + b, approximate="tanh")
        g.output("y", y, stride=stride)
        assert runs_whole(g.spec()) is whole


def test_tokens_that_lie_apart_are_no_rows() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 5, 16), F16, stride=(16, 32, 1))
    g.output("y", g.matmul(x, g.input("w", (16, 8), F16)) + g.input("b", (8,), F16))
    assert not runs_whole(g.spec())


@pytest.mark.parametrize("batches", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("turned", ["x", "y", "z"])
def test_products_that_share_an_operand_may_lie_in_any_order(
    batches: tuple[int, int], turned: str
) -> None:
    """torch raises on a GPU where x is turned and y shared (tests/gpu/test_execution.py)."""
    shapes = {"x": (batches[0], 64, 8), "y": (batches[1], 8, 32)}
    g, gen = cg.Graph("product"), torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=gen) for name, shape in shapes.items()}
    if turned != "z":
        tensors[turned] = tensors[turned].mT.contiguous().mT
    x, y = (g.input(name, like=each) for name, each in tensors.items())
    strides = {"stride": (2048, 1, 64)} if turned == "z" else {}
    g.output("z", g.matmul(x, y), **strides)
    spec = g.spec()
    out = spec.tensors["z"].empty("cpu")
    torch_steps.launcher(spec, list(tensors.values()), [out], allow_tf32=False)()
    numerics.check(out, tensors["x"].double() @ tensors["y"].double(), torch.float32, terms=8)
