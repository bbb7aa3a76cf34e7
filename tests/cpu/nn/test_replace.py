"""``nn.replace`` on models whose forwards are Python: what it takes, leaves and keeps."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import cudnngraph as cg
from tests.cpu.nn.agreement import differences, step

F64 = torch.float64
Tensor = torch.Tensor


def image(channels: int = 4, size: int = 8) -> Tensor:
    return torch.randn(3, channels, size, size, dtype=F64)


def replaced(model: nn.Module) -> tuple[nn.Module, nn.Module, list[str]]:
    """torch's model in float64, ours, and the lines of the report."""
    theirs = model.double()
    ours = copy.deepcopy(theirs)
    lines = str(cg.nn.replace(ours)).splitlines()
    return theirs, ours, lines


def same(theirs: nn.Module, ours: nn.Module, *inputs: Any) -> None:
    """Two training steps and an evaluation between, and the state dict."""
    for training in (True, False, True):
        assert differences(step(theirs, training, *inputs), step(ours, training, *inputs)) == {}
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert [name for name, _ in theirs.named_modules()] == [n for n, _ in ours.named_modules()]


# -- forms of architectures ------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """torchvision's ResNet block: one relu thrice, an addition in place."""

    def __init__(self, inner: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out = 2 * width
        self.conv1 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inner != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Bottleneck(4, 4, 2), Bottleneck(8, 4))
        self.fc = nn.Linear(8, 5)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.layer1(self.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


def test_a_resnet_is_taken_with_its_residuals() -> None:
    torch.manual_seed(0)
    theirs, ours, lines = replaced(ResNet())
    downsample = "layer1.0.downsample.0, layer1.0.downsample.1"
    blocks = [
        f"swapped {b}.conv{i}, {b}.bn{i}, {b}.relu "
        f"(Conv2d → BatchNorm2d{' → residual' * (i == 3)} → ReLU)"
        for b in ("layer1.0", "layer1.1")
        for i in (1, 2, 3)
    ]
    blocks.insert(3, f"swapped {downsample} (Conv2d → BatchNorm2d)")
    assert lines == ["swapped conv1, bn1, relu (Conv2d → BatchNorm2d → ReLU)", *blocks]
    same(theirs, ours, image())
    assert isinstance(ours.layer1[0], Bottleneck)  # type: ignore[index]
    assert type(ours.layer1[0]).__name__ == "Bottleneck"  # type: ignore[index]
    assert type(ours.conv1) is nn.Conv2d


class ConvNormAct(nn.Module):
    def __init__(self, inner: int, out: int, kernel: int = 1, act: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inner, out, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(out)
        self.act = nn.ReLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class Squeeze(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, 2, 1)
        self.fc2 = nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean((2, 3), keepdim=True)
        return x * self.fc2(F.relu(self.fc1(scale))).sigmoid()  # type: ignore[no-any-return]


class DropPath(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.p)


class RegNetBlock(nn.Module):
    """Blocks of containers: the residual crosses the border of the last."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.f = nn.Sequential(ConvNormAct(4, 6, 3), Squeeze(6), ConvNormAct(6, 8, act=False))
        self.proj = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))
        self.drop_path = DropPath(p)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.proj(x) + self.drop_path(self.f(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_a_residual_is_taken_across_containers(p: float) -> None:
    torch.manual_seed(0)
    theirs, ours, lines = replaced(RegNetBlock(p))
    assert "left" not in "".join(lines) and len(lines) == 5
    whole = (
        "swapped f.2.conv, f.2.bn, f.2.act, act (Conv2d → BatchNorm2d → Identity → residual → SiLU)"
    )
    assert whole in lines  # if p is not 0, in evaluation alone
    assert "swapped f.1.fc1 (Conv2d → ReLU)" in lines
    assert "swapped f.1.fc2 (Conv2d → Sigmoid)" in lines
    same(theirs, ours, image())
    evaluated = RegNetBlock(p).double().eval()
    assert whole in str(cg.nn.replace(evaluated)).splitlines()


def test_hooks_on_a_container_that_was_traced_into_fire() -> None:
    _, ours, _ = replaced(RegNetBlock(0.0))
    fired: list[str] = []
    x = image()
    expected = ours(x)
    for name in ("f", "f.2", "f.2.bn", "f.2.conv"):
        ours.get_submodule(name).register_forward_hook(lambda *_, name=name: fired.append(name))
    assert torch.allclose(ours(x), expected)
    assert fired == ["f.2.conv", "f.2.bn", "f.2", "f"]


class InvertedResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(4, 8, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(8),
            nn.Hardswish(),
            nn.Conv2d(8, 4, 1, bias=False),
            nn.BatchNorm2d(4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)  # type: ignore[no-any-return]


def test_an_inverted_residual_is_taken() -> None:
    theirs, ours, lines = replaced(InvertedResidual())
    assert lines == [
        "swapped conv.0, conv.1, conv.2 (Conv2d → BatchNorm2d → ReLU6)",
        "swapped conv.3, conv.4, conv.5 (Conv2d → BatchNorm2d → Hardswish)",
        "swapped conv.6, conv.7 (Conv2d → BatchNorm2d → residual)",
    ]
    same(theirs, ours, image())


class DenseLayer(nn.Module):
    """torchvision's: a tensor or a list, dropout by the module's mode."""

    def __init__(self, memory_efficient: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(8)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(8, 6, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 4, 3, padding=1, bias=False)
        self.memory_efficient = memory_efficient
        self.drop_rate = 0.3

    def bottleneck(self, *inputs: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        features = [x] if isinstance(x, Tensor) else x
        if self.memory_efficient:
            made = checkpoint(self.bottleneck, *features, use_reentrant=False)
        else:
            made = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        y: Tensor = self.conv2(self.relu2(self.norm2(made)))
        return F.dropout(y, self.drop_rate, training=self.training)


def test_a_dense_layer_is_taken_for_a_tensor_and_for_a_list() -> None:
    theirs, ours, lines = replaced(DenseLayer())
    assert lines == [
        "swapped conv1, norm2, relu2 (Conv2d → BatchNorm2d → ReLU)",
        "swapped conv2 (Conv2d)",
    ]
    same(theirs, ours, image(8))
    same(theirs, ours, [image(4), image(4)])
    ours.memory_efficient = True  # a forward that was not traced
    theirs.memory_efficient = True
    same(theirs, ours, [image(4), image(4)])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        y = F.relu(self.bn(self.down(x)), inplace=True)
        y = torch.relu_(self.up(y))
        return {"out": self.out(torch.cat([x, y], dim=1)) * scale, "aux": y}


def test_a_unet_of_functions_is_taken() -> None:
    theirs, ours, lines = replaced(UNet())
    assert lines == [
        "swapped down, bn (Conv2d → BatchNorm2d → ReLU)",
        "swapped up (ConvTranspose2d → ReLU)",
        "swapped out (Conv2d)",
    ]
    same(theirs, ours, image())
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
    x = image()
    assert torch.allclose(ours(x, scale=2.0)["out"], theirs(x, scale=2.0)["out"])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        ours()


class ViTAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.drop.p if self.training else 0.0
        )
        return self.proj(y.transpose(1, 2).reshape(b, n, c))  # type: ignore[no-any-return]


def test_attention_in_a_forward_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours, lines = replaced(nn.Sequential(ViTAttention(0.0), nn.GELU()))
    assert lines == ["swapped 0 (ViTAttention)"]
    tokens = torch.randn(2, 5, 8, dtype=F64)
    same(theirs, ours, tokens)
    same(theirs[0], ours[0], tokens, torch.randn(5, 5, dtype=F64))  # type: ignore[index]

    dropping = ViTAttention(0.5).double()
    cg.nn.replace(dropping)
    assert not torch.equal(dropping(tokens), dropping(tokens))
    dropping.eval()
    assert torch.equal(dropping(tokens), dropping(tokens))

    def fails(*given: Any, **named: Any) -> Any:
        raise AssertionError("torch's attention ran")

    monkeypatch.setattr(F, "scaled_dot_product_attention", fails)
    ours(tokens)


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, **{"batch_first": True, **options})

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        y, _ = self.attn(x, x, x, need_weights=False, attn_mask=mask, is_causal=causal)
        return x + y  # type: ignore[no-any-return]


def test_multihead_attention_is_taken_for_self_attention() -> None:
    theirs, ours, lines = replaced(Encoder())
    assert lines == ["swapped attn (MultiheadAttention)"]
    tokens = torch.randn(2, 5, 8, dtype=F64)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for mask, causal in (
        (None, False),
        (torch.randn(5, 5, dtype=F64), False),
        (torch.randn(4, 5, 5, dtype=F64), False),
    ):
        same(theirs, ours, tokens, mask, causal)
    for causal in (False, True):
        assert torch.allclose(ours(tokens, hidden, causal), theirs(tokens, hidden, causal))
    _, weights = ours.attn(tokens, tokens, tokens)  # type: ignore[operator]
    assert torch.allclose(weights, theirs.attn(tokens, tokens, tokens)[1])  # type: ignore[operator]
    for options, why in (
        ({"batch_first": False}, "it has batch_first=False"),
        ({"kdim": 4}, "it has kdim or vdim other than embed_dim"),
    ):
        (line,) = replaced(Encoder(**options))[2]
        assert line == f"left attn (MultiheadAttention): {why}"


# -- what stays ------------------------------------------------------------------------------------


def test_what_a_user_holds_of_a_model_stays_valid() -> None:
    torch.manual_seed(0)
    theirs = ResNet().double()
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (theirs, ours)]
    conv, bn = ours.conv1, ours.bn1
    cg.nn.replace(ours)
    assert ours.conv1 is conv and ours.bn1 is bn
    for _ in range(3):
        x = image()
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for (name, a), (other, b) in zip(
        theirs.state_dict().items(), ours.state_dict().items(), strict=True
    ):
        assert name == other and torch.allclose(a.double(), b.double())
    assert ours.load_state_dict(ResNet().double().state_dict(), strict=True).missing_keys == []
    bn.requires_grad_(False)
    ours(x).sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_replaced_too_and_its_own(copied: Callable[[Any], Any]) -> None:
    _, ours, _ = replaced(ResNet())
    twin = copied(ours)
    same(copy.deepcopy(ours), twin, image())
    with torch.no_grad():
        twin.layer1[0].conv1.weight.zero_()
    assert not torch.allclose(twin(image()), ours(image()))
    assert [s.reason for s in cg.nn.replace(twin).left] == ["it was replaced before"] * 8


def test_replacing_twice_says_so_and_changes_nothing() -> None:
    theirs, ours, lines = replaced(ResNet())
    again = cg.nn.replace(ours)
    assert again.swapped == ()
    told = [str(swap) for swap in again.left]
    assert told == [f"left{line.removeprefix('swapped')}: it was replaced before" for line in lines]
    same(theirs, ours, image())


def test_a_replica_of_data_parallel_runs_its_own_parameters() -> None:
    _, ours, _ = replaced(Bottleneck(4, 2))
    x = image()
    expected = ours.eval()(x)
    replica = ours._replicate_for_data_parallel()  # type: ignore[operator]
    for name, child in ours.named_children():
        replica._modules[name] = copy.deepcopy(child)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert torch.allclose(replica(x), expected)


def test_compile_traces_and_checkpoints_take_a_replaced_model() -> None:
    torch._dynamo.reset()
    theirs, ours, _ = replaced(ResNet())
    x = image()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for training in (True, False):
        theirs.train(training)
        ours.train(training)
        assert torch.allclose(compiled(x), theirs(x))
    with torch.no_grad():
        traced = torch.jit.trace(ours, (x,))
        assert torch.allclose(traced(x), theirs(x))
        assert torch.allclose(torch.fx.symbolic_trace(ours)(x), theirs(x))
    y = checkpoint(ours, x.requires_grad_(), use_reentrant=False)
    y.sum().backward()
    torch._dynamo.reset()


# -- what changes later ----------------------------------------------------------------------------


def test_what_changes_after_a_replacement_counts() -> None:
    theirs, ours, _ = replaced(Bottleneck(4, 2))
    x = image()
    for model in (theirs, ours):
        model.downsample = nn.Conv2d(4, 4, 1, dtype=F64)
        torch.manual_seed(0)
        nn.init.normal_(model.downsample.weight)
        nn.init.zeros_(model.downsample.bias)
        model.relu = nn.PReLU(dtype=F64)
        model.conv1 = nn.Sequential(copy.deepcopy(theirs.conv2), nn.Tanh())
        model.conv1[0] = nn.Conv2d(4, 2, 1, dtype=F64)
        nn.init.ones_(model.conv1[0].weight)
        nn.init.zeros_(model.conv1[0].bias)
    same(theirs, ours, x)
    theirs, ours, _ = replaced(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    for model in (theirs, ours):
        model.append(nn.Sigmoid())  # type: ignore[operator]
    same(theirs, ours, x)
    part = ours[:1]  # type: ignore[index]
    assert torch.allclose(part(x), theirs[0](x))  # type: ignore[index]


def test_a_hook_on_a_child_fires_and_a_hooked_one_is_left() -> None:
    theirs, ours, _ = replaced(Bottleneck(4, 2))
    seen: list[Tensor] = []
    ours.bn3.register_forward_hook(lambda m, given, y: seen.append(y))  # type: ignore[operator]
    x = image()
    assert torch.allclose(ours(x), theirs(x)) and len(seen) == 1
    hooked = Bottleneck(4, 2)
    hooked.bn2.register_forward_hook(lambda *given: None)
    left = cg.nn.replace(hooked).left
    assert [str(swap) for swap in left] == [
        "left conv2 (Conv2d): BatchNorm2d has hooks, which a block would not call"
    ]


# -- what a trace would get wrong ------------------------------------------------------------------


class Odd(nn.Module):
    """A convolution, with something before it that a graph cannot hold."""

    def __init__(self, before: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.before, self.count, self.child = before, 0, nn.Dropout(0.5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(self.before(self, x)))  # type: ignore[no-any-return]


def counts(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return x * self.count


def appends(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x)
    return x


def branches(self: Any, x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] > 4 else x


def without_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def draws(self: Any, x: Tensor) -> Tensor:
    return x * 2 if torch.rand(()) < 0.5 else x


def draws_in_python(self: Any, x: Tensor) -> Tensor:
    return x * 2 if random.random() < 0.5 else x


def asks_grad_mode(self: Any, x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x


def asks_child(self: Any, x: Tensor) -> Tensor:
    return x * 2 if self.child.training else x


def asks_type(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    return y if isinstance(y, Tensor) else x


def makes(self: Any, x: Tensor) -> Tensor:
    return x + torch.ones(1, dtype=F64)


def prints(self: Any, x: Tensor) -> Tensor:
    print("called")
    return x


def loops(self: Any, x: Tensor) -> Tensor:
    return torch.stack([each * 2 for each in x])


@torch.no_grad()
def decorated(self: Any, x: Tensor) -> Tensor:
    return x * 2


ODD = {
    counts: "sets Odd.count",
    appends: "changes a list or dict of the module",
    branches: "branches on a tensor's values, shape or dtype (test_replace.py:",
    without_grad: "has a with or try statement (test_replace.py:",
    draws: "draws random numbers outside of its tensors",
    draws_in_python: "draws Python's random numbers",
    asks_grad_mode: "calls torch.is_grad_enabled (test_replace.py:",
    asks_child: "asks whether a child trains (test_replace.py:",
    asks_type: "asks for the type of an intermediate result (test_replace.py:",
    makes: "makes a tensor of constants (",
    prints: "prints (test_replace.py:",
    loops: "loops over a tensor (test_replace.py:",
    decorated: "changes the grad mode, autocast or what attention may use (",
}


@pytest.mark.parametrize("before", ODD, ids=lambda f: f.__name__)
def test_a_forward_that_no_graph_can_hold_is_left_as_it_is(
    before: Callable[[Any, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    theirs = Odd(before).double()
    ours = copy.deepcopy(theirs)
    state = torch.get_rng_state(), random.getstate()
    (left,) = cg.nn.replace(ours).left
    assert left.names == ("conv",) and left.reason.startswith(f"Odd's forward {ODD[before]}")
    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()
    assert type(ours) is Odd and ours.count == 0 and ours.seen == [] and ours.training
    x = image()
    for model in (theirs, ours):
        random.seed(3)
        torch.manual_seed(3)
        model.result = model(x)
    assert torch.equal(theirs.result, ours.result)  # type: ignore[arg-type]


class Moved(nn.Module):
    """The convolution's input changes in place between it and the activation."""

    def __init__(self, change: nn.Module | None) -> None:
        super().__init__()
        self.conv, self.change = nn.Conv2d(4, 4, 1), change

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = x.detach()
        if self.change is None:
            z.mul_(3)
        else:
            self.change(z)
        return F.relu(y + z)


@pytest.mark.parametrize("change", [None, nn.ReLU(inplace=True), nn.Sequential(nn.ReLU(True))])
def test_a_convolution_is_not_moved_behind_a_change_of_its_input(change: nn.Module | None) -> None:
    theirs, ours, lines = replaced(Moved(change))
    assert lines == ["swapped conv (Conv2d)"]
    x = image()
    with torch.no_grad():
        assert torch.allclose(theirs(x.clone()), ours(x.clone()))


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return F.relu(self.conv(x) + z)


def test_an_addition_that_broadcasts_or_promotes_is_torchs() -> None:
    theirs, ours, lines = replaced(Broadcast())
    assert lines == ["swapped conv (Conv2d → residual → ReLU)"]
    for shape in ((3, 4, 8, 8), (4, 1, 1), (1, 4, 8, 8), (2, 3, 4, 8, 8)):
        same(theirs, ours, image(), torch.randn(shape, dtype=F64))
    x, z = image().float(), image()
    assert ours.float()(x, z).dtype == theirs.float()(x, z).dtype == F64


def test_modules_that_are_no_plain_convolutions_are_left_with_the_reason() -> None:
    class Same(nn.Conv2d):
        pass

    model = nn.ModuleDict(
        {
            "subclass": nn.Sequential(Same(4, 4, 1)),
            "normed": nn.Sequential(parametrizations.weight_norm(nn.Conv2d(4, 4, 1))),
            # Traced: torch.jit.script knows builtins by their ids, and took a list for one once.
            "scripted": torch.jit.trace(nn.Sequential(nn.Conv2d(4, 4, 1)), torch.ones(1, 4, 2, 2)),
            "block": cg.FusedConvBlock(4, 4, 1),
            "unused": nn.ModuleList([nn.Conv2d(4, 4, 1)]),
        }
    )
    assert [str(swap) for swap in cg.nn.replace(model).left] == [
        "left subclass.0 (Same): Same is no convolution of torch",
        "left normed.0 (ParametrizedConv2d): ParametrizedConv2d is no convolution of torch",
        "left scripted.0 (Conv2d): Sequential's forward is TorchScript",
        "left block.0 (Conv2d): it stands in FusedConvBlock, which is fused already",
        "left unused.0 (Conv2d): no forward calls it as a module",
    ]


def test_a_garbage_collection_while_a_forward_is_traced_is_no_part_of_it() -> None:
    def collected(phase: str, info: dict[str, int]) -> None:
        with contextlib.suppress(KeyError):
            info["nothing"]

    kept = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        report = cg.nn.replace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    finally:
        gc.set_threshold(*kept)
        gc.callbacks.remove(collected)
    assert [str(swap) for swap in report.swapped] == [
        "swapped 0, 1, 2 (Conv2d → BatchNorm2d → ReLU)"
    ]
    assert gc.isenabled() and not report.left


def test_a_forward_that_makes_tensors_of_a_size_it_is_given_is_traced() -> None:
    """The size is traced as what may be a tensor, which torch's C functions must not believe."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(2, 4, 1)

        def forward(self, size: tuple[int, ...]) -> Tensor:
            ones = torch.ones(size).to(self.project.weight.dtype)
            return self.project(torch.stack([ones.cumsum(1), ones.cumsum(2)], 1))

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.places = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), Places()

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.conv(x))
            return y + self.places((x.shape[0], x.shape[2], x.shape[3]))

    real = torch.ones
    theirs, ours, lines = replaced(Placed())
    assert torch.ones is real
    assert lines[0] == "swapped conv, act (Conv2d → ReLU)"
    same(theirs, ours, image())
