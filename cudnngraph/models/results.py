"""Results of a model as outputs of its graph: which is one, which is known, which only repeats."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CannotImport
from ..graph.value import Value
from ..ir.spec import TensorSpec, contiguous_strides, is_dense, memory_order, overlaps_itself
from ..ops.base import FLOATS
from .aten_ops import hands_on, is_laid_out

if TYPE_CHECKING:
    from .convert import Importer

#: A result: the name of an output, or a kind and what belongs to it (:class:`Imported`).
Result = str | tuple[str, Any]


@dataclass(frozen=True)
class Places:
    """Where results of a graph stand: those ``saved``, which only a gradient reads, those of them
    that may lie as they are ``made``, and those ``returned`` to the user."""

    saved: Sequence[int] = ()
    made: Sequence[int] = ()
    returned: Sequence[int] = ()


NO_PLACES = Places()

_Named = dict[str, dict[tuple[int, ...] | None, str]]  # outputs by value and by strides
_aten: Any = torch.ops.aten


def results_in(graph: torch.fx.Graph) -> Sequence[Any]:
    """What a traced graph gives: nodes, numbers, None."""
    (given,) = graph.output_node().args
    return given if isinstance(given, (tuple, list)) else (given,)


def results_of(c: Importer, node: torch.fx.Node) -> list[Result]:
    """Declare the outputs of the graph for the ``output`` node of a traced one."""
    named: _Named = {}
    flat = results_in(node.graph)
    shown, shared = _views(c, flat), _returned(c, flat)
    return [
        _shown(c, each, shown[place], named)
        if place in shown
        else _shared(c, each, shared[place], named)
        if place in shared
        else _result(c, each, named, as_made=place in c.places.made)
        for place, each in enumerate(flat)
    ]


def _views(c: Importer, flat: Sequence[Any]) -> dict[int, torch.fx.Node]:
    """The places of results that may be views, as torch has them, and what each is a view of:
    those saved for a gradient, where together they are all of it."""
    found: dict[int, torch.fx.Node] = {}
    read: dict[torch.fx.Node, int] = {}
    for place in c.places.saved:
        node = flat[place]
        if not isinstance(node, torch.fx.Node) or not isinstance(c.env[node], Value):
            continue
        whole = _viewed(node)
        if whole is None or not isinstance(c.env[whole], Value):
            continue
        found[place] = whole
        read[whole] = read.get(whole, 0) + int(node.meta["val"].numel())
    return {place: each for place, each in found.items() if read[each] >= each.meta["val"].numel()}


def _returned(c: Importer, flat: Sequence[Any]) -> dict[int, torch.fx.Node]:
    """The places of returned results that show the memory of one another, and whose that is: what
    is written over one is written over the others."""
    sharing: dict[torch.fx.Node, list[int]] = {}
    for place in c.places.returned:
        node = flat[place]
        if isinstance(node, torch.fx.Node) and isinstance(c.env[node], Value):
            sharing.setdefault(_viewed(node) or node, []).append(place)
    found: dict[int, torch.fx.Node] = {}
    for whole, several in sharing.items():
        value, form = c.env[whole], whole.meta.get("val")
        if len(several) < 2 or not isinstance(value, Value) or not isinstance(form, torch.Tensor):
            continue
        if c.place_of(value) is not None or isinstance(c.kept(value), torch.Tensor):
            continue
        if form.numel() and is_dense(tuple(form.shape), tuple(form.stride())):
            found |= dict.fromkeys(several, whole)
    return found


def _viewed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor whose memory a node shows; None for one that is none of another."""
    whole = node
    while whole.op == "call_function" and whole.all_input_nodes:
        source = whole.all_input_nodes[0]
        maker: Any = source.target if whole.target is operator.getitem else whole.target
        if (
            not isinstance(maker, torch._ops.OpOverload)
            or all(made.alias_info is None for made in maker._schema.returns)
            or maker._schema.is_mutable
        ):
            break
        whole = source
    form, seen = whole.meta.get("val"), node.meta.get("val")
    if whole is node or not isinstance(form, torch.Tensor) or not isinstance(seen, torch.Tensor):
        return None
    dense = is_dense(tuple(form.shape), tuple(form.stride())) and form.numel() > 0
    alike = form.dtype == seen.dtype and _bits(form) == _bits(seen)
    return whole if dense and alike else None


def _bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether the numbers of a tensor are conjugates, or negatives, of what its memory holds."""
    return tensor.is_conj(), tensor.is_neg()


def _shown(c: Importer, node: torch.fx.Node, whole: torch.fx.Node, named: _Named) -> Result:
    """A result that is a view of an output, or of what the model was given."""
    form, seen, value = whole.meta["val"], node.meta["val"], c.env[whole]
    place = c.place_of(value) if hands_on(whole) else None
    root = place if place is not None else _output(c, value, tuple(form.stride()), named)
    past = seen.storage_offset() - form.storage_offset()
    return "view", (root, tuple(seen.shape), tuple(seen.stride()), past)


def _shared(c: Importer, node: torch.fx.Node, whole: torch.fx.Node, named: _Named) -> Result:
    """A result that shows the memory of an output, as others do, and is a view of none: torch
    refuses some writes over views."""
    return "shared", _shown(c, node, whole, named)[1]


def _result(c: Importer, each: Any, named: _Named, *, as_made: bool = False) -> Result:
    value = c.env[each] if isinstance(each, torch.fx.Node) else each
    counted = _counted(c, each)
    if counted is not None:
        return "count", counted
    own = isinstance(each, torch.fx.Node) and not hands_on(each)
    seen = each.meta.get("val") if isinstance(each, torch.fx.Node) else None
    if isinstance(value, Value):
        value = c.kept(value)
    if value is None and isinstance(seen, torch.Tensor):
        raise CannotImport(f"{c.name}: a result is wanted that the graph does not have")
    if not isinstance(value, Value):
        return "copy" if own and isinstance(value, torch.Tensor) else "value", value
    place = c.place_of(value)
    if place is not None and not own:
        return "input", place
    kept = c.keep_strides or place is not None or is_laid_out(each)
    if as_made and place is None and value.spec is not None and seen is not None:
        kept = not _better_laid(value.spec, tuple(seen.stride()))
    if len(value.shape) < 4 and seen is not None:  # within a graph they may lie by channels
        kept |= is_dense(value.shape, tuple(seen.stride()))
    stride = tuple(seen.stride()) if kept and seen is not None else None
    if stride is None or not overlaps_itself(value.shape, stride):
        return _output(c, value, stride, named)
    single = _single(c, value, stride)
    if single is None:
        return _output(c, value, contiguous_strides(value.shape), named)
    return "expand", (_output(c, *single, named), value.shape)


def _better_laid(made: TensorSpec, traced: tuple[int, ...]) -> bool:
    """Whether an image lies better as it is made: without gaps, or by channels where torch would
    have rows."""
    shape = made.shape
    if overlaps_itself(shape, traced) or not is_dense(shape, made.stride):
        return False
    lies = memory_order(shape, made.stride)
    return lies != tuple(range(len(shape))) or lies == memory_order(shape, traced)


def _output(c: Importer, value: Value, stride: tuple[int, ...] | None, named: _Named) -> str:
    """The name of the output that is a value in these strides."""
    copied = c.place_of(value) is not None
    known = {} if copied else named.setdefault(value.name, {})  # each copy is one
    floats = value.spec is not None and value.spec.dtype in FLOATS
    if stride in known or (known and (stride is None or not floats)):
        return known.get(stride) or next(iter(known.values()))
    if copied or known:
        value = c.g.identity(value) if floats else c.clone(value)
    return known.setdefault(stride, c.output(value, stride))


def _single(
    c: Importer, value: Value, stride: Sequence[int]
) -> tuple[Value, tuple[int, ...]] | None:
    """A value without what a stride of 0 repeats, and its strides; None if it overlaps still."""
    shape = tuple(1 if s == 0 else n for n, s in zip(value.shape, stride, strict=True))
    if shape == value.shape or overlaps_itself(shape, stride):
        return None
    if 0 in value.shape:
        return None
    source = c.expanded(value)
    if source is not None and math.prod(source.shape) == math.prod(shape):
        return c.g.reshape(source, shape), tuple(stride)
    for dim, (n, m) in enumerate(zip(value.shape, shape, strict=True)):
        value = value if n == m else c.g.slice(value, dim, 0, 1)
    return value, tuple(stride)


def _counted(c: Importer, node: Any) -> tuple[int, int] | None:
    """The place of an input of whole numbers and the number that is added to it, as batch norms
    count batches; None for another result."""
    if not isinstance(node, torch.fx.Node) or node.target is not _aten.add.Tensor:
        return None
    source, number = node.args[0], node.args[1]
    value = c.env[source] if isinstance(source, torch.fx.Node) else None
    if not isinstance(value, Value) or type(number) is not int or node.kwargs:
        return None
    place = c.place_of(value)
    if place is None or value.dtype != node.meta["val"].dtype or value.dtype in FLOATS:
        return None
    return place, number
