"""Turn 16-bit reductions into float32 reductions and a cast, as cuDNN has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..ir.spec import GraphSpec, Node, free, taken_names
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS


def float32_reductions(spec: GraphSpec) -> GraphSpec:
    """The graph with reductions that return float32, as cuDNN's do, and narrow outputs behind.

    A product takes operands of one dtype: beside 16-bit ones it reads such a result in 16 bits.
    """
    tensors, nodes = dict(spec.tensors), list(spec.nodes)
    taken = taken_names(spec)
    for place, node in enumerate(spec.nodes):
        result = tensors[node.results[0]]
        if node.op != "reduction" or result.dtype not in LOW_PRECISION:
            continue
        if result.name not in spec.outputs:  # no tensor of the caller
            tensors[result.name] = replace(result, dtype=torch.float32)
            continue
        wide = replace(result, name=free(f"{result.name}_wide", taken), dtype=torch.float32)
        tensors[wide.name] = wide
        nodes[place] = replace(node, outputs=(wide.name,))
        label = free(f"{result.name}_narrow", taken)
        nodes.append(Node("identity", label, (wide.name,), (result.name,)))
    found = spec if tensors == spec.tensors else replace(spec, tensors=tensors, nodes=tuple(nodes))
    readers = _readers(found)
    for node in spec.nodes:
        if node.op == "reduction" and found.tensors[node.results[0]].dtype == torch.float32:
            made = _narrow_for_products(found, node.results[0], readers)
            if made is not found:
                found, readers = made, _readers(made)
    return found


def _readers(spec: GraphSpec) -> dict[str, list[Node]]:
    """The nodes that read each tensor."""
    readers: dict[str, list[Node]] = {}
    for node in spec.nodes:
        for name in dict.fromkeys(node.operands):
            readers.setdefault(name, []).append(node)
    return readers


def _narrow_for_products(
    spec: GraphSpec, name: str, readers: Mapping[str, Sequence[Node]]
) -> GraphSpec:
    """The graph in which products read a float32 tensor in 16 bits if their others have these."""
    dtypes = {
        spec.tensors[other].dtype
        for node, read in _behind_views(readers, name)
        if OPS[node.op].has("multiplies")
        for other in node.operands
        if other != read and spec.tensors[other].dtype in LOW_PRECISION
    }
    if len(dtypes) != 1:
        return spec
    taken = taken_names(spec)
    label = free(f"{name}_16", taken)  # the 17th of a graph may be called so
    narrow = replace(spec.tensors[name], name=label, dtype=dtypes.pop())
    tensors = {**spec.tensors, narrow.name: narrow}
    nodes: list[Node] = []
    names = {name: narrow.name}
    for node in spec.nodes:
        takes = OPS[node.op].view or OPS[node.op].has("multiplies")
        given = tuple(names.get(each, each) if each else each for each in node.inputs)
        if not takes or given == node.inputs:
            nodes.append(node)
            if name in node.results:
                nodes.append(Node("identity", narrow.name, (name,), (narrow.name,)))
        elif OPS[node.op].view:
            result = tensors[node.results[0]]
            label = free(f"{result.name}_16", taken)
            seen = replace(result, name=label, dtype=narrow.dtype)
            tensors[seen.name], names[result.name] = seen, seen.name
            nodes += [node, replace(node, name=seen.name, inputs=given, outputs=(seen.name,))]
        else:
            nodes.append(replace(node, inputs=given))
    return _without_dead_tensors(replace(spec, tensors=tensors, nodes=tuple(nodes)))


def _behind_views(readers: Mapping[str, Sequence[Node]], name: str) -> Iterator[tuple[Node, str]]:
    """What reads a tensor, also through views, with the name that it reads."""
    for node in readers.get(name, ()):
        yield node, name
        if OPS[node.op].view:
            for seen in node.results:
                yield from _behind_views(readers, seen)


def _without_dead_tensors(spec: GraphSpec) -> GraphSpec:
    """The graph without tensors that no node has: views that nothing reads are gone from it."""
    made = {*spec.inputs, *(name for node in spec.nodes for name in node.results)}
    tensors = {name: tensor for name, tensor in spec.tensors.items() if name in made}
    return replace(spec, tensors=tensors)
