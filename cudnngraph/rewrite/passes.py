"""Rewrites of a graph before it is cut into steps.

A boolean mask of attention becomes an additive one, since cuDNN has no other, and the rows of masks
are aligned; a 16-bit sum becomes a float32 one that is rounded; a reshape, transpose or slice of
what lies in memory becomes a view, another way to address it that costs nothing, and stands behind
what a product's plan can do besides; what is joined is written in its place (:func:`prepared`). A
graph of convolutions may be run channels last whatever its tensors' layout
(:func:`channels_last`), with copies at its edges.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    aligned_rows,
    channels_last_strides,
    contiguous_strides,
    is_channels_last,
    odd_rows,
    same_layout,
)
from ..ops.base import OPS
from ..ops.views import is_view, order_of, shape_of, view_place
from ..partition.cuts import LOW_PRECISION, Graph, is_anchor
from .row_layout import in_memory_order


def prepared(spec: GraphSpec) -> GraphSpec:
    """The graph that is cut: numeric and aligned masks, float32 sums, views and slices for what
    needs no copy, views behind what a product's plan may do, and the strides and the offsets of
    packed sequences.
    """
    seen = aligned_masks(views(wide_sums(numeric_masks(spec))))
    made = slices(views_behind(in_memory_order(seen)))
    return offsets_of_sequences(gradients_laid_alike(made))


def views(spec: GraphSpec) -> GraphSpec:
    """The graph with the results of view ops where their operands lie."""
    tensors = dict(spec.tensors)
    for node in spec.nodes:
        name = node.results[0]
        place = view_place(node, tensors[node.operands[0]]) if OPS[node.op].view else None
        if place is not None and name not in spec.outputs:
            tensors[name] = replace(tensors[name], stride=place[0])
    return spec if tensors == dict(spec.tensors) else replace(spec, tensors=tensors)


_MOVED = frozenset(("add", "sub", "mul", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"))


def views_behind(spec: GraphSpec) -> GraphSpec:
    """The graph in which what is shown of a product is shown behind the pointwise ops that read it.

    So they are part of the product's plan: the bias of a projection that torch adds behind a
    reshape, a residual behind a transposition.
    """
    if not any(node.op == "matmul" for node in spec.nodes):
        return spec
    graph = Graph(spec)
    for node in spec.nodes:
        if node.op in _MOVED:
            graph = _with_views_behind(graph, node)
    return graph.spec


def _with_views_behind(graph: Graph, node: Node) -> Graph:
    """The graph with the views in front of one pointwise op behind it, where that is possible."""
    spec, tensors, result = graph.spec, graph.spec.tensors, graph.spec.tensors[node.results[0]]
    for shown in node.operands:
        chain, name = _views_of(graph, shown)
        whole = all(tensors[each].numel == result.numel for each in (name, shown))
        parts = any(view.op == "slice" for view in chain)
        if not chain or parts or not whole or not _of_product(graph, name):
            continue
        found = _shown_back(node, shown, chain, tensors)
        if found is None:
            continue
        inputs, back = found
        product = tensors[name]
        early = TensorSpec(f"{result.name}_early", product.shape, product.stride, result.dtype)
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
        return Graph(replace(spec, tensors={**kept, **made}, nodes=tuple(nodes)))
    return graph


def _views_of(graph: Graph, name: str) -> tuple[list[Node], str]:
    """The views that end in a tensor, the last of them first, and what they are of; as far as each
    is read once."""
    chain: list[Node] = []
    while len(graph.readers[name]) == 1 and name not in graph.spec.outputs:
        view = graph.producer.get(name)
        if view is None or not is_view(graph.spec.tensors, view):
            return chain, name
        chain.append(view)
        name = view.operands[0]
    return [], name


def _of_product(graph: Graph, name: str) -> bool:
    """Whether a tensor is a product, or made of one by ops that may be part of its plan."""
    tensors = graph.spec.tensors
    shape, seen, left = tensors[name].shape, set[str](), [name]
    while left:
        node = graph.producer.get(left.pop())
        if node is None or node.name in seen:
            continue
        if node.op == "matmul":
            return True
        seen.add(node.name)
        if node.op in _MOVED:
            left += [each for each in node.operands if tensors[each].shape == shape]
    return False


def _shown_back(
    node: Node, shown: str, chain: Sequence[Node], tensors: Mapping[str, TensorSpec]
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
            label = f"{result.name}_back{number}_{step}"
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


def slices(spec: GraphSpec) -> GraphSpec:
    """The graph with what is concatenated written into its slice of the result.

    That is so for what one convolution, or a pooling that takes any strides, may read besides, and
    where slices and their rows begin at multiples of 16 bytes.
    """
    joins = [node for node in spec.nodes if node.op == "concat"]
    if not joins:
        return spec
    graph, tensors = Graph(spec), dict(spec.tensors)
    for node in reversed(joins):  # the outermost first: what it joins may be joined itself
        result = tensors[node.results[0]]
        size = graph.crossing(result.name).dtype.itemsize
        pitches = (s for n, s in zip(result.shape, result.stride, strict=True) if n > 1 < s)
        if any(pitch * size % 16 for pitch in pitches):
            continue
        start = 0
        for name in node.operands:
            tensor, offset = tensors[name], start * result.stride[node.attr("dim")]
            start += tensor.shape[node.attr("dim")]
            others = [each for each in graph.readers[name] if each is not node]
            if (
                graph.may_join(name)
                and len(graph.readers[name]) == len(others) + 1
                and all(_reads_any_strides(graph, each, name) for each in others)
                and graph.crossing(name).dtype == graph.crossing(result.name).dtype
                and offset * size % 16 == 0
            ):
                tensors[name] = replace(tensor, stride=result.stride)
    return spec if tensors == dict(spec.tensors) else replace(spec, tensors=tensors)


def _reads_any_strides(graph: Graph, node: Node, name: str) -> bool:
    """Whether an op is no slower on a slice of a larger tensor."""
    if node.op == "max_pool":  # by cuDNN
        tensors = graph.spec.tensors
        x, y = tensors[name], tensors[node.results[0]]
        images = (is_channels_last(each.shape, each.stride) for each in (x, y))
        dense = not node.attr("ceil_mode") and all(step == 1 for step in node.attr("dilation"))
        return dense and dict(node.attrs).get(BOUNDED, False) and len(x.shape) > 3 and all(images)
    return node.op in ("conv", "conv_transpose") and node.operands.count(name) == 1


#: Attributes that only the steps' own graphs have. Of max pools: that they read no -inf. Of
#: gradients of attention: to be the same bits in every run.
BOUNDED, REPEATABLE = "bounded", "repeatable"

_NO_LOWER_THAN_MINUS_ONE = frozenset({"relu", "relu6", "sigmoid", "tanh", "exp", "abs", "softmax"})


def marked(spec: GraphSpec, deterministic: bool) -> GraphSpec:
    """The graph, before it is cut, with marks for those who run its steps: on max pools that read
    no -inf, being behind a ReLU, say; where it has to be ``deterministic`` on gradients of
    attention, for which cuDNN has another way, and no note of its plans tells them apart."""
    graph = Graph(spec)

    def bounded(node: Node) -> bool:
        made: Node | None = node
        while made is not None and (made.op in ("max_pool", "identity") or OPS[made.op].view):
            made = graph.producer.get(made.operands[0])
        return made is not None and made.op in _NO_LOWER_THAN_MINUS_ONE

    def mark(node: Node) -> Node:
        if node.op == "max_pool" and bounded(node):
            return replace(node, attrs=((BOUNDED, True), *node.attrs))
        if node.op in ("sdpa_backward", "sdpa_varlen_backward") and deterministic:
            return replace(node, attrs=((REPEATABLE, True), *node.attrs))
        return node

    nodes = tuple(map(mark, spec.nodes))
    return spec if nodes == spec.nodes else replace(spec, nodes=nodes)


def numeric_masks(spec: GraphSpec) -> GraphSpec:
    """The graph with numbers in attention where a boolean mask stood, for 16-bit data: 0 or -inf
    added to the scores, and for dropout 1 or 0."""
    graph, tensors, nodes = Graph(spec), dict(spec.tensors), list(spec.nodes)
    numbers_of: dict[tuple[Any, ...], str] = {}  # attentions share masks
    for place, node in enumerate(spec.nodes):
        if node.op not in ("sdpa", "sdpa_backward"):
            continue
        ports = OPS[node.op].ports
        data = graph.crossing(str(node.inputs[ports.index("q")])).dtype
        inputs = list(node.inputs)
        for port, numbers in (("attn_mask", (0.0, -math.inf)), ("dropout_mask", (1.0, 0.0))):
            name = node.inputs[ports.index(port)]
            if name is None or tensors[name].dtype != torch.bool or data not in LOW_PRECISION:
                continue
            if (node.op, port) == ("sdpa_backward", "dropout_mask"):
                continue  # a torch step, see lowering/
            shape = tensors[name].shape
            stride = contiguous_strides(shape)
            if (node.op, port) == ("sdpa", "attn_mask") and odd_rows(shape, stride):
                stride = aligned_rows(shape)  # see aligned_masks
            known = numbers_of.get((name, port, data, stride))
            if known is None:
                label = f"{node.results[0]}_{'mask' if port == 'attn_mask' else port}"
                known = f"{label}_numbers"
                names = (f"{label}_keep", f"{label}_drop")
                tensors |= {each: TensorSpec(each, (), (), torch.float32) for each in names}
                tensors[known] = TensorSpec(known, shape, stride, data)
                nodes += [
                    Node("constant", each, (), (each,), (("value", number),))
                    for each, number in zip(names, numbers, strict=True)
                ]
                nodes.append(Node("where", label, (name, *names), (known,)))
                numbers_of[name, port, data, stride] = known
            inputs[ports.index(port)] = known
        nodes[place] = replace(node, inputs=tuple(inputs))
    return (
        spec
        if len(nodes) == len(spec.nodes)
        else replace(spec, tensors=tensors, nodes=tuple(nodes))
    )


LEAST_SCORES = 1 << 23  # of attention, for which a copy of its mask is worth a launch


def aligned_masks(spec: GraphSpec) -> GraphSpec:
    """The graph with a copy of an additive mask of attention whose rows start at odd elements.

    cuDNN takes up to twice as long for it (an H200, float16, (16, 16, 577, 64) and a mask for all
    images: 234 us, and 122 with rows 584 elements apart). Where each image and head has numbers of
    its own, the copy would take as long as it saves.
    """
    graph, tensors, nodes = Graph(spec), dict(spec.tensors), list(spec.nodes)
    copies: dict[str, str] = {}
    for place, node in enumerate(spec.nodes):
        if node.op != "sdpa":
            continue
        ports = OPS["sdpa"].ports
        q, k, name = (node.inputs[ports.index(port)] for port in ("q", "k", "attn_mask"))
        mask = None if name is None else graph.crossing(name)
        if mask is None or name is None or mask.dtype not in LOW_PRECISION:
            continue
        (batch, heads, rows, _), keys = tensors[str(q)].shape, tensors[str(k)].shape[2]
        scores = batch * heads * rows * keys
        if not odd_rows(mask.shape, mask.stride) or scores < max(LEAST_SCORES, 4 * mask.numel):
            continue
        if name not in copies:
            copy = copies[name] = f"{node.results[0]}_mask_aligned"
            tensors[copy] = replace(mask, name=copy, stride=aligned_rows(mask.shape))
            nodes.append(Node("identity", copy, (name,), (copy,)))
        inputs = list(node.inputs)
        inputs[ports.index("attn_mask")] = copies[name]
        nodes[place] = replace(node, inputs=tuple(inputs))
    return replace(spec, tensors=tensors, nodes=tuple(nodes)) if copies else spec


def wide_sums(spec: GraphSpec) -> GraphSpec:
    """The graph with reductions that return float32, as cuDNN's do, and narrow outputs behind."""
    tensors, nodes = dict(spec.tensors), list(spec.nodes)
    for place, node in enumerate(spec.nodes):
        result = tensors[node.results[0]]
        if node.op != "reduction" or result.dtype not in LOW_PRECISION:
            continue
        if result.name not in spec.outputs:  # no tensor of the caller
            tensors[result.name] = replace(result, dtype=torch.float32)
            continue
        wide = replace(result, name=f"{result.name}_wide", dtype=torch.float32)
        tensors[wide.name] = wide
        nodes[place] = replace(node, outputs=(wide.name,))
        nodes.append(Node("identity", f"{result.name}_narrow", (wide.name,), (result.name,)))
    return spec if tensors == spec.tensors else replace(spec, tensors=tensors, nodes=tuple(nodes))


def token_widths(
    node: Node, tensors: Mapping[str, TensorSpec]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How far apart the tokens of packed attention lie, in elements: the different widths of what
    has the tokens of q, and of what has those of k."""
    row = OPS[node.op]
    widths: tuple[dict[int, None], dict[int, None]] = ({}, {})
    for port, name in (*zip(row.ports, node.inputs), *zip(row.outputs, node.outputs)):  # noqa: B905
        if name is not None and port not in PACKING:
            widths[port in ("k", "v", "dk", "dv")][tensors[name].stride[0]] = None
    return tuple(widths[0]), tuple(widths[1])


FLASH_WIDTH = 256  # the widest head that torch's flash attention takes


def by_flash(node: Node, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether packed attention is torch's flash attention on a GPU: where nothing is promised of
    other sequences' numbers. cuDNN's faster engines let NaN in from there, and those that do not
    take longer (an H200, 8 sequences of 256 to 2048, 16 heads of 128, causal: 390 against 235 us).

    Its diagonals end at the bottom right, which for q and k of the same sequences is any. A torch
    that was built for CPUs alone plans for others, which have it.
    """
    if torch.version.cuda is not None and not torch.backends.cuda.is_flash_attention_available():
        return False
    if node.op != "sdpa_varlen" or node.attr("finite_padding") or node.attr("max_seqlen_q") < 2:
        return False
    names = dict(zip(OPS[node.op].ports, node.inputs, strict=True))
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
ALIKE = (("q", "dq"), ("k", "dk"), ("v", "dv"), ("do", "o"))


def gradients_laid_alike(spec: GraphSpec) -> GraphSpec:
    """The graph in which the gradient of packed attention of 16-bit data reads q, k and v in the
    strides of dq, dk and dv, and do in those of o: copied where they have others, as slices of one
    buffer have. cuDNN 9.19 reads a misaligned address there, which ends the process (an H200)."""
    graph, tensors, nodes = Graph(spec), dict(spec.tensors), list(spec.nodes)
    for place, node in enumerate(spec.nodes):
        if node.op != "sdpa_varlen_backward":
            continue
        row = OPS[node.op]
        names = dict(zip((*row.ports, *row.outputs), (*node.inputs, *node.outputs), strict=True))
        for port, other in ALIKE:
            own, want = (graph.crossing(str(names[each])) for each in (port, other))
            if own.dtype not in LOW_PRECISION or same_layout(own.shape, own.stride, want.stride):
                continue
            made = f"{node.results[0]}_{port}_alike"
            tensors[made] = replace(own, name=made, stride=want.stride)
            nodes.append(Node("identity", made, (own.name,), (made,)))
            names[port] = made
        nodes[place] = replace(node, inputs=tuple(names[port] for port in row.ports))
    changed = len(nodes) > len(spec.nodes)
    return replace(spec, tensors=tensors, nodes=tuple(nodes)) if changed else spec


PACKING = ("cu_seqlens_q", "cu_seqlens_kv", "ragged")  # ports that say where sequences lie


def offsets_of_sequences(spec: GraphSpec) -> GraphSpec:
    """The graph in which packed attention of 16-bit data is told where each sequence starts in
    every tensor, as cuDNN wants it: computed in a step before, once for a forward and a gradient
    of the same strides."""
    graph, tensors, nodes = Graph(spec), dict(spec.tensors), list(spec.nodes)
    made: dict[tuple[Any, ...], str] = {}
    for place, node in enumerate(spec.nodes):
        if node.op not in ("sdpa_varlen", "sdpa_varlen_backward") or by_flash(node, tensors):
            continue
        ports = OPS[node.op].ports
        at = {port: ports.index(port) for port in ("q", *PACKING)}
        data = graph.crossing(str(node.inputs[at["q"]]))
        ends = tuple(str(node.inputs[at[port]]) for port in PACKING[:2])
        if node.inputs[at["ragged"]] is not None or data.dtype not in LOW_PRECISION:
            continue
        widths = token_widths(node, tensors)
        key = (ends, widths)
        if key not in made:
            made[key] = name = f"{node.results[0]}_offsets"
            rows, count = 2 + len(widths[0]) + len(widths[1]), tensors[ends[0]].shape[0]
            stride = (-(-count // 4) * 4, 1)  # rows start at multiples of 16 bytes
            tensors[name] = TensorSpec(name, (rows, count), stride, torch.int32)
            attrs = (("widths_kv", widths[1]), ("widths_q", widths[0]))
            nodes.append(Node("ragged_offsets", name, ends, (name,), attrs))
        inputs = list(node.inputs)
        for port in PACKING[:2]:
            inputs[at[port]] = None
        inputs[at["ragged"]] = made[key]
        nodes[place] = replace(node, inputs=tuple(inputs))
    return replace(spec, tensors=tensors, nodes=tuple(nodes)) if made else spec


_CONVOLUTIONS = frozenset({"conv", "conv_transpose", "conv_wgrad"})


def channels_last(spec: GraphSpec, images: Collection[str] | None = None) -> GraphSpec:
    """A graph of convolutions with every image channels last, copied at the graph's edges; or only
    those named in ``images``.

    Another graph, and one that lies so already, is given back as it is.
    """
    anchors = [node for node in spec.nodes if is_anchor(node, spec.tensors)]
    if not anchors or not all(node.op in _CONVOLUTIONS for node in anchors):
        return spec
    rank = len(spec.tensors[anchors[0].operands[0]].shape)

    def last(tensor: TensorSpec) -> TensorSpec:
        return replace(tensor, stride=channels_last_strides(tensor.shape))

    tensors, nodes = dict(spec.tensors), list(spec.nodes)
    renamed: dict[str, str] = {}
    copies: list[Node] = []
    for name, tensor in spec.tensors.items():
        if len(tensor.shape) != rank or is_channels_last(tensor.shape, tensor.stride):
            continue
        if images is not None and name not in images:
            continue
        if name not in spec.inputs and name not in spec.outputs:
            tensors[name] = last(tensor)
            continue
        other = f"{name}_last"
        tensors[other] = replace(last(tensor), name=other)
        renamed[name] = other
        source, target = (name, other) if name in spec.inputs else (other, name)
        copies.append(Node("identity", f"{name}_copy", (source,), (target,)))
    if not copies:
        return spec

    def new(name: str | None) -> str | None:
        return None if name is None else renamed.get(name, name)

    nodes = [
        replace(
            node,
            inputs=tuple(new(name) for name in node.inputs),
            outputs=tuple(new(name) for name in node.outputs),
        )
        for node in nodes
    ]
    return replace(spec, tensors=tensors, nodes=(*nodes, *copies))
