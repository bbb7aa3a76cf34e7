"""The reference executor: it runs a graph by what every op means in torch.

It runs graphs on CPU tensors, and stands in for single ops on a GPU where cuDNN has no plan. Every
op is computed in the graph's compute dtype from operands converted to it; the result is then
rounded to the dtype of its tensor. With ``dtype=torch.float64`` nothing is rounded anywhere but
where rounding is what an op means (``quantize``): the yardstick for accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..ir.spec import GraphSpec, Node, TensorSpec, once, overlaps_itself, same_layout
from ..ops import aten
from ..ops.base import LOW_PRECISION, Rule, Tensors
from ..ops.operands import need
from ..ops.table import OPS

# MKL's vector math looks up the CPU in its first call and keeps the raw answer for a moment before
# the one that it means, without a lock. If that call is a parallel one, another of its threads may
# take a kernel of low accuracy for it: exp, sqrt, tanh, erf, log, sin and cos off by 1e-4, in
# float64 by 3e-9 (pytorch#188792). A call on one element has one thread. The dtype and the device
# are given because a user may have set others, by which MKL would not be called.
torch.exp(torch.zeros(1, dtype=torch.float32, device="cpu"))

_Prepare = Callable[[Tensors], "list[torch.Tensor | None]"]

#: What every op means, by its name: a rule takes operands, and attributes in canonical form.
RULES: Mapping[str, Rule] = {name: row.reference for name, row in OPS.items()}


def _widened(values: Tensors, dtype: torch.dtype) -> list[torch.Tensor | None]:
    return [
        value.to(dtype)
        if value is not None and value.dtype is not dtype and value.dtype.is_floating_point
        else value
        for value in values
    ]


def apply(node: Node, inputs: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    """Run one op in ``dtype``; results are not yet rounded to their tensors' dtypes."""
    result = RULES[node.op](_widened(inputs, dtype), dict(node.attrs))
    return tuple(_widened(result if isinstance(result, tuple) else (result,), dtype))


def run(
    spec: GraphSpec, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The outputs of ``spec`` for ``inputs``, both in the order of declaration.

    Results have the declared dtypes, or ``dtype`` throughout when one is given (float64 for the
    yardstick); their strides are torch's own.
    """
    return prepared(spec, dtype)(inputs)


def prepared(
    spec: GraphSpec, dtype: torch.dtype | None = None
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """:func:`run` of one graph, whose names are looked up once and not at every call."""
    return once(spec, ("reference", dtype), _prepare, spec, dtype)


def _prepare(
    spec: GraphSpec, dtype: torch.dtype | None
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    place: dict[str | None, int] = {None: 0}  # values[0] stands for what is not given
    for name in (*spec.inputs, *(name for node in spec.nodes for name in node.results)):
        place.setdefault(name, len(place))
    steps = _steps(spec, dtype, place)
    outputs = tuple(place[name] for name in spec.outputs)
    behind = [None] * (len(place) - 1 - len(spec.inputs))
    many = len(spec.inputs)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(inputs) != many:
            raise ValueError(f"{len(inputs)} tensors for {many} inputs")
        values: list[torch.Tensor | None] = [None, *inputs, *behind]
        device = inputs[0].device if inputs else torch.device("cpu")
        for op, attrs, compute, operands, prepare, results, gone in steps:
            given = [values[at] for at in operands]
            if op == "expand" and need(given[0]).dim() == 0:
                given = [torch.full((), need(given[0]).item(), dtype=compute, device=device)]
            wide = _widened(given, compute) if prepare is None else prepare(given)
            made = RULES[op](wide, attrs)
            several = made if isinstance(made, tuple) else (made,)
            for number, at, kept in results:
                value = several[number]
                if value is not None:
                    if value.dtype.is_floating_point and value.dtype is not kept:
                        value = value.to(compute).to(kept)
                    values[at] = value
            for at in gone:
                values[at] = None
        return [need(values[at]) for at in outputs]

    return run


# An op, its attributes, the dtype that it computes in, the places of its operands, what prepares
# those, of each result its number, place and dtype, and the places that no later op reads.
_Step = tuple[
    str,
    dict[str, Any],
    torch.dtype,
    tuple[int, ...],
    _Prepare | None,
    list[tuple[int, int, torch.dtype]],
    tuple[int, ...],
]


def _steps(
    spec: GraphSpec,
    dtype: torch.dtype | None,
    place: Mapping[str | None, int],
) -> list[_Step]:
    """The ops in order, their tensors by ``place``."""
    last_use = {name: index for index, node in enumerate(spec.nodes) for name in node.operands}
    dtypes = {name: dtype or tensor.dtype for name, tensor in spec.tensors.items()}
    dtypes |= dict.fromkeys(_exact_numbers(spec), dtype or torch.float64)
    steps: list[_Step] = []
    for index, node in enumerate(spec.nodes):
        results = [
            (number, place[name], dtypes[name])
            for number, name in enumerate(node.outputs)
            if name is not None
        ]
        gone = {
            place[name]
            for name in node.operands
            if last_use[name] == index and name not in spec.outputs
        }
        operands = tuple(place[name] for name in node.inputs)
        compute = _computes_in(spec, node) if dtype is None else dtype
        prepare: _Prepare | None = None
        if node.op == "aten":
            prepare = _for_torch(spec, node, compute, named_dtypes=dtype is None)
        steps.append((node.op, dict(node.attrs), compute, operands, prepare, results, tuple(gone)))
    return steps


def _computes_in(spec: GraphSpec, node: Node) -> torch.dtype:
    """The dtype that an op computes in: the graph's, or float64 where it reads or makes that."""
    names = (*node.operands, *node.results)
    wide = any(spec.tensors[name].dtype == torch.float64 for name in names)
    return torch.float64 if wide else spec.compute_dtype


def _exact_numbers(spec: GraphSpec) -> set[str]:
    """The constants that an op in float64 reads, which are not rounded to float32 for it."""
    made = {node.results[0] for node in spec.nodes if node.op == "constant"}
    wide = (node for node in spec.nodes if _computes_in(spec, node) == torch.float64)
    return {name for node in wide for name in node.operands if name in made} - {*spec.outputs}


def _for_torch(
    spec: GraphSpec, node: Node, compute: torch.dtype, *, named_dtypes: bool
) -> _Prepare:
    """Make the function that prepares the operands of an op of torch's own.

    They are widened, unless the op itself names the dtypes that it works in, or shows bits. They
    lie in memory as declared, since the op may go by that. Tensors between the ops of a graph are
    float32; if the op names one 16-bit dtype, they are rounded to it, as in torch.
    """
    declared = [None if name is None else spec.tensors[name] for name in node.inputs]
    between = [name is not None and name not in spec.inputs for name in node.inputs]
    attrs = dict(node.attrs)
    named = aten.named_dtypes((attrs["args"], attrs["kwargs"])) if named_dtypes else frozenset()
    narrow = next(iter(named)) if len(named) == 1 and named <= {*LOW_PRECISION} else None

    def rounded(value: torch.Tensor | None, made: bool) -> torch.Tensor | None:
        if value is None or narrow is None or not made or value.dtype is not torch.float32:
            return value
        return value.to(narrow)

    form_of_bits = declared[0] if aten.overload(attrs["overload"]) in aten.OF_BITS else None

    def prepare(values: Tensors) -> list[torch.Tensor | None]:
        if form_of_bits is not None:
            return [need(values[0]).to(form_of_bits.dtype)]
        wide = list(map(rounded, values, between)) if named else _widened(values, compute)
        return [
            value if value is None or form is None else _laid_out(value, form)
            for value, form in zip(wide, declared, strict=True)
        ]

    return prepare


def _laid_out(value: torch.Tensor, form: TensorSpec) -> torch.Tensor:
    """The same in memory as ``form`` lies."""
    if value.shape != form.shape or same_layout(form.shape, value.stride(), form.stride):
        return value
    if overlaps_itself(form.shape, form.stride):
        return value
    made = torch.empty_strided(form.shape, form.stride, dtype=value.dtype, device=value.device)
    return made.copy_(value)


def run_into(
    spec: GraphSpec, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Like :func:`run`, but writes to given tensors of the declared strides and dtypes.

    An output may lie over an input of the same form, of which another one is made.
    """
    results = prepared(spec)(inputs)
    if len(results) > 1:  # what shows an input is read before an output is written there
        written = {output.untyped_storage()._cdata for output in outputs[:-1]}
        shown = (result.untyped_storage()._cdata in written for result in results)
        results = [
            each.clone() if show else each for each, show in zip(results, shown, strict=True)
        ]
    for result, output in zip(results, outputs, strict=True):
        output.copy_(result)
