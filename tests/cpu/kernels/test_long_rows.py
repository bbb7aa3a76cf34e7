"""Softmax and losses over rows that registers do not hold as numbers: long ones, at any place.

Rows with NaN and infinities come out as torch's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.device.rules import changed
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.rows import rows_of, schedule_for
from cudnngraph.kernels.source import Source, own_part
from cudnngraph.kernels.tape import Refused
from tests import host_kernels, numerics

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PROCESSORS = 4
MANY = 132  # more than there are rows, which blocks share out then
ROWS = 5
#: Of whole vectors, and such that start at any element; some are kept in registers, others not.
EXTENTS = (36001, 40000, 50257, 66003)
OPS = ("softmax", "log_softmax", "cross_entropy", "in_parts", "scaled", "sum", "norm")
WITHOUT: tuple[Mapping[str, Any], ...] = (
    {"kernel_rows_online": False},
    {"kernel_rows_in_memory_form": False},
    {"kernel_rows_aligned": False},
    {"kernel_again_threads": 512, "kernel_once_threads": 1024},
)


def graph(op: str, extent: int, dtype: torch.dtype, rows: int = ROWS, step: int = 0) -> GraphSpec:
    """A graph of rows, which are ``step`` elements apart if that is given."""
    g = cg.Graph(op)
    x = g.input("x", (rows, extent), dtype, stride=(step or extent, 1))
    if op == "cross_entropy":
        g.output("y", g.cross_entropy(x, g.input("t", (rows,), torch.int64), "none"))
    elif op == "scaled":
        g.output("y", g.softmax(g.add(g.mul(x, 0.5), g.input("b", (extent,), F32)), 1), dtype=F32)
    elif op == "in_parts":
        wide = g.cast(x, F32)
        most = g.reduction(wide, 1, "max", True)
        shifted = g.sub(wide, most)
        total = g.reduction(g.exp(shifted), 1, "sum", True)
        for name, value in (("m", most), ("s", total), ("y", g.sub(shifted, g.log(total)))):
            g.output(name, value)
    elif op == "sum":
        g.output("y", g.reduction(x, 1, "sum"))
    elif op == "norm":
        y, inverse = g.rms_norm(x, g.input("w", (extent,), dtype), return_stats=True)
        for name, value in (("y", y), ("i", inverse)):
            g.output(name, value)
    else:
        g.output("y", getattr(g, op)(x, 1))
    return g.spec()


def tensors(spec: GraphSpec, seed: int) -> list[torch.Tensor]:
    """Rows of random numbers: plain ones, of -inf but for some, of -inf alone, with inf or NaN."""
    gen, made = torch.Generator().manual_seed(seed), []
    for tensor in (spec.tensors[name] for name in spec.inputs):
        if tensor.dtype == torch.int64:
            extent = spec.tensors["x"].shape[1]
            classes = torch.tensor([0, extent - 1, -100, 7, 5])
            made.append(classes.repeat(-(-tensor.numel // 5))[: tensor.numel])
            continue
        x = 3.0 * torch.randn(tensor.shape, generator=gen)
        if tensor.name == "x" and spec.nodes[-1].op not in ("reduction", "rms_norm"):
            at = torch.randint(x.shape[1], (3,), generator=gen)
            x[1::5] = -math.inf
            x[1::5, at] = torch.tensor([1.0, 2.0, -30.0])
            x[2::5] = -math.inf
            x[3::5, at[0]] = math.inf
            x[4::5, at[1]] = math.nan
        made.append(tensor.empty("cpu").copy_(x))
    return made


def run(spec: GraphSpec, source: Source, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a kernel makes, whichever thread runs first, between elements that it does not write."""
    found: list[list[torch.Tensor]] = []
    for backwards in (False, True):
        outputs, around = [], []
        for tensor in (spec.tensors[name] for name in spec.outputs):
            memory = torch.full((tensor.extent + 32,), 7.0).to(tensor.dtype)
            outputs.append(memory[16:-16].as_strided(tensor.shape, tensor.stride, 16))
            around.append(memory)
        host_kernels.run(source, [*inputs, *outputs], backwards=backwards)
        assert all(bool((each[:16] == 7).all() and (each[-16:] == 7).all()) for each in around)
        found.append(outputs)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    return found[0]


def ways(spec: GraphSpec) -> Iterator[tuple[str, Source]]:
    """The kernels of a graph by all rules, each once."""
    texts = set()
    for processors, values in ((PROCESSORS, {}), (MANY, {}), *((PROCESSORS, x) for x in WITHOUT)):
        with changed(**values):
            choice = patterns.by_rule(spec, processors)
            source = host_kernels.expect(patterns.source(spec, choice))
        if source.text not in texts:
            texts.add(source.text)
            yield f"{choice} by {values}", source


@pytest.mark.parametrize("dtype", (F16, BF16, F32), ids=str)
@pytest.mark.parametrize("op", OPS)
def test_long_rows_are_as_in_float64(op: str, dtype: torch.dtype) -> None:
    specs = [graph(op, extent, dtype) for extent in EXTENTS]
    specs.append(graph(op, 36001, dtype, step=36005))
    every = [(spec, list(ways(spec))) for spec in specs]
    for spec, some in every:
        inputs = tensors(spec, 1)
        exact = reference.run(spec, inputs, torch.float64)
        theirs = reference.run(spec, inputs)
        for how, source in some:
            for out, want, other in zip(run(spec, source, inputs), exact, theirs, strict=True):
                try:
                    numerics.check(out, want, dtype, other, terms=spec.tensors["x"].shape[1])
                except AssertionError as error:
                    raise AssertionError(f"{spec.tensors['x']} {how}: {error}") from None


def test_a_row_is_read_once_for_a_loss_and_twice_for_a_softmax() -> None:
    """As vectors, wherever it starts. What registers hold is read once for a softmax too."""
    for op, extent, loads in (
        ("cross_entropy", 50257, 1),
        ("in_parts", 128256, 2),
        ("softmax", 50304, 1),
        ("softmax", 50257, 1),
        ("softmax", 128256, 2),
        ("softmax", 128257, 2),
        ("log_softmax", 128257, 2),
    ):
        spec = graph(op, extent, BF16, rows=1024)
        text = own_part(patterns.source(spec, patterns.by_rule(spec, MANY)).text)
        assert len(re.findall(r"= load<[48]>\(p0 ", text)) == loads, (op, extent)


def test_what_is_read_along_a_row_alone_says_how_wide_vectors_are() -> None:
    """Not the classes of a loss, nor numbers of each row."""
    g = cg.Graph("loss")
    x, t = g.input("x", (64, 4096), BF16), g.input("t", (64,), torch.int64)
    g.output("y", g.cross_entropy(x, t, "none"))
    assert schedule_for(rows_of(g.spec()), PROCESSORS).lanes == 8
    g = cg.Graph("scaled")
    x, s = g.input("x", (64, 4096), BF16), g.input("s", (64, 1), F32)
    g.output("y", g.mul(x, s), dtype=BF16)
    assert schedule_for(rows_of(g.spec()), PROCESSORS).lanes == 8
    g = cg.Graph("biased")
    x, s = g.input("x", (64, 4096), BF16), g.input("s", (4096,), F32)
    g.output("y", g.mul(x, s), dtype=BF16)
    assert schedule_for(rows_of(g.spec()), PROCESSORS).lanes == 4


@pytest.mark.parametrize("seed", range(12))
def test_random_long_rows(seed: int) -> None:
    """Any schedule of rows of any length and place, several of a block too."""
    random = Random(seed)
    op, dtype = random.choice(OPS), random.choice((F16, BF16, F32))
    extent = random.choice((random.randrange(300, 3000), random.randrange(33000, 70000)))
    rows, step = random.choice((1, 3, 7, 10)), random.choice((0, extent, extent + 3))
    spec = graph(op, extent, dtype, rows, step)
    inputs = tensors(spec, seed)
    exact, theirs = reference.run(spec, inputs, torch.float64), reference.run(spec, inputs)
    values = random.choice(({}, *WITHOUT))
    with changed(**values):
        choices = patterns.choices(spec, PROCESSORS)
        some = [choices[0], *random.sample(choices[1:], min(4, len(choices) - 1))]
        lanes = 16 // max(2, dtype.itemsize)
        some += [
            Choice(some[0].engine, (("lanes", lanes), ("team", team), ("rows", 1), ("chunks", 0)))
            for team in (512, 1024)
        ]
        made = []
        for choice in some:
            try:
                made.append((choice, host_kernels.expect(patterns.source(spec, choice))))
            except (Refused, cg.errors.NotSupported):
                assert choice != some[0]
    for choice, source in made:
        for out, want, other in zip(run(spec, source, inputs), exact, theirs, strict=True):
            try:
                numerics.check(out, want, dtype, other, terms=extent)
            except AssertionError as error:
                raise AssertionError(f"{spec.tensors['x']} {choice} {values}: {error}") from None


def test_rows_with_ends_may_be_written_in_place() -> None:
    spec = graph("softmax", 50257, BF16)
    (x,) = tensors(spec, 3)
    for _, source in ways(spec):
        (wanted,) = run(spec, source, [x])
        for backwards in (False, True):
            both = x.clone()
            host_kernels.run(source, [both, both], backwards=backwards)
            torch.testing.assert_close(both, wanted, rtol=0, atol=0, equal_nan=True)
