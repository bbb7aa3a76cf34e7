"""Depthwise-separable convolutions against torch's modules: numbers, gradients, statistics."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.functional import conv_bn
from tests.samples import BF16, F64

EXACT = 1e-9


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert float((a - b).detach().abs().max()) < EXACT


CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mobilenet": ({}, (4, 8, 9, 10)),
    "stride": ({"stride": 2, "activation": "relu6", "pointwise_activation": None}, (4, 8, 9, 10)),
    "multiplier": ({"multiplier": 2, "kernel_size": 5, "padding": 2}, (4, 8, 9, 10)),
    "bias alone": ({"norm": None, "bias": True, "activation": "silu"}, (4, 8, 9, 10)),
    "dilated": ({"dilation": 2, "padding": 2, "bias": True}, (4, 8, 9, 10)),
    "cumulative": ({"momentum": None}, (4, 8, 9, 10)),
    "two norms without affine": ({"affine": False}, (4, 8, 9, 10)),
    "no statistics kept": (
        {"affine": False, "track_running_stats": False, "bias": True},
        (4, 8, 9, 10),
    ),
    "line": ({"dims": 1}, (4, 8, 20)),
    "volume": ({"dims": 3}, (2, 8, 4, 5, 6)),
}


def made(label: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    options, shape = CASES[label]
    module = cg.FusedDepthwiseSeparable(8, 6, dtype=F64, **options)
    for name, tensor in module.state_dict().items():
        if ".1." in name and tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    return module, torch.randn(shape, dtype=F64)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("label", CASES)
def test_the_module_its_gradients_and_statistics_are_torchs(label: str, training: bool) -> None:
    ours, x = made(label)
    theirs = copy.deepcopy(ours).to_torch()
    ours.train(training)
    theirs.train(training)
    for _ in range(2):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, want = ours(a), theirs(b)
        dy = torch.randn(want.shape, dtype=F64)
        same([y], [want])
        found = torch.autograd.grad(y, [a, *ours.parameters()], dy)
        right = torch.autograd.grad(want, [b, *theirs.parameters()], dy)
        same(found, right)
    same(
        [t.double() for t in ours.state_dict().values()],
        [t.double() for t in theirs.state_dict().values()],
    )


def test_a_residual_is_added_before_the_last_activation() -> None:
    module = cg.FusedDepthwiseSeparable(8, 8, norm=None, bias=True, dtype=F64)
    x = torch.randn(2, 8, 6, 6, dtype=F64, requires_grad=True)
    plain = module.to_torch()
    inner = plain[2](plain[1](plain[0](x)))
    want, y = torch.relu(inner + x), module(x, x)
    same([y], [want])
    same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(want.sum(), x))


def test_it_is_one_graph_and_channels_last_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    call = conv_bn.run_graph

    def counted(build: Any, *given: Any) -> Any:
        ran.append(build.__name__)
        return call(build, *given)

    monkeypatch.setattr(conv_bn, "run_graph", counted)
    module = cg.FusedDepthwiseSeparable(8, 6).eval()
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    with torch.no_grad():
        y, want = module(x), module.to_torch()(x)
    assert ran == ["separable"]
    assert y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()
    assert float((y - want).abs().max()) < 1e-5


def test_blocks_of_torchs_modules_are_taken_over() -> None:
    conv, point = nn.Conv2d(8, 16, 3, groups=8), nn.Conv2d(16, 4, 1)
    bn = nn.BatchNorm2d(16)
    first = cg.FusedConvBlock.from_torch(conv, bn, nn.ReLU6())
    second = cg.FusedConvBlock.from_torch(point)
    module = cg.FusedDepthwiseSeparable.from_blocks(first, second)
    plain = nn.Sequential(conv, bn, nn.ReLU6(), point)
    assert {id(p) for p in module.parameters()} == {id(p) for p in plain.parameters()}
    assert list(module.state_dict()) == [
        *("depthwise.0.weight", "depthwise.0.bias", "depthwise.1.weight", "depthwise.1.bias"),
        *("depthwise.1.running_mean", "depthwise.1.running_var"),
        "depthwise.1.num_batches_tracked",
        *("pointwise.0.weight", "pointwise.0.bias"),
    ]
    x = torch.randn(2, 8, 6, 6)
    module.eval()
    assert float((module(x) - plain.eval()(x)).detach().abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (nn.Conv2d(8, 8, 3, groups=4), nn.Conv2d(8, 4, 1), "depthwise: has groups=4; expected 8"),
        (
            nn.Conv2d(8, 8, 3, groups=8),
            nn.Conv2d(8, 4, 1, stride=2),
            "pointwise: has 8, 4, kernel_size=(1, 1), stride=(2, 2); expected a kernel of 1 x 1",
        ),
        (
            nn.Conv2d(8, 8, 3, groups=8),
            nn.Conv2d(8, 4, 3),
            "expected a kernel of 1 x 1, stride 1, no padding",
        ),
        (
            nn.Conv2d(8, 16, 3, groups=8),
            nn.Conv2d(8, 4, 1),
            "pointwise: takes 8 channels; expected 16, those of depthwise",
        ),
    ],
    ids=["groups", "stride", "kernel", "channels"],
)
def test_blocks_that_are_no_separable_convolution_are_refused(
    first: nn.Module, second: nn.Module, says: str
) -> None:
    blocks = [cg.FusedConvBlock.from_torch(conv) for conv in (first, second)]
    with pytest.raises(cg.GraphError) as error:
        cg.FusedDepthwiseSeparable.from_blocks(*blocks)
    assert says in str(error.value)


def test_autocast_leaves_the_norms_parameters_wide() -> None:
    module = cg.FusedDepthwiseSeparable(8, 6)
    x = torch.randn(4, 8, 9, 10, requires_grad=True)
    with torch.autocast("cpu", BF16):
        y = module(x)
    assert y.dtype == BF16
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    assert module.depthwise.norm.running_mean.dtype == torch.float32


def test_the_module_compiles_without_a_break() -> None:
    module, x = made("mobilenet")
    other = copy.deepcopy(module)
    fast = torch.compile(other, fullgraph=True, backend="aot_eager")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = fast(a), module(b)
    same([y], [want])
    same(torch.autograd.grad(y.sum(), a), torch.autograd.grad(want.sum(), b))
    same(list(other.buffers()), list(module.buffers()))


def test_the_composition_of_a_graph_is_two_convolutions() -> None:
    g = cg.Graph("separable")
    x = g.input("x", (2, 8, 6, 6), F64)
    d, p = g.input("d", (8, 1, 3, 3), F64), g.input("p", (4, 8, 1, 1), F64)
    b = g.input("b", (4,), F64)
    g.output("y", g.depthwise_separable(x, d, p, None, b, activation="silu", padding=1))
    assert [node.op for node in g.spec().nodes] == ["conv", "silu", "conv", "bias", "relu"]
    given = {name: torch.randn(t.shape, dtype=F64) for name, t in g.spec().tensors.items()}
    given = {name: given[name] for name in g.spec().inputs}
    inner = torch.nn.functional.silu(
        torch.nn.functional.conv2d(given["x"], given["d"], padding=1, groups=8)
    )
    want = torch.relu(torch.nn.functional.conv2d(inner, given["p"], given["b"]))
    same([g.compile("cpu")(**given)], [want])


def test_blocks_that_have_hooks_or_were_replaced_are_called() -> None:
    module = cg.FusedDepthwiseSeparable(4, 6).double()
    x = torch.randn(2, 4, 7, 7, dtype=F64)
    module.depthwise.register_forward_hook(lambda m, given, y: y + 1)
    want = module.pointwise(module.depthwise(x))
    same([module(x)], [want])
    for name in ("pointwise", "depthwise"):
        setattr(module, name, torch.nn.Identity())
    same([module(x)], [x])
