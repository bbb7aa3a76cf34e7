"""Kernels of several regions that have nothing to do with each other, run on the CPU."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import compile, patterns, pieces, source
from cudnngraph.kernels.cubin import resources
from cudnngraph.kernels.pieces import Pieces
from cudnngraph.kernels.tape import Refused
from cudnngraph.partition.analysis import compute_nodes
from tests import generated, host_kernels, numerics

F16, F32 = torch.float16, torch.float32
SHAPES = ((64, 32), (7,), (64, 32), (3, 5, 2), (1000,), (64, 32))


def optimizer(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> GraphSpec:
    """A step of AdamW for tensors of these shapes."""
    g = cg.Graph("optimizer")
    numbers = [g.input(name, (1,), F32) for name in ("lr", "c1", "c2")]
    for at, shape in enumerate(shapes):
        given = [g.input(f"{name}{at}", shape, F32) for name in "pgmv"]
        for name, made in zip("pmv", g.adamw(*given, *numbers), strict=True):
            g.output(f"{name}{at}_next", made)
    return g.spec()


def check(spec: GraphSpec, source: object) -> None:
    torch.manual_seed(0)
    inputs = [torch.rand(spec.tensors[name].shape) + 0.1 for name in spec.inputs]
    inputs = [t.to(spec.tensors[n].dtype) for t, n in zip(inputs, spec.inputs, strict=True)]
    outputs = [spec.tensors[name].empty(torch.device("cpu")) for name in spec.outputs]
    host_kernels.run(source, [*inputs, *outputs])  # type: ignore[arg-type]
    wanted = reference.run(spec, inputs, torch.float64)
    for name, out, want in zip(spec.outputs, outputs, wanted, strict=True):
        numerics.check(out, want, inputs[0].dtype, what=name)


def test_an_optimizer_is_one_launch_by_every_schedule() -> None:
    spec = optimizer()
    choices = patterns.choices(spec, 4)
    assert isinstance(patterns.schedule_of(choices[0]), Pieces) and len(choices) >= 3
    for choice in choices:
        source = patterns.source(spec, choice)
        assert len(source.launches) == 1
        check(spec, source)


def test_regions_that_are_alike_share_a_function() -> None:
    text = patterns.source(optimizer(), patterns.by_rule(optimizer(), 132)).text
    assert text.count("static __device__ __noinline__ void piece_") == 4
    assert text.count("    piece_0(q, block") == 3


def test_a_gpu_runs_an_optimizer_of_many_tensors_as_few_kernels() -> None:
    spec = optimizer(SHAPES * 14)
    steps = generated.selection(spec).steps
    assert [step.kind for step in steps] == ["kernel", "kernel"]
    assert sum(len(step.spec.outputs) for step in steps) == 3 * len(SHAPES) * 14
    assert max(len(s.spec.inputs) + len(s.spec.outputs) for s in steps) <= source.MOST_TENSORS


def test_what_shares_data_or_is_read_is_not_apart() -> None:
    g = cg.Graph("together")
    x, s = g.input("x", (8, 8), F16), g.input("s", (1,), F16)
    g.output("a", g.relu(x))
    g.output("b", g.mul(x, s))
    assert len(pieces.pieces_of(g.spec())) == 1
    z = g.input("z", (4,), F16)
    g.output("c", g.mul(z, s))
    spec = g.spec()
    groups = pieces.apart(compute_nodes(spec.nodes), spec.tensors)
    assert [[node.op for node in group] for group in groups] == [["relu", "mul"], ["mul"]]
    check(spec, patterns.source(spec, patterns.by_rule(spec, 4)))
    with pytest.raises(Refused, match="one region"):
        pieces.write(optimizer(SHAPES[:1]), Pieces(4, 256, 8))


def test_too_many_tensors_or_a_reduction_are_refused() -> None:
    with pytest.raises(Refused, match="of which a kernel takes 480"):
        pieces.write(optimizer(SHAPES * 14), Pieces(4, 256, 8))
    g = cg.Graph("sums")
    for name in "xz":
        g.output(f"{name}y", g.reduction(g.input(name, (8, 8), F32), 1, "sum"))
    with pytest.raises(Refused, match="a reduction among regions"):
        pieces.write(g.spec(), Pieces(4, 256, 8))


def test_it_compiles_without_spilling() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    spec = optimizer(((4096, 1024), (1024,), (4096, 1024), (77, 13)))
    source = patterns.source(spec, patterns.by_rule(spec, 132))
    assert resources(compile.cubin(source.text, 90)).local_bytes <= 8 * 10, "addresses alone"
