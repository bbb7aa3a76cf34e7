"""Graphs that are cut into steps, with the reason of each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cudnngraph.ir.spec import GraphSpec, Node
from cudnngraph.ops.table import OPS
from tests.refused.predicates import (
    Known,
    anchors_of,
    any_attention,
    any_matmul,
    dtype_of,
    lies_channels_last,
    masked_by,
    nodes_of,
    operand_at,
)


def _channels_last(spec: GraphSpec) -> bool:
    """Whether x, the weight, the result and what is as large as it lie channels_last."""
    names = {name for node in anchors_of(spec) for name in node.operands[:2]} | set(spec.outputs)
    names |= {name for name in spec.inputs if len(spec.tensors[name].shape) >= 3}
    tensors = [spec.tensors[name] for name in names]
    return all(map(lies_channels_last, tensors))


def _changes_a_residual(spec: GraphSpec) -> bool:
    """Whether a product of inputs and numbers alone is as large as the convolution's result."""
    made = {name for node in spec.nodes if node.op != "constant" for name in node.results}
    return any(
        spec.tensors[node.results[0]].shape == spec.tensors[result].shape
        for result in (conv.results[0] for conv in nodes_of(spec, "conv"))
        for node in spec.nodes
        if OPS[node.op].pointwise and not made & set(node.operands)
    )


def _broadcasts_within_rows(spec: GraphSpec) -> bool:
    """Whether beside a norm something is 1 in some of the dims before the weight's, not in all."""
    for node in nodes_of(spec, "layer_norm", "rms_norm"):
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
        for node in nodes_of(spec, "conv", "conv_transpose")
    )


def _taps_overlap(spec: GraphSpec) -> bool:
    """Whether a strided transposed convolution adds several products to one element."""
    return any(
        kernel > step > 1
        for node in nodes_of(spec, "conv_transpose")
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
    made = {name for norm in nodes_of(spec, "layer_norm", "rms_norm") for name in norm.results}
    full = spec.tensors[first].numel == spec.tensors[node.results[0]].numel
    exchanged = node.op in ("add", "mul", "minimum", "maximum") and first in spec.inputs
    return bool(made & set(others)) and full and not exchanged


CUT = (
    Known(
        "behind a norm cuDNN crashes in an op that takes one tensor twice",
        lambda spec: bool(nodes_of(spec, "layer_norm", "rms_norm")) and _takes_one_twice(spec),
    ),
    Known(
        "behind a norm cuDNN crashes in an op that takes its result second",
        _operand(_comes_second),
    ),
    Known(
        "behind a batch norm cuDNN reads what broadcasts as if it were of the images' shape",
        lambda spec: bool(nodes_of(spec, "batch_norm_train")) and _broadcasts(spec),
    ),
    Known(
        "a gradient of weights shares a plan with no vector along its input channels",
        lambda spec: bool(nodes_of(spec, "conv_wgrad")) and _broadcasts(spec),
    ),
    Known("an epilogue makes a depthwise convolution many times slower", _depthwise),
    Known("an epilogue slows a strided transposed convolution", _taps_overlap),
    Known(
        "16-bit products fuse with nothing before them",
        any_matmul(lambda spec, node: not set(node.operands) <= set(spec.inputs)),
    ),
    Known(
        "the gradients of norms fuse with nothing",
        lambda spec: bool(nodes_of(spec, "layer_norm_backward", "rms_norm_backward")),
    ),
    Known(
        "a relu's backward shares a plan with a batch norm's in 16 bits alone",
        lambda spec: any(
            spec.tensors[node.operands[1]].dtype == torch.float32
            for node in nodes_of(spec, "batch_norm_backward")
            if nodes_of(spec, "relu_backward")
        ),
    ),
    Known(
        "cuDNN reduces to float32, and what rounds it to 16 bits is a second plan",
        lambda spec: any(
            spec.tensors[node.results[0]].dtype in (torch.float16, torch.bfloat16)
            for node in nodes_of(spec, "reduction")
        ),
    ),
    Known(
        "an instance norm fuses with a relu behind it alone",
        lambda spec: (
            bool(nodes_of(spec, "instance_norm"))
            and {node.op for node in spec.nodes} != {"instance_norm", "relu"}
        ),
    ),
    Known("norms fuse with what broadcasts over all rows or none", _broadcasts_within_rows),
    Known(
        "in true float32 a residual that is changed before it is added comes out wrong (engine 8)",
        lambda spec: (
            _changes_a_residual(spec)
            and any(dtype_of(spec, node) == torch.float32 for node in nodes_of(spec, "conv"))
        ),
    ),
    Known("cuDNN fuses around one anchor", lambda spec: len(anchors_of(spec)) > 1),
    Known(
        "attention takes additive masks, boolean ones are converted first",
        any_attention(masked_by(torch.bool), "sdpa"),
    ),
    Known(
        "attention takes dropout masks of numbers, boolean ones are converted first",
        any_attention(
            lambda spec, node: operand_at(spec, node, "dropout_mask") is not None, "sdpa"
        ),
    ),
    Known(
        "attention's gradient reads its operands from memory",
        lambda spec: bool(nodes_of(spec, "sdpa_backward")),
    ),
    Known(
        "fusion wants channels_last",
        lambda spec: bool(nodes_of(spec, "conv", "conv_transpose")) and not _channels_last(spec),
    ),
    Known(
        "fusion around a strided dgrad takes two spatial dims",
        lambda spec: any(
            len(node.attr("stride")) == 3 and max(node.attr("stride")) > 1
            for node in nodes_of(spec, "conv_transpose")
        ),
    ),
)
