"""Random graphs, forward and backward, by plans that were checked: none wrong, none fatal.

    pytest tests/gpu/test_random_graphs.py --random-graphs 1500     more cases than the tier runs

``docs/results/h200_random_graphs.py`` runs thousands and writes a page.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests import random_graphs, random_runs

CASES = 60
FOUND = (  # what was wrong in a sweep on an H200, by no fault of a plan
    *(58, 358),  # a step of constants alone, which no check took
    *(135, 429, 610, 770, 1299),  # torch's pooling of images of one row or column
    *(138, 357, 1210, 1561),  # float32 by cuDNN's exp and tanh
    *(1763, 3216, 4730, 2468),  # data that hid it
    *(2500, 2560, 2930, 7670),  # a step ahead of what it reads; TF32 by operands that are cut off
)


def test_random_graphs_are_right_forward_and_backward(
    request: pytest.FixtureRequest, record_property: pytest.RecordProperty
) -> None:
    count = request.config.getoption("--random-graphs", None) or CASES
    seeds = sorted({*range(count), *FOUND})
    outcomes = random_runs.run(
        seeds,
        device="cuda",
        verify="inprocess",
        processes=max(1, min((os.cpu_count() or 2) - 1, count // 10)),
        gpus=torch.cuda.device_count(),
    )
    record_property("summary", "\n".join(random_runs.table(outcomes)))
    assert [each.seed for each in outcomes] == seeds, "every case was run"
    bad = [each for each in outcomes if each.kind != "right"]
    text = [f"{random_graphs.case(each.seed)}\n  {each.kind}: {each.text}" for each in bad]
    assert not bad, "\n".join([f"{len(bad)} of {len(seeds)} cases", *text[:40]])
