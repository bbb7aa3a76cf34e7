"""Statistics of groups, computed from those of their channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.device import rules
from cudnngraph.executor import reference, torch_steps
from cudnngraph.ir.spec import GraphSpec
from tests import numerics
from tests.steps import CPU, F16, outputs_of


def affine_step(spec: GraphSpec) -> torch_steps.Run | None:
    """The torch step of a graph of one op."""
    (node,) = spec.nodes
    return torch_steps._run_group_affine(spec, node, CPU)


@pytest.mark.parametrize("layout", ["channels_last", "contiguous", "gaps"])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(
    "shape", [(3, 16, 6, 5), (1, 16, 6, 5), (2, 16, 8, 8), (2, 16, 3, 4, 2)], ids=str
)
def test_what_makes_a_group_norm_is_of_its_channels_statistics(
    shape: tuple[int, ...], weighed: bool, layout: str
) -> None:
    torch.manual_seed(0)
    x = (
        torch.randn(shape) * 2 + 3 * torch.randn(shape[1]).view(-1, *(1,) * (len(shape) - 2))
    ).half()
    if layout == "channels_last":
        last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
        x = x.contiguous(memory_format=last)
    elif layout == "gaps":
        x = torch.cat([x, x], -1)[..., : shape[-1]]
    w = torch.rand(16).half() + 0.5 if weighed else None
    g = cg.Graph("affine")
    value = None if w is None else g.input("w", like=w)
    made = g.group_affine(g.input("x", like=x), 4, value, eps=1e-3)
    for name, each in zip(("shift", "factor"), made, strict=True):
        g.output(name, each)
    spec = g.spec()
    given = {"x": x, "w": w}
    inputs: list[Any] = [given[name] for name in spec.inputs]
    run = affine_step(spec)
    assert run is not None
    outputs = outputs_of(spec)
    run(inputs, outputs)
    wanted = reference.run(spec, inputs, torch.float64)
    for out, want in zip(outputs, wanted, strict=True):
        assert numerics.relative_error(out, want) < 1e-6
    norm = F.group_norm(x.double(), 4, None if w is None else w.double(), None, 1e-3)
    assert numerics.relative_error((x.double() + outputs[0]) * outputs[1], norm) < 1e-6


def test_statistics_of_groups_are_written_in_16_bits_too() -> None:
    g = cg.Graph("affine")
    x = torch.randn(2, 8, 4, 3).half()
    for name, each in zip(
        ("shift", "factor"), g.group_affine(g.input("x", like=x), 2), strict=True
    ):
        g.output(name, each, dtype=F16)
    spec = g.spec()
    run, outputs = affine_step(spec), outputs_of(spec)
    assert run is not None and {out.dtype for out in outputs} == {F16}
    run([x], outputs)
    for out, want in zip(outputs, reference.run(spec, [x], torch.float64), strict=True):
        assert numerics.relative_error(out, want) < 1e-3


def test_groups_of_one_number_have_no_deviation() -> None:
    g = cg.Graph("affine")
    x = torch.full((2, 4, 3, 3), 7.0).contiguous(memory_format=torch.channels_last)
    g.output("factor", g.group_affine(g.input("x", like=x), 2, eps=1e-4)[1])
    run, out = affine_step(g.spec()), torch.empty(2, 4, 1, 1)
    assert run is not None
    for each in (x, x.contiguous()):
        run([each], [out])
        torch.testing.assert_close(out, torch.full((2, 4, 1, 1), 100.0))


def test_statistics_of_groups_are_the_references_where_torch_has_no_other() -> None:
    for shape, dtype in (((0, 4, 3, 3), F16), ((2, 4, 3, 3), torch.float64)):
        g = cg.Graph("affine")
        g.output("factor", g.group_affine(g.input("x", shape, dtype), 2)[1])
        assert affine_step(g.spec()) is None
        assert g.compile("cpu")(x=torch.randn(shape, dtype=dtype)).shape == (shape[0], 4, 1, 1)


@pytest.mark.parametrize(
    ("size", "parts"), [((64, 64), 64), ((16, 16), 32), ((8, 8), 8), ((7, 7), 1), ((1, 1), 1)]
)
def test_rows_of_channels_are_cut_until_they_are_short(size: tuple[int, int], parts: int) -> None:
    x = torch.randn(2, 12, *size).contiguous(memory_format=torch.channels_last)
    rows = torch_steps._by_channel(x, 3, rules.rules())
    assert rows.shape == (2, size[0] * size[1] // parts, parts, 3, 4)
    assert rows.data_ptr() == x.data_ptr()
    torch.testing.assert_close(rows.sum((1, 2)).flatten(1), x.sum((2, 3)))
