"""Lay results of pointwise ops and norms as the matmuls and norms behind them read them.

A result lies as its first operand does. So what is computed of a transposed image is transposed
too, and so is every sum behind it: a residual stream to the last layer. Its first op can read
against the order of memory once, in the place of every op that reads rows. In the same way what is
cast for a matmul of torch's is written batch by batch, as torch would copy it.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    dense_strides,
    is_dense,
    memory_order,
    numel,
    view_strides,
)
from ..ops.table import OPS
from ..ops.views import order_of
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
        free = makes and node.op != "identity" and name in read and name not in told
        if free and is_dense(form.shape, form.stride) and not _lies_in_rows(form):
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
    """The graph with casts to float32 batch by batch, where a matmul reads them whose batch dims
    are not one in memory: cuDNN has no such plan without TF32, and torch copies its operands."""
    made = {node.results[0]: node for node in spec.nodes}
    told = _told(spec)
    laid: dict[str, TensorSpec] = {}
    for node in spec.nodes:
        for name in node.operands if node.op == "matmul" else ():
            read = spec.tensors[name]
            if _one_batch(read):
                continue
            rank = len(read.shape)
            rows = [d for d in memory_order(read.shape, read.stride) if d >= rank - 2]
            order = [*range(rank - 2), *rows]
            while name in made and (dims := order_of(made[name], rank)) is not None:
                order = [dims[dim] for dim in order]
                name = made[name].operands[0]
            form = spec.tensors[name]
            widens = name in made and made[name].op == "cast" and name not in told
            widens = widens and made[name].attr("dtype") == "float32"
            if widens and is_dense(form.shape, form.stride):
                laid[name] = replace(form, stride=dense_strides(form.shape, order))
    return alias_views(replace(spec, tensors={**spec.tensors, **laid})) if laid else spec


def _one_batch(tensor: TensorSpec) -> bool:
    """Whether the dims before the last two are one in memory."""
    batch = len(tensor.shape) - 2
    one = (numel(tensor.shape[:batch]),)
    return view_strides(tensor.shape[:batch], tensor.stride[:batch], one) is not None
