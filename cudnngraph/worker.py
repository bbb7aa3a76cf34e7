"""A process that builds and checks plans for another: ``python -m cudnngraph.worker GPU``.

It reads tasks from standard input and writes messages to standard output, a line of JSON each. A
task has an ``id`` and says what to do:

- ``first``: the first plan of cuDNN's ranking for ``spec`` under ``policy`` that passes, but for
  those in ``rejected``;
- ``one``: a given ``choice``, as the search asks for it;
- ``check``: a ``choice`` that was made before, for its numbers alone.

Before each attempt it says ``trying``. Where it dies then, whoever reads knows of what. It ends
when its input does, and when it had nothing to do for :data:`IDLE_S` seconds.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import torch

from . import verification, wire
from .backend import env
from .backend.plan import Choice, Outcome, Plan
from .errors import NotSupported
from .ir import GraphSpec
from .key import step_digest
from .policy import Policy

IDLE_S = 30.0
_CHECKS_KEPT = 4
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9

Message = dict[str, Any]


def from_choice(choice: Choice) -> list[Any]:
    """A choice as JSON data."""
    return [choice.engine, [list(knob) for knob in choice.knobs]]


def to_choice(data: Any) -> Choice:
    """The choice that :func:`from_choice` made ``data`` of."""
    engine, knobs = data
    return Choice(int(engine), tuple((str(name), int(value)) for name, value in knobs))


def from_outcome(outcome: Outcome) -> Message:
    """An outcome as JSON data."""
    candidate = outcome.candidate
    return {
        "index": candidate.index,
        "choice": from_choice(candidate.choice),
        "tag": candidate.tag,
        "accepted": outcome.accepted,
        "reason": outcome.reason,
        "workspace_bytes": outcome.workspace_bytes,
        "wrong": outcome.wrong,
    }


class Worker:
    """What one process has at hand: the checks of the graphs that it was asked about last."""

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        self._checks: OrderedDict[str, verification.Checks] = OrderedDict()
        self._trying: list[Message] = []

    def answer(self, task: Mapping[str, Any], say: Any) -> Message:
        """The last message of a task."""
        spec, policy = wire.to_spec(task["spec"]), wire.to_policy(task["policy"])

        def tell(choice: Choice) -> None:
            say({"trying": from_choice(choice)})

        if task["task"] == "check":
            choice = to_choice(task["choice"])
            tell(choice)
            why, error = verification.check(spec, policy, choice, self._index)
            return {"wrong": why, "error": error}
        rejected = {to_choice(choice): str(why) for choice, why in task["rejected"]}
        if task["task"] == "first":
            found = verification.Checks(
                spec, policy, self._index, rejected=rejected, tell=tell
            ).first()
            outcomes = [from_outcome(outcome) for outcome in found.outcomes]
            blob = None if found.plan is None else _blob(found.plan)
            return {"outcomes": outcomes, "error": found.error, "blob": blob}
        return self._one(spec, policy, to_choice(task["choice"]), rejected, tell)

    def _one(
        self,
        spec: GraphSpec,
        policy: Policy,
        choice: Choice,
        rejected: Mapping[Choice, str],
        tell: Any,
    ) -> Message:
        place = step_digest(spec)
        checks = self._checks.get(place)
        if checks is None:
            checks = verification.Checks(spec, policy, self._index, tell=tell, more=True)
            self._checks[place] = checks
            while len(self._checks) > _CHECKS_KEPT:
                self._checks.popitem(last=False)
        checks.take(rejected, tell)
        for candidate in checks.candidates:
            if candidate.choice == choice:
                outcome, plan, error = checks.attempt(candidate)
                blob = None if plan is None else _blob(plan)
                return {"outcomes": [from_outcome(outcome)], "error": error, "blob": blob}
        raise NotSupported(str(choice), ["the heuristics do not propose it here"])


def _blob(plan: Plan) -> str | None:
    """The serialized plan as text; None where the frontend does not give one."""
    try:
        return base64.b64encode(plan.serialize()).decode()
    except Exception:  # the frontend's own errors have no common base
        return None


def _tasks(source: TextIO) -> Iterator[Message]:
    """Tasks as they come. The process ends with its input, in the middle of a task too."""
    waiting: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in source:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            yield json.loads(waiting.get(timeout=IDLE_S))
        except queue.Empty:
            return


def _end_with_parent() -> None:
    """Have the system end this process when its parent dies, where it can."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def main() -> None:
    """See the module's docstring."""
    _end_with_parent()
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no message
    index = int(sys.argv[1])

    def say(message: Message) -> None:
        messages.write(json.dumps(message) + "\n")

    try:
        torch.cuda.set_device(index)
        torch.empty(1, device=torch.device("cuda", index))
        env.handle(index)
    except Exception as error:
        say({"unusable": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
        return
    say({"ready": os.getpid()})
    worker = Worker(index)
    for task in _tasks(sys.stdin):
        try:
            answer = worker.answer(task, say)
        except NotSupported as refusal:
            answer = {"refused": list(refusal.reasons)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        try:
            torch.cuda.synchronize(index)
            torch.cuda.empty_cache()
        except RuntimeError as error:  # the context is lost, and this process with it
            say({"died": str(error).splitlines()[0]})
            os._exit(1)
        say({**answer, "id": task["id"]})


if __name__ == "__main__":
    main()
