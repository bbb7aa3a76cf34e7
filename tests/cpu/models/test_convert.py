"""Models as graphs: every rule against torch, what stays torch's own, what is refused and how."""

from __future__ import annotations

import copy
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
from cudnngraph.errors import CannotImport
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec, is_channels_last, is_contiguous
from cudnngraph.models.convert import Imported, convert, import_model
from cudnngraph.models.dynamo import backend
from cudnngraph.models.export import export
from cudnngraph.ops.views import is_view
from cudnngraph.rewrite.passes import prepared
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics, thresholds

F32, F64 = torch.float32, torch.float64


class Of(nn.Module):
    """A function as a module, with parameters to use."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def ops(spec: GraphSpec | None) -> list[str]:
    return [] if spec is None else [node.op for node in spec.nodes if node.op != "constant"]


def run(imported: Imported, args: tuple[Any, ...]) -> list[Any]:
    """The results of an imported model, on the CPU."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    made: dict[str, torch.Tensor] = {}
    if imported.spec is not None:
        declared = imported.spec.tensors
        given = dict(imported.constants)
        for name, tensor in zip(imported.inputs, tensors, strict=True):
            if name is not None:
                given[name] = torch.empty_strided(
                    tensor.shape, declared[name].stride, dtype=tensor.dtype
                ).copy_(tensor)
        results = compile_spec(imported.spec, "cpu")(**given)
        outputs = imported.spec.outputs
        made = dict(zip(outputs, [results] if len(outputs) == 1 else results, strict=True))
    return [
        made[each] if isinstance(each, str) else tensors[each[1]] if each[0] == "input" else each[1]
        for each in imported.results
    ]


def check(model: nn.Module, *args: Any, terms: int = 1, channels_last: bool = False) -> Imported:
    """Import, run, and compare every result with the model in float64 and in its own dtype."""
    model = model.eval()
    imported = import_model(model, args, channels_last=channels_last)
    ours = run(imported, args)
    with torch.no_grad():
        own = torch.utils._pytree.tree_leaves(model(*args))
        wide = [
            a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
        ]
        want = torch.utils._pytree.tree_leaves(model.double()(*wide))
        model.float()
    assert len(ours) == len(own) == len(want)
    for mine, theirs, exact in zip(ours, own, want, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs
            continue
        assert mine.dtype == theirs.dtype
        numerics.check(mine, exact, F32, theirs, terms=terms)
    return imported


def image(*shape: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=gen)


# -- rules -----------------------------------------------------------------------------------------

X, Y, IMAGE, ROWS = (3, 5, 8), (3, 5, 8), (2, 6, 9, 8), (4, 10, 16)

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
    "exp_neg": (lambda m, x: torch.exp(-x), ["neg", "exp"]),
    "log_abs": (lambda m, x: torch.log(x.abs() + 1.5), ["abs", "add", "log"]),
    "roots": (lambda m, x: x.square().add(1).rsqrt() + (x * x + 1).sqrt(), None),
    "erf_reciprocal": (lambda m, x: torch.erf(x) + (x * x + 2).reciprocal(), None),
    "square": (lambda m, x: x**2, ["mul"]),
    "cube": (lambda m, x: x.abs() ** 3, ["abs", "pow"]),
    "alpha": (lambda m, x: torch.add(x, x.neg(), alpha=0.5), ["neg", "mul", "add"]),
    "sub_alpha": (lambda m, x: torch.sub(x, x.tanh(), alpha=2), ["tanh", "mul", "sub"]),
    "rsub": (lambda m, x: 2.0 - x, ["sub"]),
    "div": (lambda m, x: x / (x.abs() + 1) / 3, ["abs", "add", "div", "div"]),
    "min_max": (lambda m, x: torch.minimum(x, -x) + torch.maximum(x, x * 2), None),
    "normalize": (lambda m, x: F.normalize(x, dim=-1), ["normalize"]),
    "normalize_eps": (lambda m, x: F.normalize(x, dim=2, eps=2.5), ["normalize"]),
    "normalize_by_hand": (lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp(1e-6), ["normalize"]),
    "where": (lambda m, x: torch.where(x > 0.5, x, -x), ["gt", "neg", "where"]),
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


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of any size are as large ones."""
    thresholds.change(
        monkeypatch,
        group_norm_min_elements_channels_last=0,
        group_norm_min_elements_contiguous=0,
    )


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
def test_a_group_norm_of_torch_compile_is_ours_where_its_statistics_are_not_wanted(
    channels_last: bool, statistics: bool
) -> None:
    def norm(m: Any, x: torch.Tensor) -> Any:
        made = torch.native_group_norm(x, m.w, m.b, 2, 8, 30, 4, 1e-5)
        return made[:2] if statistics else made[0]

    model = Of(norm, w=torch.randn(8), b=torch.randn(8))
    found = ops(check(model, image(2, 8, 6, 5), channels_last=channels_last).spec)
    assert ("group_affine" in found, "aten" in found) == (not statistics, statistics)


@pytest.mark.parametrize(("channels_last", "least"), [(True, 2**19), (False, 2**22)])
def test_a_group_norm_of_small_images_is_torchs(
    channels_last: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has less to launch."""
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
@pytest.mark.parametrize("name", SHAPES)
def test_ops_on_shapes_become_ours(name: str, channels_last: bool) -> None:
    function, shape = SHAPES[name]
    imported = check(Of(function), image(*shape), channels_last=channels_last)
    assert imported.opaque == ()


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


# -- batch norm ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(6, 8, 3, bias=False),
        nn.Conv2d(6, 8, 3, groups=2),
        nn.ConvTranspose2d(6, 8, 3, stride=2),
        nn.ConvTranspose2d(6, 8, 3, groups=2, bias=False),
    ],
    ids=str,
)
def test_a_batch_norm_behind_a_convolution_is_folded(conv: nn.Module) -> None:
    model = models.randomized(nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()))
    imported = check(model, image(*IMAGE), terms=4096)
    kind = "conv" if isinstance(conv, nn.Conv2d) else "conv_transpose"
    assert ops(imported.spec) == [kind, "bias", "relu"]
    assert imported.folded == 1


def test_folded_weights_are_computed_in_float64_and_rounded_once() -> None:
    conv, norm = nn.Conv2d(3, 4, 1, bias=False).half(), nn.BatchNorm2d(4).half()
    model = models.randomized(nn.Sequential(conv, norm))
    imported = import_model(model, (image(1, 3, 4, 4).half(),))
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    want = (conv.weight.double() * scale.view(-1, 1, 1, 1)).half()
    shift = (norm.bias.double() - norm.running_mean.double() * scale).half()
    weight, bias = imported.constants.values()
    assert torch.equal(weight, want.detach())
    assert torch.equal(bias, shift.detach())


def test_a_batch_norm_that_no_convolution_can_take_is_a_scale_and_a_bias() -> None:
    conv = nn.Conv2d(6, 6, 1)
    apart = models.randomized(nn.BatchNorm2d(6))
    imported = check(Of(lambda m, x: m.norm(F.relu(x)), norm=apart), image(*IMAGE))
    assert ops(imported.spec) == ["relu", "scale", "bias"]
    twice = check(
        Of(lambda m, x: (y := m.conv(x), m.norm(y)), conv=conv, norm=apart), image(*IMAGE), terms=64
    )
    assert ops(twice.spec) == ["conv", "bias", "scale", "bias"]
    assert imported.folded == twice.folded == 0


@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(6, 8, 1, bias=False), nn.Conv2d(6, 8, 1, 2), nn.Conv2d(6, 8, 1, padding="same")],
    ids=str,
)
def test_a_batch_norm_in_front_of_a_convolution_of_pixels_is_folded(conv: nn.Module) -> None:
    norm = nn.BatchNorm2d
    model = models.randomized(nn.Sequential(norm(6), conv, norm(8), nn.ReLU()))
    imported = check(model, image(*IMAGE), terms=4096)
    assert ops(imported.spec) == ["conv", "bias", "relu"]
    assert imported.folded == 2


def test_a_batch_norm_between_two_convolutions_is_folded_once() -> None:
    parts = nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
    imported = check(models.randomized(nn.Sequential(*parts)), image(*IMAGE), terms=4096)
    assert ops(imported.spec) == ["conv", "bias", "conv", "bias"]
    assert imported.folded == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.4, 3.0, 100.0])
def test_a_batch_norm_in_front_of_a_convolution_keeps_its_precision(
    dtype: torch.dtype, mean: float
) -> None:
    """Rounded weights times means that are large beside deviations would not."""
    norm, conv = nn.BatchNorm2d(64), nn.Conv2d(64, 32, 1, bias=False)
    norm.running_mean.fill_(mean)
    model = nn.Sequential(norm, conv).eval().to(dtype)
    x = (image(2, 64, 8, 8) + mean).to(dtype)
    imported = import_model(model, (x,))
    (y,) = run(imported, (x,))
    with torch.no_grad():
        own, exact = model(x), model.double()(x.double())
    numerics.check(y, exact, dtype, own, terms=64)
    assert imported.folded == (mean < 1)


def test_a_batch_norm_in_front_that_weights_cannot_hold_stays() -> None:
    """Means that cancel in the sum, and scales beyond the range of float16."""
    conv = nn.Conv2d(64, 32, 1, bias=False)
    conv.weight.data -= conv.weight.data.mean(1, keepdim=True)
    conv.weight.data *= 0.05
    for dtype, mean, var, eps in (
        (F32, 300.0, 1.0, 1e-5),
        (torch.float16, 0.0, 6e4, 1e-5),
        (torch.float16, 0.0, 0.0, 1e-14),
    ):
        norm = nn.BatchNorm2d(64, eps=eps)
        norm.running_mean.fill_(mean)
        norm.running_var.fill_(var)
        model = copy.deepcopy(nn.Sequential(norm, conv)).eval().to(dtype)
        assert import_model(model, (torch.zeros(1, 64, 4, 4, dtype=dtype),)).folded == 0


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3)),
        nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 8, 1, padding=1)),
        nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 8, 1, groups=2)),
        nn.Sequential(nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 8, 1)),
        Of(lambda m, x: m.c(y := m.n(x)) + y, n=nn.BatchNorm2d(6), c=nn.Conv2d(6, 6, 1)),
    ],
    ids=["3x3", "padded", "groups", "transposed", "read twice"],
)
def test_a_batch_norm_in_front_that_would_not_be_the_same_stays(model: nn.Module) -> None:
    imported = check(models.randomized(model), image(*IMAGE), terms=4096)
    assert ops(imported.spec)[:2] == ["scale", "bias"]
    assert imported.folded == 0


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


# -- constants, inputs, results --------------------------------------------------------------------


def test_a_value_comes_back_in_every_layout_that_is_asked_for() -> None:
    def layouts(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned, order = (x * 2).transpose(0, 1), x.argmax(-1).t()
        return turned, turned.contiguous(), turned, turned.contiguous(), order, order.contiguous()

    x = image(3, 4, 5)
    want = layouts(None, x)
    made = torch.compile(Of(layouts).eval(), backend=backend)(x)
    assert [each.stride() for each in made[:4]] == [each.stride() for each in want[:4]]
    assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))
    imported = import_model(Of(layouts).eval(), (x,))
    assert len(set(imported.results[:4])) == 2


def test_every_copy_of_an_input_is_memory_of_its_own() -> None:
    imported = import_model(Of(lambda m, x: (x.clone(), x.clone())), (image(2, 3),))
    assert imported.results == ("out0", "out1")


def test_what_depends_on_constants_alone_is_computed_at_once() -> None:
    model = Of(
        lambda m, x: x + torch.arange(8.0).view(2, 4).sum(1).repeat(4) * m.scale,
        scale=torch.tensor([0.5] * 8),
    )
    imported = check(model, image(*X))
    assert ops(imported.spec) == ["add"]
    assert len(imported.constants) == 1


def test_results_of_every_kind_come_back() -> None:
    table = torch.tensor([1.0, 2.0])
    model = Of(lambda m, x, y: {"a": x + 1, "same": y, "b": [m.table, 3, None]}, table=table)
    imported = check(model, image(2, 3), image(2))
    assert imported.inputs[1] is None
    assert imported.results[1] == ("input", 1)
    doubled = import_model(Of(lambda m, x: (y := x + 1, y)), (image(2, 3),))
    assert doubled.results == ("out0", "out0")
    nothing = import_model(Of(lambda m, x: x), (image(2, 3),))
    assert nothing.spec is None and nothing.results == (("input", 0),)


def test_numbers_and_flags_among_the_arguments_are_part_of_the_graph() -> None:
    model = Of(lambda m, x, k, flag: x * k if flag else x)
    imported = import_model(model, (image(2, 3), 2.5, True))
    x = image(2, 3)
    (result,) = run(imported, (x,))
    assert torch.equal(result, x * 2.5)


def test_images_and_weights_lie_channels_last_throughout() -> None:
    model = models.randomized(models.DeepLab(models.ResNet((1, 1, 1), 8, dilated=True), 16, 5))
    imported = check(model, image(1, 3, 64, 64), terms=1 << 20, channels_last=True)
    assert imported.spec is not None
    for name, tensor in imported.spec.tensors.items():
        if len(tensor.shape) == 4:
            assert is_channels_last(tensor.shape, tensor.stride), name
    assert "permute" not in ops(imported.spec)


def test_neither_indices_nor_constants_say_that_an_image_is_none() -> None:
    index = torch.randint(6, (2, 8, 6, 6))
    for function in (
        lambda m, x: torch.gather(m.conv(x), 2, m.index),
        lambda m, x: torch.lerp(m.conv(x), m.ends, 0.5),
    ):
        model = Of(function, conv=nn.Conv2d(3, 8, 3), index=index, ends=image(2, 8, 6, 6))
        spec = check(model, image(2, 3, 8, 8), channels_last=True).spec
        assert spec is not None and spec.nodes[-1].op == "aten"
        made = spec.tensors[spec.nodes[-1].results[0]]
        assert is_channels_last(made.shape, made.stride)


# -- whole models ----------------------------------------------------------------------------------

NETS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet": lambda: (models.ResNet((1, 2), 16, 10), image(2, 3, 64, 64)),
    "deeplab": lambda: (
        models.DeepLab(models.ResNet((1, 1, 1), 8, dilated=True), 16, 5),
        image(1, 3, 64, 64),
    ),
    "unet": lambda: (models.UNet(8, 3), image(1, 3, 32, 32)),
    "decoder": lambda: (models.LatentDecoder((64, 64), 1, heads=1), image(2, 4, 8, 8)),
    "gpt": lambda: (models.GPT(31, 64, 2, 16), torch.arange(24).view(2, 12)),
    "vit": lambda: (models.ViT(16, 8, 64, 2, 10), image(2, 3, 16, 16)),
    "convnext": lambda: (models.ConvNeXt((8, 16), (1, 1), 10), image(2, 3, 32, 32)),
}


def test_what_a_model_turned_to_have_its_channels_last_is_no_image() -> None:
    """Nor what torch makes of it, which lies as it does; of an image it is one."""
    conv = nn.Conv2d(3, 8, 3)

    def turned(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(m.conv(x).permute(0, 2, 3, 1), (1, 2), (1, 2))

    for function in (turned, lambda m, x: torch.roll(m.conv(x), (1, 2), (2, 3))):
        spec = check(Of(function, conv=conv), image(2, 3, 8, 8), channels_last=True).spec
        assert spec is not None and spec.nodes[-1].op == "aten"
        given, rolled = (
            spec.tensors[name] for node in spec.nodes[-1:] for name in (*node.inputs, *node.results)
        )
        assert rolled.stride == given.stride
        assert is_channels_last(rolled.shape, rolled.stride) is (function is not turned)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_models_are_as_near_to_float64_as_torch(name: str, channels_last: bool) -> None:
    torch.manual_seed(1)
    model, x = NETS[name]()
    model = models.randomized(model)
    imported = import_model(model, (x,), channels_last=channels_last)
    (ours,) = run(imported, (x,))
    last = torch.channels_last if channels_last and x.dim() == 4 else torch.preserve_format
    with torch.no_grad():
        # torch's own convolutions of channels_last images are less exact than those of others.
        own = model.to(memory_format=last)(x.contiguous(memory_format=last))
        want = model.double()(x.double() if x.is_floating_point() else x)

    def error(y: torch.Tensor) -> float:
        return float((y.double() - want).norm() / want.norm())

    assert error(ours) <= max(numerics.TORCH_FACTOR * error(own), 1e-6)
    assert {each.overload for each in imported.opaque} <= {"aten.embedding.default"}


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "convnext_tiny", "vit_b_16"])
def test_models_of_torchvision_are_imported(name: str) -> None:
    try:
        from torchvision import models as vision
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision: {error}")
    side = 224 if name.startswith("vit") else 64
    model = getattr(vision, name)(weights=None).eval()
    x = image(1, 3, side, side)
    imported = import_model(model, (x,), channels_last=True)
    (ours,) = run(imported, (x,))
    with torch.no_grad():
        torch.testing.assert_close(ours, model(x), rtol=1e-4, atol=1e-4)


# -- torch's own -----------------------------------------------------------------------------------


def test_what_there_is_no_op_for_stays_torchs_own_and_is_named_with_its_line() -> None:
    def forward(m: Any, x: torch.Tensor, at: torch.Tensor) -> Any:
        y = F.pad(F.embedding(at, m.table) * x, (1, 0))
        values, places = torch.sort(y.softmax(-1), stable=True)
        return values.cumsum(-1).relu(), places

    imported = check(Of(forward, table=image(9, 8)), image(3, 8), torch.tensor([0, 8, 3]), terms=64)
    names = [each.overload for each in imported.opaque]
    assert names[:2] == ["aten.embedding.default", "aten.pad.default"] or "pad" in names[1]
    assert all(
        "test_convert.py" in each.line and "in forward" in each.line for each in imported.opaque
    )
    assert "relu" in ops(imported.spec)


def test_whole_numbers_are_torchs_own() -> None:
    imported = check(Of(lambda m, x: (x + 1) * 2), torch.arange(6))
    assert ops(imported.spec) == ["aten", "aten"]


@pytest.mark.parametrize(
    ("model", "op"),
    [
        (nn.LSTM(8, 16, 2, batch_first=True, dropout=0.5), "aten.lstm.input"),
        (nn.GRU(8, 16, bidirectional=True), "aten.gru.input"),
        (nn.RNN(8, 16), "aten.rnn_tanh.input"),
    ],
    ids=["lstm", "gru", "rnn"],
)
def test_recurrent_layers_are_torchs_own_and_draw_nothing(model: nn.Module, op: str) -> None:
    imported = check(Of(lambda m, x: m.layer(x)[0].relu(), layer=model).eval(), image(5, 2, 8))
    assert [each.overload for each in imported.opaque] == [op]
    assert ops(imported.spec) == ["aten", "relu"]


def test_a_recurrent_layer_that_drops_is_refused() -> None:
    layer = nn.LSTM(8, 16, 2, dropout=0.5)
    with pytest.raises(CannotImport, match=r"aten.lstm.input .*: it draws random numbers"):
        import_model(layer.train(), (image(5, 2, 8),))


def test_casts_keep_their_dtype() -> None:
    imported = check(Of(lambda m, x: x.double().relu()), image(3, 4))
    assert ops(imported.spec) == ["aten", "relu"]


# -- what is refused -------------------------------------------------------------------------------


def refusal(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(CannotImport) as caught:
        import_model(Of(function, state=torch.zeros(3)).eval(), args)
    return str(caught.value)


def test_a_shape_that_depends_on_numbers_is_refused_with_its_line() -> None:
    text = refusal(lambda m, x: x[x > 0] * 2, image(4))
    assert "Of is no single graph: aten.index.Tensor (test_convert.py:" in text
    assert "the shape of its result depends on the numbers in a tensor" in text


def test_a_branch_on_numbers_is_refused_with_its_line() -> None:
    text = refusal(lambda m, x: x if x.sum() > 0 else -x, image(4))
    assert text.startswith("Of cannot be exported: ")
    assert "(test_convert.py:" in text


def test_control_flow_is_refused() -> None:
    text = refusal(
        lambda m, x: torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,)), image(4)
    )
    assert "control flow, or a call that is no op of torch" in text and "cond" in text


def test_random_numbers_are_refused() -> None:
    text = refusal(lambda m, x: x + torch.rand_like(x), image(4))
    assert "aten.rand_like.default (test_convert.py:" in text
    assert "it draws random numbers (call model.eval()?)" in text


def test_a_sparse_tensor_is_refused() -> None:
    model = Of(lambda m, x: torch.sparse.mm(m.sparse, x), sparse=torch.eye(3).to_sparse())
    with pytest.raises(CannotImport) as caught:
        import_model(model.eval(), (image(3, 4),))
    text = str(caught.value)
    assert text.endswith(": it reads a sparse tensor")


def test_state_that_changes_is_refused() -> None:
    def count(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.state.add_(1)
        return x + m.state

    text = refusal(count, image(3))
    assert "changes 'state' in place" in text and "call model.eval()" in text


def test_a_parameter_that_changes_is_refused() -> None:
    model = nn.Embedding(5, 4, max_norm=0.5).eval()
    with pytest.raises(CannotImport, match=r"changes 'weight' in place"):
        import_model(model, (torch.tensor([1, 2]),))


def test_an_input_that_is_written_is_refused() -> None:
    assert "changes 'args_0' in place" in refusal(lambda m, x: x.add_(1), image(3))


def test_a_batch_norm_in_training_mode_is_refused() -> None:
    with pytest.raises(CannotImport, match=r"in place, .*call model.eval\(\)"):
        import_model(nn.BatchNorm2d(3).train(), (image(2, 3, 4, 4),))


def test_means_of_16_bit_images_are_one_kernel_of_torchs() -> None:
    model = Of(lambda m, x: F.adaptive_avg_pool2d(x, 1).flatten(1) + x.mean((2, 3))).half()
    x = image(2, 8, 4, 4).half()
    imported = import_model(model.eval(), (x,), channels_last=True)
    assert [each.overload for each in imported.opaque] == ["aten.mean.dim"] * 2
    (ours,) = run(imported, (x,))
    numerics.check(ours, 2 * x.double().mean((2, 3)), torch.float16)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (y := F.conv2d(x, m.w)) * y,
        lambda m, x: (y := F.conv2d(x, m.w)) + y,
        lambda m, x: torch.cat([y := F.conv2d(x, m.w), y], 1),
        lambda m, x: torch.addcmul(y := F.conv2d(x, m.w), y, y),
        lambda m, x: F.batch_norm(y := F.conv2d(x, m.w), z := y.mean((0, 2, 3)), z.abs() + 1),
    ],
)
def test_what_reads_a_convolution_twice_is_no_norm_of_it(forward: Any) -> None:
    check(Of(forward, w=image(4, 6, 3, 3)), image(2, 6, 9, 8), terms=54)


def test_softplus_with_another_threshold_is_torchs() -> None:
    imported = check(nn.Softplus(1, 2.0), torch.linspace(-4, 4, 9))
    assert [each.overload for each in imported.opaque] == ["aten.softplus.default"]
    assert not check(nn.Softplus(2), torch.linspace(-4, 4, 9)).opaque


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


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros(x.shape[-2:])
        mask[1:, :2] = 3
        mask = mask + torch.ones_like(mask) + x.new_full((1, 4), 0.5) + torch.full_like(mask, 2)
        mask = mask * x.new_ones(4) + torch.zeros_like(mask)
        return F.pad(x, (0, 0, 0, 0)) * mask + self.weight


def test_tensors_of_one_number_are_constants() -> None:
    x = torch.randn(2, 3, 4)
    imported = import_model(Fills(), (x,))
    assert imported.opaque == () and imported.spec is not None
    assert [node.op for node in imported.spec.nodes] == ["mul", "add"]
    check(Fills(), x)


def test_large_ones_are_left_to_torch() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros_like(x) + self.weight

    imported = import_model(Large(), (torch.randn(1025, 1024),))
    assert [each.overload for each in imported.opaque] == ["aten.zeros_like.default"]


class Laid(nn.Module):
    """What torch makes lies as its operand does, and is then taken for that."""

    def __init__(self, turn: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.turn = nn.Conv2d(4, 4, 3, padding=1), turn

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = torch.ones_like(x.permute(0, 2, 3, 1)) if self.turn else torch.ones_like(x)
        flat = ones.permute(0, 3, 1, 2).view(-1) if self.turn else ones.view(-1)
        return self.conv(x) + (flat * torch.arange(len(flat))).view(x.shape), ones


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_constants_of_one_number_lie_as_torchs(turn: bool, last: bool) -> None:
    model, x = Laid(turn).eval(), torch.randn(2, 4, 6, 4)
    compiled: Any = torch.compile(model, backend=backend, options={"channels_last": last})
    wanted = model(x)
    for made in (cg.fuse(model, x, channels_last=last)(x), compiled(x)):
        torch.testing.assert_close(made[0], wanted[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(made[1], wanted[1]) and made[1].stride() == wanted[1].stride()
