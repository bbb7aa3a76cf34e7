"""THE tolerance policy. Every number that a test allows an output to be off by stands here.

An output is compared with float64 by the relative error ``||out - ref|| / ||ref||`` (Euclidean
norms over all elements). It has to pass two bars:

1. the bound of its dtype in :data:`BOUNDS`;
2. no farther from float64 than ``TORCH_FACTOR`` times what torch itself is off by at that dtype,
   where torch's own output is given. An output that is as good as its dtype can be always passes
   this bar: it is never below :func:`floor`. It is not put to float64 results, which have no wider
   yardstick to be measured by.

Where the reference is infinite or NaN the output must be the same there (an lse of -inf, say);
those elements are left out of the norms. Bools and integers must be equal, the int32 sums of int8
products among them.

Numbers rounded to 8 bits have a policy of their own, since one of them that lies next to a tie may
fall on either side of it:

- int8: at most :data:`INT8_TIE_SHARE` of the elements (or one) differ, each by one step. What is
  rounded is off by a few units of float32, at most 4 * 127 * 2^-24 of a step at 127 steps, on both
  sides of a tie: 6e-5 of all elements.
- FP8: the inputs are exact and so are their products; the result is rounded once. Beside a
  yardstick that is rounded too, only what lies next to a tie is off: half a rounding bounds it, as
  rounding twice, or towards zero, would not keep. Beside one that is not (attention, which rounds
  its weights as well as its result) a whole rounding does: two, evenly distributed over their
  steps, make sqrt(2/3) of the largest.
- float32 of FP8 data: Hopper's tensor cores add products at 13 bits below the largest of them, and
  truncate; four such sums in a row before float32 takes over make 4 * 2^-13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

import cudnngraph.executor.reference  # noqa: F401  # for MKL's first call, before any of a yardstick

#: A sum of more terms than this counts as a long reduction.
LONG_REDUCTION_TERMS = 1024

#: Largest relative error by the kind of arithmetic.
BOUNDS: Mapping[str, float] = MappingProxyType(
    {
        "float64": 1e-14,
        "float32": 5e-7,
        "float32, long reduction": 1.5e-6,
        # Exact products of 16-bit numbers, summed in float32 by tensor cores that truncate.
        "float32 result of 16-bit data": 5e-6,
        "float32 result of FP8 data": 2.0**-11,
        "tf32": 1e-3,
        "float16": 1e-3,
        "bfloat16": 8e-3,
        "float8_e4m3fn": 2.0**-5,
        "float8_e5m2": 2.0**-4,
        "float8_e4m3fn, not rounded": 2.0**-4,
        "float8_e5m2, not rounded": 2.0**-3,
    }
)

#: The part of the int8 elements that may be one step off.
STRAYS = 1e-3

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

#: How much farther from float64 than torch at the same dtype an output may be.
TORCH_FACTOR = 1.5

#: The same of random calls, by formulas that round elsewhere than torch's own.
RANDOM_FACTOR = 5.0

#: How far modules may be from torch's that live through the same calls, by the coarsest dtype: of
#: sums that cancel; what is meant are other numbers.
OF_LIVES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-9, torch.float32: 5e-3, torch.bfloat16: 0.25}
)

#: Relative error of one rounding to nearest.
ROUNDOFF: Mapping[torch.dtype, float] = MappingProxyType(
    {
        torch.float64: 2.0**-53,
        torch.float32: 2.0**-24,
        torch.float16: 2.0**-11,
        torch.bfloat16: 2.0**-8,
        torch.float8_e4m3fn: 2.0**-4,
        torch.float8_e5m2: 2.0**-3,
    }
)


def kind(
    data: torch.dtype, result: torch.dtype | None = None, *, tf32: bool = False, terms: int = 1
) -> str:
    """The row of :data:`BOUNDS` for a result of dtype ``result`` (default ``data``).

    ``data`` is the dtype of the operands, ``terms`` the longest sum behind one element.
    """
    result = data if result is None else result
    narrow = (torch.float16, torch.bfloat16)
    if result in (*narrow, *FP8):
        return str(result).removeprefix("torch.")
    if result == torch.float64:
        return "float64"
    if data in narrow:
        return "float32 result of 16-bit data"
    if data in FP8:
        return "float32 result of FP8 data"
    if tf32:
        return "tf32"
    return "float32, long reduction" if terms > LONG_REDUCTION_TERMS else "float32"


def bound(
    data: torch.dtype, result: torch.dtype | None = None, *, tf32: bool = False, terms: int = 1
) -> float:
    """The largest relative error allowed; arguments as for :func:`kind`."""
    return BOUNDS[kind(data, result, tf32=tf32, terms=terms)]


def floor(data: torch.dtype, result: torch.dtype, *, terms: int = 1) -> float:
    """Return the error that an output may always have, however close torch is.

    One rounding of the result's dtype. In float32, which is computed in float32, there is more to
    it: an elementary function is good to a unit in the last place, two roundings; and where the
    data are float32 too, a plain running sum of n terms of random sign is off by u sqrt(n / 6):
    step k adds an error of variance k u^2 / 3 to a sum of variance n. A library that sums in blocks
    is closer, one that sums in order is right. FP8 data may be off besides by what tensor cores
    truncate.
    """
    if data in FP8:
        return ROUNDOFF[result] + BOUNDS["float32 result of FP8 data"]
    if result != torch.float32:
        return ROUNDOFF[result]
    return ROUNDOFF[result] * max(2.0, math.sqrt(terms / 6) if data == torch.float32 else 0.0)


def relative_error(out: torch.Tensor, ref64: torch.Tensor) -> float:
    """``||out - ref|| / ||ref||`` over the elements at which the reference is finite.

    0.0 where both are all zero or empty; ``inf`` where the reference is zero and the output is not,
    or where the output is not what the reference is at an infinite or NaN element, or is itself
    infinite or NaN where the reference is finite.
    """
    wide, ref = out.detach().to("cpu", torch.float64), ref64.detach().to("cpu", torch.float64)
    finite = ref.isfinite()
    there, here = ref[~finite], wide[~finite]  # infinities and NaN of the reference
    if not bool(((here == there) | (here.isnan() & there.isnan())).all()):
        return float("inf")
    wide, ref = wide[finite], ref[finite]
    if not bool(wide.isfinite().all()):
        return float("inf")
    distance, size = float((wide - ref).norm()), float(ref.norm())
    if distance == 0.0:
        return 0.0
    return distance / size if size else float("inf")


def check(
    out: torch.Tensor,
    ref64: torch.Tensor,
    dtype: torch.dtype,
    torch_out: torch.Tensor | None = None,
    tf32: bool = False,
    *,
    terms: int = 1,
    what: str = "output",
) -> float:
    """Assert that ``out`` passes both bars; return its relative error.

    ``dtype`` is the dtype of the data that went in, ``torch_out`` what torch computes from the same
    data at that dtype, ``terms`` the longest sum behind one element.
    """
    assert out.shape == ref64.shape, (
        f"{what}: shape {tuple(out.shape)}, float64 {tuple(ref64.shape)}"
    )
    if out.dtype == torch.int8:
        steps = (out.cpu().int() - ref64.cpu().int()).abs()
        differ, most = int((steps > 0).sum()), int(steps.max()) if steps.numel() else 0
        allowed = max(1, int(STRAYS * out.numel()))
        assert most <= 1 and differ <= allowed, (
            f"{what}: {differ} of {out.numel()} elements differ, by up to {most} steps; {allowed} "
            "may, by one"
        )
        return 0.0
    if not out.dtype.is_floating_point:
        differ = int((out.cpu() != ref64.cpu().to(out.dtype)).sum())
        assert differ == 0, f"{what}: {differ} of {out.numel()} elements differ ({out.dtype})"
        return 0.0
    error = relative_error(out, ref64)
    row = kind(dtype, out.dtype, tf32=tf32, terms=terms)
    if out.dtype in FP8 and not bool((ref64.to(out.dtype).to(torch.float64) == ref64).all()):
        row += ", not rounded"
    assert error <= BOUNDS[row], (
        f"{what}: relative error {error:.3g} to float64, the bound for {row} is {BOUNDS[row]:.3g}"
        f"{_misfit(out, ref64)}"
    )
    if torch_out is not None and out.dtype != torch.float64:
        theirs = relative_error(torch_out, ref64)
        limit = max(TORCH_FACTOR * theirs, floor(dtype, out.dtype, terms=terms))
        assert error <= limit, (
            f"{what}: relative error {error:.3g} to float64, torch at {dtype} is off by "
            f"{theirs:.3g}; {TORCH_FACTOR} times that, or the floor, allows {limit:.3g}"
        )
    return error


def _misfit(out: torch.Tensor, ref64: torch.Tensor) -> str:
    """Says so where the error is infinite because of infinities or NaN."""
    wide, ref = out.detach().to("cpu", torch.float64), ref64.detach().to("cpu", torch.float64)
    same = (wide == ref) | (wide.isnan() & ref.isnan()) | (wide.isfinite() & ref.isfinite())
    wrong = ~same
    count = int(wrong.sum())
    if not count:
        return ""
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"; {count} elements are infinite or NaN on one side only, the first at {at}: "
        f"{float(wide[at])} for {float(ref[at])}"
    )


def no_farther_than_eager(
    found: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Each result is at most twice as far from float64 as eager's, or within four roundings."""
    for mine, own, want in zip(found, eager, exact, strict=True):
        assert (mine.dtype, mine.shape) == (own.dtype, own.shape)
        off, theirs = (relative_error(each, want) for each in (mine, own))
        assert off <= max(2 * theirs, 4 * torch.finfo(dtype).eps)
