"""The tolerance policy tells right from wrong."""

from __future__ import annotations

import math

import pytest
import torch

from tests.numerics import BOUNDS, ROUNDOFF, check, kind, relative_error

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def test_relative_error_is_the_ratio_of_norms() -> None:
    ref = torch.tensor([3.0, 4.0], dtype=F64)
    assert relative_error(ref + torch.tensor([0.0, 0.05]), ref) == pytest.approx(0.01)


def test_equal_and_empty_tensors_have_no_error() -> None:
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize(
    ("out", "ref"),
    [
        ([0.0, 1e-30], [0.0, 0.0]),
        ([1.0, math.inf], [1.0, 2.0]),
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, 2.0], [1.0, -math.inf]),
        ([1.0, math.inf], [1.0, -math.inf]),
        ([1.0, math.nan], [1.0, -math.inf]),
    ],
)
def test_misplaced_infinities_and_nan_are_an_infinite_error(
    out: list[float], ref: list[float]
) -> None:
    assert relative_error(torch.tensor(out, dtype=F64), torch.tensor(ref, dtype=F64)) == math.inf


def test_infinities_and_nan_in_the_same_places_are_left_out() -> None:
    ref = torch.tensor([3.0, 4.0, -math.inf, math.nan, math.inf], dtype=F64)
    out = ref + torch.tensor([0.0, 0.05, 0.0, 0.0, 0.0], dtype=F64)
    assert relative_error(out, ref) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("data", "result", "options", "row"),
    [
        (F32, None, {}, "float32"),
        (F32, None, {"terms": 1025}, "float32, long reduction"),
        (F32, None, {"tf32": True, "terms": 1025}, "tf32"),
        (F16, None, {"tf32": True}, "float16"),
        (BF16, None, {}, "bfloat16"),
        (F16, F32, {}, "float32 result of 16-bit data"),
        (F32, F16, {}, "float16"),
        (F64, None, {"terms": 5000}, "float64"),
        (E4, F32, {"terms": 5000}, "float32 result of FP8 data"),
        (E5, F16, {}, "float16"),
        (E5, E4, {}, "float8_e4m3fn"),
        (F16, E5, {}, "float8_e5m2"),
        (torch.int8, F32, {}, "float32"),
    ],
)
def test_each_kind_of_arithmetic_has_its_bound(data, result, options, row) -> None:  # type: ignore
    assert kind(data, result, **options) == row
    assert row in BOUNDS


def test_the_bounds_of_the_issue_stand_in_the_table() -> None:
    assert BOUNDS["float32"] == 5e-7
    assert BOUNDS["float32, long reduction"] == 1.5e-6
    assert BOUNDS["float16"] == 1e-3
    assert BOUNDS["bfloat16"] == 8e-3


def test_check_names_the_numbers_when_the_bound_is_exceeded() -> None:
    ref = torch.tensor([3.0, 4.0], dtype=F64)
    with pytest.raises(AssertionError, match=r"y: relative error 0\.01 .* bound for float32 is 5e"):
        check((ref + torch.tensor([0.0, 0.05])).to(F32), ref, F32, what="y")


def test_check_says_where_an_infinity_is_missing() -> None:
    ref = torch.tensor([[3.0, -math.inf]], dtype=F64)
    with pytest.raises(AssertionError, match=r"1 elements .* first at \(0, 1\): 0.0 for -inf"):
        check(torch.tensor([[3.0, 0.0]]), ref, F32)


def test_check_holds_an_output_to_the_error_of_torch() -> None:
    ref = torch.linspace(1.0, 2.0, 101, dtype=F64)
    theirs, ours = ref * (1 + 1e-7), ref * (1 + 3e-7)
    assert check(ours.to(F32), ref, F32) == pytest.approx(3e-7, rel=0.2)
    with pytest.raises(AssertionError, match=r"torch at torch.float32 is off by 1"):
        check(ours.to(F32), ref, F32, theirs.to(F32))


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_float64_rounded_once_passes_beside_an_exact_torch(dtype: torch.dtype) -> None:
    ref = torch.linspace(0.1, 2.0, 1001, dtype=F64)
    assert 0 < check(ref.to(dtype), ref, dtype, ref) <= ROUNDOFF[dtype]


@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
def test_fp8_is_held_to_half_a_rounding_beside_what_is_rounded(dtype: torch.dtype) -> None:
    """Next to ties a few may be off; truncation, or two roundings, are too far."""
    exact = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=F64) * 8
    ref = exact.to(dtype).to(F64)
    assert check((exact * (1 + 1e-3)).to(dtype), ref, dtype) <= BOUNDS[kind(dtype)]
    spacing = 2.0 * ROUNDOFF[dtype] * 2.0 ** exact.abs().log2().floor()
    down = (exact / spacing).trunc() * spacing
    for wrong in (down.to(dtype), (exact + 0.5 * spacing).to(dtype)):
        with pytest.raises(AssertionError, match=rf"the bound for {kind(dtype)} is"):
            check(wrong, ref, dtype)


@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
def test_fp8_is_held_to_one_rounding_beside_what_is_not(dtype: torch.dtype) -> None:
    exact = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=F64) * 8
    assert 0.25 * ROUNDOFF[dtype] < check(exact.to(dtype), exact, dtype) < ROUNDOFF[dtype]
    with pytest.raises(AssertionError, match="not rounded is"):
        check((exact * 1.15).to(dtype), exact, dtype)


def test_int8_may_be_one_step_off_in_few_places() -> None:
    ref = torch.arange(-100, 100, dtype=torch.int8).repeat(20)
    out = ref.clone()
    out[:4] += 1
    assert check(out, ref, torch.int8) == 0.0
    out[4] -= 1
    with pytest.raises(AssertionError, match="5 of 4000 elements differ, by up to 1 steps; 4 may"):
        check(out, ref, torch.int8)
    out = ref.clone()
    out[0] += 2
    with pytest.raises(AssertionError, match="1 of 4000 elements differ, by up to 2 steps"):
        check(out, ref, torch.int8)


def test_bools_must_be_equal() -> None:
    ref = torch.tensor([True, False])
    assert check(ref.clone(), ref, F32) == 0.0
    with pytest.raises(AssertionError, match="1 of 2 elements differ"):
        check(~ref & ref, ref, F32)


def test_a_shape_of_its_own_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2, 1\), float64 \(2,\)"):
        check(torch.zeros(2, 1), torch.zeros(2, dtype=F64), F32)
