"""The regions of a cut graph that run as generated kernels.

Ops that a kernel may run are left open when a graph is cut. Here they grow together: what one makes
and another one reads is one region if a kernel can run both, and nothing between them runs
elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..backend import env
from ..backend.plan import Choice
from ..ir.key import step_digest
from ..ir.spec import GraphSpec, memory_order
from ..kernels import kernel, patterns
from ..kernels.pieces import apart
from ..kernels.source import MOST_TENSORS
from ..kernels.tape import Refused
from ..ops.base import FP8
from ..ops.table import OPS
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import subgraph_of
from .cost import least_bytes

_log = logging.getLogger(__name__)

FP8_SINCE = 89  # the compute capability from which on a GPU converts FP8
MOST_NODES = 64  # of a region: what is longer takes long to compile and spills registers


@dataclass(eq=False)
class Item:
    """A step of a cut: its nodes; ``open`` if a kernel may run them, ``free`` if nothing has to."""

    nodes: Group
    open: bool = False
    free: bool = False
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.names = {name for node in self.nodes for name in node.results}


class Kernels:
    """Which regions are kernels on a GPU with so many processors, of a compute capability as 90.

    ``why_none`` says why none can be generated at all.
    """

    def __init__(
        self, processors: int, why_none: str | None = None, *, capability: int = FP8_SINCE
    ) -> None:
        self._processors = processors
        self._capability = capability
        self.why_none = why_none
        # Nodes of one name may be others in another graph, such as one with channels last.
        self._known: dict[tuple[CutGraph, tuple[str, ...]], Choice | str] = {}
        self._alike: dict[str, Choice | str] = {}  # by what regions compute: layers repeat

    @classmethod
    def on(cls, device_index: int) -> Kernels:
        """Those of a GPU of this machine."""
        capability = env.capability(device_index)
        return cls(kernel.processors(device_index), kernel.why_none(), capability=capability)

    def choice(self, graph: CutGraph, nodes: Group) -> Choice | str:
        """The choice by rule for a region, or why it is no kernel."""
        place = graph, tuple(node.name for node in nodes)
        if place not in self._known:
            self._known[place] = self._chosen(graph, nodes)
        return self._known[place]

    def _chosen(self, graph: CutGraph, nodes: Group) -> Choice | str:
        if self.why_none is not None:
            return self.why_none
        try:
            _check_size(nodes, graph.spec)
        except Refused as reason:
            return str(reason)
        part = subgraph_of(graph, nodes)
        digest = step_digest(part)
        if digest not in self._alike:
            self._alike[digest] = self._by_rule(part)
        return self._alike[digest]

    def _by_rule(self, part: GraphSpec) -> Choice | str:
        try:
            return patterns.by_rule(self._allowed(part), self._processors)
        except Refused as reason:
            return str(reason)
        except Exception as error:  # of a rule that never saw such a graph: torch runs it then
            _log.warning("no kernel is generated for a region: %s: %s", type(error).__name__, error)
            return f"the generator fails: {type(error).__name__}: {error}"

    def choices(self, spec: GraphSpec) -> list[Choice]:
        """The choices for a step that are worth measuring, that by rule first; empty for none."""
        if self.why_none is not None:
            return []
        try:
            _check_size(compute_nodes(spec.nodes), spec)
            return patterns.choices(self._allowed(spec), self._processors)
        except Exception as error:
            if not isinstance(error, Refused):
                _log.warning("no kernel is generated for '%s': %r", spec.name, error)
            return []

    def _allowed(self, spec: GraphSpec) -> GraphSpec:
        """A region that the GPU has instructions for, and that computes in float32. Raises
        :class:`Refused`."""
        for name, tensor in spec.tensors.items():
            if tensor.dtype == torch.float64:
                raise Refused(f"'{name}' is float64")
        if self._capability < FP8_SINCE:
            wide = [spec.tensors[name] for name in (*spec.inputs, *spec.outputs)]
            if any(tensor.dtype in FP8 for tensor in wide):
                raise Refused("numbers of FP8 take a GPU of compute capability 8.9")
        return spec


def _check_size(nodes: Group, spec: GraphSpec) -> None:
    """Raise :class:`Refused` where ops that have to do with each other are too many."""
    if len(nodes) > MOST_NODES < max(len(group) for group in apart(nodes, spec.tensors)):
        raise Refused("a region of too many ops")


def grown(graph: CutGraph, items: Sequence[Item], kernels: Kernels) -> list[Item]:
    """Items in an order that can be run, the open ones joined as far as they go together."""
    order = list(items)
    changed = True
    while changed:
        changed = False
        home = {name: item for item in order for name in item.names}
        for item in list(order):
            if not item.open or item not in order:
                continue
            for source in _sources(item, home):
                joined = _joined(graph, source, item, home, kernels)
                if joined is not None:
                    at = order.index(item)
                    gone = [each for each in order if each.names & joined.names]
                    order[at] = joined
                    order = [each for each in order if each is joined or each not in gone]
                    home |= dict.fromkeys(joined.names, joined)
                    changed = True
                    break
    return _in_order(_side_by_side(graph, order, kernels))


@dataclass(frozen=True)
class Move:
    """Pointwise ops at the end of a region that are better parts of the one that reads them:
    ``source`` and ``target`` as they are, and as they would be."""

    source: Item
    target: Item
    left: Item
    more: Item


def moves(graph: CutGraph, items: Sequence[Item], kernels: Kernels) -> Iterator[Move]:
    """Yield the moves of ops between regions by which fewer bytes are moved, at most one of a
    region.

    ``cos * x`` of rotary positions, behind the norm that makes x: the kernel of the other half of
    the rotation reads x in any case, and the product is as large, or larger in float32.
    """
    done: set[Item] = set()
    home = {name: item for item in items for name in item.names}
    for source in items:
        if not source.open or len(source.nodes) < 2 or source in done:
            continue
        users = (user for name in source.names for user in graph.readers.get(name, ()))
        readers = {home[user.results[0]] for user in users if user.results[0] in home}
        for target in sorted(readers - done - {source}, key=items.index):
            going = _worth_moving(graph, source, target) if target.open else ()
            left = tuple(node for node in source.nodes if node not in going)
            more = _sorted(graph, [Item(going), target])
            if going and all(isinstance(kernels.choice(graph, n), Choice) for n in (left, more)):
                done |= {source, target}
                yield Move(source, target, Item(left, open=True), Item(more, open=True))
                break


def arranged(graph: CutGraph, items: Sequence[Item], kernels: Kernels) -> list[Item]:
    """The items :func:`grown`, and after their :func:`moves`."""
    order = grown(graph, items, kernels)
    found: dict[Item, Item] = {}
    for move in moves(graph, order, kernels):
        found |= {move.source: move.left, move.target: move.more}
    return [found.get(item, item) for item in order]


def _worth_moving(graph: CutGraph, source: Item, target: Item) -> Group:
    """The ops of a region by which least is moved if they are ``target``'s; none if that is so as
    it is."""

    def bytes_of(*items: Item) -> int:
        return least_bytes(subgraph_of(graph, _sorted(graph, items)))

    outputs = set(graph.spec.outputs)
    inside, going = set(target.names), set[str]()
    best: Group = ()
    least = -1
    for node in reversed(source.nodes):
        users = [user for name in node.results for user in graph.readers.get(name, ())]
        row = OPS[node.op]
        if not users or outputs.intersection(node.results) or not (row.pointwise or row.view):
            continue
        if not all(inside.issuperset(user.results) for user in users):
            continue
        going.update(node.results)
        inside.update(node.results)
        moved = tuple(each for each in source.nodes if going.issuperset(each.results))
        if len(moved) == len(source.nodes):
            break
        if least < 0:
            least = bytes_of(source) + bytes_of(target)
        left = Item(tuple(each for each in source.nodes if each not in moved))
        now = bytes_of(left) + bytes_of(Item(moved), target)
        if now < least:
            best, least = moved, now
    return best


def _side_by_side(graph: CutGraph, items: Sequence[Item], kernels: Kernels) -> list[Item]:
    """Items of which those are one kernel that may run first, since they read inputs alone (casts,
    as of a model's weights, and what none reads), the casts that may run last, since none reads
    them, as of gradients, and copies of parts of one tensor."""
    inputs = {*graph.spec.inputs, *(n.results[0] for n in graph.spec.nodes if n.op == "constant")}
    first: list[Item] = []
    last: list[Item] = []
    for item in items:
        mine = {node.name for node in item.nodes}
        read = {name for node in item.nodes for name in node.operands} - item.names
        users = (user for name in item.names for user in graph.readers.get(name, ()))
        unread = all(user.name in mine for user in users)
        casts = all(node.op == "cast" for node in item.nodes)
        if item.open and read <= inputs and (casts or unread):
            first.append(item)
        elif item.open and casts and unread:
            last.append(item)
    left = list(items)
    others = [item for item in items if item not in first and item not in last]
    for beside in (first, last, *_copies_of_one(graph, others)):
        while len(beside) > 1:
            together = [beside.pop(0)]
            tensors = len(_outside(graph, together[0]))
            while beside and tensors + len(_outside(graph, beside[0])) <= MOST_TENSORS:
                together.append(beside.pop(0))
                tensors += len(_outside(graph, together[-1]))
            nodes = _sorted(graph, together)
            if len(together) > 1 and isinstance(kernels.choice(graph, nodes), Choice):
                left[left.index(together[-1])] = Item(nodes, open=True)
                gone = set(together[:-1])
                left = [each for each in left if each not in gone]
    return left


def _copies_of_one(graph: CutGraph, items: Sequence[Item]) -> list[list[Item]]:
    """The open items that do no more than copy parts of one tensor as they lie, for each such
    tensor."""
    shows = {name: item.nodes[0] for item in items if item.free for name in item.names}
    found: dict[str, list[Item]] = {}
    for item in items:
        if not item.open or len(item.nodes) > 1 or item.nodes[0].op != "identity":
            continue
        (node,) = item.nodes
        part, made = (graph.spec.tensors[name] for name in (*node.operands, *node.results))
        name = part.name
        while name in shows and shows[name].op == "slice":
            name = shows[name].operands[0]
        orders = {memory_order(each.shape, each.stride) for each in (part, made)}
        if name != part.name and len(orders) == 1:
            found.setdefault(name, []).append(item)
    return list(found.values())


def _sorted(graph: CutGraph, items: Sequence[Item]) -> Group:
    """The nodes of items in the graph's order."""
    place = graph.place
    return tuple(sorted((n for each in items for n in each.nodes), key=lambda n: place[n.name]))


def _outside(graph: CutGraph, item: Item) -> set[str]:
    """What an item reads from others, but for constants, and what it makes for others."""
    mine, outputs = {node.name for node in item.nodes}, set(graph.spec.outputs)
    made = {name for node in item.nodes for name in node.results}
    read = {name for node in item.nodes for name in node.operands} - made
    return {name for name in read if name in graph.producer or name in graph.spec.inputs} | {
        name
        for name in made
        if name in outputs or any(user.name not in mine for user in graph.readers.get(name, ()))
    }


def _sources(item: Item, home: dict[str, Item]) -> list[Item]:
    """The open items that an item reads from, views of them included."""
    found: dict[int, Item] = {}
    stack = [name for node in item.nodes for name in node.operands if name not in item.names]
    while stack:
        source = home.get(stack.pop())
        if source is None or source is item:
            continue
        if source.open:
            found.setdefault(id(source), source)
        elif source.free:
            stack += [name for node in source.nodes for name in node.operands]
    return list(found.values())


def _joined(
    graph: CutGraph,
    source: Item,
    item: Item,
    home: dict[str, Item],
    kernels: Kernels,
) -> Item | None:
    """Both as one, with the views between them; None if a kernel cannot run that."""
    between = _views_between(graph, source, item, home)
    if between is None or _path_outside(source, item, between, home):
        return None
    nodes = _sorted(graph, [source, *between, item])
    if isinstance(kernels.choice(graph, nodes), str):
        return None
    return Item(nodes, open=True)


def _views_between(
    graph: CutGraph, source: Item, item: Item, home: dict[str, Item]
) -> list[Item] | None:
    """The views by which an item reads another one; None if others read them too, unless it is
    such a view alone that others read: the kernel writes that then."""
    found: dict[int, Item] = {}
    stack = [name for node in item.nodes for name in node.operands]
    while stack:
        view = home.get(stack.pop())
        if view is None or not view.free or id(view) in found:
            continue
        found[id(view)] = view
        stack += [name for node in view.nodes for name in node.operands]
    reaches = [view for view in found.values() if _reads(view, source, home)]
    inside = {node.name for each in (source, *reaches, item) for node in each.nodes}

    def leaves(name: str) -> bool:
        users = graph.readers.get(name, ())
        return name in graph.spec.outputs or any(user.name not in inside for user in users)

    for view in reaches:
        seen = [name for node in view.nodes for name in node.operands if leaves(name)]
        if seen and any(map(leaves, view.names)):
            return None
    return reaches


def _reads(view: Item, source: Item, home: dict[str, Item]) -> bool:
    """Whether a view is one of what an item makes, by views of views too."""
    stack = [name for node in view.nodes for name in node.operands]
    while stack:
        found = home.get(stack.pop())
        if found is source:
            return True
        if found is not None and found.free:
            stack += [name for node in found.nodes for name in node.operands]
    return False


def _path_outside(source: Item, item: Item, between: Sequence[Item], home: dict[str, Item]) -> bool:
    """Whether something elsewhere reads from one, or from a view of it, and is read by the other:
    it would have to run in the middle of the kernel."""
    inside = {id(source), id(item), *map(id, between)}
    seen: set[int] = set()
    stack = [item, *between]
    while stack:
        each = stack.pop()
        for node in each.nodes:
            for name in node.operands:
                below = home.get(name)
                if below is None or id(below) in inside or id(below) in seen:
                    if id(below) in inside and id(each) not in inside:
                        return True
                    continue
                seen.add(id(below))
                stack.append(below)
    return False


def _in_order(items: Sequence[Item]) -> list[Item]:
    """The items such that each follows those that it reads from, else in their order."""
    home = {name: item for item in items for name in item.names}
    done: dict[int, Item] = {}

    def visit(root: Item) -> None:
        stack: list[tuple[Item, bool]] = [(root, False)]
        while stack:
            item, ready = stack.pop()
            if id(item) in done:
                continue
            if ready:
                done[id(item)] = item
                continue
            stack.append((item, True))
            below = [home.get(name) for node in item.nodes for name in node.operands]
            stack += [(each, False) for each in below if each is not None and each is not item]

    for item in items:
        visit(item)
    return list(done.values())
