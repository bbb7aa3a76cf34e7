"""Modules that stand in for torch's: fused forward, derived backward, the same parameters."""

from __future__ import annotations

from .attention import FusedMultiheadAttention, FusedSDPA
from .conv import FusedConvBlock, FusedConvTransposeBlock
from .swap import Report, Swap, replace

__all__ = [
    "FusedConvBlock",
    "FusedConvTransposeBlock",
    "FusedMultiheadAttention",
    "FusedSDPA",
    "Report",
    "Swap",
    "replace",
]
