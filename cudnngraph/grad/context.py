"""The context of a gradient rule, and the stand-in for ops without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..graph.builder import Graph
from ..graph.value import Value
from ..ir.spec import Node, TensorSpec, memory_order
from ..ops.table import tensor_at

if TYPE_CHECKING:
    from .backward import Backward


@dataclass
class Context:
    """One node for a gradient rule: the gradient of its first result, and its operands.

    ``ctx["x"]`` is the operand at port x, ``ctx.result()`` a result, both as values of the backward
    graph in the dtype of arithmetic; asking for one is what makes it be saved or recomputed.
    """

    build: Backward
    node: Node
    dy: Value

    @property
    def g(self) -> Graph:
        """The backward graph."""
        return self.build.graph

    def name(self, port: str) -> str | None:
        """The operand's name at ``port``."""
        return tensor_at(self.node, port)

    def __getitem__(self, port: str) -> Value:
        return self.build.forward(str(self.name(port)))

    def get(self, port: str) -> Value | None:
        """The operand at an optional port."""
        name = self.name(port)
        return None if name is None else self.build.forward(name)

    def result(self, port: int = 0) -> Value:
        """A result of the node."""
        return self.build.forward(str(self.node.outputs[port]))

    def spec(self, port: str) -> TensorSpec:
        """The operand's tensor, in the dtype that it has in torch."""
        name = str(self.name(port))
        return replace(self.build.spec.tensors[name], dtype=self.build.dtypes[name])

    def needs(self, port: str) -> bool:
        """Whether somebody needs the gradient of this operand."""
        return self.name(port) in self.build.active

    def constant(self, port: str) -> float | None:
        """The operand's value where it is a number baked into the graph."""
        node = self.build.producer.get(str(self.name(port)))
        return node.attr("value") if node is not None and node.op == "constant" else None

    def fit(self, value: Value, shape: Sequence[int]) -> Value:
        """``value`` summed over the dims that broadcasting to it has added or repeated."""
        lead = len(value.shape) - len(shape)
        repeated = [
            lead + dim for dim, n in enumerate(shape) if n == 1 and value.shape[lead + dim] != 1
        ]
        dims = [*range(lead), *repeated]
        if not dims:
            return self.build.wide(value)
        return self.build.wide(self.g.reduction(value, dims, "sum", keepdim=repeated))

    def nothing(self, shape: Sequence[int]) -> Value:
        """The gradient of ``shape``, one of no elements: none of those of dy."""
        value = self.dy if self.dy.shape else self.g.reshape(self.dy, (1,))
        return self.build.wide(self.g.reshape(self.g.slice(value, 0, 0, 0), shape))

    def per_channel(self, value: Value, port: str) -> Value:
        """``value`` summed to the shape of a per-channel operand."""
        shape = self.spec(port).shape
        of_images = len(shape) > 1 and shape[0] != 1
        dims = [dim for dim in range(len(value.shape)) if dim > 1 or (dim == 0 and not of_images)]
        return self.g.reduction(value, dims, "sum", keepdim=len(shape) > 1) if dims else value

    def column(self, port: str) -> Value:
        """A per-channel operand at the rank of x: (1, C, 1, ...)."""
        rank = len(self.spec("x").shape)
        shape = [1] * rank
        shape[1] = self.spec("x").shape[1]
        value = self[port]
        if len(value.shape) == rank:
            return value
        return self.build.wide(self.g.expand(value, shape, (1,)))

    def anchor(
        self, op: str, data: Sequence[Value], *others: Value | None, **attrs: Any
    ) -> list[Value]:
        """An op that reads ``data`` in the dtype of this node's first operand."""
        dtype = self.build.dtypes[str(self.node.inputs[0])]
        operands = [self.build.narrow(value, dtype) for value in data]
        return self.build.anchor(op, (*operands, *others), attrs)  # type: ignore[no-any-return]


Gradients = Mapping[str, Callable[[], Value]]


GradRule = Callable[[Context], Gradients]


@dataclass(frozen=True)
class NoGradient:
    """In place of a rule. ``flat``: the gradient is zero, as of what jumps; else it is unknown."""

    reason: str
    flat: bool = False


def no_double_backward(op: str) -> NoGradient:
    return NoGradient(f"{op} has no gradient of its own (a second derivative)")


def own_order(tensor: TensorSpec) -> tuple[int, ...]:
    """The order of dims in memory; row-major for an expanded tensor."""
    if any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride, strict=True)):
        return tuple(range(len(tensor.shape)))
    return memory_order(tensor.shape, tensor.stride)
