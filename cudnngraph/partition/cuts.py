"""Ways to cut a graph into steps that pass real tensors to each other.

A cut is a grouping of the graph's nodes; :func:`cuts` lists those of a group of nodes, coarse to
fine: each anchor (convolution, matmul, norm, attention) with the pointwise ops behind it, anchors
and pointwise groups apart, op by op. :func:`piece` makes the subgraph of a group, and it is the
same subgraph whichever way led to it. Selection tries the whole first and goes down where cuDNN
refuses, or measures.

What is cut has been rewritten before (:mod:`~cudnngraph.rewrite.passes`).

What crosses from step to step is kept in the dtype of its data: 16-bit data in, 16 bits out, as
torch's own ops do it. It halves the traffic, and cuDNN has more engines for it. Inside a step
values stay in the graph's intermediate dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..ir.spec import GraphSpec, Node, TensorSpec, same_layout
from ..ops.base import FLOATS, Call
from ..ops.table import OPS
from ..ops.views import is_view, slots

LOW_PRECISION = (torch.float16, torch.bfloat16)
HALVED = 6  # pointwise ops, from which on halves of a group are tried before single ops
Group = tuple[Node, ...]
_OF_CHANNELS = ("bias", "scale", "batch_norm", "batch_norm_apply")  # of vectors, along dim 1
_GRADIENTS = ("sdpa_backward", "sdpa_varlen_backward")

# Pointwise ops whose result is hardly larger than what they read, so that 16 bits hold it where
# they held the operands. (exp, pow, division … may leave float16's range on the way.)
_TAME = frozenset(
    {
        *(
            "bias",
            "scale",
            "batch_norm",
            "batch_norm_apply",
            "add",
            "sub",
            "mul",
            "minimum",
            "maximum",
            "clamp",
        ),
        *("relu", "leaky_relu", "elu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"),
        *("identity", "neg", "abs", "where", "expand"),
        *("relu_backward", "gelu_backward", "gelu_tanh_backward", "silu_backward"),
    }
)


def work(nodes: Sequence[Node]) -> Group:
    """The nodes that compute something: all but constants."""
    return tuple(node for node in nodes if node.op != "constant")


def is_anchor(node: Node, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a node is no part of a group of pointwise ops.

    Such are the ops that are not element by element, and copies into another layout.
    """
    return not OPS[node.op].pointwise or is_copy(node, tensors)


def is_copy(node: Node, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a node only changes the layout, which no plan of cuDNN does."""
    if node.op != "identity":
        return False
    source, result = tensors[node.operands[0]], tensors[node.results[0]]
    return not same_layout(source.shape, source.stride, result.stride)


@dataclass(frozen=True)
class Graph:
    """A graph to be cut, with what every cut asks about it."""

    spec: GraphSpec

    def is_anchor(self, node: Node) -> bool:
        """See :func:`is_anchor`."""
        return is_anchor(node, self.spec.tensors)

    def takes_epilogue(self, node: Node) -> bool:
        """Whether pointwise ops behind a node may be part of its plan."""
        row = OPS[node.op]
        return not (row.pointwise or row.view or row.torch_only)

    def takes_prologue(self, node: Node) -> bool:
        """Whether pointwise ops in front of a node may be part of its plan, as cuDNN has it."""
        return node.op == "batch_norm_backward"

    def is_free(self, node: Node) -> bool:
        """Whether a node is a view, or joins what was written in its place: nothing has to run."""
        if node.op == "concat":
            return set(node.operands) <= self.joined and len(set(node.operands)) == len(node.inputs)
        if node.results[0] in self.spec.outputs:
            return node.results[0] in self.written_as_operand
        return self._is_view(node)

    def _is_view(self, node: Node) -> bool:
        if not OPS[node.op].view:
            return False
        return is_view({n: self.crossing(n) for n in (node.operands[0], node.results[0])}, node)

    @cached_property
    def written_as_operand(self) -> frozenset[str]:
        """Outputs that are a view of a step's result, all of it: the step writes them itself."""
        found: dict[str, str] = {}  # by what they are a view of
        for node in self.spec.nodes:
            if node.results[0] not in self.spec.outputs or not self._is_view(node):
                continue
            name = node.operands[0]
            while (source := self.producer.get(name)) is not None and self._is_view(source):
                name = source.operands[0]
            one, other = self.crossing(name), self.crossing(node.results[0])
            if (
                source is not None
                and name not in self.spec.outputs
                and name not in self.joined
                and (one.numel, one.dtype) == (other.numel, other.dtype)
            ):
                found.setdefault(name, other.name)
        return frozenset(found.values())

    def crossing(self, name: str) -> TensorSpec:
        """A tensor as it is where it crosses from one step to another."""
        return self.passed.get(name, self.spec.tensors[name])

    @cached_property
    def joined(self) -> frozenset[str]:
        """What is written straight into its slice of a concatenation's result."""
        found: set[str] = set()
        for node in self.spec.nodes:
            if node.op != "concat":
                continue
            tensors = {name: self.crossing(name) for name in (*node.operands, *node.results)}
            found |= {name for name in slots(tensors, node) if self.may_join(name)}
        return frozenset(found)

    def may_join(self, name: str) -> bool:
        """Whether a tensor is memory of one of the steps, and of no view's operand."""
        source = self.producer.get(name)
        return source is not None and name not in self.spec.outputs and not OPS[source.op].view

    @cached_property
    def readers(self) -> Mapping[str, list[Node]]:
        """The nodes that read each tensor, once for each port."""
        found: dict[str, list[Node]] = {}
        for node in self.spec.nodes:
            for name in node.operands:
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def producer(self) -> Mapping[str, Node]:
        """The node that makes each tensor, constants left out."""
        return {name: node for node in work(self.spec.nodes) for name in node.results}

    @cached_property
    def passed(self) -> Mapping[str, TensorSpec]:
        """Intermediates in 16 bits, as they are where they cross from one step to another."""
        narrow: dict[str, TensorSpec] = {}
        for node in self.spec.nodes:
            for name in node.results:
                tensor, dtype = self.spec.tensors[name], self._data[name]
                if name in self.spec.outputs or name in self._wide or dtype == tensor.dtype:
                    continue
                if node.op == "reduction":  # cuDNN writes float32, and it is small
                    continue
                if self._is_row_product(node):  # its sum may cancel, and a row has few terms
                    continue
                small = self.is_anchor(node) or node.op in _TAME or name in self._read_as_data
                if dtype in LOW_PRECISION and small:
                    narrow[name] = replace(tensor, dtype=dtype)
        return narrow

    def _is_row_product(self, node: Node) -> bool:
        """Whether a product is there for its sums along rows alone, as in a row's dot product."""
        name = node.results[0]
        rows = (len(self.spec.tensors[name].shape) - 1,)
        readers = self.readers.get(name, ())
        return (
            node.op == "mul"
            and bool(readers)
            and all(each.op == "reduction" and each.attr("dims") == rows for each in readers)
        )

    @cached_property
    def _data(self) -> Mapping[str, torch.dtype]:
        """The dtype of the data that each tensor comes of; statistics are data of their own."""
        data = {name: self.spec.tensors[name].dtype for name in self.spec.inputs}
        for node in self.spec.nodes:
            if node.op == "aten":
                data.update(self._of_torch(node, data))
                continue
            dtype = self._data_dtype(node, data)
            for port, name in enumerate(node.outputs):
                if name is not None:
                    tensor = self.spec.tensors[name]
                    gradients = node.op in _GRADIENTS and port < 3  # dq, dk, dv
                    is_data = (port == 0 or gradients) and tensor.dtype.is_floating_point
                    data[name] = dtype if is_data else tensor.dtype
        return data

    def _of_torch(self, node: Node, data: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """The dtypes of the results of torch's own op on data."""
        operands = {
            f"x{place}": replace(self.spec.tensors[name], dtype=data[name])
            for place, name in enumerate(node.operands)
        }
        results = OPS["aten"].infer(Call("aten", node.name, operands, dict(node.attrs))) or ()
        found = dict(zip(node.outputs, results, strict=False))
        return {
            name: self.spec.tensors[name].dtype if (made := found.get(name)) is None else made.dtype
            for name in node.results
        }

    @cached_property
    def _wide(self) -> frozenset[str]:
        """What pointwise ops and views make float32 outputs of 16-bit data of: roundings would show
        there."""
        wide = {
            name
            for name in self.spec.outputs
            if self.spec.tensors[name].dtype == torch.float32 and self._data[name] in LOW_PRECISION
        }
        for node in reversed(self.spec.nodes):
            op = OPS[node.op]
            if (op.pointwise or op.view) and node.results[0] in wide:
                wide |= set(node.operands)
        return frozenset(wide)

    def _data_dtype(self, node: Node, data: Mapping[str, torch.dtype]) -> torch.dtype:
        """The dtype of the data that a node works on: of its first operand for an anchor, else what
        its largest floating operands have in common. What becomes of 8-bit data is data anew, and
        so is what a group norm multiplies by and adds: rounded, it would move whole images."""
        own = self.spec.tensors[node.results[0]].dtype
        if node.op in ("constant", "quantize", "dequantize", "group_affine"):
            return own
        if self.is_anchor(node):
            dtype = data[node.operands[0]]
            return dtype if dtype in FLOATS or OPS[node.op].view else own
        floats = [n for n in node.operands if data[n].is_floating_point and n not in self._numbers]
        if not floats:
            return own
        most = max(self.spec.tensors[name].numel for name in floats)
        dtype = data[next(n for n in floats if self.spec.tensors[n].numel == most)]
        for name in floats:
            if self.spec.tensors[name].numel == most:
                dtype = torch.promote_types(dtype, data[name])
        return dtype

    @cached_property
    def _read_as_data(self) -> frozenset[str]:
        """What anchors read that were declared on data of that dtype; sums take any."""
        anchors = (n for n in self.spec.nodes if self.is_anchor(n) and n.op != "reduction")
        return frozenset(name for node in anchors for name in node.operands)

    @cached_property
    def _numbers(self) -> frozenset[str]:
        """The tensors that constants make."""
        return frozenset(n.results[0] for n in self.spec.nodes if n.op == "constant")

    @cached_property
    def stage(self) -> Mapping[str, int]:
        """When each node runs: an anchor as soon as it can, a pointwise op with its first user.

        An anchor's stage is the longest chain of anchors that ends at it; the pointwise ops of a
        stage follow its anchors. So no group waits for a later one, and what only an epilogue needs
        (a scaled residual) is part of the epilogue, not a step before the anchor.
        """
        nodes = work(self.spec.nodes)
        users: dict[str, list[Node]] = {}
        stage: dict[str, int] = {}
        for node in nodes:
            sources = [self.producer[name] for name in node.operands if name in self.producer]
            for source in sources:
                users.setdefault(source.name, []).append(node)
            depth = max((stage[source.name] for source in sources), default=0)
            stage[node.name] = depth + self.is_anchor(node)
        for node in reversed(nodes):
            if not self.is_anchor(node) and node.name in users:
                stage[node.name] = min(
                    stage[user.name] - self.is_anchor(user) for user in users[node.name]
                )
        return stage

    def sources(self, node: Node) -> list[Node]:
        """The nodes that make the operands of ``node``."""
        return [self.producer[name] for name in node.operands if name in self.producer]


def piece(graph: Graph, nodes: Sequence[Node]) -> GraphSpec:
    """The step that ``nodes`` make up; constants are copied into every step that uses them."""
    spec = graph.spec
    if len(nodes) == len(work(spec.nodes)):
        return spec
    mine = {node.name for node in nodes}
    nodes = [node for node in spec.nodes if node.name in mine]  # one order, whoever asks
    constants = {node.results[0]: node for node in spec.nodes if node.op == "constant"}
    used = dict.fromkeys(name for node in nodes for name in node.operands if name in constants)
    elsewhere = {
        name for node in spec.nodes if node.name not in mine for name in node.operands
    } | set(spec.outputs)
    made = [name for node in nodes for name in node.results]
    outputs = [name for name in made if name in elsewhere]
    label = "_".join(dict.fromkeys(node.op for node in nodes))[:60]
    part = spec.subgraph(label, [*(constants[name] for name in used), *nodes], outputs)
    crossing = {
        name: graph.passed[name] for name in (*part.inputs, *part.outputs) if name in graph.passed
    }
    return replace(part, tensors={**part.tensors, **crossing}) if crossing else part


def cuts(graph: Graph, nodes: Sequence[Node]) -> tuple[tuple[Group, ...], ...]:
    """The next finer groupings of ``nodes``, coarse to fine, each in an order that can be run.

    Empty for a single op.
    """
    if len(nodes) <= 1:
        return ()
    found: list[tuple[Group, ...]] = []
    anchors = sum(map(graph.is_anchor, nodes))
    if anchors:
        apart = _apart(graph, nodes)
        found += [_fused(graph, apart, own=True), _fused(graph, apart, own=False)]
        if anchors == 1:
            found.append(_by_pattern(graph, [node for _, _, group in apart for node in group]))
        found.append(tuple(group for _, _, group in apart))
    else:
        found.append(_by_pattern(graph, nodes))
        if len(nodes) >= HALVED:
            found += [_by_size(graph, nodes), _halves(graph, nodes)]
    found.append(tuple((node,) for node in nodes))
    return tuple(groups for groups in dict.fromkeys(found) if len(groups) > 1)


def _by_pattern(graph: Graph, nodes: Sequence[Node]) -> tuple[Group, ...]:
    """Runs of ops whose operands are repeated along the same dims, or as a matrix's row and column:
    a plan takes no more ways to repeat than these.

    What computes less than a whole tensor runs with the first op that reads it, or where none
    does, with the last op that it reads from.
    """
    small = on_numbers(graph.spec, nodes)
    made = {name: node for node in nodes for name in node.results if node.name in small}
    runs: list[list[str]] = []
    placed: set[str] = set()
    patterns: set[frozenset[int]] = set()
    for node in nodes:
        if node.name in small:
            continue
        patterns |= _repeated(graph, node)
        if not runs or not _row_and_column(graph, node, patterns):
            runs.append([])
            patterns = _repeated(graph, node)
        group = [node]
        for each in group:  # it grows by what small ops hand on
            group += [made[name] for name in each.operands if name in made]
        runs[-1] += [each.name for each in group if each.name not in placed]
        placed |= {each.name for each in group}
    run_of = {name: number for number, run in enumerate(runs) for name in run}
    for node in nodes:  # what nothing here reads
        if node.name not in run_of:
            before = (run_of.get(source.name, 0) for source in graph.sources(node))
            run_of[node.name] = max(before, default=0)
            runs[run_of[node.name]].append(node.name)
    return tuple(tuple(node for node in nodes if node.name in run) for run in map(set, runs))


def _repeated(graph: Graph, node: Node) -> set[frozenset[int]]:
    """The sets of dims along which a pointwise op repeats its operands, numbers left out."""
    if not OPS[node.op].pointwise:
        return set()
    made = graph.spec.tensors[node.results[0]].shape
    real = frozenset(dim for dim, extent in enumerate(made) if extent > 1)
    found = set()
    for name in node.operands:
        shape = graph.spec.tensors[name].shape
        if len(shape) == 1 and node.op in _OF_CHANNELS:
            found.add(real - {1})
        elif len(shape) == 1 and node.op in ("quantize", "dequantize"):
            found.add(real - {node.attr("dim")})
        else:
            shape = (1,) * (len(made) - len(shape)) + shape
            found.add(frozenset(dim for dim in real if shape[dim] == 1))
    return found - {frozenset(), real}


def _row_and_column(graph: Graph, node: Node, patterns: set[frozenset[int]]) -> bool:
    """Whether there is one pattern at most, or two that share no dim and leave none out."""
    made = graph.spec.tensors[node.results[0]].shape
    real = sum(extent > 1 for extent in made)
    return len(patterns) < 2 or (
        len(patterns) == 2
        and not frozenset.intersection(*patterns)
        and sum(map(len, patterns)) == real
    )


def _by_size(graph: Graph, nodes: Sequence[Node]) -> tuple[Group, ...]:
    """Pointwise ops on numbers and vectors alone, and behind them those on whole tensors, which
    would compute the former for every element."""
    small = on_numbers(graph.spec, nodes)
    parts = (tuple(n for n in nodes if (n.name in small) is wanted) for wanted in (True, False))
    return tuple(part for part in parts if part)


def on_numbers(spec: GraphSpec, nodes: Sequence[Node]) -> set[str]:
    """The names of those among ``nodes`` that compute less than a whole tensor, and from such."""
    whole = max(spec.tensors[node.results[0]].numel for node in nodes)
    made = {name: node.name for node in nodes for name in node.results}
    found: set[str] = set()
    for node in nodes:
        before = {made[name] for name in node.operands if name in made}
        if spec.tensors[node.results[0]].numel < whole and before <= found:
            found.add(node.name)
    return found


def _halves(graph: Graph, nodes: Sequence[Node]) -> tuple[Group, Group]:
    """Pointwise ops in two runs, parted where the least data cross, about in the middle."""
    third = len(nodes) // 3
    place = {node.name: at for at, node in enumerate(nodes)}

    def crossing(at: int) -> int:
        """Elements that the ops before ``at`` hand to those behind."""
        handed = {
            name
            for node in nodes[at:]
            for name in node.operands
            if name in graph.producer and place.get(graph.producer[name].name, at) < at
        }
        return sum(graph.spec.tensors[name].numel for name in handed)

    middle = min(
        range(third, len(nodes) - third + 1),
        key=lambda at: (crossing(at), abs(2 * at - len(nodes))),
    )
    return tuple(nodes[:middle]), tuple(nodes[middle:])


Staged = list[tuple[int, int, Group]]  # stage, whether of pointwise ops, nodes


def _apart(graph: Graph, nodes: Sequence[Node]) -> Staged:
    """Each anchor alone, and connected pointwise ops grouped by the stage at which they run."""
    stage = graph.stage
    groups: list[tuple[int, int, list[Node]]] = []
    home: dict[str, list[Node]] = {}
    for node in nodes:
        depth = stage[node.name]
        if graph.is_anchor(node):
            groups.append((depth, 0, [node]))
            continue
        # Join the groups of pointwise operands of the same stage into one.
        mine = [node]
        for source in graph.sources(node):
            group = home.get(source.name)
            if group is None or group is mine or stage[source.name] != depth:
                continue
            groups[:] = [entry for entry in groups if entry[2] is not group]
            mine[:0] = group
            for member in group:
                home[member.name] = mine
        home[node.name] = mine
        groups = [entry for entry in groups if entry[2] is not mine]
        groups.append((depth, 1, mine))
    # Within a stage anchors come first: the stage's pointwise ops follow its anchors.
    groups.sort(key=lambda entry: entry[:2])
    return [(depth, kind, tuple(group)) for depth, kind, group in groups]


def _fused(graph: Graph, apart: Staged, *, own: bool) -> tuple[Group, ...]:
    """Anchors with the pointwise ops behind them, and in front of one that takes such.

    A group behind several anchors goes to the last of them; with ``own`` the ops that depend on one
    anchor alone stay with that one.
    """
    epilogues: dict[str, list[Node]] = {}
    order: list[Group] = []
    prologues = _prologues(graph, apart)
    for depth, kind, group in apart:
        if not kind:
            if graph.takes_epilogue(group[0]):
                epilogues[group[0].name] = []
            order.append((*prologues.get(group[0].name, ()), *group))
            continue
        if group in prologues.values():
            continue
        behind: dict[str, list[str]] = {}
        for node in group:
            seen = dict.fromkeys(
                anchor
                for source in graph.sources(node)
                for anchor in (
                    [source.name]
                    if source.name in epilogues and graph.stage[source.name] == depth
                    else behind.get(source.name, [])
                )
            )
            behind[node.name] = list(seen)
        anchors = [name for name in epilogues if any(name in b for b in behind.values())]
        if not anchors:
            order.append(group)
            continue
        for node in group:
            mine = behind[node.name]
            home = mine[0] if own and len(mine) == 1 else anchors[-1]
            epilogues[home].append(node)
    return _in_order(graph, [(*group, *epilogues.get(group[-1].name, ())) for group in order])


def _prologues(graph: Graph, apart: Staged) -> dict[str, Group]:
    """Groups of pointwise ops that one anchor alone reads, where it takes such, by that anchor."""
    found: dict[str, Group] = {}
    users: dict[str, set[str]] = {}
    for _, _, group in apart:
        for node in group:
            for source in graph.sources(node):
                users.setdefault(source.name, set()).add(group[-1].name)
    anchors = {group[0].name: group[0] for _, kind, group in apart if not kind}
    for _, kind, group in apart:
        if not kind:
            continue
        outside = {user for node in group for user in users.get(node.name, ())} - {group[-1].name}
        mine = {name for node in group for name in node.results}
        if len(outside) != 1 or not anchors.keys() >= outside or mine & set(graph.spec.outputs):
            continue
        (reader,) = outside
        if graph.takes_prologue(anchors[reader]) and reader not in found:
            found[reader] = group
    return found


def _in_order(graph: Graph, groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups such that each follows those that it reads from."""
    home = {node.name: place for place, group in enumerate(groups) for node in group}
    needs = [
        {home[s.name] for node in group for s in graph.sources(node) if s.name in home} - {place}
        for place, group in enumerate(groups)
    ]
    done: list[int] = []
    while len(done) < len(groups):
        ready = [p for p in range(len(groups)) if p not in done and needs[p] <= set(done)]
        if not ready:  # two groups wait for each other: keep anchors and pointwise ops apart
            return ()
        done.append(ready[0])
    return tuple(groups[place] for place in done)


def _as_early_as_can_be(graph: Graph, nodes: Sequence[Node]) -> Group:
    """The nodes by how many anchors have to run before: of two branches that are joined, what is
    joined belongs to the longer one then, and the shorter one may run beside it."""
    level: dict[str, int] = {}
    for node in nodes:
        before = max((level[source.name] for source in graph.sources(node)), default=0)
        level[node.name] = before + graph.is_anchor(node)
    return tuple(sorted(nodes, key=lambda node: level[node.name]))


MODEL_ANCHORS = 6  # a graph with more of them is cut at each


def regions(graph: Graph) -> tuple[Group, ...]:
    """A large graph cut at its natural borders, in an order that can be run; () for a small one.

    A region is an anchor with the pointwise ops behind it, up to the next anchor: an op belongs to
    the last anchor that it depends on, if it is as large as that one's result. Pointwise ops of no
    anchor are regions too, unless they only serve one epilogue, which they then are part of.
    """
    nodes, tensors = work(graph.spec.nodes), graph.spec.tensors
    anchors = [node for node in nodes if graph.is_anchor(node) and not OPS[node.op].view]
    if len(anchors) <= MODEL_ANCHORS:
        return ()
    nodes = _as_early_as_can_be(graph, nodes)
    groups: list[list[Node]] = []
    home: dict[str, int] = {}
    for node in nodes:
        place = max((home[source.name] for source in graph.sources(node)), default=-1)
        if place >= 0 and not graph.is_anchor(node):
            first = groups[place][0]
            takes = OPS[first.op].pointwise or graph.takes_epilogue(first)
            size = tensors[first.results[0]].numel
            if takes and not is_copy(first, tensors) and size == tensors[node.results[0]].numel:
                groups[place].append(node)
                home[node.name] = place
                continue
        home[node.name] = len(groups)
        groups.append([node])
    for place, group in enumerate(groups):
        if any(map(graph.is_anchor, group)):
            continue
        results = [name for node in group for name in node.results]
        users = [user for name in results for user in graph.readers.get(name, ())]
        homes = {home[user.name] for user in users} - {place}
        if len(homes) != 1 or not set(graph.spec.outputs).isdisjoint(results):
            continue
        (other,) = homes
        if other > place and not any(
            graph.is_anchor(user) for user in users if home[user.name] == other
        ):
            groups[other] += group
            home.update((node.name, other) for node in group)
            groups[place] = []
    order = {node.name: place for place, node in enumerate(nodes)}
    return tuple(tuple(sorted(g, key=lambda node: order[node.name])) for g in groups if g)
