"""The core of the builder, which methods of all families use: apply an op, report a problem.

A family of ops is a base class of :class:`~cudnngraph.graph.builder.Graph` in a file of its own. It
inherits from :class:`Core`, and from the families whose methods it calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..arguments import NotPlain, is_a, plain, real
from ..errors import Problem
from ..ir.spec import Node, TensorSpec
from ..ops.infer import check_name, check_node
from ..ops.table import OPS
from .value import Value


class Core:
    """The state of a graph under construction, and how a method adds an op to it."""

    problems: list[Problem]
    _inputs: dict[str, Value]
    _nodes: list[Node]
    _values: dict[str, Value]
    _counts: dict[str, int]  # of labels of a name that are taken, from the first on
    _scalars: dict[str, Value]
    _numbers: set[str]

    def _value(self, name: str, spec: TensorSpec | None) -> Value:
        """A value of this graph."""
        raise NotImplementedError

    def _operand(
        self, where: str, port: str, value: Any, problems: list[Problem], *, needed: bool = False
    ) -> Value | None:
        """A value of this graph; an unknown one for what is none, which is reported."""
        try:
            value = plain(value, (Value,))
        except NotPlain as reason:
            mend = "declare it with g.input" if isinstance(value, torch.Tensor) else ""
            problems.append(Problem(where, f"{port} {reason}", "a value of this graph", mend))
            return self._value("?", None)
        if value is None and not needed:
            return None
        if isinstance(value, Value):
            if value.graph is self:
                return value
            problems.append(
                Problem(where, f"{port} '{value.name.lstrip('%')}' belongs to another graph")
            )
        elif real(value):
            return self._scalar(float(value))
        elif value is None:
            problems.append(Problem(where, f"{port} is missing", f"a value for {port}"))
        else:
            problems.append(Problem(where, f"{port} {is_a(value)}", "a value of this graph"))
        return self._value("?", None)

    def _place(self, op: str, given: Mapping[str, Any]) -> str:
        """The name of the op in a problem with an argument: the label that it has or will have."""
        name = given.get("name")
        if type(name) is str and op in (*OPS, "input", "output"):
            return f"{op} '{name}'"
        return f"{op} '{self._unique(op)}'" if op in OPS else op

    def _scalar(self, number: float) -> Value:
        bits = number.hex()  # tells 0.0 from -0.0
        if bits not in self._scalars:
            value = self._scalars[bits] = self._apply("constant", (), {"value": number})[0]
            self._numbers.add(value.name)
        return self._scalars[bits]

    def _number(self, operand: Any) -> float | None:
        """The number that an operand is, None where it is none."""
        if not isinstance(operand, Value):
            return operand if isinstance(operand, float) else None
        if operand.graph is not self or operand.name not in self._numbers:
            return None
        known = (float.fromhex(bits) for bits, each in self._scalars.items() if each is operand)
        return next(known, None)

    def _unique(self, name: str) -> str:
        """A free label for a node. Values carry it behind a "%", so no input can take it later."""
        count = self._counts.get(name, 0)
        free = f"{name}_{count}" if count else name
        while f"%{free}" in self._values:
            count += 1
            free = f"{name}_{count}"
        self._counts[name] = count
        return free

    def _apply(
        self, op: str, operands: Sequence[Any], attrs: dict[str, Any], name: str | None = None
    ) -> list[Value]:
        row = OPS[op]
        ports = row.ports_of(len(operands))
        label = self._unique(op) if name is None else name
        where = f"{op} '{label}'"
        problems = [] if name is None else check_name(where, name)
        if name is not None and f"%{name}" in self._values:
            problems.append(Problem(where, "has a name that is taken", "a name of its own"))
            label = self._unique(str(name))
        values = [
            self._operand(where, port, value, problems)
            for port, value in zip(ports, operands, strict=True)
        ]
        unknown = any(value is not None and value.spec is None for value in values)
        specs = {
            port: None if value is None or value.spec is None else value.spec
            for port, value in zip(ports, values, strict=True)
        }
        if problems or unknown:
            results: tuple[TensorSpec | None, ...] = (None,) * len(row.outputs)
            node_attrs: tuple[tuple[str, Any], ...] = ()
        else:
            numbers = [
                port
                for port, value in zip(ports, values, strict=True)
                if value is not None and value.name in self._numbers
            ]
            checked = check_node(op, label, specs, attrs, numbers)
            problems += checked.problems
            results, node_attrs = checked.results, checked.attrs
        self.problems += problems
        failed = bool(problems) or unknown
        outputs = []
        for index, spec in enumerate(results):
            port_name = f"%{label}" if index == 0 else f"%{label}_{row.outputs[index]}"
            outputs.append(self._value(port_name, spec))
            if index == 0 or spec is not None:
                self._values[port_name] = outputs[-1]
        self._nodes.append(
            Node(
                op,
                label,
                tuple(None if value is None else value.name for value in values),
                tuple(
                    value.name if value.spec is not None or (failed and index == 0) else None
                    for index, value in enumerate(outputs)
                ),
                node_attrs,
            )
        )
        return outputs

    def _all_known(self, where: str, **values: Any) -> bool:
        """Whether all are values whose shapes are known; what is no value is reported."""
        made = [self._operand(where, port, value, self.problems) for port, value in values.items()]
        for port, value in values.items():
            if value is None:
                self.problems.append(Problem(where, f"{port} is None", "a value of this graph"))
        return all(value is not None and value.spec is not None for value in made)

    def _unknown(self, *values: Any) -> Value:
        """The result of a composition with a mistake, which counts its operands as used."""
        mine = [value for value in values if isinstance(value, Value) and value.graph is self]
        operands = [self._value(value.name, None) for value in mine]
        if not operands:
            return self._value("?", None)
        return self._apply("concat", operands, {"dim": 0})[0]

    def _one(self, op: str, /, *operands: Any, name: str | None = None, **attrs: Any) -> Value:
        return self._apply(op, operands, attrs, name)[0]


# -- for folders that write graphs op by op --------------------------------------------------------


def apply(
    graph: Core, op: str, operands: Sequence[Any], attrs: Mapping[str, Any]
) -> Sequence[Value]:
    """Add an op by its name; its results, with those that nobody can ask for."""
    return graph._apply(op, operands, dict(attrs))


def scalar(graph: Core, number: float) -> Value:
    """A number as a value of the graph, the same one each time."""
    return graph._scalar(number)


def last_label(graph: Core) -> str:
    """The label of the op that was added last."""
    return graph._nodes[-1].name


def input_of(graph: Core, name: str) -> Value | None:
    """The input that was declared under a name, or None."""
    return graph._inputs.get(name)
