"""A graph's trial, captured: steps run beside others as those of programs do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import streams
from cudnngraph.ir.canonical import canonical
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.select.graph_trial import GraphTrial

CPU, F32 = torch.device("cpu"), torch.float32


def test_a_captured_trial_runs_steps_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    g = cg.Graph("gradients")
    x, w = g.input("x", (2, 8, 6, 6), F32), g.input("w", (8, 8, 3, 3), F32)
    dy = g.relu(g.input("dy", (2, 8, 6, 6), F32))
    g.output("dw", g.conv_wgrad(dy, x, kernel=3, padding=1))
    g.output("dx", g.conv_transpose(dy, w, padding=1))
    spec = canonical(g.spec())
    graph, plan = CutGraph(spec), SimpleNamespace(workspace_bytes=256)
    steps: Any = [(subgraph_of(graph, [node]), plan) for node in spec.nodes]
    chain, ran = GraphTrial(spec, cg.Policy(), CPU), []
    chain._sides = ["a stream"]  # type: ignore[list-item]
    monkeypatch.setattr(chain, "_step", lambda part, *_: lambda: ran.append(part.nodes[0].op))
    told: list[Any] = []

    def run(calls: Any, until: Any, sides: Any, index: Any) -> None:
        told.append((dict(until), sides))
        for call in calls.values():
            call("a handle")

    monkeypatch.setattr(streams, "run", run)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    launch = chain.launch(steps)
    launch()
    assert told == [], "in turn where nothing is captured"
    capturing = True
    launch()
    assert ran == 2 * [node.op for node in spec.nodes]
    assert told == [({1: 2}, ["a stream"])]
    memory = chain._memory
    assert memory is not None
    first, second = memory.layout.scratch[1:]
    assert abs(first - second) >= 256, "neither writes over the other's workspace"
