"""Kernels of several launches on the CPU, of random shapes and layouts, held against float64."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.device import rules
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec, channels_last_strides, contiguous_strides
from cudnngraph.kernels import grid, kernel, patterns, rows, short_reductions, split, write
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.split import Split
from cudnngraph.kernels.write import Refused
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEAN = 1000.0
Region = Callable[["Images"], list[cg.Value]]


class Images:
    """A graph under way over images of a random shape, layout and dtype."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.graph = cg.Graph("split")
        self.dtype = rng.choice(DTYPES)
        self.groups = rng.choice([1, 2, 3, 4])
        c = self.groups * rng.choice([1, 2, 3, 5, 8, 16])
        self.shape = (rng.randint(1, 5), c, rng.randint(1, 12), rng.choice([1, 3, 7, 8, 12, 16]))
        if rng.random() < 0.2:
            self.shape = (2, 4 * self.groups, 64, 32)
        if self.shape[0] * self.shape[2] * self.shape[3] < 2:
            self.shape = (2, *self.shape[1:])
        last = rng.random() < 0.5
        self.stride = (channels_last_strides if last else contiguous_strides)(self.shape)

    def image(self, name: str) -> cg.Value:
        """An input of the shape."""
        return self.graph.input(name, self.shape, dtype=self.dtype, stride=self.stride)

    def vector(self, name: str, dtype: torch.dtype | None = None) -> cg.Value:
        """An input of a number for each channel."""
        return self.graph.input(name, (self.shape[1],), dtype=dtype or torch.float32)

    def statistic(self, name: str) -> cg.Value:
        """An input of a number for each channel of each image."""
        stride = (self.shape[1], 1, 1, 1)
        shape = (*self.shape[:2], 1, 1)
        return self.graph.input(name, shape, dtype=torch.float32, stride=stride)


def group_norm(at: Images) -> list[cg.Value]:
    g, x = at.graph, at.image("x")
    shift, factor = g.group_affine(x, at.groups, at.vector("weight"))
    y = g.add(g.mul(g.add(x, shift), factor), g.reshape(at.vector("bias"), (1, -1, 1, 1)))
    return [g.silu(y) if at.rng.random() < 0.7 else y]


def group_norm_of_the_builder(at: Images) -> list[cg.Value]:
    """As :meth:`Graph.group_norm` declares it: by views and an instance norm."""
    vectors = (at.vector("weight", at.dtype), at.vector("bias", at.dtype))
    return [at.graph.silu(at.graph.group_norm(at.image("x"), at.groups, *vectors))]


def instance_norm(at: Images) -> list[cg.Value]:
    g, x = at.graph, at.image("x")
    stats = at.rng.random() < 0.5
    made = g.instance_norm(x, at.vector("weight"), at.vector("bias"), return_stats=stats)
    y, *rest = made if stats else (made,)
    return [g.relu(y), *rest]


def batch_norm_train(at: Images) -> list[cg.Value]:
    g, x = at.graph, at.image("x")
    running = (at.vector("m"), at.vector("v")) if at.rng.random() < 0.5 else ()
    y, *rest = g.batch_norm_train(x, at.vector("weight"), at.vector("bias"), *running)
    return [g.relu(g.add(y, at.image("z"))), *rest]


def batch_norm_backward(at: Images) -> list[cg.Value]:
    g, vectors = at.graph, [at.vector(name) for name in ("weight", "mean", "inv_std")]
    return list(g.batch_norm_backward(at.image("dy"), at.image("x"), *vectors))


def instance_norm_backward(at: Images) -> list[cg.Value]:
    g, statistics = at.graph, [at.statistic(name) for name in ("mean", "inv_std")]
    given = (at.image("dy"), at.image("x"), *statistics)
    if at.rng.random() < 0.3:
        return [g.instance_norm_backward(*given)]
    return list(g.instance_norm_backward(*given, at.vector("weight")))


def row_norm_backward(at: Images) -> list[cg.Value]:
    g, rng = at.graph, at.rng
    rows, long = rng.choice([3, 40, 300]), rng.choice([5, 24, 64, 200])
    dy, x = (g.input(name, (rows, long), dtype=at.dtype) for name in ("dy", "x"))
    weight = g.input("weight", (long,), dtype=at.dtype)
    inv = g.input("inv_std", (rows, 1), dtype=torch.float32)
    if rng.random() < 0.5:
        mean = g.input("mean", (rows, 1), dtype=torch.float32)
        made = g.layer_norm_backward(dy, x, weight, mean, inv)
    else:
        made = g.rms_norm_backward(dy, x, weight, inv, bias_grad=rng.random() < 0.5)
    return list(made)


def reduction(at: Images) -> list[cg.Value]:
    g, rng = at.graph, at.rng
    dims = sorted(rng.sample(range(4), rng.randint(1, 4)))
    x = at.image("x")
    x = g.abs(x) if rng.random() < 0.3 else x
    modes = rng.sample(["sum", "mean", "max", "min", "amax"], rng.randint(1, 2))
    found = [g.reduction(x, dims, mode, rng.random() < 0.5) for mode in modes]
    return [g.relu(y) if rng.random() < 0.3 else y for y in found]


def bias_gradient(at: Images) -> list[cg.Value]:
    g, dy = at.graph, at.image("dy")
    dx = g.relu_backward(dy, at.image("y"))
    return [dx, g.reduction(dx, (0, 2, 3), "sum")]


def softmax_of_channels(at: Images) -> list[cg.Value]:
    return [at.graph.softmax(at.image("x"), dim=1)]


def norm_behind_a_norm(at: Images) -> list[cg.Value]:
    g, x = at.graph, at.image("x")
    y = g.add(g.relu(g.instance_norm(x, at.vector("a"), at.vector("b"))), at.image("z"))
    return [g.instance_norm(y, at.vector("c"), at.vector("d"))]


REGIONS = (
    group_norm,
    group_norm_of_the_builder,
    instance_norm,
    batch_norm_train,
    batch_norm_backward,
    instance_norm_backward,
    row_norm_backward,
    reduction,
    bias_gradient,
    softmax_of_channels,
    norm_behind_a_norm,
)


def random_split(rng: random.Random) -> Split:
    return Split(rng.choice([32, 64, 128]), rng.choice([4, 16, 64, 200]), rng.choice([4, 8, 32]))


def split_is_right(region: Region, seed: int, far: bool = False) -> Source:
    """The kernel of a random region, run; ``far``: of data of mean 1000 and deviation 1."""
    at = Images(random.Random(seed))
    for number, each in enumerate(region(at)):
        at.graph.output(f"o{number}", each)
    spec = at.graph.spec()
    source = split.write(spec, random_split(at.rng))
    torch.manual_seed(seed)
    inputs = random_inputs(spec, torch.device("cpu"))
    if far:
        for name, tensor in zip(spec.inputs, inputs, strict=True):
            if name == "x":
                tensor.normal_().add_(MEAN)
    check(spec, source, inputs, far)
    return source


def check(spec: GraphSpec, source: Source, inputs: list[torch.Tensor], far: bool) -> None:
    """Run a kernel and compare it."""
    outputs = [spec.tensors[name].empty("cpu").fill_(7) for name in spec.outputs]
    host_kernels.run(source, [*inputs, *outputs])
    truth = reference.run(spec, inputs, torch.float64)
    for name, out, want in zip(spec.outputs, outputs, truth, strict=True):
        dtype = out.dtype if out.dtype.itemsize == 2 else torch.float32
        bound = numerics.BOUNDS[str(dtype).removeprefix("torch.")]
        error = numerics.relative_error(out, want)
        # float32 holds what is 1 in 1000 to 6e-5
        assert error <= (max(bound, 1e-4) if far else max(bound, 2e-6)), (
            name,
            error,
            source.launches,
        )


@pytest.fixture
def small_as_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What few threads would do alone is shared out too, so that small tensors test it, and what a
    pointwise op of a few slices would do."""
    monkeypatch.setattr(rows, "SMALL", 0)
    monkeypatch.setattr(short_reductions, "MOST", 1)
    monkeypatch.setattr(grid, "LEAST_STEPS", 1)
    with rules.changed(kernel_long_row=16):
        yield


@pytest.mark.usefixtures("small_as_large")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_random_regions(region: Region, seed: int) -> None:
    split_is_right(region, seed)


@pytest.mark.usefixtures("small_as_large")
@pytest.mark.parametrize("seed", range(4, 6))
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_random_regions_by_launches_that_put_together(region: Region, seed: int) -> None:
    with rules.changed(kernel_partials_again_bytes=0, kernel_loads_ahead=1):
        apart = split_is_right(region, seed)
    with rules.changed(kernel_loads_ahead=3):
        assert len(split_is_right(region, seed).launches) <= len(apart.launches)


@pytest.mark.usefixtures("small_as_large")
def test_outputs_of_one_number_for_each_result_need_no_launch() -> None:
    g = cg.Graph("batch_norm")
    x = g.input("x", (4, 24, 16, 8), torch.float32, layout="channels_last")
    vectors = [g.input(name, (24,), torch.float32) for name in ("w", "b", "mean", "var")]
    for number, each in enumerate(g.batch_norm_train(x, *vectors)):
        g.output(f"o{number}", each)
    spec = g.spec()
    inputs = random_inputs(spec, torch.device("cpu"))
    source = split.write(spec, Split(64, 64, 4))
    assert len(source.launches) == 2  # both of several blocks for each channel
    check(spec, source, inputs, far=False)
    with rules.changed(kernel_partials_again_bytes=0):
        assert len(split.write(spec, Split(64, 64, 4)).launches) == 3


@pytest.mark.usefixtures("small_as_large")
@pytest.mark.parametrize("seed", range(10, 13))
@pytest.mark.parametrize(
    "region", (group_norm, instance_norm, batch_norm_train), ids=lambda region: region.__name__
)
def test_means_far_from_zero(region: Region, seed: int) -> None:
    split_is_right(region, seed, far=True)


def group_norm_of(
    shape: tuple[int, ...], groups: int, layout: str, dtype: torch.dtype
) -> GraphSpec:
    """Group norm and silu of images."""
    g = cg.Graph("group_norm")
    x = g.input("x", shape, dtype, layout=layout)
    shift, factor = g.group_affine(x, groups)
    g.output("y", g.silu(g.mul(g.add(x, shift), factor)))
    return g.spec()


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_a_few_long_rows_are_shared_out_by_rule(layout: str) -> None:
    spec = group_norm_of((2, 320, 64, 64), 32, layout, torch.bfloat16)
    schedule = patterns.schedule_of(patterns.by_rule(spec, 132))
    assert isinstance(schedule, Split)
    launches = split.write(spec, schedule).launches
    assert len(launches) == (1 if layout == "contiguous" else 2)  # of clusters, or of blocks alone
    assert min(each.blocks for each in launches) > 132


def test_many_partial_results_are_put_together_by_a_launch() -> None:
    spec = group_norm_of((1, 128, 512, 512), 32, "channels_last", torch.bfloat16)
    with rules.changed(kernel_min_width_bytes=64):
        assert len(split.write(spec, split.split_for(132)).launches) == 2
    partial, together, applied = split.write(spec, split.split_for(132)).launches
    assert min(partial.blocks, applied.blocks) > 132 > together.blocks


def test_rows_that_no_registers_hold_are_shared_out() -> None:
    spec = group_norm_of((8, 320, 64, 64), 32, "channels_last", torch.float16)
    assert isinstance(patterns.schedule_of(patterns.by_rule(spec, 132)), Split)
    held = group_norm_of((8, 320, 32, 64), 32, "channels_last", torch.float16)
    assert isinstance(patterns.schedule_of(patterns.by_rule(held, 132)), write.Schedule)


@pytest.mark.usefixtures("small_as_large")
@pytest.mark.parametrize("backwards", (False, True))
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("shape", ((2, 6, 16, 8), (1, 40, 9, 7), (2, 4, 150, 1)))
def test_a_cluster_reads_once(shape: tuple[int, ...], layout: str, backwards: bool) -> None:
    spec = group_norm_of(shape, 2, layout, torch.float32)
    schedule = Split(32, 24, 4)
    source = split.write(spec, schedule)
    (only,) = source.launches
    assert "__cluster_dims__" in source.text and only.blocks > 2
    (given,) = random_inputs(spec, torch.device("cpu"))
    out, apart = torch.full_like(given, 7), torch.full_like(given, 7)
    host_kernels.run(source, [given, out], backwards=backwards)
    (want,) = reference.run(spec, [given], torch.float64)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    with rules.planning_for(80):
        several = split.write(spec, schedule)
    assert "__cluster_dims__" not in several.text and len(several.launches) == 2
    host_kernels.run(several, [given, apart])
    assert torch.equal(out, apart)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_every_variant_of_a_schedule_is_right(layout: str) -> None:
    spec = group_norm_of((1, 24, 96, 16), 2, layout, torch.float32)
    by_rule = split.split_for(8)
    inputs = [torch.randn(1, 24, 96, 16)]
    if layout == "channels_last":
        inputs = [inputs[0].contiguous(memory_format=torch.channels_last)]
    texts = set()
    with rules.changed(kernel_long_row=1):
        for schedule in (by_rule, *split.variants(by_rule)):
            source = split.write(spec, schedule)
            check(spec, source, inputs, far=False)
            texts.add((source.text, source.launches))
    assert len(texts) > 2


def test_rows_that_fill_the_gpu_stay_with_their_blocks() -> None:
    g = cg.Graph("rows")
    x, weight = g.input("x", (4096, 1024), torch.bfloat16), g.input("w", (1024,), torch.bfloat16)
    g.output("y", g.layer_norm(x, weight))
    g.output("z", g.reduction(x, (1,), "max"))
    choice = patterns.by_rule(g.spec(), 132)
    assert isinstance(patterns.schedule_of(choice), write.Schedule)


def test_one_loop_gathers_what_is_reduced_alike() -> None:
    g = cg.Graph("gradients")
    dy, x = (g.input(name, (4096, 512), torch.bfloat16) for name in ("dy", "x"))
    weight = g.input("w", (512,), torch.bfloat16)
    mean, inv = (g.input(name, (4096, 1), torch.float32) for name in ("mean", "inv_std"))
    for number, each in enumerate(g.layer_norm_backward(dy, x, weight, mean, inv)):
        g.output(f"o{number}", each)
    source = split.write(g.spec(), split.split_for(132))
    assert len(source.launches) == 3  # dx by rows; both sums of columns, and these put together


def test_what_is_summed_up_is_written_by_the_same_loop() -> None:
    g = cg.Graph("bias")
    dy, y = (g.input(name, (4096, 512), torch.bfloat16) for name in ("dy", "y"))
    dx = g.relu_backward(dy, y)
    g.output("dx", dx)
    g.output("sum", g.reduction(dx, (0,)))
    source = split.write(g.spec(), split.split_for(132))
    assert len(source.launches) == 2  # sums of chunks and dx; sums of these


@pytest.mark.usefixtures("small_as_large")
def test_nan_and_infinity_are_passed_on_as_torch_does() -> None:
    g = cg.Graph("reduced")
    x = g.input("x", (64, 12), torch.float32)
    for mode in ("sum", "max", "min"):
        g.output(mode, g.reduction(x, (0,), mode))
    spec = g.spec()
    given = torch.randn(64, 12)
    given[5, 0], given[7, 1], given[9, 2] = float("nan"), float("inf"), float("-inf")
    outputs = [spec.tensors[name].empty("cpu") for name in spec.outputs]
    host_kernels.run(split.write(spec, Split(64, 16, 4)), [given, *outputs])
    wanted = {"sum": given.sum(0), "max": given.amax(0), "min": given.amin(0)}
    for name, out in zip(spec.outputs, outputs, strict=True):
        torch.testing.assert_close(out, wanted[name], equal_nan=True)


@pytest.mark.usefixtures("small_as_large")
def test_what_is_constant_has_no_deviation() -> None:
    spec = group_norm_of((2, 6, 8, 8), 2, "channels_last", torch.float32)
    given = torch.full((2, 6, 8, 8), 1234.5).contiguous(memory_format=torch.channels_last)
    out = torch.full_like(given, 7)
    host_kernels.run(split.write(spec, Split(64, 64, 4)), [given, out])
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.usefixtures("small_as_large")
@pytest.mark.parametrize("blocks", (1, 64))
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_results_are_read_in_another_order(layout: str, blocks: int) -> None:
    g = cg.Graph("turned")
    y = g.reduction(g.input("x", (4, 4, 9, 8), torch.float32, layout=layout), (2, 3))
    turned = g.transpose(y, 0, 1)
    g.output("sum", g.add(y, turned))
    g.output("turned", g.relu(turned))
    spec = g.spec()
    given = random_inputs(spec, torch.device("cpu"))
    check(spec, split.write(spec, Split(64, blocks, 4)), given, far=False)


def test_regions_that_are_no_split_kernel_are_refused() -> None:
    g = cg.Graph("plain")
    g.output("y", g.relu(g.input("x", (4, 4), torch.float32)))
    with pytest.raises(Refused, match="nothing is reduced"):
        split.write(g.spec(), split.split_for(132))
    g = cg.Graph("empty")
    g.output("y", g.reduction(g.input("x", (0, 4), torch.float32), (0,)))
    with pytest.raises(Refused, match="empty"):
        split.write(g.spec(), split.split_for(132))


def test_a_choice_names_its_split() -> None:
    schedule = split.split_for(132)
    choice = patterns.choice_of(schedule)
    assert patterns.schedule_of(choice) == schedule
    for name in ("threads", "blocks", "columns"):
        wrong = [(knob, 0 if knob == name else value) for knob, value in choice.knobs]
        with pytest.raises(NotSupported, match="no schedule"):
            patterns.schedule_of(Choice(KERNEL, tuple(wrong)))


def test_launches_get_the_addresses_and_the_workspace_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def launch(function: str, blocks: int, *rest: int) -> tuple[int]:
        threads, shared, stream, where = rest[2], *rest[5:8]
        args, workspace = (ctypes.c_uint64 * 2).from_address(where)
        given = list((ctypes.c_uint64 * 3).from_address(args))
        scratch = ctypes.c_uint64.from_address(workspace).value
        seen.append((function, blocks, threads, shared, stream, given, scratch))
        return (0,)

    driver = SimpleNamespace(cuLaunchKernel=launch)
    monkeypatch.setattr(kernel, "_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    made = kernel.Kernel.__new__(kernel.Kernel)
    made.device_index = 0
    made._launches = [("first", 5, 64, 65536), ("second", 2, 32, 0)]
    made._call = made._native()
    made.execute(made.pointers([10, 20, 30]), 4096, None)
    assert seen == [
        ("first", 5, 64, 65536, 77, [10, 20, 30], 4096),
        ("second", 2, 32, 0, 77, [10, 20, 30], 4096),
    ]
    launched = seen[:]
    seen.clear()
    bound = made.bound(made.pointers([10, 20, 30]), 4096, 77)
    assert seen == []
    bound()
    bound()
    assert seen == launched * 2


def test_a_bound_launch_that_fails_says_so_and_launches_nothing_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def launch(function: str, *rest: int) -> tuple[str]:
        seen.append(function)
        return ("CUDA_ERROR_INVALID_VALUE",)

    monkeypatch.setattr(kernel, "_driver", lambda: SimpleNamespace(cuLaunchKernel=launch))
    made = kernel.Kernel.__new__(kernel.Kernel)
    made._launches = [("first", 5, 64, 65536), ("second", 2, 32, 0)]
    bound = made.bound(made.pointers([10]), 0, 77)
    with pytest.raises(RuntimeError, match=r"was not launched: 'CUDA_ERROR_INVALID_VALUE'"):
        bound()
    assert seen == ["first"]
