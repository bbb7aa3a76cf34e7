"""Gradients of sample graphs on the GPU: within the policy of float64, no farther than torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

import cudnngraph as cg
from cudnngraph.runtime import compile as compile_spec
from tests import numerics
from tests.gradients import by_torch, differentiable, floating_inputs, upstream
from tests.samples import Case, enumerate_cases, in_float64, make_inputs

CASES = [case for case in enumerate_cases() if case.on_gpu and differentiable(case)]


def _named(exe: cg.Executable, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = exe(**{name: tensors[name] for name in exe.spec.inputs})
    names = exe.spec.outputs
    return dict(zip(names, [result] if len(names) == 1 else result, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_is_within_the_policy_of_float64_and_of_torch(case: Case) -> None:
    spec = case.build().spec()
    # torch has no gradient for the statistics of a norm.
    wrt = tuple(name for name in floating_inputs(spec) if name not in ("mean", "var"))
    gradient = cg.differentiate(spec, wrt)
    inputs = make_inputs(case, "cuda")
    grads = {name: value.cuda() for name, value in upstream(gradient).items()}
    forward = compile_spec(gradient.forward, "cuda", allow_tf32=False)
    backward = compile_spec(gradient.backward, "cuda", allow_tf32=False)
    given = {gradient.incoming[name]: value for name, value in grads.items()}
    poison = torch.full((64 << 20,), float("nan"), device="cuda")
    del poison
    results = _named(backward, {**inputs, **_named(forward, inputs), **given})
    clean = inputs
    if "dirty" in case.id:  # torch's own gradient is NaN there
        clean = {name: value.nan_to_num(0.0) for name, value in inputs.items()}
    exact = by_torch(case, in_float64(clean), in_float64(grads), wrt)
    try:
        eager = by_torch(case, clean, grads, wrt)
    except (NotImplementedError, RuntimeError):  # torch has no kernel for it on a GPU
        eager = {}
    terms = max(case.terms, *(math.prod(spec.tensors[name].shape) for name in spec.outputs))
    for name in wrt:
        result = results[gradient.outgoing[name]]
        assert result.dtype == spec.tensors[name].dtype
        if float(exact[name].norm()) < 1e-6:  # a softmax over one key has no gradient
            assert float(result.double().norm()) < 1e-3
            continue
        theirs = eager.get(name)
        # A float32 gradient beside 16-bit data comes of what anchors wrote in 16 bits.
        numerics.check(
            result.to(case.dtype),
            exact[name],
            case.dtype,
            None if theirs is None else theirs.to(case.dtype),
            terms=terms,
            what=f"grad of {name} by {[str(step.choice or 'torch') for step in backward.steps]}",
        )
