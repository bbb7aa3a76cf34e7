"""Ways to cut a graph into steps that pass real tensors to each other.

A cut is a grouping of the graph's nodes; :func:`cuts` lists those of a group of nodes, coarse to
fine: each anchor (convolution, matmul, norm, attention) with the pointwise ops behind it, anchors
and pointwise groups apart, op by op. :func:`subgraph_of` makes the subgraph of a group: the
same subgraph whichever way led to it. Selection tries the whole first and goes down where cuDNN
refuses, or measures.

What is cut has been rewritten before (:mod:`~cudnngraph.rewrite.passes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.spec import GraphSpec, Node
from ..ops.table import OPS
from .analysis import CutGraph, Group

MIN_OPS_TO_HALVE = 6  # pointwise ops, from which on halves of a group are tried before single ops


def subgraph_of(graph: CutGraph, nodes: Sequence[Node]) -> GraphSpec:
    """The step that ``nodes`` make up; constants are copied into every step that uses them."""
    spec = graph.spec
    if len(nodes) == len(graph.compute_nodes):
        return spec
    mine = {node.name for node in nodes}
    nodes = sorted(nodes, key=lambda node: graph.place[node.name])  # one order, whoever asks
    constants = graph.constants
    used = dict.fromkeys(name for node in nodes for name in node.operands if name in constants)
    given = set(spec.outputs)
    outputs = [
        name
        for node in nodes
        for name in node.results
        if name in given or any(each.name not in mine for each in graph.readers.get(name, ()))
    ]
    label = "_".join(dict.fromkeys(node.op for node in nodes))[:60]
    part = spec.subgraph(label, [*(constants[name] for name in used), *nodes], outputs)
    crossing = {
        name: graph.passed[name] for name in (*part.inputs, *part.outputs) if name in graph.passed
    }
    return replace(part, tensors={**part.tensors, **crossing}) if crossing else part


def cuts(graph: CutGraph, nodes: Sequence[Node]) -> tuple[tuple[Group, ...], ...]:
    """The next finer groupings of ``nodes``, coarse to fine, each in an order that can be run.

    Empty for a single op.
    """
    if len(nodes) <= 1:
        return ()
    found: list[tuple[Group, ...]] = []
    anchors = sum(map(graph.is_anchor, nodes))
    if anchors:
        apart = _split_anchors(graph, nodes)
        found += [_with_epilogues(graph, apart, own=True), _with_epilogues(graph, apart, own=False)]
        if anchors == 1:
            found.append(_by_pattern(graph, [node for _, _, group in apart for node in group]))
        found.append(tuple(group for _, _, group in apart))
    else:
        found.append(_by_pattern(graph, nodes))
        if len(nodes) >= MIN_OPS_TO_HALVE:
            found += [_by_size(graph, nodes), _halves(graph, nodes)]
    found.append(tuple((node,) for node in nodes))
    return tuple(groups for groups in dict.fromkeys(found) if len(groups) > 1)


def _by_pattern(graph: CutGraph, nodes: Sequence[Node]) -> tuple[Group, ...]:
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


def _repeated(graph: CutGraph, node: Node) -> set[frozenset[int]]:
    """The sets of dims along which a pointwise op repeats its operands, numbers left out."""
    if not OPS[node.op].pointwise:
        return set()
    made = graph.spec.tensors[node.results[0]].shape
    real = frozenset(dim for dim, extent in enumerate(made) if extent > 1)
    found, roles = set(), OPS[node.op].roles.values()
    for name in node.operands:
        shape = graph.spec.tensors[name].shape
        if len(shape) == 1 and "channels" in roles:
            found.add(real - {1})
        elif len(shape) == 1 and "scale" in roles:
            found.add(real - {node.attr("dim")})
        else:
            shape = (1,) * (len(made) - len(shape)) + shape
            found.add(frozenset(dim for dim in real if shape[dim] == 1))
    return found - {frozenset(), real}


def _row_and_column(graph: CutGraph, node: Node, patterns: set[frozenset[int]]) -> bool:
    """Whether there is one pattern at most, or two that share no dim and leave none out."""
    made = graph.spec.tensors[node.results[0]].shape
    real = sum(extent > 1 for extent in made)
    return len(patterns) < 2 or (
        len(patterns) == 2
        and not frozenset.intersection(*patterns)
        and sum(map(len, patterns)) == real
    )


def _by_size(graph: CutGraph, nodes: Sequence[Node]) -> tuple[Group, ...]:
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


def _halves(graph: CutGraph, nodes: Sequence[Node]) -> tuple[Group, Group]:
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


def _split_anchors(graph: CutGraph, nodes: Sequence[Node]) -> Staged:
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


def _with_epilogues(graph: CutGraph, apart: Staged, *, own: bool) -> tuple[Group, ...]:
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


def _prologues(graph: CutGraph, apart: Staged) -> dict[str, Group]:
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


def _in_order(graph: CutGraph, groups: Sequence[Group]) -> tuple[Group, ...]:
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
