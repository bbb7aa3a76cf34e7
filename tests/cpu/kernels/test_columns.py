"""Functions of rows that reduce columns in the same pass: gradients of norms with biases beside."""

from __future__ import annotations

import random

import pytest
import torch

import cudnngraph as cg
from cudnngraph.device import rules as thresholds
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns, split
from cudnngraph.kernels.columns import (
    COLUMN_BYTES,
    most_of_thread,
    registers_of,
    schedule_of,
)
from cudnngraph.kernels.rows import (
    MOST_REGISTERS,
    MOST_THREADS,
    WARP,
    rows_of_values,
    schedule_for,
    tape_of,
)
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.split import Split, variants
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics

CPU = torch.device("cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def gradient(
    shape: tuple[int, ...],
    dtype: torch.dtype = BF16,
    *,
    norm: str = "layer_norm",
    residual: bool = True,
    bias: bool = True,
) -> GraphSpec:
    """The gradient of a norm over the last dim, with a residual's added and summed over rows."""
    g = cg.Graph("gradient")
    width, vector = shape[-1], (*shape[:-1], 1)
    dy, x = (g.input(name, shape, dtype) for name in ("dy", "x"))
    weight, inverse = g.input("weight", (width,), F32), g.input("inverse", vector, F32)
    if norm == "layer_norm":
        middle = g.input("mean", vector, F32)
        dx, *vectors = g.layer_norm_backward(dy, x, weight, middle, inverse)
    else:
        dx, *vectors = g.rms_norm_backward(dy, x, weight, inverse)
    if residual:
        dx = g.add(dx, g.input("other", shape, dtype))
    g.output("dx", dx)
    for name, value in zip(("dweight", "dbias"), vectors, strict=False):
        g.output(name, value)
    if bias:
        rows = g.reshape(dx, (-1, width)) if len(shape) == 2 else dx
        g.output("sums", g.reduction(rows, tuple(range(len(shape) - 1)), "sum"))
    return g.spec()


def written(spec: GraphSpec, processors: int = 4, *, together: bool = True) -> Source:
    """The kernel by rule, of one pass for rows and columns or of one for each."""
    with thresholds.changed(kernel_columns_with_rows=together):
        return patterns.source(spec, patterns.by_rule(spec, processors))


def check(spec: GraphSpec, source: Source) -> None:
    """Run a kernel on the host, and compare its results with those in float64."""
    inputs = random_inputs(spec, CPU)
    outs = [spec.tensors[name].empty("cpu").fill_(7) for name in spec.outputs]
    host_kernels.run(source, [*inputs, *outs])
    terms = max(tensor.numel for tensor in spec.tensors.values())
    for out, want in zip(outs, reference.run(spec, inputs, torch.float64), strict=True):
        dtype = spec.tensors[spec.inputs[0]].dtype
        numerics.check(out, want, dtype, terms=terms)


@pytest.mark.parametrize("seed", range(24))
def test_rows_and_columns_are_right(seed: int) -> None:
    number = random.Random(seed)
    width = number.choice((8, 24, 40, 96, 256, 768))
    lead = number.choice(((37,), (64,), (3, 19), (2, 4, 9)))
    spec = gradient(
        (*lead, width),
        number.choice((F32, F16, BF16)),
        norm=number.choice(("layer_norm", "rms_norm")),
        residual=number.random() < 0.6,
        bias=number.random() < 0.6,
    )
    source = written(spec, number.choice((1, 3, 132)))
    check(spec, source)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("bias", [False, True])
def test_tensors_are_read_once(norm: str, bias: bool) -> None:
    spec = gradient((8, 1024, 768), norm=norm, bias=bias)
    source = written(spec, 132)
    assert len(source.launches) == 3, "one that reads, two that put partial results together"
    first = source.text.split('extern "C"')[1]
    large = [at for at, name in enumerate(spec.inputs) if spec.tensors[name].numel > 1 << 20]
    assert [first.count(f"load<8>(p{at} ") for at in large] == [1] * len(large) == [1, 1, 1]


def test_a_threshold_says_whether_there_is_a_pass_of_each() -> None:
    spec = gradient((64, 96))
    apart, together = written(spec, together=False), written(spec)
    assert len(apart.launches) > len(together.launches) == 2
    check(spec, apart)


def test_a_block_goes_through_rows_that_are_no_multiple_of_its_own() -> None:
    spec = gradient((1000, 96))
    source = written(spec, 2)
    first = source.launches[0]
    assert first.blocks * 4 < 1000 and 1000 % (first.blocks * 4)
    check(spec, source)


@pytest.mark.parametrize("threads", [128, 256, 512])
@pytest.mark.parametrize("columns", [1, 3, 6])
@pytest.mark.parametrize("width", [96, 768, 1024, 1280, 4096, 8192, 1 << 15])
def test_what_is_planned_fits_a_block(width: int, columns: int, threads: int) -> None:
    spec = gradient((4096, width), residual=False, bias=False)
    dx, tensor = tape_of(spec)[0], spec.tensors["dx"]
    rows = rows_of_values([dx], [tensor])
    planned = schedule_of(rows, schedule_for(rows, 132), columns, threads)
    if planned is None:
        assert width > 4096 or threads > 256, "registers or shared memory do not hold such rows"
        return
    assert planned.chunks * planned.team * planned.lanes >= width
    assert registers_of(planned, columns) <= most_of_thread(threads)
    assert planned.threads * registers_of(planned, columns) <= MOST_REGISTERS
    assert 4 * planned.rows * width <= COLUMN_BYTES
    assert planned.threads % WARP == 0 and planned.threads <= MOST_THREADS


def test_more_threads_share_a_row_where_blocks_should_have_more() -> None:
    """A choice that is measured: fewer registers of each thread, and more warps at a time."""
    spec = gradient((200, 768))
    by_rule, wide = Split(256, 528, 32), Split(512, 528, 32)
    assert wide in variants(by_rule)
    blocks = [split.write(spec, each).launches[0].blocks for each in (by_rule, wide)]
    assert blocks == [50, 100], "blocks of four warps have four rows, then two"
    for each in (by_rule, wide):
        check(spec, split.write(spec, each))


def test_rows_that_no_registers_hold_have_a_pass_of_each() -> None:
    assert len(written(gradient((16, 1 << 14)), 2).launches) > 2


def test_columns_of_some_rows_are_reduced_apart() -> None:
    """The mean of each image's rows is no number of all rows."""
    g = cg.Graph("apart")
    x = g.input("x", (4, 16, 96), BF16)
    y = g.layer_norm(x, g.input("w", (96,), F32))
    g.output("y", y)
    g.output("means", g.reduction(y, (1,), "mean"))
    source = written(g.spec())
    check(g.spec(), source)
