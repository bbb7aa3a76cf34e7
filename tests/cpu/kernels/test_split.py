"""Kernels of several launches on the CPU, of random shapes and layouts, held against float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec, channels_last_strides, contiguous_strides
from cudnngraph.kernels import grid, split, write
from cudnngraph.kernels.split import Split
from cudnngraph.kernels.write import Source
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


@pytest.fixture(autouse=True)
def small_regions_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """What few threads would do alone is shared out too, so that small tensors test it."""
    monkeypatch.setattr(write, "SMALL", 0)
    monkeypatch.setattr(split, "LONG_ROW", 16)
    monkeypatch.setattr(grid, "LEAST_STEPS", 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_random_regions(region: Region, seed: int) -> None:
    split_is_right(region, seed)
