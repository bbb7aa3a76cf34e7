"""Tensors that a forward saves for its gradient, and ops that the gradient leaves out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import cudnngraph as cg
from cudnngraph.ir.spec import is_channels_last
from tests.gradients import block, check_float64, declared, extra, ops, ours, random_inputs
from tests.samples import F16, F32, F64


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
