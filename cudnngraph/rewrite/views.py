"""Make views of operands in memory, and move views behind the epilogue of a product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..device.rules import rules
from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    free,
    numel,
    same_layout,
    taken_names,
)
from ..ops.table import OPS
from ..ops.views import is_view, lies_there, order_of, shape_of, view_place
from ..partition.analysis import CutGraph

GELUS = ("gelu", "gelu_tanh")  # activations that cost a plan little, and whose gradients read x


def alias_views(spec: GraphSpec) -> GraphSpec:
    """The graph with the results of view ops where their operands lie."""
    tensors = dict(spec.tensors)
    for node in spec.nodes:
        name = node.results[0]
        place = view_place(node, tensors[node.operands[0]]) if OPS[node.op].view else None
        if place is not None and name not in spec.outputs:
            tensors[name] = replace(tensors[name], stride=place[0])
    return spec if tensors == dict(spec.tensors) else replace(spec, tensors=tensors)


def sink_views(spec: GraphSpec) -> GraphSpec:
    """The graph in which what is shown of a product is shown behind the pointwise ops that read it.

    So they are part of the plan of the matmul or convolution: the bias of a projection that torch
    adds behind a reshape, a residual behind a transposition, the activation of an image as rows. In
    training a plan so hands on two results, what a GELU makes and what its gradient reads.
    """
    if not any(map(_multiplies, spec.nodes)):
        return spec
    graph = CutGraph(spec)
    for node in spec.nodes:
        if OPS[node.op].has("sinks_views"):
            graph = _sink_one(graph, node)
    return graph.spec


def _sink_one(graph: CutGraph, node: Node) -> CutGraph:
    """The graph with the views in front of one pointwise op behind it, where that is possible."""
    spec, tensors, result = graph.spec, graph.spec.tensors, graph.spec.tensors[node.results[0]]
    for shown in node.operands:
        chain, name = views_of(graph, shown, kept=node.op in GELUS)
        whole = all(tensors[each].numel == result.numel for each in (name, shown))
        parts = any(view.op == "slice" for view in chain)
        source = _product_of(graph, name)
        if not chain or parts or not whole or source is None:
            continue
        if name in spec.outputs and _depth(spec, source) < rules().product_kept_min_depth:
            continue
        taken = taken_names(spec)
        found = _inverse_views(node, shown, chain, tensors, taken)
        if found is None:
            continue
        inputs, back = found
        product = tensors[name]
        label = free(f"{result.name}_early", taken)
        early = TensorSpec(label, product.shape, product.stride, result.dtype)
        made, shows, last = {early.name: early}, list[Node](), early
        for view in reversed(chain):
            place = view_place(view, last)
            if place is None:
                break
            to = result.name if view is chain[0] else view.results[0]
            shows.append(replace(view, inputs=(last.name,), outputs=(to,)))
            last = TensorSpec(to, tensors[view.results[0]].shape, place[0], result.dtype)
            made[to] = last
        if last.name != result.name or not same_layout(result.shape, last.stride, result.stride):
            continue
        moved = replace(
            node,
            inputs=tuple(name if each == shown else each for each in inputs),
            outputs=(early.name,),
        )
        made |= {**{each.results[0]: form for each, form in back}, result.name: result}
        changed = {node.name, *(view.name for view in chain)}
        nodes = [each for each in spec.nodes if each.name not in changed]
        nodes += [*(inverse for inverse, _ in back), moved, *shows]
        kept = {each: form for each, form in tensors.items() if each != shown}
        return CutGraph(replace(spec, tensors={**kept, **made}, nodes=tuple(nodes)))
    return graph


def views_of(graph: CutGraph, name: str, *, kept: bool = False) -> tuple[list[Node], str]:
    """The views that end in a tensor, the last of them first, and what they are of; as far as each
    is read once. With ``kept`` they may be of an output, which crosses in its own dtype."""
    spec, chain = graph.spec, list[Node]()
    while len(graph.readers[name]) == 1 and name not in spec.outputs:
        view = graph.producer.get(name)
        if view is None or not (
            is_view(spec.tensors, view) or (kept and _shows_output(spec, view))
        ):
            return chain, name
        chain.append(view)
        name = view.operands[0]
    return (chain, name) if kept and name in spec.outputs else ([], name)


def _shows_output(spec: GraphSpec, node: Node) -> bool:
    """Whether a node shows an output, in whatever dtype that is read."""
    return OPS[node.op].view and node.operands[0] in spec.outputs and lies_there(spec.tensors, node)


def _multiplies(node: Node) -> bool:
    return node.op == "matmul" or OPS[node.op].has("convolution")


def _product_of(graph: CutGraph, name: str) -> Node | None:
    """The product that a tensor is, or of which it is made by ops that may be part of its plan."""
    tensors = graph.spec.tensors
    shape, seen, left = tensors[name].shape, set[str](), [name]
    while left:
        node = graph.producer.get(left.pop())
        if node is None or node.name in seen:
            continue
        if _multiplies(node):
            return node
        seen.add(node.name)
        if OPS[node.op].has("sinks_views") or node.op == "bias":  # a convolution's own
            left += [each for each in node.operands if tensors[each].shape == shape]
    return None


def _depth(spec: GraphSpec, product: Node) -> int:
    """How many products each element of a result sums up."""
    x, weight = (spec.tensors[name].shape for name in product.operands[:2])
    if product.op == "matmul":
        return x[-1]
    return weight[0] if product.op == "conv_transpose" else numel(weight[1:])


def _inverse_views(
    node: Node,
    shown: str,
    chain: Sequence[Node],
    tensors: Mapping[str, TensorSpec],
    taken: set[str],
) -> tuple[list[str | None], list[tuple[Node, TensorSpec]]] | None:
    """The operands of a pointwise op as they are before the views of ``chain``, and the views that
    show them so; None where one would have to be copied."""
    result = tensors[node.results[0]]
    back: list[tuple[Node, TensorSpec]] = []
    inputs: list[str | None] = []
    first = tensors[chain[-1].operands[0]]
    keep_last = all(_keeps_last(each, tensors) for each in chain)
    for number, name in enumerate(node.inputs):
        if name is None or name == shown:
            inputs.append(name)
            continue
        other = tensors[name]
        small = other.numel == 1 and len(other.shape) <= len(first.shape)
        if small or (other.shape == result.shape[-1:] and keep_last):
            inputs.append(name)
            continue
        wanted: list[tuple[str, dict[str, Any]]] = []  # views of it, one after the other
        if other.shape != result.shape:  # broadcast: its dims may change places, and no more
            if any(view.op == "reshape" for view in chain):
                return None
            padding = len(result.shape) - len(other.shape)
            wanted += [("reshape", {"shape": (*(1,) * padding, *other.shape)})] * (padding > 0)
        for view in chain:
            attrs = dict(view.attrs)
            if view.op == "permute":
                dims = attrs["dims"]
                attrs = {"dims": tuple(dims.index(dim) for dim in range(len(dims)))}
            elif view.op == "reshape":
                attrs = {"shape": tensors[view.operands[0]].shape}
            wanted.append((view.op, attrs))
        for step, (op, attrs) in enumerate(wanted):
            label = free(f"{result.name}_back{number}_{step}", taken)
            inverse = Node(op, label, (other.name,), (label,), tuple(attrs.items()))
            place = view_place(inverse, other)
            if place is None:
                return None
            other = TensorSpec(label, shape_of(inverse, other.shape), place[0], other.dtype)
            back.append((inverse, other))
        if tensors[name].shape != result.shape and other.numel != other.shape[-1]:
            return None  # no vector along the rows of the product
        inputs.append(other.name)
    return inputs, back


def _keeps_last(view: Node, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a view leaves the last dim where it is."""
    shape, shown = (tensors[name].shape for name in (view.operands[0], view.results[0]))
    order = order_of(view, len(shape))
    return shape[-1:] == shown[-1:] if order is None else order[-1] == len(order) - 1
