"""Pooling and interpolation: torch's sizes, layouts and out variants; mistakes; what is saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.device import rules
from cudnngraph.executor import reference, torch_steps
from cudnngraph.grad.context import NoGradient
from cudnngraph.grad.rules.table import RULES
from cudnngraph.ir.spec import channels_last_strides, contiguous_strides
from cudnngraph.ops import pooling
from tests import numerics
from tests.gradients import ours, upstream
from tests.samples import BF16, F16, F32, F64

Apply = Callable[[cg.Graph, cg.Value], cg.Value]
LAST = torch.channels_last

BOTH: dict[str, tuple[Apply, Callable[[torch.Tensor], torch.Tensor]]] = {
    "max_pool": (lambda g, x: g.max_pool(x, 3, 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool": (lambda g, x: g.avg_pool(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "adaptive_avg_pool": (
        lambda g, x: g.adaptive_avg_pool(x, 5),
        lambda x: F.adaptive_avg_pool2d(x, 5),
    ),
    "adaptive_max_pool": (
        lambda g, x: g.adaptive_max_pool(x, 5),
        lambda x: F.adaptive_max_pool2d(x, 5),
    ),
    **{
        mode: (
            lambda g, x, mode=mode: g.interpolate(x, scale_factor=2, mode=mode),  # type: ignore[misc]
            lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode),  # type: ignore[misc]
        )
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    },
    "pixel_shuffle": (lambda g, x: g.pixel_shuffle(x, 2), lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": (lambda g, x: g.pixel_unshuffle(x, 2), lambda x: F.pixel_unshuffle(x, 2)),
}


def graph_of(apply: Apply, x: torch.Tensor) -> cg.Graph:
    g = cg.Graph("g")
    g.output("y", apply(g, g.input("x", like=x)))
    return g


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_numbers_and_strides_are_torchs_in_both_layouts(
    name: str, layout: torch.memory_format
) -> None:
    apply, run = BOTH[name]
    x = torch.randn(2, 8, 12, 14).to(memory_format=layout)
    y, want = graph_of(apply, x).compile("cpu")(x=x), run(x)
    assert torch.equal(y, want)
    assert y.stride() == want.stride()
    assert y.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("op", ["max_pool", "avg_pool", "adaptive_avg_pool", "interpolate"])
def test_volumes_and_lines_stay_channels_last(op: str) -> None:
    options = {"kernel_size": 2}
    if op == "adaptive_avg_pool":
        options = {"output_size": 3}
    if op == "interpolate":
        options = {"scale_factor": 2}
    for shape in ((2, 8, 10), (2, 8, 4, 5, 10)):
        g = cg.Graph("g")
        y = getattr(g, op)(g.input("x", shape, F32, layout="channels_last"), **options)
        assert y.stride[1] == 1


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3)
)
def test_the_number_of_windows_is_torchs(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    x = torch.zeros(1, 1, size, 7)
    for ceil in (False, True):
        options: dict[str, Any] = {
            "kernel_size": (kernel, 1),
            "stride": (stride, 1),
            "padding": (padding, 0),
            "dilation": (dilation, 1),
            "ceil_mode": ceil,
        }
        g = cg.Graph("g")
        y = g.max_pool(g.input("x", like=x), **options)
        try:
            want = F.max_pool2d(x, **options)
        except RuntimeError:
            assert g.problems
        else:
            alone = bool(want.isinf().any())  # a window of nothing but padding
            assert ["in the padding alone" in p.what for p in g.problems] == [True] * alone, options
            assert alone or y.shape == want.shape


def test_adaptive_pools_of_equal_windows_are_plain_ones() -> None:
    def ops(size: Any, shape: tuple[int, ...] = (2, 8, 12, 9)) -> list[str]:
        g = graph_of(lambda g, x: g.adaptive_avg_pool(x, size), torch.zeros(shape))
        return [node.op for node in g.spec().nodes]

    assert ops(1) == ["reduction"]
    assert ops((4, 3)) == ops((None, 9)) == ["avg_pool"]
    assert ops((5, 3)) == ops(24) == ["adaptive_avg_pool"]
    assert ops(4, (2, 8, 12)) == ["avg_pool"]


MISTAKES: dict[str, tuple[tuple[int, ...], Apply, tuple[str, ...]]] = {
    "rank": (
        (2, 8),
        lambda g, x: g.max_pool(x, 2, name="p"),
        ("max_pool 'p': x 'x' has 2 dims (2, 8); expected 3, 4 or 5: (N, C, spatial...)",),
    ),
    "no_channels": (
        (2, 0, 8, 8),
        lambda g, x: g.avg_pool(x, 2, name="p"),
        ("x 'x' has shape (2, 0, 8, 8); expected at least one channel and one element",),
    ),
    "padding": (
        (2, 8, 8, 8),
        lambda g, x: g.max_pool(x, 3, padding=(2, 0), name="p"),
        ("padding=2 over spatial dim 0 is more than half of kernel_size=3; expected padding <= 1",),
    ),
    "window": (
        (2, 8, 8, 3),
        lambda g, x: g.avg_pool(x, 4, name="p"),
        (
            "the window reaches 4 (kernel_size 4, dilation 1) over spatial dim 1, the padded "
            "input is 3; expected a window no larger than the padded input",
        ),
    ),
    "stride": (
        (2, 8, 8, 8),
        lambda g, x: g.max_pool(x, 2, 0, name="p"),
        ("stride=0 is not positive; expected every stride >= 1",),
    ),
    "ceil": (
        (2, 8, 8, 8),
        lambda g, x: g.max_pool(x, 2, ceil_mode=1, name="p"),  # type: ignore[arg-type]
        ("ceil_mode=1 is not a bool; expected True or False",),
    ),
    "output_size": (
        (2, 8, 8, 8),
        lambda g, x: g.adaptive_max_pool(x, (2, 2, 2), name="p"),
        ("output_size=(2, 2, 2) has 3 numbers; expected 1 or 2, one per spatial dim of x",),
    ),
    "output_size_zero": (
        (2, 8, 8, 8),
        lambda g, x: g.adaptive_avg_pool(x, 0, name="p"),
        ("output_size=(0, 0) is not positive",),
    ),
    "mode": (
        (2, 8, 8, 8),
        lambda g, x: g.interpolate(x, 4, mode="trilinear", name="p"),
        (
            "interpolate 'p': mode='trilinear' with 2 spatial dims; expected one of 'nearest', "
            "'nearest-exact', 'bilinear', 'bicubic'",
        ),
    ),
    "corners": (
        (2, 8, 8, 8),
        lambda g, x: g.interpolate(x, 4, align_corners=True, name="p"),
        ("align_corners=True with mode='nearest'; expected a mode that interpolates linearly",),
    ),
    "no_size": (
        (2, 8, 8, 8),
        lambda g, x: g.interpolate(x, name="p"),
        ("size=None and scale_factor=None; expected one of them",),
    ),
    "both_sizes": (
        (2, 8, 8, 8),
        lambda g, x: g.interpolate(x, 4, 2.0, name="p"),
        ("size=4 and scale_factor=2.0; expected one of them",),
    ),
    "scale": (
        (2, 8, 8, 8),
        lambda g, x: g.interpolate(x, scale_factor=(2.0, -1.0), name="p"),
        ("scale_factor=(2.0, -1.0); expected a positive number, or 2 of them",),
    ),
    "to_nothing": (
        (2, 8, 8, 8),
        lambda g, x: g.interpolate(x, scale_factor=0.1, name="p"),
        ("scale_factor=0.1 makes of (8, 8) sizes (0, 0); expected sizes >= 1",),
    ),
    "padding_alone": (
        (2, 8, 3, 3),
        lambda g, x: g.max_pool(x, 2, 1, 1, (1, 4), name="p"),
        (
            "max_pool 'p': a window over spatial dim 1 lies in the padding alone (size 3, "
            "kernel_size 2, padding 1, dilation 4); expected an element of x in every window "
            "(dilate less, or pad less)",
        ),
    ),
    "padding_alone_over_the_end": (
        (2, 8, 1),
        lambda g, x: g.max_pool(x, 3, 9, 1, 3, True, name="p"),
        ("max_pool 'p': a window over spatial dim 0 lies in the padding alone (size 1, ",),
    ),
    "padding_alone_gradient": (
        (2, 8, 1, 1),
        lambda g, x: g.max_pool_backward(x, g.input("z", (2, 8, 3, 3), F32), 2, 1, 1, 4, name="p"),
        ("max_pool_backward 'p': a window over spatial dim 0 lies in the padding alone",),
    ),
    "average_of_a_small_volume": (
        (2, 8, 2, 4, 4),
        lambda g, x: g.avg_pool(x, 3, padding=1, name="p"),
        (
            "avg_pool 'p': kernel_size=3 over spatial dim 0 is more than the size 2 of a volume; "
            "expected kernel_size <= 2, whatever the padding",
        ),
    ),
    "shuffle": (
        (2, 6, 8, 8),
        lambda g, x: g.pixel_shuffle(x, 2),
        ("pixel_shuffle: x 'x' has shape (2, 6, 8, 8); expected C % 4 == 0",),
    ),
    "unshuffle": (
        (2, 6, 8, 9),
        lambda g, x: g.pixel_unshuffle(x, 2),
        ("pixel_unshuffle: x 'x' has shape (2, 6, 8, 9); expected H and W % 2 == 0",),
    ),
    "shuffle_rank": (
        (2, 6, 8),
        lambda g, x: g.pixel_shuffle(x, 2),
        ("x 'x' (2, 6, 8) by factor 2; expected (N, C, H, W) and a factor >= 1",),
    ),
    "gradient": (
        (2, 8, 3, 3),
        lambda g, x: g.avg_pool_backward(x, 2, input_size=8, name="p"),
        (
            "avg_pool_backward 'p': dy 'x' has shape (2, 8, 3, 3); expected (N, C, out...) = "
            "(2, 8, 4, 4), the forward's result",
        ),
    ),
    "gradient_rank": (
        (2, 8, 3, 3),
        lambda g, x: g.max_pool_backward(x, g.input("z", (2, 8, 9), F32), 2, name="p"),
        ("max_pool_backward 'p': dy 'x' has 4 dims (2, 8, 3, 3); expected 3 dims",),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_problem_in_the_right_words(name: str) -> None:
    shape, apply, says = MISTAKES[name]
    g = cg.Graph("g")
    g.output("y", apply(g, g.input("x", shape, F32)))
    with pytest.raises(cg.GraphError) as error:
        g.compile("cpu")
    assert str(error.value).count("\n  - ") == 1, error.value
    for text in says:
        assert text in str(error.value)


def test_whole_numbers_are_not_pooled() -> None:
    g = cg.Graph("g")
    g.output("y", g.max_pool(g.input("x", (2, 8, 8, 8), torch.int32), 2))
    with pytest.raises(cg.GraphError, match="x 'x' is int32; expected float16, bfloat16"):
        g.spec()


# -- gradients -------------------------------------------------------------------------------------


def test_a_max_pool_saves_its_input_and_no_indices() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 8, 12, 12), F16)
    g.output("y", g.max_pool(x, 3, 2, 1))
    gradient = cg.differentiate(g, ["x"])
    assert gradient.saved == ("x",)
    assert [node.op for node in gradient.backward.nodes] == ["max_pool_backward"]


@pytest.mark.parametrize("op", ["avg_pool", "adaptive_avg_pool", "interpolate"])
def test_a_linear_op_saves_nothing_and_has_a_second_gradient(op: str) -> None:
    options: dict[str, Any] = {
        "avg_pool": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
        "adaptive_avg_pool": {"output_size": 5},
        "interpolate": {"size": (5, 17), "mode": "bilinear"},
    }[op]
    g = cg.Graph("g")
    g.output("y", getattr(g, op)(g.input("x", (2, 3, 8, 9), F64), **options))
    spec = g.spec()
    first = cg.differentiate(spec, ["x"])
    assert first.saved == ()
    (dy,) = first.backward.inputs
    second = cg.differentiate(first.backward, [dy])
    grads = upstream(second, 1, F64)
    (ddx,) = grads.values()
    found = ours(second, {dy: torch.zeros(first.backward.tensors[dy].shape).double()}, grads)
    assert torch.allclose(found[dy], reference.run(spec, [ddx])[0], rtol=1e-14)


def test_a_max_pools_gradient_has_none_of_its_own() -> None:
    for op in ("max_pool_backward", "adaptive_max_pool_backward"):
        rule = RULES[op]
        assert isinstance(rule, NoGradient)
        assert not rule.flat


# -- torch steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("name", sorted(set(BOTH) - {"pixel_shuffle", "pixel_unshuffle"}))
def test_a_step_writes_through_torchs_out_variant(
    name: str, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, run = BOTH[name]
    x = torch.randn(2, 8, 12, 14).half().to(memory_format=layout)
    spec = graph_of(apply, x).spec()
    out = torch.full_like(run(x), 77)

    def never(*given: Any) -> None:
        raise AssertionError("a copy")

    monkeypatch.setattr(pooling, "RULES", dict.fromkeys(pooling.RULES, never))
    monkeypatch.setattr(pooling, "_interpolate", never)
    torch_steps.launcher(spec, [x], [out], allow_tf32=False)()
    assert torch.equal(out, run(x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("name", sorted(set(BOTH) - {"pixel_shuffle", "pixel_unshuffle"}))
def test_a_step_writes_into_a_slice_of_a_larger_tensor(
    name: str, layout: torch.memory_format
) -> None:
    apply, run = BOTH[name]
    x = torch.randn(2, 8, 12, 14).to(memory_format=layout)
    want = run(x)
    wide = torch.full((2, 20, *want.shape[2:]), 77.0).to(memory_format=layout)
    out = wide[:, 4:12]
    g = cg.Graph("g")
    g.output("y", apply(g, g.input("x", like=x)), stride=out.stride())
    torch_steps.launcher(g.spec(), [x], [out], allow_tf32=False)()
    assert torch.equal(out, want)
    assert bool((wide[:, :4] == 77).all()) and bool((wide[:, 12:] == 77).all())


# Strides of dims of extent 1 that say nothing, but from which torch guesses another layout.
ODD = {
    "a row": ((2, 9, 1, 8), (72, 1, 9, 9)),
    "a column": ((2, 8, 7, 1), (56, 1, 8, 1)),
    "one image": ((1, 5, 6, 4), (1, 24, 4, 1)),
    "a line": ((1, 9, 8), (9, 1, 9)),
    "volumes": ((1, 3, 1, 4, 5), (7, 20, 3, 5, 1)),
}


@pytest.mark.parametrize(
    ("shape", "stride"), [((1, 1, 4), (4, 1, 1)), ((2, 1, 1, 8), (8, 1, 1, 1)), ODD["a line"]]
)
def test_the_reference_pools_images_with_strides_of_their_layout(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    """A check faulted on a GPU for others (tests/gpu/test_pooling.py)."""
    x = torch.empty_strided(shape, stride).copy_(torch.randn(shape))
    image = pooling._image(x)
    assert torch.equal(image, x.unsqueeze(2) if x.dim() == 3 else x)
    lies = x.is_contiguous()
    assert image.is_contiguous() == lies
    if lies:
        assert image.stride() == contiguous_strides(image.shape)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("op", ["max_pool", "avg_pool", "adaptive_avg_pool", "interpolate"])
def test_torch_is_given_strides_that_it_takes_for_one_layout(
    name: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's guess of both layouts shows on a GPU alone (tests/gpu/test_pooling.py)."""
    shape, stride = ODD[name]
    rank = len(shape) - 2
    if op == "interpolate" and rank != 2:
        pytest.skip("of images")
    x = torch.empty_strided(shape, stride).copy_(torch.randn(shape))
    seen: list[Any] = []
    plain = pooling._plain

    def watched(*given: torch.Tensor) -> Any:
        found = plain(*given)
        seen.extend(found or ())
        return found

    monkeypatch.setattr(pooling, "_plain", watched)
    g = cg.Graph("g")
    given = g.input("x", like=x)
    if op == "interpolate":
        made = g.interpolate(given, size=(4, 4), mode="bilinear")
    elif op == "adaptive_avg_pool":
        made = g.adaptive_avg_pool(given, (1,) * (rank - 1) + (3,))
    else:
        made = getattr(g, op)(given, (1,) * (rank - 1) + (2,), 1, (0,) * (rank - 1) + (1,))
    g.output("y", made)
    spec = g.spec()
    form = spec.tensors["y"]
    out = torch.empty_strided(form.shape, form.stride)
    torch_steps.launcher(spec, [x], [out], allow_tf32=False)()
    assert numerics.relative_error(out, reference.run(spec, [x], torch.float64)[0]) < 5e-7
    assert len(seen) == 2
    for each in seen:
        strides = {contiguous_strides(each.shape), channels_last_strides(each.shape)}
        assert each.stride() in strides


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
def test_one_element_is_copied_to_all(mode: str, layout: torch.memory_format) -> None:
    x = torch.randn(2, 8, 1, 1).half()
    wide = torch.full((2, 20, 5, 6), 77.0).half().to(memory_format=layout)
    out = wide[:, 4:12]
    g = cg.Graph("g")
    value = g.interpolate(g.input("x", like=x), (5, 6), mode=mode)
    g.output("y", value, stride=out.stride())
    torch_steps.launcher(g.spec(), [x], [out], allow_tf32=False)()
    numerics.check(out, F.interpolate(x.double(), (5, 6), mode=mode), F16)
    assert torch.equal(out, x.expand(out.shape))
    assert bool((wide[:, :4] == 77).all()) and bool((wide[:, 12:] == 77).all())


# -- enlarging by products -------------------------------------------------------------------------

CPU = torch.device("cpu")
X2: dict[str, Any] = {"scale_factor": 2}


def options(shape: tuple[int, ...], more: dict[str, Any]) -> dict[str, Any]:
    """Arguments of F.interpolate, linear for what rank the shape has."""
    return {"mode": {3: "linear", 4: "bilinear", 5: "trilinear"}[len(shape)], **more}


def attributes(x: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """The attributes of the op in canonical form."""
    g = cg.Graph("g")
    g.output("y", g.interpolate(g.input("x", like=x), **given))
    (node,) = g.spec().nodes
    return dict(node.attrs)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 90), st.booleans(), st.sampled_from([None, 1.5, 2.0, 3.3])
)
def test_the_weights_are_torchs(size: int, wanted: int, corners: bool, scale: float | None) -> None:
    """As its float32 kernel has them, seen by what it makes of each unit vector."""
    if scale is not None:
        wanted = int(size * scale)
    eye = torch.eye(size)[None]
    theirs = torch.ops.aten.upsample_linear1d(eye, [wanted], corners, scale)[0].t()
    found = pooling.weights(size, wanted, corners, scale)
    assert torch.allclose(found, theirs, rtol=0, atol=1e-6 * size)
    assert torch.allclose(found.sum(1), torch.ones(wanted))


ENLARGED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "x2": ((2, 8, 12, 9), X2),
    "x8": ((2, 21, 11, 16), {"size": (88, 128)}),
    "x4 and x2": ((1, 5, 7, 30), {"scale_factor": (4.0, 2.0)}),
    "corners": ((3, 8, 9, 17), {"size": (65, 33), "align_corners": True}),
    "one row": ((2, 8, 1, 9), {"size": (64, 18)}),
    "one channel": ((4, 1, 12, 10), X2),
    "line": ((3, 6, 25), {"scale_factor": 8}),
}


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ENLARGED)
def test_products_enlarge_as_torch_does(name: str, last: bool, dtype: torch.dtype) -> None:
    shape, more = ENLARGED[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    x, given = channels_last(x) if last else x, options(shape, more)
    want = F.interpolate(x.double(), **given)
    out = torch.full_like(want, 77, dtype=dtype)
    out = channels_last(out) if last else out.contiguous()
    run = pooling.enlarging(attributes(x, given), x, out, CPU, least=0)
    assert run is not None
    run([x], {}, out)
    numerics.check(out, want, dtype, F.interpolate(x, **given), terms=4)


@pytest.mark.parametrize("shape", [(2, 8, 12, 9), (2, 8, 12)], ids=str)
def test_products_write_into_a_slice_of_wider_rows(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy: by torch.bmm alone, with the slice as its result."""
    x = channels_last(torch.randn(shape).half())
    want = F.interpolate(x.double(), **options(shape, X2))
    wide = channels_last(torch.full((2, 20, *want.shape[2:]), 77.0).half())
    out = wide[:, 4:12]
    run = pooling.enlarging(attributes(x, options(shape, X2)), x, out, CPU, least=0)
    assert run is not None
    written, bmm = [], torch.bmm

    def seen(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        written.append(out.data_ptr())
        assert out.stride(-1) == 1
        return bmm(a, b, out=out)

    monkeypatch.setattr(torch, "bmm", seen)
    run([x], {}, out)
    assert len(written) == len(shape) - 2
    assert written[-1] == out.data_ptr()
    numerics.check(out, want, F16)
    assert bool((wide[:, :4] == 77).all()) and bool((wide[:, 12:] == 77).all())


@pytest.mark.parametrize(
    ("shape", "dtype", "more"),
    [
        ((2, 8, 12, 9), F32, X2),
        ((2, 8, 12, 9), F16, {"scale_factor": 3}),
        ((2, 8, 12, 9), F16, {"scale_factor": 2, "align_corners": True}),
        ((2, 8, 12, 9), F16, {"scale_factor": (2.0, 1.0)}),
        ((2, 8, 12, 9), F16, {"size": (24, 17)}),
        ((2, 8, 2, 9), BF16, {"size": (1024, 18)}),  # weights of 10 bits
        ((2, 8, 1, 1), F16, {"size": 8}),
        ((1, 2, 4, 600), F16, X2),
        ((1, 2, 4, 4, 4), F16, X2),
        ((2, 8, 12, 9), F16, {"scale_factor": 2, "mode": "nearest"}),
        ((2, 8, 12, 9), F16, {"scale_factor": 2, "mode": "bicubic"}),
    ],
    ids=str,
)
def test_torchs_own_kernel_runs_where_products_are_no_better_or_not_exact(
    shape: tuple[int, ...], dtype: torch.dtype, more: dict[str, Any]
) -> None:
    x = channels_last(torch.randn(shape).to(dtype))
    attrs = attributes(x, options(shape, more))
    out = x.new_empty(*shape[:2], *pooling.sizes(shape[2:], attrs))
    assert pooling.enlarging(attrs, x, channels_last(out), CPU, least=0) is None


def test_products_are_for_images_that_lie_alike() -> None:
    x = torch.randn(2, 8, 12, 9).half()
    attrs = attributes(x, options((2, 8, 12, 9), X2))
    out = x.new_empty(2, 8, 24, 18)
    wide = x.new_empty(2, 20, 24, 18)
    assert pooling.enlarging(attrs, x, out, CPU, least=0) is not None
    for a, b in ((x, channels_last(out)), (channels_last(x), out), (x, wide[:, 4:12])):
        assert pooling.enlarging(attrs, a, b, CPU, least=0) is None
    assert pooling.enlarging(attrs, x, out, CPU, least=out.numel() + 1) is None


def test_a_large_step_runs_by_products_of_weights_that_are_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = channels_last(torch.randn(1, 16, 64, 128).half())
    spec = graph_of(lambda g, x: g.interpolate(x, scale_factor=4, mode="bilinear"), x).spec()
    out = channels_last(torch.full((1, 16, 256, 512), 77.0).half())
    assert out.numel() >= rules.TABLE[90].resize_by_matmul_min_elements
    launch = torch_steps.launcher(spec, [x], [out], allow_tf32=False)

    def never(*given: Any) -> None:
        raise AssertionError("not by products")

    monkeypatch.setattr(pooling, "weights", never)
    monkeypatch.setattr(pooling, "_interpolate_into", never)
    launch()
    want = F.interpolate(x.double(), scale_factor=4, mode="bilinear")
    numerics.check(out, want, F16, F.interpolate(x, scale_factor=4, mode="bilinear"), terms=4)
    torch_steps.launcher(spec, [x], [out], allow_tf32=False)()  # by the same weights


def test_products_leave_it_to_torchs_kernel_to_be_deterministic() -> None:
    x = torch.randn(2, 8, 12, 9).half()
    attrs, out = attributes(x, options((2, 8, 12, 9), X2)), x.new_empty(2, 8, 24, 18)
    run = pooling.enlarging(attrs, x, out, CPU, least=0)
    assert run is not None
    torch.use_deterministic_algorithms(True)
    try:
        run([x], attrs, out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, F.interpolate(x, scale_factor=2, mode="bilinear"))


def test_what_is_not_finite_spreads_over_its_image_and_no_farther() -> None:
    """As the docs say; torch's kernel spreads it to the neighbours alone."""
    x = torch.randn(2, 8, 12, 9).half()
    x[0, 3, 5, 5], x[1, 2, 0, 0] = math.inf, math.nan
    attrs, out = attributes(x, options((2, 8, 12, 9), X2)), x.new_empty(2, 8, 24, 18)
    run = pooling.enlarging(attrs, x, out, CPU, least=0)
    assert run is not None
    run([x], attrs, out)
    finite = out.isfinite().flatten(2).all(2)
    touched = [(0, 3), (1, 2)]
    assert [tuple(at) for at in (~finite).nonzero().tolist()] == touched
    want = F.interpolate(x.double(), scale_factor=2, mode="bilinear")
    keep = finite[:, :, None, None].expand_as(out)
    numerics.check(out[keep], want[keep], F16)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_compiled_pooling_whose_gradient_would_write_outside_is_refused(rank: int) -> None:
    """torch's own is of a window of padding alone at an index that is not there, and its gradient
    writes to that place. Its result is right: -inf."""
    pool = getattr(torch.nn, f"MaxPool{rank}d")(2, 1, 1, 4).eval()
    x = torch.randn(1, 1, *(3,) * rank)
    assert torch.equal(cg.fuse(pool, x)(x), pool(x)) and bool(pool(x).isinf().all())
    torch._dynamo.reset()
    y = torch.compile(pool, backend="cudnngraph")(x.requires_grad_())
    with pytest.raises(
        cg.FeatureMissing, match=r"_backward\.default: a window lies in the padding"
    ):
        y.sum().backward()


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_compiled_pooling_is_trained(rank: int) -> None:
    """Dilated, and with windows that begin in the padding."""
    pool = getattr(torch.nn, f"MaxPool{rank}d")(2, 2, 1, 3)
    x = torch.randn(2, 3, *(5,) * rank, dtype=torch.float64).requires_grad_()
    torch._dynamo.reset()
    y, want = torch.compile(pool, backend="cudnngraph")(x), pool(x)
    dy = torch.randn_like(want)
    found, right = (torch.autograd.grad(each, x, dy)[0] for each in (y, want))
    assert torch.equal(y, want) and torch.equal(found, right)
