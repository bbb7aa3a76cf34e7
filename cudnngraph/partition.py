"""Ways to cut a graph into steps that pass real tensors to each other.

``split`` goes one level down: a graph with anchors (convolutions, attention) falls into each anchor
and the connected groups of pointwise ops between them; a group falls into single ops; a single op does
not fall further. The caller tries the whole first and goes down where cuDNN refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ir import GraphSpec, Node
from .ops import OPS


def split(spec: GraphSpec) -> tuple[GraphSpec, ...] | None:
    """The next finer cut of ``spec``, in an order that can be run, or None for a single op."""
    working = [node for node in spec.nodes if node.op != "constant"]
    if len(working) <= 1:
        return None
    anchors = [node for node in working if not OPS[node.op].pointwise]
    groups = _around_anchors(working) if anchors else [[node] for node in working]
    if len(groups) == 1:  # one connected group of pointwise ops
        groups = [[node] for node in working]
    return tuple(_piece(spec, group) for group in groups)


def _around_anchors(nodes: Sequence[Node]) -> list[list[Node]]:
    """Each anchor alone, and pointwise ops grouped by how many anchors lie before them.

    A stage is the longest chain of anchors that ends at a node, so no group waits for a later one.
    """
    producer = {name: node for node in nodes for name in node.results}
    stage: dict[str, int] = {}
    groups: list[tuple[int, int, list[Node]]] = []
    home: dict[str, list[Node]] = {}
    for node in nodes:
        sources = [producer[name] for name in node.operands if name in producer]
        depth = max((stage[source.name] for source in sources), default=0)
        if not OPS[node.op].pointwise:
            stage[node.name] = depth + 1
            groups.append((depth + 1, 0, [node]))
            continue
        stage[node.name] = depth
        # Join the groups of pointwise operands of the same stage into one.
        mine = [node]
        for source in sources:
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
    return [group for _, _, group in sorted(groups, key=lambda entry: entry[:2])]


def _piece(spec: GraphSpec, nodes: Sequence[Node]) -> GraphSpec:
    """The step that ``nodes`` make up; constants are copied into every step that uses them."""
    mine = {node.name for node in nodes}
    constants = {node.results[0]: node for node in spec.nodes if node.op == "constant"}
    used = dict.fromkeys(name for node in nodes for name in node.operands if name in constants)
    elsewhere = {
        name for node in spec.nodes if node.name not in mine for name in node.operands
    } | set(spec.outputs)
    made = [name for node in nodes for name in node.results]
    outputs = [name for name in made if name in elsewhere]
    label = "_".join(dict.fromkeys(node.op for node in nodes))[:60]
    return spec.subgraph(label, [*(constants[name] for name in used), *nodes], outputs)
