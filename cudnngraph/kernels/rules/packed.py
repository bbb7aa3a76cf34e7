"""Where packed sequences start, in kernels."""

from __future__ import annotations

from functools import partial

from ...ir.spec import Node, TensorSpec
from ..tape import Join, Map, Value, mapped, reshape, sliced
from .pointwise import Operands

_int = partial(mapped, type="int")


def ragged_offsets(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Lengths of the sequences of q and of k, then where each starts for each width of a token."""
    rows, keys = operands
    assert rows is not None and keys is not None
    made = [_lengths(rows), _lengths(keys)]
    for starts, widths in ((rows, node.attr("widths_q")), (keys, node.attr("widths_kv"))):
        made += [_int(lambda each, by=width: f"({each} * {by})", starts) for width in widths]
    lines = tuple(reshape(each, (1, *each.shape)) for each in made)
    return (Join(result.shape, lines, 0, type="int"),)


def _lengths(starts: Value) -> Value:
    """How long each sequence is, and a zero behind them."""
    count = (starts.shape[0] - 1,)
    ends, begins = (sliced(starts, 0, first, count, 1) for first in (1, 0))
    lengths = _int(lambda end, begin: f"({end} - {begin})", ends, begins)
    zero = Map((1,), (), lambda args: "0", type="int")
    return Join(starts.shape, (lengths, zero), 0, type="int")
