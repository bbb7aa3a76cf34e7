"""Kernels of the gradient of depthwise taps, run on the CPU against float64, and compiled."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import compile, depthwise_gradient, patterns
from cudnngraph.kernels.cubin import resources
from cudnngraph.kernels.depthwise_gradient import TapSums
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.tape import Refused
from cudnngraph.select.inputs import random_inputs
from tests import host_kernels, numerics

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEEDS = range(64)


def gradient(
    shape: tuple[int, int, int, int],
    kernel: tuple[int, int],
    dtype: torch.dtype = torch.float16,
    layouts: tuple[str, str] = ("channels_last", "channels_last"),
    out: torch.dtype | None = None,
    **options: Any,
) -> GraphSpec:
    """The gradient of a depthwise convolution's taps; the layouts are those of dy and x."""
    forward = cg.Graph("depthwise")
    x = forward.input("x", shape, dtype)
    w = forward.input("w", (shape[1], 1, *kernel), dtype)
    y = forward.conv(x, w, groups=shape[1], **options)
    forward.output("y", y)
    shape_of_dy = forward.spec().tensors["y"].shape
    g = cg.Graph("gradient")
    dy = g.input("dy", shape_of_dy, dtype, layout=layouts[0])
    x = g.input("x", shape, dtype, layout=layouts[1])
    dw = g.conv_wgrad(dy, x, kernel=kernel, groups=shape[1], **options)
    g.output("dw", dw, dtype=out or dtype, layout=layouts[1])
    return g.spec()


def drawn(rng: random.Random) -> GraphSpec:
    """One of random shapes, strides, paddings, dilations and layouts."""
    layout = rng.choice(("channels_last", "contiguous"))
    dtype = rng.choice(DTYPES)
    return gradient(
        (rng.randint(1, 3), rng.choice((1, 3, 8, 12, 24)), rng.randint(1, 14), rng.randint(1, 16)),
        (rng.choice((1, 2, 3, 5, 7)), rng.choice((1, 3, 4, 5, 7))),
        dtype,
        (rng.choice(("channels_last", layout)), layout),
        rng.choice((dtype, dtype, torch.float32)),
        stride=(rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3))),
        padding=((rng.randint(0, 3), rng.randint(0, 3)), (rng.randint(0, 3), rng.randint(0, 3))),
        dilation=(rng.choice((1, 1, 2)), rng.choice((1, 1, 2))),
    )


def graphs() -> list[tuple[int, GraphSpec]]:
    """Those of the seeds that are graphs: a window may be larger than an image."""
    found = []
    for seed in SEEDS:
        try:
            found.append((seed, drawn(random.Random(seed))))
        except cg.GraphError:
            continue
    return found


def checked(spec: GraphSpec, source: Source, inputs: list[torch.Tensor], what: str) -> None:
    """Run a kernel forwards and backwards, and compare with float64."""
    (name,) = spec.outputs
    made, again = (spec.tensors[name].empty(torch.device("cpu")) for _ in range(2))
    host_kernels.run(source, [*inputs, made])
    host_kernels.run(source, [*inputs, again], backwards=True)
    assert torch.equal(made.nan_to_num(), again.nan_to_num()), what
    (wanted,) = reference.run(spec, inputs, torch.float64)
    dy = spec.tensors[spec.inputs[0]]
    terms = dy.numel // dy.shape[1]
    numerics.check(made, wanted, dy.dtype, terms=terms, what=what)


def test_random_ones_are_right_by_every_schedule() -> None:
    cases = []
    for seed, spec in graphs():
        choices = patterns.choices(spec, 2)
        taken = random.Random(seed).sample(choices, min(3, len(choices)))
        for choice in dict.fromkeys((choices[0], *taken)):
            cases.append((seed, spec, choice, host_kernels.expect(patterns.source(spec, choice))))
    assert len(cases) > 150
    for seed, spec, choice, source in cases:
        inputs = random_inputs(spec, torch.device("cpu"), seed)
        checked(spec, source, inputs, f"seed {seed}, {choice}")
