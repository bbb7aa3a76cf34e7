"""cudnngraph: declare a subgraph, compile it into cuDNN plans, run it on tensors.

Importing this package imports neither ``cudnn`` nor ``cuda`` and makes no CUDA call.
"""

from __future__ import annotations

from .errors import (
    BackendUnavailable,
    BindError,
    CaptureError,
    CudnnGraphError,
    GraphError,
    NotSupported,
    PolicyError,
    Problem,
    SettingsError,
    UnkeyableError,
)
from .explain import Explanation, explain
from .graph import Graph, Value
from .ir import GraphSpec, TensorSpec
from .policy import Policy
from .runtime import BoundCall, Executable

__all__ = [
    "BackendUnavailable",
    "BindError",
    "BoundCall",
    "CaptureError",
    "CudnnGraphError",
    "Executable",
    "Explanation",
    "Graph",
    "GraphError",
    "GraphSpec",
    "NotSupported",
    "Policy",
    "PolicyError",
    "Problem",
    "SettingsError",
    "TensorSpec",
    "UnkeyableError",
    "Value",
    "explain",
]
