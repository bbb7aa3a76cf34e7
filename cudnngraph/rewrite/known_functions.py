"""Functions of one tensor that are written out become the op that there is for them.

Models write GELU in many ways, by tanh and by erf. As five to nine ops behind a product it leaves
cuDNN with engines that are many times as slow. What such ops compute is recognized by its values,
so that no way of writing it is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..ir.spec import GraphSpec, Node
from ..ops.base import FLOATS
from ..partition.analysis import CutGraph

Function = Callable[..., torch.Tensor]

_ARITHMETIC: Mapping[str, Function] = {
    **{"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow},
    **{"tanh": torch.tanh, "erf": torch.erf, "sigmoid": torch.sigmoid, "neg": torch.neg},
    **{"exp": torch.exp, "reciprocal": torch.reciprocal},
}
_TELLING = frozenset({"tanh", "erf", "sigmoid"})  # what a known function is made with
KNOWN: Mapping[str, Function] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
MOST_OPS = 14  # of one function
LEAST_ROUNDING = 2.0**-46  # of float64, which orders of its ops differ by
_SAMPLES = torch.linspace(-7.9, 8.1, 65, dtype=torch.float64)


def name_functions(spec: GraphSpec) -> GraphSpec:
    """The graph with GELU and SiLU as ops, where several pointwise ops compute them of a tensor and
    nothing reads what is between."""
    telling = [node for node in spec.nodes if node.op in _TELLING]
    if not telling:
        return spec
    graph = CutGraph(spec)
    found: dict[str, Node] = {}  # by the node that gives the function's value
    gone: set[str] = set()
    for node in telling:
        for last in reversed(list(_behind(graph, node))):
            made = _known(graph, node, last)
            if made is not None:
                op, x, inside = made
                found[last.name] = Node(op, last.name, (x,), last.results)
                gone |= {each.name for each in inside if each is not last}
                break
    if not found:
        return spec
    nodes = [found.get(each.name, each) for each in spec.nodes if each.name not in gone]
    read = {name for each in nodes for name in each.operands}
    nodes = [each for each in nodes if each.op != "constant" or each.results[0] in read]
    there = {*spec.inputs, *(name for each in nodes for name in each.results)}
    tensors = {name: form for name, form in spec.tensors.items() if name in there}
    return replace(spec, tensors=tensors, nodes=tuple(nodes))


def _behind(graph: CutGraph, node: Node) -> Iterator[Node]:
    """The ops that follow one after the other, of which each alone reads the one before."""
    for _ in range(MOST_OPS):
        (name,) = node.results
        readers = graph.readers.get(name, ())
        if len(readers) != 1 or name in graph.spec.outputs or readers[0].op not in _ARITHMETIC:
            return
        node = readers[0]
        yield node


def _known(graph: CutGraph, telling: Node, last: Node) -> tuple[str, str, list[Node]] | None:
    """The function that ``last`` gives the value of, its argument, and the ops that compute it."""
    tensors = graph.spec.tensors
    for x in _arguments(graph, telling):
        if tensors[x].shape != tensors[last.results[0]].shape or tensors[x].dtype not in FLOATS:
            continue
        inside = _inside(graph, last, x)
        if inside is None or telling not in inside:
            continue
        value = _value(graph, last, {x: _SAMPLES})
        wide = tensors[last.results[0]].dtype == torch.float64
        computes_in = torch.float64 if wide else graph.spec.compute_dtype
        off = max(torch.finfo(computes_in).eps, LEAST_ROUNDING)
        for op, function in KNOWN.items():
            if torch.allclose(value, function(_SAMPLES), rtol=off, atol=off):
                return op, x, inside
    return None


def _arguments(graph: CutGraph, telling: Node) -> Iterator[str]:
    """The tensors in front of an op of which it may be a function, the nearest first."""
    names, seen = list(telling.operands), set[str]()
    while names and len(seen) < MOST_OPS:
        name = names.pop(0)
        if name in seen or name in graph.constants:
            continue
        seen.add(name)
        yield name
        node = graph.producer.get(name)
        if node is not None and node.op in _ARITHMETIC:
            names += node.operands


def _inside(graph: CutGraph, last: Node, x: str) -> list[Node] | None:
    """The ops between a tensor and ``last``; None if there is more that it depends on, or something
    else that reads what they give."""
    found: dict[str, Node] = {}
    stack = [last]
    while stack:
        node = stack.pop()
        if node.name in found:
            continue
        if node.op not in _ARITHMETIC or len(found) == MOST_OPS:
            return None
        found[node.name] = node
        for name in node.operands:
            before = graph.producer.get(name)
            if name == x or name in graph.constants:
                continue
            if before is None:
                return None
            stack.append(before)
    inside = list(found.values())
    for node in inside:
        for name in node.results if node is not last else ():
            readers = graph.readers.get(name, ())
            if name in graph.spec.outputs or any(each.name not in found for each in readers):
                return None
    return inside


def _value(graph: CutGraph, node: Node, known: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a node gives, in float64."""
    operands = []
    for name in node.operands:
        if name in graph.constants:
            number = graph.constants[name].attr("value")
            operands.append(torch.tensor(float(number), dtype=torch.float64))
            continue
        if name not in known:
            known[name] = _value(graph, graph.producer[name], known)
        operands.append(known[name])
    return _ARITHMETIC[node.op](*operands)
