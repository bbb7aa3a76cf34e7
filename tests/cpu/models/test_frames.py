"""Zeros that a model sets around an image are the padding of the convolutions that read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.ir.spec import is_channels_last
from cudnngraph.models import export
from cudnngraph.models.bound import Bound
from cudnngraph.models.convert import Imported, convert
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics
from tests.converted import check, ops

CPU = torch.device("cpu")


class Same(nn.Module):
    """Convolutions behind padding as TensorFlow's "same" has it, and what else reads the result."""

    def __init__(
        self,
        pads: tuple[int, ...] = (0, 1, 0, 1),
        kernel: int = 3,
        *,
        channels: int = 8,
        readers: int = 1,
        mode: str = "constant",
        value: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.pads, self.mode, self.value = pads, mode, value
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, 8, kernel, stride=2, **options) for _ in range(readers)
        )

    def forward(self, x: torch.Tensor) -> Any:
        padded = F.pad(x, self.pads, self.mode, self.value)
        return tuple(conv(padded) for conv in self.convs)


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def paddings(imported: Imported) -> list[Any]:
    assert imported.spec is not None
    return [node.attr("padding") for node in imported.spec.nodes if node.op == "conv"]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("pads", "kernel", "options", "wanted"),
    [
        ((0, 1, 0, 1), 3, {}, ((0, 1), (0, 1))),
        ((1, 2, 0, 1), 5, {}, ((0, 1), (1, 2))),
        ((0, 1), 3, {}, ((0, 0), (0, 1))),
        ((0, 1, 2, 0), 3, {"padding": (1, 2)}, ((3, 1), (2, 3))),
        ((2, 4, 4, 0), 3, {"dilation": 2}, ((4, 0), (2, 4))),
        ((0, 1, 0, 1), 3, {"groups": 8}, ((0, 1), (0, 1))),
    ],
)
def test_zeros_around_an_image_are_the_padding_of_its_convolution(
    pads: Any, kernel: int, options: Any, wanted: Any, channels_last: bool
) -> None:
    torch.manual_seed(0)
    model = Same(pads, kernel, **options)
    imported = check(model, image(2, 8, 10, 12), terms=200, channels_last=channels_last)
    assert paddings(imported) == [wanted]
    assert set(ops(imported.spec)) == {"conv", "bias"}


def test_all_convolutions_of_one_padded_image_pad_it_themselves() -> None:
    torch.manual_seed(0)
    imported = check(Same(readers=2), image(2, 8, 10, 12), terms=72)
    assert paddings(imported) == [((0, 1), (0, 1))] * 2
    assert set(ops(imported.spec)) == {"conv", "bias"}


@pytest.mark.parametrize("rank", [1, 3])
def test_signals_and_volumes_too(rank: int) -> None:
    torch.manual_seed(0)

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](4, 6, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.conv(F.pad(x, (2, 0) * rank))

    imported = check(Causal(), torch.randn(2, 4, *(7, 8, 6)[:rank]), terms=4 * 3**rank)
    assert paddings(imported) == [((2, 0),) * rank]


class Seen(Same):
    """The padded image is a result too."""

    def forward(self, x: torch.Tensor) -> Any:
        padded = F.pad(x, self.pads)
        return padded, self.convs[0](padded)


class Norm(Same):
    """Something else reads the padded image."""

    def forward(self, x: torch.Tensor) -> Any:
        padded = F.pad(x, self.pads)
        return self.convs[0](padded) + F.max_pool2d(padded, 3, 2)


class OfWeights(Same):
    """The padded tensor is the weight."""

    def forward(self, x: torch.Tensor) -> Any:
        return F.conv2d(x, F.pad(self.convs[0].weight + x[:1, :1, :1, :1], (0, 1, 0, 1)))


@pytest.mark.parametrize(
    "model",
    [
        Seen(),
        Norm(),
        OfWeights(),
        Same(value=1.0),
        Same(mode="reflect", pads=(1, 1, 1, 1)),
        Same(pads=(0, 4, 0, 1)),  # windows that read nothing but zeros
        Same(pads=(0, 1, 0, 1, 0, 1), channels=9),  # channels too
        Same(pads=(-1, 1, 0, 1)),
        Same(pads=()),
    ],
    ids=lambda model: type(model).__name__,
)
def test_other_padding_is_a_step_of_its_own(model: Same) -> None:
    torch.manual_seed(0)
    imported = check(model, image(2, 8, 10, 12), terms=128)
    assert paddings(imported) == [((0, 0), (0, 0))]


def on_gpu(model: nn.Module, x: torch.Tensor) -> Imported:
    """A model as it is imported for a GPU."""
    made = export.export(model.half().eval(), (x,))
    options = {"channels_last": True, "on_gpu": True, "kernels": True}
    return convert(made.module, made.constants, made.placeholders, **options)


@pytest.mark.parametrize("readers", [1, 2])
def test_a_framed_image_of_three_channels_gets_a_fourth(readers: int) -> None:
    torch.manual_seed(0)
    model, x = Same(channels=3, readers=readers), image(2, 3, 10, 12).half()
    imported = on_gpu(model, x)
    ((name, _),) = imported.packed.items()
    assert imported.spec is not None and imported.spec.tensors[name].shape == (2, 4, 10, 12)
    assert set(ops(imported.spec)) == {"conv", "bias"}
    results = Bound(imported, compile_spec(imported.spec, "cpu"), CPU).run([x])
    with torch.no_grad():
        want = model.double()(x.double())
    for result, exact in zip(results, want, strict=True):
        numerics.check(result, exact, torch.float16, terms=64)


def test_patches_of_a_framed_image_are_no_channels() -> None:
    torch.manual_seed(0)
    model = Same((0, 1, 0, 1), 2, channels=3)
    imported = on_gpu(model, image(2, 3, 9, 11).half())
    (packed,) = imported.packed.values()
    assert packed.columns == 1


@pytest.mark.parametrize("pads", [(0, 1, 0, 1), (2, 1, 0, 3)])
def test_zeros_that_are_copied_lie_as_the_image(pads: Any) -> None:
    """A pooling reads them, so they are a concatenation: of channels last."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> Any:
            return F.avg_pool2d(F.pad(self.conv(x), pads), 2)

    imported = on_gpu(Pooled(), image(2, 8, 10, 12).half())
    assert imported.spec is not None
    joined = [node for node in imported.spec.nodes if node.op == "concat"]
    assert len(joined) == 2
    for node in imported.spec.nodes:
        if node.op in ("concat", "expand", "avg_pool"):
            form = imported.spec.tensors[node.results[0]]
            assert is_channels_last(form.shape, form.stride), node
