"""A GPU's steps on the CPU: cut as for a GPU, by the real library's answers, each step run here.

What cuDNN takes as one plan is run by the reference executor, and what it leaves to torch by the
code that runs it on a GPU, in the memory that the layout of the steps gives them. So all that is
ours is tried without a GPU: the cuts, what steps hand on, torch's steps. Plans are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import libraries
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference, torch_steps
from cudnngraph.explain.offline import _Walk
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime import compile as compiling
from cudnngraph.runtime import program
from cudnngraph.runtime.process import PROCESS
from cudnngraph.select import heuristic
from cudnngraph.select.decision import Selection, StepPlan

TARGET = "nvidia-h200"


class Program(program.Program):
    """Steps of a GPU's program, run on the CPU."""

    def __init__(self, spec: GraphSpec, device: torch.device, *rest: Any) -> None:
        super().__init__(spec, device, *rest)
        self.uses_cudnn = False
        free = self._layout.free
        self.torch_runs = tuple(
            None if number in free else self._simulated(step)
            for number, step in enumerate(self.steps)
        )
        self._number_places()

    def run(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """See :class:`cudnngraph.runtime.program.Program`; memory between steps is full of NaN
        at first."""
        self._steps_on(tensors, [], _filled(self.scratch_bytes), None)

    def _simulated(self, step: StepPlan) -> Any:
        if step.choice is not None:
            return partial(reference.run_into, step.spec)
        return torch_steps.prepare(step.spec, allow_tf32=False, device=self.device)


def _filled(size_bytes: int) -> torch.Tensor:
    return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)


def _refuse(part: GraphSpec) -> Any:
    raise NotSupported(f"graph '{part.name}'", ["every op is a step"])


def install(monkeypatch: pytest.MonkeyPatch, target: str | None = TARGET) -> None:
    """From now on the CPU runs graphs as the GPU ``target`` would be asked to; with None every op
    is a step of its own, and the library is not needed."""
    policy = cg.Policy(allow_tf32=False, tune="heuristic", verify="off")
    build = _refuse
    if target is not None:
        build = _Walk(target, policy, libraries.load_driver().usable).build

    def chosen(spec: GraphSpec, why: str) -> Selection:
        made = heuristic.heuristic(spec, policy, build)
        return Selection(made.steps, (None,) * len(made.steps))

    monkeypatch.setattr(compiling, "reference_only", chosen)
    monkeypatch.setattr(compiling, "Program", Program)
    monkeypatch.setattr(PROCESS, "scratch", lambda device, stream, size, plans: _filled(size))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    PROCESS.programs.clear()
