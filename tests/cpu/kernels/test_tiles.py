"""Kernels of tiles, run on the CPU: layouts that change, against float64 and exact copies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import compile, patterns, tiles, tiling
from cudnngraph.kernels.cubin import resources
from cudnngraph.kernels.rows import Schedule, rows_of
from cudnngraph.kernels.scalars import ROUNDED
from cudnngraph.kernels.tape import Refused
from cudnngraph.kernels.tiling import Tiles, Tiling
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
COPIED = (
    *FLOATS,
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
PROCESSORS = 4
MARGIN = 64  # elements before and behind a result, which nothing may write


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of few elements go through shared memory too."""
    monkeypatch.setattr(tiling, "SMALL", 64)


def strides(shape: Sequence[int], order: Sequence[int], gap: int = 0) -> tuple[int, ...]:
    """Strides by which ``order`` goes from the slowest to the fastest dim, with a gap per run."""
    found, step = [0] * len(shape), 1
    for at, dim in enumerate(reversed(order)):
        found[dim] = step
        step = step * shape[dim] + (gap if at == 0 else 0)
    return tuple(found)


def filled(spec: GraphSpec, seed: int = 0) -> list[torch.Tensor]:
    """Random inputs, in which dtypes without numbers of their own have random bits."""
    made = random_inputs(spec, torch.device("cpu"), seed)
    generator = torch.Generator().manual_seed(seed)
    for tensor in made:
        if tensor.dtype in (torch.int64, torch.int32, torch.uint8):
            tensor.copy_(torch.randint(0, 127, tensor.shape, generator=generator))
    return made


def check(
    spec: GraphSpec, plan: Tiling | None = None, found: Tiles | None = None
) -> host_kernels.Source:
    """Run a region in tiles, and compare it with float64 or, where nothing is computed, exactly."""
    found = found or tiling.tiles_of(spec)
    source = tiles.write(spec, plan or tiling.tiling_for(found, PROCESSORS), found)
    inputs = filled(spec)
    outs, around = [], []
    for name in spec.outputs:
        tensor = spec.tensors[name]
        around.append(
            torch.full(((tensor.extent + 2 * MARGIN) * tensor.dtype.itemsize,), 77).byte()
        )
        whole = around[-1].view(tensor.dtype)
        outs.append(whole.as_strided(tensor.shape, tensor.stride, MARGIN))
    host_kernels.run(source, [*inputs, *outs])
    for out, memory in zip(outs, around, strict=True):
        written = torch.zeros(memory.numel() // out.element_size(), dtype=torch.bool)
        written.as_strided(out.shape, out.stride(), MARGIN).fill_(True)
        beside = memory.view(-1, out.element_size())[~written]
        assert bool((beside == 77).all()), "it writes beside its results"
    wanted = reference.run(spec, inputs, torch.float64)
    narrow = min((tensor.dtype for tensor in inputs), key=lambda dtype: dtype.itemsize)
    for out, want, name in zip(outs, wanted, spec.outputs, strict=True):
        if not out.dtype.is_floating_point:
            assert torch.equal(out, want.to(out.dtype)), name
        elif all(node.op in ("transpose", "permute", "reshape") for node in spec.nodes):
            assert torch.equal(out.double(), want.double()), name
        else:
            allowed = numerics.bound(narrow, out.dtype)
            assert numerics.relative_error(out, want) <= allowed, name
    return source


def test_images_turn_channels_last() -> None:
    for shape, dtype in (
        ((2, 64, 8, 8), torch.float16),
        ((1, 40, 7, 7), torch.float16),
        ((2, 33, 15, 13), torch.float32),
        ((3, 3, 20, 20), torch.float16),
        ((3, 3, 9, 7), torch.float32),
    ):
        g = cg.Graph("turned")
        x = g.input("x", shape, dtype)
        g.output("y", x.relu(), layout="channels_last")
        check(g.spec())


@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_transposes_of_every_dtype_are_exact(dtype: torch.dtype) -> None:
    shape = (2, 96, 80) if COPIED.index(dtype) % 2 else (1, 61, 77)
    g = cg.Graph("transposed")
    g.output("y", g.transpose(g.input("x", shape, dtype), 1, 2), layout="contiguous")
    check(g.spec())


def test_residual_of_the_other_layout_with_a_bias() -> None:
    g = cg.Graph("residual")
    shape = (2, 48, 9, 10)
    x = g.input("x", shape, torch.float16)
    y = g.input("y", shape, torch.float16, layout="channels_last")
    b = g.input("b", (48,), torch.float32)
    s = g.input("s", (2, 48, 1, 1), torch.float16)
    rows = g.input("rows", (9, 10), torch.float32)
    z = (g.bias(x, b) * s + y + rows).gelu()
    g.output("z", z, layout="channels_last")
    check(g.spec())


def test_results_of_both_layouts() -> None:
    g = cg.Graph("both")
    x = g.input("x", (2, 48, 9, 12), torch.float32)
    y = g.input("y", (2, 48, 9, 12), torch.bfloat16, layout="channels_last")
    g.output("a", (x + y).silu(), layout="channels_last")
    g.output("b", x * y, layout="contiguous", dtype=torch.float16)
    g.output("c", x > y, layout="channels_last")
    check(g.spec())


def test_keys_are_transposed_for_heads() -> None:
    g = cg.Graph("heads")
    x = g.input("x", (2, 70, 4 * 16), torch.bfloat16)
    heads = g.transpose(g.reshape(x, (2, 70, 4, 16)), 1, 2)
    g.output("k", g.transpose(heads * 0.25, 2, 3), layout="contiguous")
    check(g.spec())


def test_slices_and_concatenations_beside_the_other_layout() -> None:
    for dim, dtype in ((1, torch.float16), (3, torch.float32)):
        g = cg.Graph("joined")
        parts = [
            g.input(name, shape, dtype, layout="channels_last")
            for name, shape in (("a", (2, 24, 9, 14)), ("b", (2, 24, 9, 14)))
        ]
        x = g.input("x", (2, 80, 9, 30), dtype)
        y = g.concat([*parts, parts[0]] if dim == 1 else parts, dim)
        shape = y.shape
        x = g.slice(g.slice(x, 1, 4, 4 + shape[1]), 3, 1, 1 + shape[3])
        g.output("y", x + y, layout="channels_last")
        check(g.spec())


def test_results_that_are_transposed_ones_of_each_other_are_read_once() -> None:
    for shape in ((1, 72, 40), (2, 56, 56)):
        g = cg.Graph("twice")
        y = g.input("x", shape, torch.float32).relu()
        g.output("y", y, dtype=torch.float16)
        g.output("z", g.transpose(y, 1, 2), dtype=torch.float16, layout="contiguous")
        source = check(g.spec())
        assert source.text.count("__shared__") == 1  # of z
        assert source.text.count("(p0 +") == 1


def test_a_matrix_and_its_transposed_one() -> None:
    g = cg.Graph("symmetric")
    x = g.input("x", (2, 77, 77), torch.float32)
    g.output("y", (x + g.transpose(x, 1, 2)) * 0.5)
    check(g.spec())


def test_concatenations_into_the_other_layout() -> None:
    for dim, dtype in ((1, torch.float16), (3, torch.float32), (2, torch.float16)):
        g = cg.Graph("joined")
        shape = [2, 24, 10, 16]
        parts = []
        for name, extent in (("a", 8), ("b", 16), ("c", 7)):
            shape[dim] = extent
            parts.append(g.input(name, shape, dtype))
        y = g.concat([parts[0], g.concat([parts[1].relu(), parts[2]], dim)], dim)
        g.output("y", y * 0.5, layout="channels_last")
        for found in tiling.ways(g.spec()):
            source = check(g.spec(), found=found)
            assert source.text.count("__shared__") == (1 if found.rows.inner.name == "m" else 3)


def test_random_tilings_are_right() -> None:
    g = cg.Graph("residual")
    x = g.input("x", (2, 48, 5, 7), torch.float16)
    y = g.input("y", (2, 48, 5, 7), torch.float16, layout="channels_last")
    g.output("z", x + y, layout="channels_last")
    spec = g.spec()
    for plan in (Tiling(1, 7, 9, 32), Tiling(2, 12, 35, 96), Tiling(8, 16, 64, 256)):
        check(spec, plan)
    for lanes, along, across, threads in ((0, 8, 8, 64), (3, 8, 8, 64), (8, 8, 0, 64)):
        with pytest.raises(Refused):
            tiles.write(spec, Tiling(lanes, along, across, threads))
    with pytest.raises(Refused):
        tiles.write(spec, Tiling(8, 48, 1000, 256))


def test_the_rule_takes_tiles_where_layouts_differ() -> None:
    def rule(shape: Sequence[int], layout: str) -> Tiling | None:
        g = cg.Graph("ruled")
        x = g.input("x", shape, torch.float16)
        g.output("y", x.relu(), layout=layout)
        return tiles.by_rule(g.spec(), rows_of(g.spec()), 132)

    assert rule((32, 256, 56, 56), "channels_last") == Tiling(8, 64, 64)
    assert rule((32, 256, 56, 56), "contiguous") is None
    assert rule((1000, 4, 2, 2), "channels_last") is None


def test_a_step_of_a_graph_is_a_kernel_of_tiles() -> None:
    spec = residual(torch.float16, (32, 256, 56, 56))
    plan = tiles.by_rule(spec, rows_of(spec), 132)
    assert plan is not None
    assert patterns.by_rule(spec, 132) == patterns.choice_of(plan)
    made = patterns.source(spec, patterns.choice_of(plan))
    assert {"cudnngraph", "add"} <= set(made.name.split("_"))
    wanted = tiles.write(spec, plan).called(made.name)
    assert made == replace(wanted, text=f"#define {ROUNDED}\n{wanted.text}")


def test_tiles_and_rows_are_measured_where_layouts_differ() -> None:
    spec = residual(torch.float16, (2, 64, 10, 12))
    found = patterns.choices(spec, PROCESSORS)
    assert found[0] == patterns.by_rule(spec, PROCESSORS)
    kinds = [type(patterns.schedule_of(choice)) for choice in found]
    assert kinds.count(Schedule) >= 1 and kinds.count(Tiling) > 3
    for choice in found[1::3]:
        plan = patterns.schedule_of(choice)
        if isinstance(plan, Tiling):
            check(spec, plan)


def residual(dtype: torch.dtype, shape: Sequence[int]) -> GraphSpec:
    """An operand of each layout."""
    g = cg.Graph("residual")
    x, y = (g.input("x", shape, dtype), g.input("y", shape, dtype, layout="channels_last"))
    g.output("z", (x + y).gelu(), layout="channels_last")
    g.output("w", x * y, layout="contiguous")
    return g.spec()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_registers_are_spilled(dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for shape in ((32, 256, 56, 56), (64, 2048, 7, 7), (64, 3, 224, 224)):
        spec = residual(dtype, shape)
        plan = tiles.by_rule(spec, rows_of(spec), 132)
        assert plan is not None
        assert resources(compile.cubin(tiles.write(spec, plan).text, 90)).local_bytes == 0


def test_choices_say_which_pattern_they_are_of() -> None:
    for schedule in (Schedule(4, 64, 2, 3), Tiling(8, 64, 32, 128)):
        assert patterns.schedule_of(patterns.choice_of(schedule)) == schedule
    with pytest.raises(NotSupported):
        patterns.schedule_of(Choice(KERNEL, (("lanes", 4),)))


def region_of(seed: int) -> GraphSpec:
    """A random pointwise region of tensors in random layouts."""
    rng = random.Random(seed)
    rank = rng.choice([2, 3, 4, 4, 5])
    most = {2: 200, 3: 60, 4: 24, 5: 10}[rank]
    shape = tuple(rng.choice([rng.randint(1, most), 8 * rng.randint(1, 6)]) for _ in range(rank))
    g = cg.Graph(f"region{seed}")
    dims = list(range(rank))
    short = rng.choice(FLOATS[1:])

    def layout(of: Sequence[int]) -> tuple[int, ...]:
        return strides(of, rng.sample(dims, rank), rng.choice([0, 0, 0, 1, 8]))

    total = None
    for number in range(rng.randint(1, 4)):
        of = tuple(1 if rng.random() < 0.15 else extent for extent in shape)
        if number == 0:
            of = shape
        kind = rng.choice([short, torch.float32, torch.bool, torch.int8, torch.float8_e4m3fn])
        if kind == torch.float8_e4m3fn and rng.random() < 0.7:
            kind = short
        x = viewed(g, rng, f"x{number}", of, kind)
        if kind == torch.bool:
            x = g.where(x, 0.5, 2.0) if total is None else g.where(x, total, 1.5)
            total = x if total is None else total
        elif kind in (torch.int8, torch.float8_e4m3fn):
            x = g.dequantize(x, g.input(f"s{number}", (), torch.float32))
        if total is None:
            total = x
        else:
            total = rng.choice([lambda a, b: a + b, lambda a, b: a * b, lambda a, b: b - a])(
                total, x
            )
        if rng.random() < 0.2:
            total = g.silu(total)
    total = g.identity(total)
    g.output("y", total, stride=layout(shape), dtype=rng.choice(FLOATS))
    if rng.random() < 0.4:
        g.output("z", total * 2.0, stride=layout(shape), dtype=rng.choice(FLOATS))
    if rng.random() < 0.3:
        z = g.permute(total, rng.sample(dims, rank))
        assert z.shape is not None
        g.output("t", z, stride=layout(z.shape), dtype=rng.choice(FLOATS))
    if rng.random() < 0.2:
        g.output("q", g.quantize(total, dtype=torch.int8), stride=layout(shape))
    return g.spec()


def viewed(
    g: cg.Graph, rng: random.Random, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> cg.Value:
    """An input of a random layout; or parts of one that are joined, turned or cut out."""
    dims = list(range(len(shape)))

    def given(name: str, shape: Sequence[int]) -> cg.Value:
        gap = rng.choice([0, 0, 0, 1, 8])
        stride = strides(shape, rng.sample(dims, len(dims)), gap)
        return g.input(name, shape, dtype, stride=stride)

    what, dim = rng.random(), rng.choice(dims)
    if what < 0.2:
        order = rng.sample(dims, len(dims))
        x = given(name, [shape[order.index(at)] for at in dims])
        return g.permute(x, order)
    if what < 0.4 and shape[dim] > 1:
        border = rng.randrange(1, shape[dim])
        parts = [
            given(f"{name}_{at}", [*shape[:dim], extent, *shape[dim + 1 :]])
            for at, extent in enumerate((border, shape[dim] - border))
        ]
        return g.concat(parts, dim)
    if what < 0.6:
        start = rng.randrange(9)
        x = given(name, [*shape[:dim], shape[dim] + start + 3, *shape[dim + 1 :]])
        return g.slice(x, dim, start, start + shape[dim])
    return given(name, shape)


def runs(seed: int) -> bool:
    """Whether a random region runs in tiles; if so it is right by each way and some tilings."""
    spec = region_of(seed)
    rng = random.Random(seed)
    try:
        ways = tiling.ways(spec)
        tiling.tiling_for(tiling.tiles_of(spec), PROCESSORS)
    except Refused:
        return False
    check(spec)
    found = rng.choice(ways)
    lanes = rng.choice([n for n in (1, 2, 4, 8, 16) if found.rows.lanes % n == 0])
    sides = lanes * rng.randint(1, 8), rng.choice([found.across.extent, rng.randint(1, 48)])
    if found.width * sides[0] * sides[1] < 20000 and sides[0] * sides[1] < 1000 * lanes:
        check(spec, Tiling(lanes, *sides, rng.choice([32, 96, 128])), found)
    return True


def test_random_regions() -> None:
    assert sum(map(runs, range(12))) >= 8
