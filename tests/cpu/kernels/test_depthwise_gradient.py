"""Kernels of the gradient of depthwise taps, run on the CPU against float64, and compiled."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import compile, depthwise_gradient, patterns
from cudnngraph.kernels.cubin import resources
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.tap_products import TapProducts
from cudnngraph.kernels.tap_sums import TapSums
from cudnngraph.kernels.tape import Refused
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEEDS = range(64)


def gradient(
    shape: tuple[int, int, int, int],
    kernel: tuple[int, int],
    dtype: torch.dtype = torch.float16,
    layouts: tuple[str, str] = ("channels_last", "channels_last"),
    out: torch.dtype | None = None,
    **options: Any,
) -> GraphSpec:
    """The gradient of a depthwise convolution's taps; the layouts are those of dy and x."""
    forward = cg.Graph("depthwise")
    x = forward.input("x", shape, dtype)
    w = forward.input("w", (shape[1], 1, *kernel), dtype)
    y = forward.conv(x, w, groups=shape[1], **options)
    forward.output("y", y)
    shape_of_dy = forward.spec().tensors["y"].shape
    g = cg.Graph("gradient")
    dy = g.input("dy", shape_of_dy, dtype, layout=layouts[0])
    x = g.input("x", shape, dtype, layout=layouts[1])
    dw = g.conv_wgrad(dy, x, kernel=kernel, groups=shape[1], **options)
    g.output("dw", dw, dtype=out or dtype, layout=layouts[1])
    return g.spec()


def drawn(rng: random.Random) -> GraphSpec:
    """One of random shapes, strides, paddings, dilations and layouts."""
    layout = rng.choice(("channels_last", "contiguous"))
    dtype = rng.choice(DTYPES)
    return gradient(
        (rng.randint(1, 3), rng.choice((1, 3, 8, 12, 24)), rng.randint(1, 14), rng.randint(1, 16)),
        (rng.choice((1, 2, 3, 5, 7)), rng.choice((1, 3, 4, 5, 7))),
        dtype,
        (rng.choice(("channels_last", layout)), layout),
        rng.choice((dtype, dtype, torch.float32)),
        stride=(rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3))),
        padding=((rng.randint(0, 3), rng.randint(0, 3)), (rng.randint(0, 3), rng.randint(0, 3))),
        dilation=(rng.choice((1, 1, 2)), rng.choice((1, 1, 2))),
    )


def graphs() -> list[tuple[int, GraphSpec]]:
    """Those of the seeds that are graphs: a window may be larger than an image."""
    found = []
    for seed in SEEDS:
        try:
            found.append((seed, drawn(random.Random(seed))))
        except cg.GraphError:
            continue
    return found


def checked(spec: GraphSpec, source: Source, inputs: list[torch.Tensor], what: str) -> None:
    """Run a kernel forwards and backwards, and compare with float64."""
    (name,) = spec.outputs
    made, again = (spec.tensors[name].empty(torch.device("cpu")) for _ in range(2))
    host_kernels.run(source, [*inputs, made])
    host_kernels.run(source, [*inputs, again], backwards=True)
    assert torch.equal(made.nan_to_num(), again.nan_to_num()), what
    (wanted,) = reference.run(spec, inputs, torch.float64)
    dy = spec.tensors[spec.inputs[0]]
    terms = dy.numel // dy.shape[1]
    numerics.check(made, wanted, dy.dtype, terms=terms, what=what)


def test_random_ones_are_right_by_every_schedule() -> None:
    cases = []
    for seed, spec in graphs():
        choices = patterns.choices(spec, 2)
        taken = random.Random(seed).sample(choices, min(3, len(choices)))
        for choice in dict.fromkeys((choices[0], *taken)):
            cases.append((seed, spec, choice, host_kernels.expect(patterns.source(spec, choice))))
    assert len(cases) > 150
    for seed, spec, choice, source in cases:
        inputs = random_inputs(spec, torch.device("cpu"), seed)
        checked(spec, source, inputs, f"seed {seed}, {choice}")


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("size", [3, 5, 7])
def test_every_schedule_of_a_usual_one_is_right(size: int, layout: str) -> None:
    shape = (2, 24, 14, 16) if layout == "channels_last" else (7, 3, 28, 40)  # more than one block
    spec = gradient(shape, (size, size), layouts=(layout, layout), padding=size // 2)
    choices = patterns.choices(spec, 2)
    assert len(choices) >= 6
    sources = [host_kernels.expect(patterns.source(spec, choice)) for choice in choices]
    assert {len(source.launches) for source in sources} == {1, 2}
    inputs = random_inputs(spec, torch.device("cpu"))
    for choice, source in zip(choices, sources, strict=True):
        checked(spec, source, inputs, str(choice))


def test_schedules_that_no_rule_draws_are_right() -> None:
    """Blocks with channels left over, rows of taps left over, tiles over both borders."""
    spec = gradient((2, 20, 9, 13), (5, 3), torch.float32, padding=1)
    drawn_by_hand = [
        TapSums(lanes, taps, wide, high, vectors, threads, resident, blocks)
        for lanes, taps, wide, high in ((4, 2, 3, 2), (2, 3, 5, 4), (1, 4, 8, 3), (4, 5, 2, 9))
        for vectors, threads, resident, blocks in ((3, 64, 1, 7), (1, 33, 2, 1), (7, 96, 4, 100))
    ]
    sources = [depthwise_gradient.write(spec, each) for each in drawn_by_hand]
    inputs = random_inputs(spec, torch.device("cpu"))
    for each, source in zip(drawn_by_hand, map(host_kernels.expect, sources), strict=True):
        checked(spec, source, inputs, str(each))


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_infinities_and_nan_stay_with_the_taps_that_meet_them(layout: str) -> None:
    cases = []
    for shape in ((2, 8, 9, 11), (1, 8, 8, 16)):
        spec = gradient(shape, (3, 5), torch.float32, (layout, layout), padding=(1, 2))
        for choice in patterns.choices(spec, 2):
            source = host_kernels.expect(patterns.source(spec, choice))
            cases.append((spec, choice, source))
    for spec, choice, source in cases:
        inputs = random_inputs(spec, torch.device("cpu"))
        for at, value in enumerate((float("inf"), float("-inf"), float("nan"))):
            for number, each in enumerate(inputs):
                each[0, at + 3 * number, -1 - at, -1 - 2 * at] = value
        checked(spec, source, inputs, str(choice))


def test_a_schedule_is_named_by_its_knobs() -> None:
    spec = gradient((2, 24, 14, 16), (3, 3))
    for choice in patterns.choices(spec, 132):
        schedule = patterns.schedule_of(choice)
        assert isinstance(schedule, (TapSums, TapProducts))
        assert patterns.choice_of(schedule) == choice


def test_few_tiles_have_one_launch_and_no_workspace() -> None:
    spec = gradient((1, 64, 4, 4), (3, 3))
    source = patterns.source(spec, patterns.choice_of(TapSums(4, 3, 4, 4, 16, 64, 1, 1)))
    assert [each.blocks for each in source.launches] == [1]
    assert source.workspace_bytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("size", [3, 5, 7])
def test_no_registers_are_spilled(size: int, layout: str, dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    layouts = (layout, layout)
    spec = gradient((64, 96, 56, 56), (size, size), dtype, layouts, padding=size // 2)
    source = patterns.source(spec, patterns.by_rule(spec, 132))
    assert resources(compile.cubin(source.text, 90)).local_bytes == 0


def test_what_no_such_kernel_has_is_refused() -> None:
    g = cg.Graph("dense")
    dy, x = (g.input(name, (1, 4, 8, 8), torch.float16) for name in ("dy", "x"))
    g.output("dw", g.conv_wgrad(dy, x, kernel=3, padding=1))
    with pytest.raises(Refused, match="but for depthwise ones of images"):
        patterns.by_rule(g.spec(), 132)

    g = cg.Graph("scaled")
    dy, x = (g.input(name, (1, 4, 8, 8), torch.float16) for name in ("dy", "x"))
    dw = g.conv_wgrad(dy, x, kernel=3, padding=1, groups=4)
    g.output("dw", g.mul(dw, 0.5))
    with pytest.raises(Refused, match="with other ops"):
        patterns.by_rule(g.spec(), 132)

    spec = gradient((1, 8, 8, 8), (3, 3))
    good = TapSums(4, 3, 4, 1, 2, 64, 1, 8)
    depthwise_gradient.write(spec, good)
    for bad, why in (
        (replace(good, lanes=3), "3 lanes"),
        (replace(good, taps=4), "4 rows of taps"),
        (replace(good, vectors=65), "too few threads"),
    ):
        with pytest.raises(Refused, match=why):
            depthwise_gradient.write(spec, bad)
