"""Random graphs of convolutions, slices of channels and what joins them, run as a GPU would.

``RANDOM_SLICES`` asks for more graphs than the usual, ``RANDOM_FIRST`` for others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.inputs import random_inputs
from tests import generated, numerics

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_SLICES", "40"))
AT_ONCE = 10
F16 = torch.float16


class Images:
    """A graph under way over 16-bit images of one batch, of any channels."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.graph = rng, cg.Graph("slices")
        self.side = rng.choice([3, 4, 6])
        shape = (rng.choice([1, 2]), rng.choice([16, 24, 32, 40, 48]), self.side, self.side)
        layout = rng.choice(["channels_last"] * 4 + [None])
        self.made = [self.graph.input("x", shape, F16, layout=layout)]
        self.read: set[int] = set()  # of what was made
        self.inputs = 0

    def another(self, *others: cg.Value) -> cg.Value:
        """One of some images, which is read besides."""
        found = self.rng.choice(others)
        self.read.add(id(found))
        return found

    def go_on(self, step: Callable[[Images, cg.Value], None]) -> None:
        """A step on one of the latest images, which may make nothing of it."""
        x, before = self.rng.choice(self.made[-4:]), (len(self.made), self.inputs)
        step(self, x)
        if before != (len(self.made), self.inputs):
            self.read.add(id(x))

    def given(self, *shape: int) -> cg.Value:
        """Another input: a weight, or a number for each channel."""
        self.inputs += 1
        last = "channels_last" if len(shape) == 4 else None
        return self.graph.input(f"w{self.inputs}", shape, F16, layout=last)

    def slice(self, x: cg.Value) -> None:
        channels = x.shape[1]
        start = self.rng.choice([0, 3, 4, 8, channels // 2])
        stop = self.rng.choice([channels, channels - 4, channels - 8, start + 8])
        if start < stop <= channels:
            self.made.append(self.graph.slice(x, 1, start, stop))

    def conv(self, x: cg.Value) -> None:
        channels, g = x.shape[1], self.graph
        groups = self.rng.choice([1, 1, 2, 4, channels])
        groups = groups if channels % groups == 0 else 1
        results = channels if groups == channels else self.rng.choice([8, 16, 24])
        y = g.conv(x, self.given(results, channels // groups, 3, 3), padding=1, groups=groups)
        if self.rng.random() < 0.5:
            y = g.relu(g.bias(y, self.given(results)))
        self.made.append(g.mul(y, 0.2))

    def parts(self, x: cg.Value) -> None:
        """Convolutions of groups of channels, each by itself, joined or not."""
        many = self.rng.choice([2, 4])
        width, rest = divmod(x.shape[1], many)
        if rest:
            return
        made = [
            self.graph.conv(
                self.graph.slice(x, 1, n * width, n * width + width), self.given(8, width, 1, 1)
            )
            for n in range(many)
        ]
        self.made += [self.graph.concat(made, 1)] if self.rng.random() < 0.6 else made

    def gradient(self, x: cg.Value) -> None:
        """That of the weight of a convolution between two parts of an image."""
        half, g = x.shape[1] // 2, self.graph
        if half:
            y, z = g.slice(x, 1, 0, half), g.slice(x, 1, x.shape[1] - half, x.shape[1])
            self.inputs += 1
            g.output(f"dw{self.inputs}", g.conv_wgrad(y, z, kernel=3, padding=1))

    def join(self, x: cg.Value) -> None:
        self.made.append(self.graph.concat([x, self.another(*self.made)], 1))

    def add(self, x: cg.Value) -> None:
        alike = [each for each in self.made if each.shape == x.shape]
        self.made.append(self.graph.add(x, self.another(*alike)))

    def pointwise(self, x: cg.Value) -> None:
        self.made.append(self.rng.choice([self.graph.relu, self.graph.gelu])(x))

    def pool(self, x: cg.Value) -> None:
        self.made.append(self.graph.max_pool(x, kernel_size=3, stride=1, padding=1))


STEPS: tuple[Callable[[Images, cg.Value], None], ...] = (
    *(Images.slice, Images.slice, Images.conv, Images.conv, Images.parts, Images.parts),
    *(Images.gradient, Images.join, Images.add, Images.pointwise, Images.pool),
)


def random_slices(seed: int) -> GraphSpec:
    """A random graph."""
    rng = random.Random(seed)
    images = Images(rng)
    for _ in range(rng.randint(3, 9)):
        images.go_on(rng.choice(STEPS))
    images.go_on(Images.pointwise)
    for number, value in enumerate(images.made):
        if id(value) not in images.read:
            images.graph.output(f"y{number}", value)
    return images.graph.spec()


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, AT_ONCE))
def test_random_slices_are_right_as_a_gpu_would_run_them(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated.install(monkeypatch)
    for seed in range(first, first + AT_ONCE):
        torch.manual_seed(seed)
        spec = random_slices(seed)
        inputs = random_inputs(spec, torch.device("cpu"))
        found = compile_spec(spec, "cpu", policy=cg.Policy(kernels=True))(*inputs)
        made = found if isinstance(found, tuple) else (found,)
        wide, plain = reference.run(spec, inputs, torch.float64), reference.run(spec, inputs)
        for mine, exact, theirs in zip(made, wide, plain, strict=True):
            off = (mine.double() - exact).norm()
            # What crosses from step to step is rounded to 16 bits, as torch rounds every op.
            least = 2 * numerics.bound(F16) * exact.norm()
            assert off <= 2 * numerics.TORCH_FACTOR * (theirs.double() - exact).norm() + least, seed


def test_the_random_slices_are_worth_running(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = generated.install(monkeypatch)
    with generated.by_reference():
        for seed in range(40):
            compile_spec(random_slices(seed), "cpu", policy=cg.Policy(kernels=True))
    copies = [each for each in kernels if {node.op for node in each.spec.nodes} == {"identity"}]
    assert len(copies) > 5 and max(len(each.spec.outputs) for each in copies) > 1
