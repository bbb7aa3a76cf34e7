"""Concatenate without copying: have each operand written into its slice of the result.

What views show of tensors is concatenated as these tensors are, and shown so behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ..device.rules import rules
from ..ir.spec import (
    ALIGNMENT_BYTES,
    GraphSpec,
    Node,
    TensorSpec,
    free,
    is_channels_last,
    taken_names,
    view_strides,
)
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS
from ..ops.views import order_of
from ..partition.analysis import CutGraph
from .annotate import BOUNDED
from .views import views_of

BY_PLANS = ("matmul", "sdpa", "max_pool")  # ops that cuDNN's plans run, beside convolutions


def concat_before_views(spec: GraphSpec) -> GraphSpec:
    """The graph with concatenations in front of the views that show their operands, where these are
    alike: gradients of queries, keys and values that attention writes by heads."""
    graph = CutGraph(spec)
    for node in spec.nodes:
        if node.op == "concat" and node.results[0] not in spec.outputs:
            graph = _before_views(graph, node)
    return graph.spec


def _before_views(graph: CutGraph, node: Node) -> CutGraph:
    tensors = graph.spec.tensors
    chains = [views_of(graph, name) for name in node.operands]
    sources = [tensors[name] for _, name in chains]
    if len({each.name for each in sources}) < len(node.operands):
        return graph
    if not all(chain and graph.may_join(name) for chain, name in chains):
        return graph
    dims = {_dims_of(graph, chain, node.attr("dim")) for chain, _ in chains}
    orders = {tuple(_order(graph, view) for view in chain) for chain, _ in chains}
    (found, *more), first = dims, chains[0][0]
    if more or found is None or len(orders) > 1:
        return graph
    many = sum(each.shape[found[-1]] for each in sources)
    if len({_widened(each.shape, found[-1], many) for each in sources}) > 1:
        return graph
    shapes = [  # of the result, of what is seen between the views, and of the sources together
        tensors[node.results[0]].shape,
        *(
            _widened(tensors[view.operands[0]].shape, dim, 0)
            for view, dim in zip(first, found[1:], strict=True)
        ),
    ]
    for at, (view, dim) in enumerate(zip(first, found[1:], strict=True), 1):
        own, shown = (tensors[name].shape for name in (view.operands[0], view.results[0]))
        grown = shapes[at - 1][found[at - 1]] * own[dim]
        if grown % shown[found[at - 1]]:
            return graph
        shapes[at] = _widened(own, dim, grown // shown[found[at - 1]])
    strides: list[tuple[int, ...]] = [tensors[node.results[0]].stride]
    for at, view in enumerate(first):
        order, given = _order(graph, view), strides[-1]
        if order is None:
            seen = view_strides(shapes[at], given, shapes[at + 1])
            if seen is None:
                return graph
            strides.append(seen)
        else:
            strides.append(tuple(given[order.index(dim)] for dim in range(len(order))))
    label, dtype = node.results[0], tensors[node.results[0]].dtype
    taken = taken_names(graph.spec)
    names = [label, *(free(f"{label}_early{at}", taken) for at in range(len(first)))]
    made = {
        name: TensorSpec(name, shape, stride, dtype)
        for name, shape, stride in zip(names[1:], shapes[1:], strides[1:], strict=True)
    }
    attrs = tuple((key, found[-1] if key == "dim" else value) for key, value in node.attrs)
    joined = replace(
        node, inputs=tuple(each.name for each in sources), outputs=(names[-1],), attrs=attrs
    )
    shows = []
    for at, view in reversed(list(enumerate(first))):
        seen_as = view.attrs if view.op != "reshape" else (("shape", shapes[at]),)
        named = replace(view, name=free(f"{node.name}_view{at}", taken), attrs=seen_as)
        shows.append(replace(named, inputs=(names[at + 1],), outputs=(names[at],)))
    gone = {view.name for chain, _ in chains for view in chain}
    unread = {name for chain, _ in chains for view in chain for name in view.results}
    nodes: list[Node] = []
    for each in graph.spec.nodes:
        if each.name == node.name:
            nodes += [joined, *shows]
        elif each.name not in gone:
            nodes.append(each)
    kept = {name: form for name, form in tensors.items() if name not in unread}
    return CutGraph(replace(graph.spec, tensors={**kept, **made}, nodes=tuple(nodes)))


def _order(graph: CutGraph, view: Node) -> tuple[int, ...] | None:
    order = order_of(view, len(graph.spec.tensors[view.operands[0]].shape))
    return None if order is None else tuple(order)


def _widened(shape: Sequence[int], dim: int, many: int) -> tuple[int, ...]:
    return (*shape[:dim], many, *shape[dim + 1 :])


def _dims_of(graph: CutGraph, chain: Sequence[Node], dim: int) -> tuple[int, ...] | None:
    """The dim in which a view is concatenated, and where it is before each view of a chain, the
    last of which comes first; None where there is none."""
    tensors = graph.spec.tensors
    found = [dim % len(tensors[chain[0].results[0]].shape)]
    for view in chain:
        own, shown = (tensors[name].shape for name in (view.operands[0], view.results[0]))
        order = order_of(view, len(own))
        if order is not None:
            found.append(order[found[-1]])
            continue
        if view.op != "reshape":
            return None
        front, size = prod(shown[: found[-1]]), shown[found[-1]]
        starts = [
            at
            for at in range(len(own))
            if prod(own[:at]) == front
            and any(prod(own[at:end]) == size for end in range(at + 1, len(own) + 1))
        ]
        if not starts:
            return None
        found.append(starts[0])
    return tuple(found)


def concat_in_place(spec: GraphSpec) -> GraphSpec:
    """The graph with what is concatenated written into its slice of the result.

    That is so for what one convolution, or a pooling that takes any strides, may read besides, and
    where slices and their rows begin at multiples of 16 bytes. Parts of a grouped convolution may
    be left as they are, to be joined by a kernel.
    """
    joins = [node for node in spec.nodes if node.op == "concat"]
    if not joins:
        return spec
    graph, tensors = CutGraph(spec), dict(spec.tensors)
    copied: dict[str, str] = {}  # the operand that is, by the result
    for node in reversed(joins):  # the outermost first: what it joins may be joined itself
        result = tensors[node.results[0]]
        size = graph.crossing(result.name).dtype.itemsize
        pitches = (s for n, s in zip(result.shape, result.stride, strict=True) if n > 1 < s)
        if any(pitch * size % ALIGNMENT_BYTES for pitch in pitches):
            continue
        start, left = 0, list[str]()
        for name in node.operands:
            tensor, offset = tensors[name], start * result.stride[node.attr("dim")]
            start += tensor.shape[node.attr("dim")]
            if offset * size % ALIGNMENT_BYTES == 0 and _may_be_part(graph, name, node):
                tensors[name] = replace(tensor, stride=result.stride)
            else:
                left.append(name)
        if len(left) != 1 or len(node.operands) < 2 or not _is_in_memory(graph, node):
            continue
        parts = [name for name in node.operands if name not in left]
        if any(_is_number(graph, each) for each in parts):
            continue  # one kernel writes that beside the copy
        if _is_of_kernel(graph, left[0]) or not any(_is_of_kernel(graph, each) for each in parts):
            copied[result.name] = left[0]
    made = spec if tensors == dict(spec.tensors) else replace(spec, tensors=tensors)
    return _with_copies(made, copied) if copied else made


def _may_be_part(graph: CutGraph, name: str, node: Node) -> bool:
    """Whether what makes an operand of a concatenation may write it into its slice."""
    others = [each for each in graph.readers[name] if each is not node]
    return (
        graph.may_join(name)
        and len(graph.readers[name]) == len(others) + 1
        and all(_reads_any_strides(graph, each, name) for each in others)
        and graph.crossing(name).dtype == graph.crossing(node.results[0]).dtype
        and (
            not (_is_of_groups(graph, node) or _is_copied(graph, name))
            or rules().convolution_parts_in_place
        )
    )


def _is_in_memory(graph: CutGraph, node: Node) -> bool:
    """Whether the result of a concatenation is needed there, whoever else reads its parts."""
    (name,) = node.results
    readers = (OPS[each.op] for each in graph.readers.get(name, ()))
    return name in graph.spec.outputs or any(
        each.has("convolution") or each.name in BY_PLANS for each in readers
    )


def _is_of_kernel(graph: CutGraph, name: str) -> bool:
    """Whether a generated kernel makes a tensor, which then may write it anywhere as well."""
    if name not in graph.producer:
        return False
    while (made := graph.producer.get(name)) is not None and OPS[made.op].pointwise:
        name = made.operands[0]
    return made is None or not (OPS[made.op].has("convolution") or made.op in BY_PLANS)


def _is_number(graph: CutGraph, name: str) -> bool:
    """Whether a tensor is one number throughout."""
    made = graph.producer.get(name)
    while made is not None and made.op in ("expand", "cast"):
        name = made.operands[0]
        made = graph.producer.get(name)
    return graph.spec.tensors[name].numel == 1


def _with_copies(spec: GraphSpec, copied: Mapping[str, str]) -> GraphSpec:
    """The graph in which a copy of an operand is joined, by the results: all of the others are
    there already. What makes the operand may write the copy, too."""
    taken, tensors = taken_names(spec), dict(spec.tensors)
    behind: dict[str, list[Node]] = {}
    joins: dict[str, Node] = {}
    for node in spec.nodes:
        name = copied.get(node.results[0]) if node.op == "concat" else None
        if name is None:
            continue
        label = free(f"{name}_part", taken)
        tensors[label] = replace(tensors[name], name=label, stride=tensors[node.results[0]].stride)
        copy = Node("identity", free(f"{label}_copy", taken), (name,), (label,))
        behind.setdefault(name, []).append(copy)
        parts = tuple(label if each == name else each for each in node.inputs)
        joins[node.name] = replace(node, inputs=parts)
    nodes = [copy for name in spec.inputs for copy in behind.get(name, ())]
    for node in spec.nodes:
        nodes.append(joins.get(node.name, node))
        nodes += [copy for name in node.results for copy in behind.get(name, ())]
    return replace(spec, tensors=tensors, nodes=tuple(nodes))


def _is_copied(graph: CutGraph, name: str) -> bool:
    """Whether the fastest engines make a tensor dense and copy it into its place: those of 16-bit
    convolutions that take a bias, a sum and ReLU alone behind."""
    made = graph.producer.get(name)
    while made is not None and made.op in ("bias", "add", "relu"):
        made = graph.producer.get(made.operands[0])
    return (
        made is not None
        and OPS[made.op].has("convolution")
        and made.attr("groups") == 1
        and graph.crossing(name).dtype in LOW_PRECISION
    )


def _is_of_groups(graph: CutGraph, node: Node) -> bool:
    """Whether convolutions of slices of one tensor are joined, as those of groups of channels."""
    sources = set()
    for name in node.operands:
        made = graph.producer.get(name)
        while made is not None and OPS[made.op].pointwise:
            made = graph.producer.get(made.operands[0])
        if made is None or not OPS[made.op].has("convolution"):
            return False
        read = graph.producer.get(made.operands[0])
        while read is not None and read.op == "identity":  # a dense copy of the slice
            read = graph.producer.get(read.operands[0])
        if read is None or read.op != "slice" or read.attr("dim") != node.attr("dim"):
            return False
        sources.add(read.operands[0])
    return len(sources) == 1


def _reads_any_strides(graph: CutGraph, node: Node, name: str) -> bool:
    """Whether an op is no slower on a slice of a larger tensor."""
    if node.op == "max_pool":  # by cuDNN
        tensors = graph.spec.tensors
        x, y = tensors[name], tensors[node.results[0]]
        images = (is_channels_last(each.shape, each.stride) for each in (x, y))
        dense = not node.attr("ceil_mode") and all(step == 1 for step in node.attr("dilation"))
        return dense and dict(node.attrs).get(BOUNDED, False) and len(x.shape) > 3 and all(images)
    return OPS[node.op].has("convolution") and node.operands.count(name) == 1
