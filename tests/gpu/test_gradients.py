"""Gradients of sample graphs on the GPU: within the policy of float64, no farther than torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cudnngraph as cg
from cudnngraph.runtime.compile import compile as compile_spec
from tests.coverage import row_of
from tests.gradients import check_at_dtype, differentiable, floating_inputs, upstream
from tests.samples import Case, enumerate_cases, make_inputs
from tests.streams import call_late


def _cases() -> Iterator[Case]:
    """Attention and norms whole; of the rest, whose backward is made of ops with samples of their
    own, one in five, and the first of each feature."""
    features = set()
    differentiated = (c for c in enumerate_cases() if c.on_gpu and differentiable(c))
    for place, case in enumerate(differentiated):
        whole = case.family in ("sdpa", "layer_norm", "rms_norm")
        if whole or place % 5 == 0 or row_of(case.id) not in features:
            yield case
        features.add(row_of(case.id))


CASES = list(_cases())


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
    saved = call_late(forward, inputs)
    made = call_late(backward, {**inputs, **saved, **given})
    results = {name: made[gradient.outgoing[name]] for name in wrt}
    what = f"by {[str(step.choice or 'torch') for step in backward.steps]}"
    check_at_dtype(case, gradient, inputs, saved, grads, results, what)
