"""A graph compiled for fake plans, with or without what is in memory; see :mod:`tests.fakes`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec
from plans_cache.record import from_json
from tests.fakes import World

F16, F64 = torch.float16, torch.float64


def graph(act: str = "relu", channels: int = 8, name: str = "stem") -> cg.Graph:
    g = cg.Graph(name)
    x, w = g.input("x", (2, channels, 6, 6), F16), g.input("w", (16, channels, 3, 3), F16)
    g.output("y", g.conv_bias_act(x, w, g.input("b", (16,), F16), padding=1, activation=act))
    return g


def compiled(act: str = "relu", **options: Any) -> cg.Executable:
    return graph(act).compile("cuda:0", **options)


def again(act: str = "relu", **options: Any) -> cg.Executable:
    """Compile as a new process would: nothing is in memory."""
    cg.cache_clear()
    return compiled(act, **options)


def in_pieces(spec: GraphSpec) -> bool:
    """Refuse everything but single ops, and refuse bias too: it becomes a torch step."""
    return len(spec.nodes) > 1 or spec.nodes[0].op == "bias"


def no_knobs(world: World) -> None:
    record = from_json(world.file().read_text())
    world.loadable = False
    world.gone = {record.steps[0].engine or 0}


def other_steps(world: World) -> None:
    world.rewrite(nodes=("elsewhere",), ops=("conv",))


def refused(act: str = "relu", **options: Any) -> cg.PlanNotCached:
    with pytest.raises(cg.PlanNotCached) as caught:
        again(act, tune="cached", **options)
    return caught.value
