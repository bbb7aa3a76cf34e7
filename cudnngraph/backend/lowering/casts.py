"""Casts within a plan: cuDNN computes in float32 and converts what it reads and writes, so a cast
of a value that stays in the plan says nothing, and one at its end is a dtype of its result."""

from __future__ import annotations

from dataclasses import replace

from ...ir.spec import GraphSpec, same_layout


def without_casts(spec: GraphSpec) -> GraphSpec:
    """The graph as cuDNN computes it, with the same inputs and outputs."""
    found = spec
    for node in spec.nodes:
        if node.op != "cast":
            continue
        nodes = [each for each in found.nodes if each.name != node.name]
        (source,) = next(each.operands for each in found.nodes if each.name == node.name)
        (result,) = node.results
        old, new = found.tensors[source], found.tensors[result]
        if not nodes or not same_layout(old.shape, old.stride, new.stride):
            continue
        if result not in found.outputs:
            gone, kept = result, source
        elif source in (*found.inputs, *found.outputs) or any(
            source in each.operands for each in nodes
        ):
            continue
        else:
            gone, kept = source, result
        found = replace(
            found,
            nodes=tuple(
                replace(
                    each,
                    inputs=tuple(kept if name == gone else name for name in each.inputs),
                    outputs=tuple(kept if name == gone else name for name in each.outputs),
                )
                for each in nodes
            ),
            tensors={name: each for name, each in found.tensors.items() if name != gone},
        )
    return found
