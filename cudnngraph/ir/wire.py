"""Graphs and policies as data, to be sent to another process: JSON, nothing that is executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..errors import CudnnGraphError
from ..policy import Policy
from .spec import GraphSpec, Node, TensorSpec


def _value(value: Any) -> Any:
    """An attribute as JSON has it; a dtype, which it has not, as a mapping."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, (tuple, list)):
        return [_value(item) for item in value]
    raise CudnnGraphError(f"a {type(value).__name__} cannot be sent to another process: {value!r}")


def _back(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _dtype(value["dtype"])
    if isinstance(value, list):
        return tuple(_back(item) for item in value)
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return found


def from_spec(spec: GraphSpec) -> dict[str, Any]:
    """A graph as JSON data; :func:`to_spec` gives an equal one back.

    Raises :class:`CudnnGraphError` for an attribute that is no data.
    """
    return {
        "name": spec.name,
        "tensors": [
            [tensor.name, tensor.shape, tensor.stride, _name(tensor.dtype)]
            for tensor in spec.tensors.values()
        ],
        "nodes": [
            [node.op, node.name, node.inputs, node.outputs, [[k, _value(v)] for k, v in node.attrs]]
            for node in spec.nodes
        ],
        "inputs": spec.inputs,
        "outputs": spec.outputs,
        "compute_dtype": _name(spec.compute_dtype),
    }


def to_spec(data: Mapping[str, Any]) -> GraphSpec:
    """The graph that :func:`from_spec` made ``data`` of."""
    return GraphSpec(
        name=data["name"],
        tensors={
            name: TensorSpec(name, tuple(shape), tuple(stride), _dtype(dtype))
            for name, shape, stride, dtype in data["tensors"]
        },
        nodes=tuple(
            Node(op, name, tuple(ins), tuple(outs), tuple((k, _back(v)) for k, v in attrs))
            for op, name, ins, outs, attrs in data["nodes"]
        ),
        inputs=tuple(data["inputs"]),
        outputs=tuple(data["outputs"]),
        compute_dtype=_dtype(data["compute_dtype"]),
    )


def from_policy(policy: Policy) -> dict[str, Any]:
    """A policy as JSON data."""
    return asdict(policy)


def to_policy(data: Mapping[str, Any]) -> Policy:
    """The policy that :func:`from_policy` made ``data`` of."""
    return Policy(**{**data, "exclude_engines": tuple(data["exclude_engines"])})
