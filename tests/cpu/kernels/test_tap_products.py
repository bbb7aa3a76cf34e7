"""Gradients of depthwise taps by tensor cores, run on the CPU and compiled."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from cudnngraph.device import rules
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import compile, patterns, tap_products
from cudnngraph.kernels.cubin import resources
from cudnngraph.kernels.tap_products import TapProducts
from cudnngraph.kernels.tape import Refused
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics
from tests.cpu.kernels.test_depthwise_gradient import checked, gradient

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "kernel", "padding", "schedule"),
    [
        ((2, 16, 14, 14), (7, 7), 3, TapProducts(7, 4)),
        ((1, 8, 5, 56), (7, 7), 3, TapProducts(5, 4)),
        ((3, 16, 9, 20), (3, 3), 1, TapProducts(4, 2)),
        ((17, 8, 7, 7), (7, 7), 3, TapProducts(7, 4)),
        ((2, 32, 6, 33), (5, 9), ((1, 2), (3, 0)), TapProducts(2, 4)),
        ((2, 8, 6, 9), (1, 2), 0, TapProducts(6, 8)),
        ((1, 8, 3, 128), (3, 3), 1, TapProducts(3, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_schedules_are_right(
    shape: tuple[int, int, int, int],
    kernel: tuple[int, int],
    padding: Any,
    schedule: TapProducts,
    dtype: torch.dtype,
) -> None:
    """With images, rows and columns left over; by one launch and by two."""
    spec = gradient(shape, kernel, dtype, out=F32, padding=padding)
    source = host_kernels.expect(patterns.source(spec, patterns.choice_of(schedule)))
    checked(spec, source, random_inputs(spec, CPU), str(schedule))


def test_schedules_that_are_measured_are_right() -> None:
    spec = gradient((2, 32, 14, 14), (7, 7), padding=3)
    found = tap_products.schedules(spec, 132)
    assert len(found) == len(tap_products.STAGES) * len(tap_products.PARTS)
    sources = [host_kernels.expect(tap_products.write(spec, each)) for each in found]
    for each, source in zip(found, sources, strict=True):
        checked(spec, source, random_inputs(spec, CPU), str(each))


def test_random_ones_are_right() -> None:
    cases = []
    for seed in range(16):
        random = Random(seed)
        kernel = random.randint(1, 7), random.randint(1, 9)
        size = random.randint(7, 40), random.randint(9, 60)
        shape = random.randint(1, 5), 8 * random.choice((1, 2, 4)), *size
        padding = tuple(random.randrange(each) for each in kernel)
        dtype = random.choice((F16, BF16))
        spec = gradient(shape, kernel, dtype, padding=padding)
        found = tap_products.schedules(spec, random.choice((1, 132)))
        for each in {found[0], random.choice(found)}:
            cases.append((spec, each, host_kernels.expect(tap_products.write(spec, each))))
    for spec, each, source in cases:
        checked(spec, source, random_inputs(spec, CPU), f"{spec.tensors} {each}")


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("operand", ["dy", "x"])
@pytest.mark.parametrize("at", [(0, 3, 0, 0), (2, 3, -1, -1), (1, 3, 6, 2)])
def test_what_is_not_finite_reaches_the_taps_that_meet_it_alone(
    at: tuple[int, int, int, int], operand: str, number: float
) -> None:
    """Zeros beside the image, and below a block's rows, times infinity are NaN."""
    spec = gradient((3, 8, 11, 10), (3, 5), F16, out=F32, padding=(1, 2))
    dy, x = random_inputs(spec, CPU)
    (dy if operand == "dy" else x)[at] = number
    made = spec.tensors["dw"].empty(CPU)
    source = tap_products.write(spec, TapProducts(4, 2))
    host_kernels.run(source, [dy, x, made])
    want = torch.zeros(3, 5, dtype=torch.float64)
    for r in range(3):
        for s in range(5):
            rows = slice(max(0, 1 - r), min(11, 12 - r))
            columns = slice(max(0, 2 - s), min(10, 12 - s))
            met = x[:, 3, rows.start + r - 1 : rows.stop + r - 1]
            met = met[..., columns.start + s - 2 : columns.stop + s - 2].double()
            want[r, s] = (dy[:, 3, rows, columns].double() * met).sum()
    own, there = made[3, 0], want.isfinite()
    assert not bool(there.all())
    assert torch.equal(own.isnan(), want.isnan()) and torch.equal(
        own[own.isinf()], want[want.isinf()].float()
    )
    if bool(there.any()):  # the last one is met by all taps
        numerics.check(own[there], want[there], F32, terms=dy.numel() // 8)


@pytest.mark.parametrize(
    ("images", "columns", "first"), [(64, 7, True), (8, 7, True), (1, 7, False), (64, 5, False)]
)
def test_they_come_first_for_many_columns_of_taps_and_images_and_are_tried_for_few(
    images: int, columns: int, first: bool
) -> None:
    spec = gradient((images, 96, 56, 56), (3, columns), padding=(1, columns // 2))
    chosen = patterns.schedule_of(patterns.by_rule(spec, 132))
    assert isinstance(chosen, TapProducts if first else patterns.TapSums)
    listed = [patterns.schedule_of(each) for each in patterns.choices(spec, 132)]
    assert listed[0] == chosen and isinstance(listed[1], TapProducts)
    assert {type(each) for each in listed} == {patterns.TapSums, TapProducts}
    assert len(set(listed)) == len(listed)
    with rules.planning_for(75):
        with pytest.raises(Refused, match="a GPU without products of such matrices"):
            tap_products.schedules(spec, 132)
        listed = [patterns.schedule_of(each) for each in patterns.choices(spec, 132)]
    assert {type(each) for each in listed} == {patterns.TapSums}


@pytest.mark.parametrize(
    ("shape", "first"),
    [  # those that were the fastest of all by measurement, where there are many images
        ((64, 96, 56, 56), TapProducts(56, 8)),
        ((64, 192, 28, 28), TapProducts(28, 4)),
        ((64, 384, 14, 14), TapProducts(14, 4)),
        ((64, 768, 7, 7), TapProducts(7, 8)),
        ((1, 96, 56, 56), TapProducts(14, 4)),  # that all processors have a block
        ((8, 192, 28, 28), TapProducts(7, 8)),
    ],
)
def test_images_are_parted_as_far_as_processors_need_it(
    shape: tuple[int, int, int, int], first: TapProducts
) -> None:
    spec = gradient(shape, (7, 7), padding=3)
    assert tap_products.schedules(spec, 132)[0] == first


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (gradient((2, 16, 9, 9), (3, 3), F32), "tensor cores multiply 16-bit numbers of one dtype"),
        (gradient((2, 16, 9, 9), (3, 3), stride=2), "a diagonal has every tap and every place"),
        (gradient((2, 16, 9, 9), (3, 3), dilation=2), "a diagonal has every tap and every place"),
        (gradient((2, 16, 9, 140), (3, 3)), "hold no such row, or no such taps"),
        (gradient((2, 16, 9, 30), (3, 10)), "hold no such row, or no such taps"),
        (gradient((2, 12, 9, 9), (3, 3)), "hold no such row, or no such taps"),
        (
            gradient((2, 16, 9, 9), (3, 3), layouts=("contiguous", "contiguous")),
            "hold no such row, or no such taps",
        ),
    ],
)
def test_what_is_no_such_product_is_refused(spec: GraphSpec, why: str) -> None:
    with pytest.raises(Refused, match=why):
        tap_products.schedules(spec, 132)


def test_schedules_that_do_not_go_are_refused() -> None:
    spec = gradient((2, 16, 9, 9), (3, 3), padding=1)
    good = TapProducts(9, 4)
    tap_products.write(spec, good)
    for bad, why in (
        (replace(good, stage=0), "no rows"),
        (replace(good, high=0), "no rows"),
        (replace(good, stage=64), "rows that shared memory does not hold"),
    ):
        with pytest.raises(Refused, match=why):
            tap_products.write(spec, bad)


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_they_are_compiled_without_spills(capability: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for shape in ((64, 96, 56, 56), (64, 384, 14, 14)):
        spec = gradient(shape, (7, 7), BF16, padding=3)
        source = tap_products.write(spec, tap_products.schedules(spec, 132)[0])
        found = resources(compile.cubin(source.text, capability))
        assert found.local_bytes == 0 and found.registers * source.threads <= 64 << 10
