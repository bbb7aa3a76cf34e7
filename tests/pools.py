"""Workers that behave as told, and whether processes have ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cudnngraph.select.processes import Server
from cudnngraph.select.workers import Workers
from tests.workers.user_programs import POLICY, STAND_IN, graph, until

GONE_S = 5.0  # in which what has no user any more ends


def lives(pid: int) -> bool:
    """Whether a process is there; a zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def gone(*pids: int, limit_s: float = GONE_S) -> bool:
    """Whether processes have ended in time."""
    return until(lambda: not any(map(lives, pids)), limit_s)


class Pool:
    """Workers that behave as told, and what they tried."""

    def __init__(self, folder: Path, behaviours: dict[str, str], most: int = 1) -> None:
        self._log = folder / "log"
        self._log.touch()
        told = json.dumps(behaviours)

        def command(file: int) -> Sequence[str]:
            return [sys.executable, str(STAND_IN), told, str(self._log), str(file)]

        self._forks = Server(command)
        self.workers = Workers(0, most, self._forks)

    def ask(self, name: str = "g") -> Any:
        return self.workers.first(graph(name), POLICY, {})

    @property
    def attempts(self) -> list[tuple[str, int, int]]:
        """Graph, engine and process of each, in order."""
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return [(name, int(engine), int(pid)) for name, engine, pid in lines]

    @property
    def processes(self) -> list[int]:
        return list(dict.fromkeys(pid for _, _, pid in self.attempts))

    @property
    def server(self) -> int:
        assert self._forks._process is not None
        return self._forks._process.pid
