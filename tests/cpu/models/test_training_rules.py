"""Losses, rearrangements, gates and adaptive max pooling within graphs of torch.compile."""

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

import cudnngraph as cg
from cudnngraph.models import dynamo, saved
from tests import generated, numerics
from tests.fused import compiled
from tests.models import image
from tests.training import Function, alike, gradients, left_to_torch, trained

GENERATES = cg.Policy(kernels=True)
Shapes = tuple[tuple[int, ...], ...]


@pytest.fixture(autouse=True)
def _new_compiler(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    with caplog.at_level(logging.WARNING, "cudnngraph"):
        yield


CLASSES = torch.tensor([0, 5, 2, 2, 6, 1])
PIXELS = (torch.arange(2 * 5 * 3) % 4).view(2, 5, 3)
REDUCTIONS = ("mean", "sum", "none")
WEIGHTS, TARGET = torch.linspace(0.5, 1.5, 7), torch.linspace(0, 1, 42).view(6, 7)
COUNTS = torch.arange(1, 8)
PAIR: Shapes = ((6, 7), (6, 7))
IMAGE: Shapes = ((2, 4, 6, 5),)

LOSSES: dict[str, tuple[Function, Shapes]] = {
    f"{name}, {how}": (lambda *x, loss=loss, how=how: loss(*x, reduction=how), shapes)
    for how in REDUCTIONS
    for name, (loss, shapes) in {
        "cross entropy": (lambda x, reduction: _classes(x, CLASSES, reduction), ((6, 7),)),
        "cross entropy of pixels": (
            lambda x, reduction: _classes(x, PIXELS, reduction),
            ((2, 4, 5, 3),),
        ),
        "likelihood": (
            lambda x, reduction: F.nll_loss(x.tanh(), CLASSES, reduction=reduction),
            ((6, 7),),
        ),
        "squares": (F.mse_loss, PAIR),
        "differences": (F.l1_loss, PAIR),
        "smooth": (lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction, beta=0.7), PAIR),
        "Huber": (lambda x, y, reduction: F.huber_loss(x, y, reduction, delta=1.3), PAIR),
        "logits": (
            lambda x, y, reduction: F.binary_cross_entropy_with_logits(
                x * 30, y.sigmoid(), reduction=reduction
            ),
            PAIR,
        ),
    }.items()
}


def _classes(x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(x, target, reduction=reduction, ignore_index=2)


def _pads(mode: str, *pads: int) -> Function:
    return lambda x: F.pad(x.tanh(), pads, mode=mode)


ARRANGED: dict[str, tuple[Function, Shapes]] = {
    "reflected lines": (_pads("reflect", 2, 3), ((2, 3, 7),)),
    "reflected": (_pads("reflect", 1, 2, 3, 0), IMAGE),
    "reflected to the border": (_pads("reflect", 3, 3, 2, 3), ((2, 3, 4, 5),)),
    "reflected volumes": (_pads("reflect", 1, 1, 1, 0, 0, 1), ((1, 2, 3, 4, 3),)),
    "repeated borders of lines": (_pads("replicate", 2, 3), ((2, 3, 7),)),
    "repeated borders": (_pads("replicate", 1, 2, 7, 0), IMAGE),
    "rolled": (lambda x: torch.roll(x.tanh(), (2, -8), (2, 3)), IMAGE),
    "rolled in place": (lambda x: torch.roll(x.tanh(), (6, 1), (2, 3)), IMAGE),
    "pixels of channels": (lambda x: F.pixel_shuffle(x.tanh(), 2), IMAGE),
    "channels of pixels": (lambda x: F.pixel_unshuffle(x.tanh(), 2), ((2, 3, 4, 6),)),
    "shuffled channels": (lambda x: F.channel_shuffle(x.tanh(), 2), IMAGE),
    "lower triangle": (lambda x: x.tanh().tril(-1), ((2, 5, 7),)),
    "upper triangle": (lambda x: x.tanh().triu(1), ((2, 5, 7),)),
    "scattered rows": (lambda x, y: x.tanh().select_scatter(y.exp(), 1, -2), ((3, 7), (3,))),
    "scattered slices": (lambda x, y: x.tanh().slice_scatter(y.exp(), 1, 2, 5), ((3, 7), (3, 3))),
}
COMPUTED: dict[str, tuple[Function, Shapes]] = {
    "weights of given lengths": (
        lambda v, g: torch._weight_norm(v, g.exp(), 0).tanh(),
        ((6, 4, 3), (6, 1, 1)),
    ),
    "weights of given lengths, last": (
        lambda v, g: torch._weight_norm(v, g.exp(), 1).tanh(),
        ((6, 5), (1, 5)),
    ),
    "gated": (lambda x: F.glu(x, 1), IMAGE),
    "prelu": (lambda x, w: F.prelu(x, w), ((2, 4, 6, 5), (4,))),
    "signs": (lambda x: x.sign() * x.exp() + F.softsign(x), PAIR[:1]),
    "products added": (lambda x, y, z: torch.addcmul(x, y, z, value=0.3), PAIR + PAIR[:1]),
    "quotients added": (
        lambda x, y, z: torch.addcdiv(x, y, z.exp() + 1, value=-0.3),
        PAIR + PAIR[:1],
    ),
    "near the first": (lambda x, y: torch.lerp(x, y, 0.3), PAIR),
    "near the second": (lambda x, y: torch.lerp(x, y, 0.8), PAIR),
    "matrices added": (
        lambda x, y, z: torch.baddbmm(x, y, z, beta=0.5, alpha=0.3),
        ((2, 3, 5), (2, 3, 4), (2, 4, 5)),
    ),
    "matrices of a layer added": (
        lambda x, y, z: torch.addmm(x, y, z, beta=0.5, alpha=-0.3) + torch.addmm(x, y, z, beta=0),
        ((5,), (3, 4), (4, 5)),
    ),
    "a matrix and a vector added": (
        lambda x, y, z: torch.addmv(x, y, z, beta=0.5, alpha=2) + torch.addmv(x, y, z.exp()),
        ((3,), (3, 4), (4,)),
    ),
    "vectors added": (
        lambda x, y, z: torch.addr(x, y, z, beta=2, alpha=0.5) * torch.addr(x, y.tanh(), z),
        ((3, 4), (3,), (4,)),
    ),
    "straight from one on": (
        lambda x: F.softplus(x, 2, threshold=1) + F.softplus(x, threshold=0.5),
        PAIR[:1],
    ),
    "a vector and a matrix": (lambda w, x: w.tanh() @ x, ((3, 5), (5,))),
    "two vectors": (lambda x, y: x.tanh().dot(y) + torch.vdot(x, y.exp()), ((5,), (5,))),
    "variances": (
        lambda x: x.var((1, 3)) + x.var() + x.exp().var((1, 3), correction=0),
        ((3, 4, 2, 5),),
    ),
    "spreads and means": (
        lambda x: torch.var_mean(x, (1, 3))[1] / torch.std_mean(x.exp(), (1, 3), correction=0)[0],
        ((3, 4, 2, 5),),
    ),
    "least and largest": (
        lambda x: torch.aminmax(x, dim=1).max - torch.aminmax(x.tanh(), dim=1, keepdim=True).min,
        PAIR[:1],
    ),
    "the larger of two": (lambda x, y: torch.max(x, y) - torch.min(x.exp(), y), PAIR),
    "largest, shared by ties": (lambda x: x.relu().amax(1) + x.relu().amin(0).sum(), PAIR[:1]),
    "counts": (
        lambda x, y: x.exp() / (y > -9).sum(1, keepdim=True) - (x > 1).sum() * y,
        PAIR,
    ),
    "masks as numbers": (
        lambda x, y: x * (y > 0) + (y < 1) - (x < 0) * y,
        PAIR,
    ),
    "any and all": (
        lambda x, y: torch.where(
            (x > 1).any(1, keepdim=True) | (y > -1).all((0, 1)) & (y > 9).any(), x, y
        ),
        PAIR,
    ),
    "deviations": (lambda x: x / (x.std(-1, keepdim=True) + 0.1), ((3, 4, 5),)),
    "logarithms of sums": (lambda x: (3 * x).logsumexp(1) + x.logsumexp((0, 1)), PAIR[:1]),
    "distances": (
        lambda x, y: F.pairwise_distance(x, y) + F.pairwise_distance(x, y, p=1),
        PAIR,
    ),
    "cosines": (F.cosine_similarity, PAIR),
    "norms": (lambda x: x.norm(1, -1) * x.norm(2, -1), PAIR[:1]),
    "within bounds": (lambda x, y, z: torch.clamp(x, y - 1, z + 1), PAIR + PAIR[:1]),
    "least values": (lambda x: F.threshold(x.tanh(), 0.2, -3.0), PAIR[:1]),
    "bools and whole numbers": (
        lambda x, y: x.exp() * (x > y) / COUNTS + (COUNTS - y) * COUNTS,
        PAIR,
    ),
    "selu": (lambda x: F.selu(x) + F.elu(x, 0.7), PAIR[:1]),
    "weighted logits": (
        lambda x: F.binary_cross_entropy_with_logits(
            *(x, TARGET.to(x.dtype), WEIGHTS.to(x.dtype)), pos_weight=1 / WEIGHTS.to(x.dtype)
        ),
        PAIR[:1],
    ),
    "instances alone": (lambda x: F.instance_norm(x), IMAGE),
    "largest of parts": (lambda x: F.adaptive_max_pool2d(x.tanh(), (4, 2)), IMAGE),
    "largest of lines": (lambda x: F.adaptive_max_pool1d(x.tanh(), 3), ((2, 3, 7),)),
    "largest of volumes": (lambda x: F.adaptive_max_pool3d(x.tanh(), 2), ((1, 2, 3, 4, 5),)),
}
CASES = {**LOSSES, **ARRANGED, **COMPUTED}


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_it_is_left_to_torch(name: str) -> None:
    function, shapes = CASES[name]
    torch.manual_seed(0)
    assert alike(function, *(torch.randn(shape) for shape in shapes), policy=GENERATES) == []


def test_sums_of_exponentials_may_be_of_infinities() -> None:
    rows = torch.tensor([[1.0, -torch.inf], [-torch.inf] * 2, [torch.inf, 1.0]])
    run = compiled(
        lambda x: (x.logsumexp(1), x.norm(torch.inf), x.norm(torch.inf, 0)), policy=GENERATES
    )
    found = run(rows)
    assert left_to_torch() == []
    wanted = rows.logsumexp(1), rows.norm(torch.inf), rows.norm(torch.inf, 0)
    for mine, torchs in zip(found, wanted, strict=True):
        assert torch.equal(mine, torchs)


@pytest.mark.parametrize("kernels", [False, True])
def test_any_and_all_of_numbers_as_torch_has_them(kernels: bool) -> None:
    """NaN is true, and so is -inf; -0 is not. Whole numbers and no elements are torch's."""
    rows = torch.tensor([[torch.nan, 0.0], [0.0, -0.0], [-torch.inf, 2.0], [torch.nan, -torch.inf]])

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        empty = x[:0].any(0), x[:0].all(0)
        whole = x.nan_to_num(0, 1, 1).long()
        return x.any(1), x.all(1), x.all(), x.any(0, keepdim=True), *empty, whole.any(1)

    run = compiled(function, policy=cg.Policy(kernels=kernels))
    for mine, torchs in zip(run(rows), function(rows), strict=True):
        assert mine.dtype == torch.bool and torch.equal(mine, torchs)


@pytest.mark.parametrize("name", ARRANGED)
def test_images_of_16_bits_and_channels_last_are_arranged_alike(name: str) -> None:
    function, shapes = ARRANGED[name]
    torch.manual_seed(0)
    data = [torch.randn(shape).bfloat16() for shape in shapes]
    if data[0].dim() == 4:
        data = [x.to(memory_format=torch.channels_last) for x in data]
    assert alike(function, *data, dtype=torch.bfloat16, policy=GENERATES) == []


WRITTEN = {
    **{name: case for name, case in LOSSES.items() if "cross" not in name and "none" not in name},
    **ARRANGED,
    **{name: COMPUTED[name] for name in ("gated", "prelu", "signs", "near the second")},
    **{name: COMPUTED[name] for name in ("counts", "masks as numbers", "largest, shared by ties")},
    **{name: COMPUTED[name] for name in ("any and all", "spreads and means")},
    "bools and whole numbers": COMPUTED["bools and whole numbers"],
    **{name: case for name, case in COMPUTED.items() if "lengths" in name},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_kernels_that_are_generated_for_it_compute_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = generated.install(monkeypatch)
    function, shapes = WRITTEN[name]
    torch.manual_seed(0)
    alike(function, *(torch.randn(shape) for shape in shapes), policy=GENERATES)
    assert made


def test_whole_numbers_beside_16_bits_are_rounded_to_these() -> None:
    function = lambda x: x * torch.arange(256, 264)  # noqa: E731  # of which bfloat16 has half
    x = torch.ones(8, dtype=torch.bfloat16)
    assert alike(function, x, dtype=torch.bfloat16, policy=GENERATES) == []
    assert torch.equal(compiled(function, policy=GENERATES)(x), function(x))


def test_a_class_that_no_row_has_counts_for_nothing() -> None:
    ignored = torch.full_like(CLASSES, 2)

    def none_of_it(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, ignored, ignore_index=2, reduction="sum") + x.sum()

    assert alike(none_of_it, torch.randn(6, 7), policy=GENERATES) == []


@pytest.mark.parametrize("pads", [(9, 9), (0, 15), (15, 1)])
def test_wide_reflections_are_ours(pads: tuple[int, int]) -> None:
    assert not alike(_pads("reflect", *pads), torch.randn(2, 3, 16), policy=GENERATES)


def _lost(x: torch.Tensor) -> torch.Tensor:
    y = F.adaptive_max_pool2d(x, (4, 2)).flatten(1)
    return F.cross_entropy(y, CLASSES[:2], ignore_index=5)


@pytest.mark.parametrize("refused", ["forward", "backward"])
def test_a_graph_that_is_torchs_meets_one_of_ours(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dynamo.convert

    def refuse(module: Any, *args: Any, **options: Any) -> Any:
        is_backward = any("backward" in str(node.target) for node in module.graph.nodes)
        if is_backward == (refused == "backward"):
            raise cg.CannotImport("not this one")
        return real(module, *args, **options)

    monkeypatch.setattr(dynamo, "convert", refuse)
    x = image(2, 3, 6, 5)
    for mine, own in zip(trained(compiled(_lost), x), trained(_lost, x), strict=True):
        torch.testing.assert_close(mine, own)


def test_neither_counts_nor_places_are_saved() -> None:
    x, saved = image(2, 3, 6, 5), list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        trained(compiled(_lost, policy=GENERATES), x)
    assert left_to_torch() == []
    places = [each for each in saved if each.dtype == torch.int64 and each.dim() == 4]
    assert all(set(each.stride()) == {0} for each in places), "one element stands for all"


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("generates", [True, False])
def test_scores_in_16_bits_are_saved_and_no_logarithms(how: str, generates: bool) -> None:
    """A kernel of the gradient computes them again; torch's op would be many without kernels."""
    data, saved = torch.randn(6, 3), list[torch.Tensor]()
    weight = torch.randn(3, 64).bfloat16()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x.bfloat16() @ weight).float(), CLASSES, reduction=how)

    policy = GENERATES if generates else cg.Policy(kernels=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = trained(compiled(loss, policy=policy), data)
    rows = [each for each in saved if each.shape == (6, 64) and each.dtype == torch.float32]
    assert len(rows) == (0 if generates else 1)
    for mine, own in zip(found, trained(loss, data), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("how", REDUCTIONS)
def test_scores_are_saved_for_a_loss_in_16_bits_and_no_logarithms(how: str) -> None:
    data, saved = torch.randn(6, 3), list[torch.Tensor]()
    weight = torch.randn(3, 64).bfloat16()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.bfloat16() @ weight, CLASSES, reduction=how)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = trained(compiled(loss, policy=GENERATES), data)
    (rows,) = (each for each in saved if each.shape == (6, 64))
    torch.testing.assert_close(rows, data.bfloat16() @ weight, rtol=2e-2, atol=5e-2)
    for mine, own in zip(found, trained(loss, data), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sides", [(), (2, 3)], ids=["rows", "images"])
def test_losses_of_sizes_that_change_are_trained(sides: tuple[int, ...]) -> None:
    weight = torch.randn(5, 7)

    def loss(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        scores = (x.movedim(1, -1).bfloat16() @ weight.bfloat16()).movedim(-1, 1)
        return F.cross_entropy(scores.float(), classes)

    call = torch.compile(loss, backend=dynamo.backend, dynamic=True)
    for rows in (4, 9, 6):
        data = torch.randn(rows, 5, *sides)
        classes = torch.randint(7, (rows, *sides))
        found = trained(call, data, classes)
        for mine, own in zip(found, trained(loss, data, classes), strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-2, atol=1e-3)
    assert not any(report.refused for report in cg.reports())


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_a_log_softmax_of_nothing_is_trained(shape: tuple[int, ...]) -> None:
    def logarithms(x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(x * 2, dim=1)

    found = trained(compiled(logarithms, policy=GENERATES), torch.randn(shape))
    assert [tuple(each.shape) for each in found] == [shape, shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_nothing_of_frozen_batch_norms_is_left_to_torch(affine: bool, dtype: torch.dtype) -> None:
    """How near their gradients are to float64 is tested by the architecture of that name."""
    mean, var = torch.randn(4), torch.rand(4) + 0.5

    def normalised(x: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
        return F.relu(F.batch_norm(torch.tanh(x), mean, var, *vectors))

    data = [torch.randn(2, 4, 5, 6).to(dtype)]
    data += [torch.randn(4), torch.randn(4)] if affine else []
    found = trained(compiled(normalised), *data)
    assert left_to_torch() == []
    for mine, own in zip(found, trained(normalised, *data), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "norm",
    [
        *(nn.LayerNorm(5), nn.LayerNorm(5, elementwise_affine=False)),
        *(nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=str,
)
def test_norms_train_whose_weights_and_statistics_have_16_bits(
    norm: nn.Module, dtype: torch.dtype
) -> None:
    """As on a CPU, where torch keeps them so."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), copy.deepcopy(norm)).to(dtype)
    own, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x, by = image(*IMAGE[0]).to(dtype), torch.linspace(-1, 1, 240, dtype=torch.float64)
    by = by.view(IMAGE[0])
    found = gradients(model, compiled(model), x.requires_grad_(), by)
    eager = gradients(own, own, x, by)
    wanted = gradients(exact, exact, x.detach().double().requires_grad_(), by)
    numerics.no_farther_than_eager(found, eager, wanted, dtype)
    running = ([b for b in each.buffers() if b.is_floating_point()] for each in (model, own, exact))
    numerics.no_farther_than_eager(*running, dtype)
    assert left_to_torch() == []


def test_a_gradient_of_the_second_operand_alone_is_its_own() -> None:
    """The gradient of the image, which nobody asks for, has the same shape."""
    image = torch.randn(3, 2, 2, 2)

    def sampled(grid: torch.Tensor) -> torch.Tensor:
        given = image.to(grid.dtype)
        return F.grid_sample(given, torch.tanh(grid), align_corners=False)

    assert alike(sampled, torch.randn(3, 2, 2, 2)) == [
        "aten.grid_sampler_2d.default",
        "aten.grid_sampler_2d_backward.default",
    ]


def test_instances_with_weights_are_normalised_by_ours() -> None:
    def normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.instance_norm(x, weight=weight, bias=bias)

    data = [torch.randn(shape).double() for shape in ((2, 4, 6, 5), (4,), (4,))]
    assert alike(normalised, *data, policy=GENERATES) == []


#: The gradients of torch's kernels on a GPU at NaN. On a CPU those of whole vectors differ from
#: those of single numbers.
AT_NAN: dict[str, tuple[Function, float]] = {
    "relu": (F.relu, 1.0),
    "relu6": (F.relu6, 1.0),
    "hardtanh": (F.hardtanh, 1.0),
    "hardswish": (F.hardswish, 1.0),
    "hardsigmoid": (F.hardsigmoid, 0.0),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.125), 0.125),
    "elu": (F.elu, 1.0),
    "gelu": (F.gelu, float("nan")),
    "silu": (F.silu, float("nan")),
    "threshold 0": (lambda x: F.threshold(x, 0.0, 0.0), 1.0),
    "threshold 0.1": (lambda x: F.threshold(x, 0.1, 20.0), 1.0),
}


@pytest.mark.parametrize("generates", [False, True], ids=["reference", "kernels"])
@pytest.mark.parametrize("name", AT_NAN)
def test_a_gradient_at_nan_is_torchs(name: str, generates: bool) -> None:
    function, slope = AT_NAN[name]
    x = torch.tensor([float("nan"), -4.0, -1.0, 0.5, 2.0, 7.0], requires_grad=True)
    policy = cg.Policy(kernels=generates)
    compiled(function, policy=policy, check=False)(x).backward(torch.arange(2.0, 8.0))
    assert left_to_torch() == []
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], torch.tensor(2.0 * slope), equal_nan=True)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_that_drops_nothing_saves_no_state_of_a_generator(dropout: float) -> None:
    """Torch's kernels for GPUs leave memory as it was there, which compares with nothing."""
    names = ("do", "q", "k", "v", "o", "lse", "seed", "offset")
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in names}
    for name, node in nodes.items():
        shape = () if name in ("seed", "offset") else (1, 2, 4) if name == "lse" else (1, 2, 4, 8)
        node.meta["val"] = torch.empty(shape, dtype=None if shape else torch.int64, device="meta")
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    *data, seed, offset = nodes.values()
    made = graph.call_function(
        backward, (*data[:4], None, *data[4:], seed, offset, dropout, [True] * 3 + [False], True)
    )
    graph.output((made,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    saved.without_states(module)
    assert saved.unread(module) == (set() if dropout else {"seed", "offset"})
    call = next(node for node in module.graph.nodes if node.target is backward)
    assert len(call.args) == 12 and all(call.args[at] is not None for at in (7, 8))
