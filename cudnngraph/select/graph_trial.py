"""A whole graph on trial: its steps on random data, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..executor import streams, torch_steps
from ..ir.spec import GraphSpec
from ..partition.memory import Layout, StepMemory
from ..policy import Policy
from .inputs import random_inputs
from .trial import Runnable, launcher


@dataclass(frozen=True)
class _Memory:
    """The memory of a chain of steps: where all tensors lie in a block, and scratch memory.

    Steps may be running ``until`` later ones.
    """

    steps: tuple[StepMemory, ...]
    until: Mapping[int, int]
    layout: Layout
    block: torch.Tensor
    values: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        chain: Sequence[tuple[GraphSpec, Runnable | None]],
        earlier: _Memory | None,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        *,
        beside: bool,
    ) -> _Memory:
        """The memory of ``earlier`` if a chain fits there, else one of its own; ``beside``: of a
        chain in which some steps run beside others."""
        steps = tuple(
            StepMemory(spec, plan is not None, 0 if plan is None else plan.workspace_bytes)
            for spec, plan in chain
        )
        if earlier is not None and _alike(steps, earlier.steps):
            if all(a.workspace_bytes <= b.workspace_bytes for a, b in _pairs(steps, earlier.steps)):
                return earlier
            steps = tuple(
                replace(a, workspace_bytes=max(a.workspace_bytes, b.workspace_bytes))
                for a, b in _pairs(steps, earlier.steps)
            )
        bound = {**inputs, **outputs}
        device = next(iter(bound.values())).device
        until = streams.overlappable(steps) if beside else {}
        layout = Layout(steps, bound, until)
        block = torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)
        return cls(steps, until, layout, block, layout.tensors(block, bound))


def _alike(steps: Sequence[StepMemory], others: Sequence[StepMemory]) -> bool:
    """Whether two chains are the same steps, whatever plans run them."""
    return len(steps) == len(others) and all(
        a.spec is b.spec and a.planned == b.planned for a, b in _pairs(steps, others)
    )


def _pairs(
    steps: Sequence[StepMemory], others: Sequence[StepMemory]
) -> Iterator[tuple[StepMemory, StepMemory]]:
    return zip(steps, others, strict=True)


class GraphTrial:
    """The steps of a whole graph on random data, each writing what the later ones read."""

    def __init__(self, spec: GraphSpec, policy: Policy, device: torch.device) -> None:
        self._policy = policy
        self._device = device
        values = random_inputs(spec, device)
        self._inputs = dict(zip(spec.inputs, values, strict=True))
        self._outputs = {name: spec.tensors[name].empty(device) for name in spec.outputs}
        self._memory: _Memory | None = None
        self._sides = streams.streams(device) if device.type == "cuda" else []

    def launch(self, steps: Sequence[tuple[GraphSpec, Runnable | None]]) -> Callable[[], None]:
        """A call that runs ``steps`` once on the current stream, in order; in a capture some beside
        others, as programs do.

        Chains of the same steps by other plans share their memory: one of them runs at a time.
        """
        bound = self._inputs, self._outputs
        self._memory = memory = _Memory.of(steps, self._memory, *bound, beside=bool(self._sides))
        layout, block, values = memory.layout, memory.block, memory.values
        launches: dict[int, Callable[[], None]] = {}
        for number, (spec, plan) in enumerate(steps):
            if number in layout.free:
                continue
            inputs = [values[name] for name in spec.inputs]
            outputs = [values[name] for name in spec.outputs]
            need = 0 if plan is None else plan.workspace_bytes
            workspace = block[layout.scratch[number] : layout.scratch[number] + need]
            launches[number] = self._step(spec, plan, inputs, outputs, workspace)
        beside = {number: partial(_without_handle, each) for number, each in launches.items()}

        def run() -> None:
            if self._sides and torch.cuda.is_current_stream_capturing():
                streams.run(beside, memory.until, self._sides, self._device.index)
                return
            for launch in launches.values():
                launch()

        return run

    def _step(
        self,
        spec: GraphSpec,
        plan: Runnable | None,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        workspace: torch.Tensor,
    ) -> Callable[[], None]:
        if plan is None:
            allowed = bool(self._policy.allow_tf32)
            return torch_steps.launcher(spec, inputs, outputs, allow_tf32=allowed)
        return launcher(plan, (*inputs, *outputs), workspace, self._device)


def _without_handle(launch: Callable[[], None], handle: object) -> None:
    """Launch what gets the handle of its stream by itself."""
    launch()
