"""Dense copies of what convolutions read of an image's channels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg
from cudnngraph.device.rules import changed
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec, channels_last_strides
from cudnngraph.kernels import patterns
from cudnngraph.kernels.pieces import Pieces
from cudnngraph.rewrite import alternatives
from cudnngraph.rewrite.passes import legalize
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.inputs import random_inputs
from tests import generated, numerics

F16, F32 = torch.float16, torch.float32
POLICY = cg.Policy(allow_tf32=False, kernels=True)


def graph(
    read: Callable[[cg.Graph, cg.Value, int], cg.Value],
    *,
    dtype: torch.dtype = F16,
    layout: str | None = "channels_last",
) -> GraphSpec:
    """Two readers of the halves of an image's channels."""
    g = cg.Graph("halves")
    x = g.relu(g.input("x", (2, 32, 6, 6), dtype, layout=layout))
    for at in range(2):
        g.output(f"y{at}", read(g, g.slice(x, 1, 16 * at, 16 * at + 16), at))
    return g.spec()


def conv(g: cg.Graph, x: cg.Value, at: int, groups: int = 1) -> cg.Value:
    assert x.spec is not None
    w = g.input(f"w{at}", (16, 16 // groups, 3, 3), x.spec.dtype, layout="channels_last")
    return g.conv(x, w, padding=1, groups=groups)


def depthwise(g: cg.Graph, x: cg.Value, at: int) -> cg.Value:
    return conv(g, x, at, 16)


def grouped(g: cg.Graph, x: cg.Value, at: int) -> cg.Value:
    return conv(g, x, at, 2)


def transposed(g: cg.Graph, x: cg.Value, at: int) -> cg.Value:
    w = g.input(f"w{at}", (16, 8, 2, 2), F16, layout="channels_last")
    return g.conv_transpose(x, w, stride=2)


def gradient(g: cg.Graph, dy: cg.Value, at: int) -> cg.Value:
    x = g.input(f"x{at}", (2, 8, 6, 6), F16, layout="channels_last")
    return g.conv_wgrad(dy, x, kernel=3, padding=1)


def gradient_of_both(g: cg.Graph, x: cg.Value, at: int) -> cg.Value:
    return g.conv_wgrad(x, x, kernel=3, padding=1)


def activated(g: cg.Graph, x: cg.Value, at: int) -> cg.Value:
    return conv(g, g.gelu(x), at)


def pooled(g: cg.Graph, x: cg.Value, at: int) -> cg.Value:
    return g.max_pool(x, kernel_size=2, stride=2)


def copies(spec: GraphSpec) -> int:
    """The dense images that are copied from slices."""
    made = {name: node for node in spec.nodes for name in node.results}
    return sum(
        node.op == "identity"
        and made[node.operands[0]].op == "slice"
        and spec.tensors[node.results[0]].stride
        == channels_last_strides(spec.tensors[node.results[0]].shape)
        for node in spec.nodes
        if node.operands and node.operands[0] in made
    )


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (conv, 2),
        (grouped, 2),
        (transposed, 2),
        (gradient, 2),
        (gradient_of_both, 2),
        (depthwise, 0),  # by a generated kernel
        (activated, 0),  # of a kernel's own image
        (pooled, 0),
    ],
)
def test_what_convolutions_read_of_an_image_is_copied(
    read: Callable[[cg.Graph, cg.Value, int], cg.Value], count: int
) -> None:
    spec = graph(read)
    assert copies(legalize(spec, POLICY)) == count
    others = list(alternatives.of_graph(spec, POLICY))
    assert others == [(("convolution_slices_in_place", True),)] * (count > 0)
    with changed(convolution_slices_in_place=True):
        assert copies(legalize(spec, POLICY)) == 0


def test_other_images_are_read_where_they_lie() -> None:
    assert copies(legalize(graph(conv, dtype=F32), POLICY)) == 0
    assert copies(legalize(graph(conv, layout=None), POLICY)) == 0
    g = cg.Graph("rows")  # some rows of all channels
    x = g.relu(g.input("x", (2, 16, 12, 6), F16, layout="channels_last"))
    g.output("y", conv(g, g.slice(x, 2, 2, 8), 0))
    assert copies(legalize(g.spec(), POLICY)) == 0


def test_a_slice_is_copied_once_for_all_convolutions_that_read_it() -> None:
    g = cg.Graph("shared")
    x = g.slice(g.relu(g.input("x", (2, 32, 6, 6), F16, layout="channels_last")), 1, 0, 16)
    for at in range(3):
        g.output(f"y{at}", conv(g, x, at))
    g.output("z", g.gelu(x))
    spec = legalize(g.spec(), POLICY)
    assert copies(spec) == 1
    (gelu,) = (node for node in spec.nodes if node.op == "gelu")
    (slice_,) = (node for node in spec.nodes if node.op == "slice")
    assert gelu.operands[0] == slice_.results[0], "what is no convolution reads the slice"


@pytest.mark.parametrize("read", [conv, grouped, transposed, gradient, gradient_of_both])
def test_both_ways_compute_the_same(
    read: Callable[[cg.Graph, cg.Value, int], cg.Value], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = graph(read)
    inputs = random_inputs(spec, torch.device("cpu"))
    kernels = generated.install(monkeypatch)
    found = []
    for value in (True, False):
        cg.cache_clear()
        with changed(convolution_slices_in_place=value):
            found.append(compile_spec(spec, "cpu", policy=POLICY)(*inputs))
    for mine, theirs in zip(*found, strict=True):
        numerics.check(mine, theirs.double(), F16, terms=144)
    (copy,) = (each for each in kernels if {n.op for n in each.spec.nodes} == {"identity"})
    assert len(copy.spec.outputs) == 2, "one kernel for both"
    assert copy.choice is not None
    assert isinstance(patterns.schedule_of(copy.choice), Pieces)


def test_a_copy_is_summed_up_by_the_kernel_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    g = cg.Graph("summed")
    x = g.slice(g.relu(g.input("x", (2, 32, 6, 6), F16, layout="channels_last")), 1, 16, 32)
    g.output("y", conv(g, x, 0))
    g.output("db", g.cast(g.reduction(x, (0, 2, 3)), F32))
    spec = g.spec()
    inputs = random_inputs(spec, torch.device("cpu"))
    kernels = generated.install(monkeypatch)
    cg.cache_clear()
    found = compile_spec(spec, "cpu", policy=POLICY)(*inputs)
    expected = reference.run(spec, inputs, torch.float64)
    for mine, theirs in zip(found, expected, strict=True):
        numerics.check(mine, theirs, mine.dtype, terms=144)
    (one,) = (each for each in kernels if any(n.op == "identity" for n in each.spec.nodes))
    assert {"identity", "reduction"} <= {node.op for node in one.spec.nodes}
