"""The intermediate representation: what a graph is once it is declared, inferred and checked.

A :class:`GraphSpec` is frozen. Its nodes stand in canonical order: a depth-first walk from the
outputs, operands in port order. So the order depends on the structure alone, not on the order of
declaration and not on names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_Port = TypeVar("_Port", str, str | None)
Attribute = Any  # None, bool, int, float, str, or nested tuples of these

DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "f64",
        torch.float32: "f32",
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.float8_e4m3fn: "e4m3",
        torch.float8_e5m2: "e5m2",
        torch.int64: "i64",
        torch.int32: "i32",
        torch.int16: "i16",
        torch.int8: "i8",
        torch.uint8: "u8",
        torch.uint16: "u16",
        torch.uint32: "u32",
        torch.uint64: "u64",
        torch.complex64: "c64",
        torch.complex128: "c128",
        torch.bool: "bool",
    }
)


def numel(shape: Iterable[int]) -> int:
    """Number of elements of ``shape``."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides (in elements) of a dense tensor whose dims lie in memory in ``order``, slowest first.

    Zero extents count as one, as torch does.
    """
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return dense_strides(shape, range(len(shape)))


ALIGNMENT_BYTES = 16  # cuDNN's engines read in vectors of up to 16 bytes


def round_up(count: int, whole: int) -> int:
    """The next multiple of ``whole``."""
    return -(-count // whole) * whole


def aligned(count: int) -> int:
    """At least so many elements of 16 bits, in whole sixteens of bytes."""
    return round_up(count, ALIGNMENT_BYTES // 2)


def aligned_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides with gaps behind rows, so that each is :func:`aligned`."""
    return contiguous_strides((*shape[:-1], *map(aligned, shape[-1:])))


def odd_rows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether there are rows that start at an odd element."""
    return any(n > 1 and s % 2 for n, s in zip(shape[:-1], stride[:-1], strict=True))


def channels_last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the layout in which dim 1, the channels, is the fastest; in elements."""
    rank = len(shape)
    return (
        dense_strides(shape, range(rank))
        if rank < 3
        else dense_strides(shape, [0, *range(2, rank), 1])
    )


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dims from slowest to fastest as ``stride`` lays them out.

    Dims of extent 1 say nothing about the layout; they keep their logical place among the rest.
    """
    real = [dim for dim in range(len(shape)) if shape[dim] > 1]
    by_stride = iter(sorted(real, key=lambda dim: (-stride[dim], dim)))
    return tuple(next(by_stride) if shape[dim] > 1 else dim for dim in range(len(shape)))


def same_layout(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two strides address the same memory: they may differ where the extent is 1."""
    return numel(shape) == 0 or all(x == y for x, y, n in zip(a, b, shape, strict=True) if n > 1)


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Row-major, strides of extents of 1 left out of the question."""
    return same_layout(shape, stride, contiguous_strides(shape))


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Channels fastest, strides of extents of 1 left out of the question; rank 3 to 5."""
    return len(shape) >= 3 and same_layout(shape, stride, channels_last_strides(shape))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """No gaps and no overlap: some order of the dims gives exactly these strides."""
    if numel(shape) == 0:
        return True
    step = 1
    for extent, stride_ in sorted(
        ((n, s) for n, s in zip(shape, stride, strict=True) if n > 1), key=lambda pair: pair[1]
    ):
        if stride_ != step:
            return False
        step *= extent
    return True


def view_strides(
    shape: Sequence[int], stride: Sequence[int], to: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides that show the same memory in shape ``to`` (as many elements), None where none do.

    Sizes of ``to`` may split a run of dims that are dense among each other, not reach over its end.
    """
    if numel(shape) == 0:
        return contiguous_strides(to)
    runs: list[tuple[int, int]] = []  # (elements, stride of the fastest dim), fastest run last
    for n, s in zip(shape, stride, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * s:
            runs[-1] = (runs[-1][0] * n, s)
        else:
            runs.append((n, s))
    steps: list[int] = []
    left, step = 1, 1  # of the run at hand
    for n in reversed(to):
        if n > 1 and left == 1:
            left, step = runs.pop()
        if left % n:
            return None
        steps.append(step)
        left, step = left // n, step * n
    return tuple(reversed(steps))


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements of one tensor may share memory (stride 0 or interleaved dims)."""
    if numel(shape) == 0:
        return False
    reach = 0  # furthest offset that the faster dims reach
    for extent, stride_ in sorted(
        ((n, s) for n, s in zip(shape, stride, strict=True) if n > 1), key=lambda pair: pair[1]
    ):
        if stride_ <= reach:
            return True
        reach += (extent - 1) * stride_
    return False


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape, stride (in elements) and dtype of one tensor of a graph."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one addressed, both included; 0 when empty."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """A tensor of this form whose memory nothing has written."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def layout(self) -> str:
        """``contiguous``, ``channels_last``, or the strides written out."""
        return _layout(self.shape, self.stride)

    def __str__(self) -> str:
        return _type(self.shape, self.stride, self.dtype)


def _layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    if is_contiguous(shape, stride):
        return "contiguous"
    if is_channels_last(shape, stride):
        return "channels_last"
    return f"stride={stride}"


@lru_cache(maxsize=4096)  # a record names the types of each step, of which few are different
def _type(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> str:
    name = DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
    layout, dims = _layout(shape, stride), ", ".join(map(str, shape))
    return f"{name}[{dims}]" + ("" if layout == "contiguous" else f" {layout}")


@dataclass(frozen=True)
class Node:
    """One op: its kind, the tensors at its ports (None at an open optional one), its attributes.

    ``attrs`` holds every attribute of the op's row in the table, defaults included, sorted by name.
    """

    op: str
    name: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    attrs: tuple[tuple[str, Attribute], ...] = ()

    def attr(self, name: str) -> Any:
        """The value of one attribute; KeyError when the op has none of that name."""
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(f"{self.op} '{self.name}' has no attribute '{name}'")

    @property
    def operands(self) -> tuple[str, ...]:
        """The names at the ports in use, in port order."""
        return _names(self.inputs)

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results that somebody asked for."""
        return _names(self.outputs)


def _names(ports: tuple[str | None, ...]) -> tuple[str, ...]:
    """The names at ports; most have one at each, and passes over a graph ask for them often."""
    if None in ports:
        return tuple(name for name in ports if name is not None)
    return ports  # type: ignore[return-value]


def free(name: str, taken: set[str]) -> str:
    """Return ``name``, with as many underscores behind it that it is not ``taken``; it is then."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def taken_names(spec: GraphSpec) -> set[str]:
    """Return the names of a graph's tensors and nodes, for :func:`free`."""
    return {*spec.tensors, *(node.name for node in spec.nodes)}


def canonical_order(nodes: Sequence[Node], outputs: Iterable[str]) -> tuple[Node, ...]:
    """The nodes that the outputs depend on, operands before users, by a walk from the outputs."""
    producer = {name: node for node in nodes for name in node.results}
    done: dict[int, Node] = {}

    def visit(root: Node) -> None:
        stack: list[tuple[Node, Iterable[str]]] = [(root, iter(root.operands))]
        while stack:
            node, rest = stack[-1]
            for name in rest:
                source = producer.get(name)
                if source is not None and id(source) not in done:
                    stack.append((source, iter(source.operands)))
                    break
            else:
                stack.pop()
                done.setdefault(id(node), node)

    for name in outputs:
        if name in producer and id(producer[name]) not in done:
            visit(producer[name])
    return tuple(done.values())


@dataclass(frozen=True)
class GraphSpec:
    """A whole graph, inferred and validated: tensors by name, nodes in canonical order.

    ``inputs`` and ``outputs`` stand in the order of declaration. ``compute_dtype`` is the dtype of
    arithmetic inside an op; every tensor that is neither input nor output is an intermediate and
    carries its own dtype in ``tensors``.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compute_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "nodes", canonical_order(self.nodes, self.outputs))

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.nodes, self.inputs, self.outputs, self.compute_dtype)
        return GraphSpec, (self.name, dict(self.tensors), *fields)

    @property
    def intermediates(self) -> tuple[str, ...]:
        """Names of the tensors between the ops, in canonical order."""
        return tuple(
            name for node in self.nodes for name in node.results if name not in self.outputs
        )

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """Values that :func:`once` has made for this graph."""
        return {}

    @cached_property
    def _numbering(self) -> Mapping[str, str]:
        numbering: dict[str, str] = {}
        for node in self.nodes:
            for name in (*node.operands, *node.results):
                numbering.setdefault(name, f"%{len(numbering)}")
        return MappingProxyType(numbering)

    def canonical_names(self) -> Mapping[str, str]:
        """Every tensor's name → ``%0``, ``%1`` …: by first use along the canonical order.

        Two graphs that differ in names alone, or in the order of independent declarations, get the
        same numbering.
        """
        return self._numbering

    def rename(self, tensors: Mapping[str, str]) -> GraphSpec:
        """The same graph with other names of tensors; names that are not in the map stay."""

        def new(names: tuple[_Port, ...]) -> tuple[_Port, ...]:
            return tuple([name if name is None else tensors.get(name, name) for name in names])

        forms = {}
        for old, form in self.tensors.items():
            name = tensors.get(old, old)
            forms[name] = TensorSpec(name, form.shape, form.stride, form.dtype)
        return GraphSpec(
            self.name,
            forms,
            tuple(
                Node(node.op, node.name, new(node.inputs), new(node.outputs), node.attrs)
                for node in self.nodes
            ),
            new(self.inputs),
            new(self.outputs),
            self.compute_dtype,
        )

    def subgraph(self, name: str, nodes: Sequence[Node], outputs: Sequence[str]) -> GraphSpec:
        """The part of this graph that ``nodes`` make up, with ``outputs`` as its results."""
        made = {result for node in nodes for result in node.results}
        used = dict.fromkeys(
            operand for node in nodes for operand in node.operands if operand not in made
        )
        keep = (*used, *made)
        return GraphSpec(
            name=name,
            tensors={key: self.tensors[key] for key in keep},
            nodes=tuple(nodes),
            inputs=tuple(used),
            outputs=tuple(outputs),
            compute_dtype=self.compute_dtype,
        )

    def __str__(self) -> str:
        return print_spec(self)


def once(spec: GraphSpec, name: Hashable, make: Callable[..., _T], *args: Any) -> _T:
    """Return ``make(*args)``, made at the first call with ``name`` and kept with the graph."""
    try:
        found: _T = spec.derived[name]
    except KeyError:
        found = spec.derived[name] = make(*args)
    return found


def print_spec(
    spec: GraphSpec, is_default: Callable[[str, str, Attribute], bool] | None = None
) -> str:
    """The graph as readable Python with a type behind every line.

    ``is_default(op, attribute, value)`` leaves attributes out that say nothing.
    """
    lines = [f"def {spec.name}("]
    lines += [f"    {name}: {spec.tensors[name]}," for name in spec.inputs]
    lines.append("):")
    for node in spec.nodes:
        arguments = [name if name is not None else "None" for name in node.inputs]
        while arguments and arguments[-1] == "None":
            arguments.pop()
        arguments += [
            f"{key}={value!r}"
            for key, value in node.attrs
            if is_default is None or not is_default(node.op, key, value)
        ]
        results = [name if name is not None else "_" for name in node.outputs]
        while len(results) > 1 and results[-1] == "_":
            results.pop()
        types = ", ".join(str(spec.tensors[name]) for name in node.results)
        lines.append(f"    {', '.join(results)} = {node.op}({', '.join(arguments)})  # {types}")
    lines.append(f"    return {', '.join(spec.outputs)}")
    return "\n".join(lines)
