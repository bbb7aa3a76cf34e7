"""A made-up library of plans with made-up times, and the search on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Choice
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec, is_channels_last
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.rewrite.known_functions import name_functions
from cudnngraph.select import alternatives
from cudnngraph.select.config import FINAL_ROUNDS
from cudnngraph.select.cost import Floor, no_floor
from cudnngraph.select.decision import Decision, Hints, Selection
from cudnngraph.select.effort import Effort
from tests.cuttings import every_way, pieces, rewritten
from tests.fakes import FakePlan

F16, F32 = torch.float16, torch.float32
POLICY = cg.Policy(tune="autotune", allow_tf32=False, budget_s=1e6)
TORCH_US = 1000.0


def ops(spec: GraphSpec) -> str:
    """The ops of a step; "last" where its first image lies channels last."""
    image = next((t for t in map(spec.tensors.get, spec.inputs) if t and len(t.shape) == 4), None)
    last = image is not None and is_channels_last(image.shape, image.stride)
    return " ".join(node.op for node in compute_nodes(spec.nodes)) + (" last" if last else "")


class Offer:
    """One plan that the made-up library has: its engine, its time, what becomes of it."""

    def __init__(
        self,
        time_us: float | str,
        workspace: int = 0,
        *,
        wrong: str | None = None,
        refused: str | None = None,
        final_us: float | None = None,
        slower: float = 0.0,
    ) -> None:
        self.time_us = time_us
        self.workspace = workspace
        self.wrong = wrong
        self.refused = refused
        self.final_us = final_us
        self.slower = slower  # as it is predicted


class Bench:
    """A library of offers by step; a step without any is refused. Keeps what it was asked."""

    def __init__(
        self,
        offers: Callable[[GraphSpec], Sequence[Offer]],
        torch_us: Callable[[GraphSpec], float | str] = lambda spec: TORCH_US,
    ) -> None:
        self._offers = offers
        self._torch_us = torch_us
        self.asked: list[str] = []
        self.built: list[tuple[str, int]] = []
        self.timed: dict[str, dict[int | None, float | str]] = {}
        self.rounds: list[tuple[int, int]] = []
        self.checked: list[tuple[str, int]] = []
        self.replayed: list[tuple[GraphSpec, Choice]] = []
        self.chains: list[list[str]] = []
        self.whole_us: Callable[..., list[float] | None] = self.sums_us
        self.on_build: Callable[[], None] = lambda: None
        self.effort = Effort()

    def offer(self, spec: GraphSpec, engine: int) -> Offer:
        return self._offers(spec)[engine]

    def proposals(self, spec: GraphSpec, known: Sequence[Candidate] | None = None) -> Any:
        self.asked.append(ops(spec))
        offers = self._offers(spec)
        if not offers:
            raise cg.NotSupported("this graph", [f"no engine for {ops(spec)}"])

        def build(candidate: Candidate) -> tuple[Outcome, FakePlan | None]:
            self.on_build()
            engine = candidate.choice.engine
            offer = offers[engine]
            if offer.refused is not None:
                return Outcome(candidate, False, offer.refused), None
            self.built.append((ops(spec), engine))
            plan = FakePlan(candidate.choice, offer.workspace)
            return Outcome(candidate, True, "", offer.workspace), plan

        listed = [
            Candidate(n, Choice(n, (("TILE", n),)), f"eng{n}", slower=offer.slower)
            for n, offer in enumerate(offers)
        ]
        return SimpleNamespace(candidates=listed, build=build)

    def times_us(
        self, spec: GraphSpec, plans: Sequence[FakePlan | None], rounds: int
    ) -> list[float | str]:
        times: list[float | str] = []
        self.rounds.append((rounds, len(plans)))
        for plan in plans:
            if plan is None:
                took = self._torch_us(spec)
            else:
                offer = self.offer(spec, plan.choice.engine)
                again = rounds == FINAL_ROUNDS and offer.final_us is not None
                took = offer.final_us if again else offer.time_us  # type: ignore[assignment]
            mine = self.timed.setdefault(digest(spec), {})
            mine[None if plan is None else plan.choice.engine] = took
            times.append(took)
        return times

    def expect(self, specs: Sequence[GraphSpec]) -> None:
        """Nothing is asked ahead."""

    def ahead(self, spec: GraphSpec, count: int) -> None:
        """Nothing is built ahead."""

    def ready(self, spec: GraphSpec, choice: Choice) -> bool:
        return True

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Nothing is built ahead."""

    def chain_times_us(
        self,
        spec: GraphSpec,
        chains: Sequence[Sequence[tuple[GraphSpec, FakePlan | None]]],
        *,
        alike: bool = False,
    ) -> list[float] | None:
        self.chains.append([" | ".join(ops(step) for step, _ in chain) for chain in chains])
        for chain in chains:
            there = set(spec.inputs)
            for step, _ in chain:
                assert there.issuperset(step.inputs), "the chain is out of order"
                there |= set(step.outputs)
            assert there.issuperset(spec.outputs)
        return self.whole_us(chains)

    def sums_us(
        self, chains: Sequence[Sequence[tuple[GraphSpec, FakePlan | None]]]
    ) -> list[float] | None:
        """As if a step took in the chain what it takes alone."""
        return [sum(self._took_us(*step) for step in chain) for chain in chains]

    def _took_us(self, spec: GraphSpec, plan: FakePlan | None) -> float:
        engine = None if plan is None else plan.choice.engine
        took = self.timed.get(digest(spec), {}).get(engine)
        if took is None:  # known from an earlier search
            took = self._torch_us(spec) if engine is None else self.offer(spec, engine).time_us
        return math.inf if isinstance(took, str) else took

    def why_wrong(self, spec: GraphSpec, plan: FakePlan) -> str | None:
        self.checked.append((ops(spec), plan.choice.engine))
        return self.offer(spec, plan.choice.engine).wrong

    def passed(self, spec: GraphSpec, plan: FakePlan) -> bool:
        return plan.verified is not None

    def replay(self, spec: GraphSpec, choice: Choice) -> FakePlan:
        self.replayed.append((spec, choice))
        return FakePlan(choice)


def digest(spec: GraphSpec) -> str:
    try:
        return graph_key(spec, POLICY).digest
    except cg.UnkeyableError:  # with the -inf of a converted mask
        return str(spec)


def table(offers: Mapping[str, Sequence[Offer]], **torch_us: float | str) -> Bench:
    """A bench by the ops of a step; for torch 1000 µs where nothing is said."""
    return Bench(
        lambda spec: offers.get(ops(spec), ()),
        lambda spec: torch_us.get(ops(spec).removesuffix(" last"), TORCH_US),
    )


def run(
    spec: GraphSpec,
    bench: Bench,
    policy: cg.Policy = POLICY,
    hints: Hints | None = None,
    floor: Floor = no_floor,
) -> Selection:
    found: Any = bench
    return alternatives.by_measurement(spec, policy, found, hints=hints, floor=floor)


def taken(selection: Selection) -> list[tuple[str, int | None]]:
    return [(ops(s.spec), None if s.choice is None else s.choice.engine) for s in selection.steps]


def reasons(selection: Selection) -> list[str]:
    return [decision.reason for step in selection.steps for decision in step.decisions]


def of(selection: Selection, engine: int, step: int = 0) -> Decision:
    """The one decision about that engine in a step."""
    (found,) = (
        d for d in selection.steps[step].decisions if d.choice and d.choice.engine == engine
    )
    return found


def block(layout: str = "channels_last", groups: int = 1) -> GraphSpec:
    g = cg.Graph("block")
    x = g.input("x", (2, 8, 6, 6), F16, layout=layout)
    w = g.input("w", (8, 8 // groups, 3, 3), F16, layout=layout)
    y = g.conv_bias_act(x, w, g.input("b", (8,), F16), padding=1, groups=groups)
    g.output("y", y)
    return g.spec()


def chain(second: str = "tanh") -> GraphSpec:
    g = cg.Graph("chain")
    last = {"layout": "channels_last"}
    x = g.input("x", (2, 8, 6, 6), F16, **last)
    w1, w2 = (g.input(name, (8, 8, 1, 1), F16, **last) for name in ("w1", "w2"))
    g.output("y", getattr(g, second)(g.conv(g.relu(g.conv(x, w1)), w2)))
    return g.spec()


WHOLE, CONV, EPILOGUE = "conv bias relu last", "conv last", "bias relu last"


def right_us(bench: Bench, spec: GraphSpec) -> float:
    """The least time that was measured of a step, plans that are wrong left out."""
    return min(
        (
            took
            for engine, took in bench.timed.get(digest(spec), {}).items()
            if not isinstance(took, str)
            and (engine is None or bench.offer(spec, engine).wrong is None)
        ),
        default=math.inf,
    )


def totals(bench: Bench, spec: GraphSpec) -> list[float]:
    """The time of every way to run the graph, its steps by the best that was measured of each."""
    spec = name_functions(spec)
    masked = rewritten(spec)
    variants = [each for each in masked if each is not spec or len(masked) == 1] or [spec]
    if masked[-1] is not spec and not any("sdpa" in node.op for node in spec.nodes):
        variants = masked
    found = []
    for variant in variants:
        graph = CutGraph(variant)
        for way in every_way(graph, compute_nodes(variant.nodes)):
            found.append(sum(right_us(bench, step) for step in pieces(graph, way)))
    return found
