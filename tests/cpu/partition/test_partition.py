"""Cuts of a graph: every way computes what the whole does, in an order that can be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.grad import differentiate as grad
from cudnngraph.ir.spec import GraphSpec, Node
from cudnngraph.ops.base import LOW_PRECISION
from cudnngraph.ops.table import OPS
from cudnngraph.partition import regions as regions_module
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import cuts, subgraph_of
from cudnngraph.partition.regions import regions
from cudnngraph.rewrite.passes import prepared
from tests import numerics, random_graphs
from tests.chunks import each_case
from tests.cuttings import every_cutting, pieces, rewritten
from tests.gradients import differentiable, floating_inputs
from tests.partitions import (
    BINARY,
    MATRIX,
    UNARY,
    Done,
    names,
    ops,
    random_graph,
    run_steps,
    same_roundings,
)
from tests.samples import Case, enumerate_cases, in_float64, make_inputs, torch_eager

CASES = enumerate_cases()


# -- every way to cut every sample -----------------------------------------------------------------


@each_case(CASES)
def test_every_way_to_run_a_sample_computes_what_the_whole_does(case: Case) -> None:
    """In float64 to the bit, the rewrites included: nothing is lost, doubled or swapped."""
    spec, inputs = case.build().spec(), in_float64(make_inputs(case))
    expected = reference.run(spec, [inputs[name] for name in spec.inputs], torch.float64)
    for variant in rewritten(spec):
        assert (variant.inputs, variant.outputs) == (spec.inputs, spec.outputs)
        done: Done = {}
        for steps in every_cutting(variant):
            results = run_steps(variant, steps, inputs, torch.float64, done)
            for name, want in zip(spec.outputs, expected, strict=True):
                assert torch.equal(results[name].nan_to_num(), want.nan_to_num()), name


@each_case(CASES)
def test_what_steps_hand_on_is_precise_enough(case: Case) -> None:
    """In the dtypes that cross: to the bit where none is narrower, as good as 16 bits else."""
    spec, inputs = case.build().spec(), make_inputs(case)
    expected = reference.run(spec, [inputs[name] for name in spec.inputs])
    yardstick = torch_eager(case, in_float64(inputs))
    for variant in rewritten(spec):
        done: Done = {}
        for steps in every_cutting(variant):
            results = run_steps(variant, steps, inputs, None, done)
            exact = same_roundings(spec, steps)
            for name, want in zip(spec.outputs, expected, strict=True):
                assert results[name].dtype == want.dtype
                if exact or want.dtype == torch.int32:
                    assert torch.equal(results[name].double(), want.double()), name
                else:
                    # Anchors hand on 16 bits then: no output is better, float32 ones too.
                    narrow = results[name]
                    if case.dtype in (torch.float16, torch.bfloat16):
                        narrow = narrow.to(case.dtype)
                    numerics.check(narrow, yardstick[name], case.dtype, what=name)


@each_case(CASES)
def test_every_way_to_run_a_sample_does_every_op_once(case: Case) -> None:
    for variant in rewritten(case.build().spec()):
        for steps in every_cutting(variant):
            assert sorted(name for step in steps for name in names(step)) == sorted(names(variant))


@each_case(CASES)
def test_what_crosses_is_narrowed_to_16_bit_data_alone(case: Case) -> None:
    for variant in rewritten(case.build().spec()):
        given = {variant.tensors[name].dtype for name in variant.inputs}
        made = {name: node for node in variant.nodes for name in node.results}
        for steps in every_cutting(variant):
            crossing = {name for step in steps for name in (*step.inputs, *step.outputs)}
            for step in steps:
                for name, tensor in step.tensors.items():
                    declared = variant.tensors[name]
                    if tensor == declared:
                        continue
                    assert replace(tensor, dtype=declared.dtype) == declared
                    assert name in crossing and name in variant.intermediates
                    assert declared.dtype.is_floating_point
                    assert tensor.dtype in LOW_PRECISION and tensor.dtype in given
                    assert made[name].outputs[0] == name, "a norm's statistics, say"


@each_case(CASES)
def test_the_finest_cut_is_op_by_op_and_goes_no_further(case: Case) -> None:
    graph = CutGraph(case.build().spec())
    nodes = compute_nodes(graph.spec.nodes)
    if len(nodes) > 1:
        finest = cuts(graph, nodes)[-1]
        assert finest == tuple((node,) for node in nodes)
    for node in nodes:
        assert cuts(graph, (node,)) == ()
        assert names(subgraph_of(graph, (node,))) == [node.name]


@pytest.mark.parametrize("case", [case for case in CASES if differentiable(case)], ids=str)
def test_regions_of_a_gradient_and_their_cuts_are_in_an_order_that_can_be_run(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if every graph were large: ops that only serve one region are moved into it."""
    monkeypatch.setattr(regions_module, "MAX_ANCHORS_AS_ONE", 0)
    spec = case.build().spec()
    can_be_run(cg.differentiate(spec, floating_inputs(spec)).backward)


@pytest.mark.parametrize("first", range(0, 240, 40))
@pytest.mark.parametrize("anchors", [0, regions_module.MAX_ANCHORS_AS_ONE])
def test_cuts_of_random_graphs_are_in_an_order_that_can_be_run(
    first: int, anchors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In seed 2500 an op that only an output reads once came before the ops that it reads."""
    monkeypatch.setattr(regions_module, "MAX_ANCHORS_AS_ONE", anchors)
    for seed in (*range(first, first + 40), 2500):
        case = random_graphs.case(seed)
        spec = case.graph(case.tensors()).spec()
        can_be_run(spec)
        if case.trained:
            can_be_run(cg.differentiate(spec, grad.differentiable(spec)).backward)


def can_be_run(spec: GraphSpec) -> None:
    """Every step of every cut reads what is there by then."""
    graph = CutGraph(prepared(spec))
    there = set(graph.spec.inputs) | graph._numbers

    def check(group: Sequence[Node], there: set[str]) -> None:
        for finer in cuts(graph, group):
            made: set[str] = set()
            for part in finer:
                own = {name for node in part for name in node.results}
                assert {name for node in part for name in node.operands} <= there | made | own
                check(part, there | made)
                made |= own

    for group in regions(graph) or (compute_nodes(graph.spec.nodes),):
        check(group, there)
        there |= {name for node in group for name in node.results}


# -- random graphs ---------------------------------------------------------------------------------


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("conv", "conv_transpose", *UNARY, *BINARY, "bias", "shift", *MATRIX, "concat")
        ),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(steps=STEPS, extra=st.lists(st.integers(0, 99), max_size=3))
def test_every_way_to_run_a_random_graph_is_bitwise_the_whole(
    steps: list[tuple[str, int, int]], extra: list[int]
) -> None:
    spec = random_graph(steps, extra).spec()
    gen = torch.Generator().manual_seed(5)
    inputs = {
        name: torch.randn(spec.tensors[name].shape, generator=gen) / 4 for name in spec.inputs
    }
    expected = reference.run(spec, [inputs[name] for name in spec.inputs])
    for variant in rewritten(spec):
        for way in every_cutting(variant):
            assert sorted(n for step in way for n in names(step)) == sorted(names(variant))
            results = run_steps(variant, way, inputs)
            for name, want in zip(spec.outputs, expected, strict=True):
                assert torch.equal(results[name].nan_to_num(), want.nan_to_num())


@settings(max_examples=120, deadline=None)
@given(steps=STEPS, extra=st.lists(st.integers(0, 99), max_size=3))
def test_the_cuts_of_a_random_graph_are_what_they_are_called(
    steps: list[tuple[str, int, int]], extra: list[int]
) -> None:
    """From fused to op by op; anchors alone in the last but one, one to a step before."""
    graph = CutGraph(random_graph(steps, extra).spec())
    nodes = compute_nodes(graph.spec.nodes)
    found = cuts(graph, nodes)
    assert len(set(found)) == len(found) and all(len(groups) > 1 for groups in found)
    if len(nodes) == 1:
        assert found == ()
        return
    assert found[-1] == tuple((node,) for node in nodes)
    for groups in found:
        steps_made = pieces(graph, groups)
        assert sorted(n for step in steps_made for n in names(step)) == sorted(
            node.name for node in nodes
        )
        for step in steps_made:
            assert sum(not OPS[op].pointwise for op in ops(step)) <= 1 or len(found) == 1


def test_what_a_group_norm_multiplies_by_and_adds_is_never_rounded_to_16_bits() -> None:
    """Rounded, images far from 0 would move as a whole."""
    g = cg.Graph("norm")
    x = g.input("x", (2, 8, 4, 4), torch.float16, layout="channels_last")
    shift, factor = g.group_affine(x, 4)
    g.output("y", g.scale(g.bias(x, shift), factor))
    graph = CutGraph(prepared(g.spec()))
    names = graph.spec.nodes[0].results
    assert len(names) == 2
    assert {graph.crossing(name).dtype for name in names} == {torch.float32}
