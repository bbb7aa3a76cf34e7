"""Random regions for generated kernels, of whole numbers: right to the bit, in whatever order.

A region is made by its seed alone. Its operands lie in memory as nobody would have them: with gaps,
overlapping, repeated, with strides of any size along dims of one element, in all dtypes. So do its
results, as far as they may. Numbers stay so small that no op rounds any: a wrong address shows, and
no tolerance hides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec, TensorSpec, overlaps_itself
from cudnngraph.ops import aten

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: Up to where a dtype has all whole numbers.
WHOLE = {F32: 1 << 24, F16: 1 << 11, BF16: 1 << 8}
EIGHTS = (torch.int8, torch.uint8, torch.int32)
EXTENTS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 24, 33, 64, 100)
BLANK = 99  # between elements, where there is no NaN
MOST = 4  # of a number that is read

Shape = tuple[int, ...]


@dataclass
class _Known:
    """A value of the graph, and the largest size of its numbers; 0 for bools."""

    value: cg.Value
    most: int

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape)


class _Maker:
    def __init__(self, seed: int) -> None:
        self.r = Random(f"region {seed}")
        self.g = cg.Graph(f"region_{seed}")
        self.count = 0
        self.most_elements = self.r.choice((300, 3000, 3000, 20_000, 20_000))
        self.turned = self.r.random() < 0.25  # large operands of several layouts, nothing reduced
        if self.turned:
            self.most_elements = 20_000
        self.dtype = self.r.choice((F32, F16, BF16, None))  # None: of any

    # -- operands ------------------------------------------------------------------------------

    def name(self) -> str:
        self.count += 1
        return f"x{self.count}"

    def strides(self, shape: Shape) -> Shape:
        """Strides of an operand: dense in any order, with gaps, repeated, overlapping."""
        r = self.r
        order = list(range(len(shape)))
        if self.turned or r.random() < 0.5:
            r.shuffle(order)
        found = [0] * len(shape)
        step = r.choice((1, 1, 1, 1, 2, 3))
        for dim in reversed(order):
            found[dim] = step
            step *= shape[dim]
            step += r.choice((0, 0, 0, 0, 1, 8, 5))
        for dim, extent in enumerate(shape):
            if extent == 1:
                found[dim] = r.choice((found[dim], 0, 1, 7, 1000))
            elif r.random() < (0.01 if self.turned else 0.08):
                found[dim] = 0
            elif r.random() < (0.0 if self.turned else 0.1):
                found[dim] = r.choice((1, 2, 3))  # overlaps others
        return tuple(found)

    def given(self, shape: Shape, dtype: torch.dtype | None = None) -> _Known:
        r = self.r
        way = r.random()
        if dtype is None:
            dtype = self.dtype or r.choice((F32, F16, BF16))
            if way < 0.12:
                dtype = r.choice(EIGHTS)
        stride = self.strides(shape)
        value = self.g.input(self.name(), shape, dtype, stride=stride)
        if dtype in EIGHTS:
            value = self.g.to_float(value)
        return _Known(value, 0 if dtype == torch.bool else MOST)

    def broadcast(self, shape: Shape) -> Shape:
        """A shape that is repeated to this one."""
        r = self.r
        dims = [n if r.random() < (0.95 if self.turned else 0.7) else 1 for n in shape]
        drop = r.randrange(len(shape)) if len(shape) > 1 and r.random() < 0.2 else 0
        return tuple(dims[drop:])

    def beside(self, x: _Known) -> _Known:
        """An operand for an op of two, in float32 where dtypes do not mix."""
        alike = [each for each in self.pool if _repeats(each.shape, x.shape) and each.most]
        like = alike and self.r.random() < 0.3
        made = self.r.choice(alike) if like else self.given(self.broadcast(x.shape))
        if {x.value.dtype, made.value.dtype} == {F16, BF16}:
            made = _Known(self.g.cast(made.value, F32), made.most)
        return made

    # -- ops -----------------------------------------------------------------------------------

    def begin(self) -> _Known:
        r = self.r
        least = self.most_elements // r.choice((4, 4) if self.turned else (4, 40, 4000))
        while True:
            shape = tuple(r.choice(EXTENTS) for _ in range(r.choice((1, 2, 2, 3, 3, 4, 4, 5))))
            if least <= math.prod(shape) <= self.most_elements:
                return self.given(shape)

    def flag(self, shape: Shape) -> cg.Value:
        """A bool to choose by."""
        r = self.r
        if r.random() < 0.5:
            made = self.given(self.broadcast(shape), torch.bool).value
        else:
            a, b = (self.given(self.broadcast(shape), r.choice((F32, F16))) for _ in "ab")
            made = getattr(self.g, r.choice(("eq", "ne", "lt", "le", "gt", "ge")))(a.value, b.value)
        if r.random() < 0.3:
            made = self.g.logical_not(made)
        if r.random() < 0.3:
            other = self.given(self.broadcast(tuple(made.shape)), torch.bool).value
            made = getattr(self.g, r.choice(("logical_and", "logical_or")))(made, other)
        return made

    def two(self, x: _Known) -> _Known | None:
        r, y = self.r, self.beside(x)
        op = r.choice(("add", "sub", "mul", "maximum", "minimum", "where"))
        if op == "where":
            made = self.g.where(self.flag(x.shape), x.value, y.value)
            return _Known(made, max(x.most, y.most))
        pair = (x, y) if r.random() < 0.5 else (y, x)
        most = {"mul": x.most * y.most, "add": x.most + y.most, "sub": x.most + y.most}
        made = getattr(self.g, op)(*(each.value for each in pair))
        return _Known(made, most.get(op, max(x.most, y.most)))

    def by_channel(self, x: _Known) -> _Known | None:
        """A vector added to channels, or channels by a vector."""
        if len(x.shape) < 2 or x.value.dtype not in WHOLE:
            return None
        y = _Known(self.given((x.shape[1],), x.value.dtype).value, MOST)
        if self.r.random() < 0.5:
            return _Known(self.g.bias(x.value, y.value), x.most + y.most)
        return _Known(self.g.scale(x.value, y.value), x.most * y.most)

    def one(self, x: _Known) -> _Known:
        op = self.r.choice(("relu", "neg", "abs", "clamp", "identity", "cast"))
        if op == "clamp":
            return _Known(self.g.clamp(x.value, -3.0, 2.0), 3)
        if op == "cast":
            dtype = self.r.choice([each for each, whole in WHOLE.items() if x.most <= whole])
            return _Known(self.g.cast(x.value, dtype), x.most)
        return _Known(getattr(self.g, op)(x.value), x.most)

    def viewed(self, x: _Known) -> _Known | None:
        r, g, shape = self.r, self.g, x.shape
        rank = len(shape)
        ways = ("slice", "permute", "reshape", "concat", "concat", "expand", "slice", "reshape")
        op = r.choice(ways[1:5] if self.turned else ways)
        if op == "slice":
            dim = r.randrange(rank)
            start = r.randrange(shape[dim])
            stop = r.randint(start + 1, shape[dim])
            return _Known(g.slice(x.value, dim, start, stop, r.choice((1, 1, 1, 2, 3))), x.most)
        if op == "permute":
            order = list(range(rank))
            r.shuffle(order)
            return _Known(g.permute(x.value, order), x.most)
        if op == "reshape":
            return _Known(g.reshape(x.value, self.factors(math.prod(shape))), x.most)
        if op == "expand":
            wide = [r.choice((1, 2, 3, 5)) if n == 1 else n for n in shape]
            lead = [r.choice((1, 2))] if rank < 5 and r.random() < 0.3 else []
            return _Known(g.expand(x.value, (*lead, *wide)), x.most)
        dim = r.randrange(rank)
        parts = [x]
        for _ in range(r.choice((1, 1, 2, 3))):
            wide = list(shape)
            wide[dim] = r.choice((1, 2, 3, 5, 8, shape[dim]))
            alike = [each for each in self.pool if each.shape == tuple(wide) and each.most]
            like = alike and r.random() < 0.4
            parts.append(r.choice(alike) if like else self.given(tuple(wide), self.plain(x)))
        r.shuffle(parts)
        if len({each.value.dtype for each in parts}) > 1:
            parts = [_Known(g.cast(each.value, F32), each.most) for each in parts]
        made = g.concat([each.value for each in parts], dim)
        return _Known(made, max(each.most for each in parts))

    def plain(self, x: _Known) -> torch.dtype:
        return x.value.dtype if x.value.dtype in WHOLE else F32

    def factors(self, count: int) -> Shape:
        """Any shape of so many elements."""
        r = self.r
        dims: list[int] = []
        while count > 1 and len(dims) < 3:
            by = r.choice([n for n in range(1, min(count, 64) + 1) if count % n == 0])
            dims.append(by)
            count //= by
        dims.append(count)
        r.shuffle(dims)
        return tuple(dims[:5])

    def reduced(self, x: _Known) -> _Known | None:
        r, rank = self.r, len(x.shape)
        dims = tuple(sorted(r.sample(range(rank), r.randint(1, rank))))
        count = math.prod(x.shape[dim] for dim in dims)
        mode = r.choice(("sum", "sum", "max", "min", "amax"))
        most = x.most * count if mode == "sum" else x.most
        made = self.g.reduction(x.value, dims, mode, keepdim=r.random() < 0.6 or len(dims) == rank)
        return _Known(made, most)

    def pooled(self, x: _Known) -> _Known | None:
        r, space = self.r, x.shape[2:]
        if not 1 <= len(space) <= 3 or x.value.dtype not in WHOLE:
            return None
        if r.random() < 0.4:
            size = tuple(n * r.choice((1, 2, 3)) for n in space)
            return _Known(self.g.interpolate(x.value, size=size, mode="nearest"), x.most)
        kernel = tuple(r.randint(1, min(n, 3)) for n in space)
        made = self.g.max_pool(
            x.value,
            kernel_size=kernel,
            stride=tuple(r.choice((1, 2)) for _ in space),
            padding=tuple(r.randint(0, k // 2) for k in kernel),
        )
        return _Known(made, x.most)

    def moved(self, x: _Known) -> _Known | None:
        """What torch's own ops move, at places that are computed or given."""
        r, g, shape = self.r, self.g, x.shape
        rank = len(shape)
        dim, of = r.randrange(rank), ("tensor", 0)
        op = r.choice(("flip", "roll", "pad", "reflect", "select", "select", "gather", "rows"))
        if op == "flip":
            dims = r.sample(range(rank), r.randint(1, rank))
            made = g.aten([x.value], "aten.flip.default", (of, ("list", *dims)))
        elif op == "roll":
            turned = of, ("list", r.randint(-5, 9)), ("list", dim)
            made = g.aten([x.value], "aten.roll.default", turned)
        elif op == "pad":
            pads = [r.choice((0, 1, 3)) for _ in range(2 * r.randint(1, rank))]
            made = g.aten([x.value], "aten.constant_pad_nd.default", (of, ("list", *pads), 2.0))
        elif op == "reflect":
            if not 2 <= rank <= 4:
                return None
            kind = "reflection" if min(shape[1:]) > 2 and r.random() < 0.5 else "replication"
            pads = [r.choice((0, 1, 2)) for _ in range(2 * (rank - 1))]
            name = f"aten.{kind}_pad{rank - 1}d.default"
            made = g.aten([x.value], name, (of, ("list", *pads)))
        else:
            dtype, at = r.choice((torch.int64, torch.int32)), ("tensor", 1)
            wide = list(shape)
            wide[dim] = r.choice((1, 3, 8))
            if op == "select":
                wanted: Shape = (wide[dim],)
                name, args = "aten.index_select.default", (of, dim, at)
            elif op == "gather":
                wanted, dtype = tuple(wide), torch.int64
                name, args = "aten.gather.default", (of, dim, at)
            else:
                wanted = (r.choice((1, 2)), r.choice((1, 4, 5)))
                name, args = "aten.index.Tensor", (of, ("list", *[None] * dim, at))
            index = g.input(self.name(), wanted, dtype, stride=self.strides(wanted))
            made = g.aten([x.value, index], name, args)
        return _Known(made, x.most)

    # -- the whole -----------------------------------------------------------------------------

    def grow(self) -> None:
        r = self.r
        x = self.begin()
        self.pool = [x]
        for _ in range(r.choice((1, 2, 3, 4, 5, 6, 8))):
            way = r.random() * (0.8 if self.turned else 1.1)
            if way < 0.25:
                made = self.two(x)
            elif way < 0.3:
                made = self.by_channel(x)
            elif way < 0.45:
                made = self.one(x)
            elif way < 0.8:
                made = self.viewed(x)
            elif way < 0.93:
                made = self.reduced(x)
            elif way < 1.0:
                made = self.pooled(x)
            else:
                made = self.moved(x)
            if made is None or math.prod(made.shape) > self.most_elements or len(made.shape) > 5:
                continue
            whole = WHOLE.get(made.value.dtype, WHOLE[F32])
            if made.most > whole:
                continue
            self.pool.append(made)
            x = made if r.random() < 0.85 else r.choice(self.pool)
        ends = [self.pool[-1], *(r.choice(self.pool) for _ in range(r.choice((0, 0, 0, 1, 2))))]
        if r.random() < 0.1:
            ends.append(_Known(self.g.logical_not(self.flag(self.pool[-1].shape)), 0))
        if r.random() < 0.12:  # what has nothing to do with the others
            ends.append(self.one(self.given(r.choice(self.pool).shape)))
        for at, end in enumerate(ends):
            value = self.g.identity(end.value) if end.most else end.value
            more = {}
            if r.random() < 0.5:
                more["stride"] = self.apart(end.shape)
            if end.most and r.random() < 0.3:
                more["dtype"] = r.choice([d for d, whole in WHOLE.items() if end.most <= whole])
            self.g.output(f"y{at}", value, **more)
        self.g.drop_unused_inputs()

    def apart(self, shape: Shape) -> Shape:
        """Strides of a result, whose elements do not overlap."""
        while True:
            found = self.strides(shape)
            if not overlaps_itself(shape, found):
                return found


def _repeats(shape: Shape, wide: Shape) -> bool:
    """Whether a shape is repeated to another one of as many dims."""
    return len(shape) == len(wide) and all(n in (1, w) for n, w in zip(shape, wide, strict=True))


def region(seed: int) -> GraphSpec:
    """The region of this seed."""
    maker = _Maker(seed)
    maker.grow()
    return maker.g.spec()


def tensors(spec: GraphSpec, seed: int) -> list[torch.Tensor]:
    """Operands of a region; between their elements is NaN, or what an op would show."""
    gen = torch.Generator().manual_seed(seed)
    counts: dict[str, int] = {}
    for node in spec.nodes:
        counts |= aten.indexed(node, spec.tensors) if node.op == "aten" else {}
    return [_given(spec.tensors[name], gen, counts.get(name)) for name in spec.inputs]


def _given(tensor: TensorSpec, gen: torch.Generator, count: int | None) -> torch.Tensor:
    blank = math.nan if tensor.dtype.is_floating_point else BLANK
    memory = torch.full((tensor.extent,), blank).to(tensor.dtype)
    low = 0 if tensor.dtype in (torch.uint8, torch.bool) else -MOST
    high = 1 if tensor.dtype == torch.bool else MOST
    if count is not None:
        low, high = 0, count - 1
    values = torch.randint(low, high + 1, (tensor.extent,), generator=gen).to(tensor.dtype)
    there = torch.zeros(tensor.extent, dtype=torch.bool)
    there.as_strided(tensor.shape, tensor.stride).fill_(True)
    memory = torch.where(there, values, memory)
    return memory.as_strided(tensor.shape, tensor.stride)
