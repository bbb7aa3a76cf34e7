"""Resizing within graphs of torch.compile: one op forward, one backward, and torch's gradients."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint

import cudnngraph as cg
from cudnngraph.models import dynamo
from tests import numerics
from tests.fused import compiled
from tests.models import image
from tests.training import alike, left_to_torch, trained

GENERATES = cg.Policy(kernels=True)


@pytest.fixture(autouse=True)
def _new_compiler(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    with caplog.at_level(logging.WARNING, "cudnngraph"):
        yield


def ops() -> list[str]:
    """The ops of all graphs of this test that resize, forward ones first."""
    found = [
        node.op
        for each in cg.reports()
        if each.executable is not None
        for node in each.executable.spec.nodes
    ]
    return sorted(op for op in found if op.startswith("interpolate"))


BOTH = ["interpolate", "interpolate_backward"]
LINEAR = ("linear", "bilinear", "trilinear", "bicubic")
FORMS: dict[int, tuple[tuple[int, ...], dict[str, dict[str, Any]]]] = {
    1: (
        (2, 3, 9),
        {
            "larger": {"size": 13},
            "twice": {"scale_factor": 2},
            "by 1.7": {"scale_factor": 1.7},
            "smaller": {"scale_factor": 0.6},
        },
    ),
    2: (
        (2, 5, 9, 7),
        {
            "larger": {"size": (13, 11)},
            "twice": {"scale_factor": 2.0},
            "by 1.7": {"scale_factor": 1.7},
            "by two scales": {"scale_factor": (2.3, 1.5)},
            "by sizes of scales": {"scale_factor": 1.7, "recompute_scale_factor": True},
            "smaller": {"size": (4, 5)},
        },
    ),
    3: (
        (2, 3, 4, 5, 3),
        {"larger": {"size": (5, 7, 6)}, "by 1.7": {"scale_factor": 1.7}},
    ),
}
MODES = {
    1: ("nearest", "nearest-exact", "linear"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic"),
    3: ("nearest", "nearest-exact", "trilinear"),
}
CASES = {
    f"{mode}, {rank} dims, {form}{', corners' if corners else ''}": (
        shape,
        {"mode": mode, **given, **({"align_corners": True} if corners else {})},
    )
    for rank, (shape, forms) in FORMS.items()
    for mode in MODES[rank]
    for form, given in forms.items()
    for corners in ((False, True) if mode in LINEAR else (False,))
}


def exactly(name: str, x: torch.Tensor) -> torch.Tensor:
    """Cubic weights of torch's in float32 are off by more than a sum of that length may be."""
    return x.double() if "bicubic" in name else x


def _laid_out(x: torch.Tensor, last: bool) -> torch.Tensor:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
    return x.to(memory_format=form if last else torch.contiguous_format)


@pytest.mark.parametrize("name", CASES)
def test_an_image_is_resized_by_one_op_and_so_is_its_gradient(name: str) -> None:
    shape, options = CASES[name]
    x = exactly(name, image(*shape))
    assert alike(lambda x: F.interpolate(x.tanh(), **options), x, policy=GENERATES) == []
    assert ops() == BOTH


IMAGES = [name for name in CASES if " 2 dims, " in name and "by 1.7" in name]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("name", IMAGES)
def test_resized_images_lie_as_torchs_do(name: str, last: bool) -> None:
    _, options = CASES[name]
    x = _laid_out(exactly(name, image(2, 16, 6, 5)), last)

    def resized(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x * 2, **options)

    assert alike(resized, x, policy=GENERATES) == []
    assert ops() == BOTH
    x = x.requires_grad_()
    made, own = compiled(resized, policy=GENERATES)(x), resized(x)
    assert made.stride() == own.stride()
    grads = [torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in (made, own)]
    assert grads[0].stride() == grads[1].stride()


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_16_bits_are_resized_in_16_bits(name: str) -> None:
    _, options = CASES[name]
    x = image(2, 4, 6, 5).bfloat16()
    assert alike(lambda x: F.interpolate(x, **options), x, dtype=torch.bfloat16) == []
    assert ops() == BOTH


class Pyramid(nn.Module):
    """Convolutions at three sizes, added up at the largest, as segmentation has them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)])
        self.whole = nn.Conv2d(8, 8, 1)
        self.up = nn.Upsample(scale_factor=1.5, mode="bicubic")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.convs[0](x)
        coarse = self.convs[1](F.relu(fine))
        whole = self.whole(F.adaptive_avg_pool2d(coarse, 1))
        whole = F.interpolate(whole, size=coarse.shape[2:], mode="bilinear", align_corners=False)
        coarse = F.interpolate(coarse + whole, size=fine.shape[2:], mode="bilinear")
        return self.up(F.interpolate(fine + coarse, scale_factor=2))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_autocast_trains_a_pyramid_without_a_gather(last: bool) -> None:
    torch.manual_seed(0)
    model, x = Pyramid(), _laid_out(image(2, 3, 10, 8), last)
    names, weights = zip(*model.named_parameters(), strict=True)

    def run(cast: bool) -> Any:
        def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            given = dict(zip(names, weights, strict=True))
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                made: torch.Tensor = torch.func.functional_call(model, given, (x,))
            return made

        return call

    data = [x, *(each.detach() for each in weights)]
    found = trained(compiled(run(True), policy=GENERATES), *data)
    own = trained(run(True), *data)
    exact = trained(run(False), *(each.double() for each in data))
    for mine, theirs, wide in zip(found, own, exact, strict=True):
        assert mine.dtype == theirs.dtype
        allowed = numerics.TORCH_FACTOR * numerics.relative_error(theirs, wide)
        error = numerics.relative_error(mine, wide)
        assert error <= max(allowed, numerics.ROUNDOFF[torch.bfloat16])
    assert not [op for op in left_to_torch() if "index" in op]
    assert ops() == ["interpolate"] * 3 + ["interpolate_backward"] * 3  # one is of one pixel


def test_a_pixel_that_is_spread_out_has_the_sum_of_the_gradients() -> None:
    x = image(2, 5, 1, 1)

    def spread(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.tanh(), (6, 7), mode="bilinear")

    assert alike(spread, x, policy=GENERATES) == []
    assert ops() == []


def test_area_and_antialias_are_what_they_were() -> None:
    x = image(2, 3, 9, 7)
    assert alike(lambda x: F.interpolate(x, (4, 3), mode="area"), x) == []
    torch._dynamo.reset()
    gc.collect()
    alike(lambda x: F.interpolate(x, (4, 3), mode="bilinear", antialias=True), x)
    assert [op for op in left_to_torch() if "_aa" in op] == [
        "aten._upsample_bilinear2d_aa.default",
        "aten._upsample_bilinear2d_aa_backward.default",
    ]


def _many(x: torch.Tensor) -> torch.Tensor:
    y = F.interpolate(x.tanh(), scale_factor=1.7, mode="bilinear")
    return y + F.interpolate(F.interpolate(x, (5, 5)), list(y.shape[2:]), mode="bicubic")


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_images_of_several_sizes_are_resized_by_one_op_each(dynamic: bool | None) -> None:
    run = torch.compile(_many, backend=dynamo.backend, dynamic=dynamic)
    for shape in ((2, 3, 5, 6), (2, 3, 7, 9), (3, 3, 8, 8)):
        x = image(*shape).double()
        for made, own in zip(trained(run, x), trained(_many, x), strict=True):
            numerics.check(made, own, torch.float64)
    assert left_to_torch() == []


def test_inference_resizes_by_one_op_too() -> None:
    model, x = Pyramid().double().eval(), image(2, 3, 10, 8).double()
    with torch.no_grad():
        numerics.check(compiled(model)(x), model(x), torch.float64)
    assert left_to_torch() == []
    assert ops() == ["interpolate"] * 3


def test_a_block_that_is_computed_again_resizes_by_one_op() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.tanh(), scale_factor=2.5, mode="bilinear").exp()

    def again(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(block, x, use_reentrant=False)
        return made

    assert alike(again, image(2, 3, 5, 6)) == []
    assert set(ops()) == set(BOTH)


def test_what_maps_or_differentiates_forward_is_taken_apart_as_before() -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.5)

    def forward(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.func.jvp(one, (x[0],), (x[1],))[1]
        return made

    x = image(2, 2, 3, 4, 5)
    for function in (torch.vmap(one), forward):
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(function)(x), function(x))


def test_images_of_whole_numbers_or_without_an_element_are_torchs() -> None:
    whole = torch.arange(24, dtype=torch.uint8).view(1, 2, 3, 4)
    for x in (whole, image(0, 2, 3, 4)):
        torch._dynamo.reset()
        made = compiled(lambda x: F.interpolate(x, (5, 7)))(x)
        assert torch.equal(made, F.interpolate(x, (5, 7)))


def test_a_graph_that_is_torchs_has_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **options: Any) -> Any:
        raise cg.CannotImport("not this one")

    monkeypatch.setattr(dynamo, "convert", refused)
    x = image(2, 3, 5, 6)
    for made, own in zip(trained(compiled(_many), x), trained(_many, x), strict=True):
        torch.testing.assert_close(made, own)


def test_other_backends_trace_as_they_did() -> None:
    x = image(2, 3, 5, 6).requires_grad_()
    graphs = []
    for _ in range(2):
        other = AotEagerAndRecordGraphs()
        torch.compile(_many, backend=other)(x)
        graphs.append([str(node.target) for node in other.fw_graphs[0].graph.nodes])
        compiled(_many)(x)
    assert graphs[0] == graphs[1]
    assert any("_unsafe_index" in target for target in graphs[0])
    assert not any("cudnngraph" in target for target in graphs[0])
