"""The table of gradient rules: for each op one that gives its operands' gradients."""

from __future__ import annotations

from collections.abc import Mapping

from ..context import GradRule, NoGradient
from . import attention, conv, matmul, norm, pointwise, reduction, resampling, shapes, softmax

RULES: Mapping[str, GradRule | NoGradient] = {
    **conv.RULES,
    **attention.RULES,
    **norm.RULES,
    **matmul.RULES,
    **shapes.RULES,
    **softmax.RULES,
    **resampling.RULES,
    **reduction.RULES,
    **pointwise.RULES,
    "dequantize": NoGradient("has no gradient: 8-bit data are constants"),
    "quantize": NoGradient("rounds, and has no gradient", flat=False),
    "aten": NoGradient("aten is torch's own op, of which no gradient is known here"),
}
