"""Random graphs, forward and backward, as heuristics pick their plans: none wrong, none fatal.

    pytest tests/gpu/test_random_graphs.py --random-graphs 1500     more cases than the tier runs

``docs/results/h200_random_graphs.py`` runs thousands and writes a page.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests import random_graphs, random_runs

CASES = 60


def test_random_graphs_are_right_forward_and_backward(
    request: pytest.FixtureRequest, record_property: pytest.RecordProperty
) -> None:
    count = request.config.getoption("--random-graphs", None) or CASES
    outcomes = random_runs.run(
        range(count),
        device="cuda",
        processes=max(1, min((os.cpu_count() or 2) - 1, count // 10)),
        gpus=torch.cuda.device_count(),
    )
    record_property("summary", "\n".join(random_runs.table(outcomes)))
    assert [each.seed for each in outcomes] == list(range(count)), "every case was run"
    bad = [each for each in outcomes if each.kind != "right"]
    text = [f"{random_graphs.case(each.seed)}\n  {each.kind}: {each.text}" for each in bad]
    assert not bad, "\n".join([f"{len(bad)} of {count} cases", *text[:40]])
