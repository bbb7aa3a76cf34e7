"""Gradient graphs against torch autograd: numbers, dtypes, layouts, attention, gradcheck."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.grad.context import NoGradient
from cudnngraph.grad.rules.table import RULES, joined
from cudnngraph.ir.spec import dense_strides, memory_order
from cudnngraph.ops.table import OPS
from tests import numerics
from tests.chunks import each_case
from tests.gradients import (
    Build,
    by_autograd,
    check_at_dtype,
    check_float64,
    declared,
    differentiable,
    floating_inputs,
    ops,
    ours,
    random_inputs,
    upstream,
)
from tests.samples import BF16, F16, F32, F64, Case, enumerate_cases, in_float64, make_inputs

CASES = [case for case in enumerate_cases() if differentiable(case)]


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
