"""Lower bounds of what a step takes, by the bytes that it moves and its multiplications.

The rates are measured at the start of a search, as steps of torch: copies of several sizes, and a
product of matrices in each dtype that the graph multiplies. They are remembered like other steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..backend.candidates import Candidate
from ..graph.builder import Graph
from ..ir.canonical import canonical
from ..ir.spec import GraphSpec, Node
from ..ops.table import OPS
from ..ops.work import bytes_of_tensor, flops_of_node
from ..partition.analysis import compute_nodes
from .bench import Bench
from .config import FASTEST_RATE, PRUNED_OVER, QUICK_ROUNDS

COPIED = (1 << 20, 1 << 22, 1 << 25)  # elements of 16 bits, in caches of any size and in memory
SIDE = 4096  # of the matrices that are multiplied
MULTIPLIED = (torch.float16, torch.bfloat16, torch.float32)

Floor = Callable[[GraphSpec], float]


def is_slow(candidate: Candidate) -> bool:
    """Whether a plan's tile is predicted to be so slow that it need not be built."""
    return candidate.slower > PRUNED_OVER


def no_floor(_: GraphSpec) -> float:
    """The bound where nothing is known of the GPU."""
    return 0.0


@dataclass(frozen=True)
class Rates:
    """What a GPU does at best: the time of the smallest kernel, bytes and operations in a µs."""

    kernel_us: float
    bytes_per_us: float
    flops_per_us: Mapping[torch.dtype, float]

    def floor_us(self, spec: GraphSpec) -> float:
        """A time that no way to run a step takes less than; 0.0 if nothing may have to run."""
        moved = least_bytes(spec)
        found = moved / self.bytes_per_us
        for dtype, flops in least_flops(spec).items():
            found = max(found, flops / self.flops_per_us.get(dtype, math.inf))
        return max(found, self.kernel_us) if found else 0.0


def measured(bench: Bench, spec: GraphSpec) -> Rates:
    """The rates of the GPU of a bench, of the dtypes that a graph multiplies."""

    def time_us(probe: GraphSpec) -> float:
        (found,) = bench.times_us(probe, [None], QUICK_ROUNDS)
        return math.inf if isinstance(found, str) else found

    kernel_us = time_us(_copy(8))
    moved = math.inf
    if math.isfinite(kernel_us):
        took = [(4 * count, time_us(_copy(count)) - kernel_us) for count in COPIED]
        moved = max(size / max(us, kernel_us / 4) for size, us in took)
    flops = {
        dtype: 2 * SIDE**3 / us
        for dtype in least_flops(spec)
        if math.isfinite(us := time_us(_product(dtype)))
    }
    return Rates(
        kernel_us / FASTEST_RATE if math.isfinite(kernel_us) else 0.0,
        moved * FASTEST_RATE if moved else math.inf,
        {dtype: rate * FASTEST_RATE for dtype, rate in flops.items()},
    )


def _copy(count: int) -> GraphSpec:
    g = Graph("copy")
    g.output("y", g.identity(g.input("x", (count,), torch.float16)))
    return canonical(g.spec())


def _product(dtype: torch.dtype) -> GraphSpec:
    g = Graph("product")
    a, b = (g.input(name, (SIDE, SIDE), dtype) for name in "ab")
    g.output("y", g.matmul(a, b))
    return canonical(g.spec())


def least_bytes(spec: GraphSpec) -> int:
    """Bytes that a step moves however it runs.

    They are its results, but for views and parts of a concatenation, and the operands that are
    known to be read whole.
    """
    made = {name: node for node in spec.nodes for name in node.results}
    alone = len(compute_nodes(spec.nodes)) == 1
    names = [
        name
        for name in spec.outputs
        if name in made and _is_written(made[name]) and (alone or made[name].op != "identity")
    ]
    read = {name for node in spec.nodes for name in _read_whole(spec, node)}
    names += [name for name in spec.inputs if name in read]
    return sum(bytes_of_tensor(spec.tensors[name]) for name in names)


def least_flops(spec: GraphSpec) -> dict[torch.dtype, int]:
    """Multiplications and additions that products take however they are computed, by dtype.

    Fast algorithms for convolutions save all but one multiplication of a window.
    """
    found: dict[torch.dtype, int] = {}
    for node in spec.nodes:
        row = OPS[node.op]
        dtype = spec.tensors[node.operands[0]].dtype if node.operands else None
        if dtype not in MULTIPLIED or not row.has("multiplies") or row.has("attention"):
            continue
        window = 1
        if row.has("convolution") or row.has("convolution_gradient"):
            weight = node.results[0] if row.has("convolution_gradient") else node.operands[1]
            window = math.prod(spec.tensors[weight].shape[2:])
        found[dtype] = found.get(dtype, 0) + flops_of_node(spec, node) // max(1, window)
    return {dtype: count for dtype, count in found.items() if count}


def _is_written(node: Node) -> bool:
    """Whether the results of a node are sure to be written by whoever runs it."""
    row = OPS[node.op]
    return not (row.view or row.has("packed") or row.has("paged") or node.op in ("concat", "aten"))


def _read_whole(spec: GraphSpec, node: Node) -> tuple[str, ...]:
    """The operands of a node that every way to run it reads from end to end."""
    row = OPS[node.op]
    if node.op == "matmul" or row.has("row_norm"):
        return node.operands
    if row.pointwise and node.op != "where":
        return node.operands
    if row.has("convolution") and not row.has("convolution_gradient"):
        return node.operands if _reaches_all(spec, node) else node.operands[1:2]
    return ()


def _reaches_all(spec: GraphSpec, node: Node) -> bool:
    """Whether the windows of a convolution have no gaps between them, and reach every end."""
    if node.op != "conv":
        return False
    x, weight = (spec.tensors[name].shape[2:] for name in node.operands[:2])
    made = spec.tensors[node.results[0]].shape[2:]
    per_dim = (node.attr(name) for name in ("stride", "dilation", "padding"))
    return all(
        d == 1 and k >= s and (count - 1) * s + k - before >= size
        for size, k, count, s, d, (before, _) in zip(x, weight, made, *per_dim, strict=True)
    )
