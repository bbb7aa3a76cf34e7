"""Workers without a GPU: they say what cudnngraph.select.worker says, and behave as they are told.

    python stand_in_worker.py '{"3": "hangs", "5": "is right"}' LOG FILE

forks them for the socket FILE. The engines are tried in the order given. Every attempt is a line in
LOG. It loads the fork server alone, since torch takes a second to import. A task with a gate runs
plans while it has a share of that; each run is a "begins" and an "ends" in LOG.runs.

Besides engines: "start" is what becomes of a worker, "task" of each task, "ranking" of the ranking
of engines, which is logged as engine -1; "idle_s" is how long the
fork server stays without a worker, and "forks" how many it may fork.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]

Say = Callable[[dict[str, object]], None]


def attempt(engine: str, behaviour: str, say: Say) -> str:
    """Return what is wrong with an engine's plan, if this process lives to tell."""
    if behaviour == "hangs":
        time.sleep(600)
    elif behaviour == "aborts":
        os.abort()
    elif behaviour == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "exits":
        os._exit(3)
    elif behaviour == "faults":
        say({"died": "CUDA error: misaligned address"})
        os._exit(1)
    elif behaviour == "fails":
        raise RuntimeError("a programming error")
    elif behaviour.startswith("takes "):
        time.sleep(float(behaviour.split()[1]))
        return ""
    elif behaviour.startswith("waits for "):
        while not Path(behaviour.removeprefix("waits for ")).exists():
            time.sleep(0.005)
        return ""
    return "" if behaviour == "is right" else behaviour


def work(
    behaviours: dict[str, str], log: Path, connection: socket.socket, device_index: int
) -> None:
    """A worker."""
    messages = connection.makefile("w")

    def say(message: dict[str, object]) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    start = behaviours.get("start", "")
    if start.startswith("takes "):
        time.sleep(float(start.split()[1]))
    elif start:
        if start == "unusable":
            say({"unusable": "AcceleratorError: CUDA-capable device(s) is/are busy or unavailable"})
        return
    say({"ready": os.getpid()})
    for line in connection.makefile("r"):
        task = json.loads(line)
        if behaviours.get("task") == "is lost":
            os._exit(9)
        try:
            answer(task, behaviours, log, say)
        except RuntimeError as error:
            say({"id": task["id"], "failed": f"RuntimeError: {error}"})


@contextlib.contextmanager
def run(gate: str | None, log: Path) -> object:
    """A plan runs in it."""
    if gate is None:
        yield
        return
    sys.path.insert(0, str(ROOT))
    from plans_cache.gate import Gate

    runs = log.with_name(f"{log.name}.runs")
    with Gate(Path(gate), 30.0).shared():
        with runs.open("a") as file:
            file.write("begins\n")
        yield
        with runs.open("a") as file:
            file.write("ends\n")


def answer(task: dict[str, object], behaviours: dict[str, str], log: Path, say: Say) -> None:
    """Do one task."""
    rejected = {choice[0]: why for choice, why in task["rejected"]}
    engines = [name for name in behaviours if name.isdigit()]
    if "ranking" in behaviours:
        if -1 in rejected:
            say({"id": task["id"], "refused": [f"cuDNN's ranking of its engines: {rejected[-1]}"]})
            return
        with log.open("a") as file:
            file.write(f"{task['spec']['name']} -1 {os.getpid()}\n")
        say({"trying": [-1, []]})
        attempt("-1", behaviours["ranking"], say)
    if task["task"] == "rank":
        candidates = [
            {"index": number, "choice": [int(name), []], "tag": f"eng{name}"}
            for number, name in enumerate(engines)
        ]
        say({"id": task["id"], "candidates": candidates})
        return
    ranked = [[int(each), []] for each in engines]
    if task["task"] == "first" and task["ahead"] is not None:
        ranked = [task["ahead"], *(each for each in ranked if each != task["ahead"])]
    for number, choice in enumerate(task["choices"] or ranked):
        engine = str(choice[0])
        reason = "not tried again"
        if int(engine) not in rejected:
            with log.open("a") as file:
                file.write(f"{task['spec']['name']} {engine} {os.getpid()}\n")
            say({"trying": choice})
            with run(task["gate"], log):
                reason = attempt(engine, behaviours.get(engine, "no such engine"), say)
        outcome = {
            "index": number,
            "choice": choice,
            "tag": f"eng{engine}",
            "accepted": not reason,
            "reason": reason,
            "workspace_bytes": 0,
            "wrong": reason.startswith("wrong"),
        }
        blob = None if reason else base64.b64encode(f"plan {engine}".encode()).decode()
        made = {"outcomes": [outcome], "blob": blob, "error": 1e-4, "wrong": reason or None}
        if task["task"] == "these":
            say({"id": task["id"], "number": number, **made})
        elif number == 0:
            outcomes = [outcome]
        else:
            outcomes.append(outcome)
        if task["task"] != "these" and not reason:
            break
    over = {} if task["task"] == "these" else {**made, "outcomes": outcomes}
    say({"id": task["id"], **over})


def load(behaviours: dict[str, str], log: Path) -> Callable[[socket.socket, int], None]:
    """Return the function that a worker runs."""
    return partial(work, behaviours, log)


def main() -> None:
    """Fork workers for who has the other end of the socket."""
    behaviours, log, file = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    path = ROOT / "cudnngraph" / "select" / "forkserver.py"
    found = importlib.util.spec_from_file_location("forkserver", path)
    forkserver = importlib.util.module_from_spec(found)
    found.loader.exec_module(forkserver)
    forkserver.IDLE_S = float(behaviours.get("idle_s", forkserver.IDLE_S))
    if "forks" in behaviours:
        os.fork = partial(limited, os.fork, [None] * int(behaviours["forks"]))
    forkserver.serve(file, lambda: load(behaviours, log))


def limited(fork: Callable[[], int], left: list[None]) -> int:
    """Fork, as often as that is allowed."""
    if not left:
        raise BlockingIOError("Resource temporarily unavailable")
    left.pop()
    return fork()


if __name__ == "__main__":
    main()
