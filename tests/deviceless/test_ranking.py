"""The ranking of plans: those of 16-bit convolutions without tensor cores stand last."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import env, tiles
from cudnngraph.backend.candidates import PREDICTED, propose, tensor_cores_first
from cudnngraph.backend.deviceless import lower_for, propose_for
from cudnngraph.backend.tiles import Model, Tile
from cudnngraph.errors import NotSupported
from cudnngraph.ir.spec import GraphSpec

TARGET = "nvidia-h200"
F16, F32 = torch.float16, torch.float32


def convolved(
    channels: int,
    results: int,
    side: int,
    window: int,
    *ops: str,
    dtype: Any = F16,
    groups: int = 1,
) -> GraphSpec:
    g = cg.Graph("conv")
    x = g.input("x", (4, channels, side, side), dtype, layout="channels_last")
    shape = (results, channels // groups, window, window)
    w = g.input("w", shape, dtype, layout="channels_last")
    y: Any = g.conv(x, w, padding=window // 2, groups=groups)
    for op in ops:
        y = g.bias(y, g.input("b", (results,), dtype)) if op == "bias" else getattr(g, op)(y)
    g.output("y", y)
    return g.spec()


def with_tensor_cores(spec: GraphSpec) -> dict[int, bool]:
    """Whether the library says of an engine that it has tensor cores multiply, by its id."""
    frontend = env.frontend()
    lowered = lower_for(spec, TARGET)
    candidates = propose(lowered, frontend, more=True)
    lowered.graph.deselect_numeric_notes([frontend.numerical_note.TENSOR_CORE])
    found: dict[int, bool] = {}
    for candidate in candidates:
        message = ""
        try:
            lowered.graph.build_plan_at_index(candidate.index)
        except (frontend.cudnnGraphNotSupportedError, RuntimeError) as error:
            message = str(error)
        if not message or "eselect" in message:  # others do not build at all
            found.setdefault(candidate.choice.engine, bool(message))
    return found


@pytest.mark.parametrize("ops", [("bias",), ("bias", "relu"), ("relu",), ("bias", "silu"), ()])
@pytest.mark.parametrize("sizes", [(768, 150, 128, 1), (64, 64, 56, 3), (96, 33, 30, 1)])
def test_a_16_bit_convolution_begins_with_a_plan_on_tensor_cores(
    sizes: tuple[int, ...], ops: tuple[str, ...], driver: None
) -> None:
    spec = convolved(*sizes, *ops)
    told = with_tensor_cores(spec)
    _, ranked = propose_for(spec, TARGET)
    order = [told[each.choice.engine] for each in ranked if each.choice.engine in told]
    assert order[0] and any(told.values())


def test_plans_move_only_behind_those_that_have_tensor_cores() -> None:
    spec = convolved(768, 150, 128, 1, "bias")
    candidates = propose(lower_for(spec, TARGET), env.frontend())
    ranked = tensor_cores_first(candidates, spec)
    assert ranked != candidates and sorted(c.index for c in ranked) == list(range(len(ranked)))
    told = with_tensor_cores(spec)
    for kind in (True, False):  # among themselves they stay in cuDNN's order
        places = [c.index for c in ranked if told.get(c.choice.engine) is kind]
        assert places == sorted(places) and places


@pytest.mark.parametrize(
    "spec",
    [
        convolved(768, 150, 32, 1, "bias", dtype=F32),
        convolved(768, 768, 32, 1, "bias", groups=2),
        convolved(4, 150, 32, 1, "bias"),
    ],
)
def test_the_ranking_of_other_convolutions_is_cudnns(spec: GraphSpec) -> None:
    candidates = propose(lower_for(spec, TARGET), env.frontend())
    assert tensor_cores_first(candidates[::-1], spec) == candidates[::-1]


def test_a_long_window_is_fused_with_nothing_if_only_plain_engines_fuse_it(driver: None) -> None:
    """cuDNN 9.24 has others, 9.19 has not."""
    plain = {0, 11, 35}
    alone, fused = convolved(64, 64, 64, 35), convolved(64, 64, 64, 35, "bias", "relu")
    engines = {each.choice.engine for each in propose(lower_for(fused, TARGET), env.frontend())}
    if engines <= plain:
        with pytest.raises(NotSupported, match="only engines without tensor cores fuse it"):
            propose_for(fused, TARGET)
    else:
        assert propose_for(fused, TARGET)[1][0].choice.engine not in plain
    candidates = propose(lower_for(fused, TARGET), env.frontend())
    ours = [each for each in candidates if each.choice.engine in plain]
    with pytest.raises(NotSupported, match="only engines without tensor cores fuse it"):
        tensor_cores_first(ours, fused)
    assert propose_for(alone, TARGET)[1][0].choice.engine not in plain


def test_the_plan_of_the_fastest_tile_stands_first_and_the_others_as_cudnn_has_them(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two that cuDNN lists first, whichever its version has there."""
    g = cg.Graph("product")
    x, w = g.input("x", (256, 1024), F16), g.input("w", (1024, 64), F16)
    g.output("y", g.silu(g.add(g.matmul(x, w), g.input("b", (64,), F16))))
    spec = g.spec()
    before = propose(lower_for(spec, TARGET), env.frontend())
    wide, narrow = (each.choice for each in before[:2])
    known = {
        choice: Tile(shape, (1, 1), (0.0, 1.0, *(0.0,) * 8), 0.05)
        for choice, shape in ((wide, (128, 128, 32)), (narrow, (128, 64, 64)))
    }
    model = Model(env.cudnn_version(), 90, known, largest_error=0.1, gain=0.95)
    monkeypatch.setattr(tiles, "_model", lambda: model)
    _, after = propose_for(spec, TARGET)
    assert [each.index for each in after] == [1, 0, *range(2, len(before))]
    assert after[0].why == PREDICTED.format(0.5)
