"""Kernels of depthwise convolutions, run on the CPU against float64, and compiled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import compile, depthwise, patterns
from cudnngraph.kernels.cubin import resources
from cudnngraph.kernels.depthwise import Strips
from cudnngraph.kernels.tape import Refused
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEEDS = range(48)


def drawn(rng: random.Random) -> GraphSpec:
    """A depthwise convolution, or the gradient of one, with more or less behind it."""
    g = cg.Graph("depthwise")
    dtype, kernel = rng.choice(DTYPES), (rng.choice((1, 2, 3, 5, 7)), rng.choice((1, 3, 4, 5, 7)))
    shape = (
        rng.randint(1, 2),
        rng.choice((1, 3, 8, 12, 24)),
        rng.randint(1, 11),
        rng.randint(1, 13),
    )
    layout = rng.choice(("channels_last", "contiguous"))
    options: dict[str, Any] = {
        "stride": (rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3))),
        "padding": (rng.randint(0, 3), rng.randint(0, 3)),
        "dilation": (rng.choice((1, 1, 2)), rng.choice((1, 1, 2))),
        "groups": shape[1],
    }
    x = g.input("x", shape, dtype, layout=layout)
    w = g.input("w", (shape[1], 1, *kernel), dtype, layout=rng.choice(("channels_last", layout)))
    y = g.conv_transpose(x, w, **options) if rng.random() < 0.4 else g.conv(x, w, **options)
    if rng.random() < 0.7:
        y = g.bias(y, g.input("b", (shape[1],), dtype))
        if rng.random() < 0.5:
            y = g.silu(y)
        if y.spec is not None and rng.random() < 0.4:
            y = g.add(y, g.input("r", y.spec.shape, dtype, layout=layout))
    g.output("y", y, dtype=dtype, layout=rng.choice((layout, "channels_last")))
    return g.spec()


def graphs() -> list[tuple[int, GraphSpec]]:
    """Those of the seeds that are graphs: a window may be larger than an image."""
    found = []
    for seed in SEEDS:
        try:
            found.append((seed, drawn(random.Random(seed))))
        except cg.GraphError:
            continue
    return found


def test_random_ones_are_right_by_every_schedule() -> None:
    cases = []
    for seed, spec in graphs():
        choices = patterns.choices(spec, 2)
        taken = random.Random(seed).sample(choices, min(2, len(choices)))
        for choice in dict.fromkeys((choices[0], *taken)):
            try:
                source = patterns.source(spec, choice)
            except cg.NotSupported:
                continue
            cases.append((seed, spec, choice, host_kernels.expect(source)))
    assert len(cases) > 60
    for seed, spec, choice, source in cases:
        inputs = random_inputs(spec, torch.device("cpu"), seed)
        outputs = [spec.tensors[name].empty(torch.device("cpu")) for name in spec.outputs]
        host_kernels.run(source, [*inputs, *outputs])
        wanted = reference.run(spec, inputs, torch.float64)
        for out, want in zip(outputs, wanted, strict=True):
            what = f"seed {seed}, {choice}"
            numerics.check(out, want, spec.tensors["x"].dtype, what=what)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_strips_over_all_borders_are_right(
    transposed: bool, stride: tuple[int, int], dilation: int
) -> None:
    """Windows that reach over the image on every side, strips over the right and lower border."""
    g = cg.Graph("borders")
    x = g.input("x", (2, 8, 9, 11), torch.float16, layout="channels_last")
    w = g.input("w", (8, 1, 5, 3), torch.float16, layout="channels_last")
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": 2, "groups": 8}
    y = g.conv_transpose(x, w, **options) if transposed else g.conv(x, w, **options)
    g.output("y", g.silu(g.bias(y, g.input("b", (8,), torch.float16))))
    spec = g.spec()
    inputs = random_inputs(spec, torch.device("cpu"))
    (want,) = reference.run(spec, inputs, torch.float64)
    down, right = stride if transposed else (1, 1)
    drawn_by_hand = [
        Strips(lanes, wide * right, high * down, vectors, blocks)
        for lanes, wide, high, vectors, blocks in (
            (1, 1, 1, 8, 2),
            (8, 2, 1, 1, 1),
            (4, 3, 2, 2, 4),
            (2, 4, 3, 4, 64),
            (2, 16, 16, 1, 8),
        )
    ]
    sources = [host_kernels.expect(depthwise.write(spec, each)) for each in drawn_by_hand]
    for strips, source in zip(drawn_by_hand, sources, strict=True):
        out = spec.tensors["y"].empty("cpu")
        host_kernels.run(source, [*inputs, out])
        numerics.check(out, want, torch.float16, what=str(strips))


def test_a_strip_meets_what_its_windows_cover() -> None:
    """Against a plain count: each pair of a result and a tap meets at one row, or at none."""
    for transposed in (False, True):
        for step, by, padding in ((1, 1, 1), (2, 1, 2), (3, 2, 0), (2, 3, 4)):
            g = cg.Graph("met")
            x = g.input("x", (1, 2, 20, 20), torch.float16)
            w = g.input("w", (2, 1, 4, 3), torch.float16)
            options: dict[str, Any] = {"stride": step, "dilation": by, "groups": 2}
            make = g.conv_transpose if transposed else g.conv
            g.output("y", make(x, w, padding=padding, **options))
            region = depthwise.region_of(g.spec())
            size = 2 * step
            met = region.met(0, size)
            for strip in range(3):
                pairs = {
                    (strip * size + own, tap): strip * region.moved(0, size) + at
                    for at, found in met.items()
                    for own, tap in found
                }
                for y in range(strip * size, (strip + 1) * size):
                    for tap in range(4):
                        if transposed:
                            at, rest = divmod(y + padding - tap * by, step)
                            assert pairs.get((y, tap)) == (None if rest else at)
                        else:
                            assert pairs[y, tap] == y * step + tap * by - padding


@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_no_registers_are_spilled(size: int, layout: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    g = cg.Graph("depthwise")
    x = g.input("x", (64, 96, 56, 56), torch.float16, layout=layout)
    w = g.input("w", (96, 1, size, size), torch.float16, layout=layout)
    y = g.conv(x, w, padding=size // 2, groups=96)
    g.output("y", g.silu(g.bias(y, g.input("b", (96,), torch.float16))))
    source = patterns.source(g.spec(), patterns.by_rule(g.spec(), 132))
    assert resources(compile.cubin(source.text, 90)).local_bytes == 0


def test_what_no_such_kernel_has_is_refused() -> None:
    g = cg.Graph("dense")
    x, w = g.input("x", (1, 4, 8, 8), torch.float16), g.input("w", (4, 4, 3, 3), torch.float16)
    g.output("y", g.conv(x, w))
    with pytest.raises(Refused, match="but for depthwise ones of images"):
        patterns.by_rule(g.spec(), 132)

    g = cg.Graph("computed")
    x, w = g.input("x", (1, 4, 8, 8), torch.float16), g.input("w", (4, 1, 3, 3), torch.float16)
    y = g.conv(g.relu(x), w, groups=4)
    g.output("y", y)
    with pytest.raises(Refused, match="of what is computed in the region"):
        patterns.by_rule(g.spec(), 132)

    g = cg.Graph("schedules")
    x, w = g.input("x", (1, 4, 8, 8), torch.float16), g.input("w", (4, 1, 3, 3), torch.float16)
    g.output("y", g.conv(x, w, groups=4))
    with pytest.raises(Refused, match="3 lanes"):
        depthwise.write(g.spec(), Strips(3, 4, 1, 0, 8))

    g = cg.Graph("large")
    x = g.input("x", (1 << 16, 64, 32, 32), torch.float16)
    g.output("y", g.conv(x, g.input("w", (64, 1, 3, 3), torch.float16), groups=64))
    with pytest.raises(Refused, match="index of 64 bits"):
        patterns.by_rule(g.spec(), 132)

    g = cg.Graph("strides")
    x, w = g.input("x", (1, 4, 8, 8), torch.float16), g.input("w", (4, 1, 3, 3), torch.float16)
    g.output("y", g.conv_transpose(x, w, stride=2, groups=4))
    with pytest.raises(Refused, match="no multiple of its stride"):
        depthwise.write(g.spec(), Strips(1, 4, 1, 0, 8))


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_what_differs_by_channels_is_read_once_and_only_where_it_is(layout: str) -> None:
    g = cg.Graph("channels")
    x = g.input("x", (2, 16, 5, 6), torch.float16, layout=layout)
    y = g.conv(x, g.input("w", (16, 1, 3, 3), torch.float16), padding=1, groups=16)
    y = g.bias(y, g.input("b", (16,), torch.float16))
    parts = [g.input(name, (1, 8, 1, 1), torch.float16) for name in ("c", "d")]
    g.output("y", g.mul(y, g.concat(parts, 1)))
    spec = g.spec()
    choice = patterns.by_rule(spec, 132)
    source = patterns.source(spec, choice)
    before, inside = source.text.split("for (u32 at = ")
    read = {
        name: [f"(p{at} + " in text or f"get(p{at}[" in text for text in (before, inside)]
        for at, name in enumerate(spec.inputs)
    }
    if layout == "channels_last":  # a thread has its channels for all places
        assert read["b"] == [True, False]
    assert read["c"] == read["d"] == [False, True]
    inputs = random_inputs(spec, torch.device("cpu"))
    out = spec.tensors["y"].empty("cpu")
    host_kernels.run(source, [*inputs, out])
    (want,) = reference.run(spec, inputs, torch.float64)
    numerics.check(out, want, torch.float16)


def test_a_window_stands_behind_it() -> None:
    g = cg.Graph("window")
    x = g.input("x", (1, 8, 6, 6), torch.float16, layout="channels_last")
    z = g.input("z", (1, 8, 3, 3), torch.float16, layout="channels_last")
    y = g.conv(x, g.input("w", (8, 1, 3, 3), torch.float16), padding=1, groups=8)
    g.output("y", g.add(y, g.interpolate(z, (6, 6), mode="nearest")))
    spec = g.spec()
    source = patterns.source(spec, patterns.by_rule(spec, 132))
    inputs = random_inputs(spec, torch.device("cpu"))
    out = spec.tensors["y"].empty("cpu")
    host_kernels.run(source, [*inputs, out])
    (want,) = reference.run(spec, inputs, torch.float64)
    numerics.check(out, want, torch.float16)


@pytest.mark.parametrize("border", [8, 6, 5])
def test_what_is_joined_behind_it_bounds_the_lanes(border: int) -> None:
    g = cg.Graph("joined")
    shape = (2, 16, 5, 6)
    x = g.input("x", shape, torch.float16, layout="channels_last")
    parts = [
        g.input(name, (2, count, 5, 6), torch.float16, layout="channels_last")
        for name, count in (("a", border), ("b", 16 - border))
    ]
    y = g.conv(x, g.input("w", (16, 1, 3, 3), torch.float16), padding=1, groups=16)
    g.output("y", g.add(y, g.neg(g.concat(parts, 1))))
    spec = g.spec()
    choice = patterns.by_rule(spec, 132)
    assert border % dict(choice.knobs)["lanes"] == 0
    inputs = random_inputs(spec, torch.device("cpu"))
    out = spec.tensors["y"].empty("cpu")
    host_kernels.run(patterns.source(spec, choice), [*inputs, out])
    (want,) = reference.run(spec, inputs, torch.float64)
    assert numerics.relative_error(out, want) < numerics.BOUNDS["float16"]
