"""Sweeps of `cudnngraph check` with a stand-in for cuDNN: its answers, its tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import cudnngraph as cg
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Choice
from cudnngraph.select import workers
from cudnngraph.select.workers import Answer
from cudnngraph.sweep import run
from cudnngraph.sweep.run import Task

OFF = "wrong: 'y' is off by 0.5, at most 0.002 is right"
Judge = Callable[[Task, Choice], Answer]


def accepted(error: float | None = 1e-4) -> Answer:
    return Answer(outcomes=(Outcome(Candidate(0, Choice(0, ()), ""), True),), error=error)


def rejected(reason: str, *, wrong: bool = False) -> Answer:
    candidate = Candidate(0, Choice(0, ()), "")
    return Answer(outcomes=(Outcome(candidate, False, reason, wrong=wrong),))


def fault(choice: Choice) -> Answer:
    return Answer(faults={choice: f"{workers.LOST} died of SIGSEGV"}, wrong="died")


class Stand:
    """A library of three engines, the second of which has two configurations."""

    most = 2

    def __init__(self, judge: Judge = lambda task, choice: accepted()) -> None:
        self.judge = judge
        self.asked: list[tuple[str, bool, Choice]] = []
        self.listed: list[str] = []

    def candidates(self, task: Task) -> Sequence[Candidate]:
        self.listed.append(task.graph)
        if "pool" in task.pattern:
            raise cg.NotSupported("this graph", ["the frontend has no resampling"])
        choices = [Choice(4, ()), Choice(7, (("TILE", 1),)), Choice(7, (("TILE", 2),))]
        choices.append(Choice(9, ()))
        return [Candidate(n, choice, f"eng{choice.engine}") for n, choice in enumerate(choices)]

    def why_barred(self, task: Task, candidate: Candidate) -> str | None:
        return "known to be wrong: everywhere" if candidate.choice.engine == 9 else None

    def submit(self, task: Task, choice: Choice) -> Future[Answer]:
        self.asked.append((*task.place, choice))
        future: Future[Answer] = Future()
        try:
            future.set_result(self.judge(task, choice))
        except RuntimeError as error:
            future.set_exception(error)
        return future


def some(count: int = 4, only: str = "conv 3x3, relu(x + c), float16") -> list[Task]:
    return list(run.tasks(full=True, only=only))[:count]
