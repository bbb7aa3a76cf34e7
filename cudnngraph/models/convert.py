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

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..device.rules import rules
from ..errors import CannotImport, GraphError
from ..graph.builder import Graph
from ..graph.core import input_of
from ..graph.value import Value, set_stride
from ..ir.spec import (
    GraphSpec,
    channels_last_strides,
    contiguous_strides,
    is_contiguous,
    is_dense,
    overlaps_itself,
    same_layout,
)
from ..ops import aten
from ..ops import meta as forms
from ..ops.base import FLOATS, LOW_PRECISION
from .aten_ops import ASSERTIONS, MAKE_IMAGES, OF_MEMORY, goes_by_layout, meant
from .bands import Band
from .export import HasGraph, export, last_line
from .frames import frame_of, is_frame
from .mends import mend_of
from .pad_channels import pad_channels
from .pad_products import pad_products
from .results import NO_PLACES, Places, Result, results_of
from .retrace import LIES
from .rules.base import Arguments, Rule, Skip, gives_many, reads, spread
from .rules.norm import Norm, norm_of
from .rules.table import rule_of
from .siblings import join_siblings
from .simplify import simplify
from .stacks import own_stacks

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Opaque:
    """An op that stays torch's own, and the line of the model that it comes from."""

    overload: str
    line: str


@dataclass(frozen=True)
class PaddedImage:
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
        """Arrange a convolution's weight (K, channels, R, S) for the padded tensor."""
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
    and the place of a tensor that is handed on, "value" and what the result always is, "copy" and a
    tensor whose numbers it always has, "expand" and the name of an output with the shape that it is
    expanded to, "view" and the name of an output or the place of a tensor with the shape, strides
    and offset of the view, "shared" and as much, or "count" and the place of a tensor of whole
    numbers with what is added to it.
    ``spec`` is None where nothing is left to compute. ``folded`` counts batch norms in weights.
    ``packed`` says how an image lies in an input that is no such image. ``elsewhere`` are the
    places of results that the model has on the CPU, where the graph is a GPU's.
    """

    spec: GraphSpec | None
    inputs: tuple[str | None, ...]
    constants: Mapping[str, torch.Tensor]
    results: tuple[Result, ...]
    opaque: tuple[Opaque, ...]
    folded: int
    packed: Mapping[str, PaddedImage] = field(default_factory=dict)
    elsewhere: tuple[int, ...] = ()


def convert(
    module: HasGraph,
    constants: Mapping[str, torch.Tensor],
    placeholders: Sequence[str],
    *,
    name: str = "model",
    channels_last: bool = False,
    keep_strides: bool = False,
    on_gpu: bool = False,
    kernels: bool = False,
    random: bool = False,
    places: Places = NO_PLACES,
    folds: bool = True,
) -> Imported:
    """The graph of ATen ops ``module`` as one of ours.

    ``constants`` holds a tensor for each placeholder that is none of ``placeholders``.
    ``keep_strides`` gives the outputs the strides of the trace. ``on_gpu`` does what is faster
    there: images of three channels get a fourth where convolutions by constant weights alone read
    them (not with ``keep_strides``), several short sequences of attention are one, constant masks
    are aligned. ``kernels`` leaves nothing to torch that a generated kernel does. ``random`` takes
    ops that draw random numbers as they are. ``places`` says which results may be views. ``folds``
    puts norms into the weights of convolutions. Raises :class:`CannotImport` with the op's line.
    """
    options = (channels_last, keep_strides, on_gpu, kernels, random, places, folds)
    return Importer(module, constants, placeholders, name, *options).run()


def import_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    channels_last: bool = False,
    kernels: bool = False,
) -> Imported:
    """``model`` as called with ``args``, as one graph; see :func:`export`, :func:`convert`."""
    made = export(model, args, kwargs)
    return convert(
        made.module,
        made.constants,
        made.placeholders,
        name=type(model).__name__,
        channels_last=channels_last,
        kernels=kernels,
    )


@dataclass
class Importer:
    module: HasGraph
    constants: Mapping[str, torch.Tensor]
    placeholders: Sequence[str]
    name: str
    channels_last: bool
    keep_strides: bool
    on_gpu: bool
    kernels: bool
    random: bool
    places: Places
    folds: bool
    env: dict[torch.fx.Node, Any] = field(default_factory=dict)
    opaque: dict[str, Opaque] = field(default_factory=dict)  # by the graph's nodes
    folded: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    biased: dict[str, tuple[Value, torch.Tensor]] = field(default_factory=dict)
    examples: set[int] = field(default_factory=lambda: {1})  # how many each input may hold
    masks: dict[tuple[Any, ...], tuple[torch.Tensor | None, torch.Tensor]] = field(
        default_factory=dict
    )
    bands: dict[tuple[Any, ...], tuple[torch.Tensor, Band | None]] = field(default_factory=dict)
    node: Any = None

    def __post_init__(self) -> None:
        label = re.sub(r"\W", "_", self.name) or "model"
        self.g = Graph(label if label.isidentifier() else "model", compute_dtype=torch.float32)
        self._names: dict[str, torch.fx.Node] = {}
        self._counts: dict[str, int] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._held: dict[tuple[Any, ...], Value] = {}
        self._by_input: dict[str, int] = {}
        self._packed: dict[str, PaddedImage] = {}

    # -- the walk ----------------------------------------------------------------------------------

    def run(self) -> Imported:
        graph = self.module.graph
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in ASSERTIONS:
                node.replace_all_uses_with(None)
                graph.erase_node(node)
        simplify(graph)
        graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=self.random))
        if self.on_gpu:
            self.constants = join_siblings(graph, self.constants)
            self.constants = pad_products(graph, self.constants)
            if self.channels_last:
                self.constants = pad_channels(graph, self.constants)
            if self.kernels:
                own_stacks(graph)
        user = {name: place for place, name in enumerate(self.placeholders)}
        results: list[Result] = []
        for node in graph.nodes:
            self.node = node
            if node.op == "placeholder":
                self.env[node] = self._placeholder(node, user)
            elif node.op == "get_attr":
                self.env[node] = self.attribute(node)
            elif node.op == "call_function":
                self.env[node] = self._result(node)
            elif node.op == "output":
                results = results_of(self, node)
            else:
                raise self._refused(f"a node of kind {node.op}")
        return self._finished(results)

    def _placeholder(self, node: torch.fx.Node, user: Mapping[str, int]) -> Any:
        if node.name in self.constants:
            return forms.as_held(self.constants[node.name])
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
        stride: Any = node.meta.get(LIES, tuple(seen.stride()))
        stride = None if overlaps_itself(shape, stride) else stride
        if self._is_image(seen):
            stride, layout = None, "channels_last"
            if self._wants_padding(node, seen):
                images, channels, rows, columns = shape
                packed = self._packed[label] = PaddedImage(
                    channels, self._side_by_side(node, columns)
                )
                shape = (images, 4 * packed.columns, rows, columns // packed.columns)
        return self.g.input(label, shape, seen.dtype, stride=stride, layout=layout)

    def _wants_padding(self, node: torch.fx.Node, seen: torch.Tensor) -> bool:
        """Whether to give an image of three channels a fourth, all zero
        (:attr:`DeviceRules.pads_three_channels`). In bfloat16 no engine is the faster for it."""
        return (
            self.on_gpu
            and not self.keep_strides  # the caller's tensor is read as it is
            and rules().pads_three_channels
            and seen.dim() == 4
            and seen.shape[1] == 3
            and seen.dtype in LOW_PRECISION
            and bool(self._convolutions(node))
            and all(self._convolves(user, node) for user in self._convolutions(node))
            and (seen.dtype == torch.float16 or self._side_by_side(node, seen.shape[3]) > 1)
        )

    def _convolutions(self, image: torch.fx.Node) -> list[torch.fx.Node]:
        """The readers of an image, those behind a frame of zeros too."""
        return [
            reader for user in image.users for reader in (user.users if is_frame(user) else (user,))
        ]

    def _convolves(self, user: torch.fx.Node, image: torch.fx.Node) -> bool:
        """Whether a node is a convolution of the image by a weight that is constant."""
        if user.target is not _aten.conv2d.default or user.all_input_nodes.count(image) > 1:
            return False
        given = forms.bind_arguments(user.target, user.args, user.kwargs)
        weight = given["weight"]
        constant = isinstance(weight, torch.fx.Node) and weight.name in self.constants
        frame = frame_of(user)
        read = given["input"] if frame is None else frame[0]
        return read is image and constant and given["groups"] == 1

    def _side_by_side(self, node: torch.fx.Node, columns: int) -> int:
        """The number of columns of a three-channel image to read as channels.

        All of a window's, if windows do not overlap (:attr:`DeviceRules.patches_as_channels`).
        """
        if not rules().patches_as_channels:
            return 1
        widths = set[int]()
        for user in self._convolutions(node):
            given = forms.bind_arguments(user.target, user.args, user.kwargs)
            width = self.constants[given["weight"].name].shape[3]
            window = tuple(spread(given[key], 2)[1] for key in ("stride", "padding", "dilation"))
            whole = window == (width, 0, 1) and frame_of(user) is None
            widths.add(width if whole else 1)
        width = widths.pop()
        return 1 if widths or columns % width else width

    def packed(self, x: Value) -> PaddedImage | None:
        """The layout of the image in x; None if x is no padded image."""
        return self._packed.get(x.name)

    def _is_image(self, tensor: torch.Tensor) -> bool:
        return self.channels_last and tensor.dim() in (4, 5) and tensor.dtype in FLOATS

    def attribute(self, node: torch.fx.Node) -> Any:
        value: Any = self.module
        for word in str(node.target).split("."):
            value = getattr(value, word)
        return forms.as_held(value.detach()) if isinstance(value, torch.Tensor) else value

    def _result(self, node: torch.fx.Node) -> Any:
        target: Any = node.target
        args, kwargs = self.filled(node.args), self.filled(node.kwargs)
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
                if gives_many(node)
                else self.env[self.folded[node]]
            )
        if target._schema.is_mutable:
            raise self._refused("it writes over its operands")
        graph_values = [each for each in _leaves((args, kwargs)) if isinstance(each, Value)]
        draws = forms.is_random(target, args, kwargs)
        if not graph_values and not draws:
            with torch.no_grad():
                made = target(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, forms.as_held, made)
        for seen in _leaves(node.meta.get("val")):
            if isinstance(seen, torch.Tensor):
                self._known_shape(seen)
            elif isinstance(seen, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                mend = mend_of(str(target))
                raise self._refused(f"its result depends on the numbers in a tensor; {mend}")
        if args and isinstance(args[0], Value) and self.packed(args[0]) and is_frame(node):
            return args[0]  # convolutions alone read it, and set the frame themselves
        rule = rule_of(target)
        if rule is not None:
            made = self._by_rule(rule, node, target, args, kwargs)
            if made is not None:
                return made
        if draws and not (self.random and graph_values):
            raise self._refused("it draws random numbers (call model.eval()?)")
        if target.overloadpacket in OF_MEMORY:
            raise self._refused("it reaches memory that none of its operands fills")
        if target in aten.OF_BITS and self._is_wider(args[0]):
            raise self._refused("it reads bits of what no graph rounds to 16 bits on its way")
        image = not any(map(self._lies_in_order, graph_values))
        if goes_by_layout(target):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._as_traced)
        wanted = meant(target, args)
        return self.left_to_torch(str(target), wanted, kwargs, node, image=image)

    def _is_wider(self, x: Value) -> bool:
        """Whether x is kept in float32, though the model has it in 16 bits."""
        return x.dtype in LOW_PRECISION and input_of(self.g, x.name) is not x

    def _as_traced(self, node: torch.fx.Node) -> Any:
        """Return the value of a node with the strides that it had when the model was traced."""
        value, seen = self.env[node], node.meta.get("val")
        if not isinstance(value, Value) or value.spec is None or not isinstance(seen, torch.Tensor):
            return value
        shape, wanted = value.spec.shape, tuple(seen.stride())
        if tuple(seen.shape) != shape or same_layout(shape, value.spec.stride, wanted):
            return value
        if value.spec.dtype not in FLOATS:
            return self.clone(value)
        made = self.g.identity(value)
        stride = wanted if is_dense(shape, wanted) else contiguous_strides(shape)
        set_stride(made, stride)
        return made

    def clone(self, value: Value) -> Any:
        """A contiguous copy of what our own ops do not take."""
        form = (("memory_format", ("memory_format", "contiguous_format")),)
        return self.g.aten([value], "aten.clone.default", (("tensor", 0),), form)

    def filled(self, value: Any) -> Any:
        """Arguments with what the nodes in them stand for."""
        return torch.fx.node.map_arg(value, lambda node: self.env[node])

    def _by_rule(
        self, rule: Rule, node: torch.fx.Node, target: Any, args: Any, kwargs: Any
    ) -> Any | None:
        """Return the value that a rule makes of an op, or None if it does not apply."""
        mark = self.g.mark()
        given = forms.bind_arguments(target, args, kwargs)
        try:
            made = rule(self, given)
        except (Skip, GraphError):
            made = None
        seen = _stated(target, node.meta.get("val"), given, known=self._as_told(node))
        if made is not None and len(self.g.problems) == mark[1] and _agrees(made, seen):
            if target.overloadpacket in MAKE_IMAGES:
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
        seen = node.meta.get("val")
        several = seen if isinstance(seen, (tuple, list)) else (seen,)
        tensors = iter(made if isinstance(made, tuple) else (made,))
        if several[0] is None:  # which :func:`meant` has asked for too
            next(tensors)
        results = tuple(  # what is no tensor is always the same
            next(tensors, None) if isinstance(each, torch.Tensor) else each for each in several
        )
        op, dtypes = aten.overload(name), [value.dtype for value in operands]
        known = self._as_told(node)
        for number, (result, right) in enumerate(zip(results, several, strict=False)):
            if not isinstance(right, torch.Tensor) or not isinstance(result, Value):
                continue
            spec, dtype = result.spec, forms.dtype_made(op, number, right.dtype, dtypes)
            same = spec is None or spec.shape == tuple(right.shape)
            same = same and (spec is None or spec.dtype == dtype or not known)
            if not same and (not gives_many(node) or reads(node, number)):
                raise self._refused("its results have other shapes or dtypes on this device")
        if image:
            self._settle(results[0])
        return results if gives_many(node) else results[0]

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
            set_stride(value, channels_last_strides(spec.shape))

    # -- operands ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the op at hand, for tensors that are made for it."""
        seen = _leaves(self.node.meta["val"])
        return next(each.device for each in seen if isinstance(each, torch.Tensor))

    def value(self, given: Any) -> Value:
        """An operand of a rule as a value of the graph; a number stays out of it."""
        if isinstance(given, Value):
            return given
        if isinstance(given, torch.Tensor):
            return self.constant(given)
        raise Skip

    def operand(self, given: Any) -> Any:
        """The same, or a number: a Python one, or that of a tensor without dims."""
        if isinstance(given, bool):
            raise Skip
        if isinstance(given, (int, float)):
            return float(given)
        if isinstance(given, torch.Tensor) and given.dim() == 0 and given.dtype in FLOATS:
            return float(given)
        return self.value(given)

    def constant(self, tensor: torch.Tensor, label: str = "constant") -> Value:
        """The graph's input for a tensor that is always the same."""
        if tensor.layout != torch.strided:
            raise self._refused("it reads or makes a sparse tensor")
        place = (
            tensor.data_ptr() if tensor.numel() else id(tensor),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
        )
        found = self._held.get(place)
        if found is not None and input_of(self.g, found.name) is found:
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

    def image_weight(self, weight: torch.Tensor, x: Value) -> Value:
        """The weight of a convolution of x, laid out as the graph's images are."""
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
        if last is not None and self.channels_last:
            return self.constant(weight.contiguous(memory_format=last), "weight")
        if weight.dim() == 3 and x.spec is not None and not is_contiguous(x.shape, x.spec.stride):
            return self.constant(weight.transpose(1, 2).contiguous().transpose(1, 2), "weight")
        return self.constant(weight.contiguous(), "weight")

    def _free(self, label: str) -> str:
        label = re.sub(r"\W", "_", label)
        label = label if label.isidentifier() else f"x_{label}"
        count = self._counts.get(label, 0)  # of names that are taken, which they stay
        name = f"{label}_{count}" if count else label
        while name in self.g._inputs or name in self._names:
            count += 1
            name = f"{label}_{count}"
        self._counts[label] = count
        self._names[name] = self.node
        return name

    # -- batch norm --------------------------------------------------------------------------------

    def preceding_norm(self) -> tuple[torch.fx.Node, Norm, Any] | None:
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
            given = forms.bind_arguments(
                node.target, self.filled(node.args), self.filled(node.kwargs)
            )
            norm = norm_of(node.target.overloadpacket, given)
            return None if norm is None else (node, norm, given["input"])
        return None

    # -- the end -----------------------------------------------------------------------------------

    def output(self, value: Value, stride: tuple[int, ...] | None) -> str:
        """Declare an output, and return its name."""
        name = self._free(f"out{len(self.g._outputs)}")
        mark = self.g.mark()
        self.g.output(name, value, stride=stride)
        if len(self.g.problems) > mark[1]:
            raise CannotImport(f"{self.name}: " + "; ".join(map(str, self.g.problems[mark[1] :])))
        return name

    def kept(self, value: Value) -> Value | torch.Tensor:
        """The tensor of a value that is constant; another value itself."""
        return self._kept.get(value.name, value)

    def place_of(self, value: Value) -> int | None:
        """The place of the model's tensor that a value is; None for one that is computed."""
        return self._by_input.get(value.name)

    def expanded(self, value: Value) -> Value | None:
        """What a value was expanded from; None if it was not."""
        for node in reversed(self.g._nodes):
            if value.name in node.results and node.op == "expand":
                (name,) = node.operands
                found = self.g._values.get(name)
                return input_of(self.g, name) if found is None else found
        return None

    def _finished(self, results: list[Result]) -> Imported:
        spec = None
        if self.g._outputs:
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
            sum(map(self._begins_norm, self.folded)),
            {name: each for name, each in self._packed.items() if name in there},
        )

    def _begins_norm(self, node: torch.fx.Node) -> bool:
        """Whether a node in a weight is the first of its norm, which may be a scale and a shift."""
        before = (self.folded.get(each) for each in node.all_input_nodes)
        return self.folded[node] not in before

    def _known_shape(self, seen: torch.Tensor) -> None:
        if seen.layout != torch.strided:
            raise self._refused("it reads or makes a sparse tensor")
        if any(not isinstance(size, int) for size in (*seen.shape, *seen.stride())):
            what = "the shape of its result depends on the numbers in a tensor"
            raise self._refused(f"{what}; {mend_of(str(self.node.target))}")

    def _line(self, node: torch.fx.Node) -> str:
        """The line of the model that an op comes from, "" where torch does not say."""
        return last_line(node.meta.get("stack_trace") or "")

    def _refused(self, why: str) -> CannotImport:
        line = self._line(self.node)
        at = f" ({line})" if line else ""
        return CannotImport(f"{self.name} is no single graph: {self.node.target}{at}: {why}")


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, (tuple, list)):
        return [value]
    found: list[Any] = []
    for item in value:
        if isinstance(item, (tuple, list, dict)):
            found += _leaves(item)
        else:
            found.append(item)
    return found


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
    if isinstance(seen, int):
        return made is seen or made == seen
    if isinstance(made, torch.Tensor):
        return True
    if not isinstance(made, Value) or made.spec is None or not isinstance(seen, tuple):
        return False
    shape, dtype = seen
    return made.shape == shape and dtype in (None, made.dtype)
