"""Processes for the tests of the store, and records to put into it. Imports no torch: it forks.

    python -m tests.workers.store_worker COMMAND DIRECTORY [...]

Each command prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from plans_cache import Candidate, Hit, PlanRecord, PlanStore, StepRecord

ENV = (("cudnn", "91900"), ("gpu", '"NVIDIA H200"'))


def record(number: int, version: int = 0, *, candidates: int = 2) -> PlanRecord:
    """The record of key ``number``; ``version`` is part of the choice, not of the key."""
    return PlanRecord(
        key=(("schema", "1"), ("ops", f'["conv", {number}]')),
        env=ENV,
        summary=f"conv → relu of {number}",
        graph=f"def conv_{number}(t0):\n    return relu(conv(t0))",
        steps=(
            StepRecord(
                nodes=("conv0", "relu1"),
                ops=("conv", "relu"),
                inputs=(("t0", "f16[8, 64, 56, 56]"), ("t1", "f16[64, 64, 3, 3]")),
                outputs=(("t3", "f16[8, 64, 56, 56]"),),
                kind="cudnn",
                engine=version,
                knobs=(("SPLIT_K", 1), ("TILE_SIZE", 2)),
                workspace_bytes=4096,
                time_us=12.5,
                candidates=tuple(
                    Candidate(f"engine {engine}", engine == 0, "measured", engine, (), 12.5, 4096)
                    for engine in range(candidates)
                ),
            ),
        ),
        policy={"deterministic": False, "workspace_limit": None},
        versions={"cudnngraph": "0.1.0"},
        created=1_700_000_000.0,
    )


def blob(number: int, version: int) -> bytes:
    return f"{number}:{version};".encode() * 3000


def _report(result: object) -> None:
    print(json.dumps(result), flush=True)


# -- kill: writers killed at random moments --------------------------------------------------------

KEYS = 6


def _write_for_ever(directory: Path, version: int, committed: int) -> None:
    store = PlanStore(directory, seeds=None, strict=True, max_entries=0)
    while True:
        for number in range(KEYS):
            version += 1
            store.put(record(number, version), blob(number, version))
            os.write(committed, b"%d %d\n" % (number, version))


def kill(directory: Path, rounds: int, seed: int) -> None:
    """Kill a writer ``rounds`` times; read while it writes and after; count what goes wrong.

    Every write puts a new blob in the place of the one before. A writer lives until it has said
    of some writes that they are committed, and a part of the next one longer: however slow the
    machine, each round gets as far.
    """
    moments = random.Random(seed)
    last = dict.fromkeys(range(KEYS), 0)  # the version that is known to be committed
    counts: Counter[str] = Counter()

    def check(*, writing: bool) -> None:
        store = PlanStore(directory, seeds=None, max_entries=0)
        for number, version in last.items():
            found = store.get(record(number).id)
            counts["reads"] += 1
            if not isinstance(found, Hit):
                counts["lost"] += 1
                continue
            now = found.record.steps[0].engine
            assert now is not None
            expected = record(number, now).with_blob(blob(number, now))
            counts["blobs read"] += found.blob is not None
            counts["older than committed"] += now < version
            counts["wrong records"] += found.record != expected
            counts["wrong blobs"] += found.blob not in (None, blob(number, now))
            # While a writer lives, a blob can go between the reads of its record and of itself.
            gone = writing and found.blob_problem == "blob is missing"
            counts["blobs left out"] += found.blob is None and not gone
        counts["quarantined"] += store.stats().quarantined

    store = PlanStore(directory, seeds=None, strict=True, max_entries=0)
    start = time.monotonic()
    for number in range(KEYS):
        store.put(record(number), blob(number, 0))
    write_s = (time.monotonic() - start) / KEYS
    for _ in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _write_for_ever(directory, max(last.values()) + KEYS, writing)
            finally:
                os._exit(1)
        os.close(writing)
        check(writing=True)
        with open(reading, "rb") as pipe:
            lines = [pipe.readline() for _ in range(moments.randrange(3))]
            time.sleep(moments.random() * write_s)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            counts["killed"] += os.WIFSIGNALED(status)
            for line in lines + pipe.readlines():
                number, version = map(int, line.split())
                last[number] = version
                counts["committed"] += 1
        check(writing=False)
    _report(counts)


# -- race: many processes, the same keys -----------------------------------------------------------


def race(directory: Path, processes: int, keys: int) -> None:
    """Every process asks for every key at once; what each was given, and who built what."""
    log = os.open(directory.with_suffix(".builds"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    waiting, go = os.pipe()
    reading, writing = os.pipe()
    children = []
    for _ in range(processes):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            os.close(go)
            os.read(waiting, 1)  # returns when the parent closes its end
            store = PlanStore(directory, seeds=None, strict=True)
            order = list(range(keys))
            random.Random(os.getpid()).shuffle(order)
            for number in order:

                def build(number: int = number) -> tuple[PlanRecord, bytes | None]:
                    os.write(log, b"%d\n" % number)
                    time.sleep(0.002)
                    return record(number, os.getpid()), blob(number, os.getpid())

                found = store.get_or_build(record(number).id, build)
                maker = found.record.steps[0].engine
                assert maker is not None
                assert found.blob == blob(number, maker)
                os.write(writing, b"%d %d %s\n" % (number, maker, found.tier.encode()))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    os.close(go)
    with open(reading, "rb") as pipe:
        lines = [line.decode().split() for line in pipe.read().splitlines()]
    exits = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    builds = directory.with_suffix(".builds").read_text().split()
    _report({"lines": lines, "builds": builds, "exits": exits})


# -- hold, fork ------------------------------------------------------------------------------------


def hold(directory: Path) -> None:
    """Hold the right to build key 0 until killed."""
    with PlanStore(directory, seeds=None, strict=True).building(record(0).id):
        _report({"held": True})
        time.sleep(600)


def fork(directory: Path) -> None:
    """Fork while one thread holds a key and the store's own locks; use it in the child."""
    store = PlanStore(directory, seeds=None, strict=True, lock_timeout_s=0.2)
    store.put(record(1))
    held, done = threading.Event(), threading.Event()

    def work() -> None:
        with store.building(record(0).id), store._memory.lock, store._journal.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    held.wait()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            tier = getattr(store.get(record(1).id), "tier", "none")
            with store.building(record(2).id):
                built = store.put(record(2))
            try:
                with store.building(record(0).id):
                    parents = "taken from it"
            except TimeoutError as error:
                parents = str(error)
            os.write(writing, json.dumps([tier, built, parents]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    status = os.waitpid(child, 0)[1]
    with open(reading, "rb") as pipe:
        told = json.loads(pipe.read())
    done.set()
    thread.join()
    with store.building(record(0).id):
        after = "free"
    _report({"child": told, "status": status, "after": after})


if __name__ == "__main__":
    name, where, *numbers = sys.argv[1:]
    {"kill": kill, "race": race, "hold": hold, "fork": fork}[name](Path(where), *map(int, numbers))
