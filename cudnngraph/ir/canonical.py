"""The canonical form of a graph: names that depend on its structure alone.

Programs and records are made of it. The key numbers tensors alike, so graphs of one key share them.
"""

from __future__ import annotations

from dataclasses import replace

from .spec import GraphSpec


def canonical_tensor_names(spec: GraphSpec) -> dict[str, str]:
    """Tensor names of a graph → ``t0``, ``t1`` …, numbered as in the key."""
    return {name: f"t{number[1:]}" for name, number in spec.canonical_names().items()}


def canonical(spec: GraphSpec) -> GraphSpec:
    """The graph under canonical names, inputs in canonical order."""
    names = canonical_tensor_names(spec)
    renamed = spec.rename(names)
    return replace(
        renamed,
        name="_".join(dict.fromkeys(node.op for node in spec.nodes if node.op != "constant"))[:80],
        nodes=tuple(
            replace(node, name=f"{node.op}{position}")
            for position, node in enumerate(renamed.nodes)
        ),
        inputs=tuple(sorted(renamed.inputs, key=lambda name: int(name[1:]))),
    )
