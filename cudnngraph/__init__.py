"""cudnngraph: declare a subgraph, compile it into cuDNN plans, run it on tensors.

Importing this package imports neither ``cudnn`` nor ``cuda`` and makes no CUDA call.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cache.state import on_miss
from .cache.stats import CacheStats, MissInfo
from .errors import (
    BackendUnavailable,
    BindError,
    CannotImport,
    CaptureError,
    CudnnGraphError,
    FeatureMissing,
    GraphError,
    NotSupported,
    PlanFault,
    PlanNotCached,
    PolicyError,
    Problem,
    SettingsError,
    UnkeyableError,
    WrongResult,
)
from .explain.offline import Explanation, explain
from .grad.backward import Gradient
from .grad.differentiate import differentiate
from .graph.builder import Graph
from .graph.value import Value
from .ir.spec import GraphSpec, TensorSpec
from .models.fused import Fused, fuse
from .models.report import reports
from .policy import Policy
from .runtime.bound import BoundCall, CapturedCall
from .runtime.compile import warm_up
from .runtime.executable import Executable
from .runtime.process import cache_clear, cache_stats
from .runtime.specialize import Specialized, specialize
from .runtime.step import CapturedStep, capture_step
from .runtime.trainable import Trainable
from .settings import VERSION

if TYPE_CHECKING:
    from . import functional, nn
    from .nn import (
        FusedConvBlock,
        FusedConvTransposeBlock,
        FusedDepthwiseSeparable,
        FusedLayerNorm,
        FusedMLP,
        FusedMultiheadAttention,
        FusedRMSNorm,
        FusedSDPA,
    )

__version__ = VERSION
__all__ = [
    "BackendUnavailable",
    "BindError",
    "BoundCall",
    "CapturedCall",
    "CapturedStep",
    "CacheStats",
    "CannotImport",
    "CaptureError",
    "CudnnGraphError",
    "Executable",
    "Explanation",
    "FeatureMissing",
    "Fused",
    "FusedConvBlock",
    "FusedConvTransposeBlock",
    "FusedDepthwiseSeparable",
    "FusedLayerNorm",
    "FusedMLP",
    "FusedMultiheadAttention",
    "FusedRMSNorm",
    "FusedSDPA",
    "Gradient",
    "Graph",
    "GraphError",
    "GraphSpec",
    "MissInfo",
    "NotSupported",
    "PlanFault",
    "PlanNotCached",
    "Policy",
    "PolicyError",
    "Problem",
    "SettingsError",
    "Specialized",
    "TensorSpec",
    "Trainable",
    "UnkeyableError",
    "Value",
    "WrongResult",
    "cache_clear",
    "cache_stats",
    "capture_step",
    "differentiate",
    "explain",
    "functional",
    "fuse",
    "nn",
    "on_miss",
    "reports",
    "specialize",
    "warm_up",
]

_MODULES = ("functional", "nn")
_FROM_NN = frozenset(name for name in __all__ if name.startswith("Fused"))


def __getattr__(name: str) -> Any:
    """The modules that are imported when they are first asked for."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _FROM_NN:
        return getattr(import_module(f"{__name__}.nn"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
