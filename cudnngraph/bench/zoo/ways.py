"""The ways to run a model of the zoo: eager, torch.compile's, and ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...models.fused import Fused, fuse
from ...policy import Policy, Tune
from ..measure import Call, captured

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Way:
    """A way to run a model: torch.compile in a ``mode``, ours with ``tune``, or eager.

    ``measures`` says whether it measures while it compiles, so that nothing else may run then.
    """

    name: str
    title: str
    mode: str = ""
    tune: Tune | None = None
    measures: bool = False

    @property
    def compiles(self) -> bool:
        """Whether there is a first result to wait for."""
        return bool(self.mode) or self.ours

    @property
    def family(self) -> str:
        """What a process has to load before it can run the way; "" for eager."""
        return "cudnngraph" if self.ours else "torch.compile" if self.mode else ""

    @property
    def ours(self) -> bool:
        """Whether it is cudnngraph's."""
        return self.tune is not None


WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        Way("eager", "eager"),
        Way("graph", "eager in a CUDA graph"),
        Way("reduce-overhead", "torch.compile reduce-overhead", mode="reduce-overhead"),
        Way("max-autotune", "torch.compile max-autotune", mode="max-autotune", measures=True),
        Way("heuristic", "cudnngraph, heuristic", tune="heuristic"),
        Way("autotuned", "cudnngraph, autotuned", tune="autotune", measures=True),
    )
}
ON_CPU = ("eager", "heuristic")  # by the reference executor, whose times say nothing


def call_of(way: Way, model: nn.Module, inputs: Tensors) -> tuple[Call, Fused | None]:
    """Return a model as a call, and what ``fuse`` made if the way is ours. The first result of
    torch.compile is the one that it compiles for."""
    if way.ours:
        gpu = inputs[0].is_cuda
        policy = Policy(tune=way.tune if gpu else None)
        fused = fuse(model, tuple(inputs), policy=policy, capture=gpu, reuse_results=True)
        return _inferring(fused, inputs), fused
    if way.mode:
        return _compiled(way.mode, model, inputs), None
    eager = _inferring(model, inputs)
    return (captured(eager) if way.name == "graph" else eager), None


def _inferring(model: Callable[..., Any], inputs: Tensors) -> Call:
    @torch.no_grad()
    def call() -> object:
        return model(*inputs)

    return call


def _compiled(mode: str, model: nn.Module, inputs: Tensors) -> Call:
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.freezing = True
    compiled = torch.compile(model, mode=mode, dynamic=False)
    begin: Any = torch.compiler.cudagraph_mark_step_begin

    @torch.no_grad()
    def call() -> object:
        begin()
        return compiled(*inputs)

    return call
