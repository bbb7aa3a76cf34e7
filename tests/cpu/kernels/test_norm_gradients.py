"""Kernels of the gradients of batch norms behind a relu: what they read, and the numbers."""

from __future__ import annotations

import re

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.ahead import most_ahead, registers_kept
from cudnngraph.kernels.grid import grid_of, space_of
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.split import Split, split_for
from cudnngraph.kernels.tape import Read, Value
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics

BF16 = torch.bfloat16
LARGE = (64, 256, 56, 56)
SMALL = (4, 64, 12, 12)


def gradient(shape: tuple[int, ...], *, residual: bool, dtype: torch.dtype = BF16) -> GraphSpec:
    """The gradient of a batch norm with a relu; with a residual, whose gradient is a result."""
    g = cg.Graph("norm")
    dy, y, x = (g.input(name, shape, dtype, layout="channels_last") for name in ("dy", "y", "x"))
    if residual:
        dy = g.add(dy, g.input("other", shape, dtype, layout="channels_last"))
    dz = g.relu_backward(dy, y)
    vectors = [g.input(name, shape[1:2], torch.float32) for name in ("w", "mean", "inverse")]
    for name, value in zip(("dx", "dw", "db"), g.batch_norm_backward(dz, x, *vectors), strict=True):
        g.output(name, value)
    if residual:
        g.output("dz", dz)
    return g.spec()


def images_read(source: Source, spec: GraphSpec) -> list[set[str]]:
    """The images that each launch reads that reads any, in vectors of 16 bytes."""
    names, found = (*spec.inputs, *spec.outputs), []
    for text in re.split(r"extern \"C\"", source.text)[1:]:
        read = {names[int(at)] for at in re.findall(r"load<8>\(p(\d+) ", text)}
        found.append({name for name in read if len(spec.tensors[name].shape) == 4})
    return [each for each in found if each]


def test_a_gradient_that_is_written_beside_the_sums_is_what_the_next_launch_reads() -> None:
    spec = gradient(LARGE, residual=True)
    first, second = images_read(patterns.source(spec, patterns.by_rule(spec, 132)), spec)
    assert first == {"dy", "other", "y", "x"}
    assert second == {"dz", "x"}


def test_one_that_is_no_result_is_computed_again() -> None:
    spec = gradient(LARGE, residual=False)
    first, second = images_read(patterns.source(spec, patterns.by_rule(spec, 132)), spec)
    assert first == second == {"dy", "y", "x"}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("blocks", [8, 40])
def test_gradients_are_right(residual: bool, dtype: torch.dtype, blocks: int) -> None:
    spec = gradient(SMALL, residual=residual, dtype=dtype)
    choice = patterns.choice_of(Split(64, blocks, 8))
    inputs = random_inputs(spec, torch.device("cpu"))
    outs = [spec.tensors[name].empty("cpu").fill_(7) for name in spec.outputs]
    source = patterns.source(spec, choice)
    assert len(source.launches) > 1
    host_kernels.run(source, [*inputs, *outs])
    for out, want in zip(outs, reference.run(spec, inputs, torch.float64), strict=True):
        assert numerics.relative_error(out, want) <= numerics.bound(dtype, out.dtype)


@pytest.mark.parametrize("channels", [32, 64, 128, 256, 512])
def test_no_threads_stand_beside_the_channels(channels: int) -> None:
    spec = gradient((64, channels, 28, 28), residual=False)
    read: Value = Read(spec.tensors["x"].shape, spec.tensors["x"])
    split = split_for(132)
    found = grid_of(space_of(read, (0, 2, 3), 8), split.threads, split.blocks, split.columns)
    assert found.wide == min(channels // 8, split.columns)
    assert found.wide * found.deep == found.threads == split.threads


def test_steps_are_read_ahead_as_registers_for_four_blocks_allow() -> None:
    two, one = ["vec<bf16, 8> v1_0", "vec<bf16, 8> v2_0"], ["vec<bf16, 8> v1_0"]
    assert most_ahead(256, 8, 32, two, writes=True) == 1
    assert most_ahead(256, 8, 24, two, writes=False) == 2
    assert most_ahead(256, 8, 16, one, writes=False) == 4
    assert most_ahead(128, 8, 16, one, writes=False) == 12
    assert most_ahead(256, 8, 200, two, writes=True) == 1  # there is no loop without
    before = ["float v9[8];", "float v13;", "float v14[8];"]
    assert registers_kept(8, ["v1[j] = v9[j] * v13;"], before) == 8
