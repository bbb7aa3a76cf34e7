"""Training through torch.compile: what is random, saved or of many results, and what is ours."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import cudnngraph as cg
from cudnngraph.models import dynamo, report, retrace
from cudnngraph.models.convert import convert
from cudnngraph.runtime import checks
from tests import numerics
from tests.fused import compiled
from tests.models import Of, image
from tests.training import Function, alike, left_to_torch, trained


@pytest.fixture(autouse=True)
def _new_compiler(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    with caplog.at_level(logging.WARNING, "cudnngraph"):
        yield


# -- random numbers --------------------------------------------------------------------------------


def test_dropout_has_torchs_numbers_and_new_ones_in_every_step() -> None:
    def drop(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x, 0.25) * 3, 0.5)

    x, run = torch.rand(64, 32) + 1, compiled(drop)
    for seed in (3, 4):
        for mine, own in zip(trained(run, x, seed=seed), trained(drop, x, seed=seed), strict=True):
            torch.testing.assert_close(mine, own)
    assert left_to_torch() == []
    results = [run(x) for _ in range(3)]
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


def test_a_gradient_is_dropped_where_its_result_is() -> None:
    x = (torch.rand(50, 40) + 1).requires_grad_()
    y = compiled(lambda x: F.dropout(x.exp(), 0.3))(x)
    y.sum().backward()
    assert x.grad is not None
    kept = y != 0
    assert 0.6 < float(kept.float().mean()) < 0.8
    torch.testing.assert_close(x.grad, torch.where(kept, x.detach().exp() / 0.7, 0.0))


def _drop_path(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.7).div_(0.7)


RANDOM: dict[str, tuple[Function, list[str]]] = {
    "drop path": (_drop_path, []),
    "noise": (lambda x: x + 0.1 * torch.randn_like(x) * x.tanh(), []),
    "uniform": (lambda x: x * torch.rand(x.shape[-1]), []),
    "everything dropped": (lambda x: F.dropout(x, 1.0) + x, []),
    "mixed": (lambda x: F.dropout(x * torch.rand(x.shape), 0.5) + _drop_path(x), []),
    "channels": (lambda x: F.dropout2d(x[None], 0.5)[0], []),
    "alpha": (lambda x: F.alpha_dropout(x, 0.5, training=True), []),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.25)[0],
        [],
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_a_form_are_drawn_as_torch_draws_them(name: str) -> None:
    function, opaque = RANDOM[name]
    x = image(6, 5, 8)
    for mine, own in zip(trained(compiled(function), x), trained(function, x), strict=True):
        torch.testing.assert_close(mine, own)
    assert left_to_torch() == opaque


@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.parametrize("budget", [0, 0.5])
def test_a_budget_of_memory_draws_no_numbers_again(budget: float, generates: bool) -> None:
    """What a backward computes again, it computes of the numbers of its forward."""

    def dropped(x: torch.Tensor) -> torch.Tensor:
        x = F.dropout((x @ x.mT).exp(), 0.5) * torch.bernoulli(x.detach().sigmoid().mean())
        return (F.dropout2d(x[None], 0.5)[0] @ x).square() + torch.rand_like(x) * x

    x = image(3, 5, 5)
    policy = cg.Policy(kernels=generates)
    run = compiled(dropped, activation_memory_budget=budget, policy=policy)
    for seed in range(3):
        mine, own = (trained(each, x, seed=seed) for each in (run, dropped))
        torch.testing.assert_close(mine, own)
    assert not any(report.refused for report in cg.reports())


def test_an_op_that_reads_numbers_and_draws_others_is_a_step_of_torch() -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(x.detach().sigmoid())

    x = torch.randn(100, 10)
    run = compiled(chosen)
    results = [trained(run, x, seed=seed) for seed in range(2)]
    for y, gradient in results:
        kept = gradient != 0
        assert 0.4 < float(kept.float().mean()) < 0.6
        torch.testing.assert_close(y, torch.where(kept, x, 0.0))
    assert not torch.equal(results[0][0], results[1][0])
    assert left_to_torch() == ["aten.bernoulli.default"]


def _read_last_first(x: torch.Tensor) -> torch.Tensor:
    first, last = torch.bernoulli(x.detach().sigmoid()), torch.poisson(x.detach().exp())
    return x * last + x.tanh() * first


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(F.rrelu(F.dropout(x, 0.3), training=True), 0.2),
        lambda x: torch.bernoulli(x.detach().sigmoid()) * F.dropout(x, 0.5),
        _read_last_first,
    ],
    ids=["a slope", "a gate", "two"],
)
def test_random_numbers_come_in_the_order_of_the_model(function: Any) -> None:
    """Also beside ops that read numbers, which cannot draw in front of the graph."""
    x = image(6, 5, 8)
    for mine, own in zip(trained(compiled(function), x), trained(function, x), strict=True):
        torch.testing.assert_close(mine, own)


# -- what is saved, and of what form ---------------------------------------------------------------


def test_tensors_that_repeat_elements_are_saved_and_given_as_torch_gives_them() -> None:
    def repeats(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wide = x.exp().unsqueeze(1).expand(-1, 4, -1)
        return (wide * y).tanh()

    assert alike(repeats, image(3, 5), image(3, 4, 5)) == []
    wide = compiled(lambda x: (x + 1)[:, None].expand(3, 4, 5))
    for x in (image(3, 5), image(3, 5).requires_grad_()):
        y = wide(x)
        assert y.stride() == (5, 0, 1)
        torch.testing.assert_close(y, (x + 1)[:, None].expand(3, 4, 5))


def test_a_tensor_that_overlaps_itself_otherwise_is_given_with_its_numbers() -> None:
    windows = compiled(lambda x: (x * 2).unfold(0, 3, 1))
    x = torch.arange(6.0)
    torch.testing.assert_close(windows(x), (x * 2).unfold(0, 3, 1))
    assert not any(report.refused for report in cg.reports())


def test_whole_numbers_are_reshaped_and_computed_within_a_graph() -> None:
    table = image(12, 4)

    def looked_up(weight: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        places = (at.view(-1) + 1).reshape(at.shape) % 12
        return F.embedding(places, weight).tanh()

    names = alike(looked_up, table, torch.tensor([[3, 4, 11], [0, 5, 3]]))
    assert set(names) <= {
        *("aten.add.Tensor", "aten.remainder.Scalar", "aten.embedding.default"),
        *("aten.clone.default", "aten.embedding_dense_backward.default"),
    }


def test_an_op_of_more_results_than_a_few_is_a_step_of_torch() -> None:
    data = [image(2, count) for count in range(1, 10)]

    def scaled(*data: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch._foreach_mul([x.tanh() for x in data], 2.0), 1)

    with torch.no_grad():
        torch.testing.assert_close(compiled(scaled)(*data), scaled(*data))
    assert left_to_torch() == ["aten._foreach_mul.Scalar"]


def test_batches_are_counted_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    real = torch._foreach_add

    def add(tensors: Any, number: Any) -> Any:
        launched.append(len(tensors))
        return real(tensors, number)

    monkeypatch.setattr(torch, "_foreach_add", add)
    norms = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3)))
    run = compiled(norms)
    for _ in range(2):
        run(image(5, 4)).sum().backward()
    assert launched == [3, 3]
    assert [int(norm.num_batches_tracked) for norm in norms] == [2, 2, 2]
    assert left_to_torch() == []


def test_what_a_model_writes_is_written_in_one_launch_for_each_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Running statistics, counts of batches, and an argument that the model adds to."""
    launched: list[int] = []
    real = torch._foreach_copy_

    def copy(targets: Any, values: Any) -> None:
        launched.append(len(targets))
        real(targets, values)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(3))

        def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            total.add_(x.sum(0))
            return torch.cat([norm(x) for norm in self.norms])

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    model, own = Model(), Model()
    run = compiled(model)
    found, wanted = torch.zeros(4), torch.zeros(4)
    for step in range(3):
        x = image(5, 4) + step
        run(x, found).sum().backward()
        own(x, wanted).sum().backward()
    assert sorted(launched) == [3] * 3 + [7] * 3, "of int64, of float32"
    numerics.check(found, wanted.double(), torch.float32, terms=64)
    for mine, torchs in zip(model.buffers(), own.buffers(), strict=True):
        assert mine._version >= 3
        numerics.check(mine, torchs.double(), torch.float32, terms=64)


def test_a_graph_that_torch_runs_writes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise cg.CannotImport("not this one")

    monkeypatch.setattr(dynamo, "convert", refuse)
    norm, own = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    run = compiled(norm)
    for step in range(2):
        x = image(5, 4) + step
        run(x).sum().backward()
        own(x).sum().backward()
    for mine, torchs in zip(norm.buffers(), own.buffers(), strict=True):
        assert torch.equal(mine, torchs)


def _pooled(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x.sigmoid(), 3, 2, 1)


@pytest.mark.parametrize("ours", [True, False])
def test_indices_of_max_pooling_are_found_again(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dynamo.convert

    def refuse_gradients(module: Any, *args: Any, **options: Any) -> Any:
        if any("backward" in str(node.target) for node in module.graph.nodes):
            raise cg.CannotImport("not this one")
        return real(module, *args, **options)

    if not ours:
        monkeypatch.setattr(dynamo, "convert", refuse_gradients)
    x = image(2, 3, 9, 8)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = trained(compiled(_pooled), x)
    for mine, own in zip(found, trained(_pooled, x), strict=True):
        torch.testing.assert_close(mine, own)
    (indices,) = (each for each in saved if each.dtype == torch.int64)
    assert set(indices.stride()) == {0}, "one element stands for all"
    if ours:
        assert left_to_torch() == []


# -- what is ours ----------------------------------------------------------------------------------


def _rotated(x: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * 2 - odd, odd + even], -1).flatten(-2)


GENERATES = cg.Policy(kernels=True)
OURS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    **{
        name: (getattr(F, name), ((3, 4, 7),))
        for name in (
            *("gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "relu6"),
            *("leaky_relu", "elu", "celu", "softplus", "mish", "relu"),
        )
    },
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), ((5, 6),)),
    "celu of another slope": (lambda x: F.celu(x.tanh(), 0.4), ((5, 6),)),
    "softmax": (lambda x: F.softmax(x, 1), ((3, 4, 7),)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), ((3, 7),)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (7,), w, b), ((3, 4, 7), (7,), (7,))),
    "layer norm alone": (lambda x: F.layer_norm(x, (4, 7)), ((3, 4, 7),)),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((3, 4, 5, 6), (4,), (4,))),
    "group norm alone": (lambda x: F.group_norm(x, 2), ((3, 4, 5, 6),)),
    "attention": (F.scaled_dot_product_attention, ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))),
    "causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5),
        ((2, 3, 5, 8),) * 3,
    ),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), ((2, 3, 9, 8),)),
    "max pool of volumes": (lambda x: F.max_pool3d(x, 2), ((2, 3, 4, 6, 4),)),
    "average pool": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        ((2, 3, 9, 8),),
    ),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), ((2, 3, 9, 8),)),
    "nearest": (lambda x: F.interpolate(x.tanh(), scale_factor=2), ((2, 3, 4, 5),)),
    "nearest of one dim": (lambda x: F.interpolate(x.tanh(), (12,)), ((2, 3, 4),)),
    "slices": (lambda x: x[:, 1:3] * x[:, 2:4], ((3, 5, 4),)),
    "selected": (lambda x: x[:, 0] + x[:, -1].tanh(), ((3, 5, 4),)),
    "strided": (_rotated, ((3, 5, 8),)),
    "strided, with a rest": (lambda x: x[:, 1::3].exp(), ((4, 9),)),
    "padded": (lambda x: F.pad(x, (1, 2, -1, 3), value=0.5).tanh(), ((3, 5, 4),)),
    "transposed convolution": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, output_padding=1, groups=2),
        ((2, 4, 5, 6), (4, 3, 3, 3), (6,)),
    ),
    "transposed convolution of lines": (
        lambda x, w: F.conv_transpose1d(x.tanh(), w, stride=3, dilation=2),
        ((2, 4, 5), (4, 3, 3)),
    ),
    "repeated": (lambda x: x.tanh().repeat(2, 1, 3), ((5, 4),)),
    "a norm of rows": (lambda x: x * torch.linalg.vector_norm(x, dim=-1, keepdim=True), ((5, 4),)),
    "dropped": (lambda x: F.dropout(x, 0.5), ((3, 5, 4),)),
    "whole": (lambda x: F.hardtanh(x, -0.5, 0.25) * x.sum((1, 2), keepdim=True), ((3, 4, 5),)),
}


@pytest.mark.parametrize("name", OURS)
def test_gradients_of_torchs_inner_ops_are_ours(name: str) -> None:
    function, shapes = OURS[name]
    torch.manual_seed(0)
    assert alike(function, *(torch.randn(shape) for shape in shapes), policy=GENERATES) == []


@pytest.mark.parametrize("kernels", [True, False])
def test_places_that_repeat_nothing_evenly_are_looked_up_by_torch(kernels: bool) -> None:
    """And are summed up by it, where no kernel does."""

    def looked_up(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()[:, :, torch.tensor([0, 0, 1, 3, 3, 2])]

    left = alike(looked_up, image(2, 3, 4), policy=cg.Policy(kernels=kernels))
    assert "aten.index.Tensor" in left
    assert ("aten.index_put.default" in left) == (not kernels)


def test_images_channels_last_are_normalised_by_groups_as_they_lie() -> None:
    function, shapes = OURS["group norm"]
    x, *rest = (torch.randn(shape) for shape in shapes)
    x = x.to(memory_format=torch.channels_last)
    assert alike(function, x, *rest, policy=GENERATES) == []


def test_rows_that_attend_to_nothing_have_no_gradient() -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False

    def masked(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    _, dq, dk = trained(compiled(masked), image(1, 2, 5, 8), image(1, 2, 7, 8))
    assert bool((dq[:, :, 2] == 0).all()) and bool(dk.isfinite().all())


# -- reports ---------------------------------------------------------------------------------------


def test_reports_list_each_graph_and_what_is_left_to_torch() -> None:
    torch.compiler.reset()
    assert cg.reports() == []
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    run = compiled(model)
    run(image(3, 4)).sum().backward()
    forward, backward = cg.reports()
    assert forward.model.startswith("forward ") and backward.model.startswith("backward ")
    assert forward.counts == {"reference": len(forward.steps)} and "matmul" in str(forward)
    assert "gelu_backward" in str(backward) and backward.opaque == ()
    run = compiled(Of(lambda m, x: torch.sort(x)[0].relu()))
    with torch.no_grad():
        run(image(5))
    assert "torch's own: aten.sort" in str(cg.reports()[-1])
    alive = list(report._COMPILED.values())
    torch.compiler.reset()
    assert len(alive) == 3 and cg.reports() == []


def test_a_report_says_why_a_graph_is_left_to_torch() -> None:
    torch.compiler.reset()
    model = Of(lambda m, x: x.half().view(torch.int16) + 1)
    with torch.no_grad():
        compiled(model)(torch.ones(10))
    (only,) = cg.reports()
    assert "it reads bits" in only.refused and "left to torch, " in str(only)
    assert only.steps == () and "it reads bits" in only._repr_html_()


# -- time ------------------------------------------------------------------------------------------


def test_a_graph_is_traced_again_for_other_forms_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    real = retrace.fits

    def noted(*args: Any, **options: Any) -> bool:
        found.append(real(*args, **options))
        return found[-1]

    monkeypatch.setattr(retrace, "fits", noted)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    plain = copy.deepcopy(model)
    run = compiled(model)
    for size in (8, 10, 12):
        x = image(2, 3, size, size)
        run(x).sum().backward()
        plain(x).sum().backward()
    assert found[:2] == [True, True] and False in found[2:], "sizes are symbols from then on"
    for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad, rtol=1e-4, atol=1e-5)


def test_inputs_that_lie_otherwise_at_each_call_are_graphs_of_ours() -> None:
    """torch then has symbols for strides, also for those that its guards let be one number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5))
    plain = copy.deepcopy(model)
    run = compiled(model)
    wide, long = torch.randn(8, 12), torch.randn(30)
    ways = [wide[:4, :6], wide[:6, :4].t(), wide[:1, :6].expand(4, 6), wide[::2, ::2]]
    ways += [long[3:27].view(4, 6), long.as_strided((4, 6), (2, 1)), wide[:4, :6].clone()]
    for x in ways:
        run(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert left_to_torch() == []
    for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad, rtol=1e-4, atol=1e-5)


def test_neighbours_are_all_that_overlap() -> None:
    memory = torch.zeros(200)
    torch.manual_seed(0)
    for _ in range(20):
        tensors = {}
        for at in range(12):
            start, rows, step = (
                int(torch.randint(*each, ())) for each in ((0, 90), (0, 9), (1, 9))
            )
            tensors[f"t{at}"] = memory.as_strided((rows, 2), (step, 1), start)
        near = checks.neighbours(tensors)
        for a, first in tensors.items():
            for b, second in tensors.items():
                if a != b and first.numel() and second.numel():
                    assert not checks.overlap(first, second) or (b in near[a] and a in near[b])


# -- attention of GPUs, imported without one -------------------------------------------------------


def _on_gpu(kind: str, p: float) -> Function:
    """Attention and its gradient in the form that torch traces on a GPU."""
    aten: Any = torch.ops.aten
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> Any:
        if kind == "flash":
            o, lse, *rest, _ = forward(q, k, v, p, True, False)
            given = (*rest[:4], p, True, *rest[4:])
        elif kind == "cudnn":
            o, lse, *rest, _ = forward(q, k, v, None, True, p, True, False)
            given = (*rest[4:], None, *rest[:4], p, True)
        else:
            o, lse, *rest = forward(q, k, v, None, True, p, True)
            return (
                o,
                lse,
                *rest,
                *backward(do, q, k, v, None, o, lse, *rest, p, [True, True, True, False], True),
            )
        return o, lse, *rest[4:], *backward(do, q, k, v, o, lse, *given)

    return run


@pytest.mark.parametrize(
    ("kind", "p", "dtype"),
    [
        *((kind, p, "float16") for kind in ("cudnn", "flash", "efficient") for p in (0.0, 0.25)),
        ("efficient", 0.0, "float32"),
    ],
)
def test_attention_as_gpus_have_it_is_ours_and_torchs_if_it_drops(
    kind: str, p: float, dtype: str
) -> None:
    form: Any = {"dtype": getattr(torch, dtype), "device": "meta"}
    data = [torch.empty(2, 3, 37, 64, **form) for _ in range(4)]
    traced = make_fx(_on_gpu(kind, p), tracing_mode="real")(*data)
    names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    found = convert(traced, {}, names, keep_strides=True, random=True)
    assert found.spec is not None
    ops = [node.op for node in found.spec.nodes]
    seeds = [result[0] for result in found.results[2:4]]
    if p or dtype == "float32":
        assert ops == ["aten", "aten"], "forward and backward by the same kernels"
        return
    assert "aten" not in ops and {"sdpa", "sdpa_backward"} <= {*ops}
    assert set(seeds) == {"copy"}, "nothing is drawn"


def test_a_step_reads_the_callers_tensors_and_holds_no_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of each weight and of each saved tensor would be a launch, and memory, a tensor."""
    from cudnngraph.runtime.executable import Executable

    read: set[int] = set()
    run = Executable.stepwise

    def noted(self: Executable, tensors: Any) -> Any:
        read.update(each.data_ptr() for each in tensors)
        return run(self, tensors)

    monkeypatch.setattr(Executable, "stepwise", noted)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    compiled = torch.compile(model, backend="cudnngraph")
    x = torch.randn(2, 3, 8, 8)
    first = compiled(x)
    first.sum().backward()
    assert {p.data_ptr() for p in model.parameters() if p.dim() == 4} <= read
    assert x.data_ptr() in read
    kept = first.detach().clone()
    second = compiled(x + 1)
    assert second.data_ptr() != first.data_ptr() and torch.equal(first.detach(), kept)
