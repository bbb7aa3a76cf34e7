"""Every engine that cuDNN offers for a graph, run and compared on a GPU; for :mod:`tests.apart`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.backend import env
from cudnngraph.executor import reference
from cudnngraph.select.bench import GpuBench
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.tolerance import relative_error, tolerance
from cudnngraph.sweep import run
from tests import broadcasts

WHOLE = "as compiled"  # the mark of the graph as heuristics compile it, cut or not

if __name__ != "__main__":
    env.frontend()  # in the server, so that a child need not


def broadcast(described: Mapping[str, Any], skip: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """A case of :mod:`tests.broadcasts`: each engine, and the graph as compiled."""
    yield from engines(broadcasts.case(described).graph(), skip)


def broadcast_let_through(
    described: Mapping[str, Any], skip: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """The same of each engine alone, with nothing barred and no way to repeat refused."""
    from cudnngraph.backend import found_bad, known_bad
    from cudnngraph.backend.lowering import driver

    known_bad.TABLE = ()
    found_bad.let_through()
    driver.check_beside_convolutions = lambda ctx: None
    yield from engines(broadcasts.case(described).graph(), [*skip, WHOLE])


def engines(graph: cg.Graph, skip: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """("engine N", "" or what is wrong) of the first plan of each engine that builds, then the same
    of :data:`ATOMIC`. What is barred says so."""
    device, policy = torch.device("cuda", 0), cg.Policy(allow_tf32=False, tune="autotune")
    spec = graph.spec()
    bench = GpuBench(policy, device)
    try:
        proposals = bench.proposals(spec)
    except cg.NotSupported:
        proposals = None
    settled = set(skip)
    for candidate in proposals.candidates if proposals else ():
        mark = f"engine {candidate.choice.engine}"
        if mark in settled:
            continue
        yield mark, None
        outcome, plan = proposals.build(candidate)
        torch.cuda.synchronize()  # a fault stays, whatever was caught, and ends this process here
        if plan is not None:
            settled.add(mark)
            yield mark, bench.why_wrong(spec, plan) or "right"
        elif any(words in outcome.reason for words in run.BARRED_WORDS):
            settled.add(mark)
            yield mark, "barred"
        else:
            launched = outcome.reason.startswith("does not launch")
            yield mark, outcome.reason if launched else "not built"
    if WHOLE not in settled:
        yield WHOLE, None
        yield WHOLE, _as_compiled(graph, device) or "right"


def _as_compiled(graph: cg.Graph, device: torch.device) -> str:
    """Return what is wrong with the results of what heuristics compile; empty if nothing is."""
    exe = graph.compile(device, policy=cg.Policy(allow_tf32=False))
    spec = graph.spec()
    inputs = random_inputs(spec, device, seed=1)
    made = exe(**dict(zip(spec.inputs, inputs, strict=True)))
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    wanted = reference.run(spec, inputs, torch.float64)
    for name, out, want in zip(spec.outputs, results, wanted, strict=True):
        error, bound = relative_error(out, want), tolerance(out.dtype, tf32=False)
        if not error <= bound:
            return f"wrong: '{name}' is off by {error:.2g}, at most {bound:.2g} is right"
    return ""
