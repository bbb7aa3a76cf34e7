"""The backward graph under construction: a walk over the forward from its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import GraphError, Problem
from ..graph.builder import Graph
from ..graph.core import apply, input_of, last_label, scalar
from ..graph.value import Value, known
from ..ir.spec import GraphSpec, Node, dense_strides, free
from ..ops.infer import check_node
from ..ops.table import OPS, by_port
from .context import Context, NoGradient, own_order
from .rules.table import RULES


@dataclass(frozen=True)
class Gradient:
    """A graph and its gradient.

    ``forward`` is the graph with the tensors of it that ``backward`` needs as further outputs.
    ``backward`` takes the gradients of the forward's outputs (``incoming``: output → name, by
    default ``grad_<output>``) and ``saved``: inputs and outputs of ``forward``, under their own
    names. It returns one gradient per name of ``wrt`` (``outgoing``: input → ``grad_<input>``), in
    the dtype of that input and in dense strides of its order.
    """

    forward: GraphSpec
    backward: GraphSpec
    saved: tuple[str, ...]
    incoming: Mapping[str, str]
    outgoing: Mapping[str, str]


def torch_dtypes(spec: GraphSpec) -> dict[str, torch.dtype]:
    """The dtype that each tensor has in torch's own chain of ops: 16 bits for 16-bit data."""
    known = {name: spec.tensors[name] for name in spec.inputs}
    constants: set[str | None] = set()
    for node in spec.nodes:
        if node.op == "constant":
            constants.update(node.outputs)
        names = by_port(node)
        operands = {port: None if name is None else known[name] for port, name in names.items()}
        numbers = [port for port, name in names.items() if name in constants]
        results = check_node(node.op, node.name, operands, dict(node.attrs), numbers).results
        for name, result in zip(node.outputs, results, strict=True):
            if name is not None:
                known[name] = spec.tensors[name]
                if result is not None:
                    known[name] = replace(known[name], dtype=result.dtype)
    return {name: tensor.dtype for name, tensor in known.items()}


class Backward:
    """The backward graph under construction.

    ``saved`` are the intermediates that it may read; None for any, to find out which are asked for.
    """

    def __init__(
        self,
        spec: GraphSpec,
        wrt: Sequence[str],
        active: frozenset[str],
        saved: frozenset[str] | None,
    ) -> None:
        self.spec, self.wrt, self.active, self.saved = spec, wrt, active, saved
        self.dtypes = torch_dtypes(spec)
        # With float64 anywhere all of it is, for no gradient is to lose what the forward kept.
        wide = any(tensor.dtype == torch.float64 for tensor in spec.tensors.values())
        self.compute_dtype = torch.float64 if wide else spec.compute_dtype
        self.graph = Graph(f"{spec.name}_backward", compute_dtype=self.compute_dtype)
        self.producer = {name: node for node in spec.nodes for name in node.results}
        self.requested: dict[str, None] = {}
        taken = set(spec.tensors)
        self.incoming = {
            name: free(f"grad_{name}", taken) for name in spec.outputs if name in active
        }
        self.outgoing = {name: free(f"grad_{name}", taken) for name in wrt}
        self._forward: dict[str, Value] = {}
        self._grads: dict[str, list[Value]] = {}
        self._reads: list[tuple[str, int, torch.dtype]] = []

    # -- values

    def wide(self, value: Value) -> Value:
        """The same value, seen in the dtype of arithmetic: what it has between ops."""
        spec = value.spec
        if spec is None or not spec.dtype.is_floating_point:
            return value
        return Value(self.graph, value.name, replace(spec, dtype=self.compute_dtype))

    def narrow(self, value: Value, dtype: torch.dtype) -> Value:
        """The same value in ``dtype``, for an anchor to read; see :meth:`anchor`."""
        return Value(self.graph, value.name, replace(known(value), dtype=dtype))

    def apply(self, op: str, operands: Sequence[Value | None], attrs: Mapping[str, Any]) -> Any:
        """One op; its results, each in the dtype of arithmetic."""
        return [self.wide(value) for value in apply(self.graph, op, operands, attrs)]

    def anchor(self, op: str, operands: Sequence[Value | None], attrs: Mapping[str, Any]) -> Any:
        """An op that reads each operand in the very dtype in which it is given here."""
        results = self.apply(op, operands, attrs)
        label = last_label(self.graph)
        self._reads += [
            (label, port, value.dtype)
            for port, value in enumerate(operands)
            if value is not None and value.dtype.is_floating_point
        ]
        return results

    def forward(self, name: str) -> Value:
        """A tensor of the forward: given, or recomputed from what is given."""
        waiting = [name]
        while waiting:
            last = waiting[-1]
            self.requested[last] = None
            if last not in self._forward:
                first = next((n for n in self._sources(last) if n not in self._forward), None)
                if first is not None:
                    waiting.append(first)
                    continue
                node, value = self.producer.get(last), self._made(last)
                number = node is not None and node.op == "constant"  # these go with any dtype
                self._forward[last] = value if number else self.wide(value)
            waiting.pop()
        return self._forward[name]

    def _given(self, name: str) -> bool:
        there = name in self.spec.inputs or name in self.spec.outputs
        return there or self.saved is None or name in self.saved

    def _sources(self, name: str) -> Iterable[str]:
        """The tensors that one of the forward is recomputed from; none if it is given."""
        node = self.producer.get(name)
        return () if node is None or self._given(name) else node.operands

    def _made(self, name: str) -> Value:
        """A tensor of the forward whose sources are there."""
        node = self.producer.get(name)
        if node is not None and node.op == "constant":
            return scalar(self.graph, node.attr("value"))
        if node is None or self._given(name):
            there = name in self.spec.inputs or name in self.spec.outputs
            tensor = self.spec.tensors[name]
            dtype = tensor.dtype if there else self.dtypes[name]
            return self.graph.input(name, tensor.shape, dtype, stride=tensor.stride)
        operands = [None if each is None else self._forward[each] for each in node.inputs]
        return apply(self.graph, node.op, operands, dict(node.attrs))[0]

    def users(self, name: str) -> int:
        """The number of readers of a forward tensor: ops, and the caller if it is an output."""
        readers = sum(name in node.operands for node in self.spec.nodes)
        return readers + (name in self.spec.outputs)

    def read_by_anchors(self) -> frozenset[str]:
        """The forward's tensors that anchors of this graph read."""
        operands = {name for node in self._anchors(self.graph._nodes) for name in node.operands}
        return frozenset(name for name, value in self._forward.items() if value.name in operands)

    @staticmethod
    def _anchors(nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if not OPS[node.op].pointwise and node.op != "reduction"]

    # -- from the outputs to the inputs

    def build(self) -> None:
        """Walk the forward backwards and declare the gradients of ``wrt``."""
        for node in reversed(self.spec.nodes):
            rule, result = RULES[node.op], node.outputs[0]
            if result not in self.active or isinstance(rule, NoGradient):
                continue
            grad = self._total(result)
            if grad is None:
                continue
            ctx = Context(self, node, grad)
            for port, gradient in rule(ctx).items():
                operand = ctx.name(port)
                if operand is None or operand not in self.active:
                    continue
                shape = self.spec.tensors[operand].shape
                # Of no elements it is known, and its rule may have no op that makes none.
                value = ctx.nothing(shape) if 0 in shape else ctx.fit(gradient(), shape)
                self._grads.setdefault(operand, []).append(value)
        problems = []
        declared: set[str] = set()
        for name in self.wrt:
            grad, tensor = self._total(name), self.spec.tensors[name]
            if grad is None:
                problems.append(
                    Problem(
                        f"wrt '{name}'",
                        "has no gradient",
                        "a way to an output other than through comparisons and statistics",
                        "leave it out of wrt",
                    )
                )
                continue
            if grad.name in declared or input_of(self.graph, grad.name) is not None:
                grad = self.graph.identity(grad)
            declared.add(grad.name)
            stride = dense_strides(tensor.shape, own_order(tensor))
            self.graph.output(self.outgoing[name], grad, dtype=tensor.dtype, stride=stride)
        problems += self.graph.problems
        if problems:
            raise GraphError(self.spec.name, problems)

    def _total(self, name: str) -> Value | None:
        """The sum of what has come for ``name``; from the caller too where it is an output."""
        parts = self._grads.pop(name, [])
        if name in self.incoming:
            tensor = self.spec.tensors[name]
            stride = dense_strides(tensor.shape, own_order(tensor))
            given = self.graph.input(self.incoming[name], tensor.shape, tensor.dtype, stride=stride)
            parts = [self.wide(given), *parts]
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = self.wide(self.graph.add(total, part))
        return total

    # -- after the walk

    def finish(self) -> Gradient:
        """Both graphs."""
        backward = self._narrowed(self.graph.spec())
        given = set(backward.inputs)
        outside = [name for name in (*self.spec.inputs, *self.spec.outputs) if name in given]
        extra = [name for name in self.producer if name in given and name not in outside]
        incoming = {name: grad for name, grad in self.incoming.items() if grad in given}
        backward = replace(backward, inputs=(*incoming.values(), *outside, *extra))
        narrow = {name: replace(self.spec.tensors[name], dtype=self.dtypes[name]) for name in extra}
        forward = replace(
            self.spec,
            tensors={**self.spec.tensors, **narrow},
            outputs=(*self.spec.outputs, *extra),
        )
        return Gradient(forward, backward, (*outside, *extra), incoming, self.outgoing)

    def _narrowed(self, spec: GraphSpec) -> GraphSpec:
        """Give operands of anchors the dtype of the data, by a conversion if theirs is fixed.

        Operands that they read through ops that only move elements get it too.
        """
        tensors, nodes = dict(spec.tensors), {node.name: node for node in spec.nodes}
        producer = {name: node for node in spec.nodes for name in node.results}
        fixed, taken = {*spec.inputs, *spec.outputs}, set(spec.tensors)
        converted: dict[tuple[str, torch.dtype], str] = {}
        reads = [read for read in self._reads if read[0] in nodes]
        for label, port, dtype in reads:
            name = str(nodes[label].inputs[port])
            if name in fixed and tensors[name].dtype != dtype:
                if (name, dtype) not in converted:
                    new = converted[name, dtype] = free(f"{name}_narrow", taken)
                    tensors[new] = replace(tensors[name], name=new, dtype=dtype)
                    nodes[new] = Node("identity", new, (name,), (new,))
                inputs = list(nodes[label].inputs)
                inputs[port] = converted[name, dtype]
                nodes[label] = replace(nodes[label], inputs=tuple(inputs))
            elif name not in fixed:
                fixed.add(name)
                tensors[name] = replace(tensors[name], dtype=dtype)
                source = producer[name]
                if OPS[source.op].view or source.op == "concat":
                    reads += [(source.name, place, dtype) for place in range(len(source.inputs))]
        return replace(spec, tensors=tensors, nodes=tuple(nodes.values()))
