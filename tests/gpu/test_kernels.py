"""Generated kernels on the GPU: samples, usual sizes, capture, threads, the cache."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.executor.plans import replay
from cudnngraph.kernels import banded, patterns
from cudnngraph.kernels import compile as compiler
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.trial import StepTrial, launcher
from cudnngraph.settings import override
from tests import coverage, numerics
from tests.blocks import depthwise
from tests.gpu.test_samples import CASES, check
from tests.samples import Case

F16, F32 = torch.float16, torch.float32
HAD_TORCH = [case for case in CASES if coverage.read()["forward"].get(case.id) in ("torch", "both")]


@pytest.mark.parametrize("case", HAD_TORCH, ids=str)
def test_what_torch_ran_is_right_by_kernels(case: Case) -> None:
    exe = check(case, kernels=True)
    left = {
        node.op
        for step in exe.steps
        if step.kind == "torch" and any(d.choice for d in step.decisions)
        for node in step.spec.nodes
    }
    assert not left, "a kernel was refused: " + str([s.decisions for s in exe.steps])[:2000]


def compiled(g: cg.Graph, **options: object) -> cg.Executable:
    return g.compile("cuda", kernels=True, **options)  # type: ignore[arg-type]


def kinds(exe: cg.Executable) -> set[str]:
    """By what steps run, views left out."""
    return {step.kind for step in exe.steps if "memory" not in step.decisions[-1].reason}


def group_norm(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> cg.Graph:
    g = cg.Graph("group_norm")
    x = g.input("x", shape, dtype, layout=layout)
    w, b = (g.input(name, shape[1:2], dtype) for name in "wb")
    shift, factor = g.group_affine(x, 32, w)
    g.output("y", g.silu(g.bias(g.scale(g.bias(x, shift), factor), b)))
    return g


@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(2, 320, 64, 64), (1, 128, 256, 256), (2, 1280, 8, 8)])
def test_group_norms_of_usual_sizes(shape: tuple[int, ...], layout: str, tune: str) -> None:
    torch.manual_seed(0)
    x = 3 + torch.randn(shape, device="cuda").to(F16)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    w, b = (torch.randn(shape[1], device="cuda").to(F16) for _ in range(2))
    exe = compiled(group_norm(shape, layout, F16), tune=tune, budget_s=2.0)
    assert kinds(exe) <= {"kernel", "cudnn"} and "kernel" in kinds(exe)
    exact = F.silu(F.group_norm(x.double(), 32, w.double(), b.double()))
    numerics.check(exe(x, w, b), exact, F16, F.silu(F.group_norm(x, 32, w, b)))


@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolutions_of_usual_sizes(size: int, stride: int, tune: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 96, 56, 56, device="cuda").to(F16).to(memory_format=torch.channels_last)
    w, b = torch.randn(96, 1, size, size, device="cuda").to(F16), torch.randn(96, device="cuda")
    given = {"x": x, "w": w.to(memory_format=torch.channels_last), "b": b.to(F16)}
    g = cg.Graph("depthwise")
    v = {name: g.input(name, like=each) for name, each in given.items()}
    made = g.conv(v["x"], v["w"], stride=stride, padding=size // 2, groups=96)
    g.output("y", g.silu(g.bias(made, v["b"])))
    exe = compiled(g, tune=tune, budget_s=2.0)

    def eager(dtype: torch.dtype) -> torch.Tensor:
        x, w, b = (each.to(dtype) for each in given.values())
        return F.silu(F.conv2d(x, w, b, stride, size // 2, groups=96))

    numerics.check(exe(**given), eager(torch.float64), F16, eager(F16))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 7])
def test_depthwise_convolutions_by_tensor_cores(
    size: int, dtype: torch.dtype, transposed: bool
) -> None:
    """By every schedule that is measured; an infinity reaches its windows alone."""
    spec = depthwise((4, 64, 30, 27), (size, size), dtype, transposed=transposed)
    found = banded.schedules(spec, 132)
    assert len(found) > 1
    device = torch.device("cuda", 0)
    trial = StepTrial(spec, cg.Policy(), device)
    plans = [replay(spec, patterns.choice_of(schedule), 0) for schedule in found]
    assert [trial.why_wrong(plan) for plan in plans] == [None] * len(found)
    inputs = random_inputs(spec, device)
    inputs[0][2, 5, 11, 13] = float("inf")
    out = spec.tensors["y"].empty(device)
    launcher(plans[0], (*inputs, out), out.new_empty(0, dtype=torch.uint8), device)()
    assert torch.equal(out.isfinite(), reference.run(spec, inputs)[0].isfinite())


@pytest.mark.parametrize("dtype", [F32, F16, torch.bfloat16])
def test_layouts_are_changed_exactly(dtype: torch.dtype) -> None:
    x = torch.randint(-100, 100, (8, 60, 31, 33), device="cuda").to(dtype)
    g = cg.Graph("layout")
    value = g.input("x", like=x)
    g.output("y", g.identity(value), layout="channels_last")
    y = compiled(g)(x)
    assert y.is_contiguous(memory_format=torch.channels_last) and torch.equal(y, x)


def test_it_is_captured_in_a_cuda_graph_and_reads_new_data() -> None:
    shape = (2, 320, 16, 16)
    exe = compiled(group_norm(shape, "channels_last", F16))
    x = torch.randn(shape, device="cuda").to(F16).to(memory_format=torch.channels_last)
    w, b = (torch.randn(320, device="cuda").to(F16) for _ in range(2))
    y = torch.empty_like(x)
    call = exe.capture(x=x, w=w, b=b, y=y)
    x.copy_(torch.randn_like(x))
    call()
    torch.cuda.synchronize()
    exact = F.silu(F.group_norm(x.double(), 32, w.double(), b.double()))
    numerics.check(y, exact, F16, F.silu(F.group_norm(x, 32, w, b)))


def test_threads_that_launch_one_kernel_do_not_mix_their_tensors() -> None:
    g = cg.Graph("threads")
    g.output("y", g.add(g.input("x", (1024,), F32), 1.0))
    exe = compiled(g)
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            x = torch.full((1024,), float(number), device="cuda")
            for _ in range(200):
                if not bool((exe(x) == number + 1).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_kept_kernel_is_loaded_without_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with override(cache_dir=tmp_path):
        first = compiled(group_norm((2, 64, 16, 16), "contiguous", F16))
        assert first.tier == "built"
        cg.cache_clear()

        def cubin(text: str, capability: int) -> bytes:
            raise AssertionError("compiled again")

        monkeypatch.setattr(compiler, "cubin", cubin)
        again = compiled(group_norm((2, 64, 16, 16), "contiguous", F16))
        assert again.tier != "built" and kinds(again) == {"kernel"}


@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [F32, F16, torch.bfloat16])
@pytest.mark.parametrize("attrs", [(3, 2, 1), (2, 2, 0), (3, 1, 1)], ids=str)
def test_gradients_of_max_pools_are_torchs_where_most_elements_are_zero(
    attrs: tuple[int, int, int], dtype: torch.dtype, layout: str, tune: str
) -> None:
    kernel, stride, padding = attrs
    size = (56 + 2 * padding - kernel) // stride + 1
    g = cg.Graph("max_pool_backward")
    dy = g.input("dy", (4, 64, size, size), dtype, layout=layout)
    x = g.input("x", (4, 64, 56, 56), dtype, layout=layout)
    dx = g.max_pool_backward(dy, x, kernel_size=kernel, stride=stride, padding=padding)
    g.output("dx", g.relu_backward(dx, x))
    exe = compiled(g, tune=tune, budget_s=2.0)
    assert kinds(exe) == {"kernel"}
    given = [exe.spec.tensors[name].empty("cuda").normal_() for name in ("dy", "x")]
    given[1].copy_(given[1].mul(2).round().relu())
    found = exe(*given)
    there = given[1].double().requires_grad_()
    y = F.max_pool2d(there, kernel, stride, padding)
    (want,) = torch.autograd.grad(y, there, given[0].double())
    want = torch.where(there > 0, want, 0.0).detach()
    assert numerics.relative_error(found, want) <= numerics.bound(dtype, found.dtype)
    assert torch.equal(found == 0, want == 0)


@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
@pytest.mark.parametrize("broadcast", [False, True], ids=["residual", "average"])
def test_gradients_of_norms_with_a_residual(broadcast: bool, tune: str) -> None:
    """The sum of two gradients, or of that of an average, which torch lays row-major."""
    shape = (8, 256, 48, 48)
    g = cg.Graph("norm")
    dy, y, x = (
        g.input(name, shape, torch.bfloat16, layout="channels_last") for name in ("dy", "y", "x")
    )
    small = (*shape[:2], 1, 1) if broadcast else shape
    other = g.input("other", small, torch.bfloat16, layout="channels_last")
    dz = g.relu_backward(g.add(g.div(g.expand(other, shape), 9.0) if broadcast else other, dy), y)
    vectors = [g.input(name, shape[1:2], F32) for name in ("w", "mean", "inverse")]
    for name, value in zip(("dx", "dw", "db"), g.batch_norm_backward(dz, x, *vectors), strict=True):
        g.output(name, value)
    g.output("dz", dz, layout="channels_last")
    exe = compiled(g, tune=tune, budget_s=2.0)
    assert kinds(exe) == {"kernel"} or (tune == "autotune" and "torch" not in kinds(exe))
    torch.manual_seed(0)
    given = [exe.spec.tensors[name].empty("cuda").normal_() for name in exe.spec.inputs]
    wanted = reference.run(exe.spec, given, torch.float64)
    h = cg.Graph("torch")  # which sums up what it has rounded, as a tuned choice may
    args = [h.input("dz", shape, torch.float64), h.input("x", shape, torch.float64)]
    args += [h.input(name, shape[1:2], torch.float64) for name in ("w", "mean", "inverse")]
    for name, value in zip(("dx", "dw", "db"), h.batch_norm_backward(*args), strict=True):
        h.output(name, value)
    named = dict(zip(exe.spec.inputs, given, strict=True))
    rounded = [wanted[3].bfloat16(), *(named[name] for name in ("x", "w", "mean", "inverse"))]
    own = reference.run(h.spec(), [each.double() for each in rounded], torch.float64)
    for found, want, torchs in zip(exe(*given), wanted, (*own, wanted[3]), strict=True):
        bound = numerics.bound(torch.bfloat16, found.dtype)
        if tune == "autotune":
            bound += numerics.relative_error(torchs, want)
        assert numerics.relative_error(found, want) <= bound
