"""The convolution blocks against the torch modules that they stand for."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import cudnngraph as cg
from tests import numerics
from tests.ranks import on_two_ranks
from tests.samples import F32, F64

EXACT = 1e-9
Block = Any


def by_torch(block: Block, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Compute the block by calling its children, as torch does."""
    y = block.conv(x)
    y = y if block.norm is None else block.norm(y)
    y = y if residual is None else y + residual
    return y if block.activation is None else block.activation(y)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    return float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0


CONV_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no norm": {"norm": None, "activation": "silu"},
    "no activation": {"activation": None},
    "no bias": {"bias": False},
    "stride": {"stride": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "out": 4},
    "dilation": {"dilation": 2, "padding": 2},
    "same": {"padding": "same"},
    "cumulative": {"momentum": None},
    "untracked": {"track_running_stats": False},
    "no affine": {"affine": False},
    "no affine, untracked": {"affine": False, "track_running_stats": False},
    "sync in one process": {"norm": "sync"},
    "leaky": {"activation": "leaky_relu", "negative_slope": 0.3, "eps": 1e-3, "momentum": 0.4},
    "module": {"activation": nn.GELU("tanh")},
    "1d": {"dims": 1, "stride": 2},
    "3d": {"dims": 3},
}
TRANSPOSED_CASES: dict[str, dict[str, Any]] = {
    "transposed": {},
    "transposed stride": {"stride": 2, "output_padding": 1},
    "transposed groups": {"groups": 2, "dilation": 2},
    "transposed no norm": {"norm": None, "activation": "gelu"},
    "transposed 1d": {"dims": 1, "stride": 2},
    "transposed 3d": {"dims": 3, "bias": False},
    "transposed no affine": {"groups": 2, "affine": False, "momentum": None},
}


def make(label: str, dtype: torch.dtype = F64) -> Block:
    torch.manual_seed(3)
    transposed = label in TRANSPOSED_CASES
    options = {"padding": 1, **({**CONV_CASES, **TRANSPOSED_CASES}[label])}
    kind = cg.FusedConvTransposeBlock if transposed else cg.FusedConvBlock
    block = kind(4, options.pop("out", 6), 3, dtype=dtype, **options)
    if block.norm is not None and block.norm.affine:
        nn.init.normal_(block.norm.weight)
        nn.init.normal_(block.norm.bias)
    return block


ALL = [*CONV_CASES, *TRANSPOSED_CASES]


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("label", ALL)
def test_training_and_evaluation_are_torchs(label: str, residual: bool) -> None:
    """Results, every gradient, and the running statistics over several steps."""
    ours = make(label)
    theirs = copy.deepcopy(ours)
    dims = ours.conv.weight.dim() - 2
    for step in range(5):
        training = step != 3
        ours.train(training)
        theirs.train(training)
        x = torch.randn(3, 4, *(7,) * dims, dtype=F64, requires_grad=True)
        z = None
        if residual:
            with torch.no_grad():
                shape = theirs.conv(x).shape
            z = torch.randn(shape, dtype=F64, requires_grad=True)
        y, expected = ours(x, z), by_torch(theirs, x, z)
        grad = torch.randn(y.shape, dtype=F64)
        given = [x] if z is None else [x, z]
        found = torch.autograd.grad(y, [*given, *ours.parameters()], grad)
        right = torch.autograd.grad(expected, [*given, *theirs.parameters()], grad)
        assert distance(y, expected) < EXACT
        assert max(map(distance, found, right)) < EXACT
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert distance(a, b) < EXACT


@pytest.mark.parametrize("label", ["plain", "no norm", "transposed stride"])
def test_float32_is_within_the_policy(label: str) -> None:
    ours = make(label, F32)
    wide = copy.deepcopy(ours).double()
    eager = copy.deepcopy(ours)
    x = torch.randn(8, 4, 9, 9)
    y, exact, theirs = ours(x), by_torch(wide, x.double(), None), by_torch(eager, x, None)
    numerics.check(y, exact, F32, theirs, terms=y.numel())
    grad = torch.randn(y.shape)
    for module, out in ((ours, y), (wide, exact), (eager, theirs)):
        out.backward(grad.to(out.dtype))
        assert all(p.grad is not None for p in module.parameters())
    for (name, a), b, c in zip(
        ours.named_parameters(), wide.parameters(), eager.parameters(), strict=True
    ):
        if name == "0.bias" and ours.norm is not None:
            continue  # zero but for rounding: a norm takes every bias away
        error = numerics.relative_error(a.grad, b.grad)
        limit = numerics.TORCH_FACTOR * numerics.relative_error(c.grad, b.grad)
        assert error <= max(limit, numerics.bound(F32, terms=y.numel())), name


def test_a_norm_in_eval_mode_stays_so_in_a_block_that_trains() -> None:
    ours = make("plain")
    ours.norm.eval()
    theirs, x = copy.deepcopy(ours), torch.randn(3, 4, 7, 7, dtype=F64)
    assert ours.training and distance(ours(x), by_torch(theirs, x, None)) < EXACT
    assert int(ours.norm.num_batches_tracked) == 0


def test_a_batch_of_one_value_is_refused_as_by_torch() -> None:
    block = make("plain")
    with pytest.raises(ValueError, match="1 values per channel"):
        block(torch.randn(1, 4, 1, 1, dtype=F64))


@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_an_empty_batch_trains_as_by_torch(tracks: bool, momentum: float | None) -> None:
    options: Any = {"momentum": momentum, "track_running_stats": tracks, "dtype": F64}
    ours = cg.FusedConvBlock(4, 6, 3, **options)
    theirs = copy.deepcopy(ours.to_torch())
    for x in (torch.zeros(0, 4, 5, 5, dtype=F64), torch.randn(2, 4, 5, 5, dtype=F64)):
        y, expected = ours(x), theirs(x)
        assert y.shape == expected.shape
        for made in (y, expected):
            made.sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.grad is not None
            assert distance(a.grad, b.grad) < EXACT
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.allclose(a, b)


def test_an_empty_batch_trains_in_a_separable_convolution() -> None:
    ours = cg.FusedDepthwiseSeparable(4, 6, dtype=F64)
    before = [each.clone() for each in ours.buffers()]
    y = ours(torch.zeros(0, 4, 5, 5, dtype=F64), torch.zeros(0, 6, 5, 5, dtype=F64))
    y.sum().backward()
    assert y.shape == (0, 6, 5, 5)
    assert all(not each.grad.any() for each in ours.parameters() if each.grad is not None)
    for old, new in zip(before, ours.buffers(), strict=True):
        assert torch.equal(old, new) or new.dtype == torch.int64


def test_output_size_stands_for_an_output_padding() -> None:
    block = cg.FusedConvTransposeBlock(4, 6, 3, stride=2, padding=1, norm=None, dtype=F64)
    x = torch.randn(2, 4, 5, 5, dtype=F64)
    for size in (9, 10):
        expected = torch.relu(block.conv(x, output_size=[size, size]))
        assert distance(block(x, output_size=[size, size]), expected) < EXACT


def test_channels_last_follows_the_input() -> None:
    block = make("plain", F32)
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    y = block(x.contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()
    assert block(x).is_contiguous()
    whole = block.to(memory_format=torch.channels_last)
    assert whole(x).stride() == whole.conv(x).stride()


def test_autocast_gives_the_dtypes_that_torch_gives() -> None:
    block = make("plain", F32)
    theirs, x = copy.deepcopy(block), torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = block(x), by_torch(theirs, x, None)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert numerics.relative_error(y, expected.double()) < 2 * numerics.bound(torch.bfloat16)
    y.float().sum().backward()
    assert all(p.grad.dtype == F32 for p in block.parameters())


@pytest.mark.parametrize(
    ("frozen", "ops"),
    [
        ("conv", {"relu_backward", "batch_norm_backward"}),
        ("norm", {"relu_backward", "batch_norm_backward", "wgrad"}),
        ("conv, norm, but x", {"relu_backward", "batch_norm_backward", "dgrad"}),
        ("nothing", {"relu_backward", "batch_norm_backward", "wgrad", "dgrad"}),
    ],
)
@pytest.mark.parametrize("label", ["no bias", "transposed 3d"])
def test_what_needs_no_gradient_costs_none(label: str, frozen: str, ops: set[str]) -> None:
    """Counted in the nodes of the backward graph that runs: neither has the block a bias."""
    block = make(label)
    for name in ("conv", "norm"):
        getattr(block, name).requires_grad_(name not in frozen)
    needs_x = frozen == "nothing" or "x" in frozen
    transposed = "transposed" in label
    x = torch.randn(3, 4, *(7,) * (3 if transposed else 2), dtype=F64, requires_grad=needs_x)
    y = block(x)
    backward = y.grad_fn.pair.backward
    kinds = {
        "conv_wgrad": "wgrad",
        "conv": "dgrad" if transposed else "conv",
        "conv_transpose": "conv_transpose" if transposed else "dgrad",
    }
    nodes = [node for step in backward.steps for node in step.spec.nodes]
    assert {kinds.get(n.op, n.op) for n in nodes if n.op != "constant"} == ops
    y.sum().backward()
    assert (x.grad is not None) == needs_x
    for name in ("conv", "norm"):
        for parameter in getattr(block, name).parameters():
            assert (parameter.grad is not None) == (name not in frozen)


# -- state dicts, copies, converters ---------------------------------------------------------------


@pytest.mark.parametrize("label", ["plain", "no norm", "untracked", "transposed 3d"])
def test_the_state_dict_is_that_of_the_sequential(label: str) -> None:
    block = make(label)
    modules = [m for m in (block.conv, block.norm, block.activation) if m is not None]
    sequential = nn.Sequential(*copy.deepcopy(modules))
    assert list(block.state_dict()) == list(sequential.state_dict())
    with torch.no_grad():
        for tensor in sequential.state_dict().values():
            tensor.add_(1)
    block.load_state_dict(sequential.state_dict())
    other = make(label).to_torch()
    other.load_state_dict(block.state_dict())
    for a, b in zip(other.state_dict().values(), sequential.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_from_torch_and_to_torch_share_the_modules() -> None:
    conv, bn, act = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
    block = cg.FusedConvBlock.from_torch(conv.eval(), bn, act)
    assert (block.conv, block.norm, block.activation) == (conv, bn, act)
    assert not block.training
    assert list(block.to_torch()) == [conv, bn, act] and not block.to_torch().training
    x = torch.randn(2, 4, 6, 6)
    bn.eval()
    assert torch.allclose(block(x), block.to_torch()(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ((nn.Linear(2, 2),), "Linear is no convolution of torch"),
        ((nn.Conv2d(2, 4, 3, padding_mode="reflect"),), "padding_mode='reflect' is not 'zeros'"),
        ((nn.Conv2d(2, 4, 3), nn.BatchNorm1d(4)), "BatchNorm1d is not BatchNorm2d"),
        ((nn.Conv2d(2, 4, 3), nn.BatchNorm2d(3)), "BatchNorm2d has 3 features, not 4"),
        ((nn.Conv2d(2, 4, 3), nn.SyncBatchNorm(3)), "SyncBatchNorm has 3 features, not 4"),
        ((nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), "GroupNorm is not BatchNorm2d"),
        ((nn.Conv2d(2, 4, 3), None, nn.PReLU()), "PReLU is no activation of a graph"),
        (
            (nn.Conv2d(2, 4, 3), None, nn.Softplus(threshold=1)),
            "Softplus has threshold=1, not 20",
        ),
        (
            (nn.ConvTranspose2d(2, 4, 3),),
            "ConvTranspose2d is none of Conv1d, Conv2d, Conv3d",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_a_block_is_refused_with_the_reason(modules: Any, reason: str) -> None:
    with pytest.raises(cg.GraphError, match=f"block: {re.escape(reason)}"):
        cg.FusedConvBlock.from_torch(*modules)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layer"}, "norm='layer'; expected 'batch', 'sync' or None"),
        ({"process_group": 1}, "process_group is given; expected norm='sync' too"),
        ({"dims": 4}, "dims=4; expected 1, 2 or 3"),
        ({"activation": "swish"}, "'swish' is unknown; expected one of relu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(cg.GraphError, match=re.escape(message)):
        cg.FusedConvBlock(2, 4, 3, **options)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same(how: str) -> None:
    block = make("leaky")
    block(torch.randn(3, 4, 7, 7, dtype=F64))
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(block, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(block) if how == "deepcopy" else pickle.loads(pickle.dumps(block))
    x = torch.randn(3, 4, 7, 7, dtype=F64)
    assert torch.equal(other(x), block(x))
    assert other.conv.weight is not block.conv.weight


HOOKED: dict[str, Any] = {
    "weight norm": lambda block: nn.utils.weight_norm(block.conv),
    "pruned": lambda block: prune.l1_unstructured(block.conv, "weight", amount=0.5),
    "forward": lambda block: block.norm.register_forward_hook(lambda m, given, y: 2 * y),
    "before": lambda block: block.activation.register_forward_pre_hook(lambda m, given: -given[0]),
    "parametrized": lambda block: nn.utils.parametrizations.weight_norm(block.conv),
}


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_hooks_on_the_modules_of_a_block_are_called(name: str) -> None:
    """The hooks are put on the children after the block was made."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()).double()
    block = cg.FusedConvBlock.from_torch(*copy.deepcopy(plain))
    x, residual = torch.randn(2, 4, 7, 7, dtype=F64), torch.randn(2, 6, 5, 5, dtype=F64)
    before = block(x)
    HOOKED[name](block)
    if hasattr(block.conv, "weight_g"):
        with torch.no_grad():
            block.conv.weight_g.mul_(-3)
    y = block(x, residual)
    other = copy.deepcopy(plain)
    other_block = cg.FusedConvBlock.from_torch(*other)
    HOOKED[name](other_block)
    if hasattr(other[0], "weight_g"):
        with torch.no_grad():
            other[0].weight_g.mul_(-3)
    right = other[2](other[1](other[0](x)) + residual)
    assert distance(y, right) < EXACT
    assert name == "parametrized" or distance(block(x), before) > 0.1
    grads = torch.autograd.grad(y.sum(), [p for p in block.parameters() if p.requires_grad])
    rights = torch.autograd.grad(right.sum(), [p for p in other.parameters() if p.requires_grad])
    for a, b in zip(grads, rights, strict=True):
        assert distance(a, b) < EXACT


def test_a_module_in_place_of_another_is_called() -> None:
    """An adapter, say: its weight alone is not what it computes."""

    class Adapted(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    block = cg.FusedConvBlock(4, 6, 3).double().eval()
    block.add_module("0", Adapted(4, 6, 3).double())
    x = torch.randn(2, 4, 7, 7, dtype=F64)
    assert distance(block(x), by_torch(block, x, None)) < EXACT


class Tripled(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


CHANGED: dict[str, Any] = {
    "padding mode": lambda b: b.add_module("0", nn.Conv2d(4, 6, 3, padding_mode="reflect")),
    "threshold": lambda b: b.add_module("2", nn.Softplus(threshold=1)),
    "threshold later": lambda b: [
        b.add_module("2", nn.Softplus()),
        setattr(b.activation, "threshold", 1),
    ],
    "no norm any more": lambda b: b.add_module("1", nn.Identity()),
    "no convolution any more": lambda b: b.add_module("0", nn.Identity()),
    "a norm last": lambda b: b.add_module("2", nn.BatchNorm2d(6)),
    "another forward": lambda b: b.add_module("0", weight_normed(Tripled(4, 6, 3))),
}


def weight_normed(module: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(module)


@pytest.mark.parametrize("name", CHANGED)
def test_what_a_block_cannot_express_is_left_to_torch(name: str) -> None:
    """Put in the place of a part, or changed in it, once the block was made."""
    torch.manual_seed(0)
    channels = 6 if name == "no convolution any more" else 4
    block = cg.FusedConvBlock(channels, 6, 3)
    CHANGED[name](block)
    block.double()
    x = torch.randn(2, channels, 7, 7, dtype=F64)
    ours, theirs = (copy.deepcopy(each) for each in (block, block.to_torch()))
    assert distance(ours(x), theirs(x)) < EXACT
    assert distance(ours.eval()(x), theirs.eval()(x)) < EXACT


def test_a_block_with_a_normed_weight_is_fused_still() -> None:
    block = cg.FusedConvBlock(4, 6, 3)
    weight_normed(block.conv)
    assert not block._calls_children()


def test_a_residual_of_a_wider_dtype_makes_the_sum_of_it() -> None:
    """Under autocast the convolution and its bias are in 16 bits, and what is added need not be."""
    torch.manual_seed(0)
    block = cg.FusedConvBlock(4, 4, 3, padding=1, norm=None)
    x = torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, want = block(x, x), (block.conv(x) + x).relu()
    assert y.dtype == want.dtype == F32
    assert numerics.relative_error(y, want) < numerics.bound(torch.bfloat16, terms=36)
    y.sum().backward()
    assert block.conv.bias is not None and block.conv.bias.grad is not None


def test_a_clamp_may_have_one_bound() -> None:
    x = torch.randn(2, 4, 7, 7)
    for bounds in ({"min": 0.25}, {"max": 0.25}):
        block = cg.FusedConvBlock(4, 6, 3, activation="clamp", **bounds)  # type: ignore[arg-type]
        assert distance(block(x), copy.deepcopy(block.to_torch())(x)) < 1e-5


def test_attributes_that_an_activation_has_not_are_named() -> None:
    with pytest.raises(cg.GraphError, match=r"clamp with strict=False: .*unexpected keyword"):
        cg.FusedConvBlock(4, 6, 3, activation="clamp", strict=False)
    with pytest.raises(cg.GraphError, match=r"relu with slope=1: .*unexpected keyword"):
        cg.FusedConvBlock(4, 6, 3, activation="relu", slope=1)


def test_a_block_is_made_whatever_the_default_device_is() -> None:
    block = cg.FusedConvBlock(4, 6, 3, activation="hardswish")
    x = torch.randn(2, 4, 7, 7)
    with torch.device("meta"):
        y = block(x)
    assert distance(y, block.to_torch()(x)) < 1e-5


def test_hooks_on_the_modules_of_a_separable_convolution_are_called() -> None:
    module = cg.FusedDepthwiseSeparable(4, 6).double()
    x = torch.randn(2, 4, 7, 7, dtype=F64)
    module.depthwise.norm.register_forward_hook(lambda m, given, y: y + 1)
    plain = module.to_torch()
    assert distance(module(x), plain(x)) < EXACT


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_one_image_without_a_batch_is_taken_as_by_torch(dims: int) -> None:
    torch.manual_seed(0)
    block = cg.FusedConvBlock(3, 4, 3, norm=None, dims=dims, dtype=F64)
    back = cg.FusedConvTransposeBlock(4, 2, 2, stride=2, norm=None, dims=dims, dtype=F64)
    x = torch.randn(3, *(5,) * dims, dtype=F64, requires_grad=True)
    residual = torch.randn(4, *(3,) * dims, dtype=F64)
    y, right = block(x, residual), (block.conv(x) + residual).relu()
    assert distance(y, right) < EXACT
    assert distance(back(y), back.conv(right).relu()) < EXACT
    (grad,), (want,) = (torch.autograd.grad(each.sum(), x) for each in (y, right))
    assert distance(grad, want) < EXACT
    if dims == 2:
        out = torch.empty(4, 3, 3, dtype=F64)
        with torch.no_grad():
            made = cg.functional.conv2d(x, block.conv.weight, block.conv.bias, out=out)
        assert made is out and distance(out, block.conv(x)) < EXACT
        normed = cg.FusedConvBlock(3, 4, 3)
        with pytest.raises(cg.GraphError, match="x"):
            normed(torch.randn(3, 5, 5))


def test_a_block_can_be_checkpointed_and_hooked() -> None:
    block = make("no norm")
    seen: list[tuple[int, ...]] = []
    block.register_forward_hook(lambda module, given, result: seen.append(tuple(result.shape)))
    x = torch.randn(3, 4, 7, 7, dtype=F64, requires_grad=True)
    block(x).sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, expected)
    assert seen == [(3, 6, 7, 7)] * 2  # the second forward stops when all that was saved is there


# -- replace ---------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A convolution whose surroundings only its forward knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x)  # type: ignore[no-any-return]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(6, 6, 3, bias=False), nn.GELU(), nn.MaxPool2d(2)),
        Residual(),
        nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(6, 4, 1),
        nn.PReLU(),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.BatchNorm2d(2),
    ).double()


def test_replace_swaps_patterns_and_says_what_it_left() -> None:
    ours, theirs = model(), model()
    report = cg.nn.replace(ours)
    assert str(report).splitlines() == [
        "swapped 0, 1, 2 (Conv2d → BatchNorm2d → ReLU)",
        "swapped 3.0, 3.1 (Conv2d → GELU)",
        "swapped 4.conv (Conv2d → residual)",
        "swapped 6 (Conv2d)",
        "swapped 8, 9 (ConvTranspose2d → BatchNorm2d)",
        "left 5 (Conv2d): padding_mode='circular' is not 'zeros'",
    ]
    for training in (True, False):
        x = torch.randn(4, 3, 14, 14, dtype=F64)
        ours.train(training)
        theirs.train(training)
        y, expected = ours(x), theirs(x)
        assert distance(y, expected) < EXACT
        y.sum().backward()
        expected.sum().backward()
    mine = dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True))
    for name, value in theirs.state_dict().items():
        assert distance(mine[name], value) < EXACT
    assert cg.nn.replace(ours).swapped == ()


def test_a_swapped_model_keeps_the_keys_of_its_state_dict() -> None:
    ours, theirs = nn.ModuleDict({"a": model()}), nn.ModuleDict({"a": model()})
    parameters = {id(p) for p in ours.parameters()}
    cg.nn.replace(ours)
    assert {id(p) for p in ours.parameters()} == parameters
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(1.0)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    again = pickle.loads(pickle.dumps(ours))
    theirs.load_state_dict(copy.deepcopy(again).state_dict())
    x = torch.randn(2, 3, 14, 14, dtype=F64)
    assert distance(again["a"](x), theirs["a"](x)) < EXACT


def test_replace_leaves_hooked_modules_and_lists_a_shared_one_once() -> None:
    shared = nn.Conv2d(3, 3, 1)
    hooked = nn.Conv2d(3, 3, 1)
    hooked.register_forward_hook(lambda *given: None)
    ours = nn.Sequential(shared, shared, nn.ReLU(), hooked)
    x = torch.randn(2, 3, 4, 4)
    expected = ours(x)
    assert str(cg.nn.replace(ours)).splitlines() == [
        "swapped 0 (Conv2d)",
        "left 3 (Conv2d): Conv2d has hooks, which a block would not call",
    ]
    assert torch.allclose(ours(x), expected, rtol=1e-5, atol=1e-6)


# -- several processes -----------------------------------------------------------------------------


def test_two_processes_train_as_torchs_model_does(tmp_path: Path) -> None:
    told = on_two_ranks("ddp_worker.py", tmp_path)
    for rank in told:
        theirs, ours = rank["losses"]
        assert ours == pytest.approx(theirs, abs=EXACT)
        assert rank["apart"] < EXACT
    assert told[0]["weight"] == told[1]["weight"]
    assert told[0]["losses"] != told[1]["losses"]


def test_synchronised_norms_are_those_of_the_joined_batch(tmp_path: Path) -> None:
    """Results, gradients and running statistics, of batches of 3 and 5, of 4 and none."""
    told = on_two_ranks("sync_worker.py", tmp_path)
    assert len(told[0]) == len(told[1]) == 12
    for rank in told:
        assert {name: apart for name, apart in rank.items() if not apart < EXACT} == {}
    assert max(told[0].values()) > 0.0


def test_synchronised_norms_come_from_torch_and_go_back() -> None:
    conv, bn = nn.Conv2d(4, 6, 3), nn.SyncBatchNorm(6, eps=1e-3)
    block = cg.FusedConvBlock.from_torch(conv, bn, nn.ReLU())
    assert block.norm is bn and list(block.to_torch())[1] is bn
    assert type(cg.FusedConvBlock(4, 6, 3, norm="sync").norm) is nn.SyncBatchNorm
    model = nn.Sequential(conv, bn, nn.ReLU())
    assert [str(s) for s in cg.nn.replace(model).swapped] == [
        "swapped 0, 1, 2 (Conv2d → SyncBatchNorm → ReLU)"
    ]
    plain = nn.Sequential(cg.FusedConvTransposeBlock(4, 6, 3))
    turned = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert type(turned[0].norm) is nn.SyncBatchNorm
    x = torch.randn(2, 4, 5, 5)
    assert torch.allclose(turned[0](x), turned[0].to_torch()(x), rtol=1e-5, atol=1e-6)


def test_a_sequence_that_is_changed_after_a_swap_loads_what_it_saves() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    cg.nn.replace(model)
    model.insert(0, nn.Identity())
    wanted = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(wanted)
    found = model.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
