"""The timing protocol with samplers that are made up."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnngraph.device.timing import DROP_OVER, ROUNDS, Captured, interleave
from cudnngraph.device.timing import samplers as sampled


class Sampler:
    """Gives its times in turn, the last one for ever, and notes when it was asked."""

    def __init__(self, times: Sequence[float], log: list[str], name: str) -> None:
        self._times: Iterator[float] = iter(times)
        self._last = times[-1]
        self._log = log
        self._name = name
        self.count = 0

    def __call__(self) -> float:
        self._log.append(self._name)
        self.count += 1
        return next(self._times, self._last)


def samplers(**times: Sequence[float]) -> tuple[list[Sampler], list[str]]:
    log: list[str] = []
    return [Sampler(each, log, name) for name, each in times.items()], log


def test_contenders_are_sampled_in_turn() -> None:
    made, log = samplers(a=[1.0], b=[1.0], c=[1.0])
    interleave(made, rounds=3)
    assert log == ["a", "b", "c"] * 4, "once to be thrown away, then three rounds"


def test_the_first_sample_is_thrown_away() -> None:
    made, _ = samplers(a=[1000.0, 2.0], b=[0.001, 3.0])
    assert interleave(made, rounds=5) == [2.0, 3.0]


def test_samples_that_warm_up_by_themselves_count_from_the_first_one() -> None:
    made, log = samplers(a=[1.0, 2.0, 3.0], b=[5.0])
    assert interleave(made, rounds=3, warm=False) == [2.0, 5.0]
    assert log == ["a", "b", "a", "b", "a"], "the slow one drops out after two"


@pytest.mark.parametrize(("us", "rounds"), [(99.0, 9), (101.0, 3)])
def test_long_launches_are_sampled_under_load(us: float, rounds: int) -> None:
    one, other = (Captured.__new__(Captured) for _ in range(2))
    one.launch_us, other.launch_us = us, 500.0
    samples, count, warm = sampled([one, other], 9)
    assert count == rounds and warm == (us < 100.0)
    assert samples == ([one, other] if warm else [one.sustained, other.sustained])
    assert sampled([one, other], 9, quick=True) == ([one, other], 9, True)


def test_the_result_is_the_median() -> None:
    made, _ = samplers(a=[0.0, 9.0, 1.0, 2.0, 100.0, 3.0], b=[0.0, 3.0, 3.0, 3.0, 3.0, 4.0])
    assert interleave(made, rounds=5, drop_over=1e9) == [3.0, 3.0]


def test_one_that_is_clearly_slower_drops_out_after_two_rounds() -> None:
    made, log = samplers(fast=[0.0, 10.0], slow=[0.0, 12.0, 14.0, 1.0], near=[0.0, 12.0])
    assert interleave(made, rounds=9) == [10.0, 13.0, 12.0]
    assert [each.count for each in made] == [10, 3, 10]
    assert log[-2:] == ["fast", "near"]


def test_one_that_becomes_slower_drops_out_later() -> None:
    made, _ = samplers(steady=[0.0, 10.0], worse=[0.0, 10.0, 10.0, 20.0, 20.0, 20.0])
    interleave(made, rounds=9)
    assert made[0].count == 10
    assert 3 < made[1].count < 10


def test_one_round_drops_nobody() -> None:
    made, _ = samplers(a=[0.0, 1.0], b=[0.0, 99.0])
    assert interleave(made, rounds=1) == [1.0, 99.0]
    assert [each.count for each in made] == [2, 2]


def test_just_within_the_bound_nobody_drops() -> None:
    made, _ = samplers(a=[0.0, 8.0], b=[0.0, 8.0 * DROP_OVER])
    interleave(made)
    assert [each.count for each in made] == [1 + ROUNDS] * 2


def test_what_a_sampler_raises_goes_through() -> None:
    def broken() -> float:
        raise RuntimeError("launch failed")

    with pytest.raises(RuntimeError, match="launch failed"):
        interleave([broken])


TIMES = st.lists(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=12), min_size=1, max_size=5)


@settings(deadline=None)
@given(times=TIMES, rounds=st.integers(1, 9), drop_over=st.sampled_from([1.0, 1.25, 2.0]))
def test_the_fastest_is_never_dropped_and_every_result_is_a_median(
    times: list[list[float]], rounds: int, drop_over: float
) -> None:
    log: list[str] = []
    made = [Sampler([0.0, *each], log, str(place)) for place, each in enumerate(times)]
    found = interleave(made, rounds=rounds, drop_over=drop_over)
    for each, sampler, median in zip(times, made, found, strict=True):
        taken = [each[min(place, len(each) - 1)] for place in range(sampler.count - 1)]
        assert median == statistics.median(taken)
        assert min(2, rounds) <= len(taken) <= rounds
    assert max(sampler.count for sampler in made) == rounds + 1


@settings(deadline=None)
@given(times=TIMES)
def test_where_nobody_drops_out_all_have_the_same_rounds(times: list[list[float]]) -> None:
    log: list[str] = []
    made = [Sampler(each, log, str(place)) for place, each in enumerate(times)]
    interleave(made, rounds=7, drop_over=float("inf"))
    assert log == [str(place) for place in range(len(times))] * 8


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_a_capture_is_over_whatever_a_launch_raises(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may be waited for while one is going on; what cannot be captured is launched."""
    events: list[str] = []

    class Graph:
        def capture_begin(self, capture_error_mode: str) -> None:
            events.append("begin")

        def capture_end(self) -> None:
            events.append("end")

    def launch() -> None:
        raise raised("stop")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    captured = Captured.__new__(Captured)
    captured.count = 2
    if raised is RuntimeError:
        assert captured._capture([launch]) is None
        assert events == ["begin", "end", "wait"]
    else:
        with pytest.raises(raised, match="stop"):
            captured._capture([launch])
        assert events == ["begin", "end"]


class Clock:
    """A stream's time: launches and replays take some of it, and the host is late for a replay."""

    device = None

    def __init__(self, launches: list[float], replay: float, late: float) -> None:
        self.now, self.free = 0.0, 0.0  # the host's, and when the GPU will have done all
        self._launches, self._replay, self._late = iter(launches), replay, late

    def _work(self, took: float) -> None:
        self.now += self._late
        self.free = max(self.free, self.now) + took

    def launch(self) -> None:
        self._work(next(self._launches))

    def replay(self) -> None:
        self._work(self._replay)

    def sleep(self, cycles: int) -> None:
        self._work(cycles / 2e3)  # at 2 GHz

    def synchronize(self) -> None:
        self.now = self.free = max(self.now, self.free)

    def wait_stream(self, other: object) -> None:
        pass

    def event(self, enable_timing: bool) -> Event:
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self._clock, self.at = clock, 0.0

    def record(self) -> None:
        self.at = max(self._clock.now, self._clock.free)

    def synchronize(self) -> None:
        self._clock.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) / 1e3


def captured(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Captured:
    class Graph:
        replay = clock.replay

        def capture_begin(self, capture_error_mode: str) -> None:
            pass

        def capture_end(self) -> None:
            clock.synchronize()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    made: Captured = Captured([clock.launch], clock)  # type: ignore[arg-type]
    return made


def test_the_first_launches_of_a_process_do_not_decide_how_many_are_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []
    for first in (30.0, 300.0):
        clock = Clock([first, first, *[30.0] * 30], replay=0.0, late=10.0)
        counts.append(captured(clock, monkeypatch).count)
    assert counts == [10, 10], "400 us of launches that take 30, and 10 of the host"


@pytest.mark.parametrize("replay_us", [1.0, 100.0, 5000.0])
def test_what_the_host_takes_to_ask_for_a_replay_is_not_in_its_time(
    replay_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = captured(Clock([30.0] * 30, replay_us, late=10.0), monkeypatch)
    assert each() * each.count == pytest.approx(replay_us)
