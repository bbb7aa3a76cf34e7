"""Tolerances of a trial: the relative error, bools, TF32."""

from __future__ import annotations

import math

import pytest
import torch

from cudnngraph.select import tolerance as tolerance_of
from cudnngraph.select.tolerance import TF32_TOLERANCE, relative_error, tolerance
from tests import numerics
from tests.trials import BF16, F16, F32


@pytest.mark.parametrize(
    ("out", "ref", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-9], [0.0, 0.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([-math.inf, 1.0], [math.inf, 1.0], math.inf),
        ([1.0, 1.0], [math.nan, 1.0], math.inf),
        ([math.nan, 1.0], [2.0, 1.0], math.inf),
        ([math.inf, 1.0], [2.0, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_relative_error(out: list[float], ref: list[float], error: float) -> None:
    given = torch.tensor(out), torch.tensor(ref, dtype=torch.float64)
    assert relative_error(*given) == pytest.approx(error)
    assert numerics.relative_error(*given) == pytest.approx(error), "the tests' own yardstick"


@pytest.mark.parametrize(
    "place", [None, (0, 0, 0), (2, 5, 39), (1, 3, 20)], ids=["none", "first", "last", "within"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, 7.0])
def test_large_tensors_are_compared_part_by_part(
    place: tuple[int, ...] | None, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    ref = torch.randn(3, 6, 40, dtype=torch.float64).transpose(1, 2)
    out = ref.float() + 1e-3
    if place is not None:
        out.transpose(1, 2)[place] = value
    whole = tolerance_of.distance(out, ref)
    for most in (1, 7, 100, 719):
        monkeypatch.setattr(tolerance_of, "_COMPARED", most)
        assert len(list(tolerance_of._parts(out, ref))) > 1
        assert tolerance_of.distance(out, ref) == pytest.approx(whole, nan_ok=True)


def test_bools_are_off_by_a_single_one() -> None:
    ref = torch.tensor([True, False, True, True])
    assert relative_error(ref, ref) == 0.0
    assert relative_error(torch.tensor([True, True, True, True]), ref) > tolerance(
        torch.bool, tf32=True
    )


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_the_tolerance_lets_nothing_through_that_is_far_beyond_the_tests_own(
    dtype: torch.dtype,
) -> None:
    """Looser than the policy of the tests, for any op and any data, but by 25 times at most."""
    assert numerics.bound(dtype) <= tolerance(dtype, tf32=False) <= 25 * numerics.bound(dtype)


def test_tf32_loosens_float32_alone() -> None:
    assert tolerance(F32, tf32=True) == TF32_TOLERANCE > tolerance(F32, tf32=False)
    assert tolerance(F16, tf32=True) == tolerance(F16, tf32=False)
    assert tolerance(torch.bool, tf32=True) == tolerance(torch.int32, tf32=False) == 0.0
