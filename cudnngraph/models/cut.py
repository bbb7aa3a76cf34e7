"""Graphs of torch.compile with calls that no graph of ours can hold, cut at these calls.

They are torch's higher-order ops: kernels of Triton, ops that write over their operands, control
flow. So are ops of sparse tensors, and on a CPU bags of embeddings, and ops that read numbers and
draw others, beside other random ones: a graph draws in front of it, and the order would not be the
model's. Torch runs each between graphs of ours.
Higher-order ops that only call a graph are called as that before a graph is traced, and flex
attention as other ops, or by torch's own kernels (:mod:`~cudnngraph.models.flex`).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from . import draws, flex, report
from .export import last_line
from .report import Report
from .results import results_in

_log = logging.getLogger(__name__)
Node = torch.fx.Node
#: A part of a graph, the places of its inputs that are weights, and its number, as something to
#: call with a list of inputs.
Make = Callable[[torch.fx.GraphModule, "tuple[int, ...]", int], "Part"]
Call = Callable[[list[Any]], Sequence[Any]]


class Part(Protocol):
    """A graph of ours between two of torch's calls."""

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """The results, for a list of inputs, which it empties."""

    def make_none(self, places: Iterable[int]) -> None:
        """Make no results in these places: nothing reads them."""


def _call(graph: Any, identifier: Any, *operands: Any) -> Any:
    return graph(*operands)


def _call_hinted(graph: Any, args: Any, kwargs: Any, hints: Any = None) -> Any:
    return graph(*args, **kwargs)


_aten: Any = torch.ops.aten
_OTHER_FORMS = frozenset({_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default})

_WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "flex_attention": flex.attention,
    "invoke_subgraph": _call,
    "hints_wrapper": _call_hinted,
}


def write_out(module: torch.fx.GraphModule) -> None:
    """Have a graph of dynamo's, and the graphs in it, call functions in the place of ops that are
    written out."""
    for part in module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        found = [
            node
            for node in part.graph.nodes
            if flex.higher_name(node.target) in _WRITTEN_OUT and not _is_torchs(part, node)
        ]
        for node in found:
            node.target = _WRITTEN_OUT[flex.higher_name(node.target)]
        if found:
            part.recompile()


def _is_torchs(part: torch.fx.GraphModule, node: Node) -> bool:
    """Whether flex attention stays torch's."""
    if flex.higher_name(node.target) != "flex_attention":
        return False

    def known(each: Node) -> Any:
        if each.op == "get_attr":
            return operator.attrgetter(str(each.target))(part)
        return each.meta["example_value"]

    given: Any = torch.fx.map_arg((node.args, node.kwargs), known)
    return flex.is_torchs(*given[0], **given[1])


def is_needed(module: torch.fx.GraphModule) -> bool:
    """Whether a graph has calls to be cut at. One with effects is left as it is."""
    names = set(_torchs(module.graph.nodes).values())
    return bool(names) and "with_effects" not in names


def _torchs(nodes: Iterable[Node]) -> dict[Node, str]:
    """The calls to be cut at, with their names."""
    found = {node: name for node in nodes if (name := flex.higher_name(node.target))}
    found |= {node: str(node.target) for node in nodes if _is_apart(node)}
    random = [node for node in nodes if draws.is_random(node) and _is_on_cpu(node)]
    if len(random) > 1:
        found |= {node: str(node.target) for node in random if draws.reads_numbers(node)}
    return found


def _is_apart(node: Node) -> bool:
    """Whether an op reads or gives sparse tensors, or on a CPU other forms than torch says."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    seen = pytree.tree_leaves([each.meta.get("val") for each in (node, *node.all_input_nodes)])
    if any(isinstance(x, torch.Tensor) and x.layout is not torch.strided for x in seen):
        return True
    return node.target in _OTHER_FORMS and _is_on_cpu(node)


def _is_on_cpu(node: Node) -> bool:
    seen = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in seen)


@dataclass(frozen=True)
class _Step:
    """A call, the nodes that it reads and gives, and those of the former that it reads last."""

    call: Call
    reads: tuple[Node, ...]
    gives: tuple[Node, ...]
    gone: tuple[Node, ...]


class Cut:
    """A traced graph that runs as graphs of ours, which ``make`` gives, and torch's calls between.

    ``static`` are the places of inputs that are weights, ``saved`` those of results that a backward
    alone reads. It is called with a list of inputs, which it empties.
    """

    def __init__(
        self,
        traced: torch.fx.GraphModule,
        static: Sequence[int],
        saved: Sequence[int],
        title: str,
        make: Make,
    ) -> None:
        self._boxed_call = True  # as AOTAutograd asks, of the instance
        self.traced, self._title = traced, title
        nodes = list(traced.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        weights = {self._inputs[place] for place in static}
        self._results = results_in(traced.graph)
        self._saved = frozenset(saved)
        self._steps: list[_Step] = []
        self._ours: dict[int, Part] = {}
        self._left: list[tuple[str, str]] = []
        torchs = _torchs(nodes)
        parts = list(_parts(nodes, torchs))
        kept = {each for each in self._results if isinstance(each, Node)}
        last = {read: at for at, part in enumerate(parts) for node in part for read in _read(node)}
        last |= dict.fromkeys(kept, len(parts))
        for number, part in enumerate(parts):
            own = set(part)
            reads = tuple(dict.fromkeys(r for node in part for r in _read(node) if r not in own))
            gives = tuple(node for node in part if last.get(node, number) > number)
            if name := torchs.get(part[0]):
                by_torch = _by_torch(traced, part, reads, gives)
                is_flex = name.startswith("flex_attention")
                module = partial(_module, traced, part, reads, gives)
                call = _ByCompiler(name, module, by_torch) if is_flex else by_torch
                self._left.append((name, last_line(part[0].meta.get("stack_trace") or "")))
            else:
                places = tuple(at for at, node in enumerate(reads) if node in weights)
                call = self._ours[number] = make(
                    _module(traced, part, reads, gives), places, number
                )
            gone = tuple(node for node in reads if last[node] == number)
            self._steps.append(_Step(call, reads, gives, gone))
        report.watch(self)

    def leave_out(self, unread: frozenset[str]) -> None:
        """Have graphs of ours make no results that the backward's inputs of these names would be
        and that it does not read."""
        kept = {node for step in self._steps for node in step.reads}
        for at, node in enumerate(self._results):
            if isinstance(node, Node) and (at not in self._saved or node.name not in unread):
                kept.add(node)
        for number, part in self._ours.items():
            gives = self._steps[number].gives
            part.make_none(at for at, node in enumerate(gives) if node not in kept)

    def reports(self) -> Iterator[Report]:
        """One of what torch runs between graphs of ours, which have reports of their own."""
        seen = (node.meta.get("val") for node in self._inputs)
        device = next((x.device for x in seen if isinstance(x, torch.Tensor)), torch.device("cpu"))
        yield Report(self._title, device, False, False, "torch", (), 0, tuple(self._left), 0)

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        with torch.inference_mode(False), torch.no_grad():
            values = dict(zip(self._inputs, args, strict=True))
            args.clear()
            for step in self._steps:
                given = [values[node] for node in step.reads]
                for node in step.gone:  # so that a call may let go of what it has read
                    del values[node]
                values.update(zip(step.gives, step.call(given), strict=True))
            return tuple(values[each] if isinstance(each, Node) else each for each in self._results)


def _parts(nodes: Sequence[Node], torchs: Container[Node]) -> Iterator[list[Node]]:
    """The calls of a graph in order: one of torch's with its results, and all that is between
    two."""
    part: list[Node] = []
    results = {each for node in nodes if node in torchs for each in _results(node)}
    for node in nodes:
        if node.op != "call_function" or node in results:
            continue
        if node in torchs:
            if part:
                yield part
            yield [node, *_results(node)]
            part = []
        else:
            part.append(node)
    if part:
        yield part


def _results(node: Node) -> Iterator[Node]:
    """The nodes that take results of one apart."""
    for user in node.users:
        if user.target is operator.getitem:
            yield user
            yield from _results(user)


def _read(node: Node) -> list[Node]:
    """The nodes that one reads, but for graphs and constants that are held."""
    return [each for each in node.all_input_nodes if each.op != "get_attr"]


def _module(
    whole: torch.fx.GraphModule, part: Sequence[Node], reads: Sequence[Node], gives: Sequence[Node]
) -> torch.fx.GraphModule:
    """A part of a graph as a graph."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in reads:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in part:
        for each in node.all_input_nodes:
            if each not in copies:
                copies[each] = graph.node_copy(each)
        copies[node] = graph.node_copy(node, lambda read: copies[read])
    graph.output(tuple(copies[node] for node in gives))
    return torch.fx.GraphModule(whole, graph)


class _ByCompiler:
    """A call that torch compiles for each form of what it is called with, or ``otherwise`` where
    that fails."""

    def __init__(
        self, name: str, module: Callable[[], torch.fx.GraphModule], otherwise: Call
    ) -> None:
        self._name, self._module, self._otherwise = name, module, otherwise
        self._made: dict[Hashable, Call] = {}

    def __call__(self, given: list[Any]) -> Sequence[Any]:
        form = tuple(
            (each.shape, each.stride(), each.dtype) if isinstance(each, torch.Tensor) else each
            for each in given
        )
        if form not in self._made:
            self._made[form] = self._compile(given)
        return self._made[form](given)

    def _compile(self, given: Sequence[Any]) -> Call:
        from torch._inductor.compile_fx import compile_fx_inner

        try:
            made: Any = compile_fx_inner(_taken_apart(self._module()), list(given))
        except Exception as error:
            told = str(error).splitlines()[0] if str(error) else ""
            _log.warning("not compiled, %s: %s: %s", self._name, type(error).__name__, told)
            return self._otherwise
        return lambda given: made(list(given))


def _taken_apart(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph whose inner graphs have no op that torch's compiler wants to be other ops."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    inners: list[tuple[str, Any]] = list(module.named_children())
    for name, inner in inners:
        given = [node.meta["val"] for node in inner.graph.nodes if node.op == "placeholder"]
        setattr(module, name, make_fx(inner, select_decomp_table())(*given))
    return module


def _by_torch(
    whole: torch.fx.GraphModule, part: Sequence[Node], reads: Sequence[Node], gives: Sequence[Node]
) -> Call:
    """An op of torch's, with its results, as something to call with what it reads."""
    op, *results = part
    held = {
        each: operator.attrgetter(str(each.target))(whole)
        for each in op.all_input_nodes
        if each.op == "get_attr"
    }
    target: Any = op.target

    def call(given: list[Any]) -> Sequence[Any]:
        values = {**held, **dict(zip(reads, given, strict=True))}
        args, kwargs = torch.fx.map_arg((op.args, op.kwargs), lambda each: values[each])
        values[op] = target(*args, **kwargs)
        for node in results:
            values[node] = values[node.all_input_nodes[0]][node.args[1]]
        return [values[node] for node in gives]

    return call
