"""Whether what stands behind a product of matrices is part of its plan, or a kernel behind it.

A plan with an epilogue is compiled at run time, and its product is slower than one by cuBLASLt,
most of all where it reads another tensor as large as its result. A kernel behind the product moves
more bytes, unless it goes on to a norm that would read them anyway. Which of both takes less is
estimated; :class:`~cudnngraph.device.rules.DeviceRules` has the numbers. Rows that begin at odd
places leave cuBLASLt without its fast kernels, so that nothing is lost there. Behind convolutions
cuDNN's plans are as fast as the convolution and a kernel, but for a few. A sigmoid is slow in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.plan import Choice
from ..device.rules import rules
from ..executor.linear import runs_whole
from ..ir.spec import Node, TensorSpec, numel
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS
from ..partition.analysis import CutGraph, Group
from ..partition.cuts import subgraph_of
from .kernels import Kernels
from .settled import APART, TORCH, NoPlan

MOST_VIEWS = 4  # between a kernel and what reads it


@dataclass(frozen=True)
class Apart:
    """The steps of a product and its epilogue: what runs before, the product with what it takes
    along, by torch or not, and a kernel of the rest; and why."""

    before: Group
    front: Group
    rest: Group
    by_torch: bool
    reason: str


def apart(graph: CutGraph, nodes: Group, kernels: Kernels, *, torch_too: bool) -> Apart | None:
    """How a product is to be parted from its epilogue, or None if one plan is expected to be
    faster. With ``torch_too`` it may be a call of torch's, which has some epilogues. ``kernels`` is
    a GPU's on which some can be generated."""
    product = _product(graph, nodes)
    if product is None:
        return _of_convolution(graph, nodes, kernels)
    casts = _casts(graph, nodes)
    if casts:
        reason = "a bias is cast with the weights, since a product that casts one is slower"
        return _cast_before(nodes, casts, reason)
    lost_us = _lost_us(graph, nodes, product)
    lost = f"a plan compiled at run time would lose about {lost_us:.1f} us on the product"
    if lost_us <= 0.0:
        return None
    if torch_too and runs_whole(subgraph_of(graph, nodes)):
        return Apart((), nodes, (), True, f"{lost}; torch has it as one call")
    behind = tuple(node for node in nodes if node is not product)
    if not isinstance(kernels.choice(graph, behind), Choice):
        return None
    more_us = _us(*_more_bytes(graph, nodes, product, behind, kernels))
    if more_us >= lost_us:
        return None
    reason = f"{lost}; a kernel behind it takes about {max(more_us, 0.0):.1f} us more"
    return Apart((), (product,), behind, False, reason)


def as_settled(
    graph: CutGraph, nodes: Group, kernels: Kernels, way: NoPlan, reason: str, *, torch_too: bool
) -> Apart | None:
    """How nodes are parted where that is settled by measurement. What cannot be so here follows
    :func:`apart`."""
    if way == TORCH and torch_too:
        return Apart((), nodes, (), True, reason)
    front = tuple(node for node in nodes if graph.is_anchor(node))
    behind = tuple(node for node in nodes if node not in front)
    if way == APART and isinstance(kernels.choice(graph, behind), Choice):
        return Apart((), front, behind, False, reason)
    return apart(graph, nodes, kernels, torch_too=torch_too)


def _of_convolution(graph: CutGraph, nodes: Group, kernels: Kernels) -> Apart | None:
    """How a convolution of 16-bit data is to be parted from its epilogue, None if it is not.

    No precompiled engine casts a bias. An epilogue is apart if a kernel of that and of what reads
    it moves fewer bytes.
    """
    anchors = [node for node in nodes if graph.is_anchor(node)]
    if len(anchors) != 1 or len(nodes) < 2 or not OPS[anchors[0].op].has("convolution"):
        return None
    (anchor,) = anchors
    data = graph.crossing(anchor.operands[0]).dtype
    if data not in LOW_PRECISION:
        return None
    casts = _casts(graph, nodes, alone=True)
    if casts:
        reason = "a bias is cast before: cuDNN has no precompiled convolution that casts one"
        return _cast_before(nodes, casts, reason)
    if graph.crossing(anchor.results[0]).dtype != data:
        return None
    if {name for node in nodes for name in node.results} & set(anchor.operands):
        return None
    behind = tuple(node for node in nodes if node is not anchor)
    if not isinstance(kernels.choice(graph, behind), Choice):
        return None
    more, joins = _more_bytes(graph, nodes, anchor, behind, kernels)
    reason = f"a kernel of its epilogue and of what reads that moves {-more} bytes less"
    if more >= 0:
        lost_us = _sigmoid_us(graph, anchor, behind)
        more_us = _us(more, joins)
        if more_us >= lost_us:
            return None
        reason = (
            f"a sigmoid would cost its plan about {lost_us:.1f} us, a kernel {more_us:.1f} more"
        )
    return Apart((), (anchor,), behind, False, reason)


def _sigmoid_us(graph: CutGraph, anchor: Node, behind: Group) -> float:
    """What a sigmoid behind a product or a convolution costs within its plan; 0.0 without one."""
    if not any(node.op == "sigmoid" for node in behind):
        return 0.0
    tensors, measured = graph.spec.tensors, rules()
    elements = tensors[anchor.results[0]].numel
    found = 1e-6 * elements * measured.sigmoid_us_per_million
    if anchor.op != "matmul":
        depth = numel(tensors[anchor.operands[1]].shape[1:])
        found += measured.sigmoid_short_us if depth <= measured.sigmoid_short_depth else 0.0
    return found


def _product(graph: CutGraph, nodes: Group) -> Node | None:
    """The one product of 16-bit data, with pointwise ops around it."""
    anchors = [node for node in nodes if graph.is_anchor(node)]
    if len(anchors) != 1 or len(nodes) < 2 or anchors[0].op != "matmul":
        return None
    (product,) = anchors
    (made,) = product.results
    data = graph.crossing(product.operands[0]).dtype
    if data not in LOW_PRECISION or graph.crossing(made).dtype != data:
        return None  # it would have to hand on float32, which few engines write
    inside = {name for node in nodes for name in node.results}
    return None if inside & set(product.operands) else product


def behind_product(graph: CutGraph, nodes: Group) -> tuple[Group, Group] | None:
    """The product of 16-bit data among the nodes, and the pointwise ops around it."""
    product = _product(graph, nodes)
    if product is None:
        return None
    return (product,), tuple(node for node in nodes if node is not product)


def _casts(graph: CutGraph, nodes: Group, *, alone: bool = False) -> Group:
    """The casts of vectors that may be one launch with other casts of the graph's inputs; with
    ``alone`` also where there are no others."""

    def is_first(node: Node) -> bool:
        return node.op == "cast" and node.operands[0] in graph.spec.inputs

    tensors = graph.spec.tensors
    found = tuple(n for n in nodes if is_first(n) and len(tensors[n.results[0]].shape) == 1)
    others = any(is_first(node) and node not in nodes for node in graph.spec.nodes)
    return found if others or alone else ()


def _cast_before(nodes: Group, casts: Group, reason: str) -> Apart:
    return Apart(casts, tuple(node for node in nodes if node not in casts), (), False, reason)


def _lost_us(graph: CutGraph, nodes: Group, product: Node) -> float:
    """What a plan of all the nodes loses on the product, beside cuBLASLt's."""
    spec, measured = graph.spec, rules()
    read_or_made = (spec.tensors[name] for name in (*product.operands, *product.results))
    if not all(map(_has_aligned_rows, read_or_made)):
        return 0.0
    size = spec.tensors[product.results[0]].numel
    gflop = 2e-9 * spec.tensors[product.operands[0]].shape[-1] * size
    inside = {name for node in nodes for name in node.results}
    behind = tuple(node for node in nodes if node is not product)
    read = {name for node in behind for name in node.operands} - inside
    slow_us = _sigmoid_us(graph, product, behind)
    if any(spec.tensors[name].numel >= size for name in read):
        return gflop * measured.product_residual_us_per_gflop + slow_us
    return gflop * measured.product_epilogue_us_per_gflop - measured.product_start_us + slow_us


def _has_aligned_rows(tensor: TensorSpec) -> bool:
    return all(
        stride * tensor.dtype.itemsize % rules().product_row_bytes == 0
        for size, stride in zip(tensor.shape, tensor.stride, strict=True)
        if size > 1 and stride != 1
    )


def _us(more: int, joins: bool) -> float:
    """What a kernel behind an anchor takes that moves so many bytes more, or goes on to an op."""
    measured = rules()
    launch_us = 0.0 if joins else measured.kernel_launch_us
    return more / measured.kernel_bytes_per_us + launch_us


def _more_bytes(
    graph: CutGraph, nodes: Group, anchor: Node, behind: Group, kernels: Kernels
) -> tuple[int, bool]:
    """How many bytes more are moved with a kernel behind an anchor, and whether that goes on to an
    op that reads what it makes."""
    whole, alone, rest = (_moved(graph, part) for part in (nodes, (anchor,), behind))
    readers = _readers(graph, nodes)
    saved = max((_saved(graph, behind, each, kernels) for each in readers), default=0)
    return alone + rest - whole - saved, saved > 0


def _moved(graph: CutGraph, nodes: Group) -> int:
    """Bytes of what a step reads and writes, each tensor once."""
    spec = subgraph_of(graph, nodes)
    tensors = [spec.tensors[name] for name in (*spec.inputs, *spec.outputs)]
    return sum(each.numel * each.dtype.itemsize for each in tensors)


def _readers(graph: CutGraph, nodes: Group) -> list[Group]:
    """Ops elsewhere that read what these make, each with the views by which it does."""
    mine = {node.name for node in nodes}
    found: dict[str, Group] = {}
    stack: list[tuple[str, Group]] = [(name, ()) for node in nodes for name in node.results]
    while stack:
        name, views = stack.pop()
        for user in graph.readers.get(name, ()):
            if user.name in mine or user.name in found:
                continue
            if not OPS[user.op].view:
                found[user.name] = (*views, user)
            elif len(views) < MOST_VIEWS:
                stack += [(made, (*views, user)) for made in user.results]
    return list(found.values())


def _saved(graph: CutGraph, behind: Group, reader: Group, kernels: Kernels) -> int:
    """Bytes that a kernel of both does not move which two kernels would; 0 if there is none."""
    place, last = graph.place, reader[-1:]
    both = tuple(sorted((*behind, *reader), key=lambda node: place[node.name]))
    if not all(isinstance(kernels.choice(graph, part), Choice) for part in (last, both)):
        return 0
    return max(0, _moved(graph, behind) + _moved(graph, last) - _moved(graph, both))
