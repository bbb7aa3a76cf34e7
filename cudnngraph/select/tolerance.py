"""Bounds on the error of a plan's results: how far off the exact ones each dtype may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from ..ir.spec import GraphSpec, Node
from ..ops.base import FP8
from ..ops.table import OPS
from ..policy import Policy

# Largest relative error ||out - ref|| / ||ref||: a wrong plan is off by far more.
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 2.0**-3,
    torch.float8_e5m2: 2.0**-2,
}
TF32_TOLERANCE = 2e-3
# Of float32 data without TF32: three roundings, or seven where there are sums. cuDNN's exp and tanh
# are off by 1e-6 to 6e-6, torch's by 1e-7.
STRICT_TOLERANCE = 3 * 2.0**-24
STRICT_TOLERANCE_OF_SUMS = 7 * 2.0**-24
TORCH_FACTOR = 1.5  # how much farther off than torch's own float32 such a result may be
FP8_TOLERANCE = 2.0**-10  # of float32 results: tensor cores add FP8 products at about 13 bits
_COMPARED = 1 << 24  # elements at a time
INT8_TIE_SHARE = 1e-3  # part of the int8 elements that may be one step off: they were next to a tie


def tolerance(dtype: torch.dtype, *, tf32: bool, fp8: bool = False) -> float:
    """The largest relative error that a result of ``dtype`` may have; 0 for whole numbers.

    ``fp8``: products of FP8 data are behind it (:func:`multiplies_fp8`).
    """
    if not dtype.is_floating_point:
        return 0.0
    if dtype == torch.float32 and tf32:
        return TF32_TOLERANCE
    if dtype == torch.float32 and fp8:
        return FP8_TOLERANCE
    return TOLERANCE[dtype]


def is_strict(spec: GraphSpec, policy: Policy) -> bool:
    """Whether float32 results are held to about what torch's own float32 gives."""
    kinds = {spec.tensors[name].dtype for name in spec.inputs}
    return not policy.allow_tf32 and {k for k in kinds if k.is_floating_point} == {torch.float32}


def is_pointwise(spec: GraphSpec) -> bool:
    """Whether no element of a result depends on several of one operand."""
    return all(OPS[node.op].pointwise or OPS[node.op].view for node in spec.nodes)


def flattens(spec: GraphSpec) -> bool:
    """Whether a graph has functions of exponentials that are finite for every number."""
    if any(OPS[node.op].has("attention") for node in spec.nodes):
        return False
    return any(node.op.removesuffix("_backward") in _FLAT for node in spec.nodes)


_FLAT = {"sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "softplus", "elu", "mish"}


def rounding_of_sums(spec: GraphSpec) -> float:
    """Expected error of the longest sum of a graph in float32, term added to term.

    It is u sqrt(n / 6): step k adds an error of variance k u² / 3 to a sum of variance n.
    """
    terms = (terms_of(spec, node) for node in spec.nodes)
    return 2.0**-24 * math.sqrt(max(terms, default=1.0) / 6)


def terms_of(spec: GraphSpec, node: Node) -> float:
    """About how many terms the sums of an op have."""
    if OPS[node.op].pointwise or OPS[node.op].view or not node.operands:
        return 1.0
    if OPS[node.op].has("grouped"):  # columns, or the rows of a group: all of them at most
        rows, columns = spec.tensors[node.operands[0]].shape
        return max(1.0, columns if node.op == "grouped_matmul" else rows)
    read = sorted((spec.tensors[name].numel for name in node.operands), reverse=True)
    made = min(max(1, spec.tensors[name].numel) for name in node.results)
    # A product of M x K and K x N numbers makes M x N; else each number is read once.
    return max(1.0, math.sqrt(read[0] * read[1] / made) if len(read) > 1 else read[0] / made)


def multiplies_fp8(spec: GraphSpec) -> bool:
    """Whether an op that is not element by element reads FP8."""
    return any(
        spec.tensors[name].dtype in FP8
        for node in spec.nodes
        if not OPS[node.op].pointwise
        for name in node.operands
    )


def relative_error(out: torch.Tensor, ref64: torch.Tensor) -> float:
    """``||out - ref|| / ||ref||``; infinite where one is infinite or NaN and the other is not.

    Of int8 a few elements one step off are no error: what is rounded may lie next to a tie.
    """
    off, size = distance(out, ref64)
    if off == 0.0:
        return 0.0
    return off / size if size and off == off else float("inf")


def distance(out: torch.Tensor, ref64: torch.Tensor) -> tuple[float, float]:
    """``||out - ref||`` and ``||ref||``, as :func:`relative_error` takes them.

    Tensors that are large are compared part by part, so that this needs little memory.
    """
    if ref64.device != out.device:  # what the reference makes of constants alone lies on the CPU
        ref64 = ref64.to(out.device)
    found = [_distance(*part) for part in _parts(out, ref64)]
    off, size = (math.hypot(*each) for each in zip(*found, strict=True))
    return 0.0 if out.dtype == torch.int8 and _is_tied(out, ref64) else off, size


def _parts(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same parts of two tensors."""
    if a.shape != b.shape or a.numel() <= _COMPARED:
        yield a, b
        return
    dim = max(range(a.dim()), key=a.shape.__getitem__)
    extent = a.shape[dim]
    long = max(1, _COMPARED * extent // a.numel())
    for at in range(0, extent, long):
        here = dim, at, min(long, extent - at)
        yield a.narrow(*here), b.narrow(*here)


def _distance(out: torch.Tensor, ref64: torch.Tensor) -> tuple[float, float]:
    wide = out.to(torch.float64)
    ref = ref64.to(torch.float64)
    finite = ref.isfinite()
    size = float(ref[finite].norm())
    mine, theirs = wide[~finite], ref[~finite]
    if not bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all()):
        return float("inf"), size
    return float((wide - ref)[finite].norm()), size


def _is_tied(out: torch.Tensor, ref: torch.Tensor) -> bool:
    """Whether int8 is off by one step in a few elements at most."""
    steps = (out.int() - ref.int()).abs()
    few = max(1, int(INT8_TIE_SHARE * steps.numel()))
    return int((steps > 0).sum()) <= few and bool((steps < 2).all())
