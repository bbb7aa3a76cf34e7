"""Checks: one op at a time while a graph is declared, and the whole graph before it is frozen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from numbers import Integral
from typing import Any

import torch

from ..errors import Problem
from ..ir.spec import DTYPE_NAMES, TensorSpec, dense_strides, numel, overlaps_itself
from .base import MAX_RANK, REQUIRED, InferContext
from .table import OPS


@dataclass(frozen=True)
class Checked:
    """The outcome for one op: canonical attributes, a spec per output port, and what was wrong."""

    attrs: tuple[tuple[str, Any], ...]
    results: tuple[TensorSpec | None, ...]
    problems: tuple[Problem, ...]


_MOST_ELEMENTS = 1 << 60  # so that strides and sizes in bytes fit 64 bits
_FEWER = f"fewer than 2^{_MOST_ELEMENTS.bit_length() - 1} elements"


def _is_addressable(shape: Sequence[int]) -> bool:
    """Whether strides tell the elements of a tensor apart, also of one that is empty."""
    return numel(max(n, 1) for n in shape) < _MOST_ELEMENTS


def check_node(
    op: str,
    name: str,
    inputs: Mapping[str, TensorSpec | None],
    attrs: Mapping[str, Any],
    numbers: Collection[str] = (),
) -> Checked:
    """Infer one op. Result specs carry the op's name; they are all None when anything was wrong.

    ``numbers`` are the ports at which a Python number stands.
    """
    row = OPS[op]
    call = InferContext(op, name, inputs, {**row.attrs, **attrs}, numbers=frozenset(numbers))
    for attr in attrs:
        if attr not in row.attrs:
            known = ", ".join(row.attrs) or "none"
            call.problem(f"no attribute '{attr}'", f"one of: {known}")
    for attr, value in call.attrs.items():
        if value is REQUIRED:
            call.problem(f"{attr} is missing", f"a value for {attr}")
    for port in row.ports_of(len(inputs)):
        if row.required(port) and inputs.get(port) is None:
            call.problem(f"{port} is missing", f"a value for {port}")
    results = None if call.problems else row.infer(call)
    if results is None or call.problems:
        return Checked((), (None,) * len(row.outputs), tuple(call.problems))
    for result in results:
        if result is not None and not _is_addressable(result.shape):
            call.problem(f"its result has the shape {result.shape}", _FEWER)
            return Checked((), (None,) * len(row.outputs), tuple(call.problems))
    specs = tuple(
        None
        if result is None
        else TensorSpec(name, result.shape, dense_strides(result.shape, result.order), result.dtype)
        for result in results
    )
    return Checked(tuple(sorted(call.attrs.items())), specs, ())


def check_shape(where: str, shape: Any) -> tuple[tuple[int, ...] | None, list[Problem]]:
    """A declared shape: whole numbers >= 0, at most 8 of them."""
    if isinstance(shape, Integral):
        shape = (shape,)
    if isinstance(shape, str):
        return None, [Problem(where, f"shape={shape!r} is a str", "whole numbers >= 0")]
    try:
        dims = tuple(shape)
    except TypeError:
        return None, [Problem(where, f"shape={shape!r} is not a sequence", "whole numbers >= 0")]
    if any(isinstance(n, bool) or not isinstance(n, Integral) or n < 0 for n in dims):
        return None, [Problem(where, f"shape={dims!r} is not made of whole numbers >= 0")]
    if len(dims) > MAX_RANK:
        return None, [Problem(where, f"shape has {len(dims)} dims", f"at most {MAX_RANK}")]
    if not _is_addressable(dims):
        return None, [Problem(where, f"has the shape {dims}", _FEWER)]
    return tuple(int(n) for n in dims), []


def check_stride(
    where: str, shape: Sequence[int], stride: Any, *, written: bool
) -> tuple[tuple[int, ...] | None, list[Problem]]:
    """Declared strides in elements. A tensor that is written may not overlap itself."""
    steps = tuple(stride) if isinstance(stride, (tuple, list, torch.Size)) else None
    if steps is None or any(
        isinstance(s, bool) or not isinstance(s, Integral) or s < 0 for s in steps
    ):
        return None, [Problem(where, f"stride={stride!r} is not made of whole numbers >= 0")]
    if len(steps) != len(shape):
        return None, [
            Problem(
                where,
                f"stride has {len(steps)} entries",
                f"{len(shape)}, one per dim of {tuple(shape)}",
            )
        ]
    if sum(max(n - 1, 0) * s for n, s in zip(shape, steps, strict=True)) >= _MOST_ELEMENTS or any(
        s >= _MOST_ELEMENTS for s in steps
    ):
        return None, [Problem(where, f"stride={steps} reaches too far", _FEWER)]
    if written and numel(shape) > 1 and overlaps_itself(shape, steps):
        return None, [
            Problem(where, f"stride={steps} makes elements overlap", "one place per element")
        ]
    return tuple(int(s) for s in steps), []


def check_dtype(where: str, dtype: Any) -> list[Problem]:
    """A declared dtype: one that the IR has a name for."""
    if isinstance(dtype, torch.dtype) and dtype in DTYPE_NAMES:
        return []
    names = [str(known).removeprefix("torch.") for known in DTYPE_NAMES]
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        mend = f"write torch.{name}" if name in names else ""
        return [Problem(where, f"dtype={dtype!r} is a str", "a torch.dtype", mend)]
    wanted = f"one of torch's {', '.join(names)}"
    return [Problem(where, f"dtype={dtype!r} is not supported", wanted)]


def check_name(where: str, name: Any) -> list[Problem]:
    """Inputs and outputs are keyword arguments of the executable, so names are identifiers."""
    if isinstance(name, str) and name.isidentifier() and not iskeyword(name):
        return []
    wanted = "letters, digits and _, with no digit in front, and no keyword"
    return [Problem(where, f"name {name!r} is not a Python identifier", wanted)]


def check_whole(
    inputs: Sequence[str], reached: Sequence[str], outputs: Sequence[tuple[str, str]]
) -> list[Problem]:
    """The rules that only the whole graph can break.

    ``reached`` are the inputs that some output depends on, ``outputs`` pairs of (declared name,
    value).
    """
    problems = []
    if not outputs:
        problems.append(
            Problem("graph", "has no output", "at least one", "call g.output(name, value)")
        )
    seen: dict[str, str] = {}
    for name, value in outputs:
        where = f"output '{name}'"
        if value in inputs:
            problems.append(Problem(where, f"is the input '{value}'", "the result of an op"))
        elif name in inputs:
            problems.append(
                Problem(
                    where, "has the name of an input", "a name of its own", "rename one of them"
                )
            )
        if value in seen:
            problems.append(
                Problem(
                    where, f"is the same value as output '{seen[value]}'", "one output per value"
                )
            )
        seen.setdefault(value, name)
    if outputs:
        used = {*reached, *seen}
        problems += [
            Problem(f"input '{name}'", "is not used by any output", "every input used", "remove it")
            for name in inputs
            if name not in used
        ]
    return problems
