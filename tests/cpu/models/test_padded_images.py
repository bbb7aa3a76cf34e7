"""Images that fuse() pads with a channel, or reads by windows side by side, for convolutions."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.models import bound as bindings
from cudnngraph.models import export
from cudnngraph.models.convert import PaddedImage, convert
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics
from tests.fused import net
from tests.models import Of, image

fusing: Any = importlib.import_module("cudnngraph.models.fused")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


def padded(model: nn.Module, x: torch.Tensor) -> tuple[Any, Any]:
    """A model as it is imported for a GPU, and bound here."""
    made = export.export(model, (x,))
    imported = convert(
        made.module, made.constants, made.placeholders, channels_last=True, on_gpu=True
    )
    assert imported.spec is not None
    return imported, bindings.Bound(imported, compile_spec(imported.spec, "cpu"), CPU)


def test_an_image_of_three_channels_gets_a_fourth_for_convolutions() -> None:
    model, x = net().half(), image(2, 3, 32, 32).half()
    imported, bound = padded(model, x)
    ((name, packed),) = imported.packed.items()
    assert packed == PaddedImage(3) and imported.spec.tensors[name].shape == (2, 4, 32, 32)
    with torch.no_grad():
        want = model.double()(x.double())
    for _ in range(2):
        (result,) = bound.run([x])
        numerics.check(result, want, torch.float16, terms=64)
    assert bound.inputs[0].shape == x.shape
    assert float(bound.tensors[name][:, 3:].abs().max()) == 0.0


@pytest.mark.parametrize(
    ("kernel", "options", "columns"),
    [
        ((4, 4), {"stride": 4}, 4),
        ((4, 3), {"stride": (2, 3), "padding": (1, 0)}, 3),  # rows overlap and have padding
        ((3, 2), {"stride": 2, "dilation": (2, 1)}, 2),
        ((4, 4), {"stride": (4, 2)}, 1),  # windows overlap
        ((2, 2), {"stride": (2, 4)}, 1),  # there are columns between them
        ((2, 2), {"stride": 2, "padding": 1}, 1),
        ((2, 2), {"stride": 2, "dilation": 2}, 1),
        ((5, 5), {"stride": 5}, 1),  # 24 columns are no whole windows
    ],
)
def test_columns_of_windows_that_stand_side_by_side_are_read_as_channels(
    kernel: tuple[int, int], options: dict[str, Any], columns: int
) -> None:
    w, b = image(8, 3, *kernel).half(), image(8).half()
    model, x = Of(lambda m, x: F.conv2d(x, m.w, m.b, **options).relu(), w=w, b=b).eval(), None
    x = image(2, 3, 20, 24).half()
    imported, bound = padded(model, x)
    ((name, packed),) = imported.packed.items()
    assert packed == PaddedImage(3, columns)
    assert imported.spec.tensors[name].shape == (2, 4 * columns, 20, 24 // columns)
    want = F.conv2d(x.double(), w.double(), b.double(), **options).relu()
    for _ in range(2):
        (result,) = bound.run([x])
        numerics.check(result, want, torch.float16, terms=3 * kernel[0] * kernel[1])
    assert bound.inputs[0].shape == x.shape
    assert torch.equal(bound.inputs[0], x)


def test_two_convolutions_with_other_windows_keep_columns_apart() -> None:
    def forward(m: Any, x: Any) -> Any:
        return F.conv2d(x, m.w, stride=4), F.conv2d(x, m.v, stride=2)

    model = Of(forward, w=image(8, 3, 4, 4).half(), v=image(8, 3, 2, 2).half()).eval()
    imported, _ = padded(model, image(2, 3, 8, 8).half())
    assert set(imported.packed.values()) == {PaddedImage(3)}


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: F.conv2d(x, m.w[:, :1].expand(6, 1, 3, 3), groups=3),
        lambda m, x: F.conv2d(x, m.w) + x[:, :1, 1:-1, 1:-1],
        lambda m, x: F.conv2d(x, m.w * x.sum()),
        lambda m, x: F.conv2d(x.float(), m.w.float()),
    ],
)
def test_other_images_keep_their_channels(forward: Any) -> None:
    model = Of(forward, w=image(6, 3, 3, 3).half()).eval()
    imported, _ = padded(model, image(2, 3, 8, 8).half())
    assert not imported.packed
    wide = Of(lambda m, x: F.conv2d(x, m.w), w=image(6, 3, 3, 3)).eval()
    assert not padded(wide, image(2, 3, 8, 8))[0].packed
