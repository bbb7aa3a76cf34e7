"""Names that the user took stay the user's where plans are proposed without a GPU."""

from __future__ import annotations

import pytest

import cudnngraph as cg
from cudnngraph.device.rules import changed
from cudnngraph.rewrite.passes import prepared
from tests.names import GRAPHS, with_names_taken


@pytest.mark.parametrize("which", GRAPHS)
def test_a_graph_whose_names_are_taken_is_explained(which: str) -> None:
    with changed(mask_copy_min_scores=0):
        spec = with_names_taken(GRAPHS[which][0](), prepared)
        found = cg.explain(spec, "nvidia-h200", kernels=True)
    made = {name for step in found.steps for name in step.spec.outputs}
    assert set(spec.outputs) <= made
