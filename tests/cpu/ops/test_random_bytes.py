"""Random graphs of int8 and FP8 are right by the policy of the tests, in the executor and as steps.

``tests/random_bytes.py`` says how to make many more, or one.
"""

from __future__ import annotations

import os

import pytest
import torch

from cudnngraph.executor import torch_steps
from tests import numerics
from tests.random_bytes import Case, attention, case, off
from tests.random_functions import ACTIVATIONS
from tests.random_tensors import F32
from tests.random_tensors import off as compared
from tests.steps import outputs_of

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_BYTES", "300"))
PART = 50


def by_executor(of: Case) -> dict[str, torch.Tensor]:
    made = of.g.compile("cpu")(**of.tensors)
    return dict(zip(of.made, made if isinstance(made, tuple) else (made,), strict=True))


def by_steps(of: Case) -> dict[str, torch.Tensor]:
    spec = of.g.spec()
    outputs = outputs_of(spec)
    inputs = [of.tensors[name] for name in spec.inputs]
    torch_steps.launcher(spec, inputs, outputs, allow_tf32=False)()
    return dict(zip(spec.outputs, outputs, strict=True))


def one(seed: int) -> str:
    """What is wrong with the case of a seed, "" for nothing."""
    of = case(seed)
    for run in (by_executor, by_steps):
        found = run(of)
        for name, ours in found.items():
            right = of.right(found, name)
            if ours.dtype == F32 and of.made[name].text in ACTIVATIONS:
                (x,) = of.made[name].operands
                near = compared(ours, right, [of.made[name].theirs(found[x])], F32, 1)
                wrong = f"{name} {near}" if near else ""
            else:
                wrong = off(of, name, ours, right)
            if wrong:
                return f"{run.__name__}: {wrong}\n{of}"
    return ""


def attends(seed: int) -> str:
    """What is wrong with the attention of a seed."""
    of = attention(seed)
    spec, right = of.graph().spec(), of.right()
    outputs = outputs_of(spec)
    inputs = [of.tensors[name] for name in spec.inputs]
    torch_steps.launcher(spec, inputs, outputs, allow_tf32=False)()
    made = of.graph().compile("cpu")(**of.tensors)
    for way, found in (("executor", made), ("steps", outputs)):
        for name, ours in zip(spec.outputs, found, strict=True):
            want = right[name]
            try:
                if name == "o":  # weights next to a tie are rounded to either side
                    bound = numerics.BOUNDS[f"{str(of.dtype)[6:]}, not rounded"]
                    assert numerics.relative_error(ours.double(), want) <= bound
                else:
                    numerics.check(ours, want, of.dtype, what=name)
            except AssertionError as error:
                return f"{way}, {name}: {error}\n{of}"
    return ""


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_random_attention_of_fp8_is_right(first: int) -> None:
    told = {seed: attends(seed) for seed in range(first, min(first + PART, FIRST + COUNT))}
    wrong = [f"seed {seed}: {what}" for seed, what in told.items() if what]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_random_graphs_of_8_bits_are_right(first: int) -> None:
    told = {seed: one(seed) for seed in range(first, min(first + PART, FIRST + COUNT))}
    wrong = [f"seed {seed}: {what}" for seed, what in told.items() if what]
    assert not wrong, "\n".join(wrong)
