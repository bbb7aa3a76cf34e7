"""Cuts by subject: which there are, and the dtypes of the tensors between their steps."""

from __future__ import annotations

import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import cuts, subgraph_of
from tests import numerics
from tests.cuttings import every_cutting, every_way
from tests.gradients import upstream
from tests.partitions import BF16, F16, F32, block, cut_ops, ops, two_branches
from tests.samples import enumerate_cases, make_inputs

# -- which cuts there are --------------------------------------------------------------------------


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


def test_what_hangs_on_one_anchor_stays_with_it_or_waits_for_the_last() -> None:
    """If two branches are added, the first can finish alone or leave its end to the sum's step."""
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


def test_a_product_beside_float32_reads_and_hands_on_float32() -> None:
    g = cg.Graph("g")
    x, v = g.input("x", (16, 32), BF16), g.input("v", (32,), F32)
    made = g.tanh(g.mul(x, v), name="made")
    product = g.matmul(made, g.input("w", (32, 8), F32), name="product")
    g.output("y", g.relu(product), dtype=BF16)
    g.output("z", g.relu(g.matmul(g.cast(made, BF16), g.input("u", (32, 8), BF16))), dtype=BF16)
    assert not {"made", "product"} & set(CutGraph(g.spec()).passed)


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
