"""Choose what the forward saves for its backward: a minimum cut of the fewest bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..ir.spec import GraphSpec
from ..ops.table import OPS


def min_cut_saved(
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
        """Map each place to the one before it, on the shortest paths with room from start."""
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
