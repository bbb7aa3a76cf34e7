"""Every sample case is lowered for an H200 and shown to the real cuDNN library.

cuDNN must have a plan for the whole graph, or for every step that it is cut into. What is known to
be refused stands in two lists with the reason: ops that are left to torch, and graphs that are cut.
A refusal that is in neither fails. The summary at the end counts how often each row was met: one
that is not is out of date.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import env
from cudnngraph.backend.candidates import Candidate, propose
from cudnngraph.backend.deviceless import Listed, examine, lower_for, propose_for
from cudnngraph.backend.lowering.context import Alias, Constant
from cudnngraph.backend.lowering.driver import RULES, Lowered
from cudnngraph.backend.lowering.refusals import REFUSALS
from cudnngraph.backend.plan import Choice, load
from cudnngraph.ir import versions
from cudnngraph.ir.key import Key, graph_key
from cudnngraph.ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    channels_last_strides,
    is_dense,
    memory_order,
    same_layout,
)
from cudnngraph.ops import pooling
from cudnngraph.ops.table import OPS
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.partition.memory import Layout, StepMemory
from cudnngraph.policy import Policy
from cudnngraph.rewrite.packed import insert_ragged_offsets, prefers_flash
from tests import coverage
from tests.gradients import differentiable, floating_inputs
from tests.samples import Case, enumerate_cases

TARGET = "nvidia-h200"
CASES = enumerate_cases()
ATTENTION = [name for name in OPS if OPS[name].has("attention")]


@dataclass(frozen=True)
class Known:
    """A refusal that is cuDNN's own, and which graphs it meets."""

    reason: str
    meets: Callable[[GraphSpec], bool]


def _nodes(spec: GraphSpec, *ops: str) -> list[Node]:
    return [node for node in spec.nodes if node.op in ops]


def _anchors(spec: GraphSpec) -> list[Node]:
    return [node for node in spec.nodes if not OPS[node.op].pointwise]


def _pointwise(spec: GraphSpec) -> bool:
    return not _anchors(spec)


def _dtype(spec: GraphSpec, node: Node) -> torch.dtype:
    return spec.tensors[node.operands[0]].dtype


def _expanded(spec: GraphSpec) -> bool:
    tensors = [spec.tensors[name] for name in spec.inputs]
    return any(s == 0 and n > 1 for t in tensors for n, s in zip(t.shape, t.stride, strict=True))


NORMS = ("layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward")


def _sdpa(test: Callable[[GraphSpec, Node], bool], *ops: str) -> Callable[[GraphSpec], bool]:
    pair = ("sdpa", "sdpa_backward")
    return lambda spec: any(test(spec, node) for node in _nodes(spec, *(ops or pair)))


def _at(spec: GraphSpec, node: Node, port: str) -> TensorSpec | None:
    """The operand at ``port``."""
    name = node.inputs[OPS[node.op].ports.index(port)]
    return None if name is None else spec.tensors[name]


def _long_bottom_right(spec: GraphSpec, node: Node) -> bool:
    q, k = _at(spec, node, "q"), _at(spec, node, "k")
    assert q is not None and k is not None
    return node.attr("diagonal_alignment") == "bottom_right" and q.shape[2] > k.shape[2]


def _odd_head(spec: GraphSpec, node: Node) -> bool:
    data = [_at(spec, node, port) for port in "qkv"]
    return any(tensor is not None and tensor.shape[3] % 8 for tensor in data)


def _masked(*dtypes: torch.dtype) -> Callable[[GraphSpec, Node], bool]:
    def test(spec: GraphSpec, node: Node) -> bool:
        mask = _at(spec, node, "attn_mask")
        return mask is not None and mask.dtype in dtypes

    return test


def _one_row_for_all(spec: GraphSpec, node: Node) -> bool:
    """Whether an attention mask has one row for all rows of q."""
    mask, q = _at(spec, node, "attn_mask"), _at(spec, node, "q")
    assert q is not None
    return mask is not None and (1, *mask.shape)[-2] == 1 < q.shape[2]


def _between(spec: GraphSpec, node: Node) -> bool:
    """Whether the dims of a reduction are neither the slowest in memory nor the fastest."""
    x = spec.tensors[node.operands[0]]
    order = [d for d in memory_order(x.shape, x.stride) if x.shape[d] > 1]
    reduced = [d in node.attr("dims") for d in order]
    return sorted(reduced) != reduced and sorted(reduced, reverse=True) != reduced


def _narrow_norm(spec: GraphSpec) -> bool:
    nodes = _nodes(spec, "batch_norm_train", "batch_norm_backward")
    return any(
        tensor is not None and tensor.dtype != torch.float32
        for node in nodes
        for tensor in (
            _at(spec, node, port) for port in OPS[node.op].ports if port not in ("x", "dy")
        )
    )


def _computes_a_column(spec: GraphSpec) -> bool:
    """Whether a batch norm works on channels that are not the fastest dim."""
    tensors = [spec.tensors[str(node.inputs[0])] for node in _nodes(spec, "batch_norm")]
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


def _lies_last(tensor: TensorSpec) -> bool:
    return same_layout(tensor.shape, tensor.stride, channels_last_strides(tensor.shape))


def _product(test: Callable[[GraphSpec, Node], bool]) -> Callable[[GraphSpec], bool]:
    return lambda spec: any(test(spec, node) for node in _nodes(spec, "matmul"))


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
        for node in _nodes(spec, *NORMS):
            x, weight = _at(spec, node, "x"), _at(spec, node, "weight")
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
        _sdpa(lambda spec, node: _at(spec, node, "dropout_mask") is not None, "sdpa_backward"),
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
        _product(lambda spec, node: _dtype(spec, node) == torch.float32),
    ),
    Known("matrix products take one batch dim", _product(_batches_apart)),
    Known(
        "cuDNN's norms have no groups of channels",
        lambda spec: bool(_nodes(spec, "group_affine")),
    ),
    Known(
        "torch's flash attention is faster where nothing is promised of other sequences",
        lambda spec: any(prefers_flash(node, spec.tensors) for node in spec.nodes),
    ),
    Known(
        "products sum up squares of 16-bit rows alone",
        lambda spec: any(_dtype(spec, node) == torch.float32 for node in _nodes(spec, "normalize")),
    ),
    Known(
        "what moves elements and computes nothing is left to torch",
        lambda spec: bool(_nodes(spec, "reshape", "transpose", "permute", "slice", "concat")),
    ),
    Known("an op of torch runs by torch", lambda spec: bool(_nodes(spec, "aten"))),
    Known(
        "cuDNN's Python frontend has no resampling",
        lambda spec: bool(_nodes(spec, *pooling.RULES)),
    ),
    Known(
        "cuDNN's Python frontend has softmax in attention alone",
        lambda spec: any(node.op.startswith(("softmax", "log_soft", "nll")) for node in spec.nodes),
    ),
    Known(
        "an instance norm takes images of one layout, without gaps",
        lambda spec: any(
            not is_dense(spec.tensors[name].shape, spec.tensors[name].stride)
            for node in _nodes(spec, "instance_norm")
            for name in node.operands[:2]
        ),
    ),
    Known(
        "cuDNN leaves the call's stream in an instance norm's gradient",
        lambda spec: bool(_nodes(spec, "instance_norm_backward")),
    ),
    Known("norms take rows that lie one behind the other", _norm(_rows_apart)),
    Known(
        "cuDNN has no transposed convolution of int8",
        lambda spec: any(_dtype(spec, node) == I8 for node in _nodes(spec, "conv_transpose")),
    ),
    Known(
        "8-bit convolutions read and write channels_last",
        lambda spec: any(
            _dtype(spec, node) in (I8, *FP8) and not _lies_last(spec.tensors[name])
            for node in _nodes(spec, "conv")
            for name in (*node.operands, *node.results)
        ),
    ),
    Known(
        "a transposed convolution in FP8 takes a weight with its first dim fastest",
        lambda spec: any(
            _dtype(spec, node) in FP8 and spec.tensors[node.operands[1]].stride[0] != 1
            for node in _nodes(spec, "conv_transpose")
        ),
    ),
    Known(
        "8-bit convolutions take groups of 4, 8... channels",
        lambda spec: any(
            _dtype(spec, node) in (I8, *FP8)
            and node.attr("groups") > 1
            and spec.tensors[node.operands[1]].shape[1] % 4
            for node in _nodes(spec, "conv")
        ),
    ),
    Known(
        "FP8 attention takes head dims that are multiples of 16",
        _sdpa(
            lambda spec, node: any(spec.tensors[name].shape[3] % 16 for name in node.operands[:3]),
            "sdpa_fp8",
        ),
    ),
    Known(
        "FP8 attention takes more than one row",
        _sdpa(lambda spec, node: spec.tensors[node.operands[0]].shape[2] == 1, "sdpa_fp8"),
    ),
    Known(
        "FP8 attention has the bottom-right diagonal from Blackwell on",
        _sdpa(lambda spec, node: node.attr("diagonal_alignment") == "bottom_right", "sdpa_fp8"),
    ),
    Known(
        "FP8 attention has engines alone that let NaN out of the padding behind lengths",
        _sdpa(lambda spec, node: _at(spec, node, "seq_len_kv") is not None, "sdpa_fp8"),
    ),
    Known(
        "attention takes 16-bit data only",
        _sdpa(lambda spec, node: _dtype(spec, node) == torch.float32, *ATTENTION),
    ),
    Known(
        "where packed sequences start is told in whole numbers, which torch makes",
        lambda spec: bool(_nodes(spec, "ragged_offsets")),
    ),
    Known(
        "the gradient of a float32 mask beside 16-bit data",
        _sdpa(
            lambda spec, node: node.attr("mask_grad") and _masked(torch.float32)(spec, node),
            "sdpa_backward",
        ),
    ),
    Known(
        "attention's gradient takes additive masks, and nothing converts a boolean one yet",
        _sdpa(_masked(torch.bool), "sdpa_backward"),
    ),
    Known(
        "attention's gradient lets NaN out of the padding that lengths leave",
        _sdpa(
            lambda spec, node: any(_at(spec, node, f"seq_len_{of}") for of in ("q", "kv")),
            "sdpa_backward",
        ),
    ),
    Known(
        "attention's gradient comes out wrong under a mask that is broadcast over rows",
        _sdpa(_one_row_for_all, "sdpa_backward"),
    ),
    Known(
        "the gradient of gelu_tanh is too far off for float32",
        lambda spec: any(
            {spec.tensors[name].dtype for name in (*node.operands, *node.results)}
            == {torch.float32}
            for node in _nodes(spec, "gelu_tanh_backward")
        ),
    ),
    Known(
        "a strided transposed convolution of 16-bit data is not written in float32",
        lambda spec: any(
            _dtype(spec, node) in (torch.float16, torch.bfloat16)
            and spec.tensors[node.results[0]].dtype == torch.float32
            and max(node.attr("stride")) > 1
            for node in _nodes(spec, "conv_transpose")
        ),
    ),
    Known(
        "cuDNN reduces to float32",
        lambda spec: any(
            spec.tensors[node.results[0]].dtype != torch.float32
            for node in _nodes(spec, "reduction")
        ),
    ),
    Known(
        "cuDNN reduces the rows or the columns of a matrix, not dims between others",
        lambda spec: any(_between(spec, node) for node in _nodes(spec, "reduction")),
    ),
    Known(
        "cuDNN repeats a tensor only beside one of the full shape",
        lambda spec: {node.op for node in spec.nodes} <= {"expand", "constant"},
    ),
    Known("batch norm in training takes parameters in float32", _narrow_norm),
    Known("attention takes head dims that are multiples of 8", _sdpa(_odd_head)),
    Known(
        "a pointwise graph broadcasts over three dims at most",
        lambda spec: (
            _pointwise(spec)
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
        _sdpa(
            lambda spec, node: (
                node.attr("dropout_p") > 0 and node.attr("diagonal_alignment") == "bottom_right"
            )
        ),
    ),
    Known(
        "attention takes no sink where S_q is 1",
        _sdpa(
            lambda spec, node: (
                _at(spec, node, "sink") is not None and spec.tensors[node.operands[0]].shape[2] == 1
            ),
            "sdpa",
        ),
    ),
    Known(
        "cuDNN's own ALiBi slopes are for the causal band from the top left",
        _sdpa(
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
        _sdpa(
            lambda spec, node: (
                node.attr("softcap") is not None and _at(spec, node, "seq_len_kv") is not None
            ),
            "sdpa",
        ),
    ),
    Known(
        "attention has no gradient of a mask beside a soft cap",
        _sdpa(
            lambda spec, node: node.attr("mask_grad") and node.attr("softcap") is not None,
            "sdpa_backward",
        ),
    ),
    Known("attention along the bottom-right diagonal takes S_q <= S_kv", _sdpa(_long_bottom_right)),
    Known(
        "over an expanded batch there is no convolution in true float32",
        lambda spec: any(
            _dtype(spec, node) == torch.float32 and _expanded(spec) for node in _nodes(spec, "conv")
        ),
    ),
    Known(
        "a pointwise graph reads and writes in one order of memory",
        lambda spec: _pointwise(spec) and len(_memory_orders(spec)) > 1,
    ),
    Known(
        "a pointwise graph takes no tensors with gaps",
        lambda spec: (
            _pointwise(spec)
            and any(
                not is_dense(tensor.shape, tensor.stride)
                for tensor in (spec.tensors[name] for name in (*spec.inputs, *spec.outputs))
            )
        ),
    ),
    Known(
        "a computed column comes out wrong (cuDNN 9.19)",
        lambda spec: _pointwise(spec) and _computes_a_column(spec),
    ),
    Known(
        "a vector broadcast over dims on both sides of it comes out wrong (cuDNN 9.19)",
        lambda spec: any(_in_the_middle(spec, node) for node in spec.nodes if _pointwise(spec)),
    ),
)


def _channels_last(spec: GraphSpec) -> bool:
    """Whether x, the weight, the result and what is as large as it lie channels_last."""
    names = {name for node in _anchors(spec) for name in node.operands[:2]} | set(spec.outputs)
    names |= {name for name in spec.inputs if len(spec.tensors[name].shape) >= 3}
    tensors = [spec.tensors[name] for name in names]
    return all(map(_lies_last, tensors))


def _changes_a_residual(spec: GraphSpec) -> bool:
    """Whether a product of inputs and numbers alone is as large as the convolution's result."""
    made = {name for node in spec.nodes if node.op != "constant" for name in node.results}
    return any(
        spec.tensors[node.results[0]].shape == spec.tensors[result].shape
        for result in (conv.results[0] for conv in _nodes(spec, "conv"))
        for node in spec.nodes
        if OPS[node.op].pointwise and not made & set(node.operands)
    )


def _broadcasts_within_rows(spec: GraphSpec) -> bool:
    """Whether beside a norm something is 1 in some of the dims before the weight's, not in all."""
    for node in _nodes(spec, "layer_norm", "rms_norm"):
        x, weight = (spec.tensors[name] for name in node.operands[:2])
        full = x.shape[: len(x.shape) - len(weight.shape)]
        given = [spec.tensors[name].shape for name in spec.inputs]
        rows = {shape[: len(full)] for shape in given if len(shape) == len(x.shape)}
        if rows - {full, (1,) * len(full)}:
            return True
    return False


def _depthwise(spec: GraphSpec) -> bool:
    """Whether a convolution has a group for each of its input's channels."""
    return any(
        node.attr("groups") == spec.tensors[node.operands[0]].shape[1] > 1
        for node in _nodes(spec, "conv", "conv_transpose")
    )


def _taps_overlap(spec: GraphSpec) -> bool:
    """Whether a strided transposed convolution adds several products to one element."""
    return any(
        kernel > step > 1
        for node in _nodes(spec, "conv_transpose")
        for kernel, step in zip(
            spec.tensors[node.operands[1]].shape[2:], node.attr("stride"), strict=True
        )
    )


def _operand(test: Callable[[GraphSpec, Node], bool]) -> Callable[[GraphSpec], bool]:
    """Whether ``test`` holds for a pointwise op."""
    return lambda spec: any(OPS[node.op].pointwise and test(spec, node) for node in spec.nodes)


_takes_one_twice = _operand(lambda spec, node: len(set(node.operands)) < len(node.operands))
_broadcasts = _operand(
    lambda spec, node: any(
        1 < spec.tensors[name].numel < spec.tensors[node.results[0]].numel for name in node.operands
    )
)


def _comes_second(spec: GraphSpec, node: Node) -> bool:
    """Whether an op takes a norm's result as its second operand, behind one of its size."""
    if not node.operands:
        return False
    first, *others = node.operands
    made = {name for norm in _nodes(spec, "layer_norm", "rms_norm") for name in norm.results}
    full = spec.tensors[first].numel == spec.tensors[node.results[0]].numel
    exchanged = node.op in ("add", "mul", "minimum", "maximum") and first in spec.inputs
    return bool(made & set(others)) and full and not exchanged


CUT = (
    Known(
        "behind a norm cuDNN crashes in an op that takes one tensor twice",
        lambda spec: bool(_nodes(spec, "layer_norm", "rms_norm")) and _takes_one_twice(spec),
    ),
    Known(
        "behind a norm cuDNN crashes in an op that takes its result second",
        _operand(_comes_second),
    ),
    Known(
        "behind a batch norm cuDNN reads what broadcasts as if it were of the images' shape",
        lambda spec: bool(_nodes(spec, "batch_norm_train")) and _broadcasts(spec),
    ),
    Known(
        "a gradient of weights shares a plan with no vector along its input channels",
        lambda spec: bool(_nodes(spec, "conv_wgrad")) and _broadcasts(spec),
    ),
    Known("an epilogue makes a depthwise convolution many times slower", _depthwise),
    Known("an epilogue slows a strided transposed convolution", _taps_overlap),
    Known(
        "16-bit products fuse with nothing before them",
        _product(lambda spec, node: not set(node.operands) <= set(spec.inputs)),
    ),
    Known(
        "the gradients of norms fuse with nothing",
        lambda spec: bool(_nodes(spec, "layer_norm_backward", "rms_norm_backward")),
    ),
    Known(
        "a relu's backward shares a plan with a batch norm's in 16 bits alone",
        lambda spec: any(
            spec.tensors[node.operands[1]].dtype == torch.float32
            for node in _nodes(spec, "batch_norm_backward")
            if _nodes(spec, "relu_backward")
        ),
    ),
    Known(
        "cuDNN reduces to float32, and what rounds it to 16 bits is a second plan",
        lambda spec: any(
            spec.tensors[node.results[0]].dtype in (torch.float16, torch.bfloat16)
            for node in _nodes(spec, "reduction")
        ),
    ),
    Known(
        "an instance norm fuses with a relu behind it alone",
        lambda spec: (
            bool(_nodes(spec, "instance_norm"))
            and {node.op for node in spec.nodes} != {"instance_norm", "relu"}
        ),
    ),
    Known("norms fuse with what broadcasts over all rows or none", _broadcasts_within_rows),
    Known(
        "in true float32 a residual that is changed before it is added comes out wrong (engine 8)",
        lambda spec: (
            _changes_a_residual(spec)
            and any(_dtype(spec, node) == torch.float32 for node in _nodes(spec, "conv"))
        ),
    ),
    Known("cuDNN fuses around one anchor", lambda spec: len(_anchors(spec)) > 1),
    Known(
        "attention takes additive masks, boolean ones are converted first",
        _sdpa(_masked(torch.bool), "sdpa"),
    ),
    Known(
        "attention takes dropout masks of numbers, boolean ones are converted first",
        _sdpa(lambda spec, node: _at(spec, node, "dropout_mask") is not None, "sdpa"),
    ),
    Known(
        "attention's gradient reads its operands from memory",
        lambda spec: bool(_nodes(spec, "sdpa_backward")),
    ),
    Known(
        "fusion wants channels_last",
        lambda spec: bool(_nodes(spec, "conv", "conv_transpose")) and not _channels_last(spec),
    ),
    Known(
        "fusion around a strided dgrad takes two spatial dims",
        lambda spec: any(
            len(node.attr("stride")) == 3 and max(node.attr("stride")) > 1
            for node in _nodes(spec, "conv_transpose")
        ),
    ),
)


# -- what the frontend was told ----------------------------------------------------------------


def _in_memory(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """(stride, extent) from slowest to fastest, merged where dims are dense, repeats left out."""
    merged: list[tuple[int, int]] = []
    for step, extent in sorted(
        ((s, n) for n, s in zip(shape, stride, strict=True) if n > 1 and s > 0), reverse=True
    ):
        if merged and merged[-1][0] == step * extent:
            merged[-1] = (step, merged[-1][1] * extent)
        else:
            merged.append((step, extent))
    return merged


def _real(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(shape, stride, strict=True) if n > 1]


def _merges_dims(spec: GraphSpec) -> bool:
    """Whether the dims that cuDNN sees are others: pointwise ops, products, norms, reductions."""
    merging = ("matmul", "normalize", *NORMS, "reduction")
    return all(node.op in merging for node in _anchors(spec))


def check_explicit(spec: GraphSpec, lowered: Lowered) -> None:
    """Nothing was left to inference, and inputs and outputs lie where the spec says."""
    for node in lowered.graph.nodes:
        for port, tensor in node.outputs.items():
            if tensor is not None:
                assert tensor.dim_assigned, f"{node.name}.{port} was given no dims"
                assert tensor.stride_assigned, f"{node.name}.{port} was given no strides"
                assert tensor.data_type is not None, f"{node.name}.{port} was given no dtype"
    names = (*spec.inputs, *spec.outputs)
    packed = {
        name
        for node in _nodes(spec, "sdpa_varlen", "sdpa_varlen_backward")
        for name in (*node.operands, *node.results)
    }
    for uid, name in zip(lowered.uids, names, strict=True):
        if name in packed:  # see test_packed_tokens_are_shown_as_sequences
            continue
        want, told = spec.tensors[name], lowered.graph.find_tensor(uid)
        assert _in_memory(told.dim, told.stride) == _in_memory(want.shape, want.stride), name
        if not _merges_dims(spec):
            assert _real(told.dim, told.stride) == _real(want.shape, want.stride), name


_ANSWERS: dict[Key, tuple[list[Candidate], tuple[Listed, ...]]] = {}


def _key(spec: GraphSpec, policy: Policy) -> Key | None:
    """The key of a graph, None for one that has none: of a mask converted to -inf."""
    try:
        return graph_key(spec, policy)
    except cg.UnkeyableError:
        return None


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GraphSpec, Lowered]]:
    """Every graph that `explain` lowers, with the frontend's graph of it.

    All are lowered. cuDNN ranks the plans of graphs that are equal but for names once a process:
    many cases are cut into the same steps, and its rankings take most of the time.
    """
    seen: list[tuple[GraphSpec, Lowered]] = []

    def proposing(spec: GraphSpec, target: str) -> tuple[Lowered, list[Candidate]]:
        lowered, key = lower_for(spec, target), _key(spec, Policy(allow_tf32=False))
        known = _ANSWERS.get(key) if key else None
        candidates = known[0] if known else propose(lowered, env.frontend())
        seen.append((spec, lowered))
        return lowered, candidates

    def listing(
        lowered: Lowered, found: list[Candidate], spec: GraphSpec, policy: Policy, *rest: Any
    ) -> tuple[Listed, ...]:
        key = _key(spec, policy)
        known = _ANSWERS.get(key) if key else None
        listed = known[1] if known else examine(lowered, found, spec, policy, *rest)
        if key:
            _ANSWERS[key] = found, listed
        return listed

    offline = sys.modules["cudnngraph.explain.offline"]
    monkeypatch.setattr(offline, "propose_for", proposing)
    monkeypatch.setattr(offline, "examine", listing)
    return seen


# -- the tests ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cudnn_has_a_plan_for_every_step(
    case: Case,
    lowerings: list[tuple[GraphSpec, Lowered]],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    outcome = check_planned(case.build().spec(), lowerings, record_property)
    check_covered(case, "forward", outcome, request, record_property)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("case", [case for case in CASES if differentiable(case)], ids=str)
def test_cudnn_has_a_plan_for_every_step_of_the_gradient(
    case: Case,
    lowerings: list[tuple[GraphSpec, Lowered]],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    spec = case.build().spec()
    gradient = cg.differentiate(spec, floating_inputs(spec))
    outcome = check_planned(gradient.backward, lowerings, record_property)
    check_covered(case, "gradient", outcome, request, record_property)


def check_planned(
    graph: GraphSpec,
    lowerings: list[tuple[GraphSpec, Lowered]],
    record_property: Callable[[str, object], None],
) -> str:
    """Every step has a plan, or is refused for a reason that is listed; so for the cut.

    What the graph runs as, by the words of :mod:`tests.coverage`.
    """
    found = cg.explain(graph, TARGET, allow_tf32=False)
    for spec, lowered in lowerings:
        check_explicit(spec, lowered)
    used: list[str] = []
    for step in found.steps:
        if step.runs_on == "cuDNN":
            assert step.plans
            assert step.first is not None
            continue
        known = [row.reason for row in TORCH if row.meets(step.spec)]
        assert known, f"refused for a reason that is in no row of TORCH\n{found}"
        used += known
    if not found.whole and not used:
        used = [row.reason for row in CUT if row.meets(found.spec)]
        assert used, f"cut for a reason that is in no row of CUT\n{found}"
    record_property("known refusals", used)
    return runs_as(found)


def runs_as(found: cg.Explanation) -> str:
    """Of what kind the steps are; views between them run nothing and do not count."""
    planned = [step.runs_on == "cuDNN" for step in found.steps]
    laid = [StepMemory(step.spec, plan, 0) for step, plan in zip(found.steps, planned, strict=True)]
    free = Layout(laid, {*found.spec.inputs, *found.spec.outputs}).free
    kinds = Counter(plan for number, plan in enumerate(planned) if number not in free)
    if kinds[False]:
        return "both" if kinds[True] else "torch"
    return "plan" if kinds[True] == 1 else "steps"


def check_covered(
    case: Case,
    of: str,
    outcome: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """The table in the README says of a case what cuDNN does; it stands for one version of it."""
    record_property("planned", (case.id, of, outcome))
    known = coverage.read()
    if request.config.getoption("--write-coverage") or env.cudnn_version() != known["cudnn"]:
        return
    if coverage.counted(case):
        assert known[of].get(case.id) == outcome, coverage.HOW_TO_WRITE


@lru_cache
def _sample_specs() -> tuple[GraphSpec, ...]:
    """The sample graphs that cuDNN may take, those of 16-bit data first."""
    cases = [case for case in CASES if case.dtype != torch.float64]
    cases.sort(key=lambda case: case.dtype not in (torch.float16, torch.bfloat16))
    return tuple(case.build().spec() for case in cases)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("op", RULES)
def test_cudnn_takes_every_op_that_is_not_refused_by_name(op: str) -> None:
    """Each rule of lowering gives at least one sample a plan, or none, and is known for that."""
    taken = (
        step
        for spec in _sample_specs()
        if _nodes(spec, op)
        for step in cg.explain(spec, TARGET, allow_tf32=False).steps
        if step.runs_on == "cuDNN" and _nodes(step.spec, op)
    )
    assert (next(taken, None) is None) == (RULES[op] in REFUSALS)


def _conv_graph(dtype: torch.dtype, *, fused: bool = False) -> cg.Graph:
    g = cg.Graph("conv")
    x = g.input("x", (32, 64, 56, 56), dtype, layout="channels_last")
    w = g.input("w", (64, 64, 3, 3), dtype, layout="channels_last")
    y = g.conv(x, w, padding=1)
    g.output("y", g.silu(g.bias(y, g.input("b", (64,), dtype))) if fused else y)
    return g


def _attention_graph() -> cg.Graph:
    g = cg.Graph("attention")
    q, k, v = (g.input(name, (4, 16, 512, 128), torch.bfloat16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, is_causal=True))
    return g


def _check_plans(graph: cg.Graph, at_least: int, *, runtime_compiled: bool) -> None:
    found = cg.explain(graph, TARGET, allow_tf32=True)
    assert found.whole
    plans = found.steps[0].plans
    assert len(plans) >= at_least
    assert [plan.rank for plan in plans] == list(range(1, len(plans) + 1))
    assert len({plan.choice for plan in plans}) == len(plans)
    for plan in plans:
        assert isinstance(plan.engine, int) and 0 <= plan.engine < 10_000
        assert all(isinstance(n, str) and isinstance(v, int) for n, v in plan.knobs)
        assert isinstance(plan.workspace_bytes, int) and plan.workspace_bytes >= 0
        assert plan.allowed
    assert plans[0].runtime_compiled is runtime_compiled


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_bare_convolution_has_many_precompiled_plans(dtype: torch.dtype) -> None:
    _check_plans(_conv_graph(dtype), 20, runtime_compiled=False)


@pytest.mark.usefixtures("driver")
def test_a_fused_convolution_has_runtime_compiled_plans() -> None:
    _check_plans(_conv_graph(torch.float16, fused=True), 3, runtime_compiled=True)


@pytest.mark.usefixtures("driver")
def test_attention_has_runtime_compiled_plans() -> None:
    _check_plans(_attention_graph(), 2, runtime_compiled=True)


@pytest.mark.usefixtures("driver")
def test_the_epsilon_of_a_norm_lies_on_the_host_and_a_missing_bias_is_zeros() -> None:
    g = cg.Graph("norm")
    x, w = g.input("x", (4, 24, 64), torch.float16), g.input("w", (64,), torch.float16)
    g.output("y", g.layer_norm(x, w, eps=0.25))
    lowered, candidates = propose_for(g.spec(), TARGET)
    zeros, eps = lowered.extras
    assert zeros == Constant(4, 64, 0.0, torch.float16)
    assert eps == Constant(5, 1, 0.25, torch.float32, on_host=True)
    assert lowered.graph.find_tensor(eps.uid).is_pass_by_value
    assert not lowered.graph.find_tensor(zeros.uid).is_pass_by_value
    assert candidates


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("taken", [(), ("mean",), ("inv_std",), ("mean", "inv_std")], ids=str)
def test_a_plan_of_a_norm_hands_out_all_of_its_statistics_or_none(taken: tuple[str, ...]) -> None:
    g = cg.Graph("norm")
    x, w = g.input("x", (4, 24, 64), torch.float16), g.input("w", (64,), torch.float16)
    y, mean, inv_std = g.layer_norm(x, w, return_stats=True)
    g.output("y", y)
    for name in taken:
        g.output(name, {"mean": mean, "inv_std": inv_std}[name])
    (step,) = cg.explain(g, TARGET).steps
    assert step.runs_on == ("torch" if len(taken) == 1 else "cuDNN")
    assert len(taken) != 1 or step.refusals[0].reason.startswith("layer_norm hands out all")


def test_two_products_share_no_plan() -> None:
    g = cg.Graph("two")
    x, w = g.input("x", (64, 64), torch.float16), g.input("w", (64, 64), torch.float16)
    g.output("y", (x @ w) @ w)
    with pytest.raises(cg.NotSupported) as caught:
        propose_for(g.spec(), TARGET)
    assert caught.value.reasons == ("matmul shares a plan with pointwise ops alone",)


@pytest.mark.parametrize("head", [{}, {"lowering": versions.LOWERING - 1}])
def test_a_serialized_plan_of_a_graph_lowered_by_other_rules_is_not_loaded(
    head: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is replayed: what is refused since, or lowered otherwise, was wrong."""
    asked = "cudnngraph.backend.plan.refuse_during_capture"  # the GPU
    monkeypatch.setattr(asked, lambda: None)
    blob = json.dumps({"choice": "engine 4", "uids": 2, **head}).encode() + b"\nplan"
    with pytest.raises(cg.NotSupported, match="lowered by other rules") as caught:
        load(blob, Choice(4, ()), 0)
    assert caught.value.reasons == ("its graph was lowered by other rules than this program's",)


@pytest.mark.usefixtures("driver")
def test_a_clamp_is_a_clipped_relu_which_keeps_nan() -> None:
    def told(low: float | None, high: float | None) -> list[str]:
        g = cg.Graph("clamp")
        g.output("y", g.clamp(g.input("x", (64, 64), torch.float16), low, high))
        lowered, _ = propose_for(g.spec(), TARGET)
        return [node.params["mode"] for node in lowered.graph.nodes]

    assert told(0.0, None) == told(0.0, 6.0) == told(0.5, None) == ["relu"]
    assert told(None, 0.5) == ["min"]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("slope", "modes"), [(0.2, ["leaky_relu"]), (2.0, ["mul", "min"])])
def test_a_leaky_relu_steeper_than_1_is_the_smaller_of_x_and_its_multiple(
    slope: float, modes: list[str]
) -> None:
    """cuDNN's engines take the larger of the two, whatever the slope (9.19)."""
    g = cg.Graph("leaky")
    g.output("y", g.leaky_relu(g.input("x", (64, 64), torch.float16), slope))
    lowered, _ = propose_for(g.spec(), TARGET)
    assert [node.params["mode"] for node in lowered.graph.nodes] == modes


BEHIND_ROWS: dict[str, tuple[Callable[..., cg.Value], str]] = {
    "squared": (lambda g, y, z: y * y + z, "mul of a tensor and itself"),
    "doubled": (lambda g, y, z: y + y - z, "add of a tensor and itself"),
    "z - y": (lambda g, y, z: z - y, "sub with the norm's result second"),
    "relu'": (lambda g, y, z: g.relu_backward(y, z), "relu_backward beside a norm"),
    "2 y + z": (lambda g, y, z: y * 2.0 + z, ""),
    "z * y": (lambda g, y, z: z * y, ""),
    "y - z": (lambda g, y, z: y - z, ""),
}


def behind_rows(norm: str, name: str, width: int, dtype: torch.dtype) -> cg.GraphSpec:
    g = cg.Graph("norm")
    x, z = g.input("x", (96, width), dtype), g.input("z", (96, width), dtype)
    w = g.input("w", (width,), dtype)
    y = g.rms_norm(x, w) if norm == "rms_norm" else g.layer_norm(x, w, w)
    g.output("y", BEHIND_ROWS[name][0](g, y, z))
    return g.spec()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("name", BEHIND_ROWS)
def test_ops_in_which_cudnn_crashes_share_no_plan_with_a_norm_of_rows(norm: str, name: str) -> None:
    """Engine 5 leaves its memory in the first three; in float32 its build crashes in the fourth."""
    why = BEHIND_ROWS[name][1]
    spec = behind_rows(norm, name, 256, torch.float32 if name == "relu'" else torch.float16)
    if not why:
        assert propose_for(spec, TARGET)[1]
        return
    with pytest.raises(cg.NotSupported) as caught:
        propose_for(spec, TARGET)
    assert caught.value.reasons[0].startswith(why)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", ["squared", "z - y", "z * y"])
def test_a_norm_by_a_product_takes_its_result_second_and_twice(name: str) -> None:
    """Its engine gets it right, as behind `normalize`."""
    _, candidates = propose_for(behind_rows("rms_norm", name, 64, torch.float16), TARGET)
    assert {candidate.choice.engine for candidate in candidates} == {7}


@pytest.mark.usefixtures("driver")
def test_what_broadcasts_or_lies_otherwise_shares_no_plan_with_a_batch_norm() -> None:
    def behind(shape: tuple[int, ...], layout: str = "channels_last") -> cg.GraphSpec:
        g = cg.Graph("norm")
        x = g.input("x", (4, 64, 8, 8), torch.float16, layout="channels_last")
        v = g.input("v", shape, torch.float16, layout=layout)
        w, b = (g.input(name, (64,), torch.float32) for name in "wb")
        g.output("y", g.relu(g.batch_norm_train(x, w, b)[0] + v))
        return g.spec()

    assert propose_for(behind((4, 64, 8, 8)), TARGET)[1]
    with pytest.raises(cg.NotSupported, match="what broadcasts behind a batch norm"):
        propose_for(behind((1, 64, 1, 1)), TARGET)
    with pytest.raises(cg.NotSupported, match="what lies otherwise than the images"):
        propose_for(behind((4, 64, 8, 8), "contiguous"), TARGET)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("op", ["add", "mul", "minimum", "maximum"])
def test_what_is_computed_is_the_first_operand_where_they_may_be_exchanged(op: str) -> None:
    """In both orders the frontend is told the same."""

    def seen(second: bool) -> list[str]:
        g = cg.Graph("order")
        x, w = g.input("x", (96, 64), torch.float16), g.input("w", (64, 128), torch.float16)
        z = g.input("z", (96, 128), torch.float16)
        y = g.matmul(x, w)
        g.output("y", getattr(g, op)(*((z, y) if second else (y, z))))
        lowered, _ = propose_for(g.spec(), TARGET)
        last = lowered.graph.nodes[-1]
        return [tensor.name for tensor in last.inputs.values()]

    first, *others = seen(False)
    assert first != "z" and others == ["z"]
    assert seen(True)[1:] == ["z"]


def _seen(g: cg.Graph) -> list[tuple[list[int], list[int]]]:
    """What the frontend is told of the inputs and outputs."""
    lowered, _ = propose_for(g.spec(), TARGET)
    told = [lowered.graph.find_tensor(uid) for uid in lowered.uids]
    return [(list(tensor.dim), list(tensor.stride)) for tensor in told]


@pytest.mark.usefixtures("driver")
def test_the_rows_of_a_sequence_fold_where_nothing_keeps_them_apart() -> None:
    def product(stride: tuple[int, ...], *, positions: bool = False) -> cg.Graph:
        g = cg.Graph("product")
        x = g.input("x", (4, 24, 64), torch.float16, stride=stride)
        z = x @ g.input("w", (64, 40), torch.float16, stride=(1, 64))
        g.output("z", z + g.input("p", (24, 40), torch.float16) if positions else z)
        return g

    weight = ([1, 64, 40], [2560, 1, 64])
    folded = ([1, 96, 64], [6144, 64, 1]), weight, ([1, 96, 40], [3840, 40, 1])
    assert _seen(product((1536, 64, 1))) == [*folded]
    apart = ([4, 24, 64], [3072, 64, 1]), weight, ([4, 24, 40], [960, 40, 1])
    assert _seen(product((3072, 64, 1))) == [*apart]
    x, w, p, z = _seen(product((1536, 64, 1), positions=True))
    assert (x, w, p) == (([4, 24, 64], [1536, 64, 1]), weight, ([1, 24, 40], [960, 40, 1]))
    assert z == ([4, 24, 40], [960, 40, 1])


@pytest.mark.usefixtures("driver")
def test_a_norm_sees_rows_and_columns_in_the_order_of_memory() -> None:
    g = cg.Graph("norm")
    x = g.input("x", (2, 24, 8, 16), torch.float16, stride=(128, 256, 16, 1))  # (S, B, ...)
    w = g.input("w", (8, 16), torch.float16)
    y, inv_std = g.rms_norm(x, w, return_stats=True)
    g.output("y", y)
    g.output("inv_std", inv_std)
    rows, columns = ([48, 128, 1, 1], [128, 1, 1, 1]), ([1, 128, 1, 1], [128, 1, 1, 1])
    assert _seen(g) == [rows, columns, rows, ([48, 1, 1, 1], [1, 1, 1, 1])]


@pytest.mark.usefixtures("driver")
def test_packed_tokens_are_shown_as_sequences_with_offsets_into_one_table() -> None:
    g = cg.Graph("packed")
    q = g.input("q", (107, 8, 64), torch.float16, stride=(3 * 8 * 64, 64, 1))  # of a packed buffer
    k, v = (g.input(name, (150, 2, 64), torch.float16) for name in "kv")
    ends = [g.input(name, (4,), torch.int32) for name in ("cu_q", "cu_kv")]
    o, lse = g.sdpa_varlen(q, k, v, *ends, 64, 80, is_causal=True, return_lse=True)
    g.output("o", o, stride=(8 * 64, 64, 1))
    g.output("lse", lse)
    offsets, attention = cg.explain(g, TARGET).steps
    widths = dict(offsets.spec.nodes[0].attrs)
    assert widths == {"widths_q": (3 * 8 * 64, 8 * 64, 8), "widths_kv": (2 * 64,)}
    lowered, _ = propose_for(attention.spec, TARGET)
    names = (*attention.spec.inputs, *attention.spec.outputs)
    told = {
        name: lowered.graph.find_tensor(uid) for name, uid in zip(names, lowered.uids, strict=True)
    }
    longest = {"q": 64, "o": 64, "lse": 64, "k": 80, "v": 80}
    token = {"q": 3 * 8 * 64, "o": 8 * 64, "lse": 8, "k": 2 * 64, "v": 2 * 64}
    for name, rows in longest.items():
        heads, depth = (2 if name in "kv" else 8), (1 if name == "lse" else 64)
        head = 1 if name == "lse" else 64
        assert list(told[name].dim) == [3, heads, rows, depth], name
        assert list(told[name].stride) == [rows * token[name], head, token[name], 1], name
    (ragged,) = (name for name in names if name not in longest)
    assert list(told[ragged].dim) == [3, 1, 1, 1]
    aliases = [extra for extra in lowered.extras if isinstance(extra, Alias)]
    assert {extra.position for extra in aliases} == {attention.spec.inputs.index(ragged)}
    row_bytes = 16  # four numbers of four bytes
    assert sorted(extra.offset_bytes for extra in aliases) == [row_bytes * n for n in range(1, 6)]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("sliced", ["qkv", "do", "dk", ""])
def test_the_gradient_of_packed_attention_has_its_operands_laid_as_its_results(sliced: str) -> None:
    """Else cuDNN 9.19 reads a misaligned address on an H200, which ends the process."""
    g = cg.Graph("packed")
    shape, wide = (107, 4, 64), (3 * 4 * 64, 64, 1)
    q, k, v = (
        g.input(name, shape, torch.float16, stride=wide if sliced == "qkv" else None)
        for name in "qkv"
    )
    do = g.input("do", shape, torch.float16, stride=wide if sliced == "do" else None)
    o, lse = g.input("o", shape, torch.float16), g.input("lse", (107, 4), torch.float32)
    ends = [g.input(name, (4,), torch.int32) for name in ("cu_q", "cu_kv")]
    grads = g.sdpa_varlen_backward(do, q, k, v, o, lse, *ends, 64, 64)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        g.output(name, grad, stride=wide if sliced == name else None)
    copied = {"qkv": ["q", "k", "v"], "do": ["do"], "dk": ["k"], "": []}[sliced]
    found = cg.explain(g, TARGET)
    copies = [step for step in found.steps if "identity" in step.ops]
    assert [step.spec.inputs for step in copies] == [(name,) for name in copied]
    (last,) = (step for step in found.steps if "sdpa_varlen_backward" in step.ops)
    assert last.runs_on == "cuDNN"
    (node,) = last.spec.nodes
    for port, result in (("q", "dq"), ("k", "dk"), ("v", "dv")):
        name = node.inputs[OPS[node.op].ports.index(port)]
        assert last.spec.tensors[str(name)].stride == last.spec.tensors[result].stride, port
    apart = insert_ragged_offsets(g.spec())
    (place,) = (n for n, node in enumerate(apart.nodes) if node.op == "sdpa_varlen_backward")
    bare = subgraph_of(CutGraph(apart), [apart.nodes[place]])
    if not copied:
        assert propose_for(bare, TARGET)[1]
        return
    with pytest.raises(cg.NotSupported, match=f"{copied[0]} and .* of packed attention's gradient"):
        propose_for(bare, TARGET)


@pytest.mark.usefixtures("driver")
def test_one_page_table_for_keys_and_values_is_passed_twice() -> None:
    g = cg.Graph("paged")
    q = g.input("q", (2, 8, 1, 64), torch.float16)
    k, v = (g.input(f"{n}_cache", (12, 2, 16, 64), torch.float16) for n in "kv")
    table, lengths = g.input("table", (2, 4), torch.int32), g.input("lengths", (2,), torch.int32)
    g.output("o", g.sdpa_paged(q, k, v, table, lengths))
    spec = g.spec()
    lowered, _ = propose_for(spec, TARGET)
    told = lowered.graph.find_tensor(lowered.uids[spec.inputs.index("table")])
    assert (list(told.dim), list(told.stride)) == ([2, 1, 4, 1], [4, 4, 1, 1])
    (alias,) = (extra for extra in lowered.extras if isinstance(extra, Alias))
    assert (alias.position, alias.offset_bytes) == (spec.inputs.index("table"), 0)


SEEDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (9, 0)},
    "mask": {"mask": ((2, 4, 64, 64), torch.bfloat16)},
    "float32 mask": {"mask": ((2, 4, 64, 64), torch.float32)},
    "one row for all": {"mask": ((2, 1, 1, 64), torch.bfloat16)},
    "lengths": {"lengths": True},
    "lengths of finite padding": {"lengths": True, "finite_padding": True},
    "bottom right": {"is_causal": True, "diagonal_alignment": "bottom_right"},
    "softcap": {"softcap": 0.7},
    "softcap and mask": {"softcap": 0.7, "mask": ((2, 4, 64, 64), torch.bfloat16)},
    "alibi": {"alibi": True, "is_causal": True},
    "alibi both ways": {"alibi": True},
    "sink": {"sink": True},
}
BY_TORCH = {"float32 mask", "one row for all", "lengths", "bottom right", "alibi both ways"}


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", SEEDED)
def test_an_attention_that_drops_by_a_seed_runs_where_its_gradient_does(name: str) -> None:
    """Or the two would drop different weights: the generators of cuDNN and torch steps differ."""
    options = dict(SEEDED[name])
    g = cg.Graph("attention")
    q, k, v = (g.input(port, (2, 4, 64, 64), torch.bfloat16) for port in "qkv")
    for of in ("seed", "offset"):
        options[f"dropout_{of}"] = g.input(of, (1,), torch.int64)
    if "mask" in options:
        options["attn_mask"] = g.input("mask", *options.pop("mask"))
    if options.pop("lengths", False):
        options["seq_len_kv"] = g.input("lengths", (2,), torch.int32)
    if options.pop("sink", False):
        options["sink"] = g.input("sink", (4,), torch.float32)
    g.output("o", g.sdpa(q, k, v, dropout_p=0.1, **options))
    gradient = cg.differentiate(g, [n for n in g.spec().inputs if n in ("q", "mask", "sink")])
    places = {
        step.runs_on
        for spec in (gradient.forward, gradient.backward)
        for step in cg.explain(spec, TARGET).steps
        if set(step.ops) & set(ATTENTION)
    }
    assert places == {"torch" if name in BY_TORCH | {"softcap and mask"} else "cuDNN"}


@pytest.mark.usefixtures("driver")
def test_the_gradient_of_attention_with_a_dropout_mask_is_refused() -> None:
    """cuDNN 9.19 leaves the row sums of do * o as if nothing had been dropped."""
    g = cg.Graph("attention")
    shape, names = (2, 4, 64, 64), ("q", "k", "v", "do", "o")
    q, k, v, do, o = (g.input(name, shape, torch.float16) for name in names)
    lse = g.input("lse", (2, 4, 64), torch.float32)
    dropped = g.input("dropped", shape, torch.float16)
    grads = g.sdpa_backward(do, q, k, v, o, lse, dropout_p=0.75, dropout_mask=dropped)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=False):
        g.output(name, grad)
    with pytest.raises(cg.NotSupported) as caught:
        propose_for(g.spec(), TARGET)
    assert caught.value.reasons == ("cuDNN's gradient of dropout by a mask is wrong",)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_images_of_one_pixel_are_shown_channels_last(layout: str) -> None:
    """Shown as rows, engines 4 and 7 leave most of the result of conv and relu unwritten (9.19)."""
    g = cg.Graph("pixel")
    x = g.input("x", (4, 32, 1, 1), torch.float16, layout=layout)
    w = g.input("w", (48, 32, 1, 1), torch.float16, layout=layout)
    g.output("y", g.relu(g.conv(x, w)))
    lowered, candidates = propose_for(g.spec(), TARGET)
    shown = [lowered.graph.find_tensor(uid).stride for uid in lowered.uids]
    assert shown == [(32, 1, 32, 32), (32, 1, 32, 32), (48, 1, 48, 48)]
    assert candidates


def test_what_the_frontend_cannot_rank_without_a_package_is_refused_by_its_name() -> None:
    class Graph:
        def create_execution_plans(self, modes: object) -> None:
            raise ModuleNotFoundError("No module named 'cuda'")

    with pytest.raises(cg.NotSupported) as caught:
        propose(Lowered(Graph(), (), ()), env.frontend())
    assert caught.value.reasons == ("the frontend cannot rank it: No module named 'cuda'",)


@pytest.mark.parametrize("first", [True, False])
def test_a_residual_is_found_by_the_same_engines_on_either_side(first: bool, driver: None) -> None:
    """Ready-made engines know convolution + residual, not residual + convolution."""
    g = cg.Graph("block")
    last = {"layout": "channels_last"}
    x = g.input("x", (8, 64, 14, 14), torch.float16, **last)
    z = g.input("z", (8, 64, 14, 14), torch.float16, **last)
    y = g.conv(x, g.input("w", (64, 64, 1, 1), torch.float16, **last))
    y = g.add(y, z) if first else g.add(z, y)
    g.output("y", g.relu(g.bias(y, g.input("b", (64,), torch.float16))))
    (step,) = cg.explain(g).steps
    assert sum(not plan.runtime_compiled for plan in step.plans) > 20


@pytest.mark.parametrize("kind", ["plain", "grouped", "mask", "packed"])
def test_a_deterministic_gradient_of_attention_has_plans_of_its_own(kind: str) -> None:
    """cuDNN adds up dq in no fixed order unless it is told not to, and no note says so."""
    shape = (2, 4, 512, 64)
    g = cg.Graph("attention")
    if kind == "packed":
        q, k, v = (g.input(name, (1024, 4, 64), torch.float16) for name in "qkv")
        ends = g.input("ends", (3,), torch.int32)
        g.output("o", g.sdpa_varlen(q, k, v, ends, ends, 512, 512, is_causal=True))
    else:
        q = g.input("q", shape, torch.float16)
        heads = 2 if kind == "grouped" else 4
        k, v = (g.input(name, (2, heads, 512, 64), torch.float16) for name in "kv")
        mask = g.input("mask", (2, 4, 512, 512), torch.float16) if kind == "mask" else None
        g.output("o", g.sdpa(q, k, v, mask, is_causal=mask is None))
    graph = cg.differentiate(g, wrt=("q", "k", "v")).backward
    needs = []
    for deterministic in (False, True):
        steps = cg.explain(graph, deterministic=deterministic).steps
        (step,) = (step for step in steps if step.ops[-1].startswith("sdpa"))
        assert step.runs_on == "cuDNN", step.refusals
        needs.append({plan.workspace_bytes for plan in step.plans})
    assert needs[0].isdisjoint(needs[1])


def _weight_in_order(order: tuple[int, ...]) -> cg.Graph:
    g = cg.Graph("conv")
    x = g.input("x", (2, 16, 9, 9), torch.float16, layout="channels_last")
    shape, strides, step = (32, 16, 3, 3), [0] * 4, 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    g.output("y", g.conv(x, g.input("w", shape, torch.float16, stride=strides), padding=1))
    return g


@pytest.mark.parametrize("order", [(1, 2, 3, 0), (2, 3, 0, 1), (0, 3, 1, 2), (1, 0, 2, 3)])
def test_a_weight_in_another_order_of_dims_is_refused(order: tuple[int, ...]) -> None:
    """Random graphs on an H200: 13 of 53 with such weights were wrong, of others 3 in 100."""
    with pytest.raises(cg.NotSupported, match=r"the weight 'w' with strides .* engines misread"):
        propose_for(_weight_in_order(order).spec(), TARGET)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_a_weight_in_one_of_the_two_layouts_is_taken(order: tuple[int, ...]) -> None:
    assert propose_for(_weight_in_order(order).spec(), TARGET)[1]


@pytest.mark.parametrize("stride", [(0, 1), (1, 0)])
@pytest.mark.parametrize("operand", ["x", "w"])
def test_a_matrix_that_repeats_a_row_or_a_column_is_refused(
    stride: tuple[int, int], operand: str
) -> None:
    """Random graphs on an H200: 8 of 16 such products were wrong."""
    strides = {"x": (64, 1), "w": (32, 1), operand: stride}
    g = cg.Graph("product")
    x = g.input("x", (33, 64), torch.float16, stride=strides["x"])
    w = g.input("w", (64, 32), torch.float16, stride=strides["w"])
    g.output("y", g.matmul(x, w))
    with pytest.raises(cg.NotSupported, match=f"'{operand}' .* repeats a row or a column"):
        propose_for(g.spec(), TARGET)
