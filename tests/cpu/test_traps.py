"""Traps of convolutions and of attention that users of such systems have met, each by its thread.

A thread is ``repo#number``. It is named by the docstring of a test here, or by a row of
:data:`COVERED`: the tests elsewhere that are there for it, by paths under ``tests``. Of a trap that
a GPU alone can spring, those are in ``gpu``; sample graphs are run there too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph import functional as CF
from cudnngraph.ir.spec import dense_strides
from cudnngraph.select.rules import why_not_cudnn
from tests import numerics
from tests.mistakes import ROWS
from tests.samples import BF16, F16, F32, F64, enumerate_cases

TESTS = Path(__file__).parents[1]
EXACT = 1e-9

_SAMPLE = "cpu/test_samples.py::test_sample_is_within_the_policy_of_float64_and_of_torch"
_GRADIENT = "gpu/test_gradients.py::test_the_gradient_is_within_the_policy_of_float64_and_of_torch"
_BAD = "cpu/graph/test_bad_input.py::test_one_mistake_is_one_problem_in_the_right_words"


def _samples(*names: str) -> tuple[str, ...]:
    return tuple(f"{_SAMPLE}[{name}]" for name in names)


# The threads of both lists.
CONVOLUTION = """pytorch#19599 pytorch#31425 pytorch#117736 pytorch#132300 pytorch#24090
    pytorch#31952 pytorch#103665 pytorch#62926 oneDNN#3324 pytorch#77295 pytorch#45667 pytorch#68506
    pytorch#91735 cudnn-frontend#422 cudnn-frontend#131 pytorch#163539 pytorch#107514 pytorch#964
    pytorch#14272 Paddle#64840 Paddle#71179 pytorch#31500"""
ATTENTION = """pytorch#103963 pytorch#101967 pytorch#196678 cudnn-frontend#1072 pytorch#138529
    cudnn-frontend#1083 pytorch#193893 cudnn-frontend#943 diffusers#14342 jax#28974 ort#29020
    ort#29714 pytorch#128348 jax#24607 TE#341 pytorch#175764 pytorch#141147 flashinfer#4625
    pytorch#195650 pytorch#138354 cudnn-frontend#554 jax#30593 pytorch#146734"""

COVERED: dict[str, tuple[str, ...]] = {
    # -- convolution
    "pytorch#19599: N = 0": (
        "cpu/graph/test_empty_tensors.py::test_an_empty_batch_gives_an_empty_result_of_the_right_shape",
        "cpu/functional/test_functional.py::test_an_empty_batch_has_an_empty_result_and_zero_gradients",
        "gpu/test_execution.py::test_an_empty_batch_gives_an_empty_result_without_cudnn",
    ),
    "pytorch#31425: H = 0 with padding, an output that is not empty": (
        "cpu/graph/test_empty_tensors.py::test_height_zero_with_padding_gives_the_bias",
    ),
    "pytorch#117736, pytorch#132300: more than 2^31 elements, in the input or in the output": (
        "cpu/select/test_heuristic.py::test_what_cudnn_must_not_see_is_one_torch_step",
        "cpu/select/test_heuristic.py::test_an_output_that_alone_is_too_large_is_found",
        "gpu/test_execution.py::test_more_than_int32_elements_are_right",
        "gpu/test_execution.py::test_a_large_convolution_is_right_at_its_far_end",
    ),
    "pytorch#24090, pytorch#31952: C = 1, H = W = 1, where strides do not tell the layout": (
        "cpu/graph/test_graph.py::test_strides_of_an_extent_of_one_do_not_choose_a_layout",
        "cpu/graph/test_graph.py::test_an_ambiguous_input_follows_an_unmistakable_weight",
        "deviceless/test_lowered_layouts.py::test_images_of_one_pixel_are_shown_channels_last",
        *_samples(*(f"conv_bias_act-{name}-fp16" for name in ("c1", "hw1", "c1_hw1"))),
    ),
    "pytorch#103665: C = 209 against 208; a kernel larger than the input with stride 2": (
        *_samples(*(f"conv_bias_act-{name}-fp16" for name in ("c208", "c209"))),
        *_samples("conv_bias_act-kernel_over_input-fp16"),
    ),
    "pytorch#62926: a residual that would be overwritten": (
        "gpu/test_execution.py::test_a_residual_may_not_be_overwritten",
    ),
    "oneDNN#3324, pytorch#77295: a float32 bias beside 16-bit weights, also transposed": (
        *_samples("conv_bias_act-bias_fp32-fp16", "conv_bias_act-bias_fp32-bf16"),
        *_samples("conv_transpose-bias_fp32-fp16", "conv_transpose-bias_fp32-bf16"),
    ),
    "pytorch#45667: asymmetric padding must not be made symmetric": _samples(
        "conv_bias_act-asymmetric-fp16",
        "conv_bias_act-asymmetric_one_dim-fp16",
        "conv_transpose-asymmetric-fp16",
        "gradients-wgrad_asymmetric-fp16",
        "int8-conv-rounded_asymmetric-int8",
    ),
    "pytorch#68506: 7x7, channels last: fused 17 times slower than apart": (
        "cpu/select/test_search.py::test_a_split_is_taken_where_it_is_faster_than_one_plan",
        *_samples("conv_bias_act-k7_s2_p3_c3-fp16"),
    ),
    "pytorch#91735: grouped and depthwise convolutions that an epilogue slows": (
        "cpu/select/test_heuristic.py::test_what_is_better_run_apart",
        *_samples("conv_bias_act-depthwise-fp16", "conv_bias_act-groups4_s2-fp16"),
    ),
    "cudnn-frontend#422, cudnn-frontend#131: what 8-bit convolutions do not take": (
        "deviceless/test_quantized.py::test_what_8_bit_convolutions_are_refused_for_says_what_to_do",
        "gpu/test_quantized.py::test_what_cudnn_refuses_runs_as_a_torch_step",
        *_samples("int8-conv-relu-int8", "int8-conv-relu_contiguous-int8", "fp8-conv-bare_c3-e4m3"),
    ),
    "pytorch#163539: a convolution in three dims of bfloat16": _samples("conv_bias_act-3d-bf16"),
    "pytorch#107514: TF32 belongs in the key and in the tolerance": (
        "cpu/ir/test_key.py::test_each_field_of_the_policy_is_a_component_of_its_own",
        "cpu/test_policy.py::test_tf32_follows_the_switch_of_torch_where_the_policy_is_silent",
        "cpu/backend/test_known_bad.py::test_what_is_wrong_for_its_tf32_alone_is_right_where_tf32_is_allowed",
        "gpu/test_plans.py::test_tf32_is_used_when_allowed_and_not_otherwise",
    ),
    "pytorch#964, pytorch#14272: output_padding, also with a dilation": _samples(
        "conv_transpose-k3_s2_p1_op1-fp16",
        "conv_transpose-k3_s3_op_0x2-fp16",
        "conv_transpose-dilation2_op1-fp16",
    ),
    "Paddle#64840, Paddle#71179: dilation 0, padding below 0 or over the kernel": tuple(
        f"{_BAD}[transposed_{what}]"
        for what in ("dilation_0", "padding_negative", "padding_too_large")
    ),
    "pytorch#31500: a workspace of 48 GiB": (
        "cpu/plans_cache/test_workspace.py::test_a_request_over_the_limit_is_refused_and_nothing_is_allocated",
        "deviceless/test_explain.py::test_a_workspace_limit_bars_plans_by_what_they_need",
        "gpu/test_plans.py::test_a_workspace_limit_rules_plans_out",
    ),
    # -- attention
    "pytorch#103963, pytorch#101967: rows without a key give zeros; select, never times 0": (
        "cpu/test_samples.py::test_rows_without_a_key_give_zeros_and_minus_infinity",
        "cpu/grad/test_grad.py::test_rows_without_a_key_have_zero_gradients",
        "cpu/grad/test_grad.py::test_padding_that_holds_nan_does_not_reach_the_gradients",
        *_samples("sdpa-mask_bool_dead_rows-fp16", "gradients-attention_mask_add_dead_rows-fp16"),
    ),
    "pytorch#196678: a mask over 64, 192, 320 or 704 keys, and a low lse": (
        *_samples("gradients-attention_s_192_mask-fp16"),
        *_samples(*(f"gradients-attention_mask_add_s_{s}-fp16" for s in (320, 704))),
        *_samples(*(f"gradients-attention_mask_bool_s_{s}-fp16" for s in (320, 704))),
        "gpu/test_attention.py::test_a_low_lse_under_a_mask_gives_finite_gradients",
    ),
    "cudnn-frontend#1072, pytorch#138529: the gradient of one row, of 128 or 65536 keys": (
        *_samples("gradients-attention_decode-fp16", "gradients-attention_decode_low-fp16"),
        "gpu/test_attention.py::test_one_row_has_the_gradient_of_few_and_of_many_keys",
    ),
    "cudnn-frontend#1083: one row and grouped heads": (
        *_samples("sdpa-decode_gqa-fp16", "gradients-attention_decode_gqa-fp16"),
    ),
    "cudnn-frontend#943: sequences of no length": _samples(
        "sdpa-lengths_zero-fp16",
        "gradients-attention_lengths_zero-fp16",
        "gradients-packed_attention_empty-fp64",
    ),
    "diffusers#14342, jax#28974: a boolean mask is not 0 and 1 to add; masks that broadcast": (
        "cpu/functional/test_functional.py::test_attention_is_torchs",
        "cpu/select/test_search.py::test_a_boolean_mask_is_converted",
        *_samples("sdpa-mask_bool-fp16", "sdpa-mask_bool_111k-fp16", "sdpa-mask_add_b11k-fp16"),
    ),
    "ort#29020, ort#29714: the bottom-right diagonal, S_q below and above S_kv, and of lengths": (
        "cpu/nn/test_attention.py::test_bands_are_those_of_a_mask",
        *_samples("sdpa-bottom_right_short_q-fp16", "sdpa-bottom_right_long_q-fp16"),
        *_samples("sdpa-lengths_bottom_right-fp16"),
        *_samples("gradients-attention_lengths_bottom_right-fp16"),
    ),
    "pytorch#128348, jax#24607, TE#341: d_v unlike d, d = 256, d no multiple of 8, S = 32": (
        *_samples("sdpa-d_v_32-fp16", "sdpa-d_256-fp16", "sdpa-d_20-fp16", "sdpa-s_32-fp16"),
        *(f"{_GRADIENT}[sdpa-{name}-fp16]" for name in ("d_v_32", "d_256", "d_20", "s_32")),
    ),
    "pytorch#175764, pytorch#141147: q, k, v of stride 0, and a gradient of stride 0": (
        "cpu/nn/test_attention.py::test_expanded_and_packed_operands_and_a_gradient_of_stride_0",
        "cpu/runtime/test_trainable.py::test_an_incoming_gradient_may_lie_in_any_way",
        "gpu/test_modules.py::test_a_gradient_of_stride_0_and_packed_operands",
        *_samples("sdpa-expanded_kv-fp16", "gradients-attention_expanded_kv-fp16"),
    ),
    "flashinfer#4625: slices of one buffer, of more than one batch": (
        "cpu/test_samples.py::test_packed_inputs_are_slices_of_one_buffer",
        *_samples("sdpa-packed_b3-fp16", "gradients-attention_packed-fp16"),
    ),
    "pytorch#195650: tensors that start at no multiple of 16 bytes": (
        "gpu/test_execution.py::test_an_unaligned_input_is_copied_by_a_call_and_refused_by_bind",
        "gpu/test_attention.py::test_attention_into_an_unaligned_output_is_refused_by_name",
    ),
    "pytorch#138354, cudnn-frontend#554: the output lies as q does, and is said to": (
        "cpu/graph/test_graph.py::test_attention_passes_the_order_of_q_on",
        "cpu/nn/test_attention.py::test_the_output_lies_as_q_does",
        "cpu/runtime/test_custom_ops.py::test_opcheck_of_attention_with_a_mask_and_an_lse",
    ),
    "jax#30593: the gradient of a bias that broadcasts over batches": (
        "cpu/grad/test_grad.py::test_a_broadcast_masks_gradient_has_its_shape",
        *_samples("gradients-attention_mask_add_1hsk-fp16", "gradients-attention_mask_add_sk-fp16"),
    ),
    "pytorch#146734: seeds of 64 bits, and a backward that can be repeated": (
        f"{_BAD}[sdpa_dropout_seed_int32]",
        "gpu/test_attention.py::test_a_deterministic_backward_gives_the_same_bits_again",
        *_samples("sdpa-dropout_seed-fp64", "gradients-attention_dropout_seed-fp64"),
    ),
}


# -- every trap has its test -----------------------------------------------------------------------


@lru_cache
def _parsed(path: str) -> ast.Module:
    return ast.parse((TESTS / path).read_text(encoding="utf-8"))


def _tests_of(path: str) -> dict[str, str]:
    """The docstrings of a file's tests, by name."""
    return {
        node.name: ast.get_docstring(node) or ""
        for node in _parsed(path).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("trap", COVERED)
def test_the_tests_that_a_trap_names_exist(trap: str) -> None:
    """A name in brackets is that of a sample graph or of a mistake, or stands in the file."""
    cases = {case.id for case in enumerate_cases()} | {row.id for row in ROWS}
    for named in COVERED[trap]:
        found = re.fullmatch(r"([\w/]+\.py)::(\w+)(?:\[(.+)\])?", named)
        assert found is not None, named
        path, test, case = found.groups()
        assert test in _tests_of(path), named
        if case is not None:
            written = {node.value for node in ast.walk(_parsed(path)) if type(node) is ast.Constant}
            assert case in cases | written, named


def test_every_thread_is_named_by_a_test_or_a_row() -> None:
    told = " ".join([*COVERED, *_tests_of("cpu/test_traps.py").values()])
    assert set(re.findall(r"[\w-]+#\d+", told)) == {*CONVOLUTION.split(), *ATTENTION.split()}


# -- convolution -----------------------------------------------------------------------------------


def check_float64(ours: torch.Tensor, theirs: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """The results and every gradient are the same in float64."""
    grad = torch.randn(theirs.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(ours, leaves, grad)
    right = torch.autograd.grad(theirs, leaves, grad)
    for a, b in zip((ours, *found), (theirs, *right), strict=True):
        assert a.shape == b.shape
        if a.numel():
            assert float((a - b).detach().abs().max()) < EXACT


def made(*shapes: tuple[int, ...], dtype: torch.dtype = F64) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=gen, dtype=F64).to(dtype).requires_grad_() for s in shapes]


def test_a_transposed_convolution_of_no_images_has_gradients() -> None:
    """pytorch#19599: cuDNN refuses N = 0."""
    x, w, b = made((0, 4, 5, 5), (4, 6, 3, 3), (6,))
    ours = CF.conv_transpose2d(x, w, b, stride=2, activation="relu")
    check_float64(ours, F.relu(F.conv_transpose2d(x, w, b, stride=2)), [x, w, b])


def no_height(wrt: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The result of a convolution of (2, 3, 0, 5), and what it may be differentiated by."""
    given = dict(zip("xwb", made((2, 3, 0, 5), (4, 3, 3, 3), (4,)), strict=True))
    leaves = {name: t.detach().requires_grad_(name in wrt) for name, t in given.items()}
    return CF.conv2d(*leaves.values(), padding=(2, 1)), leaves


def test_images_of_no_height_with_padding_train_weights() -> None:
    """pytorch#31425: with padding there are results, and the bias has a gradient from each."""
    y, leaves = no_height("wb")
    assert torch.equal(y, leaves["b"].view(1, 4, 1, 1).expand(2, 4, 2, 5))
    dw, db = torch.autograd.grad(y.sum(), [leaves["w"], leaves["b"]])
    assert not dw.any() and torch.equal(db, torch.full((4,), 20.0, dtype=F64))


def test_images_of_no_height_with_padding_have_a_gradient() -> None:
    """pytorch#31425: it is as empty as they are."""
    y, leaves = no_height("x")
    (dx,) = torch.autograd.grad(y.sum(), [leaves["x"]])
    assert dx.shape == (2, 3, 0, 5)


@pytest.mark.parametrize(
    ("x", "w", "large"),
    [
        ((1, 514, 2048, 2048), (1, 514, 3, 3), "x"),
        ((1, 1, 2048, 2048), (514, 1, 3, 3), "y"),
        ((1024, 1, 1024, 2048), (1, 1, 1, 1), "x"),
    ],
    ids=["input", "output", "batch"],
)
def test_a_convolution_over_2_31_elements_is_not_shown_to_cudnn(
    x: tuple[int, ...], w: tuple[int, ...], large: str
) -> None:
    """pytorch#117736, pytorch#132300: cuDNN's offsets of 32 bits wrap; nor are its gradients."""
    g = cg.Graph("large")
    given = g.input("x", x, F16), g.input("w", w, F16)
    g.output("y", g.conv(*given, padding=w[2] // 2))
    assert (why_not_cudnn(g.spec()) or "").startswith(f"'{large}' spans")
    gradient = cg.differentiate(g.spec(), ("x", "w"))
    assert "over 2^31 - 1" in (why_not_cudnn(gradient.backward) or "")


RESIDUAL: dict[str, dict[str, Any]] = {
    "one channel": {"channels": 1, "kernel": 1, "padding": 0},
    "k3": {},
    "depthwise": {"groups": 4},
    "silu": {"activation": "silu"},
    "norm": {"norm": "batch"},
    "transposed": {},
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", RESIDUAL)
def test_a_residual_may_be_the_input_itself(name: str, layout: torch.memory_format) -> None:
    """pytorch#62926: one tensor in two places gave wrong results; its gradients are summed."""
    options = {"norm": None, "padding": 1, "dtype": F64, **RESIDUAL[name]}
    channels, kernel = options.pop("channels", 4), options.pop("kernel", 3)
    kind = cg.FusedConvTransposeBlock if name == "transposed" else cg.FusedConvBlock
    torch.manual_seed(0)
    block = kind(channels, channels, kernel, **options)
    (x,) = made((2, block.conv.in_channels, 8, 8))
    x = x.detach().to(memory_format=layout).requires_grad_()
    y = block.conv(x)
    y = y if block.norm is None else F.batch_norm(y, None, None, training=True)
    theirs = block.activation(y + x)
    ours = block(x, x)
    parameters = [block.conv.weight] if block.norm is not None else list(block.parameters())
    check_float64(ours, theirs, [x, *parameters])


def test_a_residual_of_the_inputs_memory_runs_in_every_way() -> None:
    """pytorch#62926: one tensor under two names, one value in two places, and what may not be."""
    x, w = (t.detach() for t in made((2, 4, 6, 6), (4, 4, 3, 3)))
    want = F.relu(F.conv2d(x, w, padding=1) + x)
    one, two = cg.Graph("one"), cg.Graph("two")
    value = one.input("x", x.shape, F64)
    filters = one.input("w", w.shape, F64)
    one.output("y", one.conv_bias_act(value, filters, residual=value, padding=1))
    shapes = {"x": x.shape, "w": w.shape, "z": x.shape}
    value, filters, z = (two.input(name, shape, F64) for name, shape in shapes.items())
    two.output("y", two.conv_bias_act(value, filters, residual=z, padding=1))
    for graph, given in ((one, {"x": x, "w": w}), (two, {"x": x, "w": w, "z": x})):
        exe, out = graph.compile("cpu"), torch.empty_like(x)
        assert float((exe(**given) - want).abs().max()) < EXACT
        exe.run(**given, y=out)
        assert torch.equal(out, exe(**given))
        with pytest.raises(cg.BindError, match="output 'y': overlaps input 'x'"):
            exe.run(**given, y=x)


@pytest.mark.parametrize("dilation", [2, 3])
def test_output_size_counts_the_dilation(dilation: int) -> None:
    """pytorch#14272: the sizes that are allowed were computed without it."""
    options: dict[str, Any] = {"stride": 2, "padding": 1, "dilation": dilation}
    block = cg.FusedConvTransposeBlock(4, 6, 3, norm=None, activation=None, dtype=F64, **options)
    (x,) = made((2, 4, 5, 5))
    least = 4 * 2 - 2 + 2 * dilation + 1
    for size in (least, least + 1):
        ours = block(x, output_size=[size, size])
        assert ours.shape[2:] == (size, size)
        check_float64(ours, block.conv(x, output_size=[size, size]), [x, *block.parameters()])
    for size in (least - 1, least + 2):
        with pytest.raises(ValueError, match=rf"valid sizes range from \[{least}, {least}\]"):
            block(x, output_size=[size, size])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dilation": 0}, "dilation=(0, 0) is not positive; expected every dilation >= 1"),
        ({"padding": -1}, "padding=(-1, -1) is negative; expected every padding >= 0"),
        ({"padding": (0, 8)}, "output size over spatial dim 1 is 0; expected at least 1"),
    ],
    ids=["dilation 0", "negative padding", "padding over the kernel"],
)
def test_geometry_that_torchs_modules_take_is_refused_when_it_is_called(
    options: dict[str, Any], says: str
) -> None:
    """Paddle#64840, Paddle#71179: these crashed, or came back as a status of cuDNN."""
    block = cg.FusedConvTransposeBlock(4, 6, 3, norm=None, **options)
    for training in (True, False):
        block.requires_grad_(training)
        with pytest.raises(cg.GraphError, match=re.escape(f"conv_transpose': {says}")):
            block(torch.randn(1, 4, 14, 14))


def test_padding_over_the_kernel_cuts_where_something_is_left() -> None:
    """Paddle#71179: padding that is larger than the kernel is no mistake by itself."""
    x, w, b = made((2, 4, 14, 9), (4, 6, 3, 3), (6,))
    ours = CF.conv_transpose2d(x, w, b, padding=(5, 4))
    check_float64(ours, F.conv_transpose2d(x, w, b, padding=(5, 4)), [x, w, b])


# -- attention -------------------------------------------------------------------------------------


def low_scores(
    rows: int, keys: int, low: bool, heads: int = 1, dtype: torch.dtype = BF16
) -> list[torch.Tensor]:
    """q, k and v (1, heads, …, 64); with ``low`` every score is about -120."""
    q, k, v = (t.detach() for t in made(*((1, heads, n, 64) for n in (rows, keys, keys))))
    if low:
        q[..., 0], k[..., 0] = -120.0, 8.0
    return [t.to(dtype) for t in (q, k, v)]


def check_attention(
    data: Sequence[torch.Tensor], mask: torch.Tensor | None, grad: torch.Tensor
) -> None:
    """o and the gradients of q, k and v are within the policy of float64."""
    leaves = [t.clone().requires_grad_() for t in data]
    wide = [t.double().requires_grad_() for t in data]
    ours = cg.FusedSDPA()(*leaves, mask)
    bias = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = F.scaled_dot_product_attention(*wide, bias)
    found = torch.autograd.grad(ours, leaves, grad)
    right = torch.autograd.grad(exact, wide, grad.double())
    terms = max(*data[1].shape[2:])
    for name, a, b in zip(("o", "dq", "dk", "dv"), (ours, *found), (exact, *right), strict=True):
        numerics.check(a.detach(), b.detach(), data[0].dtype, terms=terms, what=name)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("length", [64, 192, 320, 704])
def test_a_low_lse_under_a_mask_gives_finite_gradients(length: int, kind: str) -> None:
    """pytorch#196678: dq was NaN where half of the last 128 keys are there and lse < -88.7, so that
    exp(-lse) is more than float32 holds."""
    data = low_scores(length, length, True)
    keep = torch.ones(length, length, dtype=torch.bool).tril()
    mask = keep if kind == "bool" else torch.zeros(length, length).masked_fill(~keep, -torch.inf)
    mask = mask.to(BF16) if kind == "float" else mask
    _, lse = CF.scaled_dot_product_attention(*data, mask, return_lse=True)
    assert float(lse.max()) < -88.8
    grad = torch.randn(data[0].shape, generator=torch.Generator().manual_seed(2)).to(BF16)
    check_attention(data, mask, grad)


@pytest.mark.parametrize("low", [False, True], ids=["", "low lse"])
@pytest.mark.parametrize("keys", [128, 65536])
def test_one_row_has_the_gradient_of_few_and_of_many_keys(keys: int, low: bool) -> None:
    """cudnn-frontend#1072, pytorch#138529: of S_q = 1 dk and dv were NaN where lse is low, and
    65536 keys an error. The gradient is that of a sum: of stride 0 (pytorch#141147)."""
    data = low_scores(1, keys, low)
    check_attention(data, None, torch.ones((), dtype=BF16).expand(data[0].shape))


@pytest.mark.parametrize("cache", ["grows", "is padded"])
@pytest.mark.parametrize("shared", [1, 2, 4, 8])
def test_a_long_generation_is_what_all_of_it_at_once_is(shared: int, cache: str) -> None:
    """pytorch#193893: fewer than 8 heads of keys went wrong slowly, token by token."""
    steps = 160
    q, k, v = (
        t.detach().to(F32) for t in made(*((1, heads, steps, 16) for heads in (8, shared, shared)))
    )
    exact = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    places = [torch.full((1, shared, steps, 16), torch.nan) for _ in "kv"]
    rows = []
    for step in range(1, steps + 1):
        for place, data in zip(places, (k, v), strict=True):
            place[:, :, step - 1] = data[:, :, step - 1]
        row = q[:, :, step - 1 : step]
        if cache == "grows":
            there = [place[:, :, :step].contiguous() for place in places]
            rows.append(CF.scaled_dot_product_attention(row, *there))
        else:
            length = torch.tensor([step], dtype=torch.int32)
            rows.append(CF.scaled_dot_product_attention(row, *places, seq_len_kv=length))
    numerics.check(torch.cat(rows, 2), exact, F32, whole, terms=steps)


ORDERS = {
    "bhsd": (0, 1, 2, 3),
    "bshd": (0, 2, 1, 3),
    "sbhd": (2, 0, 1, 3),
    "packed": (0, 2, 1, 3),
    "expanded": (0, 1, 2, 3),
}


def laid(name: str) -> list[torch.Tensor]:
    """q, k and v (2, 3, 5, 8) in another order of memory, slices of one buffer, or of stride 0."""
    if name == "packed":
        (packed,) = made((2, 5, 3, 3, 8))
        return list(packed.detach().permute(2, 0, 3, 1, 4))
    if name == "expanded":
        return [t.detach().expand(2, 3, 5, 8) for t in made(*((1, 1, 5, 8),) * 3)]
    stride = dense_strides((2, 3, 5, 8), ORDERS[name])
    shapes = ((2, 3, 5, 8),) * 3
    return [
        torch.empty_strided(t.shape, stride, dtype=F64).copy_(t.detach()) for t in made(*shapes)
    ]


@pytest.mark.parametrize("name", ORDERS)
def test_the_output_lies_as_q_does_and_a_compiler_is_told_so(name: str) -> None:
    """pytorch#138354, cudnn-frontend#554: the fake kernel's strides were others than the real
    one's. pytorch#175764: of an expanded q the output's last dim was not the fastest."""

    def attend(*given: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        o = CF.scaled_dot_product_attention(*given, is_causal=True)
        return o, o.stride()

    wanted = dense_strides((2, 3, 5, 8), ORDERS[name])
    data = [t.requires_grad_() for t in laid(name)]
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for run in (attend, compiled):
        o, told = run(*data)
        assert o.stride() == told == wanted
        theirs = F.scaled_dot_product_attention(*data, is_causal=True)
        check_float64(o, theirs, data)


def test_expanded_queries_get_the_sum_of_their_gradients() -> None:
    """pytorch#175764: one q for all batches and heads, stored once."""
    q, k, v = made((1, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    wide = q.expand(2, 3, 5, 8)
    check_float64(cg.FusedSDPA()(wide, k, v), F.scaled_dot_product_attention(wide, k, v), [q, k, v])


def test_attention_reads_and_writes_at_any_address() -> None:
    """pytorch#195650: an output that starts 2 bytes past a multiple of 16, and all operands."""
    shape, count = (1, 2, 8, 16), 256
    data = [t.detach().to(F16) for t in made(*(shape,) * 4)]
    want = CF.scaled_dot_product_attention(*data[:3])
    memory = [torch.full((count + 9,), 7.0, dtype=F16) for _ in range(5)]
    apart = [m[1 : count + 1].view(shape) for m in memory]
    assert all(t.data_ptr() % 16 == 2 for t in apart)
    for place, value in zip(apart, data, strict=False):
        place.copy_(value)
    q, k, v, grad, out = apart
    assert CF.scaled_dot_product_attention(q, k, v, out=out) is out
    assert torch.equal(out, want)
    assert bool((memory[4][[0, *range(count + 1, count + 9)]] == 7.0).all())
    results = []
    for given, incoming in ((data[:3], data[3]), ((q, k, v), grad)):
        leaves = [t.detach().requires_grad_() for t in given]
        o = CF.scaled_dot_product_attention(*leaves)
        results.append(torch.autograd.grad(o, leaves, incoming))
    assert all(map(torch.equal, *results))


def test_all_64_bits_of_a_seed_and_an_offset_count() -> None:
    """pytorch#146734: as int32 they were read wrong; they are refused by their dtype."""
    q = made((2, 4, 16, 8))[0].detach()

    def dropped(seed: int, offset: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        numbers = (torch.tensor([n], dtype=dtype) for n in (seed, offset))
        given = dict(zip(("dropout_seed", "dropout_offset"), numbers, strict=True))
        return CF.scaled_dot_product_attention(q, q, q, None, 0.4, **given)

    first = dropped(5, 8)
    assert torch.equal(dropped(5, 8), first)
    for seed, offset in ((5 + 2**32, 8), (5 - 2**63, 8), (5, 8 + 2**34)):
        assert not torch.equal(dropped(seed, offset), first)
    with pytest.raises(cg.GraphError, match=r"dropout_seed 'dropout_seed' is int32 \(1,\); expect"):
        dropped(5, 8, torch.int32)


def test_a_deterministic_policy_reaches_the_backward_of_attention() -> None:
    """pytorch#146734: the same bits again, here by the reference."""
    attend = cg.FusedSDPA(causal=True, policy=cg.Policy(deterministic=True))
    leaves = made(*((2, 4, 33, 16),) * 3, dtype=F32)
    (grad,) = made((2, 4, 33, 16), dtype=F32)
    first, again = (torch.autograd.grad(attend(*leaves), leaves, grad.detach()) for _ in range(2))
    assert all(map(torch.equal, first, again))
    backward = attend(*leaves).grad_fn.pair.backward
    assert backward.policy.deterministic
