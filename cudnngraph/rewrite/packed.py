"""Prepare attention on packed sequences: offsets, strides of gradients, flash attention or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..device.rules import rules
from ..ir.spec import (
    ALIGNMENT_BYTES,
    GraphSpec,
    Node,
    TensorSpec,
    free,
    round_up,
    same_layout,
    taken_names,
)
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS, by_port, by_result
from ..partition.analysis import CutGraph


def token_strides(
    node: Node, tensors: Mapping[str, TensorSpec]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The distinct strides of tokens of packed attention: of q's tensors, and of k's."""
    row = OPS[node.op]
    roles = {**row.roles, **row.result_roles}
    widths: tuple[dict[int, None], dict[int, None]] = ({}, {})
    for port, name in (*by_port(node).items(), *by_result(node).items()):
        if name is not None and port not in SEQUENCE_PORTS:
            widths[roles[port] == "tokens_kv"][tensors[name].stride[0]] = None
    return tuple(widths[0]), tuple(widths[1])


FLASH_WIDTH = 256  # the widest head that torch's flash attention takes


def prefers_flash(node: Node, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether packed attention is torch's flash attention on a GPU: where nothing is promised of
    other sequences' values. cuDNN's faster engines let NaN in from there, and those that do not
    take longer (:attr:`DeviceRules.packed_by_flash`).

    Its diagonals end at the bottom right, which for q and k of the same sequences is any. A torch
    that was built for CPUs alone plans for others, which have it.
    """
    if not rules().packed_by_flash:
        return False
    if torch.version.cuda is not None and not torch.backends.cuda.is_flash_attention_available():
        return False
    if node.op != "sdpa_varlen" or node.attr("finite_padding") or node.attr("max_seqlen_q") < 2:
        return False
    names = by_port(node)
    if names["ragged"] is not None:
        return False
    q, k, v = (tensors[str(names[port])] for port in "qkv")
    causal, window = node.attr("is_causal"), node.attr("window")
    longest = node.attr("max_seqlen_q"), node.attr("max_seqlen_kv")
    alike = longest[0] == longest[1] and names["cu_seqlens_q"] == names["cu_seqlens_kv"]
    at_the_end = node.attr("diagonal_alignment") == "bottom_right"
    if window is not None and not causal and (window[1] is None or window[1] >= longest[1]):
        # It sees as many keys to the right as the longest k has, from rows left of the first too.
        at_the_end = at_the_end and longest[0] <= longest[1]
    return (
        ((not causal and window is None) or alike or at_the_end)
        and q.shape[-1] == v.shape[-1] <= FLASH_WIDTH
        and min(q.numel, k.numel) > 0
        and all(x.stride[-1] == 1 for x in (q, k, v))
        and all(step % 8 == 0 for x in (q, k, v) for step in (x.shape[-1], *x.stride[:-1]))
    )


# Of the gradient of packed attention: what lies as the other does, or is copied; see below.
SAME_STRIDES = (("q", "dq"), ("k", "dk"), ("v", "dv"), ("do", "o"))


def match_gradient_strides(spec: GraphSpec) -> GraphSpec:
    """The graph in which the gradient of packed attention of 16-bit data reads q, k and v in the
    strides of dq, dk and dv, and do in those of o: copied where they have others, as slices of one
    buffer have. cuDNN 9.19 reads a misaligned address there, which ends the process (an H200)."""
    graph, tensors, nodes = CutGraph(spec), dict(spec.tensors), list(spec.nodes)
    taken = taken_names(spec)
    for place, node in enumerate(spec.nodes):
        if node.op != "sdpa_varlen_backward":
            continue
        names = {**by_port(node), **by_result(node)}
        for port, other in SAME_STRIDES:
            own, want = (graph.crossing(str(names[each])) for each in (port, other))
            if own.dtype not in LOW_PRECISION or same_layout(own.shape, own.stride, want.stride):
                continue
            made = free(f"{node.results[0]}_{port}_alike", taken)
            tensors[made] = replace(own, name=made, stride=want.stride)
            nodes.append(Node("identity", made, (own.name,), (made,)))
            names[port] = made
        nodes[place] = replace(node, inputs=tuple(names[port] for port in by_port(node)))
    changed = len(nodes) > len(spec.nodes)
    return replace(spec, tensors=tensors, nodes=tuple(nodes)) if changed else spec


SEQUENCE_PORTS = ("cu_seqlens_q", "cu_seqlens_kv", "ragged")  # ports that say where sequences lie


def insert_ragged_offsets(spec: GraphSpec) -> GraphSpec:
    """The graph in which packed attention of 16-bit data is told where each sequence starts in
    every tensor, as cuDNN wants it: computed in a step before, once for a forward and a gradient
    of the same strides."""
    graph, tensors, nodes = CutGraph(spec), dict(spec.tensors), list(spec.nodes)
    taken, made = taken_names(spec), dict[tuple[Any, ...], str]()
    for place, node in enumerate(spec.nodes):
        if not OPS[node.op].has("packed") or prefers_flash(node, tensors):
            continue
        names = by_port(node)
        data = graph.crossing(str(names["q"]))
        ends = tuple(str(names[port]) for port in SEQUENCE_PORTS[:2])
        if names["ragged"] is not None or data.dtype not in LOW_PRECISION:
            continue
        widths = token_strides(node, tensors)
        key = (ends, widths)
        if key not in made:
            made[key] = name = free(f"{node.results[0]}_offsets", taken)
            rows, count = 2 + len(widths[0]) + len(widths[1]), tensors[ends[0]].shape[0]
            stride = (round_up(count, ALIGNMENT_BYTES // torch.int32.itemsize), 1)
            tensors[name] = TensorSpec(name, (rows, count), stride, torch.int32)
            attrs = (("widths_kv", widths[1]), ("widths_q", widths[0]))
            nodes.append(Node("ragged_offsets", name, ends, (name,), attrs))
        names |= dict.fromkeys(SEQUENCE_PORTS[:2])
        names["ragged"] = made[key]
        nodes[place] = replace(node, inputs=tuple(names.values()))
    return replace(spec, tensors=tensors, nodes=tuple(nodes)) if made else spec
