"""Steps side by side: which they are, the order that holds between them, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.executor import streams
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.partition.memory import Layout, StepMemory
from cudnngraph.rewrite.passes import prepared
from tests.gradients import differentiable, floating_inputs
from tests.samples import Case, enumerate_cases

F16 = torch.float16
CASES = [case for case in enumerate_cases() if differentiable(case)]
LAST = {"layout": "channels_last"}


def one_by_one(spec: GraphSpec, planned: Callable[[Any], bool]) -> list[StepMemory]:
    """Every op a step; a plan where ``planned`` says so, with scratch memory of its own."""
    graph = CutGraph(prepared(canonical(spec)))
    parts = [subgraph_of(graph, (node,)) for node in compute_nodes(graph.spec.nodes)]
    return [StepMemory(part, *((True, 1000) if planned(part) else (False, 0))) for part in parts]


def branches(*, joined: bool = True) -> list[StepMemory]:
    """conv → (conv, conv → conv) → add; every step a plan."""
    g = cg.Graph("branches")
    x = g.input("x", (2, 8, 6, 6), F16, **LAST)  # type: ignore[arg-type]
    w = g.input("w", (8, 8, 3, 3), F16, **LAST)  # type: ignore[arg-type]
    stem = g.conv(x, w, padding=1)
    side = g.conv(stem, w, padding=1)
    main = g.conv(g.conv(stem, w, padding=1), w, padding=1)
    if joined:
        g.output("y", side + main)
    else:
        g.output("side", side)
        g.output("main", main)
    return one_by_one(g.spec(), lambda part: True)


def ops(steps: Sequence[StepMemory]) -> list[str]:
    return [step.spec.nodes[-1].op for step in steps]


def test_a_plan_runs_beside_those_that_do_not_read_its_result() -> None:
    assert ops(branches()) == ["conv", "conv", "conv", "conv", "add"]
    assert streams.overlappable(branches()) == {1: 3}
    assert streams.overlappable(branches(joined=False)) == {1: 3}


def test_torch_steps_and_pointwise_plans_run_in_their_place() -> None:
    steps = branches()
    apart = [StepMemory(step.spec, at != 1, 0) for at, step in enumerate(steps)]
    assert streams.overlappable(apart) == {}
    alone = [StepMemory(step.spec, at == 1, 0) for at, step in enumerate(steps)]
    assert streams.overlappable(alone) == {}, "there is no plan to run beside"
    g = cg.Graph("pointwise")
    x = g.input("x", (4, 6), F16)
    for name in "abc":
        g.output(name, x * float(ord(name)))
    assert streams.overlappable(one_by_one(g.spec(), lambda part: True)) == {}


def test_so_many_run_beside_the_others_at_a_time() -> None:
    g = cg.Graph("many")
    x = g.input("x", (2, 8, 6, 6), F16, **LAST)  # type: ignore[arg-type]
    w = g.input("w", (8, 8, 3, 3), F16, **LAST)  # type: ignore[arg-type]
    for number in range(6):
        g.output(f"y{number}", g.conv(x, w, padding=1))
    assert streams.overlappable(one_by_one(g.spec(), lambda part: True)) == dict.fromkeys(
        range(3), 5
    )


class Stream:
    """A stream that notes what it is told to wait for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


def test_streams_wait_for_each_other_where_a_result_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    main, *sides = (Stream(name, log) for name in ("main", "a", "b"))
    current = [main]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(handles, "handle_on_current_stream", lambda index: current[-1].name)
    calls = {
        number: lambda handle, number=number: log.append(f"{number} on {handle}")
        for number in (0, 1, 3, 4, 5)
    }
    streams.run(calls, {1: 3, 4: 5}, sides, 0)  # type: ignore[arg-type]
    assert log == [
        "0 on main",
        "b waits for main",
        "1 on b",
        "3 on main",
        "main waits for b",
        "b waits for main",
        "4 on b",
        "5 on main",
        "main waits for b",
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_runs_side_by_side_shares_no_memory(case: Case, monkeypatch: Any) -> None:
    """In a gradient cut op by op, a step writes no memory of the steps that may run beside it."""
    spec = case.build().spec()
    backward = cg.differentiate(spec, floating_inputs(spec)).backward
    steps = one_by_one(backward, lambda part: part.nodes[-1].op != "concat")
    until = streams.overlappable(steps)
    graph = prepared(canonical(backward))
    bound = {*graph.inputs, *graph.outputs}
    layout = Layout(steps, bound, until)
    start: dict[str, tuple[str, int]] = {name: (name, 0) for name in bound}
    for each in layout.order:
        root, past = ("the block", 0) if each.root is None else start[each.root]
        start[each.form.name] = (root, past + each.past * each.form.dtype.itemsize)

    def place(name: str, part: GraphSpec) -> tuple[str, int, int, Any]:
        """Return a tensor's root, its first byte, the byte behind its last, and its form."""
        (root, at), form = start[name], part.tensors[name]
        return root, at, at + form.extent * form.dtype.itemsize, form

    def touched(number: int) -> tuple[list[Any], list[Any]]:
        part = steps[number].spec
        at, size = layout.scratch[number], steps[number].workspace_bytes
        written = [place(name, part) for name in part.outputs]
        written += [("the block", at, at + size, None)] if size else []
        return [place(name, part) for name in part.inputs], written

    def elements(at: int, form: Any) -> set[int]:
        """The first byte of each element: slices of one whole lie between each other."""
        whole = torch.arange(form.extent).as_strided(form.shape, form.stride)
        return {at + form.dtype.itemsize * n for n in whole.reshape(-1).tolist()}

    def meet(some: list[Any], others: list[Any]) -> bool:
        for root, first, stop, form in some:
            for other_root, other_first, other_stop, other in others:
                if root != other_root or other_stop <= first or stop <= other_first:
                    continue
                if form is None or other is None:
                    return True
                if elements(first, form) & elements(other_first, other):
                    return True
        return False

    for number, last in until.items():
        reads, writes = touched(number)
        for other in range(number + 1, last + 1):
            if other in layout.free:
                continue
            other_reads, other_writes = touched(other)
            assert not meet(writes, other_reads + other_writes)
            assert not meet(other_writes, reads)
    assert layout.size_bytes >= Layout(steps, bound).size_bytes
