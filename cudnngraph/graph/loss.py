"""Softmax and its loss, and ATen ops that have no method of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import Problem
from .core import Core
from .value import Value


class LossMethods(Core):
    """Softmax, the loss of its logarithm, and :meth:`aten`."""

    # -- softmax and its loss ------------------------------------------------------------------

    def softmax(self, x: Value, dim: int, *, name: str | None = None) -> Value:
        """exp(x) over its sum along ``dim`` (F.softmax)."""
        return self._one("softmax", x, dim=dim, name=name)

    def softmax_backward(self, dy: Value, y: Value, dim: int, *, name: str | None = None) -> Value:
        """Gradient of :meth:`softmax` from dy and its result y."""
        return self._one("softmax_backward", dy, y, dim=dim, name=name)

    def log_softmax(self, x: Value, dim: int, *, name: str | None = None) -> Value:
        """The logarithm of :meth:`softmax` along ``dim`` (F.log_softmax)."""
        return self._one("log_softmax", x, dim=dim, name=name)

    def log_softmax_backward(
        self, dy: Value, y: Value, dim: int, *, name: str | None = None
    ) -> Value:
        """Gradient of :meth:`log_softmax` from dy and its result y."""
        return self._one("log_softmax_backward", dy, y, dim=dim, name=name)

    def nll_loss(
        self,
        x: Value,
        target: Value,
        reduction: str = "mean",
        ignore_index: int = -100,
        *,
        name: str | None = None,
    ) -> Value:
        """-x at each row's class (F.nll_loss without weights).

        x (N, C, ...) logarithms of probabilities, target (N, ...) int64 → a number for the "mean"
        or the "sum" over rows whose class is not ``ignore_index``, (N, ...) for "none".
        """
        return self._one(
            "nll_loss", x, target, reduction=reduction, ignore_index=ignore_index, name=name
        )

    def nll_loss_backward(
        self,
        dy: Value,
        target: Value,
        shape: Sequence[int],
        reduction: str = "mean",
        ignore_index: int = -100,
        *,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`nll_loss` from its result's dy; ``shape`` is that of x."""
        return self._one(
            "nll_loss_backward",
            dy,
            target,
            shape=shape,
            reduction=reduction,
            ignore_index=ignore_index,
            name=name,
        )

    def cross_entropy(
        self,
        x: Value,
        target: Value,
        reduction: str = "mean",
        ignore_index: int = -100,
    ) -> Value:
        """F.cross_entropy of x (N, C, ...) and classes (N, ...) int64, without weights."""
        return self.nll_loss(self.log_softmax(x, 1), target, reduction, ignore_index)

    # -- ops of torch --------------------------------------------------------------------------

    def aten(
        self,
        x: Sequence[Value],
        overload: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...] = (),
        *,
        name: str | None = None,
    ) -> Any:
        """An op of torch that has no other name here, ``overload``: by torch, or part of a kernel.

        ``overload`` is its full name, "aten.embedding.default"; ``args`` and ``kwargs`` are its
        arguments as plain values, ``("tensor", 0)`` for the first of the list x (see
        :mod:`cudnngraph.ops.aten`). → the result, or a tuple of up to 16.
        """
        if not x:
            label = name or "aten"
            self.problems.append(
                Problem(f"aten '{label}'", f"x is {x!r}", "a list of one value or more")
            )
            return self._unknown()
        attrs = {"overload": overload, "args": args, "kwargs": kwargs}
        outputs = self._apply("aten", x, attrs, name)
        made = [value for value in outputs[1:] if value.spec is not None]
        return (outputs[0], *made) if made else outputs[0]
