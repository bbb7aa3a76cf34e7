"""Plans on a GPU: replay of a choice, what a policy rules out, and what is refused and why."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.backend.candidates import replay
from cudnngraph.backend.plan import Choice
from cudnngraph.ir.canonical import canonical
from tests import numerics


def conv(dtype: torch.dtype, act: str | None = "relu", layout: str = "channels_last") -> cg.Graph:
    g = cg.Graph("conv")
    x = g.input("x", (8, 64, 28, 28), dtype, layout=layout)
    w = g.input("w", (64, 64, 3, 3), dtype, layout=layout)
    b = g.input("b", (64,), dtype)
    g.output("y", g.conv_bias_act(x, w, b, padding=1, activation=act))
    return g


def tensors(exe: cg.Executable) -> dict[str, torch.Tensor]:
    made = {}
    for name in exe.spec.inputs:
        spec = exe.spec.tensors[name]
        made[name] = torch.empty_strided(
            spec.shape, spec.stride, dtype=spec.dtype, device="cuda"
        ).normal_()
    return made


def float64(exe: cg.Executable, given: dict[str, torch.Tensor]) -> torch.Tensor:
    wide = {name: tensor.double().cpu() for name, tensor in given.items()}
    y = torch.nn.functional.conv2d(wide["x"], wide["w"], wide["b"], padding=1)
    return y.relu()


@pytest.mark.parametrize("act", ["relu", "silu"])
def test_a_choice_replays_to_the_same_plan_and_the_same_bits(act: str) -> None:
    exe = conv(torch.float16, act).compile("cuda")
    given = tensors(exe)
    want = exe(**given)
    (step,) = exe._program.steps
    assert step.choice is not None
    plan = replay(step.spec, step.choice, 0)
    assert plan.workspace_bytes == step.workspace_bytes
    out = torch.empty_like(want)
    ordered = [given[name] for name in _original_order(exe)]
    block = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
    pointers = plan.pointers([tensor.data_ptr() for tensor in (*ordered, out)])
    plan.execute(pointers, block.data_ptr(), handles.handle_on_current_stream(0))
    assert torch.equal(out, want)


def _original_order(exe: cg.Executable) -> list[str]:
    back = {canonical_name: name for name, canonical_name in exe._names.items()}
    return [back[name] for name in exe._program.spec.inputs]


def test_the_public_call_of_the_frontend_gives_the_same_bits_as_the_one_by_addresses() -> None:
    exe = conv(torch.float16).compile("cuda")
    given = tensors(exe)
    want = exe(**given)
    (plan,) = exe._program.plans()
    assert plan is not None and plan.native is not None
    (name,), out = exe.spec.outputs, torch.zeros_like(want)
    native, plan.native = plan.native, None
    try:
        exe.bind(**given, **{name: out})()
        torch.cuda.synchronize()
    finally:
        plan.native = native
    assert torch.equal(out, want)


def test_a_choice_that_cannot_be_replayed_is_refused() -> None:
    spec = canonical(conv(torch.float16).spec())
    with pytest.raises(cg.NotSupported, match="engine 9999"):
        replay(spec, Choice(9999, ()), 0)
    with pytest.raises(cg.NotSupported, match="NO_SUCH_KNOB"):
        replay(spec, Choice(0, (("NO_SUCH_KNOB", 1),)), 0)


def test_tf32_is_used_when_allowed_and_not_otherwise() -> None:
    errors = {}
    for allowed in (False, True):
        exe = conv(torch.float32).compile("cuda", allow_tf32=allowed)
        torch.manual_seed(0)
        given = tensors(exe)
        errors[allowed] = numerics.relative_error(exe(**given), float64(exe, given))
    assert errors[False] <= numerics.BOUNDS["float32"]
    assert 1e-5 < errors[True] <= numerics.BOUNDS["tf32"]


def test_allow_tf32_follows_torchs_own_switch() -> None:
    torch.backends.cudnn.allow_tf32 = True
    assert conv(torch.float32).compile("cuda").policy.allow_tf32 is True
    torch.backends.cudnn.allow_tf32 = False
    assert conv(torch.float32).compile("cuda").policy.allow_tf32 is False


def test_a_workspace_limit_rules_plans_out() -> None:
    free = conv(torch.float16, layout="contiguous").compile("cuda")
    assert free.workspace_bytes > 0
    tight = conv(torch.float16, layout="contiguous").compile("cuda", workspace_limit=0)
    given = tensors(tight)
    assert all(step.workspace_bytes == 0 for step in tight.steps)
    numerics.check(tight(**given), float64(tight, given), torch.float16)


def test_deterministic_plans_repeat_bit_by_bit() -> None:
    exe = conv(torch.float16).compile("cuda", deterministic=True)
    given = tensors(exe)
    first = exe(**given)
    assert all(torch.equal(exe(**given), first) for _ in range(5))


def test_fallback_error_raises_with_the_librarys_reasons() -> None:
    g = cg.Graph("attention")
    q = g.input("q", (2, 4, 64, 64), torch.float32)
    g.output("o", g.sdpa(q, q, q))
    with pytest.raises(cg.NotSupported, match="float16 and bfloat16 only"):
        g.compile("cuda", fallback="error")
    two = cg.Graph("two_convs")
    x = two.input("x", (8, 64, 28, 28), torch.float16, layout="channels_last")
    w1 = two.input("w1", (64, 64, 3, 3), torch.float16, layout="channels_last")
    w2 = two.input("w2", (64, 64, 3, 3), torch.float16, layout="channels_last")
    total = two.relu(two.conv(x, w1, padding=1) + two.conv(x, w2, padding=1))
    two.output("y", total)
    with pytest.raises(cg.NotSupported):
        two.compile("cuda", fallback="error")
    exe = two.compile("cuda")
    assert [len(step.spec.nodes) for step in exe.steps] == [1, 3]
    assert all(step.choice is not None for step in exe.steps)
    given = tensors(exe)
    wide = {name: tensor.double().cpu() for name, tensor in given.items()}
    conv2d = torch.nn.functional.conv2d
    want = conv2d(wide["x"], wide["w1"], padding=1) + conv2d(wide["x"], wide["w2"], padding=1)
    numerics.check(exe(**given), want.relu(), torch.float16)


def test_explain_names_the_plan_and_the_reasons() -> None:
    text = conv(torch.float16).compile("cuda").explain()
    assert "cuDNN engine" in text and "first of cuDNN's ranking that builds" in text
    g = cg.Graph("attention")
    q = g.input("q", (2, 4, 64, 64), torch.float32)
    g.output("o", g.sdpa(q, q, q))
    text = g.compile("cuda").explain()
    assert "plan: torch" in text and "float16 and bfloat16 only" in text


def test_the_reference_backend_can_be_forced() -> None:
    from cudnngraph import settings

    with settings.override(backend="reference"):
        exe = conv(torch.float16).compile("cuda")
    assert [step.choice for step in exe.steps] == [None]
    given = tensors(exe)
    numerics.check(exe(**given), float64(exe, given), torch.float16)


def test_a_process_that_used_plans_exits_cleanly() -> None:
    code = (
        "import torch, cudnngraph as cg\n"
        "g = cg.Graph('g'); x = g.input('x', (4, 32, 8, 8), torch.float16)\n"
        "w = g.input('w', (32, 32, 3, 3), torch.float16)\n"
        "g.output('y', g.relu(g.conv(x, w)))\n"
        "exe = g.compile('cuda')\n"
        "y = exe(x=torch.ones(4, 32, 8, 8, device='cuda').half(),"
        " w=torch.ones(32, 32, 3, 3, device='cuda').half())\n"
        "print(float(y.float().mean()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.strip() == "288.0"


def test_a_forked_child_drops_plans_without_touching_them() -> None:
    code = (
        "import os, torch, cudnngraph as cg\n"
        "from cudnngraph.runtime.process import PROCESS\n"
        "g = cg.Graph('g'); x = g.input('x', (64, 64), torch.float16); g.output('y', g.relu(x))\n"
        "exe = g.compile('cuda'); exe(x=torch.ones(64, 64, device='cuda').half())\n"
        "torch.cuda.synchronize()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    ok = len(PROCESS.programs) == 0\n"
        "    c = g.compile('cpu')(x=torch.full((64, 64), -1.0).half())\n"
        "    os._exit(0 if ok and float(c.sum()) == 0 else 1)\n"
        "_, status = os.waitpid(pid, 0)\n"
        "y = exe(x=torch.ones(64, 64, device='cuda').half())\n"
        "print(status, float(y.sum()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "0 4096.0", done.stderr


def test_two_scaled_terms_and_a_bias_do_not_crash_in_the_precompiled_engines() -> None:
    g = cg.Graph("two_scaled")
    last = {"layout": "channels_last"}
    x = g.input("x", (2, 16, 8, 8), torch.float16, **last)
    w = g.input("w", (32, 16, 3, 3), torch.float16, **last)
    z = g.input("z", (2, 32, 8, 8), torch.float16, **last)
    a, b, c = (g.input(name, (32,), torch.float16) for name in "abc")
    y = g.scale(g.conv(x, w, padding=1), a) + g.scale(z, b)
    g.output("y", g.relu(g.bias(y, c)))
    exe = g.compile("cuda")
    given = tensors(exe)
    wide = {name: tensor.double().cpu() for name, tensor in given.items()}

    def channel(name: str) -> torch.Tensor:
        return wide[name].view(1, -1, 1, 1)

    want = torch.nn.functional.conv2d(wide["x"], wide["w"], padding=1) * channel("a")
    want = (want + wide["z"] * channel("b") + channel("c")).relu()
    numerics.check(exe(**given), want, torch.float16)
    assert any("known to be wrong" in d.reason for step in exe.steps for d in step.decisions)


def test_a_plan_that_builds_and_does_not_launch_is_passed_over() -> None:
    """cuDNN 9.19's first choice here, of engine 62, builds; cuLaunchKernelEx then refuses it."""
    g = cg.Graph("nchw")
    x = g.input("x", (16, 64, 56, 56), torch.float16)
    w = g.input("w", (64, 64, 3, 3), torch.float16)
    g.output("y", g.conv(x, w, padding=1))
    exe = g.compile("cuda")
    given = tensors(exe)
    wide = {name: tensor[:1].double().cpu() for name, tensor in given.items()}
    wide["w"] = given["w"].double().cpu()
    want = torch.nn.functional.conv2d(wide["x"], wide["w"], padding=1)
    numerics.check(exe(**given)[:1], want, torch.float16)


def test_attention_of_a_tensor_with_itself() -> None:
    g = cg.Graph("itself")
    q = g.input("q", (2, 4, 64, 64), torch.float16)
    g.output("o", g.sdpa(q, q, q))
    exe = g.compile("cuda")
    assert [step.choice is not None for step in exe.steps] == [True]
    given = tensors(exe)
    wide = given["q"].double().cpu()
    want = torch.nn.functional.scaled_dot_product_attention(wide, wide, wide)
    numerics.check(exe(**given), want, torch.float16)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_norm_reads_its_epsilon_at_each_launch_and_when_captured(op: str) -> None:
    results = {}
    for eps in (1e-5, 2.0):  # one key each; a second plan must not bring the first's number along
        g = cg.Graph("norm")
        x, w = g.input("x", (64, 256), torch.float16), g.input("w", (256,), torch.float16)
        g.output("y", getattr(g, op)(x, w, eps=eps))
        exe = g.compile("cuda")
        assert [step.choice is not None for step in exe.steps] == [True]
        torch.manual_seed(0)
        given = tensors(exe)
        x64, w64 = given["x"].double().cpu(), given["w"].double().cpu()
        centred = x64 - x64.mean(1, keepdim=True) if op == "layer_norm" else x64
        want = centred / (centred.square().mean(1, keepdim=True) + eps).sqrt() * w64
        y = exe(**given)
        numerics.check(y, want, torch.float16)
        call = exe.bind(**given, y=torch.empty_like(y))
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        out = torch.zeros_like(y)
        captured = exe.bind(**given, y=out)
        with torch.cuda.graph(graph, stream=side):
            captured()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, y)
        results[eps] = y
    assert not torch.equal(results[1e-5], results[2.0])


def test_a_product_of_float32_uses_tf32_when_allowed_and_not_otherwise() -> None:
    errors = {}
    for allowed in (False, True):
        g = cg.Graph("product")
        x, w = g.input("x", (256, 512), torch.float32), g.input("w", (512, 384), torch.float32)
        g.output("y", x @ w + g.input("b", (384,), torch.float32))
        exe = g.compile("cuda", allow_tf32=allowed)
        torch.manual_seed(0)
        given = tensors(exe)
        wide = {name: tensor.double().cpu() for name, tensor in given.items()}
        want = wide["x"] @ wide["w"] + wide["b"]
        errors[allowed] = numerics.relative_error(exe(**given), want)
    assert errors[False] <= numerics.BOUNDS["float32"]
    assert 1e-5 < errors[True] <= numerics.BOUNDS["tf32"]
