"""One plan several times in a row of contenders: each place should give the same time.

    python docs/results/h200_protocol.py

Prints, for each of some convolutions, its plan's times by the timing protocol and how many launches
each CUDA graph has. Run it with another tree of this project in front of PYTHONPATH for another
protocol.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from h200_tiles import Case, spec_of

import cudnngraph as cg
from cudnngraph.backend.candidates import Proposals
from cudnngraph.device import timing
from cudnngraph.select.config import FINAL_ROUNDS
from cudnngraph.select.trial import StepTrial

PLACES = 4
CASES: tuple[Case, ...] = (
    {"batch": 64, "side": 7, "n": 32, "k": 960, "act": "bare", "dtype": "bfloat16", "op": "data"},
    {"batch": 2, "side": 56, "n": 240, "k": 576, "act": "bare", "dtype": "float16"},
    {"batch": 1, "side": 128, "n": 1024, "k": 112, "act": "bare", "dtype": "bfloat16"},
    {"batch": 64, "side": 48, "n": 112, "k": 224, "act": "", "dtype": "float16"},
    {"batch": 64, "side": 16, "n": 1536, "k": 192, "act": "relu", "dtype": "bfloat16"},
)


def measure(case: Case, device: torch.device) -> str:
    """A row of the table."""
    spec = spec_of({"kind": "1x1", **case})
    proposals = Proposals(spec, cg.Policy(), device.index, more=True)
    plan = next(
        made
        for each in proposals.candidates
        if (made := proposals.build(each, launch=False)[1]) is not None
    )
    trial, stream = StepTrial(spec, cg.Policy(), device), torch.cuda.Stream()
    time.sleep(0.2)  # so that the GPU is at rest before the first
    contenders: list[Any] = [timing.Captured([trial.launch(plan)], stream) for _ in range(PLACES)]
    times = timing.interleave(contenders, rounds=FINAL_ROUNDS)
    cells = [f"{us:.2f} ({each.count})" for us, each in zip(times, contenders, strict=True)]
    return f"| {' | '.join([str(case), *cells])} |"


def main() -> None:
    """See the module's docstring."""
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for case in CASES:
        print(measure(case, device), flush=True)


if __name__ == "__main__":
    main()
