"""Gradient graphs against torch autograd: numbers, dtypes, layouts, and how little they save."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph import grad
from cudnngraph.ir import GraphSpec, dense_strides, memory_order
from cudnngraph.ops import OPS
from tests import numerics
from tests.gradients import by_autograd, differentiable, floating_inputs, ours, upstream
from tests.samples import (
    BF16,
    F16,
    F32,
    F64,
    Case,
    enumerate_cases,
    in_float64,
    make_inputs,
)

CASES = [case for case in enumerate_cases() if differentiable(case)]
Build = Callable[[cg.Graph], Mapping[str, cg.Value]]


def check_float64(
    spec: GraphSpec,
    inputs: Mapping[str, torch.Tensor],
    wrt: tuple[str, ...] | None = None,
    seed: int = 0,
) -> cg.Gradient:
    """Both ways in float64 agree to 1e-9 of the gradient's size (of 1, where that is tiny)."""
    wrt = floating_inputs(spec) if wrt is None else wrt
    gradient = cg.differentiate(spec, wrt)
    grads = upstream(gradient, seed, F64)
    inputs = in_float64(inputs)
    mine = ours(gradient, inputs, grads, F64)
    theirs = by_autograd(spec, inputs, grads, wrt)
    assert set(mine) == set(wrt)
    for name in wrt:
        assert mine[name].shape == inputs[name].shape
        distance = float((mine[name] - theirs[name]).norm())
        size = max(float(theirs[name].norm()), 1e-3)
        assert distance <= 1e-9 * size, f"{name}: off by {distance:.3g} of {size:.3g}\n{spec}"
    return gradient


def declared(build: Build, inputs: Mapping[str, tuple[int, ...]], dtype: torch.dtype = F64):  # type: ignore
    g = cg.Graph("g")
    values = {name: g.input(name, shape, dtype) for name, shape in inputs.items()}
    for name, value in build(g, **values).items():  # type: ignore[call-arg]
        g.output(name, value)
    return g.spec()


def ops(spec: GraphSpec) -> Counter[str]:
    return Counter(node.op for node in spec.nodes if node.op != "constant")


def random_inputs(spec: GraphSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.tensors[name].shape, generator=gen, dtype=F64)
        for name in spec.inputs
    }


# -- the table -------------------------------------------------------------------------------------


def test_every_op_has_a_row() -> None:
    assert set(grad.RULES) == set(OPS)


def test_only_what_jumps_is_flat_and_only_second_derivatives_are_missing() -> None:
    rows = {op: rule for op, rule in grad.RULES.items() if isinstance(rule, grad.NoGradient)}
    flat = {op for op, rule in rows.items() if rule.flat}
    assert flat == {
        *("eq", "ne", "lt", "le", "gt", "ge"),
        *("logical_and", "logical_or", "logical_not", "constant"),
    }
    assert all(op.endswith("_backward") for op in set(rows) - flat)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_a_sample_is_torch_autograds(case: Case) -> None:
    spec = case.build().spec()
    inputs = make_inputs(case)
    if "dirty" in case.id:  # torch's own gradient is NaN there; see the test of padding below
        inputs = {name: value.nan_to_num(0.0) for name, value in inputs.items()}
    check_float64(spec, inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_a_sample_has_the_form_of_what_it_is_for(case: Case) -> None:
    spec = case.build().spec()
    gradient = cg.differentiate(spec, floating_inputs(spec))
    for name, result in gradient.outgoing.items():
        tensor, made = spec.tensors[name], gradient.backward.tensors[result]
        assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
        expanded = any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride, strict=True))
        order = range(len(made.shape)) if expanded else memory_order(tensor.shape, tensor.stride)
        assert made.stride == dense_strides(tensor.shape, list(order))
    for output, name in gradient.incoming.items():
        tensor, taken = spec.tensors[output], gradient.backward.tensors[name]
        assert (taken.shape, taken.dtype) == (tensor.shape, tensor.dtype)
    for name in gradient.saved:
        assert gradient.forward.tensors[name] == gradient.backward.tensors[name]
        assert name in (*gradient.forward.inputs, *gradient.forward.outputs)
    assert gradient.forward.outputs[: len(spec.outputs)] == spec.outputs
    assert gradient.backward.inputs == (*gradient.incoming.values(), *gradient.saved)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.dtype in (F16, BF16, F32) and "dirty" not in case.id][::5],
    ids=str,
)
def test_the_gradient_at_the_samples_dtype_is_within_the_policy(case: Case) -> None:
    spec = case.build().spec()
    wrt = floating_inputs(spec)
    gradient, inputs = cg.differentiate(spec, wrt), make_inputs(case)
    grads = upstream(gradient)
    mine = ours(gradient, inputs, grads)
    exact = by_torch(case, in_float64(inputs), grads, wrt)
    eager = by_torch(case, inputs, grads, wrt)
    terms = max(case.terms, *(math.prod(spec.tensors[name].shape) for name in spec.outputs))
    for name in wrt:
        assert mine[name].dtype == spec.tensors[name].dtype
        if float(exact[name].norm()) < 1e-6:  # a softmax over one key has no gradient
            assert float(mine[name].double().norm()) < 1e-3
            continue
        numerics.check(
            mine[name], exact[name], case.dtype, eager[name], terms=terms, what=f"grad of {name}"
        )


def by_torch(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    grads: Mapping[str, torch.Tensor],
    wrt: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """Autograd through what a user of torch would write, in the dtype of the inputs."""
    leaves = {
        name: value.detach().clone().requires_grad_(name in wrt) for name, value in inputs.items()
    }
    outputs = case.eager(leaves)
    found = torch.autograd.grad(
        [outputs[name] for name in grads],
        [leaves[name] for name in wrt],
        [grad.to(outputs[name].dtype) for name, grad in grads.items()],
        allow_unused=True,
    )
    return {
        name: torch.zeros_like(leaves[name]) if grad is None else grad
        for name, grad in zip(wrt, found, strict=True)
    }


# -- random graphs ---------------------------------------------------------------------------------

SMOOTH = ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "softplus", "elu", "erf", "neg")
KINKED = ("relu", "leaky_relu", "abs", "clamp", "identity")


class Grower:
    """Draws a random graph over one image, (2, 4, 5, 6) to begin with."""

    def __init__(self, draw: Callable[..., int]) -> None:
        self.draw = draw
        self.g = cg.Graph("random")
        self.pool = [self.g.input("x0", (2, 4, 5, 6), F64, layout=self.one("channels_last", None))]
        self.made = 0

    def one(self, *choices):  # type: ignore[no-untyped-def]
        return self.draw(st.sampled_from(choices))

    def new(self, *shape: int) -> cg.Value:
        self.made += 1
        return self.g.input(f"p{self.made}", shape, F64)

    def image(self) -> cg.Value:
        return self.one(*[value for value in self.pool if len(value.shape) == 4])

    def step(self) -> None:
        kind = self.one(
            *("conv", "conv", "conv_transpose", "bias", "scale", "smooth", "smooth", "kinked"),
            *("residual", "broadcast", "arithmetic", "batch_norm", "batch_norm_train", "sdpa"),
            *("reduction", "select", "extremum", "power", "expand"),
        )
        self.pool.append(getattr(self, kind)(self.image()))

    def conv(self, x: cg.Value) -> cg.Value:
        c = x.shape[1]
        groups = self.one(*(n for n in (1, 2, c) if c % n == 0))
        k = groups * self.one(1, 2)
        kernel, stride, dilation = self.one(1, 2, 3), self.one(1, 2), self.one(1, 2)
        reach = dilation * (kernel - 1)
        pads = tuple((self.one(0, 1) + reach // 2, reach - reach // 2) for _ in range(2))
        w = self.new(k, c // groups, kernel, kernel)
        return self.g.conv(x, w, stride=stride, padding=pads, dilation=dilation, groups=groups)

    def conv_transpose(self, x: cg.Value) -> cg.Value:
        c = x.shape[1]
        groups = self.one(*(n for n in (1, 2) if c % n == 0))
        kernel, stride, dilation = self.one(1, 2, 3), self.one(1, 2), self.one(1, 2)
        extra = self.one(*range(max(stride, dilation)))
        # What reaches the stride has to be padded away again.
        pads = tuple((self.one(0, 1), extra // stride * stride) for _ in range(2))
        reach = dilation * (kernel - 1) + 1
        many = zip(x.shape[2:], pads, strict=True)
        if any((n - 1) * stride - sum(pad) + reach + extra < 1 for n, pad in many):
            return self.g.neg(x)
        w = self.new(c, self.one(1, 2), kernel, kernel)
        return self.g.conv_transpose(
            x,
            w,
            stride=stride,
            padding=pads,
            output_padding=extra,
            groups=groups,
            dilation=dilation,
        )

    def vector(self, x: cg.Value) -> cg.Value:
        c = x.shape[1]
        return self.new(c) if self.one(True, False) else self.new(1, c, 1, 1)

    def bias(self, x: cg.Value) -> cg.Value:
        return self.g.bias(x, self.vector(x))

    def scale(self, x: cg.Value) -> cg.Value:
        return self.g.scale(x, self.vector(x))

    def smooth(self, x: cg.Value) -> cg.Value:
        kind = self.one(*SMOOTH)
        return self.g.softplus(x, beta=1.5) if kind == "softplus" else getattr(self.g, kind)(x)

    def kinked(self, x: cg.Value) -> cg.Value:
        kind = self.one(*KINKED)
        if kind == "clamp":
            return self.g.clamp(x, *self.one((-0.4, 0.7), (None, 0.5), (-0.25, None)))
        if kind == "leaky_relu":
            return self.g.leaky_relu(x, self.one(0.1, -0.3))
        return getattr(self.g, kind)(x)

    def residual(self, x: cg.Value) -> cg.Value:
        like = [value for value in self.pool if value.shape == x.shape]
        return self.one(self.g.add, self.g.sub, self.g.mul)(x, self.one(*like))

    def broadcast(self, x: cg.Value) -> cg.Value:
        n, c, h, w = x.shape
        shape = self.one((w,), (h, 1), (c, 1, 1), (n, 1, 1, w), (), (1, c, h, 1))
        other = self.new(*shape)
        return self.one(self.g.add, self.g.mul)(*self.one((x, other), (other, x)))

    def arithmetic(self, x: cg.Value) -> cg.Value:
        return self.one(
            lambda: x / (self.g.exp(x * 0.1) + 1.0),
            lambda: 2.0 - x * 0.5,
            lambda: (x * x + 0.5).log(),
            lambda: (x * x + 0.5).sqrt(),
            lambda: (x * x + 0.5).rsqrt(),
            lambda: (x * x + 1.0).reciprocal(),
        )()

    def power(self, x: cg.Value) -> cg.Value:
        positive = x * x + 0.3
        return self.one(
            lambda: x**2.0,
            lambda: positive**0.7,
            lambda: self.g.pow(positive, self.g.tanh(x)),
            lambda: self.g.pow(1.5, self.g.tanh(x)),
        )()

    def batch_norm(self, x: cg.Value) -> cg.Value:
        mean, var = self.vector(x), self.vector(x)
        affine = [self.vector(x) for _ in range(self.one(0, 1, 2))]
        return self.g.batch_norm(x, mean, var * var + 0.5, *affine, eps=1e-3)

    def batch_norm_train(self, x: cg.Value) -> cg.Value:
        if x.shape[0] * x.shape[2] * x.shape[3] < 2:
            return self.g.neg(x)
        return self.g.batch_norm_train(x, self.vector(x), self.vector(x), eps=0.1)[0]

    def sdpa(self, x: cg.Value) -> cg.Value:
        b, h, s, d = x.shape
        h_kv = self.one(*(n for n in (1, 2, h) if h % n == 0))
        keys, d_v = self.one(3, s, 7), self.one(d, 3)
        k, v = self.new(b, h_kv, keys, d), self.new(b, h_kv, keys, d_v)
        mask = self.one(None, (b, h, s, keys), (1, 1, 1, keys), (s, keys), (b, 1, s, 1))
        return self.g.sdpa(
            x,
            k,
            v,
            None if mask is None else self.new(*mask),
            is_causal=self.one(True, False),
            window=self.one(None, (2, 1), (None, 2)),
            diagonal_alignment=self.one("top_left", "bottom_right"),
        )

    def reduction(self, x: cg.Value) -> cg.Value:
        dims = self.one((1,), (2, 3), (0, 2, 3), (0, 1), None)
        small = self.g.reduction(x, dims, self.one("sum", "mean", "max", "min"), keepdim=True)
        return x - small

    def expand(self, x: cg.Value) -> cg.Value:
        vector = self.g.reduction(x, (0, 2, 3), self.one("mean", "max"))
        return x * self.g.expand(vector, x.shape, (1,))

    def select(self, x: cg.Value) -> cg.Value:
        other = self.residual(x)
        return self.g.where(self.one(self.g.gt, self.g.le)(x, other), x * 0.5, other)

    def extremum(self, x: cg.Value) -> cg.Value:
        return self.one(self.g.minimum, self.g.maximum)(x, self.one(0.2, x * 0.5, self.residual(x)))

    def finish(self) -> GraphSpec:
        used = {name for node in self.g._nodes for name in node.operands}
        loose = [value for value in self.pool[1:] if value.name not in used]
        for place, value in enumerate(loose):
            self.g.output(f"y{place}", value)
        return self.g.spec()


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(st.data(), st.integers(1, 10), st.integers(0, 3))
def test_the_gradient_of_a_random_graph_is_torch_autograds(
    data: st.DataObject, steps: int, seed: int
) -> None:
    grower = Grower(data.draw)
    for _ in range(steps):
        grower.step()
    spec = grower.finish()
    inputs = random_inputs(spec, seed)
    gradient = check_float64(spec, inputs)
    # A part of wrt gives the same numbers from no more work.
    some = data.draw(st.sampled_from(floating_inputs(spec)))
    part = check_float64(spec, inputs, (some,), seed)
    assert len(part.backward.nodes) <= len(gradient.backward.nodes)
    extra = len(spec.outputs)
    assert len(part.forward.outputs[extra:]) <= len(gradient.forward.outputs[extra:])
