"""The one timing protocol, of plan selection and of the benchmarks alike.

Each contender is captured in a CUDA graph of several launches, so that the host's cost is not in
the numbers. The graphs are replayed in turn, so that what drifts (clocks, neighbours) drifts for
all; a contender that is clearly slower drops out early. The result is the median.

A replay begins some 10 us after the host asked for it. Each sample therefore stands behind a wait
of the GPU (:data:`LEAD_CYCLES`) that does not count: by its end the replay has arrived.

Large products draw more power than the GPU may, and within some 100 ms of work its clocks give way,
for some kernels more than for others: one H200 ran two of them at 1.36 and 1.20 ms from rest, and
at 1.61 and 1.40 ms for good. Where launches take long (:data:`HEAVY_US`) each sample therefore is
work without a break, and only its second half counts.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

Launch = Callable[[], None]
Sample = Callable[[], float]

MAX_LAUNCHES = 20
REPLAY_US = 400.0  # about how long one replay is to take
LEAD_CYCLES = 100_000  # of the GPU, 50 to 80 us
TRIES = 3  # of a launch, to know how long one takes: the first of a process takes much longer
ROUNDS = 9
DROP_OVER = 1.25  # times the fastest: out after the second round
HEAVY_US = 100.0  # a launch that takes as long is sampled under sustained load
LOAD_MS = 60.0  # of load before such a sample, and of the sample itself
LOAD_ROUNDS = 3  # of such samples, each the mean of many launches
STEADY_MS = 5.0  # of a sample of contenders that load the GPU alike


def interleave(
    samples: Sequence[Sample],
    *,
    rounds: int = ROUNDS,
    drop_over: float = DROP_OVER,
    warm: bool = True,
) -> list[float]:
    """The median of each sampler over ``rounds``, taken in turn.

    One whose median is over ``drop_over`` times the least after two rounds is sampled no more; its
    median is that of two. The first sample of each is thrown away if they are to ``warm`` up.
    """
    for sample in samples if warm else ():
        sample()
    taken: list[list[float]] = [[] for _ in samples]
    alive = list(range(len(samples)))
    for number in range(rounds):
        for place in alive:
            taken[place].append(samples[place]())
        if number >= 1:
            medians = {place: statistics.median(taken[place]) for place in alive}
            least = min(medians.values())
            alive = [place for place in alive if medians[place] <= drop_over * least]
    return [statistics.median(each) for each in taken]


class Captured:
    """Launches captured in a CUDA graph, timed by replaying it.

    ``launches`` are called in turn, over and over, until the graph holds enough of them: one for
    data that stays in the cache, several on rotating data for data that does not. Work that cannot
    be captured is launched one by one between two events instead. ``stream`` is made to wait for
    what the current stream has been given by then. What a launch raises goes through.
    """

    def __init__(self, launches: Sequence[Launch], stream: torch.cuda.Stream) -> None:
        self._stream = stream
        event: Any = torch.cuda.Event
        self._start, self._end = (event(enable_timing=True) for _ in range(2))
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # it makes what they read
        with torch.cuda.stream(stream):
            for launch in launches:
                launch()
            stream.synchronize()
            once = min(self._elapsed_us(launches[0]) for _ in range(TRIES))
            wanted = min(MAX_LAUNCHES, max(1, math.ceil(REPLAY_US / max(once, 1.0))))
            self.count = max(wanted, len(launches))
            self._graph = self._capture(launches)
        self._launches = launches
        self.launch_us = once

    def _capture(self, launches: Sequence[Launch]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for number in range(self.count):
                launches[number % len(launches)]()
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the capture is broken, as was to be expected
                graph.capture_end()
            if not isinstance(error, RuntimeError):
                raise
            torch.cuda.synchronize()
            return None
        graph.capture_end()
        return graph

    def _elapsed_us(self, work: Launch) -> float:
        """Time on the GPU of what ``work`` launches on the current stream."""
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3

    @property
    def captured(self) -> bool:
        """Whether the launches are in a CUDA graph; else each sample launches them one by one."""
        return self._graph is not None

    def __call__(self) -> float:
        """Microseconds of one launch, over one replay."""
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(LEAD_CYCLES)  # type: ignore[no-untyped-call]
            return self._elapsed_us(self._replay) / self.count

    def sustained(self) -> float:
        """Microseconds of one launch after :data:`LOAD_MS` of them, over as long again."""
        replays = math.ceil(LOAD_MS * 1e3 / (self.launch_us * self.count))

        def load() -> None:
            for _ in range(replays):
                self._replay()

        with torch.cuda.stream(self._stream):
            load()
            return self._elapsed_us(load) / (replays * self.count)

    def steady(self) -> float:
        """Microseconds of one launch over :data:`STEADY_MS` of them."""
        replays = math.ceil(STEADY_MS * 1e3 / (self.launch_us * self.count))

        def work() -> None:
            for _ in range(replays):
                self._replay()

        with torch.cuda.stream(self._stream):
            return self._elapsed_us(work) / (replays * self.count)

    def _replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for number in range(self.count):
            self._launches[number % len(self._launches)]()


def measure(
    contenders: Sequence[Launch | Sequence[Launch]],
    stream: torch.cuda.Stream,
    *,
    rounds: int = ROUNDS,
    drop_over: float = DROP_OVER,
    quick: bool = False,
    alike: bool = False,
) -> list[float]:
    """Median microseconds of each contender on the GPU, measured side by side on ``stream``.

    A contender is a launch, or several that do the same on rotating data. It is called with
    ``stream`` current, a first time outside of any capture. What it raises goes through. Heavy ones
    are measured under sustained load, which takes half a second each, unless ``quick``. Those that
    are ``alike`` but for a small part load the GPU for one another: short samples in turn will do.
    """
    listed = [[each] if callable(each) else list(each) for each in contenders]
    try:
        captured = [Captured(each, stream) for each in listed]
        warm = True
        if alike:
            samples: list[Sample] = [each.steady for each in captured]
        else:
            samples, rounds, warm = samplers(captured, rounds, quick=quick)
        return interleave(samples, rounds=rounds, drop_over=drop_over, warm=warm)
    finally:  # or what they use may be given away while they run
        stream.synchronize()


def samplers(
    captured: Sequence[Captured], rounds: int, *, quick: bool = False
) -> tuple[list[Sample], int, bool]:
    """Return how contenders are sampled, how often, and whether they have to warm up: under load,
    which is a part of the sample then, if all of them are heavy."""
    if quick or min(each.launch_us for each in captured) < HEAVY_US:
        return list(captured), rounds, True
    return [each.sustained for each in captured], min(rounds, LOAD_ROUNDS), False
