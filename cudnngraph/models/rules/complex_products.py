"""Products of complex numbers that are read as pairs of real ones, as rotary embeddings are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ops import meta as forms
from .base import Arguments, Rule, Skip
from .shape import last_pair

if TYPE_CHECKING:
    from ..convert import Importer

_aten: Any = torch.ops.aten
Pair = tuple[Value, Value]


def _view_as_real(c: Importer, a: Arguments) -> Value:
    """``view_as_real(view_as_complex(x) * y)`` by real products, for real x (..., 2) and complex y.

    Raises :class:`Skip` for another complex tensor, which torch has.
    """
    product: Any = c.node.args[0]
    if not isinstance(product, torch.fx.Node) or product.target is not _aten.mul.Tensor:
        raise Skip
    pairs = [_of_pairs(each) for each in product.args]
    if not any(pairs) or len(product.users) > 1:
        raise Skip
    (x, x_im), (y, y_im) = (_parts(c, each) for each in product.args)
    real = c.g.sub(c.g.mul(x, y), c.g.mul(x_im, y_im))
    imaginary = c.g.add(c.g.mul(x, y_im), c.g.mul(x_im, y))
    apart = [c.g.reshape(each, (*each.shape, 1)) for each in (real, imaginary)]
    return c.g.concat(apart, len(real.shape))


def _of_pairs(node: Any) -> torch.fx.Node | None:
    """The real tensor that a complex one is a view of; None if it is none."""
    if not isinstance(node, torch.fx.Node) or node.target is not _aten.view_as_complex.default:
        return None
    return node.args[0] if isinstance(node.args[0], torch.fx.Node) else None


def _parts(c: Importer, node: Any) -> Pair:
    """The real and the imaginary parts of a complex operand."""
    source = _of_pairs(node)
    value = c.env[node] if isinstance(node, torch.fx.Node) else None
    if isinstance(value, torch.Tensor) and value.is_complex():
        real, imaginary = (forms.as_held(each).contiguous() for each in (value.real, value.imag))
        return c.constant(real, "real"), c.constant(imaginary, "imaginary")
    if source is not None and isinstance(c.env[source], Value):
        return last_pair(c, c.env[source])
    if isinstance(value, Value) and value.dtype.is_complex:
        return last_pair(c, c.g.aten([value], "aten.view_as_real.default", (("tensor", 0),)))
    raise Skip


RULES: dict[str, Rule] = {"view_as_real": _view_as_real}
