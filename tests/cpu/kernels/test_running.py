"""Running sums of long rows that lie across memory, run on the CPU and compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import compile, patterns, running
from cudnngraph.kernels.cubin import resources
from cudnngraph.kernels.running import Scan
from cudnngraph.kernels.tape import Refused
from cudnngraph.select.inputs import random_inputs
from tests import generated, host_kernels, numerics
from tests.cpu.kernels.test_whole_numbers import whole
from tests.torch_ops import BF16, BOOL, F16, F32, I32, I64, X, graph

CPU = torch.device("cpu")
LONG = 300  # more than a short row has
Shape = tuple[int, ...]


class Sums(nn.Module):
    """Running sums along a dim, with ops in front and behind, permuted for the result."""

    def __init__(self, dim: int, order: tuple[int, ...] = (), *, ops: bool = True) -> None:
        super().__init__()
        self.dim, self.order, self.ops = dim, order, ops

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """(…) of x, which y is added to → the sums."""
        if self.ops:
            x = torch.where(y > 0, x * y, 0.25)
        sums = x.cumsum(self.dim)
        if self.ops:
            sums = torch.sigmoid(sums) - y
        return sums.permute(self.order) if self.order else sums


def kernels_of(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[Any]]:
    """The results of a model that is fused with kernels, and the kernels with running sums."""
    made = generated.install(monkeypatch)
    with torch.no_grad():
        results = cg.fuse(model.eval(), inputs, check=False)(*inputs)
    return results, [step for step in made if any(node.op == "aten" for node in step.spec.nodes)]


def refused(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the check of a GPU's steps says of kernels."""
    monkeypatch.setattr(handles, "handle_on_current_stream", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return generated.refused(kernels, cg.Policy(allow_tf32=False))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(
    ("shape", "dim", "order"),
    [
        ((2, LONG, 24), 1, ()),
        ((LONG, 40), 0, ()),
        ((1, LONG, 1, 40, 1), 1, ()),
        ((3, 2, LONG, 16), -2, ()),
        ((2, LONG, 3, 8), 1, (0, 1, 3, 2)),
    ],
)
def test_ops_in_front_and_behind_are_one_kernel_with_them(
    shape: Shape, dim: int, order: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(shape).to(dtype) * 0.5 for _ in range(2))
    if order:  # what is read lies as the result does
        back = [order.index(each) for each in range(len(order))]
        x, y = (each.permute(order).contiguous().permute(back) for each in (x, y))
    model = Sums(dim, order)
    made, kernels = kernels_of(model, (x, y), monkeypatch)
    (step,) = kernels
    assert step.choice is not None and isinstance(patterns.schedule_of(step.choice), Scan)
    assert {"where", "sigmoid", "sub"} <= {node.op for node in step.spec.nodes}
    assert not refused(kernels, monkeypatch)
    numerics.check(made, model(x.double(), y.double()), dtype, model(x, y), terms=LONG)


def sums_of(
    shape: Shape, dim: int, dtype: torch.dtype = F32, stride: Shape | None = None
) -> GraphSpec:
    """Running sums alone."""
    return graph("aten.cumsum.default", (X, dim), (shape, dtype, stride))


@pytest.mark.parametrize("schedule", [Scan(1, 32, 1), Scan(2, 64, 7), Scan(4, 32, 16)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_schedule_is_right(schedule: Scan, dtype: torch.dtype) -> None:
    """With steps left over, and threads."""
    spec = sums_of((3, LONG, 12), 1, dtype)
    inputs = random_inputs(spec, CPU)
    made = spec.tensors["y"].empty(CPU)
    host_kernels.run(patterns.source(spec, patterns.choice_of(schedule)), [*inputs, made])
    (want,) = reference.run(spec, inputs, torch.float64)
    (theirs,) = reference.run(spec, inputs)
    numerics.check(made, want, dtype, theirs, terms=LONG)


@pytest.mark.parametrize("dtype", [I32, I64, BOOL])
def test_whole_numbers_wrap_as_torchs_do(dtype: torch.dtype) -> None:
    spec = sums_of((2, LONG, 8), 1, dtype)
    form = spec.tensors[spec.inputs[0]]
    x = whole(form.shape, dtype) if dtype != BOOL else torch.rand(form.shape) < 0.5
    made = spec.tensors["y"].empty(CPU)
    host_kernels.run(patterns.source(spec, patterns.by_rule(spec, 132)), [x, made])
    assert torch.equal(made, x.cumsum(1))


def test_what_is_not_finite_stays_in_its_row() -> None:
    spec = sums_of((2, LONG, 8), 1)
    (x,) = random_inputs(spec, CPU)
    x[0, 7, 3], x[1, 290, 0], x[1, 291, 0], x[1, 0, 5] = math.inf, math.inf, -math.inf, math.nan
    made = spec.tensors["y"].empty(CPU)
    host_kernels.run(patterns.source(spec, patterns.by_rule(spec, 132)), [x, made])
    want = x.double().cumsum(1)
    assert torch.equal(made.isnan(), want.isnan())
    assert torch.equal(made.isposinf(), want.isposinf()) and not bool(made.isneginf().any())
    there = want.isfinite()
    numerics.check(made[there], want[there], F32, terms=LONG)


def test_sums_of_sums_and_several_results_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            first = x.exp().cumsum(1)
            return first * 2.0, (first - x).cumsum(1)

    torch.manual_seed(0)
    x = torch.randn(2, LONG, 8) * 0.1
    made, kernels = kernels_of(Twice(), (x,), monkeypatch)
    assert len(kernels) == 1
    for mine, want, own in zip(made, Twice()(x.double()), Twice()(x), strict=True):
        numerics.check(mine, want, F32, own, terms=LONG * LONG)


def test_a_segments_sums_are_written_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Mamba-2 has them: the sums of what is broadcast and masked, and exp of what is left."""

    class Segments(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            long = x.shape[-1]
            below = torch.ones(long, long, dtype=torch.bool).tril(-1)
            sums = x[..., None].expand(*x.shape, long).masked_fill(~below, 0).cumsum(-2)
            here = torch.ones(long, long, dtype=torch.bool).tril()
            return sums.masked_fill(~here, -math.inf).exp()

    torch.manual_seed(0)
    x = -torch.rand(1, 3, 2, 272)
    made, kernels = kernels_of(Segments(), (x,), monkeypatch)
    (step,) = kernels
    assert isinstance(patterns.schedule_of(step.choice), Scan)
    assert {"where", "aten", "exp"} <= {node.op for node in step.spec.nodes}
    assert not refused(kernels, monkeypatch)
    assert not step.spec.tensors[step.spec.inputs[0]].numel > x.numel() * 272 // 6
    numerics.check(made, Segments()(x.double()), F32, Segments()(x), terms=272)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (sums_of((4, 5000), 1), "long rows that lie along memory"),
        (sums_of((LONG, 4), 0), "long rows that lie along memory"),
    ],
)
def test_rows_along_memory_stay_with_torch(spec: GraphSpec, why: str) -> None:
    with pytest.raises(Refused, match=why):
        patterns.by_rule(spec, 132)


def test_part_of_the_sums_is_no_such_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out in front belongs to all sums behind it."""

    class Last(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(1)[:, 20:].sigmoid()

    torch.manual_seed(0)
    x = torch.randn(2, LONG, 8) * 0.1
    made, _ = kernels_of(Last(), (x,), monkeypatch)
    numerics.check(made, Last()(x.double()), F32, Last()(x), terms=LONG)


def test_schedules_that_do_not_go_are_refused() -> None:
    spec = sums_of((3, LONG, 9), 1)
    for bad, why in (
        (Scan(2, 128, 8), "2 lanes of 27 rows"),
        (Scan(1, 100, 8), "1 lanes, 100 threads"),
        (Scan(1, 128, 0), "1 lanes, 128 threads"),
    ):
        with pytest.raises(Refused, match=why):
            running.write(spec, bad)
    assert {each.lanes for each in running.schedules(spec, 132)} == {1}
    listed = [patterns.schedule_of(each) for each in patterns.choices(spec, 132)]
    assert listed == running.schedules(spec, 132)


@pytest.mark.parametrize(
    ("rows", "threads"), [(24, 32), (24 * 1024, 32), (64 * 1024, 64), (128 * 1024, 128)]
)
def test_few_rows_are_shared_out_in_small_blocks(rows: int, threads: int) -> None:
    spec = sums_of((rows // 8, LONG, 8), 1)
    assert running.schedules(spec, 132)[0].threads == threads
    assert {each.threads for each in running.schedules(spec, 132)} == {32, 64, 128}


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_they_are_compiled_without_spills(capability: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for dtype in (F32, BF16):
        spec = sums_of((24, 256, 1024), 1, dtype)
        for each in running.schedules(spec, 132):
            found = resources(compile.cubin(running.write(spec, each).text, capability))
            assert found.local_bytes == 0
