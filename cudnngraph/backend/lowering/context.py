"""The context of a lowering rule, and tensors that a plan provides by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...ir.spec import GraphSpec, Node, TensorSpec, channels_last_strides, numel
from ...ops.table import by_port
from .base import Place, Refused
from .dims import DimMap
from .placement import cudnn_dims


@dataclass(frozen=True)
class Constant:
    """A small tensor that the plan itself provides: ``numel`` elements of one value.

    Numbers baked into a graph are passed so too. The frontend's own way, ``tensor_scalar``, needs
    cuDNN 9.22 for compile-time constants, and gave wrong results for run-time ones (frontend 1.32).
    ``on_host``: in the memory of the host, where cuDNN reads the epsilon of a norm at each launch.
    It also stands for a result that nobody asked for, which the library writes all the same.
    """

    uid: int
    numel: int
    value: float
    dtype: torch.dtype
    on_host: bool = False

    def tensor(self, device: torch.device | str) -> torch.Tensor:
        """Itself, on ``device``."""
        return torch.full((self.numel,), self.value, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Alias:
    """A second tensor over the memory of the graph's input at ``position``, ``offset_bytes`` in.

    Attention of a tensor with itself needs it: cuDNN crashes where one tensor stands at several of
    q, k and v (seen on 9.19). So do the rows of what tells packed attention where sequences lie.
    """

    uid: int
    position: int
    offset_bytes: int = 0


Extra = Constant | Alias


def dtypes(frontend: Any) -> dict[torch.dtype, Any]:
    kinds = frontend.data_type
    return {
        torch.float32: kinds.FLOAT,
        torch.float16: kinds.HALF,
        torch.bfloat16: kinds.BFLOAT16,
        torch.float8_e4m3fn: kinds.FP8_E4M3,
        torch.float8_e5m2: kinds.FP8_E5M2,
        torch.int32: kinds.INT32,
        torch.int64: kinds.INT64,
        torch.int8: kinds.INT8,
        torch.uint8: kinds.UINT8,
        torch.bool: kinds.BOOLEAN,
    }


@dataclass
class Context:
    """The view of a rule: the frontend graph, the spec, and the frontend's tensors by name."""

    frontend: Any
    graph: Any
    spec: GraphSpec
    view: DimMap
    values: dict[str, Any] = field(default_factory=dict)
    extras: list[Extra] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    as_is: set[str] = field(default_factory=set)  # results of expand that are its operand

    def dtype(self, dtype: torch.dtype) -> Any:
        """The frontend's name of a dtype."""
        try:
            return dtypes(self.frontend)[dtype]
        except KeyError:
            raise Refused(f"cuDNN graphs have no {str(dtype).removeprefix('torch.')}") from None

    def operands(self, node: Node) -> list[Any]:
        """The frontend's tensors at the ports of ``node``, None at open ones."""
        return [None if name is None else self.values[name] for name in node.inputs]

    def by_port(self, node: Node) -> dict[str, Any]:
        """The frontend's tensors by the names of the ports of ``node``, None at open ones."""
        return dict(zip(by_port(node), self.operands(node), strict=True))

    def declare(self, tensor: Any, spec: TensorSpec) -> Any:
        """Give a result its dims, strides and dtype."""
        if spec.name not in self.spec.outputs:
            return self.virtual(tensor, spec)
        dims, strides = self.view.dims(spec.shape, spec.stride)
        return tensor.set_dim(dims).set_stride(strides).set_data_type(self.dtype(spec.dtype))

    def virtual(self, tensor: Any, spec: TensorSpec) -> Any:
        """Give a tensor inside the graph its dims, strides and dtype."""
        dims, strides = self.view.virtual(spec.shape, spec.stride)
        return tensor.set_dim(dims).set_stride(strides).set_data_type(self.dtype(spec.dtype))

    def temporary(self, tensor: Any, spec: TensorSpec) -> Any:
        """A value inside one op's lowering, shaped like ``spec``, in float32."""
        return self.virtual(tensor, replace(spec, dtype=torch.float32))

    def scalar(self, value: float) -> Any:
        """A number baked into the graph."""
        name = float(value).hex()  # 0.0 and -0.0 are two numbers
        if name not in self.scalars:
            self.scalars[name] = self.constant([1] * self.view.seen_rank, value, torch.float32)
        return self.scalars[name]

    def host_scalar(self, value: float) -> Any:
        """A number that cuDNN takes by value: it reads the host's memory."""
        uid = self._next_uid()
        self.extras.append(Constant(uid, 1, value, torch.float32, on_host=True))
        ones = [1] * self.view.seen_rank
        return self.graph.tensor(
            dim=ones,
            stride=ones,
            data_type=self.dtype(torch.float32),
            uid=uid,
            is_pass_by_value=True,
            name=f"number_{uid}",
        )

    def _next_uid(self) -> int:
        return len(self.spec.inputs) + len(self.spec.outputs) + len(self.extras) + 1

    def alias(self, name: str, place: Place | None = None, offset_bytes: int = 0) -> Any:
        """Another tensor over the memory of input ``name``, of shape and stride ``place``."""
        uid, tensor = self._next_uid(), self.spec.tensors[name]
        self.extras.append(Alias(uid, self.spec.inputs.index(name), offset_bytes))
        dims, strides = self.view.dims(*(place or cudnn_dims(self.spec, name)))
        kind = self.dtype(tensor.dtype)
        return self.graph.tensor(
            dim=dims, stride=strides, data_type=kind, uid=uid, name=f"{name}_{uid}"
        )

    def constant(self, shape: list[int], value: float, dtype: torch.dtype) -> Any:
        """A tensor of one value that the plan provides."""
        uid = self._next_uid()
        self.extras.append(Constant(uid, numel(shape), value, dtype))
        return self.graph.tensor(
            dim=shape,
            stride=list(channels_last_strides(shape)),
            data_type=self.dtype(dtype),
            uid=uid,
            name=f"constant_{uid}",
        )

    def discard(self, tensor: Any, spec: TensorSpec) -> None:
        """A result that nobody asked for: cuDNN writes it into memory of the plan's own."""
        dims, strides = self.view.dims(spec.shape, spec.stride)
        uid = self._next_uid()
        self.extras.append(Constant(uid, spec.numel, 0.0, spec.dtype))
        tensor.set_dim(dims).set_stride(strides).set_data_type(self.dtype(spec.dtype))
        tensor.set_output(True).set_uid(uid)


Rule = Callable[[Context, Node], "Sequence[Any] | Any"]
