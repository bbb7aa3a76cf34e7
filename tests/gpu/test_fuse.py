"""Whole models on a GPU in float16: as good as torch, captured, and no memory lost."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.device.rules import changed
from cudnngraph.models.dynamo import backend
from cudnngraph.models.fused import Fused
from tests import thresholds
from tests.models import Attends, DiffusionUNet, Of, Windows, WritesAttention, drifting, turned

F16 = torch.float16
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "resnet": (
        lambda: models.ResNet((1, 2, 1, 1), 32, 10),
        lambda: torch.randn(4, 3, 96, 96, device="cuda", dtype=F16),
    ),
    "deeplab": (
        lambda: models.DeepLab(models.ResNet((1, 1, 2, 1), 16, 10, dilated=True), 32, 5),
        lambda: torch.randn(2, 3, 97, 97, device="cuda", dtype=F16),
    ),
    "unet": (
        lambda: models.UNet(16, 3),
        lambda: torch.randn(2, 3, 64, 64, device="cuda", dtype=F16),
    ),
    "decoder": (
        lambda: models.LatentDecoder((128, 64), 1, heads=2),
        lambda: torch.randn(2, 4, 64, 64, device="cuda", dtype=F16),
    ),
    "gpt": (
        lambda: models.GPT(97, 128, 2, 64),
        lambda: torch.randint(0, 97, (3, 64), device="cuda"),
    ),
    "vit": (
        lambda: models.ViT(64, 8, 128, 2, 10),
        lambda: torch.randn(3, 3, 64, 64, device="cuda", dtype=F16),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(128, 2, 256, activation="gelu", batch_first=True),
            2,
            enable_nested_tensor=False,
        ),
        lambda: torch.randn(3, 64, 128, device="cuda", dtype=F16),
    ),
    "attention": (Attends, lambda: torch.randn(4, 32, 16, device="cuda", dtype=F16)),
    "written": (WritesAttention, lambda: torch.randn(4, 32, 64, device="cuda", dtype=F16)),
    "windows": (Windows, lambda: torch.randn(3, 10, 32, device="cuda", dtype=F16)),
    "convnext": (
        lambda: models.ConvNeXt((32, 64), (1, 2), 10),
        lambda: torch.randn(2, 3, 64, 64, device="cuda", dtype=F16),
    ),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, example = MODELS[name]
    return models.randomized(make()).cuda().half(), example()


def test_attention_that_is_written_out_runs_as_plans() -> None:
    """Both of it, and nothing is copied on the way."""
    model, x = made("written")
    report = cg.fuse(model, x).report
    assert report is not None and not report.opaque
    kinds = [(kind, ops) for kind, ops, _, _ in report.rows() if kind != "view"]
    assert [ops for _, ops in kinds if "sdpa" in ops] == ["sdpa"] * 2
    assert all(kind == "cuDNN" for kind, ops in kinds if "sdpa" in ops)
    assert not [ops for _, ops in kinds if ops in ("reshape", "permute", "transpose")]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_near_to_float64_as_torch(
    name: str, record_property: pytest.RecordProperty
) -> None:
    """The check of fuse itself: at most twice torch's own distance, or within the tolerance."""
    model, x = made(name)
    fused = cg.fuse(model, x, capture=True)
    assert fused.report is not None and fused.report.errors
    record_property("summary", str(fused.report))
    assert fused.report.counts["cuDNN"] > 0
    assert fused.report.captured
    again = fused(x)
    assert torch.equal(again, fused(x)), "a replay gives the same"
    other = torch.flip(x, (0,))
    torch.testing.assert_close(fused(other), torch.flip(again, (0,)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["resnet", "gpt", "convnext"])
def test_a_second_start_is_compared_with_the_model_and_has_no_weights_in_float64(
    name: str, folder: object
) -> None:
    model, x = made(name)
    peaks, errors = [], []
    for _ in range(2):
        cg.cache_clear()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        fused = cg.fuse(model, x)
        peaks.append(torch.cuda.max_memory_allocated())
        assert fused.report is not None
        errors.append((fused.report.kept, [own is None for _, own in fused.report.errors]))
        del fused
    assert errors == [(False, [False]), (True, [True])]
    assert peaks[1] < peaks[0]


def test_a_second_start_leaves_norms_apart_that_the_first_has_left_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = drifting(24)
    model, x = model.cuda(), x.cuda()
    found, said = [], "norms are not folded into weights, as plans that are kept say"
    for _ in range(2):
        cg.cache_clear()
        caplog.clear()
        with caplog.at_level("INFO", logger="cudnngraph"):
            fused = cg.fuse(model, x)
        assert fused.report is not None and fused.report.errors
        found.append((fused.report.folded, fused.report.kept, said in caplog.text))
    assert found == [(0, False, False), (0, True, True)]


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
def test_a_diffusion_models_embedding_is_added_where_it_belongs(
    tune: Any, dtype: torch.dtype, record_property: Any
) -> None:
    """A number for each channel of each image behind a convolution, which cuDNN's engines read from
    the wrong place, or at an address that faults; check=True compares with float64."""
    torch.manual_seed(0)
    model = DiffusionUNet(64).cuda().to(dtype).eval()
    x, context = (torch.randn(shape, device="cuda") for shape in ((3, 4, 32, 32), (3, 7, 24)))
    given = (x.to(dtype), torch.tensor([1, 40, 900], device="cuda"), context.to(dtype))
    fused = cg.fuse(model, given, policy=cg.Policy(tune=tune, budget_s=2.0))
    assert fused.report is not None and fused.report.errors
    record_property("summary", str(fused.report))
    torch.testing.assert_close(fused(*given), model(*given), rtol=5e-2, atol=5e-2)


def test_windows_of_an_example_are_taken_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of five tokens each as one of ten, by a plan; check=True compares with float64."""
    thresholds.change(monkeypatch, attention_blocks_per_sm=0)
    model, x = made("windows")
    fused = cg.fuse(model, x)
    assert fused.report is not None and fused.report.errors
    (step,) = (s for s in fused.report.steps if s.spec.nodes[-1].op == "sdpa")
    assert step.choice is not None
    assert step.spec.tensors[step.spec.inputs[0]].shape[::2] == (3, 10)
    bad = x.clone()
    bad[0] = math.inf
    assert torch.equal(fused(bad)[1:], fused(x)[1:])


@pytest.mark.parametrize("name", ["resnet", "deeplab", "unet"])
def test_an_autotuned_model_is_right_and_searches_equal_regions_once(
    name: str, record_property: pytest.RecordProperty
) -> None:
    model, x = made(name)
    fused = cg.fuse(model, x, policy=cg.Policy(tune="autotune", budget_s=2.0))
    assert fused.report is not None and fused.report.errors
    record_property("summary", str(fused.report))
    whole = [d for d in fused.report.steps[0].decisions if d.subject == "the whole graph"]
    assert any("cut at its anchors" in decision.reason for decision in whole)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["deeplab", "unet"])
def test_what_is_concatenated_is_joined_by_a_kernel_or_written_in_place(
    name: str, in_place: bool, folder: object
) -> None:
    """Of an empty cache: rules of measurement are in no key."""
    model, x = made(name)
    with changed(convolution_parts_in_place=in_place):
        fused = cg.fuse(model, x)
    assert fused.report is not None
    joins = [s for s in fused.report.steps if "concat" in [node.op for node in s.spec.nodes]]
    views = [any(d.subject == "a view" for d in s.decisions) for s in joins]
    assert joins and (all(views) if in_place else not any(views))


def test_results_are_new_tensors_unless_reuse_is_asked_for() -> None:
    model, x = made("resnet")
    fresh = cg.fuse(model, x, capture=True)
    reused = cg.fuse(model, x, capture=True, reuse_results=True)
    a, b = fresh(x), fresh(x)
    assert a.data_ptr() != b.data_ptr() and torch.equal(a, b)
    c, d = reused(x), reused(-x)
    assert c.data_ptr() == d.data_ptr()


def test_many_calls_and_shapes_take_no_more_memory() -> None:
    model, x = made("resnet")
    fused = cg.fuse(model, x, capture=True, max_shapes=2, check=False)

    def calls() -> int:
        for size in (64, 96, 64, 96):
            for _ in range(25):
                fused(x[..., :size, :size])
        torch.cuda.synchronize()
        gc.collect()  # else earlier tests' memory may be let go of in between
        return torch.cuda.memory_allocated()

    calls()
    before = calls()
    assert calls() == before
    assert len(fused) == 2


def test_a_fused_model_is_part_of_a_graph_that_others_capture() -> None:
    model, x = made("resnet")
    fused = cg.fuse(model, x)
    by_hand, fresh = torch.cuda.CUDAGraph(), torch.randn_like(x)
    fused(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(by_hand):
        y = fused(x)
    graphed = torch.cuda.make_graphed_callables(fused, (x.clone(),))
    x.copy_(fresh)
    by_hand.replay()
    want = fused(fresh)
    torch.testing.assert_close(y, want, rtol=0, atol=0)
    torch.testing.assert_close(graphed(fresh), want, rtol=0, atol=0)


@pytest.mark.parametrize("capture", [False, True])
def test_calls_on_several_streams_run_in_turn(capture: bool) -> None:
    """They share the model's tensors; a stream that lags keeps the next one waiting."""
    model, x = made("resnet")
    fused = cg.fuse(model, x, capture=capture)
    inputs = [torch.randn_like(x) for _ in range(4)]
    want = [fused(each) for each in inputs]
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for number, each in enumerate(inputs):
            with torch.cuda.stream(streams[number % 2]):
                if number % 2 == 0:
                    torch.cuda._sleep(20_000_000)
                found.append(fused(each))
        torch.cuda.synchronize()
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a, b)


def test_a_first_call_on_another_stream_waits_for_the_weights() -> None:
    model, x = made("resnet")
    want = cg.fuse(model, x)(x)
    other: Any = torch.cuda.Stream()
    torch.cuda.synchronize()
    fused = Fused(model)
    torch.cuda._sleep(200_000_000)
    bound = fused._ready(fused._call((x,), {})).bound
    with torch.cuda.stream(other):
        (y,) = bound.run([x])
    torch.cuda.synchronize()
    assert torch.equal(y, want)


def test_a_model_follows_writes_into_its_weights() -> None:
    model, x = made("resnet")
    fused = cg.fuse(model, x, capture=True)
    before = fused(x)
    with torch.no_grad():
        model.head[2].weight.mul_(2.0)
        model.head[2].bias.mul_(2.0)
    torch.testing.assert_close(fused(x), 2.0 * before, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_torch_compile_by_this_backend(name: str) -> None:
    model, x = made(name)
    compiled = torch.compile(model, backend=backend, options={"channels_last": name == "resnet"})
    with torch.no_grad():
        want, out = model(x), compiled(x)
        assert out.stride() == want.stride()
        error = float((out.double() - want.double()).norm() / want.double().norm())
        assert error < 2e-2
        shorter = compiled(x[:1])
    assert shorter.shape[0] == 1


@pytest.mark.parametrize("capture", [False, True])
def test_numbers_and_lengths_may_change_from_call_to_call(capture: bool) -> None:
    """A time step may be a tensor of the CPU, as a scheduler's is."""
    torch.manual_seed(0)
    model = Of(lambda m, x, t: m.layer(x) * t, layer=nn.Linear(64, 64)).cuda().half().eval()

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, 64, device="cuda", dtype=F16)

    lengths = {"args[0]": {0: (8, 16)}}
    fused: Any = cg.fuse(model, (rows(5), 1.0), capture=capture, dynamic=lengths)
    steps = (2.0, 3.0, 0.5, torch.tensor(4.0), torch.tensor(5.0))
    for count, t in zip((5, 7, 12, 6, 3), steps, strict=True):
        x = rows(count)
        with torch.no_grad():
            torch.testing.assert_close(fused(x, t), model(x, t), rtol=1e-2, atol=1e-2)
    assert len(fused) == 3 and fused.layer is model.layer


def test_a_fused_model_is_a_module_on_its_device() -> None:
    model, x = made("unet")
    fused = Fused(model)
    y = fused(x)
    assert y.device == x.device and y.dtype == F16 and len(fused) == 1


def _weighted(x: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, torch._weight_norm(v.contiguous(), g, 0))


@pytest.mark.parametrize("last", [False, True], ids=["as given", "channels_last"])
@pytest.mark.parametrize("name", ["attention", "weight norm", "layer norm"])
def test_torchs_inner_ops_get_their_operands_as_they_lay_when_traced(name: str, last: bool) -> None:
    """Trained by torch.compile: they read memory without asking how it lies."""
    torch._dynamo.reset()
    shapes = {
        "attention": [(2, 4, 64, 96)] * 3,
        "weight norm": [(2, 16, 9, 9), (8, 16, 3, 3), (8, 1, 1, 1)],
        "layer norm": [(2, 5, 6, 64), (64,), (64,)],
    }[name]
    function: Callable[..., torch.Tensor] = {
        "attention": turned,
        "weight norm": _weighted,
        "layer norm": lambda x, w, b: F.layer_norm(x, (64,), w, b),
    }[name]
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device="cuda", dtype=F16) for shape in shapes]
    if name == "weight norm":
        leaves = [t.to(memory_format=torch.channels_last) for t in leaves]
    leaves = [t.requires_grad_() for t in leaves]
    options = {"channels_last": True} if last else {}
    fast = torch.compile(function, backend=backend, options=options)
    ours, theirs = fast(*leaves), function(*leaves)
    grad = torch.randn_like(theirs)
    found = [ours, *torch.autograd.grad(ours, leaves, grad)]
    for a, b in zip(found, [theirs, *torch.autograd.grad(theirs, leaves, grad)], strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert float((a - b).float().norm()) <= 1e-2 * float(b.float().norm())
