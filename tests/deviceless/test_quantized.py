"""Graphs of 8-bit data that cuDNN takes, and its reasons for those that it refuses."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import torch

import cudnngraph as cg
from cudnngraph import backend
from cudnngraph.backend import env
from cudnngraph.backend.deviceless import propose_for
from cudnngraph.backend.lowering.driver import lower

I8, E4, E5 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
F16, F32 = torch.float16, torch.float32
TARGET = "nvidia-h200"
# The engines that fuse. For the described GPU cuDNN 9.19 does not offer 4 ("No GPC available"), of
# which its description has no number; 9.26 does.
FUSE = {2, 4, 7}


def conv(
    dtype: torch.dtype,
    c: int = 64,
    groups: int = 1,
    layout: str = "channels_last",
    amax: bool = False,
) -> cg.Graph:
    """Convolution, scale per channel, bias, ReLU, the largest result where asked, rounding."""
    g = cg.Graph("conv")
    x = g.input("x", (4, c, 14, 14), dtype, layout=layout)
    w = g.input("w", (64, c // groups, 3, 3), dtype, layout=layout)
    s, b, s_out = g.input("s", (64,), F32), g.input("b", (64,), F32), g.input("s_out", (), F32)
    y = g.quantized_conv_bias_act(x, w, s, b, padding=1, groups=groups)
    if amax:
        g.output("amax", g.reduction(y, mode="amax"))
    g.output("y", g.quantize(y, s_out, dtype=dtype), layout=layout)
    return g


def transposed(dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> cg.Graph:
    g = cg.Graph("transposed")
    x = g.input("x", (4, 64, 14, 14), dtype, layout="channels_last")
    at = {"layout": "channels_last"} if stride is None else {"stride": stride}
    w = g.input("w", (64, 32, 3, 3), dtype, **at)  # type: ignore[arg-type]
    g.output("y", g.conv_transpose(x, w, padding=1))
    return g


def reasons(graph: cg.Graph) -> tuple[str, ...]:
    with pytest.raises(cg.NotSupported) as caught:
        propose_for(graph.spec(), TARGET)
    return caught.value.reasons


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("amax", [False, True])
@pytest.mark.parametrize("dtype", [I8, E4, E5], ids=str)
def test_a_quantised_block_is_one_plan(dtype: torch.dtype, amax: bool) -> None:
    found = cg.explain(conv(dtype, amax=amax), TARGET)
    assert found.whole
    engines = {plan.engine for plan in found.steps[0].plans}
    assert engines and engines <= FUSE


@pytest.mark.usefixtures("driver")
def test_int8_is_summed_up_in_int32_and_fp8_in_float32() -> None:
    kinds = env.frontend().data_type
    for dtype, compute, sums in ((I8, kinds.INT32, kinds.INT32), (E4, kinds.FLOAT, kinds.FLOAT)):
        lowered, _ = propose_for(conv(dtype).spec(), TARGET)
        node = next(node for node in lowered.graph.nodes if node.name == "conv")
        assert node.compute_data_type == compute
        (made,) = node.outputs.values()
        assert made.data_type == sums


SUMS = {
    "k3": ((64, 64, 3, 3), {"padding": 1}),
    "k1": ((64, 64, 1, 1), {}),
    "s2": ((64, 64, 3, 3), {"stride": 2}),
    "dilation2": ((64, 64, 3, 3), {"dilation": 2}),
    "groups2": ((64, 32, 3, 3), {"groups": 2}),
    "k5": ((5, 64, 3, 3), {}),
}


def sums(w_shape: tuple[int, ...], layout: str = "channels_last", **options: int) -> cg.Graph:
    """A convolution of int8 with nothing behind it."""
    g = cg.Graph("sums")
    x = g.input("x", (4, 64, 14, 14), I8, layout=layout)
    g.output("y", g.conv(x, g.input("w", w_shape, I8, layout=layout), **options), layout=layout)
    return g


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", SUMS)
def test_the_sums_of_int8_are_written_by_engines_that_fuse(name: str) -> None:
    """Not by 0, 28 and 71, those of a convolution by itself: the first two get int32 wrong."""
    w_shape, options = SUMS[name]
    lowered, candidates = propose_for(sums(w_shape, **options).spec(), TARGET)
    assert {candidate.choice.engine for candidate in candidates} <= FUSE
    kind = env.frontend().data_type.INT32
    conv, last = lowered.graph.nodes
    assert (conv.compute_data_type, last.compute_data_type) == (kind, kind)
    assert [t.data_type for node in (conv, last) for t in node.outputs.values()] == [kind, kind]


def test_the_sums_that_engines_that_fuse_refuse_are_torch_steps() -> None:
    for graph in (sums((64, 64, 3, 3), layout="contiguous"), sums((64, 1, 3, 3), groups=64)):
        (step,) = cg.explain(graph, TARGET).steps
        assert step.runs_on == "torch"


def rounding(kind: str, dtype: torch.dtype) -> cg.Graph:
    """One plan that writes ``dtype``: of 16-bit numbers, or of a product of 8-bit data."""
    g = cg.Graph(kind)
    if kind == "pointwise":
        y = g.input("x", (4, 64, 14, 14), F16)
    elif kind == "matmul":
        w = g.input("w", (64, 32), dtype, stride=(1, 64))
        y = g.dequantize(g.input("x", (16, 64), dtype) @ w, g.input("s", (), F32))
    elif kind == "conv":
        return conv(dtype)
    else:
        (x, w), padding = (transposed(dtype, (1, 576, 192, 64)).spec().tensors[n] for n in "xw"), 1
        data = [g.input(t.name, t.shape, dtype, stride=t.stride) for t in (x, w)]
        y = g.dequantize(g.conv_transpose(*data, padding=padding), g.input("s", (), F32))
    g.output("y", g.quantize(y, dtype=dtype))
    return g


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
@pytest.mark.parametrize("kind", ["pointwise", "matmul", "conv", "conv_transpose"])
def test_what_a_plan_writes_in_fp8_is_clamped_before(kind: str, dtype: torch.dtype) -> None:
    """cuDNN's own conversion makes NaN or infinity of what is beyond the largest number, and its
    minimum and maximum make numbers of NaN."""
    lowered, candidates = propose_for(rounding(kind, dtype).spec(), TARGET)
    assert candidates
    low, high, lost, added = lowered.graph.nodes[-4:]
    assert [n.params["mode"] for n in (low, high, lost, added)] == ["max", "min", "mul", "add"]
    bounds = [
        next(e.value for e in lowered.extras if e.uid == n.inputs["IN_1"].uid)
        for n in (low, high, lost)
    ]
    assert bounds == [-torch.finfo(dtype).max, torch.finfo(dtype).max, 0.0]
    float32 = env.frontend().data_type.FLOAT
    assert all(n.outputs["OUT_0"].data_type == float32 for n in (low, high, lost))
    assert added.outputs["OUT_0"].data_type != float32
    assert high.inputs["IN_0"].name == low.outputs["OUT_0"].name
    assert lost.inputs["IN_0"].name == low.inputs["IN_0"].name
    assert {added.inputs[at].name for at in ("IN_0", "IN_1")} == {
        n.outputs["OUT_0"].name for n in (high, lost)
    }


def test_what_8_bit_convolutions_are_refused_for_says_what_to_do() -> None:
    assert reasons(sums((64, 64, 3, 3), layout="contiguous")) == (
        "'x' is not channels_last, as 8-bit convolutions want it; declare it with "
        "layout='channels_last'",
    )
    for dtype in (I8, E4):
        assert reasons(conv(dtype, layout="contiguous")) == (
            "'x' is not channels_last, as 8-bit convolutions want it; declare it with "
            "layout='channels_last'",
        )
        assert reasons(conv(dtype, groups=32)) == (
            "2 channels in each of 32 groups; 8-bit convolutions take a multiple of 4",
        )
    assert reasons(transposed(I8)) == ("cuDNN has no transposed convolution of int8",)
    assert reasons(transposed(E5)) == (
        "the weight 'w' of a transposed convolution in FP8 has its first dim fastest in memory; "
        "declare stride=(1, 576, 192, 64)",
    )


@pytest.mark.usefixtures("driver")
def test_the_stride_that_a_refusal_names_is_taken() -> None:
    _, candidates = propose_for(transposed(E5, (1, 576, 192, 64)).spec(), TARGET)
    assert candidates


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("dtype", [I8, E4], ids=str)
def test_what_is_refused_is_a_torch_step_with_the_rest_on_cudnn(dtype: torch.dtype) -> None:
    found = cg.explain(conv(dtype, groups=64), TARGET)
    first, second = found.steps
    assert (first.ops, second.ops) == (("conv",), ("dequantize", "bias", "relu", "quantize"))
    assert second.runs_on == "cuDNN"
    assert first.runs_on == "torch"


@pytest.mark.parametrize(("sm", "name"), [(80, "8.0"), (86, "8.6")])
def test_fp8_on_an_older_gpu_is_refused_before_cudnn_is_asked(sm: int, name: str) -> None:
    text = (resources.files(backend) / "targets" / f"{TARGET}.json").read_text()
    frontend = env.frontend()
    described = frontend.create_device_properties(json.dumps(json.loads(text)))
    with pytest.raises(cg.NotSupported) as caught:
        lower(conv(E4).spec(), frontend, device_property=described, sm_version=sm)
    assert caught.value.reasons == (
        f"FP8 needs compute capability 8.9 or higher, this GPU has {name}; declare float16 data",
    )


def test_what_is_rounded_is_not_used_further_in_a_plan() -> None:
    g = cg.Graph("g")
    x, s = g.input("x", (16, 64), F16), g.input("s", (), F32)
    g.output("y", g.dequantize(g.quantize(x, s, dtype=I8), s))
    assert reasons(g) == ("what is quantised is rounded where it leaves a plan, not within",)
    assert [step.ops for step in cg.explain(g, TARGET).steps] == [("quantize",), ("dequantize",)]


def attention(**options: object) -> cg.Graph:
    g = cg.Graph("attention")
    shape = options.pop("shape", (2, 4, 256, 128))
    q, k, v = (g.input(name, shape, E4) for name in "qkv")  # type: ignore[arg-type]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    given = [g.input(name, (), F32) for name in names]
    o, amax_s, amax_o = g.sdpa_fp8(q, k, v, *given, **options)  # type: ignore[arg-type]
    for name, value in {"o": o, "amax_s": amax_s, "amax_o": amax_o}.items():
        g.output(name, value)
    return g


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (64, 0)}], ids=str)
def test_attention_in_fp8_is_one_plan_with_its_largest_numbers(options: dict[str, object]) -> None:
    found = cg.explain(attention(**options), TARGET)
    assert found.whole
    assert found.steps[0].plans


@pytest.mark.usefixtures("driver")
def test_one_tensor_may_be_several_operands_of_attention() -> None:
    g = cg.Graph("attention")
    x, one = g.input("x", (2, 4, 256, 128), E4), g.input("one", (), F32)
    g.output("o", g.sdpa_fp8(x, x, x, *[one] * 6)[0])
    lowered, candidates = propose_for(g.spec(), TARGET)
    assert candidates
    assert sum(type(extra).__name__ == "Alias" for extra in lowered.extras) == 7


def test_what_attention_in_fp8_is_refused_for() -> None:
    assert reasons(attention(shape=(2, 4, 256, 72))) == (
        "head dims [72]; cuDNN's FP8 attention takes multiples of 16 up to 256",
    )
    (reason,) = reasons(attention(is_causal=True, diagonal_alignment="bottom_right"))
    assert "only supported on Blackwell" in reason
