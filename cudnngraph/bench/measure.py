"""Measuring: contenders side by side, and the device's own ceilings in the same run.

Four clocks. "gpu" replays launches in CUDA graphs (:mod:`~cudnngraph.device.timing`): the host's
part is not in it. "wall" is what a caller waits for, the GPU's work finished. "host" is what a call
costs the host, on data so small that the GPU waits. "process" is for calls that take seconds each.
On a CPU all are the time of the call.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from ..device import tf32, timing
from ..runtime.bound import CapturedCall

Call = Callable[[], object]

Clock = str

ROUNDS = 9
NOISE = 1.02  # of two measurements: a row that is faster by less has not beaten a ceiling
SAMPLE_S = 0.02  # about how long one sample of the wall clock takes
IN_FLIGHT = 50  # calls of the host's clock in a row, so few that no queue of launches fills


def captured(call: Call) -> Call:
    """A call whose launches are captured in a CUDA graph; it returns what the graph writes."""
    kept: list[object] = []

    def run() -> None:
        kept[:] = [call()]

    recorded = CapturedCall(run, torch.device("cuda", torch.cuda.current_device()))

    def replay() -> object:
        recorded()
        return kept[0]

    return replay


def kernels_of(call: Call, most: int) -> list[tuple[str, int, float]]:
    """The kernels of a call on a GPU by name: how often each runs and its microseconds in all,
    those that take longest first; the last row is the sum of all of them, "all"."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in seen.events() or ():
        if str(event.device_type).endswith("CUDA"):
            name = re.sub(r"[|\s]+", " ", event.name)[:90]
            spent[name] += event.device_time
            count[name] += 1
    rows = [(name, count[name], us) for name, us in spent.most_common(most)]
    return [*rows, ("all", sum(count.values()), sum(spent.values()))]


@dataclass(frozen=True)
class Contest:
    """Calls that do the same: by name, ours under ``ours``. ``clock`` is one of the four.

    ``flops`` and ``moved_bytes`` are what has to be done once, 0 where nobody counts;
    ``dtype`` says which ceiling holds. ``notes`` say what is missing, and why.
    """

    calls: Mapping[str, Call]
    ours: str
    clock: Clock = "gpu"
    flops: int = 0
    moved_bytes: int = 0
    dtype: torch.dtype = torch.float32
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Task:
    """One row to be: ``prepare`` makes its contest when its turn comes, and it is let go then."""

    suite: str
    name: str
    prepare: Callable[[], Contest]


MEMORY = "memory"
TF32 = "float32 in TF32"


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of the device: memory in GB/s (read and written), products in TFLOP/s by dtype.

    ``cache_bytes`` are those that may stay in the L2 cache from one call to the next. ``beaten``
    names what a row was faster than, :data:`MEMORY` or a kind of products: that is no ceiling.
    """

    copy_gb_s: float
    matmul_tflop_s: Mapping[str, float]
    cache_bytes: int = 0
    beaten: tuple[str, ...] = ()

    def least_us(self, flops: int, moved_bytes: int, dtype: str) -> float | None:
        """The time below which work cannot be done.

        None if nobody counted it, if products of the dtype were not measured, if all of it may stay
        in the cache, or if the ceiling that is nearest has been beaten.
        """
        bounds = self._bounds(flops, moved_bytes, dtype)
        if bounds is None:
            return None
        nearest = max(bounds, key=bounds.__getitem__)
        return None if nearest in self.beaten or not bounds[nearest] else bounds[nearest]

    def _bounds(self, flops: int, moved_bytes: int, dtype: str) -> dict[str, float] | None:
        """The least time by each ceiling; None if one that is needed is not known."""
        kind = TF32 if dtype == "float32" and TF32 in self.matmul_tflop_s else dtype
        peak = self.matmul_tflop_s.get(kind)
        if flops and not peak:
            return None
        through = max(0, moved_bytes - self.cache_bytes)
        found = {MEMORY: through / self.copy_gb_s / 1e3 if through else 0.0}
        return found | ({kind: flops / peak / 1e6} if peak and flops else {})

    def without_beaten(self, rows: Sequence[Row]) -> Ceilings:
        """These ceilings, those marked that a row was faster than by more than :data:`NOISE`."""
        found = [
            kind
            for row in rows
            for kind, us in (self._bounds(row.flops, row.moved_bytes, row.dtype) or {}).items()
            if us > row.us * NOISE
        ]
        return replace(self, beaten=tuple(dict.fromkeys([*self.beaten, *found])))


def with_shares(ceilings: Ceilings, rows: Sequence[Row]) -> tuple[Ceilings, list[Row]]:
    """Ceilings that no row beat, and the rows with their least times by them."""
    ceilings = ceilings.without_beaten(rows)
    made = [
        replace(row, least_us=ceilings.least_us(row.flops, row.moved_bytes, row.dtype))
        for row in rows
    ]
    return ceilings, made


@dataclass(frozen=True)
class Row:
    """Measurements of a task: microseconds by contender, and the clock that took them."""

    suite: str
    name: str
    ours: str
    clock: Clock
    times_us: Mapping[str, float]
    flops: int = 0
    moved_bytes: int = 0
    dtype: str = "float32"
    least_us: float | None = None
    notes: Sequence[str] = field(default=())

    @property
    def us(self) -> float:
        """Our time."""
        return self.times_us[self.ours]

    def times_faster(self, other: str) -> float | None:
        """Speedup over a contender; None if there is no such contender."""
        theirs = self.times_us.get(other)
        return None if theirs is None else theirs / self.us

    @property
    def part_of_ceiling(self) -> float | None:
        """The least time over ours: 1 is what the device can do."""
        return None if self.least_us is None else self.least_us / self.us


def dtype_text(dtype: torch.dtype) -> str:
    """ "float16"."""
    return str(dtype).removeprefix("torch.")


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wall_us(call: Call, count: int, device: torch.device, host: bool) -> float:
    _sync(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    if not host:
        _sync(device)
    took = time.perf_counter() - start
    _sync(device)
    return took / count * 1e6


def times_us(
    calls: Sequence[Call], clock: Clock, device: torch.device, *, quick: bool = False
) -> list[float]:
    """The median microseconds of each call, side by side."""
    rounds = 3 if quick else ROUNDS
    if clock == "gpu" and device.type == "cuda":
        launches = [partial(_launch, call) for call in calls]
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return timing.measure(launches, stream, rounds=rounds, drop_over=math.inf, quick=quick)
    if clock == "process":
        samples = [partial(_wall_us, call, 1, device, False) for call in calls]
        return [sample() for sample in samples] if quick else timing.interleave(samples, rounds=3)
    host = clock == "host"
    most = IN_FLIGHT if host and device.type == "cuda" else 10_000
    samples = []
    for call in calls:
        for _ in range(3):
            call()
        once = max(_wall_us(call, 3, device, host), 0.1)
        wanted = (0.2 if quick else 1.0) * SAMPLE_S * 1e6 / once
        count = max(1, min(most, int(wanted)))
        samples.append(partial(_wall_us, call, count, device, host))
    return timing.interleave(samples, rounds=rounds, drop_over=math.inf)


def _launch(call: Call) -> None:
    call()


def measured(
    task: Task, device: torch.device, ceilings: Callable[[torch.dtype], Ceilings], *, quick: bool
) -> Row:
    """The row of a task. A contender that cannot run is left out with a note; ours may not fail."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # it compiles eight forms of a function and runs the ninth eagerly
    contest = task.prepare()
    notes = list(contest.notes)
    calls: dict[str, Call] = {}
    for name, call in contest.calls.items():
        try:
            if contest.clock != "process":
                call()
                _sync(device)
            calls[name] = call
        except Exception as error:  # whatever a compiler of torch's raises is no reason to stop
            if name == contest.ours:
                raise
            notes.append(f"{name} does not run: {str(error).strip().splitlines()[0][:120]}")
    found = times_us(list(calls.values()), contest.clock, device, quick=quick)
    kind = dtype_text(contest.dtype)
    least = None
    if contest.flops or contest.moved_bytes:
        least = ceilings(contest.dtype).least_us(contest.flops, contest.moved_bytes, kind)
    return Row(
        suite=task.suite,
        name=task.name,
        ours=contest.ours,
        clock=contest.clock,
        times_us=dict(zip(calls, found, strict=True)),
        flops=contest.flops,
        moved_bytes=contest.moved_bytes,
        dtype=kind,
        least_us=least,
        notes=tuple(notes),
    )


class CeilingsOf:
    """The ceilings of a device, measured when a dtype is first asked for."""

    def __init__(self, device: torch.device, *, quick: bool = False) -> None:
        self._device = device
        self._small = device.type == "cpu" or quick
        self._copy_gb_s = 0.0
        self._products: dict[str, float] = {}

    @property
    def known(self) -> Ceilings:
        """The ceilings measured so far."""
        gpu = self._device.type == "cuda"
        cache = torch.cuda.get_device_properties(self._device).L2_cache_size if gpu else 0
        return Ceilings(self._copy_gb_s, dict(self._products), cache)

    def __call__(self, dtype: torch.dtype) -> Ceilings:
        """The ceilings, that of products of ``dtype`` among them."""
        if not self._copy_gb_s:
            self._copy_gb_s = self._memory()
        kind = dtype_text(dtype)
        if kind not in self._products and dtype.is_floating_point and dtype.itemsize > 1:
            with tf32.scope(False):
                self._products[kind] = self._product(dtype)
            if dtype == torch.float32 and self._device.type == "cuda":
                with tf32.scope(True):
                    self._products[TF32] = self._product(dtype)
        return self.known

    def _memory(self) -> float:
        """GB/s of what is fastest: torch's copy is not, beside kernels that read and write."""
        size = (16 if self._small else 512) << 20
        source = torch.zeros(size // 4, dtype=torch.float32, device=self._device)
        target, total = torch.empty_like(source), source.new_empty(())
        calls: list[tuple[Call, int]] = [
            (lambda: target.copy_(source), 2),
            (lambda: torch.mul(source, 2.0, out=target), 2),
            (lambda: torch.sum(source, 0, out=total), 1),
        ]
        found = self._times([call for call, _ in calls])
        return max(n * size / us / 1e3 for (_, n), us in zip(calls, found, strict=True))

    def _product(self, dtype: torch.dtype) -> float:
        """TFLOP/s of a large product."""
        n = 256 if self._small else 8192
        a, b = (torch.randn(n, n, device=self._device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        (us,) = self._times([lambda: torch.matmul(a, b, out=out)])
        return 2 * n**3 / us / 1e6

    def _times(self, calls: Sequence[Call]) -> list[float]:
        return times_us(calls, "gpu", self._device, quick=self._small)
