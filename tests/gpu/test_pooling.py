"""Max pooling by cuDNN's own call has torch's bits, where they lie and on whatever stream."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.backend import legacy_pooling
from cudnngraph.executor import reference, torch_steps
from cudnngraph.ir.spec import GraphSpec, TensorSpec
from tests import numerics

LAST = torch.channels_last


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether cuDNN's call did it, for every one; what other tests compiled is compiled anew."""
    cg.cache_clear()
    made, found = legacy_pooling.pooling, list[bool]()

    def watched(*given: Any) -> legacy_pooling.Pooling:
        pool = made(*given)
        assert pool is not None

        def run(image: torch.Tensor, out: torch.Tensor) -> bool:
            found.append(pool(image, out))
            return found[-1]

        return run

    monkeypatch.setattr(legacy_pooling, "pooling", watched)
    return found


def spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec("x", tuple(tensor.shape), tensor.stride(), tensor.dtype)


@pytest.mark.parametrize("op", ["max_pool", "avg_pool", "adaptive_avg_pool", "interpolate"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("strides", [(1, 9, 9), (9, 9, 1), (1, 72, 9), (8, 1, 1), (8, 8, 1)])
def test_strides_of_a_single_row_say_nothing_of_the_layout(
    op: str, dtype: torch.dtype, strides: tuple[int, int, int]
) -> None:
    """torch guesses a layout from them, another one of x than of the result that it is given."""
    shape = (2, 9, 1, 8)
    x = torch.empty_strided(shape, (72, *strides), dtype=dtype, device="cuda")
    x.copy_(torch.randn(shape))
    g = cg.Graph("g")
    given = g.input("x", like=x)
    if op == "interpolate":
        made = g.interpolate(given, size=(3, 16), mode="bilinear")
    elif op == "adaptive_avg_pool":
        made = g.adaptive_avg_pool(given, (2, 3))
    else:
        made = getattr(g, op)(given, (1, 3), 1, (0, 1))
    g.output("y", made)
    spec = g.spec()
    (want,) = reference.run(spec, [x.cpu()], torch.float64)
    for out in (g.compile("cuda", tune="heuristic")(x=x), _by_torch(spec, x)):
        assert numerics.relative_error(out, want) <= numerics.bound(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("stride", [(4, 1, 1), (4, 4, 1), (1, 1, 1)])
def test_one_channel_and_one_row(dtype: torch.dtype, stride: tuple[int, int, int]) -> None:
    """A check faulted for the first of these strides; the reference gives torch others."""
    x = torch.empty_strided((1, 1, 4), stride, dtype=dtype, device="cuda").copy_(torch.arange(4.0))
    g = cg.Graph("g")
    g.output("y", g.max_pool(g.input("x", like=x), 3, 3))
    (found,) = reference.run(g.spec(), [x], torch.float64)
    assert found.item() == 2.0


def _by_torch(spec: GraphSpec, x: torch.Tensor) -> torch.Tensor:
    form = spec.tensors["y"]
    out = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="cuda")
    torch_steps.launcher(spec, [x], [out], allow_tf32=False)()
    return out


@pytest.mark.parametrize("channels", [24, 3])
@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [((56, 56), 3, 2, 1), ((31, 47), 2, 2, 0), ((20, 12), 5, 3, 2), ((9, 9), 3, 1, 1)],
)
def test_it_has_torchs_bits(
    channels: int,
    layout: torch.memory_format,
    dtype: torch.dtype,
    size: tuple[int, int],
    kernel: int,
    stride: int,
    padding: int,
) -> None:
    x = torch.randn(3, channels, *size, device="cuda").to(dtype).to(memory_format=layout)
    x[0, 2, 4, 5], x[1, 2, 0, 0], x[2, 1, 3, 3] = math.nan, -math.inf, math.inf
    want = F.max_pool2d(x, kernel, stride, padding)
    made = torch.empty_like(want)
    numbers = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": 1}
    attrs = {name: (value, value) for name, value in numbers.items()}
    assert legacy_pooling.takes("max_pool", attrs, spec(x), spec(made))
    pool = legacy_pooling.pooling(attrs, spec(x), spec(made))
    assert pool is not None and pool(x, made)
    assert torch.equal(made.isnan(), want.isnan())
    assert torch.equal(made[~made.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("bounded", [True, False])
def test_windows_of_minus_infinity_alone_are_never_its(used: list[bool], bounded: bool) -> None:
    x = torch.randn(2, 16, 32, 32, device="cuda").half().to(memory_format=LAST)
    x[1, 3] = -math.inf
    g = cg.Graph("pool")
    given = g.input("x", like=x)
    given = g.relu(given) if bounded else given
    g.output("y", g.max_pool(given, 3, stride=2, padding=1))
    made = g.compile("cuda", kernels=False)(x=x)
    assert bool(used) is bounded and all(used)
    assert torch.equal(made, F.max_pool2d(x.relu() if bounded else x, 3, 2, 1))


def test_volumes_have_torchs_bits(used: list[bool]) -> None:
    x = torch.randn(2, 16, 9, 12, 10, device="cuda").half().relu()
    x = x.to(memory_format=torch.channels_last_3d)
    g = cg.Graph("pool")
    g.output(
        "y",
        g.max_pool(g.relu(g.input("x", like=x)), (1, 3, 2), stride=(1, 2, 2), padding=(0, 1, 0)),
    )
    made = g.compile("cuda", kernels=False)(x=x)
    assert used and all(used)
    assert torch.equal(made, F.max_pool3d(x, (1, 3, 2), (1, 2, 2), (0, 1, 0)))


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format])
def test_it_reads_and_writes_slices(layout: torch.memory_format) -> None:
    wide = torch.randn(2, 48, 32, 32, device="cuda").half().to(memory_format=layout)
    held = torch.full((2, 40, 16, 16), 5.0, device="cuda").half().to(memory_format=layout)
    x, y = wide[:, 16:32], held[:, 8:24]
    attrs = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1)}
    assert legacy_pooling.takes("max_pool", attrs, spec(x), spec(y))
    pool = legacy_pooling.pooling(attrs, spec(x), spec(y))
    assert pool is not None and pool(x, y)
    assert torch.equal(y, F.max_pool2d(x, 3, 2, 1))
    assert bool((held[:, :8] == 5).all()) and bool((held[:, 24:] == 5).all())


def test_it_is_captured_on_another_stream(used: list[bool]) -> None:
    x = torch.randn(2, 16, 32, 32, device="cuda").half().to(memory_format=LAST)
    g = cg.Graph("pool")
    g.output("y", g.max_pool(g.relu(g.input("x", like=x)), 3, stride=2, padding=1))
    exe = g.compile("cuda", kernels=False)
    out = exe(x=x)
    call = exe.capture(x=x, y=out)
    assert used and all(used)
    x.copy_(torch.randn_like(x))
    call()
    torch.cuda.synchronize()
    assert torch.equal(out, F.max_pool2d(x.relu(), 3, 2, 1))
