"""The builder: what declarations mean, what is inferred, and how a graph is printed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.ir.spec import (
    channels_last_strides,
    dense_strides,
    is_channels_last,
    is_contiguous,
    is_dense,
    memory_order,
    overlaps_itself,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAST = torch.channels_last


def ops(g: cg.Graph) -> list[str]:
    return [node.op for node in g.spec().nodes]


# -- operators and methods -------------------------------------------------------------------------


def test_operators_mean_what_they_mean_on_tensors() -> None:
    g = cg.Graph("g")
    x, y = g.input("x", (6,), F32), g.input("y", (6,), F32)
    results = {
        "a": x + y,
        "b": 2.0 + x,
        "c": x - y,
        "d": 2 - x,
        "e": x * 3,
        "f": 3 * y,
        "h": x / y,
        "i": 1.0 / y,
        "j": y**2,
        "k": -x,
        "m": x < y,
        "n": x <= 0.5,
        "o": x > y,
        "p": x >= 0.5,
        "q": 0.5 > x,  # noqa: SIM300
    }
    for name, value in results.items():
        g.output(name, value)
    u = torch.tensor([0.5, -1.0, 2.0, 3.0, 0.25, -0.5])
    v = torch.tensor([0.5, 1.5, 0.5, 2.0, 4.0, 1.0])
    out = g.compile("cpu")(x=u, y=v)._asdict()
    want = {
        "a": u + v,
        "b": 2.0 + u,
        "c": u - v,
        "d": 2 - u,
        "e": u * 3,
        "f": 3 * v,
        "h": u / v,
        "i": 1.0 / v,
        "j": v**2,
        "k": -u,
        "m": u < v,
        "n": u <= 0.5,
        "o": u > v,
        "p": u >= 0.5,
        "q": 0.5 > u,  # noqa: SIM300
    }
    assert set(out) == set(want)
    for name, value in want.items():
        assert torch.equal(out[name], value), name


def test_a_method_of_a_value_is_the_op_of_its_graph() -> None:
    def declared(methods: bool) -> cg.Graph:
        g = cg.Graph("g")
        x, w = g.input("x", (1, 4, 5, 5), F32), g.input("w", (4, 4, 1, 1), F32)
        if methods:
            y = x.conv(w, stride=2).leaky_relu(0.2).clamp(max=1.0).relu6()
        else:
            y = g.relu6(g.clamp(g.leaky_relu(g.conv(x, w, stride=2), 0.2), max=1.0))
        g.output("y", y)
        return g

    assert str(declared(True)) == str(declared(False))


def test_a_number_is_one_constant_however_often_it_is_used() -> None:
    g = cg.Graph("g")
    x = g.input("x", (4,), F32)
    g.output("y", (x + 2) * 2.0 - (2.0 - x) + 3.0)
    constants = [node.attr("value") for node in g.spec().nodes if node.op == "constant"]
    assert sorted(constants) == [2.0, 3.0]


def test_numbers_of_numpy_are_numbers() -> None:
    def declared(whole: type, real: type) -> cg.Graph:
        g = cg.Graph("g")
        x = g.input("x", tuple(map(whole, (1, 4, 5, 5))), F32)
        w = g.input("w", (4, whole(2), 1, 1), F32, stride=tuple(map(whole, (2, 1, 1, 1))))
        y = g.conv(x, w, groups=whole(2), stride=whole(2), padding=(whole(1), 0))
        g.output("y", g.leaky_relu(y * real(0.5), real(0.25)))
        return g

    ours, theirs = declared(int, float), declared(np.int64, np.float32)
    assert str(theirs) == str(ours)
    assert theirs.compile("cpu").key == ours.compile("cpu").key


def test_the_two_zeros_are_two_constants() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2,), F32)
    g.output("up", x / 0.0)
    g.output("down", x / -0.0)
    result = g.compile("cpu")(x=torch.ones(2))
    assert torch.equal(result.up, torch.full((2,), math.inf))
    assert torch.equal(result.down, torch.full((2,), -math.inf))


def test_a_value_knows_its_shape_dtype_and_stride_while_the_graph_is_declared() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 8, 9, 9), F16, layout="channels_last")
    y = g.conv(x, g.input("w", (16, 8, 3, 3), F16), stride=2)
    assert (y.shape, y.dtype, y.stride) == ((2, 16, 4, 4), F16, (256, 1, 64, 16))
    assert repr(x) == "<x: f16[2, 8, 9, 9] channels_last>"
    assert repr(y) == "<conv: f16[2, 16, 4, 4] channels_last>"


def test_the_compositions_are_made_of_the_ops() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (1, 4, 6, 6), F32), g.input("w", (4, 4, 1, 1), F32)
    b, z = g.input("b", (4,), F32), g.input("z", (1, 4, 6, 6), F32)
    mean, var = g.input("mean", (4,), F32), g.input("var", (4,), F32)
    y = g.conv_bias_act(x, w, b, residual=z, alpha1=0.5, alpha2=2.0, activation="gelu")
    y = g.conv_bn_act(y, w, mean, var, bias=b, residual=z, activation="elu", alpha=0.3)
    g.output("y", g.conv_transpose_bias_act(y, w, b, activation=None))
    assert [op for op in ops(g) if op != "constant"] == [
        *("conv", "mul", "bias", "mul", "add", "gelu"),
        *("conv", "bias", "batch_norm", "add", "elu"),
        *("conv_transpose", "bias"),
    ]


def test_factors_of_one_add_no_ops() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (1, 4, 6, 6), F32), g.input("w", (4, 4, 1, 1), F32)
    g.output("y", g.conv_bias_act(x, w, residual=g.input("z", (1, 4, 6, 6), F32)))
    assert ops(g) == ["conv", "add", "relu"]


# -- inputs and outputs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, 4, 5),
        torch.zeros(2, 3, 4, 5, dtype=BF16).to(memory_format=LAST),
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(1, 5).expand(3, 5),
        torch.zeros(3, 4).t(),
        torch.zeros(()),
    ],
    ids=["contiguous", "channels_last", "sliced", "expanded", "transposed", "scalar"],
)
def test_like_takes_shape_dtype_and_strides_of_a_tensor(tensor: torch.Tensor) -> None:
    spec = cg.Graph("g").input("x", like=tensor).spec
    assert spec is not None
    assert (spec.shape, spec.dtype) == (tuple(tensor.shape), tensor.dtype)
    assert spec.stride == tensor.stride()


def test_what_is_given_beside_like_overrides_it() -> None:
    tensor = torch.zeros(2, 3, 4, 5).to(memory_format=LAST)
    g = cg.Graph("g")
    assert g.input("a", like=tensor, layout="contiguous").stride == (60, 20, 5, 1)
    assert g.input("b", like=tensor, dtype=F16).dtype == F16
    assert g.input("c", (2, 3), like=tensor).stride == (3, 1)


def test_an_output_takes_its_declared_name_and_a_clash_moves_the_intermediate() -> None:
    g = cg.Graph("g")
    x = g.input("relu", (3,), F32)
    y = x.relu().neg()
    g.output("neg", y.exp())
    spec = g.spec()
    assert spec.inputs == ("relu",)
    assert spec.outputs == ("neg",)
    assert [node.outputs for node in spec.nodes] == [("relu_1",), ("neg_1",), ("neg",)]
    assert torch.equal(g.compile("cpu")(relu=torch.ones(3)), torch.full((3,), -1.0).exp())


def test_outputs_and_inputs_stand_in_the_order_of_declaration() -> None:
    g = cg.Graph("g")
    z, a = g.input("z", (3,), F32), g.input("a", (3,), F32)
    y = a - z
    g.output("second", y.exp())
    g.output("first", y)
    spec = g.spec()
    assert spec.inputs == ("z", "a")
    assert spec.outputs == ("second", "first")


def test_a_frozen_graph_does_not_follow_its_builder() -> None:
    g = cg.Graph("g")
    x = g.input("x", (3,), F32)
    g.output("y", x.relu())
    spec = g.spec()
    text = str(spec)
    g.output("z", x.neg())
    assert str(spec) == text
    assert g.spec().outputs == ("y", "z")
    with pytest.raises(TypeError):
        spec.tensors["y"] = spec.tensors["x"]  # type: ignore[index]


def test_the_frozen_graph_is_the_same_object_until_something_is_added() -> None:
    g = cg.Graph("g")
    x = g.input("x", (3,), F32)
    g.output("y", x.relu())
    first = g.spec()
    assert g.spec() is first
    g.compile("cpu")
    assert g.spec() is first
    x.neg()  # no output needs it, and yet it is a node more
    second = g.spec()
    assert second is not first and second == first
    assert g.spec() is second
    g.output("z", x.exp())
    third = g.spec()
    assert (third.outputs, first.outputs) == (("y", "z"), ("y",))
    assert g.spec() is third


def test_a_mistake_after_freezing_is_reported_and_again() -> None:
    g = cg.Graph("g")
    x = g.input("x", (3,), F32)
    g.output("y", x.relu())
    frozen = g.spec()
    g.add(x, g.input("z", (4,), F32))
    for _ in range(2):
        with pytest.raises(cg.GraphError, match="add 'add'"):
            g.spec()
    assert frozen.outputs == ("y",)


def test_an_input_that_is_added_and_not_used_is_reported() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (3,), F32).relu())
    g.spec()
    z = g.input("z", (3,), F32)
    with pytest.raises(cg.GraphError, match="input 'z': is not used by any output"):
        g.spec()
    g.output("w", z.exp())
    assert g.spec().inputs == ("x", "z")


def test_what_no_output_needs_is_left_out() -> None:
    g = cg.Graph("g")
    x = g.input("x", (3,), F32)
    x.exp().tanh()
    g.output("y", x.relu())
    assert ops(g) == ["relu"]


def test_a_thousand_ops_in_a_row_are_no_problem() -> None:
    g = cg.Graph("g")
    y = g.input("x", (3,), F32)
    for _ in range(2000):
        y = y + 0.5
    g.output("y", y)
    assert torch.equal(g.compile("cpu")(x=torch.zeros(3)), torch.full((3,), 1000.0))


# -- shapes, dtypes, strides -----------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_sizes_of_convolutions_are_those_of_torch(
    kernel: int, stride: int, dilation: int, padding: int
) -> None:
    g = cg.Graph("g")
    x = g.input("x", (1, 2, 11, 12), F32)
    w = g.input("w", (2, 2, kernel, kernel), F32)
    options = {"stride": stride, "dilation": dilation, "padding": padding}
    t, f = torch.zeros(1, 2, 11, 12), torch.zeros(2, 2, kernel, kernel)
    assert g.conv(x, w, **options).shape == F.conv2d(t, f, **options).shape
    for extra in range(max(stride, dilation)):
        ours = g.conv_transpose(x, w, output_padding=extra, **options)
        assert ours.shape == F.conv_transpose2d(t, f, output_padding=extra, **options).shape


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 4), (3, 4)),
        ((3, 1), (1, 4)),
        ((5, 1, 4), (3, 1)),
        ((), (2, 3)),
        ((1,), ()),
        ((0, 3), (1, 3)),
        ((2, 1, 1, 6), (4, 5, 1)),
    ],
)
def test_shapes_broadcast_as_in_torch(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    g = cg.Graph("g")
    ours = g.add(g.input("a", a, F32), g.input("b", b, F32))
    assert ours.shape == torch.broadcast_shapes(a, b)


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [(F16, F16, F16), (F16, F32, F32), (F32, BF16, F32), (BF16, BF16, BF16), (F64, F64, F64)],
)
def test_dtypes_mix_as_in_torch(a: torch.dtype, b: torch.dtype, result: torch.dtype) -> None:
    g = cg.Graph("g")
    ours = g.mul(g.input("a", (3,), a), g.input("b", (3,), b))
    assert ours.dtype == result == torch.promote_types(a, b)
    assert (ours * 2.0).dtype == result  # a number takes the other operand's dtype


def test_an_output_has_the_dtype_that_torch_would_give() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (1, 8, 6, 6), F16), g.input("w", (8, 8, 3, 3), F16)
    y = g.bias(g.conv(x, w), g.input("b", (8,), F32))
    g.output("y", y)
    g.output("flag", y > 0.0)
    g.output("wide", y.neg(), dtype=F32)
    spec = g.spec()
    assert [spec.tensors[name].dtype for name in spec.outputs] == [F16, torch.bool, F32]


def test_values_between_ops_are_kept_in_the_intermediate_dtype() -> None:
    def middle(**options: torch.dtype) -> torch.dtype:
        g = cg.Graph("g", **options)
        g.output("y", g.input("x", (3,), F16).relu().exp())
        return g.spec().tensors["relu"].dtype

    assert middle() == F32
    assert middle(intermediate_dtype=F16) == F16
    assert middle(compute_dtype=F64) == F64


def test_intermediates_are_not_rounded_to_the_dtype_of_the_data() -> None:
    """300 * 300 overflows float16; the result does not."""
    g = cg.Graph("g")
    x = g.input("x", (1,), F16)
    g.output("y", x * x / 300.0)
    assert g.compile("cpu")(x=torch.tensor([300.0], dtype=F16)).item() == 300.0


def test_one_float64_input_makes_the_arithmetic_float64() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (1,), F64) / 3.0)
    assert g.spec().compute_dtype == F64
    assert g.compile("cpu")(x=torch.ones(1, dtype=F64)).item() == 1.0 / 3.0


@pytest.mark.parametrize("x_last", [True, False])
@pytest.mark.parametrize("w_last", [True, False])
@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (2, 8, 1, 1), (1, 8, 5, 1)], ids=str)
def test_a_convolution_is_channels_last_where_that_of_torch_is(
    x_last: bool, w_last: bool, shape: tuple[int, ...]
) -> None:
    t = torch.randn(shape).to(memory_format=LAST if x_last else torch.contiguous_format)
    f = torch.randn(8, shape[1], 3, 3).to(memory_format=LAST if w_last else torch.contiguous_format)
    g = cg.Graph("g")
    y = g.conv(g.input("x", like=t), g.input("w", like=f), padding=1)
    g.output("y", y)
    ours = g.compile("cpu")(x=t, w=f)
    theirs = F.conv2d(t, f, padding=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert ours.is_contiguous(memory_format=LAST) == theirs.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("memory", [torch.contiguous_format, LAST])
def test_strides_of_an_extent_of_one_do_not_choose_a_layout(memory: torch.memory_format) -> None:
    """C = 1 (pytorch#24090): torch looks at the stride of that dim, which may be anything here."""
    t, f = (torch.randn(s).to(memory_format=memory) for s in ((2, 1, 5, 6), (8, 1, 3, 3)))
    g = cg.Graph("g")
    g.output("y", g.conv(g.input("x", like=t), g.input("w", like=f)))
    ours = g.compile("cpu")(x=t, w=f)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, F.conv2d(t, f), rtol=0, atol=1e-5)


def test_an_ambiguous_input_follows_an_unmistakable_weight() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 8, 1, 1), F32)
    told = g.input("told", (16, 8, 3, 3), F32, layout="channels_last")
    untold = g.input("untold", (16, 8, 1, 1), F32, layout="channels_last")
    assert g.conv(x, told, padding=2).stride == channels_last_strides((2, 16, 3, 3))
    assert g.conv(x, untold, padding=2).stride == (400, 25, 5, 1)


def test_pointwise_ops_pass_the_layout_of_the_full_operand_on() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 8, 5, 6), F32, layout="channels_last")
    odd = g.input("odd", (2, 8, 5, 6), F32, stride=dense_strides((2, 8, 5, 6), (3, 1, 0, 2)))
    row = g.input("row", (6,), F32)
    assert (row * x).stride == channels_last_strides((2, 8, 5, 6))
    assert odd.relu().stride == odd.stride
    assert g.bias(odd, g.input("b", (8,), F32)).stride == odd.stride
    assert (x > row).stride == channels_last_strides((2, 8, 5, 6))


def test_the_result_of_an_expanded_or_gapped_input_is_dense() -> None:
    g = cg.Graph("g")
    expanded = g.input("e", (4, 3, 5), F32, stride=(0, 5, 1))
    gapped = g.input("s", (4, 3, 5), F32, stride=(60, 1, 3))
    assert expanded.relu().stride == (15, 5, 1)
    assert gapped.relu().stride == (15, 1, 3)


def test_attention_passes_the_order_of_q_on() -> None:
    g = cg.Graph("g")
    bshd = dense_strides((2, 4, 16, 32), (0, 2, 1, 3))
    q = g.input("q", (2, 4, 16, 32), F16, stride=bshd)
    k, v = (g.input(name, (2, 4, 24, d), F16) for name, d in (("k", 32), ("v", 48)))
    o, lse = g.sdpa(q, k, v, return_lse=True)
    assert (o.shape, o.stride) == ((2, 4, 16, 48), dense_strides((2, 4, 16, 48), (0, 2, 1, 3)))
    assert (lse.shape, lse.stride, lse.dtype) == ((2, 4, 16), (64, 16, 1), F32)


def test_forms_of_one_attention_are_one_graph() -> None:
    def spec(**options: object) -> str:
        g = cg.Graph("g")
        q, k, v = (g.input(name, (1, 2, 8, 16), F16) for name in "qkv")
        g.output("o", g.sdpa(q, k, v, **options))
        return str(g.spec())

    causal = spec(is_causal=True)
    assert spec(window=(None, 0)) == causal
    assert spec(window=(None, 3), is_causal=True) == causal
    assert spec(scale=0.25) == spec()
    assert spec(window=(None, None)) == spec()
    assert spec(diagonal_alignment="bottom_right") == spec()
    assert spec(is_causal=True, diagonal_alignment="bottom_right") != causal


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1)], ids=str)
def test_names_of_layouts_agree_with_torch(shape: tuple[int, ...]) -> None:
    for memory in (torch.contiguous_format, LAST):
        tensor = torch.empty(shape).to(memory_format=memory)
        stride = tensor.stride()
        assert is_contiguous(shape, stride) == tensor.is_contiguous()
        assert is_channels_last(shape, stride) == tensor.is_contiguous(memory_format=LAST)
        assert is_dense(shape, stride)
    last = torch.empty(shape, memory_format=LAST)
    assert is_channels_last(shape, last.stride())


@pytest.mark.parametrize(
    ("shape", "stride", "dense", "overlaps"),
    [
        ((2, 3), (3, 1), True, False),
        ((2, 3), (1, 2), True, False),
        ((2, 3), (4, 1), False, False),
        ((2, 3), (0, 1), False, True),
        ((2, 3), (2, 1), False, True),
        ((2, 3), (1, 1), False, True),
        ((1, 3), (0, 1), True, False),
        ((0, 3), (0, 0), True, False),
    ],
)
def test_density_and_overlap_of_strides(
    shape: tuple[int, ...], stride: tuple[int, ...], dense: bool, overlaps: bool
) -> None:
    places = {
        sum(i * s for i, s in zip(index, stride, strict=True))
        for index in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, 2).tolist()
    }
    count = math.prod(shape)
    assert overlaps == (len(places) < count)
    assert dense == (places == set(range(count)))
    assert is_dense(shape, stride) == dense
    assert overlaps_itself(shape, stride) == overlaps


def test_the_order_in_memory_puts_dims_of_extent_one_where_they_were() -> None:
    assert memory_order((2, 8, 5, 6), channels_last_strides((2, 8, 5, 6))) == (0, 2, 3, 1)
    assert memory_order((2, 1, 5, 6), (30, 1, 6, 1)) == (0, 1, 2, 3)
    assert memory_order((4, 3), (1, 4)) == (1, 0)


# -- printing --------------------------------------------------------------------------------------


def test_a_graph_prints_as_readable_python_with_types() -> None:
    g = cg.Graph("conv_bias_relu")
    x = g.input("x", (2, 16, 8, 8), F16, layout="channels_last")
    w = g.input("w", (32, 8, 3, 3), F16)
    z = g.input("z", (2, 32, 8, 8), F16, stride=(2048, 64, 1, 8))
    y = g.bias(g.conv(x, w, padding=1, groups=2), g.input("b", (32,), F32))
    g.output("pre", y)
    g.output("y", g.relu(y * 0.5 + z), dtype=F32, layout="contiguous")
    assert str(g) == "\n".join(
        [
            "def conv_bias_relu(",
            "    x: f16[2, 16, 8, 8] channels_last,",
            "    w: f16[32, 8, 3, 3],",
            "    z: f16[2, 32, 8, 8] stride=(2048, 64, 1, 8),",
            "    b: f32[32],",
            "):",
            "    conv = conv(x, w, groups=2, padding=((1, 1), (1, 1)))"
            "  # f32[2, 32, 8, 8] channels_last",
            "    pre = bias(conv, b)  # f16[2, 32, 8, 8] channels_last",
            "    constant = constant(value=0.5)  # f32[]",
            "    mul = mul(pre, constant)  # f32[2, 32, 8, 8] channels_last",
            "    add = add(mul, z)  # f32[2, 32, 8, 8] channels_last",
            "    y = relu(add)  # f32[2, 32, 8, 8]",
            "    return pre, y",
        ]
    )


def test_attention_prints_its_open_ports_and_both_results() -> None:
    g = cg.Graph("attention")
    q, k, v = (g.input(name, (2, 4, 8, 64), BF16) for name in "qkv")
    o, lse = g.sdpa(q, k, v, seq_len_kv=g.input("n", (2,), torch.int32), return_lse=True)
    g.output("o", o)
    g.output("lse", lse)
    last = str(g).splitlines()[-2:]
    assert last == [
        "    o, lse = sdpa(q, k, v, None, None, n, return_lse=True, scale=0.125)"
        "  # bf16[2, 4, 8, 64], f32[2, 4, 8]",
        "    return o, lse",
    ]


def test_printing_a_wrong_graph_raises_its_problems() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (3,), F32).leaky_relu("a"))
    with pytest.raises(cg.GraphError, match="negative_slope='a'"):
        str(g)


def test_an_input_that_is_an_output_is_not_taken_back_as_unused() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (4,), torch.float32))
    g.drop_unused_inputs()
    with pytest.raises(cg.GraphError, match="output 'y': is the input 'x'"):
        g.spec()
