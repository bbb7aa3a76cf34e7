"""The timing protocol with samplers that are made up."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnngraph.device.timing import DROP_OVER, ROUNDS, Captured, interleave


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
