"""Cuts of a graph: every level computes what the whole does, in an order that can be run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph import reference
from cudnngraph.ir import GraphSpec
from cudnngraph.ops import OPS
from cudnngraph.partition import split
from tests import numerics
from tests.samples import Case, enumerate_cases, in_float64, make_inputs, torch_eager

F16, F32 = torch.float16, torch.float32
Pieces = tuple[GraphSpec, ...]


def whole(spec: GraphSpec) -> Pieces:
    return (spec,)


def once(spec: GraphSpec) -> Pieces:
    return split(spec) or (spec,)


def fully(spec: GraphSpec) -> Pieces:
    pieces = split(spec)
    return (spec,) if pieces is None else tuple(one for piece in pieces for one in fully(piece))


LEVELS: tuple[Callable[[GraphSpec], Pieces], ...] = (whole, once, fully)


def work(spec: GraphSpec) -> list[str]:
    """The names of the nodes that do something; constants are copied freely."""
    return [node.name for node in spec.nodes if node.op != "constant"]


def run_pieces(
    spec: GraphSpec, pieces: Sequence[GraphSpec], inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run the pieces in order, each on what is there by then."""
    values = dict(inputs)
    for piece in pieces:
        missing = set(piece.inputs) - set(values)
        assert not missing, f"{piece.name} is to run before {missing} is made"
        assert not set(piece.outputs) & set(values), "a value is made twice"
        assert piece.outputs, f"{piece.name} hands nothing on"
        results = reference.run(piece, [values[name] for name in piece.inputs])
        for name, result in zip(piece.outputs, results, strict=True):
            assert result.dtype == piece.tensors[name].dtype
            values[name] = result
    return {name: values[name] for name in spec.outputs}


def same_roundings(spec: GraphSpec, pieces: Sequence[GraphSpec]) -> bool:
    """Whether every value of the whole has the same dtype in the pieces."""
    return all(
        name in spec.tensors and tensor.dtype == spec.tensors[name].dtype
        for piece in pieces
        for name, tensor in piece.tensors.items()
    )


@pytest.mark.parametrize("case", enumerate_cases(), ids=str)
def test_every_cut_of_a_sample_computes_what_the_whole_does(case: Case) -> None:
    spec, inputs = case.build().spec(), make_inputs(case)
    expected = reference.run(spec, [inputs[name] for name in spec.inputs])
    yardstick = torch_eager(case, in_float64(inputs))
    for level in (once, fully):
        pieces = level(spec)
        results = run_pieces(spec, pieces, inputs)
        exact = same_roundings(spec, pieces)
        for name, want in zip(spec.outputs, expected, strict=True):
            if exact:
                assert torch.equal(results[name], want), f"{level.__name__}: {name}"
            else:
                # Anchors hand on 16 bits then: no output is better than that, float32 ones too.
                narrow = results[name].to(case.dtype)
                numerics.check(narrow, yardstick[name], case.dtype, what=name)


@pytest.mark.parametrize("case", enumerate_cases(), ids=str)
def test_every_cut_of_a_sample_does_every_op_once(case: Case) -> None:
    spec = case.build().spec()
    for level in (once, fully):
        done = [name for piece in level(spec) for name in work(piece)]
        assert len(done) == len(set(done))
        assert set(done) - {"mask"} == set(work(spec))


@pytest.mark.parametrize("case", enumerate_cases(), ids=str)
def test_a_full_cut_leaves_one_op_a_piece(case: Case) -> None:
    for piece in fully(case.build().spec()):
        assert len(work(piece)) == 1
        assert split(piece) is None


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


def ops(piece: GraphSpec) -> list[str]:
    return [node.op for node in piece.nodes if node.op != "constant"]


def test_the_first_cut_parts_an_anchor_from_its_epilogue() -> None:
    pieces = once(block().spec())
    assert [ops(piece) for piece in pieces] == [["conv"], ["mul", "add", "bias", "silu"]]
    assert pieces[0].inputs == ("x", "w")
    assert pieces[0].outputs == ("conv",)
    assert set(pieces[1].inputs) == {"conv", "z", "b"}
    assert pieces[1].outputs == ("y",)


def test_an_anchor_hands_on_the_dtype_of_its_data() -> None:
    spec = block().spec()
    assert spec.tensors["conv"].dtype == F32
    conv, epilogue = once(spec)
    assert conv.tensors["conv"].dtype == epilogue.tensors["conv"].dtype == F16
    assert epilogue.tensors["add"].dtype == F32  # between pointwise ops nothing is rounded


def test_constants_go_with_the_op_that_uses_them() -> None:
    pieces = fully(block().spec())
    (scaled,) = [piece for piece in pieces if ops(piece) == ["mul"]]
    assert [node.op for node in scaled.nodes] == ["constant", "mul"]
    assert scaled.inputs == ("z",)


def test_pointwise_ops_between_two_anchors_are_one_piece() -> None:
    g = cg.Graph("g")
    x = g.input("x", (1, 8, 6, 6), F32)
    y = g.conv(x, g.input("w1", (8, 8, 1, 1), F32)).relu()
    y = g.conv(y * 2.0, g.input("w2", (8, 8, 1, 1), F32))
    g.output("y", y.sigmoid() + x)
    pieces = once(g.spec())
    assert [ops(piece) for piece in pieces] == [
        ["conv"],
        ["relu", "mul"],
        ["conv"],
        ["sigmoid", "add"],
    ]


def test_what_two_stages_need_is_made_for_the_first() -> None:
    g = cg.Graph("g")
    x = g.input("x", (1, 8, 6, 6), F32).relu()
    y = g.conv(x, g.input("w1", (8, 8, 1, 1), F32)) + x
    g.output("y", y)
    assert [ops(piece) for piece in once(g.spec())] == [["relu"], ["conv"], ["add"]]


def test_branches_that_do_not_touch_are_pieces_of_their_own() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (1, 8, 6, 6), F32), g.input("w", (8, 8, 1, 1), F32)
    g.output("a", g.conv(x, w).relu())
    g.output("b", g.tanh(g.input("u", (3,), F32)))
    g.output("c", g.exp(g.input("v", (5,), F32)))
    assert sorted(ops(piece) for piece in once(g.spec())) == [["conv"], ["exp"], ["relu"], ["tanh"]]


def test_attentions_that_share_a_mask_share_no_converted_one() -> None:
    """Steps hand tensors on by name: the same name in two dtypes would be read as the wrong one."""
    g = cg.Graph("g")
    mask = g.input("mask", (1, 1, 8, 8), torch.bool)
    for number, dtype in enumerate((torch.float16, torch.bfloat16)):
        q = g.input(f"q{number}", (2, 4, 8, 8), dtype)
        g.output(f"o{number}", g.sdpa(q, q, q, mask))
    pieces = [step for piece in split(g.spec()) or () for step in split(piece) or ()]
    assert len(pieces) == 4
    made = [name for piece in pieces for name in piece.outputs]
    assert len(made) == len(set(made))


def test_a_boolean_mask_of_attention_becomes_an_additive_one() -> None:
    g = cg.Graph("g")
    q, k, v = (g.input(name, (1, 2, 8, 16), F16) for name in "qkv")
    mask = g.input("mask", (8, 8), torch.bool)
    g.output("o", g.sdpa(q, k, v, mask))
    convert, attend = once(g.spec())
    assert ops(convert) == ["where"]
    assert ops(attend) == ["sdpa"]
    assert convert.inputs == ("mask",)
    assert set(attend.inputs) == {"q", "k", "v", *convert.outputs}
    given = torch.eye(8, dtype=torch.bool)
    (added,) = reference.run(convert, [given])
    assert torch.equal(added == 0, given)
    assert torch.equal(added == -torch.inf, ~given)


def test_a_single_op_does_not_fall_further() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (4,), F32) * 3.0)
    assert split(g.spec()) is None


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


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, extra=st.lists(st.integers(0, 99), max_size=3))
def test_every_cut_of_a_random_graph_is_bitwise_the_whole(
    steps: list[tuple[str, int, int]], extra: list[int]
) -> None:
    spec = random_graph(steps, extra).spec()
    gen = torch.Generator().manual_seed(5)
    inputs = {
        name: torch.randn(spec.tensors[name].shape, generator=gen) / 4 for name in spec.inputs
    }
    expected = reference.run(spec, [inputs[name] for name in spec.inputs])
    for level in LEVELS:
        pieces = level(spec)
        assert sorted(n for piece in pieces for n in work(piece)) == sorted(work(spec))
        results = run_pieces(spec, pieces, inputs)
        for name, want in zip(spec.outputs, expected, strict=True):
            assert torch.equal(results[name].nan_to_num(), want.nan_to_num())
    for piece in once(spec):
        anchors = [op for op in ops(piece) if not OPS[op].pointwise]
        assert not anchors or ops(piece) == anchors[:1], "an anchor stands alone after one cut"
