"""Python numbers among the arguments of fused models, and forms that are many."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.models import DiffusionUNet, Of, image


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = (r for r in caplog.records if r.name.startswith("cudnngraph"))
    return [r.getMessage() for r in ours if r.levelno >= logging.WARNING]


def compare(fused: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Fused results beside the model's: of the same dtypes, and as close as their dtypes are."""
    with torch.no_grad():
        ours, theirs = fused(*args, **kwargs), model(*args, **kwargs)
    for mine, own in zip(_all(ours), _all(theirs), strict=True):
        assert type(mine) is type(own)
        if not isinstance(own, torch.Tensor):
            assert mine == own
            continue
        assert mine.dtype == own.dtype and mine.shape == own.shape
        exact = own.double() if own.is_floating_point() else own  # as far as the model knows it
        numerics.check(mine, exact, own.dtype, terms=numerics.LONG_REDUCTION_TERMS + 1)


def _all(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (tuple, list)) else (results,)


def embedding(t: Any, width: int = 8) -> torch.Tensor:
    """Of a time step, as diffusion models compute it."""
    t = t[None] if torch.is_tensor(t) else torch.tensor([t])
    rates = torch.exp(-math.log(100.0) * torch.arange(width // 2) / width)
    angles = t[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


# -- numbers that become inputs --------------------------------------------------------------------


def test_a_loop_over_time_steps_compiles_twice(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    unet = DiffusionUNet()
    model = Of(lambda m, x, t, c: m.unet(x, m.steps(x, t), c), unet=unet).eval()
    model.steps = lambda x, t: torch.as_tensor(t).expand(x.shape[0])
    x, context = image(3, 4, 12, 12), image(3, 7, 24)
    fused = cg.fuse(model, (x, 999, context))
    compare(fused, model, x, 979, context)
    bound = fused.bound(x, 959, context)
    for t in range(959, 0, -20):
        assert fused.bound(x, t, context) is bound
    compare(fused, model, x, 1, context)
    compare(fused, model, x, 999, context)
    assert len(fused) == 1 and said(caplog) == []


NUMBERS: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "factor": (lambda m, x, t: x * t, (0.5, 2.0, -3.25, 0.1)),
    "exponent": (lambda m, x, t: x.abs() ** t, (2.0, 0.5, 3.0)),
    "divisor": (lambda m, x, t: x / t, (3, 7, -2)),
    "divided": (lambda m, x, t: t / (x.abs() + 1), (3, 7.0, 7)),
    "whole": (lambda m, x, t: x + t, (1, 2, -3)),
    "compared": (lambda m, x, t: torch.where(x > t, x, 0.0), (0.1, -0.2, 0.5)),
    "in 16 bits": (lambda m, x, t: m.layer(x).half() * t, (0.5, 0.3, 8.0)),
    "of whole numbers": (lambda m, x, t: (x * 8).int() + t, (1, 4, -2)),
    "whole and halved": (lambda m, x, t: (x * 8).int() * t, (0.5, 0.25, 3.0)),
    "computed with": (lambda m, x, t: x * (1.0 / (t**2 + 1.0) ** 0.5), (0.5, 14.6, 2.0)),
    "embedded": (lambda m, x, t: x * embedding(t), (981, 961, 1)),
    "embedded, of numpy": (lambda m, x, t: x * embedding(t), tuple(np.array([981, 961, 1]))),
    "factor of numpy": (lambda m, x, t: x * t, (np.float32(0.5), np.float32(2), np.float32(3))),
    "not finite": (lambda m, x, t: torch.clamp_max(x.exp(), 3.0) + t, (1.0, math.inf, -math.inf)),
    "handed on": (lambda m, x, t: (x * t, t), (0.5, 2.5, 7.0)),
    "not used": (lambda m, x, t: x * 2, (0.5, 2.5, 7.0)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change_become_inputs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    forward, values = NUMBERS[name]
    torch.manual_seed(0)
    model, x = Of(forward, layer=nn.Linear(8, 8)).eval(), image(3, 8)
    fused = cg.fuse(model, (x, values[0]))
    for value in (*values, *values):
        compare(fused, model, x, value)
    kinds = len({type(value) for value in values})
    assert len(fused) == kinds and said(caplog) == []


def test_numbers_of_float64_models_are_wide() -> None:
    model, x = Of(lambda m, x, t: x * t).eval(), image(3, 8).double()
    fused = cg.fuse(model, (x, 0.1))
    for t in (0.3, 0.7):
        compare(fused, model, x, t)
    assert len(fused) == 1


def test_several_numbers_in_containers_and_by_name(caplog: pytest.LogCaptureFixture) -> None:
    def forward(m: Any, x: Any, *, scales: Any, shift: float = 0.0, flag: bool = True) -> Any:
        return x * scales["a"] * scales["b"][0] + (shift if flag else 0.0)

    model, x = Of(forward).eval(), image(2, 3)
    fused = cg.fuse(model, (x,), kwargs={"scales": {"a": 0.5, "b": [2]}, "shift": 0.25})
    for a, b, shift in ((0.5, 3, 0.25), (0.7, 3, 0.25), (0.9, 4, 1.25), (0.9, 5, 0.125)):
        compare(fused, model, x, scales={"a": a, "b": [b]}, shift=shift)
    assert len(fused) == 1 and said(caplog) == []
    compare(fused, model, x, scales={"a": 0.1, "b": [7]}, shift=3.0, flag=False)
    compare(fused, model, x, scales={"a": 0.2, "b": [8]}, shift=4.0, flag=False)
    assert len(fused) == 2


def test_other_sizes_take_the_number_as_an_input_at_once() -> None:
    model = Of(lambda m, x, t: x * t).eval()
    fused = cg.fuse(model, (image(2, 3), 1.0))
    compare(fused, model, image(2, 3), 2.0)
    bound = fused.bound(image(4, 3), 3.0)
    assert fused.bound(image(4, 3), 4.0) is bound and len(fused) == 2


def test_without_the_check_a_number_is_compared_with_the_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which needs no copy of the model."""
    from cudnngraph.models import check

    def refuse(*args: Any) -> Any:
        raise AssertionError("a copy was made")

    monkeypatch.setattr(check, "copied", refuse)
    model, x = Of(lambda m, x, t: m.layer(x) * t, layer=nn.Linear(3, 3)).eval(), image(2, 3)
    fused = cg.fuse(model, (x, 1.0), check=False)
    for t in (2.0, 3.0):
        compare(fused, model, x, t)
    assert len(fused) == 1


# -- numbers that do not ---------------------------------------------------------------------------


FIXED: dict[str, tuple[Callable[..., Any], Sequence[Any], str]] = {
    "a size": (lambda m, x, t: F.interpolate(x[None], size=t), (4, 6, 5), ""),
    "a size of ours": (lambda m, x, t: x.new_zeros(t) + 1, (4, 6, 5), ""),
    "a branch": (lambda m, x, t: x * 2 if t > 5 else x, (4, 6, 5), ""),
    "a place": (lambda m, x, t: x[:, t], (0, 2, 1), ""),
    "a count": (lambda m, x, t: sum(x * at for at in range(t)), (1, 4, 2), ""),
    "math": (lambda m, x, t: x * math.sin(t), (0.5, 1.5, 2.5), ""),
    "a result": (lambda m, x, t: (x, t + 1), (1, 4, 2), "result"),
    "a result's dtype": (
        lambda m, x, t: torch.as_tensor(t) * 2 if torch.is_tensor(t) else torch.tensor(t).double(),
        (1.0, 4.0, 2.0),
        r"result 0 is torch\.float32 \(\), the model's torch\.float64",
    ),
    "asked for its type": (
        lambda m, x, t: x * (t if type(t) is int else 3),
        (1, 4, 2),
        "is off by",
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_numbers_that_decide_stay_in_the_form(name: str, caplog: pytest.LogCaptureFixture) -> None:
    forward, values, reason = FIXED[name]

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, size: Any) -> Any:
            return forward(self, x, size)

    model, x = Model().eval(), image(2, 3)
    fused = cg.fuse(model, (x, values[0]))
    for value in (*values, *values):
        compare(fused, model, x, value)
    assert len(fused) == len(values)
    (text,) = said(caplog)
    start = f"Model: argument 'size' (now {values[1]!r}) changes from call to call and cannot be"
    assert text.startswith(start) and "each value of it is compiled: 2 forms so far (" in text
    assert "call with few values, or let the model take a tensor there" in text
    assert re.search(reason, text)


def test_one_number_may_be_an_input_beside_one_that_may_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Of(lambda m, x, t, n, s: torch.cat([x * t] * n) + s).eval()
    x = image(2, 3)
    fused = cg.fuse(model, (x, 0.5, 2, 1.0))
    for t, n, s in ((0.7, 3, 2.0), (0.9, 3, 3.0), (0.1, 2, 4.0), (0.3, 2, 5.0), (0.3, 3, 6.0)):
        compare(fused, model, x, t, n, s)
    assert len(fused) == 2, "one for each number of copies"
    (text,) = said(caplog)
    assert text.startswith("Of: argument 'args[2]' (now 3) changes from call to call")


def test_what_fails_for_one_size_stays_an_input_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forward(m: Any, x: Any, t: Any) -> Any:
        return x * t if x.shape[0] < 4 else x * float(t)

    model = Of(forward).eval()
    fused = cg.fuse(model, (image(2, 3), 0.5))
    for rows, t in ((2, 1.5), (4, 2.5), (4, 3.5), (2, 4.5), (2, 5.5), (3, 6.5), (3, 7.5)):
        compare(fused, model, image(rows, 3), t)
    assert len(fused) == 4 and len(said(caplog)) == 1


def test_whole_numbers_that_int64_does_not_hold_stay_in_the_form() -> None:
    model = Of(lambda m, x, t: x * float(t)).eval()
    fused = cg.fuse(model, (image(2), 1))
    compare(fused, model, image(2), 10**30)
    assert len(fused) == 2


# -- forms that are many ---------------------------------------------------------------------------


def test_forms_that_are_dropped_again_and_again_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, mode: str = "a") -> torch.Tensor:
            return x * len(mode)

    fused = cg.fuse(Model().eval(), image(1, 3), max_shapes=2)
    for rows in (2, 3):
        fused(image(rows, 3))
    assert said(caplog) == [], "one was dropped"
    for rows in (4, 5, 6, 7):
        fused(image(rows, 3))
    (text,) = said(caplog)
    assert text.startswith(
        "Model: 4 forms of its inputs were compiled and max_shapes=2 are kept, so what comes again "
        "is compiled again; the last differs from one that was dropped in 'x'; raise max_shapes="
    )
    assert "pad to a few sizes by dynamic=" in text and len(fused) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([(1, "a"), (1, "b"), (1, "c"), (1, "d")], "'mode'"),
        ([(1, "a"), (2, "a"), (3, "b"), (4, "b")], "'x', 'mode'"),
        ([(1, "a"), (2, "a"), (3,), (4,)], "which arguments are given"),
    ],
)
def test_what_changes_is_named(
    arguments: Sequence[Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, mode: str = "a") -> torch.Tensor:
            return x * len(mode)

    fused = cg.Fused(Model().eval(), max_shapes=2)
    for rows, *more in arguments:
        fused(image(rows, 3), *more)
    (text,) = said(caplog)
    assert f"differs from one that was dropped in {named}; raise" in text
