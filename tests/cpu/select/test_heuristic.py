"""Selection without a GPU: a stand-in for the plan builder says yes or no, and the cuts follow."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Choice
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select import heuristic
from cudnngraph.select.decision import Selection
from cudnngraph.select.kernels import Kernels
from cudnngraph.select.rules import why_not_cudnn, why_split

F16, F32, F64 = torch.float16, torch.float32, torch.float64
POLICY = cg.Policy(allow_tf32=False)


def ops(spec: GraphSpec) -> tuple[str, ...]:
    return tuple(node.op for node in spec.nodes if node.op != "constant")


def builder(takes: Callable[[tuple[str, ...]], bool]) -> Any:
    """Builds a plan where ``takes`` says so; the first candidate of each is rejected."""

    def build(spec: GraphSpec) -> Any:
        kinds = ops(spec)
        if not takes(kinds):
            raise cg.NotSupported(f"graph '{spec.name}'", [f"no engine for {' '.join(kinds)}"])
        first, second = (Choice(engine, (("TILE", engine),)) for engine in (3, 4))
        outcomes = (
            Outcome(Candidate(0, first, "a"), False, "needs 99 bytes of workspace"),
            Outcome(Candidate(1, second, "b"), True, "", 64),
        )
        return SimpleNamespace(choice=second, workspace_bytes=64, verified=None), outcomes

    return build


def block() -> GraphSpec:
    g = cg.Graph("block")
    x, w = g.input("x", (1, 8, 6, 6), F16), g.input("w", (8, 8, 1, 1), F16)
    g.output("y", g.conv_bias_act(x, w, g.input("b", (8,), F16)))
    return g.spec()


def chosen(selection: Selection) -> list[tuple[tuple[str, ...], str]]:
    return [(ops(s.spec), "torch" if s.choice is None else "cuDNN") for s in selection.steps]


def test_a_graph_that_cudnn_takes_is_one_step() -> None:
    selection = heuristic.heuristic(block(), POLICY, builder(lambda kinds: True))
    assert chosen(selection) == [(("conv", "bias", "relu"), "cuDNN")]
    (step,) = selection.steps
    assert step.workspace_bytes == 64
    assert [(d.subject, d.accepted) for d in step.decisions] == [
        ("engine 3 (TILE=3)", False),
        ("engine 4 (TILE=4)", True),
    ]
    assert step.decisions[0].reason == "needs 99 bytes of workspace"
    assert selection.built[0] is not None


def test_a_refused_graph_is_cut_and_the_refusal_is_kept() -> None:
    selection = heuristic.heuristic(block(), POLICY, builder(lambda kinds: len(kinds) < 3))
    assert chosen(selection) == [(("conv",), "cuDNN"), (("bias", "relu"), "cuDNN")]
    first = selection.steps[0].decisions[0]
    assert (first.subject, first.accepted) == ("'block' as one plan", False)
    assert first.reason == "no engine for conv bias relu"


def test_an_op_that_cudnn_cannot_run_becomes_a_torch_step() -> None:
    takes = builder(lambda kinds: kinds in (("conv",), ("relu",)))
    selection = heuristic.heuristic(block(), POLICY, takes)
    assert chosen(selection) == [(("conv",), "cuDNN"), (("bias",), "torch"), (("relu",), "cuDNN")]
    assert [plan is None for plan in selection.built] == [False, True, False]
    reasons = [d.reason for d in selection.steps[1].decisions]
    assert reasons == ["no engine for bias relu", "no engine for bias"]


def test_nothing_is_ever_refused_for_good() -> None:
    selection = heuristic.heuristic(block(), POLICY, builder(lambda kinds: False))
    assert chosen(selection) == [((op,), "torch") for op in ("conv", "bias", "relu")]
    assert all(decision.reason for step in selection.steps for decision in step.decisions)


def test_fallback_error_raises_what_cudnn_said() -> None:
    policy = cg.Policy(allow_tf32=False, fallback="error")
    with pytest.raises(cg.NotSupported) as caught:
        heuristic.heuristic(block(), policy, builder(lambda kinds: False))
    assert caught.value.reasons == ("no engine for conv bias relu",)
    assert "cuDNN has no plan for graph 'block'" in str(caught.value)


@pytest.mark.parametrize("error", [KeyError, cg.CaptureError, ZeroDivisionError])
def test_only_a_refusal_makes_a_candidate_lose(error: type[Exception]) -> None:
    def build(spec: GraphSpec) -> Any:
        raise error("a mistake of ours")

    with pytest.raises(error, match="a mistake of ours"):
        heuristic.heuristic(block(), POLICY, build)


def one_relu(shape: tuple[int, ...], dtype: torch.dtype, **options: Any) -> GraphSpec:
    g = cg.Graph("g")
    g.output("y", g.input("x", shape, dtype, **options).relu())
    return g.spec()


# -- what is better run apart ----------------------------------------------------------------------

LAST = {"layout": "channels_last"}
DEPTHWISE = "an epilogue makes a depthwise convolution many times slower"
OVERLAP = "an epilogue slows a strided transposed convolution whose taps overlap"
TWO = "2 anchors (conv) in one plan are refused, or slow"
COMPUTED = "attention reads tensors, not results of the same plan"


def conv(groups: int, channels: int = 8, op: str = "conv", **options: Any) -> GraphSpec:
    """A convolution with a relu, kernel 3 × 3."""
    g = cg.Graph("g")
    shape = (8, 8 // groups, 3, 3) if op == "conv" else (channels, 8 // groups, 3, 3)
    x = g.input("x", (2, channels, 6, 6), F16, **LAST)
    w = g.input("w", shape, F16, **LAST)
    g.output("y", g.relu(getattr(g, op)(x, w, groups=groups, padding=1, **options)))
    return g.spec()


def kernel(size: tuple[int, int], stride: tuple[int, int]) -> GraphSpec:
    """A transposed convolution with a relu."""
    g = cg.Graph("g")
    x, w = g.input("x", (2, 8, 6, 6), F16, **LAST), g.input("w", (8, 8, *size), F16, **LAST)
    g.output("y", g.relu(g.conv_transpose(x, w, stride=stride)))
    return g.spec()


def two_convolutions() -> GraphSpec:
    g = cg.Graph("g")
    x, w = g.input("x", (2, 8, 6, 6), F16, **LAST), g.input("w", (8, 8, 1, 1), F16, **LAST)
    g.output("y", g.relu(g.conv(g.conv(x, w), w)))
    return g.spec()


def attention(*, scaled: bool = False, relu: bool = False) -> GraphSpec:
    """Attention; of a scaled q, or with a relu behind it."""
    g = cg.Graph("g")
    q, k, v = (g.input(name, (2, 4, 16, 16), F16) for name in "qkv")
    made = g.sdpa(q * 2.0 if scaled else q, k, v)
    g.output("o", g.relu(made) if relu else made)
    return g.spec()


def adamw(count: int) -> GraphSpec:
    g = cg.Graph("g")
    given = [g.input(name, (count,), F32) for name in "pgmv"]
    made = g.adamw(*given, *(g.input(name, (1,), F32) for name in "rst"))
    for name, value in zip("abc", made, strict=True):
        g.output(name, value)
    return g.spec()


def alone(spec: GraphSpec) -> GraphSpec:
    """The first op of a graph, as a graph."""
    first = next(node for node in spec.nodes if node.op != "constant")
    return spec.subgraph("alone", [first], list(first.results))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (conv(1), None),
        (conv(2), None),
        (conv(8), DEPTHWISE),
        (alone(conv(8)), None),
        (conv(8, op="conv_transpose"), DEPTHWISE),
        (conv(1, op="conv_transpose"), None),
        (kernel((3, 3), (2, 2)), OVERLAP),
        (kernel((4, 4), (2, 2)), OVERLAP),
        (kernel((2, 2), (2, 2)), None),
        (kernel((2, 3), (2, 2)), OVERLAP),
        (kernel((3, 3), (1, 1)), None),
        (kernel((1, 3), (1, 2)), OVERLAP),
        (alone(kernel((3, 3), (2, 2))), None),
        (two_convolutions(), TWO),
        (attention(), None),
        (attention(relu=True), None),
        (attention(scaled=True), COMPUTED),
        (attention(scaled=True, relu=True), COMPUTED),
        (one_relu((4,), F16), None),
        (adamw(1 << 24), None),
        (adamw(1 << 26), "6 ops on numbers would run for each of 67108864 elements"),
    ],
)
def test_what_is_better_run_apart(spec: GraphSpec, why: str | None) -> None:
    assert why_split(spec) == why


def test_what_is_better_run_apart_is_not_shown_to_cudnn_whole() -> None:
    asked: list[tuple[str, ...]] = []

    def takes(kinds: tuple[str, ...]) -> bool:
        asked.append(kinds)
        return True

    selection = heuristic.heuristic(conv(8), POLICY, builder(takes))
    assert chosen(selection) == [(("conv",), "cuDNN"), (("relu",), "cuDNN")]
    assert asked == [("conv",), ("relu",)]
    first = selection.steps[0].decisions[0]
    assert (first.subject, first.accepted, first.reason) == ("'g' as one plan", False, DEPTHWISE)


def test_who_wants_one_plan_or_none_gets_what_is_better_run_apart() -> None:
    policy = cg.Policy(allow_tf32=False, fallback="error")
    selection = heuristic.heuristic(conv(8), policy, builder(lambda kinds: True))
    assert chosen(selection) == [(("conv", "relu"), "cuDNN")]


def test_two_anchors_are_cut_into_the_coarsest_steps() -> None:
    selection = heuristic.heuristic(two_convolutions(), POLICY, builder(lambda kinds: True))
    assert chosen(selection) == [(("conv",), "cuDNN"), (("conv", "relu"), "cuDNN")]


def test_a_refused_step_of_a_cut_is_cut_again_and_the_others_are_not() -> None:
    selection = heuristic.heuristic(
        two_convolutions(), POLICY, builder(lambda kinds: kinds != ("conv", "relu"))
    )
    assert chosen(selection) == [((op,), "cuDNN") for op in ("conv", "conv", "relu")]


def test_a_boolean_mask_is_converted_in_a_step_before() -> None:
    g = cg.Graph("g")
    q, mask = g.input("q", (2, 4, 16, 16), F16), g.input("mask", (1, 1, 16, 16), torch.bool)
    g.output("o", g.sdpa(q, q, q, mask))
    selection = heuristic.heuristic(g.spec(), POLICY, builder(lambda kinds: True))
    assert chosen(selection) == [(("where",), "cuDNN"), (("sdpa",), "cuDNN")]
    assert selection.steps[0].decisions[0].reason == COMPUTED


# -- what cuDNN never sees -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (one_relu((4, 0, 2), F16), "a tensor is empty"),
        (one_relu((4,), F64), "cuDNN graphs have no float64"),
        (
            one_relu((2**16, 2**16), F16),
            "'x' spans 4294967296 elements, over 2^31 - 1",
        ),
        (
            one_relu((2, 8), F16, stride=(2**31, 1)),
            "'x' spans 2147483656 elements, over 2^31 - 1",
        ),
    ],
    ids=["empty", "float64", "large", "far_apart"],
)
def test_what_cudnn_must_not_see_is_one_torch_step(spec: GraphSpec, reason: str) -> None:
    def build(part: GraphSpec) -> Any:
        raise AssertionError("cuDNN was asked")

    selection = heuristic.heuristic(spec, POLICY, build)
    assert chosen(selection) == [(("relu",), "torch")]
    assert selection.steps[0].decisions[0].reason == reason


def test_float64_between_other_ops_is_torchs_and_they_are_not() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (16, 16), F16), g.input("w", (16, 16), F16)
    y = g.cast(x @ w, F64) * (1 / 3) + 1e5 - 1e5
    g.output("y", g.cast(y, F16) @ w)
    selection = heuristic.heuristic(
        g.spec(),
        POLICY,
        builder(lambda kinds: True),
        Kernels(132),
        lambda parts: ["none"] * len(parts),
    )
    by_cudnn = [kinds for kinds, runs_on in chosen(selection) if runs_on == "cuDNN"]
    assert [kinds for kinds in by_cudnn if "matmul" in kinds] == [("matmul",), ("matmul",)]
    for step in selection.steps:
        if any(tensor.dtype == F64 for tensor in step.spec.tensors.values()):
            assert step.choice is None, step.spec.name


def test_an_output_that_alone_is_too_large_is_found() -> None:
    g = cg.Graph("g")
    column, row = g.input("column", (2**16, 1), F16), g.input("row", (1, 2**16), F16)
    g.output("y", column + row)
    assert why_not_cudnn(g.spec()) == "'y' spans 4294967296 elements, over 2^31 - 1"


def test_a_tensor_of_the_largest_size_is_shown_to_cudnn() -> None:
    assert why_not_cudnn(one_relu((2**31 - 1,), F16)) is None
    assert why_not_cudnn(one_relu((2**31,), F16)) is not None
