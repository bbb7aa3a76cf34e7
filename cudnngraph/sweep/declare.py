"""Shared by the graphs of the sweep: dtypes, layouts, and chains behind an anchor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..graph.builder import Graph
from ..graph.value import Value

Op = Callable[..., Value]
Shape = tuple[int, ...]

F16, BF16, F32, I8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
LAST, CONTIGUOUS = "channels_last", "contiguous"

# What stands behind an anchor's result x: v and u are repeated, c is a vector of the last dim or of
# the channels, z is as large as x.
CHAINS: Mapping[str, tuple[Op, str]] = {
    "x": (lambda g, x: x, ""),
    "relu(x)": (lambda g, x: g.relu(x), ""),
    "x + v": (lambda g, x, v: x + v, "v"),
    "v - x": (lambda g, x, v: v - x, "v"),
    "x v": (lambda g, x, v: x * v, "v"),
    "relu(x + v)": (lambda g, x, v: g.relu(x + v), "v"),
    "relu(x v + c)": (lambda g, x, v, c: g.relu(x * v + c), "vc"),
    "silu(x + c + v)": (lambda g, x, v, c: g.silu(x + c + v), "vc"),
    "x (v + 1) + u": (lambda g, x, v, u: x * (v + 1.0) + u, "vu"),
    "x + silu(v)": (lambda g, x, v: x + g.silu(v), "v"),
    "x + v + u": (lambda g, x, v, u: x + v + u, "vu"),
    "relu(x + v) + z": (lambda g, x, v, z: g.relu(x + v) + z, "vz"),
    "gelu(x) v": (lambda g, x, v: g.gelu(x) * v, "v"),
    "where(v > 0, x, x / 2)": (lambda g, x, v: g.where(g.gt(v, 0.0), x, x * 0.5), "v"),
    "maximum(x, v)": (lambda g, x, v: g.maximum(x, v), "v"),
    "x / (|v| + 1)": (lambda g, x, v: x / (g.abs(v) + 1.0), "v"),
}
# The same with operands that are not repeated otherwise than a bias is.
EPILOGUES: Mapping[str, tuple[Op, str]] = {
    "x + c": (lambda g, x, c: x + c, "c"),
    "relu(x + c)": (lambda g, x, c: g.relu(x + c), "c"),
    "leaky_relu(x + c)": (lambda g, x, c: g.leaky_relu(x + c, 0.2), "c"),
    "clamp(x + c, 0, 6)": (lambda g, x, c: g.clamp(x + c, 0.0, 6.0), "c"),
    "elu(x + c)": (lambda g, x, c: g.elu(x + c), "c"),
    "gelu(x + c)": (lambda g, x, c: g.gelu(x + c), "c"),
    "gelu_tanh(x + c)": (lambda g, x, c: g.gelu_tanh(x + c), "c"),
    "silu(x + c)": (lambda g, x, c: g.silu(x + c), "c"),
    "sigmoid(x + c)": (lambda g, x, c: g.sigmoid(x + c), "c"),
    "tanh(x + c)": (lambda g, x, c: g.tanh(x + c), "c"),
    "softplus(x + c)": (lambda g, x, c: g.softplus(x + c), "c"),
    "hardswish(x + c)": (lambda g, x, c: g.hardswish(x + c), "c"),
    "x z": (lambda g, x, z: x * z, "z"),
    "x + z": (lambda g, x, z: x + z, "z"),
    "relu(x + c + z)": (lambda g, x, c, z: g.relu(x + c + z), "cz"),
    "relu(x / 2 + 2 z + c)": (lambda g, x, c, z: g.relu(x * 0.5 + z * 2.0 + c), "cz"),
    "relu(x c + c)": (lambda g, x, c: g.relu(x * c + c), "c"),
}
_QUICK_CHAINS = ("x", "relu(x + v)", "relu(x v + c)")
_QUICK_EPILOGUES = ("relu(x + c)", "leaky_relu(x + c)", "relu(x / 2 + 2 z + c)")

# One letter a dim of the result: "w" whole, "1" repeated.
WAYS: Mapping[int, tuple[str, ...]] = {
    2: ("1w", "w1", "11", "ww"),
    3: ("11w", "w11", "1w1", "www"),
    4: ("1w11", "ww11", "w1ww", "1111", "wwww"),
    5: ("1w111", "ww111", "w1www", "wwwww"),
}

# In the order in which they are swept; a pattern's first QUICK_SIZES are the quick ones.
QUICK_SIZES = 3
IMAGES: tuple[tuple[int, int, Shape], ...] = (  # channels in, channels out, images and pixels
    (64, 64, (2, 16, 16)),
    (33, 17, (3, 7, 5)),
    (8, 24, (2, 1, 1)),
    (320, 64, (1, 8, 8)),
    (16, 32, (1, 57, 31)),
)


@dataclass(frozen=True)
class Sample:
    """One graph to sweep.

    ``pattern`` names what it has in common with other sizes; ``quick``: it is one of the small
    spread.
    """

    pattern: str
    size: str
    quick: bool
    build: Callable[[], Graph] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.pattern}, {self.size}"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sizes(*numbers: int) -> str:
    return "x".join(map(str, numbers))


@dataclass
class Declaring:
    """A graph being declared: inputs of one dtype in one layout, a chain behind a result."""

    dtype: torch.dtype
    layout: str
    graph: Graph = field(default_factory=lambda: Graph("check"))

    def given(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Value:
        """An input; images lie as the layout says."""
        layout = self.layout if len(shape) in (3, 4, 5) else CONTIGUOUS
        return self.graph.input(name, shape, dtype or self.dtype, layout=layout)

    def ended(self, x: Value, chain: tuple[Op, str], way: str = "", *, flat: bool = False) -> Graph:
        """The graph whose result is the chain behind ``x``."""
        op, more = chain
        vector = (x.shape[-1],) if flat else (1, x.shape[1], *(1,) * (len(x.shape) - 2))
        repeated = tuple(
            n if kind == "w" else 1
            for n, kind in zip(x.shape, way or "w" * len(x.shape), strict=True)
        )
        shapes = {"v": repeated, "u": repeated, "c": vector, "z": x.shape}
        y = op(self.graph, x, *(self.given(name, shapes[name]) for name in more))
        layout = self.layout if len(y.shape) in (3, 4, 5) else CONTIGUOUS
        self.graph.output("y", y, layout=layout)
        return self.graph


def chains(rank: int, ways: Sequence[str]) -> Iterator[tuple[str, tuple[Op, str], str, bool]]:
    """(name, chain, way to repeat, whether it is quick) of everything behind an anchor."""
    for name, chain in CHAINS.items():
        for way in ways if set(chain[1]) & set("vu") else ("",):
            quick = name in _QUICK_CHAINS and way in ("", *WAYS[rank][:3])
            yield f"{name} [{','.join(way)}]" if way else name, chain, way, quick
    for name, chain in EPILOGUES.items():
        yield name, chain, "", name in _QUICK_EPILOGUES


FEW_CHAINS = ("x", "relu(x)", "relu(x + v)", "relu(x v + c)", "x + silu(v)")
FEW_EPILOGUES = ("relu(x + c)", "silu(x + c)", "relu(x + c + z)", "relu(x / 2 + 2 z + c)")
QUICK_PLACES = ((F16, LAST), (F32, CONTIGUOUS))
