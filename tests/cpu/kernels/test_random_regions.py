"""Kernels of random regions of whole numbers, by several schedules: right to the bit.

``RANDOM_GRAPHS=500 RANDOM_FIRST=1000`` tries so many, from that seed on.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.tape import Refused
from tests import exact_regions, generated, host_kernels
from tests.exact_regions import BLANK

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_GRAPHS", "80"))
PART = 40
PARTS = [range(at, min(FIRST + COUNT, at + PART)) for at in range(FIRST, FIRST + COUNT, PART)]
SCHEDULES = 4  # of each region: that by rule, and others
BEHIND = 64  # elements behind a result, which no kernel writes


def choices(spec: GraphSpec, seed: int) -> list[Choice]:
    """Some choices for a region, none for one that is no kernel."""
    try:
        first, *others = patterns.choices(spec, generated.PROCESSORS)
    except Refused:
        return []
    return [first, *Random(seed).sample(others, min(SCHEDULES - 1, len(others)))]


def sources(spec: GraphSpec, seed: int) -> list[tuple[Choice, Source]]:
    """Their kernels. That by rule is known to be written, others may turn out not to go."""
    found = []
    for number, each in enumerate(choices(spec, seed)):
        try:
            found.append((each, patterns.source(spec, each)))
        except NotSupported:
            assert number, "the choice by rule"
    return found


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_random_regions_are_right_to_the_bit(seeds: range) -> None:
    specs = {seed: exact_regions.region(seed) for seed in seeds}
    every = {seed: sources(spec, seed) for seed, spec in specs.items()}
    for made in every.values():
        for _, source in made:
            host_kernels.expect(source)
    bad = [
        f"seed {seed}, {choice}: {why}"
        for seed, made in every.items()
        for choice, source in made
        for why in wrong(specs[seed], seed, source)
    ]
    assert not bad, "\n".join(bad)


def wrong(spec: GraphSpec, seed: int, source: Source) -> list[str]:
    """What is wrong with the results of a kernel, whichever thread runs first."""
    inputs = exact_regions.tensors(spec, seed)
    wanted = reference.run(spec, inputs)
    found = []
    for backwards in (False, True):
        memory, outputs = [], []
        for tensor in (spec.tensors[name] for name in spec.outputs):
            blank = torch.tensor(BLANK).to(tensor.dtype)
            memory.append(blank.repeat(tensor.extent + BEHIND))
            outputs.append(memory[-1].as_strided(tensor.shape, tensor.stride))
        host_kernels.run(source, [*inputs, *outputs], backwards=backwards)
        for name, out, want, around in zip(spec.outputs, outputs, wanted, memory, strict=True):
            if not torch.equal(out.float(), want.float()):
                found.append(f"{name} differs, backwards={backwards}")
            out.fill_(BLANK)
            if not bool((around.float() == around[-1].float()).all()):
                found.append(f"{name} is written beside, backwards={backwards}")
    return found


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_a_row_that_is_not_there_is_not_reduced(shift: int, kind: str) -> None:
    """Numbers of rows that move by some places, with others at their end: a kernel that reduced
    the row of each would read beside the tensor, of whose memory nothing is known."""
    rows, many = 6, abs(shift)
    g = cg.Graph()
    x = g.input("x", (rows, 7), torch.float32)
    more = g.input("more", (max(many, 1),), torch.float32)
    y = g.reduction(g.mul(x, x), dims=1, mode=kind)
    if many:
        start, stop = (0, rows - many) if shift < 0 else (many, rows)
        part = g.slice(y, 0, start, stop)
        y = g.concat([more, part] if shift < 0 else [part, more], 0)
    else:
        y = g.add(y, more)
    g.output("y", g.relu(y))
    spec = g.spec()
    made = sources(spec, 0)
    assert made
    for choice, source in made:
        assert wrong(spec, 0, source) == [], choice


def test_operands_of_every_kind_occur() -> None:
    specs = [exact_regions.region(seed) for seed in range(200)]
    given = [spec.tensors[name] for spec in specs for name in spec.inputs]
    made = [spec.tensors[name] for spec in specs for name in spec.outputs]
    kinds = Counter(type(patterns.schedule_of(choice)).__name__ for choice in some(specs))
    assert min(kinds[kind] for kind in ("Schedule", "Split", "Tiling", "Pieces")) >= 5, kinds
    dtypes = Counter(tensor.dtype for tensor in given)
    assert min(dtypes[dtype] for dtype in (*exact_regions.WHOLE, *exact_regions.EIGHTS)) >= 5
    assert dtypes[torch.bool] >= 20 and {tensor.dtype for tensor in made} >= {torch.bool}
    repeated = overlapping = odd = gaps = 0
    for tensor in given:
        pairs = [(n, s) for n, s in zip(tensor.shape, tensor.stride, strict=True) if n > 1]
        repeated += any(step == 0 for _, step in pairs)
        overlapping += tensor.extent < tensor.numel and all(step for _, step in pairs)
        strange = [s for n, s in zip(tensor.shape, tensor.stride, strict=True) if n == 1]
        odd += any(step in (7, 1000) for step in strange)
        gaps += tensor.extent > tensor.numel
    assert min(repeated, overlapping, odd, gaps) >= 10, (repeated, overlapping, odd, gaps)
    assert sum(tensor.extent > tensor.numel for tensor in made) >= 20


def some(specs: list[GraphSpec]) -> list[Choice]:
    return [choice for seed, spec in enumerate(specs) for choice in choices(spec, seed)]
