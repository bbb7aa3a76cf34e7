"""Cases made from their seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from tests.random_graphs.cases import Case, Given, Result, Step, widened
from tests.random_graphs.ops import BF16, F16, F32, OPS, UNARY, Shape, Tensor

CHANNELS = (1, 3, 7, 8, 16, 17, 32, 64, 209)
ELEMENTS = 24_000  # of a value, at most
PRODUCTS = 6_000_000  # multiplications of a step, at most


class _Maker:
    """Grows a case. A value that an op may take is in ``pool``."""

    def __init__(self, seed: int) -> None:
        r = self.r = Random(f"graph {seed}")
        dtype = r.choice((F16, F16, BF16, F32, F32))
        way = r.random()
        self.case = Case(seed, dtype, trained=way < 0.36, fused=way > 0.88)
        self.case.tf32 = dtype == F32 and r.random() < 0.4
        self.pool: list[int] = []
        self.turn = 0
        self.made: list[Tensor] = []  # in float64
        self.exact: set[int] = set()  # values that no op has rounded
        self.last = r.random() < 0.5  # images of this case lie channels_last, mostly
        self.many = r.choice((1, 2, 3, 3, 4, 4, 5, 6, 7, 8))

    # values

    def next(self, of: Sequence[Any]) -> Any:
        """One after another from case to case, so that all of them occur."""
        self.turn += 1
        return of[(self.case.seed * 13 + self.turn) % len(of)]

    def shape(self, at: int) -> Shape:
        return self.case.values[at].shape

    def layout(self, shape: Shape, kind: str) -> tuple[str, int]:
        r, rank = self.r, len(shape)
        if rank == 0:
            return "contiguous", 0
        usual = "channels_last" if self.last and rank in (3, 4, 5) else "contiguous"
        ways = [usual] * (6 if kind == "data" else 10)
        ways += ["contiguous"] * 2
        ways += ["channels_last"] * (2 if rank in (3, 4, 5) else 0)
        if math.prod(shape) > 1 and not (self.case.fused and kind == "weight"):
            ways += ["sliced", "stepped", "permuted"]
            ways += ["expanded"] if kind == "data" else []
        way = r.choice(ways)
        dims = [d for d, n in enumerate(shape) if n > 1] if way in ("expanded", "stepped") else []
        return way, r.choice(dims or range(rank))

    def given(self, shape: Shape, kind: str = "data", **more: Any) -> int:
        dtype = more.pop("dtype", self.case.dtype)
        layout, dim = self.layout(shape, kind) if dtype != torch.bool else ("contiguous", 0)
        if more.pop("plain", False):
            layout = "contiguous"
        at = len(self.case.values)
        name = f"{'w' if kind == 'weight' else 'x'}{at}"
        given = Given(name, shape, dtype, kind, layout, dim, **more)
        self.case.values.append(given)
        self.made.append(widened(given.tensor(self.case.seed)))
        self.exact.add(at)
        return at

    def step(self, op: str, *operands: int, terms: int = 1, **attrs: Any) -> int:
        """Its number; scaled by a power of 2 if its numbers are large or small."""
        at = len(self.case.values)
        made = OPS[op].run(*(self.made[place] for place in operands), **attrs)
        self.case.values.append(Step(op, operands, attrs, tuple(made.shape), terms))
        self.made.append(made)
        size = float(made.square().mean().sqrt())
        if size > 4.0 or 0.0 < size < 0.1:
            return self.step("scaled", at, by=2.0 ** -round(math.log2(size)))
        self.pool.append(at)
        return at

    def weight(self, shape: Shape, fan_in: int) -> int:
        return self.given(shape, "weight", size=1.0 / math.sqrt(max(1, fan_in)))

    def vector(self, n: int | Shape, *, wide: bool = False, positive: bool = False) -> int:
        """A vector of the channels or a row: a bias or a norm's weight, in float32 now and then."""
        shape = (n,) if isinstance(n, int) else n
        dtype = F32 if wide and not self.case.fused and self.r.random() < 0.5 else self.case.dtype
        return self.given(shape, "weight", dtype=dtype, positive=positive, plain=True)

    # beginnings

    def begin(self) -> int:
        r = self.r
        start = r.choice(("image",) * 5 + ("rows",) * 3 + ("heads",) * 2)
        if start == "image":
            rank = r.choice((3, 4, 4, 4, 4, 4, 5))
            n, c = r.choice((1, 1, 2, 3)), r.choice(CHANNELS)
            sizes = {3: (1, 5, 16, 33), 4: (1, 2, 5, 7, 8, 13, 16), 5: (1, 2, 3, 5, 8)}[rank]
            space = [r.choice(sizes) for _ in range(rank - 2)]
            while n * c * math.prod(space) > ELEMENTS:
                space = [max(1, s // 2) for s in space]
            shape: Shape = (n, c, *space)
        elif start == "rows":
            d = r.choice((*CHANNELS, 48, 128, 256))
            s = r.choice((1, 2, 7, 16, 33, 64))
            shape = (s, d) if r.random() < 0.5 else (r.choice((1, 2, 3)), s, d)
        else:
            d = r.choice((8, 16, 32, 64, 64, 128, 7, 17))
            shape = (r.choice((1, 2)), r.choice((1, 2, 3, 4)), r.choice((1, 7, 16, 33, 64)), d)
        at = self.given(shape)
        self.pool.append(at)
        return at

    # steps, each from the value x; None where it cannot be

    def grow(self) -> None:
        x = self.begin()
        r = self.r
        done = 0
        turns = 0
        while done < self.many and turns < 40:
            turns += 1
            rank = len(self.shape(x))
            ways: list[Callable[[int], int | None]] = []
            ways += [self.unary] * 4 + [self.binary] * 7 + [self.view] * 4
            if rank >= 3:
                ways += [self.conv] * 4 + [self.pool_] * 2 + [self.image_norm] * 2
                ways += [self.channelwise] * 2
            if rank in (2, 3, 4):
                ways += [self.matrix] * 2
            if rank >= 2:
                ways += [self.row_norm] * 2 + [self.reduced]
            if rank == 4:
                ways += [self.attention] * 2
            if done == 0:  # anchors first, mostly
                anchors: list[Callable[[int], int | None]] = []
                anchors += [w for w in ways if w in (self.conv, self.matrix, self.attention)]
                heads = rank == 4 and self.shape(x)[-1] >= self.shape(x)[1] * 2
                anchors += [self.attention] * (8 if heads else 0)
                if anchors and r.random() < 0.6:
                    ways = anchors
            made = r.choice(ways)(x)
            if made is None:
                continue
            if math.prod(self.shape(made)) > ELEMENTS:
                del self.case.values[made:], self.made[made:]
                self.pool = [at for at in self.pool if at < made]
                continue
            x, done = made, done + 1
            if r.random() < 0.12 and len(self.pool) > 2:
                x = r.choice(self.pool)
        if not isinstance(self.case.values[x], Step):
            x = self.step("relu", x)
        self.end(x)

    def conv(self, x: int) -> int | None:
        r = self.r
        n, c, *space = self.shape(x)
        way = r.choice(("conv", "conv", "conv", "depthwise", "conv_grouped", "conv_transpose"))
        k = r.choice(CHANNELS)
        groups = 1
        if way == "depthwise":
            groups, k = c, c * r.choice((1, 1, 1, 2))
        elif way == "conv_grouped":
            groups = r.choice([g for g in (2, 3, 4, 8, 11, 19) if c % g == 0] or [1])
            if groups == 1:
                way = "conv"
            k = groups * r.choice((1, 2, 3, 8))
        kernel = [r.choice((1, 1, 2, 3, 3, 5)) for _ in space]
        if r.random() < 0.7:
            kernel = kernel[:1] * len(space)
        stride = [r.choice((1, 1, 1, 2)) for _ in space]
        dilation = [r.choice((1, 1, 1, 2)) for _ in space]
        if way == "conv_transpose":
            if r.random() < 0.2:
                groups = r.choice([g for g in (1, 2, 4) if c % g == 0])
                k = groups * r.choice((1, 3, 8))
            options: dict[str, Any] = {
                "stride": tuple(stride),
                "padding": tuple(r.randint(0, (kern - 1) // 2) for kern in kernel),
                "groups": groups,
                "dilation": tuple(dilation),
                "output_padding": tuple(r.choice((0, s - 1)) for s in stride),
            }
            many = n * c * (k // groups) * math.prod(space) * math.prod(kernel)
            if many > PRODUCTS:
                return None
            fan = c // groups * math.prod(kernel)
            w = self.weight((c, k // groups, *kernel), fan)
            return self.step(way, x, w, terms=fan, **options)
        reach = [d * (kern - 1) + 1 for d, kern in zip(dilation, kernel, strict=True)]
        padding = []
        for full, size_ in zip(reach, space, strict=True):
            least = max(0, full - size_)
            before = max(r.choice((0, full // 2, full // 2)), -(-least // 2))
            after = before if r.random() < 0.9 else before + r.choice((1, 2))
            padding.append((before, after))
        out = [
            (n_ + sum(pad) - full) // s + 1
            for n_, pad, full, s in zip(space, padding, reach, stride, strict=True)
        ]
        fan = c // groups * math.prod(kernel)
        if n * k * math.prod(out) * fan > PRODUCTS:
            return None
        w = self.weight((k, c // groups, *kernel), fan)
        return self.step(
            *(way, x, w),
            terms=fan,
            padding=tuple(padding),
            stride=tuple(stride),
            dilation=tuple(dilation),
            groups=groups,
        )

    def pool_(self, x: int) -> int | None:
        r, space = self.r, self.shape(x)[2:]
        way = r.choice(("max_pool", "avg_pool", "adaptive_avg_pool", "interpolate"))
        if way == "adaptive_avg_pool":
            size = tuple(r.choice((1, 1, 2, 3)) for _ in space)
            return self.step(way, x, terms=math.prod(space), output_size=size)
        if way == "interpolate":
            linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(space)]
            mode = r.choice(("nearest", linear))
            size = tuple(n * 2 if r.random() < 0.7 else r.choice((1, 3, 8)) for n in space)
            return self.step(way, x, size=size, mode=mode)
        if way == "max_pool" and self.case.trained and x not in self.exact:
            return None  # rounding may choose another of two that are nearly equal
        kernel = tuple(min(n, r.choice((1, 2, 2, 3, 3))) for n in space)
        stride = tuple(r.choice((1, 2, 2, 3)) for _ in space)
        padding = tuple(r.randint(0, k // 2) for k in kernel)
        return self.step(
            *(way, x),
            terms=math.prod(kernel),
            kernel_size=kernel,
            stride=stride,
            padding=padding,
        )

    def image_norm(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        n, c, *space = shape
        way = r.choice(("batch_norm", "batch_norm_train", "instance_norm", "group_norm"))
        groups = r.choice([g for g in (1, 2, 4, 8, 11) if c % g == 0])
        count = {
            "batch_norm": 9,
            "batch_norm_train": n * math.prod(space),
            "instance_norm": math.prod(space),
            "group_norm": c // groups * math.prod(space),
        }[way]
        if count < 8 or (self.case.fused and way == "batch_norm_train"):
            return None
        parts = self.made[x].reshape(n, groups if way == "group_norm" else c, -1)
        if way != "batch_norm" and self.flat(parts, (0, 2) if "train" in way else (2,)):
            return None
        if way == "batch_norm":
            if self.case.fused:
                return None
            operands = [
                self.given((c,), "weight", plain=True, dtype=F32, positive=name == "v")
                for name in "mvwb"
            ]
        elif way == "batch_norm_train":
            operands = [self.given((c,), "weight", plain=True, dtype=F32) for _ in "wb"]
        else:
            wide = r.random() < 0.3 and not self.case.fused
            dtype = F32 if wide else self.case.dtype
            operands = [self.given((c,), "weight", plain=True, dtype=dtype) for _ in "wb"]
        more = {"num_groups": groups} if way == "group_norm" else {}
        return self.step(way, x, *operands, terms=count, **more)

    def flat(self, x: Tensor, dims: tuple[int, ...]) -> bool:
        """Whether some numbers of one norm are nearly equal: it makes 300 times their rounding."""
        variance = x.var(dims, unbiased=False)
        return bool((variance < 1e-2 * x.square().mean(dims)).any())

    def row_norm(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        way = r.choice(("layer_norm", "rms_norm", "softmax", "log_softmax", "normalize"))
        d = shape[-1]
        if way in ("softmax", "log_softmax"):
            dim = r.choice((len(shape) - 1, len(shape) - 1, r.randrange(len(shape))))
            if shape[dim] < 2:
                return None
            return self.step(way, x, terms=shape[dim], dim=dim)
        if d < 3 or (way == "layer_norm" and self.flat(self.made[x], (-1,))):
            return None
        if way == "normalize":
            least = float(self.made[x].square().sum(-1).min())
            if self.case.trained and least < 1e-2:  # of a row of zeros it is 1e12
                return None
            return self.step(way, x, terms=d)
        operands = [self.vector(d, wide=True)]
        if way == "layer_norm":
            dtype = self.case.values[operands[0]].dtype  # type: ignore[union-attr]
            operands.append(self.given((d,), "weight", plain=True, dtype=dtype))
        return self.step(way, x, *operands, terms=d)

    def matrix(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        *lead, _, k = shape
        n = r.choice((*CHANNELS, 48, 128))
        if math.prod(shape) * n > PRODUCTS:
            return None
        way = r.choice(("matmul", "matmul", "linear", "swiglu"))
        if way == "linear":
            operands = [self.weight((n, k), k), self.vector(n)]
        elif way == "swiglu":
            operands = [self.weight((k, n), k) for _ in "ab"]
        else:
            batch = [d if r.random() < 0.5 else 1 for d in lead]
            batch = batch if r.random() < 0.4 else []
            operands = [self.weight((*batch, k, n), k)]
        return self.step(way, x, *operands, terms=k)

    def attention(self, x: int) -> int | None:
        r = self.r
        b, h, s, d = self.shape(x)
        if d > 256 or b * h * s * s * d > PRODUCTS or d < 2:
            return None
        if d % 2 == 0 and r.random() < 0.25:
            tables = [self.given((s, d // 2), "weight", plain=True) for _ in "cs"]
            x = self.step("rope", x, *tables)
        keys = s if r.random() < 0.6 else r.choice((1, 5, 16, 40))
        kv = r.choice([g for g in (1, h) if h % g == 0])
        k, v = self.given((b, kv, keys, d)), self.given((b, kv, keys, d))
        options: dict[str, Any] = {}
        operands = [x, k, v]
        way = r.random()
        if way < 0.3:
            options["is_causal"] = True
        elif way < 0.6:
            of = (r.choice((1, b)), r.choice((1, h)), r.choice((1, s)), keys)
            dtype = torch.bool if r.random() < 0.5 else self.case.dtype
            operands.append(self.given(of, "mask", dtype=dtype))
        return self.step("sdpa", *operands, terms=max(keys, d), **options)

    def unary(self, x: int) -> int | None:
        op = self.next(UNARY)
        return self.step(op, x)

    def channelwise(self, x: int) -> int | None:
        op = self.r.choice(("bias", "bias", "scale"))
        return self.step(op, x, self.vector(self.shape(x)[1]))

    def binary(self, x: int) -> int | None:
        """With an operand that is repeated in any way, or an earlier value."""
        r, shape = self.r, self.shape(x)
        op = r.choice(("add", "add", "sub", "mul", "div", "maximum", "minimum", "where"))
        like = [at for at in self.pool if self.shape(at) == shape and at != x]
        other = r.choice(like) if like and r.random() < 0.2 else self.repeated(shape)
        if op == "where":
            condition = self.repeated(shape)
            return self.step(op, x, other, condition)
        swapped = op in ("sub", "maximum") and r.random() < 0.4
        return self.step(op, *((other, x) if swapped else (x, other)))

    def repeated(self, shape: Shape) -> int:
        r = self.r
        way = self.next(tuple(itertools.product((True, False), repeat=len(shape))))
        dims = [n if whole else 1 for n, whole in zip(shape, way, strict=True)]
        drop = r.randrange(len(shape)) if r.random() < 0.3 and len(shape) > 1 else 0
        return self.given(tuple(dims[drop:]))

    def view(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        rank = len(shape)
        op = r.choice(("slice", "concat", "concat", "reshape", "permute", "expand"))
        if op == "slice":
            dim = r.choice([d for d, n in enumerate(shape) if n > 2] or [-1])
            if dim < 0:
                return None
            start, stop = r.choice((0, 1, shape[dim] // 2)), shape[dim] - r.choice((0, 1))
            if stop <= start:
                return None
            step = r.choice((1, 1, 2))
            return self.step(op, x, dim=dim, start=start, stop=stop, step=step)
        if op == "concat":
            dim = r.randrange(rank)
            like = [
                at
                for at in self.pool
                if len(self.shape(at)) == rank
                and all(self.shape(at)[d] == n for d, n in enumerate(shape) if d != dim)
            ]
            more = list(shape)
            more[dim] = r.choice((1, 3, shape[dim]))
            other = r.choice(like) if r.random() < 0.5 else self.given(tuple(more))
            pair = (x, other) if r.random() < 0.5 else (other, x)
            return self.step(op, *pair, dim=dim)
        if op == "permute":
            dims = list(range(rank))
            r.shuffle(dims)
            return self.step(op, x, dims=tuple(dims))
        if op == "expand":
            if math.prod(shape) > 2000 or 1 not in shape:
                return None
            wide = tuple(3 if n == 1 and r.random() < 0.7 else n for n in shape)
            return self.step(op, x, shape=wide)
        if rank >= 3 and r.random() < 0.4:
            wanted: Shape = (*shape[:2], math.prod(shape[2:]))
        elif rank >= 2 and r.random() < 0.5:
            wanted = (math.prod(shape[:-1]), shape[-1])
        else:
            heads = r.choice([h for h in (2, 3, 4, 7) if shape[-1] % h == 0] or [1])
            wanted = (*shape[:-1], heads, shape[-1] // heads)
        if wanted == shape or len(wanted) > 5:
            return None
        return self.step(op, x, shape=wanted)

    def reduced(self, x: int) -> int | None:
        r, shape = self.r, self.shape(x)
        rank = len(shape)
        if rank >= 3 and r.random() < 0.5:
            dims = tuple(range(2, rank))
        else:
            dims = tuple(sorted(r.sample(range(rank), r.choice((1, 1, min(2, rank))))))
        keep = r.random() < 0.6
        left = math.prod(n for d, n in enumerate(shape) if d not in dims)
        if not keep and rank - len(dims) < 2:
            keep = True
        terms = math.prod(shape[d] for d in dims)
        mode = r.choice(("sum", "sum", "mean", "mean", "max", "min", "amax"))
        if self.case.trained and mode not in ("sum", "mean") and x not in self.exact:
            mode = "mean"
        if left < 16:  # few sums, that may all be nearly zero
            x = self.step("softplus", x)
        return self.step("reduction", x, terms=terms, dims=dims, mode=mode, keepdim=keep)

    def end(self, x: int) -> None:
        """Make ``x`` a result, and now and then another value; drop what no result needs."""
        r, case = self.r, self.case
        ends = [x]
        steps = [at for at in case.steps if at != x]
        if steps and r.random() < 0.3:
            ends.append(r.choice(steps))
        needed = set(ends)
        for at in reversed(range(len(case.values))):
            value = case.values[at]
            if at in needed and isinstance(value, Step):
                needed |= set(value.operands)
        kept = sorted(needed)
        place = {at: new for new, at in enumerate(kept)}
        for end in ends:
            shape, dtype, layout = self.shape(end), None, None
            if case.dtype != F32 and not case.fused and r.random() < 0.15:
                dtype = F32
            if len(shape) == 4 and not case.fused and r.random() < 0.3:
                layout = r.choice(("contiguous", "channels_last"))
            case.results.append(Result(place[end], dtype, layout))
        values = []
        for at in kept:
            value = case.values[at]
            if isinstance(value, Step):
                operands = tuple(place[o] for o in value.operands)
                value = Step(value.op, operands, value.attrs, value.shape, value.terms)
            values.append(value)
        case.values = values


def case(seed: int) -> Case:
    """The case of this seed."""
    maker = _Maker(seed)
    maker.grow()
    return maker.case
