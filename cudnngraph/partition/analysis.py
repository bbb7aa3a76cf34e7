"""The graph to be cut: anchors, views, readers, depth, and dtypes of tensors between steps.

What crosses from step to step is kept in the dtype of its data: 16-bit data in, 16 bits out, as
torch's own ops do it. It halves the traffic, and cuDNN has more engines for it. Inside a step
values stay in the graph's intermediate dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..ir.spec import GraphSpec, Node, TensorSpec, same_layout
from ..ops.base import FLOATS, LOW_PRECISION, InferContext
from ..ops.table import OPS
from .aliases import Aliases, Made, aliases

Group = tuple[Node, ...]


def compute_nodes(nodes: Sequence[Node]) -> Group:
    """The nodes that compute something: all but constants."""
    return tuple(node for node in nodes if node.op != "constant")


def is_anchor(node: Node, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a node is no part of a group of pointwise ops.

    Such are the ops that are not element by element, and copies into another layout.
    """
    return not OPS[node.op].pointwise or is_copy(node, tensors)


def is_copy(node: Node, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a node only changes the layout, which no plan of cuDNN does."""
    if node.op not in ("identity", "cast"):
        return False
    source, result = tensors[node.operands[0]], tensors[node.results[0]]
    return not same_layout(source.shape, source.stride, result.stride)


@dataclass(frozen=True, eq=False)
class CutGraph:
    """A graph to be cut, with what every cut asks about it."""

    spec: GraphSpec

    def is_anchor(self, node: Node) -> bool:
        """See :func:`is_anchor`."""
        return is_anchor(node, self.spec.tensors)

    def takes_epilogue(self, node: Node) -> bool:
        """Whether pointwise ops behind a node may be part of its plan.

        Those behind the gradient of a convolution's weight are not: its engines for 16-bit data
        write 16 bits.
        """
        row = OPS[node.op]
        none = row.pointwise or row.view or row.torch_only
        return not none and not row.has("convolution_gradient")

    def takes_prologue(self, node: Node) -> bool:
        """Whether pointwise ops in front of a node may be part of its plan, as cuDNN has it."""
        return node.op == "batch_norm_backward"

    def is_free(self, node: Node) -> bool:
        """Whether nothing has to run for a node that is a step of its own: see
        :mod:`~cudnngraph.partition.aliases`."""
        return node.name in self._free

    @cached_property
    def compute_nodes(self) -> Group:
        """See :func:`compute_nodes`."""
        return compute_nodes(self.spec.nodes)

    @cached_property
    def constants(self) -> Mapping[str, Node]:
        """The constants by their tensors."""
        return {node.results[0]: node for node in self.spec.nodes if node.op == "constant"}

    @cached_property
    def _free(self) -> frozenset[str]:
        nodes = compute_nodes(self.spec.nodes)
        free = self.aliases.free
        return frozenset(node.name for number, node in enumerate(nodes) if number in free)

    @cached_property
    def aliases(self) -> Aliases:
        """Tensors that are memory of another one if each op is a step of its own."""
        tensors = {**self.spec.tensors, **self.passed}
        steps = [Made(tensors, node.results, node) for node in compute_nodes(self.spec.nodes)]
        return aliases(steps, {*self.spec.inputs, *self.spec.outputs})

    def crossing(self, name: str) -> TensorSpec:
        """A tensor as it is where it crosses from one step to another."""
        return self.passed.get(name, self.spec.tensors[name])

    def may_join(self, name: str) -> bool:
        """Whether a tensor is memory of one of the steps, and of no view's operand."""
        source = self.producer.get(name)
        return source is not None and name not in self.spec.outputs and not OPS[source.op].view

    @cached_property
    def readers(self) -> Mapping[str, list[Node]]:
        """The nodes that read each tensor, once for each port."""
        found: dict[str, list[Node]] = {}
        for node in self.spec.nodes:
            for name in node.operands:
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Where each node stands among the graph's."""
        return {node.name: at for at, node in enumerate(self.spec.nodes)}

    @cached_property
    def producer(self) -> Mapping[str, Node]:
        """The node that makes each tensor, constants left out."""
        return {name: node for node in compute_nodes(self.spec.nodes) for name in node.results}

    @cached_property
    def passed(self) -> Mapping[str, TensorSpec]:
        """Intermediates in 16 bits, as they are where they cross from one step to another."""
        narrow: dict[str, TensorSpec] = {}
        as_they_are = self._wide | self._read_in_float32 | set(self.spec.outputs)
        for node in self.spec.nodes:
            for name in node.results:
                tensor, dtype = self.spec.tensors[name], self._data[name]
                if name in as_they_are:
                    continue
                if node.op == "cast":
                    narrow.update(self._as_cast(node))
                if node.op == "cast" or dtype == tensor.dtype:
                    continue
                if node.op == "reduction":  # cuDNN writes float32, and it is small
                    continue
                if self._is_row_product(node):  # its sum may cancel, and a row has few terms
                    continue
                small = (
                    self.is_anchor(node)
                    or OPS[node.op].has("fp16_safe")
                    or name in self._read_as_data
                )
                if dtype in LOW_PRECISION and small:
                    narrow[name] = replace(tensor, dtype=dtype)
        return narrow

    def _as_cast(self, node: Node) -> dict[str, TensorSpec]:
        """A cast's result as it crosses: in 16 bits if it comes of such, or goes to such.

        What products read has the dtype that it was cast to, as their other operand has.
        """
        (name,), (source,) = node.results, node.operands
        kinds = [self._data[name]]
        if not self._feeds_products(name):
            kinds.append(self._data[source])
        dtype = next((kind for kind in kinds if kind in LOW_PRECISION), kinds[0])
        tensor = self.spec.tensors[name]
        return {} if dtype == tensor.dtype else {name: replace(tensor, dtype=dtype)}

    def _feeds_products(self, name: str) -> bool:
        """Whether a product reads a tensor, or a view of it."""
        return any(
            OPS[each.op].has("multiplies")
            or (OPS[each.op].view and self._feeds_products(each.results[0]))
            for each in self.readers.get(name, ())
        )

    def _is_row_product(self, node: Node) -> bool:
        """Whether a product is there for its sums along rows alone, as in a row's dot product."""
        name = node.results[0]
        rows = (len(self.spec.tensors[name].shape) - 1,)
        readers = self.readers.get(name, ())
        return (
            node.op == "mul"
            and bool(readers)
            and all(each.op == "reduction" and each.attr("dims") == rows for each in readers)
        )

    @property
    def _data(self) -> Mapping[str, torch.dtype]:
        """The dtype of the data that each tensor comes of; statistics are data of their own."""
        return self._dtypes[0]

    @cached_property
    def _dtypes(self) -> tuple[Mapping[str, torch.dtype], Mapping[str, torch.dtype]]:
        """The dtype of each tensor's data, and that of torch, which has float32 where one operand
        has it, be it a vector beside an image of 16 bits."""
        data = {name: self.spec.tensors[name].dtype for name in self.spec.inputs}
        torchs = dict(data)
        for node in self.spec.nodes:
            if node.op == "aten":
                found = self._of_torch(node, torchs)
                data.update(found)
                torchs.update(found)
                continue
            dtype = self._data_dtype(node, data)
            for port, name in enumerate(node.outputs):
                if name is not None:
                    tensor = self.spec.tensors[name]
                    gradients = OPS[node.op].has("attention_gradient") and port < 3  # dq, dk, dv
                    is_data = (port == 0 or gradients) and tensor.dtype.is_floating_point
                    data[name] = dtype if is_data else tensor.dtype
                    torchs[name] = self._promoted(node, name, data, torchs)
        return data, torchs

    def _promoted(
        self,
        node: Node,
        name: str,
        data: Mapping[str, torch.dtype],
        torchs: Mapping[str, torch.dtype],
    ) -> torch.dtype:
        """The dtype that torch gives a result of a node of ours."""
        own = data[name]
        if node.op == "cast" or own not in LOW_PRECISION or not node.operands:
            return own
        first = node.operands[0]
        if not OPS[node.op].pointwise:
            return torchs[first] if data[first] == own else own
        kinds = {torchs[each] for each in node.operands if self.spec.tensors[each].shape}
        if torch.float32 not in kinds:
            return own
        operands = {
            port: None if each is None else replace(self.spec.tensors[each], dtype=torchs[each])
            for port, each in zip(OPS[node.op].ports, node.inputs, strict=True)
        }
        call = InferContext(node.op, node.name, operands, dict(node.attrs))
        made = (OPS[node.op].infer(call) or (None,))[0]
        return own if made is None else made.dtype

    def _of_torch(self, node: Node, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """The dtypes of the results of torch's own op on operands of given ones."""
        operands = {
            f"x{place}": replace(self.spec.tensors[name], dtype=dtypes[name])
            for place, name in enumerate(node.operands)
        }
        results = (
            OPS["aten"].infer(InferContext("aten", node.name, operands, dict(node.attrs))) or ()
        )
        found = dict(zip(node.outputs, results, strict=False))
        return {
            name: self.spec.tensors[name].dtype if (made := found.get(name)) is None else made.dtype
            for name in node.results
        }

    @cached_property
    def _read_in_float32(self) -> frozenset[str]:
        """Tensors of 16-bit data that torch's own ops read in float32, and products beside float32
        data, and what these are made of in float32: they take no other dtype beside their other
        operands."""
        data, torchs = self._dtypes
        found: set[str] = set()
        for node in reversed(self.spec.nodes):
            op = OPS[node.op]
            moves = (op.pointwise or op.view) and not found.isdisjoint(node.results)
            if node.op == "aten" or moves or self._multiplies_float32(node, data):
                found |= {
                    each
                    for each in node.operands
                    if data[each] in LOW_PRECISION and torchs[each] == torch.float32
                }
        return frozenset(found)

    def _multiplies_float32(self, node: Node, data: Mapping[str, torch.dtype]) -> bool:
        """Whether a node multiplies float32 data, beside which torch has no other."""
        multiplied = node.operands[:3] if OPS[node.op].has("multiplies") else ()
        return any(data[name] == torch.float32 for name in multiplied)  # no masks, no statistics

    @cached_property
    def _wide(self) -> frozenset[str]:
        """Tensors of 16-bit data that reach a float32 output through pointwise ops and views only:
        rounding them to 16 bits would be visible there."""
        wide = {
            name
            for name in self.spec.outputs
            if self.spec.tensors[name].dtype == torch.float32
            and (self._data[name] in LOW_PRECISION or self._is_cast(name))
        }
        for node in reversed(self.spec.nodes):
            op = OPS[node.op]
            if (op.pointwise or op.view) and node.results[0] in wide:
                wide |= {name for name in node.operands if not self._is_weight_gradient(name)}
        return frozenset(wide)

    def _is_weight_gradient(self, name: str) -> bool:
        """Whether a tensor is a gradient that engines for 16-bit data write in 16 bits."""
        return name in self.producer and OPS[self.producer[name].op].has("convolution_gradient")

    def _is_cast(self, name: str) -> bool:
        """Whether a tensor is what was cast, or a view of it."""
        node = self.producer.get(name)
        while node is not None and OPS[node.op].view:
            node = self.producer.get(node.operands[0])
        return node is not None and node.op == "cast"

    def _data_dtype(self, node: Node, data: Mapping[str, torch.dtype]) -> torch.dtype:
        """The dtype of the data that a node works on: of its first operand for an anchor, else what
        its largest floating operands have in common. What becomes of 8-bit data is data anew, and
        so is what a group norm multiplies by and adds: rounded, it would move whole images."""
        own = self.spec.tensors[node.results[0]].dtype
        if OPS[node.op].has("own_data"):
            return own
        if node.op == "cast":
            return getattr(torch, node.attr("dtype"))  # type: ignore[no-any-return]
        if self._multiplies_float32(node, data):
            return torch.float32
        if self.is_anchor(node):
            dtype = data[node.operands[0]]
            return dtype if dtype in FLOATS or OPS[node.op].view else own
        floats = [n for n in node.operands if data[n].is_floating_point and n not in self._numbers]
        if not floats:
            return own
        most = max(self.spec.tensors[name].numel for name in floats)
        dtype = data[next(n for n in floats if self.spec.tensors[n].numel == most)]
        for name in floats:
            if self.spec.tensors[name].numel == most:
                dtype = torch.promote_types(dtype, data[name])
        return dtype

    @cached_property
    def _read_as_data(self) -> frozenset[str]:
        """Operands of anchors but sums: they keep the dtype that they were declared with."""
        anchors = (n for n in self.spec.nodes if self.is_anchor(n) and n.op != "reduction")
        return frozenset(name for node in anchors for name in node.operands)

    @cached_property
    def _numbers(self) -> frozenset[str]:
        """The tensors that constants make."""
        return frozenset(n.results[0] for n in self.spec.nodes if n.op == "constant")

    @cached_property
    def stage(self) -> Mapping[str, int]:
        """Return the depth of each node: anchors as early as can be, pointwise ops with users.

        An anchor's stage is the longest chain of anchors that ends at it; the pointwise ops of a
        stage follow its anchors. So no group waits for a later one, and what only an epilogue needs
        (a scaled residual) is part of the epilogue, not a step before the anchor.
        """
        nodes = compute_nodes(self.spec.nodes)
        users: dict[str, list[Node]] = {}
        stage: dict[str, int] = {}
        for node in nodes:
            sources = [self.producer[name] for name in node.operands if name in self.producer]
            for source in sources:
                users.setdefault(source.name, []).append(node)
            depth = max((stage[source.name] for source in sources), default=0)
            stage[node.name] = depth + self.is_anchor(node)
        for node in reversed(nodes):
            if not self.is_anchor(node) and node.name in users:
                stage[node.name] = min(
                    stage[user.name] - self.is_anchor(user) for user in users[node.name]
                )
        return stage

    def sources(self, node: Node) -> list[Node]:
        """The nodes that make the operands of ``node``."""
        return [self.producer[name] for name in node.operands if name in self.producer]
