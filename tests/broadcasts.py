"""Graphs in which an operand is repeated along some dims of what an anchor makes.

Every way to broadcast (each dim of the result either whole or 1), anchors, chains of ops, dtypes,
channels, sizes and layouts; a case is their names, so that it can be sent to another process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.sweep.declare import CHAINS

Value = cg.Value
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

# Name: rank of the result.
ANCHORS: Mapping[str, int] = {
    "conv 1x1": 4,
    "conv 3x3": 4,
    "conv 3x3 stride 2": 4,
    "conv 2 groups": 4,
    "depthwise": 4,
    "conv 1d": 3,
    "conv 3d": 5,
    "conv_transpose": 4,
    "conv_wgrad": 4,
    "matmul": 2,
    "matmul, batch": 3,
    "layer_norm": 2,
    "rms_norm": 3,
    "batch_norm_train": 4,
    "nothing": 4,
    "in front of conv 1x1": 4,
    "in front of matmul": 2,
}
CHANNELS = (8, 64, 320)
SIZES = ((2, 16, 16), (3, 7, 5), (1, 8, 8), (2, 1, 1), (5, 12, 4))
LAYOUTS = ("channels_last", "contiguous")


@dataclass(frozen=True)
class Case:
    """One graph. ``whole`` has a letter a dim of the result: "w" whole, "1" repeated."""

    anchor: str
    whole: str
    chain: str
    dtype: str
    channels: int
    size: tuple[int, int, int]
    layout: str = "channels_last"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.size))
        return (
            f"{self.anchor}, [{','.join(self.whole)}], {self.chain}, {self.dtype}, "
            f"{self.channels} channels, {shape}, {self.layout}"
        )

    def graph(self) -> cg.Graph:
        """Declared. Raises :class:`cudnngraph.GraphError` where the chain is no graph."""
        return _declared(self)


def case(described: Mapping[str, Any]) -> Case:
    """A case from what :func:`dataclasses.asdict` made of it, and JSON of that."""
    return Case(**{**described, "size": tuple(described["size"])})


def all_cases() -> Iterator[Case]:
    """Every case there is, some tens of thousands."""
    for anchor, rank in ANCHORS.items():
        ways = ["".join(way) for way in itertools.product("w1", repeat=rank)]
        for each in itertools.product(ways, CHAINS, DTYPES, CHANNELS, SIZES, LAYOUTS):
            if each[-1] != LAYOUTS[0] and rank not in (4, 5):
                continue
            if anchor == "nothing" and each[1] == "x":
                continue
            yield Case(anchor, *each)


def drawn(count: int, seed: int = 0) -> list[Case]:
    """``count`` cases, each way to broadcast behind each anchor about equally often."""
    rng = random.Random(seed)
    groups: dict[tuple[str, str], list[Case]] = {}
    for each in all_cases():
        groups.setdefault((each.anchor, each.whole), []).append(each)
    rounds = -(-count // len(groups))
    picked = [rng.sample(group, min(rounds, len(group))) for group in groups.values()]
    cases = [each for turn in itertools.zip_longest(*picked) for each in turn if each is not None]
    return cases[:count]


def described(each: Case) -> dict[str, Any]:
    """For JSON."""
    return asdict(each)


def _declared(case: Case) -> cg.Graph:
    g = cg.Graph("broadcast")
    dtype, channels = DTYPES[case.dtype], case.channels
    images, height, width = case.size
    layout: Any = case.layout if case.layout == "channels_last" else None

    def given(name: str, shape: tuple[int, ...], kind: torch.dtype = dtype) -> Value:
        last = {"layout": layout} if layout and len(shape) >= 3 and not flat else {}
        return g.input(name, shape, kind, **last)

    anchor = case.anchor.removeprefix("in front of ")
    front = anchor != case.anchor
    kind = anchor.partition(",")[0].partition(" ")[0]
    flat = kind in ("matmul", "layer_norm", "rms_norm")
    space = (images, channels, height, width)
    rows = images * height * width

    def applied(x: Value) -> Value:
        op, more = CHAINS[case.chain]
        repeated = tuple(n if way == "w" else 1 for n, way in zip(x.shape, case.whole, strict=True))
        vector = (x.shape[-1],) if flat else (1, x.shape[1], *(1,) * (len(x.shape) - 2))
        shapes = {"v": repeated, "u": repeated, "c": vector, "z": x.shape}
        return op(g, x, *(given(name, shapes[name]) for name in more))

    if kind == "matmul":
        shape = (rows, channels) if "batch" not in anchor else (images, height * width, channels)
        x = given("x", shape)
    elif kind == "layer_norm":
        x = given("x", (rows, channels))
    elif kind == "rms_norm":
        x = given("x", (images, height * width, channels))
    elif anchor == "conv 1d":
        x = given("x", (images, channels, height * width))
    elif anchor == "conv 3d":
        x = given("x", (images, channels, 3, height, width))
    else:
        x = given("x", space)
    if front:
        x = applied(x)
    if kind == "matmul":
        y = g.matmul(x, given("w", (*x.shape[:-2], channels, channels)))
    elif kind == "layer_norm":
        y = g.layer_norm(x, given("w", (channels,)), given("b", (channels,)))
    elif kind == "rms_norm":
        y = g.rms_norm(x, given("w", (channels,)))
    elif kind == "conv_transpose":
        y = g.conv_transpose(x, given("w", (channels, channels, 2, 2)), stride=2)
    elif kind == "conv_wgrad":
        y = g.conv_wgrad(given("dy", space), x, kernel=3, padding=1)
    elif kind == "batch_norm_train":
        weight, bias = (given(name, (channels,), torch.float32) for name in ("w", "b"))
        y = g.batch_norm_train(x, weight, bias)[0]
    elif kind in ("conv", "depthwise"):
        groups = channels if kind == "depthwise" else 2 if "groups" in anchor else 1
        size = 1 if "1x1" in anchor else 3
        kernel = (size,) * (len(x.shape) - 2)
        weight = given("w", (channels, channels // groups, *kernel))
        stride = 2 if "stride" in anchor else 1
        y = g.conv(x, weight, padding=size // 2, groups=groups, stride=stride)
    else:
        y = x
    g.output("y", y if front else applied(y))
    return g
