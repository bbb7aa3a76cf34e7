"""Steps of a cut graph, run in order by the reference; graphs to cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import cuts
from tests.cuttings import pieces

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


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


def two_branches() -> GraphSpec:
    g = cg.Graph("g")
    x, b = g.input("x", (1, 8, 6, 6), F32), g.input("b", (8,), F32)
    left = g.bias(g.conv(x, g.input("w1", (8, 8, 1, 1), F32)), b)
    right = g.tanh(g.conv(x, g.input("w2", (8, 8, 1, 1), F32)))
    g.output("y", g.relu(left + right))
    return g.spec()


def same_results(spec: GraphSpec, other: GraphSpec) -> bool:
    """Whether two graphs of the same inputs give the same numbers."""
    torch.manual_seed(0)
    given = [
        torch.rand(t.shape) < 0.8 if t.dtype == torch.bool else torch.randn(t.shape).to(t.dtype)
        for t in (spec.tensors[name] for name in spec.inputs)
    ]
    results = zip(reference.run(spec, given), reference.run(other, given), strict=True)
    return all(torch.equal(*pair) for pair in results)


def attention(dtype: torch.dtype, mask: torch.dtype | None) -> GraphSpec:
    g = cg.Graph("g")
    q, k, v = (g.input(name, (1, 2, 8, 16), dtype) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, None if mask is None else g.input("mask", (8, 8), mask)))
    return g.spec()


UNARY = ("relu", "tanh", "neg", "sigmoid")
BINARY = ("add", "mul", "sub", "maximum")
MATRIX = ("matmul", "layer_norm", "rms_norm", "transpose")


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
