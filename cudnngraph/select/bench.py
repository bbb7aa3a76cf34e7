"""The bench on which the search builds, times and checks plans; on a GPU, trials on random data."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from ..backend.candidates import Candidate, Proposals
from ..backend.plan import Choice, Plan
from ..device.timing import HEAVY_US, measure
from ..errors import NotSupported
from ..executor.plans import replay
from ..ir.spec import GraphSpec
from ..policy import Policy
from .config import (
    ALIKE,
    ALIKE_ROUNDS,
    FINAL_ROUNDS,
    FINALIST_RATIO,
    MEMORY_PLACEMENTS,
    PLACED_ROUNDS,
    QUICK_ROUNDS,
    SPACER_BYTES,
    TRIALS_KEPT,
)
from .effort import COMPARING, GPU, IN_PLACE, MEASURING, Effort
from .graph_trial import GraphTrial
from .trial import StepTrial


class Bench(Protocol):
    """Builds, times and checks plans; on a GPU :class:`GpuBench`."""

    @property
    def effort(self) -> Effort:
        """What was done, and how long it took."""

    def alone(self) -> AbstractContextManager[None]:
        """A turn at the GPU for all that is timed within; a wait for a worker ends it early."""

    def proposals(self, spec: GraphSpec, known: Sequence[Candidate] | None = None) -> Any:
        """cuDNN's candidates with a ``build``, as those of
        :class:`~cudnngraph.backend.candidates.Proposals`; ``known`` if they were kept."""

    def expect(self, specs: Sequence[GraphSpec]) -> None:
        """The proposals of these steps will be asked for soon."""

    def ahead(self, spec: GraphSpec, count: int) -> None:
        """More plans of a step will be asked for: ``count`` may be built elsewhere before that."""

    def ready(self, spec: GraphSpec, choice: Choice) -> bool:
        """Whether a candidate that is asked for now needs no wait for a worker."""

    def kernels(self, parts: Sequence[tuple[GraphSpec, Choice]]) -> list[Plan | str]:
        """The generated kernels of steps, or why there is none."""

    def times_us(
        self, spec: GraphSpec, plans: Sequence[Plan | None], rounds: int
    ) -> list[float | str]:
        """Time of each plan of a step (None: torch) side by side, or why it did not run."""

    def chain_times_us(
        self,
        spec: GraphSpec,
        chains: Sequence[Sequence[tuple[GraphSpec, Plan | None]]],
        *,
        alike: bool = False,
    ) -> list[float] | None:
        """Time of each chain of steps that runs ``spec``, side by side; None without memory.

        ``alike``: the chains differ in a small part of their work.
        """

    def close(self) -> None:
        """Few plans are asked for from now on: those that were to be built ahead are not."""

    def why_wrong(self, spec: GraphSpec, plan: Plan) -> str | None:
        """Return what a plan does wrong, or None."""

    def passed(self, spec: GraphSpec, plan: Plan) -> bool:
        """Whether a plan is known to be right, without a check now."""

    def replay(self, spec: GraphSpec, choice: Choice) -> Plan:
        """The plan of a choice alone, to be kept."""


class GpuBench:
    """Trials on one GPU. Use it with that device current.

    Measurements hold ``alone()``, so that processes which tune on the same GPU at the same time
    take turns at it and only build in parallel.
    """

    _turn: ExitStack | None = None  # within :meth:`alone`: what to let go of
    _taken = False

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
        effort: Effort | None = None,
    ) -> None:
        self._policy = policy
        self._device = device
        self._alone = alone
        stream: Any = torch.cuda.Stream
        self._stream: torch.cuda.Stream = stream(device)
        self._trials: OrderedDict[int, StepTrial] = OrderedDict()
        self._chain: tuple[GraphSpec, GraphTrial] | None = (
            None  # the whole graph that was timed last
        )
        self.effort = effort or Effort()
        self.effort.let_go = self._let_go

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See :class:`Bench`."""
        if self._turn is not None:
            yield
            return
        self._turn = ExitStack()
        try:
            yield
        finally:
            self._let_go()
            self._turn = None

    def _let_go(self) -> None:
        if self._turn is not None:
            self._turn.close()
            self._taken = False

    @contextmanager
    def _measuring(self, kind: str) -> Iterator[None]:
        """A turn at the GPU, or the one that there is."""
        with ExitStack() as own:
            if not self._taken:
                with self.effort.spent(GPU):
                    (own if self._turn is None else self._turn).enter_context(self._alone())
                self._taken = self._turn is not None
            with self.effort.spent(kind):
                yield

    def proposals(self, spec: GraphSpec, known: Sequence[Candidate] | None = None) -> Any:
        """See :class:`Bench`; what is known is asked for again, to be built in this process."""
        return Proposals(spec, self._policy, self._device.index, more=True)

    def expect(self, specs: Sequence[GraphSpec]) -> None:
        """See :class:`Bench`."""

    def ahead(self, spec: GraphSpec, count: int) -> None:
        """See :class:`Bench`."""

    def ready(self, spec: GraphSpec, choice: Choice) -> bool:
        """See :class:`Bench`."""
        return True

    def kernels(self, parts: Sequence[tuple[GraphSpec, Choice]]) -> list[Plan | str]:
        """See :class:`Bench`."""
        return [self._kernel(spec, choice) for spec, choice in parts]

    def _kernel(self, spec: GraphSpec, choice: Choice) -> Plan | str:
        try:
            return self.replay(spec, choice)
        except NotSupported as refusal:
            return refusal.reasons[0]

    def _trial(self, spec: GraphSpec) -> StepTrial:
        found = self._trials.get(id(spec))
        if found is None:
            found = self._trials[id(spec)] = StepTrial(spec, self._policy, self._device)
        self._trials.move_to_end(id(spec))
        while len(self._trials) > TRIALS_KEPT:
            self._trials.popitem(last=False)
        return found

    def times_us(
        self, spec: GraphSpec, plans: Sequence[Plan | None], rounds: int
    ) -> list[float | str]:
        """See :class:`Bench`."""
        try:
            times = self._times_us(self._trial(spec), plans, rounds)
            if len(plans) == 1 or min(times) >= HEAVY_US:
                return list(times)
            # Where tensors lie moves a short kernel's time by some percent: so elsewhere too.
            taken: list[list[float]] = [times]
            kept: list[Any] = []
            for place in range(1, MEMORY_PLACEMENTS):
                kept.append(
                    torch.empty(place * SPACER_BYTES, dtype=torch.uint8, device=self._device)
                )
                kept.append(StepTrial(spec, self._policy, self._device))
                taken.append(self._times_us(kept[-1], plans, rounds))
            return [statistics.fmean(each) for each in zip(*taken, strict=True)]
        except torch.OutOfMemoryError:
            return ["out of memory"] * len(plans)

    def _times_us(self, trial: StepTrial, plans: Sequence[Plan | None], rounds: int) -> list[float]:
        launches = [trial.launch(plan) for plan in plans]
        quick = rounds == QUICK_ROUNDS
        rounds = rounds if quick else PLACED_ROUNDS
        with self._measuring(MEASURING if quick else COMPARING):
            return measure(launches, self._stream, rounds=rounds, quick=quick)

    def chain_times_us(
        self,
        spec: GraphSpec,
        chains: Sequence[Sequence[tuple[GraphSpec, Plan | None]]],
        *,
        alike: bool = False,
    ) -> list[float] | None:
        """See :class:`Bench`."""
        try:
            if self._chain is None or self._chain[0] is not spec:
                self._chain = (spec, GraphTrial(spec, self._policy, self._device))
            launches = [self._chain[1].launch(steps) for steps in chains]
            with self._measuring(IN_PLACE if alike else COMPARING):
                if alike:
                    return measure(
                        launches, self._stream, rounds=ALIKE_ROUNDS, drop_over=ALIKE, alike=True
                    )
                return measure(
                    launches, self._stream, rounds=FINAL_ROUNDS, drop_over=FINALIST_RATIO
                )
        except torch.OutOfMemoryError:
            self._chain = None
            return None

    def close(self) -> None:
        """See :class:`Bench`."""

    def rest(self) -> None:
        """Give the GPU's memory back; a later search goes on with the plans."""
        self.close()
        self._trials.clear()
        self._chain = None

    def why_wrong(self, spec: GraphSpec, plan: Plan) -> str | None:
        """See :class:`Bench`."""
        try:
            return self._trial(spec).why_wrong(plan)
        except torch.OutOfMemoryError:
            return None  # it cannot be checked here; the plan itself needs less

    def passed(self, spec: GraphSpec, plan: Plan) -> bool:
        """See :class:`Bench`."""
        return plan.verified is not None

    def replay(self, spec: GraphSpec, choice: Choice) -> Plan:
        """See :class:`Bench`."""
        return replay(spec, choice, self._device.index)
