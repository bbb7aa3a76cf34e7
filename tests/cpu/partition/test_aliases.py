"""Tensors that alias another's memory, and the steps that therefore run nothing."""

from __future__ import annotations

import torch

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.aliases import Aliases, Made, aliases
from cudnngraph.partition.analysis import CutGraph, compute_nodes

F16 = torch.float16


def of_each_op(spec: GraphSpec) -> tuple[Aliases, list[str]]:
    """The aliases of a graph whose ops are steps of their own, and the ops that are free."""
    graph = CutGraph(spec)
    return graph.aliases, [node.op for node in compute_nodes(spec.nodes) if graph.is_free(node)]


def where(found: Aliases) -> dict[str, tuple[str | None, int]]:
    return {each.form.name: (each.root, each.past) for each in found.order}


def test_a_view_is_its_operand_and_what_an_output_shows_is_the_output() -> None:
    g = cg.Graph("views")
    x = g.relu(g.input("x", (4, 8, 16), F16))
    flat = g.reshape(x, (32, 16))
    g.output("y", g.transpose(flat, 0, 1))
    g.output("z", g.relu(flat))
    found, free = of_each_op(g.spec())
    assert free == ["reshape", "transpose"]
    (written, shown) = found.order
    assert (written.root, shown.root) == ("y", written.form.name), "a view of what is an output"

    g = cg.Graph("shown")
    x = g.relu(g.input("x", (4, 8, 16), F16))
    g.output("y", g.reshape(x, (32, 16)))
    found, free = of_each_op(g.spec())
    (each,) = found.order
    assert free == ["reshape"] and (each.root, each.past) == ("y", 0)


def test_what_two_concatenations_join_is_written_into_the_first() -> None:
    g = cg.Graph("twice")
    a, b, c = (g.relu(g.input(name, (4, 16), F16)) for name in "abc")
    g.output("y", g.concat([a, b], 0))
    g.output("z", g.concat([a, c], 0))
    found, free = of_each_op(g.spec())
    assert free == ["concat"] and len(found.order) == 3
    assert sorted(root or "" for root, _ in where(found).values()) == ["y", "y", "z"]
    assert sorted(past for _, past in where(found).values()) == [0, 64, 64]


def test_a_slice_of_a_slice_stands_behind_the_whole() -> None:
    g = cg.Graph("nested")
    a, b, c = (g.relu(g.input(name, (4, 16), F16)) for name in "abc")
    g.output("y", g.concat([g.concat([a, b], 0), c], 0))
    found, free = of_each_op(g.spec())
    assert free == ["concat", "concat"]
    known = {"y"}
    for each in found.order:
        assert each.root in known
        known.add(each.form.name)
    assert len(known) == 5


def test_a_step_that_a_plan_runs_is_no_alias() -> None:
    g = cg.Graph("planned")
    g.output("y", g.reshape(g.relu(g.input("x", (4, 16), F16)), (64,)))
    spec = g.spec()
    nodes = compute_nodes(spec.nodes)
    steps = [Made(spec.tensors, node.results, None) for node in nodes]
    assert aliases(steps, {"x", "y"}) == Aliases((), frozenset())
