"""A worker without a GPU: it says what cudnngraph.worker says, and behaves as it is told.

    python stand_in_worker.py '{"3": "hangs", "5": "is right"}' LOG GPU

The engines are tried in the order given. Every attempt is a line in LOG.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from pathlib import Path


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def attempt(engine: str, behaviour: str) -> str:
    """What is wrong with an engine's plan, if this process lives to tell."""
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
    return "" if behaviour == "is right" else behaviour


def main() -> None:
    behaviours, log = json.loads(sys.argv[1]), Path(sys.argv[2])
    if "start" in behaviours:
        if behaviours["start"] == "unusable":
            say({"unusable": "AcceleratorError: CUDA-capable device(s) is/are busy or unavailable"})
        sys.exit(0)
    say({"ready": os.getpid()})
    for line in sys.stdin:
        task = json.loads(line)
        if behaviours.get("task") == "is lost":
            os._exit(9)
        rejected = {choice[0] for choice, _ in task["rejected"]}
        outcomes: list[dict[str, object]] = []
        blob, failed = None, False
        asked = [str(task["choice"][0])] if "choice" in task else list(behaviours)
        for index, engine in enumerate(asked):
            choice = [int(engine), []]
            reason = "not tried again"
            if int(engine) not in rejected:
                with log.open("a") as file:
                    file.write(f"{task['spec']['name']} {engine} {os.getpid()}\n")
                say({"trying": choice})
                try:
                    reason = attempt(engine, behaviours[engine])
                except RuntimeError as error:
                    say({"id": task["id"], "failed": f"RuntimeError: {error}"})
                    failed = True
                    break
            outcomes.append(
                {
                    "index": index,
                    "choice": choice,
                    "tag": f"eng{engine}",
                    "accepted": not reason,
                    "reason": reason,
                    "workspace_bytes": 0,
                    "wrong": reason.startswith("wrong"),
                }
            )
            if not reason:
                blob = base64.b64encode(f"plan {engine}".encode()).decode()
                break
        if failed:
            continue
        wrong = None if blob is not None or not outcomes else outcomes[-1]["reason"]
        say({"id": task["id"], "outcomes": outcomes, "blob": blob, "error": 1e-4, "wrong": wrong})


if __name__ == "__main__":
    main()
