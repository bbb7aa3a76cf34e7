"""Arguments of graph methods: made plain, or reported as problems of the graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..arguments import NotPlain, expected, items, neutral, plain, tensor_mend, wrong_kind
from ..errors import Problem
from ..ops.table import OPS
from .value import Value

if TYPE_CHECKING:
    from .builder import Graph


Method = TypeVar("Method", bound=Callable[..., Any])

# The annotation of an operand → whether there has to be one.
_OPERANDS = {"Value": True, "Operand": True, "Value | None": False}


def _reads(method: Method) -> Method:
    """A method of the builder that gets plain arguments (:mod:`~cudnngraph.arguments`), and
    operands that are values of its graph.

    What is none is reported here. In the place of an operand then stands an unknown value, in that
    of an attribute its default beside unknown operands, so that no further mistakes are found.
    """
    own = list(inspect.signature(method).parameters.values())[1:]
    order = [each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
    annotations = {each.name: str(each.annotation) for each in own}
    op = method.__name__
    defaults = {
        each.name: neutral(annotations[each.name]) if each.default is each.empty else each.default
        for each in own
    }
    operands = {name for name, annotation in annotations.items() if annotation in _OPERANDS}
    # The rule of an op checks its attributes, and a declaration what it declares.
    checks_kinds = op not in (*OPS, "input", "output")

    @wraps(method)
    def read(self: Graph, /, *args: Any, **named: Any) -> Any:
        if len(args) > len(order) or not named.keys().isdisjoint(order[: len(args)]):
            return method(self, *args, **named)  # Python says what is wrong
        given = {**dict(zip(order, args, strict=False)), **named}
        problems: list[Problem] = []
        attributes_fit = True
        for name, value in given.items():
            annotation = annotations.get(name, "Any")
            known = type(value) is Value and value.graph is self
            if (known and annotation != "Sequence[Value]") or (op, name) == ("output", "value"):
                continue
            if name in operands:
                needed = _OPERANDS[annotation]
                where = self._place(op, given)
                given[name] = self._operand(where, name, value, problems, needed=needed)
                continue
            try:
                if annotation == "Sequence[Value]":
                    given[name] = [
                        self._operand(
                            self._place(op, given), f"{name}{at}", item, problems, needed=True
                        )
                        for at, item in enumerate(items(value))
                    ]
                    continue
                tensor = "torch.Tensor" in annotation
                if not (tensor and tensor_mend(value)):  # an array is named as what it is
                    given[name] = plain(value, (torch.Tensor,) if tensor else ())
                found = wrong_kind("", name, given[name], annotation) if checks_kinds else []
            except NotPlain as reason:
                found = [Problem("", f"{name} {reason}", expected(annotation))]
            if found:
                problems += [replace(each, where=self._place(op, given)) for each in found]
                given[name] = defaults.get(name)
                attributes_fit = False
        self.problems += problems
        if not attributes_fit:
            if not operands:  # the declaration of one
                return Value(self, "?", None)
            given = {name: _unknown_of(self, value) for name, value in given.items()}
        return method(self, **given)

    return read  # type: ignore[return-value]


def _unknown_of(graph: Graph, value: Any) -> Any:
    """An operand, or a row of them, of which nothing is known."""
    if type(value) is list:
        return [_unknown_of(graph, each) if isinstance(each, Value) else each for each in value]
    if not isinstance(value, Value):
        return value
    return Value(graph, value.name if value.graph is graph else "?", None)


# Methods that take no part in declaring a graph.
_OTHERS = frozenset({"compile", "spec", "mark", "undo", "drop_unused_inputs"})


def declares(kind: type[Graph]) -> type[Graph]:
    """A class whose public methods, but for some, read their arguments by :func:`_reads`.

    Those of its bases become its own, and bear its name in errors and pickles.
    """
    members = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    for name, method in members.items():
        if inspect.isfunction(method) and not name.startswith("_") and name not in _OTHERS:
            method.__module__ = kind.__module__
            method.__qualname__ = f"{kind.__qualname__}.{name}"
            setattr(kind, name, _reads(method))
    return kind
