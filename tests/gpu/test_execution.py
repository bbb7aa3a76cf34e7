"""Execution on a GPU: streams, threads, captures, memory, and what is refused."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.device import rules
from cudnngraph.executor import torch_steps
from cudnngraph.runtime.process import PROCESS
from tests import numerics
from tests.copies import check_slices

X, W = (4, 32, 14, 14), (32, 32, 3, 3)


def conv_graph(act: str = "silu", dtype: torch.dtype = torch.float16) -> cg.Graph:
    g = cg.Graph("conv_bias_act")
    x = g.input("x", X, dtype, layout="channels_last")
    w = g.input("w", W, dtype, layout="channels_last")
    b = g.input("b", (W[0],), dtype)
    g.output("y", g.conv_bias_act(x, w, b, padding=1, activation=act))
    return g


def inputs(seed: int = 0, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    gen = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device="cuda").to(dtype)

    last = torch.channels_last
    return {
        "x": normal(*X).to(memory_format=last),
        "w": (normal(*W) / 17).to(memory_format=last),
        "b": normal(W[0]),
    }


def expected(given: dict[str, torch.Tensor], act: Callable[..., torch.Tensor]) -> torch.Tensor:
    wide = {name: tensor.double().cpu() for name, tensor in given.items()}
    return act(F.conv2d(wide["x"], wide["w"], wide["b"], padding=1))


def test_call_run_and_bind_agree_bitwise() -> None:
    exe, given = conv_graph().compile("cuda"), inputs()
    called = exe(**given)
    ran, bound = torch.full_like(called, 7), torch.full_like(called, 7)
    exe.run(**given, y=ran)
    call = exe.bind(**given, y=bound)
    call()
    assert torch.equal(called, ran) and torch.equal(called, bound)
    numerics.check(called, expected(given, F.silu), torch.float16)


def test_a_bound_call_sees_new_contents_of_its_tensors() -> None:
    exe, given = conv_graph().compile("cuda"), inputs()
    out = exe(**given)
    call = exe.bind(**given, y=out)
    for name, tensor in inputs(seed=1).items():
        given[name].copy_(tensor)
    call()
    numerics.check(out, expected(given, F.silu), torch.float16)


def test_run_allocates_nothing() -> None:
    exe, given = conv_graph().compile("cuda"), inputs()
    out = exe(**given)
    exe.run(**given, y=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        exe.run(**given, y=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_work_is_launched_on_the_callers_stream() -> None:
    exe, given = conv_graph().compile("cuda"), inputs()
    out = exe(**given)
    call = exe.bind(**given, y=out)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        given["x"].zero_()
        call()
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "the call ran ahead of its stream"
    side.synchronize()
    numerics.check(out, expected(given, F.silu), torch.float16)


def two_steps() -> tuple[cg.Executable, list[dict[str, torch.Tensor]]]:
    """Steps that hand something on in the workspace, and two sets of inputs."""
    g = cg.Graph("two_steps")
    x = g.input("x", (8, 64, 28, 28), torch.float32)
    w = g.input("w", (64, 64, 3, 3), torch.float32)
    g.output("y", g.gelu(g.conv(x, w, padding=1)))
    exe = g.compile("cuda", allow_tf32=False)
    assert exe.workspace_bytes > 0
    return exe, [
        {
            "x": torch.randn(8, 64, 28, 28, device="cuda"),
            "w": torch.randn(64, 64, 3, 3, device="cuda") / 24,
        }
        for _ in range(2)
    ]


def test_two_streams_use_workspaces_of_their_own() -> None:
    exe, given = two_steps()
    blocks = []
    results: list[torch.Tensor] = []
    torch.cuda.synchronize()
    for each in given:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                result = exe(**each)
            results.append(result)
            need = exe.workspace_bytes
            blocks.append(PROCESS.workspace.get(0, stream.cuda_stream, need).data_ptr())
    torch.cuda.synchronize()
    assert blocks[0] != blocks[1]
    for each, result in zip(given, results, strict=True):
        wide = F.gelu(F.conv2d(each["x"].cpu().double(), each["w"].cpu().double(), padding=1))
        numerics.check(result, wide, torch.float32)


def test_capture_and_replay_give_the_same_bits() -> None:
    exe, given = conv_graph().compile("cuda"), inputs()
    out = exe(**given)
    want = out.clone()
    call = exe.bind(**given, y=out)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        call()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_a_capture_of_ours_replays_and_lets_go_of_all_that_it_held() -> None:
    torch.cuda.synchronize()
    exe, given = conv_graph("tanh").compile("cuda"), inputs()  # in no capture of another test
    out = exe(**given)
    want = out.clone()
    exe.bind(**given, y=out)()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, kept = torch.cuda.memory_reserved(), len(PROCESS.captured)
    call = exe.capture(**given, y=out)
    assert isinstance(call.graph, torch.cuda.CUDAGraph)
    held = weakref.ref(next(iter(call._held.values()))[0])
    assert len(PROCESS.captured) == kept
    out.zero_()
    call()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    del exe
    cg.cache_clear()
    gc.collect()
    out.zero_()
    call()  # by plans that nothing else holds
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    assert held() is not None
    del call
    gc.collect()
    torch.cuda.empty_cache()
    assert held() is None
    assert torch.cuda.memory_reserved() <= before


def test_a_capture_within_a_capture_is_refused() -> None:
    exe, given = conv_graph().compile("cuda"), inputs()
    out = exe(**given)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(cg.CaptureError, match=r"in it; call what bind\(\) gives"):
            exe.capture(**given, y=out)
        torch.zeros(1, device="cuda")


def test_what_is_let_go_of_during_a_capture_does_not_spoil_it() -> None:
    """Python collects garbage when it likes; CUDA destroys no plan and no graph in a capture."""
    exe, given = conv_graph().compile("cuda"), inputs()
    out = exe(**given)
    captured = exe.capture(**given, y=out)
    cg.cache_clear()
    gc.collect()  # what earlier tests left
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        del exe, captured
        gc.collect()
    assert len(handles._kept.things) >= 2
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [3.0, 3.0, 3.0]
    handles.let_go()
    assert handles._kept.things == []


def _product(g: cg.Graph, x: cg.Value, w: cg.Value) -> cg.Value:
    """By torch, whatever cuDNN can do."""
    product: cg.Value = g.aten([x, w], "aten.mm.default", (("tensor", 0), ("tensor", 1)))
    return product


def test_a_capture_keeps_the_memory_that_cublas_works_in() -> None:
    """Whatever clears cuBLAS's workspaces, as torch.compile does around each capture of its own."""
    g = cg.Graph("product")
    x = torch.randn(64, 1 << 15, device="cuda").half()
    w = torch.randn(1 << 15, 64, device="cuda").half()
    g.output("y", _product(g, g.input("x", like=x), g.input("w", like=w)))
    out = torch.empty(64, 64, device="cuda", dtype=torch.float16)
    exe = g.compile("cuda")
    calls = [exe.capture(x=x, w=w, y=out) for _ in range(3)]
    want = out.clone()
    del calls[0], calls[1]
    torch._C._cuda_clearCublasWorkspaces()
    fill = [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(128)]
    out.zero_()
    calls[0]()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    assert all(bool((each == 7.0).all()) for each in fill)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_captured_enlargement_outlives_its_executable(layout: torch.memory_format) -> None:
    """The matrices that it multiplies by were copied to the GPU before, and stay there."""
    g = cg.Graph("enlarge")
    x = torch.randn(2, 21, 32, 32, device="cuda").half().to(memory_format=layout)
    g.output("y", g.interpolate(g.input("x", like=x), scale_factor=8, mode="bilinear"))
    exe = g.compile("cuda")
    out = exe(x=x)
    assert out.numel() >= rules.TABLE[90].resize_by_matmul_min_elements
    call = exe.bind(x=x, y=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    del exe, call, g
    cg.cache_clear()
    fill = [torch.full((1 << 14,), float("nan"), device="cuda") for _ in range(512)]
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    wide = F.interpolate(x.cpu().double(), scale_factor=8, mode="bilinear")
    theirs = F.interpolate(x, scale_factor=8, mode="bilinear")
    numerics.check(out, wide, torch.float16, theirs, terms=4)
    del fill


def test_a_captured_group_norm_outlives_its_executable() -> None:
    """The signs that its statistics are made with were on the GPU before, and stay there."""
    g = cg.Graph("groups")
    x = torch.randn(2, 64, 32, 32, device="cuda").half().to(memory_format=torch.channels_last)
    value = g.input("x", like=x)
    shift, factor = g.group_affine(value, 8)
    g.output("y", g.scale(g.bias(value, shift), factor))
    exe = g.compile("cuda")
    out = exe(x=x)
    call = exe.bind(x=x, y=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    del exe, call, g
    cg.cache_clear()
    fill = [torch.full((1 << 14,), float("nan"), device="cuda") for _ in range(512)]
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    theirs = F.group_norm(x, 8)
    numerics.check(out, F.group_norm(x.cpu().double(), 8), torch.float16, theirs, terms=8192)
    del fill


def test_building_during_capture_is_refused_by_a_clear_error() -> None:
    g = conv_graph("gelu_tanh")
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(cg.CaptureError, match="while a CUDA graph is being captured")
    with refused, torch.cuda.graph(graph):
        g.compile("cuda")
    torch.cuda.synchronize()
    assert torch.equal(torch.ones(3, device="cuda"), torch.ones(3, device="cuda"))


@pytest.mark.parametrize("bound", [True, False])
def test_a_graph_has_a_workspace_of_its_own(bound: bool) -> None:
    """Whatever stream it is captured on; no later use of the pool reaches it, and it goes with the
    graph."""
    g = cg.Graph("nchw")
    x = g.input("x", (2, 64, 28, 28), torch.float16)
    w = g.input("w", (64, 64, 3, 3), torch.float16)
    g.output("y", g.relu(g.conv(x, w, padding=1)))
    exe = g.compile("cuda")
    assert exe.workspace_bytes > 0
    given = {
        "x": torch.randn(2, 64, 28, 28, device="cuda").half(),
        "w": torch.randn(64, 64, 3, 3, device="cuda").half() / 24,
    }
    out = exe(**given)
    want = out.clone()
    call = exe.bind(**given, y=out)
    held = PROCESS.workspace.held_bytes
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream that nothing has run on before
        call() if bound else exe.run(**given, y=out)
    assert PROCESS.workspace.held_bytes == held
    fill = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    del fill, graph
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_several_threads_share_one_executable() -> None:
    exe, given = conv_graph("gelu").compile("cuda"), inputs()
    want = exe(**given)
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    if not torch.equal(exe(**given), want):
                        wrong.append("bits differ")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_on_one_stream_keep_out_of_each_others_steps() -> None:
    exe, given = two_steps()
    want = [exe(**each) for each in given]
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for _ in range(40):
                results = [exe(**given[number]) for _ in range(25)]
                wrong.extend(number for each in results if not torch.equal(each, want[number]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_a_renamed_graph_shares_its_program_and_runs_on_its_own_names() -> None:
    first = conv_graph().compile("cuda")
    g = cg.Graph("other")
    bias = g.input("beta", (W[0],), torch.float16)
    kernel = g.input("kernel", W, torch.float16, layout="channels_last")
    image = g.input("image", X, torch.float16, layout="channels_last")
    g.output("out", g.conv_bias_act(image, kernel, bias, padding=1, activation="silu"))
    second = g.compile("cuda")
    given = inputs()
    assert second.key == first.key and second._program is first._program
    called = second(image=given["x"], kernel=given["w"], beta=given["b"])
    assert torch.equal(called, first(**given))


def test_an_unaligned_input_is_copied_by_a_call_and_refused_by_bind() -> None:
    g = cg.Graph("aligned")
    g.output("y", g.relu(g.input("x", (64, 64), torch.float16)))
    exe = g.compile("cuda")
    memory = torch.randn(64 * 64 + 1, device="cuda").half()
    view = memory[1:].view(64, 64)
    assert torch.equal(exe(x=view), view.relu())
    with pytest.raises(cg.BindError, match=r"starts 2 bytes past a multiple of 16.*clone"):
        exe.bind(x=view, y=torch.empty(64, 64, device="cuda", dtype=torch.float16))


def test_a_product_whose_operand_is_shared_may_be_turned() -> None:
    """torch's product raises where it is given the result's place (H100, torch 2.11)."""
    x = torch.randn(2, 8, 64, device="cuda").mT
    y = torch.randn(1, 8, 32, device="cuda")
    g = cg.Graph("product")
    g.output("z", g.matmul(g.input("x", like=x), g.input("y", like=y)))
    spec = g.spec()
    out = spec.tensors["z"].empty("cuda")
    torch_steps.launcher(spec, [x, y], [out], allow_tf32=False)()
    numerics.check(out, x.double() @ y.double(), torch.float32, terms=8)


def test_a_pointwise_graph_may_run_in_place() -> None:
    g = cg.Graph("in_place")
    g.output("y", g.gelu(g.input("x", (64, 64), torch.float16)))
    exe = g.compile("cuda")
    x = torch.randn(64, 64, device="cuda").half()
    want = exe(x=x)
    exe.run(x=x, y=x)
    assert torch.equal(x, want)


def test_a_residual_may_not_be_overwritten() -> None:
    g = cg.Graph("residual")
    x = g.input("x", X, torch.float16, layout="channels_last")
    w = g.input("w", W, torch.float16, layout="channels_last")
    z = g.input("z", X, torch.float16, layout="channels_last")
    g.output("y", g.conv_bias_act(x, w, residual=z, padding=1))
    exe, given = g.compile("cuda"), inputs()
    with pytest.raises(cg.BindError, match="output 'y': overlaps input 'x'"):
        exe.run(x=given["x"], w=given["w"], z=given["x"].clone(), y=given["x"])
    z_tensor = torch.zeros_like(given["x"])
    with pytest.raises(cg.BindError, match="output 'y': overlaps input 'z'"):
        exe.run(x=given["x"], w=given["w"], z=z_tensor, y=z_tensor)


def test_tensors_of_another_device_are_refused() -> None:
    exe, given = conv_graph().compile("cuda"), inputs()
    given["b"] = given["b"].cpu()
    with pytest.raises(cg.BindError, match="tensor 'b': is on cpu; expected cuda:0"):
        exe(**given)


@pytest.mark.parametrize("n", [0, 2])
def test_an_empty_batch_gives_an_empty_result_without_cudnn(n: int) -> None:
    g = cg.Graph("empty")
    x = g.input("x", (n, 32, 8, 8), torch.float16, layout="channels_last")
    w = g.input("w", (16, 32, 3, 3), torch.float16, layout="channels_last")
    g.output("y", g.relu(g.conv(x, w, padding=1)))
    exe = g.compile("cuda")
    out = exe(
        x=torch.ones(n, 32, 8, 8, device="cuda").half().to(memory_format=torch.channels_last),
        w=torch.ones(16, 32, 3, 3, device="cuda").half().to(memory_format=torch.channels_last),
    )
    assert out.shape == (n, 16, 8, 8) and out.device.type == "cuda"
    assert (exe.steps[0].choice is None) == (n == 0)


def test_more_than_int32_elements_are_right() -> None:
    """2^31 + 2^20 elements in and out; the far end must be what it would be alone."""
    rows = (1 << 11) + 1
    g = cg.Graph("large")
    x = g.input("x", (rows, 1 << 20), torch.float16)
    g.output("y", g.relu(g.mul(x, 2.0)))
    exe = g.compile("cuda")
    given = torch.empty(rows, 1 << 20, device="cuda", dtype=torch.float16).normal_()
    out = exe(x=given)
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(out[row], (given[row].float() * 2).relu().half())


def test_a_large_convolution_is_right_at_its_far_end() -> None:
    n = 2**31 // (64 * 128 * 128) + 1
    g = cg.Graph("large_conv")
    x = g.input("x", (n, 64, 128, 128), torch.float16, layout="channels_last")
    w = g.input("w", (8, 64, 1, 1), torch.float16, layout="channels_last")
    g.output("y", g.conv(x, w))
    exe = g.compile("cuda")
    given = torch.empty(n, 64, 128, 128, device="cuda", dtype=torch.float16)
    given = given.to(memory_format=torch.channels_last).normal_()
    w_ = (torch.randn(8, 64, 1, 1, device="cuda") / 8).half().to(memory_format=torch.channels_last)
    out = exe(x=given, w=w_)
    for image in (0, n - 1):
        wide = F.conv2d(given[image : image + 1].double().cpu(), w_.double().cpu())
        numerics.check(out[image : image + 1], wide, torch.float16)


def test_no_autograd_graph_is_kept() -> None:
    exe, given = conv_graph().compile("cuda"), inputs()
    given["w"].requires_grad_()
    assert not exe(**given).requires_grad


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_uses_its_own_handle_and_stream() -> None:
    exe = conv_graph().compile("cuda:1")
    given = {name: tensor.to("cuda:1") for name, tensor in inputs().items()}
    assert torch.cuda.current_device() == 0
    out = exe(**given)
    assert out.device.index == 1 and torch.cuda.current_device() == 0
    numerics.check(out, expected(given, F.silu), torch.float16)
    call = exe.bind(**given, y=out)
    out.zero_()
    call()
    numerics.check(out, expected(given, F.silu), torch.float16)


def test_another_thread_may_grow_its_workspace_while_a_capture_is_in_progress() -> None:
    small, given = conv_graph().compile("cuda"), inputs()
    out = small(**given)
    want = out.clone()
    call = small.bind(**given, y=out)
    g = cg.Graph("large")
    x = g.input("x", (8, 64, 56, 56), torch.float16)
    w = g.input("w", (64, 64, 3, 3), torch.float16)
    b = g.input("b", (64,), torch.float16)
    g.output("y", g.conv_bias_act(x, w, b, padding=1))
    large = g.compile("cuda")
    assert large.workspace_bytes > 0
    tensors = {
        "x": torch.randn(8, 64, 56, 56, device="cuda").half(),
        "w": torch.randn(64, 64, 3, 3, device="cuda").half() / 24,
        "b": torch.randn(64, device="cuda").half(),
    }
    expect = large(**tensors)
    torch.cuda.synchronize()
    ready, captured = threading.Event(), threading.Event()
    results: list[object] = []

    def other() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                mine = torch.empty_like(expect)
                large.run(**tensors, y=mine)  # this thread's plan, before the capture
                stream.synchronize()
                second = torch.cuda.Stream()
            ready.set()
            captured.wait(60)
            with torch.cuda.stream(second):  # a stream without a workspace yet: the pool grows
                large.run(**tensors, y=mine)
            results.append(mine)
        except Exception as error:
            results.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert ready.wait(60)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    # By default a capture forbids every thread of the process what it forbids its own.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        call()
        captured.set()
        thread.join(60)
    torch.cuda.synchronize()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    (mine,) = results
    assert isinstance(mine, torch.Tensor), mine
    assert torch.equal(mine, expect)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8], ids=str)
def test_slices_are_copied_as_they_are(dtype: torch.dtype) -> None:
    check_slices(dtype, "cuda")
