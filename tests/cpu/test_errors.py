"""Errors cross the borders of processes: each is copied and pickled with all that it says."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from cudnngraph import errors
from cudnngraph.errors import CudnnGraphError, Problem

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, CudnnGraphError)
]
#: A value for each parameter of the constructors, of every type that these take.
VALUES: dict[str, Any] = {
    "subject": "conv 'c1'",
    "problems": [Problem("conv 'c1'", "x is int32", "float16", "convert it"), Problem("y", "z")],
    "plan": "engine 4 (TILE=3)",
    "engine": 4,
    "reason": "no entry",
    "nearest": "0123456789abcdef0123",
    "differences": [("cudnn", "9.19", "9.24"), ("gpu", None, "H200")],
    "reasons": ["engine 4 is barred", "no engine"],
    "detail": "CUDNN_STATUS_NOT_SUPPORTED",
    "heading": "a GPU is not known",
}
ROADS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda error, protocol=protocol: pickle.loads(
            pickle.dumps(error, protocol)
        )
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


def _fields(kind: type[CudnnGraphError]) -> list[str]:
    """Return the parameters of a constructor of ours; none for one of Python's."""
    own = inspect.isfunction(kind.__init__)
    return list(inspect.signature(kind).parameters) if own else []


def _made(kind: type[CudnnGraphError]) -> CudnnGraphError:
    fields = _fields(kind)
    return kind(*[VALUES[name] for name in fields]) if fields else kind("two", "words")


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_arrives_with_all_its_fields(kind: type[CudnnGraphError], road: str) -> None:
    error = _made(kind)
    error.add_note("on rank 3")
    came = ROADS[road](error)
    assert came is not error and type(came) is kind
    assert (str(came), came.args) == (str(error), error.args)
    assert vars(came) == vars(error)
    assert set(vars(error)) >= set(_fields(kind)) - {"reason"}  # which is in the text alone


def test_there_are_errors_with_fields_of_their_own() -> None:
    assert len(KINDS) >= 12
    assert sum(len(vars(_made(kind))) >= 2 for kind in KINDS) >= 4


def test_a_fault_says_how_to_leave_its_plan_out() -> None:
    plan = errors.PlanFault("step 1 of 'g'", "engine 4 (KERNEL_CFG=2)", 4, "misaligned address")
    assert "by its plan, cuDNN engine 4 (KERNEL_CFG=2): misaligned address" in str(plan)
    assert 'Policy(exclude_engines=("eng4",))' in str(plan)
    kernel = errors.PlanFault("step 1 of 'g'", "kernel (lanes=8)", 1_000_000, "misaligned address")
    assert "by its plan, a generated kernel (lanes=8): misaligned address" in str(kernel)
    assert "Policy(kernels=False)" in str(kernel)
