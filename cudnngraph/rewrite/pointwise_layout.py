"""Lay results of pointwise ops as most of what they read lies.

Torch lays a sum as its first operand lies, and what is broadcast row-major: so the gradient of an
average over an image is row-major, and each sum that begins with it. An op of mixed layouts reads
or writes some of them element by element. A value inside of a graph may lie in any layout: it gets
the one of most of the bytes that its op reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..ir.spec import GraphSpec, Node, TensorSpec, dense_strides, is_dense, memory_order
from ..ops.table import OPS

Order = tuple[int, ...]

#: Ops that are not pointwise, and whose results and plans are as good for an operand of any layout.
_READERS = frozenset(
    {"batch_norm_train", "batch_norm_backward", "reduction", "max_pool", "max_pool_backward"}
)


def lay_pointwise(spec: GraphSpec) -> GraphSpec:
    """The graph with values of pointwise ops in the layout of most of their operands; the graph
    itself where they are in it."""
    movable = _movable(spec)
    tensors = dict(spec.tensors)
    loose: set[str] = set()  # made of what is broadcast: nothing says how it should lie
    for node in spec.nodes:
        name = node.results[0]
        if not OPS[node.op].pointwise or len(node.results) > 1:
            continue
        alike = [each for each in node.operands if tensors[each].shape == tensors[name].shape]
        votes: Counter[Order] = Counter()
        for each in alike:
            form = tensors[each]
            if each not in loose and is_dense(form.shape, form.stride):
                votes[memory_order(form.shape, form.stride)] += form.numel * form.dtype.itemsize
        if not votes:
            loose |= {name} & movable
            continue
        ((order, _),) = votes.most_common(1)
        for each in (*alike, name):
            if each in loose or (each == name and name in movable):
                tensors[each] = _laid(tensors[each], order)
                loose.discard(each)
    changed = any(tensors[name] != form for name, form in spec.tensors.items())
    return replace(spec, tensors=tensors) if changed else spec


def _laid(tensor: TensorSpec, order: Order) -> TensorSpec:
    return replace(tensor, stride=dense_strides(tensor.shape, order))


def _movable(spec: GraphSpec) -> set[str]:
    """The values of pointwise ops that nobody outside sees, and that ops read for which any layout
    will do."""
    readers: dict[str, list[Node]] = {}
    for node in spec.nodes:
        for name in node.operands:
            readers.setdefault(name, []).append(node)

    def any_layout(node: Node) -> bool:
        op = OPS[node.op]
        if op.pointwise:
            return node.op != "identity"
        return node.op in _READERS or bool(op.traits & {"convolution", "convolution_gradient"})

    found = set()
    for node in spec.nodes:
        (name, *others), op = node.results, OPS[node.op]
        form = spec.tensors[name]
        image = len(form.shape) in (4, 5) and is_dense(form.shape, form.stride)
        if others or not op.pointwise or node.op == "identity" or not image:
            continue
        if name not in spec.outputs and all(map(any_layout, readers.get(name, ()))):
            found.add(name)
    return found
