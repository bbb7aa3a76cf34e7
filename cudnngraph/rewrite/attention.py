"""Bring attention of 16-bit data that cuDNN has no engine for into a form that it has one for.

Its engines read rows of q, k and v: their last dim has stride 1, and a multiple of 8 elements.
Attention over the channels of an image (XCiT, EdgeNeXt, DaViT) has no such rows, and few scores
beside its data: it becomes two matmuls and a softmax. Other attention gets its operands copied to
rows that are filled up with zeros, which change no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    aligned,
    contiguous_strides,
    dense_strides,
    free,
    memory_order,
    taken_names,
)
from ..ops.base import LOW_PRECISION
from ..ops.table import by_port, by_result, tensor_at
from ..partition.analysis import CutGraph
from .views import alias_views

#: The operands and results whose rows an engine reads and writes, by op.
_ROWS = {
    "sdpa": (("q", "k", "v"), ("o",)),
    "sdpa_backward": (("do", "q", "k", "v", "o"), ("dq", "dk", "dv")),
}


def is_in_rows(x: TensorSpec) -> bool:
    """Whether cuDNN's attention reads a tensor (B, H, S, D) as it lies."""
    return x.shape[-1] % 8 == 0 and x.stride[-1] == 1


def transposed(x: TensorSpec) -> TensorSpec:
    """A tensor with its last two dims swapped."""
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    return replace(x, shape=shape, stride=(*x.stride[:-2], x.stride[-1], x.stride[-2]))


def has_few_scores(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> bool:
    """Whether matmuls and a softmax move less than an engine with copies in front of it.

    Scores are written and read twice. Copies write and read q, k, v and the result.
    """
    rows = prod(q.shape[:-1])
    data = q.numel + k.numel + v.numel + rows * v.shape[-1]
    return 2 * rows * k.shape[-2] <= data


def attention_with_engines(spec: GraphSpec) -> GraphSpec:
    """The graph in which attention of 16-bit data has an engine of cuDNN's, or is two matmuls."""
    graph = CutGraph(spec)
    made = _Made(graph)
    for node in spec.nodes:
        if node.op not in _ROWS or _has_engine(graph, node):
            made.nodes.append(node)
        elif _is_plain(node, spec):
            made.products(node)
        else:
            made.rows(node)
    nodes = tuple(made.nodes)
    if nodes == spec.nodes:
        return spec
    return alias_views(replace(spec, tensors=made.tensors, nodes=nodes))


def _has_engine(graph: CutGraph, node: Node) -> bool:
    """Whether attention is left as it is: float32 too, which no engine reads in any form."""
    if graph.crossing(_name(node, "q")).dtype not in LOW_PRECISION:
        return True
    return all(is_in_rows(graph.spec.tensors[_name(node, port)]) for port in _ROWS[node.op][0])


def _name(node: Node, port: str) -> str:
    return str(tensor_at(node, port))


def _is_plain(node: Node, spec: GraphSpec) -> bool:
    """Whether it is softmax(scale * q k^T) v and nothing else, of few scores."""
    if node.op != "sdpa" or len(node.results) > 1 or any(node.inputs[3:]):
        return False
    changed = (node.attr(name) for name in ("window", "softcap", "alibi"))
    q, k, v = (spec.tensors[_name(node, port)] for port in "qkv")
    return not any(changed) and q.shape[1] == k.shape[1] and has_few_scores(q, k, v)


class _Made:
    """The nodes and tensors of the graph that is made."""

    def __init__(self, graph: CutGraph) -> None:
        self._graph = graph
        self._outputs = frozenset(graph.spec.outputs)
        self._taken = taken_names(graph.spec)
        self.tensors = dict(graph.spec.tensors)
        self.nodes: list[Node] = []

    def _put(
        self, op: str, name: str, inputs: Sequence[str], shape: Sequence[int], **attrs: object
    ) -> str:
        """A node whose result lies as its first operand does, if that has its rank."""
        name = free(name, self._taken)
        first = self.tensors[inputs[0]]
        stride = dense_strides(shape, memory_order(first.shape, first.stride))
        self.tensors[name] = TensorSpec(name, tuple(shape), stride, torch.float32)
        self.nodes.append(Node(op, name, tuple(inputs), (name,), tuple(sorted(attrs.items()))))
        return name

    def products(self, node: Node) -> None:
        """Attention as a softmax between two matmuls.

        In float16 a scale below 1 multiplies q, so that no score is beyond its range.
        """
        (result,) = node.results
        q, k, v = (_name(node, port) for port in "qkv")
        scale = node.attr("scale")
        *batch, rows, _ = self.tensors[q].shape
        *_, keys, width = self.tensors[k].shape
        number = free(f"{result}_scale", self._taken)

        def scaled(x: str) -> str:
            if scale == 1.0:
                return x
            self.tensors[number] = TensorSpec(number, (), (), torch.float32)
            self.nodes.append(Node("constant", number, (), (number,), (("value", scale),)))
            return self._put("mul", f"{result}_scaled", (x, number), self.tensors[x].shape)

        if self._graph.crossing(q).dtype == torch.float16 and abs(scale) < 1.0:
            q, scale = scaled(q), 1.0
        across = (*batch, width, keys)
        turned = self._put("transpose", f"{result}_keys", (k,), across, dim0=2, dim1=3)
        scores = self._matmul(f"{result}_scores", q, turned, (*batch, rows, keys))
        shape = self.tensors[scores].shape
        weights = self._put("softmax", f"{result}_weights", (scaled(scores),), shape, dim=3)
        self.nodes.append(Node("matmul", node.name, (weights, v), (result,)))
        if result not in self._outputs:
            form = self.tensors[result]
            self.tensors[result] = replace(form, stride=contiguous_strides(form.shape))

    def _matmul(self, name: str, x: str, y: str, shape: tuple[int, ...]) -> str:
        name = free(name, self._taken)
        self.tensors[name] = TensorSpec(name, shape, contiguous_strides(shape), torch.float32)
        self.nodes.append(Node("matmul", name, (x, y), (name,)))
        return name

    def rows(self, node: Node) -> None:
        """Attention of operands that are in rows, copied there where they are not."""
        reads, writes = _ROWS[node.op]
        given, results = by_port(node), by_result(node)
        known: dict[str, str] = {}
        for port in reads:
            name = str(given[port])
            if name not in known:
                known[name] = self._in_rows(name, f"{node.results[0]}_{port}_rows")
        given |= {port: known[str(given[port])] for port in reads}
        behind: list[Node] = []
        for port in writes:
            made = results[port]
            if made is not None and not is_in_rows(self.tensors[made]):
                results[port] = self._result_in_rows(made, behind)
        inputs, outputs = tuple(given.values()), tuple(results.values())
        self.nodes += [replace(node, inputs=inputs, outputs=outputs), *behind]

    def _in_rows(self, name: str, label: str) -> str:
        """An operand in rows: itself, its copy, or that filled up with zeros."""
        x = self.tensors[name]
        if is_in_rows(x):
            return name
        label = free(label, self._taken)
        more = aligned(x.shape[-1]) - x.shape[-1]
        self.tensors[label] = _laid(x, label, x.shape[-1] + more)
        if not more:
            self.nodes.append(Node("identity", label, (name,), (label,)))
            return label
        args = (("tensor", 0), ("list", 0, more), 0.0)
        attrs = (("args", args), ("kwargs", ()), ("overload", "aten.constant_pad_nd.default"))
        self.nodes.append(Node("aten", label, (name,), (label, None, None, None), attrs))
        return label

    def _result_in_rows(self, name: str, behind: list[Node]) -> str:
        """The name of a result in rows; ``behind`` gets the node that makes what was asked for."""
        form = self.tensors[name]
        width = aligned(form.shape[-1])
        if width == form.shape[-1] and name not in self._outputs:
            self.tensors[name] = _laid(form, name, width)
            return name
        label = free(f"{name}_rows", self._taken)
        self.tensors[label] = _laid(form, label, width)
        if width == form.shape[-1]:
            behind.append(Node("identity", free(f"{name}_part", self._taken), (label,), (name,)))
            return label
        part = (("dim", 3), ("start", 0), ("step", 1), ("stop", form.shape[-1]))
        behind.append(Node("slice", free(f"{name}_part", self._taken), (label,), (name,), part))
        return label


def _laid(x: TensorSpec, name: str, width: int) -> TensorSpec:
    """A tensor of that width with its last dim the fastest, the others in their order."""
    shape = (*x.shape[:-1], width)
    order = [dim for dim in memory_order(x.shape, x.stride) if dim != 3]
    return replace(x, name=name, shape=shape, stride=dense_strides(shape, (*order, 3)))
