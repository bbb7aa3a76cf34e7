"""Graphs of torch.compile around ops that no graph of ours can hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.fused import compiled
from tests.models import image

W = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@torch.library.custom_op("cudnngraph_tests::halve_", mutates_args={"x"})
def halve_(x: torch.Tensor) -> None:
    """Write over an operand, as kernels of users do."""
    x.mul_(0.5)


@torch.library.custom_op("cudnngraph_tests::split_into", mutates_args={"out"})
def split_into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(x.clamp(max=0))
    return x.clamp(min=0)


@split_into.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def writes(x: torch.Tensor) -> torch.Tensor:
    y = F.relu(x @ W)
    halve_(y)
    return y @ W + x


def writes_and_gives(x: torch.Tensor) -> torch.Tensor:
    low = torch.empty_like(x)
    high = split_into(x @ W, low)
    return F.silu(high) - low


def branches(x: torch.Tensor) -> torch.Tensor:
    y = F.gelu(x @ W)
    z = torch.cond(y.sum() > 0, lambda y: y @ W + 1, lambda y: y.tanh(), (y,))
    return F.softmax(z + y, -1)


def of_rows(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch._higher_order_ops.map(lambda row: F.relu(row @ W), x * 2)
    return F.layer_norm(y, (8,)) @ W


def first(x: torch.Tensor) -> torch.Tensor:
    """What is read again behind the op, and given as it is."""
    z: torch.Tensor = torch.cond(x.sum() > 0, torch.cos, torch.sin, (x,))
    return z


OPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "writes": (writes, "auto_functionalized_v2"),
    "writes and gives": (writes_and_gives, "auto_functionalized_v2"),
    "branches": (branches, "cond"),
    "a map": (of_rows, "map_impl"),
    "of what is given": (first, "cond"),
}


def left() -> list[str]:
    found = cg.reports()
    assert found and not any(report.refused for report in found)
    return [name for report in found for name, _ in report.opaque]


@pytest.mark.parametrize("name", OPS)
def test_such_an_op_alone_is_torchs(name: str) -> None:
    function, op = OPS[name]
    x = torch.randn(6, 8)
    with torch.no_grad():
        ours = compiled(function)(x)
    assert left() == [op]
    numerics.check(ours, function(x).double(), torch.float32, terms=64)
    assert any("part" in report.model and report.steps for report in cg.reports())


@pytest.mark.parametrize("name", ["branches", "a map", "of what is given"])
def test_it_is_trained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, op = OPS[name]
    data, dy = torch.randn(6, 8), torch.randn(6, 8)

    def gradient(call: Callable[..., torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        x = data.to(dtype, copy=True).requires_grad_()
        call(x).backward(dy.to(dtype))
        assert x.grad is not None
        return x.grad

    ours, eager = (gradient(call, torch.float32) for call in (compiled(function), function))
    assert set(left()) == {op}
    monkeypatch.setitem(globals(), "W", W.double())
    exact = gradient(function, torch.float64)
    numerics.no_farther_than_eager([ours], [eager], [exact], torch.float32)


def test_graphs_around_it_save_nothing_that_no_gradient_reads() -> None:
    """The places of largest elements, which a gradient finds again."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(x * 2, 2)
        y = torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y + 1, (y,))
        return F.max_pool2d(y.relu(), 2)

    data, dy = image(2, 3, 8, 8), image(2, 3, 2, 2)
    saved: list[torch.Tensor] = []
    found = []
    for call in (compiled(function, policy=cg.Policy(kernels=True)), function):
        x = data.clone().requires_grad_()
        keep = saved if call is not function else []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, keep=keep: keep.append(t) or t, lambda t: t
        ):
            call(x).backward(dy)
        found.append(x.grad)
    torch.testing.assert_close(*found)
    assert set(left()) == {"cond"}
    places = [each for each in saved if each.dtype == torch.int64 and each.dim() == 4]
    assert all(set(each.stride()) == {0} for each in places), "one element stands for all"


class Net(nn.Module):
    """Convolutions and batch norms before and behind a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.behind = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        y = torch.cond(y.mean() > 5, lambda y: y * 2, lambda y: y + 1, (y,))
        made: torch.Tensor = self.behind(y)
        return made


def test_statistics_are_written_and_weights_are_trained_around_it() -> None:
    ours = Net().double()
    theirs = copy.deepcopy(ours)
    for model, call in ((ours, compiled(ours)), (theirs, theirs)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for seed in range(3):
            x = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(seed)).double()
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    assert set(left()) == {"cond"}
    for (name, mine), its in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, its, msg=lambda text, name=name: f"{name}: {text}")


def test_weights_that_change_are_taken_anew_around_it() -> None:
    model = Net().eval()
    call, x = compiled(model), image(2, 3, 7, 6)
    with torch.no_grad():
        for factor in (1.0, 2.0, 0.5):
            model.before[0].weight.mul_(factor)
            numerics.check(call(x), copy.deepcopy(model).double()(x.double()), torch.float32)


def test_a_wrong_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnngraph.executor import reference

    monkeypatch.setitem(reference.RULES, "gelu", lambda inputs, attrs: F.gelu(inputs[0]) * 1.01)  # type: ignore[index]
    with torch.no_grad(), pytest.raises(cg.WrongResult, match="value 0 is off by"):
        compiled(branches)(torch.randn(6, 8))


def test_regions_that_are_compiled_once_are_part_of_the_graph() -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return F.relu(x @ W)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return region(region(x)) + 1

    x = torch.randn(6, 8, requires_grad=True)
    y = compiled(twice)(x)
    y.sum().backward()
    assert left() == [] and len(cg.reports()) == 2
    torch.testing.assert_close(y, F.relu(F.relu(x @ W) @ W) + 1)


class Bags(nn.Module):
    """Sums, means or largest of rows of a table, or the rows, in front of layers."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(self.table(ids))
        return y


TABLES: dict[str, Callable[[], nn.Module]] = {
    "sums": lambda: nn.EmbeddingBag(9, 4, mode="sum", padding_idx=1),
    "means": lambda: nn.EmbeddingBag(9, 4),
    "largest": lambda: nn.EmbeddingBag(9, 4, mode="max"),
    "sparse rows": lambda: nn.Embedding(9, 4, sparse=True),
    "sparse sums": lambda: nn.EmbeddingBag(9, 4, mode="sum", sparse=True),
}


@pytest.mark.parametrize("name", TABLES)
def test_bags_and_sparse_gradients_leave_the_layers_to_us(name: str) -> None:
    torch.manual_seed(0)
    model = Bags(TABLES[name]())
    ids = torch.randint(0, 9, (5, 3))
    layouts, found = [], []
    for make, dtype in ((compiled, torch.float32), (None, torch.float32), (None, torch.float64)):
        each = copy.deepcopy(model).to(dtype)
        y = (each if make is None else make(each))(ids)
        y.square().sum().backward()
        grads = [p.grad for p in each.parameters() if p.grad is not None]
        layouts.append([grad.layout for grad in grads])
        found.append([y.detach(), *(grad.to_dense() for grad in grads)])
    assert layouts[0] == layouts[1]
    numerics.no_farther_than_eager(*found, torch.float32)
    reports = cg.reports()
    assert reports and not any(report.refused for report in reports), list(map(str, reports))
