"""Kernels of sums by row, run on the CPU against torch's in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns, row_sums
from cudnngraph.kernels.row_lists import Lists
from cudnngraph.kernels.row_sums import Bins
from cudnngraph.kernels.tape import Refused
from cudnngraph.ops.row_sums import OVERLOAD
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.inputs import random_inputs
from tests import generated, host_kernels, numerics

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def table(
    index: tuple[int, ...],
    rest: tuple[int, ...],
    rows: int,
    skip: int = -1,
    dtype: torch.dtype = F32,
    of: torch.dtype = torch.int64,
) -> GraphSpec:
    g = cg.Graph("table")
    values = g.input("values", (*index, *rest), dtype)
    named = g.input("index", index, of)
    args = (("tensor", 0), ("tensor", 1), rows, skip)
    g.output("sums", g.aten([values, named], OVERLOAD, args))
    return g.spec()


def check(spec: GraphSpec, index: torch.Tensor, rows: int, skip: int, choice: Any = None) -> None:
    """A kernel's sums against float64, whichever thread comes first, in memory that was not
    cleared."""
    form = spec.tensors[spec.inputs[0]]
    values = torch.randn(form.extent).to(form.dtype).as_strided(form.shape, form.stride)
    exact = torch.ops.cudnngraph.sum_rows(values.double(), index, rows, skip)
    source = patterns.source(spec, choice or patterns.by_rule(spec, 132))
    made = [spec.tensors[spec.outputs[0]].empty("cpu").fill_(float("nan")) for _ in range(2)]
    for at, result in enumerate(made):
        host_kernels.run(source, [values, index, result], backwards=bool(at))
    assert torch.equal(*made)
    most = int(torch.bincount(index.flatten() % rows, minlength=rows).max())
    numerics.check(made[0], exact, values.dtype, terms=most)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(
    ("index", "rest", "rows"),
    [
        ((2401,), (3,), 169),
        ((49, 49), (24,), 169),
        ((3, 7), (40,), 5),
        ((1,), (1,), 1),
        ((70,), (2, 3), 1000),
        ((4, 300), (300,), 2),
        ((90,), (70,), 3000),
    ],
)
def test_sums_by_row(
    dtype: torch.dtype, index: tuple[int, ...], rest: tuple[int, ...], rows: int
) -> None:
    spec = table(index, rest, rows, dtype=dtype)
    check(spec, torch.randint(rows, index), rows, -1)
    check(spec, torch.full(index, rows - 1), rows, -1)  # all in one


@pytest.mark.parametrize("of", [torch.int64, torch.int32])
def test_negative_indices_count_from_the_end_and_a_row_may_be_left_out(of: torch.dtype) -> None:
    spec = table((300,), (9,), 11, skip=4, of=of)
    named = torch.randint(-11, 11, (300,)).to(of)
    values = torch.randn(300, 9)
    kernel = patterns.source(spec, patterns.by_rule(spec, 132))
    made = torch.empty(11, 9)
    host_kernels.run(kernel, [values, named, made])
    wanted = torch.zeros(11, 9, dtype=torch.float64)
    for at, row in enumerate(named.tolist()):
        if row % 11 != 4:
            wanted[row % 11] += values[at].double()
    numerics.check(made, wanted, F32, terms=300)


def test_every_schedule_gives_the_same_sums() -> None:
    for count, width, rows in ((500, 20, 37), (90, 600, 70), (300, 40, 2000)):
        spec, index = table((count,), (width,), rows), torch.randint(rows, (count,))
        choices = patterns.choices(spec, 132)
        assert len(choices) > 2 and choices[0] == patterns.by_rule(spec, 132)
        for choice in choices:
            assert patterns.choice_of(patterns.schedule_of(choice)) == choice
            check(spec, index, rows, -1, choice)


LISTS = [Lists(256, 16, 3, 128), Lists(4, 64, 1, 64), Lists(32, 32, 2, 256)]


@pytest.mark.parametrize("by", LISTS, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_blocks_of_many_rows_list_what_is_theirs(by: Lists, dtype: torch.dtype) -> None:
    count, width, rows = 3000, 70, 700
    spec, choice = table((count,), (width,), rows, skip=5, dtype=dtype), patterns.choice_of(by)
    assert patterns.schedule_of(choice) == by
    few = torch.cat([torch.full((700,), 3), torch.full((330,), 4)])
    for index in (
        torch.randint(rows, (count,)),
        torch.full((count,), 699),  # more than a list holds: rows are summed up one by one
        torch.cat([few[torch.randperm(1030)], torch.randint(690, 700, (count - 1030,))]),
        torch.randint(-rows, 0, (count,)),
        torch.full((count,), 5),  # none
    ):
        values = torch.randn(count, width).to(dtype)
        exact = torch.ops.cudnngraph.sum_rows(values.double(), index % rows, rows, 5)
        made = [torch.full((rows, width), float("nan"), dtype=dtype) for _ in range(2)]
        for at, result in enumerate(made):
            host_kernels.run(
                patterns.source(spec, choice), [values, index, result], backwards=bool(at)
            )
        assert torch.equal(*made)
        numerics.check(made[0], exact, dtype, terms=count)


def test_kernels_are_timed_and_checked_with_indices_of_all_rows() -> None:
    spec = table((4096,), (3,), 700, of=torch.int32)
    _, index = random_inputs(spec, torch.device("cpu"))
    assert index.min() >= 0 and 600 < int(index.max()) < 700
    assert len(index.unique()) > 600


def test_lists_are_for_tables_of_many_rows() -> None:
    for count, width, rows in ((8192, 768, 50304), (65536, 512, 32000), (4096, 768, 30522)):
        choice = patterns.by_rule(table((count,), (width,), rows), 132)
        assert isinstance(patterns.schedule_of(choice), Lists)
    for count, width, rows in ((2401, 3, 169), (4096, 768, 2)):
        choice = patterns.by_rule(table((count,), (width,), rows), 132)
        assert isinstance(patterns.schedule_of(choice), Bins)


LAYOUTS = {
    "heads first": ((7, 1, 49), (14, 2)),
    "a gradient that is the same for a row of indices": ((6, 0, 1), (7, 1)),
    "a gradient that is the same for all rows of indices": ((0, 6, 1), (7, 1)),
    "one number for each index": ((7, 1, 0), (7, 1)),
    "one number": ((0, 0, 0), (7, 1)),
    "indices of a column, repeated": ((42, 6, 1), (1, 0)),
    "indices of a row, repeated": ((42, 6, 1), (0, 1)),
    "turned indices": ((6, 42, 1), (1, 7)),
    "with gaps": ((100, 14, 2), (30, 4)),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_values_and_indices_lie_in_any_way(kind: str) -> None:
    """As gradients of sums, which are broadcast, and of biases whose heads come first."""
    stride, of_index = LAYOUTS[kind]
    g = cg.Graph("turned")
    values = g.input("values", (7, 7, 6), F32, stride=stride)
    index = g.input("index", (7, 7), torch.int64, stride=of_index)
    args = (("tensor", 0), ("tensor", 1), 13, -1)
    g.output("sums", g.aten([values, index], OVERLOAD, args))
    spec = g.spec()
    extent = spec.tensors[spec.inputs[1]].extent
    check(spec, torch.randint(13, (extent,)).as_strided((7, 7), of_index), 13, -1)


def test_what_is_not_finite_stays_in_its_row() -> None:
    spec = table((6,), (3,), 4)
    values = torch.randn(6, 3)
    values[2, 0], values[3, 1] = float("nan"), float("inf")
    index, made = torch.tensor([0, 1, 2, 2, 3, 1]), torch.empty(4, 3)
    host_kernels.run(patterns.source(spec, patterns.by_rule(spec, 132)), [values, index, made])
    wanted = torch.ops.cudnngraph.sum_rows(values, index, 4, -1)
    assert torch.equal(made.isfinite(), wanted.isfinite()) and bool(
        made[[0, 1, 3]].isfinite().all()
    )


def test_what_has_no_such_kernel() -> None:
    with pytest.raises(Refused, match="other dtypes"):
        row_sums.region_of(table((5,), (2,), 3, dtype=torch.float64))
    spec = table((5,), (2,), 3)
    (name,) = spec.outputs
    turned = {**spec.tensors, name: replace(spec.tensors[name], stride=(1, 3))}
    with pytest.raises(Refused, match="does not lie in rows"):
        row_sums.region_of(replace(spec, tensors=turned))
    bins = (Bins(1, 3, 256), Bins(64, 4, 256), Bins(1, 4, 2048), Bins(1, 4, 40))
    lists = (
        Lists(4, 3, 1, 128),
        Lists(512, 32, 1, 128),
        Lists(4, 32, 9, 128),
        Lists(4, 8, 1, 1024),
    )
    for by in (*bins, *lists):
        with pytest.raises(NotSupported, match="columns by"):
            patterns.source(spec, patterns.choice_of(by))


class Biased(nn.Module):
    """Scores with a bias that is read of a table, along its first dim or its last."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last, self.words = last, nn.Embedding(20, 8, padding_idx=3)
        self.table = nn.Parameter(torch.randn(2, 11) if last else torch.randn(11, 2))
        self.places: torch.Tensor
        self.register_buffer("places", torch.randint(11, (5, 5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.embedding(x, self.words.weight, 3)
        bias = self.table[:, self.places] if self.last else self.table[self.places.view(-1)]
        if not self.last:
            bias = bias.view(5, 5, 2).permute(2, 0, 1)
        q = x.view(-1, 5, 2, 4).transpose(1, 2)
        y: torch.Tensor = (q @ q.transpose(-1, -2) + bias).softmax(-1) @ q
        return y


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_of_tables_and_embeddings_are_such_sums(last: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Biased(last).to(dtype), torch.randint(20, (6, 5))
    x[0, :3] = 3
    exact = Biased(last).double()
    exact.load_state_dict(
        {k: v.double() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    )
    by = torch.randn(6, 2, 5, 4)
    leaves = [model.words.weight, model.table]
    compiled: Any = torch.compile(model, backend="cudnngraph")
    found = torch.autograd.grad((compiled(x).float() * by).sum(), leaves)
    own = torch.autograd.grad((model(x).float() * by).sum(), leaves)
    wanted = torch.autograd.grad((exact(x) * by).sum(), [exact.words.weight, exact.table])
    numerics.no_farther_than_eager(found, own, wanted, dtype)
    assert not found[0][3].any()
    backward = [report for report in cg.reports() if not report.refused][-1]
    nodes = [node for step in backward.steps for node in step.spec.nodes if node.op == "aten"]
    assert [node.attr("overload") for node in nodes] == [OVERLOAD] * 2


def test_an_embedding_that_scales_by_frequency_is_left_to_torch() -> None:
    torch._dynamo.reset()
    weight, x = torch.randn(7, 4, requires_grad=True), torch.randint(7, (9,))

    def looked_up(x: torch.Tensor) -> torch.Tensor:
        return F.embedding(x, weight, scale_grad_by_freq=True).exp()

    compiled: Any = torch.compile(looked_up, backend="cudnngraph")
    (found,) = torch.autograd.grad(compiled(x).sum(), [weight])
    (own,) = torch.autograd.grad(looked_up(x).sum(), [weight])
    numerics.check(found, own.double(), F32)


def shared(
    count: int,
    width: int,
    rows: int,
    *,
    more: torch.dtype,
    cast: bool = False,
    turned: bool = False,
) -> GraphSpec:
    """Sums by row added to another table, as of a head that shares the weight of an embedding."""
    g = cg.Graph("shared")
    values, named = g.input("values", (count, width), F32), g.input("index", (count,), torch.int64)
    summed = g.aten([values, named], OVERLOAD, (("tensor", 0), ("tensor", 1), rows, -1))
    other = g.input("more", (rows, width), more)
    other = g.cast(other, F32) if cast else other
    g.output("sums", g.add(other, summed) if turned else g.add(summed, other))
    return g.spec()


@pytest.mark.parametrize("by", [Bins(4, 16, 256), *LISTS], ids=str)
@pytest.mark.parametrize(
    ("more", "cast", "turned"), [(F32, False, False), (BF16, True, True), (F16, True, False)]
)
def test_a_table_is_added_to_sums_by_row(
    by: Any, more: torch.dtype, cast: bool, turned: bool
) -> None:
    count, width, rows = 3000, 70, 700
    spec = shared(count, width, rows, more=more, cast=cast, turned=turned)
    source = patterns.source(spec, patterns.choice_of(by))
    values, table_ = torch.randn(count, width), torch.randn(rows, width).to(more)
    for index in (torch.randint(rows, (count,)), torch.full((count,), 699)):
        exact = torch.ops.cudnngraph.sum_rows(values.double(), index, rows, -1) + table_.double()
        made = [torch.full((rows, width), float("nan")) for _ in range(2)]
        given = {"values": values, "index": index, "more": table_}
        for at, result in enumerate(made):
            inputs = [given[name] for name in spec.inputs]
            host_kernels.run(source, [*inputs, result], backwards=bool(at))
        assert torch.equal(*made)
        numerics.check(made[0], exact, F32, terms=count)


def test_what_is_no_sum_and_a_table_is_no_such_kernel() -> None:
    """Sums that are read elsewhere, turned, cast or of another form; tables that are broadcast."""
    args = (("tensor", 0), ("tensor", 1), 40, -1)

    def region(kind: str) -> GraphSpec:
        g = cg.Graph("other")
        summed = g.aten(
            [g.input("v", (90, 40), F32), g.input("i", (90,), torch.int64)], OVERLOAD, args
        )
        table_ = g.input("more", (40,) if kind == "broadcast" else (40, 40), F32)
        if kind == "read":
            g.output("sums", summed)
        if kind == "cast":
            summed = g.cast(summed, F16)
        if kind == "turned":
            summed = g.transpose(summed, 0, 1)
        if kind == "copied":
            summed = g.reshape(g.transpose(summed, 0, 1), (40, 40))
        g.output("y", summed * table_ if kind == "scaled" else g.add(summed, table_))
        return g.spec()

    for kind in ("read", "cast", "turned", "copied", "broadcast", "scaled"):
        spec = region(kind)
        with pytest.raises(Refused, match=r"sum by row|no kernel"):
            patterns.by_rule(spec, 132)


def test_a_gradient_of_a_shared_weight_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = generated.install(monkeypatch)
    spec = shared(90, 8, 30, more=F16, cast=True)
    inputs = random_inputs(spec, torch.device("cpu"))
    cg.cache_clear()
    found = compile_spec(spec, "cpu", policy=cg.Policy(kernels=True))(*inputs)
    (exact,) = reference.run(spec, inputs, torch.float64)
    numerics.check(found, exact, F32, terms=90)
    assert [sorted(n.op for n in k.spec.nodes) for k in kernels] == [["add", "aten", "cast"]]
