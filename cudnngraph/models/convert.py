"""Models as graphs: a graph of ATen ops, as torch.export and torch.compile make it, becomes one.

An ATen op that there is an op for becomes it; any other becomes an ``aten`` node, which is a step
of torch. Parameters and buffers are constants: they are inputs of the graph with their tensors
beside it, and what depends on constants alone is computed here. A batch norm behind a convolution
is folded into its weight, in float64 and rounded once. Layouts are the graph's own: with
``channels_last`` images and the weights of convolutions lie so from the input to the output, and
what only asks for a layout (``contiguous``, ``clone``) is left out; torch's ops that go by the
layout of their operands get them as the model had them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from types import NoneType
from typing import Any

import torch
from torch import nn

from ..errors import CannotImport, FeatureMissing, GraphError
from ..graph.builder import Graph
from ..graph.value import Value
from ..ir.spec import (
    GraphSpec,
    aligned,
    channels_last_strides,
    contiguous_strides,
    dense_strides,
    is_channels_last,
    is_contiguous,
    is_dense,
    odd_rows,
    overlaps_itself,
    same_layout,
    view_strides,
)
from ..ops import aten
from ..ops import meta as forms
from ..ops.base import FLOATS, SOFTPLUS_THRESHOLD, in_padding
from ..ops.pooling import UPSAMPLE
from ..ops.views import order
from ..partition.cuts import LOW_PRECISION
from .export import HasGraph, export, last_line
from .patterns import Written, attention_before, least_norm_before, rms_norm_before


@dataclass(frozen=True)
class Opaque:
    """An op that stays torch's own, and the line of the model that it comes from."""

    overload: str
    line: str


@dataclass(frozen=True)
class Packed:
    """An image of few ``channels`` in a tensor of more, the rest zero, where ``columns`` of it that
    stand side by side are channels too: (N, 4 columns, H, W / columns), channels fastest."""

    channels: int
    columns: int = 1

    def image(self, tensor: torch.Tensor) -> torch.Tensor:
        """The image (N, channels, H, W) as it lies in the tensor."""
        rows = tensor.permute(0, 2, 3, 1)
        images, height, width, channels = rows.shape
        rows = rows.view(images, height, width * self.columns, channels // self.columns)
        return rows.permute(0, 3, 1, 2)[:, : self.channels]

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """What a convolution's weight (K, channels, R, S) is for the tensor."""
        wide = nn.functional.pad(weight, (0, 0, 0, 0, 0, 1))
        if self.columns == 1:
            return wide
        return wide.permute(0, 3, 1, 2).flatten(1, 2).unsqueeze(3)


@dataclass(frozen=True)
class Imported:
    """A model as a graph.

    ``inputs`` gives, for each tensor that the model takes, the name of the graph's input, None
    where nothing depends on it. ``constants`` are the tensors of the other inputs. ``results`` are
    the model's results in order: the name of an output, or ``(kind, value)`` with the kind "input"
    and the place of a tensor that is handed on, "value" and what the result always is, or "copy"
    and a tensor whose numbers it always has.
    ``spec`` is None where nothing is left to compute. ``folded`` counts batch norms in weights.
    ``packed`` says how an image lies in an input that is no such image.
    """

    spec: GraphSpec | None
    inputs: tuple[str | None, ...]
    constants: Mapping[str, torch.Tensor]
    results: tuple[str | tuple[str, Any], ...]
    opaque: tuple[Opaque, ...]
    folded: int
    packed: Mapping[str, Packed] = field(default_factory=dict)


def convert(
    module: HasGraph,
    constants: Mapping[str, torch.Tensor],
    placeholders: Sequence[str],
    *,
    name: str = "model",
    channels_last: bool = False,
    keep_strides: bool = False,
    on_gpu: bool = False,
) -> Imported:
    """The graph of ATen ops ``module`` as one of ours.

    ``constants`` holds a tensor for each placeholder that is none of ``placeholders``.
    ``keep_strides`` gives the outputs the strides that the trace says. ``on_gpu`` does what is
    faster there: images of three channels get a fourth where convolutions by constant weights alone
    read them, several short sequences of attention are one, constant masks are aligned. Raises
    :class:`CannotImport` with the op and its line where that cannot be.
    """
    return _Conversion(
        module, constants, placeholders, name, channels_last, keep_strides, on_gpu
    ).run()


def import_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    channels_last: bool = False,
) -> Imported:
    """``model`` as called with ``args``, as one graph; see :func:`export`, :func:`convert`."""
    made = export(model, args, kwargs)
    return convert(
        made.module,
        made.constants,
        made.placeholders,
        name=type(model).__name__,
        channels_last=channels_last,
    )


# -- the conversion --------------------------------------------------------------------------------

Arguments = Mapping[str, Any]


class _Skip(Exception):
    """A rule does not apply to these arguments."""


@dataclass
class _Conversion:
    module: HasGraph
    constants: Mapping[str, torch.Tensor]
    placeholders: Sequence[str]
    name: str
    channels_last: bool
    keep_strides: bool
    on_gpu: bool
    env: dict[torch.fx.Node, Any] = field(default_factory=dict)
    opaque: dict[str, Opaque] = field(default_factory=dict)  # by the graph's nodes
    folded: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    biased: dict[str, tuple[Value, torch.Tensor]] = field(default_factory=dict)
    examples: set[int] = field(default_factory=lambda: {1})  # how many each input may hold
    masks: dict[tuple[Any, ...], tuple[torch.Tensor | None, torch.Tensor]] = field(
        default_factory=dict
    )
    node: Any = None

    def __post_init__(self) -> None:
        label = re.sub(r"\W", "_", self.name) or "model"
        self.g = Graph(label if label.isidentifier() else "model")
        self._names: dict[str, torch.fx.Node] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._held: dict[tuple[Any, ...], Value] = {}
        self._by_input: dict[str, int] = {}
        self._packed: dict[str, Packed] = {}

    # -- the walk ----------------------------------------------------------------------------------

    def run(self) -> Imported:
        graph = self.module.graph
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in _ASSERTIONS:
                node.replace_all_uses_with(None)
                graph.erase_node(node)
        graph.eliminate_dead_code()
        user = {name: place for place, name in enumerate(self.placeholders)}
        results: list[str | tuple[str, Any]] = []
        for node in graph.nodes:
            self.node = node
            if node.op == "placeholder":
                self.env[node] = self._placeholder(node, user)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op == "call_function":
                self.env[node] = self._result(node)
            elif node.op == "output":
                results = self._outputs(node)
            else:
                raise self._refused(f"a node of kind {node.op}")
        return self._finished(results)

    def _placeholder(self, node: torch.fx.Node, user: Mapping[str, int]) -> Any:
        if node.name in self.constants:
            return self.constants[node.name]
        seen = node.meta.get("val")
        if not isinstance(seen, torch.Tensor):
            return seen
        if node.name not in user:
            raise self._refused("a placeholder that is neither input nor constant")
        self._known_shape(seen)
        label = self._free(node.name)
        self._by_input[label] = user[node.name]
        self.examples |= {max(1, length) for length in seen.shape[:1]}
        shape, layout = tuple(seen.shape), None
        stride: Any = None if overlaps_itself(shape, seen.stride()) else tuple(seen.stride())
        if self._is_image(seen):
            stride, layout = None, "channels_last"
            if self._wants_padding(node, seen):
                images, channels, rows, columns = shape
                packed = self._packed[label] = Packed(channels, self._side_by_side(node, columns))
                shape = (images, 4 * packed.columns, rows, columns // packed.columns)
        return self.g.input(label, shape, seen.dtype, stride=stride, layout=layout)

    def _wants_padding(self, node: torch.fx.Node, seen: torch.Tensor) -> bool:
        """Whether to give an image of three channels a fourth, all zero: convolutions of 16-bit
        images take four fifths to two thirds of their time then (an H200: 84 and 62 us for 32
        images of 224 x 224 and 7 x 7 taps, 13.1 and 8.4 us for one)."""
        return (
            self.on_gpu
            and seen.dim() == 4
            and seen.shape[1] == 3
            and seen.dtype in LOW_PRECISION
            and bool(node.users)
            and all(self._convolves(user, node) for user in node.users)
        )

    def _convolves(self, user: torch.fx.Node, image: torch.fx.Node) -> bool:
        """Whether a node is a convolution of the image by a weight that is constant."""
        if user.target is not _aten.conv2d.default or user.all_input_nodes.count(image) > 1:
            return False
        given = forms.named(user.target, user.args, user.kwargs)
        weight = given["weight"]
        constant = isinstance(weight, torch.fx.Node) and weight.name in self.constants
        return given["input"] is image and constant and given["groups"] == 1

    def _side_by_side(self, node: torch.fx.Node, columns: int) -> int:
        """How many columns of an image of three channels to read as channels: all of a window's,
        where windows stand side by side. A transformer's patches of 16 x 16 take less than half
        then (an H200: 39.5 and 16.1 us for 8 images of 224 x 224, 26.4 and 7.0 us for one)."""
        widths = set[int]()
        for user in node.users:
            given = forms.named(user.target, user.args, user.kwargs)
            width = self.constants[given["weight"].name].shape[3]
            window = tuple(_spread(given[key], 2)[1] for key in ("stride", "padding", "dilation"))
            widths.add(width if window == (width, 0, 1) else 1)
        width = widths.pop()
        return 1 if widths or columns % width else width

    def packed(self, x: Value) -> Packed | None:
        """How an image lies in x, where x is no such image."""
        return self._packed.get(x.name)

    def _is_image(self, tensor: torch.Tensor) -> bool:
        return self.channels_last and tensor.dim() in (4, 5) and tensor.dtype in FLOATS

    def _attribute(self, node: torch.fx.Node) -> Any:
        value: Any = self.module
        for word in str(node.target).split("."):
            value = getattr(value, word)
        return value.detach() if isinstance(value, torch.Tensor) else value

    def _result(self, node: torch.fx.Node) -> Any:
        target: Any = node.target
        args, kwargs = self._filled(node.args), self._filled(node.kwargs)
        if target is operator.getitem:
            return args[0][args[1]]
        if not isinstance(target, torch._ops.OpOverload):
            if not any(isinstance(each, Value) for each in _leaves((args, kwargs))) and not (
                isinstance(target, torch._ops.HigherOrderOperator)
            ):
                return target(*args, **kwargs)  # arithmetic on sizes
            raise self._refused("control flow, or a call that is no op of torch")
        if node in self.folded:
            return (
                (self.env[self.folded[node]], None, None)
                if _many(node)
                else self.env[self.folded[node]]
            )
        if target._schema.is_mutable:
            raise self._refused("it writes over its operands")
        graph_values = [each for each in _leaves((args, kwargs)) if isinstance(each, Value)]
        draws = forms.draws(target, args, kwargs)
        if not graph_values and not draws:
            with torch.no_grad():
                return target(*args, **kwargs)
        for seen in _leaves(node.meta.get("val")):
            if isinstance(seen, torch.Tensor):
                self._known_shape(seen)
            elif isinstance(seen, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise self._refused("its result depends on the numbers in a tensor")
        rule = RULES.get(target.overloadpacket)
        if rule is not None:
            made = self._by_rule(rule, node, target, args, kwargs)
            if made is not None:
                return made
        if draws:
            raise self._refused("it draws random numbers (call model.eval()?)")
        if target.overloadpacket in _OF_MEMORY:
            raise self._refused("it reaches memory that none of its operands fills")
        image = not any(map(self._lies_in_order, graph_values))
        if _goes_by_layout(target):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._as_traced)
        wanted = _meant(target, args)
        return self.left_to_torch(str(target), wanted, kwargs, node, image=image)

    def _as_traced(self, node: torch.fx.Node) -> Any:
        """What a node stands for, in memory as it lay when the model was traced."""
        value, seen = self.env[node], node.meta.get("val")
        if not isinstance(value, Value) or value.spec is None or not isinstance(seen, torch.Tensor):
            return value
        shape, wanted = value.spec.shape, tuple(seen.stride())
        if tuple(seen.shape) != shape or same_layout(shape, value.spec.stride, wanted):
            return value
        if value.spec.dtype not in FLOATS:
            return self._clone(value)
        made = self.g.identity(value)
        stride = wanted if is_dense(shape, wanted) else contiguous_strides(shape)
        made.spec = replace(value.spec, name=made.name, stride=stride)
        return made

    def _clone(self, value: Value) -> Any:
        """A contiguous copy of what our own ops do not take."""
        form = (("memory_format", ("memory_format", "contiguous_format")),)
        return self.g.aten([value], "aten.clone.default", (("tensor", 0),), form)

    def _filled(self, value: Any) -> Any:
        """Arguments with what the nodes in them stand for."""
        return torch.fx.node.map_arg(value, lambda node: self.env[node])

    def _by_rule(
        self, rule: Rule, node: torch.fx.Node, target: Any, args: Any, kwargs: Any
    ) -> Any | None:
        """What a rule makes of an op; None where it does not apply, or made something else."""
        mark = self.g.mark()
        given = forms.named(target, args, kwargs)
        try:
            made = rule(self, given)
        except (_Skip, GraphError):
            made = None
        seen = _stated(target, node.meta.get("val"), given, known=self._as_told(node))
        if made is not None and len(self.g.problems) == mark[1] and _agrees(made, seen):
            if target.overloadpacket in _MAKE_IMAGES:
                self._settle(made)
            return made
        self.g.undo(mark)
        return None

    def left_to_torch(
        self, name: str, args: Any, kwargs: Any, node: torch.fx.Node, *, image: bool = True
    ) -> Any:
        """A node of torch's own op; whether what has an image's rank is one."""
        operands: list[Value] = []

        def place(value: Any) -> int | None:
            if isinstance(value, torch.Tensor):
                value = self.constant(value)
            if not isinstance(value, Value):
                return None
            if value not in operands:
                operands.append(value)
            return operands.index(value)

        mark = self.g.mark()
        try:
            encoded = tuple(aten.encode(value, place) for value in args)
            named = tuple((key, aten.encode(value, place)) for key, value in kwargs.items())
        except ValueError as error:
            raise self._refused(str(error)) from None
        made = self.g.aten(operands, name, encoded, named)
        if len(self.g.problems) > mark[1]:
            raise self._refused("; ".join(problem.what for problem in self.g.problems[mark[1] :]))
        self.opaque[self.g._nodes[-1].name] = Opaque(name, self._line(node))
        results = made if isinstance(made, tuple) else (made,)
        seen = node.meta.get("val")
        several = seen if isinstance(seen, (tuple, list)) else (seen,)
        op, dtypes = aten.overload(name), [value.dtype for value in operands]
        known = self._as_told(node)
        for number, (result, right) in enumerate(zip(results, several, strict=False)):
            if not isinstance(right, torch.Tensor) or not isinstance(result, Value):
                continue
            spec, dtype = result.spec, forms.dtype_made(op, number, right.dtype, dtypes)
            same = spec is None or spec.shape == tuple(right.shape)
            same = same and (spec is None or spec.dtype == dtype or not known)
            if not same and (not _many(node) or _reads(node, number)):
                raise self._refused("its results have other shapes or dtypes on this device")
        if image:
            self._settle(results[0])
        return results if _many(node) else results[0]

    def _as_told(self, node: torch.fx.Node) -> bool:
        """Whether the operands of a node have the dtypes that torch says, and so its results."""
        pairs = ((self.env[each], each.meta.get("val")) for each in node.all_input_nodes)
        return all(
            value.dtype == seen.dtype
            for value, seen in pairs
            if isinstance(value, Value) and isinstance(seen, torch.Tensor)
        )

    def _lies_in_order(self, x: Value) -> bool:
        """Whether x has the rank of an image and lies contiguous, as an image here does not: what a
        model turned to have its channels last, say. No constant is an image, nor are indices."""
        spec = x.spec
        if spec is None or len(spec.shape) not in (4, 5) or spec.dtype not in FLOATS:
            return False
        last = channels_last_strides(spec.shape)
        turned = is_contiguous(spec.shape, spec.stride) and x.name not in self._kept
        return turned and not same_layout(spec.shape, spec.stride, last)

    def _settle(self, value: Any) -> None:
        """Lay an image out as the others are, where its op could not know: a single pixel says
        nothing, and what is broadcast has no layout yet."""
        spec = value.spec if isinstance(value, Value) else None
        if spec is None or not self.channels_last or len(spec.shape) not in (4, 5):
            return
        if spec.dtype in FLOATS and is_contiguous(spec.shape, spec.stride):
            value.spec = replace(spec, stride=channels_last_strides(spec.shape))

    # -- operands ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the result of the op at hand is, and what is made for it belongs."""
        seen = _leaves(self.node.meta["val"])
        return next(each.device for each in seen if isinstance(each, torch.Tensor))

    def value(self, given: Any) -> Value:
        """An operand of a rule as a value of the graph; a number stays out of it."""
        if isinstance(given, Value):
            return given
        if isinstance(given, torch.Tensor):
            return self.constant(given)
        raise _Skip

    def operand(self, given: Any) -> Any:
        """The same, or a number: a Python one, or that of a tensor without dims."""
        if isinstance(given, bool):
            raise _Skip
        if isinstance(given, (int, float)):
            return float(given)
        if isinstance(given, torch.Tensor) and given.dim() == 0 and given.dtype in FLOATS:
            return float(given)
        return self.value(given)

    def constant(self, tensor: torch.Tensor, label: str = "constant") -> Value:
        """The graph's input for a tensor that is always the same."""
        if tensor.layout != torch.strided:
            raise self._refused("it reads a sparse tensor")
        place = (
            tensor.data_ptr() if tensor.numel() else id(tensor),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
        )
        found = self._held.get(place)
        if found is not None and self.g._inputs.get(found.name) is found:
            return found
        name = self._free(label)
        value = self.g.input(name, like=tensor)
        self._kept[name] = tensor
        self._held[place] = value
        return value

    def biased_value(self, value: Value, bias: torch.Tensor) -> Value:
        """The value with a constant added along its channels."""
        made = self.g.bias(value, self.constant(bias, "bias"))
        self.biased[made.name] = (value, bias)
        return made

    def image_weight(self, weight: torch.Tensor) -> Value:
        """The weight of a convolution, laid out as the graph's images are."""
        if not self.channels_last or weight.dim() not in (4, 5):
            return self.constant(weight.contiguous(), "weight")
        last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
        return self.constant(weight.contiguous(memory_format=last), "weight")

    def _free(self, label: str) -> str:
        label = re.sub(r"\W", "_", label)
        label = label if label.isidentifier() else f"x_{label}"
        name, count = label, 0
        while name in self.g._inputs or name in self._names:
            count += 1
            name = f"{label}_{count}"
        self._names[name] = self.node
        return name

    # -- batch norm --------------------------------------------------------------------------------

    def following_norm(self) -> tuple[torch.fx.Node, _Norm] | None:
        """The batch norm that alone reads the convolution at hand, its parameters constant."""
        users = list(self.node.users)
        if len(users) != 1 or users[0].op != "call_function" or users[0].args[0] is not self.node:
            return None
        (user,) = users
        target: Any = user.target
        reads: list[torch.fx.Node] = []
        torch.fx.map_arg((user.args, user.kwargs), reads.append)
        if reads.count(self.node) != 1:
            return None
        if not isinstance(target, torch._ops.OpOverload) or any(
            each is not self.node and each not in self.env for each in user.all_input_nodes
        ):
            return None
        rest = self._filled((None, *user.args[1:]))
        given = forms.named(target, rest, self._filled(dict(user.kwargs)))
        norm = _norm_of(target.overloadpacket, given)
        return None if norm is None else (user, norm)

    def preceding_norm(self) -> tuple[torch.fx.Node, _Norm, Any] | None:
        """The batch norm that the convolution at hand alone reads, its parameters constant, and
        what that norm is of."""
        node: Any = self.node.args[0]
        while isinstance(node, torch.fx.Node) and node.op == "call_function":
            if len(node.users) != 1 or node in self.folded:
                return None
            if node.target is operator.getitem and node.args[1] == 0:
                node = node.args[0]
                continue
            if not isinstance(node.target, torch._ops.OpOverload):
                return None
            given = forms.named(node.target, self._filled(node.args), self._filled(node.kwargs))
            norm = _norm_of(node.target.overloadpacket, given)
            return None if norm is None else (node, norm, given["input"])
        return None

    # -- the end -----------------------------------------------------------------------------------

    def _outputs(self, node: torch.fx.Node) -> list[str | tuple[str, Any]]:
        results: list[str | tuple[str, Any]] = []
        named: dict[str, dict[tuple[int, ...] | None, str]] = {}  # by value and by strides
        flat = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
        for each in flat:
            value = self.env[each] if isinstance(each, torch.fx.Node) else each
            own = isinstance(each, torch.fx.Node) and not _hands_on(each)
            if isinstance(value, Value) and value.name in self._kept:
                value = self._kept[value.name]
            if value is None and isinstance(each, torch.fx.Node) and _is_tensor(each):
                raise CannotImport(f"{self.name}: a result is wanted that the graph does not have")
            if not isinstance(value, Value):
                kind = "copy" if own and isinstance(value, torch.Tensor) else "value"
                results.append((kind, value))
            elif value.name in self._by_input and not own:
                results.append(("input", self._by_input[value.name]))
            else:
                seen = each.meta.get("val") if isinstance(each, torch.fx.Node) else None
                copied = value.name in self._by_input
                kept = self.keep_strides or copied or _is_laid_out(each)
                stride = tuple(seen.stride()) if kept and seen is not None else None
                known = {} if copied else named.setdefault(value.name, {})  # each copy is one
                floats = value.spec is not None and value.spec.dtype in FLOATS
                if stride in known or (known and not floats):
                    results.append(known.get(stride) or next(iter(known.values())))
                    continue
                name = self._free(f"out{len(self.g._outputs)}")
                if copied or known:
                    value = self.g.identity(value) if floats else self._clone(value)
                mark = self.g.mark()
                self.g.output(name, value, stride=stride)
                if len(self.g.problems) > mark[1]:
                    raise CannotImport(
                        f"{self.name}: " + "; ".join(map(str, self.g.problems[mark[1] :]))
                    )
                known[stride] = name
                results.append(name)
        return results

    def _finished(self, results: list[str | tuple[str, Any]]) -> Imported:
        spec = None
        if any(isinstance(result, str) for result in results):
            self.g.drop_unused_inputs()
            spec = self.g.spec()
        there = set(() if spec is None else spec.inputs)
        nodes = set(() if spec is None else (node.name for node in spec.nodes))
        by_place = {place: name for name, place in self._by_input.items() if name in there}
        return Imported(
            spec,
            tuple(by_place.get(place) for place in range(len(self.placeholders))),
            {name: tensor for name, tensor in self._kept.items() if name in there},
            tuple(results),
            tuple(each for name, each in self.opaque.items() if name in nodes),
            len(self.folded),
            {name: each for name, each in self._packed.items() if name in there},
        )

    def _known_shape(self, seen: torch.Tensor) -> None:
        if any(not isinstance(size, int) for size in (*seen.shape, *seen.stride())):
            raise self._refused("the shape of its result depends on the numbers in a tensor")

    def _line(self, node: torch.fx.Node) -> str:
        """The line of the model that an op comes from, "" where torch does not say."""
        return last_line(node.meta.get("stack_trace") or "")

    def _refused(self, why: str) -> CannotImport:
        line = self._line(self.node)
        at = f" ({line})" if line else ""
        return CannotImport(f"{self.name} is no single graph: {self.node.target}{at}: {why}")


def _many(node: torch.fx.Node) -> bool:
    """Whether an op gives several results."""
    return isinstance(node.meta.get("val"), (tuple, list))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _stated(op: Any, seen: Any, given: Arguments, *, known: bool) -> Any:
    """The shapes and dtypes of an op's results, as torch says and as they are; the dtypes are
    None where they are not ``known``."""
    dtypes = [each.dtype for each in _leaves(given) if isinstance(each, (Value, torch.Tensor))]

    def stated(number: int, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        dtype = forms.dtype_made(op, number, tensor.dtype, dtypes) if known else None
        return tuple(tensor.shape), dtype

    if isinstance(seen, (tuple, list)):
        return [stated(number, each) for number, each in enumerate(seen)]
    return stated(0, seen)


def _agrees(made: Any, seen: Any) -> bool:
    """Whether results have the shapes and dtypes of what torch makes; None is a result unused."""
    if isinstance(seen, list):
        return isinstance(made, tuple) and all(
            mine is None or _agrees(mine, theirs) for mine, theirs in zip(made, seen, strict=False)
        )
    if isinstance(made, torch.Tensor):
        return True
    if not isinstance(made, Value) or made.spec is None or not isinstance(seen, tuple):
        return False
    shape, dtype = seen
    return made.shape == shape and dtype in (None, made.dtype)


# -- ops by what they are --------------------------------------------------------------------------

_aten: Any = torch.ops.aten


def _packets(*names: str) -> frozenset[Any]:
    """Ops of torch's, each with all of its overloads, as far as this torch has them. An op is known
    by itself alone: names that begin or end like its own are other ops'."""
    return frozenset(getattr(_aten, name) for name in names if hasattr(_aten, name))


_ASSERTIONS = frozenset(
    getattr(packet, which)
    for packet in _packets("_assert_tensor_metadata", "_assert_async", "_assert_scalar")
    for which in packet.overloads()
    if not getattr(packet, which)._schema.returns
)
_CONVOLUTIONS = (
    *("conv1d", "conv2d", "conv3d", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
CONVOLUTIONS = _packets(*_CONVOLUTIONS)
_UPSAMPLES = {name: mode for (mode, _), name in UPSAMPLE.items()}
_MEANS = (
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
)
#: Ops whose results are images: they get the layout of images where nothing says otherwise.
_MAKE_IMAGES = _packets(*_CONVOLUTIONS, *_UPSAMPLES, *_MEANS)

_OF_BATCHES = (
    *("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm"),
    "cudnn_batch_norm",
)
_NORMS = _packets(*_OF_BATCHES)

#: Ops whose results go by the strides of their operands and by where those begin, which are the
#: graph's own: never called as they are.
_OF_MEMORY = _packets("as_strided", "as_strided_copy", "as_strided_scatter")

#: Inner ops of torch's that take operands of any strides.
_ANY_LAYOUT = _packets(
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *(*_MEANS, *(f"{name}_backward" for name in _MEANS)),
    *(*_UPSAMPLES, *(f"{name}_backward" for name in _UPSAMPLES)),
    *("avg_pool2d_backward", "avg_pool3d_backward"),
    *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
    *("convolution", "convolution_backward"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("_native_batch_norm_legit_no_training", "native_batch_norm", "native_batch_norm_backward"),
    *("native_dropout", "native_dropout_backward"),
    *("_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index", "_unsafe_view", "_to_copy"),
    *("hardswish_backward", "hardsigmoid_backward", "hardtanh_backward", "leaky_relu_backward"),
    *("elu_backward", "softplus_backward", "log_sigmoid_backward", "mse_loss_backward"),
    *("_fft_r2c", "_fft_c2r", "_fft_c2c"),
)


# -- rules -----------------------------------------------------------------------------------------

Rule = Callable[[_Conversion, Arguments], Any]


@dataclass(frozen=True)
class _Norm:
    """A batch norm with given statistics, in float64: y = (x - mean) * scale + offset along the
    channels, where (x - mean) * scale has the standard deviation ``gain``."""

    mean: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    gain: torch.Tensor

    @property
    def shift(self) -> torch.Tensor:
        """y = x * scale + shift."""
        return self.offset - self.mean * self.scale


def _norm_of(packet: Any, a: Arguments) -> _Norm | None:
    if packet not in _NORMS or a.get("training", a.get("train", False)):
        return None
    mean, var = a["running_mean"], a["running_var"]
    given = [mean, var, a["weight"], a["bias"]]
    if (
        mean is None
        or var is None
        or any(each is not None and not isinstance(each, torch.Tensor) for each in given)
    ):
        return None
    inverse = torch.rsqrt(var.double() + float(a["eps"]))
    gain = torch.ones_like(inverse) if a["weight"] is None else a["weight"].double()
    offset = torch.zeros_like(inverse) if a["bias"] is None else a["bias"].double()
    return _Norm(mean.double(), inverse * gain, offset, gain)


def _batch_norm(c: _Conversion, a: Arguments) -> Any:
    """One that no convolution took in: a scale and a bias."""
    norm = _norm_of(c.node.target.overloadpacket, a)
    if norm is None:
        raise _Skip
    x = c.value(a["input"])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = c.g.scale(x, c.constant(norm.scale.to(wide), "scale"))
    y = c.g.bias(y, c.constant(norm.shift.to(wide), "shift"))
    return (y, None, None) if _many(c.node) else y


MOST_OFF_CENTRE = 4.0  # standard deviations that means may be, for weights to take a norm in


def _convolved(c: _Conversion, a: Arguments, rank: int, *, transposed: bool, padding: Any) -> Value:
    x, weight, bias = c.value(a["input"]), a["weight"], a["bias"]
    if len(x.shape) != rank + 2:
        raise _Skip
    options: dict[str, Any] = {
        "stride": _spread(a["stride"], rank),
        "padding": padding,
        "dilation": _spread(a["dilation"], rank),
        "groups": a["groups"],
    }
    if transposed:
        options["output_padding"] = _spread(a["output_padding"], rank)
    before = norm = None
    if isinstance(weight, torch.Tensor) and isinstance(bias, (torch.Tensor, NoneType)):
        dtype = weight.dtype
        padded = not isinstance(padding, str) and any(padding)
        if a["groups"] == 1 == math.prod(weight.shape[2:]) and not (transposed or padded):
            before = c.preceding_norm()
        norm = c.following_norm()
        if norm is not None:
            weight, bias = _folded(norm[1], weight, bias, a["groups"], transposed)
        taken = None if before is None else _taken_in(before[1], weight, bias, dtype)
        if before is not None and taken is not None:
            x, (weight, bias) = c.value(before[2]), taken
        else:
            before = None
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    if isinstance(weight, torch.Tensor):
        if packed := c.packed(x):
            weight = packed.weight(weight)
            if packed.columns > 1:  # one of its windows is one of x
                options |= {"stride": (options["stride"][0], 1)}
        held = c.image_weight(weight)
    else:
        held = c.value(weight)
    y = (c.g.conv_transpose if transposed else c.g.conv)(x, held, **options)
    if isinstance(bias, torch.Tensor):
        y = c.biased_value(y, bias)
    elif bias is not None:
        y = c.g.bias(y, c.value(bias))
    for folded in (before, norm):
        if folded is not None and y.spec is not None:
            c.folded[folded[0]] = c.node
    return y


def _taken_in(
    norm: _Norm, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Weight in ``dtype`` and bias in float64 of a convolution of single pixels with a batch norm
    in front.

    W (x - mean) becomes W x - W mean with the W that is rounded, so what W is off by counts for
    x - mean alone. None where means are so much larger than deviations that rounding x and W mean
    would tell, or where the W that is rounded leaves the range of ``dtype``.
    """
    wide = weight.double().flatten(1)
    exact = wide * norm.scale
    scaled = exact.to(dtype)
    means = scaled.double() * norm.mean
    most = MOST_OFF_CENTRE * (wide * norm.gain).norm(dim=1)
    fits = (means.norm(dim=1) <= most) & (means.sum(1).abs() <= most)
    fits &= (scaled.double() - exact).norm(dim=1) <= torch.finfo(dtype).eps * exact.norm(dim=1)
    if not bool(fits.all()):
        return None
    means = means.sum(1)
    shift = wide @ norm.offset - means
    return scaled.view(weight.shape), shift if bias is None else shift + bias.double()


def _folded(
    norm: _Norm, weight: torch.Tensor, bias: torch.Tensor | None, groups: int, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias, in float64, of a convolution with a batch norm behind it."""
    if transposed:  # (C, K/groups, ...): output channels are numbered through the groups
        grouped = weight.double().view(groups, -1, *weight.shape[1:])
        scale = norm.scale.view(groups, 1, -1, *(1,) * (weight.dim() - 2))
        wide = (grouped * scale).view(weight.shape)
    else:
        wide = weight.double() * norm.scale.view(-1, *(1,) * (weight.dim() - 1))
    shift = norm.shift if bias is None else norm.shift + bias.double() * norm.scale
    return wide, shift


def _spread(value: Any, rank: int) -> tuple[int, ...]:
    many = [value] if isinstance(value, int) else list(value)
    return tuple(many * rank if len(many) == 1 else many)


def _conv(rank: int) -> Rule:
    def rule(c: _Conversion, a: Arguments) -> Value:
        padding = a["padding"]
        padding = padding if isinstance(padding, str) else _spread(padding, rank)
        return _convolved(c, a, rank, transposed=False, padding=padding)

    return rule


def _conv_transpose(rank: int) -> Rule:
    def rule(c: _Conversion, a: Arguments) -> Value:
        return _convolved(c, a, rank, transposed=True, padding=_spread(a["padding"], rank))

    return rule


def _convolution(c: _Conversion, a: Arguments) -> Value:
    rank = len(c.value(a["input"]).shape) - 2
    padding = _spread(a["padding"], rank)
    return _convolved(c, a, rank, transposed=a["transposed"], padding=padding)


def _unary(method: str, *attrs: str) -> Rule:
    return lambda c, a: getattr(c.g, method)(
        c.value(_first(a)), *(float(a[each]) for each in attrs)
    )


def _first(a: Arguments) -> Any:
    """The operand: it is called self or input."""
    return a["self"] if "self" in a else a["input"]


def _one(function: Callable[[Graph, Value], Value]) -> Rule:
    return lambda c, a: function(c.g, c.value(_first(a)))


def _add(c: _Conversion, a: Arguments) -> Value:
    """x + y, where a bias of either comes last.

    cuDNN has precompiled engines for the order convolution, residual, bias, activation, and a bias
    on both sides is one bias.
    """
    x, y = c.operand(a["self"]), c.operand(a["other"])
    if a.get("alpha", 1) != 1 or not (isinstance(x, Value) and isinstance(y, Value)):
        return _two("add")(c, a)  # type: ignore[no-any-return]
    biases: list[torch.Tensor] = []
    parts = []
    for value, node in zip((x, y), c.node.args, strict=True):
        found = c.biased.get(value.name)
        if found is None or len(getattr(node, "users", ())) != 1 or x.shape != y.shape:
            parts.append(value)
        else:
            parts.append(found[0])
            biases.append(found[1])
    made = c.g.add(*parts)
    if not biases:
        return made
    total = biases[0]
    if len(biases) > 1:
        total = (biases[0].double() + biases[1].double()).to(biases[0].dtype)
    return c.biased_value(made, total)


_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")


def _two(method: str) -> Rule:
    def rule(c: _Conversion, a: Arguments) -> Value:
        x, other = c.operand(_first(a)), a["exponent"] if "exponent" in a else a["other"]
        if method in _COMPARES and isinstance(other, float) and x.dtype in LOW_PRECISION:
            other = torch.tensor(other, dtype=x.dtype).item()  # as torch compares
        y = c.operand(other)
        alpha = a.get("alpha", 1)
        if a.get("rounding_mode") is not None:
            raise _Skip
        y = y if alpha == 1 else c.g.mul(y, float(alpha))
        return getattr(c.g, method)(x, y)  # type: ignore[no-any-return]

    return rule


def _div(c: _Conversion, a: Arguments) -> Value:
    floor = least_norm_before(c.node)
    if floor is not None:
        return c.g.normalize(c.value(a["self"]), eps=floor)
    return _written_norm(c) or _two("div")(c, a)


def _mul(c: _Conversion, a: Arguments) -> Value:
    return _written_norm(c) or _two("mul")(c, a)


def _written_norm(c: _Conversion) -> Value | None:
    """What a product, a quotient or a conversion is the end of, where that is an RMS norm that the
    model writes out."""
    found = rms_norm_before(c.node)
    if found is None:
        return None
    x, weight, seen = c.env[found.x], None, c.node.meta["val"]
    if found.weight is not None:
        weight = c.env[found.weight]
    if not isinstance(x, Value) or (x.shape, x.dtype) != (tuple(seen.shape), seen.dtype):
        return None
    if not x.shape:
        return None
    if weight is None:
        weight = torch.ones(x.shape[-1], dtype=x.dtype, device=c.device)
    if isinstance(weight, torch.Tensor) and weight.shape[-1:].numel() == weight.numel():
        weight = weight.flatten()
    if tuple(weight.shape) != x.shape[-1:] or weight.dtype not in (x.dtype, torch.float32):
        return None
    return c.g.rms_norm(x, c.value(weight), eps=found.eps)  # type: ignore[no-any-return]


def _rsub(c: _Conversion, a: Arguments) -> Value:
    x, alpha = c.operand(a["self"]), a.get("alpha", 1)
    return c.g.sub(c.operand(a["other"]), x if alpha == 1 else c.g.mul(x, float(alpha)))


def _pow(c: _Conversion, a: Arguments) -> Value:
    if isinstance(a["exponent"], (int, float)) and a["exponent"] == 2:
        x = c.value(a["self"])
        return c.g.mul(x, x)
    return _two("pow")(c, a)  # type: ignore[no-any-return]


def _where(c: _Conversion, a: Arguments) -> Value:
    return c.g.where(c.value(a["condition"]), c.operand(a["self"]), c.operand(a["other"]))


def _full(number: float | None) -> Rule:
    """A tensor of one number, of whatever operand it takes the form: a constant, unless large. It
    lies as it did when the model was traced, as those that are computed of it expect."""

    def rule(c: _Conversion, a: Arguments) -> torch.Tensor:
        seen = c.node.meta["val"]
        near = next((each for each in c.constants.values() if each.dim()), None)
        value = a["fill_value"] if number is None else number
        if near is None or seen.numel() > MOST_FILLED or not isinstance(value, (int, float)):
            raise _Skip
        asked = {torch.device(each).type for each in (seen.device, a.get("device")) if each}
        if not asked <= {"meta", near.device.type}:
            raise _Skip
        stride = tuple(seen.stride())
        made = torch.empty_strided(seen.shape, stride, dtype=seen.dtype, device=near.device)
        return made.fill_(value)

    return rule


def _pad(c: _Conversion, a: Arguments) -> Value:
    """By nothing: what pads to a multiple often has nothing to do."""
    if any(a["pad"]):
        raise _Skip
    return c.value(a["self"])


def _masked_fill(c: _Conversion, a: Arguments) -> Value:
    x, number = c.value(a["self"]), c.operand(a["value"])
    if isinstance(number, Value):
        raise _Skip
    return c.g.where(c.value(a["mask"]), number, x)


def _gelu(c: _Conversion, a: Arguments) -> Value:
    return c.g.gelu(c.value(a["self"]), a["approximate"])


def _elu(c: _Conversion, a: Arguments) -> Value:
    if a["scale"] != 1 or a["input_scale"] != 1:
        raise _Skip
    return c.g.elu(c.value(a["self"]), float(a["alpha"]))


def _softplus(c: _Conversion, a: Arguments) -> Value:
    if a["threshold"] != SOFTPLUS_THRESHOLD:
        raise _Skip
    return c.g.softplus(c.value(a["self"]), float(a["beta"]))


def _clamp(c: _Conversion, a: Arguments) -> Value:
    low, high = a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))
    if any(isinstance(each, (torch.Tensor, Value)) for each in (low, high)):
        raise _Skip
    return c.g.clamp(
        c.value(a["self"]),
        None if low is None else float(low),
        None if high is None else float(high),
    )


def _reads(node: torch.fx.Node, place: int) -> bool:
    """Whether something reads this one of a node's results."""
    return any(user.args[1] == place for user in node.users)


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _goes_by_layout(op: Any) -> bool:
    """Whether an op may read memory as it lay when the model was traced: torch's own inner ones
    (attention, weight norm, gradients, what norms have saved for theirs) often do not ask."""
    if op.namespace != "aten":
        return True
    if torch.Tag.pointwise in op.tags or op.overloadpacket in _ANY_LAYOUT:
        return False
    return op is _aten.view.dtype or not _is_public(op.overloadpacket.__name__)


@cache
def _is_public(name: str) -> bool:
    """Whether an op is a function that torch documents: those take operands of any strides, all
    but one."""
    _, _, of_module = name.partition("_")  # as in linalg_qr
    places: tuple[tuple[Any, str], ...] = (
        *((torch, name), (torch.Tensor, name), (nn.functional, name), (torch.fft, name)),
        *((torch.linalg, of_module), (torch.special, of_module)),
    )
    known = (getattr(place, each, None) for place, each in places)
    return name != "pdist" and any(bool(getattr(each, "__doc__", None)) for each in known)


def _meant(target: Any, args: Any) -> Any:
    """Arguments without the one of a group norm that torch ignores, which torch.export may set
    otherwise than the model, and that ask a gradient's op for its first result too: a graph has
    none without."""
    names = [argument.name for argument in target._schema.arguments]
    if target is _aten.group_norm.default:
        return args[: names.index("cudnn_enabled")]
    place = names.index("output_mask") if "output_mask" in names else len(args)
    if place >= len(args) or args[place][0]:
        return args
    return (*args[:place], [True, *args[place][1:]], *args[place + 1 :])


def _relabels(source: torch.Tensor, made: Any) -> bool:
    """Whether as_strided gives the tensor itself, but for the strides of dims of one element."""
    return (
        isinstance(made, torch.Tensor)
        and made.shape == source.shape
        and made.storage_offset() == source.storage_offset()
        and same_layout(tuple(source.shape), made.stride(), source.stride())
    )


MOST_PLACED = 1 << 24  # places in memory that are gone through


def _places(seen: torch.Tensor, a: Arguments) -> torch.Tensor:
    """Which elements of a tensor, counted in its order, lie where ``as_strided`` is to read."""
    start = seen.storage_offset() if a["storage_offset"] is None else int(a["storage_offset"])
    size, stride = list(a["size"]), list(a["stride"])
    first = min(start, seen.storage_offset())
    forms = (
        (list(seen.shape), list(seen.stride()), seen.storage_offset() - first),
        (size, stride, start - first),
    )
    extent = max(
        1 + begin + sum((n - 1) * step for n, step in zip(*form, strict=True))
        if all(form[0])
        else 0
        for *form, begin in forms
    )
    if extent > MOST_PLACED or not seen.numel():
        raise _Skip
    elements = torch.full((extent,), -1)
    torch.as_strided(elements, *forms[0]).copy_(torch.arange(seen.numel()).view(seen.shape))
    found = torch.as_strided(elements, *forms[1])
    if bool((found < 0).any()):
        raise _Skip  # it is memory of something else
    return found.clone(memory_format=torch.contiguous_format)


def _in_order(places: torch.Tensor) -> bool:
    return bool((places.flatten() == torch.arange(places.numel())).all())


def _as_strided(c: _Conversion, a: Arguments) -> Any:
    """The elements that lay there when the model was traced."""
    seen, x = c.node.args[0].meta["val"], c.value(a["self"])
    if _relabels(seen, c.node.meta["val"]):
        return x
    places = _places(seen, a)
    if places.numel() == seen.numel() and _in_order(places) and x.dtype in FLOATS:
        return c.g.reshape(x, tuple(places.shape))
    places = places.to(c.device)
    return c.left_to_torch("aten.take.default", [x, places], {}, c.node, image=False)


def _as_strided_scatter(c: _Conversion, a: Arguments) -> Any:
    """A copy in which others stand for the elements that lay there when the model was traced."""
    seen, x, others = c.node.args[0].meta["val"], a["self"], c.value(a["src"])
    places = _places(seen, a)
    twice = bool((places.flatten().bincount() > 1).any())
    if twice or overlaps_itself(tuple(seen.shape), tuple(seen.stride())):
        raise _Skip  # what is written last is not said
    if others.shape != tuple(places.shape):
        raise _Skip
    if places.numel() == seen.numel() and _in_order(places) and others.dtype in FLOATS:
        return c.g.reshape(others, tuple(seen.shape))
    given = [c.value(x), places.to(c.device), others]
    return c.left_to_torch("aten.put.default", given, {}, c.node, image=False)


def _is_laid_out(node: Any) -> bool:
    """Whether a result's strides are asked for, by ``contiguous`` or a copy of that form."""
    if not isinstance(node, torch.fx.Node):
        return False
    form = node.kwargs.get("memory_format")
    asked = form is not None and form != torch.preserve_format
    return node.target is _aten.contiguous.default or asked


def _hands_on(node: torch.fx.Node) -> bool:
    """Whether torch gives the very tensor that a placeholder stands for, or its memory."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        name = forms.packet(node)
        source = node.args[0] if node.args else None
        if name not in forms.SAME or name in _COPIES or not isinstance(source, torch.fx.Node):
            return False
        made, of = (each.meta.get("val") for each in (node, source))
        if made is None or of is None or made.stride() != of.stride():
            return False
        node = source
    return node.op in ("placeholder", "get_attr")


def _same(c: _Conversion, a: Arguments) -> Value:
    """What changes no number: the layout is the graph's own."""
    x = c.value(_first(a))
    if a.get("dtype") in (None, x.dtype) and not a.get("train"):
        return x
    normed = _written_norm(c)
    if normed is None:
        raise _Skip
    return normed


# -- gradients, as torch.compile traces them -------------------------------------------------------


def _affine(c: _Conversion, a: Arguments, name: str, number: float) -> Value:
    """The weight or the bias of a batch norm; ``number`` for every channel where it has none."""
    if a[name] is not None:
        return c.value(a[name])
    channels, dtype = c.value(a["input"]).shape[1], c.value(a["input"]).dtype
    wide = torch.promote_types(dtype, torch.float32)
    return c.constant(torch.full((channels,), number, dtype=wide, device=c.device))


def _batch_norm_train(c: _Conversion, a: Arguments) -> tuple[Value, ...]:
    if not a["training"] or a["running_mean"] is None:
        raise _Skip
    affine = _affine(c, a, "weight", 1.0), _affine(c, a, "bias", 0.0)
    running = c.value(a["running_mean"]), c.value(a["running_var"])
    eps, momentum = float(a["eps"]), float(a["momentum"])
    x = c.value(a["input"])
    return c.g.batch_norm_train(x, *affine, *running, eps=eps, momentum=momentum)


def _batch_norm_backward(c: _Conversion, a: Arguments) -> tuple[Any, ...]:
    if not a["train"]:
        raise _Skip
    dy, x, mean, deviation = (
        c.value(a[name]) for name in ("grad_out", "input", "save_mean", "save_invstd")
    )
    made = c.g.batch_norm_backward(dy, x, _affine(c, a, "weight", 1.0), mean, deviation)
    return tuple(
        value if wanted else None for value, wanted in zip(made, a["output_mask"], strict=True)
    )


def _convolution_backward(c: _Conversion, a: Arguments) -> tuple[Any, ...]:
    dy, x, weight = (c.value(a[name]) for name in ("grad_output", "input", "weight"))
    rank = len(x.shape) - 2
    if a["transposed"] or rank not in (1, 2, 3):
        raise _Skip
    geometry: dict[str, Any] = {
        name: _spread(a[name], rank) for name in ("stride", "padding", "dilation")
    }
    geometry["groups"] = a["groups"]
    kernel = weight.shape[2:]
    reached = (
        (n - 1) * s - 2 * p + d * (r - 1) + 1
        for n, s, p, d, r in zip(
            dy.shape[2:],
            geometry["stride"],
            geometry["padding"],
            geometry["dilation"],
            kernel,
            strict=True,
        )
    )
    extra = tuple(n - m for n, m in zip(x.shape[2:], reached, strict=True))
    of_x, of_weight, of_bias = a["output_mask"]
    return (
        c.g.conv_transpose(dy, weight, output_padding=extra, **geometry) if of_x else None,
        c.g.conv_wgrad(dy, x, kernel=kernel, **geometry) if of_weight else None,
        c.g.reduction(dy, (0, *range(2, rank + 2))) if of_bias else None,
    )


def _threshold_backward(c: _Conversion, a: Arguments) -> Value:
    if a["threshold"] != 0:
        raise _Skip
    return c.g.relu_backward(c.value(a["grad_output"]), c.value(a["self"]))


# -- products --------------------------------------------------------------------------------------


def _turned(c: _Conversion, weight: Any) -> Value:
    """A matrix with its dims exchanged; one that is constant is so by its strides."""
    if isinstance(weight, torch.Tensor):
        return c.constant(weight.t(), "weight")
    return c.g.transpose(c.value(weight), 0, 1)


def _linear(c: _Conversion, a: Arguments) -> Value:
    y = c.g.matmul(c.value(a["input"]), _turned(c, a["weight"]))
    return y if a["bias"] is None else c.g.add(y, c.value(a["bias"]))


def _addmm(c: _Conversion, a: Arguments) -> Value:
    if a["beta"] != 1 or a["alpha"] != 1:
        raise _Skip
    return c.g.add(c.g.matmul(c.value(a["mat1"]), c.value(a["mat2"])), c.value(a["self"]))


def _matmul(c: _Conversion, a: Arguments) -> Value:
    attended = _written(c)
    if attended is not None:
        return attended
    other = a["mat2"] if "mat2" in a else a["other"]
    return c.g.matmul(c.value(a["self"]), c.value(other))


def _written(c: _Conversion) -> Value | None:
    """What a product is the end of, where that is attention of 16-bit data that the model writes
    out; cuDNN's keeps the scores to itself."""
    found = attention_before(c.node)
    if found is None:
        return None
    mark = c.g.mark()
    try:
        made = _attention(c, found)
    except (_Skip, GraphError):
        made = None
    if made is None or len(c.g.problems) > mark[1]:
        c.g.undo(mark)
        return None
    return made


MOST_FILLED = 1 << 20  # elements of a tensor of one number that is kept
MOST_KEPT = 1 << 26  # elements of a constant that is made here


def _attention(c: _Conversion, found: Written) -> Value | None:
    q, k, v = (c.value(c.env[node]) for node in (found.query, found.key, found.value))
    rank, batch = len(q.shape), q.shape[:-2]
    if q.dtype not in LOW_PRECISION or rank < 3:
        return None
    if any(x.shape[:-2] != batch or x.dtype != q.dtype for x in (k, v)):
        return None

    def heads(x: Any) -> Any:
        """With a dim for the heads, one, where there is none, and one for all that is before."""
        shape = x.shape
        if rank == 4 or len(shape) < min(rank, 4):
            return x
        before = (shape[0], 1) if rank == 3 else (math.prod(shape[:-3]), shape[-3])
        shape = (*before, *shape[-2:])
        return x.reshape(shape) if isinstance(x, torch.Tensor) else c.g.reshape(x, shape)

    factors, scale = [], found.scale
    for node in found.factors:
        factor = c.env[node]
        if not isinstance(factor, torch.Tensor) or factor.dtype != q.dtype or factor.is_meta:
            return None
        most = float(factor.abs().max()) if factor.numel() else 0.0
        if not math.isfinite(most):
            return None
        power = math.ldexp(1.0, math.frexp(most)[1])  # so queries do not grow beyond 16 bits
        factors.append(factor / power)
        scale *= power
    if rank > 4:  # a mask of some of what is before the heads is none of all
        given = [c.env[node] for node in (*found.added, *(node for node, _, _ in found.hidden))]
        if any(math.prod(each.shape[:-3]) != 1 for each in given):
            return None
    masks: list[Any] = [heads(c.env[node]) for node in found.added]
    for node, (images, windows) in found.windowed:
        mask = c.env[node]
        if not isinstance(mask, torch.Tensor):
            return None
        mask = mask.reshape((1,) * (5 - mask.dim()) + mask.shape)
        if images * windows * math.prod(mask.shape[2:]) > MOST_KEPT:
            return None
        masks.append(mask.expand(images, windows, -1, -1, -1).flatten(0, 1))
    if not all(each.dtype.is_floating_point for each in masks):
        return None
    rows = (*batch, q.shape[-2], k.shape[-1 if found.turned else -2])
    causal, known, left = False, [], None
    for node, hides, number in found.hidden:
        mask = c.env[node]
        if not isinstance(mask, torch.Tensor):  # unknown here, so as it is or not at all
            if number != -math.inf or len(found.hidden) > 1 or masks:
                return None
            masks.append(heads(c.g.logical_not(mask) if hides else mask))
            continue
        known.append(~mask if hides else mask)
        left = known[-1] if left is None else left & known[-1]
    if left is not None and bool((~left.expand(rows).any(-1)).any()):
        return None  # where all is hidden the number makes it the mean
    for keeps in known:
        lower = torch.ones(rows[-2:], dtype=torch.bool, device=keeps.device).tril()
        if rows[-2] == rows[-1] and bool((keeps == lower).all()):
            causal = True
        elif masks or len(known) > 1:
            zero = torch.zeros((), dtype=q.dtype, device=keeps.device)
            masks.append(torch.where(heads(keeps), zero, -math.inf))
        else:
            masks.append(heads(keeps))
    fixed = [each for each in masks if isinstance(each, torch.Tensor)]
    if len(fixed) > 1:  # computed once
        terms: tuple[torch.Tensor, ...]
        terms = torch.broadcast_tensors(*fixed)  # type: ignore[no-untyped-call]
        if terms[0].numel() <= MOST_KEPT:
            dtype = reduce(torch.promote_types, (each.dtype for each in fixed))
            whole = reduce(torch.add, (each.float() for each in terms)).to(dtype)
            masks = [whole, *(each for each in masks if not isinstance(each, torch.Tensor))]
    total: Any = masks[0] if masks else None
    for each in masks[1:]:
        total = c.g.add(c.value(total), c.value(each))
    if found.turned:
        k = c.g.transpose(k, rank - 2, rank - 1)
    for factor in factors:
        shape = (1,) * (rank - factor.dim()) + tuple(factor.shape)
        whole = factor.reshape(shape).expand(*shape[:-1], q.shape[-1])  # so a plan can have it
        q = c.g.mul(q, c.constant(whole.contiguous()))
    y = _attend(c, (heads(q), heads(k), heads(v)), total, causal=causal, scale=scale)
    return y if rank == 4 else c.g.reshape(y, (*batch, q.shape[-2], v.shape[-1]))


ROWS = 128  # of queries that one block of cuDNN's attention takes
BLOCKS = 264  # that are enough to do without others
READ = 4  # numbers of a mask for each of q, at most


def _attend(
    c: _Conversion, qkv: Sequence[Value], mask: Any, *, causal: bool, scale: float | None
) -> Value:
    """Attention. Of the short sequences of one example that lie behind one another (the windows of
    a Swin transformer) several are one, whose tokens do not attend to each other's: a block of
    cuDNN's kernel takes as long for 98 rows as for 49."""
    q, k, v = qkv
    mask = _narrowed(mask) if isinstance(mask, torch.Tensor) else mask
    joined = 1 if causal else _joined(c, qkv, mask)
    if joined == 1:
        given = None if mask is None else _mask(c, mask, q.dtype)
        return c.g.sdpa(q, k, v, given, is_causal=causal, scale=scale)  # type: ignore[no-any-return]
    batch, _, length, _ = q.shape
    whole = _mask(c, mask, q.dtype, joined, length)

    def together(x: Value) -> Value:
        _, heads, _, width = x.shape
        apart = c.g.reshape(x, (batch // joined, joined, heads, length, width))
        beside = c.g.permute(apart, (0, 2, 1, 3, 4))
        return c.g.reshape(beside, (batch // joined, heads, joined * length, width))

    o = c.g.sdpa(together(q), together(k), together(v), whole, scale=scale)
    _, heads, _, width = o.shape
    apart = c.g.reshape(o, (batch // joined, heads, joined, length, width))
    return c.g.reshape(c.g.permute(apart, (0, 2, 1, 3, 4)), (batch, heads, length, width))


def _narrowed(mask: torch.Tensor) -> torch.Tensor:
    """A mask without what only repeats it for images or heads."""
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:
            mask = mask[(slice(None),) * dim + (slice(0, 1),)]
    return mask


def _joined(c: _Conversion, qkv: Sequence[Value], mask: torch.Tensor | Value | None) -> int:
    """How many sequences of a batch to take as one.

    What is not finite reaches the sequences beside it, so they are to be of one example: inputs
    that have a first dim in common count their examples by it, one behind another.
    """
    q, k, v = qkv
    if not c.on_gpu or not isinstance(mask, (torch.Tensor, NoneType)):
        return 1
    if q.dtype not in LOW_PRECISION or any(len(x.shape) != 4 for x in qkv):
        return 1
    batch, heads, length, width = q.shape
    if any(x.shape[0] != batch or x.shape[2] != length for x in (k, v)) or not length:
        return 1
    if any(x.spec is None or x.spec.stride[0] != length * x.spec.stride[2] for x in qkv):
        return 1
    examples = max(c.examples)
    if c.examples - {1, examples} or batch % examples:
        return 1
    images, planes = (1, 1, 1, 1, *(() if mask is None else mask.shape))[-4:-2]
    joined = 1
    for count in range(2, ROWS // length + 1):
        blocks, rows = batch // count * heads, count * length
        numbers = -(-images // count) * planes * rows * rows
        if batch // examples % count or blocks < BLOCKS or numbers > MOST_KEPT:
            continue
        if numbers <= READ * batch * heads * length * width:
            joined = count
    return joined


def _mask(c: _Conversion, mask: Any, dtype: torch.dtype, joined: int = 1, length: int = 0) -> Value:
    """A mask of attention. A constant one, of 16-bit data on a GPU, is what is added, in aligned
    rows, and of ``joined`` sequences of ``length`` taken as one, what each has, if anything."""
    if joined == 1:
        known = c.on_gpu and isinstance(mask, torch.Tensor) and dtype in LOW_PRECISION
        if not known or not 0 < mask.numel() <= MOST_KEPT:
            return c.value(mask)
        if mask.dtype != torch.bool and not odd_rows(mask.shape, mask.stride()):
            return c.value(mask)
    form = None
    if mask is not None:
        form = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype)
    made_of = (form, dtype, joined, length)
    if made_of not in c.masks:
        added = mask
        if mask is None:
            added = torch.zeros((), dtype=dtype, device=c.device)
        elif mask.dtype == torch.bool:
            added = mask.new_zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
        if joined > 1:
            added = _block_diagonal(added, joined, length)
        if added.dim():
            memory = added.new_zeros((*added.shape[:-1], aligned(added.shape[-1])))
            added = memory[..., : added.shape[-1]].copy_(added)
        c.masks[made_of] = mask, added
    return c.constant(c.masks[made_of][1])


def _block_diagonal(mask: torch.Tensor, joined: int, length: int) -> torch.Tensor:
    """The mask of sequences that are taken as one, out of what each has: what is added."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    images = max(1, mask.shape[0] // joined)
    shape = (images, mask.shape[1], joined * length, joined * length)
    whole = torch.full(shape, -math.inf, dtype=mask.dtype, device=mask.device)
    for place in range(joined):
        part = slice(place * length, (place + 1) * length)
        whole[:, :, part, part] = mask[place::joined] if mask.shape[0] > 1 else mask
    return whole


def _layer_norm(c: _Conversion, a: Arguments) -> Any:
    if _many(c.node) and (_reads(c.node, 1) or _reads(c.node, 2)):
        raise _Skip  # its statistics are wanted too
    x, weight = c.value(a["input"]), _norm_weight(c, a)
    bias = None if a["bias"] is None else c.value(a["bias"])
    y = c.g.layer_norm(x, weight, bias, eps=float(a["eps"]))
    return (y, None, None) if _many(c.node) else y


# Elements of the images whose group norm is ours (docs/results/h200-residual.md).
FEWEST_NORMALIZED: dict[str, float] = {"channels_last": 2**19, "contiguous": 2**22}


def _group_norm(c: _Conversion, a: Arguments) -> Any:
    """Of large images by a shift and a factor for each channel, in their strides; of small ones
    torch's own has less to launch. It copies those that lie channels last."""
    many = _many(c.node)
    if many and (_reads(c.node, 1) or _reads(c.node, 2)):
        raise _Skip  # its statistics are wanted too
    x = c.value(a["input"])
    contiguous = is_contiguous(x.shape, x.stride)
    if len(x.shape) < 4 or not (contiguous or is_channels_last(x.shape, x.stride)):
        raise _Skip
    if math.prod(x.shape) < FEWEST_NORMALIZED["contiguous" if contiguous else "channels_last"]:
        raise _Skip
    weight, bias = None if a["weight"] is None else c.value(a["weight"]), a["bias"]
    groups = int(a["group" if many else "num_groups"])
    shift, factor = c.g.group_affine(x, groups, weight, eps=float(a["eps"]))
    y = c.g.scale(c.g.bias(x, shift), factor)
    column = (*x.shape[:2], *(1,) * (len(x.shape) - 2))
    if isinstance(bias, torch.Tensor):
        y = c.g.bias(y, c.value(bias.repeat(x.shape[0]).view(column)))
    elif bias is not None:
        y = c.g.bias(y, c.g.reshape(c.g.expand(bias, x.shape[:2], (1,)), column))
    return (y, None, None) if many else y


def _rms_norm(c: _Conversion, a: Arguments) -> Value:
    x = c.value(a["input"])
    eps = forms.default_eps(x.dtype) if a["eps"] is None else float(a["eps"])
    return c.g.rms_norm(x, _norm_weight(c, a), eps=eps)  # type: ignore[no-any-return]


def _norm_weight(c: _Conversion, a: Arguments) -> Value:
    """The weight of a norm, ones where it has none."""
    if a["weight"] is not None:
        return c.value(a["weight"])
    shape = list(a["normalized_shape"])
    return c.constant(torch.ones(shape, dtype=c.value(a["input"]).dtype, device=c.device))


def _sdpa(c: _Conversion, a: Arguments) -> Value:
    q, k, v = (c.value(a[name]) for name in ("query", "key", "value"))
    if a["dropout_p"]:
        raise _Skip
    scale = None if a["scale"] is None else float(a["scale"])
    return _attend(c, (q, k, v), a["attn_mask"], causal=a["is_causal"], scale=scale)


def _attended(c: _Conversion, a: Arguments) -> tuple[Any, ...]:
    """The forms that attention is traced in behind torch.compile; results but the first unused."""
    if a.get("dropout_p"):
        raise _Skip
    q, k, v = (c.value(a[name]) for name in ("query", "key", "value"))
    given = a.get("attn_bias", a.get("attn_mask"))
    scale = None if a.get("scale") is None else float(a["scale"])
    o = _attend(c, (q, k, v), given, causal=bool(a["is_causal"]), scale=scale)
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in c.node.users):
        raise _Skip
    return (o,)


# -- shapes ----------------------------------------------------------------------------------------


def _reshape(c: _Conversion, a: Arguments) -> Value:
    shape = tuple(c.node.meta["val"].shape)
    x = c.value(_first(a))
    if x.shape == shape:
        return x
    y = c.g.reshape(x, shape)
    order = None if y.spec is None else _order_of_copy(c, x, shape)
    if order is not None and y.spec is not None:
        y.spec = replace(y.spec, stride=dense_strides(shape, order))
    return y


_READ_IMAGES = frozenset(
    (
        *(*_CONVOLUTIONS, *_OF_BATCHES, *_MEANS, *_UPSAMPLES),
        *("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices"),
        *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    )
)
_READ_ALIKE = frozenset({"add", "sub", "mul", "relu", "gelu", "silu", "sigmoid", "tanh"})
_READ_ROWS = frozenset(
    ("layer_norm", "native_layer_norm", "rms_norm", "linear", "mm", "addmm", "matmul")
)


def _order_of_copy(c: _Conversion, x: Value, shape: tuple[int, ...]) -> Sequence[int] | None:
    """The order in memory of what a reshape has to copy; None for its own.

    Of what is transposed and then read by rows, which the transposition leaves as they are, it is
    that of the rows. What convolutions and the like read, or a reshape that cuts images into parts,
    beside pointwise ops at most, lies channels last, where channels lie beside each other in x.
    """
    spec, rank, users = x.spec, len(shape), list(c.node.users)
    if spec is None or not spec.numel or view_strides(spec.shape, spec.stride, shape) is not None:
        return None
    if len(users) == 1 and (packet := forms.packet(users[0])) in ("permute", "transpose"):
        user = users[0]
        dims = order(packet, forms.named(user.target, user.args, user.kwargs), rank)
        by_rows = any(forms.packet(each) in _READ_ROWS for each in user.users)
        return dims if by_rows and dims is not None and dims[-1] == rank - 1 else None
    if not c.channels_last or rank not in (4, 5) or spec.dtype not in FLOATS:
        return None
    images = [user for user in users if _reads_image(user, shape)]
    others = {forms.packet(user) for user in users if user not in images}
    if not images or not others <= _READ_ALIKE:
        return None
    fastest = [dim for dim, s in enumerate(spec.stride) if s == 1 < spec.shape[dim]]
    behind = math.prod(spec.shape[fastest[0] + 1 :]) if fastest else 0
    channels = math.prod(shape[2:]) <= behind < math.prod(shape[1:])
    return (0, *range(2, rank), 1) if channels else None


def _reads_image(user: torch.fx.Node, shape: tuple[int, ...]) -> bool:
    """Whether an op has its images channels last, or cuts them into parts."""
    seen, packet = user.meta.get("val"), forms.packet(user)
    if packet in forms.RESHAPES and isinstance(seen, torch.Tensor):
        return seen.dim() > len(shape) and tuple(seen.shape[:2]) == shape[:2]
    return packet in _READ_IMAGES


def _expand(c: _Conversion, a: Arguments) -> Value:
    shape = tuple(c.node.meta["val"].shape)
    x = c.value(a["self"])
    return x if x.shape == shape else c.g.expand(x, shape)


def _permute(c: _Conversion, a: Arguments) -> Value:
    return c.g.permute(c.value(a["self"]), tuple(a["dims"]))


def _transpose(c: _Conversion, a: Arguments) -> Value:
    x = c.value(a["self"])
    if len(x.shape) < 2:
        return x
    return c.g.transpose(x, a.get("dim0", 0), a.get("dim1", 1))


def _part(c: _Conversion, x: Value, dim: int, start: Any, stop: Any, step: int = 1) -> Value:
    size = x.shape[dim]
    taken = range(*slice(start, stop, step).indices(size))
    if len(taken) == size:
        return x
    return c.g.slice(x, dim, taken.start, taken.stop, step)


def _slice(c: _Conversion, a: Arguments) -> Value:
    return _part(c, c.value(a["self"]), a["dim"], a["start"], a["end"], a["step"])


def _narrow(c: _Conversion, a: Arguments) -> Value:
    if not isinstance(a["start"], int):
        raise _Skip
    return _part(c, c.value(a["self"]), a["dim"], a["start"], a["start"] + a["length"])


def _select(c: _Conversion, a: Arguments) -> Value:
    x = c.value(a["self"])
    dim, index = a["dim"] % len(x.shape), a["index"]
    index += x.shape[dim] if index < 0 else 0
    return c.g.reshape(_part(c, x, dim, index, index + 1), (*x.shape[:dim], *x.shape[dim + 1 :]))


def _split(c: _Conversion, a: Arguments) -> tuple[Value, ...]:
    x, made, start = c.value(a["self"]), [], 0
    dim = a["dim"] % len(x.shape)
    for seen in c.node.meta["val"]:
        made.append(_part(c, x, dim, start, start + seen.shape[dim]))
        start += seen.shape[dim]
    return tuple(made)


def _unbind(c: _Conversion, a: Arguments) -> tuple[Value, ...]:
    count = len(c.node.meta["val"])
    return tuple(_select(c, {**a, "index": index}) for index in range(count))


def _cat(c: _Conversion, a: Arguments) -> Value:
    return c.g.concat([c.value(each) for each in a["tensors"]], a["dim"])


def _stack(c: _Conversion, a: Arguments) -> Value:
    values = [c.value(each) for each in a["tensors"]]
    rank = len(values[0].shape) + 1
    dim = a["dim"] % rank
    apart = [c.g.reshape(v, (*v.shape[:dim], 1, *v.shape[dim:])) for v in values]
    return c.g.concat(apart, dim)


def _reduced(mode: str) -> Rule:
    def rule(c: _Conversion, a: Arguments) -> Value:
        x = c.value(a["self"])
        if a.get("dtype") not in (None, x.dtype) or x.dtype in LOW_PRECISION:
            raise _Skip  # torch's own returns 16 bits of 16 bits, in one kernel
        dims = a.get("dim")
        dims = None if dims is None or dims == [] else tuple(_spread(dims, 1))
        return c.g.reduction(x, dims, mode, bool(a.get("keepdim", False)))

    return rule


def _max_pool(rank: int) -> Rule:
    def rule(c: _Conversion, a: Arguments) -> Any:
        x = c.value(a["self"])
        given = [list(a[name]) for name in ("kernel_size", "stride", "padding", "dilation")]
        if len(x.shape) != rank + 2:
            raise _Skip
        if _many(c.node) and _reads(c.node, 1):
            raise _Skip  # the indices are wanted too
        kernel, stride, padding, dilation = (
            _spread(each, rank) if each else None for each in given
        )
        y = c.g.max_pool(
            x, _ints(kernel), stride, _ints(padding), _ints(dilation), bool(a["ceil_mode"])
        )
        return (y, None) if _many(c.node) else y

    return rule


def _max_pool_backward(rank: int) -> Rule:
    """torch's own, where it does no harm."""

    def rule(c: _Conversion, a: Arguments) -> Any:
        x, dy = c.value(a["self"]), c.value(a["grad_output"])
        window, padding, dilation = (
            _spread(a[name], rank) for name in ("kernel_size", "padding", "dilation")
        )
        stride = _spread(a["stride"] or window, rank)
        many = zip(x.shape[-rank:], dy.shape[-rank:], stride, padding, dilation, strict=True)
        if any(in_padding(*each) for each in many):
            raise FeatureMissing(
                f"{c.name}: {c.node.target}: a window lies in the padding alone, and torch's "
                "gradient would write outside of its result: dilate less, or pad less"
            )
        raise _Skip

    return rule


def _ints(value: tuple[int, ...] | None) -> tuple[int, ...]:
    assert value is not None
    return value


def _avg_pool(rank: int) -> Rule:
    def rule(c: _Conversion, a: Arguments) -> Value:
        x = c.value(_first(a))
        if a.get("divisor_override") is not None or len(x.shape) != rank + 2:
            raise _Skip
        window, padding = _spread(a["kernel_size"], rank), _spread(a["padding"], rank)
        stride = _spread(list(a["stride"]) or window, rank)
        ceil_mode, whole = bool(a["ceil_mode"]), bool(a["count_include_pad"])
        if _averages_by_convolution(c, x, window) and not ceil_mode and (whole or not any(padding)):
            shape = (x.shape[1], 1, *window)
            weight = torch.full(shape, 1 / math.prod(window), dtype=x.dtype, device=c.device)
            held = c.image_weight(weight)
            return c.g.conv(x, held, stride=stride, padding=padding, groups=shape[0])
        return c.g.avg_pool(x, window, stride, padding, ceil_mode, whole)

    return rule


def _averages_by_convolution(c: _Conversion, x: Value, window: Sequence[int]) -> bool:
    """Whether to average 16-bit images by a convolution of each channel: of 3 x 3 windows cuDNN's
    are four to eight times as fast as torch's pooling, of 2 x 2 half as fast (an H200: 25 and 182
    us for 32 images of 64 channels and 112 x 112; 21 and 11 for 8 of 256 and 32 x 32)."""
    fits = x.spec is not None and is_channels_last(x.shape, x.spec.stride) and window == (3, 3)
    return c.on_gpu and fits and x.shape[1] % 8 == 0 and x.dtype in LOW_PRECISION


def _adaptive_mean(rank: int) -> Rule:
    def rule(c: _Conversion, a: Arguments) -> Any:
        x = c.value(_first(a))
        if len(x.shape) != rank + 2:
            raise _Skip
        size = _spread(a["output_size"], rank)
        if x.dtype in LOW_PRECISION and size == (1,) * rank:  # as in _reduced
            return c.left_to_torch("aten.mean.dim", [x, list(range(-rank, 0)), True], {}, c.node)
        return c.g.adaptive_avg_pool(x, size)

    return rule


def _upsample(mode: str) -> Rule:
    def rule(c: _Conversion, a: Arguments) -> Value:
        x = c.value(_first(a))
        scales = a.get("scale_factors")
        if "scale_factors" not in a:
            many = [a[name] for name in ("scales_d", "scales_h", "scales_w", "scales") if name in a]
            if any(each is not None for each in many):
                raise _Skip
        seen = c.node.meta["val"].shape
        if math.prod(x.shape[2:]) == 1 and mode != "bicubic":
            return c.g.expand(x, tuple(seen))
        size = None if scales is not None else tuple(seen[2:])
        return c.g.interpolate(x, size, scales, mode, a.get("align_corners"))

    return rule


_COPIES = ("clone", "lift_fresh_copy", "_to_copy")
_ATTENTION = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_attention_math",
)
#: ATen op → how it is said here. What has no rule, or whose rule does not apply, stays torch's own.
RULES: Mapping[Any, Rule] = {
    packet: rule
    for name, rule in {
        **{f"conv{rank}d": _conv(rank) for rank in (1, 2, 3)},
        **{f"conv_transpose{rank}d": _conv_transpose(rank) for rank in (1, 2, 3)},
        "convolution": _convolution,
        **dict.fromkeys(_OF_BATCHES, _batch_norm),
        **{
            name: _one(lambda g, x, name=name: getattr(g, name)(x))  # type: ignore[misc]
            for name in (
                *("relu", "silu", "sigmoid", "tanh", "neg", "abs", "exp", "log", "sqrt", "rsqrt"),
                *("reciprocal", "erf", "relu6", "hardswish", "logical_not"),
            )
        },
        "square": _one(lambda g, x: g.mul(x, x)),
        "hardsigmoid": _one(lambda g, x: g.mul(g.clamp(g.add(x, 3.0), 0.0, 6.0), 1.0 / 6.0)),
        "gelu": _gelu,
        "elu": _elu,
        "leaky_relu": _unary("leaky_relu", "negative_slope"),
        "softplus": _softplus,
        **dict.fromkeys(("clamp", "hardtanh", "clamp_min", "clamp_max"), _clamp),
        "add": _add,
        **{name: _two(name) for name in ("sub", "minimum", "maximum")},
        "mul": _mul,
        "div": _div,
        **{name: _two(name) for name in _COMPARES},
        **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), _two("logical_and")),
        **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), _two("logical_or")),
        "bitwise_not": _one(lambda g, x: g.logical_not(x)),
        "rsub": _rsub,
        "pow": _pow,
        "where": _where,
        "masked_fill": _masked_fill,
        **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
        **dict.fromkeys(("new_zeros", "zeros_like"), _full(0)),
        **dict.fromkeys(("new_ones", "ones_like"), _full(1)),
        **dict.fromkeys(("new_full", "full_like"), _full(None)),
        "linear": _linear,
        "addmm": _addmm,
        **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
        **dict.fromkeys(("group_norm", "native_group_norm"), _group_norm),
        "layer_norm": _layer_norm,
        "native_layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
        "_native_batch_norm_legit_functional": _batch_norm_train,
        "native_batch_norm_backward": _batch_norm_backward,
        "convolution_backward": _convolution_backward,
        "threshold_backward": _threshold_backward,
        "scaled_dot_product_attention": _sdpa,
        **dict.fromkeys(_ATTENTION, _attended),
        **dict.fromkeys(forms.SAME, _same),
        **dict.fromkeys(forms.RESHAPES, _reshape),
        "expand": _expand,
        "permute": _permute,
        "transpose": _transpose,
        "t": _transpose,
        "slice": _slice,
        "narrow": _narrow,
        "select": _select,
        **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
        **dict.fromkeys(("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"), _split),
        **dict.fromkeys(("split_copy", "split_with_sizes_copy"), _split),
        **dict.fromkeys(("unbind", "unbind_copy"), _unbind),
        **dict.fromkeys(("as_strided", "as_strided_copy"), _as_strided),
        "as_strided_scatter": _as_strided_scatter,
        "cat": _cat,
        "stack": _stack,
        "mean": _reduced("mean"),
        "sum": _reduced("sum"),
        "amax": _reduced("max"),
        "amin": _reduced("min"),
        **{f"adaptive_avg_pool{rank}d": _adaptive_mean(rank) for rank in (1, 2, 3)},
        "_adaptive_avg_pool2d": _adaptive_mean(2),
        **{name: _upsample(mode) for name, mode in _UPSAMPLES.items()},
        **{f"max_pool{rank}d": _max_pool(rank) for rank in (1, 2, 3)},
        **{f"max_pool{rank}d_with_indices": _max_pool(rank) for rank in (2, 3)},
        **{f"max_pool{rank}d_with_indices_backward": _max_pool_backward(rank) for rank in (2, 3)},
        **{f"avg_pool{rank}d": _avg_pool(rank) for rank in (1, 2, 3)},
    }.items()
    for packet in _packets(name)
}
