"""Random graphs of norms and rotations behind products, in which ops move from kernel to kernel.

``RANDOM_GRAPHS=600 RANDOM_FIRST=1000`` tries so many, from that seed on. Those in which something
moves are run by the kernels that are generated, with the moves and without, and are to be as near
to float64 in both.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.runtime.process import PROCESS
from cudnngraph.select import kernels
from tests import generated, numerics

COUNT = int(os.environ.get("RANDOM_GRAPHS", "40"))
FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
HEADS, PAIRS = (1, 8, 2, 128), (1, 8, 2, 64, 2)
KINDS = ("norm",) * 3 + ("places",) * 4 + ("wide",) * 3 + ("turn",) * 4 + ("add",) * 5
KINDS += ("row", "neg", "silu", "narrow", "mul")


def made(seed: int) -> cg.Graph:
    """A graph whose values are all results or read by others."""
    roll = random.Random(seed)
    dtype = roll.choice([torch.float16, torch.bfloat16])
    g = cg.Graph("moves")
    x = g.input("x", (1, 8, 256), dtype)
    for number in range(8):  # as many as it takes to go anchor by anchor
        x = g.matmul(x, g.input(f"k{number}", (256, 256), dtype))
    values, read = [g.reshape(x, HEADS)], set()

    def given(name: str, shape: tuple[int, ...]) -> Any:
        return g.input(name, shape, roll.choice([dtype, torch.float32]))

    for number in range(roll.randint(6, 16)):
        one, two, kind = roll.choice(values[-3:]), roll.choice(values[-4:]), roll.choice(KINDS)
        read |= {id(one), id(two)} if kind in ("add", "mul") else {id(one)}
        if kind == "norm":
            weight = g.input(f"w{number}", (128,), dtype)
            values.append(g.rms_norm(g.cast(one, dtype), weight))
        elif kind == "places":
            values.append(g.mul(one, given(f"c{number}", (1, 8, 1, 128))))
        elif kind == "row":
            values.append(g.mul(one, given(f"r{number}", (128,))))
        elif kind in ("wide", "narrow"):
            values.append(g.cast(one, torch.float32 if kind == "wide" else dtype))
        elif kind == "turn":
            pairs = g.reshape(one, PAIRS)
            turned = g.concat([g.neg(g.slice(pairs, 4, 1)), g.slice(pairs, 4, 0, 1)], 4)
            values.append(g.reshape(turned, HEADS))
        elif kind in ("add", "mul"):
            values.append(getattr(g, kind)(one, two))
        else:
            values.append(getattr(g, kind)(one))
    for number, value in enumerate(each for each in values if id(each) not in read):
        g.output(f"y{number}", g.cast(value, dtype))
    return g


def results(g: cg.Graph, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the steps compute of a graph that is compiled anew."""
    PROCESS.programs.clear()
    found = g.compile("cpu")(**inputs)
    return list(found) if isinstance(found, tuple) else [found]


class Moved:
    """What moves from now on; nothing while ``allowed`` is false."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.allowed = 0, True
        real = kernels.moves

        def moves(*args: Any) -> list[kernels.Move]:
            new = list(real(*args)) if self.allowed else []
            self.count += len(new)
            return new

        monkeypatch.setattr(kernels, "moves", moves)


def test_random_graphs_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generated.install(monkeypatch)
    moved = Moved(monkeypatch)
    for seed in range(FIRST, FIRST + COUNT):
        before = moved.count
        g = made(seed)
        spec = g.spec()
        if generated.selection(spec) and moved.count == before:
            continue
        torch.manual_seed(seed)
        forms = {name: spec.tensors[name] for name in spec.inputs}
        scales = {name: 1 / 16 if name[0] == "k" else 1.0 for name in forms}
        given = {n: (scales[n] * torch.randn(f.shape)).to(f.dtype) for n, f in forms.items()}
        exact = reference.run(spec, list(given.values()), torch.float64)
        mine = results(g, given)
        moved.allowed = False
        plain = results(g, given)
        moved.allowed = True
        for one, theirs, wanted in zip(mine, plain, exact, strict=True):
            error, own = (numerics.relative_error(each, wanted) for each in (one, theirs))
            assert error <= numerics.TORCH_FACTOR * own + numerics.bound(one.dtype), f"seed {seed}"
    assert moved.count or FIRST, "something moves in the first graphs"
