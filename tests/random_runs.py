"""Many random graphs, spread over processes that take one after another.

:func:`run` is for tests and scripts. A process that dies is noted with the seed that it was at, and
another goes on behind that seed; a seed that takes longer than its limit ends its process too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.backend import env
from cudnngraph.backend.candidates import UNCHECKED, replay
from cudnngraph.backend.plan import KERNEL
from cudnngraph.executor import reference
from cudnngraph.runtime.program import Program
from cudnngraph.select.trial import StepTrial
from tests import apart, numerics, random_graphs

SEED_LIMIT_S = 60.0
LOADING_S = 240.0  # more for the first seed of a process, which loads cuDNN, maybe off a cold disk
KINDS = ("right", "refused", "wrong", "fatal")

if __name__ != "__main__":  # in the server, so that a child need not; a CPU run may have none
    with contextlib.suppress(cg.BackendUnavailable):
        env.frontend()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a seed; a negative seed is a process that died outside of any.

    ``text`` says what is wrong, why it is refused, or how its process died; ``without_digits``
    counts results that are all rounding, by torch too.
    """

    seed: int
    kind: str
    text: str = ""
    without_digits: int = 0
    seconds: float = 0.0


class _Warned(logging.Handler):
    """A handler that keeps the warnings of checks that fail by themselves."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.failures: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if UNCHECKED in record.getMessage():
            self.failures.append(record.getMessage())


def work(case: Mapping[str, Any], skip: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """A child's share, for :mod:`tests.apart`; its marks are seeds."""
    os.environ["CUDNNGRAPH_CACHE_DIR"] = folder = tempfile.mkdtemp(dir=case["cache"])
    assert str(settings.current().cache_dir) == folder, "the settings were read before"
    done = set(skip)
    warned = _Warned()
    logging.getLogger("cudnngraph").addHandler(warned)
    made = _programs()
    loading_s = LOADING_S
    for seed in (seed for seed in case["seeds"] if str(seed) not in done):
        yield str(seed), None
        warned.failures.clear()
        made.clear()
        limit_s = case["limit_s"] + loading_s
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # ends the process, wherever it is
        loading_s = 0.0
        start = time.monotonic()
        policy = cg.Policy(tune="heuristic", verify=case["verify"])
        if case["autotune"] and seed % case["autotune"] == 0:
            policy = cg.Policy(
                tune="autotune", verify=case["verify"], max_candidates=2, budget_s=0.2
            )
        verdict = random_graphs.judge(random_graphs.case(seed), case["device"], policy)
        cg.cache_clear()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        outcome = verdict.outcome
        if outcome == "right" and warned.failures:
            outcome = f"wrong: {warned.failures[0]}"
        refused = next((why for program in made for why in _refused_kernels(program)), None)
        if outcome == "right" and refused:
            outcome = f"wrong: {refused}"
        yield str(seed), [outcome, verdict.without_digits, time.monotonic() - start]


def diagnose(case: Mapping[str, Any], skip: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """As :func:`work`, for seeds that were wrong: which of their steps are, each on random data."""
    os.environ["CUDNNGRAPH_CACHE_DIR"] = tempfile.mkdtemp(dir=case["cache"])
    done = set(skip)
    made = _programs()
    for seed in (seed for seed in case["seeds"] if str(seed) not in done):
        yield str(seed), None
        signal.setitimer(signal.ITIMER_REAL, case["limit_s"])
        made.clear()
        policy = cg.Policy(tune="heuristic", verify=case["verify"])
        verdict = random_graphs.judge(random_graphs.case(seed), case["device"], policy)
        said = [line for program in made for line in _of_steps(program)]
        cg.cache_clear()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        yield str(seed), [f"{verdict.outcome}; " + "; ".join(said or ["no step is wrong"]), 0, 0.0]


def _programs() -> list[Program]:
    """A list to which all programs are added that are made from here on."""
    made: list[Program] = []
    init = Program.__init__

    def noted(self: Program, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    Program.__init__ = noted  # type: ignore[method-assign, assignment]
    return made


def _refused_kernels(program: Program) -> Iterator[str]:
    """Yield which generated kernels the checks of plans did not let through, and why."""
    for step in program.steps:
        for decision in step.decisions:
            kernel = decision.choice is not None and decision.choice.engine == KERNEL
            if kernel and not decision.accepted and step.kind == "torch":
                ops = " ".join(node.op for node in step.spec.nodes)
                yield f"a kernel was refused: {decision.choice} of {ops}: {decision.reason}"


def _of_steps(program: Program) -> Iterator[str]:
    """Yield what is wrong with each step of a program, run alone."""
    policy = cg.Policy(allow_tf32=program._allow_tf32, tune="heuristic", verify="off")
    for step in program.steps:
        trial = StepTrial(step.spec, policy, program.device)
        if step.choice is not None:
            why = trial.why_wrong(replay(step.spec, step.choice, program.device.index or 0))
        else:
            trial.launch(None)()
            wanted = reference.run(step.spec, trial._inputs, torch.float64)
            errors = map(numerics.relative_error, trial._outputs, wanted)
            why = ", ".join(f"off by {error:.2g}" for error in errors if not error < 0.02)
        if why:
            spec = step.spec
            ops = " ".join(node.op for node in spec.nodes if node.op != "constant")
            forms = [
                (t.shape, t.stride, str(t.dtype))
                for t in (spec.tensors[name] for name in spec.inputs)
            ]
            yield f"{step.choice or 'torch'} of {ops} {forms}: {why}"


def run(
    seeds: Sequence[int],
    *,
    device: str,
    processes: int,
    verify: str = "off",
    autotune: int = 0,
    limit_s: float = 3600.0,
    seed_limit_s: float = SEED_LIMIT_S,
    gpus: int = 1,
    function: str = "tests.random_runs:work",
    heard: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Return the outcome of each seed, without those that ``limit_s`` cuts off.

    One seed of ``autotune`` is autotuned with next to no budget, none for 0. ``heard`` is told each
    outcome as it comes.
    """
    outcomes = []
    until = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="random-graphs-", ignore_cleanup_errors=True) as cache:
        common = {"device": device, "verify": verify, "autotune": autotune, "cache": cache}
        common["limit_s"] = seed_limit_s
        shares = [list(seeds[at::processes]) for at in range(processes)]
        cases = [{**common, "seeds": share} for share in shares if share]
        said = apart.run(function, cases, jobs=processes, limit_s=limit_s + 60.0, gpus=gpus)
        for number, mark, what in said:
            made = _outcome(number, mark, what)
            outcomes.append(made)
            heard(made)
            if time.monotonic() > until:
                said.close()  # type: ignore[attr-defined]
                break
    return sorted(outcomes, key=lambda each: each.seed)


def _outcome(number: int, mark: str, what: Any) -> Outcome:
    if isinstance(what, dict):
        why = str(what["died"])
        if mark == apart.ALL:
            return Outcome(-1 - number, "fatal", f"process {number} died between seeds: {why}")
        if why == "SIGALRM":
            why = "takes too long (SIGALRM)"
        return Outcome(int(mark), "fatal", why)
    verdict, without_digits, seconds = what
    kind, _, text = verdict.partition(": ")
    return Outcome(int(mark), kind, text, without_digits, seconds)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Rows in Markdown: all, by way, by dtype, and by family of ops; a case is in each of its
    families."""
    counts: dict[str, Counter[str]] = {"all": Counter()}
    for outcome in outcomes:
        if outcome.seed < 0:
            counts["all"][outcome.kind] += 1
            continue
        case = random_graphs.case(outcome.seed)
        way = "forward and backward" if case.trained else "fused module" if case.fused else "graph"
        dtype = str(case.dtype).removeprefix("torch.") + (", TF32" if case.tf32 else "")
        for row in ("all", way, dtype, *sorted(case.families)):
            counts.setdefault(row, Counter())[outcome.kind] += 1
            counts[row]["cases"] += 1
    ways = ["all", "graph", "fused module", "forward and backward"]
    ways += sorted(row for row in counts if "float" in row)
    lines = ["| | cases | right | refused | wrong | fatal |", "|---|---|---|---|---|---|"]
    for row in (*ways, *random_graphs.FAMILIES):
        if row in counts:
            cells = [row, *(counts[row][kind] for kind in ("cases", *KINDS))]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def findings(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each seed that is not right."""
    return [
        f"- seed {each.seed}, {each.kind}: {' '.join(each.text.split())[:400]}"
        for each in outcomes
        if each.kind != "right"
    ]
