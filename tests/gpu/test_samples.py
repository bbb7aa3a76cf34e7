"""Every sample graph on the GPU: within the policy of float64, no farther from it than torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnngraph as cg
from tests import accuracy, numerics
from tests.samples import Case, enumerate_cases, in_float64, make_inputs, torch_eager
from tests.streams import call_late

CASES = [case for case in enumerate_cases() if case.on_gpu]
# Families that cuDNN has, unlike views, resampling, losses and torch's own ops.
FUSED = (
    *("conv_bias_act", "conv_bn_act", "conv_transpose", "matmul", "pointwise", "sdpa"),
    *("layer_norm", "rms_norm", "normalize"),
)


def _torch_answer(case: Case, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """torch at the same dtype, None where torch itself has no kernel for it on a GPU."""
    try:
        return torch_eager(case, inputs)
    except (NotImplementedError, RuntimeError):
        return None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sample_is_within_the_policy_of_float64_and_of_torch(
    case: Case, record_property: pytest.RecordProperty
) -> None:
    exe = check(case)
    torch_steps = [step for step in exe.steps if step.choice is None]
    ran = "torch steps" if torch_steps else "cut" if len(exe.steps) > 1 else "whole"
    record_property("ran", ran)
    if case.family in FUSED:
        record_property("ran of what cuDNN has", ran)


def check(case: Case, **options: Any) -> cg.Executable:
    """Run a case, and hold its results against float64 and torch; what ran it."""
    inputs = make_inputs(case, "cuda")
    exe = case.build().compile("cuda", allow_tf32=False, **options)
    outputs = call_late(exe, inputs)
    yardstick = torch_eager(case, in_float64(inputs))
    eager = _torch_answer(case, inputs)
    for name, output in outputs.items():
        assert output.stride() == exe.spec.tensors[name].stride
        numerics.check(
            output,
            yardstick[name],
            case.dtype,
            None if eager is None else eager[name],
            terms=case.terms,
            what=f"{name} by {[str(step.choice or 'torch') for step in exe.steps]}",
        )
    return exe


def test_accuracy_table_on_the_gpu(record_property: pytest.RecordProperty) -> None:
    rows = accuracy.measure("cuda")
    record_property("summary", accuracy.render(rows, torch.cuda.get_device_name()))
    for row in rows:
        assert row.ours <= row.bound, row
        assert row.ours <= row.limit_by_torch, row
