"""Index arithmetic of generated kernels: sums of digits of loop variables, known to be exact.

A loop variable counts elements. The index along a dim of a tensor is a digit of it, ``(v // div) %
mod``; a view, a broadcast or a slice makes sums of such digits of others. Sums are kept in a form
in which equal ones are equal objects, and in which digits that belong together are one digit again:
a dense tensor that is read in the order of its memory is read at ``v``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from ..ir.spec import numel


@dataclass(frozen=True, order=True)
class Var:
    """A loop variable, ``0 <= name < extent``."""

    name: str
    extent: int


@dataclass(frozen=True, order=True)
class Digit:
    """``(var // div) % mod``: less than ``mod``, which is what is left where nothing is cut off."""

    var: Var
    div: int
    mod: int

    def code(self, var: str) -> str:
        """C++ for it, the variable written as ``var``."""
        text = var if self.div == 1 else f"{var} / {self.div}u"
        if self.div * self.mod >= self.var.extent:
            return text if self.div == 1 else f"({text})"
        return f"({text} % {self.mod}u)"


@dataclass(frozen=True)
class Sum:
    """A sum of digits by what they are multiplied with, and a number."""

    terms: tuple[tuple[Digit, int], ...] = ()
    number: int = 0

    @classmethod
    def of(cls, terms: Mapping[Digit, int], number: int = 0) -> Sum:
        """The sum in its one form."""
        return cls(tuple(sorted(_joined(terms).items())), number)

    @property
    def most(self) -> int:
        """The largest value that it may have, as far as can be told."""
        return self.number + sum((digit.mod - 1) * by for digit, by in self.terms)

    def within(self, extent: int) -> bool:
        """Whether it is always at least 0 and less than an extent, as far as can be told."""
        reach = [(digit.mod - 1) * by for digit, by in self.terms]
        least = self.number + sum(each for each in reach if each < 0)
        return least >= 0 and self.number + sum(each for each in reach if each > 0) < extent

    def __add__(self, other: Sum | int) -> Sum:
        if isinstance(other, int):
            return Sum(self.terms, self.number + other)
        terms = dict(self.terms)
        for digit, by in other.terms:
            terms[digit] = terms.get(digit, 0) + by
        return Sum.of(terms, self.number + other.number)

    def __mul__(self, by: int) -> Sum:
        return Sum.of({digit: old * by for digit, old in self.terms}, self.number * by)

    def cut(self, div: int, mod: int) -> Sum | None:
        """``(self // div) % mod``, None if that is no sum of digits."""
        above = {digit: by // div for digit, by in self.terms if by % div == 0}
        below = Sum(tuple(term for term in self.terms if term[1] % div))
        if below.most + self.number % div >= div:
            return self._cut_digits(div, mod)
        quotient = Sum.of(above, self.number // div)
        if quotient.most < mod:
            return quotient
        low = {digit: by for digit, by in quotient.terms if by % mod}
        rest = Sum.of(low, quotient.number % mod)
        return rest if rest.most < mod else quotient._cut_digits(1, mod)

    def _cut_digits(self, div: int, mod: int) -> Sum | None:
        """The same of one digit that both cut through. A number may be what is cut off above."""
        wanted: dict[Digit, int] = {}
        if self.number % (div * mod):
            return None
        for digit, by in self.terms:
            # by * digit, of which the elements from div to div * mod are kept
            top = by * digit.mod
            if top <= div:
                if self._below(div):
                    continue
                return None
            if by >= div * mod:
                if by % (div * mod):
                    return None
                continue
            low, high = max(by, div), min(top, div * mod)
            if low % by or (by < div and div % by) or high % low or digit.mod % (low // by):
                return None
            if by >= div and by % div:
                return None
            if high < top and digit.mod % (high // by):
                return None  # what is cut off above is no digit of the variable
            part = Digit(digit.var, digit.div * (low // by), high // low)
            wanted[part] = wanted.get(part, 0) + low // div
        if not self._nested():
            return None
        return Sum.of(wanted)

    def _below(self, div: int) -> bool:
        return Sum(tuple(t for t in self.terms if t[1] * t[0].mod <= div)).most < div

    def _nested(self) -> bool:
        """Whether no two terms can carry into each other: they are digits of one number."""
        reach = 0
        for digit, by in sorted(self.terms, key=lambda term: term[1]):
            if by <= reach:
                return False
            reach += (digit.mod - 1) * by
        return True

    def slope(self, var: Var, lanes: int) -> int | None:
        """What it grows by from lane to lane, where ``var`` is a multiple of ``lanes`` and the
        lanes count on from there; None if it does not grow evenly."""
        found = 0
        for digit, by in self.terms:
            if digit.var != var or digit.div % lanes == 0:
                continue
            whole = digit.div * digit.mod >= var.extent
            if digit.div != 1 or not (whole or digit.mod % lanes == 0):
                return None
            found += by
        return found

    def multiple(self, var: Var, lanes: int) -> int:
        """A number that divides it at the first lane."""
        found = self.number
        for digit, by in self.terms:
            found = gcd(found, by * lanes if digit.var == var and digit.div == 1 else by)
        return found

    def vars(self) -> set[Var]:
        """The variables that it depends on."""
        return {digit.var for digit, _ in self.terms}

    def code(self, names: Mapping[Var, str], known: Mapping[Digit, str] | None = None) -> str:
        """C++ for it, by the names of variables, and of digits that are known."""
        parts = []
        for digit, by in self.terms:
            text = (known or {}).get(digit) or digit.code(names[digit.var])
            parts.append(text if by == 1 else f"{text} * {by}u")
        if self.number < 0 and parts:  # whatever the width of the variables
            return f"{' + '.join(parts)} - {-self.number}u"
        if self.number or not parts:
            parts.append(f"{self.number}u")
        return " + ".join(parts)


def _joined(terms: Mapping[Digit, int]) -> dict[Digit, int]:
    """Terms with neighbouring digits of a variable as one, where their factors fit."""
    found = {digit: by for digit, by in terms.items() if by and digit.mod > 1}
    joined = True
    while joined:
        joined = False
        ends = {(digit.var, digit.div): digit for digit in found}
        for low, by in found.items():
            high = ends.get((low.var, low.div * low.mod))
            if high is not None and found[high] == by * low.mod:
                del found[high], found[low]
                whole = Digit(low.var, low.div, low.mod * high.mod)
                found[whole] = found.get(whole, 0) + by
                joined = True
                break
    return found


def counter(var: Var) -> Sum:
    """The variable itself."""
    return Sum.of({Digit(var, 1, var.extent): 1})


def digits(var: Sum, extents: Sequence[int]) -> list[Sum]:
    """A counter of elements of a shape as the index along each dim, the last one fastest."""
    found: list[Sum] = []
    div = numel(extents)
    for extent in extents:
        div //= max(extent, 1)
        cut = var.cut(div, extent)
        assert cut is not None
        found.append(cut)
    return found


def place(index: Iterable[Sum], strides: Iterable[int]) -> Sum:
    """Where an element lies, in elements."""
    found = Sum()
    for each, stride in zip(index, strides, strict=True):
        found = found + each * stride
    return found


def reshaped(index: Sequence[Sum], shape: Sequence[int], to: Sequence[int]) -> list[Sum] | None:
    """The index into a tensor of shape ``to`` of the element that ``index`` names in ``shape``, in
    row-major order; None if it is no sum of digits. No index is past its shape, whatever the digits
    that it is made of could come to: a part of a concatenation is asked for its own places alone.
    """
    steps, step = [], 1
    for extent in reversed(shape):
        steps.append(step)
        step *= extent
    linear = place(index, reversed(steps))
    found: list[Sum] = []
    div, first = step, True
    for extent in to:
        div //= max(extent, 1)
        cut: Sum | None = Sum()
        if extent > 1:
            most = linear.most // div + 1 if first else extent
            cut, first = linear.cut(div, max(extent, most)), False
        if cut is None:
            return None
        found.append(cut)
    return found
