"""Lay results of pointwise ops and norms as the matmuls and norms behind them read them.

A result lies as its first operand does. So what is computed of a transposed image is transposed
too, and so is every sum behind it: a residual stream to the last layer. Its first op can read
against the order of memory once, in the place of every op that reads rows. In the same way what
batches of matmuls read is written batch by batch, as torch would copy it.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    dense_strides,
    free,
    is_dense,
    memory_order,
    numel,
    taken_names,
    view_strides,
)
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS
from ..ops.views import order_of
from ..partition.analysis import CutGraph
from .row_layout import copied_elements
from .views import alias_views


def lay_rows(spec: GraphSpec) -> GraphSpec:
    """The graph with results in rows that are read by rows, where no more elements are read against
    their order then; else the graph itself. A pointwise op does that by tiles, a matmul slowly."""
    turned = _turned(spec)
    if not turned:
        return spec
    laid = {name: _in_rows(spec.tensors[name]) for name in turned}
    made = alias_views(replace(spec, tensors={**spec.tensors, **laid}))
    return made if _against_order(made) <= _against_order(spec) else spec


def _turned(spec: GraphSpec) -> set[str]:
    """The results that are read by rows, and lie otherwise though nothing tells them to."""
    read: set[str] = set()  # by rows, by an op itself or by those that read its result
    told = _told(spec)
    found: set[str] = set()
    for node in reversed(spec.nodes):
        name = node.results[0]
        read |= {each for each in _rows_of(spec, node) if each is not None}
        if OPS[node.op].pointwise and name in read:
            shape = spec.tensors[name].shape
            read |= {each for each in node.operands if spec.tensors[each].shape == shape}
        form = spec.tensors[name]
        makes = OPS[node.op].pointwise or OPS[node.op].has("row_norm")
        loose = makes and node.op != "identity" and name in read and name not in told
        if loose and is_dense(form.shape, form.stride) and not _lies_in_rows(form):
            found.add(name)
    return found


def _told(spec: GraphSpec) -> set[str]:
    """The values whose strides are told by what is outside, or by one of torch's own ops."""
    told = set(spec.outputs)
    for node in reversed(spec.nodes):
        if node.op == "aten" or (OPS[node.op].view and node.results[0] in told):
            told |= set(node.operands)
    return told


def _lies_in_rows(tensor: TensorSpec) -> bool:
    return tensor.shape[-1] == 1 or tensor.stride[-1] == 1


def _in_rows(tensor: TensorSpec) -> TensorSpec:
    """A tensor with its last dim the fastest, the others in their order."""
    last = len(tensor.shape) - 1
    order = [dim for dim in memory_order(tensor.shape, tensor.stride) if dim != last]
    return replace(tensor, stride=dense_strides(tensor.shape, (*order, last)))


def _rows_of(spec: GraphSpec, node: Node) -> tuple[str, ...]:
    """The operands whose rows an op reads one by one."""
    if OPS[node.op].has("row_norm"):
        return node.operands[:1]
    if node.op == "matmul" and len(spec.tensors[node.operands[1]].shape) == 2:
        return node.operands[:1]
    return ()


def _against_order(spec: GraphSpec) -> int:
    """Count the elements that are copied for views, or read in another order than they lie in."""
    count = copied_elements(spec)
    for node in spec.nodes:
        for form in (spec.tensors[name] for name in _rows_of(spec, node)):
            count += 0 if _lies_in_rows(form) else form.numel
    return count


def lay_batches(spec: GraphSpec) -> GraphSpec:
    """The graph in which matmuls read batch by batch what else torch would copy for them.

    cuDNN has no plan for batch dims that are not one in memory; without TF32 it has none for
    float32 either way. What is cast to float32 for a matmul is written so. Of 16-bit data, so is
    what pointwise ops and norms make for matmuls alone, and the rest is copied.
    """
    graph = CutGraph(spec)
    told, taken = _told(spec), taken_names(spec)
    laid: dict[str, TensorSpec] = {}
    copies: dict[str, TensorSpec] = {}
    for node in spec.nodes:
        matrices = any(len(spec.tensors[name].shape) < 3 for name in node.operands)
        for name in node.operands if node.op == "matmul" and not matrices else ():
            read = spec.tensors[name]
            if _one_batch(read):
                continue
            source, order = _behind_permutes(graph, name)
            form, by = spec.tensors[source], graph.producer.get(source)
            movable = by is not None and source not in told and is_dense(form.shape, form.stride)
            narrow = graph.crossing(name).dtype in LOW_PRECISION
            if narrow and not _one_batch(spec.tensors[node.results[0]]):
                continue  # torch copies in any case
            if movable and by is not None and _is_made_for_matmuls(graph, by, narrow=narrow):
                laid[source] = replace(form, stride=dense_strides(form.shape, order))
            elif narrow:
                stride = dense_strides(read.shape, _by_batches(read))
                label = free(f"{name}_batches", taken)
                copies[name] = replace(read, name=label, stride=stride)
    if not laid and not copies:
        return spec
    tensors = {**spec.tensors, **laid, **{each.name: each for each in copies.values()}}
    nodes: list[Node] = []
    pending = dict(copies)
    for node in spec.nodes:
        if node.op == "matmul":
            for name in node.operands:
                if name in pending:
                    made = pending.pop(name).name
                    nodes.append(Node("identity", made, (name,), (made,)))
            names = (copies[x].name if x in copies else x for x in node.operands)
            node = replace(node, inputs=tuple(names))
        nodes.append(node)
    return alias_views(replace(spec, tensors=tensors, nodes=tuple(nodes)))


def _by_batches(tensor: TensorSpec) -> tuple[int, ...]:
    """The dims of matrices from slowest to fastest, if they lay batch by batch."""
    rank = len(tensor.shape)
    rows = [dim for dim in memory_order(tensor.shape, tensor.stride) if dim >= rank - 2]
    return (*range(rank - 2), *rows)


def _behind_permutes(graph: CutGraph, name: str) -> tuple[str, tuple[int, ...]]:
    """What a tensor is a permutation of, and the order in memory that has it batch by batch."""
    order = _by_batches(graph.spec.tensors[name])
    while (by := graph.producer.get(name)) is not None:
        dims = order_of(by, len(order))
        if dims is None:
            break
        order = tuple(dims[dim] for dim in order)
        name = by.operands[0]
    return name, order


def _is_made_for_matmuls(graph: CutGraph, by: Node, *, narrow: bool) -> bool:
    """Whether a node may write its result batch by batch.

    Of 16-bit data what matmuls alone read; else what is cast to float32.
    """
    if not narrow:
        return by.op == "cast" and by.attr("dtype") == "float32"
    row = OPS[by.op]
    makes = (row.pointwise and by.op != "identity") or row.has("row_norm")
    return makes and len(by.results) == 1 and _feeds_matmuls_alone(graph, by.results[0])


def _feeds_matmuls_alone(graph: CutGraph, name: str) -> bool:
    rank = len(graph.spec.tensors[name].shape)
    return all(
        node.op == "matmul"
        or (order_of(node, rank) is not None and _feeds_matmuls_alone(graph, node.results[0]))
        for node in graph.readers.get(name, ())
    )


def _one_batch(tensor: TensorSpec) -> bool:
    """Whether the dims before the last two are one in memory."""
    batch = len(tensor.shape) - 2
    one = (numel(tensor.shape[:batch]),)
    return view_strides(tensor.shape[:batch], tensor.stride[:batch], one) is not None
