"""torch.compile and fuse where layouts, identities and writes of tensors matter."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.device.import_rules import NO
from cudnngraph.device.rules import following
from cudnngraph.errors import CannotImport
from cudnngraph.models import dynamo
from cudnngraph.models.convert import convert
from tests import numerics
from tests.models import turned

pytestmark = pytest.mark.usefixtures("forgotten")

EXACT = 1e-5
BF16 = torch.bfloat16


def compiled(function: Any, **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, backend="cudnngraph", options=options)
    return made


def distance(a: Any, b: Any) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    return float((a.detach().double() - b.detach().double()).abs().max())


def trained_alike(function: Any, *given: torch.Tensor, **options: Any) -> None:
    """Results and gradients of all that has one."""
    leaves = [x for x in given if x.requires_grad]
    leaves += list(function.parameters()) if isinstance(function, nn.Module) else []
    ours, theirs = compiled(function, **options)(*given), function(*given)
    assert distance(ours, theirs) < EXACT
    scale = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((ours * scale).sum(), leaves)
    for a, b in zip(grads, torch.autograd.grad((theirs * scale).sum(), leaves), strict=True):
        assert distance(a, b) < EXACT


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(self.patches(x).flatten(2).transpose(1, 2))
        return y


@pytest.mark.parametrize("last", [False, True], ids=["as given", "channels_last"])
def test_torchs_inner_ops_get_their_operands_as_they_lay_when_traced(last: bool) -> None:
    """Attention, norms and weight norm read memory without asking how it lies."""
    torch.manual_seed(0)
    options = {"channels_last": True} if last else {}
    data = [torch.randn(2, 4, 8, 6, requires_grad=True) for _ in range(3)]
    trained_alike(turned, *data, **options)
    trained_alike(lambda *t: F.scaled_dot_product_attention(*t), *data, **options)
    trained_alike(nn.LayerNorm(8), torch.randn(2, 5, 6, 8, requires_grad=True), **options)
    trained_alike(Patches(), torch.randn(2, 3, 16, 16), **options)
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
    normed = normed.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    trained_alike(normed, x, **options)


def test_norms_of_float16_weights_are_kept_as_the_gradient_takes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In float32: torch's meta kernel says float16, and on a GPU the gradient refuses that."""
    torch.manual_seed(0)
    shapes = [(2, 3, 6, 6), (8, 3, 3, 3), (8, 1, 1, 1)]
    leaves = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    assert torch._weight_norm_interface(*leaves[1:], 0)[1].dtype == torch.float32

    def weighted(x: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, torch._weight_norm(v, g, 0))

    with caplog.at_level(logging.WARNING, "cudnngraph.models.dynamo"):
        ours = compiled(weighted)(*leaves)
        kept = ours.grad_fn.saved_tensors
        found = [ours, *torch.autograd.grad(ours.sum(), leaves)]
    assert not caplog.records
    assert [each.dtype for each in kept if each.shape == shapes[2]] == [
        torch.float16,
        torch.float32,
    ]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wide = weighted(*exact)
    for a, b in zip(found, [wide, *torch.autograd.grad(wide.sum(), exact)], strict=True):
        assert float((a.detach().double() - b.detach()).norm()) <= 2e-3 * float(b.detach().norm())


def test_an_op_of_the_users_gets_its_operands_as_they_lay_when_traced() -> None:
    @torch.library.custom_op("cudnngraph_tests::row_sums", mutates_args=())
    def row_sums(x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        return x.sum(-1)

    @row_sums.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[:-1])

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops.cudnngraph_tests.row_sums(x.transpose(1, 2).contiguous())
            return y

    x = torch.randn(2, 3, 4)
    assert distance(cg.fuse(Model().eval(), x)(x), Model()(x)) < EXACT


def test_a_mean_of_images_channels_last_is_no_reason_to_leave_the_graph_to_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torch traces it with an as_strided that relabels dims of one element."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    with caplog.at_level(logging.WARNING, "cudnngraph.models.dynamo"), torch.no_grad():
        assert distance(compiled(model)(x), model(x)) < EXACT
    assert not caplog.records


def test_a_norm_that_comes_first_trains_as_ours(caplog: pytest.LogCaptureFixture) -> None:
    """Its input needs no gradient, and what torch calls for the others gives None for that."""
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))
    with caplog.at_level(logging.WARNING, "cudnngraph.models.dynamo"):
        trained_alike(model, torch.randn(2, 5, 16))
    assert not caplog.records


def test_16_bit_models_train_where_an_op_names_its_dtypes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Softmax(-1)).half()
    x, scale = torch.randn(2, 5, 16).half(), torch.randn(2, 5, 8).half()
    want = torch.autograd.grad((model(x) * scale).sum(), list(model.parameters()))
    found = torch.autograd.grad((compiled(model)(x) * scale).sum(), list(model.parameters()))
    assert all(distance(a, b) < 1e-2 for a, b in zip(found, want, strict=True))
    other = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)).bfloat16()
    compiled(other)(x.bfloat16()).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in other.parameters())


def test_weights_in_the_place_of_others_are_noticed_wherever_they_lie() -> None:
    """Memory that nobody holds is handed out again, and a new tensor's version is 0 again."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)).eval()
    x, fast = torch.randn(1, 64, 8, 8), compiled(model)
    with torch.no_grad():
        for _ in range(3):
            del model[0].weight
            model[0].weight = nn.Parameter(torch.randn(64, 64, 3, 3))
            assert distance(fast(x), model(x)) < 1e-3


def test_writes_to_weights_of_inference_mode_are_noticed() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
        x, fast = torch.randn(2, 4, 3, 3), compiled(model)
        for factor in (1, 10, -1):
            model[0].weight.mul_(factor)
            assert distance(fast(x), model(x)) < EXACT


def test_results_have_torchs_strides_also_with_gaps() -> None:
    x = torch.randn(4, 6)
    with torch.no_grad():
        parts = compiled(lambda x: (x * 2).chunk(2, -1))(x)
    assert [part.stride() for part in parts] == [(6, 1), (6, 1)]
    assert torch.equal(torch.cat(parts, -1), x * 2)


class Twice(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(2, 5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.p


def test_one_tensor_in_two_places_of_the_example_says_nothing_of_the_next() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 16).unbind(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    fused = cg.fuse(attention, (q, q, q))
    with torch.no_grad():
        for given in ((q, k, v), (q, k, k), (v, v, v)):
            assert distance(fused(*given)[0], attention(*given)[0]) < EXACT
    assert distance(cg.fuse(Twice().eval(), (q, q))(q, k), q * 2 + k) < EXACT
    held = Held().eval()
    fused = cg.fuse(held, held.p.data)
    assert distance(fused(k), held(k)) < EXACT
    fused = cg.fuse(held, held.p)
    assert distance(fused(k), held(k)) < EXACT and distance(fused(held.p), held(held.p)) < EXACT


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)
        self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x.half()).relu()).float()
        return y


def test_a_model_that_works_in_16_bits_inside_is_checked_as_such() -> None:
    torch.manual_seed(0)
    model, x = Narrow().eval(), torch.randn(2, 3, 16, 16)
    fused = cg.fuse(model, x)
    assert distance(fused(x), model(x)) < 1e-2


class Result:
    def __init__(self, a: torch.Tensor) -> None:
        self.a = a


def test_results_that_are_no_tensors_are_refused() -> None:
    class Boxed(nn.Module):
        def forward(self, x: torch.Tensor) -> Result:
            return Result(x + 1)

    for check in (True, False):
        with pytest.raises(
            cg.CannotImport,
            match=r"Boxed returns a Result, which a graph does not: .*return the tensors in it",
        ):
            cg.fuse(copy.deepcopy(Boxed()).eval(), torch.randn(2, 3), check=check)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_graph_is_imported_for_the_device_that_it_runs_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def noted(*args: Any, on_gpu: bool, **options: Any) -> Any:
        asked.append(on_gpu)
        raise CannotImport("enough is seen")

    monkeypatch.setattr(dynamo, "convert", noted)
    monkeypatch.setattr(dynamo, "traced_on", lambda traced, args: torch.device(kind))
    x = torch.randn(4, 8, requires_grad=True)
    compiled(nn.Linear(8, 8))(x).sum().backward()
    assert asked == [kind == "cuda"] * 2  # forward and backward


class Scored(nn.Module):
    """Words of an odd number, and the weights by which they are read and scored alike."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layer(self.words(x)), self.words.weight)


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_done_for_a_gpu_is_right_through_torch_compile(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def for_a_gpu(*args: Any, on_gpu: bool, **options: Any) -> Any:
        made.append(convert(*args, on_gpu=True, **options))
        return made[-1]

    monkeypatch.setattr(dynamo, "convert", for_a_gpu)
    torch.manual_seed(0)
    model, x = Scored().to(BF16).requires_grad_(not inference), torch.randint(37, (4, 6))
    with following((("padded_product_min", NO),)):
        ours = compiled(model)(x)
        found = [] if inference else torch.autograd.grad(ours.float().sum(), model.parameters())
    exact = copy.deepcopy(model).double()
    want = exact(x)
    numerics.check(ours, want, BF16, terms=64)
    if not inference:
        grads = torch.autograd.grad(want.sum(), exact.parameters())
        for ours, want in zip(found, grads, strict=True):
            numerics.check(ours, want, BF16, terms=64)
    sizes = {
        size
        for imported in made
        for node in imported.spec.nodes
        if node.op == "matmul"
        for name in (*node.operands, *node.results)
        for size in imported.spec.tensors[name].shape
    }
    assert 40 in sizes and 37 not in sizes
