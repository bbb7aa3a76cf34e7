"""Modules that stand in for torch's: fused forward, derived backward, the same parameters."""

from __future__ import annotations

from .attention import FusedMultiheadAttention, FusedSDPA
from .conv import FusedConvBlock, FusedConvTransposeBlock
from .mlp import FusedMLP
from .norm import FusedLayerNorm, FusedRMSNorm
from .replace import Report, Swap, replace
from .separable import FusedDepthwiseSeparable

__all__ = [
    "FusedConvBlock",
    "FusedConvTransposeBlock",
    "FusedDepthwiseSeparable",
    "FusedLayerNorm",
    "FusedMLP",
    "FusedMultiheadAttention",
    "FusedRMSNorm",
    "FusedSDPA",
    "Report",
    "Swap",
    "replace",
]
