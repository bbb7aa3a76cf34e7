"""Gradients: for each op the rule that gives its operands' gradients, in the same IR.

:func:`differentiate` turns a declared graph into two: the forward with what has to be saved as
further outputs, and the backward, a graph like every other. Rules are written with the builder. A
rule answers with one function per operand; only those are called whose gradient somebody needs, so
what ``wrt`` does not reach emits nothing.

What a rule asks of the forward is recomputed from what is there anyway, the forward's inputs and
outputs, as far as pointwise ops go. What cannot be, is saved: of all sets of tensors from which
the rest follows by pointwise ops, the one of the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ..arguments import checked
from ..errors import GraphError, Problem
from ..graph.builder import Graph
from ..graph.value import Value
from ..ir.spec import GraphSpec, Node, TensorSpec, dense_strides, memory_order
from ..ops.base import FLOATS, OPS, dtype_name
from ..ops.infer import check_node


@dataclass(frozen=True)
class Gradient:
    """A graph and its gradient.

    ``forward`` is the graph with the tensors of it that ``backward`` needs as further outputs.
    ``backward`` takes the gradients of the forward's outputs (``incoming``: output → name, by
    default ``grad_<output>``) and ``saved``: inputs and outputs of ``forward``, under their own
    names. It returns one gradient per name of ``wrt`` (``outgoing``: input → ``grad_<input>``), in
    the dtype of that input and in dense strides of its order.
    """

    forward: GraphSpec
    backward: GraphSpec
    saved: tuple[str, ...]
    incoming: Mapping[str, str]
    outgoing: Mapping[str, str]


@checked
def differentiate(graph: Graph | GraphSpec, wrt: Sequence[str]) -> Gradient:
    """The gradient of every floating output of ``graph`` for the inputs ``wrt``.

    Statistics (the lse of attention; the batch's mean and inv_std, and the next running statistics)
    are outputs without a gradient. Raises :class:`GraphError` when ``wrt`` names what is no
    floating input, or what no gradient reaches, and where an op on the way has no gradient.
    """
    spec = _visible_names(graph.spec() if isinstance(graph, Graph) else graph)
    wrt = tuple(dict.fromkeys(wrt))
    problems = _check_wrt(spec, wrt)
    if problems:
        raise GraphError(spec.name, problems)
    active = _active(spec, wrt)
    spec = _with_statistics(spec, active)
    asked = _Backward(spec, wrt, active, None)
    asked.build()
    saved = _fewest_bytes(spec, asked.requested, asked.read_by_anchors(), asked.dtypes)
    final = _Backward(spec, wrt, active, saved)
    final.build()
    return final.finish()


def differentiable(spec: GraphSpec) -> tuple[str, ...]:
    """The floating inputs that lie on a way to a floating output, other than one of jumps."""
    reached = {name for name in spec.outputs if spec.tensors[name].dtype in FLOATS}
    for node in reversed(spec.nodes):
        rule = RULES[node.op]
        if node.outputs[0] in reached and not (isinstance(rule, NoGradient) and rule.flat):
            fixed = _FIXED.get(node.op, ())
            reached.update(
                name
                for port, name in zip(
                    OPS[node.op].ports_of(len(node.inputs)), node.inputs, strict=True
                )
                if name is not None and port not in fixed
            )
    return tuple(
        name for name in spec.inputs if name in reached and spec.tensors[name].dtype in FLOATS
    )


# -- before the walk -------------------------------------------------------------------------------


def _visible_names(spec: GraphSpec) -> GraphSpec:
    """Any tensor may become an output, and the name of an output starts with a letter."""
    taken, new = set(spec.tensors), {}
    for name in spec.intermediates:
        if name.startswith("_"):
            new[name] = _free(f"saved{name}", taken)
    return spec.rename(new) if new else spec


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _check_wrt(spec: GraphSpec, wrt: Sequence[str]) -> list[Problem]:
    problems = []
    if not wrt:
        problems.append(Problem("wrt", "is empty", f"some of: {', '.join(spec.inputs)}"))
    for name in wrt:
        where = f"wrt '{name}'"
        if name not in spec.inputs:
            problems.append(Problem(where, "is no input", f"one of: {', '.join(spec.inputs)}"))
        elif spec.tensors[name].dtype not in FLOATS:
            kind = dtype_name(spec.tensors[name].dtype)
            problems.append(Problem(where, f"is {kind}", "a floating input of 16 bits or more"))
    return problems


def _active(spec: GraphSpec, wrt: Sequence[str]) -> frozenset[str]:
    """The floating tensors that depend on ``wrt``. Gradients flow through first results alone."""
    active = set(wrt)
    statistics: dict[str, Node] = {}
    problems = []
    for node in spec.nodes:
        result = node.outputs[0]
        rule = RULES[node.op]
        used = [name for name in node.operands if name in statistics]
        if used and isinstance(rule, NoGradient) and rule.flat:
            used = []
        problems += [
            Problem(
                f"{node.op} '{node.name}'",
                f"uses '{name}', a statistic of {statistics[name].op} '{statistics[name].name}'",
                "no further use of it",
                "no gradient flows through it",
            )
            for name in used
        ]
        if not any(name in active for name in node.operands):
            continue
        if isinstance(rule, NoGradient):
            if not rule.flat:
                problems.append(Problem(f"{node.op} '{node.name}'", rule.reason))
            continue
        if result is not None and spec.tensors[result].dtype.is_floating_point:
            active.add(result)
        statistics |= {name: node for name in node.outputs[1:] if name is not None}
    if problems:
        raise GraphError(spec.name, problems)
    return frozenset(active)


# Floating operands that get no gradient.
_FIXED = {"sdpa": ("alibi_slopes", "dropout_mask")}
_STATISTICS = {
    "sdpa": "return_lse",
    "sdpa_varlen": "return_lse",
    **{op: "return_stats" for op in ("layer_norm", "rms_norm", "instance_norm")},
}


def _with_statistics(spec: GraphSpec, active: frozenset[str]) -> GraphSpec:
    """The graph in which what is differentiated gives the statistics that its gradient reads."""
    tensors, nodes, taken = dict(spec.tensors), [], set(spec.tensors)
    dtypes = _torch_dtypes(spec)
    for node in spec.nodes:
        switch = _STATISTICS.get(node.op)
        if switch is None or node.outputs[0] not in active or node.attr(switch):
            nodes.append(node)
            continue
        row = OPS[node.op]
        operands = {
            port: None if name is None else replace(spec.tensors[name], dtype=dtypes[name])
            for port, name in zip(row.ports, node.inputs, strict=True)
        }
        checked = check_node(node.op, node.name, operands, {**dict(node.attrs), switch: True})
        outputs = [node.outputs[0]]
        for port, result in zip(row.outputs[1:], checked.results[1:], strict=True):
            assert result is not None
            outputs.append(_free(f"{node.outputs[0]}_{port}", taken))
            tensors[outputs[-1]] = replace(result, name=outputs[-1])
        nodes.append(replace(node, outputs=tuple(outputs), attrs=checked.attrs))
    return replace(spec, tensors=tensors, nodes=tuple(nodes))


def _torch_dtypes(spec: GraphSpec) -> dict[str, torch.dtype]:
    """The dtype that each tensor has in torch's own chain of ops: 16 bits for 16-bit data."""
    known = {name: spec.tensors[name] for name in spec.inputs}
    constants: set[str | None] = set()
    for node in spec.nodes:
        if node.op == "constant":
            constants.update(node.outputs)
        ports = OPS[node.op].ports_of(len(node.inputs))
        operands = {
            port: None if name is None else known[name]
            for port, name in zip(ports, node.inputs, strict=True)
        }
        numbers = [p for p, name in zip(ports, node.inputs, strict=True) if name in constants]
        results = check_node(node.op, node.name, operands, dict(node.attrs), numbers).results
        for name, result in zip(node.outputs, results, strict=True):
            if name is not None:
                known[name] = spec.tensors[name]
                if result is not None:
                    known[name] = replace(known[name], dtype=result.dtype)
    return {name: tensor.dtype for name, tensor in known.items()}


# -- what is saved ---------------------------------------------------------------------------------


def _fewest_bytes(
    spec: GraphSpec,
    requested: Iterable[str],
    read_by_anchors: frozenset[str],
    dtypes: Mapping[str, torch.dtype],
) -> frozenset[str]:
    """The intermediates to save: a minimum cut between the anchors' results and ``requested``.

    Inputs and outputs of the graph are there anyway and cost nothing; only pointwise ops are
    recomputed. Of equal bytes, first what an anchor of the backward reads as it stands, then what
    an anchor of the forward writes.
    """
    there = {*spec.inputs, *spec.outputs}
    there |= {name for node in spec.nodes if node.op == "constant" for name in node.results}
    source, sink = ("", False), ("", True)
    room: dict[tuple[Any, Any], float] = {}
    near: dict[Any, list[Any]] = {}

    def edge(start: Any, end: Any, capacity: float) -> None:
        room[start, end] = capacity
        room.setdefault((end, start), 0.0)
        near.setdefault(start, []).append(end)
        near.setdefault(end, []).append(start)

    for node in spec.nodes:
        pointwise = OPS[node.op].pointwise
        for name in node.results:
            if name in there:
                continue
            wide = 8 if dtypes[name] == torch.bool else dtypes[name].itemsize
            tie = -1 if name in read_by_anchors else pointwise
            edge((name, False), (name, True), max(4 * spec.tensors[name].numel * wide, 4) + tie)
            if not pointwise:
                edge(source, (name, False), math.inf)
            for operand in node.operands:
                if pointwise and operand not in there:
                    edge((operand, True), (name, False), math.inf)
    for name in dict.fromkeys(requested):
        if name not in there:
            edge((name, True), sink, math.inf)

    def road(start: Any, end: Any) -> dict[Any, Any]:
        """Where each place was come from, on the shortest ways with room from start."""
        came = {start: start}
        queue = [start]
        for place in queue:
            for after in near.get(place, ()):
                if after not in came and room[place, after] > 0:
                    came[after] = place
                    queue.append(after)
            if end in came:
                break
        return came

    while sink in (came := road(source, sink)):
        steps, place = [], sink
        while place != source:
            steps.append((came[place], place))
            place = came[place]
        flow = min(room[step] for step in steps)
        for start, end in steps:
            room[start, end] -= flow
            room[end, start] += flow
    # The cut that is nearest to the requests: places that can still reach the sink.
    behind = {sink}
    queue: list[Any] = [sink]
    for place in queue:
        for before in near.get(place, ()):
            if before not in behind and room[before, place] > 0:
                behind.add(before)
                queue.append(before)
    return (
        frozenset(
            name for name in spec.tensors if (name, True) in behind and (name, False) not in behind
        )
        - there
    )


# -- the walk --------------------------------------------------------------------------------------


class _Backward:
    """The backward graph under construction.

    ``saved`` are the intermediates that it may read; None for any, to find out which are asked for.
    """

    def __init__(
        self,
        spec: GraphSpec,
        wrt: Sequence[str],
        active: frozenset[str],
        saved: frozenset[str] | None,
    ) -> None:
        self.spec, self.wrt, self.active, self.saved = spec, wrt, active, saved
        self.dtypes = _torch_dtypes(spec)
        self.graph = Graph(f"{spec.name}_backward", compute_dtype=spec.compute_dtype)
        self.producer = {name: node for node in spec.nodes for name in node.results}
        self.requested: dict[str, None] = {}
        taken = set(spec.tensors)
        self.incoming = {
            name: _free(f"grad_{name}", taken) for name in spec.outputs if name in active
        }
        self.outgoing = {name: _free(f"grad_{name}", taken) for name in wrt}
        self._forward: dict[str, Value] = {}
        self._grads: dict[str, list[Value]] = {}
        self._reads: list[tuple[str, int, torch.dtype]] = []

    # -- values

    def wide(self, value: Value) -> Value:
        """The same value, seen in the dtype of arithmetic: what it has between ops."""
        spec = value.spec
        if spec is None or not spec.dtype.is_floating_point:
            return value
        return Value(self.graph, value.name, replace(spec, dtype=self.spec.compute_dtype))

    def narrow(self, value: Value, dtype: torch.dtype) -> Value:
        """The same value in ``dtype``, for an anchor to read; see :meth:`anchor`."""
        return Value(self.graph, value.name, replace(value._known(), dtype=dtype))

    def apply(self, op: str, operands: Sequence[Value | None], attrs: Mapping[str, Any]) -> Any:
        """One op; its results, each in the dtype of arithmetic."""
        return [self.wide(value) for value in self.graph._apply(op, operands, dict(attrs))]

    def anchor(self, op: str, operands: Sequence[Value | None], attrs: Mapping[str, Any]) -> Any:
        """An op that reads each operand in the very dtype in which it is given here."""
        results = self.apply(op, operands, attrs)
        label = self.graph._nodes[-1].name
        self._reads += [
            (label, port, value.dtype)
            for port, value in enumerate(operands)
            if value is not None and value.dtype.is_floating_point
        ]
        return results

    def forward(self, name: str) -> Value:
        """A tensor of the forward: given, or recomputed from what is given."""
        self.requested[name] = None
        if name not in self._forward:
            node, value = self.producer.get(name), self._made(name)
            number = node is not None and node.op == "constant"  # these go with any dtype
            self._forward[name] = value if number else self.wide(value)
        return self._forward[name]

    def _made(self, name: str) -> Value:
        node = self.producer.get(name)
        if node is not None and node.op == "constant":
            return self.graph._scalar(node.attr("value"))
        there = name in self.spec.inputs or name in self.spec.outputs
        if there or node is None or self.saved is None or name in self.saved:
            tensor = self.spec.tensors[name]
            dtype = tensor.dtype if there else self.dtypes[name]
            return self.graph.input(name, tensor.shape, dtype, stride=tensor.stride)
        operands = [None if operand is None else self.forward(operand) for operand in node.inputs]
        return self.graph._apply(node.op, operands, dict(node.attrs))[0]

    def users(self, name: str) -> int:
        """How many ops of the forward read a tensor, its caller counted where it is an output."""
        readers = sum(name in node.operands for node in self.spec.nodes)
        return readers + (name in self.spec.outputs)

    def read_by_anchors(self) -> frozenset[str]:
        """The forward's tensors that anchors of this graph read."""
        operands = {name for node in self._anchors(self.graph._nodes) for name in node.operands}
        return frozenset(name for name, value in self._forward.items() if value.name in operands)

    @staticmethod
    def _anchors(nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if not OPS[node.op].pointwise and node.op != "reduction"]

    # -- from the outputs to the inputs

    def build(self) -> None:
        """Walk the forward backwards and declare the gradients of ``wrt``."""
        for node in reversed(self.spec.nodes):
            rule, result = RULES[node.op], node.outputs[0]
            if result not in self.active or isinstance(rule, NoGradient):
                continue
            grad = self._total(result)
            if grad is None:
                continue
            ctx = Context(self, node, grad)
            for port, gradient in rule(ctx).items():
                operand = ctx.name(port)
                if operand is None or operand not in self.active:
                    continue
                shape = self.spec.tensors[operand].shape
                # Of no elements it is known, and its rule may have no op that makes none.
                value = ctx.nothing(shape) if 0 in shape else ctx.fit(gradient(), shape)
                self._grads.setdefault(operand, []).append(value)
        problems = []
        declared: set[str] = set()
        for name in self.wrt:
            grad, tensor = self._total(name), self.spec.tensors[name]
            if grad is None:
                problems.append(
                    Problem(
                        f"wrt '{name}'",
                        "has no gradient",
                        "a way to an output other than through comparisons and statistics",
                        "leave it out of wrt",
                    )
                )
                continue
            if grad.name in declared or grad.name in self.graph._inputs:
                grad = self.graph.identity(grad)
            declared.add(grad.name)
            stride = dense_strides(tensor.shape, _order(tensor))
            self.graph.output(self.outgoing[name], grad, dtype=tensor.dtype, stride=stride)
        problems += self.graph.problems
        if problems:
            raise GraphError(self.spec.name, problems)

    def _total(self, name: str) -> Value | None:
        """The sum of what has come for ``name``; from the caller too where it is an output."""
        parts = self._grads.pop(name, [])
        if name in self.incoming:
            tensor = self.spec.tensors[name]
            stride = dense_strides(tensor.shape, _order(tensor))
            given = self.graph.input(self.incoming[name], tensor.shape, tensor.dtype, stride=stride)
            parts = [self.wide(given), *parts]
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = self.wide(self.graph.add(total, part))
        return total

    # -- after the walk

    def finish(self) -> Gradient:
        """Both graphs."""
        backward = self._narrowed(self.graph.spec())
        given = set(backward.inputs)
        outside = [name for name in (*self.spec.inputs, *self.spec.outputs) if name in given]
        extra = [name for name in self.producer if name in given and name not in outside]
        incoming = {name: grad for name, grad in self.incoming.items() if grad in given}
        backward = replace(backward, inputs=(*incoming.values(), *outside, *extra))
        narrow = {name: replace(self.spec.tensors[name], dtype=self.dtypes[name]) for name in extra}
        forward = replace(
            self.spec,
            tensors={**self.spec.tensors, **narrow},
            outputs=(*self.spec.outputs, *extra),
        )
        return Gradient(forward, backward, (*outside, *extra), incoming, self.outgoing)

    def _narrowed(self, spec: GraphSpec) -> GraphSpec:
        """What anchors read gets the dtype of the data, by a conversion where it is fixed.

        So does what they read through ops that only move elements.
        """
        tensors, nodes = dict(spec.tensors), {node.name: node for node in spec.nodes}
        producer = {name: node for node in spec.nodes for name in node.results}
        fixed, taken = {*spec.inputs, *spec.outputs}, set(spec.tensors)
        converted: dict[tuple[str, torch.dtype], str] = {}
        reads = [read for read in self._reads if read[0] in nodes]
        for label, port, dtype in reads:
            name = str(nodes[label].inputs[port])
            if name in fixed and tensors[name].dtype != dtype:
                if (name, dtype) not in converted:
                    new = converted[name, dtype] = _free(f"{name}_narrow", taken)
                    tensors[new] = replace(tensors[name], name=new, dtype=dtype)
                    nodes[new] = Node("identity", new, (name,), (new,))
                inputs = list(nodes[label].inputs)
                inputs[port] = converted[name, dtype]
                nodes[label] = replace(nodes[label], inputs=tuple(inputs))
            elif name not in fixed:
                fixed.add(name)
                tensors[name] = replace(tensors[name], dtype=dtype)
                source = producer[name]
                if OPS[source.op].view or source.op == "concat":
                    reads += [(source.name, place, dtype) for place in range(len(source.inputs))]
        return replace(spec, tensors=tensors, nodes=tuple(nodes.values()))


def _order(tensor: TensorSpec) -> tuple[int, ...]:
    """The order of dims in memory; row-major for an expanded tensor."""
    if any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride, strict=True)):
        return tuple(range(len(tensor.shape)))
    return memory_order(tensor.shape, tensor.stride)


# -- the rules -------------------------------------------------------------------------------------


@dataclass
class Context:
    """What a rule sees of one node: the gradient of its first result, and its operands.

    ``ctx["x"]`` is the operand at port x, ``ctx.result()`` a result, both as values of the backward
    graph in the dtype of arithmetic; asking for one is what makes it be saved or recomputed.
    """

    build: _Backward
    node: Node
    dy: Value

    @property
    def g(self) -> Graph:
        """The backward graph."""
        return self.build.graph

    def name(self, port: str) -> str | None:
        """The operand's name at ``port``."""
        ports = OPS[self.node.op].ports_of(len(self.node.inputs))
        return self.node.inputs[ports.index(port)]

    def __getitem__(self, port: str) -> Value:
        return self.build.forward(str(self.name(port)))

    def get(self, port: str) -> Value | None:
        """The operand at an optional port."""
        name = self.name(port)
        return None if name is None else self.build.forward(name)

    def result(self, port: int = 0) -> Value:
        """A result of the node."""
        return self.build.forward(str(self.node.outputs[port]))

    def spec(self, port: str) -> TensorSpec:
        """The operand's tensor, in the dtype that it has in torch."""
        name = str(self.name(port))
        return replace(self.build.spec.tensors[name], dtype=self.build.dtypes[name])

    def needs(self, port: str) -> bool:
        """Whether somebody needs the gradient of this operand."""
        return self.name(port) in self.build.active

    def constant(self, port: str) -> float | None:
        """The operand's value where it is a number baked into the graph."""
        node = self.build.producer.get(str(self.name(port)))
        return node.attr("value") if node is not None and node.op == "constant" else None

    def fit(self, value: Value, shape: Sequence[int]) -> Value:
        """``value`` summed over the dims that broadcasting to it has added or repeated."""
        lead = len(value.shape) - len(shape)
        repeated = [
            lead + dim for dim, n in enumerate(shape) if n == 1 and value.shape[lead + dim] != 1
        ]
        dims = [*range(lead), *repeated]
        if not dims:
            return self.build.wide(value)
        return self.build.wide(self.g.reduction(value, dims, "sum", keepdim=repeated))

    def nothing(self, shape: Sequence[int]) -> Value:
        """The gradient of ``shape``, one of no elements: none of those of dy."""
        value = self.dy if self.dy.shape else self.g.reshape(self.dy, (1,))
        return self.build.wide(self.g.reshape(self.g.slice(value, 0, 0, 0), shape))

    def per_channel(self, value: Value, port: str) -> Value:
        """``value`` summed to the shape of a per-channel operand."""
        shape = self.spec(port).shape
        of_images = len(shape) > 1 and shape[0] != 1
        dims = [dim for dim in range(len(value.shape)) if dim > 1 or (dim == 0 and not of_images)]
        return self.g.reduction(value, dims, "sum", keepdim=len(shape) > 1) if dims else value

    def column(self, port: str) -> Value:
        """A per-channel operand at the rank of x: (1, C, 1, ...)."""
        rank = len(self.spec("x").shape)
        shape = [1] * rank
        shape[1] = self.spec("x").shape[1]
        value = self[port]
        if len(value.shape) == rank:
            return value
        return self.build.wide(self.g.expand(value, shape, (1,)))

    def anchor(
        self, op: str, data: Sequence[Value], *others: Value | None, **attrs: Any
    ) -> list[Value]:
        """An op that reads ``data`` in the dtype of this node's first operand."""
        dtype = self.build.dtypes[str(self.node.inputs[0])]
        operands = [self.build.narrow(value, dtype) for value in data]
        return self.build.anchor(op, (*operands, *others), attrs)  # type: ignore[no-any-return]


Gradients = Mapping[str, Callable[[], Value]]
GradRule = Callable[[Context], Gradients]


@dataclass(frozen=True)
class NoGradient:
    """In place of a rule. ``flat``: the gradient is zero, as of what jumps; else it is unknown."""

    reason: str
    flat: bool = False


_JUMPS = NoGradient("is constant but for jumps", flat=True)


def _second(op: str) -> NoGradient:
    return NoGradient(f"{op} has no gradient of its own (a second derivative)")


def _geometry(node: Node) -> dict[str, Any]:
    return {key: node.attr(key) for key in ("stride", "padding", "dilation", "groups")}


def _conv(ctx: Context) -> Gradients:
    options, x, weight = _geometry(ctx.node), ctx.spec("x"), ctx.spec("weight")
    kernel = weight.shape[2:]
    many = zip(
        x.shape[2:],
        ctx.dy.shape[2:],
        kernel,
        *(options[key] for key in ("stride", "padding", "dilation")),
        strict=True,
    )
    # The rows of x behind the last one that the kernel has reached.
    rest = tuple(n - ((out - 1) * s - sum(p) + d * (r - 1) + 1) for n, out, r, s, p, d in many)
    return {
        "x": lambda: ctx.anchor(
            "conv_transpose", (ctx.dy, ctx["weight"]), output_padding=rest, **options
        )[0],
        "weight": lambda: ctx.anchor("conv_wgrad", (ctx.dy, ctx["x"]), kernel=kernel, **options)[0],
    }


def _conv_transpose(ctx: Context) -> Gradients:
    """The convolution that this one is the data gradient of, and its weight's gradient."""
    options = _geometry(ctx.node)
    kernel = ctx.spec("weight").shape[2:]
    padding, cut = [], []
    many = zip(
        ctx.spec("x").shape[2:],
        ctx.dy.shape[2:],
        kernel,
        *(options[key] for key in ("stride", "padding", "dilation")),
        ctx.node.attr("output_padding"),
        strict=True,
    )
    for n, rows, r, stride, (before, after), d, extra in many:
        # Rows that output_padding has added behind the last tap; a stride of them would count.
        after -= extra // stride * stride
        if -after > rows:  # those are all that is left: the padding has cut off every tap
            before, after = (n - 1) * stride + d * (r - 1) + 1, -rows
        cut.append(max(-after, 0))
        padding.append((before, max(after, 0)))
    options["padding"] = tuple(padding)

    @cache
    def dy() -> Value:
        value = ctx.dy
        for dim, rows in enumerate(cut, 2):
            value = ctx.g.slice(value, dim, 0, value.shape[dim] - rows) if rows else value
        return value

    return {
        "x": lambda: ctx.anchor("conv", (dy(), ctx["weight"]), **options)[0],
        "weight": lambda: ctx.anchor("conv_wgrad", (ctx["x"], dy()), kernel=kernel, **options)[0],
    }


def _conv_wgrad(ctx: Context) -> Gradients:
    """Linear in both: the convolution of x, and the transposed one of dy, by the weight's grad."""
    options, x, dy = _geometry(ctx.node), ctx.spec("x"), ctx.spec("dy")
    many = zip(
        x.shape[2:],
        dy.shape[2:],
        ctx.node.attr("kernel"),
        *(options[key] for key in ("stride", "padding", "dilation")),
        strict=True,
    )
    rest = tuple(n - ((out - 1) * s - sum(p) + d * (r - 1) + 1) for n, out, r, s, p, d in many)
    return {
        "dy": lambda: ctx.anchor("conv", (ctx["x"], ctx.dy), **options)[0],
        "x": lambda: ctx.anchor(
            "conv_transpose", (ctx["dy"], ctx.dy), output_padding=rest, **options
        )[0],
    }


def _sdpa(ctx: Context) -> Gradients:
    node = ctx.node
    keys = (
        *("scale", "is_causal", "diagonal_alignment", "window"),
        *("dropout_p", "alibi", "softcap", "finite_padding"),
    )
    options = {key: node.attr(key) for key in keys}

    def own(port: str) -> Value | None:
        value = ctx.get(port)
        if value is None or not value.dtype.is_floating_point:
            return value
        return ctx.build.narrow(value, ctx.spec(port).dtype)

    @cache
    def lse_() -> Value:
        lse = ctx.result(1)
        if any(ctx.name(p) for p in ("attn_mask", "seq_len_q", "seq_len_kv")) or node.attr(
            "window"
        ) not in (None, (None, 0)):
            # A row without a key has -inf; from a large number its weights come out as exp(-inf).
            lse = ctx.build.wide(ctx.g.where(lse < -1e30, 1e30, lse))
        return lse

    @cache
    def all_() -> list[Value]:
        statistics = torch.float64 if ctx.spec("q").dtype == torch.float64 else torch.float32
        return ctx.anchor(
            "sdpa_backward",
            (ctx.dy, ctx["q"], ctx["k"], ctx["v"], ctx.result()),
            ctx.build.narrow(lse_(), statistics),
            *(own(port) for port in ("attn_mask", "seq_len_q", "seq_len_kv")),
            *(own(f"dropout_{of}") for of in ("seed", "offset", "mask")),
            own("alibi_slopes"),
            mask_grad=ctx.needs("attn_mask"),
            **options,
        )

    def dsink() -> Value:
        """-sum of the sink's weights times the row sums of do * o: its own value is zero."""
        g, shape = ctx.g, ctx.spec("q").shape[:3]
        pull = g.reduction(ctx.dy * ctx.result(), 3)
        weights = (g.expand(ctx["sink"], shape, (1,)) - lse_()).exp()
        # A row that is padding has an lse of -inf, or 1e30, and may hold NaN.
        each = g.where(lse_() > 1e29, 0.0, weights * pull)
        return g.neg(g.reduction(each, (0, 2)))

    ports = ("q", "k", "v", "attn_mask")
    return {
        **{port: lambda place=place: all_()[place] for place, port in enumerate(ports)},  # type: ignore[misc]
        "sink": dsink,
    }


def _sdpa_varlen(ctx: Context) -> Gradients:
    node = ctx.node
    keys = ("scale", "is_causal", "diagonal_alignment", "window", "max_seqlen_q", "max_seqlen_kv")

    @cache
    def all_() -> list[Value]:
        lse = ctx.result(1)  # as for sdpa; a sequence may have no key
        lse = ctx.build.wide(ctx.g.where(lse < -1e30, 1e30, lse))
        statistics = torch.float64 if ctx.spec("q").dtype == torch.float64 else torch.float32
        return ctx.anchor(
            "sdpa_varlen_backward",
            (ctx.dy, ctx["q"], ctx["k"], ctx["v"], ctx.result()),
            ctx.build.narrow(lse, statistics),
            *(ctx.get(port) for port in ("cu_seqlens_q", "cu_seqlens_kv", "ragged")),
            **{key: node.attr(key) for key in keys},
        )

    return {port: lambda place=place: all_()[place] for place, port in enumerate("qkv")}  # type: ignore[misc]


def _batch_norm_train(ctx: Context) -> Gradients:
    @cache
    def all_() -> list[Value]:
        weight = ctx.build.narrow(ctx["weight"], ctx.spec("weight").dtype)
        kind = torch.float64 if ctx.spec("x").dtype == torch.float64 else torch.float32
        mean, inv_std = (ctx.build.narrow(ctx.result(place), kind) for place in (1, 2))
        return ctx.anchor("batch_norm_backward", (ctx.dy, ctx["x"]), weight, mean, inv_std)

    def like(port: str, place: int) -> Value:
        """The weight's gradient has the weight's shape; the bias may have the other one."""
        return _revector(ctx, all_()[place], ctx.spec(port).shape)

    return {
        "x": lambda: all_()[0],
        "weight": lambda: all_()[1],
        "bias": lambda: like("bias", 2),
    }


def _revector(ctx: Context, value: Value, shape: Sequence[int]) -> Value:
    """A vector between its two forms, (C,) and (1, C, 1, ...)."""
    if value.shape == tuple(shape):
        return value
    if len(shape) > 1:
        return ctx.build.wide(ctx.g.expand(value, shape, (1,)))
    dims = [dim for dim in range(len(value.shape)) if dim != 1]
    return ctx.build.wide(ctx.g.reduction(value, dims))


def _batch_norm(ctx: Context) -> Gradients:
    g, eps = ctx.g, ctx.node.attr("eps")
    affine = ctx.name("weight") is not None

    def inverse(value: Value) -> Value:
        return g.rsqrt(value + eps)

    @cache
    def dx() -> Value:
        factor = inverse(ctx.column("running_var"))
        return ctx.dy * (factor * ctx.column("weight") if affine else factor)

    @cache
    def centred() -> Value:
        return ctx.dy * (ctx["x"] - ctx.column("running_mean"))

    def vector(port: str, like: str) -> Value:
        return _revector(ctx, ctx[port], ctx.spec(like).shape)

    def dvar() -> Value:
        inv = inverse(ctx["running_var"])
        slope = inv * inv * inv * -0.5
        total = ctx.per_channel(centred(), "running_var")
        return total * (slope * vector("weight", "running_var") if affine else slope)

    return {
        "x": dx,
        "running_mean": lambda: -ctx.per_channel(dx(), "running_mean"),
        "running_var": dvar,
        "weight": lambda: (
            ctx.per_channel(centred(), "weight") * inverse(vector("running_var", "weight"))
        ),
        "bias": lambda: ctx.per_channel(ctx.dy, "bias"),
    }


def _instance_norm(ctx: Context) -> Gradients:
    @cache
    def all_() -> list[Value]:
        weight = None
        if ctx.name("weight") is not None:
            weight = ctx.build.narrow(ctx["weight"], ctx.spec("weight").dtype)
        kind = torch.float64 if ctx.spec("x").dtype == torch.float64 else torch.float32
        mean, inv_std = (ctx.build.narrow(ctx.result(place), kind) for place in (1, 2))
        return ctx.anchor("instance_norm_backward", (ctx.dy, ctx["x"]), mean, inv_std, weight)

    def bias() -> Value:
        """A sum of dy alone, where nothing else is needed."""
        if any(ctx.needs(port) for port in ("x", "weight")):
            return _revector(ctx, all_()[2], ctx.spec("bias").shape)
        return ctx.per_channel(ctx.dy, "bias")

    return {"x": lambda: all_()[0], "weight": lambda: all_()[1], "bias": bias}


def _trailing_norm(op: str, statistics: int) -> GradRule:
    """A norm over trailing dims, by the op that gives all its gradients."""

    def rule(ctx: Context) -> Gradients:
        with_bias = ctx.name("bias") is not None and ctx.needs("bias")

        @cache
        def all_() -> list[Value]:
            weight = ctx.build.narrow(ctx["weight"], ctx.spec("weight").dtype)
            kind = torch.float64 if ctx.spec("x").dtype == torch.float64 else torch.float32
            given = [ctx.build.narrow(ctx.result(1 + n), kind) for n in range(statistics)]
            return ctx.anchor(op, (ctx.dy, ctx["x"]), weight, *given, bias_grad=with_bias)

        def alone(port: str, place: int) -> Value:
            """The bias's gradient is a sum of dy alone, where nothing else is needed."""
            if any(ctx.needs(other) for other in ("x", "weight")):
                return all_()[place]
            return ctx.fit(ctx.dy, ctx.spec(port).shape)

        return {
            "x": lambda: all_()[0],
            "weight": lambda: all_()[1],
            "bias": lambda: alone("bias", 2),
        }

    return rule


def _matmul(ctx: Context) -> Gradients:
    """Transposed operands are views; batch dims that broadcast are summed behind the product."""

    def turned(port: str) -> Value:
        rank = len(ctx.spec(port).shape)
        return ctx.build.wide(ctx.g.transpose(ctx[port], rank - 2, rank - 1))

    def dy() -> Value:
        rank = len(ctx.dy.shape)
        return ctx.build.wide(ctx.g.transpose(ctx.dy, rank - 2, rank - 1))

    def dweight() -> Value:
        """Of a matrix that all batches share: one product over batch and rows together.

        Of a matrix whose columns lie in rows, as that of a linear layer does, the product is made
        the other way round, so that its result lies like the matrix.
        """
        x, y = ctx.spec("x"), ctx.spec("y")
        rank, wide = len(y.shape), ctx.build.wide
        x_, dy_ = ctx["x"], ctx.dy
        if rank == 2 < len(x.shape):
            rows = math.prod(x.shape[:-1])
            x_, dy_ = (wide(ctx.g.reshape(v, (rows, v.shape[-1]))) for v in (x_, dy_))
        last = len(x_.shape) - 1
        order = _order(y)
        if rank == 2 and order.index(1) < order.index(0):
            product = ctx.anchor("matmul", (wide(ctx.g.transpose(dy_, last - 1, last)), x_))[0]
            return wide(ctx.g.transpose(product, last - 1, last))
        return ctx.anchor("matmul", (wide(ctx.g.transpose(x_, last - 1, last)), dy_))[0]

    return {"x": lambda: ctx.anchor("matmul", (ctx.dy, turned("y")))[0], "y": dweight}


def _permuted(ctx: Context) -> Gradients:
    dims = ctx.node.attr("dims")
    back = tuple(dims.index(dim) for dim in range(len(dims)))
    return {"x": lambda: ctx.g.permute(ctx.dy, back)}


def _zeros(ctx: Context, shape: Sequence[int]) -> Value:
    return ctx.build.wide(ctx.g.expand(ctx.g._scalar(0.0), shape, ()))


def _slice(ctx: Context) -> Gradients:
    """dy with zeros where nothing was taken."""
    dim, start, step = (ctx.node.attr(key) for key in ("dim", "start", "step"))
    size = ctx.spec("x").shape[dim]

    def dx() -> Value:
        g, value = ctx.g, ctx.dy
        shape = list(value.shape)
        if step > 1:  # zeros between the elements: a dim of its own, merged again
            apart = [*shape[: dim + 1], 1, *shape[dim + 1 :]]
            gaps = [*shape[: dim + 1], step - 1, *shape[dim + 1 :]]
            value = ctx.build.wide(g.reshape(value, apart))
            value = ctx.build.wide(g.concat([value, _zeros(ctx, gaps)], dim + 1))
            shape[dim] *= step
            value = ctx.build.wide(g.reshape(value, shape))
            if shape[dim] > size - start:
                value = ctx.build.wide(g.slice(value, dim, 0, size - start))
                shape[dim] = size - start
        many = ((start, True), (size - start - shape[dim], False))
        for rows, before in many:
            if rows:
                zeros = _zeros(ctx, [*shape[:dim], rows, *shape[dim + 1 :]])
                parts = [zeros, value] if before else [value, zeros]
                value = ctx.build.wide(g.concat(parts, dim))
        return value

    return {"x": dx}


def _concat(ctx: Context) -> Gradients:
    dim, rules, start = ctx.node.attr("dim"), {}, 0
    for port in OPS["concat"].ports_of(len(ctx.node.inputs)):
        stop = start + ctx.spec(port).shape[dim]
        rules[port] = lambda start=start, stop=stop: ctx.g.slice(ctx.dy, dim, start, stop)
        start = stop
    return rules


def _of_image(op: str, *also: str) -> GradRule:
    """A pool or an interpolation, by the op of its gradient: from dy, and from what ``also`` names.

    A max pool saves no indices, which take 8 bytes an element: its gradient pools x again.
    """

    def rule(ctx: Context) -> Gradients:
        attrs = dict(ctx.node.attrs)
        if not also:
            attrs["input_size"] = ctx.spec("x").shape[2:]
        return {"x": lambda: ctx.anchor(op, (ctx.dy, *(ctx[port] for port in also)), **attrs)[0]}

    return rule


def _from_result(op: str) -> GradRule:
    """An op whose gradient reads its result."""

    def rule(ctx: Context) -> Gradients:
        attrs = dict(ctx.node.attrs)
        return {"x": lambda: ctx.anchor(op, (ctx.dy, ctx.result()), **attrs)[0]}

    return rule


def _nll_loss(ctx: Context) -> Gradients:
    attrs = {**dict(ctx.node.attrs), "shape": ctx.spec("x").shape}
    return {"x": lambda: ctx.anchor("nll_loss_backward", (ctx.dy,), ctx["target"], **attrs)[0]}


def _back_to(op: str) -> GradRule:
    """The gradient of an op that is linear: the op itself."""

    def rule(ctx: Context) -> Gradients:
        attrs = {key: value for key, value in ctx.node.attrs if key != "input_size"}
        return {"dy": lambda: ctx.anchor(op, (ctx.dy,), **attrs)[0]}

    return rule


def _normalize(ctx: Context) -> Gradients:
    """Along the row nothing but what goes beyond its own direction; all of it below eps."""

    def dx() -> Value:
        g, x, floor = ctx.g, ctx["x"], ctx.node.attr("eps") ** 2
        rows = (len(x.shape) - 1,)
        squares = ctx.build.wide(g.reduction(x * x, rows, "sum", keepdim=True))
        inverse = g.rsqrt(squares + g.relu(floor - squares))  # cuDNN's maximum loses NaN
        y = x * inverse
        along = ctx.build.wide(g.reduction(ctx.dy * y, rows, "sum", keepdim=True))
        return (ctx.dy - y * g.where(squares > floor, along, 0.0)) * inverse

    return {"x": dx}


def _reduction(ctx: Context) -> Gradients:
    g, x, node = ctx.g, ctx.spec("x"), ctx.node
    dims, mode, keep = node.attr("dims"), node.attr("mode"), node.attr("keepdim")
    kept = dims if keep is True else keep or ()
    left = [dim for dim in range(len(x.shape)) if dim not in dims or dim in kept]
    full = [1 if dim in dims else n for dim, n in enumerate(x.shape)]

    def spread(value: Value, shape: Sequence[int]) -> Value:
        return ctx.build.wide(g.expand(value, shape, left)) if dims else value

    def total() -> Value:
        count = math.prod(x.shape[dim] for dim in dims)
        return spread(ctx.dy if mode == "sum" else ctx.dy * (1.0 / count), x.shape)

    def extreme() -> Value:
        """As torch's amax: shared evenly by the elements with the largest value, or |value|."""
        data = ctx["x"]
        value = ctx.build.wide(g.abs(data)) if mode == "amax" else data
        best = g.eq(value, g.reduction(value, dims, mode, keepdim=True))
        ones = ctx.build.wide(g.where(best, 1.0, 0.0))
        dy = spread(ctx.dy, full) if full != list(ctx.dy.shape) else ctx.dy
        share = ctx.build.wide(dy / g.reduction(ones, dims, "sum", keepdim=True))
        if mode == "amax":
            share = g.where(g.lt(data, 0.0), -share, share)
            share = g.where(g.eq(data, 0.0), 0.0, share)
        return g.where(best, share, 0.0)

    return {"x": total if mode in ("sum", "mean") else extreme}


def _expand(ctx: Context) -> Gradients:
    x, dims = ctx.spec("x"), ctx.node.attr("dims")
    shape = ctx.node.attr("shape")
    repeated = [d for d, n in zip(dims, x.shape, strict=True) if n == 1 and shape[d] != 1]
    over = [dim for dim in range(len(shape)) if dim not in dims] + repeated
    return {"x": lambda: ctx.g.reduction(ctx.dy, over, keepdim=repeated) if over else ctx.dy}


def _pow(ctx: Context) -> Gradients:
    g, number = ctx.g, ctx.constant("y")

    def base() -> Value:
        if number == 0:
            return ctx.dy * 0.0
        if number is not None:
            less = number - 1.0
            slope = ctx["x"] if less == 1.0 else g.pow(ctx["x"], less)
            return ctx.dy * (slope * number)
        x, y = ctx["x"], ctx["y"]
        return g.where(g.eq(y, 0.0), 0.0, ctx.dy * (y * g.pow(x, y - 1.0)))

    def exponent() -> Value:
        x, y = ctx["x"], ctx["y"]
        nothing = g.logical_and(g.eq(x, 0.0), g.ge(y, 0.0))
        return g.where(nothing, 0.0, ctx.dy * (ctx.result() * g.log(x)))

    return {"x": base, "y": exponent}


def _extremum(better: str) -> GradRule:
    """To the operand that won, half to each where they are equal."""

    def rule(ctx: Context) -> Gradients:
        g = ctx.g

        def part(mine: str, other: str) -> Value:
            a, b = ctx[mine], ctx[other]
            won = g.gt(a, b) if better == "maximum" else g.lt(a, b)
            tied = g.where(g.eq(a, b), ctx.dy * 0.5, 0.0)
            return g.where(won, ctx.dy, tied)

        return {"x": lambda: part("x", "y"), "y": lambda: part("y", "x")}

    return rule


def _div(ctx: Context) -> Gradients:
    @cache
    def dx() -> Value:
        return ctx.dy / ctx["y"]

    return {"x": dx, "y": lambda: -(dx() * ctx.result())}


def _clamp(ctx: Context) -> Gradients:
    """Where x is between the bounds; 0 at them, as of relu at 0."""

    def dx() -> Value:
        g, low, high = ctx.g, ctx.node.attr("min"), ctx.node.attr("max")
        x = ctx["x"]
        inside = g.gt(x, low) if low is not None else g.lt(x, high)
        if low is not None and high is not None:
            inside = g.logical_and(inside, g.lt(x, high))
        return g.where(inside, ctx.dy, 0.0)

    return {"x": dx}


def _batch_norm_apply(ctx: Context) -> Gradients:
    @cache
    def centred() -> Value:
        return ctx["x"] - ctx.column("mean")

    def dx() -> Value:
        return ctx.dy * (ctx.column("inv_std") * ctx.column("weight"))

    return {
        "x": dx,
        "mean": lambda: -ctx.per_channel(dx(), "mean"),
        "inv_std": lambda: ctx.per_channel(ctx.dy * centred() * ctx.column("weight"), "inv_std"),
        "weight": lambda: ctx.per_channel(ctx.dy * centred() * ctx.column("inv_std"), "weight"),
        "bias": lambda: ctx.per_channel(ctx.dy, "bias"),
    }


def _relu(ctx: Context) -> Gradients:
    """dy where y is positive. In front of a batch norm's backward y comes from what that one reads:
    cuDNN has the two as one plan so, for 16-bit data, and y need not be kept."""

    def dx() -> Value:
        norm = ctx.build.producer.get(str(ctx.name("x")))
        if (
            norm is None
            or norm.op != "batch_norm_train"
            or norm.outputs[0] != ctx.name("x")
            or ctx.build.dtypes[str(norm.inputs[0])].itemsize != 2
            or ctx.build.users(str(norm.outputs[0])) > 1
        ):
            return ctx.g.relu_backward(ctx.dy, ctx.result())
        x, weight, bias, *_ = norm.inputs
        _, mean, inv_std, *_ = norm.outputs
        names = (x, mean, inv_std, weight, bias)
        y = ctx.build.apply(
            "batch_norm_apply", [ctx.build.forward(str(name)) for name in names], {}
        )[0]
        return ctx.g.relu_backward(ctx.dy, y)

    return {"x": dx}


def _leaky_relu(ctx: Context) -> Gradients:
    slope = ctx.node.attr("negative_slope")
    # The result has the sign of x unless the slope turns it.
    return {
        "x": lambda: ctx.g.relu_backward(ctx.dy, ctx.result() if slope >= 0 else ctx["x"], slope)
    }


def _elu(ctx: Context) -> Gradients:
    alpha = ctx.node.attr("alpha")

    def dx() -> Value:
        if alpha >= 0:
            y = ctx.result()
            return ctx.g.where(y > 0.0, ctx.dy, ctx.dy * (y + alpha))
        x = ctx["x"]
        return ctx.g.where(x > 0.0, ctx.dy, ctx.dy * (x.exp() * alpha))

    return {"x": dx}


def _abs(ctx: Context) -> Gradients:
    def dx() -> Value:
        x = ctx["x"]
        return ctx.g.where(x > 0.0, ctx.dy, ctx.g.where(x < 0.0, -ctx.dy, 0.0))

    return {"x": dx}


def _from_x(slope: Callable[[Context, Value], Value]) -> GradRule:
    """A unary op: ``slope(ctx, x)`` is the gradient of x."""
    return lambda ctx: {"x": lambda: slope(ctx, ctx["x"])}


def _from_y(slope: Callable[[Context, Value], Value]) -> GradRule:
    """A unary op: ``slope(ctx, y)`` is the gradient of x, from the result y."""
    return lambda ctx: {"x": lambda: slope(ctx, ctx.result())}


RULES: Mapping[str, GradRule | NoGradient] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "conv_wgrad": _conv_wgrad,
    "sdpa": _sdpa,
    "sdpa_backward": _second("sdpa_backward"),
    "sdpa_paged": NoGradient("has no gradient: the cache is for inference"),
    "sdpa_varlen": _sdpa_varlen,
    "sdpa_varlen_backward": _second("sdpa_varlen_backward"),
    "ragged_offsets": NoGradient("is of whole numbers", flat=True),
    "sdpa_fp8": NoGradient("has no gradient: 8-bit data are constants; sdpa has one"),
    "batch_norm_train": _batch_norm_train,
    "batch_norm_backward": _second("batch_norm_backward"),
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "instance_norm_backward": _second("instance_norm_backward"),
    "batch_norm_apply": _batch_norm_apply,
    "layer_norm": _trailing_norm("layer_norm_backward", 2),
    "layer_norm_backward": _second("layer_norm_backward"),
    "rms_norm": _trailing_norm("rms_norm_backward", 1),
    "rms_norm_backward": _second("rms_norm_backward"),
    "matmul": _matmul,
    "reshape": lambda c: {"x": lambda: c.g.reshape(c.dy, c.spec("x").shape)},
    "transpose": lambda c: {
        "x": lambda: c.g.transpose(c.dy, c.node.attr("dim0"), c.node.attr("dim1"))
    },
    "permute": _permuted,
    "slice": _slice,
    "concat": _concat,
    "softmax": _from_result("softmax_backward"),
    "softmax_backward": _second("softmax_backward"),
    "log_softmax": _from_result("log_softmax_backward"),
    "log_softmax_backward": _second("log_softmax_backward"),
    "nll_loss": _nll_loss,
    "nll_loss_backward": _second("nll_loss_backward"),
    "max_pool": _of_image("max_pool_backward", "x"),
    "max_pool_backward": _second("max_pool_backward"),
    "avg_pool": _of_image("avg_pool_backward"),
    "avg_pool_backward": _back_to("avg_pool"),
    "adaptive_avg_pool": _of_image("adaptive_avg_pool_backward"),
    "adaptive_avg_pool_backward": _back_to("adaptive_avg_pool"),
    "adaptive_max_pool": _of_image("adaptive_max_pool_backward", "x"),
    "adaptive_max_pool_backward": _second("adaptive_max_pool_backward"),
    "interpolate": _of_image("interpolate_backward"),
    "interpolate_backward": _back_to("interpolate"),
    "group_affine": NoGradient("has no gradient: it is for inference; group_norm has one"),
    "normalize": _normalize,
    "reduction": _reduction,
    "expand": _expand,
    "dequantize": NoGradient("has no gradient: 8-bit data are constants"),
    "quantize": NoGradient("rounds, and has no gradient", flat=False),
    "bias": lambda c: {"x": lambda: c.dy, "bias": lambda: c.per_channel(c.dy, "bias")},
    "scale": lambda c: {
        "x": lambda: c.g.scale(c.dy, c["scale"]),
        "scale": lambda: c.per_channel(c.dy * c["x"], "scale"),
    },
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "gelu": _from_x(lambda c, x: c.g.gelu_backward(c.dy, x)),
    "gelu_tanh": _from_x(lambda c, x: c.g.gelu_tanh_backward(c.dy, x)),
    "silu": _from_x(lambda c, x: c.g.silu_backward(c.dy, x)),
    "sigmoid": _from_y(lambda c, y: c.dy * (y - y * y)),
    "tanh": _from_y(lambda c, y: c.dy - c.dy * (y * y)),
    "softplus": _from_x(lambda c, x: c.dy * c.g.sigmoid(x * c.node.attr("beta"))),
    "clamp": _clamp,
    # Linear in dy; y is only asked for its sign.
    "relu_backward": lambda c: {
        "dy": lambda: c.g.relu_backward(c.dy, c["y"], c.node.attr("negative_slope"))
    },
    "gelu_backward": _second("gelu_backward"),
    "gelu_tanh_backward": _second("gelu_tanh_backward"),
    "silu_backward": _second("silu_backward"),
    "identity": lambda c: {"x": lambda: c.dy},
    "to_float": NoGradient("is of whole numbers", flat=True),
    "neg": lambda c: {"x": lambda: -c.dy},
    "abs": _abs,
    "exp": _from_y(lambda c, y: c.dy * y),
    "log": _from_x(lambda c, x: c.dy / x),
    "sqrt": _from_y(lambda c, y: c.dy * 0.5 / y),
    "rsqrt": _from_y(lambda c, y: c.dy * -0.5 * (y * y * y)),
    "reciprocal": _from_y(lambda c, y: -(c.dy * (y * y))),
    "erf": _from_x(lambda c, x: c.dy * ((-(x * x)).exp() * (2.0 / math.sqrt(math.pi)))),
    "add": lambda c: {"x": lambda: c.dy, "y": lambda: c.dy},
    "sub": lambda c: {"x": lambda: c.dy, "y": lambda: -c.dy},
    "mul": lambda c: {"x": lambda: c.dy * c["y"], "y": lambda: c.dy * c["x"]},
    "div": _div,
    "pow": _pow,
    "minimum": _extremum("minimum"),
    "maximum": _extremum("maximum"),
    **{name: _JUMPS for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: _JUMPS for name in ("logical_and", "logical_or", "logical_not")},
    "where": lambda c: {
        "x": lambda: c.g.where(c["condition"], c.dy, 0.0),
        "y": lambda: c.g.where(c["condition"], 0.0, c.dy),
    },
    "aten": NoGradient("aten is torch's own op, of which no gradient is known here"),
    "constant": NoGradient("is a number", flat=True),
}
