"""The builder: declare tensors and ops, get a frozen :class:`~cudnngraph.ir.spec.GraphSpec`.

Nothing here raises on a mistake in the graph. Mistakes are collected, the result of a wrong op is
marked unknown so that it causes no further ones, and ``spec()`` or ``compile()`` reports them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, overload

import torch

from ..arguments import (
    NotPlain,
    expected,
    is_a,
    items,
    neutral,
    plain,
    real,
    shown,
    unreadable,
    wrong_kind,
)
from ..errors import GraphError, PolicyError, Problem
from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    canonical_order,
    channels_last_strides,
    contiguous_strides,
    is_channels_last,
    is_contiguous,
    numel,
    print_spec,
)
from ..ops.base import FLOATS, OPS, QUANTIZED, dtype_name, is_default
from ..ops.infer import check_dtype, check_name, check_node, check_shape, check_stride, check_whole
from ..policy import Policy

if TYPE_CHECKING:
    from ..runtime.executable import Executable
    from ..runtime.trainable import Trainable

Scalar = int | float
Operand = Union["Value", Scalar]
Ints = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[Sequence[int]]


class Value:
    """A tensor of a graph under construction: what an op returns and the next one takes.

    Has ``shape``, ``dtype`` and ``stride`` as far as inference knows them, the arithmetic and
    ordering operators, and every op of the graph as a method: ``y.relu()`` is ``g.relu(y)``.
    """

    def __init__(self, graph: Graph, name: str, spec: TensorSpec | None) -> None:
        self.graph = graph
        self.name = name
        self.spec = spec

    def _known(self) -> TensorSpec:
        if self.spec is None:
            raise GraphError(self.graph.name, self.graph.problems)
        return self.spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes. Raises :class:`GraphError` when an earlier mistake leaves them unknown."""
        return self._known().shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that this value has as an output; inside a graph it is kept in the
        intermediate dtype."""
        return self._known().dtype

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._known().stride

    def __repr__(self) -> str:
        return f"<{self.name.lstrip('%')}: {self.spec if self.spec is not None else 'unknown'}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in METHODS:
            method = getattr(self.graph, name)
            return lambda *args, **kwargs: method(self, *args, **kwargs)
        raise AttributeError(f"a graph value has no attribute or op '{name}'")

    def __add__(self, other: Operand) -> Value:
        return self.graph.add(self, other)

    def __radd__(self, other: Scalar) -> Value:
        return self.graph.add(other, self)

    def __sub__(self, other: Operand) -> Value:
        return self.graph.sub(self, other)

    def __rsub__(self, other: Scalar) -> Value:
        return self.graph.sub(other, self)

    def __mul__(self, other: Operand) -> Value:
        return self.graph.mul(self, other)

    def __rmul__(self, other: Scalar) -> Value:
        return self.graph.mul(other, self)

    def __truediv__(self, other: Operand) -> Value:
        return self.graph.div(self, other)

    def __rtruediv__(self, other: Scalar) -> Value:
        return self.graph.div(other, self)

    def __pow__(self, other: Operand) -> Value:
        return self.graph.pow(self, other)

    def __rpow__(self, other: Scalar) -> Value:
        return self.graph.pow(other, self)

    def __matmul__(self, other: Value) -> Value:
        return self.graph.matmul(self, other)

    def __neg__(self) -> Value:
        return self.graph.neg(self)

    def __lt__(self, other: Operand) -> Value:
        return self.graph.lt(self, other)

    def __le__(self, other: Operand) -> Value:
        return self.graph.le(self, other)

    def __gt__(self, other: Operand) -> Value:
        return self.graph.gt(self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.graph.ge(self, other)


Method = TypeVar("Method", bound=Callable[..., Any])

# The annotation of an operand → whether there has to be one.
_OPERANDS = {"Value": True, "Operand": True, "Value | None": False}


def _reads(method: Method) -> Method:
    """A method of the builder that gets plain arguments (:mod:`~cudnngraph.arguments`), and
    operands that are values of its graph.

    What is none is reported here. In the place of an operand then stands an unknown value, in that
    of an attribute its default beside unknown operands, so that no further mistakes are found.
    """
    own = list(inspect.signature(method).parameters.values())[1:]
    order = [each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
    annotations = {each.name: str(each.annotation) for each in own}
    op = method.__name__
    defaults = {
        each.name: neutral(annotations[each.name]) if each.default is each.empty else each.default
        for each in own
    }
    operands = {name for name, annotation in annotations.items() if annotation in _OPERANDS}
    # The rule of an op checks its attributes, and a declaration what it declares.
    checks_kinds = op not in (*OPS, "input", "output")

    @wraps(method)
    def read(self: Graph, /, *args: Any, **named: Any) -> Any:
        if len(args) > len(order) or not named.keys().isdisjoint(order[: len(args)]):
            return method(self, *args, **named)  # Python says what is wrong
        given = {**dict(zip(order, args, strict=False)), **named}
        problems: list[Problem] = []
        attributes_fit = True
        for name, value in given.items():
            if (type(value) is Value and value.graph is self) or (op, name) == ("output", "value"):
                continue
            annotation = annotations.get(name, "Any")
            if name in operands:
                needed = _OPERANDS[annotation]
                where = self._place(op, given)
                given[name] = self._operand(where, name, value, problems, needed=needed)
                continue
            try:
                if annotation == "Sequence[Value]":
                    given[name] = [
                        self._operand(
                            self._place(op, given), f"{name}{at}", item, problems, needed=True
                        )
                        for at, item in enumerate(items(value))
                    ]
                    continue
                given[name] = plain(value, (torch.Tensor,) if "torch.Tensor" in annotation else ())
                found = wrong_kind("", name, given[name], annotation) if checks_kinds else []
            except NotPlain as reason:
                found = [Problem("", f"{name} {reason}", expected(annotation))]
            if found:
                problems += [replace(each, where=self._place(op, given)) for each in found]
                given[name] = defaults.get(name)
                attributes_fit = False
        self.problems += problems
        if not attributes_fit:
            if not operands:  # the declaration of one
                return Value(self, "?", None)
            given = {name: _unknown_of(self, value) for name, value in given.items()}
        return method(self, **given)

    return read  # type: ignore[return-value]


def _unknown_of(graph: Graph, value: Any) -> Any:
    """An operand, or a row of them, of which nothing is known."""
    if type(value) is list:
        return [_unknown_of(graph, each) if isinstance(each, Value) else each for each in value]
    if not isinstance(value, Value):
        return value
    return Value(graph, value.name if value.graph is graph else "?", None)


# Methods that take no part in declaring a graph.
_OTHERS = frozenset({"compile", "spec", "mark", "undo", "drop_unused_inputs"})


def _declares(kind: type[Graph]) -> type[Graph]:
    """A class whose public methods, but for some, read their arguments by :func:`_reads`."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_") and name not in _OTHERS:
            setattr(kind, name, _reads(method))
    return kind


def _of_one_dtype(*values: Value | None) -> bool:
    """Whether those that are given, and known, are."""
    return len({value.spec.dtype for value in values if value is not None and value.spec}) < 2


@_declares
class Graph:
    """A graph under construction.

    ``name`` is a Python identifier. ``compute_dtype`` is the dtype of arithmetic: float32, or
    float64 when an input is float64. ``intermediate_dtype`` is what values between ops are kept in
    (default: ``compute_dtype``).
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
        self._scalars: dict[str, Value] = {}
        self._numbers: set[str] = set()  # their names
        self._tables: dict[tuple[str, str, bool], tuple[Value, Value]] = {}  # of rope

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
                problems.append(Problem(where, f"like={type(like).__name__}", "a torch.Tensor"))
            elif found := unreadable(f"{where}, like", like):
                problems += found
            else:
                shape = tuple(like.shape) if shape is None else shape
                dtype = like.dtype if dtype is None else dtype
                if stride is None and layout is None and tuple(shape) == tuple(like.shape):
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

    # -- applying an op ------------------------------------------------------------------------

    def _operand(
        self, where: str, port: str, value: Any, problems: list[Problem], *, needed: bool = False
    ) -> Value | None:
        """A value of this graph; an unknown one for what is none, which is reported."""
        try:
            value = plain(value, (Value,))
        except NotPlain as reason:
            mend = "declare it with g.input" if isinstance(value, torch.Tensor) else ""
            problems.append(Problem(where, f"{port} {reason}", "a value of this graph", mend))
            return Value(self, "?", None)
        if value is None and not needed:
            return None
        if isinstance(value, Value):
            if value.graph is self:
                return value
            problems.append(
                Problem(where, f"{port} '{value.name.lstrip('%')}' belongs to another graph")
            )
        elif real(value):
            return self._scalar(float(value))
        elif value is None:
            problems.append(Problem(where, f"{port} is missing", f"a value for {port}"))
        else:
            problems.append(Problem(where, f"{port} {is_a(value)}", "a value of this graph"))
        return Value(self, "?", None)

    def _place(self, op: str, given: Mapping[str, Any]) -> str:
        """How a problem with an argument names the op: by its label, or as that is to be."""
        name = given.get("name")
        if type(name) is str and op in (*OPS, "input", "output"):
            return f"{op} '{name}'"
        return f"{op} '{self._unique(op)}'" if op in OPS else op

    def _scalar(self, number: float) -> Value:
        bits = number.hex()  # tells 0.0 from -0.0
        if bits not in self._scalars:
            value = self._scalars[bits] = self._apply("constant", (), {"value": number})[0]
            self._numbers.add(value.name)
        return self._scalars[bits]

    def _unique(self, name: str) -> str:
        """A free label for a node. Values carry it behind a "%", so no input can take it later."""
        count, free = 0, name
        while f"%{free}" in self._values:
            count += 1
            free = f"{name}_{count}"
        return free

    def _apply(
        self, op: str, operands: Sequence[Any], attrs: dict[str, Any], name: str | None = None
    ) -> list[Value]:
        row = OPS[op]
        ports = row.ports_of(len(operands))
        label = self._unique(op) if name is None else name
        where = f"{op} '{label}'"
        problems = [] if name is None else check_name(where, name)
        if name is not None and f"%{name}" in self._values:
            problems.append(Problem(where, "has a name that is taken", "a name of its own"))
            label = self._unique(str(name))
        values = [
            self._operand(where, port, value, problems)
            for port, value in zip(ports, operands, strict=True)
        ]
        unknown = any(value is not None and value.spec is None for value in values)
        specs = {
            port: None if value is None or value.spec is None else value.spec
            for port, value in zip(ports, values, strict=True)
        }
        if problems or unknown:
            results: tuple[TensorSpec | None, ...] = (None,) * len(row.outputs)
            node_attrs: tuple[tuple[str, Any], ...] = ()
        else:
            numbers = [
                port
                for port, value in zip(ports, values, strict=True)
                if value is not None and value.name in self._numbers
            ]
            checked = check_node(op, label, specs, attrs, numbers)
            problems += checked.problems
            results, node_attrs = checked.results, checked.attrs
        self.problems += problems
        failed = bool(problems) or unknown
        outputs = []
        for index, spec in enumerate(results):
            port_name = f"%{label}" if index == 0 else f"%{label}_{row.outputs[index]}"
            outputs.append(Value(self, port_name, spec))
            if index == 0 or spec is not None:
                self._values[port_name] = outputs[-1]
        self._nodes.append(
            Node(
                op,
                label,
                tuple(None if value is None else value.name for value in values),
                tuple(
                    value.name if value.spec is not None or (failed and index == 0) else None
                    for index, value in enumerate(outputs)
                ),
                node_attrs,
            )
        )
        return outputs

    def _all_known(self, where: str, **values: Any) -> bool:
        """Whether all are values whose shapes are known; what is no value is reported."""
        made = [self._operand(where, port, value, self.problems) for port, value in values.items()]
        for port, value in values.items():
            if value is None:
                self.problems.append(Problem(where, f"{port} is None", "a value of this graph"))
        return all(value is not None and value.spec is not None for value in made)

    def _unknown(self, *values: Any) -> Value:
        """The result of a composition with a mistake, which counts its operands as used."""
        mine = [value for value in values if isinstance(value, Value) and value.graph is self]
        operands = [Value(self, value.name, None) for value in mine]
        if not operands:
            return Value(self, "?", None)
        return self._apply("concat", operands, {"dim": 0})[0]

    def _one(self, op: str, /, *operands: Any, name: str | None = None, **attrs: Any) -> Value:
        return self._apply(op, operands, attrs, name)[0]

    # -- taking back ---------------------------------------------------------------------------

    def mark(self) -> tuple[int, int]:
        """Where the graph stands, for :meth:`undo`."""
        return len(self._nodes), len(self.problems)

    def undo(self, mark: tuple[int, int]) -> None:
        """Take back the ops, and the problems, since ``mark``; nothing may have used them."""
        for node in self._nodes[mark[0] :]:
            for name in node.results:
                self._values.pop(name, None)
        self._scalars = {
            bits: value for bits, value in self._scalars.items() if value.name in self._values
        }
        self._numbers &= set(self._values)
        del self._nodes[mark[0] :], self.problems[mark[1] :]

    def drop_unused_inputs(self) -> None:
        """Take back the inputs that no declared output depends on."""
        nodes = canonical_order(self._nodes, [value.name for _, value, _ in self._outputs])
        used = {name for node in nodes for name in node.operands}
        self._inputs = {name: value for name, value in self._inputs.items() if name in used}

    # -- convolution ---------------------------------------------------------------------------

    def conv(
        self,
        x: Value,
        weight: Value,
        *,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        name: str | None = None,
    ) -> Value:
        """Convolution in 1, 2 or 3 spatial dims (torch.nn.functional.conv2d without its bias).

        x (N, C, spatial...), weight (K, C/groups, kernel...) of one dtype → (N, K, out...), with
        ``out = floor((in + before + after - dilation * (kernel - 1) - 1) / stride) + 1``.
        ``padding`` is an int, one per dim, (before, after) pairs per dim, "valid" or "same".
        Of int8 the result is int32, of FP8 (either format, or one of each) float32.
        """
        return self._one(
            "conv",
            x,
            weight,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            name=name,
        )

    def conv_transpose(
        self,
        x: Value,
        weight: Value,
        *,
        stride: Ints = 1,
        padding: Padding = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
        name: str | None = None,
    ) -> Value:
        """Transposed convolution in 1, 2 or 3 spatial dims (F.conv_transpose2d without its bias).

        x (N, C, spatial...), weight (C, K/groups, kernel...) → (N, K, out...), with ``out =
        (in - 1) * stride - before - after + dilation * (kernel - 1) + output_padding + 1``.
        Of int8 the result is int32, of FP8 float32.
        """
        return self._one(
            "conv_transpose",
            x,
            weight,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            dilation=dilation,
            name=name,
        )

    def conv_wgrad(
        self,
        dy: Value,
        x: Value,
        *,
        kernel: Ints,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        name: str | None = None,
    ) -> Value:
        """Gradient of a convolution's weight, of ``conv(x, weight, ...)`` with the result's dy.

        dy (N, K, out...), x (N, C, spatial...) of one dtype → (K, C/groups, kernel...);
        ``kernel`` holds the weight's spatial sizes, which dy and x do not tell. The gradient of x
        is ``conv_transpose(dy, weight, ...)``.
        """
        return self._one(
            "conv_wgrad",
            dy,
            x,
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            name=name,
        )

    # -- per channel ---------------------------------------------------------------------------

    def bias(self, x: Value, bias: Value, *, name: str | None = None) -> Value:
        """x + bias, bias (C,) along dim 1 of x (N, C, ...). bias has x's dtype, or float32.

        Also (1, C, 1, ...) and, for each image its own, (N, C, 1, ...).
        """
        return self._one("bias", x, bias, name=name)

    def scale(self, x: Value, scale: Value, *, name: str | None = None) -> Value:
        """x * scale, scale (C,) along dim 1 of x (N, C, ...). scale has x's dtype, or float32.

        Also (1, C, 1, ...) and, for each image its own, (N, C, 1, ...).
        """
        return self._one("scale", x, scale, name=name)

    def batch_norm(
        self,
        x: Value,
        running_mean: Value,
        running_var: Value,
        weight: Value | None = None,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
        name: str | None = None,
    ) -> Value:
        """Batch normalisation with given statistics (F.batch_norm with training=False).

        ``(x - mean) / sqrt(var + eps) * weight + bias`` along dim 1; parameters (C,) in x's dtype
        or float32.
        """
        return self._one(
            "batch_norm", x, running_mean, running_var, weight, bias, eps=eps, name=name
        )

    def batch_norm_apply(
        self,
        x: Value,
        mean: Value,
        inv_std: Value,
        weight: Value,
        bias: Value,
        *,
        name: str | None = None,
    ) -> Value:
        """``(x - mean) * inv_std * weight + bias`` along dim 1: what :meth:`batch_norm_train` does
        with the statistics it has found. Parameters (C,) in x's dtype or float32.
        """
        return self._one("batch_norm_apply", x, mean, inv_std, weight, bias, name=name)

    def batch_norm_train(
        self,
        x: Value,
        weight: Value,
        bias: Value,
        running_mean: Value | None = None,
        running_var: Value | None = None,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Batch normalisation with the batch's own statistics (F.batch_norm with training=True).

        x (N, C, ...), the rest (C,) in x's dtype or float32 → (y, mean, inv_std), mean and
        1 / sqrt(var + eps) of the batch, (C,) in float32, var biased. With the running statistics
        two more: ``(1 - momentum) * running + momentum * batch``, there with the unbiased variance.
        Gradients flow through y alone.
        """
        outputs = self._apply(
            "batch_norm_train",
            (x, weight, bias, running_mean, running_var),
            {"eps": eps, "momentum": momentum},
            name,
        )
        return tuple(outputs[:3] if running_mean is None and running_var is None else outputs)

    def batch_norm_backward(
        self,
        dy: Value,
        x: Value,
        weight: Value,
        mean: Value,
        inv_std: Value,
        *,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dx, dweight, dbias) of :meth:`batch_norm_train` from its y's dy.

        dy has the shape and dtype of x; mean and inv_std are those that the forward returned.
        """
        return tuple(self._apply("batch_norm_backward", (dy, x, weight, mean, inv_std), {}, name))

    def instance_norm(
        self,
        x: Value,
        weight: Value | None = None,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
        return_stats: bool = False,
        name: str | None = None,
    ) -> Any:
        """Normalisation of each channel of each image (F.instance_norm without running statistics).

        ``(x - mean) / sqrt(var + eps) * weight + bias`` over the spatial dims of x (N, C, ...);
        weight and bias, both or neither, (C,) in x's dtype or float32. → y like x; with
        ``return_stats=True`` the three (y, mean, inv_std), the latter two float32, (N, C, 1, ...).
        """
        outputs = self._apply(
            "instance_norm", (x, weight, bias), {"eps": eps, "return_stats": return_stats}, name
        )
        return tuple(outputs) if return_stats is True else outputs[0]

    def instance_norm_backward(
        self,
        dy: Value,
        x: Value,
        mean: Value,
        inv_std: Value,
        weight: Value | None = None,
        *,
        name: str | None = None,
    ) -> Any:
        """Gradients (dx, dweight, dbias) of :meth:`instance_norm` from its y's dy.

        dy has the shape and dtype of x; mean and inv_std are those that the forward returned.
        Without a weight dx alone.
        """
        outputs = self._apply("instance_norm_backward", (dy, x, mean, inv_std, weight), {}, name)
        return outputs[0] if weight is None else tuple(outputs)

    def group_affine(
        self,
        x: Value,
        num_groups: int,
        weight: Value | None = None,
        *,
        eps: float = 1e-5,
        name: str | None = None,
    ) -> Any:
        """What makes a group norm of each channel of each image, ``(x + shift) * factor``.

        x (N, C, ...), weight (C,) in x's dtype or float32 → shift and factor (N, C, 1, ...) in
        float32, or float64 of such an x: ``-mean`` of the channel's group, and ``weight / sqrt(var
        + eps)``. For inference: it has no gradient.
        """
        attrs = {"num_groups": num_groups, "eps": eps}
        return tuple(self._apply("group_affine", (x, weight), attrs, name))

    def group_norm(
        self,
        x: Value,
        num_groups: int,
        weight: Value | None = None,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
    ) -> Value:
        """F.group_norm: each group of channels of each image, then * weight + bias per channel.

        x (N, C, ...), weight and bias (C,) in x's dtype or float32. An :meth:`instance_norm` over
        groups in the place of channels, x seen as (N, num_groups, ...): a channels_last x is copied
        for it, and y is contiguous. For inference :meth:`group_affine` copies nothing.
        """
        spec = x.spec
        if spec is None or len(spec.shape) < 2 or num_groups < 1 or spec.shape[1] % num_groups:
            if spec is not None:
                what = f"x '{spec.name}' has shape {spec.shape}, num_groups={num_groups!r}"
                self.problems.append(
                    Problem("group_norm", what, "(N, C, ...) with C % num_groups == 0")
                )
            return self._unknown(*(v for v in (x, weight, bias) if v is not None))
        n, c = spec.shape[:2]
        if num_groups == c and (weight is None) == (bias is None) and spec.shape[2:]:
            return self.instance_norm(x, weight, bias, eps=eps)  # type: ignore[no-any-return]
        width = numel(spec.shape[1:]) // num_groups
        y = self.instance_norm(self.reshape(x, (n, num_groups, width)), eps=eps)
        y = self.reshape(y, spec.shape)
        # cuDNN gets a vector wrong that broadcasts over images and elements, so it is repeated for
        # each image: a column beside the matrix that a contiguous image is.
        shape = (n, c, *(1,) * (len(spec.shape) - 2))
        for apply, vector in ((self.scale, weight), (self.bias, bias)):
            if vector is not None:
                each = self.expand(vector, (n, c), (1,))
                y = apply(y, self.reshape(each, shape))
        return y

    # -- shape -----------------------------------------------------------------------------------

    def reduction(
        self,
        x: Value,
        dims: Ints | None = None,
        mode: str = "sum",
        keepdim: bool | Sequence[int] = False,
        *,
        name: str | None = None,
    ) -> Value:
        """The sum, mean, max or min of x, or the max of |x| (amax), over ``dims`` (None for all).

        Reduced dims are dropped, or stay with size 1: all with ``keepdim=True``, or those that
        ``keepdim`` lists.
        """
        return self._one("reduction", x, dims=dims, mode=mode, keepdim=keepdim, name=name)

    def expand(
        self,
        x: Value,
        shape: Sequence[int],
        dims: Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """x repeated to ``shape``; dim i of x becomes dim ``dims[i]``, its size that or 1.

        ``dims`` ascends and defaults to the last ones, as torch's expand. ``(C,)`` with
        ``dims=(1,)`` is set along the channels.
        """
        return self._one("expand", x, shape=shape, dims=dims, name=name)

    # -- normalisation over trailing dims ------------------------------------------------------

    def layer_norm(
        self,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
        return_stats: bool = False,
        name: str | None = None,
    ) -> Any:
        """Layer normalisation over the dims of the weight (F.layer_norm), the last ones of x.

        ``(x - mean) / sqrt(var + eps) * weight + bias``; weight and bias have the shape of those
        dims, and x's dtype or float32. → y like x; with ``return_stats=True`` the three
        (y, mean, inv_std), the latter two float32, x's shape with 1 for every normalised dim.
        """
        outputs = self._apply(
            "layer_norm", (x, weight, bias), {"eps": eps, "return_stats": return_stats}, name
        )
        return tuple(outputs) if return_stats is True else outputs[0]

    def rms_norm(
        self,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
        return_stats: bool = False,
        name: str | None = None,
    ) -> Any:
        """Root-mean-square normalisation over the dims of the weight (F.rms_norm), x's last ones.

        ``x / sqrt(mean(x * x) + eps) * weight + bias``; weight and bias have the shape of those
        dims, and x's dtype or float32. → y like x; with ``return_stats=True`` the pair
        (y, inv_std), inv_std float32, x's shape with 1 for every normalised dim.
        """
        outputs = self._apply(
            "rms_norm", (x, weight, bias), {"eps": eps, "return_stats": return_stats}, name
        )
        return tuple(outputs) if return_stats is True else outputs[0]

    def normalize(self, x: Value, *, eps: float = 1e-12, name: str | None = None) -> Value:
        """x (..., D) by the Euclidean norm of each row (F.normalize over the last dim).

        ``x / max(sqrt(sum(x * x)), eps)`` → y like x. The sums are taken in float32, so rows of
        zeros stay zeros in float16 too, where torch's eps is 0.
        """
        return self._one("normalize", x, eps=eps, name=name)

    def layer_norm_backward(
        self,
        dy: Value,
        x: Value,
        weight: Value,
        mean: Value,
        inv_std: Value,
        *,
        bias_grad: bool = True,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dx, dweight, dbias) of :meth:`layer_norm` from its y's dy.

        dy has the shape and dtype of x; mean and inv_std are those that the forward returned.
        ``bias_grad=False`` leaves the last one out.
        """
        outputs = self._apply(
            "layer_norm_backward", (dy, x, weight, mean, inv_std), {"bias_grad": bias_grad}, name
        )
        return tuple(outputs if bias_grad is True else outputs[:2])

    def rms_norm_backward(
        self,
        dy: Value,
        x: Value,
        weight: Value,
        inv_std: Value,
        *,
        bias_grad: bool = True,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dx, dweight, dbias) of :meth:`rms_norm` from its y's dy.

        dy has the shape and dtype of x; inv_std is the one that the forward returned.
        ``bias_grad=False`` leaves the last one out.
        """
        outputs = self._apply(
            "rms_norm_backward", (dy, x, weight, inv_std), {"bias_grad": bias_grad}, name
        )
        return tuple(outputs if bias_grad is True else outputs[:2])

    # -- matrix product ------------------------------------------------------------------------

    def matmul(self, x: Value, y: Value, *, name: str | None = None) -> Value:
        """Matrix product, also ``x @ y`` (torch.matmul of 2 to 4 dims).

        x (..., M, K), y (..., K, N) of one dtype → (..., M, N), contiguous; the dims before the
        last two broadcast. A transposed operand is one of other strides. Of int8 the result is
        int32, of FP8 (either format, or one of each) float32.
        """
        return self._one("matmul", x, y, name=name)

    # -- quantisation --------------------------------------------------------------------------

    def dequantize(
        self,
        x: Value,
        scale: Value,
        *,
        dim: int = 1,
        zero_point: int = 0,
        name: str | None = None,
    ) -> Value:
        """x * scale, in float32: the numbers that 8-bit data, or the sums of their products, mean.

        x int8 or FP8, the int32 that products of int8 give, or the float32 of FP8's; scale float32,
        () or (1,) for all of x, or a vector along ``dim``. ``zero_point`` can only be 0.
        """
        return self._one("dequantize", x, scale, dim=dim, zero_point=zero_point, name=name)

    def quantize(
        self,
        x: Value,
        scale: Value | None = None,
        *,
        dtype: torch.dtype,
        dim: int = 1,
        zero_point: int = 0,
        name: str | None = None,
    ) -> Value:
        """x / scale in an 8-bit dtype: rounded to nearest, ties to even, and saturated.

        x of a floating dtype; scale as in :meth:`dequantize`, or None for 1. ``dtype`` is
        torch.int8 (-128 to 127), float8_e4m3fn (up to 448) or float8_e5m2 (up to 57344), in which
        what is not finite is NaN. ``zero_point`` can only be 0.
        """
        return self._one(
            "quantize", x, scale, dtype=dtype, dim=dim, zero_point=zero_point, name=name
        )

    # -- activations ---------------------------------------------------------------------------

    def relu(self, x: Value, *, name: str | None = None) -> Value:
        """max(x, 0)."""
        return self._one("relu", x, name=name)

    def leaky_relu(
        self, x: Value, negative_slope: float = 0.01, *, name: str | None = None
    ) -> Value:
        """x where x > 0, else negative_slope * x."""
        return self._one("leaky_relu", x, negative_slope=negative_slope, name=name)

    def elu(self, x: Value, alpha: float = 1.0, *, name: str | None = None) -> Value:
        """x where x > 0, else alpha * (exp(x) - 1)."""
        return self._one("elu", x, alpha=alpha, name=name)

    def gelu(self, x: Value, approximate: str = "none", *, name: str | None = None) -> Value:
        """x * Phi(x), by erf ("none") or by tanh ("tanh")."""
        if approximate not in ("none", "tanh"):
            self.problems.append(
                Problem(
                    f"gelu '{name or 'gelu'}'", f"approximate={approximate!r}", "'none' or 'tanh'"
                )
            )
        return self._one("gelu_tanh" if approximate == "tanh" else "gelu", x, name=name)

    def gelu_tanh(self, x: Value, *, name: str | None = None) -> Value:
        """GELU by its tanh approximation."""
        return self._one("gelu_tanh", x, name=name)

    def silu(self, x: Value, *, name: str | None = None) -> Value:
        """x * sigmoid(x), also called swish."""
        return self._one("silu", x, name=name)

    def sigmoid(self, x: Value, *, name: str | None = None) -> Value:
        """1 / (1 + exp(-x))."""
        return self._one("sigmoid", x, name=name)

    def tanh(self, x: Value, *, name: str | None = None) -> Value:
        """Hyperbolic tangent."""
        return self._one("tanh", x, name=name)

    def softplus(self, x: Value, beta: float = 1.0, *, name: str | None = None) -> Value:
        """log(1 + exp(beta * x)) / beta."""
        return self._one("softplus", x, beta=beta, name=name)

    def clamp(
        self,
        x: Value,
        min: float | None = None,
        max: float | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """x held within [min, max]; either bound may be None.

        The gradient at a bound is 0, whichever torch is installed, as of its relu, relu6 and
        hardtanh. torch.clamp's is 0 from 2.14 on, and was dy before.
        """
        return self._one("clamp", x, min=min, max=max, name=name)

    def relu_backward(
        self, dy: Value, y: Value, negative_slope: float = 0.0, *, name: str | None = None
    ) -> Value:
        """dy where y > 0, else negative_slope * dy; y is the relu's result, or what went in."""
        return self._one("relu_backward", dy, y, negative_slope=negative_slope, name=name)

    def gelu_backward(self, dy: Value, x: Value, *, name: str | None = None) -> Value:
        """dy times the slope of gelu at x."""
        return self._one("gelu_backward", dy, x, name=name)

    def gelu_tanh_backward(self, dy: Value, x: Value, *, name: str | None = None) -> Value:
        """dy times the slope of gelu_tanh at x."""
        return self._one("gelu_tanh_backward", dy, x, name=name)

    def silu_backward(self, dy: Value, x: Value, *, name: str | None = None) -> Value:
        """dy times the slope of silu at x."""
        return self._one("silu_backward", dy, x, name=name)

    def relu6(self, x: Value) -> Value:
        """x held within [0, 6]."""
        return self.clamp(x, 0.0, 6.0)

    def hardswish(self, x: Value) -> Value:
        """x * relu6(x + 3) / 6, as a composition."""
        return self.mul(x, self.mul(self.relu6(self.add(x, 3.0)), 1.0 / 6.0))

    # -- arithmetic ----------------------------------------------------------------------------

    def add(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x + y, broadcasting as torch does; so for the other arithmetic.

        The result's dtype is torch's: operands with dims decide it, then those without, then
        numbers. Of those that decide, float32 may stand beside one 16-bit dtype, no others mix.
        """
        return self._one("add", x, y, name=name)

    def sub(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x - y."""
        return self._one("sub", x, y, name=name)

    def mul(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x * y."""
        return self._one("mul", x, y, name=name)

    def div(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x / y."""
        return self._one("div", x, y, name=name)

    def pow(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x to the power y."""
        return self._one("pow", x, y, name=name)

    def minimum(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """The smaller of x and y."""
        return self._one("minimum", x, y, name=name)

    def maximum(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """The larger of x and y."""
        return self._one("maximum", x, y, name=name)

    def identity(self, x: Value, *, name: str | None = None) -> Value:
        """x itself; with ``output(dtype=..., layout=...)`` a conversion."""
        return self._one("identity", x, name=name)

    def to_float(self, x: Value, *, name: str | None = None) -> Value:
        """x (uint8, int8 or int32) as float32."""
        return self._one("to_float", x, name=name)

    def neg(self, x: Value, *, name: str | None = None) -> Value:
        """-x."""
        return self._one("neg", x, name=name)

    def abs(self, x: Value, *, name: str | None = None) -> Value:
        """|x|."""
        return self._one("abs", x, name=name)

    def exp(self, x: Value, *, name: str | None = None) -> Value:
        """e to the power x."""
        return self._one("exp", x, name=name)

    def log(self, x: Value, *, name: str | None = None) -> Value:
        """Natural logarithm."""
        return self._one("log", x, name=name)

    def sqrt(self, x: Value, *, name: str | None = None) -> Value:
        """Square root."""
        return self._one("sqrt", x, name=name)

    def rsqrt(self, x: Value, *, name: str | None = None) -> Value:
        """1 / sqrt(x)."""
        return self._one("rsqrt", x, name=name)

    def reciprocal(self, x: Value, *, name: str | None = None) -> Value:
        """1 / x."""
        return self._one("reciprocal", x, name=name)

    def erf(self, x: Value, *, name: str | None = None) -> Value:
        """Gauss error function."""
        return self._one("erf", x, name=name)

    # -- comparison and selection --------------------------------------------------------------

    def eq(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x == y, as bool; so for the other comparisons."""
        return self._one("eq", x, y, name=name)

    def ne(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x != y."""
        return self._one("ne", x, y, name=name)

    def lt(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x < y."""
        return self._one("lt", x, y, name=name)

    def le(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x <= y."""
        return self._one("le", x, y, name=name)

    def gt(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x > y."""
        return self._one("gt", x, y, name=name)

    def ge(self, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x >= y."""
        return self._one("ge", x, y, name=name)

    def logical_and(self, x: Value, y: Value, *, name: str | None = None) -> Value:
        """x and y, both bool."""
        return self._one("logical_and", x, y, name=name)

    def logical_or(self, x: Value, y: Value, *, name: str | None = None) -> Value:
        """x or y, both bool."""
        return self._one("logical_or", x, y, name=name)

    def logical_not(self, x: Value, *, name: str | None = None) -> Value:
        """not x, bool."""
        return self._one("logical_not", x, name=name)

    def where(self, condition: Value, x: Operand, y: Operand, *, name: str | None = None) -> Value:
        """x where condition (bool) holds, else y; what is not selected may be NaN."""
        return self._one("where", condition, x, y, name=name)

    # -- views and concatenation ---------------------------------------------------------------

    def reshape(self, x: Value, shape: Sequence[int], *, name: str | None = None) -> Value:
        """The elements of x, in logical order, in another shape; one size may be -1.

        The result lies in memory as torch's does: as x, where strides can say it, else contiguous.
        """
        return self._one("reshape", x, shape=shape, name=name)

    def transpose(self, x: Value, dim0: int, dim1: int, *, name: str | None = None) -> Value:
        """x with two of its dims exchanged. No element moves: the order of the strides changes."""
        return self._one("transpose", x, dim0=dim0, dim1=dim1, name=name)

    def permute(self, x: Value, dims: Sequence[int], *, name: str | None = None) -> Value:
        """x with its dims in the order ``dims``. No element moves: the order of strides changes."""
        return self._one("permute", x, dims=dims, name=name)

    def slice(
        self,
        x: Value,
        dim: int,
        start: int = 0,
        stop: int | None = None,
        step: int = 1,
        *,
        name: str | None = None,
    ) -> Value:
        """Elements start, start + step, … before stop along one dim of x, as Python slices do."""
        return self._one("slice", x, dim=dim, start=start, stop=stop, step=step, name=name)

    def concat(self, x: Sequence[Value], dim: int = 0, *, name: str | None = None) -> Value:
        """The tensors of the list x, of one dtype, one behind the other along ``dim`` (torch.cat).

        The result lies in memory as they do where all lie alike (channels_last, say), else
        contiguous.
        """
        if not x:
            label = name or "concat"
            self.problems.append(
                Problem(f"concat '{label}'", f"x is {x!r}", "a list of one value or more")
            )
            return Value(self, "?", None)
        return self._one("concat", *x, dim=dim, name=name)

    # -- softmax and its loss ------------------------------------------------------------------

    def softmax(self, x: Value, dim: int, *, name: str | None = None) -> Value:
        """exp(x) over its sum along ``dim`` (F.softmax)."""
        return self._one("softmax", x, dim=dim, name=name)

    def softmax_backward(self, dy: Value, y: Value, dim: int, *, name: str | None = None) -> Value:
        """Gradient of :meth:`softmax` from dy and its result y."""
        return self._one("softmax_backward", dy, y, dim=dim, name=name)

    def log_softmax(self, x: Value, dim: int, *, name: str | None = None) -> Value:
        """The logarithm of :meth:`softmax` along ``dim`` (F.log_softmax)."""
        return self._one("log_softmax", x, dim=dim, name=name)

    def log_softmax_backward(
        self, dy: Value, y: Value, dim: int, *, name: str | None = None
    ) -> Value:
        """Gradient of :meth:`log_softmax` from dy and its result y."""
        return self._one("log_softmax_backward", dy, y, dim=dim, name=name)

    def nll_loss(
        self,
        x: Value,
        target: Value,
        reduction: str = "mean",
        ignore_index: int = -100,
        *,
        name: str | None = None,
    ) -> Value:
        """-x at each row's class (F.nll_loss without weights).

        x (N, C, ...) logarithms of probabilities, target (N, ...) int64 → a number for the "mean"
        or the "sum" over rows whose class is not ``ignore_index``, (N, ...) for "none".
        """
        return self._one(
            "nll_loss", x, target, reduction=reduction, ignore_index=ignore_index, name=name
        )

    def nll_loss_backward(
        self,
        dy: Value,
        target: Value,
        shape: Sequence[int],
        reduction: str = "mean",
        ignore_index: int = -100,
        *,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`nll_loss` from its result's dy; ``shape`` is that of x."""
        return self._one(
            "nll_loss_backward",
            dy,
            target,
            shape=shape,
            reduction=reduction,
            ignore_index=ignore_index,
            name=name,
        )

    def cross_entropy(
        self,
        x: Value,
        target: Value,
        reduction: str = "mean",
        ignore_index: int = -100,
    ) -> Value:
        """F.cross_entropy of x (N, C, ...) and classes (N, ...) int64, without weights."""
        return self.nll_loss(self.log_softmax(x, 1), target, reduction, ignore_index)

    def aten(
        self,
        x: Sequence[Value],
        overload: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...] = (),
        *,
        name: str | None = None,
    ) -> Any:
        """An op of torch that has no other name here, always a torch step: ``overload`` on x.

        ``overload`` is its full name, "aten.embedding.default"; ``args`` and ``kwargs`` are its
        arguments as plain values, ``("tensor", 0)`` for the first of the list x (see
        :mod:`cudnngraph.ops.aten`). → the result, or a tuple of up to 4.
        """
        if not x:
            label = name or "aten"
            self.problems.append(
                Problem(f"aten '{label}'", f"x is {x!r}", "a list of one value or more")
            )
            return Value(self, "?", None)
        attrs = {"overload": overload, "args": args, "kwargs": kwargs}
        outputs = self._apply("aten", x, attrs, name)
        made = [value for value in outputs[1:] if value.spec is not None]
        return (outputs[0], *made) if made else outputs[0]

    # -- pooling and interpolation -------------------------------------------------------------

    def max_pool(
        self,
        x: Value,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
        *,
        name: str | None = None,
    ) -> Value:
        """The largest element of each window (F.max_pool2d), in 1, 2 or 3 spatial dims.

        x (N, C, spatial...) → (N, C, out...), channels_last where x is. ``stride`` defaults to the
        kernel's size; ``ceil_mode`` rounds the number of windows up. A window that holds nothing
        but padding, as a dilation may make one, is a mistake.
        """
        return self._one(
            "max_pool",
            x,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            ceil_mode=ceil_mode,
            name=name,
        )

    def max_pool_backward(
        self,
        dy: Value,
        x: Value,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
        *,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`max_pool` from its result's dy; x is pooled again."""
        return self._one(
            "max_pool_backward",
            dy,
            x,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            ceil_mode=ceil_mode,
            name=name,
        )

    def avg_pool(
        self,
        x: Value,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        *,
        name: str | None = None,
    ) -> Value:
        """The mean of each window (F.avg_pool2d), in 1, 2 or 3 spatial dims.

        As :meth:`max_pool`; ``count_include_pad`` counts the zeros of the padding.
        """
        return self._one(
            "avg_pool",
            x,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            name=name,
        )

    def avg_pool_backward(
        self,
        dy: Value,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        *,
        input_size: Ints,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`avg_pool` from dy; ``input_size`` are x's spatial sizes."""
        return self._one(
            "avg_pool_backward",
            dy,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            input_size=input_size,
            name=name,
        )

    def adaptive_avg_pool(
        self, x: Value, output_size: int | Sequence[int | None], *, name: str | None = None
    ) -> Value:
        """The mean of each of ``output_size`` windows (F.adaptive_avg_pool2d).

        x (N, C, spatial...) → (N, C, output_size); None in ``output_size`` leaves a dim as it is.
        Windows of one size, where the sizes divide, are an :meth:`avg_pool`, and one window over
        all is a :meth:`reduction`.
        """
        sizes = () if x.spec is None else x.spec.shape[2:]
        given = output_size if isinstance(output_size, (tuple, list)) else [output_size]
        want = list(given) * (len(sizes) if len(given) == 1 else 1)
        if len(want) == len(sizes) in (1, 2, 3) and all(
            isinstance(n, (int, type(None))) for n in want
        ):
            out = [n if k is None else k for n, k in zip(sizes, want, strict=True)]
            if all(k == 1 for k in out) and all(sizes):
                return self.reduction(x, list(range(2, 2 + len(sizes))), "mean", True, name=name)
            if all(k > 0 and n and n % k == 0 for n, k in zip(sizes, out, strict=True)):
                kernel = [n // k for n, k in zip(sizes, out, strict=True)]
                return self.avg_pool(x, kernel, name=name)
        return self._one("adaptive_avg_pool", x, output_size=output_size, name=name)

    def adaptive_avg_pool_backward(
        self,
        dy: Value,
        output_size: int | Sequence[int | None],
        *,
        input_size: Ints,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`adaptive_avg_pool` from dy; ``input_size`` are x's spatial sizes."""
        return self._one(
            "adaptive_avg_pool_backward",
            dy,
            output_size=output_size,
            input_size=input_size,
            name=name,
        )

    def adaptive_max_pool(
        self, x: Value, output_size: int | Sequence[int | None], *, name: str | None = None
    ) -> Value:
        """The largest element of each of ``output_size`` windows (F.adaptive_max_pool2d)."""
        return self._one("adaptive_max_pool", x, output_size=output_size, name=name)

    def adaptive_max_pool_backward(
        self,
        dy: Value,
        x: Value,
        output_size: int | Sequence[int | None],
        *,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`adaptive_max_pool` from its result's dy; x is pooled again."""
        return self._one("adaptive_max_pool_backward", dy, x, output_size=output_size, name=name)

    def interpolate(
        self,
        x: Value,
        size: Ints | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = False,
        *,
        name: str | None = None,
    ) -> Value:
        """x resized to ``size``, or by ``scale_factor`` (F.interpolate), in 1, 2 or 3 spatial dims.

        x (N, C, spatial...) → (N, C, out...), channels_last where x is. ``mode`` is "nearest",
        "nearest-exact", "linear" (one spatial dim), "bilinear" or "bicubic" (two), "trilinear".

        On a GPU large 16-bit results of "linear" and "bilinear" whose weights are exact in 16 bits
        are made by products of matrices: an infinity or NaN in x then makes NaN of its whole image
        in its channel. Elsewhere it reaches its neighbours, as in torch.
        """
        return self._one(
            "interpolate",
            x,
            size=size,
            scale_factor=scale_factor,
            mode=mode,
            align_corners=align_corners,
            name=name,
        )

    def interpolate_backward(
        self,
        dy: Value,
        size: Ints | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = False,
        *,
        input_size: Ints,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`interpolate` from dy; ``input_size`` are x's spatial sizes."""
        return self._one(
            "interpolate_backward",
            dy,
            size=size,
            scale_factor=scale_factor,
            mode=mode,
            align_corners=align_corners,
            input_size=input_size,
            name=name,
        )

    def _shuffled(self, op: str, x: Value, factor: int, down: bool) -> Value:
        """Blocks of ``factor`` x ``factor`` pixels between channels and space, by views of x."""
        spec = x.spec
        if spec is None or factor < 1 or len(spec.shape) != 4:
            if spec is not None:
                what = f"x '{spec.name}' {spec.shape} by factor {factor!r}"
                self.problems.append(Problem(op, what, "(N, C, H, W) and a factor >= 1"))
            return self._unknown(x)
        n, c, h, w = spec.shape
        if (h % factor or w % factor) if down else c % factor**2:
            what = f"x '{spec.name}' has shape {spec.shape}"
            expected = f"H and W % {factor} == 0" if down else f"C % {factor**2} == 0"
            self.problems.append(Problem(op, what, expected))
            return self._unknown(x)
        last = is_channels_last(spec.shape, spec.stride) and not is_contiguous(
            spec.shape, spec.stride
        )
        if down:
            h, w = h // factor, w // factor
            split, c = (n, c, h, factor, w, factor), c * factor**2
            channels: Sequence[int] = (1, 3, 5)
            space: Sequence[int] = (2, 4)
        else:
            c //= factor**2
            split = (n, c, factor, factor, h, w)
            h, w = h * factor, w * factor
            channels, space = (1,), (4, 2, 5, 3)
        y = self.reshape(x, split)
        if last:  # the copy is made channels last too
            y = self.reshape(self.permute(y, (0, *space, *channels)), (n, h, w, c))
            return self.permute(y, (0, 3, 1, 2))
        return self.reshape(self.permute(y, (0, *channels, *space)), (n, c, h, w))

    def pixel_shuffle(self, x: Value, upscale_factor: int) -> Value:
        """x (N, C r², H, W) → (N, C, H r, W r) with r = ``upscale_factor`` (F.pixel_shuffle)."""
        return self._shuffled("pixel_shuffle", x, upscale_factor, down=False)

    def pixel_unshuffle(self, x: Value, downscale_factor: int) -> Value:
        """x (N, C, H r, W r) → (N, C r², H, W) with r = ``downscale_factor``, undoing the other."""
        return self._shuffled("pixel_unshuffle", x, downscale_factor, down=True)

    # -- attention -----------------------------------------------------------------------------

    def sdpa(
        self,
        q: Value,
        k: Value,
        v: Value,
        attn_mask: Value | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        seq_len_q: Value | None = None,
        seq_len_kv: Value | None = None,
        dropout_p: float = 0.0,
        dropout_seed: Value | None = None,
        dropout_offset: Value | None = None,
        dropout_mask: Value | None = None,
        alibi: bool = False,
        alibi_slopes: Value | None = None,
        softcap: float | None = None,
        sink: Value | None = None,
        finite_padding: bool = False,
        return_lse: bool = False,
        name: str | None = None,
    ) -> Any:
        """Scaled dot-product attention: softmax(scale * q k^T + mask) v.

        q (B, H, S_q, D), k (B, H_kv, S_kv, D), v (B, H_kv, S_kv, D_v) of one dtype; H is a multiple
        of H_kv (grouped query heads). → o (B, H, S_q, D_v) with q's dtype and order of strides;
        with ``return_lse=True`` the pair (o, lse), lse (B, H, S_q) float32: the natural logarithm
        of the sum of the exponentials of a row's scores.

        - ``attn_mask``: bool (True attends) or float (added to the scaled scores), any shape that
          broadcasts to (B, H, S_q, S_kv).
        - ``is_causal``: no key to the right of the diagonal. ``window=(left, right)``: at most that
          many keys to either side of it, None for no bound.
        - ``diagonal_alignment``: the diagonal starts at the "top_left" corner, or ends at the
          "bottom_right" one (of each sequence, where lengths are given).
        - ``seq_len_q``, ``seq_len_kv``: (B,) int32, the valid rows and keys of each sequence.
        - ``finite_padding=True`` is a promise: what lies past the lengths of a sequence, in q, k, v
          and the gradient of o, are finite numbers, and every sequence has a row and a key. Then
          cuDNN's faster kernels may run, which multiply it by 0, and its gradient.
        - ``scale`` defaults to 1 / sqrt(D).
        - ``softcap`` c > 0: scaled scores s become c tanh(s / c), before any mask is added.
        - ``alibi=True``: scores fall by slope * distance, how far a key stands from the row's place
          on the diagonal, with ALiBi's own slopes for H heads; ``alibi_slopes`` (H,) float32 gives
          others, which get no gradient.
        - ``sink`` (H,) float32: a score that every row has besides those of its keys, with a value
          of zero (attention sink). It is part of lse.
        - ``dropout_p``: each attention weight is dropped with that probability, and those kept are
          divided by 1 - dropout_p. Which, ``dropout_mask`` says, (B, H, S_q, S_kv) bool (True
          keeps), or ``dropout_seed`` and ``dropout_offset``, int64 of one element: the same two
          drop the same. cuDNN and the reference have a generator each, so they drop others.

        A row that may attend to no key gives zeros, and -inf in lse where there is no sink.
        """
        outputs = self._apply(
            "sdpa",
            (
                *(q, k, v, attn_mask, seq_len_q, seq_len_kv),
                *(dropout_seed, dropout_offset, dropout_mask, alibi_slopes, sink),
            ),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "finite_padding": finite_padding,
                "dropout_p": dropout_p,
                "alibi": alibi,
                "softcap": softcap,
                "return_lse": return_lse,
            },
            name,
        )
        return tuple(outputs) if return_lse is True else outputs[0]

    def sdpa_fp8(
        self,
        q: Value,
        k: Value,
        v: Value,
        descale_q: Value,
        descale_k: Value,
        descale_v: Value,
        descale_s: Value,
        scale_s: Value,
        scale_o: Value,
        *,
        seq_len_q: Value | None = None,
        seq_len_kv: Value | None = None,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        return_lse: bool = False,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Attention of FP8 data: softmax(scale * (q descale_q) (k descale_k)^T) v descale_v.

        q (B, H, S_q, D), k (B, H_kv, S_kv, D), v (B, H_kv, S_kv, D_v), all float8_e4m3fn or all
        float8_e5m2; scales and descales float32 on the GPU, one number each. The exponentials of a
        row's scores, at most 1, are multiplied by ``scale_s`` and rounded to FP8; what they are
        summed up to with v is multiplied by ``descale_s`` and ``descale_v``. → (o, amax_s, amax_o):
        o (B, H, S_q, D_v) in q's dtype (``dtype`` can say so), multiplied by ``scale_o``, rounded
        and saturated; the largest weight and the largest size in o before ``scale_o``, float32 ().
        With ``return_lse=True`` (o, lse, amax_s, amax_o). The rest as in :meth:`sdpa`.
        """
        outputs = self._apply(
            "sdpa_fp8",
            (
                *(q, k, v, descale_q, descale_k, descale_v),
                *(descale_s, scale_s, scale_o, seq_len_q, seq_len_kv),
            ),
            {
                "dtype": dtype,
                "scale": scale,
                "is_causal": is_causal,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "return_lse": return_lse,
            },
            name,
        )
        return tuple(outputs if return_lse is True else (outputs[0], *outputs[2:]))

    def sdpa_backward(
        self,
        do: Value,
        q: Value,
        k: Value,
        v: Value,
        o: Value,
        lse: Value,
        attn_mask: Value | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        seq_len_q: Value | None = None,
        seq_len_kv: Value | None = None,
        dropout_p: float = 0.0,
        dropout_seed: Value | None = None,
        dropout_offset: Value | None = None,
        dropout_mask: Value | None = None,
        alibi: bool = False,
        alibi_slopes: Value | None = None,
        softcap: float | None = None,
        finite_padding: bool = False,
        mask_grad: bool = False,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dq, dk, dv) of :meth:`sdpa` from its o's gradient ``do``.

        The other operands and keywords are those of the forward call, o and lse its results (a sink
        is in the lse, and no operand here). With
        ``mask_grad=True`` a fourth one, that of the additive mask, in the mask's shape. A row that
        may attend to no key gives zeros; its lse is infinite of either sign.
        """
        outputs = self._apply(
            "sdpa_backward",
            (
                *(do, q, k, v, o, lse, attn_mask, seq_len_q, seq_len_kv),
                *(dropout_seed, dropout_offset, dropout_mask, alibi_slopes),
            ),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "finite_padding": finite_padding,
                "dropout_p": dropout_p,
                "alibi": alibi,
                "softcap": softcap,
                "mask_grad": mask_grad,
            },
            name,
        )
        return tuple(outputs if mask_grad is True else outputs[:3])

    def sdpa_paged(
        self,
        q: Value,
        k_cache: Value,
        v_cache: Value,
        page_table: Value,
        seq_len_kv: Value,
        *,
        seq_len_q: Value | None = None,
        page_table_v: Value | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "bottom_right",
        window: tuple[int | None, int | None] | None = None,
        finite_padding: bool = False,
        return_lse: bool = False,
        name: str | None = None,
    ) -> Any:
        """Attention to keys and values that lie in the pages of a cache, as :meth:`sdpa` means it.

        q (B, H, S_q, D), k_cache (pages, H_kv, page, D), v_cache (pages, H_kv, page, D_v), of any
        strides, so (pages, page, H_kv, D) in memory too. ``page_table`` (B, P) int32: the pages of
        each sequence in order, of which ``seq_len_kv`` (B,) int32 keys are valid; what the table
        holds behind them is not used. ``page_table_v`` where those of v_cache are others. → o
        (B, H, S_q, D_v), with ``return_lse=True`` the pair (o, lse). No gradient.

        ``finite_padding`` promises the same as in :meth:`sdpa`, of the pages' keys too. Unlike
        :meth:`sdpa` the diagonal ends at the bottom right unless told otherwise: the last
        row of q is the last valid key's.
        """
        outputs = self._apply(
            "sdpa_paged",
            (q, k_cache, v_cache, page_table, seq_len_kv, seq_len_q, page_table_v),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "finite_padding": finite_padding,
                "return_lse": return_lse,
            },
            name,
        )
        return tuple(outputs) if return_lse is True else outputs[0]

    def sdpa_varlen(
        self,
        q: Value,
        k: Value,
        v: Value,
        cu_seqlens_q: Value,
        cu_seqlens_kv: Value,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        finite_padding: bool = False,
        return_lse: bool = False,
        name: str | None = None,
    ) -> Any:
        """Attention within each of several sequences that are packed one behind the other.

        q (T_q, H, D), k (T_kv, H_kv, D), v (T_kv, H_kv, D_v); ``cu_seqlens_q`` and
        ``cu_seqlens_kv`` (B + 1,) int32: 0, then where each sequence ends. ``max_seqlen_q`` and
        ``max_seqlen_kv``: no sequence is longer. ``finite_padding`` promises that all numbers are
        finite, those of other sequences too, and that every sequence has a key. The other keywords
        are those of :meth:`sdpa`, for each sequence by itself. → o (T_q, H, D_v), with
        ``return_lse=True`` the pair (o, lse), lse (T_q, H). Tokens behind the last sequence are no
        part of the result: what o holds for them is undefined, and so are their gradients.
        """
        outputs = self._apply(
            "sdpa_varlen",
            (q, k, v, cu_seqlens_q, cu_seqlens_kv, None),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "finite_padding": finite_padding,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_kv": max_seqlen_kv,
                "return_lse": return_lse,
            },
            name,
        )
        return tuple(outputs) if return_lse is True else outputs[0]

    def sdpa_varlen_backward(
        self,
        do: Value,
        q: Value,
        k: Value,
        v: Value,
        o: Value,
        lse: Value,
        cu_seqlens_q: Value,
        cu_seqlens_kv: Value,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        diagonal_alignment: str = "top_left",
        window: tuple[int | None, int | None] | None = None,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dq, dk, dv) of :meth:`sdpa_varlen` from its o's gradient ``do``."""
        outputs = self._apply(
            "sdpa_varlen_backward",
            (do, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_kv, None),
            {
                "is_causal": is_causal,
                "scale": scale,
                "diagonal_alignment": diagonal_alignment,
                "window": window,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_kv": max_seqlen_kv,
            },
            name,
        )
        return tuple(outputs)

    def ragged_offsets(
        self,
        cu_seqlens_q: Value,
        cu_seqlens_kv: Value,
        widths_q: Sequence[int],
        widths_kv: Sequence[int],
        *,
        name: str | None = None,
    ) -> Value:
        """Where packed sequences lie in memory: what a plan of packed attention is told.

        Both ``cu_seqlens`` (B + 1,) int32 → (2 + widths, B + 1) int32: the lengths of the sequences
        of q and of k, with a 0 behind them, then each ``cu_seqlens_q`` times a width
        of ``widths_q``, the elements of a token, then the same of k. Packed attention makes it
        itself.
        """
        widths = {"widths_q": widths_q, "widths_kv": widths_kv}
        return self._one("ragged_offsets", cu_seqlens_q, cu_seqlens_kv, name=name, **widths)

    # -- compositions --------------------------------------------------------------------------

    def activation(self, x: Value, kind: str | None, **attrs: Any) -> Value:
        """Apply the activation named ``kind`` with its attributes; None leaves x as it is."""
        if kind is None or kind == "identity":
            return x
        if not isinstance(kind, str) or kind not in ACTIVATIONS:
            self.problems.append(
                Problem(
                    "activation", f"{kind!r} is unknown", f"one of {', '.join(ACTIVATIONS)}, None"
                )
            )
            return self._unknown(x)
        if kind in OPS:
            return self._one(kind, x, **attrs)
        if attrs:
            self.problems.append(
                Problem("activation", f"{kind} takes no attributes, got {', '.join(attrs)}")
            )
        return getattr(self, kind)(x)  # type: ignore[no-any-return]

    def _epilogue(
        self,
        y: Value,
        bias: Value | None,
        residual: Value | None,
        alpha1: float,
        alpha2: float,
        activation: str | None,
        attrs: dict[str, Any],
    ) -> Value:
        """act(alpha1 * y + alpha2 * residual + bias).

        The residual comes before the bias: cuDNN has precompiled engines for that order. With both
        factors the bias comes first, since the engines for that pattern crash (see known_bad.py);
        so it does where the residual is of a dtype of its own, which would become the sum's.
        """
        if alpha1 != 1:
            y = self.mul(y, alpha1)
        scaled = residual if residual is None or alpha2 == 1 else self.mul(residual, alpha2)
        terms = [(self.add, scaled), (self.bias, bias)]
        if (alpha1 != 1 and alpha2 != 1) or not _of_one_dtype(bias, residual):
            terms.reverse()
        for add, term in terms:
            y = y if term is None else add(y, term)
        return self.activation(y, activation, **attrs)

    def conv_bias_act(
        self,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        *,
        activation: str | None = "relu",
        residual: Value | None = None,
        alpha1: float = 1.0,
        alpha2: float = 1.0,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        **activation_attrs: Any,
    ) -> Value:
        """act(alpha1 * conv(x, weight) + alpha2 * residual + bias)."""
        y = self.conv(x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
        return self._epilogue(y, bias, residual, alpha1, alpha2, activation, activation_attrs)

    def conv_bn_act(
        self,
        x: Value,
        weight: Value,
        running_mean: Value,
        running_var: Value,
        bn_weight: Value | None = None,
        bn_bias: Value | None = None,
        *,
        bias: Value | None = None,
        eps: float = 1e-5,
        activation: str | None = "relu",
        residual: Value | None = None,
        alpha1: float = 1.0,
        alpha2: float = 1.0,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        **activation_attrs: Any,
    ) -> Value:
        """act(alpha1 * batch_norm(conv(x, weight) + bias) + alpha2 * residual)."""
        y = self.conv(x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
        y = y if bias is None else self.bias(y, bias)
        y = self.batch_norm(y, running_mean, running_var, bn_weight, bn_bias, eps=eps)
        return self._epilogue(y, None, residual, alpha1, alpha2, activation, activation_attrs)

    def conv_transpose_bias_act(
        self,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        *,
        activation: str | None = "relu",
        residual: Value | None = None,
        alpha1: float = 1.0,
        alpha2: float = 1.0,
        stride: Ints = 1,
        padding: Padding = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
        **activation_attrs: Any,
    ) -> Value:
        """act(alpha1 * conv_transpose(x, weight) + alpha2 * residual + bias)."""
        y = self.conv_transpose(
            x,
            weight,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            dilation=dilation,
        )
        return self._epilogue(y, bias, residual, alpha1, alpha2, activation, activation_attrs)

    def depthwise_separable(
        self,
        x: Value,
        depthwise: Value,
        pointwise: Value,
        depthwise_bias: Value | None = None,
        pointwise_bias: Value | None = None,
        *,
        activation: str | None = "relu",
        pointwise_activation: str | None = "relu",
        residual: Value | None = None,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
    ) -> Value:
        """A convolution of each channel by itself, then one of 1 x 1 over the channels.

        x (N, C, spatial...), depthwise (C M, 1, kernel...), pointwise (K, C M, 1, ...) → (N, K,
        out...): ``act(conv(act(conv(x, depthwise) + bias), pointwise) + residual + bias)``.
        """
        groups = 1 if x.spec is None or len(x.spec.shape) < 2 else x.spec.shape[1]
        y = self.conv_bias_act(
            x,
            depthwise,
            depthwise_bias,
            activation=activation,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )
        return self.conv_bias_act(
            y, pointwise, pointwise_bias, activation=pointwise_activation, residual=residual
        )

    def quantized_conv_bias_act(
        self,
        x: Value,
        weight: Value,
        scale: Value,
        bias: Value | None = None,
        *,
        out_scale: Value | None = None,
        dtype: torch.dtype | None = None,
        activation: str | None = "relu",
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
        **activation_attrs: Any,
    ) -> Value:
        """quantize(act(dequantize(conv(x, weight), scale) + bias), out_scale) of int8 or FP8 data.

        ``scale`` is the product of those of x and weight: () or (1,), or (K,) for a weight with a
        scale per channel. bias float32. ``dtype`` is the 8-bit dtype of the result; with None it
        stays float32, to be given another floating dtype by ``output(dtype=...)``.
        """
        y = self.conv(x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
        y = self.dequantize(y, scale)
        y = y if bias is None else self.bias(y, bias)
        y = self.activation(y, activation, **activation_attrs)
        if dtype is None:
            if out_scale is not None:
                self.problems.append(
                    Problem("quantized_conv_bias_act", "out_scale without dtype", "both or neither")
                )
            return y
        return self.quantize(y, out_scale, dtype=dtype)

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """x weight^T + bias (F.linear): x (..., K), weight (N, K), bias (N,) → (..., N)."""
        spec = weight.spec
        if spec is not None and len(spec.shape) != 2:
            what = f"weight '{spec.name}' has shape {spec.shape}"
            self.problems.append(Problem("linear", what, "(N, K)"))
            return self._unknown(x, weight, bias)
        y = self.matmul(x, self.transpose(weight, 0, 1))
        return y if bias is None else self.add(y, bias)

    def swiglu(self, x: Value, w_gate: Value, w_up: Value) -> Value:
        """silu(x w_gate) * (x w_up): x (..., K), both weights (K, N) → (..., N)."""
        return self.mul(self.silu(self.matmul(x, w_gate)), self.matmul(x, w_up))

    def rope(self, x: Value, cos: Value, sin: Value, *, interleaved: bool = False) -> Value:
        """Rotary position embedding (arXiv 2104.09864): x (..., S, D) turned by an angle per
        position and pair of columns.

        ``cos`` and ``sin`` (S, D/2), or of any shape that broadcasts to (..., S, D/2). A pair is
        the columns j and j + D/2 (rotate-half), or with ``interleaved=True`` 2j and 2j + 1:
        (a, b) → (a cos - b sin, b cos + a sin). Made of one copy of x with the pairs swapped, and
        pointwise ops on the whole of x.
        """
        if not self._all_known("rope", x=x, cos=cos, sin=sin):
            return self._unknown(x, cos, sin)
        depth = x.shape[-1] if x.shape else 0
        wanted = (depth // 2,)
        if depth % 2 or depth == 0 or cos.shape[-1:] != wanted or sin.shape != cos.shape:
            self.problems.append(
                Problem(
                    "rope",
                    f"x has shape {x.shape}, cos {cos.shape}, sin {sin.shape}",
                    "x (..., S, D) with an even D, cos and sin (S, D/2) alike",
                )
            )
            return self._unknown(x, cos, sin)
        last, pairs = len(x.shape) - 1, (*x.shape[:-1], depth // 2, 2)
        if interleaved:
            both = self.reshape(x, pairs)
            first, second = (self.slice(both, last + 1, at, at + 1) for at in (0, 1))
            swapped = self.reshape(self.concat([second, first], last + 1), x.shape)
        else:
            first, second = (self.slice(x, last, at, at + depth // 2) for at in (0, depth // 2))
            swapped = self.concat([second, first], last)

        def table(a: Value, b: Value) -> Value:
            rank = len(a.shape)
            if not interleaved:
                return self.concat([a, b], rank - 1)
            columns = [self.reshape(each, (*each.shape, 1)) for each in (a, b)]
            return self.reshape(self.concat(columns, rank), (*a.shape[:-1], depth))

        key = (cos.name, sin.name, interleaved)
        if key not in self._tables:  # made once for q and k
            self._tables[key] = table(cos, cos), table(self.neg(sin), sin)
        wide_cos, wide_sin = self._tables[key]
        return self.add(self.mul(x, wide_cos), self.mul(swapped, wide_sin))

    def block_mask(self, blocks: Value, rows: int, keys: int, block: int = 128) -> Value:
        """A mask for :meth:`sdpa` from one of blocks: block x block pairs of rows and keys each.

        ``blocks`` bool, (..., ceil(rows / block), ceil(keys / block)), True attends → bool
        (..., rows, keys). The whole mask is written out; cuDNN skips blocks by a mask on Blackwell
        alone.
        """
        if not self._all_known("block_mask", blocks=blocks):
            return self._unknown(blocks)
        many = [-(-rows // block), -(-keys // block)] if block > 0 else []
        if blocks.dtype != torch.bool or list(blocks.shape[-2:]) != many:
            self.problems.append(
                Problem(
                    "block_mask",
                    f"blocks '{blocks.name.lstrip('%')}' is {dtype_name(blocks.dtype)} "
                    f"{blocks.shape}",
                    f"bool (..., {', '.join(map(str, many))}), one for each {block} rows and keys",
                )
            )
            return self._unknown(blocks)
        lead, rank = blocks.shape[:-2], len(blocks.shape)
        full = (*lead, many[0], block, many[1], block)
        spread = self.expand(blocks, full, (*range(rank - 1), rank))
        whole = self.reshape(spread, (*lead, many[0] * block, many[1] * block))
        whole = self.slice(whole, rank - 2, 0, rows)
        return self.slice(whole, rank - 1, 0, keys)

    def geglu(self, x: Value, w_gate: Value, w_up: Value, approximate: str = "none") -> Value:
        """gelu(x w_gate) * (x w_up): x (..., K), both weights (K, N) → (..., N)."""
        return self.mul(self.gelu(self.matmul(x, w_gate), approximate), self.matmul(x, w_up))

    def mlp(
        self,
        x: Value,
        up: Value,
        up_bias: Value | None,
        down: Value,
        down_bias: Value | None = None,
        *,
        gate: Value | None = None,
        gate_bias: Value | None = None,
        activation: str | None = "gelu",
        **activation_attrs: Any,
    ) -> Value:
        """Two linear layers, down(act(up(x))), or with a gate down(act(gate(x)) * up(x)).

        x (..., K); up and gate (F, K) and down (N, F) as F.linear has them, biases (F,) and (N,)
        → (..., N).
        """
        inner = self.linear(x, up, up_bias)
        if gate is None:
            inner = self.activation(inner, activation, **activation_attrs)
        else:
            opened = self.activation(
                self.linear(x, gate, gate_bias), activation, **activation_attrs
            )
            inner = self.mul(opened, inner)
        return self.linear(inner, down, down_bias)

    def dropout(self, x: Value, keep: Value, p: float) -> Value:
        """x / (1 - p) where ``keep`` (bool, that of x's shape) holds, else 0.

        ``keep`` is drawn outside, true with probability 1 - p, so that the graph has no state.
        """
        if not 0 <= p < 1:
            self.problems.append(Problem("dropout", f"p={p!r}", "0 <= p < 1"))
            return self._unknown(x)
        return self.where(keep, self.mul(x, 1.0 / (1.0 - p)), 0.0)

    def normalize_images(self, x: Value, scale: Value, shift: Value) -> Value:
        """Pixels x (N, H, W, C) uint8 → x * scale + shift, (N, C, H, W) in the same memory order.

        scale and shift (W, C) float32: the numbers of each channel, repeated for each column, for
        cuDNN is slow on rows of three elements. For ``(x / 255 - mean) / std`` they are
        ``1 / (255 * std)`` and ``-mean / std``. float32; an output in float16 is one pass too.
        """
        spec = x.spec
        if spec is not None and len(spec.shape) != 4:
            what = f"x '{spec.name}' has shape {spec.shape}"
            self.problems.append(Problem("normalize_images", what, "(N, H, W, C)"))
            return self._unknown(scale, shift)
        images = self.to_float(self.permute(x, (0, 3, 1, 2)))
        rows = [
            self.permute(self.reshape(v, (1, 1, *v.spec.shape[-2:])), (0, 3, 1, 2))
            if v.spec is not None and len(v.spec.shape) == 2
            else v
            for v in (scale, shift)
        ]
        return self.add(self.mul(images, rows[0]), rows[1])

    def adamw(
        self,
        param: Value,
        grad: Value,
        exp_avg: Value,
        exp_avg_sq: Value,
        lr: Value,
        bias_correction1: Value,
        bias_correction2: Value,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> tuple[Value, Value, Value]:
        """One step of torch.optim.AdamW → the next (param, exp_avg, exp_avg_sq).

        The first four are of one shape, float32; lr and the bias corrections ``1 - beta ** step``
        have one element each, so that they may change from step to step. All pointwise: outputs of
        the strides of the inputs may be written over them.
        """
        beta1, beta2 = betas
        # What is one number comes first, in ops of its own: a plan may compute it once.
        root = self.sqrt(bias_correction2)
        rate = self.div(self.mul(lr, root), bias_correction1)
        small = self.mul(root, eps)
        kept = self.sub(1.0, self.mul(lr, weight_decay))
        first = self.add(exp_avg, self.mul(self.sub(grad, exp_avg), 1.0 - beta1))
        second = self.add(self.mul(exp_avg_sq, beta2), self.mul(self.mul(grad, grad), 1.0 - beta2))
        step = self.div(self.mul(first, rate), self.add(self.sqrt(second), small))
        return self.sub(self.mul(param, kept), step), first, second

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
            tensors[free] = TensorSpec(
                free,
                spec.shape,
                spec.stride,
                intermediate if spec.dtype in FLOATS else spec.dtype,
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
        **options: Any,
    ) -> Executable: ...
    @overload
    def compile(
        self,
        device: torch.device | str | int | None = None,
        *,
        policy: Policy | None = None,
        training: Literal[True],
        check: bool | None = None,
        **options: Any,
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
        if training:
            from ..runtime.trainable import compile_training

            return compile_training(
                self.spec(), device, policy=policy, check=check, options=options
            )
        if check is not None:
            raise PolicyError("check is for training=True")
        from ..runtime.compile import compile as compile_spec

        return compile_spec(self.spec(), device, policy=policy, **options)

    def __str__(self) -> str:
        return print_spec(self.spec(), is_default)


ACTIVATIONS = (
    "relu",
    "leaky_relu",
    "elu",
    "gelu",
    "gelu_tanh",
    "silu",
    "sigmoid",
    "tanh",
    "softplus",
    "clamp",
    "relu6",
    "hardswish",
    "identity",
)

METHODS = frozenset(OPS) - {"constant", "concat", "aten"} | {
    "relu6",
    "hardswish",
    "activation",
    "conv_bias_act",
    "conv_bn_act",
    "conv_transpose_bias_act",
    "cross_entropy",
    "depthwise_separable",
    "dropout",
    "geglu",
    "group_norm",
    "quantized_conv_bias_act",
    "linear",
    "mlp",
    "normalize_images",
    "pixel_shuffle",
    "pixel_unshuffle",
    "swiglu",
    "rope",
    "block_mask",
}
