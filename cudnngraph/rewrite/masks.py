"""Turn boolean attention masks into additive ones, and copy masks with odd rows to aligned ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..device.rules import rules
from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    aligned_rows,
    contiguous_strides,
    free,
    odd_rows,
    taken_names,
)
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS, by_port
from ..partition.analysis import CutGraph


def bool_masks_to_additive(spec: GraphSpec) -> GraphSpec:
    """The graph with numbers in attention where a boolean mask stood, for 16-bit data: 0 or -inf
    added to the scores, and for dropout 1 or 0."""
    graph, tensors, nodes = CutGraph(spec), dict(spec.tensors), list(spec.nodes)
    taken = taken_names(spec)
    numbers_of: dict[tuple[Any, ...], str] = {}  # attentions share masks
    for place, node in enumerate(spec.nodes):
        if not OPS[node.op].has("attention"):
            continue
        backward = OPS[node.op].has("attention_gradient")
        names_of = by_port(node)
        data = graph.crossing(str(names_of["q"])).dtype
        for port, numbers in (("attn_mask", (0.0, -math.inf)), ("dropout_mask", (1.0, 0.0))):
            name = names_of.get(port)
            if name is None or tensors[name].dtype != torch.bool or data not in LOW_PRECISION:
                continue
            if backward and port == "dropout_mask":
                continue  # a torch step, see backend/lowering
            shape = tensors[name].shape
            stride = contiguous_strides(shape)
            if not backward and port == "attn_mask" and odd_rows(shape, stride):
                stride = aligned_rows(shape)  # see aligned_masks
            known = numbers_of.get((name, port, data, stride))
            if known is None:
                label = f"{node.results[0]}_{'mask' if port == 'attn_mask' else port}"
                known = free(f"{label}_numbers", taken)
                names = tuple(free(f"{label}_{part}", taken) for part in ("keep", "drop"))
                tensors |= {each: TensorSpec(each, (), (), torch.float32) for each in names}
                tensors[known] = TensorSpec(known, shape, stride, data)
                nodes += [
                    Node("constant", each, (), (each,), (("value", number),))
                    for each, number in zip(names, numbers, strict=True)
                ]
                nodes.append(Node("where", free(label, taken), (name, *names), (known,)))
                numbers_of[name, port, data, stride] = known
            names_of[port] = known
        nodes[place] = replace(node, inputs=tuple(names_of.values()))
    return (
        spec
        if len(nodes) == len(spec.nodes)
        else replace(spec, tensors=tensors, nodes=tuple(nodes))
    )


def align_masks(spec: GraphSpec) -> GraphSpec:
    """The graph with a copy of an additive mask of attention whose rows start at odd elements.

    cuDNN takes up to twice as long for it. If each image and head has values of its own, the copy
    would take as long as it saves. :attr:`DeviceRules.mask_copy_min_scores` says when it pays.
    """
    graph, tensors, nodes = CutGraph(spec), dict(spec.tensors), list(spec.nodes)
    taken, copies = taken_names(spec), dict[str, str]()
    for place, node in enumerate(spec.nodes):
        if not OPS[node.op].has("attention") or OPS[node.op].has("attention_gradient"):
            continue
        names_of = by_port(node)
        q, k, name = (names_of.get(port) for port in ("q", "k", "attn_mask"))
        mask = None if name is None else graph.crossing(name)
        if mask is None or name is None or mask.dtype not in LOW_PRECISION:
            continue
        (batch, heads, rows, _), keys = tensors[str(q)].shape, tensors[str(k)].shape[2]
        scores = batch * heads * rows * keys
        if not odd_rows(mask.shape, mask.stride) or scores < 4 * mask.numel:
            continue
        if scores < rules().mask_copy_min_scores:
            continue
        if name not in copies:
            copy = copies[name] = free(f"{node.results[0]}_mask_aligned", taken)
            tensors[copy] = replace(mask, name=copy, stride=aligned_rows(mask.shape))
            nodes.append(Node("identity", copy, (name,), (copy,)))
        names_of["attn_mask"] = copies[name]
        nodes[place] = replace(node, inputs=tuple(names_of.values()))
    return replace(spec, tensors=tensors, nodes=tuple(nodes)) if copies else spec
