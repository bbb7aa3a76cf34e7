"""An op is a row of the table: its ports, its attributes, its inference rule and its reference.

A rule gets an :class:`InferContext`, checks the operands, brings the attributes into their one
canonical form and answers with a :class:`Result` per output port: shape, dtype and the order in
which the dims lie in memory. Rules report mistakes through :meth:`InferContext.problem` and return
None if the result cannot be known. A family of ops registers its rows in a module of its own, and
:mod:`~cudnngraph.ops.table` collects them. CONTRIBUTING.md says what else an op needs; a test
asserts that the tables agree. A reference takes operands and canonical attributes, and says in
torch what the op means.

Letters in shapes: N batch, C input channels, K output channels, R S kernel; B batch, H heads,
S sequence, D head dim; M N rows and columns of a product, K what it sums over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from ..errors import Problem
from ..ir.spec import TensorSpec

MAX_RANK = 8

#: Stands in the table for an attribute that has no default.
REQUIRED = inspect.Parameter.empty

LOW_PRECISION = (torch.float16, torch.bfloat16)
FLOATS = (*LOW_PRECISION, torch.float32, torch.float64)

#: The 8-bit floating formats: data of products and attention, results of quantize, nothing else.
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

QUANTIZED = (torch.int8, *FP8)


@dataclass(frozen=True)
class Result:
    """An inferred output: shape, dtype, and its dims from slowest to fastest."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]


@dataclass
class InferContext:
    """One op with its operands, as a rule sees it. ``attrs`` is brought into canonical form.

    ``numbers`` are the ports at which a Python number stands, which has no dtype of its own.
    """

    op: str
    name: str
    inputs: Mapping[str, TensorSpec | None]
    attrs: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    numbers: frozenset[str] = frozenset()

    def problem(self, what: str, expected: str = "", mend: str = "") -> None:
        """Report one mistake of this op."""
        self.problems.append(Problem(f"{self.op} '{self.name}'", what, expected, mend))

    def __getitem__(self, port: str) -> TensorSpec:
        value = self.inputs[port]
        assert value is not None, f"{self.op} needs {port}"
        return value

    def get(self, port: str) -> TensorSpec | None:
        """The operand at an optional port."""
        return self.inputs[port]


InferRule = Callable[[InferContext], Sequence[Result | None] | None]
Tensors = Sequence["torch.Tensor | None"]
Rule = Callable[[Tensors, Mapping[str, Any]], "torch.Tensor | tuple[torch.Tensor | None, ...]"]


#: Facts of an op that the rest of the package asks for.
#:
#: - ``convolution``, ``attention``, ``row_norm``: the family. A gradient of attention has
#:   ``attention_gradient`` besides; ``convolution_gradient``, of weights, and
#:   ``activation_gradient`` stand alone.
#: - ``packed``: sequences lie one behind the other. ``paged``: keys and values lie in pages.
#: - ``multiplies``: sums up products of its operands. ``adds_up``: sums up without products.
#: - ``grouped``: rows lie group behind group, and end where the operand ``ends`` says.
#: - ``across_images``: its result for one image depends on the others.
#: - ``own_data``: its result keeps its dtype, whatever the dtype of what it reads.
#: - ``holds_sizes``: its attributes have sizes of tensors in them.
#: - ``arranges``: a view of all elements, in another order or other dims.
#: - ``sinks_views``: a view in front of it may stand behind it. ``row_by_row``: it may run on rows
#:   as they lie in memory.
#: - ``fp16_safe``: if 16 bits hold its operands they hold its result.
#: - ``bounded_below``: its result is never far below zero, whatever it reads.
#: - ``makes_positive``, ``keeps_positive``: of any operands, or of positive ones.
Trait = Literal[
    "convolution",
    "convolution_gradient",
    "attention",
    "attention_gradient",
    "activation_gradient",
    "row_norm",
    "packed",
    "paged",
    "multiplies",
    "adds_up",
    "grouped",
    "across_images",
    "own_data",
    "holds_sizes",
    "arranges",
    "sinks_views",
    "row_by_row",
    "fp16_safe",
    "bounded_below",
    "makes_positive",
    "keeps_positive",
]


#: What a port takes, or a result is, where that is not a tensor with the dims of the first result.
#:
#: - ``channels``: (C,), a value a channel, along dim 1. ``scale``: one value, or a vector along the
#:   attribute ``dim``. ``expanded``: its dims are those of the attribute ``dims``.
#: - ``lengths``: (B,), of sequences. ``starts``: offsets of packed sequences. ``pages``: (B, P).
#: - ``tokens_q``, ``tokens_kv``: packed tokens (T, ...), of queries or of keys.
#: - ``heads``: (H,). ``row_stats``: (B, H, S). ``scalar``: one value.
#: - ``reduced``: the dims of the operand that the attributes ``dims`` and ``keepdim`` leave.
Role = Literal[
    "channels",
    "scale",
    "expanded",
    "lengths",
    "starts",
    "pages",
    "tokens_q",
    "tokens_kv",
    "heads",
    "row_stats",
    "scalar",
    "reduced",
]


@dataclass(frozen=True)
class Op:
    """One row of the table.

    ``inputs`` names the ports in order, optional ones end in "?". ``attrs`` maps each attribute to
    its default, to :data:`REQUIRED` where it has none. ``pointwise`` marks an op that works element
    by element (it may join an epilogue), ``view`` one whose result is its operand seen in another
    way: where strides allow, the same memory; ``torch_only`` one that cuDNN's Python frontend does
    not have.

    A single port that ends in "*" takes one operand or more: x* is x0, x1 and so on.

    ``traits`` are facts that others ask for (:data:`Trait`), ``roles`` say what ports take and
    ``result_roles`` what results are (:data:`Role`). ``stats_flag`` is the attribute that
    asks for results that the gradient needs. ``no_grad_ports`` take floats and get no gradient.
    ``positive_port`` is the one whose operand has to be positive.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    infer: InferRule
    reference: Rule
    pointwise: bool = False
    view: bool = False
    torch_only: bool = False
    traits: frozenset[str] = frozenset()
    roles: Mapping[str, Role] = field(default_factory=dict)
    result_roles: Mapping[str, Role] = field(default_factory=dict)
    stats_flag: str | None = None
    no_grad_ports: tuple[str, ...] = ()
    positive_port: str | None = None

    def has(self, trait: Trait) -> bool:
        """Whether the op has a trait."""
        return trait in self.traits

    @property
    def ports(self) -> tuple[str, ...]:
        """Port names without their marks."""
        return tuple(port.rstrip("?*") for port in self.inputs)

    def ports_of(self, count: int) -> tuple[str, ...]:
        """The names of the ports of a node with ``count`` operands, open ones counted."""
        if self.inputs and self.inputs[0].endswith("*"):
            return tuple(f"{self.ports[0]}{place}" for place in range(count))
        return self.ports

    def required(self, port: str) -> bool:
        """Whether ``port`` must be connected."""
        return f"{port}?" not in self.inputs


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix."""
    return str(dtype).removeprefix("torch.")


def _with_roles(names: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of ports or results, and the roles of those that have one."""
    words = [word.partition(":") for word in names.split()]
    roles = {name.rstrip("?*"): role for name, _, role in words if role}
    return tuple(name for name, _, _ in words), roles


#: Every op by its name, in the order in which the families were imported.
ROWS: dict[str, Op] = {}


def register(
    name: str,
    inputs: str,
    infer: InferRule,
    reference: Rule,
    outputs: str = "y",
    pointwise: bool = False,
    view: bool = False,
    torch_only: bool = False,
    *,
    traits: str = "",
    stats_flag: str | None = None,
    no_grad_ports: str = "",
    positive_port: str | None = None,
    **attrs: Any,
) -> None:
    """Add a row to the table; ports and traits are given as words. A name has one row.

    A port with a role is "port:role", "port?:role" if it may be left out; so are outputs. Raises
    ValueError for a name that is taken, and for traits, roles, ports or attributes that do not
    exist.
    """
    if name in ROWS:
        raise ValueError(f"op {name!r} is registered twice")
    ports, roles = _with_roles(inputs)
    results, result_roles = _with_roles(outputs)
    row = Op(
        name,
        ports,
        results,
        attrs,
        infer,
        reference,
        pointwise,
        view,
        torch_only,
        frozenset(traits.split()),
        roles,
        result_roles,
        stats_flag,
        tuple(no_grad_ports.split()),
        positive_port,
    )
    named = {*row.no_grad_ports, *([positive_port] if positive_port else [])}
    unknown = {*(row.traits - set(get_args(Trait))), *(named - set(row.ports))}
    unknown |= {*roles.values(), *result_roles.values()} - set(get_args(Role))
    if stats_flag is not None and stats_flag not in attrs:
        unknown.add(stats_flag)
    if unknown:
        raise ValueError(f"op {name!r} names what there is not: {', '.join(sorted(unknown))}")
    ROWS[name] = row
