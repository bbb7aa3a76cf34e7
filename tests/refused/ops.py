"""Ops that are left to torch, with the reason of each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cudnngraph.ir.spec import GraphSpec, Node, TensorSpec, is_dense, memory_order
from cudnngraph.ops import pooling
from cudnngraph.ops.table import OPS
from cudnngraph.rewrite.packed import prefers_flash
from tests.refused.predicates import (
    NORMS,
    Known,
    any_attention,
    any_matmul,
    dtype_of,
    is_pointwise,
    lies_channels_last,
    masked_by,
    nodes_of,
    operand_at,
)

ATTENTION = [name for name in OPS if OPS[name].has("attention")]


def _expanded(spec: GraphSpec) -> bool:
    tensors = [spec.tensors[name] for name in spec.inputs]
    return any(s == 0 and n > 1 for t in tensors for n, s in zip(t.shape, t.stride, strict=True))


def _long_bottom_right(spec: GraphSpec, node: Node) -> bool:
    q, k = operand_at(spec, node, "q"), operand_at(spec, node, "k")
    assert q is not None and k is not None
    return node.attr("diagonal_alignment") == "bottom_right" and q.shape[2] > k.shape[2]


def _odd_head(spec: GraphSpec, node: Node) -> bool:
    data = [operand_at(spec, node, port) for port in "qkv"]
    return any(tensor is not None and tensor.shape[3] % 8 for tensor in data)


def _one_row_for_all(spec: GraphSpec, node: Node) -> bool:
    """Whether an attention mask has one row for all rows of q."""
    mask, q = operand_at(spec, node, "attn_mask"), operand_at(spec, node, "q")
    assert q is not None
    return mask is not None and (1, *mask.shape)[-2] == 1 < q.shape[2]


def _between(spec: GraphSpec, node: Node) -> bool:
    """Whether the dims of a reduction are neither the slowest in memory nor the fastest."""
    x = spec.tensors[node.operands[0]]
    order = [d for d in memory_order(x.shape, x.stride) if x.shape[d] > 1]
    reduced = [d in node.attr("dims") for d in order]
    return sorted(reduced) != reduced and sorted(reduced, reverse=True) != reduced


def _narrow_norm(spec: GraphSpec) -> bool:
    nodes = nodes_of(spec, "batch_norm_train", "batch_norm_backward")
    return any(
        tensor is not None and tensor.dtype != torch.float32
        for node in nodes
        for tensor in (
            operand_at(spec, node, port) for port in OPS[node.op].ports if port not in ("x", "dy")
        )
    )


def _computes_a_column(spec: GraphSpec) -> bool:
    """Whether a batch norm works on channels that are not the fastest dim."""
    tensors = [spec.tensors[str(node.inputs[0])] for node in nodes_of(spec, "batch_norm")]
    return any(t.stride[1] != 1 and t.shape[1] > 1 for t in tensors)


PER_CHANNEL = ("bias", "scale", "batch_norm", "dequantize", "quantize")


def _in_the_middle(spec: GraphSpec, node: Node) -> bool:
    """Whether an operand has one dim alone, neither the slowest nor the fastest of the result."""
    result = spec.tensors[node.results[0]]
    order = sorted(range(len(result.shape)), key=lambda dim: -result.stride[dim])
    inner = [dim for dim in order if result.shape[dim] > 1][1:-1]
    for name in node.operands:
        shape = spec.tensors[name].shape
        if shape == result.shape[1:2] and node.op in PER_CHANNEL:
            shape = (1, shape[0], *(1,) * (len(result.shape) - 2))
        shape = (1,) * (len(result.shape) - len(shape)) + shape
        if any([dim for dim, n in enumerate(shape) if n > 1] == [place] for place in inner):
            return True
    return False


def _memory_orders(spec: GraphSpec) -> set[tuple[int, ...]]:
    """The orders in which the largest tensors lie in memory."""
    tensors = [spec.tensors[name] for name in (*spec.inputs, *spec.outputs)]
    largest = max(tensor.numel for tensor in tensors)
    return {
        tuple(sorted(range(len(t.shape)), key=lambda dim: -t.stride[dim]))
        for t in tensors
        if t.numel == largest
    }


I8, FP8 = torch.int8, (torch.float8_e4m3fn, torch.float8_e5m2)


def _batches_apart(spec: GraphSpec, node: Node) -> bool:
    """Whether a tensor of a product has two batch dims of which one broadcasts, or with a gap."""
    rank = len(spec.tensors[node.results[0]].shape)
    for tensor in (spec.tensors[name] for name in node.operands):
        shape = (1,) * (rank - len(tensor.shape)) + tensor.shape
        stride = (0,) * (rank - len(tensor.shape)) + tensor.stride
        apart = min(shape[:2]) == 1 or stride[0] != shape[1] * stride[1]
        if rank == 4 and max(shape[:2]) > 1 and apart:
            return True
    return False


def _norm(test: Callable[[TensorSpec, TensorSpec], bool]) -> Callable[[GraphSpec], bool]:
    def meets(spec: GraphSpec) -> bool:
        for node in nodes_of(spec, *NORMS):
            x, weight = operand_at(spec, node, "x"), operand_at(spec, node, "weight")
            assert x is not None and weight is not None
            if test(x, weight):
                return True
        return False

    return meets


def _order(tensor: TensorSpec) -> list[int]:
    """The dims that say something, from the slowest, counted from the last one back."""
    real = [dim for dim, n in enumerate(tensor.shape) if n > 1]
    return [dim - len(tensor.shape) for dim in sorted(real, key=lambda dim: -tensor.stride[dim])]


def _rows_apart(x: TensorSpec, weight: TensorSpec) -> bool:
    """Whether the dims of a norm's weight are not the fastest of x in one order, without gaps."""
    order = _order(weight)
    return not is_dense(x.shape, x.stride) or _order(x)[len(_order(x)) - len(order) :] != order


TORCH = (
    Known(
        "the gradient of attention with a dropout mask is wrong",
        any_attention(
            lambda spec, node: operand_at(spec, node, "dropout_mask") is not None, "sdpa_backward"
        ),
    ),
    Known(
        "cuDNN graphs have no float64",
        lambda spec: any(tensor.dtype == torch.float64 for tensor in spec.tensors.values()),
    ),
    Known(
        "cuDNN takes no empty tensors",
        lambda spec: any(tensor.numel == 0 for tensor in spec.tensors.values()),
    ),
    Known(
        "matrix products of float32 round to TF32",
        any_matmul(lambda spec, node: dtype_of(spec, node) == torch.float32),
    ),
    Known("matrix products take one batch dim", any_matmul(_batches_apart)),
    Known(
        "cuDNN's norms have no groups of channels",
        lambda spec: bool(nodes_of(spec, "group_affine")),
    ),
    Known(
        "torch's flash attention is faster where nothing is promised of other sequences",
        lambda spec: any(prefers_flash(node, spec.tensors) for node in spec.nodes),
    ),
    Known(
        "products sum up squares of 16-bit rows alone",
        lambda spec: any(
            dtype_of(spec, node) == torch.float32 for node in nodes_of(spec, "normalize")
        ),
    ),
    Known(
        "what moves elements and computes nothing is left to torch",
        lambda spec: bool(nodes_of(spec, "reshape", "transpose", "permute", "slice", "concat")),
    ),
    Known(
        "cuDNN has no products of groups of rows",
        lambda spec: bool(nodes_of(spec, "grouped_matmul", "grouped_matmul_wgrad")),
    ),
    Known("an op of torch runs by torch", lambda spec: bool(nodes_of(spec, "aten"))),
    Known(
        "cuDNN's Python frontend has no resampling",
        lambda spec: bool(nodes_of(spec, *pooling.RULES)),
    ),
    Known(
        "cuDNN's Python frontend has softmax in attention alone",
        lambda spec: any(node.op.startswith(("softmax", "log_soft")) for node in spec.nodes),
    ),
    Known(
        "cuDNN reads nothing at an index, as a loss does",
        lambda spec: bool(nodes_of(spec, "nll_loss", "nll_loss_backward")),
    ),
    Known(
        "an instance norm takes images of one layout, without gaps",
        lambda spec: any(
            not is_dense(spec.tensors[name].shape, spec.tensors[name].stride)
            for node in nodes_of(spec, "instance_norm")
            for name in node.operands[:2]
        ),
    ),
    Known(
        "cuDNN leaves the call's stream in an instance norm's gradient",
        lambda spec: bool(nodes_of(spec, "instance_norm_backward")),
    ),
    Known("norms take rows that lie one behind the other", _norm(_rows_apart)),
    Known(
        "cuDNN has no transposed convolution of int8",
        lambda spec: any(dtype_of(spec, node) == I8 for node in nodes_of(spec, "conv_transpose")),
    ),
    Known(
        "8-bit convolutions read and write channels_last",
        lambda spec: any(
            dtype_of(spec, node) in (I8, *FP8) and not lies_channels_last(spec.tensors[name])
            for node in nodes_of(spec, "conv")
            for name in (*node.operands, *node.results)
        ),
    ),
    Known(
        "a transposed convolution in FP8 takes a weight with its first dim fastest",
        lambda spec: any(
            dtype_of(spec, node) in FP8 and spec.tensors[node.operands[1]].stride[0] != 1
            for node in nodes_of(spec, "conv_transpose")
        ),
    ),
    Known(
        "8-bit convolutions take groups of 4, 8... channels",
        lambda spec: any(
            dtype_of(spec, node) in (I8, *FP8)
            and node.attr("groups") > 1
            and spec.tensors[node.operands[1]].shape[1] % 4
            for node in nodes_of(spec, "conv")
        ),
    ),
    Known(
        "FP8 attention takes head dims that are multiples of 16",
        any_attention(
            lambda spec, node: any(spec.tensors[name].shape[3] % 16 for name in node.operands[:3]),
            "sdpa_fp8",
        ),
    ),
    Known(
        "FP8 attention takes more than one row",
        any_attention(lambda spec, node: spec.tensors[node.operands[0]].shape[2] == 1, "sdpa_fp8"),
    ),
    Known(
        "FP8 attention has the bottom-right diagonal from Blackwell on",
        any_attention(
            lambda spec, node: node.attr("diagonal_alignment") == "bottom_right", "sdpa_fp8"
        ),
    ),
    Known(
        "FP8 attention has engines alone that let NaN out of the padding behind lengths",
        any_attention(
            lambda spec, node: operand_at(spec, node, "seq_len_kv") is not None, "sdpa_fp8"
        ),
    ),
    Known(
        "attention takes 16-bit data only",
        any_attention(lambda spec, node: dtype_of(spec, node) == torch.float32, *ATTENTION),
    ),
    Known(
        "where packed sequences start is told in whole numbers, which torch makes",
        lambda spec: bool(nodes_of(spec, "ragged_offsets")),
    ),
    Known(
        "the gradient of a float32 mask beside 16-bit data",
        any_attention(
            lambda spec, node: node.attr("mask_grad") and masked_by(torch.float32)(spec, node),
            "sdpa_backward",
        ),
    ),
    Known(
        "attention's gradient takes additive masks, and nothing converts a boolean one yet",
        any_attention(masked_by(torch.bool), "sdpa_backward"),
    ),
    Known(
        "attention's gradient lets NaN out of the padding that lengths leave",
        any_attention(
            lambda spec, node: any(operand_at(spec, node, f"seq_len_{of}") for of in ("q", "kv")),
            "sdpa_backward",
        ),
    ),
    Known(
        "attention's gradient comes out wrong under a mask that is broadcast over rows",
        any_attention(_one_row_for_all, "sdpa_backward"),
    ),
    Known(
        "the gradient of gelu_tanh is too far off for float32",
        lambda spec: any(
            {spec.tensors[name].dtype for name in (*node.operands, *node.results)}
            == {torch.float32}
            for node in nodes_of(spec, "gelu_tanh_backward")
        ),
    ),
    Known(
        "a strided transposed convolution of 16-bit data is not written in float32",
        lambda spec: any(
            dtype_of(spec, node) in (torch.float16, torch.bfloat16)
            and spec.tensors[node.results[0]].dtype == torch.float32
            and max(node.attr("stride")) > 1
            for node in nodes_of(spec, "conv_transpose")
        ),
    ),
    Known(
        "cuDNN reduces to float32",
        lambda spec: any(
            spec.tensors[node.results[0]].dtype != torch.float32
            for node in nodes_of(spec, "reduction")
        ),
    ),
    Known(
        "cuDNN reduces the rows or the columns of a matrix, not dims between others",
        lambda spec: any(_between(spec, node) for node in nodes_of(spec, "reduction")),
    ),
    Known(
        "cuDNN repeats a tensor only beside one of the full shape",
        lambda spec: {node.op for node in spec.nodes} <= {"expand", "constant"},
    ),
    Known("batch norm in training takes parameters in float32", _narrow_norm),
    Known("attention takes head dims that are multiples of 8", any_attention(_odd_head)),
    Known(
        "a pointwise graph broadcasts over three dims at most",
        lambda spec: (
            is_pointwise(spec)
            and any(
                tensor.numel < max(t.numel for t in spec.tensors.values())
                for tensor in spec.tensors.values()
                if len(tensor.shape) > 1
            )
            and max(len(t.shape) for t in spec.tensors.values()) > 3
        ),
    ),
    Known(
        "attention along the bottom-right diagonal drops nothing",
        any_attention(
            lambda spec, node: (
                node.attr("dropout_p") > 0 and node.attr("diagonal_alignment") == "bottom_right"
            )
        ),
    ),
    Known(
        "attention takes no sink where S_q is 1",
        any_attention(
            lambda spec, node: (
                operand_at(spec, node, "sink") is not None
                and spec.tensors[node.operands[0]].shape[2] == 1
            ),
            "sdpa",
        ),
    ),
    Known(
        "cuDNN's own ALiBi slopes are for the causal band from the top left",
        any_attention(
            lambda spec, node: (
                node.attr("alibi")
                and (
                    (node.attr("window") or (None, None))[1] != 0
                    or node.attr("diagonal_alignment") == "bottom_right"
                )
            )
        ),
    ),
    Known(
        "attention changes scores beside no lengths",
        any_attention(
            lambda spec, node: (
                node.attr("softcap") is not None
                and operand_at(spec, node, "seq_len_kv") is not None
            ),
            "sdpa",
        ),
    ),
    Known(
        "attention has no gradient of a mask beside a soft cap",
        any_attention(
            lambda spec, node: node.attr("mask_grad") and node.attr("softcap") is not None,
            "sdpa_backward",
        ),
    ),
    Known(
        "attention along the bottom-right diagonal takes S_q <= S_kv",
        any_attention(_long_bottom_right),
    ),
    Known(
        "over an expanded batch there is no convolution in true float32",
        lambda spec: any(
            dtype_of(spec, node) == torch.float32 and _expanded(spec)
            for node in nodes_of(spec, "conv")
        ),
    ),
    Known(
        "a pointwise graph reads and writes in one order of memory",
        lambda spec: is_pointwise(spec) and len(_memory_orders(spec)) > 1,
    ),
    Known(
        "a pointwise graph takes no tensors with gaps",
        lambda spec: (
            is_pointwise(spec)
            and any(
                not is_dense(tensor.shape, tensor.stride)
                for tensor in (spec.tensors[name] for name in (*spec.inputs, *spec.outputs))
            )
        ),
    ),
    Known(
        "a computed column comes out wrong (cuDNN 9.19)",
        lambda spec: is_pointwise(spec) and _computes_a_column(spec),
    ),
    Known(
        "a vector broadcast over dims on both sides of it comes out wrong (cuDNN 9.19)",
        lambda spec: any(_in_the_middle(spec, node) for node in spec.nodes if is_pointwise(spec)),
    ),
)
