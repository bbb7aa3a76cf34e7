"""8-bit data on a GPU, beyond the samples: ties, saturation, amax, selection, torch steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import env
from cudnngraph.bench.quantized import lowprecision_suite
from cudnngraph.executor import reference
from cudnngraph.ops.quantize import saturated
from cudnngraph.select.inputs import random_inputs
from cudnngraph.settings import override
from tests import numerics

F16, F32, F64 = torch.float16, torch.float32, torch.float64
I8, E4, E5 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2


def on_cudnn(exe: cg.Executable) -> bool:
    return all(step.choice is not None for step in exe.steps)


def rounded_by_a_plan(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` rounded to ``dtype`` by a pointwise plan."""
    g = cg.Graph("rounding")
    g.output("y", g.quantize(g.input("x", (1, values.numel()), F32), dtype=dtype))
    exe = g.compile("cuda")
    assert on_cudnn(exe), exe.explain()
    return exe(x=values.view(1, -1).cuda())[0]


def rounded_behind_a_product(values: torch.Tensor) -> torch.Tensor:
    """``values``, sixteenths of int8 numbers, as products that the same plan rounds to int8."""
    whole = torch.zeros(values.numel(), 64, dtype=I8)
    whole[:, 0] = (values * 16).to(I8)
    g = cg.Graph("rounding")
    x, w = g.input("x", whole.shape, I8), g.input("w", (64, 64), I8, stride=(1, 64))
    g.output("y", g.quantize(g.dequantize(x @ w, g.input("s", (), F32)), dtype=I8))
    exe = g.compile("cuda")
    assert on_cudnn(exe) and len(exe.steps) == 1, exe.explain()
    one = torch.eye(64, dtype=I8).cuda().t()
    return exe(x=whole.cuda(), w=one, s=torch.tensor(1 / 16).cuda())[:, 0]


TIES = [0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 0.4999, 0.5001, 1.25, 126.5, 127.49, -127.5, -128.49]
BEYOND = [127.5, 128.0, 129.0, 1e4, 3e9, -128.5, -129.0, -1e4, -3e9]


def test_int8_is_rounded_to_even_and_saturated() -> None:
    values = torch.tensor([*TIES, *BEYOND, *torch.linspace(-140, 140, 1001).tolist()])
    made = rounded_by_a_plan(values, I8)
    assert torch.equal(made.cpu(), saturated(values, I8))


def test_int8_is_rounded_to_even_behind_a_product() -> None:
    values = torch.arange(-128, 128) / 16.0  # every half among them
    assert torch.equal(rounded_behind_a_product(values).cpu(), values.round().to(I8))


@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
def test_fp8_is_rounded_to_even_and_saturated(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    some = torch.cat([torch.logspace(-12, 20, 4001, base=2.0), torch.linspace(0, 2, 513)])
    values = torch.cat([some, -some, torch.tensor([most, 1.03 * most, 1.07 * most, 2 * most, 1e9])])
    made = rounded_by_a_plan(values, dtype)
    assert torch.equal(made.cpu().double(), saturated(values, dtype).double())


@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
@pytest.mark.parametrize("kind", ["matmul", "conv"])
def test_fp8_saturates_behind_a_product(kind: str, dtype: torch.dtype) -> None:
    """Every finite number of the format times 1.07, and 2: the largest ones are beyond it then."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = values[values.float().isfinite()]
    image = (1, 1) if kind == "conv" else ()
    data = torch.zeros(values.numel(), 64, *image).to(dtype)
    data.view(torch.uint8)[:, 0] = values.view(torch.uint8).view(-1, *image)
    g = cg.Graph("saturation")
    last = {"layout": "channels_last"} if image else {}
    x = g.input("x", data.shape, dtype, **last)  # type: ignore[arg-type]
    w = g.input("w", (64, 64, *image), dtype, **(last or {"stride": (1, 64)}))  # type: ignore[arg-type]
    y = g.dequantize(g.conv(x, w) if image else x @ w, g.input("s", (), F32))
    g.output("y", g.quantize(y, dtype=dtype))
    exe = g.compile("cuda")
    assert on_cudnn(exe) and len(exe.steps) == 1, exe.explain()
    one = torch.eye(64).to(dtype).view(64, 64, *image).cuda()
    for factor in (1.07, 2.0):
        scale = torch.tensor(factor)
        made = exe(x=data.cuda(), w=one if image else one.t(), s=scale.cuda())[:, 0].reshape(-1)
        want = saturated(values.float() * scale, dtype).double()
        assert float(want.max()) == -float(want.min()) == torch.finfo(dtype).max
        assert torch.equal(made.cpu().double(), want)


@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
def test_what_is_not_finite_is_nan_in_fp8(dtype: torch.dtype) -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]).repeat(16)
    made = rounded_by_a_plan(values, dtype).cpu().double().view(16, 4)
    assert bool(made[:, :3].isnan().all())
    assert bool((made[:, 3] == 1.0).all())


@pytest.mark.parametrize("dtype", [I8, E4, E5], ids=str)
@pytest.mark.parametrize("negative", [False, True])
def test_the_amax_of_a_product_is_the_largest_of_this_run_alone(
    dtype: torch.dtype, negative: bool
) -> None:
    """Run after run into the same memory: nothing is kept of the run before."""
    g = cg.Graph("amax")
    x = g.input("x", (2, 32, 14, 14), dtype, layout="channels_last")
    w = g.input("w", (64, 32, 3, 3), dtype, layout="channels_last")
    y = g.dequantize(g.conv(x, w, padding=1), g.input("s", (), F32))
    g.output("amax", g.reduction(y, mode="amax"))
    g.output("y", y)
    exe = g.compile("cuda")
    assert on_cudnn(exe) and len(exe.steps) == 1, exe.explain()
    amax = torch.full((), float("nan"), device="cuda")
    out = torch.empty(2, 64, 14, 14, device="cuda").to(memory_format=torch.channels_last)
    gen = torch.Generator("cuda").manual_seed(0)
    for size in (8.0, 1.0, 4.0):
        data = [
            (torch.randn(*t.shape, device="cuda", generator=gen) * size)
            .to(memory_format=torch.channels_last)
            .to(dtype)
            for t in (x, w)
        ]
        if negative:
            data = [data[0].double().abs().to(dtype), (-data[1].double().abs()).to(dtype)]
        exe.run(x=data[0], w=data[1], s=torch.tensor(0.01, device="cuda"), amax=amax, y=out)
        assert float(amax) == float(out.abs().max())


def test_the_largest_numbers_of_attention_are_those_of_the_definition() -> None:
    """Row 0 attends to one key, with a weight of 1; the result is off by its weights' roundings."""
    g = cg.Graph("attention")
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    data = [g.input(name, (2, 4, 256, 64), E4) for name in "qkv"]
    scales = [g.input(name, (), F32) for name in names]
    o, amax_s, amax_o = g.sdpa_fp8(*data, *scales, is_causal=True)
    for name, value in {"o": o, "amax_s": amax_s, "amax_o": amax_o}.items():
        g.output(name, value)
    exe = g.compile("cuda")
    assert on_cudnn(exe), exe.explain()
    gen = torch.Generator("cuda").manual_seed(0)
    t = {n: torch.randn(2, 4, 256, 64, device="cuda", generator=gen).to(E4) for n in "qkv"}
    values = (1.0, 1.0, 1.0, 1 / 256, 256.0, 64.0)
    t |= {n: torch.tensor(v, device="cuda") for n, v in zip(names, values, strict=True)}
    made = exe(**t)
    wanted = reference.run(exe.spec, [t[name] for name in exe.spec.inputs], F64)
    assert (
        numerics.relative_error(made.o, wanted[0]) < numerics.BOUNDS["float8_e4m3fn, not rounded"]
    )
    assert float(wanted[1]) == 1.0
    assert float(made.amax_s) == pytest.approx(1.0, rel=numerics.BOUNDS["float32"])
    assert float(made.amax_o) == pytest.approx(float(wanted[2]), rel=2.0**-4)


def test_the_largest_weight_of_attention_is_one_after_the_sum() -> None:
    """Without a mask no weight is 1: tells exp(scores - max) from its share of the row."""
    g = cg.Graph("attention")
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    data = [g.input(name, (1, 2, 128, 64), E4) for name in "qkv"]
    g.output("amax_s", g.sdpa_fp8(*data, *(g.input(name, (), F32) for name in names))[1])
    exe = g.compile("cuda")
    assert on_cudnn(exe), exe.explain()
    gen = torch.Generator("cuda").manual_seed(0)
    t = {n: torch.randn(1, 2, 128, 64, device="cuda", generator=gen).to(E4) for n in "qkv"}
    t |= {n: torch.ones((), device="cuda") for n in names}
    scores = t["q"].double() @ t["k"].double().transpose(-1, -2) / 8.0
    assert float(exe(**t)) == pytest.approx(float(scores.softmax(-1).max()), rel=2.0**-8)


def test_sums_of_int8_past_what_float32_holds_are_exact() -> None:
    g = cg.Graph("sums")
    x = g.input("x", (64, 4096), I8)
    g.output("y", x @ g.input("w", (4096, 64), I8, stride=(1, 4096)))
    exe = g.compile("cuda")
    assert on_cudnn(exe), exe.explain()
    gen = torch.Generator().manual_seed(0)
    xt = torch.randint(120, 128, (64, 4096), generator=gen)
    wt = torch.randint(120, 128, (64, 4096), generator=gen).t()
    want = xt @ wt
    assert int(want.max()) > 1 << 24
    made = exe(x=xt.to(I8).cuda(), w=wt.t().contiguous().to(I8).cuda().t())
    assert torch.equal(made.cpu().long(), want)


@pytest.mark.parametrize("dtype", [I8, E4, E5], ids=str)
def test_what_cudnn_refuses_runs_as_a_torch_step(dtype: torch.dtype) -> None:
    g = cg.Graph("transposed")
    x = g.input("x", (2, 32, 9, 9), dtype)
    w = g.input("w", (32, 16, 3, 3), dtype)
    s = g.input("s", (), F32)
    g.output("y", g.quantize(g.dequantize(g.conv_transpose(x, w, stride=2), s), dtype=dtype))
    exe = g.compile("cuda")
    assert exe.steps[0].choice is None
    gen = torch.Generator().manual_seed(0)
    made = [torch.randn(*t.shape, generator=gen) for t in (x, w)]
    t = {"x": (made[0] * 20).to(dtype), "w": (made[1] * 20).to(dtype), "s": torch.tensor(1e-2)}
    on_gpu = exe(**{name: value.cuda() for name, value in t.items()})
    on_cpu = g.compile("cpu")(**t)
    numerics.check(on_gpu, on_cpu.double() if dtype != I8 else on_cpu, dtype)


@pytest.mark.parametrize("dtype", [I8, E4, E5], ids=str)
def test_selection_measures_checks_and_keeps_8_bit_plans(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    g = cg.Graph("block")
    x = g.input("x", (8, 64, 28, 28), dtype, layout="channels_last")
    w = g.input("w", (64, 64, 3, 3), dtype, layout="channels_last")
    s, b, so = g.input("s", (64,), F32), g.input("b", (64,), F32), g.input("so", (), F32)
    g.output("y", g.quantized_conv_bias_act(x, w, s, b, out_scale=so, dtype=dtype, padding=1))
    with override(cache_dir=tmp_path):
        cg.cache_clear()
        exe = g.compile("cuda", tune="autotune")
        cg.cache_clear()
        again = g.compile("cuda", tune="cached")
    assert on_cudnn(exe), exe.explain()
    decided = [decision.reason for step in exe.steps for decision in step.decisions]
    assert not [reason for reason in decided if reason.startswith("wrong:")], exe.explain()
    assert [step.choice for step in again.steps] == [step.choice for step in exe.steps]
    given = random_inputs(exe.spec, torch.device("cuda"))
    (want,) = reference.run(exe.spec, given, F64)
    for each in (exe, again):
        numerics.check(each(*given), want if dtype == I8 else want.double(), dtype)


def test_a_graph_of_8_bits_is_captured_and_replayed() -> None:
    case = next(
        c for c in lowprecision_suite() if "32 128 28 128 3 1 1 e4m3fn scale relu" in c.name
    )
    tensors = case.tensors(torch.device("cuda"))
    call = case.graph.compile("cuda").bind(**tensors)
    call()
    eager = tensors["y"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    tensors["y"].view(torch.uint8).fill_(0x11)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(tensors["y"].view(torch.uint8), eager.view(torch.uint8))


def test_what_ran_is_said(record_property: pytest.RecordProperty) -> None:
    lines = []
    for case in lowprecision_suite():
        exe = case.graph.compile("cuda")
        lines.append(f"{case.name}: {[str(step.choice or 'torch') for step in exe.steps]}")
    record_property("summary", f"cuDNN {env.cudnn_version()}\n" + "\n".join(lines))
