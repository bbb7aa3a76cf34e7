"""Values of pointwise ops are laid as most of what is read for them, where nobody sees it."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec, is_channels_last, is_contiguous
from cudnngraph.kernels import patterns
from cudnngraph.rewrite.pointwise_layout import lay_pointwise
from cudnngraph.select.inputs import random_inputs
from tests import generated

BF16 = torch.bfloat16
SHAPE = (4, 64, 6, 6)


def pyramid(*, seen: bool = False, view: bool = False, contiguous: int = 0) -> GraphSpec:
    """The gradient of an average over an image, and those of other branches, before a norm."""
    g = cg.Graph("pyramid")
    total = g.div(g.expand(g.input("mean", (*SHAPE[:2], 1, 1), BF16), SHAPE), 36.0)
    for branch in range(3):
        layout = "contiguous" if branch < contiguous else "channels_last"
        total = g.add(total, g.input(f"dy{branch}", SHAPE, BF16, layout=layout))
    y, x = (g.input(name, SHAPE, BF16, layout="channels_last") for name in "yx")
    vectors = [g.input(name, SHAPE[1:2], torch.float32) for name in ("w", "mu", "inverse")]
    dy = g.relu_backward(total, y)
    dx, dw, db = g.batch_norm_backward(dy, x, *vectors)
    for name, value in (("dx", dx), ("dw", dw), ("db", db)):
        g.output(name, value)
    if seen:
        g.output("dy", dy)
    if view:
        g.output("rows", g.reshape(dy, (4, 64, 36)))
    return g.spec()


def gradients(spec: GraphSpec) -> list[bool]:
    """Whether the results of sums and of the relu's gradient lie channels last."""
    made = [node.results[0] for node in spec.nodes if node.op in ("div", "add", "relu_backward")]
    forms = [spec.tensors[name] for name in made]
    assert all(
        is_contiguous(f.shape, f.stride) != is_channels_last(f.shape, f.stride) for f in forms
    )
    return [is_channels_last(form.shape, form.stride) for form in forms]


def test_sums_that_begin_with_what_is_broadcast_lie_as_the_other_operands() -> None:
    spec = pyramid()
    assert gradients(spec) == [False] * 5
    assert gradients(lay_pointwise(spec)) == [True] * 5
    laid = lay_pointwise(spec)
    assert lay_pointwise(laid) is laid


def test_outputs_and_what_views_read_stay() -> None:
    for spec in (pyramid(seen=True), pyramid(view=True)):
        made = lay_pointwise(spec)
        assert gradients(made) == [True] * 4 + [False]
        for name in (*spec.inputs, *spec.outputs):
            assert made.tensors[name] == spec.tensors[name]


def test_of_two_operands_that_differ_the_first_decides() -> None:
    found = gradients(lay_pointwise(pyramid(contiguous=1)))
    assert found == [False] * 5


@pytest.mark.parametrize("contiguous", [0, 1, 3])
@pytest.mark.parametrize("seen", [False, True])
def test_the_results_are_the_same(contiguous: int, seen: bool) -> None:
    spec = pyramid(contiguous=contiguous, seen=seen)
    inputs = random_inputs(spec, torch.device("cpu"))
    wanted = reference.run(spec, inputs, torch.float64)
    for found, want in zip(
        reference.run(lay_pointwise(spec), inputs, torch.float64), wanted, strict=True
    ):
        assert torch.equal(found, want) and found.stride() == want.stride()


def test_the_norm_behind_reads_whole_vectors() -> None:
    """One kernel of two launches, in which every image is read and written 16 bytes at a time."""
    (step,) = generated.selection(pyramid(), 4).steps
    assert step.kind == "kernel" and step.choice is not None
    source = patterns.source(step.spec, step.choice)
    assert len(source.launches) == 2
    images = [n for n, t in enumerate(step.spec.inputs) if len(step.spec.tensors[t].shape) == 4]
    assert len(images) == 6
    for at in images[1:]:
        assert f"load<8>(p{at} " in source.text and f"get(p{at}[" not in source.text
