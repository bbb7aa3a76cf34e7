"""Pooling in kernels, with its gradients: each element gathers what it is made of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...device.rules import rules
from ...ir.spec import Node, TensorSpec
from ..scalars import number
from ..tape import Map, MaxGradient, Read, Refused, Value, View, Window, mean, operands_of
from .pointwise import Operands

if TYPE_CHECKING:
    from ..window import Steps

_SLOW = re.compile(r"exp|log|pow|erf|tanh|sigmoid|silu|gelu|softplus|mish|elu\(|sqrt|/")


@dataclass(frozen=True)
class Strided:
    """The windows of a pool over a dim."""

    size: int
    count: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def taps(self) -> int:
        """The most elements of a window."""
        return self.kernel

    @property
    def windows(self) -> int:
        """The most windows of an element."""
        return self.dilation * (self.kernel - 1) // self.stride + 1

    def tap(self, window: str, tap: str) -> str:
        """C++ for the place of a tap; one in front of the image is a large number."""
        return f"{window} * {self.stride}u + {tap} * {self.dilation}u - {self.padding}u"

    def inside(self, window: str, place: str) -> str:
        """C++ for whether a tap's place is in the window and the image."""
        if self.padding or (self.count - 1) * self.stride + self._reach > self.size:
            return f"{place} < {self.size}u"
        return ""

    @property
    def _reach(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def window(self, place: str, nth: str) -> str:
        """C++ for the nth window that an element may be of; one in front is a large number."""
        return f"({place} + {self.padding}u) / {self.stride}u - {nth}"

    def holds(self, window: str, place: str) -> str:
        """C++ for whether an element is in a window."""
        tap = f"({place} + {self.padding}u - {window} * {self.stride}u)"
        parts = [f"{window} < {self.count}u"]
        if self.dilation > 1:
            parts.append(f"{tap} % {self.dilation}u == 0")
        if self.dilation > 1 or self._reach % self.stride:
            parts.append(f"{tap} < {self._reach}u")
        return " && ".join(parts)

    def length(self, window: str, padded: bool) -> str | int:
        """C++ for the number of elements that an average divides by, a number if all are alike."""
        last = (self.count - 1) * self.stride + self.kernel
        if last <= self.size + (2 if padded else 1) * self.padding and (padded or not self.padding):
            return self.kernel
        first = f"{window} * {self.stride}u"
        end = f"lesser({first} + {self.kernel}u, {self.size + (1 + padded) * self.padding}u)"
        if padded or not self.padding:
            return f"({end} - {first})"
        return f"({end} - greater({first}, {self.padding}u))"


@dataclass(frozen=True)
class Adaptive:
    """The windows of an adaptive pool over a dim: as many as are asked for, of about one size."""

    size: int
    count: int

    @property
    def taps(self) -> int:
        """The most elements of a window."""
        return max(
            -(-(at + 1) * self.size // self.count) - at * self.size // self.count
            for at in range(self.count)
        )

    @property
    def windows(self) -> int:
        """The most windows of an element."""
        return Adaptive(self.count, self.size).taps

    def _first(self, window: str) -> str:
        return f"{window} * {self.size}u / {self.count}u"

    def _end(self, window: str) -> str:
        return f"(({window} + 1u) * {self.size}u + {self.count - 1}u) / {self.count}u"

    def tap(self, window: str, tap: str) -> str:
        """See :class:`Strided`."""
        return f"{self._first(window)} + {tap}"

    def inside(self, window: str, place: str) -> str:
        """See :class:`Strided`."""
        return f"{place} < {self._end(window)}" if self.size % self.count else ""

    def window(self, place: str, nth: str) -> str:
        """See :class:`Strided`."""
        return f"{place} * {self.count}u / {self.size}u + {nth}"

    def holds(self, window: str, place: str) -> str:
        """See :class:`Strided`."""
        return f"{window} < (({place} + 1u) * {self.count}u + {self.size - 1}u) / {self.size}u"

    def length(self, window: str, padded: bool) -> str | int:
        """See :class:`Strided`."""
        if self.size % self.count == 0:
            return self.size // self.count
        return f"({self._end(window)} - {self._first(window)})"


Dim = Strided | Adaptive


def _dims(node: Node, image: Sequence[int], pooled: Sequence[int]) -> list[Dim]:
    """The windows over each spatial dim. Raises Refused for those that are too large."""
    found: list[Dim]
    attrs = dict(node.attrs)
    if "kernel_size" in attrs:
        ones = (1,) * len(image)
        many = zip(
            image,
            pooled,
            attrs["kernel_size"],
            attrs["stride"],
            attrs["padding"],
            attrs.get("dilation", ones),
            strict=True,
        )
        found = [Strided(*each) for each in many]
    else:
        found = [Adaptive(*each) for each in zip(image, pooled, strict=True)]
        check_products(image, pooled)
    return found


def check_products(image: Sequence[int], other: Sequence[int]) -> None:
    """Raise Refused where places of one image, by the size of another, need more than 32 bits."""
    if any((size + 1) * (count + 1) >= 1 << 32 for size, count in zip(image, other, strict=True)):
        raise Refused("places that need an index of 64 bits")


def window(
    operands: tuple[Value, ...],
    shape: tuple[int, ...],
    write: Callable[[Steps], str],
    reads: int,
    shared: int | None = None,
) -> Window:
    """A window that is no too long way to compute what it is of. Raises Refused.

    ``shared`` says how often an element of an operand is computed at most, where windows share it.
    """
    if reads > rules().window_most_reads:
        raise Refused("windows of many elements")
    for operand in operands:
        work = _work(operand, {})
        again = shared or reads * math.prod(shape) / max(1, math.prod(operand.shape))
        if again > 1 and again * work > rules().window_most_again:
            raise Refused("windows of what is computed at some length")
    return Window(shape, operands, write, reads)


def _work(value: Value, known: dict[int, int]) -> int:
    """About how many pointwise ops an element of a value takes."""
    if id(value) in known:
        return 0
    known[id(value)] = 0
    below = sum(_work(each, known) for each in operands_of(value))
    if isinstance(value, Window):
        return value.reads * (1 + below)
    if isinstance(value, Map):
        return below + (8 if _SLOW.search(value.code(["x"] * len(value.operands))) else 1)
    return below


@contextmanager
def taps(steps: Steps, dims: Sequence[Dim], windows: Sequence[str]) -> Iterator[list[str]]:
    """A loop over the elements of a window: their places."""
    reads = math.prod(dim.taps for dim in dims)
    with ExitStack() as stack:
        places = []
        for dim, at in zip(dims, windows, strict=True):
            nth = stack.enter_context(steps.loop(dim.taps, reads))
            place = steps.place(dim.tap(at, nth))
            test = dim.inside(at, place)
            if test:
                steps.line(f"if (!({test})) continue;")
            places.append(place)
        yield places


@contextmanager
def windows_of(steps: Steps, dims: Sequence[Dim], reads: int) -> Iterator[list[str]]:
    """A loop over the windows that hold an element."""
    with ExitStack() as stack:
        found = []
        for dim, at in zip(dims, steps.at, strict=True):
            nth = stack.enter_context(steps.loop(dim.windows, reads))
            place = steps.place(dim.window(at, nth))
            steps.line(f"if (!({dim.holds(place, at)})) continue;")
            found.append(place)
        yield found


def _divisor(dims: Sequence[Dim], windows: Sequence[str], padded: bool) -> str:
    """C++ for the number of elements that an average divides by."""
    lengths = [dim.length(at, padded) for dim, at in zip(dims, windows, strict=True)]
    known = math.prod(each for each in lengths if isinstance(each, int))
    varied = [each for each in lengths if isinstance(each, str)]
    return f"(float)({' * '.join([*varied, f'{known}u'])})" if varied else number(float(known))


def max_pool(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """The largest element of each window; NaN where there is one."""
    (x,) = operands
    assert x is not None
    dims = _dims(node, x.shape[2:], result.shape[2:])

    def write(steps: Steps) -> str:
        most = steps.local("float", number(-math.inf))
        with taps(steps, dims, steps.at) as places:
            steps.lanes(f"{most} = larger({most}, {steps.read(0, places)});")
        return most

    return (window((x,), result.shape, write, math.prod(dim.taps for dim in dims)),)


def avg_pool(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """The mean of each window; of one window a plain mean."""
    (x,) = operands
    assert x is not None
    if node.op == "adaptive_avg_pool" and all(size == 1 for size in result.shape[2:]):
        return (mean(x, range(2, len(x.shape))),)
    dims = _dims(node, x.shape[2:], result.shape[2:])
    padded = dict(node.attrs).get("count_include_pad", False)

    def write(steps: Steps) -> str:
        total = steps.local("float", "0.0f")
        with taps(steps, dims, steps.at) as places:
            steps.lanes(f"{total} += {steps.read(0, places)};")
        steps.lanes(f"{total} = divided({total}, {_divisor(dims, steps.at, padded)});")
        return total

    return (window((x,), result.shape, write, math.prod(dim.taps for dim in dims)),)


def avg_pool_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """The sum over the windows of an element of their gradients, each by its length."""
    (dy,) = operands
    assert dy is not None
    dims = _dims(node, result.shape[2:], dy.shape[2:])
    padded = dict(node.attrs).get("count_include_pad", False)
    reads = math.prod(dim.windows for dim in dims)

    def write(steps: Steps) -> str:
        total = steps.local("float", "0.0f")
        with windows_of(steps, dims, reads) as at:
            divisor = steps.number("float", _divisor(dims, at, padded))
            steps.lanes(f"{total} += divided({steps.read(0, at)}, {divisor});")
        return total

    return (window((dy,), result.shape, write, reads),)


def max_pool_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """The sum over the windows of an element of which it is the maximum, as torch finds it.

    That is the last NaN, else the first of the largest. The windows are searched again: indices
    that a forward would keep take more memory than that takes time. Images have a pattern of their
    own (:mod:`~cudnngraph.kernels.pool_gradient`); here every element searches its windows.
    """
    dy, x = operands
    assert dy is not None and x is not None
    base = x
    while isinstance(base, View):
        base = base.operand
    if not isinstance(base, Read):
        raise Refused("the maxima of what is not in memory")
    dims = _dims(node, result.shape[2:], dy.shape[2:])
    reads = math.prod(dim.windows * dim.taps for dim in dims)

    def write(steps: Steps) -> str:
        total = steps.local("float", "0.0f")
        mine = steps.read(1, steps.at)
        with windows_of(steps, dims, reads) as at:
            wins = steps.local("bool", "true")
            with taps(steps, dims, at) as places:
                _compare(steps, wins, mine, places)
            steps.lanes(f"{total} += {wins} ? {steps.read(0, at)} : 0.0f;")
        return total

    image = len(dims) == 2 and all(isinstance(dim, Strided) for dim in dims)
    shared = math.prod(dim.windows for dim in dims) if image else None
    made = window((dy, x), result.shape, write, reads, shared)
    return (MaxGradient(made.shape, made.operands, made.write, made.reads, tuple(dims)),)


def _compare(steps: Steps, wins: str, mine: str, places: Sequence[str]) -> None:
    """One element of a window against that which may be its maximum."""
    before, same = "false", "true"
    for place, own in reversed(list(zip(places, steps.at, strict=True))):
        before = f"({place} < {own} || ({place} == {own} && {before}))"
        same = f"{place} == {own} && {same}"
    first, self_ = steps.number("bool", before), steps.number("bool", same)
    other = steps.read(1, places)
    nan = f"{mine} != {mine}"
    loses = f"{nan} || {other} < {mine}", f"{other} == {other} && ({nan} || {other} <= {mine})"
    less = f"({first} ? {loses[0]} : {loses[1]})"
    steps.lanes(f"{wins} = {wins} && ({self_} || {less});")
