"""Convolutions by constant weights that are imported for a GPU as products or dense ones, and the
scales and shifts behind them that their weights take in."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.device import rules as thresholds
from cudnngraph.errors import WrongResult
from cudnngraph.models import bound as bindings
from cudnngraph.models import export
from cudnngraph.models.check import Wanted
from cudnngraph.models.convert import Imported, convert
from cudnngraph.models.rules.conv_forms import (
    blocks_read,
    dense_weight,
    groups_together,
    weight_of_blocks,
)
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics
from tests.converted import ops

Tensor = torch.Tensor
CPU = torch.device("cpu")
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


class Convolved(nn.Module):
    """A convolution, and what is done with its result."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, behind: Callable[..., Tensor], **options: Any
    ) -> None:
        super().__init__()
        self.w, self.options, self.behind = nn.Parameter(weight), options, behind
        self.b = None if bias is None else nn.Parameter(bias)
        channels, rank = weight.shape[0], weight.dim() - 2
        form = (1, channels, *(1,) * rank)
        self.register_buffer("factor", torch.rand(channels) + 0.5)
        self.register_buffer("variance", torch.rand(form) + 0.5)
        self.register_buffer("shift", torch.randn(form))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) → (N, K, ...)."""
        y: Tensor = CONV[self.w.dim() - 2](x, self.w, self.b, **self.options)
        return self.behind(self, y)


def nothing(m: Any, y: Tensor) -> Tensor:
    return y


def relu(m: Any, y: Tensor) -> Tensor:
    return y.relu()


def frozen(m: Any, y: Tensor) -> Tensor:
    """As the frozen batch norms of detectors are written, with statistics in float32."""
    scale = m.factor.float().reshape(m.shift.shape) * (m.variance.float() + 1e-5).rsqrt()
    shift = m.shift.float() - m.variance.float() * scale
    return (y * scale.to(y.dtype) + shift.to(y.dtype)).relu()


def halved(m: Any, y: Tensor) -> Tensor:
    return (0.5 * y).relu()


def shifted(m: Any, y: Tensor) -> Tensor:
    return m.shift + y


def scaled_twice_read(m: Any, y: Tensor) -> Tensor:
    return y * m.variance + y


def by_columns(m: Any, y: Tensor) -> Tensor:
    return y * torch.linspace(0.5, 1.5, y.shape[-1], dtype=y.dtype)


BEHIND = (nothing, relu, frozen, halved, shifted, scaled_twice_read, by_columns)


def imported(model: nn.Module, x: Tensor, **options: Any) -> Imported:
    """A model as it is imported for a GPU."""
    made = export.export(model, (x,))
    given = {"channels_last": x.dim() > 3, "on_gpu": True, "kernels": True, **options}
    found = convert(made.module, made.constants, made.placeholders, **given)
    assert found.spec is not None
    return found


def checked(model: nn.Module, x: Tensor, terms: int, **options: Any) -> Imported:
    """The same, its results compared with the model in float64."""
    found = imported(model, x, **options)
    assert found.spec is not None
    bound = bindings.Bound(found, compile_spec(found.spec, "cpu"), CPU)
    (result,) = bound.run([x])
    with torch.no_grad():
        want = model.double()(x.double())
    numerics.check(result, want, x.dtype, terms=terms)
    return found


def drawn(number: random.Random) -> tuple[Convolved, Tensor, int]:
    """A convolution of any kind with something behind it, its input, and the terms of its sums."""
    rank = number.choice((1, 2, 2, 2, 3))
    groups = number.choice((1, 1, 2, 3, 4, 6))
    channels, results = (groups * number.choice((1, 2, 3, 4, 5, 8)) for _ in range(2))
    window = [number.choice((1, 2, 3)) for _ in range(rank)]
    if number.random() < 0.3:
        window = [1] * rank
    whole = number.random() < 0.3
    sides = list(window) if whole else [number.randint(5, 8) for _ in range(rank)]
    options: dict[str, Any] = {"groups": groups}
    if not whole or number.random() < 0.3:
        options["padding"] = [number.randint(0, 1) for _ in range(rank)]
        options["stride"] = [number.randint(1, 2) for _ in range(rank)]
    terms = channels // groups * torch.Size(window).numel()
    torch.manual_seed(number.randrange(1 << 30))
    dtype = number.choice((torch.float16, torch.bfloat16))
    weight = torch.randn(results, channels // groups, *window) / terms**0.5
    bias = torch.randn(results) if number.random() < 0.7 else None
    x = torch.randn(number.randint(1, 3), channels, *sides).to(dtype)
    if rank in LAST and number.random() < 0.8:
        x = x.contiguous(memory_format=LAST[rank])
    return Convolved(weight, bias, number.choice(BEHIND), **options).to(dtype).eval(), x, terms


@pytest.mark.parametrize("seed", range(60))
def test_convolutions_of_any_kind_are_right(seed: int) -> None:
    model, x, terms = drawn(random.Random(seed))
    limit = random.Random(seed).choice((0, 4, 8, 512))
    with thresholds.changed(grouped_as_dense_max_channels=limit):
        checked(model, x, terms + 2)


@pytest.mark.parametrize("last", [False, True])
def test_a_window_as_large_as_the_image_makes_a_product(last: bool) -> None:
    w, x = torch.randn(10, 6, 3, 4) / 8, torch.randn(2, 6, 3, 4)
    model = Convolved(w, torch.randn(10), relu).half().eval()
    x = x.half().contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    spec = checked(model, x, 72, channels_last=last).spec
    assert spec is not None and "conv" not in ops(spec) and ops(spec).count("matmul") == 1
    model = Convolved(w, None, relu, padding=1).half().eval()
    assert ops(imported(model, x).spec).count("conv") == 1, "the window is not the whole image"
    assert "conv" in ops(imported(Convolved(w, None, relu).eval(), x.float()).spec), "16 bits alone"


def test_groups_that_cudnn_has_no_engine_for_become_dense() -> None:
    """By the widths of published models: RegNetY, ResNeXt, NFNet, EfficientViT, wav2vec 2.0."""
    found = {
        form: groups_together(*form)
        for form in (
            *((3, 24, 24, 9), (9, 24, 24, 9), (24, 24, 24, 9), (63, 24, 24, 9), (4, 112, 112, 9)),
            *((32, 4, 4, 9), (32, 32, 32, 9), (6, 128, 128, 9)),
            *((24, 32, 32, 1), (48, 32, 32, 1), (16, 48, 48, 128)),
            *((64, 1, 1, 9), (64, 1, 2, 9), (2, 336, 336, 9)),
        )
    }
    assert list(found.values()) == [3, 9, 12, 21, 4, *[None] * 3, 12, 16, 8, *[None] * 3]


def test_dense_convolutions_of_several_groups_write_one_result() -> None:
    w, x = torch.randn(18, 3, 3, 3) / 5, torch.randn(2, 18, 7, 7)
    model = Convolved(w, torch.randn(18), relu, groups=6, padding=1).half().eval()
    x = x.half().contiguous(memory_format=torch.channels_last)
    for limit, count in ((9, 2), (18, 1), (5, 1), (0, 1)):
        with thresholds.changed(grouped_as_dense_max_channels=limit):
            spec = imported(model, x).spec
        assert spec is not None
        convs = [node for node in spec.nodes if node.op == "conv"]
        assert len(convs) == count and ops(spec).count("concat") == (count > 1)
        assert {node.attr("groups") for node in convs} == {1 if limit > 5 else 6}
    assert not any(node.attr("groups") == 1 for node in _convs(imported(model.float(), x.float())))


def _convs(found: Imported) -> list[Any]:
    assert found.spec is not None
    return [node for node in found.spec.nodes if node.op == "conv"]


def test_sequences_have_their_channels_side_by_side() -> None:
    class Heard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm = nn.Conv1d(1, 8, 5, stride=2), nn.GroupNorm(8, 8)
            self.second, self.third = nn.Conv1d(8, 6, 3, padding=1), nn.Conv1d(6, 6, 3, groups=2)
            self.deep = nn.Conv1d(6, 6, 3, groups=6)

        def forward(self, x: Tensor) -> Tensor:
            """(N, 1, L) → (N, 6, ...)."""
            y = F.gelu(self.norm(self.first(x)))
            return self.deep(self.third(F.gelu(self.second(y))))  # type: ignore[no-any-return]

    model, x = Heard().half().eval(), torch.randn(2, 1, 41).half()
    found = checked(model, x, 64)
    assert found.spec is not None and found.opaque == ()
    tensors = found.spec.tensors
    for node in _convs(found):
        if node.attr("groups") < 6:
            channels = tensors[node.operands[0]].shape[1]
            assert channels == 1 or tensors[node.operands[0]].stride[1:] == (1, channels)
            assert channels == 1 or tensors[node.operands[1]].stride[1] == 1
    (result,) = found.spec.outputs
    assert tensors[result].stride == (
        tensors[result].shape[1] * tensors[result].shape[2],
        tensors[result].shape[2],
        1,
    ), "as torch's"


@pytest.mark.parametrize("padding", [0, 3, "same"])
def test_a_depthwise_convolution_of_sequences_is_one_of_images(padding: Any) -> None:
    w, x = torch.randn(12, 1, 4) / 2, torch.randn(2, 12, 17).half()
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        model = Convolved(w, torch.randn(12), relu, groups=12, padding=padding).half().eval()
        (node,) = _convs(checked(model, given, 6))
        assert node.attr("groups") == 12 and len(node.attr("stride")) == 2
        (node,) = _convs(imported(model.half(), given, kernels=False))
        assert len(node.attr("stride")) == 1


def test_a_dense_weight_has_zeros_beside_its_groups() -> None:
    w = torch.randn(8, 3, 2, 2)
    whole = dense_weight(w, 4, 2)
    assert whole.shape == (8, 6, 2, 2)
    x = torch.randn(1, 12, 5, 5)
    parts = [F.conv2d(x[:, 6 * n : 6 * n + 6], whole[4 * n : 4 * n + 4]) for n in range(2)]
    torch.testing.assert_close(torch.cat(parts, 1), F.conv2d(x, w, groups=4))


# -- scales and shifts -----------------------------------------------------------------------------


@pytest.mark.parametrize("behind", BEHIND, ids=lambda behind: behind.__name__)
def test_a_scale_and_a_shift_of_channels_go_into_the_weight(behind: Any) -> None:
    w, x = torch.randn(6, 4, 3, 3) / 6, torch.randn(2, 4, 8, 8)
    model = Convolved(w, torch.randn(6), behind).half().eval()
    found = checked(model, x.half(), 38)
    behind_conv = [op for op in ops(found.spec) if op not in ("conv", "bias", "relu")]
    folded = {frozen: 1, halved: 1, shifted: 1}.get(behind, 0)
    assert found.folded == folded and (behind_conv == [] or not folded)


def test_constants_that_come_later_in_the_graph_are_known() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3)
            self.register_buffer("scale", torch.rand(6))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            made = self.conv(x)
            return made * (self.scale.sqrt() + 1.0).view(1, 6, 1, 1) + y.mean()

    model = Later().half().eval()
    made = export.export(model, (torch.randn(1, 4, 6, 6).half(), torch.randn(3).half()))
    found = convert(made.module, made.constants, made.placeholders, channels_last=True)
    assert found.folded == 1 and "mul" not in ops(found.spec), "the sum is with no constant"


# -- weights that cannot take a norm in ------------------------------------------------------------


class Deep(nn.Module):
    """Convolutions with norms, whose scales are no powers of two."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(depth):
            norm = nn.BatchNorm2d(8)
            norm.weight.data = torch.rand(8) + 0.6
            layers += [nn.Conv2d(8, 8, 1, bias=False), norm, nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8, H, W) → the same."""
        y: Tensor = self.layers(x)
        return y


def test_norms_stay_apart_if_weights_that_take_them_in_put_results_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Deep(3).half().eval(), torch.randn(2, 8, 6, 6).half()
    fused = cg.fuse(model, (x,))
    assert fused.report is not None and fused.report.folded == 3
    genuine, calls = Wanted.check, []

    def strict(self: Wanted, executable: Any, results: Any, **how: Any) -> Any:
        calls.append(executable)
        if len(calls) == 1:
            raise WrongResult("result 0 is off by 0.0034, at most 0.002 is right")
        return genuine(self, executable, results, **how)

    monkeypatch.setattr(Wanted, "check", strict)
    with caplog.at_level("INFO", logger="cudnngraph"):
        fused = cg.fuse(model, (x,))
    assert fused.report is not None and fused.report.folded == 0 and fused.report.errors
    assert "norms are not folded into weights, since then result 0 is off by 0.0034" in caplog.text
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
    numerics.check(fused(x), want, torch.float16, terms=64)
    monkeypatch.undo()
    again = fused(torch.randn(1, 8, 6, 6).half())
    assert again.shape == (1, 8, 6, 6), "a further form is made the same way"


def test_a_model_that_is_wrong_without_folded_norms_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(self: Wanted, executable: Any, results: Any, **how: Any) -> Any:
        raise WrongResult("result 0 is off")

    monkeypatch.setattr(Wanted, "check", never)
    x = torch.randn(2, 8, 6, 6)
    for model in (Deep(1).eval(), nn.Conv2d(8, 8, 1).eval()):
        with pytest.raises(WrongResult, match="result 0 is off"):
            cg.fuse(model, (x,))


@pytest.mark.parametrize("seed", range(24))
def test_long_windows_over_sequences_are_products(seed: int) -> None:
    number = random.Random(seed)
    groups, window = number.choice((1, 2, 3, 4)), number.choice((33, 40, 64, 128))
    many, results = number.choice((2, 3, 8)), number.choice((1, 4, 6))
    padding = number.choice(("same", "valid", 0, window // 2, window + 3))
    length = window + number.choice((0, 1, 7, 50))
    torch.manual_seed(seed)
    dtype, terms = number.choice((torch.float16, torch.bfloat16)), many * window
    weight = torch.randn(groups * results, many, window) / terms**0.5
    bias = torch.randn(groups * results) if number.random() < 0.7 else None
    model = Convolved(weight, bias, relu, groups=groups, padding=padding).to(dtype).eval()
    x = torch.randn(number.randint(1, 3), groups * many, length).to(dtype)
    spec = checked(model, x, terms + 2).spec
    assert ops(spec).count("matmul") == 1 and "conv" not in ops(spec)


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}])
def test_long_windows_of_steps_apart_stay_convolutions(options: dict[str, int]) -> None:
    model = Convolved(torch.randn(6, 6, 40) / 16, None, relu, **options).half().eval()
    assert "conv" in ops(imported(model, torch.randn(2, 6, 100).half()).spec)


@pytest.mark.parametrize(("groups", "block"), [(1, 1), (2, 3), (3, 8)])
def test_weights_of_blocks_are_those_of_each_step(groups: int, block: int) -> None:
    weight = torch.randn(groups * 2, 5, 7, dtype=torch.float64)
    x = torch.randn(1, groups * 5, blocks_read(block, 7) * block, dtype=torch.float64)
    want = F.conv1d(x, weight, groups=groups)[0, :, :block]
    rows = x.reshape(groups, 5, -1).transpose(1, 2).reshape(groups, 1, -1)
    found = (rows @ weight_of_blocks(weight, groups, block)).reshape(groups, block, 2)
    torch.testing.assert_close(found.permute(0, 2, 1).reshape(groups * 2, block), want)
