"""The value of a graph: its shape, dtype and stride, operators, and every op as a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Union

import torch

from ..errors import GraphError, Problem
from ..ir.spec import TensorSpec
from ..ops.table import OPS

if TYPE_CHECKING:
    from .builder import Graph


Scalar = int | float
Operand = Union["Value", Scalar]
Ints = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[Sequence[int]]


class Value:
    """A tensor of a graph under construction: what an op returns and the next one takes.

    Has ``shape``, ``dtype`` and ``stride`` as far as inference knows them, the arithmetic and
    ordering operators, and every op of the graph as a method: ``y.relu()`` is ``g.relu(y)``. It is
    neither true nor false: ``if x > 0`` and ``0 < x < 1`` raise :class:`GraphError`.
    """

    def __init__(self, graph: Graph, name: str, spec: TensorSpec | None) -> None:
        self.graph = graph
        self.name = name
        self.spec = spec

    def _known(self) -> TensorSpec:
        if self.spec is None:
            raise GraphError(self.graph.name, self.graph.problems)
        return self.spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes. Raises :class:`GraphError` when an earlier mistake leaves them unknown."""
        return self._known().shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that this value has as an output; inside a graph it is kept in the
        intermediate dtype."""
        return self._known().dtype

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._known().stride

    def __repr__(self) -> str:
        return f"<{self.name.lstrip('%')}: {self.spec if self.spec is not None else 'unknown'}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in METHODS:
            method = getattr(self.graph, name)
            return lambda *args, **kwargs: method(self, *args, **kwargs)
        raise AttributeError(f"a graph value has no attribute or op '{name}'")

    def __bool__(self) -> bool:
        where = f"value '{self.name.lstrip('%')}'"
        what = "is neither true nor false before the graph runs"
        mend = "use g.where, g.logical_and, g.logical_or, g.logical_not, or `is None`"
        raise GraphError(self.graph.name, [Problem(where, what, "", mend)])

    def __add__(self, other: Operand) -> Value:
        return self.graph.add(self, other)

    def __radd__(self, other: Scalar) -> Value:
        return self.graph.add(other, self)

    def __sub__(self, other: Operand) -> Value:
        return self.graph.sub(self, other)

    def __rsub__(self, other: Scalar) -> Value:
        return self.graph.sub(other, self)

    def __mul__(self, other: Operand) -> Value:
        return self.graph.mul(self, other)

    def __rmul__(self, other: Scalar) -> Value:
        return self.graph.mul(other, self)

    def __truediv__(self, other: Operand) -> Value:
        return self.graph.div(self, other)

    def __rtruediv__(self, other: Scalar) -> Value:
        return self.graph.div(other, self)

    def __pow__(self, other: Operand) -> Value:
        return self.graph.pow(self, other)

    def __rpow__(self, other: Scalar) -> Value:
        return self.graph.pow(other, self)

    def __matmul__(self, other: Value) -> Value:
        return self.graph.matmul(self, other)

    def __neg__(self) -> Value:
        return self.graph.neg(self)

    def __lt__(self, other: Operand) -> Value:
        return self.graph.lt(self, other)

    def __le__(self, other: Operand) -> Value:
        return self.graph.le(self, other)

    def __gt__(self, other: Operand) -> Value:
        return self.graph.gt(self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.graph.ge(self, other)


METHODS = frozenset(OPS) - {"constant", "concat", "aten"} | {
    "relu6",
    "hardswish",
    "activation",
    "conv_bias_act",
    "conv_bn_act",
    "conv_transpose_bias_act",
    "cross_entropy",
    "depthwise_separable",
    "dropout",
    "geglu",
    "group_norm",
    "quantized_conv_bias_act",
    "linear",
    "mlp",
    "normalize_images",
    "pixel_shuffle",
    "pixel_unshuffle",
    "swiglu",
    "rope",
    "block_mask",
}


def set_stride(value: Value, stride: Sequence[int]) -> None:
    """Store a value in other strides than its op would; nothing may have read it yet."""
    value.spec = replace(known(value), stride=tuple(stride))


def known(value: Value) -> TensorSpec:
    """The value's spec. Raises :class:`GraphError` if an earlier mistake leaves it unknown."""
    return value._known()
