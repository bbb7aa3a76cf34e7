"""Kernels of several regions that have nothing to do with each other, as an optimizer's updates.

Each region is elementwise, and has blocks of its own. Regions that are alike share a function,
which takes their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from ..device.rules import rules
from ..ir.spec import GraphSpec, Node, TensorSpec
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import subgraph_of
from .row_kernels import written
from .rows import VECTOR_BYTES, Schedule, check_count, rows_of
from .source import NAME, Source, function, pointers, text_of
from .tape import Refused

THREADS = 256
_TAKEN = "void* const* const q, const u32 block, const u32 blocks"


@dataclass(frozen=True)
class Pieces:
    """A schedule: elements that lie side by side for a thread, threads of a block, and the most
    blocks of a region."""

    lanes: int
    threads: int
    blocks: int


def apart(nodes: Sequence[Node], tensors: Mapping[str, TensorSpec]) -> list[Group]:
    """The nodes in groups of which none reads what another one makes, nor the same data but for
    single numbers; in the order of the first of each."""
    home: dict[str, int] = {}  # of a tensor, the group that has to do with it
    joined: list[int] = []  # of a group, the one that it is part of now

    def root(group: int) -> int:
        while joined[group] != group:
            joined[group] = joined[joined[group]]
            group = joined[group]
        return group

    mine = {}
    for node in nodes:
        read = [name for name in node.operands if tensors[name].numel > 1 or name in home]
        touched = [*read, *node.results]
        groups = sorted({root(home[name]) for name in touched if name in home})
        if not groups:
            groups = [len(joined)]
            joined.append(len(joined))
        for other in groups[1:]:
            joined[other] = groups[0]
        home.update(dict.fromkeys(touched, groups[0]))
        mine[node.name] = groups[0]
    found: dict[int, list[Node]] = {}
    for node in nodes:
        found.setdefault(root(mine[node.name]), []).append(node)
    return [tuple(group) for group in found.values()]


def pieces_of(spec: GraphSpec) -> list[GraphSpec]:
    """The regions that have nothing to do with each other."""
    graph = CutGraph(spec)
    groups = apart(compute_nodes(spec.nodes), spec.tensors)
    return [subgraph_of(graph, group) for group in groups]


def schedules(processors: int) -> list[Pieces]:
    """Schedules that are worth measuring, the one by rule first."""
    blocks = rules().kernel_region_blocks_per_sm * processors
    first = Pieces(VECTOR_BYTES // 2, THREADS, blocks)
    return [
        first,
        Pieces(first.lanes // 2, THREADS, blocks),
        Pieces(first.lanes, THREADS, 4 * blocks),
        Pieces(first.lanes, 2 * THREADS, blocks),
    ]


def write(spec: GraphSpec, plan: Pieces) -> Source:
    """The kernel of several regions. Raises :class:`Refused`."""
    parts = pieces_of(spec)
    places = {name: at for at, name in enumerate((*spec.inputs, *spec.outputs))}
    if len(parts) < 2:
        raise Refused("one region, which is no kernel of pieces")
    check_count(spec)
    functions: dict[str, str] = {}
    calls: list[tuple[int, list[str]]] = []
    count = 0
    for part in parts:
        body, blocks = _piece(part, plan)
        name = functions.setdefault(body, f"piece_{len(functions)}")
        given = ", ".join(f"a.p[{places[each]}]" for each in (*part.inputs, *part.outputs))
        lines = [f"void* const q[] = {{{given}}};", f"{name}(q, block - {count}u, {blocks}u);"]
        calls.append((count, lines))
        count += blocks
    head = "static __device__ __noinline__ void"
    own = [f"{head} {name}({_TAKEN}) {{\n{body}}}" for body, name in functions.items()]
    whole = function(NAME, plan.threads, ["const u32 block = blockIdx.x;", *_chosen(calls)])
    return Source(text_of(len(places), [*own, whole]), count, plan.threads)


def _chosen(calls: Sequence[tuple[int, list[str]]]) -> list[str]:
    """The lines that do one of several calls, by the block that each begins with: in halves, so
    that few comparisons find it."""
    if len(calls) == 1:
        return calls[0][1]
    middle = len(calls) // 2
    first, behind = (
        [f"  {line}" for line in _chosen(some)] for some in (calls[:middle], calls[middle:])
    )
    return [f"if (block < {calls[middle][0]}u) {{", *first, "} else {", *behind, "}"]


def _piece(part: GraphSpec, plan: Pieces) -> tuple[str, int]:
    """The body of a region's function, and the number of its blocks."""
    rows = rows_of(part)
    if rows.reductions:
        raise Refused("a reduction among regions that have nothing to do with each other")
    schedule = Schedule(gcd(rows.lanes, plan.lanes), plan.threads)
    _, lines, blocks = written(part, schedule, rows, plan.blocks)
    tensors = [part.tensors[name] for name in (*part.inputs, *part.outputs)]
    typed = pointers(tensors, len(part.inputs), "q")
    body = "".join(f"  {line}\n" for line in (*typed, *lines))
    return body.replace("blockIdx.x", "block").replace("gridDim.x", "blocks"), blocks
