"""A GPU's steps on the CPU, cut as if cuDNN had no plans: kernels wherever one is generated.

Kernels run by :mod:`tests.host_kernels`, in the memory that the layout of the steps gives them; all
else is run by the reference. So the cuts, the joined regions, the text of the
kernels and what steps hand on are tried without a GPU, for any graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import Choice, Plan
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.source import Source
from cudnngraph.rewrite.passes import legalize
from cudnngraph.runtime import compile as compiling
from cudnngraph.runtime.process import PROCESS
from cudnngraph.select.decision import Selection, StepPlan
from cudnngraph.select.heuristic import Builds, by_torch, choose
from cudnngraph.select.kernels import Kernels
from cudnngraph.select.trial import StepTrial
from tests import host_kernels, simulated, trials

PROCESSORS = 4  # of the GPU that stands behind it: few, so that small tensors have wide lanes


class Generated:
    """A plan that is no more than its choice."""

    workspace_bytes = 0
    verified = None


def no_plan(part: GraphSpec) -> NoReturn:
    """cuDNN's answer to every part."""
    raise NotSupported(f"graph '{part.name}'", ["cuDNN is not asked"])


def selection(spec: GraphSpec, processors: int = PROCESSORS) -> Selection:
    """What a GPU would run a graph as, if cuDNN had no plans. Compiles nothing."""
    policy = cg.Policy(allow_tf32=False, tune="heuristic", verify="off")

    def checked(parts: Sequence[tuple[GraphSpec, Choice]]) -> list[Plan | str]:
        return [cast(Plan, Generated()) for _ in parts]

    chosen = by_torch(spec) or choose(
        legalize(spec, policy), policy, Builds(no_plan, checked=checked), Kernels(processors)
    )
    return Selection(chosen.steps, (None,) * len(chosen.steps))


class Program(simulated.Program):
    """Steps of which kernels are run on the CPU, and others by the reference."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.uses_cudnn = any(step.kind == "kernel" for step in self.steps)  # so data are aligned

    def _simulated(self, step: StepPlan) -> Any:
        if step.kind == "kernel":
            assert step.choice is not None
            source = host_kernels.expect(patterns.source(step.spec, step.choice))
            return partial(_launch, step.spec, source)
        return partial(reference.run_into, step.spec)


@contextmanager
def by_reference() -> Iterator[None]:
    """The reference runs what kernels would, which are compiled later, all at once."""
    global _standing_in
    _standing_in = True
    yield
    _standing_in = False


_standing_in = False


def _launch(
    spec: GraphSpec,
    source: Source,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> None:
    if _standing_in:
        reference.run_into(spec, inputs, outputs)
    else:
        host_kernels.run(source, [*inputs, *outputs])


class OnTrial:
    """A kernel as the check of a GPU's steps runs it, on the CPU."""

    workspace_bytes = 0

    def __init__(self, step: StepPlan) -> None:
        assert step.choice is not None
        self._spec = step.spec
        self._source = host_kernels.expect(patterns.source(step.spec, step.choice))

    def pointers(self, tensors: Sequence[int]) -> list[int]:
        return list(tensors)

    def execute(self, pointers: Any, workspace: int, handle: object) -> None:
        names = (*self._spec.inputs, *self._spec.outputs)
        tensors = [
            trials.at(pointer, self._spec.tensors[name])
            for pointer, name in zip(pointers, names, strict=True)
        ]
        host_kernels.run(self._source, tensors)


def refused(kernels: Sequence[StepPlan], policy: cg.Policy) -> list[str]:
    """What is said of the kernels that a GPU's check would take to be wrong."""
    tried = [(step, OnTrial(step)) for step in kernels]  # all are compiled before the first runs
    found = [
        (step, StepTrial(step.spec, policy, trials.CPU).why_wrong(each)) for step, each in tried
    ]
    return [f"{'+'.join(n.op for n in step.spec.nodes)}: {why}" for step, why in found if why]


def install(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """From now on the CPU runs graphs so. Return the kernels, which are added as they are made."""
    made: list[StepPlan] = []

    def chosen(spec: GraphSpec, why: str) -> Selection:
        found = selection(spec)
        made.extend(step for step in found.steps if step.kind == "kernel")
        return found

    simulated.install(monkeypatch)
    monkeypatch.setattr(compiling, "reference_only", chosen)
    monkeypatch.setattr(compiling, "Program", Program)
    PROCESS.programs.clear()
    return made


def rotated(dtype: torch.dtype = torch.bfloat16, *, wide: bool = True) -> cg.Graph:
    """Products, a norm, and rotary positions behind it: in pairs, in float32 if ``wide``.

    As many products as it takes for the search to go anchor by anchor.
    """
    g = cg.Graph("rotated")
    flat, heads, pairs = (1, 24, 512), (1, 24, 4, 128), (1, 24, 4, 64, 2)
    x = g.input("x", flat, dtype)
    for number in range(8):
        x = g.matmul(x, g.input(f"k{number}", (512, 512), dtype))
    normal = g.rms_norm(g.reshape(x, heads), g.input("w", (128,), dtype))
    other = torch.float32 if wide else dtype
    cos, sin = (g.input(name, (1, 24, 1, 128), other) for name in ("cos", "sin"))
    halves = g.reshape(normal, pairs)
    turned = g.concat([g.neg(g.slice(halves, 4, 1)), g.slice(halves, 4, 0, 1)], 4)
    along, across = normal, g.reshape(turned, heads)
    if wide:
        along, across = g.cast(along, torch.float32), g.cast(across, torch.float32)
    g.output("y", g.cast(g.add(g.mul(along, cos), g.mul(across, sin)), dtype))
    return g
