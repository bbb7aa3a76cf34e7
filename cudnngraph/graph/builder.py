"""The builder: declare tensors and ops, get a frozen :class:`~cudnngraph.ir.spec.GraphSpec`.

Nothing here raises on a mistake in the graph. Mistakes are collected, the result of a wrong op is
marked unknown so that it causes no further ones, and ``spec()`` or ``compile()`` reports them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..arguments import (
    NotPlain,
    is_a,
    plain,
    shown,
    tensor_mend,
    unreadable,
)
from ..errors import GraphError, PolicyError, Problem
from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    canonical_order,
    channels_last_strides,
    contiguous_strides,
    print_spec,
)
from ..ops.base import FLOATS, QUANTIZED, dtype_name
from ..ops.infer import check_dtype, check_name, check_shape, check_stride, check_whole
from ..ops.table import is_default
from ..policy import Policy
from .attention import AttentionMethods
from .conv import ConvMethods
from .loss import LossMethods
from .pooling import PoolingMethods
from .reading import declares
from .recipes import RecipeMethods
from .value import Value

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..policy import PolicyOptions
    from ..runtime.executable import Executable
    from ..runtime.trainable import Trainable


MOST_OPS_SHOWN = 6


def counted(ops: Iterable[str]) -> str:
    """ "2 conv, relu": names with how often each is there, the most frequent first."""
    found = Counter(ops).most_common()
    shown = [op if count == 1 else f"{count} {op}" for op, count in found[:MOST_OPS_SHOWN]]
    more = sum(count for _, count in found[MOST_OPS_SHOWN:])
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


@declares
class Graph(ConvMethods, AttentionMethods, PoolingMethods, LossMethods, RecipeMethods):
    """A graph under construction.

    ``name`` is a Python identifier. ``compute_dtype`` is the dtype of arithmetic: float32, or
    float64 when an input is float64. ``intermediate_dtype`` is what values between ops are kept in
    (default: ``compute_dtype``), but for what is cast to float64 and what is made of that.
    """

    def __init__(
        self,
        name: str = "graph",
        *,
        compute_dtype: torch.dtype | None = None,
        intermediate_dtype: torch.dtype | None = None,
    ) -> None:
        try:
            self.name = plain(name)
            self.problems: list[Problem] = list(check_name("graph", self.name))
        except NotPlain as reason:
            self.name = "graph"
            self.problems = [Problem("graph", f"name {reason}", "a Python identifier")]
        self._compute_dtype = compute_dtype
        self._intermediate_dtype = intermediate_dtype
        for label, dtype in (("compute", compute_dtype), ("intermediate", intermediate_dtype)):
            if dtype is not None and (
                not isinstance(dtype, torch.dtype) or not dtype.is_floating_point
            ):
                self.problems.append(
                    Problem(
                        "graph", f"{label}_dtype={shown(dtype)}", "a floating-point torch.dtype"
                    )
                )
        self._inputs: dict[str, Value] = {}
        self._outputs: list[tuple[str, Value, TensorSpec | None]] = []
        self._nodes: list[Node] = []
        self._frozen: tuple[tuple[int, ...], GraphSpec] | None = None
        self._values: dict[str, Value] = {}
        self._counts: dict[str, int] = {}
        self._scalars: dict[str, Value] = {}
        self._numbers: set[str] = set()  # their names
        self._tables: dict[tuple[str, str, bool], tuple[Value, Value]] = {}  # of rope

    def _value(self, name: str, spec: TensorSpec | None) -> Value:
        return Value(self, name, spec)

    # -- tensors -------------------------------------------------------------------------------

    def input(
        self,
        name: str,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        layout: str | None = None,
        stride: Sequence[int] | None = None,
        like: torch.Tensor | None = None,
    ) -> Value:
        """Declare an input.

        ``shape`` and ``dtype`` are given, or taken from the tensor ``like`` with its strides.
        ``layout`` is "contiguous" (the default) or "channels_last"; ``stride`` (elements) overrides
        both and may hold zeros for an expanded tensor.
        """
        where = f"input '{name}'"
        problems = check_name(where, name)
        if not problems and name in self._inputs:
            problems.append(Problem(where, "is declared twice", "a name of its own"))
        if like is not None:
            if not isinstance(like, torch.Tensor):
                kind, mend = type(like).__name__, tensor_mend(like)
                problems.append(Problem(where, f"like={kind}", "a torch.Tensor", mend))
            elif found := unreadable(f"{where}, like", like):
                problems += found
            else:
                shape = tuple(like.shape) if shape is None else shape
                dtype = like.dtype if dtype is None else dtype
                same = isinstance(shape, (tuple, list)) and tuple(shape) == tuple(like.shape)
                if stride is None and layout is None and same:
                    stride = tuple(like.stride())
        if not problems and (shape is None or dtype is None):
            missing = "shape" if shape is None else "dtype"
            problems.append(Problem(where, f"has no {missing}", "shape= and dtype=, or like="))
        spec = (
            None
            if problems
            else self._declared(where, name, shape, dtype, layout, stride, problems)
        )
        self.problems += problems
        value = Value(self, str(name), spec)
        self._inputs.setdefault(str(name), value)
        return value

    def output(
        self,
        name: str,
        value: Value,
        *,
        dtype: torch.dtype | None = None,
        layout: str | None = None,
        stride: Sequence[int] | None = None,
    ) -> None:
        """Declare that ``value`` is an output under ``name``.

        ``dtype`` defaults to the one that torch's op would give, strides to the layout that the op
        passes on (channels_last in, channels_last out).
        """
        where = f"output '{name}'"
        problems = check_name(where, name)
        if not problems and name.startswith("_"):
            problems.append(
                Problem(where, "name starts with an underscore", "a field of a named tuple")
            )
        if any(name == other for other, _, _ in self._outputs):
            problems.append(Problem(where, "is declared twice", "a name of its own"))
        if not isinstance(value, Value):
            problems.append(Problem(where, f"is a {type(value).__name__}", "a value of this graph"))
        elif value.graph is not self:
            problems.append(Problem(where, f"'{value.name.lstrip('%')}' belongs to another graph"))
        elif value.spec is not None and not problems:
            spec = value.spec
            dtype = spec.dtype if dtype is None else dtype
            if layout is None and stride is None:
                stride = spec.stride
            declared = self._declared(
                where, name, spec.shape, dtype, layout, stride, problems, written=True
            )
            if spec.dtype == torch.bool and dtype != torch.bool:
                problems.append(
                    Problem(where, f"dtype={dtype_name(dtype)} of a bool", "bool, or g.where of it")
                )
            elif spec.dtype != torch.bool and dtype == torch.bool:
                problems.append(Problem(where, "dtype=bool of a number", "a comparison of it"))
            elif spec.dtype in FLOATS and declared is not None and dtype not in FLOATS:
                mend = "g.quantize it first" if dtype in QUANTIZED else ""
                problems.append(
                    Problem(
                        where, f"dtype={dtype_name(dtype)} of a number", "a floating dtype", mend
                    )
                )
            elif (
                spec.dtype not in (*FLOATS, torch.bool)
                and declared is not None
                and dtype != spec.dtype
            ):
                kind = dtype_name(spec.dtype)
                what = f"dtype={dtype_name(dtype)} of {kind}"
                problems.append(Problem(where, what, kind, "g.dequantize it first"))
            self._outputs.append((name, value, declared))
        else:
            self._outputs.append((str(name), value, None))
        self.problems += problems

    def _declared(
        self,
        where: str,
        name: str,
        shape: Any,
        dtype: Any,
        layout: str | None,
        stride: Any,
        problems: list[Problem],
        *,
        written: bool = False,
    ) -> TensorSpec | None:
        dims, found = check_shape(where, shape)
        found += check_dtype(where, dtype)
        problems += found
        if dims is None:
            return None
        if layout not in (None, "contiguous", "channels_last"):
            problems.append(
                Problem(where, f"layout={layout!r} is unknown", "'contiguous' or 'channels_last'")
            )
            return None
        if layout is not None and stride is not None:
            problems.append(Problem(where, "has both layout and stride", "one of them"))
            return None
        if layout == "channels_last" and len(dims) not in (3, 4, 5):
            problems.append(
                Problem(where, f"layout='channels_last' with {len(dims)} dims", "3, 4 or 5 dims")
            )
            return None
        if stride is not None:
            steps, found = check_stride(where, dims, stride, written=written)
            problems += found
            if steps is None:
                return None
        elif layout == "channels_last":
            steps = channels_last_strides(dims)
        else:
            steps = contiguous_strides(dims)
        return None if found else TensorSpec(name, dims, steps, dtype)

    # -- taking back ---------------------------------------------------------------------------

    def mark(self) -> tuple[int, int]:
        """Return the state of the graph, for :meth:`undo`."""
        return len(self._nodes), len(self.problems)

    def undo(self, mark: tuple[int, int]) -> None:
        """Take back the ops, and the problems, since ``mark``; nothing may have used them."""
        del self.problems[mark[1] :]
        if len(self._nodes) == mark[0]:
            return
        for node in self._nodes[mark[0] :]:
            for name in node.results:
                self._values.pop(name, None)
        self._counts.clear()
        self._scalars = {
            bits: value for bits, value in self._scalars.items() if value.name in self._values
        }
        self._numbers &= set(self._values)
        self._tables = {
            key: tables
            for key, tables in self._tables.items()
            if all(self._values.get(table.name) is table for table in tables)
        }
        del self._nodes[mark[0] :]

    def drop_unused_inputs(self) -> None:
        """Take back the inputs that no declared output depends on."""
        results = [value.name for _, value, _ in self._outputs]
        nodes = canonical_order(self._nodes, results)
        used = {*results, *(name for node in nodes for name in node.operands)}
        self._inputs = {name: value for name, value in self._inputs.items() if name in used}

    # -- freezing ------------------------------------------------------------------------------

    def spec(self) -> GraphSpec:
        """The frozen graph, the same object until something is added to this one.

        Raises :class:`GraphError` with every problem found.
        """
        size = tuple(map(len, (self._inputs, self._nodes, self._outputs, self.problems)))
        if self._frozen is None or self._frozen[0] != size:
            self._frozen = (size, self._checked_spec())
        return self._frozen[1]

    def _checked_spec(self) -> GraphSpec:
        declared = [
            (name, value.name) for name, value, _ in self._outputs if isinstance(value, Value)
        ]
        nodes = canonical_order(self._nodes, [value for _, value in declared])
        used = {operand for node in nodes for operand in node.operands}
        problems = self.problems + check_whole(list(self._inputs), list(used), declared)
        if problems:
            raise GraphError(str(self.name), dict.fromkeys(problems))
        compute = self._compute_dtype
        if compute is None:
            wide = any(
                v.spec is not None and v.spec.dtype == torch.float64 for v in self._inputs.values()
            )
            compute = torch.float64 if wide else torch.float32
        return self._freeze(nodes, compute, self._intermediate_dtype or compute)

    def _freeze(
        self, nodes: Sequence[Node], compute: torch.dtype, intermediate: torch.dtype
    ) -> GraphSpec:
        """Outputs get their declared names; an intermediate keeps its own where that is free."""
        tensors = {name: value._known() for name, value in self._inputs.items()}
        rename = {name: name for name in self._inputs}
        outputs = []
        for name, value, declared in self._outputs:
            assert declared is not None
            rename[value.name] = name
            tensors[name] = declared
            outputs.append(name)
        taken = set(tensors)
        for result in (result for node in nodes for result in node.results):
            if result in rename:
                continue
            label = free = result.lstrip("%")
            count = 0
            while free in taken:
                count += 1
                free = f"{label}_{count}"
            taken.add(free)
            rename[result] = free
            spec = self._values[result]._known()
            is_wide = spec.dtype == torch.float64  # a cast to it, and what is made of that
            tensors[free] = TensorSpec(
                free,
                spec.shape,
                spec.stride,
                intermediate if spec.dtype in FLOATS and not is_wide else spec.dtype,
            )
        renamed = [
            Node(
                node.op,
                node.name,
                tuple(None if name is None else rename[name] for name in node.inputs),
                tuple(None if name is None else rename[name] for name in node.outputs),
                node.attrs,
            )
            for node in nodes
        ]
        return GraphSpec(
            self.name, tensors, tuple(renamed), tuple(self._inputs), tuple(outputs), compute
        )

    @overload
    def compile(
        self,
        device: torch.device | str | int | None = None,
        *,
        policy: Policy | None = None,
        training: Literal[False] = False,
        **options: Unpack[PolicyOptions],
    ) -> Executable: ...
    @overload
    def compile(
        self,
        device: torch.device | str | int | None = None,
        *,
        policy: Policy | None = None,
        training: Literal[True],
        check: bool | None = None,
        **options: Unpack[PolicyOptions],
    ) -> Trainable: ...
    def compile(
        self,
        device: torch.device | str | int | None = None,
        *,
        policy: Policy | None = None,
        training: bool = False,
        check: bool | None = None,
        **options: Any,
    ) -> Executable | Trainable:
        """An executable for this graph on ``device`` (default: "cuda" if there is one, else "cpu").

        On a CPU that is the reference executor, on CUDA cuDNN plans. Fields of
        :class:`~cudnngraph.Policy` may be given as keywords: ``compile(allow_tf32=True)``. With
        ``training=True`` a :class:`~cudnngraph.Trainable`, which torch autograd differentiates;
        ``check`` then compares its first results and gradients with the reference in float64 (by
        default as ``CUDNNGRAPH_CHECK`` says), and raises :class:`WrongResult` if one is off.
        Raises :class:`GraphError` with every mistake in the graph, :class:`NotSupported` with
        ``fallback="error"`` when cuDNN has no plan.
        """
        if type(training) is not bool:
            raise PolicyError(f"training {is_a(training)}; expected True or False")
        if not (check is None or type(check) is bool):
            raise PolicyError(f"check {is_a(check)}; expected True, False or None")
        if check is not None and not training:
            raise PolicyError("check is for training=True")
        from ..runtime.trainable import compile_graph

        return compile_graph(
            self.spec(), device, policy=policy, training=training, check=check, options=options
        )

    def __repr__(self) -> str:
        """One line, of a graph with mistakes too: ``str()`` of it is the whole."""
        ops = counted(node.op for node in self._nodes if node.op != "constant")
        inputs = ", ".join(map(repr, self._inputs.values()))
        outputs = ", ".join(str(name) for name, _, _ in self._outputs)
        parts = [f"ops: {ops or 'none'}", f"inputs: {inputs or 'none'}"]
        parts.append(f"outputs: {outputs or 'none'}")
        if self.problems:
            parts.append(f"{len(self.problems)} problem(s)")
        return f"<Graph {self.name}; {'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        """The graph as a notebook shows it."""
        try:
            text = str(self)
        except GraphError as error:
            text = f"{self!r}\n{error}"
        return f"<pre>{escape(text)}</pre>"

    def __str__(self) -> str:
        return print_spec(self.spec(), is_default)
