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
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import GraphSpec, Node, contiguous_strides, is_channels_last, same_layout
from cudnngraph.ops.base import LOW_PRECISION
from cudnngraph.ops.table import OPS
from cudnngraph.partition import regions as regions_module
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import cuts, subgraph_of
from cudnngraph.partition.regions import regions
from cudnngraph.rewrite.channels_last import channels_last
from cudnngraph.rewrite.masks import align_masks, bool_masks_to_additive
from cudnngraph.rewrite.passes import prepared
from tests import numerics, random_graphs, thresholds
from tests.chunks import each_case
from tests.cuttings import every_cutting, every_way, pieces, rewritten
from tests.gradients import differentiable, floating_inputs, upstream
from tests.samples import Case, enumerate_cases, in_float64, make_inputs, torch_eager

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASES = enumerate_cases()


def names(spec: GraphSpec) -> list[str]:
    """The names of the nodes that do something; constants are copied freely."""
    return [node.name for node in compute_nodes(spec.nodes)]


def ops(spec: GraphSpec) -> list[str]:
    return [node.op for node in compute_nodes(spec.nodes)]


Done = dict[tuple[object, ...], tuple[GraphSpec, list[torch.Tensor], list[torch.Tensor]]]


def run_once(
    step: GraphSpec, inputs: list[torch.Tensor], dtype: torch.dtype | None, done: Done
) -> list[torch.Tensor]:
    """The step's results; from ``done`` where the same step had the very same tensors before."""
    key = (*(node.name for node in step.nodes), *map(id, inputs), dtype)
    if key not in done or done[key][0] != step:
        done[key] = step, inputs, reference.run(step, inputs, dtype)
    return done[key][2]


def run_steps(
    spec: GraphSpec,
    steps: Sequence[GraphSpec],
    inputs: dict[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    done: Done | None = None,
) -> dict[str, torch.Tensor]:
    """Run the steps in order, each on what is there by then; ``dtype`` as in reference.run.

    Ways to cut a graph have most steps in common: with a ``done`` of theirs each is run once.
    """
    values = dict(inputs)
    done = {} if done is None else done
    for step in steps:
        missing = set(step.inputs) - set(values)
        assert not missing, f"{step.name} is to run before {missing} is made"
        assert not set(step.outputs) & set(values), "a value is made twice"
        assert step.outputs, f"{step.name} hands nothing on"
        results = run_once(step, [values[name] for name in step.inputs], dtype, done)
        for name, result in zip(step.outputs, results, strict=True):
            if dtype is None:
                assert result.dtype == step.tensors[name].dtype
            values[name] = result
    return {name: values[name] for name in spec.outputs}


def same_roundings(spec: GraphSpec, steps: Sequence[GraphSpec]) -> bool:
    """Whether every value of the whole has the same dtype in the steps."""
    return all(
        name in spec.tensors and tensor.dtype == spec.tensors[name].dtype
        for step in steps
        for name, tensor in step.tensors.items()
    )


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
    """What only an output reads came ahead of what it reads itself, in seed 2500."""
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


# -- which cuts there are --------------------------------------------------------------------------


def block() -> cg.Graph:
    g = cg.Graph("block")
    x = g.input("x", (1, 16, 6, 6), F16, layout="channels_last")
    w = g.input("w", (16, 16, 3, 3), F16, layout="channels_last")
    z = g.input("z", (1, 16, 6, 6), F16, layout="channels_last")
    y = g.conv_bias_act(
        x, w, g.input("b", (16,), F16), residual=z, alpha2=0.5, padding=1, activation="silu"
    )
    g.output("y", y)
    return g


def cut_ops(spec: GraphSpec) -> list[list[list[str]]]:
    """The ops of the steps of each cut of a whole graph."""
    graph = CutGraph(spec)
    found = cuts(graph, compute_nodes(spec.nodes))
    return [[ops(step) for step in pieces(graph, groups)] for groups in found]


def test_ops_on_numbers_are_parted_from_those_on_tensors() -> None:
    g = cg.Graph("adamw")
    given = [g.input(name, (4096,), F32) for name in "pgmv"]
    made = g.adamw(*given, *(g.input(name, (1,), F32) for name in ("lr", "c1", "c2")))
    for name, value in zip(("p_", "m_", "v_"), made, strict=True):
        g.output(name, value)
    numbers, rest = cut_ops(g.spec())[0]
    assert sorted(numbers) == ["div", "mul", "mul", "mul", "sqrt", "sub"]
    assert len(rest) == 13


def test_one_anchor_is_parted_from_its_epilogue_and_then_op_by_op() -> None:
    assert cut_ops(block().spec()) == [
        [["conv"], ["mul", "add", "bias", "silu"]],
        [["conv"], ["mul"], ["add"], ["bias"], ["silu"]],
    ]
    conv, epilogue = every_cutting(block().spec())[1]
    assert (conv.inputs, conv.outputs) == (("x", "w"), ("conv",))
    assert (set(epilogue.inputs), epilogue.outputs) == ({"conv", "z", "b"}, ("y",))


def test_each_anchor_takes_what_follows_it_along_first() -> None:
    g = cg.Graph("g")
    x = g.input("x", (1, 8, 6, 6), F32)
    y = g.conv(x, g.input("w1", (8, 8, 1, 1), F32)).relu()
    y = g.conv(y * 2.0, g.input("w2", (8, 8, 1, 1), F32))
    g.output("y", y.sigmoid() + x)
    assert cut_ops(g.spec()) == [
        [["conv", "relu", "mul"], ["conv", "sigmoid", "add"]],
        [["conv"], ["relu", "mul"], ["conv"], ["sigmoid", "add"]],
        [["conv"], ["relu"], ["mul"], ["conv"], ["sigmoid"], ["add"]],
    ]


def two_branches() -> GraphSpec:
    g = cg.Graph("g")
    x, b = g.input("x", (1, 8, 6, 6), F32), g.input("b", (8,), F32)
    left = g.bias(g.conv(x, g.input("w1", (8, 8, 1, 1), F32)), b)
    right = g.tanh(g.conv(x, g.input("w2", (8, 8, 1, 1), F32)))
    g.output("y", g.relu(left + right))
    return g.spec()


def test_what_hangs_on_one_anchor_stays_with_it_or_waits_for_the_last() -> None:
    """Of two branches that are added, the first can finish alone or leave it to the sum's step."""
    own, late, apart, single = cut_ops(two_branches())
    assert own == [["conv", "bias"], ["conv", "tanh", "add", "relu"]]
    assert late == [["conv"], ["bias", "conv", "tanh", "add", "relu"]]
    assert apart == [["conv"], ["conv"], ["bias", "tanh", "add", "relu"]]
    assert single == [["conv"], ["bias"], ["conv"], ["tanh"], ["add"], ["relu"]]


def test_a_part_that_is_cut_again_gives_the_cuts_of_its_own_group() -> None:
    graph = CutGraph(two_branches())
    own = cuts(graph, compute_nodes(graph.spec.nodes))[0]
    below = [[node.op for node in group] for group in cuts(graph, own[1])[0]]
    assert below == [["conv"], ["tanh", "add", "relu"]]
    ways = every_way(graph, compute_nodes(graph.spec.nodes))
    assert len(ways) == len(set(ways)) > 6


def test_what_two_stages_need_is_made_for_the_first() -> None:
    g = cg.Graph("g")
    x = g.input("x", (1, 8, 6, 6), F32).relu()
    y = g.conv(x, g.input("w1", (8, 8, 1, 1), F32)) + x
    g.output("y", y)
    assert cut_ops(g.spec()) == [[["relu"], ["conv", "add"]], [["relu"], ["conv"], ["add"]]]


def test_branches_that_do_not_touch_are_steps_of_their_own() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (1, 8, 6, 6), F32), g.input("w", (8, 8, 1, 1), F32)
    g.output("a", g.conv(x, w).relu())
    g.output("b", g.tanh(g.input("u", (3,), F32)))
    g.output("c", g.exp(g.input("v", (5,), F32)))
    fused, apart, *_ = cut_ops(g.spec())
    assert sorted(fused) == [["conv", "relu"], ["exp"], ["tanh"]]
    assert sorted(apart) == [["conv"], ["exp"], ["relu"], ["tanh"]]


def test_a_copy_into_another_layout_is_a_step_of_its_own() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 8, 6, 6), F16)
    y = g.identity(g.relu(x))
    g.output("y", y, layout="channels_last")
    assert cut_ops(g.spec()) == [[["relu"], ["identity"]]]


def test_pointwise_ops_alone_are_cut_op_by_op() -> None:
    g = cg.Graph("g")
    g.output("y", (g.input("x", (4,), F32) * 3.0).relu())
    assert cut_ops(g.spec()) == [[["mul"], ["relu"]]]


def test_many_pointwise_ops_are_parted_where_the_least_crosses() -> None:
    g = cg.Graph("g")
    x, z = g.input("x", (8, 4), F32), g.input("z", (4,), F32)
    y = (x * z).relu().tanh()  # one tensor goes on from here, two from every other op in the middle
    g.output("y", (y.exp() + y).sigmoid() * x)
    (halves, singles) = cut_ops(g.spec())
    assert halves == [["mul", "relu", "tanh"], ["exp", "add", "sigmoid", "mul"]]
    assert singles == [[op] for half in halves for op in half]


def test_a_group_is_parted_where_operands_are_repeated_in_a_third_way() -> None:
    """The embedding of a diffusion model's block, behind a convolution and its bias."""
    g = cg.Graph("g")
    x, w = g.input("x", (2, 8, 6, 6), F16), g.input("w", (8, 8, 3, 3), F16)
    pixel, embedding = g.input("p", (2, 1, 6, 6), F16), g.input("t", (2, 8, 1, 1), F16)
    y = g.bias(g.conv(x, w, padding=1), g.input("b", (8,), F16)) * pixel
    g.output("y", g.silu(y + g.silu(embedding) * 2.0))
    by_pattern, *_ = cut_ops(g.spec())
    assert by_pattern == [["conv", "bias", "mul"], ["silu", "mul", "add", "silu"]]


def test_pointwise_ops_are_parted_by_what_they_repeat_too() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 6, 8), F32)
    y = x * g.input("v", (2, 1, 8), F32) + g.input("c", (8,), F32)
    g.output("y", g.relu(y))
    assert cut_ops(g.spec()) == [[["mul"], ["add", "relu"]], [["mul"], ["add"], ["relu"]]]


def test_what_only_an_output_reads_is_in_the_first_of_the_parts() -> None:
    g = cg.Graph("g")
    x, v = g.input("x", (2, 6, 8), F32), g.input("v", (2, 1, 8), F32)
    g.output("s", g.exp(v))
    g.output("y", x * v + g.input("c", (8,), F32))
    assert cut_ops(g.spec())[0] == [["exp", "mul"], ["add"]]


def test_a_single_op_does_not_fall_further() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (4,), F32) * 3.0)
    assert cut_ops(g.spec()) == []


# -- what a step is --------------------------------------------------------------------------------


def test_an_anchor_hands_on_the_dtype_of_its_data() -> None:
    spec = block().spec()
    assert spec.tensors["conv"].dtype == F32
    conv, epilogue = every_cutting(spec)[1]
    assert conv.tensors["conv"].dtype == epilogue.tensors["conv"].dtype == F16
    assert epilogue.tensors["add"].dtype == F32  # between pointwise ops nothing is rounded


def test_a_pointwise_op_hands_on_16_bits_where_they_hold_its_result() -> None:
    g = cg.Graph("g")
    x = g.input("x", (64,), F16)
    g.output("y", g.relu(g.log(g.exp(g.add(x, x)))))
    add, exp, log, relu = every_cutting(g.spec())[-1]
    assert add.tensors[add.outputs[0]].dtype == exp.tensors[exp.inputs[0]].dtype == F16
    assert exp.tensors[exp.outputs[0]].dtype == log.tensors[log.inputs[0]].dtype == F32
    assert log.tensors[log.outputs[0]].dtype == relu.tensors[relu.inputs[0]].dtype == F32


def test_data_in_float32_crosses_in_float32() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (1, 8, 6, 6), F32), g.input("w", (8, 8, 1, 1), F32)
    g.output("y", g.conv(x, w).relu())
    assert not CutGraph(g.spec()).passed


def test_what_reads_float32_data_beside_16_bit_data_hands_on_float32() -> None:
    g = cg.Graph("g")
    x, z = g.input("x", (2, 8, 6, 6), F16), g.input("z", (2, 8, 6, 6), F32)
    g.output("y", g.relu(g.tanh(x) + z), dtype=F16)
    spec = g.spec()
    assert {name: tensor.dtype for name, tensor in CutGraph(spec).passed.items()} == {"tanh": F16}


def test_views_of_a_wide_sum_that_is_an_output_stay_wide() -> None:
    g = cg.Graph("sum")
    total = g.reduction(g.input("x", (2, 3, 24, 40), F16, layout="channels_last"), (0, 2))
    total = g.permute(total, (1, 0))
    g.output("y", g.reshape(total, (120,)), dtype=torch.float32)
    assert not CutGraph(g.spec()).passed


def test_what_pointwise_ops_make_a_float32_output_of_crosses_in_float32() -> None:
    g = cg.Graph("g")
    x, z = g.input("x", (2, 8, 6, 6), F16), g.input("z", (2, 8, 6, 6), F16)
    w = g.input("w", (8, 8, 1, 1), F16)
    y = g.tanh(g.conv(x, w)) + g.exp(z)
    g.output("wide", g.relu(y), dtype=F32)
    g.output("narrow", g.conv(g.silu(x), w), dtype=F32)
    passed = CutGraph(g.spec()).passed
    assert {name: tensor.dtype for name, tensor in passed.items()} == {"silu": F16}


def test_the_products_of_a_dot_product_cross_in_float32() -> None:
    g = cg.Graph("g")
    x, z = g.input("x", (2, 8, 64), F16), g.input("z", (2, 8, 64), F16)
    g.output("rows", g.reduction(x * z, -1), dtype=F32)
    g.output("columns", g.reduction(g.mul(x, z, name="down"), 1), dtype=F32)
    both = g.mul(x, z, name="both")
    g.output("summed", g.reduction(both, 2), dtype=F32)
    g.output("kept", g.relu(both), dtype=F16)
    passed = CutGraph(g.spec()).passed
    assert {name: tensor.dtype for name, tensor in passed.items()} == {"down": F16, "both": F16}


def test_the_gradient_of_a_sink_of_one_row_is_within_the_bound_of_float64() -> None:
    """Its products of do and o, rounded to 16 bits between two plans, are not: they cancel."""
    (case,) = [case for case in enumerate_cases() if case.id == "sdpa-sink_decode-fp16"]
    gradient = cg.differentiate(case.build(), ["q", "k", "v", "sink"])
    inputs = make_inputs(case)
    saved = reference.run(gradient.forward, [inputs[name] for name in gradient.forward.inputs])
    known = {**inputs, **dict(zip(gradient.forward.outputs, saved, strict=True))}
    known |= {gradient.incoming[name]: grad for name, grad in upstream(gradient).items()}
    exact = reference.run(
        gradient.backward,
        [known[name] for name in gradient.backward.inputs],
        torch.float64,
    )[-1]
    for step in every_cutting(gradient.backward)[-1]:
        results = reference.run(step, [known[name] for name in step.inputs])
        known |= dict(zip(step.outputs, results, strict=True))
    assert gradient.backward.outputs[-1] == gradient.outgoing["sink"]
    numerics.check(known[gradient.outgoing["sink"]].half(), exact, F16, terms=64)


def test_a_vector_in_float32_makes_no_float32_of_an_image_in_16_bits() -> None:
    g = cg.Graph("g")
    x, b = g.input("x", (2, 8, 6, 6), BF16), g.input("b", (8,), F32)
    g.output("y", g.relu(g.bias(x, b)))
    (narrow,) = CutGraph(g.spec()).passed.values()
    assert narrow.dtype == BF16


def test_constants_go_with_the_op_that_uses_them() -> None:
    (scaled,) = [step for step in every_cutting(block().spec())[-1] if ops(step) == ["mul"]]
    assert [node.op for node in scaled.nodes] == ["constant", "mul"]
    assert scaled.inputs == ("z",)


def test_a_piece_is_the_same_whatever_the_order_of_its_nodes() -> None:
    graph = CutGraph(block().spec())
    nodes = compute_nodes(graph.spec.nodes)[1:]
    assert subgraph_of(graph, nodes) == subgraph_of(graph, nodes[::-1])


def test_all_nodes_are_the_graph_itself() -> None:
    graph = CutGraph(block().spec())
    assert subgraph_of(graph, compute_nodes(graph.spec.nodes)) is graph.spec


# -- rewrites --------------------------------------------------------------------------------------


def test_attentions_that_share_a_mask_share_no_converted_one() -> None:
    """Steps hand tensors on by name: the same name in two dtypes would be read as the wrong one."""
    g = cg.Graph("g")
    mask = g.input("mask", (1, 1, 8, 8), torch.bool)
    for number, dtype in enumerate((F16, BF16)):
        q = g.input(f"q{number}", (2, 4, 8, 8), dtype)
        g.output(f"o{number}", g.sdpa(q, q, q, mask))
    steps = every_cutting(bool_masks_to_additive(g.spec()))[-1]
    assert sorted(op for step in steps for op in ops(step)) == ["sdpa", "sdpa", "where", "where"]
    made = [name for step in steps for name in step.outputs]
    assert len(made) == len(set(made)) == 4


def test_attentions_of_one_dtype_share_a_converted_mask() -> None:
    g = cg.Graph("g")
    mask = g.input("mask", (3, 7, 7), torch.bool)
    for number in range(2):
        q = g.input(f"q{number}", (2, 3, 7, 8), F16)
        g.output(f"o{number}", g.sdpa(q, q, q, mask))
    spec = bool_masks_to_additive(g.spec())
    (convert,) = (node for node in spec.nodes if node.op == "where")
    made = spec.tensors[convert.results[0]]
    assert (made.dtype, made.stride) == (F16, (7 * 8, 8, 1))
    assert same_results(g.spec(), spec)


def same_results(spec: GraphSpec, other: GraphSpec) -> bool:
    """Whether two graphs of the same inputs give the same numbers."""
    torch.manual_seed(0)
    given = [
        torch.rand(t.shape) < 0.8 if t.dtype == torch.bool else torch.randn(t.shape).to(t.dtype)
        for t in (spec.tensors[name] for name in spec.inputs)
    ]
    results = zip(reference.run(spec, given), reference.run(other, given), strict=True)
    return all(torch.equal(*pair) for pair in results)


LARGE = (16, 16, 193, 8)  # over eight million scores


def with_masks(*kinds: tuple[tuple[int, ...], torch.dtype], width: int = 193) -> GraphSpec:
    """An attention by each of the masks, given by shape and dtype; rows ``width`` apart."""
    g = cg.Graph("g")
    q = g.input("q", LARGE, F16)
    for number, (shape, dtype) in enumerate(kinds):
        stride = contiguous_strides((*shape[:-1], width))
        mask = g.input(f"m{number}", shape, dtype, stride=stride)
        g.output(f"o{number}", g.sdpa(q, q, q, mask))
        g.output(f"p{number}", g.sdpa(q, q, q, mask, scale=1.0))
    return g.spec()


def test_masks_whose_rows_start_at_odd_elements_are_copied_once_each() -> None:
    spec = with_masks(((193, 193), F16), ((16, 1, 193, 193), F16), ((1, 16, 193, 193), F16))
    made = align_masks(spec)
    copies = [node for node in made.nodes if node.op == "identity"]
    assert [node.operands[0] for node in copies] == ["m0", "m1", "m2"]
    for node in copies:
        mask = made.tensors[node.results[0]]
        assert (mask.stride[-2:], mask.dtype) == ((200, 1), F16)
    assert {node.operands[3] for node in made.nodes if node.op == "sdpa"} == {
        node.results[0] for node in copies
    }
    assert ("identity",) in {tuple(ops(step)) for step in every_cutting(made)[-1]}


@pytest.mark.parametrize("dtype", [torch.bool, F16], ids=str)
def test_masks_are_aligned_where_the_data_are_made_by_the_graph(dtype: torch.dtype) -> None:
    """What it makes is declared float32, and handed on in 16 bits."""
    g = cg.Graph("g")
    x, mask = g.input("x", (16 * 193, 16 * 8), F16), g.input("mask", (193, 193), dtype)
    y = g.permute(g.reshape(g.relu(x), (16, 193, 16, 8)), (0, 2, 1, 3))
    g.output("o", g.sdpa(y, y, y, mask if dtype == torch.bool else g.add(mask, mask)))
    spec = canonical(g.spec())
    made = prepared(spec)
    (node,) = (node for node in made.nodes if node.op == "sdpa")
    read = CutGraph(made).crossing(node.operands[3])
    assert (read.dtype, read.stride) == (F16, (200, 1))
    assert same_results(spec, made)


def test_views_of_masks_that_are_aligned_are_left_as_they_are() -> None:
    g = cg.Graph("g")
    q, mask = g.input("q", LARGE, F16), g.input("mask", (193, 200), F16)
    g.output("o", g.sdpa(q, q, q, g.slice(mask, 1, 0, 193)))
    assert not [node for node in prepared(g.spec()).nodes if node.op == "identity"]


@pytest.mark.parametrize(
    "spec",
    [
        with_masks(((193, 193), F16), width=194),
        with_masks(((193, 193), F32)),
        with_masks(((16, 1, 1, 193), F16), width=194),
        with_masks(((1, 193), F16)),
        with_masks(((16, 16, 193, 193), F16)),
    ],
    ids=["even", "float32", "row", "one row", "of each image and head"],
)
def test_other_masks_are_left_as_they_are(spec: GraphSpec) -> None:
    assert align_masks(spec) is spec


def test_masks_of_little_attention_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    g = cg.Graph("g")
    q, mask = g.input("q", (2, 3, 7, 8), F16), g.input("m", (7, 7), F16)
    g.output("o", g.sdpa(q, q, q, mask))
    spec = g.spec()
    assert align_masks(spec) is spec
    thresholds.change(monkeypatch, mask_copy_min_scores=1)
    made = align_masks(spec)
    assert made is not spec
    assert same_results(spec, made)


def attention(dtype: torch.dtype, mask: torch.dtype | None) -> GraphSpec:
    g = cg.Graph("g")
    q, k, v = (g.input(name, (1, 2, 8, 16), dtype) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, None if mask is None else g.input("mask", (8, 8), mask)))
    return g.spec()


def test_a_boolean_mask_of_attention_becomes_an_additive_one() -> None:
    spec = bool_masks_to_additive(attention(F16, torch.bool))
    convert, attend = every_cutting(spec)[-1]
    assert ops(convert) == ["where"]
    assert ops(attend) == ["sdpa"]
    assert convert.inputs == ("mask",)
    assert set(attend.inputs) == {"q", "k", "v", *convert.outputs}
    given = torch.eye(8, dtype=torch.bool)
    (added,) = reference.run(convert, [given])
    assert added.dtype == F16
    assert torch.equal(added == 0, given)
    assert torch.equal(added == -torch.inf, ~given)


@pytest.mark.parametrize(
    ("dtype", "mask"), [(F16, None), (F16, F16), (BF16, BF16), (F32, torch.bool)], ids=str
)
def test_other_attention_is_left_as_it_is(dtype: torch.dtype, mask: torch.dtype | None) -> None:
    spec = attention(dtype, mask)
    assert bool_masks_to_additive(spec) is spec


def nchw(*, out: str = "contiguous") -> GraphSpec:
    g = cg.Graph("g")
    x, w = g.input("x", (2, 8, 6, 6), F16), g.input("w", (16, 8, 3, 3), F16)
    z = g.input("z", (2, 16, 4, 4), F16, layout="channels_last")
    y = g.bias(g.conv(x, w), g.input("b", (16,), F16)) + z
    g.output("y", y.relu(), layout=out)
    return g.spec()


def test_channels_last_copies_at_the_edges_and_nowhere_else() -> None:
    spec = nchw()
    last = channels_last(spec)
    for name in (*spec.inputs, *spec.outputs):
        assert last.tensors[name] == spec.tensors[name], "what the caller gives is as declared"
    copies = {node.operands[0]: node.results[0] for node in last.nodes if node.op == "identity"}
    assert copies == {"x": "x_last", "w": "w_last", "y_last": "y"}
    for node in last.nodes:
        for name in (*node.operands, *node.results) if node.op != "identity" else ():
            tensor = last.tensors[name]
            assert len(tensor.shape) != 4 or is_channels_last(tensor.shape, tensor.stride), name
    graph = CutGraph(last)
    assert all(graph.is_anchor(node) for node in last.nodes if node.op == "identity")


def test_an_output_that_lies_channels_last_is_not_copied() -> None:
    last = channels_last(nchw(out="channels_last"))
    assert {n.results[0] for n in last.nodes if n.op == "identity"} == {"x_last", "w_last"}


def test_an_intermediate_in_another_layout_is_laid_channels_last_without_a_copy() -> None:
    last = channels_last(nchw())
    for name in last.intermediates:
        tensor = last.tensors[name]
        assert is_channels_last(tensor.shape, tensor.stride)
    assert not any(
        same_layout(t.shape, t.stride, last.tensors[f"{name}_last"].stride)
        for name, t in last.tensors.items()
        if f"{name}_last" in last.tensors
    )


@pytest.mark.parametrize(
    "spec", [block().spec(), attention(F16, None)], ids=["lies_so_already", "no_convolution"]
)
def test_other_graphs_are_not_run_channels_last(spec: GraphSpec) -> None:
    assert channels_last(spec) is spec


def test_a_graph_with_another_anchor_is_not_run_channels_last() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (2, 8, 6, 6), F16), g.input("w", (8, 8, 1, 1), F16)
    g.output("y", g.matmul(g.conv(x, w), g.input("m", (6, 6), F16)))
    spec = g.spec()
    assert channels_last(spec) is spec


# -- random graphs ---------------------------------------------------------------------------------

UNARY = ("relu", "tanh", "neg", "sigmoid")
BINARY = ("add", "mul", "sub", "maximum")
MATRIX = ("matmul", "layer_norm", "rms_norm", "transpose")
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


def random_graph(steps: Sequence[tuple[str, int, int]], extra: Sequence[int]) -> cg.Graph:
    """One op per step on earlier values; the last value is an output, and so are ``extra`` ones."""
    g = cg.Graph("random")
    x, w, b = g.input("x", (1, 4, 3, 3), F32), g.input("w", (4, 4, 3, 3), F32), None
    gamma = g.input("gamma", (3, 3), F32)
    values = [x]
    for op, first, second in steps:
        a, c = values[first % len(values)], values[second % len(values)]
        if op in ("conv", "conv_transpose"):
            made = getattr(g, op)(a, w, padding=1)
        elif op == "bias":
            b = g.input("b", (4,), F32) if b is None else b
            made = g.bias(a, b)
        elif op == "shift":
            made = a + 0.5
        elif op.endswith("_norm"):
            made = getattr(g, op)(a, gamma, eps=0.1)
        elif op == "transpose":
            made = a.transpose(2, 3)
        elif op == "matmul":
            made = a @ c
        elif op == "concat":
            made = g.concat([a.slice(1, 0, 1 + first % 3), c.slice(1, 1 + first % 3)], 1)
        else:
            made = getattr(g, op)(a) if op in UNARY else getattr(g, op)(a, c)
        values.append(made)
    chosen = dict.fromkeys([len(values) - 1, *(1 + place % (len(values) - 1) for place in extra)])
    for place in chosen:
        g.output(f"out{place}", values[place])
    used = {o for _, value, _ in g._outputs for o in _reached(g, value.name)}
    for name in [name for name in g._inputs if name not in used]:
        del g._inputs[name]
    return g


def _reached(g: cg.Graph, name: str) -> set[str]:
    """Every value that ``name`` depends on."""
    producer = {result: node for node in g._nodes for result in node.results}
    seen, stack = set(), [name]
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            stack += producer[value].operands if value in producer else ()
    return seen


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
