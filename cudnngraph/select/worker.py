"""A process that builds and checks plans for another one, forked by
:mod:`~cudnngraph.select.forkserver`.

It reads tasks from a socket and writes messages to it, a line of JSON each. A task has an ``id``
and says what to do:

- ``first``: the choice ``ahead``, where there is one, or else the first plan of cuDNN's ranking
  for ``spec`` under ``policy`` that passes, but for those in ``rejected``;
- ``rank``: cuDNN's candidates, best first;
- ``these``: each of the ``choices``, as the search asks for them, with an answer for each;
- ``check``: a choice that was made before, for its numbers alone.

Before each attempt it says ``trying``. Where it dies then, whoever reads knows of what. It ends
when the socket is closed, in the middle of a task too.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import queue
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from plans_cache.gate import Gate

from ..backend import env, handles
from ..backend.candidates import Candidate, Outcome
from ..backend.plan import KERNEL, Choice
from ..errors import BackendUnavailable, NotSupported
from ..ir import wire
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..policy import Policy
from . import forkserver, verification

_CHECKS_KEPT = 4
STACK_BYTES = 512  # half of the driver's own choice
_CU_LIMIT_STACK_SIZE = 0

Message = dict[str, Any]


def from_choice(choice: Choice) -> list[Any]:
    """A choice as JSON data."""
    return [choice.engine, [list(knob) for knob in choice.knobs]]


def to_choice(data: Any) -> Choice:
    """The choice that :func:`from_choice` made ``data`` of."""
    engine, knobs = data
    return Choice(int(engine), tuple((str(name), int(value)) for name, value in knobs))


def from_candidate(candidate: Candidate) -> Message:
    """A candidate as JSON data."""
    return {
        "index": candidate.index,
        "choice": from_choice(candidate.choice),
        "tag": candidate.tag,
        "why": candidate.why,
        "slower": candidate.slower,
    }


def to_candidate(data: Mapping[str, Any]) -> Candidate:
    """The candidate that :func:`from_candidate` made ``data`` of."""
    choice = to_choice(data["choice"])
    told = {name: data[name] for name in ("why", "slower") if name in data}
    return Candidate(data["index"], choice, data["tag"], **told)


def from_outcome(outcome: Outcome) -> Message:
    """An outcome as JSON data."""
    return {
        **from_candidate(outcome.candidate),
        "accepted": outcome.accepted,
        "reason": outcome.reason,
        "workspace_bytes": outcome.workspace_bytes,
        "wrong": outcome.wrong,
    }


class Worker:
    """The state of one worker: checks of the graphs that it was asked about last."""

    def __init__(self, device_index: int, say: Callable[[Message], None]) -> None:
        self._index = device_index
        self._say = say
        self._checks: OrderedDict[tuple[str, Policy], verification.Checks] = OrderedDict()

    def answer(self, task: Mapping[str, Any]) -> Message:
        """The last message of a task."""
        spec, policy = wire.to_spec(task["spec"]), wire.to_policy(task["policy"])
        gate = Gate(None if task["gate"] is None else Path(task["gate"]))
        rejected = {to_choice(choice): str(why) for choice, why in task["rejected"]}
        choices = [to_choice(choice) for choice in task["choices"]]
        if task["task"] == "check":
            self._tell(choices[0])
            plan, why, error = verification.built(spec, policy, choices[0], self._index, gate)
            blob = plan.serialize() if choices[0].engine == KERNEL and why is None else None
            text = None if blob is None else base64.b64encode(blob).decode()
            return {"wrong": why, "error": error, "blob": text}
        if task["task"] == "first":
            first = verification.Checks(
                spec, policy, self._index, rejected=rejected, tell=self._tell, gate=gate
            )
            return _found(first.first(None if task["ahead"] is None else to_choice(task["ahead"])))
        checks = self._checks_of(spec, policy, rejected)
        if task["task"] == "rank":
            return {"candidates": [from_candidate(each) for each in checks.candidates]}
        checks.take(rejected, gate)
        for number, choice in enumerate(choices):
            built_s, checked_s = checks.built_s, checks.checked_s
            try:
                made = _found(checks.of(choice))
            except NotSupported as refusal:
                made = {"refused": list(refusal.reasons)}
            made["built_s"] = checks.built_s - built_s
            made["checked_s"] = checks.checked_s - checked_s
            self._say({**made, "id": task["id"], "number": number})
        return {}

    def _tell(self, choice: Choice) -> None:
        self._say({"trying": from_choice(choice)})

    def _checks_of(
        self, spec: GraphSpec, policy: Policy, rejected: Mapping[Choice, str]
    ) -> verification.Checks:
        place = (step_digest(spec), policy)
        checks = self._checks.get(place)
        if checks is None:
            checks = verification.Checks(
                spec, policy, self._index, rejected=rejected, tell=self._tell, more=True
            )
            self._checks[place] = checks
            while len(self._checks) > _CHECKS_KEPT:
                self._checks.popitem(last=False)
        return checks


def _found(found: verification.Found) -> Message:
    """A result as JSON data, with the serialized plan as text; None if the frontend gives none."""
    blob = None
    if found.plan is not None:
        try:
            blob = base64.b64encode(found.plan.serialize()).decode()
        except Exception:  # the frontend's own errors have no common base
            blob = None
    outcomes = [from_outcome(outcome) for outcome in found.outcomes]
    return {"outcomes": outcomes, "error": found.error, "blob": blob}


def _tasks(source: TextIO) -> Iterator[Message]:
    """Tasks as they come. The process ends with its input, in the middle of a task too."""
    waiting: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in source:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(waiting.get())


def work(connection: socket.socket, device_index: int) -> None:
    """Answer the tasks that come by ``connection``; returns where there is no GPU to be had."""
    messages = connection.makefile("w", buffering=1)

    def say(message: Message) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    try:
        torch.cuda.set_device(device_index)
        torch.empty(1, device=torch.device("cuda", device_index))
        _keep_small()
        handles.handle(device_index)
    except Exception as error:
        say({"unusable": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
        return
    say({"ready": os.getpid()})
    worker = Worker(device_index, say)
    for task in _tasks(connection.makefile("r")):
        try:
            answer = worker.answer(task)
        except NotSupported as refusal:
            answer = {"refused": list(refusal.reasons)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        try:
            torch.cuda.synchronize(device_index)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        except RuntimeError as error:  # the context is lost, and this process with it
            say({"died": str(error).splitlines()[0]})
            os._exit(1)
        say({**answer, "id": task["id"]})


def _keep_small() -> None:
    """Have the driver set less memory aside for the threads that the GPU can run at a time.

    That is 0.13 GiB less on an H200. Only functions that call themselves would need it.
    """
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuCtxSetLimit(_CU_LIMIT_STACK_SIZE, ctypes.c_size_t(STACK_BYTES))


def load() -> forkserver.Work:
    """Import everything a worker needs, and return the function that it runs."""
    with contextlib.suppress(BackendUnavailable):  # each worker says so
        env.frontend()
    return work
