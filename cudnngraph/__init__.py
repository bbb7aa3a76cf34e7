"""cudnngraph: declare a subgraph, compile it into cuDNN plans, run it on tensors.

Importing this package imports neither ``cudnn`` nor ``cuda`` and makes no CUDA call.
"""

from __future__ import annotations

from .cache import CacheStats, MissInfo, on_miss
from .errors import (
    BackendUnavailable,
    BindError,
    CaptureError,
    CudnnGraphError,
    GraphError,
    NotSupported,
    PlanNotCached,
    PolicyError,
    Problem,
    SettingsError,
    UnkeyableError,
)
from .explain import Explanation, explain
from .grad import Gradient, differentiate
from .graph import Graph, Value
from .ir import GraphSpec, TensorSpec
from .policy import Policy
from .runtime import BoundCall, Executable, cache_clear, cache_stats, warm_up
from .specialize import Specialized, specialize

__all__ = [
    "BackendUnavailable",
    "BindError",
    "BoundCall",
    "CacheStats",
    "CaptureError",
    "CudnnGraphError",
    "Executable",
    "Explanation",
    "Gradient",
    "Graph",
    "GraphError",
    "GraphSpec",
    "MissInfo",
    "NotSupported",
    "PlanNotCached",
    "Policy",
    "PolicyError",
    "Problem",
    "SettingsError",
    "Specialized",
    "TensorSpec",
    "UnkeyableError",
    "Value",
    "cache_clear",
    "cache_stats",
    "differentiate",
    "explain",
    "on_miss",
    "specialize",
    "warm_up",
]
