"""Propagate the layout of rows: run row-by-row ops in memory order, and move views behind them.

If the input of a projection, norm or activation is transposed, or needs a copying reshape, compute
in memory order and apply the view to the result. Behind the op the view often meets its inverse,
and both vanish. Torch's attention is an example: its sequences are stored batch first, and its
projections want them sequence first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    contiguous_strides,
    dense_strides,
    free,
    is_dense,
    memory_order,
    numel,
    same_layout,
    taken_names,
    view_strides,
)
from ..ops.table import OPS
from ..ops.views import lies_there, order_of, shape_of, view_place

Extent = tuple[int, int]  # how many elements, and how far apart they lie
Dims = tuple[
    tuple[Extent, ...], ...
]  # each dim, as one step after the other; () for an extent of 1

MOST_DIMS = 4  # that a product takes


def propagate_row_layout(spec: GraphSpec) -> GraphSpec:
    """The graph with row by row ops on rows as they lie in memory, where fewer elements are copied
    or read against their order then; else the graph itself."""
    moved = copied_elements(spec)
    if not moved or any(tensor.numel == 0 for tensor in spec.tensors.values()):
        return spec
    made = _RowLayout(spec).run()
    return spec if made is None or copied_elements(made) >= moved else made


def copied_elements(spec: GraphSpec) -> int:
    """Count the elements that are copied for views, or read in another order than written."""
    tensors, count = spec.tensors, 0
    for node in spec.nodes:
        result = tensors[node.results[0]]
        if OPS[node.op].view:
            count += 0 if lies_there(tensors, node) else result.numel
        elif node.op == "matmul":
            x = tensors[node.operands[0]]
            rows = (numel(x.shape[:-1]), x.shape[-1])
            count += x.numel if view_strides(x.shape, x.stride, rows) is None else 0
        elif OPS[node.op].pointwise and node.op != "identity":
            for each in (tensors[name] for name in node.operands):
                alike = each.shape != result.shape or same_layout(
                    each.shape, each.stride, result.stride
                )
                count += 0 if alike else each.numel
    return count


@dataclass(frozen=True)
class _StridedRef:
    """A tensor as a part of the memory of ``root``, whether strides can express it or not."""

    root: str
    dims: Dims


def _dims_of(tensor: TensorSpec) -> Dims:
    shape = zip(tensor.shape, tensor.stride, strict=True)
    return tuple(((n, s),) if n > 1 else () for n, s in shape)


def _merged(atoms: Sequence[Extent]) -> tuple[Extent, ...]:
    """Atoms with those as one that follow each other in memory."""
    found: list[Extent] = []
    for n, s in atoms:
        if found and found[-1][1] == n * s:
            found[-1] = (found[-1][0] * n, s)
        else:
            found.append((n, s))
    return tuple(found)


def _regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The same elements in the same order as ``shape``; None where a size is no run of atoms."""
    left = list(_merged([atom for group in dims for atom in group]))
    groups: list[tuple[Extent, ...]] = []
    for size in reversed(shape):
        group: list[Extent] = []
        while size > 1:
            n, s = left.pop()
            taken = min(n, size)
            if n % taken or size % taken:
                return None
            if n > taken:
                left.append((n // taken, s * taken))
            group.insert(0, (taken, s))
            size //= taken
        groups.append(_merged(group))
    return tuple(reversed(groups))


def _chain(
    root: TensorSpec, dims: Dims, shape: Sequence[int], label: str, taken: set[str]
) -> list[Node] | None:
    """The views, at most three, that show ``dims`` of ``root`` as a tensor ``label`` of ``shape``:
    its dims split, in another order, and merged. None where a split is no whole one."""
    own = _dims_of(root)
    atoms = [atom for group in dims for atom in group]
    ends = {p for n, s in (*atoms, *(a for group in own for a in group)) for p in (s, s * n)}
    points = sorted(ends)
    if 0 in ends:
        return None

    def split(n: int, s: int) -> list[Extent]:
        within = [p for p in points if s <= p <= n * s]
        return [(b // a if b % a == 0 else 0, a) for a, b in pairwise(within)][::-1]

    parts = [part for group in own for n, s in group for part in split(n, s)]
    wanted = [part for n, s in atoms for part in split(n, s)]
    if sorted(parts) != sorted(wanted) or any(n == 0 for n, _ in parts):
        return None
    sizes = tuple(n for n, _ in parts)
    order = tuple(parts.index(part) for part in wanted)
    steps: list[tuple[str, tuple[int, ...]]] = []
    if sizes != root.shape:
        steps.append(("shape", sizes))
    if order != tuple(range(len(order))):
        steps.append(("dims", order))
    if tuple(n for n, _ in wanted) != tuple(shape) or not steps:
        steps.append(("shape", tuple(shape)))
    nodes: list[Node] = []
    name = root.name
    for number, (attr, value) in enumerate(steps):
        view = free(f"{label}_shown{number}", taken)
        to = label if number == len(steps) - 1 else view
        op = "reshape" if attr == "shape" else "permute"
        nodes.append(Node(op, view, (name,), (to,), ((attr, value),)))
        name = to
    return nodes


class _RowLayout:
    """A graph made again, node by node."""

    def __init__(self, spec: GraphSpec) -> None:
        self._spec = spec
        self._tensors = dict(spec.tensors)
        self._taken = taken_names(spec)
        self._nodes: list[Node] = []
        self._shown: dict[str, _StridedRef] = {}
        self._renamed: dict[str, str] = {}
        self._copied: set[str] = set()  # what is no view of its root's memory
        self._laid = {
            node.results[0]
            for node in spec.nodes
            if node.op == "reshape" and view_place(node, spec.tensors[node.operands[0]]) is None
        }

    def run(self) -> GraphSpec | None:
        """The graph; None where one of torch's own ops would get its operands in other strides."""
        for node in self._spec.nodes:
            inputs = tuple(n if n is None else self._renamed.get(n, n) for n in node.inputs)
            renamed = replace(node, inputs=inputs)
            if OPS[node.op].has("arranges"):
                self._view(renamed)
            elif not self._by_rows(renamed) and not self._by_heads(renamed):
                pairs = zip(node.operands, renamed.operands, strict=True)
                alike = all(
                    self._spec.tensors[a].stride == self._tensors[b].stride for a, b in pairs
                )
                if node.op == "aten" and not alike:
                    return None
                self._keep(renamed) if alike else self._lay(renamed)
        made = replace(self._spec, tensors=self._tensors, nodes=tuple(self._nodes))
        used = {*made.inputs, *(name for node in made.nodes for name in node.results)}
        return replace(made, tensors={n: form for n, form in self._tensors.items() if n in used})

    # -- views -------------------------------------------------------------------------------------

    def _source(self, name: str) -> _StridedRef:
        return self._shown.get(name) or _StridedRef(name, _dims_of(self._tensors[name]))

    def _view(self, node: Node) -> None:
        (source,), (name,) = node.operands, node.results
        known, result = self._source(source), self._tensors[name]
        order = order_of(node, len(self._tensors[source].shape))
        dims = (
            _regrouped(known.dims, result.shape)
            if order is None
            else tuple(known.dims[dim] for dim in order)
        )
        if dims is not None and name not in self._spec.outputs:
            root = self._tensors[known.root]
            alike = result.dtype == root.dtype or root.name in self._spec.inputs
            if alike and result.shape == root.shape and dims == _dims_of(root):
                self._renamed[name] = root.name
                return
            self._shown[name] = _StridedRef(root.name, dims)
            copied = source in self._copied or view_place(node, self._tensors[source]) is None
            strided = all(len(group) < 2 for group in dims)
            if copied and strided and self._show(root, dims, name):
                return
            if copied:
                self._copied.add(name)
        self._keep(node)

    def _show(self, root: TensorSpec, dims: Dims, name: str) -> bool:
        """Put the views that show ``root`` as the tensor ``name``; False where there are none."""
        result = self._tensors[name]
        chain = _chain(root, dims, result.shape, name, self._taken)
        if chain is None:
            return False
        for view in chain:
            shape, to = shape_of(view, self._tensors[view.operands[0]].shape), view.results[0]
            self._tensors.setdefault(
                to, TensorSpec(to, shape, contiguous_strides(shape), result.dtype)
            )
            self._keep(view)
        return True

    # -- ops ---------------------------------------------------------------------------------------

    def _by_rows(self, node: Node) -> bool:
        """Whether an op was put on the rows as they lie in memory."""
        plan = self._plan(node)
        if plan is None:
            return False
        mains, dims, memory = plan
        name, columns = node.results[0], dims[-1][0][0]
        result = self._tensors[name]
        shape = (*(n for n, _ in memory), columns)
        wanted = (*((atom,) for atom in memory), dims[-1])
        inputs = list(node.inputs)
        for place in mains:
            inputs[place] = self._read(node, place, shape, wanted)
            if inputs[place] is None:
                return False
        wide = result.shape[-1]
        shape = (*shape[:-1], wide)
        lead = (tuple((n, s // columns * wide) for n, s in group) for group in dims[:-1])
        label = free(f"{name}_rows", self._taken)
        made = TensorSpec(label, shape, contiguous_strides(shape), result.dtype)
        return self._put(node, inputs, made, (*lead, ((wide, 1),)))

    def _read(self, node: Node, place: int, shape: tuple[int, ...], dims: Dims) -> str | None:
        """A tensor that shows ``dims`` of the memory of a node's operand; None if there is none."""
        root = self._tensors[self._source(str(node.inputs[place])).root]
        if root.shape == shape and _dims_of(root) == dims:
            return root.name
        label = free(f"{node.results[0]}_read{place}", self._taken)
        self._tensors[label] = TensorSpec(label, shape, (), root.dtype)
        if self._show(root, dims, label):
            return label
        del self._tensors[label]
        return None

    def _put(self, node: Node, inputs: Sequence[str | None], made: TensorSpec, dims: Dims) -> bool:
        """Put an op that reads and makes others, and what shows ``dims`` of that as its result."""
        name = node.results[0]
        self._tensors[made.name] = made
        if not self._show(made, dims, name):
            return False
        outputs = (made.name, *node.outputs[1:])
        self._nodes.append(replace(node, inputs=tuple(inputs), outputs=outputs))
        self._shown[name] = _StridedRef(made.name, dims)
        if any(len(group) > 1 for group in dims):
            self._copied.add(name)
        return True

    def _plan(self, node: Node) -> tuple[list[int], Dims, list[Extent]] | None:
        """The operands with the rows of an op, their dims, and the rows as they lie in memory.

        None for an op that is best left where it is.
        """
        tensors, result = self._tensors, self._tensors[node.results[0]]
        if len(node.results) > 1 or not result.shape or result.shape[-1] == 1:
            return None
        if OPS[node.op].has("row_by_row"):
            mains = [
                place
                for place, name in enumerate(node.inputs)
                if name is not None and tensors[name].shape == result.shape
            ]
        elif OPS[node.op].has("row_norm") or (
            node.op == "matmul" and len(tensors[node.operands[1]].shape) == 2
        ):
            mains = [0]
        else:
            return None
        if not mains:
            return None
        columns = tensors[str(node.inputs[mains[0]])].shape[-1]
        others = [name for place, name in enumerate(node.inputs) if name and place not in mains]
        numbers = [name for name in others if tensors[name].numel == 1]
        vectors = [tensors[name].shape == (columns,) for name in others if name not in numbers]
        if not all(vectors) and node.op != "matmul":
            return None
        shown = {self._source(str(node.inputs[place])).dims for place in mains}
        dims = shown.pop()
        if shown or dims[-1] != ((columns, 1),):
            return None
        rows = _merged([atom for group in dims[:-1] for atom in group])
        memory = sorted(rows, key=lambda atom: -atom[1])
        if any(len(tensors[str(name)].shape) > len(memory) + 1 for name in numbers):
            return None
        step = columns
        for n, s in reversed(memory):
            if s != step:
                return None
            step *= n
        if list(rows) == memory or len(memory) >= MOST_DIMS:
            return None
        return mains, dims, memory

    def _by_heads(self, node: Node) -> bool:
        """Whether attention whose heads are counted with its batch was given both apart, which
        strides can say of the heads of a projection."""
        if node.op != "sdpa" or len(node.results) > 1 or node.attr("alibi"):
            return False
        mask, *others = node.inputs[3:]
        if any(others) or (mask is not None and numel(self._tensors[mask].shape[:-2]) > 1):
            return False
        shown = [self._source(str(name)).dims for name in node.inputs[:3]]
        parts = {tuple(n for n, _ in dims[0]) for dims in shown if len(dims[0]) > 1}
        if len(parts) != 1 or any(dims[1] for dims in shown):
            return False
        (sizes,) = parts
        inputs = list(node.inputs)
        for place, dims in enumerate(shown):
            shape = (*sizes, *self._tensors[str(node.inputs[place])].shape[2:])
            apart = _regrouped(dims, shape)
            if len(sizes) != 2 or apart is None or any(len(group) > 1 for group in apart):
                return False
            inputs[place] = self._read(node, place, shape, apart)
            if inputs[place] is None:
                return False
        result, q = self._tensors[node.results[0]], self._tensors[str(inputs[0])]
        shape = (*sizes, *result.shape[2:])
        stride = dense_strides(shape, memory_order(q.shape, q.stride))
        label = free(f"{result.name}_heads", self._taken)
        made = TensorSpec(label, shape, stride, result.dtype)
        batch, head, *rest = _dims_of(made)
        return self._put(node, inputs, made, (_merged((*batch, *head)), (), *rest))

    def _keep(self, node: Node) -> None:
        """Put an op as it is; a view where its operand lies."""
        self._nodes.append(node)
        name = node.results[0]
        if OPS[node.op].view and name not in self._spec.outputs:
            form = self._tensors[name]
            place = view_place(node, self._tensors[node.operands[0]])
            if place is not None:
                stride = place[0]
            else:  # what a reshape copied before lies as it was told to
                given = name in self._laid and is_dense(form.shape, form.stride)
                stride = form.stride if given else contiguous_strides(form.shape)
            self._tensors[name] = replace(form, stride=stride)

    def _lay(self, node: Node) -> None:
        """Put an op whose operands lie in another way now, its result where they lead it."""
        self._keep(node)
        result = self._tensors[node.results[0]]
        forms = [self._tensors[name] for name in node.operands]
        if OPS[node.op].pointwise and node.op != "identity":
            forms = [form for form in forms if form.shape == result.shape]
        elif OPS[node.op].has("row_norm") or node.op == "sdpa":
            forms = forms[:1]
        else:
            return
        if result.name in self._spec.outputs or not forms or any(0 in f.stride for f in forms):
            return
        orders = {memory_order(form.shape, form.stride) for form in forms}
        order = orders.pop() if len(orders) == 1 else range(len(result.shape))
        stride = dense_strides(result.shape, order)
        self._tensors[result.name] = replace(result, stride=stride)
