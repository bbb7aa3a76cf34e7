"""Kernels of windows, run on the CPU: pooling and interpolation against float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.errors import GraphError
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.row_kernels import write
from cudnngraph.kernels.rows import Schedule, rows_of
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.tape import Refused
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "channels_last")


def check(
    spec: GraphSpec, inputs: Sequence[torch.Tensor] | None = None, lanes: int = 0
) -> tuple[Source, list[torch.Tensor]]:
    """Run a region, and compare it with float64."""
    rows = rows_of(spec)
    source = write(spec, Schedule(lanes or rows.lanes, 32), rows, most_blocks=2)
    inputs = inputs or random_inputs(spec, torch.device("cpu"))
    outs = [spec.tensors[name].empty("cpu").fill_(7) for name in spec.outputs]
    host_kernels.run(source, [*inputs, *outs])
    wanted = reference.run(spec, inputs, torch.float64)
    narrow = min((tensor.dtype for tensor in inputs), key=lambda dtype: dtype.itemsize)
    for out, want in zip(outs, wanted, strict=True):
        error = numerics.relative_error(out, want)
        assert error <= numerics.bound(narrow, out.dtype), (error, source.text[-4000:])
    return source, outs


def image(rng: random.Random, rank: int) -> tuple[int, ...]:
    """The shape of a small image."""
    sizes = (rng.randint(3, 11) for _ in range(rank))
    return (rng.randint(1, 2), rng.choice([1, 3, 8, 16]), *sizes)


def layout(rng: random.Random, rank: int) -> str:
    """A layout of an image."""
    return rng.choice(LAYOUTS) if rank == 2 else "contiguous"


def pool_of(rng: random.Random, rank: int, op: str) -> dict[str, Any]:
    """Random attributes of a pool."""
    if op.startswith("adaptive"):
        return {"output_size": tuple(rng.randint(1, 6) for _ in range(rank))}
    kernel = tuple(rng.randint(1, 4) for _ in range(rank))
    attrs: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": tuple(rng.randint(1, 3) for _ in range(rank)),
        "padding": tuple(rng.randint(0, size // 2) for size in kernel),
        "ceil_mode": rng.random() < 0.4,
    }
    if op == "max_pool":
        attrs["dilation"] = tuple(rng.randint(1, 2) for _ in range(rank))
    else:
        attrs["count_include_pad"] = rng.random() < 0.5
    return attrs


def pooled(seed: int, op: str, backward: bool) -> GraphSpec | None:
    """A graph of a random pool or its gradient, None if there is no such pool."""
    rng = random.Random(seed)
    rank = rng.choice([1, 2, 2, 2, 3])
    shape, attrs, dtype = image(rng, rank), pool_of(rng, rank, op), rng.choice(FLOATS)
    order = layout(rng, rank)
    try:
        g = cg.Graph("pool")
        x = g.input("x", shape, dtype, layout=order)
        y = getattr(g, op)(x, **attrs)
        if not backward:
            g.output("y", y)
            return g.spec()
        g = cg.Graph("gradient")
        dy = g.input("dy", y.shape, dtype, layout=order)
        if "max" in op:
            x = g.input("x", shape, dtype, layout=order)
            dx = getattr(g, f"{op}_backward")(dy, x, **attrs)
        else:
            dx = getattr(g, f"{op}_backward")(dy, **attrs, input_size=shape[2:])
        g.output("dx", dx)
        return g.spec()
    except GraphError:
        return None


POOLS = ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")


@pytest.mark.parametrize("op", POOLS)
def test_pools(op: str) -> None:
    assert run_many(op, False) >= 8


@pytest.mark.parametrize("op", POOLS)
def test_gradients_of_pools(op: str) -> None:
    assert run_many(op, True) >= 8


def run_many(op: str, backward: bool, count: int = 14) -> int:
    """How many of random pools are kernels; those are right, with few distinct values for ties."""
    done = 0
    for seed in range(count):
        spec = pooled(seed, op, backward)
        if spec is None:
            continue
        inputs = random_inputs(spec, torch.device("cpu"), seed)
        if backward and "max" in op:
            inputs[1].copy_(inputs[1].mul(2).round())
        try:
            check(spec, inputs)
        except Refused:
            continue
        done += 1
    return done


RESIZED: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"scale_factor": 2.0, "mode": "nearest"}),
    (2, {"scale_factor": (1.5, 0.7), "mode": "nearest"}),
    (2, {"size": (5, 17), "mode": "nearest-exact"}),
    (2, {"scale_factor": 2.0, "mode": "bilinear"}),
    (2, {"scale_factor": (1.3, 0.6), "mode": "bilinear"}),
    (2, {"size": (13, 4), "mode": "bilinear", "align_corners": True}),
    (2, {"size": (1, 1), "mode": "bilinear", "align_corners": True}),
    (2, {"scale_factor": 4.0, "mode": "bilinear"}),
    (1, {"scale_factor": 3.0, "mode": "linear"}),
    (1, {"size": 29, "mode": "nearest"}),
    (3, {"scale_factor": 2.0, "mode": "trilinear"}),
    (3, {"size": (3, 9, 7), "mode": "nearest"}),
    (2, {"scale_factor": 2.0, "mode": "bicubic"}),
    (2, {"scale_factor": (1.3, 0.6), "mode": "bicubic"}),
    (2, {"size": (13, 4), "mode": "bicubic", "align_corners": True}),
    (2, {"size": (1, 1), "mode": "bicubic"}),
    (2, {"size": (7, 9), "mode": "bicubic"}),
    (2, {"size": (7, 6), "mode": "bicubic"}),
)


def resized(number: int, backward: bool, order: str, dtype: torch.dtype) -> GraphSpec:
    """A graph of an interpolation or its gradient."""
    rank, attrs = RESIZED[number]
    shape = (2, 8, *(7, 6, 4)[:rank])
    order = order if rank == 2 else "contiguous"
    g = cg.Graph("resized")
    x = g.input("x", shape, dtype, layout=order)
    y = g.interpolate(x, **attrs)
    if not backward:
        g.output("y", y)
        return g.spec()
    g = cg.Graph("gradient")
    dy = g.input("dy", y.shape, dtype, layout=order)
    g.output("dx", g.interpolate_backward(dy, **attrs, input_size=shape[2:]))
    return g.spec()


@pytest.mark.parametrize("number", range(len(RESIZED)))
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_interpolation(number: int, backward: bool) -> None:
    check(resized(number, backward, LAYOUTS[number % 2], FLOATS[number % 3]))
    if RESIZED[number][0] == 2:
        check(resized(number, backward, LAYOUTS[1 - number % 2], FLOATS[(number + 1) % 3]))


@pytest.mark.parametrize("order", LAYOUTS)
def test_pool_between_pointwise_ops(order: str) -> None:
    g = cg.Graph("fused")
    x = g.input("x", (2, 16, 9, 10), torch.bfloat16, layout=order)
    b = g.input("b", (16,), torch.float32)
    skip = g.input("skip", (2, 16, 5, 5), torch.bfloat16, layout=order)
    y = g.max_pool(g.bias(x, b).relu(), 3, 2, 1)
    g.output("y", (y + skip).silu())
    source, _ = check(g.spec())
    assert ("load<4>(p0" in source.text) == (order == "channels_last")


def test_upsampled_beside_what_it_is_concatenated_with() -> None:
    g = cg.Graph("decoder")
    x = g.input("x", (1, 8, 5, 6), torch.float16, layout="channels_last")
    skip = g.input("skip", (1, 16, 10, 12), torch.float16, layout="channels_last")
    g.output("y", g.concat([g.interpolate(x, scale_factor=2, mode="bilinear"), skip], 1).relu())
    check(g.spec())


def test_nan_and_infinity_are_where_torch_has_them() -> None:
    for op, attrs in (
        ("max_pool", {"kernel_size": 3, "stride": 2, "padding": 1}),
        ("avg_pool", {"kernel_size": 2, "stride": 1}),
        ("adaptive_max_pool", {"output_size": 3}),
    ):
        for backward in (False, "max" in op):
            g = cg.Graph("odd")
            x = g.input("x", (1, 8, 8, 8), torch.float32, layout="channels_last")
            y = getattr(g, op)(x, **attrs)
            if backward:
                dy = g.input("dy", y.shape, torch.float32, layout="channels_last")
                y = getattr(g, f"{op}_backward")(dy, x, **attrs)
            g.output("y", y)
            spec = g.spec()
            inputs = random_inputs(spec, torch.device("cpu"))
            given = inputs[0]
            given[0, 0, 1, 1:4] = float("nan")
            given[0, 1] = -float("inf")
            given[0, 2, 3, 3] = float("inf")
            check(spec, inputs)


def test_an_empty_batch_is_refused() -> None:
    g = cg.Graph("empty")
    g.output("y", g.max_pool(g.input("x", (0, 8, 16, 16), torch.float32), 2))
    with pytest.raises(Refused, match="empty"):
        patterns.by_rule(g.spec(), 4)


def test_windows_that_are_no_kernels() -> None:
    g = cg.Graph("large")
    g.output("y", g.avg_pool(g.input("x", (1, 8, 64, 64), torch.float32), 32))
    with pytest.raises(Refused, match="many elements"):
        rows_of(g.spec())
    g = cg.Graph("dear")
    g.output("y", g.max_pool(g.input("x", (1, 8, 16, 16), torch.float32).gelu(), 3, 1))
    with pytest.raises(Refused, match="at some length"):
        rows_of(g.spec())


def test_a_mean_of_whole_images_is_a_reduction() -> None:
    g = cg.Graph("squeezed")
    x = g.input("x", (2, 6, 7, 9), torch.float16)
    g.output("y", g.adaptive_avg_pool(x.relu(), 1).sigmoid())
    rows = rows_of(g.spec())
    assert rows.reductions and rows.inner.extent == 63
    check(g.spec())


def test_windows_go_in_rows_where_the_layout_changes() -> None:
    g = cg.Graph("turned")
    x = g.input("x", (2, 64, 32, 32), torch.float16)
    g.output("y", g.max_pool(x, 2), layout="channels_last")
    assert isinstance(patterns.schedule_of(patterns.by_rule(g.spec(), 4)), Schedule)
    check(g.spec())


@pytest.mark.parametrize("order", LAYOUTS)
def test_what_is_resized_is_added_behind_a_depthwise_convolution(order: str) -> None:
    g = cg.Graph("added")
    x = g.input("x", (2, 16, 10, 12), torch.bfloat16, layout=order)
    w = g.input("w", (16, 1, 3, 3), torch.bfloat16)
    z = g.input("z", (2, 16, 5, 6), torch.bfloat16, layout=order)
    up = g.interpolate(z, scale_factor=2, mode="bilinear")
    g.output("y", g.conv(x, w, padding=1, groups=16) + up)
    spec = g.spec()
    inputs = random_inputs(spec, torch.device("cpu"))
    out = spec.tensors[spec.outputs[0]].empty("cpu").fill_(7)
    choice = patterns.by_rule(spec, 4)
    host_kernels.run(patterns.source(spec, choice), [*inputs, out])
    (want,) = reference.run(spec, inputs, torch.float64)
    assert numerics.relative_error(out, want) <= numerics.bound(torch.bfloat16)


def test_windows_beside_reductions_are_refused() -> None:
    g = cg.Graph("both")
    x = g.input("x", (2, 6, 8, 8), torch.float32)
    g.output("y", g.max_pool(x, 2).softmax(-1))
    with pytest.raises(Refused, match="windows and reductions"):
        patterns.by_rule(g.spec(), 132)


@pytest.mark.parametrize("long", [False, True])
def test_signals_whose_places_32_bits_do_not_count(long: bool) -> None:
    """A place of the one times the length of the other is over 2^32."""
    sizes = (480_000, 100_003) if long else (4800, 1003)

    def pool(g: cg.Graph) -> cg.Value:
        x = g.input("x", (1, 1, 1, sizes[0]), torch.float32)
        return g.adaptive_avg_pool(x, (1, sizes[1]))

    def pool_backward(g: cg.Graph) -> cg.Value:
        dy = g.input("dy", (1, 1, 1, sizes[1]), torch.float32)
        return g.adaptive_avg_pool_backward(dy, (1, sizes[1]), input_size=(1, sizes[0]))

    def interpolate_backward(g: cg.Graph) -> cg.Value:
        dy = g.input("dy", (1, 1, 1, sizes[0]), torch.float32)
        return g.interpolate_backward(dy, size=(1, sizes[0]), input_size=(1, sizes[1]))

    for made in (pool, pool_backward, interpolate_backward):
        g = cg.Graph("signal")
        g.output("y", made(g))
        if not long:
            check(g.spec())
            continue
        with pytest.raises(Refused, match="64 bits"):
            patterns.by_rule(g.spec(), 132)
