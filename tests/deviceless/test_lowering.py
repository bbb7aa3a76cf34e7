"""Every sample case is lowered for an H200 and shown to the real cuDNN library.

cuDNN must have a plan for the whole graph, or for every step that it is cut into. What is known to
be refused stands in two lists with the reason, in :mod:`tests.refused`: ops that are left to torch,
and graphs that are cut. A refusal that is in neither fails. The summary at the end counts how often
each row was met: one that is not is out of date.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import env
from cudnngraph.backend.candidates import Candidate, propose
from cudnngraph.backend.deviceless import Listed, examine, lower_for
from cudnngraph.backend.lowering.driver import RULES, Lowered
from cudnngraph.backend.lowering.refusals import REFUSALS
from cudnngraph.backend.plan import Choice, load
from cudnngraph.explain.offline import PlannedStep
from cudnngraph.ir import versions
from cudnngraph.ir.key import Key, graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.memory import Layout, StepMemory
from cudnngraph.policy import Policy
from cudnngraph.select.heuristic import GENERATED
from tests import coverage
from tests.gradients import differentiable, floating_inputs
from tests.refused.cuts import CUT
from tests.refused.ops import TORCH
from tests.refused.predicates import NORMS, anchors_of, nodes_of
from tests.samples import Case, enumerate_cases

TARGET = "nvidia-h200"
CASES = enumerate_cases()


# -- what the frontend was told ----------------------------------------------------------------


def _in_memory(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """(stride, extent) from slowest to fastest, merged where dims are dense, repeats left out."""
    merged: list[tuple[int, int]] = []
    for step, extent in sorted(
        ((s, n) for n, s in zip(shape, stride, strict=True) if n > 1 and s > 0), reverse=True
    ):
        if merged and merged[-1][0] == step * extent:
            merged[-1] = (step, merged[-1][1] * extent)
        else:
            merged.append((step, extent))
    return merged


def _real(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(shape, stride, strict=True) if n > 1]


def _merges_dims(spec: GraphSpec) -> bool:
    """Whether the dims that cuDNN sees are others: pointwise ops, products, norms, reductions."""
    merging = ("matmul", "normalize", *NORMS, "reduction")
    return all(node.op in merging for node in anchors_of(spec))


def check_explicit(spec: GraphSpec, lowered: Lowered) -> None:
    """Nothing was left to inference, and inputs and outputs lie where the spec says."""
    for node in lowered.graph.nodes:
        for port, tensor in node.outputs.items():
            if tensor is not None:
                assert tensor.dim_assigned, f"{node.name}.{port} was given no dims"
                assert tensor.stride_assigned, f"{node.name}.{port} was given no strides"
                assert tensor.data_type is not None, f"{node.name}.{port} was given no dtype"
    names = (*spec.inputs, *spec.outputs)
    packed = {
        name
        for node in nodes_of(spec, "sdpa_varlen", "sdpa_varlen_backward")
        for name in (*node.operands, *node.results)
    }
    for uid, name in zip(lowered.uids, names, strict=True):
        if name in packed:  # see test_packed_tokens_are_shown_as_sequences
            continue
        want, told = spec.tensors[name], lowered.graph.find_tensor(uid)
        assert _in_memory(told.dim, told.stride) == _in_memory(want.shape, want.stride), name
        if not _merges_dims(spec):
            assert _real(told.dim, told.stride) == _real(want.shape, want.stride), name


_ANSWERS: dict[Key, tuple[list[Candidate], tuple[Listed, ...]]] = {}


def _key(spec: GraphSpec, policy: Policy) -> Key | None:
    """The key of a graph, None for one that has none: of a mask converted to -inf."""
    try:
        return graph_key(spec, policy)
    except cg.UnkeyableError:
        return None


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GraphSpec, Lowered]]:
    """Every graph that `explain` lowers, with the frontend's graph of it.

    All are lowered. cuDNN ranks the plans of graphs that are equal but for names once a process:
    many cases are cut into the same steps, and its rankings take most of the time.
    """
    seen: list[tuple[GraphSpec, Lowered]] = []

    def proposing(spec: GraphSpec, target: str) -> tuple[Lowered, list[Candidate]]:
        lowered, key = lower_for(spec, target), _key(spec, Policy(allow_tf32=False))
        known = _ANSWERS.get(key) if key else None
        candidates = known[0] if known else propose(lowered, env.frontend())
        seen.append((spec, lowered))
        return lowered, candidates

    def listing(
        lowered: Lowered, found: list[Candidate], spec: GraphSpec, policy: Policy, *rest: Any
    ) -> tuple[Listed, ...]:
        key = _key(spec, policy)
        known = _ANSWERS.get(key) if key else None
        listed = known[1] if known else examine(lowered, found, spec, policy, *rest)
        if key:
            _ANSWERS[key] = found, listed
        return listed

    offline = sys.modules["cudnngraph.explain.offline"]
    monkeypatch.setattr(offline, "propose_for", proposing)
    monkeypatch.setattr(offline, "examine", listing)
    return seen


# -- the tests ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cudnn_has_a_plan_for_every_step(
    case: Case,
    lowerings: list[tuple[GraphSpec, Lowered]],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    spec = case.build().spec()
    outcome = check_planned(spec, lowerings, record_property)
    check_covered(case, "forward", outcome, left_to_torch(spec), request, record_property)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("case", [case for case in CASES if differentiable(case)], ids=str)
def test_cudnn_has_a_plan_for_every_step_of_the_gradient(
    case: Case,
    lowerings: list[tuple[GraphSpec, Lowered]],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    spec = case.build().spec()
    gradient = cg.differentiate(spec, floating_inputs(spec))
    outcome = check_planned(gradient.backward, lowerings, record_property)
    left = left_to_torch(gradient.backward)
    check_covered(case, "gradient", outcome, left, request, record_property)


def check_planned(
    graph: GraphSpec,
    lowerings: list[tuple[GraphSpec, Lowered]],
    record_property: Callable[[str, object], None],
) -> str:
    """Every step has a plan, or is refused for a reason that is listed; so for the cut.

    What the graph runs as, by the words of :mod:`tests.coverage`.
    """
    found = cg.explain(graph, TARGET, allow_tf32=False)
    for spec, lowered in lowerings:
        check_explicit(spec, lowered)
    used: list[str] = []
    for step in found.steps:
        if step.runs_on == "cuDNN":
            assert step.plans
            assert step.first is not None
            continue
        known = [row.reason for row in TORCH if row.meets(step.spec)]
        assert known, f"refused for a reason that is in no row of TORCH\n{found}"
        used += known
    if not found.whole and not used:
        used = [row.reason for row in CUT if row.meets(found.spec)]
        assert used, f"cut for a reason that is in no row of CUT\n{found}"
    record_property("known refusals", used)
    return runs_as(found)


def runs_as(found: cg.Explanation) -> str:
    """Return the kind of the steps; views between them run nothing and do not count."""
    kinds = Counter(step.runs_on == "cuDNN" for step in steps_that_run(found))
    if kinds[False]:
        return "both" if kinds[True] else "torch"
    return "plan" if kinds[True] == 1 else "steps"


def steps_that_run(found: cg.Explanation) -> list[PlannedStep]:
    """The steps but for views between them."""
    laid = [StepMemory(step.spec, step.runs_on in ("cuDNN", "kernel"), 0) for step in found.steps]
    free = Layout(laid, {*found.spec.inputs, *found.spec.outputs}).free
    return [step for number, step in enumerate(found.steps) if number not in free]


def left_to_torch(graph: GraphSpec) -> dict[str, str]:
    """The ops that torch runs where kernels are generated, and why."""
    found = cg.explain(graph, TARGET, allow_tf32=False, kernels=True)
    return {
        " ".join(step.ops): next(
            (each.reason for each in step.refusals if each.subject == GENERATED), "not for cuDNN"
        )
        for step in steps_that_run(found)
        if step.runs_on == "torch"
    }


def check_covered(
    case: Case,
    of: str,
    outcome: str,
    left: Mapping[str, str],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """docs/coverage.json says what cuDNN makes of a case; it is of one version of cuDNN."""
    record_property("planned", (case.id, of, outcome))
    record_property("left", (case.id, of, left))
    known = coverage.read()
    if request.config.getoption("--write-coverage") or env.cudnn_version() != known["cudnn"]:
        return
    if coverage.counted(case):
        assert known[of].get(case.id) == outcome, coverage.HOW_TO_WRITE
        assert known["left"][of].get(case.id, {}) == left, coverage.HOW_TO_WRITE


@lru_cache
def _sample_specs() -> tuple[GraphSpec, ...]:
    """The sample graphs that cuDNN may take, those of 16-bit data first."""
    cases = [case for case in CASES if case.dtype != torch.float64]
    cases.sort(key=lambda case: case.dtype not in (torch.float16, torch.bfloat16))
    return tuple(case.build().spec() for case in cases)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("op", RULES)
def test_cudnn_takes_every_op_that_is_not_refused_by_name(op: str) -> None:
    """Each rule of lowering gives at least one sample a plan, or none, and is known for that."""
    taken = (
        step
        for spec in _sample_specs()
        if nodes_of(spec, op)
        for step in cg.explain(spec, TARGET, allow_tf32=False).steps
        if step.runs_on == "cuDNN" and nodes_of(step.spec, op)
    )
    assert (next(taken, None) is None) == (RULES[op] in REFUSALS)


def _conv_graph(dtype: torch.dtype, *, fused: bool = False) -> cg.Graph:
    g = cg.Graph("conv")
    x = g.input("x", (32, 64, 56, 56), dtype, layout="channels_last")
    w = g.input("w", (64, 64, 3, 3), dtype, layout="channels_last")
    y = g.conv(x, w, padding=1)
    g.output("y", g.silu(g.bias(y, g.input("b", (64,), dtype))) if fused else y)
    return g


def _attention_graph() -> cg.Graph:
    g = cg.Graph("attention")
    q, k, v = (g.input(name, (4, 16, 512, 128), torch.bfloat16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, is_causal=True))
    return g


def _check_plans(graph: cg.Graph, at_least: int, *, runtime_compiled: bool) -> None:
    found = cg.explain(graph, TARGET, allow_tf32=True)
    assert found.whole
    plans = found.steps[0].plans
    assert len(plans) >= at_least
    assert [plan.rank for plan in plans] == list(range(1, len(plans) + 1))
    assert len({plan.choice for plan in plans}) == len(plans)
    for plan in plans:
        assert isinstance(plan.engine, int) and 0 <= plan.engine < 10_000
        assert all(isinstance(n, str) and isinstance(v, int) for n, v in plan.knobs)
        assert isinstance(plan.workspace_bytes, int) and plan.workspace_bytes >= 0
        assert plan.allowed
    assert plans[0].runtime_compiled is runtime_compiled


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_bare_convolution_has_many_precompiled_plans(dtype: torch.dtype) -> None:
    _check_plans(_conv_graph(dtype), 20, runtime_compiled=False)


@pytest.mark.usefixtures("driver")
def test_a_fused_convolution_has_runtime_compiled_plans() -> None:
    _check_plans(_conv_graph(torch.float16, fused=True), 3, runtime_compiled=True)


@pytest.mark.usefixtures("driver")
def test_attention_has_runtime_compiled_plans() -> None:
    _check_plans(_attention_graph(), 2, runtime_compiled=True)


@pytest.mark.parametrize("head", [{}, {"lowering": versions.LOWERING - 1}])
def test_a_serialized_plan_of_a_graph_lowered_by_other_rules_is_not_loaded(
    head: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is replayed: what is refused since, or lowered otherwise, was wrong."""
    asked = "cudnngraph.backend.plan.refuse_during_capture"  # the GPU
    monkeypatch.setattr(asked, lambda: None)
    blob = json.dumps({"choice": "engine 4", "uids": 2, **head}).encode() + b"\nplan"
    with pytest.raises(cg.NotSupported, match="lowered by other rules") as caught:
        load(blob, Choice(4, ()), 0)
    assert caught.value.reasons == ("its graph was lowered by other rules than this program's",)


def test_a_plan_that_another_frontend_has_serialized_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its record is replayed, which builds the same plan with this one."""
    monkeypatch.setattr("cudnngraph.backend.plan.refuse_during_capture", lambda: None)
    head = {"choice": "engine 4", "uids": 2, "lowering": versions.LOWERING, "frontend": "1.27.9"}
    with pytest.raises(cg.NotSupported) as caught:
        load(json.dumps(head).encode() + b"\nplan", Choice(4, ()), 0)
    assert caught.value.reasons == ("frontend 1.27.9 has written it",)


def test_what_the_frontend_cannot_rank_without_a_package_is_refused_by_its_name() -> None:
    class Graph:
        def create_execution_plans(self, modes: object) -> None:
            raise ModuleNotFoundError("No module named 'cuda'")

    with pytest.raises(cg.NotSupported) as caught:
        propose(Lowered(Graph(), (), ()), env.frontend())
    assert caught.value.reasons == ("the frontend cannot rank it: No module named 'cuda'",)


@pytest.mark.parametrize("first", [True, False])
def test_a_residual_is_found_by_the_same_engines_on_either_side(first: bool, driver: None) -> None:
    """Ready-made engines know convolution + residual, not residual + convolution."""
    g = cg.Graph("block")
    last = {"layout": "channels_last"}
    x = g.input("x", (8, 64, 14, 14), torch.float16, **last)
    z = g.input("z", (8, 64, 14, 14), torch.float16, **last)
    y = g.conv(x, g.input("w", (64, 64, 1, 1), torch.float16, **last))
    y = g.add(y, z) if first else g.add(z, y)
    g.output("y", g.relu(g.bias(y, g.input("b", (64,), torch.float16))))
    (step,) = cg.explain(g).steps
    assert sum(not plan.runtime_compiled for plan in step.plans) > 20
