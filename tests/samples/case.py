"""The type of a sample, the fills of its tensors, and helpers that every family uses."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I8, E4, E5 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
SHORT = {F16: "fp16", BF16: "bf16", F32: "fp32", F64: "fp64", I8: "int8", E4: "e4m3", E5: "e5m2"}

Shape = tuple[int, ...]
Layout = str | Shape | None  # "channels_last", strides in elements, or None for contiguous
Tensors = dict[str, torch.Tensor]
Fill = Callable[[torch.Generator, Shape], torch.Tensor]  # float64 numbers on the CPU


@dataclass(frozen=True)
class Case:
    """One sample graph.

    ``dtype`` is that of the data. ``fills`` says how an input is filled (default: standard normal),
    ``packed`` names inputs that are slices of one buffer, in the order of their offsets. ``terms``
    is the longest sum behind one element of an output. ``note`` says which trap the case is for.
    ``drawn``: what is dropped is drawn by a generator that the reference alone has.
    """

    id: str
    family: str
    dtype: torch.dtype
    build: Callable[[], cg.Graph] = field(repr=False)
    eager: Callable[[Tensors], Tensors] = field(repr=False)
    fills: Mapping[str, Fill] = field(default_factory=dict, repr=False)
    packed: tuple[str, ...] = ()
    terms: int = 1
    note: str = ""
    drawn: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the case is meant for a GPU too: float64 is for the CPU, and so is a draw."""
        return self.dtype != F64 and not self.drawn

    def __str__(self) -> str:
        return self.id


def normal(std: float = 1.0, mean: float = 0.0) -> Fill:
    """Normally distributed."""
    return lambda gen, shape: torch.randn(shape, generator=gen, dtype=torch.float64) * std + mean


def uniform(low: float, high: float) -> Fill:
    """Uniform in [low, high)."""
    return lambda gen, shape: (
        low + (high - low) * torch.rand(shape, generator=gen, dtype=torch.float64)
    )


def exactly(values: Sequence[float]) -> Fill:
    """These numbers."""
    return lambda gen, shape: torch.tensor(values, dtype=torch.float64).reshape(shape)


def small_whole(low: int, high: int) -> Fill:
    """Whole numbers in [low, high), so that equal ones are found."""
    return lambda gen, shape: torch.randint(low, high, shape, generator=gen).double()


def make_inputs(
    case: Case, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, torch.Tensor]:
    """Tensors for every input of ``case``, strides as declared; gaps between elements hold NaN."""
    spec = case.build().spec()
    gen = torch.Generator().manual_seed(zlib.crc32(case.id.encode()) + seed)
    made: dict[str, torch.Tensor] = {}
    for name in spec.inputs:
        tensor = spec.tensors[name]
        core = tuple(
            1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride, strict=True)
        )
        values = case.fills.get(name, normal())(gen, core)
        blank = float("nan") if tensor.dtype.is_floating_point else 0
        memory = torch.full((tensor.extent,), blank, dtype=tensor.dtype)
        memory.as_strided(core, tensor.stride).copy_(values)
        made[name] = memory.to(device).as_strided(tensor.shape, tensor.stride)
    if case.packed:
        _pack(made, case.packed)
    return made


def _pack(made: dict[str, torch.Tensor], names: Sequence[str]) -> None:
    """Move tensors into one buffer, each behind the one before: (B, S, slices, H, D) in memory."""
    first = made[names[0]]
    heads, depth = first.shape[1], first.shape[3]
    extent = 1 + sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True))
    buffer = torch.full(
        (extent + (len(names) - 1) * heads * depth,),
        float("nan"),
        dtype=first.dtype,
        device=first.device,
    )
    for place, name in enumerate(names):
        tensor = made[name]
        slot = buffer.as_strided(tensor.shape, tensor.stride(), place * heads * depth)
        made[name] = slot.copy_(tensor)


def in_float64(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same numbers in float64 on the CPU; bools and integers stay what they are."""
    return {
        name: value.detach().to("cpu", F64 if value.dtype.is_floating_point else value.dtype)
        for name, value in inputs.items()
    }


def torch_eager(case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return torch's results for ``case`` by output name, in the dtype of the inputs."""
    with torch.no_grad():
        return case.eager(dict(inputs))


ACTIVATIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
    "clamp": torch.clamp,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "identity": lambda x: x,
}


def activate(y: torch.Tensor, kind: str | None, attrs: Mapping[str, Any]) -> torch.Tensor:
    """torch's own activation by our name of it."""
    return y if kind is None else ACTIVATIONS[kind](y, **attrs)


def at_layout(layout: Layout) -> dict[str, Any]:
    if layout is None:
        return {}
    return {"layout": layout} if isinstance(layout, str) else {"stride": layout}


Inputs = Mapping[str, tuple[Shape, torch.dtype, Layout]]
Declare = Callable[[cg.Graph, dict[str, cg.Value]], dict[str, cg.Value]]
Eager = Callable[[Tensors], Tensors]


def table_case(
    family: str,
    name: str,
    inputs: Inputs,
    declare: Declare,
    eager: Eager,
    fills: Mapping[str, Fill] | None = None,
    note: str = "",
    terms: int = 1,
    result: torch.dtype | None = None,
    **placed: Any,
) -> Case:
    """``result`` is the dtype of every output, ``placed`` are more keywords of ``Graph.output``."""
    dtype = next(iter(inputs.values()))[1]

    def build() -> cg.Graph:
        g = cg.Graph(family)
        values = {
            key: g.input(key, shape, kind, **at_layout(layout))
            for key, (shape, kind, layout) in inputs.items()
        }
        for key, value in declare(g, values).items():
            g.output(key, value, dtype=result, **placed)
        return g

    return Case(
        f"{family}-{name}-{SHORT[dtype]}",
        family,
        dtype,
        build,
        eager,
        fills or {},
        terms=terms,
        note=note,
    )


def grads_of(
    function: Callable[..., torch.Tensor], of: Sequence[torch.Tensor], upstream: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """torch autograd's gradients of ``function(*of)``."""
    with torch.enable_grad():
        leaves = [value.detach().clone().requires_grad_() for value in of]
        return torch.autograd.grad(function(*leaves), leaves, upstream)


def gradient_case(
    name: str,
    dtype: torch.dtype,
    build: Callable[[], cg.Graph],
    eager: Callable[[Tensors], Tensors],
    fills: Mapping[str, Fill] | None = None,
    note: str = "",
    terms: int = 1,
) -> Case:
    return Case(
        f"gradients-{name}-{SHORT[dtype]}",
        "gradients",
        dtype,
        build,
        eager,
        fills or {},
        terms=terms,
        note=note,
    )
