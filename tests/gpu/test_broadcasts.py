"""Operands that are repeated along some dims of what an anchor makes, by every engine that cuDNN
offers and as compiled: nothing wrong, nothing fatal. Each case runs in a process of its own.

    pytest tests/gpu/test_broadcasts.py --broadcasts 1500     more cases than the tier runs
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests import apart, broadcasts

LIMIT_S = 120.0  # of one process
CASES = 96


def test_every_engine_is_right_in_every_way_to_repeat(
    request: pytest.FixtureRequest, record_property: pytest.RecordProperty
) -> None:
    cases = broadcasts.drawn(request.config.getoption("--broadcasts", None) or CASES)
    sent = [broadcasts.described(case) for case in cases]
    said = []
    log = request.config.getoption("--broadcasts-log", None)
    for number, mark, outcome in apart.run(
        "tests.engines:broadcast",
        sent,
        jobs=max(2, (os.cpu_count() or 4) - 4),
        limit_s=LIMIT_S,
        gpus=torch.cuda.device_count(),
    ):
        said.append((number, mark, outcome))
        if log:
            with Path(log).open("a") as file:
                file.write(json.dumps([str(cases[number]), mark, outcome]) + "\n")
    tried = Counter(mark for _, mark, outcome in said if outcome == "right")
    print(f"{len(cases)} cases; right: {dict(tried.most_common())}")
    record_property("broadcasts", len(cases))
    bad = [
        f"{cases[number]}: {mark}: {outcome}"
        for number, mark, outcome in said
        if outcome not in ("right", "barred", "not built")
    ]
    assert not bad, "\n".join([f"{len(bad)} of {len(cases)} cases", *sorted(bad)[:60]])
    assert tried["as compiled"] == len(cases), "every case was run to its end"
    assert sum(tried.values()) > 1.5 * len(cases), "engines were tried"
