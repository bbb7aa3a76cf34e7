"""Run the zoo: its models in processes of their own, within limits, and go on where a run stopped.

The cold start of a model in one way has a process of its own, with empty caches. Those that measure
nothing while they compile run side by side. One further process a model finds the caches filled,
compares the ways and times them. Several of them get ready side by side, and are timed one after
the other, when no other works; so do our warm starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...device import files
from .entries import Entry
from .one import READY, Job
from .results import Results, Row
from .ways import WAYS

ROOT = Path(__file__).resolve().parents[3]
TAIL = 300  # characters of what a process wrote that are told if it died
POLL_S = 0.05
NO_MEMORY = "OutOfMemoryError"


@dataclass(frozen=True)
class Options:
    """Options of a run. ``limit_s`` is of a process, ``budget_s`` of all of them; ``jobs`` cold
    starts run side by side. ``caches`` is a folder for the caches of compilers. ``retry`` measures
    what failed, ``again`` everything."""

    registry: str
    device: str
    tiny: bool
    ways: tuple[str, ...]
    caches: Path
    limit_s: float = 300.0
    budget_s: float = float("inf")
    jobs: int = 1
    retry: bool = False
    again: bool = False


class OutOfBudget(Exception):
    """No job can begin, or go on: the time of all is over."""


@dataclass
class Zoo:
    """One run: the results, what is told of each job, and where results go after each."""

    options: Options
    results: Results
    say: Callable[[str], object] = field(default=lambda line: None)
    save: Callable[[], object] = field(default=lambda: None)
    start: float = field(default_factory=time.monotonic)
    _ways: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _before: dict[str, Row] = field(default_factory=dict)
    _running: set[Process] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of results, by cold starts

    def run(self, entries: Sequence[Entry]) -> bool:
        """Measure what is not done; whether all of it was reached."""
        todo = [entry for entry in entries if not self._is_done(entry)]
        self.options.caches.mkdir(parents=True, exist_ok=True)
        try:
            for first in range(0, len(todo), self.options.jobs):
                self._batch(todo[first : first + self.options.jobs])
        except OutOfBudget:
            return False
        finally:
            for process in list(self._running):
                process.end()
            self._put_back()
            self.save()
        return True

    @property
    def _measures(self) -> bool:
        """Whether ways are measured: the reference executor of a CPU is only compared."""
        return self.options.device != "cpu"

    def _put_back(self) -> None:
        """Put back the row that a model had if there is but the half of a new one."""
        for name, before in self._before.items():
            row = self.results.rows.get(name, before)
            if row["status"] == "begun" and before["status"] != "begun":
                self.results.rows[name] = before
            elif row["status"] == "begun" and not row["ways"]:
                self.results.rows.pop(name, None)

    def _is_done(self, entry: Entry) -> bool:
        row = self.results.rows.get(entry.name)
        if self.options.again:
            return False
        if row is None or row["status"] in ("begun", "missing"):
            return False
        if row["status"] == "failed":
            return not self.options.retry
        return all(name in row["ways"] for name in self.options.ways)

    def _batch(self, entries: Sequence[Entry]) -> None:
        """Models whose cold starts may run side by side; then each is timed."""
        here = []
        for entry in entries:
            row = self._row(entry)
            why = entry.why_missing()
            if why:
                self._end(row, "missing", why)
            else:
                here.append((entry, row))
        if self._measures:
            self._cold_starts(here)
        begun = [(entry, row, self._timing(entry, row)) for entry, row in here]
        ready = [(entry, row, process) for entry, row, process in begun if process is not None]
        for _, _, process in ready:
            process.go()
        for _, _, process in ready:
            self._wait_for(process)
        for entry, row, process in ready:
            self._timed(entry, row, process, len(ready))
        for entry, row, process in ready:
            if len(ready) > 1 and (row["status"] == "failed" or _lacks_memory(row)):
                self._alone(entry, row, process.job.ways)

    def _alone(self, entry: Entry, row: Row, ways: Sequence[str]) -> None:
        """Time a model once more that failed, or had too little memory, beside others: where memory
        is short, cuDNN and other libraries have errors of their own."""
        row["status"] = "begun"
        for name in ways:
            row["ways"].get(name, {}).pop("error", None)
        process = self._timing(entry, row)
        if process is not None:
            process.go()
            self._wait_for(process)
            self._timed(entry, row, process, 1)

    def _row(self, entry: Entry) -> Row:
        """The row of a model that is to be measured; of an earlier run its cold starts stay."""
        size = entry.size(tiny=self.options.tiny)
        nothing: Row = {"ways": {}, "status": "begun"}
        old = self.results.rows.get(entry.name, nothing)
        self._before[entry.name] = old
        old = nothing if self.options.again else old
        asked = {*self.options.ways, *(name for name, way in old["ways"].items() if "us" in way)}
        self._ways[entry.name] = tuple(name for name in WAYS if name in asked)
        kept = ("cold_s", "beside", "building_bytes", "allocated_bytes", "reserved_bytes")
        ways = {
            name: {key: way[key] for key in kept if key in way}
            for name, way in old["ways"].items()
            if "cold_s" in way and name in asked
        }
        row: Row = {
            "name": entry.name,
            "library": entry.library,
            "inputs": ", ".join(map(str, size.inputs)),
            "dtype": str(entry.dtype if self._measures else torch.float32).removeprefix("torch."),
            "cut": "" if self.options.tiny else entry.cut,
            "run": len(self.results.runs) - 1,
            "status": "begun",
            "ways": ways,
        }
        self.results.rows[entry.name] = row
        return row

    def _end(self, row: Row, status: str, error: str = "") -> None:
        row["status"] = status
        row["ways"] = {name: row["ways"][name] for name in WAYS if name in row["ways"]}
        row.pop("error", None)
        if error:
            row["error"] = error
        self.save()
        times = {n: way["us"] / 1e3 for n, way in row["ways"].items() if "us" in way}
        told = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
        said = ": ".join(filter(None, (status, _line(error), told)))
        said += f" (in {row['took_s']:.0f} s)" if "took_s" in row else ""
        self.say(f"{row['name']}: {said}")

    # -- cold starts -------------------------------------------------------------------------------

    def _cold_starts(self, rows: Sequence[tuple[Entry, Row]]) -> None:
        todo = [
            (entry, row, name)
            for entry, row in rows
            for name in self._ways[entry.name]
            if WAYS[name].compiles and "cold_s" not in row["ways"].get(name, {})
        ]
        quiet = [each for each in todo if not WAYS[each[2]].measures]
        beside = min(self.options.jobs, len(quiet))
        with ThreadPoolExecutor(max(1, self.options.jobs)) as pool:
            try:
                list(pool.map(lambda each: self._cold(each[0], each[1], each[2], beside), quiet))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    process.end()
                raise
        for entry, row, name in todo:
            if WAYS[name].measures:
                self._cold(entry, row, name, 1)

    def _cold(self, entry: Entry, row: Row, name: str, beside: int) -> None:
        """The cold start of a model in one way, ``beside`` of them at a time."""
        self._left_s()
        folder = self._folder(entry)
        for part in (self._plans(entry, name), folder / "inductor" / name):
            shutil.rmtree(part, ignore_errors=True)
        self._mark(entry, name).unlink(missing_ok=True)
        process = self._process("cold", entry, (name,), folder / "inductor" / name)
        process.go()
        found = self._found(process)
        with self._lock:
            way = row["ways"].setdefault(name, {})
            way |= {**found["ways"].get(name, {}), "beside": beside}
            if "error" in found:
                way["error"] = found["error"]
            else:
                self._mark(entry, name).touch()
            self.save()
            cold = f"{way['cold_s']:.1f} s" if "cold_s" in way else _line(way.get("error", ""))
            told = f"{WAYS[name].title}, cold: {cold} (in {found['took_s']:.0f} s)"
            self.say(f"{entry.name}: {told}")

    # -- timing ------------------------------------------------------------------------------------

    def _timing(self, entry: Entry, row: Row) -> Process | None:
        """A process that is to time the ways that have not failed; None if none of ours is left."""
        self._left_s()
        asked = self._ways[entry.name]
        ways = [name for name in asked if not _error(row, name)]
        if not any(WAYS[name].ours for name in ways):
            self._end(row, "failed", next(_error(row, name) for name in asked if WAYS[name].ours))
            return None
        folder = self._folder(entry)
        merged = folder / "inductor" / "all"
        for name in ways:  # the files of both modes have names by what is in them
            own = folder / "inductor" / name
            if own.is_dir():
                shutil.copytree(own, merged, dirs_exist_ok=True)
        return self._process("timed", entry, tuple(ways), merged)

    def _wait_for(self, process: Process) -> None:
        """Wait until a process is ready to time its ways, or has ended."""
        left = self._left_s()
        process.until_ready(left)
        if process.late and left < self.options.limit_s:
            raise OutOfBudget

    def _timed(self, entry: Entry, row: Row, process: Process, beside: int) -> None:
        """Let a process that is ready time its ways; one that a way ended is followed by one
        without it. ``beside`` of them got ready at a time."""
        while True:
            process.go()
            found = self._found(process)
            for name, part in found.pop("ways").items():
                others = 1 if name in process.job.alone else beside
                filled = self._mark(entry, name).exists()
                told = {**part, "filled": filled, "warm_beside": others}
                row["ways"].setdefault(name, {}).update(told)
            guilty = found.pop("guilty", "")
            if not guilty:
                break
            row["ways"].setdefault(guilty, {})["error"] = found["error"]
            row["ways"][guilty].pop("errors", None)
            next_one = self._timing(entry, row)
            if next_one is None:
                return
            process, beside = next_one, 1
            process.go()
            self._wait_for(process)
        row |= {key: found[key] for key in ("parameters", "wide", "took_s") if key in found}
        asked = self._ways[entry.name]
        wrong = [_error(row, n) for n in asked if WAYS[n].ours and _error(row, n)]
        error = found.get("error", "") or next(iter(wrong), "")
        self._end(row, "failed" if error else "done", error)

    # -- folders and processes ---------------------------------------------------------------------

    def _folder(self, entry: Entry) -> Path:
        return self.options.caches / re.sub(r"[^\w.]+", "-", entry.name)

    def _plans(self, entry: Entry, name: str) -> Path:
        return self._folder(entry) / "plans" / name

    def _mark(self, entry: Entry, name: str) -> Path:
        """A file that is there if the cold start of a way has filled its caches."""
        return self._folder(entry) / f"{name}.filled"

    def _process(self, kind: Any, entry: Entry, ways: tuple[str, ...], inductor: Path) -> Process:
        folder = self._folder(entry)
        folder.mkdir(parents=True, exist_ok=True)
        label = f"{kind}-{'-'.join(ways)}"
        plans = {name: str(self._plans(entry, name)) for name in ways if WAYS[name].ours}
        for path in plans.values():
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        alone: tuple[str, ...] = ()
        if kind == "timed" and self._measures:  # a start that compiles nothing is short
            alone = tuple(name for name in plans if self._mark(entry, name).exists())
        job = Job(
            *(kind, self.options.registry, entry.name, ways, self.options.device),
            *(self.options.tiny, str(folder / f"{label}.found.json"), plans, self._measures, alone),
        )
        job.write(folder / f"{label}.json")
        cached = {"TORCHINDUCTOR_CACHE_DIR": inductor, "TRITON_CACHE_DIR": inductor / "triton"}
        process = Process(job, folder / f"{label}.json", {k: str(v) for k, v in cached.items()})
        self._running.add(process)
        return process

    def _found(self, process: Process) -> dict[str, Any]:
        """What a process found. Raises :class:`OutOfBudget` if the budget ended it."""
        left = self._left_s()
        found = process.wait(left)
        found["took_s"] = time.monotonic() - process.begun
        self._running.discard(process)
        if process.late and left < self.options.limit_s:
            raise OutOfBudget
        return found

    def _left_s(self) -> float:
        """Seconds that a process may take. Raises :class:`OutOfBudget` if none are left."""
        left = self.options.budget_s - (time.monotonic() - self.start)
        if left <= 0:
            raise OutOfBudget
        return min(self.options.limit_s, left)


class Process:
    """A process of the zoo. It waits for :meth:`go` when it has imported what it needs, and one
    that times waits again when it is ready to."""

    def __init__(self, job: Job, file: Path, environment: Mapping[str, str]) -> None:
        self.job = job
        self.late = False
        self.begun = time.monotonic()
        self._why = ""  # how it ended if not by itself
        Path(job.result).unlink(missing_ok=True)
        self._log = file.with_suffix(".log")
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        with files.writing(self._log) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cudnngraph.bench.zoo.one", str(file)],
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what it starts is ended with it; Ctrl-C is for this one
            )

    def go(self) -> None:
        """Let it begin, or time its ways; nothing if it has ended."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        with suppress(BrokenPipeError):
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def until_ready(self, limit_s: float) -> None:
        """Wait until it is ready to time its ways, or has ended; end it after so many seconds."""
        end = time.monotonic() + limit_s
        while self._process.poll() is None and self._told().get("stage") != READY:
            if time.monotonic() > end:
                self._stop(limit_s)
                return
            time.sleep(POLL_S)

    def _stop(self, limit_s: float) -> None:
        self.late, self._why = True, f"takes more than {limit_s:.0f} s"
        self.end()

    def wait(self, limit_s: float) -> dict[str, Any]:
        """What it found. ``error`` says how it ended if not by itself, ``guilty`` in which way."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._stop(limit_s)
        finally:
            self.end()
        if not self._why and code < 0:
            self._why = f"the process was ended by {_signal(-code)}"
        elif not self._why and code:
            self._why = f"the process ended with exit code {code}"
        why, found = self._why, {"ways": {}, "stage": "start", **self._told()}
        if why and "error" not in found:
            said = "" if self.late or not self._said() else f" ({self._said()})"
            found["error"] = f"{found['stage']}: {why}{said}"
            found["guilty"] = found.get("of", "")
        return found

    def end(self) -> None:
        """End it, and what it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _told(self) -> dict[str, Any]:
        """What it has found so far."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(Path(self.job.result).read_text())
            return found
        return {}

    def _said(self) -> str:
        """The last of what it wrote."""
        with suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            return lines[-1][-TAIL:] if lines else ""
        return ""


def _lacks_memory(row: Row) -> bool:
    errors = (row, *row["ways"].values())
    return any(NO_MEMORY in each.get("error", "") for each in errors)


def _error(row: Row, name: str) -> str:
    text: str = row["ways"].get(name, {}).get("error", "")
    return text


def _line(text: str) -> str:
    """The first line of a text."""
    return (text.strip().splitlines() or [""])[0][:200]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
