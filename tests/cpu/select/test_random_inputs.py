"""Random inputs of a trial: as declared, with finite results; masks and lengths hide little."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec, TensorSpec
from cudnngraph.select import inputs as inputs_module
from cudnngraph.select.inputs import random_inputs, strided
from tests.chunks import each_case
from tests.samples import Case, enumerate_cases
from tests.trials import CPU, F16, F32, attention

CASES = [case for case in enumerate_cases() if case.on_gpu]


@each_case(CASES)
def test_random_inputs_of_a_sample_are_as_declared_and_give_numbers(case: Case) -> None:
    """No case is so far out that the reference gives NaN, which any plan would be right about."""
    spec = case.build().spec()
    inputs = random_inputs(spec, CPU)
    for name, tensor in zip(spec.inputs, inputs, strict=True):
        declared = spec.tensors[name]
        assert (tensor.shape, tensor.stride()) == (declared.shape, declared.stride)
        assert tensor.dtype == declared.dtype
    for result in reference.run(spec, inputs, torch.float64):
        assert not bool(result.isnan().any())
        # An lse of -inf is right where no key is in reach.
        assert not result.numel() or bool(result.isfinite().any())


def graph(build: Callable[[cg.Graph], Any]) -> GraphSpec:
    g = cg.Graph("g")
    g.output("y", build(g))
    return g.spec()


X, Y, Z = (("tensor", place) for place in range(3))
INDEXED = {
    "embedding.default": (X, Y),
    "index_select.default": (X, 1, Y),
    "gather.default": (X, 1, Y),
    "index.Tensor": (X, ("list", None, Y)),
}


@pytest.mark.parametrize("op", INDEXED)
@pytest.mark.parametrize("stride", [(1,), (0,)])
def test_indices_are_of_elements_that_there_are(op: str, stride: tuple[int, ...]) -> None:
    """All of them, and of two tensors those that both have."""
    shapes = [(5, 3), (2, 3)] if op == "embedding.default" else [(3, 5), (3, 2)]

    def build(g: cg.Graph) -> Any:
        xs = [g.input(f"x{n}", shape, F32) for n, shape in enumerate(shapes)]
        lead = (1,) * (op == "gather.default")
        at = g.input("at", (*lead, 400), torch.int64, stride=(*lead, *stride))
        return g.add(*(g.aten([x, at], f"aten.{op}", INDEXED[op]) for x in xs))

    spec = graph(build)
    found = set(random_inputs(spec, CPU)[spec.inputs.index("at")].flatten().tolist())
    assert found <= {0, 1} and (stride == (0,) or found == {0, 1})


def test_floats_are_on_both_sides_of_zero() -> None:
    (x,) = random_inputs(graph(lambda g: g.input("x", (4096,), F32).relu()), CPU)
    assert -1.0 <= float(x.min()) < -0.99 and 0.99 < float(x.max()) <= 1.0
    assert abs(float(x.mean())) < 0.05


@pytest.mark.parametrize("op", ["log", "sqrt", "rsqrt", "reciprocal"])
def test_floats_are_positive_where_an_op_wants_that(op: str) -> None:
    (x,) = random_inputs(graph(lambda g: getattr(g, op)(g.input("x", (4096,), F32))), CPU)
    assert 0.5 <= float(x.min()) < 0.51 and 1.49 < float(x.max()) <= 1.5


INPUT = {"x": (16, 16), "v": (16,), "w": (16, 16)}
POSITIVE: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "a divisor": (lambda g, x, v, w: x / v + w, {"v"}),
    "a divisor and more": (lambda g, x, v, w: x @ w / (v + 1e-5), {"v"}),
    "a norm by hand": (
        lambda g, x, v, w: x * g.rsqrt(g.reduction(x * x, 1, "mean", True) + 1e-5) * v + w,
        set(),
    ),
    "a gate": (lambda g, x, v, w: x / (g.exp(w) + 1.0) + v, set()),
    "a square": (lambda g, x, v, w: g.pow(x @ w, 2.0) + v, set()),
    "a root of an input": (lambda g, x, v, w: g.sqrt(g.relu(x) * v) @ w, {"x", "v"}),
    "a product": (lambda g, x, v, w: g.log(x @ w) + v, {"x", "v", "w"}),
    "a difference": (lambda g, x, v, w: g.sqrt(x - v) + w, {"x", "v", "w"}),
}


@pytest.mark.parametrize("name", POSITIVE)
def test_no_more_is_positive_than_has_to_be(name: str) -> None:
    build, positive = POSITIVE[name]
    g = cg.Graph("g")
    given = [g.input(each, shape, F32) for each, shape in INPUT.items()]
    g.output("y", build(g, *given))
    spec = g.spec()
    drawn = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))
    assert {each for each, values in drawn.items() if float(values.min()) > 0.0} == positive
    (y,) = reference.run(spec, list(drawn.values()), torch.float64)
    assert bool(y.isfinite().any())


def test_a_tensor_that_is_read_again_and_again_is_looked_at_once() -> None:
    """Each residual doubles the ways from the root to the inputs: 2^60 of them."""

    def build(g: cg.Graph) -> Any:
        y = g.input("x", (8,), F32)
        for _ in range(60):
            y = y + g.relu(y) * 0.5
        return g.sqrt(y)

    (x,) = random_inputs(graph(build), CPU)
    assert float(x.min()) >= 0.5


def test_bools_are_drawn_but_a_mask_hides_nothing() -> None:
    spec = graph(
        lambda g: g.where(g.input("c", (4096,), torch.bool), g.input("x", (4096,), F32), 0.0)
    )
    drawn = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))["c"]
    assert 0.4 < float(drawn.float().mean()) < 0.6
    spec = attention(mask=(8, 8), mask_dtype=torch.bool)
    mask = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))["mask"]
    assert bool(mask.all())


@pytest.mark.parametrize(("rows", "length"), [(8, 6), (5, 4), (4, 3), (2, 2), (1, 1)])
def test_a_quarter_of_a_sequence_is_padding(rows: int, length: int) -> None:
    g = cg.Graph("attention")
    q = g.input("q", (3, 4, rows, 16), F16)
    k, v = (g.input(name, (3, 2, 8, 16), F16) for name in "kv")
    lengths = {name: g.input(name, (3,), torch.int32) for name in ("seq_len_q", "seq_len_kv")}
    g.output("o", g.sdpa(q, k, v, **lengths))
    spec = g.spec()
    given = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))
    assert given["seq_len_q"].tolist() == [length] * 3
    assert given["seq_len_kv"].tolist() == [6] * 3


SHARED = {
    "plain": {},
    "mask": {"attn_mask": ((8, 8), F16)},
    "bool": {"attn_mask": ((3, 1, 8, 8), torch.bool)},
    "causal": {"is_causal": True},
    "lengths": {"seq_len_q": ((3,), torch.int32), "seq_len_kv": ((3,), torch.int32)},
}


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
def test_the_gradient_of_attention_is_given_the_results_of_its_operands(
    options: dict[str, Any],
) -> None:
    def build(backward: bool) -> GraphSpec:
        g = cg.Graph("g")
        q = g.input("q", (3, 4, 8, 16), F16)
        k, v = (g.input(name, (3, 2, 8, 16), F16) for name in "kv")
        given = {
            name: g.input(name, *value) if isinstance(value, tuple) else value
            for name, value in options.items()
        }
        if backward:
            do, o = (g.input(name, (3, 4, 8, 16), F16) for name in ("do", "o"))
            made = g.sdpa_backward(do, q, k, v, o, g.input("lse", (3, 4, 8), F32), **given)
            names: tuple[str, ...] = ("dq", "dk", "dv")
        else:
            made = g.sdpa(q, k, v, return_lse=True, **given)
            names = ("o", "lse")
        for name, value in zip(names, made, strict=True):
            g.output(name, value)
        return g.spec()

    spec, forward = build(True), build(False)
    given = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))
    o, lse = reference.run(forward, [given[name] for name in forward.inputs], torch.float64)
    assert torch.equal(given["o"], o.half())
    # A row without a key has a large number in place of -inf.
    assert torch.equal(given["lse"], torch.where(lse == -math.inf, 1e30, lse).float())
    assert bool((given["lse"] == 1e30).any()) is ("seq_len_q" in options)
    for result in reference.run(spec, list(given.values()), torch.float64):
        assert bool(result.isfinite().all()) and float(result.norm()) > 0.1


def test_for_large_attention_the_lse_is_about_that_of_even_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own would take the reference too long."""
    monkeypatch.setattr(inputs_module, "LARGE_SCORES", 0)
    g = cg.Graph("g")
    q, k, v, do, o = (g.input(name, (1, 2, 8, 16), F16) for name in ("q", "k", "v", "do", "o"))
    made = g.sdpa_backward(do, q, k, v, o, g.input("lse", (1, 2, 8), F32))
    for name, grad in zip(("dq", "dk", "dv"), made, strict=True):
        g.output(name, grad)
    spec = g.spec()
    inputs = random_inputs(spec, CPU)
    given = dict(zip(spec.inputs, inputs, strict=True))
    assert torch.equal(given["lse"], torch.full((1, 2, 8), math.log(8) + 1.0))
    for result in reference.run(spec, inputs, torch.float64):
        assert bool(result.isfinite().all()) and float(result.norm()) > 0.1


def test_results_of_attention_that_are_no_inputs_are_left_alone() -> None:
    g = cg.Graph("g")
    q, k, v, do = (g.input(name, (1, 2, 8, 16), F16) for name in ("q", "k", "v", "do"))
    o, lse = g.sdpa(q, k, v, return_lse=True)
    for name, grad in zip(("dq", "dk", "dv"), g.sdpa_backward(do, q, k, v, o, lse), strict=True):
        g.output(name, grad)
    assert [tensor.shape for tensor in random_inputs(g.spec(), CPU)] == [q.shape] * 4
    g = cg.Graph("g")
    q, k, v, do, o = (g.input(name, (1, 2, 8, 16), F16) for name in ("q", "k", "v", "do", "o"))
    made = g.sdpa_backward(do, g.relu(q), k, v, o, g.input("lse", (1, 2, 8), F32))
    for name, grad in zip(("dq", "dk", "dv"), made, strict=True):
        g.output(name, grad)
    spec = g.spec()
    given = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))
    assert float(given["lse"].abs().max()) <= 1.0, "random: its q is computed"


def test_the_seed_makes_the_data() -> None:
    spec = graph(lambda g: g.input("x", (64,), F32).relu())
    a, b, c = (random_inputs(spec, CPU, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_what_is_repeated_is_stored_once() -> None:
    declared = TensorSpec("x", (3, 4, 5), (5, 0, 1), F16)
    values = torch.arange(60).view(3, 4, 5).float()
    made = strided(declared, values, CPU)
    assert made.stride() == (5, 0, 1)
    assert torch.equal(made, values[:, :1].half().expand(3, 4, 5))


@pytest.mark.parametrize("shape", [(64, 5), (2, 5, 6, 7)])
def test_targets_are_of_all_classes(shape: tuple[int, ...]) -> None:
    g = cg.Graph("loss")
    x = g.input("x", shape, torch.float32)
    target = g.input("t", (shape[0], *shape[2:]), torch.int64)
    g.output("y", g.nll_loss(g.log_softmax(x, 1), target))
    spec = g.spec()
    backward = cg.differentiate(spec, ["x"]).backward
    for each in (spec, backward):
        given = dict(zip(each.inputs, random_inputs(each, torch.device("cpu")), strict=True))
        (classes,) = (v for v in given.values() if v.dtype == torch.int64)
        assert set(classes.flatten().tolist()) == set(range(5))
