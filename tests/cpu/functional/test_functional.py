"""The functions against torch's: results and gradients, layouts, out=, autocast, errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnngraph as cg
from cudnngraph import functional as CF
from cudnngraph.functional import conv_bn, graphs
from cudnngraph.functional.call import _compiled
from cudnngraph.graph.pointwise import ACTIVATIONS
from tests import numerics
from tests.samples import BF16, F16, F32, F64

EXACT = 1e-9


def made(*shapes: tuple[int, ...], dtype: torch.dtype = F64, seed: int = 0) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen, dtype=F64).to(dtype).requires_grad_() for s in shapes]


def check(ours: torch.Tensor, theirs: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Results and gradients are equal to float64's last digits."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    grad = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad(ours, leaves, grad)
    expected = torch.autograd.grad(theirs, leaves, grad)
    for a, b in zip((ours, *found), (theirs, *expected), strict=True):
        assert a.shape == b.shape
        assert bool(((a - b).detach().abs() < EXACT).all())


CONVS = [
    {},
    {"stride": 2, "padding": 1},
    {"padding": 2, "dilation": 2},
    {"groups": 2, "padding": 1},
    {"padding": "same"},
    {"padding": "valid"},
]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("options", CONVS, ids=str)
def test_conv_is_torchs(dims: int, options: dict[str, Any]) -> None:
    groups = options.get("groups", 1)
    leaves = made((2, 4, *(7,) * dims), (6, 4 // groups, *(3,) * dims), (6,))
    ours, theirs = (getattr(module, f"conv{dims}d") for module in (CF, F))
    check(ours(*leaves, **options), theirs(*leaves, **options), leaves)
    check(ours(*leaves[:2], **options), theirs(*leaves[:2], **options), leaves[:2])


def test_conv_takes_torchs_positional_arguments() -> None:
    leaves = made((2, 4, 7, 7), (6, 2, 3, 3), (6,))
    given = ([2, 1], [1, 2], 1, 2)
    check(CF.conv2d(*leaves, *given), F.conv2d(*leaves, *given), leaves)
    x, w, b = made((2, 4, 5, 5), (4, 3, 3, 3), (6,))
    turned = (2, 1, 1, 2, 1)
    check(CF.conv_transpose2d(x, w, b, *turned), F.conv_transpose2d(x, w, b, *turned), [x, w, b])


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2, "dilation": 2}],
    ids=str,
)
def test_conv_transpose_is_torchs(dims: int, options: dict[str, Any]) -> None:
    groups = options.get("groups", 1)
    leaves = made((2, 4, *(4,) * dims), (4, 6 // groups, *(3,) * dims), (6,))
    name = f"conv_transpose{dims}d"
    check(getattr(CF, name)(*leaves, **options), getattr(F, name)(*leaves, **options), leaves)


TORCHS = {
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.7),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": lambda x: F.softplus(x, 0.5),
    "clamp": lambda x: torch.clamp(x, -0.5, 0.5),
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "identity": lambda x: x,
}
ATTRS: dict[str, dict[str, float]] = {
    "leaky_relu": {"negative_slope": 0.2},
    "elu": {"alpha": 0.7},
    "softplus": {"beta": 0.5},
    "clamp": {"min": -0.5, "max": 0.5},
}


def test_every_activation_is_tested_below() -> None:
    assert set(TORCHS) == set(ACTIVATIONS)


@pytest.mark.parametrize("kind", TORCHS)
def test_activation_and_residual_follow_the_bias(kind: str) -> None:
    x, w, b, z = leaves = made((2, 3, 6, 6), (4, 3, 3, 3), (4,), (2, 4, 6, 6))
    attrs = ATTRS.get(kind, {})
    theirs = TORCHS[kind](F.conv2d(x, w, b, padding=1) + z)
    ours = CF.conv2d(x, w, b, padding=1, activation=kind, residual=z, **attrs)
    check(ours, theirs, leaves)
    same = CF.conv_bias_act(x, w, b, padding=1, activation=kind, residual=z, **attrs)
    assert torch.equal(same, ours)


def test_the_factors_of_conv_bias_act() -> None:
    x, w, b, z = leaves = made((2, 3, 6, 6), (4, 3, 3, 3), (4,), (2, 4, 6, 6))
    theirs = torch.relu(0.5 * F.conv2d(x, w, padding=1) + 2.0 * z + b.view(1, -1, 1, 1))
    check(CF.conv_bias_act(x, w, b, padding=1, residual=z, alpha1=0.5, alpha2=2.0), theirs, leaves)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_conv_bn_act_is_torchs_and_updates_the_running_statistics(
    training: bool, transposed: bool
) -> None:
    x, w, b, gamma, beta, z = leaves = made(
        (3, 4, 6, 6), (4, 4, 3, 3), (4,), (4,), (4,), (3, 4, 6, 6)
    )
    running = [torch.rand(4, dtype=F64) + 0.5 for _ in range(2)]
    mine = [t.clone() for t in running]
    conv, run = (
        (F.conv_transpose2d, CF.conv_transpose_bn_act) if transposed else (F.conv2d, CF.conv_bn_act)
    )
    normed = F.batch_norm(conv(x, w, b, padding=1), *running, gamma, beta, training, 0.3, 1e-3)
    ours = run(
        x,
        w,
        *mine,
        gamma,
        beta,
        bias=b,
        training=training,
        momentum=0.3,
        eps=1e-3,
        padding=1,
        residual=z,
    )
    check(ours, torch.relu(normed + z), leaves)
    for a, c in zip(mine, running, strict=True):
        assert float((a - c).abs().max()) < EXACT


def test_a_momentum_that_changes_compiles_no_graph_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conv_bn, "_momenta", set())
    x, w, gamma, beta = made((3, 5, 6, 6), (4, 5, 3, 3), (4,), (4,))
    mean, var = torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64)
    theirs = (mean.clone(), var.clone())
    calls = _compiled(graphs.conv_norm_act, None)
    before = len(calls)
    for step in range(1, 10):
        given = (gamma, beta)
        CF.conv_bn_act(x, w, mean, var, *given, training=True, momentum=1.0 / step)
        F.batch_norm(F.conv2d(x, w), *theirs, *given, True, 1.0 / step)
        for a, c in zip((mean, var), theirs, strict=True):
            assert float((a - c).abs().max()) < EXACT
    assert len(calls) == before + conv_bn.MOMENTA_KEPT + 1
    assert mean._version >= 9, "autograd knows that they were written to"


def test_vectors_of_a_norm_without_parameters_are_kept_of_real_tensors_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return CF.conv_bn_act(x, w, None, None, training=True)

    monkeypatch.setattr(conv_bn, "_vectors", {})
    x, w = (t.detach() for t in made((3, 5, 6, 6), (4, 5, 3, 3)))
    for _ in range(2):  # before a real call and behind it
        kept = dict(conv_bn._vectors)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(t) for t in (x, w)]
            assert normed(*fake).shape == (3, 4, 4, 4)
        torch.func.grad(lambda x: normed(x, w).square().sum())(x)
        assert conv_bn._vectors == kept
        theirs = torch.relu(F.batch_norm(F.conv2d(x, w), None, None, training=True))
        assert float((normed(x, w) - theirs).abs().max()) < EXACT
    assert len(conv_bn._vectors) == 1


def test_vectors_of_a_norm_are_never_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other streams and CUDA graphs may read them; beyond so many, they are made anew."""
    monkeypatch.setattr(conv_bn, "_vectors", {})
    monkeypatch.setattr(conv_bn, "STATICS_KEPT", 1)
    x = torch.zeros(1)
    first = conv_bn._no_affine(3, x)
    assert conv_bn._no_affine(4, x) is not conv_bn._no_affine(4, x)
    assert conv_bn._no_affine(3, x) is first
    assert [each.tolist() for each in conv_bn._no_affine(4, x)] == [[1.0] * 4, [0.0] * 4]


# -- operands that are none ------------------------------------------------------------------------


def test_a_weight_without_memory_or_elsewhere_is_named() -> None:
    x, w = (t.detach() for t in made((2, 4, 6, 6), (3, 4, 3, 3)))
    CF.conv2d(x, w)
    with pytest.raises(cg.BindError, match="'weight': is on meta; expected a CPU or a CUDA"):
        CF.conv2d(x, w.to("meta"))
    block = cg.FusedConvBlock(4, 3, 3, dtype=F64)
    block(x)
    block.conv.weight = torch.nn.Parameter(block.conv.weight.to("meta"))
    with pytest.raises(cg.BindError, match="'weight': is on meta"):
        block(x)
    attend = cg.FusedSDPA()
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(cg.BindError, match="'k': is on meta"):
        attend(q, q.to("meta"), q)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, w: CF.conv2d(None, w), "argument 'input': is None; expected a torch.Tensor"),
        (lambda x, w: CF.conv2d(x, None), "argument 'weight': is None; expected a torch.Tensor"),
        (lambda x, w: CF.conv2d(x, w, 3.0), "argument 'bias': is 3.0; expected a torch.Tensor"),
        (
            lambda x, w: CF.conv2d(x, w.detach().numpy()),
            "argument 'weight': is a ndarray; expected a torch.Tensor (torch.from_numpy() it)",
        ),
        (lambda x, w: CF.layer_norm(x, None), "normalized_shape is None; expected a tuple"),
        (lambda x, w: CF.group_norm(x, "2"), "num_groups='2'; expected a whole number"),
        (lambda x, w: CF.conv_bias_act(x, w, alpha1="2"), "'alpha1': is '2'; expected a number"),
        (lambda x, w: CF.conv2d(x, w, policy="autotune"), "policy is a str; expected a cudnngraph"),
        (lambda x, w: CF.conv2d(x, w, stride={1}), "argument 'stride': is a set; expected an int"),
        (lambda x, w: cg.FusedSDPA()(None, None, None), "argument 'q': is None; expected a"),
        (lambda x, w: cg.FusedConvBlock(4, None, 3), "argument 'out_channels': is None; expected"),
        (lambda x, w: cg.FusedConvBlock(4, 3, 3, groups=3), "in_channels must be divisible"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_argument_of_a_wrong_kind_is_named(call: Any, says: str) -> None:
    x, w = made((2, 4, 6, 6), (3, 4, 3, 3))
    with pytest.raises((cg.BindError, cg.GraphError, cg.PolicyError), match=re.escape(says)):
        call(x, w)


@pytest.mark.parametrize("op", ["conv1d", "conv2d", "conv3d", "conv_transpose2d"])
def test_one_number_in_a_tuple_stands_for_every_spatial_dim(op: str) -> None:
    rank = int(op[-2])
    x, w = made((2, 4, *(7,) * rank), (4, 4, *(3,) * rank))
    options = {"stride": (2,), "padding": [1], "dilation": torch.Size([1])}
    theirs = getattr(F, op)(x, w, **{**options, "dilation": (1,)})
    check(getattr(CF, op)(x, w, **options), theirs, [x, w])


def test_numbers_of_numpy_are_numbers() -> None:
    x, w = made((2, 4, 6, 6), (4, 2, 3, 3))
    options = {"stride": np.int64(2), "padding": np.array([1, 1]), "groups": np.int8(2)}
    ours = CF.conv_bias_act(x, w, **options, alpha1=np.float32(0.5), activation=np.str_("silu"))
    check(ours, F.silu(0.5 * F.conv2d(x, w, None, 2, 1, 1, 2)), [x, w])


# -- layouts and dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["x", "weight", "both"])
def test_channels_last_in_gives_channels_last_out(which: str) -> None:
    x, w = made((2, 4, 6, 6), (6, 4, 3, 3))
    last = torch.channels_last
    given = [
        t.contiguous(memory_format=last) if which in (name, "both") else t
        for name, t in (("x", x), ("weight", w))
    ]
    theirs = F.conv2d(*given, padding=1)
    ours = CF.conv2d(*given, padding=1)
    assert ours.is_contiguous(memory_format=last) and not ours.is_contiguous()
    assert ours.stride() == theirs.stride()
    check(ours, theirs, [x, w])


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_results_and_gradients_at_lower_precision_are_within_the_policy(
    dtype: torch.dtype,
) -> None:
    shapes = ((2, 8, 7, 7), (6, 8, 3, 3), (6,), (2, 6, 7, 7))
    leaves = made(*shapes, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    grad = torch.randn(2, 6, 7, 7, dtype=F64).to(dtype)

    def by_torch(x: Any, w: Any, b: Any, z: Any) -> torch.Tensor:
        return F.silu(F.conv2d(x, w, b, padding=1) + z)

    x, w, b, z = leaves
    ours = CF.conv2d(x, w, b, padding=1, activation="silu", residual=z)
    exact, eager = by_torch(*wide), by_torch(*leaves)
    numerics.check(ours, exact, dtype, eager, terms=72)
    found = torch.autograd.grad(ours, leaves, grad)
    right = torch.autograd.grad(exact, wide, grad.double())
    theirs = torch.autograd.grad(eager, leaves, grad)
    for name, a, b_, c in zip("xwbz", found, right, theirs, strict=True):
        assert a.dtype == dtype
        # The policy for gradients of a chain: no farther from float64 than torch, or the bound.
        error = numerics.relative_error(a, b_)
        limit = numerics.TORCH_FACTOR * numerics.relative_error(c, b_)
        assert error <= max(limit, numerics.bound(dtype, terms=98)), name


def test_autocast_casts_as_torchs_own_ops_do() -> None:
    x, w, b = made((2, 3, 6, 6), (4, 3, 3, 3), (4,), dtype=F32)
    gamma, beta = made((4,), (4,), dtype=F32)
    with torch.autocast("cpu", BF16):
        ours, theirs = CF.conv2d(x, w, b), F.conv2d(x, w, b)
        normed = CF.conv_bn_act(x, w, None, None, gamma, beta, training=True)
    assert ours.dtype == theirs.dtype == normed.dtype == BF16
    assert numerics.relative_error(ours, theirs.double()) < numerics.bound(BF16)
    ours.float().sum().backward()
    assert w.grad is not None and w.grad.dtype == F32
    q, k, v = made((2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8), dtype=F32)
    with torch.autocast("cpu", BF16):
        assert CF.scaled_dot_product_attention(q, k, v).dtype == BF16
    wide = [t.double() for t in (x, w)]
    with torch.autocast("cpu", BF16):
        assert CF.conv2d(*wide).dtype == F64


# -- out= ------------------------------------------------------------------------------------------


def test_out_and_into_write_to_the_given_tensor() -> None:
    x, w, b, z = (t.detach() for t in made((2, 3, 6, 6), (4, 3, 3, 3), (4,), (2, 4, 6, 6)))
    out = torch.full((2, 4, 6, 6), torch.nan, dtype=F64)
    expected = torch.relu(F.conv2d(x, w, b, padding=1) + z)
    assert CF.conv_bias_act_into(out, x, w, b, padding=1, residual=z) is out
    assert float((out - expected).abs().max()) < EXACT
    out.fill_(torch.nan)
    assert CF.conv2d(x, w, b, padding=1, activation="relu", residual=z, out=out) is out
    assert float((out - expected).abs().max()) < EXACT


def test_the_other_into_forms() -> None:
    x, w = (t.detach() for t in made((2, 4, 5, 5), (4, 4, 3, 3)))
    mean, var = torch.rand(4, dtype=F64), torch.rand(4, dtype=F64) + 0.5
    out = torch.empty(2, 4, 5, 5, dtype=F64)
    CF.conv_transpose_bias_act_into(out, x, w, padding=1)
    assert float((out - torch.relu(F.conv_transpose2d(x, w, padding=1))).abs().max()) < EXACT
    CF.conv_bn_act_into(out, x, w, mean, var, padding=1)
    normed = F.batch_norm(F.conv2d(x, w, padding=1), mean, var)
    assert float((out - torch.relu(normed)).abs().max()) < EXACT
    q, k, v = (t.detach() for t in made((2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)))
    o = torch.empty_like(q)
    CF.scaled_dot_product_attention_into(o, q, k, v, is_causal=True)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert float((o - theirs).abs().max()) < EXACT


def test_out_is_refused_where_it_would_lose_a_gradient_or_does_not_fit() -> None:
    x, w = made((2, 3, 6, 6), (4, 3, 3, 3))
    out = torch.empty(2, 4, 4, 4, dtype=F64)
    with pytest.raises(cg.BindError, match="out: is given where a tensor requires grad"):
        CF.conv2d(x, w, out=out)
    with torch.no_grad():
        CF.conv2d(x, w, out=out)
        with pytest.raises(cg.BindError, match=r"'out': has shape \(2, 4, 4, 5\)"):
            CF.conv2d(x, w, out=torch.empty(2, 4, 4, 5, dtype=F64))
        with pytest.raises(cg.BindError, match="out: is given with training=True"):
            CF.conv_bn_act(x, w, None, None, training=True, out=out)


def test_the_into_forms_name_what_is_wrong_beside_tensors_that_are_options() -> None:
    """They named every tensor among their options, and hid the mistake."""
    x, w, z = (tensor.detach() for tensor in made((2, 3, 6, 6), (3, 3, 3, 3), (2, 3, 6, 6)))
    last = torch.empty_like(z, memory_format=torch.channels_last)
    for into in (CF.conv_bias_act_into, CF.conv_transpose_bias_act_into):
        with pytest.raises(cg.BindError, match=r"1 problem:\n.*'out': has stride") as caught:
            into(last, x, w, padding=1, residual=z)
        assert "residual" not in str(caught.value)
        with pytest.raises(cg.BindError, match="output 'out': overlaps input 'residual'"):
            into(z, x, w, padding=1, residual=z)
    mean, var = w.new_zeros(3), w.new_ones(3)
    with pytest.raises(cg.BindError, match=r"1 problem:\n.*'out': has stride"):
        CF.conv_bn_act_into(last, x, w, mean, var, padding=1, residual=z)
    q, mask = x.detach(), torch.ones(6, 6, dtype=torch.bool)
    with pytest.raises(cg.BindError, match=r"1 problem:\n.*'out': is float32"):
        CF.scaled_dot_product_attention_into(q.float(), q, q, q, attn_mask=mask)
    with pytest.raises(cg.BindError, match=r"1 problem:\n.*'residual': is 'z'"):
        CF.conv_bias_act_into(z, x, w, padding=1, residual="z")


def test_the_into_forms_refuse_none_by_name() -> None:
    """They returned a new tensor, and left nothing in the caller's."""
    x, w = (tensor.detach() for tensor in made((2, 3, 6, 6), (3, 3, 3, 3)))
    tensors = {
        CF.conv_bias_act_into: (x, w),
        CF.conv_transpose_bias_act_into: (x, w),
        CF.conv_bn_act_into: (x, w, w.new_zeros(3), w.new_ones(3)),
        CF.scaled_dot_product_attention_into: (x, x, x),
    }
    for into, given in tensors.items():
        said = rf"'{into.__name__}', 1 problem:\n.*'out': is None; expected a torch.Tensor$"
        with pytest.raises(cg.BindError, match=said):
            into(None, *given)


# -- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "residual", "features"),
    [
        ((2, 3, 5), (), 4),  # of no dims
        ((5,), (), 4),
        ((5,), (3, 4), 4),  # makes the result larger
        ((2, 5), (3, 1, 1), 4),
        ((2, 5), (2, 2, 3, 1, 4), 4),
        ((5,), (2, 1, 3, 2, 4), 4),
        ((2, 1, 3, 2, 5), (2, 3, 1, 1), 4),
        ((2, 3, 5), (2, 3, 4), 1),
        ((2, 2, 2, 3, 5), (2, 2, 2, 1, 4), 4),  # more dims than products of a graph have
        ((2, 2, 2, 3, 5), (3, 4), 4),
        ((2, 2, 2, 3, 5), (4,), 4),
        ((2, 2, 2, 3, 5), (2, 2, 2, 3, 1), 4),
        ((0, 2, 2, 3, 5), (3, 4), 4),
        ((0,), None, 4),  # no features
        ((2, 2, 2, 3, 0), None, 4),
        ((2, 2, 2, 3, 0), (3, 1), 4),
    ],
    ids=str,
)
def test_linear_adds_what_torch_adds(
    x: tuple[int, ...], residual: tuple[int, ...] | None, features: int
) -> None:
    shapes = (x, (features, x[-1]), (features,))
    leaves = made(*shapes, *([] if residual is None else [residual]))
    theirs = F.linear(*leaves[:3])
    theirs = theirs if residual is None else theirs + leaves[3]
    ours = CF.linear(*leaves[:3], residual=None if residual is None else leaves[3])
    check(ours, theirs, leaves)


@pytest.mark.parametrize("x", [(5,), (2, 3, 5), (2, 2, 2, 3, 5)], ids=str)
def test_linear_refuses_a_residual_that_does_not_broadcast(x: tuple[int, ...]) -> None:
    given, w, z = made(x, (4, 5), (2, 7))
    with pytest.raises(cg.GraphError, match=r"residual: has shape \(2, 7\), which does not"):
        CF.linear(given, w, residual=z)


@pytest.mark.parametrize("weight", [(), (5,), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("residual", [(1, 1, 3, 1, 5), (7,)], ids=str)
def test_a_weight_that_is_no_matrix_is_named_beside_a_residual(
    weight: tuple[int, ...], residual: tuple[int, ...]
) -> None:
    x, w, z = made((4, 1, 3, 1, 5), weight, residual)
    with pytest.raises(cg.GraphError, match=r"weight 'weight' has shape \(.*expected \(N, K\)"):
        CF.linear(x, w, residual=z)


def test_a_number_is_no_operand_of_a_product() -> None:
    x, w, down = made((), (4, 1), (3, 4))
    with pytest.raises(cg.GraphError):
        CF.linear(x, w)
    with pytest.raises(cg.GraphError):
        CF.mlp(x, w, None, down)


# -- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_is_torchs(causal: bool, mask: str | None) -> None:
    q, k, v, bias = made((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 5), (2, 1, 6, 6))
    keep = torch.rand(6, 6) > 0.4
    keep |= torch.eye(6, dtype=torch.bool)
    given = {"bool": keep, "float": bias, None: None}[mask]
    band = torch.ones(6, 6, dtype=torch.bool).tril() if causal else torch.ones(6, 6).bool()
    theirs_mask: Any = band if given is None else given & band if mask == "bool" else None
    if mask == "float":
        theirs_mask = bias.masked_fill(~band, -torch.inf)
    theirs = F.scaled_dot_product_attention(q, k, v, theirs_mask, scale=0.3)
    ours = CF.scaled_dot_product_attention(q, k, v, given, is_causal=causal, scale=0.3)
    check(ours, theirs, [q, k, v, *([bias] if mask == "float" else [])])


def test_attention_shares_heads_and_returns_the_lse() -> None:
    q, k, v = made((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    theirs = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    ours, lse = CF.scaled_dot_product_attention(q, k, v, enable_gqa=True, return_lse=True)
    check(ours, theirs, [q, k, v])
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
    assert float((lse - scores.logsumexp(-1)).detach().abs().max()) < EXACT
    assert not lse.requires_grad


def test_dropout_draws_its_seed_from_torchs_generator() -> None:
    """Attention over ones gives the share of a row's weights that is kept, over 1 - p."""
    q = torch.ones(4, 8, 16, 8)
    torch.manual_seed(3)
    first = CF.scaled_dot_product_attention(q, q, q, dropout_p=0.25)
    second = CF.scaled_dot_product_attention(q, q, q, dropout_p=0.25)
    torch.manual_seed(3)
    assert torch.equal(CF.scaled_dot_product_attention(q, q, q, dropout_p=0.25), first)
    assert not torch.equal(first, second)
    kept = first[..., 0].double() * 0.75 * 16
    assert torch.allclose(kept, kept.round(), atol=1e-4)
    assert abs(float(kept.mean()) / 16 - 0.75) < 4 * (0.1875 / kept.numel() / 16) ** 0.5


def test_packed_attention_is_attention_of_each_sequence_with_gradients() -> None:
    lengths, gen = [5, 9, 2], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, h, 8, generator=gen, dtype=F64).requires_grad_() for h in (4, 2, 2))
    ends = torch.tensor([0, 5, 14, 16], dtype=torch.int32)
    o = CF.varlen_attention(q, k, v, ends, ends, 9, 9, is_causal=True)
    parts = [
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in each), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        for each in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    theirs, grad = torch.cat(parts), torch.randn(16, 4, 8, generator=gen, dtype=F64)
    found, right = (torch.autograd.grad(y, [q, k, v], grad) for y in (o, theirs))
    for a, b in zip((o, *found), (theirs, *right), strict=True):
        assert float((a - b).detach().abs().max()) < 1e-12
    apart = CF.varlen_attention(q, k, v, ends, ends.clone(), 9, 9, is_causal=True)
    assert torch.equal(o, apart)
    _, lse = CF.varlen_attention(q, k, v, ends, ends, 9, 9, return_lse=True)
    assert lse.shape == (16, 4) and not lse.requires_grad


def test_the_tokens_behind_the_last_sequence_are_no_keys() -> None:
    q = torch.randn(7, 2, 8, dtype=F64)
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    spoilt = q.clone()
    spoilt[5:] = torch.nan
    ours = CF.varlen_attention(spoilt, spoilt, spoilt, ends, ends, 3, 3)
    theirs = CF.varlen_attention(q[:5], q[:5], q[:5], ends, ends, 3, 3)
    assert torch.equal(ours[:5], theirs)


def test_paged_attention_reads_the_pages_of_the_table() -> None:
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 8, generator=gen, dtype=F64)
    caches = [torch.randn(6, 4, 2, 8, generator=gen, dtype=F64).transpose(1, 2) for _ in range(2)]
    table = torch.tensor([[3, 0, -7], [5, 1, 2]], dtype=torch.int32)
    lengths = torch.tensor([7, 12], dtype=torch.int32)
    ours = CF.paged_attention(q, *caches, table, lengths, is_causal=True)
    for batch, (pages, keys) in enumerate((([3, 0], 7), ([5, 1, 2], 12))):
        k, v = (torch.cat(list(cache[pages]), 1)[:, :keys] for cache in caches)
        keep = torch.arange(keys) <= torch.arange(3).view(-1, 1) + keys - 3
        one = F.scaled_dot_product_attention(q[batch], k, v, keep, enable_gqa=True)
        assert float((ours[batch] - one).abs().max()) < 1e-12
    with pytest.raises(cg.GraphError, match="has no gradient: the cache is for"):
        CF.paged_attention(q.requires_grad_(), *caches, table, lengths)


# -- policies and mistakes -------------------------------------------------------------------------


def test_deterministic_follows_torchs_switch() -> None:
    x = torch.ones(1, 1, 3, 3)
    assert _compiled(graphs.conv_act, None)._policy is None
    torch.use_deterministic_algorithms(True)
    try:
        policy = _compiled(graphs.conv_act, None)._policy
        assert policy is not None and policy.deterministic
        assert CF.conv2d(x, x).item() == 9.0
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_mistake_is_told_as_that_of_a_graph() -> None:
    x, w = made((2, 3, 6, 6), (4, 2, 3, 3))
    with pytest.raises(cg.GraphError, match="weight has 2 input channels per group, x has 3"):
        CF.conv2d(x, w)
    with pytest.raises(cg.GraphError, match=r"conv1d: x has 4 dims .*; expected 3: \(N, C, W\)"):
        CF.conv1d(x, w)
    with pytest.raises(cg.GraphError, match="'swish' is unknown; expected one of relu"):
        CF.conv2d(x[:, :2], w, activation="swish")


def test_an_empty_batch_has_an_empty_result_and_zero_gradients() -> None:
    x, w = made((0, 3, 6, 6), (4, 3, 3, 3))
    y = CF.conv2d(x, w, activation="relu")
    assert y.shape == (0, 4, 4, 4)
    y.sum().backward()
    assert w.grad is not None and not w.grad.any() and x.grad is not None


def test_an_iterator_is_read_once() -> None:
    """Looking at an argument must not use it up."""
    block = cg.FusedConvBlock(4, 8, iter((3, 3)), padding=iter((1, 1)))
    assert block(torch.randn(2, 4, 6, 6)).shape == (2, 8, 6, 6)
    assert cg.warm_up(iter([]), "cpu", progress=False) is not None
