"""Rules of the conversion against torch: pointwise ops, shapes, layers, pools, copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.device import rules
from cudnngraph.executor import reference
from cudnngraph.ir.spec import is_channels_last, is_contiguous
from cudnngraph.models import dynamo
from cudnngraph.models.convert import convert, import_model
from cudnngraph.models.export import export
from cudnngraph.ops.views import is_view
from cudnngraph.rewrite.passes import prepared
from tests import numerics, thresholds
from tests.converted import F32, F64, IMAGE, ROWS, X, check, ops, run
from tests.models import Of, image

# -- rules -----------------------------------------------------------------------------------------


POINTWISE: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "relu": (lambda m, x: F.relu(x), ["relu"]),
    "relu_": (lambda m, x: F.relu(x + 1, inplace=True), ["add", "relu"]),
    "relu6": (lambda m, x: F.relu6(x), ["clamp"]),
    "leaky_relu": (lambda m, x: F.leaky_relu(x, 0.2), ["leaky_relu"]),
    "elu": (lambda m, x: F.elu(x, 0.5), ["elu"]),
    "gelu": (lambda m, x: F.gelu(x), ["gelu"]),
    "gelu_tanh": (lambda m, x: F.gelu(x, approximate="tanh"), ["gelu_tanh"]),
    "silu": (lambda m, x: F.silu(x), ["silu"]),
    "hardswish": (lambda m, x: F.hardswish(x), ["add", "clamp", "mul", "mul"]),
    "mish": (lambda m, x: F.mish(x), ["mish"]),
    "hardsigmoid": (lambda m, x: F.hardsigmoid(x), ["add", "clamp", "mul"]),
    "hardtanh": (lambda m, x: F.hardtanh(x, -0.5, 0.25), ["clamp"]),
    "clamp": (lambda m, x: x.clamp(min=-0.3), ["clamp"]),
    "sigmoid": (lambda m, x: torch.sigmoid(x), ["sigmoid"]),
    "tanh": (lambda m, x: torch.tanh(x), ["tanh"]),
    "softplus": (lambda m, x: F.softplus(x), ["softplus"]),
    "logsigmoid": (lambda m, x: F.logsigmoid(x * 20), ["mul", "neg", "softplus", "neg"]),
    "celu": (lambda m, x: F.celu(x, 2.0), ["gt", "mul", "elu", "mul", "where"]),
    "hardshrink": (lambda m, x: F.hardshrink(x, 0.3), None),
    "softshrink": (lambda m, x: F.softshrink(x, 0.3), None),
    "rrelu": (lambda m, x: F.rrelu(x, 0.1, 0.3), ["leaky_relu"]),
    "logit": (lambda m, x: torch.logit(x.sigmoid()) + torch.logit(x, 0.1), None),
    "nan_to_num": (lambda m, x: torch.nan_to_num(x.log(), 7.0), None),
    "logaddexp": (lambda m, x: torch.logaddexp(x * 20, x.tanh()), None),
    "xlogy": (lambda m, x: torch.xlogy(F.relu(x), x.abs()), None),
    "exp_neg": (lambda m, x: torch.exp(-x), ["neg", "exp"]),
    "log_abs": (lambda m, x: torch.log(x.abs() + 1.5), ["abs", "add", "log"]),
    "roots": (lambda m, x: x.square().add(1).rsqrt() + (x * x + 1).sqrt(), None),
    "erf_reciprocal": (lambda m, x: torch.erf(x) + (x * x + 2).reciprocal(), None),
    "square": (lambda m, x: x**2, ["mul"]),
    "cube": (lambda m, x: x.abs() ** 3, ["abs", "mul", "mul"]),
    "alpha": (lambda m, x: torch.add(x, x.neg(), alpha=0.5), ["neg", "mul", "add"]),
    "sub_alpha": (lambda m, x: torch.sub(x, x.tanh(), alpha=2), ["tanh", "mul", "sub"]),
    "rsub": (lambda m, x: 2.0 - x, ["sub"]),
    "div": (lambda m, x: x / (x.abs() + 1) / 3, ["abs", "add", "div", "div"]),
    "min_max": (lambda m, x: torch.minimum(x, -x) + torch.maximum(x, x * 2), None),
    "normalize": (lambda m, x: F.normalize(x, dim=-1), ["normalize"]),
    "normalize_eps": (lambda m, x: F.normalize(x, dim=2, eps=2.5), ["normalize"]),
    "normalize_by_hand": (lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp(1e-6), ["normalize"]),
    "where": (lambda m, x: torch.where(x > 0.5, x, -x), ["gt", "neg", "where"]),
    "where_infinite": (
        lambda m, x: torch.where(x > 0.5, x, -math.inf).exp() + torch.where(x > 9, math.inf, x),
        ["gt", "where", "exp", "gt", "where", "add"],
    ),
    "compare": (lambda m, x: torch.where((x > 0) & (x < 1), x, 0.0), None),
    "dropout": (lambda m, x: F.dropout(x, 0.5, training=False) * 2, ["mul"]),
    "clones": (lambda m, x: x.clone().contiguous().detach() + 1, ["add"]),
    "zero_dim": (lambda m, x: x * torch.tensor(2.5), ["mul"]),
    "to_same": (lambda m, x: x.to(torch.float32) + 1, ["add"]),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_ops_become_ours(name: str) -> None:
    function, wanted = POINTWISE[name]
    imported = check(Of(function), image(*X))
    assert imported.opaque == ()
    if wanted is not None:
        assert ops(imported.spec) == wanted


SHAPES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "view": (lambda m, x: x.view(3, -1) * 2, X),
    "flatten": (lambda m, x: torch.flatten(x.exp(), 1), X),
    "unflatten": (lambda m, x: x.exp().unflatten(2, (2, 4)), X),
    "squeeze": (lambda m, x: x.unsqueeze(1).exp().squeeze(1).neg(), X),
    "permute": (lambda m, x: x.exp().permute(2, 0, 1), X),
    "transpose": (lambda m, x: x.exp().transpose(-1, 0) + 1, X),
    "t": (lambda m, x: x.exp()[0].t() + 1, X),
    "expand": (lambda m, x: x[:, :1].expand(3, 5, 8) + x, X),
    "slice": (lambda m, x: x.exp()[:, 1:-1, ::3], X),
    "select": (lambda m, x: x.exp()[:, -2] + x.exp().select(1, 0), X),
    "narrow": (lambda m, x: x.exp().narrow(2, 2, 4), X),
    "split": (lambda m, x: [part * 2 for part in x.exp().split(3, 2)], X),
    "split_sizes": (lambda m, x: list(x.exp().split([1, 4], 1)), X),
    "chunk": (lambda m, x: torch.cat(x.exp().chunk(2, 2)[::-1], 2), X),
    "unbind": (lambda m, x: torch.stack(x.exp().unbind(1)[::-1], 2), X),
    "patches": (lambda m, x: x.exp().unfold(2, 3, 3).unfold(3, 4, 4), IMAGE),
    "patches_cut": (lambda m, x: x.exp().unfold(-1, 3, 3), X),
    "cat": (lambda m, x: torch.cat([x, x.exp(), x[:, :2]], 1), X),
    "mean": (lambda m, x: x.mean(1) + x.mean((1,), keepdim=True)[:, 0], X),
    "mean_all": (lambda m, x: x.exp().mean(), X),
    "sum": (lambda m, x: x.exp().sum((0, 2)), X),
    "amax": (lambda m, x: x.amax(-1, keepdim=True) - x.amin(1, keepdim=True), X),
    "max_pool": (lambda m, x: F.max_pool2d(x, 3, 2, 1), IMAGE),
    "max_pool_plain": (lambda m, x: F.max_pool2d(x, 2), IMAGE),
    "avg_pool": (lambda m, x: F.avg_pool2d(x, 2, ceil_mode=True), IMAGE),
    "global_pool": (lambda m, x: F.adaptive_avg_pool2d(x, 1).flatten(1), IMAGE),
    "adaptive_pool": (lambda m, x: F.adaptive_avg_pool2d(x, (3, 5)), IMAGE),
    "nearest": (lambda m, x: F.interpolate(x, scale_factor=2), IMAGE),
    "bilinear": (
        lambda m, x: F.interpolate(x, (13, 7), mode="bilinear", align_corners=False),
        IMAGE,
    ),
    "corners": (
        lambda m, x: F.interpolate(x, (13, 7), mode="bilinear", align_corners=True),
        IMAGE,
    ),
    "of_a_pixel": (
        lambda m, x: F.interpolate(x.mean((2, 3), keepdim=True), (4, 3), mode="bilinear"),
        IMAGE,
    ),
}


STRANGE = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 1e38, 0.5])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: F.logsigmoid(x),
        lambda x, y: F.celu(x, 2.0),
        lambda x, y: F.hardshrink(x),
        lambda x, y: F.softshrink(x),
        lambda x, y: F.rrelu(x),
        lambda x, y: torch.logit(x),
        lambda x, y: torch.logit(x, 0.1),
        lambda x, y: torch.nan_to_num(x, 1.0, 3.0, -2.0),
        torch.logaddexp,
        torch.xlogy,
    ],
    ids=[
        *("logsigmoid", "celu", "hardshrink", "softshrink", "rrelu", "logit", "logit_eps"),
        *("nan_to_num", "logaddexp", "xlogy"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_strange_numbers_come_out_as_of_torch(
    function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    x, y = (each.to(dtype) for each in torch.meshgrid(STRANGE, STRANGE, indexing="ij"))
    fused = cg.fuse(Of(lambda m, x, y: function(x, y)).eval(), (x, y))
    found, wanted = fused(x, y), function(x.float(), y.float()).to(dtype)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given", [{}, {"nan": 2.0, "neginf": -3.0}, {"posinf": 7}], ids=str)
def test_infinities_are_replaced_by_the_largest_number_of_the_dtype(
    dtype: torch.dtype, given: dict[str, Any]
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(x, **given) + 0.0

    x = STRANGE.to(dtype).expand(3, -1)
    wanted = function(x)
    assert wanted.isfinite().all()
    for made in (
        cg.fuse(Of(lambda m, x: function(x)).eval(), x),
        torch.compile(function, backend=dynamo.backend),
    ):
        assert torch.equal(made(x), wanted)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_a_group_norm_of_large_images_is_ours(
    channels_last: bool, affine: bool, images: int
) -> None:
    norm = nn.GroupNorm(4, 8, affine=affine)
    model = models.randomized(nn.Sequential(nn.Conv2d(6, 8, 3), norm, nn.SiLU()))
    assert not affine or bool(norm.bias.any())
    imported = check(model, image(images, 6, 9, 8), channels_last=channels_last)
    assert "group_affine" in ops(imported.spec) and not imported.opaque
    assert imported.spec is not None and imported.spec.nodes[-1].op == "silu"
    for each in imported.spec.inputs:
        spec = imported.spec.tensors[each]
        assert is_contiguous(spec.shape, spec.stride) or is_channels_last(spec.shape, spec.stride)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_group_norm_of_torch_compile_is_ours_with_its_statistics_too(
    channels_last: bool, statistics: bool
) -> None:
    def norm(m: Any, x: torch.Tensor) -> Any:
        made = torch.native_group_norm(x, m.w, m.b, 2, 8, 30, 4, 1e-5)
        return made[:2] if statistics else made[0]

    model = Of(norm, w=torch.randn(8), b=torch.randn(8))
    found = ops(check(model, image(2, 8, 6, 5), channels_last=channels_last).spec)
    assert "group_affine" in found and "aten" not in found


@pytest.mark.parametrize(("channels_last", "least"), [(True, 2**19), (False, 2**22)])
def test_a_group_norm_of_small_images_is_torchs(
    channels_last: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own group norm launches less."""
    name = f"group_norm_min_elements_{'channels_last' if channels_last else 'contiguous'}"
    assert getattr(rules.TABLE[90], name) == least
    shape = (2, 8, 6, 5)
    for fewest, found in ((math.prod(shape), "group_affine"), (math.prod(shape) + 1, "aten")):
        thresholds.change(monkeypatch, **{name: fewest})
        spec = check(nn.GroupNorm(4, 8), image(*shape), channels_last=channels_last).spec
        assert found in ops(spec)


@pytest.mark.usefixtures("large")
def test_a_group_norm_by_what_the_model_computes_is_ours() -> None:
    norm = Of(lambda m, x: F.group_norm(x, 4, m.w.exp(), m.w * x.mean()), w=torch.randn(8))
    imported = check(norm, image(2, 8, 6, 5), channels_last=True)
    assert "group_affine" in ops(imported.spec) and "expand" in ops(imported.spec)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_an_instance_norm_is_ours(affine: bool, channels_last: bool) -> None:
    norm = nn.InstanceNorm2d(8, affine=affine)
    if affine:
        norm.weight.data, norm.bias.data = image(8), image(1, 8)[0]
    imported = check(norm, image(2, 8, 6, 5), channels_last=channels_last, terms=30)
    assert ops(imported.spec) == ["instance_norm"]


def test_an_instance_norm_by_running_statistics_is_torchs() -> None:
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    norm.running_mean, norm.running_var = image(8), image(8).abs() + 0.5
    assert ops(check(norm, image(2, 8, 6, 5)).spec) == ["aten"]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_ops_on_shapes_become_ours(name: str, channels_last: bool) -> None:
    function, shape = SHAPES[name]
    imported = check(Of(function), image(*shape), channels_last=channels_last)
    assert imported.opaque == ()


WINDOWS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "overlapping": (lambda m, x: x.exp().unfold(2, 3, 2).unfold(3, 4, 1) * 2, IMAGE),
    "apart": (lambda m, x: x.exp().unfold(1, 1, 3).flatten(1), X),
    "of whole numbers": (lambda m, x: (x * 9).long().unfold(-1, 3, 2), X),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_choices_of_elements_for_a_kernel(name: str) -> None:
    function, shape = WINDOWS[name]
    model, x = Of(function).eval(), image(*shape)
    fused = cg.fuse(model, x)
    assert fused.report is not None
    assert "aten.unfold.default" not in {each for each, _ in fused.report.opaque}
    made, wanted = fused(x), model(x)
    assert made.dtype == wanted.dtype and torch.equal(made, wanted)


PRODUCTS: dict[str, tuple[nn.Module, tuple[tuple[int, ...], ...]]] = {
    "linear": (nn.Linear(16, 12), (ROWS,)),
    "linear_plain": (nn.Linear(16, 12, bias=False), ((7, 16),)),
    "mm": (Of(lambda m, x, y: torch.mm(x, y) + 1), ((4, 16), (16, 6))),
    "addmm": (Of(lambda m, x, y: torch.addmm(x[0, :6], x, y)), ((4, 16), (16, 6))),
    "bmm": (Of(lambda m, x, y: torch.bmm(x, y.transpose(1, 2))), (ROWS, (4, 6, 16))),
    "matmul": (Of(lambda m, x, y: x @ y), (ROWS, (16, 6))),
    "layer_norm": (nn.LayerNorm(16), (ROWS,)),
    "layer_norm_bare": (nn.LayerNorm((10, 16), elementwise_affine=False), (ROWS,)),
    "rms_norm": (nn.RMSNorm(16, eps=1e-6), (ROWS,)),
    "rms_norm_bare": (nn.RMSNorm(16, elementwise_affine=False), (ROWS,)),
    "conv1d": (nn.Conv1d(10, 6, 3, padding=1), (ROWS,)),
    "conv2d_same": (nn.Conv2d(6, 4, 3, padding="same"), (IMAGE,)),
    "conv2d_groups": (nn.Conv2d(6, 12, 3, 2, 2, 2, groups=3), (IMAGE,)),
    "conv3d": (nn.Conv3d(2, 3, 2), ((2, 2, 4, 5, 6),)),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1), (IMAGE,)),
    "transposed_groups": (nn.ConvTranspose2d(6, 9, 2, 2, groups=3, bias=False), (IMAGE,)),
    "attention": (
        Of(lambda m, q, k: F.scaled_dot_product_attention(q, k, k + 1, is_causal=True, scale=0.3)),
        ((2, 2, 6, 8), (2, 2, 6, 8)),
    ),
    "attention_mask": (
        Of(
            lambda m, q: F.scaled_dot_product_attention(q, q, q, m.mask),
            mask=torch.ones(6, 6, dtype=torch.bool).tril(),
        ),
        ((2, 2, 6, 8),),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_layers_become_ours(name: str) -> None:
    torch.manual_seed(0)
    model, shapes = PRODUCTS[name]
    imported = check(model, *(image(*shape) for shape in shapes), terms=4096)
    assert imported.opaque == ()


def test_a_transposed_weight_is_one_by_its_strides() -> None:
    layer = nn.Linear(16, 12)
    imported = import_model(layer, (image(4, 16),))
    assert ops(imported.spec) == ["matmul", "add"]
    (weight,) = (t for t in imported.constants.values() if t.dim() == 2)
    assert weight.data_ptr() == layer.weight.data_ptr()
    assert weight.stride() == (1, 16)


# -- norms by hand, pools, copies ------------------------------------------------------------------


@pytest.mark.parametrize(
    "divided",
    [
        lambda m, x: F.normalize(x, dim=1),
        lambda m, x: F.normalize(x, p=1.0, dim=-1),
        lambda m, x: F.normalize(x, dim=(1, 2)),
        lambda m, x: x / (x + 1).norm(dim=-1, keepdim=True).clamp_min(1e-6),
        lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp(1e-6, 2.0),
        lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp_min(-1.0),
        lambda m, x: torch.div(
            x, x.norm(dim=-1, keepdim=True).clamp_min(1e-6), rounding_mode="floor"
        ),
    ],
)
def test_what_divides_by_other_norms_is_no_normalize(divided: Callable[..., Any]) -> None:
    imported = check(Of(divided), image(*X), terms=64)
    assert "normalize" not in ops(imported.spec)


F16, LAST, ROWS_FIRST = torch.float16, torch.channels_last, torch.contiguous_format
POOLS = {
    "plain": (nn.AvgPool2d(3), 8, F16, LAST),
    "padded": (nn.AvgPool2d(3, 2, 1), 8, F16, LAST),
    "one apart": (nn.AvgPool2d(3, (2, 1), (0, 1)), 8, F16, LAST),
    "edges count less": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), 8, F16, LAST),
    "ceil": (nn.AvgPool2d(3, 2, ceil_mode=True), 8, F16, LAST),
    "small": (nn.AvgPool2d(2), 8, F16, LAST),
    "few channels": (nn.AvgPool2d(3), 6, F16, LAST),
    "float32": (nn.AvgPool2d(3), 8, F32, LAST),
    "contiguous": (nn.AvgPool2d(3), 8, F16, ROWS_FIRST),
}


@pytest.mark.parametrize("name", POOLS)
def test_16_bit_images_are_averaged_by_a_convolution_on_a_gpu(name: str) -> None:
    pool, channels, dtype, layout = POOLS[name]
    x = image(2, channels, 9, 7).to(dtype)
    made = export(pool, (x,), {})
    spec, constants = {}, {}
    for on_gpu in (False, True):
        imported = convert(
            made.module,
            made.constants,
            made.placeholders,
            channels_last=layout == LAST,
            on_gpu=on_gpu,
        )
        assert imported.spec is not None
        spec[on_gpu], constants[on_gpu] = imported.spec, imported.constants
    assert ops(spec[False]) == ["avg_pool"]
    assert ops(spec[True]) == (
        ["conv"] if name in ("plain", "padded", "one apart") else ["avg_pool"]
    )
    (y,) = reference.run(spec[True], [x, *constants[True].values()], F64)
    numerics.check(y.to(dtype), pool(x.double()), dtype, pool(x), terms=9)


def split(x: torch.Tensor) -> torch.Tensor:
    """Its windows of 4 x 4 pixels, as rows of channels."""
    return x.reshape(2, 8, 3, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(2, 6, 16, 8)


def joined(rows: torch.Tensor) -> torch.Tensor:
    """An image of such rows, of pixels that lay apart in the one before."""
    return rows.reshape(2, 3, 2, 4, 4, 8).permute(0, 5, 3, 1, 4, 2).reshape(2, 8, 12, 8)


COPIES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "convolved": (lambda m, x: m.conv(joined(split(x))), ["last"]),
    "normed and added": (lambda m, x: m.norm(y := joined(split(x))) + y, ["last"]),
    "cut again": (lambda m, x: split(joined(split(x))), ["last", "rows"]),
    "read by rows": (lambda m, x: split(x).swapaxes(1, 2) @ m.weight, ["turned"]),
    "turned and added": (
        lambda m, x: m.rows(y := split(x).permute(0, 2, 1, 3)) + y,
        ["turned"],
    ),
    "returned": (lambda m, x: joined(split(x)), ["rows"]),
    "other channels": (lambda m, x: m.conv(x.permute(0, 2, 1, 3).reshape(2, 8, 12, 8)), ["rows"]),
    "flat": (lambda m, x: joined(split(x)).flatten(1) @ m.flat, ["rows"]),
    "convolved and read as rows": (
        lambda m, x: (m.conv(y := joined(split(x))), m.rows(y)),
        ["rows"],
    ),
    "cut across channels": (
        lambda m, x: joined(split(x)).reshape(2, 4, 2, 12, 8).transpose(1, 2) + 1,
        ["rows"],
    ),
    "read as rows": (lambda m, x: m.rows(joined(split(x))), ["rows"]),
    "turned and returned": (lambda m, x: split(x).swapaxes(1, 2) + 1, ["rows"]),
    "turned twice": (lambda m, x: split(x).swapaxes(1, 2).mT @ m.short, ["rows"]),
    "turned back": (lambda m, x: split(x).swapaxes(1, 2).swapaxes(1, 2) @ m.weight, ["rows"]),
    "columns": (lambda m, x: split(x).transpose(2, 3) @ m.short, ["rows"]),
    "read twice": (
        lambda m, x: (y := split(x)).swapaxes(1, 2) @ m.weight + (y @ m.weight).swapaxes(1, 2),
        ["rows"],
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_lie_as_they_are_read(name: str) -> None:
    """Channels last where images are read, in the order of a transposition where rows are, else as
    torch lays them."""
    function, layouts = COPIES[name]
    model = Of(
        function,
        conv=nn.Conv2d(8, 4, 3),
        norm=nn.BatchNorm2d(8),
        rows=nn.LayerNorm(8),
        weight=image(8, 4),
        short=image(6, 4) if name == "turned twice" else image(16, 4),
        flat=image(768, 4),
    )
    imported = check(model, image(2, 8, 12, 8), channels_last=True, terms=4096)
    assert imported.spec is not None
    spec = prepared(imported.spec)
    found = []
    for node in spec.nodes:
        if node.op != "reshape" or is_view(spec.tensors, node):
            continue
        made = spec.tensors[node.results[0]]
        rows = is_contiguous(made.shape, made.stride)
        last = is_channels_last(made.shape, made.stride)
        found.append("rows" if rows else "last" if last else "turned")
    assert found == layouts


def test_the_bias_comes_behind_what_is_added() -> None:
    """The order that cuDNN has precompiled engines for; biases on both sides are one."""
    one, other = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)
    plain = check(Of(lambda m, x: F.relu(m.one(x) + x), one=one), image(*IMAGE), terms=64)
    assert ops(plain.spec) == ["conv", "add", "bias", "relu"]
    both = check(
        Of(lambda m, x: F.relu(m.one(x) + m.other(x)), one=one, other=other),
        image(*IMAGE),
        terms=64,
    )
    assert ops(both.spec) == ["conv", "conv", "add", "bias", "relu"]
    used = check(Of(lambda m, x: (y := m.one(x), y + x), one=one), image(*IMAGE), terms=64)
    assert ops(used.spec) == ["conv", "bias", "add"]


# -- dtypes, and operands of another kind ----------------------------------------------------------


def test_means_of_16_bit_images_are_one_kernel_of_torchs() -> None:
    model = Of(lambda m, x: F.adaptive_avg_pool2d(x, 1).flatten(1) + x.mean((2, 3))).half()
    x = image(2, 8, 4, 4).half()
    imported = import_model(model.eval(), (x,), channels_last=True)
    assert [each.overload for each in imported.opaque] == ["aten.mean.dim"] * 2
    (ours,) = run(imported, (x,))
    numerics.check(ours, 2 * x.double().mean((2, 3)), torch.float16)


def test_softplus_with_a_higher_threshold_is_torchs() -> None:
    imported = check(nn.Softplus(1, 22.0), torch.linspace(-4, 24, 9))
    assert [each.overload for each in imported.opaque] == ["aten.softplus.default"]
    assert not check(nn.Softplus(2, 3.0), torch.linspace(-4, 4, 9)).opaque


def test_an_exponent_may_be_a_tensor() -> None:
    check(Of(lambda m, x: x.abs().pow(m.p), p=image(6, 1, 1).abs() + 1), image(2, 6, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_compared_with_the_number_as_16_bits_have_it(dtype: torch.dtype) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return x == 0.1, x != 0.1, x > 0.1, x < 0.3, x <= 0.3, x >= 0.7

    x = torch.tensor([0.1, 0.3, 0.7], dtype=dtype)
    fused = cg.fuse(Of(forward).eval(), x, check=False)
    for made, want in zip(fused(x), forward(None, x), strict=True):
        assert torch.equal(made, want)
