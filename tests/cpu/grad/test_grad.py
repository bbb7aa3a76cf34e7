"""Gradient graphs against torch autograd: numbers, dtypes, layouts, and how little they save."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.grad.context import NoGradient
from cudnngraph.grad.rules.table import RULES, joined
from cudnngraph.ir.spec import (
    GraphSpec,
    canonical_order,
    dense_strides,
    is_channels_last,
    memory_order,
)
from cudnngraph.ops.table import OPS
from tests import numerics
from tests.chunks import each_case
from tests.gradients import (
    by_autograd,
    check_at_dtype,
    differentiable,
    floating_inputs,
    ours,
    upstream,
)
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
    assert set(RULES) == set(OPS)


def test_a_second_rule_and_a_rule_of_no_op_are_errors() -> None:
    rule = RULES["add"]
    assert dict(joined({"add": rule}, {"mul": rule})) == {"add": rule, "mul": rule}
    with pytest.raises(ValueError, match=r"a second rule, or no op: add$"):
        joined({"add": rule}, {"add": rule})
    with pytest.raises(ValueError, match=r"a second rule, or no op: added$"):
        joined({"added": rule})


def test_only_what_jumps_is_flat_and_only_second_derivatives_are_missing() -> None:
    rows = {op: rule for op, rule in RULES.items() if isinstance(rule, NoGradient)}
    flat = {op for op, rule in rows.items() if rule.flat}
    assert flat == {
        *("eq", "ne", "lt", "le", "gt", "ge"),
        *("logical_and", "logical_or", "logical_not", "constant", "to_float"),
        "ragged_offsets",
    }
    others = {"aten", "group_affine", "sdpa_paged", "quantize", "dequantize", "sdpa_fp8"}
    assert all(op.endswith("_backward") for op in set(rows) - flat - others)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_a_sample_is_torch_autograds(case: Case) -> None:
    spec = case.build().spec()
    inputs = make_inputs(case)
    if "dirty" in case.id:  # torch's own gradient is NaN there; see the test of padding below
        inputs = {name: value.nan_to_num(0.0) for name, value in inputs.items()}
    check_float64(spec, inputs)


@each_case(CASES)
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
    # torch has no gradient for the statistics of a norm.
    wrt = tuple(name for name in floating_inputs(spec) if name not in ("mean", "var"))
    gradient, inputs = cg.differentiate(spec, wrt), make_inputs(case)
    grads, forward = upstream(gradient), gradient.forward
    saved = reference.run(forward, [inputs[name] for name in forward.inputs])
    results = ours(gradient, inputs, grads)
    check_at_dtype(
        case, gradient, inputs, dict(zip(forward.outputs, saved, strict=True)), grads, results
    )


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
            *("reduction", "select", "extremum", "power", "expand", "matmul", "norm", "views"),
            *("concat", "slice"),
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

    def matmul(self, x: cg.Value) -> cg.Value:
        b, h, s, d = x.shape
        shape = self.one((d, 3), (h, d, 3), (1, h, d, 2), (b, 1, d, d))
        if self.one(True, False):
            return x @ self.new(*shape)
        left = self.one((3, s), (b, 1, 2, s))
        return self.new(*left) @ x

    def norm(self, x: cg.Value) -> cg.Value:
        shape = x.shape[self.one(1, 2, 3) :]
        with_bias = [self.new(*shape) for _ in range(self.one(0, 1))]
        return self.one(self.g.layer_norm, self.g.rms_norm)(
            x, self.new(*shape), *with_bias, eps=0.1
        )

    def views(self, x: cg.Value) -> cg.Value:
        b, h, s, d = x.shape
        return self.one(
            lambda: self.g.transpose(x, *self.one((1, 2), (2, 3), (0, 3))),
            lambda: self.g.permute(x, self.one((0, 2, 3, 1), (3, 1, 0, 2))),
            lambda: self.g.reshape(x, self.one((b, h * s, d, 1), (1, b, h, s * d))),
        )()

    def slice(self, x: cg.Value) -> cg.Value:
        dim = self.one(*range(4))
        n = x.shape[dim]
        start = self.one(*range(min(n, 3)))
        return self.g.slice(x, dim, start, self.one(None, n), self.one(1, 2, 3))

    def concat(self, x: cg.Value) -> cg.Value:
        like = [value for value in self.pool if value.shape == x.shape]
        return self.g.concat([x, self.one(*like), x], self.one(0, 1, 3))

    def select(self, x: cg.Value) -> cg.Value:
        other = self.residual(x)
        return self.g.where(self.one(self.g.gt, self.g.le)(x, other), x * 0.5, other)

    def extremum(self, x: cg.Value) -> cg.Value:
        return self.one(self.g.minimum, self.g.maximum)(x, self.one(0.2, x * 0.5, self.residual(x)))

    def finish(self) -> GraphSpec:
        """What nothing else in the pool is made of are the outputs. (Not each operand has a use: a
        choice between what is drawn may drop it.)"""
        reached: set[str] = set()
        for value in reversed(self.pool[1:]):
            if value.name not in reached:
                self.g.output(f"y{len(self.g._outputs)}", value)
                nodes = canonical_order(self.g._nodes, [value.name])
                reached.update(name for node in nodes for name in node.results)
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


# -- how little is done and saved ------------------------------------------------------------------


def block(act: str | None = "relu", dtype: torch.dtype = F16, residual: bool = False) -> GraphSpec:
    g = cg.Graph("block")
    x = g.input("x", (2, 8, 6, 6), dtype, layout="channels_last")
    w = g.input("w", (16, 8, 3, 3), dtype, layout="channels_last")
    b = g.input("b", (16,), dtype)
    z = g.input("z", (2, 16, 6, 6), dtype, layout="channels_last") if residual else None
    g.output("y", g.conv_bias_act(x, w, b, activation=act, residual=z, padding=1))
    return g.spec()


def extra(gradient: cg.Gradient, spec: GraphSpec) -> tuple[str, ...]:
    return gradient.forward.outputs[len(spec.outputs) :]


@pytest.mark.parametrize("act", ["relu", "leaky_relu", "elu", "sigmoid", "tanh", None])
def test_what_its_output_tells_is_not_saved(act: str | None) -> None:
    spec = block(act)
    gradient = cg.differentiate(spec, ["x", "w", "b"])
    assert extra(gradient, spec) == ()
    assert gradient.saved == (("x", "w") if act is None else ("x", "w", "y"))
    assert gradient.forward == spec


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "softplus", "mish", "hardswish"])
@pytest.mark.parametrize("residual", [False, True])
def test_before_an_activation_the_convolution_is_saved_in_16_bits(act: str, residual: bool) -> None:
    spec = block(act, residual=residual)
    gradient = cg.differentiate(spec, ["x", "w", "b"])
    (saved,) = extra(gradient, spec)
    assert {node.results[0]: node.op for node in spec.nodes}[saved] == "conv"
    tensor = gradient.forward.tensors[saved]
    assert tensor.dtype == F16
    assert is_channels_last(tensor.shape, tensor.stride)
    assert ops(gradient.backward)["bias"] == 1  # and the rest is computed again


def test_exp_and_its_like_are_differentiated_from_their_results() -> None:
    for name in ("exp", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "relu"):
        spec = declared(lambda g, x, name=name: {"y": getattr(g, name)(x)}, {"x": (3, 4)})
        assert cg.differentiate(spec, ["x"]).saved == ("y",), name


def test_a_sum_of_two_convolutions_is_saved_once() -> None:
    g = cg.Graph("two")
    x = g.input("x", (2, 8, 6, 6), F16)
    w, v = g.input("w", (8, 8, 1, 1), F16), g.input("v", (8, 8, 1, 1), F16)
    g.output("y", g.silu(g.conv(x, w) + g.conv(x, v)))
    spec = g.spec()
    (saved,) = extra(cg.differentiate(spec, ["x", "w", "v"]), spec)
    assert {node.results[0]: node.op for node in spec.nodes}[saved] == "add"


def test_what_the_next_convolution_reads_is_saved_as_it_reads_it() -> None:
    g = cg.Graph("chain")
    x = g.input("x", (2, 8, 6, 6), F16)
    w, v = g.input("w", (8, 8, 1, 1), F16), g.input("v", (8, 8, 1, 1), F16)
    g.output("y", g.conv(g.relu(g.conv(x, w)), v))
    spec = g.spec()
    gradient = cg.differentiate(spec, ["x", "w", "v"])
    (saved,) = extra(gradient, spec)
    assert {node.results[0]: node.op for node in spec.nodes}[saved] == "relu"
    assert gradient.forward.tensors[saved].dtype == F16
    assert "relu" not in ops(gradient.backward)


def test_a_smooth_activation_between_convolutions_saves_one_tensor() -> None:
    g = cg.Graph("chain")
    x = g.input("x", (2, 8, 6, 6), F16)
    w, v = g.input("w", (8, 8, 1, 1), F16), g.input("v", (8, 8, 1, 1), F16)
    g.output("y", g.conv(g.silu(g.conv(x, w)), v))
    spec = g.spec()
    gradient = cg.differentiate(spec, ["x", "w", "v"])
    (saved,) = extra(gradient, spec)
    assert {node.results[0]: node.op for node in spec.nodes}[saved] == "conv"
    assert ops(gradient.backward)["silu"] == 1


def test_training_norm_saves_its_input_and_two_vectors() -> None:
    g = cg.Graph("block")
    x = g.input("x", (2, 8, 6, 6), F16, layout="channels_last")
    w = g.input("w", (16, 8, 3, 3), F16, layout="channels_last")
    gamma, beta = g.input("gamma", (16,), F32), g.input("beta", (16,), F32)
    y, *_ = g.batch_norm_train(g.conv(x, w), gamma, beta)
    g.output("y", g.relu(y))
    spec = g.spec()
    gradient = cg.differentiate(spec, ["x", "w", "gamma", "beta"])
    saved = [gradient.forward.tensors[name] for name in extra(gradient, spec)]
    assert [(t.shape, t.dtype) for t in saved] == [
        ((2, 16, 4, 4), F16),
        ((16,), F32),
        ((16,), F32),
    ]
    assert ops(gradient.backward) == Counter(
        [
            *("batch_norm_apply", "relu_backward", "batch_norm_backward"),
            *("conv_transpose", "conv_wgrad"),
        ]
    )
    assert "y" not in gradient.saved, "the sign of y comes from the norm's own operands"
    check_float64(spec, random_inputs(spec))


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (("x",), ("relu_backward", "conv_transpose")),
        (("w",), ("relu_backward", "conv_wgrad")),
        (("b",), ("relu_backward", "reduction")),
        (("z",), ("relu_backward",)),
        (("x", "w"), ("relu_backward", "conv_transpose", "conv_wgrad")),
        (
            ("x", "w", "b", "z"),
            ("relu_backward", "conv_transpose", "conv_wgrad", "reduction"),
        ),
    ],
)
def test_what_wrt_does_not_reach_emits_nothing(
    wrt: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    gradient = cg.differentiate(block(residual=True), wrt)
    made = ops(gradient.backward)
    made.pop("identity", None)  # a residual's gradient in float32 is also read in 16 bits
    assert made == Counter(expected)
    assert gradient.backward.outputs == tuple(f"grad_{name}" for name in wrt)


def test_gradients_of_a_shared_tensor_are_summed() -> None:
    spec = declared(
        lambda g, x, y: {"a": g.tanh(x) * y, "b": x * x, "c": g.relu(x) + y},
        {"x": (3, 4), "y": (3, 4)},
    )
    gradient = check_float64(spec, random_inputs(spec))
    assert gradient.incoming == {"a": "grad_a", "b": "grad_b", "c": "grad_c"}
    assert ops(gradient.backward)["add"] == 4  # four parts of x, two of y


def test_an_output_that_is_used_further_takes_both_gradients() -> None:
    spec = declared(lambda g, x: {"h": (h := g.exp(x)), "y": h * 3.0}, {"x": (5,)})
    inputs = random_inputs(spec)
    gradient = check_float64(spec, inputs)
    ones = {"h": torch.ones(5, dtype=F64), "y": torch.ones(5, dtype=F64)}
    found = ours(gradient, inputs, ones, F64)["x"]
    torch.testing.assert_close(found, 4.0 * inputs["x"].exp(), rtol=1e-12, atol=0.0)


def test_a_gradient_that_is_the_incoming_one_is_an_output_of_its_own() -> None:
    spec = declared(lambda g, x, y: {"z": x + y}, {"x": (3,), "y": (3,)})
    gradient = check_float64(spec, random_inputs(spec))
    assert ops(gradient.backward) == Counter({"identity": 2})


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_anchors_read_the_datas_dtype_and_the_rest_is_kept_wide(dtype: torch.dtype) -> None:
    g = cg.Graph("two_layers")
    x = g.input("x", (2, 8, 6, 6), dtype, layout="channels_last")
    w, v = (g.input(name, (8, 8, 3, 3), dtype, layout="channels_last") for name in "wv")
    b = g.input("b", (8,), F32 if dtype in (F16, BF16) else dtype)
    h = g.gelu(g.bias(g.conv(x, w, padding=1), b))
    g.output("y", g.tanh(g.conv(h, v, padding=1)), dtype=F32 if dtype != F64 else F64)
    backward = cg.differentiate(g, ["x", "w", "v", "b"]).backward
    wide = F64 if dtype == F64 else F32
    read = {name for node in backward.nodes if "conv" in node.op for name in node.operands}
    assert {backward.tensors[name].dtype for name in read} == {dtype}
    others = [
        tensor.dtype
        for name, tensor in backward.tensors.items()
        if name not in read and name in backward.intermediates and tensor.shape != ()
    ]
    assert set(others) == {wide}


def test_a_wide_gradient_is_not_rounded_for_an_anchor_that_reads_it_narrow() -> None:
    g = cg.Graph("residual")
    x = g.input("x", (2, 8, 6, 6), F16)
    w, z = g.input("w", (8, 8, 1, 1), F16), g.input("z", (2, 8, 6, 6), F32)
    g.output("y", g.tanh(g.conv(x, w) + z))
    gradient = cg.differentiate(g, ["x", "z"])
    assert ops(gradient.backward)["identity"] == 1
    spec = g.spec()
    inputs = {k: v.to(spec.tensors[k].dtype) for k, v in random_inputs(spec).items()}
    grads = upstream(gradient)
    mine = ours(gradient, inputs, grads)["z"]
    exact = by_autograd(spec, inputs, grads, ("z",))["z"]
    assert numerics.relative_error(mine, exact) < 5e-6  # in 16 bits it would be 2e-4


# -- attention -------------------------------------------------------------------------------------


def test_padding_that_holds_nan_does_not_reach_the_gradients() -> None:
    case = next(case for case in CASES if case.id == "sdpa-lengths_dirty-fp16")
    spec, inputs = case.build().spec(), in_float64(make_inputs(case))
    assert any(bool(value.isnan().any()) for value in inputs.values())
    gradient = cg.differentiate(spec, ("q", "k", "v"))
    grads = upstream(gradient, dtype=F64)
    clean = {name: value.nan_to_num(0.0) for name, value in inputs.items()}
    exact = by_autograd(spec, clean, grads, ("q", "k", "v"))
    for name, value in ours(gradient, inputs, grads, F64).items():
        assert numerics.relative_error(value, exact[name]) < 1e-12


@pytest.mark.parametrize("how", ["mask", "bool", "bottom_right", "lengths"])
def test_rows_without_a_key_have_zero_gradients(how: str) -> None:
    g = cg.Graph("dead")
    q, k, v = (g.input(name, (2, 2, rows, 4), F64) for name, rows in (("q", 6), ("k", 3), ("v", 3)))
    options: dict[str, object] = {}
    inputs = {name: torch.randn(2, 2, n, 4, dtype=F64) for name, n in zip("qkv", (6, 3, 3))}  # noqa: B905
    if how in ("mask", "bool"):
        options["attn_mask"] = g.input("mask", (6, 3), F64 if how == "mask" else torch.bool)
        keep = torch.ones(6, 3, dtype=torch.bool)
        keep[:2] = False
        inputs["mask"] = torch.where(keep, 0.0, -math.inf).double() if how == "mask" else keep
    elif how == "bottom_right":
        options |= {"is_causal": True, "diagonal_alignment": "bottom_right"}
    else:
        options["seq_len_kv"] = g.input("keys", (2,), torch.int32)
        inputs["keys"] = torch.tensor([0, 3], dtype=torch.int32)
    g.output("o", g.sdpa(q, k, v, **options))  # type: ignore[arg-type]
    spec = g.spec()
    gradient = cg.differentiate(spec, ("q", "k", "v"))
    grads = upstream(gradient, dtype=F64)
    found = ours(gradient, inputs, grads, F64)
    exact = by_autograd(spec, inputs, grads, ("q", "k", "v"))
    for name, value in found.items():
        assert bool(value.isfinite().all())
        torch.testing.assert_close(value, exact[name], rtol=1e-9, atol=1e-12)
    dead = found["q"][0] if how == "lengths" else found["q"][:, :, :2]
    assert torch.count_nonzero(dead) == 0


def test_a_broadcast_masks_gradient_has_its_shape() -> None:
    shapes = {"q": (3, 2, 5, 4), "k": (3, 1, 6, 4), "v": (3, 1, 6, 4), "m": (1, 2, 1, 6)}
    spec = declared(lambda g, q, k, v, m: {"o": g.sdpa(q, k, v, m)}, shapes)
    gradient = check_float64(spec, random_inputs(spec))
    assert gradient.backward.tensors["grad_m"].shape == (1, 2, 1, 6)
    (node,) = [node for node in gradient.backward.nodes if node.op == "sdpa_backward"]
    assert node.attr("mask_grad")
    without = cg.differentiate(spec, ("q",)).backward
    (node,) = [node for node in without.nodes if node.op == "sdpa_backward"]
    assert not node.attr("mask_grad")


# -- gradcheck -------------------------------------------------------------------------------------

CHECKED: dict[str, tuple[Build, dict[str, tuple[int, ...]]]] = {
    "conv": (
        lambda g, x, w: {"y": g.conv(x, w, stride=2, padding=((1, 0), (0, 2)), groups=2)},
        {"x": (2, 4, 5, 6), "w": (4, 2, 3, 2)},
    ),
    "conv_transpose": (
        lambda g, x, w: {
            "y": g.conv_transpose(x, w, stride=2, padding=1, output_padding=1, dilation=2)
        },
        {"x": (1, 2, 3, 4), "w": (2, 3, 3, 2)},
    ),
    "batch_norm_train": (
        lambda g, x, w, b: {"y": g.batch_norm_train(x, w, b, eps=0.1)[0]},
        {"x": (3, 2, 4), "w": (2,), "b": (2,)},
    ),
    "batch_norm": (
        lambda g, x, m, v, w, b: {"y": g.batch_norm(x, m, v * v + 0.5, w, b)},
        {"x": (3, 2, 4), "m": (2,), "v": (2,), "w": (1, 2, 1), "b": (2,)},
    ),
    "sdpa": (
        lambda g, q, k, v, m: {"o": g.sdpa(q, k, v, m, is_causal=True)},
        {"q": (1, 2, 4, 3), "k": (1, 1, 5, 3), "v": (1, 1, 5, 2), "m": (1, 1, 4, 5)},
    ),
    "reduction": (
        lambda g, x: {"y": g.reduction(x, (0, 2), "mean"), "z": g.reduction(x, (1,), "max", True)},
        {"x": (3, 4, 2)},
    ),
    "pow": (lambda g, x, y: {"z": g.pow(g.exp(x), y)}, {"x": (3, 4), "y": (4,)}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck(name: str) -> None:
    build, shapes = CHECKED[name]
    spec = declared(build, shapes)
    gradient = cg.differentiate(spec, spec.inputs)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(*inputs)
            return tuple(reference.run(spec, inputs, F64))

        @staticmethod
        def backward(ctx, *grads):  # type: ignore[no-untyped-def]
            inputs = dict(zip(spec.inputs, ctx.saved_tensors, strict=True))
            given = dict(zip(spec.outputs, grads, strict=True))
            found = ours(gradient, inputs, given, F64)
            return tuple(found[name] for name in spec.inputs)

    leaves = [value.requires_grad_() for value in random_inputs(spec).values()]
    assert torch.autograd.gradcheck(Function.apply, leaves)


def test_the_gradient_of_a_gradient_of_a_convolution() -> None:
    spec = declared(
        lambda g, x, w: {"y": g.conv(x, w, stride=2, padding=1)},
        {"x": (2, 3, 5, 6), "w": (4, 3, 3, 3)},
    )
    backward = cg.differentiate(spec, ["x", "w"]).backward
    check_float64(backward, random_inputs(backward))


def test_rows_that_output_padding_adds_and_no_padding_takes_back_are_cut_off() -> None:
    spec = declared(
        lambda g, x, w: {
            "y": g.conv_transpose(x, w, dilation=(3, 2), output_padding=(2, 0), padding=(1, 0))
        },
        {"x": (1, 2, 4, 4), "w": (2, 2, 3, 3)},
    )
    gradient = check_float64(spec, random_inputs(spec))
    assert ops(gradient.backward) == Counter(["slice", "conv", "conv_wgrad"])


# -- mistakes --------------------------------------------------------------------------------------


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
