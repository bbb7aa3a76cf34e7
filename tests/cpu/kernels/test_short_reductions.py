"""Reductions over few elements that lie across memory: they are pointwise ops of slices."""

from __future__ import annotations

import random

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec, channels_last_strides
from cudnngraph.kernels import patterns, short_reductions
from cudnngraph.kernels.rows import reachable, tape_of
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.split import Split
from cudnngraph.kernels.stages import reductions_of
from cudnngraph.kernels.tape import Join
from cudnngraph.kernels.write import Schedule
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics

CPU = torch.device("cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
H100 = 132  # multiprocessors
ROWS = ((32, 64, 56, 56), (32, 128, 28, 28), (32, 256, 14, 14), (32, 512, 7, 7))


def halves(g: cg.Graph, shape: tuple[int, ...], radix: int, dtype: torch.dtype) -> cg.Value:
    """The parts of an image's channels, (N, radix, C, H, W) of (N, radix C, H, W)."""
    n, c, h, w = shape
    whole = (n, radix * c, h, w)
    x = g.input("x", whole, dtype, stride=channels_last_strides(whole))
    return g.reshape(x, (n, radix, c, h, w))


def stacked(g: cg.Graph, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> cg.Value:
    """Images that are stacked, (N, count, C, H, W)."""
    n, c, h, w = shape
    stride = channels_last_strides(shape)
    images = [g.input(f"x{at}", shape, dtype, stride=stride) for at in range(count)]
    return g.concat([g.reshape(each, (n, 1, c, h, w)) for each in images], 1)


def means(x: cg.Value, g: cg.Graph) -> cg.Value:
    """The mean over all pixels of the sum of the parts."""
    return g.reduction(g.reduction(x, (1,), "sum"), (2, 3), "mean", True)


def weighed(x: cg.Value, g: cg.Graph) -> cg.Value:
    """The sum of the parts by weights, a softmax over them."""
    n, count, c, _, _ = x.shape
    scores = g.input("scores", (n, count, c, 1, 1), x.dtype)
    return g.reduction(g.mul(x, g.softmax(scores, 1)), (1,), "sum")


def spec_of(make, form, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> GraphSpec:  # type: ignore[no-untyped-def]
    g = cg.Graph("parts")
    g.output("y", make(form(g, shape, count, dtype), g))
    return g.spec()


def by_rule(spec: GraphSpec, processors: int = H100) -> Source:
    return patterns.source(spec, patterns.by_rule(spec, processors))


def check(spec: GraphSpec, source: Source) -> None:
    """Run a kernel on the host, and compare its results with those in float64."""
    inputs = random_inputs(spec, CPU)
    outs = [spec.tensors[name].empty("cpu").fill_(7) for name in spec.outputs]
    host_kernels.run(source, [*inputs, *outs])
    terms = max(tensor.numel for tensor in spec.tensors.values())
    for out, want in zip(outs, reference.run(spec, inputs, torch.float64), strict=True):
        numerics.check(out, want, spec.tensors[spec.inputs[0]].dtype, terms=terms)


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("form", (halves, stacked))
def test_a_mean_of_parts_reads_each_once_in_vectors(form, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    spec = spec_of(means, form, shape, 2, F16)
    source = by_rule(spec)
    pixels = shape[2] * shape[3]
    if pixels < 64:  # a thread has a channel
        assert source.blocks * source.threads == shape[0] * shape[1]
        return
    assert isinstance(patterns.schedule_of(patterns.by_rule(spec, H100)), Split)
    assert len(source.launches) <= 2, "one that reads, and one of partial results"
    first = source.text.split('extern "C"')[1]
    assert "get(p0" not in first and "load<8>(p0" in first, "16 bytes at a time"
    assert source.threads == 256 and source.blocks > (2 if pixels > 200 else 1) * H100
    assert source.workspace_bytes <= 4 * shape[0] * shape[1] * 64, "nothing of the images' size"


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("form", (halves, stacked))
def test_a_weighed_sum_of_parts_is_a_pointwise_kernel(form, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    spec = spec_of(weighed, form, shape, 2, F16)
    schedule = patterns.schedule_of(patterns.by_rule(spec, H100))
    assert isinstance(schedule, Schedule) and schedule.team == 256
    source = by_rule(spec)
    assert len(source.launches) <= 1
    assert source.blocks >= 4 * H100
    if shape[2] >= 28:
        assert schedule.lanes == 8 and "get(p" not in source.text.split('extern "C"')[1]


@pytest.mark.parametrize("seed", range(24))
def test_sums_of_parts_are_right(seed: int) -> None:
    rng = random.Random(seed)
    shape = (rng.randint(1, 3), rng.choice((1, 3, 8, 13, 16, 24)), rng.randint(1, 9), 7)
    form, make = rng.choice((halves, stacked)), rng.choice((means, weighed))
    count = rng.randint(2, 5)
    spec = spec_of(make, form, shape, count, rng.choice((F32, F16, BF16)))
    check(spec, by_rule(spec, rng.choice((1, 8, H100))))


MODES = ("sum", "mean", "max", "min", "amax")


@pytest.mark.parametrize("seed", range(32))
def test_reductions_of_any_rank_are_right(seed: int) -> None:
    rng = random.Random(seed)
    g = cg.Graph("reductions")
    rank = rng.randint(2, 6)
    shape = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(rank - 1))
    shape = (*shape, rng.choice((5, 8, 16, 31)))
    x = g.input("x", shape, rng.choice((F32, F16, BF16)))
    x = g.add(x, g.input("bias", shape[-1:], x.dtype)) if rng.random() < 0.5 else x
    for _ in range(rng.randint(1, 2)):
        dims = sorted(rng.sample(range(rank - 1), rng.randint(1, max(1, rank - 2))))
        x = g.reduction(x, dims, rng.choice(MODES), True)
        x = g.relu(x) if rng.random() < 0.3 else x
    g.output("y", g.reshape(x, (-1, shape[-1])))
    spec = g.spec()
    check(spec, by_rule(spec, rng.choice((1, H100))))


def left(spec: GraphSpec) -> list[tuple[int, ...]]:
    """The dims of the reductions that are not written out."""
    return [each.dims for each in reductions_of(tape_of(spec))]


def test_a_mean_of_parts_is_one_reduction() -> None:
    assert left(spec_of(means, halves, (4, 64, 16, 16), 2, F16)) == [(2, 3)]
    assert left(spec_of(weighed, halves, (4, 64, 16, 16), 2, F16)) == []


def test_a_softmax_of_parts_stays_a_kernel_of_rows() -> None:
    g = cg.Graph("softmax")
    x = g.input("x", (4, 2, 64, 64), F16)
    g.output("y", g.softmax(x, 1))
    spec = g.spec()
    assert left(spec) == [(1,), (1,)], "each result would read all parts"
    check(spec, by_rule(spec))


def test_parts_that_lie_side_by_side_stay_rows() -> None:
    g = cg.Graph("pairs")
    g.output("y", g.reduction(g.input("x", (4096, 2), F16), (1,), "sum"))
    assert left(g.spec()) == [(1,)]


def test_parts_that_are_written_too_stay_in_one_kernel() -> None:
    g = cg.Graph("both")
    x = g.relu(g.input("x", (4, 2, 64, 32), F16))
    g.output("y", x)
    g.output("sum", g.reduction(x, (1,), "sum"))
    assert left(g.spec()) == [(1,)]
    check(g.spec(), by_rule(g.spec()))


def test_a_variance_of_parts_is_right() -> None:
    g = cg.Graph("variance")
    x = g.input("x", (4, 3, 16, 8), F32, layout="channels_last")
    middle = g.reduction(g.reshape(x, (2, 2, 3, 16, 8)), (1,), "mean", True)
    apart = g.sub(g.reshape(x, (2, 2, 3, 16, 8)), middle)
    g.output("y", g.reduction(g.mul(apart, apart), (1,), "mean"))
    assert left(g.spec()) == []
    check(g.spec(), by_rule(g.spec()))


def test_slices_of_what_is_stacked_are_read_without_a_branch() -> None:
    spec = spec_of(means, stacked, (2, 16, 8, 8), 3, F16)
    assert any(isinstance(value, Join) for value in reachable(tape_of(spec)))
    assert "else" not in by_rule(spec).text.split('extern "C"')[1]


def test_more_elements_are_a_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec() -> GraphSpec:
        return spec_of(weighed, halves, (2, 16, 8, 8), 4, F16)

    assert left(spec()) == []
    monkeypatch.setattr(short_reductions, "MOST", 3)
    assert left(spec()) == [(1,), (1,), (1,)]
    check(spec(), by_rule(spec()))
