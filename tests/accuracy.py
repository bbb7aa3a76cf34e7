"""The accuracy table: float32 with TF32 off against float64, beside torch's own float32.

``measure(device)`` runs the rows, ``render(rows)`` prints them; the CPU and the GPU tests assert on
the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests.numerics import BOUNDS, ROUNDOFF, TORCH_FACTOR, relative_error
from tests.samples import F32, Case, Conv, in_float64, make_inputs, torch_eager

_SHORT, _LONG = BOUNDS["float32"], BOUNDS["float32, long reduction"]
_IMAGE = (8, 16, 28, 28)
_STEM = (8, 3, 56, 56)
_DEEP = (32, 512, 7, 7)


@dataclass(frozen=True)
class Claim:
    """One row before it is measured: a bare convolution and the largest relative error allowed."""

    name: str
    conv: Conv
    bound: float


def _claim(name: str, x: tuple[int, ...], k: int, bound: float, **options: object) -> Claim:
    bare = {"dtype": F32, "bias": None, "act": None, "x_at": None, "w_at": None}
    return Claim(name, Conv(x, k, **(bare | options)), bound)  # type: ignore[arg-type]


CLAIMS: tuple[Claim, ...] = (
    _claim("conv k3 s1 p0", _IMAGE, 32, _SHORT),
    _claim("conv k3 s1 p1", _IMAGE, 32, _SHORT, padding=1),
    _claim("conv k3 s2 p1", _IMAGE, 32, _SHORT, stride=2, padding=1),
    _claim("conv k1 s1 p0", _IMAGE, 32, _SHORT, kernel=1),
    _claim("conv k1 s2 p0", _IMAGE, 32, _SHORT, kernel=1, stride=2),
    _claim("conv k7 s2 p3", _STEM, 16, _SHORT, kernel=7, stride=2, padding=3),
    _claim("transposed k3 s1 p1", _IMAGE, 32, _SHORT, padding=1, transposed=True),
    _claim("32x512x7x7 conv k3 s1 p1", _DEEP, 512, _LONG, padding=1),
    _claim("32x512x7x7 transposed k3 s1 p1", _DEEP, 512, _LONG, padding=1, transposed=True),
)


@dataclass(frozen=True)
class Row:
    """One measured row: relative errors to float64."""

    name: str
    ours: float
    torchs: float
    bound: float

    @property
    def limit_by_torch(self) -> float:
        """Return the larger of one rounding and torch's own error times the factor."""
        return max(TORCH_FACTOR * self.torchs, ROUNDOFF[F32])


@contextmanager
def tf32_off() -> Iterator[None]:
    """torch's own float32 without TF32, switches put back afterwards."""
    convolution, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (convolution.allow_tf32, matmul.allow_tf32)
    convolution.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        convolution.allow_tf32, matmul.allow_tf32 = before


def measure_one(claim: Claim, device: torch.device | str) -> Row:
    """Run one row on ``device``; float64 is always computed on the CPU."""
    conv = claim.conv
    case = Case(claim.name, "accuracy", F32, conv.build, conv.eager, fills=conv.fills)
    inputs = make_inputs(case, device)
    yardstick = torch_eager(case, in_float64(inputs))["y"]
    ours = conv.build().compile(device, allow_tf32=False)(**inputs)
    with tf32_off():
        torchs = torch_eager(case, inputs)["y"]
    return Row(
        claim.name,
        relative_error(ours, yardstick),
        relative_error(torchs, yardstick),
        claim.bound,
    )


def measure(device: torch.device | str = "cpu") -> list[Row]:
    """Every row on ``device``."""
    return [measure_one(claim, device) for claim in CLAIMS]


def render(rows: Sequence[Row], device: torch.device | str) -> str:
    """The table as text."""
    width = max(len(row.name) for row in rows)
    lines = [
        f"float32, TF32 off, relative error to float64, on {device}",
        f"{'case':{width}}  {'cudnngraph':>10}  {'torch':>10}  {'bound':>8}",
    ]
    lines += [
        f"{row.name:{width}}  {row.ours:10.2e}  {row.torchs:10.2e}  {row.bound:8.1e}"
        for row in rows
    ]
    return "\n".join(lines)
