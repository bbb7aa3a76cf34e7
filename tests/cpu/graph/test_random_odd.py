"""Random graphs of odd operands are right, whole, cut and as torch steps, or refused in words.

``tests/random_odd.py`` says how to make many more, or one.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import cudnngraph as cg
from cudnngraph.executor import torch_steps
from cudnngraph.ir.spec import GraphSpec
from tests.cuttings import every_cutting, rewritten
from tests.partitions import run_steps
from tests.random_odd import Case
from tests.random_tensors import F64, off
from tests.steps import outputs_of

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_ODD", "300"))
PART, CUTTINGS = 50, 4
# What a graph refuses and torch does not.
OURS = (
    *("is no dim of x", "expected dims of a tensor of 0 dims", "mean over no element"),
    *("do not mix", "expected one dtype", "is bool; expected float16"),
)


def compared(of: Case, spec: GraphSpec, found: Any) -> str:
    """What is wrong with results, "" for nothing."""
    for name, ours, right in zip(spec.outputs, found, of.right, strict=True):
        declared = spec.tensors[name]
        if (tuple(ours.shape), ours.dtype) != (declared.shape, declared.dtype):
            return f"{name} is {ours.dtype} {tuple(ours.shape)}, declared {declared}"
        if ours.numel() > 1 and ours.stride() != declared.stride:
            return f"{name} has strides {ours.stride()}, declared {declared.stride}"
        near = off(ours, right, [], of.dtype, 4096)
        if near and (of.dtype == F64 or "shape" in near or "another" in near):
            return f"{name} {near}"
    return ""


def one(seed: int) -> str:
    """What is wrong with the case of a seed: "" for nothing, "-" and why where it is refused."""
    of = Case(seed)
    try:
        spec = of.g.spec()
    except cg.GraphError as error:
        what = str(error.problems[0])
        known = of.refused or any(text in what for text in OURS)
        return f"- {what}" if known else f"refused: {what}\n  {of}"
    if of.refused:
        return f"torch refuses {of.refused}\n  {of}"
    repr(spec)
    inputs = [of.tensors[name] for name in spec.inputs]
    made = of.g.compile("cpu")(*inputs)
    made = made if isinstance(made, tuple) else (made,)
    if wrong := compared(of, spec, made):
        return f"{wrong}\n  {of}"
    outputs = outputs_of(spec)
    torch_steps.launcher(spec, inputs, outputs, allow_tf32=False)()
    if wrong := compared(of, spec, outputs):
        return f"as torch steps: {wrong}\n  {of}"
    for way in rewritten(spec):
        for steps in every_cutting(way)[:CUTTINGS]:
            cut = run_steps(way, steps, dict(zip(way.inputs, inputs, strict=True)), F64)
            wide = [cut[name].to(spec.tensors[name].dtype) for name in spec.outputs]
            for name, ours, right in zip(spec.outputs, wide, of.right, strict=True):
                if of.dtype == F64 and (near := off(ours, right, [], F64, 4096)):
                    return f"cut in {len(steps)}: {name} {near}\n  {of}"
    return ""


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_odd_graphs_are_torchs_or_refused(first: int) -> None:
    told = {seed: one(seed) for seed in range(first, min(first + PART, FIRST + COUNT))}
    wrong = [f"seed {seed}: {what}" for seed, what in told.items() if what and what[0] != "-"]
    assert not wrong, "\n".join(wrong)
