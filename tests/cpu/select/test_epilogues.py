"""Where a product is parted from what stands behind it: by the rule, and as it was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.device.rules import changed
from cudnngraph.ir import wire
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.rewrite.passes import legalize
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select import epilogues, heuristic
from cudnngraph.select.decision import Selection
from cudnngraph.select.epilogues import Apart, apart
from cudnngraph.select.kernels import Kernels
from cudnngraph.select.settled import APART, TORCH, NoPlan
from tests import blocks, generated, numerics, random_graphs
from tests.fakes import FakePlan, builder
from tests.scripts import loaded

RESULTS = Path(__file__).parents[3] / "docs" / "results"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
POLICY = cg.Policy(allow_tf32=False)
NEVER = dict.fromkeys(("product_epilogue_us_per_gflop", "product_residual_us_per_gflop"), 0.0)
ALWAYS = {**dict.fromkeys(NEVER, 1e9), "product_row_bytes": 1}


def way(spec: GraphSpec, kernels: Kernels | None = None, *, torch_too: bool = True) -> Apart | None:
    """How the graph, all of it, is parted."""
    graph = CutGraph(legalize(spec, POLICY))
    nodes = compute_nodes(graph.spec.nodes)
    return apart(graph, nodes, kernels or Kernels(132), torch_too=torch_too)


def ops(nodes: Sequence[Any]) -> list[str]:
    return [node.op for node in nodes]


def layer(
    rows: int = 8192,
    inner: int = 3072,
    columns: int = 768,
    dtype: torch.dtype = BF16,
    *,
    residual: torch.dtype | None = None,
    act: str = "",
) -> GraphSpec:
    g = cg.Graph("layer")
    x, w = g.input("x", (rows, inner), dtype), g.input("w", (inner, columns), dtype)
    y = g.add(g.matmul(x, w), g.input("b", (columns,), dtype))
    if residual is not None:
        y = g.add(y, g.input("r", (rows, columns), residual))
    g.output("y", getattr(g, act)(y) if act else y)
    return g.spec()


# -- as measured -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases() -> Iterator[ModuleType]:
    yield loaded(RESULTS / "product_ways.py")


def test_the_rule_takes_what_was_measured_to_be_faster(cases: ModuleType) -> None:
    """Beside one plan, on every product that was measured, with what stands behind it."""
    data = json.loads((RESULTS / "h200-products.json").read_text(encoding="utf-8"))
    times = {row["name"]: row["times"] for row in data["rows"]}
    ratios: dict[str, float] = {}
    best: list[float] = []
    for row in cases.ROWS:
        if not row.is_product or row.behind == "nothing":
            continue
        graph = CutGraph(legalize(row.spec(), POLICY))
        product, bias, rest = cases.parts(graph)
        pointwise, _ = cases.epilogue((*bias, *rest))
        found = apart(graph, (*product, *pointwise), Kernels(132), torch_too=True)
        taken = "heuristic"
        if found is not None:
            taken = "addmm | kernel" if found.by_torch else "anchor | kernel"
        us = times[row.name]
        ratios[row.name] = us[taken] / us["heuristic"]
        ways = ("heuristic", "anchor | kernel", "addmm | kernel")
        best.append(min(us[each] for each in ways if each in us) / us["heuristic"])
    assert len(ratios) > 50
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    possible = math.exp(sum(map(math.log, best)) / len(best))
    assert mean < 0.95 and mean < possible + 0.03
    assert max(ratios.values()) < 1.04, max(ratios, key=lambda name: ratios[name])
    assert sum(ratio < 0.97 for ratio in ratios.values()) >= 15


def test_sigmoids_are_parted_where_that_was_measured_to_be_faster() -> None:
    """Steps of models beside one plan each, those without a sigmoid among them."""
    data = json.loads((RESULTS / "h200-epilogues.json").read_text(encoding="utf-8"))
    ratios, parted = [], 0
    for row in data["rows"]:
        spec = wire.to_spec(row["spec"])
        graph = CutGraph(spec)
        found = apart(graph, compute_nodes(spec.nodes), Kernels(132), torch_too=True)
        ratios.append(row["apart"] / row["whole"] if found else 1.0)
        if found is not None:
            parted += 1
            assert "sigmoid" in ops(found.rest) and not found.by_torch
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert len(ratios) > 200 and parted >= 15
    assert mean < 0.97 and max(ratios) < 1.13


# -- the rule --------------------------------------------------------------------------------------


def test_a_long_product_with_a_residual_hands_on_to_a_kernel() -> None:
    found = way(layer(residual=BF16))
    assert found is not None and not found.by_torch and found.before == ()
    assert (ops(found.front), ops(found.rest)) == (["matmul"], ["add", "add"])
    assert found.reason == (
        "a plan compiled at run time would lose about 30.9 us on the product; "
        "a kernel behind it takes about 6.5 us more"
    )


@pytest.mark.parametrize(
    "spec",
    [
        layer(),
        layer(act="silu"),
        layer(act="gelu_tanh"),
        layer(64, residual=BF16),
        layer(8192, 64, residual=BF16),
        layer(dtype=F32, residual=F32),
        layer(residual=F32, dtype=F16, rows=16, inner=16, columns=16),
    ],
    ids=["bias", "silu", "gelu", "few rows", "short", "float32", "tiny"],
)
def test_other_products_stay_one_plan(spec: GraphSpec) -> None:
    assert way(spec) is None


def test_a_convolution_stays_one_plan() -> None:
    g = cg.Graph("conv")
    x = g.input("x", (32, 256, 56, 56), F16, layout="channels_last")
    w = g.input("w", (256, 256, 3, 3), F16, layout="channels_last")
    y = g.silu(g.bias(g.conv(x, w, padding=1), g.input("b", (256,), F16)))
    g.output("y", g.add(y, x))
    with changed(**ALWAYS):
        assert way(g.spec()) is None


def gate(channels: int, results: int = 240, side: int = 1, act: str = "sigmoid") -> GraphSpec:
    """A convolution of single pixels with a bias and an activation."""
    g = cg.Graph("gate")
    x = g.input("x", (32, channels, side, side), F16, layout="channels_last")
    w = g.input("w", (results, channels, 1, 1), F16, layout="channels_last")
    y = g.bias(g.conv(x, w), g.input("b", (results,), F16))
    g.output("y", getattr(g, act)(y))
    return g.spec()


def test_a_short_convolution_hands_its_sigmoid_to_a_kernel() -> None:
    found = way(gate(32))
    assert found is not None and found.before == () and not found.by_torch
    assert (ops(found.front), ops(found.rest)) == (["conv"], ["bias", "sigmoid"])
    assert found.reason == "a sigmoid would cost its plan about 3.5 us, a kernel 1.5 more"
    assert way(gate(33)) is None and way(gate(32, act="silu")) is None
    with changed(sigmoid_short_us=1.0):
        assert way(gate(32)) is None
    with changed(sigmoid_short_depth=16):
        assert way(gate(32)) is None


def test_a_large_result_hands_its_sigmoid_to_a_kernel() -> None:
    assert way(gate(128, 80, side=40)) is not None
    assert way(gate(128, 80, side=10)) is None
    with changed(sigmoid_us_per_million=0.1):
        assert way(gate(128, 80, side=40)) is None


def test_a_product_with_quick_gelu_hands_it_to_a_kernel() -> None:
    def quick(rows: int) -> GraphSpec:
        g = cg.Graph("quick")
        x, w = g.input("x", (rows, 512), F16), g.input("w", (512, 2048), F16)
        y = g.add(g.matmul(x, w), g.input("b", (2048,), F16))
        g.output("y", g.mul(y, g.sigmoid(g.mul(y, 1.702))))
        return g.spec()

    found = way(quick(2464))
    assert found is not None and "sigmoid" in ops(found.rest)
    assert ops(found.front) == ["matmul"]
    assert way(quick(256)) is None
    with changed(sigmoid_us_per_million=0.0):
        assert way(quick(2464)) is None


def test_each_number_of_the_rule_counts() -> None:
    spec, call = layer(residual=BF16), layer(8192, 4096, 4096, act="relu")
    assert way(spec) is not None and way(call) is not None
    for value in (
        {"product_residual_us_per_gflop": 0.1},
        {"kernel_bytes_per_us": 5e5},
        {"kernel_launch_us": 100.0},
    ):
        with changed(**value):
            assert way(spec) is None
    for value in ({"product_epilogue_us_per_gflop": 0.01}, {"product_start_us": 100.0}):
        with changed(**value):
            assert way(call) is None


def test_rows_at_odd_places_stay_one_plan() -> None:
    """A vocabulary of 30,522 words: cuBLASLt has no fast kernel for rows that begin anywhere."""
    assert way(layer(4096, 768, 30528)) is not None
    assert way(layer(4096, 768, 30522)) is None
    assert way(layer(8192, 3076, 768, residual=BF16)) is None


def test_a_norm_behind_saves_what_it_would_read() -> None:
    def graph(norm: bool) -> CutGraph:
        g = cg.Graph("sum")
        x, w = g.input("x", (512, 320), F16), g.input("w", (320, 320), F16)
        y = g.add(g.add(g.matmul(x, w), g.input("b", (320,), F16)), g.input("r", (512, 320), F16))
        g.output("sum", y)
        if norm:
            g.output("y", g.layer_norm(y, *(g.input(n, (320,), F16) for n in ("s", "t"))))
        return CutGraph(g.spec())

    for norm in (False, True):
        found = graph(norm)
        nodes = compute_nodes(found.spec.nodes)[:3]
        assert ops(nodes) == ["matmul", "add", "add"]
        with changed(product_residual_us_per_gflop=1.2):  # 0.13 us, less than a launch
            assert (apart(found, nodes, Kernels(132), torch_too=True) is not None) is norm


def test_a_large_layer_is_one_call_of_torch_where_that_may_be() -> None:
    spec = layer(8192, 4096, 4096, act="relu")
    found = way(spec)
    assert found is not None and found.by_torch and found.rest == ()
    assert ops(found.front) == ["matmul", "add", "relu"]
    found = way(spec, torch_too=False)
    assert found is not None and not found.by_torch and ops(found.rest) == ["add", "relu"]


def test_a_bias_is_cast_with_the_weights_where_those_are() -> None:
    graph = CutGraph(legalize(blocks.gpt_block().spec(), POLICY))
    nodes = {node.name: node for node in graph.spec.nodes}
    bias = next(n for n in nodes.values() if n.op == "cast" and n.operands == ("out_b",))
    product = next(n for n in nodes.values() if n.op == "matmul")
    add = next(n for n in nodes.values() if bias.results[0] in n.operands)
    group = tuple(sorted((bias, product, add), key=lambda node: graph.place[node.name]))
    found = apart(graph, group, Kernels(132), torch_too=True)
    assert found is not None and found.before == (bias,) and found.rest == ()
    assert set(found.front) == {product, add} and "cast with the weights" in found.reason

    g = cg.Graph("alone")  # its weight is not cast, so that the bias would be a kernel's only work
    x, w = g.input("x", (8192, 768), BF16), g.input("w", (768, 768), BF16)
    b = g.cast(g.input("b", (768,), F32), BF16)
    g.output("y", g.add(g.matmul(x, w), b), dtype=BF16)
    assert way(g.spec()) is None


# -- what the heuristics make of it ----------------------------------------------------------------


def chosen(
    spec: GraphSpec,
    kernel: str | None = None,
    policy: cg.Policy = POLICY,
    settled: heuristic.Settled = lambda spec: None,
) -> tuple[Selection, list[str]]:
    """The choice where cuDNN takes everything; ``kernel`` says why none can be had, "" none yet."""
    asked: list[str] = []

    def build(part: GraphSpec) -> Any:
        return builder()(part)

    def expect(parts: Any) -> None:
        asked.extend(" ".join(ops(compute_nodes(part.nodes))) for part in parts)

    def checked(parts: Sequence[tuple[GraphSpec, Choice]]) -> list[Any]:
        return [kernel or FakePlan(choice) for _, choice in parts]

    kernels = None if kernel == "" else Kernels(132)
    legal = legalize(spec, policy)
    builds = heuristic.Builds(build, expect, checked, settled=settled)
    made = heuristic.choose(legal, policy, builds, kernels)
    return made, asked


def steps(selection: Selection) -> list[tuple[str, str]]:
    return [(each.kind, " ".join(ops(compute_nodes(each.spec.nodes)))) for each in selection.steps]


def test_a_product_and_a_kernel_are_steps_and_the_reason_is_kept() -> None:
    made, _ = chosen(layer(residual=BF16))
    assert steps(made) == [("cudnn", "matmul"), ("kernel", "add add")]
    first = made.steps[0].decisions[0]
    assert not first.accepted and "compiled at run time" in first.reason


def as_settled(spec: GraphSpec, way: NoPlan) -> heuristic.Settled:
    """A choice by measurement knows the whole graph."""
    digest = step_digest(legalize(spec, POLICY))
    return lambda part: (way, "measured") if step_digest(part) == digest else None


def test_what_was_measured_is_followed_in_place_of_the_rule() -> None:
    whole, parted = layer(act="silu"), layer(residual=BF16)
    made, _ = chosen(whole, settled=as_settled(whole, APART))
    assert steps(made) == [("cudnn", "matmul"), ("kernel", "add silu")]
    assert made.steps[0].decisions[0].reason == "measured"
    for each in (whole, parted):
        made, _ = chosen(each, settled=as_settled(each, TORCH))
        assert [kind for kind, _ in steps(made)] == ["torch"]
        assert [d.reason for d in made.steps[0].decisions] == ["measured", heuristic.BY_TORCH]


def test_what_was_measured_of_the_product_alone_is_followed_where_it_is_apart() -> None:
    spec = layer(act="silu")
    first, product = as_settled(spec, APART), as_settled(bare(), TORCH)
    made, _ = chosen(spec, settled=lambda part: first(part) or product(part))
    assert steps(made) == [("torch", "matmul"), ("kernel", "add silu")]


def bare() -> GraphSpec:
    g = cg.Graph("bare")
    g.output("y", g.matmul(g.input("x", (8192, 3072), BF16), g.input("w", (3072, 768), BF16)))
    return g.spec()


def test_what_was_measured_is_followed_as_far_as_the_policy_and_kernels_let_it() -> None:
    spec, call = layer(act="silu"), layer(8192, 4096, 4096, act="relu")
    policy = cg.Policy(allow_tf32=False, deterministic=True)
    for way in (TORCH, APART):
        settled = as_settled(spec, way)
        assert steps(chosen(spec, "", settled=settled)[0]) == [("cudnn", "matmul add silu")]
    made, _ = chosen(spec, policy=policy, settled=as_settled(spec, TORCH))
    assert steps(made) == [("cudnn", "matmul add silu")]
    none = Kernels(132, "there is no NVRTC")
    graph = CutGraph(legalize(call, POLICY))
    nodes = compute_nodes(graph.spec.nodes)
    found = epilogues.as_settled(graph, nodes, none, APART, "measured", torch_too=True)
    assert found is not None and found.by_torch, "by the rule: there is no kernel"
    made, _ = chosen(spec, "it does not compile", settled=as_settled(spec, APART))
    assert steps(made) == [("cudnn", "matmul"), ("cudnn", "add silu")]


def test_without_kernels_nothing_is_parted() -> None:
    made, _ = chosen(layer(residual=BF16), "")
    assert steps(made) == [("cudnn", "matmul add add")]
    with changed(**NEVER):
        assert steps(chosen(layer(residual=BF16))[0]) == [("cudnn", "matmul add add")]


def test_where_no_kernel_can_be_generated_nothing_is_parted() -> None:
    none = Kernels(132, "there is no NVRTC")
    specs = (layer(residual=BF16), layer(8192, 4096, 4096, act="relu"), blocks.gpt_block().spec())
    for spec in specs:
        legal = legalize(spec, POLICY)
        without = heuristic.choose(legal, POLICY, heuristic.Builds(builder()))
        builds = heuristic.Builds(builder(), checked=lambda parts: [])
        made = heuristic.choose(legal, POLICY, builds, none)
        assert steps(made) == steps(without)


def test_a_kernel_that_is_refused_leaves_its_ops_to_a_plan() -> None:
    made, _ = chosen(layer(residual=BF16), "it does not compile")
    assert steps(made) == [("cudnn", "matmul"), ("cudnn", "add add")]
    assert any(d.reason == "it does not compile" for d in made.steps[1].decisions)


def test_torch_is_a_step_that_says_so() -> None:
    made, _ = chosen(layer(8192, 4096, 4096, act="relu"))
    assert steps(made) == [("torch", "matmul add relu")]
    assert made.built == (None,)
    assert [d.accepted for d in made.steps[0].decisions] == [False, True]
    assert made.steps[0].decisions[1].reason == heuristic.BY_TORCH
    policy = cg.Policy(allow_tf32=False, deterministic=True)
    made, _ = chosen(layer(8192, 4096, 4096, act="relu"), policy=policy)
    assert steps(made) == [("cudnn", "matmul"), ("kernel", "add relu")]


def test_only_plans_that_will_be_asked_for_are_built_ahead() -> None:
    made, asked = chosen(blocks.unet_block().spec())
    assert "matmul add add" not in asked and asked.count("matmul") == 4
    plans = [names for kind, names in steps(made) if kind == "cudnn"]
    assert sorted(asked) == sorted(plans)


# -- numbers ---------------------------------------------------------------------------------------


def test_a_sum_that_is_kept_in_another_shape_is_written_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Generated kernels, run on the CPU: the kept sum is a view of what the norm reads."""
    made = generated.install(monkeypatch)
    spec = blocks.gpt_block(2, 3, 32).spec()
    gen = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(spec.tensors[name].shape, generator=gen).to(spec.tensors[name].dtype)
        for name in spec.inputs
    }
    exe = compile_spec(spec, "cpu")
    with generated.by_reference():
        wanted = exe(**given)._asdict()
    found = exe(**given)._asdict()
    kernels = [" ".join(ops(compute_nodes(step.spec.nodes))) for step in made]
    assert sum("add reshape layer_norm" in each for each in kernels) == 2
    for name, each in found.items():
        if name not in ("middle", "norm2_mean", "norm2_inv_std"):
            each = each.to(BF16)  # behind what is rounded, which may fall on either side
        numerics.check(each, wanted[name].double(), each.dtype, terms=128, what=name)


@pytest.mark.parametrize("seeds", [range(at, at + 40) for at in (0, 40)], ids=str)
def test_random_graphs_whose_products_are_parted_compute_the_same(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, where a product is parted from whatever a kernel can run behind it; the
    reference stands in for the kernels."""
    generated.install(monkeypatch)
    parted: list[Apart] = []

    def told(*given: Any, **options: Any) -> Apart | None:
        found = apart(*given, **options)
        parted.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(epilogues, "apart", told)
    free = {"product_start_us": 0.0, "kernel_launch_us": 0.0, "kernel_bytes_per_us": 1 << 62}
    with changed(**ALWAYS, **free), generated.by_reference():
        cases = [random_graphs.case(seed) for seed in seeds]
        outcomes = {str(case): random_graphs.judge(case).outcome for case in cases}
    bad = [f"{case}\n  {outcome}" for case, outcome in outcomes.items() if outcome != "right"]
    assert not bad, "\n".join([f"{len(bad)} of {len(seeds)}", *bad])
    assert sum(bool(each.rest) for each in parted) >= 5


def gradient(*, wide: bool, sums: bool) -> tuple[CutGraph, Any]:
    """The gradient of a convolution with what a norm's gradient takes of it, and that part."""
    g = cg.Graph("gradient")
    dy = g.input("dy", (16, 64, 32, 32), BF16, layout="channels_last")
    w = g.input("w", (64, 64, 3, 3), BF16, layout="channels_last")
    x = g.input("x", (16, 64, 32, 32), F32 if wide else BF16, layout="channels_last")
    dx = g.conv_transpose(dy, w, padding=1)
    dx = g.cast(dx, F32) if wide else dx
    product = g.mul(dx, x)
    if sums:
        g.output("product", g.reduction(product, (0, 2, 3)))
        g.output("sum", g.reduction(dx, (0, 2, 3)))
    else:
        g.output("product", product)
    graph = CutGraph(legalize(g.spec(), POLICY))
    return graph, tuple(n for n in graph.spec.nodes if n.op in ("conv_transpose", "cast", "mul"))


@pytest.mark.parametrize("wide", [False, True])
def test_a_convolution_does_not_hand_on_what_a_kernel_would_not_write(wide: bool) -> None:
    graph, part = gradient(wide=wide, sums=True)
    found = apart(graph, part, Kernels(132), torch_too=False)
    assert found is not None and not found.by_torch and not found.before
    assert (ops(found.front), ops(found.rest)) == (["conv_transpose"], ["cast"] * wide + ["mul"])
    assert "a kernel of its epilogue" in found.reason and "bytes less" in found.reason


@pytest.mark.parametrize("wide", [False, True])
def test_other_epilogues_of_convolutions_are_in_their_plans(wide: bool) -> None:
    graph, part = gradient(wide=wide, sums=False)
    assert apart(graph, part, Kernels(132), torch_too=False) is None
    assert apart(graph, part, Kernels(132, "no compiler"), torch_too=False) is None


@pytest.mark.parametrize("op", ["conv", "conv_transpose"])
@pytest.mark.parametrize("kind", [BF16, F32])
def test_a_bias_is_cast_before_its_convolution(op: str, kind: torch.dtype) -> None:
    g = cg.Graph("biased")
    x = g.input("x", (16, 64, 32, 32), BF16, layout="channels_last")
    w = g.input("w", (64, 64, 3, 3), BF16, layout="channels_last")
    b = g.input("b", (64,), kind)
    y = g.bias(getattr(g, op)(x, w, padding=1), g.cast(b, BF16) if kind == F32 else b)
    g.output("y", g.relu(y))
    found = way(g.spec())
    if kind == BF16:
        assert found is None
    else:
        assert found is not None and not found.by_torch
        assert (ops(found.before), ops(found.rest)) == (["cast"], [])
        assert set(ops(found.front)) == {op, "bias", "relu"} and "is cast before" in found.reason


def test_a_bias_that_is_cast_for_a_convolution_in_float32_stays_in_its_plan() -> None:
    g = cg.Graph("biased")
    x, w = g.input("x", (16, 64, 32, 32), F32), g.input("w", (64, 64, 3, 3), F32)
    g.output("y", g.bias(g.conv(x, w, padding=1), g.cast(g.input("b", (64,), BF16), F32)))
    assert way(g.spec()) is None
