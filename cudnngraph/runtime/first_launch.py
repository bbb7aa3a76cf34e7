"""The first run of a program that this process has built: step by step, each plan marked before.

A plan that passed its check may still fault, on other data or at other addresses. The mark lets the
next process know what this one died of; where it lives on without its CUDA context, the error says
which plan that was. Either way the plan is withdrawn, and another one is taken from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import torch

from ..cache import lookup
from ..cache.codec import summary
from ..errors import PlanFault
from ..policy import Policy
from ..select.decision import StepPlan


class FirstRun:
    """The first run of a program; several threads may run it at once."""

    def __init__(
        self,
        steps: Sequence[StepPlan],
        policy: Policy,
        device: torch.device,
        kept: lookup.Rejected,
    ) -> None:
        self._steps = steps
        self._policy = policy
        self._device = device
        self._kept = kept

    def run(self, calls: Iterable[tuple[int, Callable[[], None]]]) -> None:
        """Call what launches the steps of these numbers on the current stream, and wait for each.

        Raises :class:`PlanFault` where a plan faults; what else is raised goes through.
        """
        with closing(self._kept.begin()) as mark:
            wait(self._device)  # what faulted before is no fault of these
            for number, call in calls:
                step = self._steps[number]
                choice = step.choice
                if choice is None:
                    call()
                    wait(self._device)
                    continue
                id = self._kept.id(step.spec, self._policy)
                if id is not None:
                    mark.set(id, (choice.engine, choice.knobs))
                try:
                    call()
                    wait(self._device)
                except Exception as error:
                    if not is_lost(self._device):
                        raise
                    why = next(iter(str(error).splitlines()), type(error).__name__)
                    self._kept.withdraw(
                        step.spec, self._policy, choice, f"its first launch faulted: {why}"
                    )
                    subject = f"step {number + 1}, {summary(step.spec)},"
                    raise PlanFault(subject, str(choice), choice.engine, why) from error
                mark.clear()


def wait(device: torch.device) -> None:
    """Until the current stream is done. Raises what a kernel that faulted left behind."""
    try:
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError as error:
        if "captur" not in str(error):  # another thread captures, and forbids all others to wait
            raise


def is_lost(device: torch.device) -> bool:
    """Whether nothing runs on the device any more, as after a fault; not so without memory."""
    try:
        wait(device)
    except RuntimeError:
        return True
    return False
