"""Random graphs of odd operands, each op beside torch's: no dims, no elements, no strides, twice.

A case is made by its seed alone. Its inputs are numbers, empty tensors, expanded ones and tensors
with dims of 1; axes count from either end; operands are used more than once; outputs are inputs,
or parts of one another. What torch computes is computed, or refused by a ``GraphError``.

``RANDOM_ODD=3000 pytest tests/cpu/graph/test_random_odd.py`` makes so many;
``RANDOM_FIRST=1234 RANDOM_ODD=1`` that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from tests.random_functions import ACTIVATIONS
from tests.random_tensors import BF16, F16, F32, F64, Maker

BOOL, I32, I64 = torch.bool, torch.int32, torch.int64
Both = tuple[Any, Any]  # a value of the graph, and torch's
Op = Callable[["Case"], Both]

UNARY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("neg", "abs", "exp", "erf", "tanh", "sigmoid")},
    "identity": lambda x: x,
    **{name: ACTIVATIONS[name] for name in ("relu", "gelu", "silu", "mish", "hardswish", "relu6")},
}
BINARY: Mapping[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "maximum", "minimum")},
    **{name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
REDUCED: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "amax": lambda x, dims, keep: torch.amax(x.abs(), dims, keep),
}


class Refused(Exception):
    """torch does not take an op's operands."""


class Case:
    """A graph under way; ``values`` are pairs of ours and torch's."""

    def __init__(self, seed: int) -> None:
        self.m = m = Maker(seed)
        self.dtype = m.pick(F64, F64, F64, F32, F16, BF16)
        self.g = cg.Graph("odd")
        self.tensors: dict[str, torch.Tensor] = {}
        self.exact: dict[str, torch.Tensor] = {}
        self.values: list[Both] = []
        self.told: list[str] = []
        self.refused = ""  # why torch refuses
        for _ in range(m.rng.randint(1, 3)):
            self.input()
        for _ in range(m.rng.randint(0, 5)):
            try:
                self.step()
            except Refused as reason:
                self.refused = f"{self.told[-1]}: {reason}"
                break
        self.outputs()

    def __str__(self) -> str:
        given = [
            f"{n} {tuple(t.shape)} {str(t.dtype)[6:]} {t.stride()}" for n, t in self.tensors.items()
        ]
        return "\n  ".join([f"{self.dtype}", *given, *self.told])

    def shape(self) -> tuple[int, ...]:
        m = self.m
        rank = m.pick(0, 1, 1, 2, 2, 3, 4, 5)
        return tuple(m.pick(1, 1, 2, 3, 4, 0 if m.chance(0.2) else 3) for _ in range(rank))

    def input(self) -> Both:
        """Another input, like one that is there or not."""
        m, name = self.m, f"x{len(self.tensors)}"
        shape = self.shape()
        if self.values and m.chance(0.6):
            like = m.pick(*self.values)[1].shape
            shape = tuple(1 if m.chance(0.25) else n for n in like)[m.pick(0, 0, 0, 1) :]
        given = m.tensor(shape, self.dtype)
        if m.chance(0.12):
            given = given > 0
        self.tensors[name] = given
        exact = given.detach().clone().double() if given.dtype != BOOL else given
        self.exact[name] = exact
        self.values.append((self.g.input(name, like=given), exact))
        return self.values[-1]

    def any(self, kind: str = "number") -> Both:
        """A value that is there: a number or a bool, as asked for mostly."""
        found = [v for v in self.values if (v[1].dtype == BOOL) == (kind == "bool")]
        if not found or self.m.chance(0.02):
            found = self.values
        recent = found[-2:] if self.m.chance(0.7) else found
        return self.m.pick(*recent)  # type: ignore[no-any-return]

    def dim(self, x: torch.Tensor) -> int:
        """An axis from either end, rarely one that is none."""
        rank = max(x.dim(), 1)
        return self.m.rng.randrange(-rank, rank) if self.m.chance(0.97) else self.m.pick(rank, -9)

    def step(self) -> None:
        """Another op."""
        ops: list[Op] = [unary, unary, binary, binary, binary, number, where, reduce, reshape]
        ops += [transpose, permute, cut, concat, expand, product, softmax, logic, cast]
        self.told.append("?")
        ours, theirs = self.m.pick(*ops)(self)
        self.values.append((ours, theirs))

    def both(self, text: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> Both:
        """An op done by ours and by torch."""
        self.told[-1] = text
        made = ours()
        try:
            return made, theirs()
        except Exception as error:
            raise Refused(str(error)) from error

    def outputs(self) -> None:
        m = self.m
        results = [self.values[-1], *(m.pick(*self.values) for _ in range(m.pick(0, 0, 1, 2)))]
        if m.chance(0.9):  # else refused where one is an input, or there twice
            inputs = set(self.tensors)
            results = list({id(v): (v, t) for v, t in results if v.name not in inputs}.values())
        self.right = [each[1] for each in results]
        names = [value.name for value, _ in results]
        if not names or len({*names}) < len(names) or {*names} & {*self.tensors}:
            self.refused = self.refused or "the outputs"
        for at, (value, right) in enumerate(results):
            options: dict[str, Any] = {}
            if m.chance(0.1) and right.dim() in (3, 4, 5):
                options["layout"] = "channels_last"
            if m.chance(0.1) and right.is_floating_point():
                options["dtype"] = F64 if self.dtype == F64 else F32  # else what reads it rounds
            self.g.output(f"y{at}", value, **options)
            self.told.append(f"y{at} {options}")
        self.g.drop_unused_inputs()


def unary(c: Case) -> Both:
    (v, t), name = c.any(), c.m.pick(*UNARY)
    return c.both(name, lambda: getattr(c.g, name)(v), lambda: UNARY[name](_float(t)))


def _float(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == BOOL:
        raise Refused("a bool")
    return t


def binary(c: Case) -> Both:
    (v, t), (w, u), name = c.any(), c.any(), c.m.pick(*BINARY)
    if c.m.chance(0.3):
        w, u = c.input()
    text = f"{name} {tuple(t.shape)} {tuple(u.shape)}"
    return c.both(
        text, lambda: getattr(c.g, name)(v, w), lambda: BINARY[name](_float(t), _float(u))
    )


def number(c: Case) -> Both:
    (v, t), name = c.any(), c.m.pick("add", "sub", "mul", "maximum", "lt", "div")
    n = c.m.pick(0, 1, -1.5, 0.5, 3)
    n = n or (0 if name != "div" else 2.0)
    if name == "maximum":
        return c.both(f"max {n}", lambda: c.g.maximum(v, n), lambda: _float(t).clamp(min=n))
    ours = getattr(c.g, name)
    if c.m.chance(0.3):
        return c.both(f"{n} {name}", lambda: ours(n, v), lambda: getattr(torch, name)(_as(n), t))
    return c.both(
        f"{name} {n}", lambda: ours(v, n), lambda: getattr(torch, name)(_float(t), _as(n))
    )


def _as(n: float) -> torch.Tensor:
    return torch.tensor(n, dtype=F64)


def where(c: Case) -> Both:
    (v, t), (w, u), (k, b) = c.any(), c.any(), c.any("bool")
    if b.dtype != BOOL:
        k, b = c.g.gt(k, 0.0), b > 0
    return c.both("where", lambda: c.g.where(k, v, w), lambda: torch.where(b, _float(t), _float(u)))


def reduce(c: Case) -> Both:
    (v, t), mode, keep = c.any(), c.m.pick(*REDUCED), c.m.chance(0.5)
    dims: Any = tuple({c.dim(t) for _ in range(c.m.pick(1, 1, 2, 3))})
    dims = c.m.pick(None, dims, dims, dims[0])
    text = f"{mode} {tuple(t.shape)} over {dims} {keep}"
    over = tuple(range(t.dim())) if dims is None else dims
    ours = lambda: c.g.reduction(v, dims, mode, keep)  # noqa: E731
    return c.both(text, ours, lambda: REDUCED[mode](_float(t), over, keep))


def reshape(c: Case) -> Both:
    v, t = c.any()
    sizes = list(t.shape)
    c.m.rng.shuffle(sizes)
    if c.m.chance(0.4):
        sizes.insert(c.m.rng.randint(0, len(sizes)), 1)
    if sizes and c.m.chance(0.4):
        sizes[c.m.rng.randrange(len(sizes))] = -1
    shape = c.m.pick(tuple(sizes), tuple(sizes), (-1,), (t.numel(),), ())
    return c.both(f"reshape {shape}", lambda: c.g.reshape(v, shape), lambda: t.reshape(shape))


def transpose(c: Case) -> Both:
    v, t = c.any()
    a, b = c.dim(t), c.dim(t)
    ours = lambda: c.g.transpose(v, a, b)  # noqa: E731
    return c.both(f"transpose {a} {b}", ours, lambda: t.transpose(a, b))


def permute(c: Case) -> Both:
    v, t = c.any()
    dims = c.m.rng.sample(range(t.dim()), t.dim())
    dims = [d - t.dim() if c.m.chance(0.3) else d for d in dims]
    return c.both(f"permute {dims}", lambda: c.g.permute(v, dims), lambda: t.permute(dims))


def cut(c: Case) -> Both:
    v, t = c.any()
    dim = c.dim(t)
    start, stop, step = c.m.pick(0, 0, 1, -1, -2), c.m.pick(None, 2, -1, 99), c.m.pick(1, 1, 2)
    index = slice(start, stop, step)

    def theirs() -> torch.Tensor:
        t.size(dim)  # raises for a dim that is none
        return t[(slice(None),) * (dim % t.dim()) + (index,)]

    text = f"slice {tuple(t.shape)} {dim} {start}:{stop}:{step}"
    return c.both(text, lambda: c.g.slice(v, dim, start, stop, step), theirs)


def concat(c: Case) -> Both:
    found = [c.any()]
    found += [c.m.pick(found[0], c.any()) for _ in range(c.m.pick(0, 1, 2))]
    dim = c.dim(found[0][1])
    ours = lambda: c.g.concat([v for v, _ in found], dim)  # noqa: E731
    text = f"concat {[tuple(t.shape) for _, t in found]} along {dim}"
    return c.both(text, ours, lambda: _joined([t for _, t in found], dim))


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    if len({(t.dim(), t.dtype) for t in parts}) > 1:
        raise Refused("several ranks or dtypes")
    return torch.cat(parts, dim)


def expand(c: Case) -> Both:
    v, t = c.any()
    shape = (*(2,) * c.m.pick(0, 1), *(3 if n == 1 and c.m.chance(0.7) else n for n in t.shape))
    return c.both(f"expand {shape}", lambda: c.g.expand(v, shape), lambda: t.expand(shape))


def product(c: Case) -> Both:
    v, t = c.any()
    w, u = c.m.pick((c.g.transpose(v, -1, -2), t.mT), (v, t)) if t.dim() > 1 else c.any()

    def theirs() -> torch.Tensor:
        if not (2 <= t.dim() <= 4 and 2 <= u.dim() <= 4):
            raise Refused("rank")
        return _float(t) @ _float(u)

    return c.both(f"matmul {tuple(t.shape)} {tuple(u.shape)}", lambda: c.g.matmul(v, w), theirs)


def softmax(c: Case) -> Both:
    v, t = c.any()
    dim, name = c.dim(t), c.m.pick("softmax", "log_softmax")
    ours = lambda: getattr(c.g, name)(v, dim)  # noqa: E731
    return c.both(f"{name} {dim}", ours, lambda: getattr(F, name)(_float(t), dim))


def logic(c: Case) -> Both:
    (v, t), (w, u) = c.any("bool"), c.any("bool")
    if t.dtype != BOOL:
        v, t = c.g.gt(v, 0.0), t > 0
    if u.dtype != BOOL:
        w, u = c.g.le(w, 0.5), u <= 0.5
    name = c.m.pick("and", "or", "not")
    if name == "not":
        return c.both("not", lambda: c.g.logical_not(v), lambda: ~t)
    both = getattr(torch, f"logical_{name}")
    return c.both(name, lambda: getattr(c.g, f"logical_{name}")(v, w), lambda: both(t, u))


def cast(c: Case) -> Both:
    v, t = c.any()
    return c.both("cast", lambda: c.g.cast(v, F64), lambda: _float(t))
