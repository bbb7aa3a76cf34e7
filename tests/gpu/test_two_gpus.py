"""Two processes over NCCL, each on its own GPU: training, synchronised norms, choice of plans."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("two_gpus_worker.py")
LIMIT_S = 120.0  # after which a rank says what its threads are at, and ends

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.alone,  # a rank's kernels keep a GPU busy while they wait for the other's
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The reports of the two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with contextlib.ExitStack() as stack:
        running = []
        for rank in range(2):
            command = [sys.executable, str(WORKER), str(rank), str(folder / "meet"), str(LIMIT_S)]
            out = stack.enter_context(open(folder / f"{rank}.out", "wb"))
            err = stack.enter_context(open(folder / f"{rank}.err", "wb"))
            environment = {"PYTHONPATH": path, "CUDNNGRAPH_CACHE_DIR": str(folder / "plans")}
            process = subprocess.Popen(
                command, stdout=out, stderr=err, env={**os.environ, **environment}
            )
            stack.callback(stack.enter_context(process).kill)
            running.append(process)
        codes = [process.wait(2 * LIMIT_S) for process in running]
    errors = [(folder / f"{rank}.err").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"{r}.out").read_text().splitlines()[-1]) for r in range(2)]


def test_ddp_trains_as_with_torchs_modules(told: list[Any]) -> None:
    for rank in told:
        theirs, ours = rank["ddp"]["losses"]
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert max(rank["ddp"]["gradients"]) < 1e-5
    assert told[0]["ddp"]["weight"] == told[1]["ddp"]["weight"]
    assert told[0]["ddp"]["losses"] != told[1]["ddp"]["losses"], "each rank has data of its own"


def test_synchronised_norms_are_torchs(told: list[Any]) -> None:
    assert max(rank["sync"] for rank in told) < 1e-5


def test_all_ranks_run_the_plans_that_one_has_chosen(told: list[Any]) -> None:
    assert told[0]["plans"] == told[1]["plans"]
    assert told[0]["plans"] != ["None"]
