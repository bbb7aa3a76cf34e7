"""Plans that are known, or were reported, to be wrong: each is run here, barred or not.

What is let through has to be right. What ``known_bad`` bars has to be wrong where an entry says
that it was measured; elsewhere the test says what was found, by which the entry can be narrowed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cudnngraph.backend import env
from cudnngraph.backend.known_bad import TABLE, why_bad
from tests.reported import EXAMPLES, Example

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("reported_worker.py")
LIMIT_S = 300.0
BAD = ("wrong", "dead")


@dataclass(frozen=True)
class Found:
    """What became of one plan: "right", "wrong", "dead" or "not built"."""

    engine: int
    became: str
    why: str


def measured(example: Example) -> Iterator[Found]:
    """Run every plan, in as many processes as it takes."""
    skip = 0
    while True:
        done = subprocess.run(
            [sys.executable, str(WORKER), example.id, str(skip)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        engine: int | None = None
        for line in done.stdout.splitlines():
            told = json.loads(line)
            if "refused" in told:
                return
            if "next" in told:
                engine, skip = told["engine"], told["next"] + 1
            else:
                assert engine is not None
                yield Found(engine, told["became"], told["why"])
                engine = None
        if done.returncode == 0:
            return
        if engine is not None:
            yield Found(engine, "dead", f"the process ended with {done.returncode}")
        else:
            assert done.returncode == 3, done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(example.id))
def test_what_is_let_through_is_right_and_what_is_barred_is_wrong(
    example: Example, record_property: pytest.RecordProperty
) -> None:
    version, capability = env.cudnn_version(), env.capability(0)
    specs = [graph.spec() for graph in example.build()]

    def barred(engine: int) -> bool:
        return any(
            why_bad(spec, engine, version, capability=capability, allow_tf32=example.allow_tf32)
            for spec in specs
        )

    found = list(measured(example))
    lines = [
        f"engine {each.engine}{' (barred)' if barred(each.engine) else ''}: {each.became}"
        + (f", {each.why}" if each.why else "")
        for each in found
    ]
    record_property("summary", f"{example.id}\n" + "\n".join(lines or ["no plan is offered"]))
    faulty = [line for line, each in zip(lines, found, strict=True) if each.became in BAD]
    assert not [line for line in faulty if "(barred)" not in line], lines
    ran = [each for each in found if barred(each.engine) and each.became != "not built"]
    if not ran or any(each.became in BAD for each in ran):
        return
    entries = [
        entry
        for entry in TABLE
        if any(map(entry.applies, specs)) and (version, capability) in entry.measured
    ]
    assert not entries, f"measured to be wrong on this release and GPU, and right here: {lines}"
    pytest.skip(f"cuDNN {version}, compute capability {capability}: barred and right, {lines}")
