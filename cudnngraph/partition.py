"""Ways to cut a graph into steps that pass real tensors to each other.

``split`` goes one level down: a graph with anchors (convolutions, attention) falls into each anchor
and the connected groups of pointwise ops between them; a group falls into single ops; attention
with a boolean mask falls into the conversion of the mask and attention with an additive one; any
other single op does not fall further. The caller tries the whole first and goes down where cuDNN
refuses.

What an anchor hands on is kept in the dtype of its data: 16-bit data in, 16 bits out, as torch's
own ops do it. It halves the traffic, and cuDNN has more engines for it. Between pointwise ops
values stay in the graph's intermediate dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from .ir import GraphSpec, Node, TensorSpec, contiguous_strides
from .ops import OPS

LOW_PRECISION = (torch.float16, torch.bfloat16)


def split(spec: GraphSpec) -> tuple[GraphSpec, ...] | None:
    """The next finer cut of ``spec``, in an order that can be run, or None for a single op."""
    working = [node for node in spec.nodes if node.op != "constant"]
    if len(working) <= 1:
        return _additive_mask(spec, working[0]) if working else None
    spec = _narrow(spec)
    anchors = [node for node in working if not OPS[node.op].pointwise]
    groups = _around_anchors(working) if anchors else [[node] for node in working]
    if len(groups) == 1:  # one connected group of pointwise ops
        groups = [[node] for node in working]
    return tuple(_piece(spec, group) for group in groups)


def _around_anchors(nodes: Sequence[Node]) -> list[list[Node]]:
    """Each anchor alone, and connected pointwise ops grouped by the stage at which they run."""
    producer = {name: node for node in nodes for name in node.results}
    stage = _stages(nodes)
    groups: list[tuple[int, int, list[Node]]] = []
    home: dict[str, list[Node]] = {}
    for node in nodes:
        sources = [producer[name] for name in node.operands if name in producer]
        depth = stage[node.name]
        if not OPS[node.op].pointwise:
            groups.append((depth, 0, [node]))
            continue
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


def _stages(nodes: Sequence[Node]) -> dict[str, int]:
    """When each node runs: an anchor as soon as it can, a pointwise op with the first user of it.

    An anchor's stage is the longest chain of anchors that ends at it; the pointwise ops of a stage
    follow its anchors. So no group waits for a later one, and what only an epilogue needs (a scaled
    residual) is part of the epilogue, not a step before the anchor.
    """
    producer = {name: node for node in nodes for name in node.results}
    users: dict[str, list[Node]] = {}
    stage: dict[str, int] = {}
    for node in nodes:
        sources = [producer[name] for name in node.operands if name in producer]
        for source in sources:
            users.setdefault(source.name, []).append(node)
        depth = max((stage[source.name] for source in sources), default=0)
        stage[node.name] = depth + (not OPS[node.op].pointwise)
    for node in reversed(nodes):
        if OPS[node.op].pointwise and node.name in users:
            stage[node.name] = min(
                stage[user.name] - (not OPS[user.op].pointwise) for user in users[node.name]
            )
    return stage


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


def _narrow(spec: GraphSpec) -> GraphSpec:
    """The graph with its anchors' results in the dtype of their data, where that is 16 bits."""
    narrow: dict[str, TensorSpec] = {}
    for node in spec.nodes:
        if OPS[node.op].pointwise:
            continue
        data = spec.tensors[node.operands[0]].dtype
        result = node.results[0]
        if data in LOW_PRECISION and result not in spec.outputs:
            narrow[result] = replace(spec.tensors[result], dtype=data)
    return replace(spec, tensors={**spec.tensors, **narrow}) if narrow else spec


def _additive_mask(spec: GraphSpec, node: Node) -> tuple[GraphSpec, ...] | None:
    """Attention with a boolean mask in two steps: 0 or -inf from the mask, then adding that."""
    if node.op != "sdpa" or node.inputs[3] is None:
        return None
    mask, data = spec.tensors[node.inputs[3]], spec.tensors[str(node.inputs[0])].dtype
    if mask.dtype != torch.bool or data not in LOW_PRECISION:
        return None
    label = f"{mask.name}_of_{node.results[0]}"  # another attention may share the mask
    added = TensorSpec(f"{label}_added", mask.shape, contiguous_strides(mask.shape), data)
    scalars = {
        name: TensorSpec(name, (), (), torch.float32) for name in (f"{label}_keep", f"{label}_drop")
    }
    keep, drop = scalars
    convert = GraphSpec(
        name="mask",
        tensors={mask.name: mask, added.name: added, **scalars},
        nodes=(
            Node("constant", keep, (), (keep,), (("value", 0.0),)),
            Node("constant", drop, (), (drop,), (("value", -math.inf),)),
            Node("where", "mask", (mask.name, keep, drop), (added.name,)),
        ),
        inputs=(mask.name,),
        outputs=(added.name,),
    )
    inputs = tuple(added.name if port == 3 else name for port, name in enumerate(node.inputs))
    attend = replace(
        spec,
        tensors={**spec.tensors, added.name: added},
        nodes=(replace(node, inputs=inputs),),
        inputs=tuple(name for name in dict.fromkeys(inputs) if name is not None),
    )
    return convert, attend
