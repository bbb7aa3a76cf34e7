"""The table of gradient rules: for each op one that gives its operands' gradients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...ops.table import OPS
from ..context import GradRule, NoGradient
from . import attention, conv, matmul, norm, pointwise, reduction, resampling, shapes, softmax

GradRules = Mapping[str, GradRule | NoGradient]

_OTHERS: GradRules = {
    "dequantize": NoGradient("has no gradient: 8-bit data are constants"),
    "quantize": NoGradient("rounds, and has no gradient", flat=False),
    "aten": NoGradient("aten is torch's own op, of which no gradient is known here"),
}


def joined(*families: GradRules) -> GradRules:
    """Return the rules of all families.

    Raises ValueError for an op that has two rules, or that there is not.
    """
    rules: dict[str, GradRule | NoGradient] = {}
    for family in families:
        wrong = sorted({*(rules.keys() & family.keys()), *(family.keys() - OPS.keys())})
        if wrong:
            raise ValueError(f"a second rule, or no op: {', '.join(wrong)}")
        rules.update(family)
    return MappingProxyType(rules)


RULES: GradRules = joined(
    conv.RULES,
    attention.RULES,
    norm.RULES,
    matmul.RULES,
    shapes.RULES,
    softmax.RULES,
    resampling.RULES,
    reduction.RULES,
    pointwise.RULES,
    _OTHERS,
)
