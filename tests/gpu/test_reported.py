"""Plans that are known, or were reported, to be wrong: each is run here, barred or not.

What is let through has to be right. What ``known_bad`` bars has to be wrong where an entry says
that it was measured; elsewhere what was found is printed, by which the entry can be narrowed.
"""

from __future__ import annotations

import re

import pytest
import torch

from cudnngraph.backend import env
from cudnngraph.backend.known_bad import TABLE, why_bad
from tests import apart
from tests.reported import EXAMPLES, Example

LIMIT_S = 120.0  # of one process
JOBS = 4


def test_what_is_let_through_is_right_and_what_is_barred_is_wrong(
    record_property: pytest.RecordProperty,
) -> None:
    version, capability = env.cudnn_version(), env.capability(0)

    def barred(example: Example, engine: int) -> bool:
        tf32 = example.allow_tf32
        return any(
            why_bad(graph.spec(), engine, version, capability=capability, allow_tf32=tf32)
            for graph in example.build()
        )

    lines: list[str] = []
    let_through: list[str] = []
    told: dict[str, list[bool]] = {}  # of each example: whether what is barred and ran was wrong
    for number, mark, outcome in apart.run(
        "tests.reported:plans",
        [example.id for example in EXAMPLES],
        jobs=JOBS,
        limit_s=LIMIT_S,
        gpus=torch.cuda.device_count(),
    ):
        example, engine = EXAMPLES[number], re.match(r"engine (\d+)", mark)
        assert engine is not None, (example.id, outcome)
        is_barred = barred(example, int(engine[1]))
        line = f"{example.id}: {mark}{', barred' if is_barred else ''}: {outcome}"
        lines.append(line)
        if isinstance(outcome, str) and outcome.startswith("not built"):
            continue
        if is_barred:
            told.setdefault(example.id, []).append(outcome != "right")
        elif outcome != "right":
            let_through.append(line)
    lines.sort()
    report = f"cuDNN {version}, compute capability {capability}\n" + "\n".join(lines)
    print(report)
    record_property("summary", report)
    assert lines, "no plan was tried"
    assert not let_through, "\n".join(let_through)
    for example in EXAMPLES:
        specs = [graph.spec() for graph in example.build()]
        here = [
            entry.reason
            for entry in TABLE
            if (version, capability) in entry.measured and any(map(entry.applies, specs))
        ]
        if here and example.id in told:
            assert any(told[example.id]), f"{example.id} is right here, and barred: {here}"
