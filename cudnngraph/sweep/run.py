"""Every plan that the library offers for the graphs of :mod:`~cudnngraph.sweep.patterns`, built and
checked by workers: what ``cudnngraph check`` does.

Results are kept as they come, so that a sweep which was ended goes on where it was. What is wrong,
or ends a process, is barred on this GPU from then on (:mod:`~cudnngraph.backend.found_bad`).
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..backend import env, found_bad
from ..backend.candidates import (
    UNCHECKED,
    Candidate,
    Proposals,
    multiplies_float32,
    why_passed_over,
)
from ..backend.plan import Choice
from ..device.allocation import names_shortage
from ..errors import NotSupported
from ..ir import versions
from ..ir.canonical import canonical
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import cuts, subgraph_of
from ..policy import Policy
from ..rewrite.passes import legalize
from ..select.processes import Server, Unusable, program
from ..select.rules import why_not_cudnn, why_split
from ..select.worker import from_choice, to_choice
from ..select.workers import MOST, Answer, Workers, cores
from .declare import Sample
from .patterns import samples

if TYPE_CHECKING:
    from plans_cache.findings import Findings

STATUSES = ("right", "wrong", "fault", "refused", "out of memory", "barred", "failed")
BAD = ("wrong", "fault")
BARRED_WORDS = ("known to be wrong", "barred by the policy", found_bad.WHERE)  # ours, not cuDNN's
AHEAD = 4  # candidates for each worker that are asked for before the oldest has its result
_OFF = re.compile(r"off by (\S+), at most (\S+) is right")

Row = dict[str, Any]
Place = tuple[str, bool]  # a step's digest, and whether TF32 is allowed


# -- what is swept ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One step to sweep. ``why_none`` says why it is never a plan, where it is not."""

    graph: str
    pattern: str
    spec: GraphSpec = field(repr=False, compare=False)
    digest: str
    allow_tf32: bool
    why_none: str = ""

    @property
    def place(self) -> Place:
        """The name by which results know it."""
        return self.digest, self.allow_tf32

    @property
    def policy(self) -> Policy:
        """The policy under which its plans are asked for."""
        return Policy(tune="autotune", allow_tf32=self.allow_tf32, verify="isolated")


def tasks(*, full: bool, only: str | None = None) -> Iterator[Task]:
    """The steps of the samples in order, each once; float32 products with TF32 too."""
    known: set[Place] = set()
    for sample in samples(full=full, only=only):
        for task in _of(sample):
            if task.place not in known:
                known.add(task.place)
                yield task


def _of(sample: Sample) -> Iterator[Task]:
    """The steps that a compiled graph asks cuDNN for first: all of it, or the parts of what is
    never one plan."""
    given = canonical(sample.build().spec())
    why = why_not_cudnn(given)
    if why is not None:
        yield Task(str(sample), sample.pattern, given, step_digest(given), False, why)
        return
    graph = CutGraph(legalize(given, Policy()))

    def parts(nodes: Group) -> Iterator[tuple[GraphSpec, str]]:
        spec = subgraph_of(graph, nodes)
        why = why_split(spec)
        below = cuts(graph, nodes) if why is not None else ()
        if not below:
            yield spec, why or ""
        for group in below[0] if below else ():
            if not (len(group) == 1 and graph.is_free(group[0])):
                yield from parts(group)

    found = list(parts(compute_nodes(graph.spec.nodes)))
    for spec, why in found:
        step = f": {spec.name}" if len(found) > 1 else ""
        for allow_tf32 in (False, True) if multiplies_float32(spec) else (False,):
            text = f"{sample}{step}" + (", TF32" if allow_tf32 else "")
            yield Task(text, sample.pattern, spec, step_digest(spec), allow_tf32, why)


# -- who is asked ----------------------------------------------------------------------------------


class Library(Protocol):
    """The library that a sweep asks; on a GPU :class:`OnGpu`."""

    most: int

    def candidates(self, task: Task) -> Sequence[Candidate]:
        """Every plan that is offered for a step. Raises :class:`NotSupported`."""

    def why_barred(self, task: Task, candidate: Candidate) -> str | None:
        """Why a candidate is not tried: it is known to be wrong on every such GPU."""

    def submit(self, task: Task, choice: Choice) -> Future[Answer]:
        """One candidate, built and checked in a process of its own."""


class OnGpu:
    """cuDNN and the workers of one GPU."""

    def __init__(self, device_index: int, server: Server | None = None) -> None:
        self._index = device_index
        self.most = max(1, min(MOST, cores() - 1))
        server = server or Server(partial(program, module="sweep.worker"))
        self._workers = Workers(device_index, self.most, server)

    def candidates(self, task: Task) -> Sequence[Candidate]:
        """See :class:`Library`. The ranking comes first, then the engines that it leaves out."""
        with torch.cuda.device(self._index):
            return Proposals(task.spec, task.policy, self._index, more=True, every=True).candidates

    def why_barred(self, task: Task, candidate: Candidate) -> str | None:
        """See :class:`Library`."""
        return why_passed_over(candidate, task.spec, task.policy, env.capability(self._index))

    def submit(self, task: Task, choice: Choice) -> Future[Answer]:
        """See :class:`Library`."""
        return self._workers.these(task.spec, task.policy, [choice])[0]


# -- results ---------------------------------------------------------------------------------------


def judged(future: Future[Answer]) -> Row:
    """The row of a candidate: its status, the reason, the error and its bound.

    Raises :class:`Unusable` where there are no workers.
    """
    try:
        answer = future.result()
    except Unusable:
        raise
    except RuntimeError as error:  # what a worker did not expect
        text = str(error)
        return {"status": "out of memory" if names_shortage(text) else "failed", "reason": text}
    if answer.faults:
        return {"status": "fault", "reason": next(iter(answer.faults.values()))}
    reasons = list(answer.refused)
    for outcome in answer.outcomes:
        if outcome.accepted:
            if answer.error is None:
                return {"status": "out of memory", "reason": "no memory to compare its results"}
            return {"status": "right", "error": answer.error}
        reasons.append(outcome.reason)
        if outcome.reason.startswith(UNCHECKED):
            return {"status": "failed", "reason": outcome.reason}
        if outcome.wrong:
            row: Row = {"status": "wrong", "reason": outcome.reason}
            numbers = _OFF.search(outcome.reason)
            if numbers is not None:
                row |= {"error": float(numbers[1]), "bound": float(numbers[2])}
            return row
    reason = "; ".join(reasons)
    if names_shortage(reason):
        return {"status": "out of memory", "reason": reason}
    barred = any(words in reason for words in (*BARRED_WORDS, "Deselecting"))
    return {"status": "barred" if barred else "refused", "reason": reason[:200]}


@dataclass
class Results:
    """All that is known of an environment, from the lines of its file.

    ``plans`` has the results of each step's candidates, ``done`` the steps that are at an end.
    """

    plans: dict[Place, dict[Choice, Row]] = field(default_factory=dict)
    done: dict[Place, Row] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Results:
        """Rows that are no results are left out."""
        made = cls()
        for row in rows:
            made.take(row)
        return made

    def take(self, row: Row) -> None:
        """One more row."""
        step, tf32 = row.get("step"), row.get("tf32")
        if not isinstance(step, str) or not isinstance(tf32, bool):
            return
        if row.get("status") in STATUSES and isinstance(row.get("reason", ""), str):
            try:
                choice = to_choice([row["engine"], row["knobs"]])
            except (KeyError, TypeError, ValueError):
                return
            self.plans.setdefault((step, tf32), {})[choice] = row
        elif type(row.get("offered")) is int and isinstance(row.get("signature"), str):
            self.done[step, tf32] = row

    def counts(self, places: Iterable[Place] | None = None) -> dict[str, int]:
        """Return the number of candidates of each status."""
        chosen = self.plans if places is None else places
        found = Counter(
            row["status"] for place in chosen for row in self.plans.get(place, {}).values()
        )
        return {status: found[status] for status in STATUSES}

    def bad(self, places: Iterable[Place] | None = None) -> list[Row]:
        """The rows of what is wrong."""
        chosen = self.plans if places is None else places
        return [
            row
            for place in chosen
            for row in self.plans.get(place, {}).values()
            if row["status"] in BAD
        ]


def barred_by(results: Results) -> tuple[list[Row], list[Row]]:
    """The rows of ``steps`` and of ``patterns`` in the file of what is known bad.

    A choice that is wrong where TF32 is allowed is so where it is not. A pattern's engine is barred
    where at least :data:`found_bad.LEAST_SIZES` sizes were tried and it was right for none.
    """
    steps = [
        {
            "step": row["step"],
            "graph": row.get("graph", ""),
            "engine": row["engine"],
            "knobs": row["knobs"],
            "tf32": _holds(row),
            "reason": row.get("reason", "")[:300],
        }
        for row in results.bad()
    ]
    tried: dict[tuple[str, bool, int], dict[str, list[Row]]] = {}
    for place, done in results.done.items():
        for choice, row in results.plans.get(place, {}).items():
            if row["status"] in ("right", *BAD):
                engine = (done["signature"], place[1], choice.engine)
                tried.setdefault(engine, {}).setdefault(place[0], []).append(row)
    patterns = []
    for (signature, tf32, number), sizes in tried.items():
        rows = [row for each in sizes.values() for row in each]
        if len(sizes) >= found_bad.LEAST_SIZES and all(row["status"] in BAD for row in rows):
            named = f"engine {number} is right for none of {len(sizes)} sizes of this pattern"
            patterns.append(
                {
                    "pattern": signature,
                    "graph": rows[0].get("pattern", ""),
                    "engine": number,
                    "tf32": None if tf32 or all(_holds(row) is None for row in rows) else False,
                    "reason": f"{named}: {rows[0].get('reason', '')[:200]}",
                }
            )
    return steps, patterns


def _holds(row: Row) -> bool | None:
    """The policies that a finding holds for: None for all, False if TF32 is not allowed."""
    return False if row.get("float32") and not row["tf32"] else None


def write_known_bad(
    store: Findings, results: Results, environment: Mapping[str, str], **told: Any
) -> tuple[int, int]:
    """Bar what is wrong; how many steps' choices and patterns' engines that are."""
    steps, patterns = barred_by(results)
    store.write_known_bad(
        {
            "schema": versions.FINDINGS,
            "environment": dict(environment),
            "checked": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **told,
            "graphs": len(results.done),
            "counts": results.counts(),
            "steps": steps,
            "patterns": patterns,
        }
    )
    return len(steps), len(patterns)


# -- the sweep -------------------------------------------------------------------------------------


@dataclass
class _Waiting:
    """A candidate that was asked for, or the end of a step (``candidate`` None)."""

    task: Task
    candidate: Candidate | None
    future: Future[Answer] | None = None
    row: Row = field(default_factory=dict)


def run(
    todo: Sequence[Task],
    library: Library,
    store: Findings,
    results: Results,
    *,
    deadline: float | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> bool:
    """Sweep what has no result yet, in order; whether it came to the end before ``deadline``
    (``time.monotonic``).

    Each result is taken into ``results`` and kept in ``store`` before the next. What is still asked
    for when this is interrupted is dropped, and asked for again another time.
    """
    waiting: deque[_Waiting] = deque()
    left = [task for task in todo if task.place not in results.done]
    finished = len(todo) - len(left)
    tell(finished, len(todo))
    try:
        for task in left:
            for each in _asked(task, library, results):
                waiting.append(each)
                while len(waiting) > AHEAD * library.most:
                    finished += _settle(waiting.popleft(), store, results)
                    tell(finished, len(todo))
                    if deadline is not None and time.monotonic() >= deadline:
                        return False
        while waiting:
            finished += _settle(waiting.popleft(), store, results)
            tell(finished, len(todo))
            if deadline is not None and time.monotonic() >= deadline and waiting:
                return False
        return True
    finally:
        for each in waiting:
            if each.future is not None:
                each.future.cancel()


def _asked(task: Task, library: Library, results: Results) -> Iterator[_Waiting]:
    """The candidates of a step that have no result, each submitted, and its end."""
    refused: list[str] = [task.why_none] if task.why_none else []
    candidates: Sequence[Candidate] = ()
    if not refused:
        try:
            candidates = library.candidates(task)
        except NotSupported as refusal:
            refused = list(refusal.reasons)
    known = results.plans.get(task.place, {})
    for candidate in candidates:
        if candidate.choice in known:
            continue
        barred = library.why_barred(task, candidate)
        if barred is not None:
            yield _Waiting(task, candidate, row={"status": "barred", "reason": barred[:200]})
        else:
            yield _Waiting(task, candidate, library.submit(task, candidate.choice))
    signature = found_bad.pattern(task.spec)
    ended: Row = {"graph": task.graph, "signature": signature, "offered": len(candidates)}
    if refused:
        ended["refused"] = [reason[:200] for reason in refused[:3]]
    yield _Waiting(task, None, row=ended)


def _settle(each: _Waiting, store: Findings, results: Results) -> int:
    """Wait for a result and keep it; 1 at the end of a step."""
    task = each.task
    row: Row = {"step": task.digest, "tf32": task.allow_tf32}
    if each.candidate is not None:
        engine, knobs = from_choice(each.candidate.choice)
        row |= {"engine": engine, "knobs": knobs}
    row |= each.row if each.future is None else judged(each.future)
    if row.get("status") in BAD:
        float32 = multiplies_float32(task.spec)
        row |= {"graph": task.graph, "pattern": task.pattern, "float32": float32}
    store.add(row)
    results.take(row)
    return int(each.candidate is None)
