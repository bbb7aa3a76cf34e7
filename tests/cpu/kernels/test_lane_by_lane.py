"""Kernels whose lanes go through branches of their own, run on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import lane_by_lane, row_kernels
from cudnngraph.kernels.rows import Schedule, rows_of
from tests import host_kernels

F16, F32 = torch.float16, torch.float32
DTYPES = (F16, torch.bfloat16, F32, torch.int64, torch.uint8)
Given = list[torch.Tensor]
Made = tuple[GraphSpec, Given, Given]  # the graph, its inputs, and what torch makes of these


def joined(seed: int) -> Made:
    """Tensors joined at any places, once or twice, in parts or turned around, and what is computed
    of that beside an operand that is not joined."""
    draw = random.Random(seed)
    dtype = draw.choice(DTYPES[:3])
    rank = draw.randint(1, 4)
    shape = [draw.randint(1, 5) for _ in range(rank)]
    last = rank == 4 and draw.random() < 0.5
    lies = {"layout": "channels_last"} if last else {}
    g, given = cg.Graph("joined"), list[torch.Tensor]()

    def new(extents: list[int]) -> tuple[cg.Value, torch.Tensor]:
        value = torch.randn(extents).to(dtype)
        given.append(value.contiguous(memory_format=torch.channels_last) if last else value)
        return g.input(f"x{len(given)}", tuple(extents), dtype, **lies), value

    value, tensor = new(shape)
    dims = [draw.randrange(rank) for _ in range(draw.randint(1, 2))]
    dims[0] = 1 if last else rank - 1
    for dim in dims:
        parts = [(value, tensor)]
        for _ in range(draw.randint(1, 2)):
            extents = list(value.shape)
            extents[dim] = draw.randint(1, 7)
            parts.insert(draw.randint(0, len(parts)), new(extents))
        if draw.random() < 0.3:
            parts = [(g.neg(part), -tensor) for part, tensor in parts]
        value = g.concat([part for part, _ in parts], dim)
        tensor = torch.cat([each for _, each in parts], dim)
        if draw.random() < 0.3 and tensor.shape[dim] > 2:
            start = draw.randint(1, tensor.shape[dim] - 1)
            value = g.slice(value, dim, start, tensor.shape[dim])
            tensor = tensor.narrow(dim, start, tensor.shape[dim] - start)
    missing = -tensor.shape[0] % 8  # rows, so that vectors are asked for
    if missing:
        more, beside = new([missing, *tensor.shape[1:]])
        value, tensor = g.concat([more, value], 0), torch.cat([beside, tensor])
    if draw.random() < 0.7:
        extents = [each if draw.random() < 0.7 else 1 for each in tensor.shape]
        other, beside = new(extents)
        value, tensor = g.maximum(value, other), torch.maximum(tensor, beside)
    outputs = [tensor]
    g.output("y", value, **lies)
    if draw.random() < 0.4:
        g.output("z", g.relu(value), dtype=F32, **lies)
        outputs.append(tensor.relu().float())
    return g.spec(), given, outputs


def padded(seed: int) -> Made:
    """Images with rows and columns of zeros around them."""
    draw = random.Random(seed)
    before, behind = draw.randint(0, 3), draw.randint(1, 3)
    side = 8 - (before + behind) % 8 + 8 * draw.randint(0, 1)
    x = torch.randn(2, 3, 5, side).to(torch.bfloat16)
    g = cg.Graph("padded")
    value, zero = g.input("x", x.shape, x.dtype), g.input("zero", (1, 1, 1, 1), x.dtype)
    for dim in (3, 2):
        edges = []
        for many in (before, behind):
            shape = list(value.shape)
            shape[dim] = many
            edges.append([g.expand(zero, tuple(shape))] if many else [])
        value = g.concat([*edges[0], value, *edges[1]], dim)
    g.output("y", value, dtype=x.dtype)
    given = [x, torch.zeros(1, 1, 1, 1, dtype=x.dtype)]
    return g.spec(), given, [torch.nn.functional.pad(x, (before, behind, before, behind))]


def run(made: Made, lanes: int, most_blocks: int = 0) -> str:
    """Run the kernel of so many lanes and compare; its text."""
    spec, given, wanted = made
    source = row_kernels.write(spec, Schedule(lanes, 32), None, most_blocks)
    named = dict(zip([f"x{n + 1}" for n in range(len(given))], given, strict=True))
    inputs = [named.get(name, each) for name, each in zip(spec.inputs, given, strict=True)]
    outs = [spec.tensors[name].empty(torch.device("cpu")) for name in spec.outputs]
    host_kernels.run(source, [*inputs, *outs])
    for out, want in zip(outs, wanted, strict=True):
        assert torch.equal(out, want.reshape(out.shape)), source.text
    return source.text


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_what_is_joined_anywhere(first: int) -> None:
    apart = 0
    for seed in range(first, first + 8):
        torch.manual_seed(seed)
        made = padded(seed) if seed % 8 == 7 else joined(seed)
        for lanes in (8, 2):
            if rows_of(made[0]).inner.extent % lanes == 0:
                apart += "first | j" in run(made, lanes, most_blocks=seed % 3)
    assert apart


def halves() -> Made:
    """Two parts of odd length, which only lanes of their own can tell apart."""
    given = [torch.randn(6, 13).half(), torch.randn(6, 11).half()]
    g = cg.Graph("halves")
    x = [g.input(f"x{n}", each.shape, F16) for n, each in enumerate(given, 1)]
    g.output("y", g.concat(x, 1))
    return g.spec(), given, [torch.cat(given, 1)]


def test_vectors_are_written_where_parts_have_odd_lengths() -> None:
    text = run(halves(), 8)
    assert "store<8>" in text and "first | j" in text


def test_what_is_too_long_to_unroll_is_written_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_by_lane, "MOST_LINES", 8)
    text = run(halves(), 8)
    assert "first | j" not in text and "store<" not in text.split("__global__")[1]
