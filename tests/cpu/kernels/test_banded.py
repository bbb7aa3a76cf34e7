"""Depthwise convolutions by tensor cores: run on the CPU against float64, and compiled."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch

from cudnngraph.device import rules
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import banded, compile, patterns
from cudnngraph.kernels.banded import Banded
from cudnngraph.kernels.cubin import resources
from cudnngraph.kernels.tape import Refused
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics
from tests.blocks import depthwise as graph

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def check(spec: GraphSpec, schedule: Banded, *, backwards: bool = False) -> None:
    inputs = random_inputs(spec, torch.device("cpu"))
    (want,) = reference.run(spec, inputs, torch.float64)
    out = spec.tensors["y"].empty("cpu")
    host_kernels.run(banded.write(spec, schedule), [*inputs, out], backwards=backwards)
    numerics.check(out, want, spec.tensors["x"].dtype, what=str(schedule))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kernel", [(7, 7), (5, 5), (9, 3), (1, 1), (4, 2)])
def test_bands_of_all_sizes_are_right(
    dtype: torch.dtype, transposed: bool, kernel: tuple[int, int]
) -> None:
    spec = graph(kernel=kernel, dtype=dtype, transposed=transposed)
    check(spec, Banded(1, 3, 4, 2, 2, 4))


@pytest.mark.parametrize("padding", [(0, 0), (6, 1), (2, 5)])
@pytest.mark.parametrize("transposed", [False, True])
def test_windows_may_reach_over_the_image(padding: tuple[int, int], transposed: bool) -> None:
    spec = graph((1, 8, 18, 11), padding=padding, transposed=transposed, behind=False)
    check(spec, Banded(1, 1, 2, 1, 1, 1))


@pytest.mark.parametrize(
    "schedule",
    [
        Banded(1, 3, 4, 1, 1, 4),
        Banded(2, 2, 16, 4, 1, 8),
        Banded(2, 1, 16, 2, 2, 8),
        Banded(1, 2, 6, 2, 4, 4),
        Banded(3, 2, 2, 1, 1, 2),
        Banded(2, 3, 2, 1, 2, 16),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_every_schedule_is_right(schedule: Banded, backwards: bool) -> None:
    """With places over the borders, images that are not there, and warps that have none left."""
    check(graph((3, 32, 35, 23), (5, 5), F16), schedule, backwards=backwards)


def test_schedules_that_are_measured_are_right() -> None:
    spec = graph((2, 24, 14, 14), (5, 5))
    found = banded.schedules(spec, 132)
    assert 2 <= len(found) <= banded.MOST and found[0].wide == 2
    for schedule in found:
        check(spec, schedule)


@pytest.mark.parametrize("seed", range(12))
def test_random_convolutions_are_right(seed: int) -> None:
    """By the first schedule, and by one of all."""
    random = Random(seed)
    kernel = random.randint(1, 9), random.randint(1, 7)
    shape = (random.randint(1, 5), 8 * random.choice((1, 2, 3, 5)), *(random.randint(9, 40),) * 2)
    padding = tuple(random.randrange(size) for size in kernel)
    options: dict[str, Any] = {"padding": padding, "behind": random.random() < 0.5}
    spec = graph(shape, kernel, random.choice((F16, BF16)), transposed=seed % 2 == 1, **options)
    found = banded.schedules(spec, random.choice((1, 132)))
    for schedule in {found[0], random.choice(found)}:
        check(spec, schedule, backwards=seed % 3 == 0)


@pytest.mark.parametrize(
    ("shape", "kernel", "bands"),
    [((64, 384, 14, 14), 7, True), ((1, 96, 56, 56), 7, True), ((32, 144, 56, 56), 3, False)],
)
def test_rules_take_what_counts_fewer_clocks(
    shape: tuple[int, int, int, int], kernel: int, bands: bool
) -> None:
    """What was faster on an H200."""
    spec = graph(shape, (kernel, kernel), F16)
    choices = patterns.choices(spec, 132)
    listed = [patterns.schedule_of(each) for each in choices]
    assert choices[0] == patterns.by_rule(spec, 132)
    assert isinstance(listed[0], Banded if bands else patterns.Strips)
    assert {type(each) for each in listed} == {Banded, patterns.Strips}


def test_gpus_without_such_products_have_strips() -> None:
    spec = graph((64, 384, 14, 14), dtype=F16)
    with rules.planning_for(75):
        with pytest.raises(Refused, match="a GPU without products of such matrices"):
            banded.schedules(spec, 132)
        listed = [patterns.schedule_of(each) for each in patterns.choices(spec, 132)]
    assert {type(each) for each in listed} == {patterns.Strips}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_reaches_its_windows_alone(number: float) -> None:
    """Zeros of a band times infinity are NaN, where no window of torch's is."""
    spec = graph((1, 8, 17, 20), (3, 5), F16, behind=False)
    inputs = random_inputs(spec, torch.device("cpu"))
    inputs[0][0, 3, 5, 9] = number
    (want,) = reference.run(spec, inputs, torch.float64)
    out = spec.tensors["y"].empty("cpu")
    host_kernels.run(banded.write(spec, Banded(1, 3, 4, 2, 1, 1)), [*inputs, out])
    assert int((~want.isfinite()).sum()) == 15
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.isinf(), want.isinf())
    there = want.isfinite()
    numerics.check(out[there], want[there], F16)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (graph(dtype=F32), "tensor cores multiply 16-bit numbers of one dtype"),
        (graph(stride=2), "a band has every tap and every place"),
        (graph(dilation=2), "a band has every tap and every place"),
        (graph((1, 12, 20, 20)), "a band of eight columns holds at most seven taps"),
        (graph(kernel=(3, 8)), "a band of eight columns holds at most seven taps"),
    ],
)
def test_what_is_no_band_is_refused(spec: GraphSpec, why: str) -> None:
    for call in (
        lambda: banded.schedules(spec, 132),
        lambda: banded.write(spec, Banded(1, 1, 1, 1, 1, 1)),
    ):
        with pytest.raises(Refused, match=why):
            call()


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (Banded(1, 0, 1, 1, 1, 1), "a schedule without places"),
        (Banded(1, 3, 5, 2, 1, 1), "a schedule without places"),
        (Banded(1, 3, 10, 2, 1, 1), "more than sixteen places"),
        (Banded(1, 1, 1, 1, 4, 4), "4 vectors of channels"),
        (Banded(1, 1, 1, 1, 2, 3), "2 vectors of channels"),
        (Banded(1, 14, 16, 16, 2, 4), "an image that shared memory does not hold"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(schedule: Banded, why: str) -> None:
    with pytest.raises(Refused, match=why):
        banded.write(graph(), schedule)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("kernel", [5, 7])
def test_they_compile_and_spill_nothing(kernel: int, capability: int) -> None:
    pytest.importorskip("cuda.bindings")
    spec = graph((64, 96, 56, 56), (kernel, kernel))
    for schedule in banded.schedules(spec, 132):
        used = resources(compile.cubin(banded.write(spec, schedule).text, capability))
        assert used.local_bytes == 0 and used.registers <= 128, (schedule, used)
