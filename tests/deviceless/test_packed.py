"""Packed attention of what a graph makes, as cuDNN lists its plans."""

from __future__ import annotations

import pytest

import cudnngraph as cg
from tests.models import packed_training


@pytest.mark.usefixtures("driver")
def test_packed_attention_of_slices_of_what_a_graph_makes_is_of_plans() -> None:
    runs = {step.ops: step.runs_on for step in cg.explain(packed_training(), "nvidia-h200").steps}
    assert runs[("sdpa_varlen",)] == runs[("sdpa_varlen_backward",)] == "cuDNN"
