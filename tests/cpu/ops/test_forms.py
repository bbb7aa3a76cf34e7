"""The forms of results that are known without torch's own kernels for them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from cudnngraph.ops import forms, meta
from tests import python

_aten: Any = torch.ops.aten
DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.bool, torch.uint8),
)
FLOATS = DTYPES[:4]


def laid(
    shape: Sequence[int], draw: random.Random, dtypes: Sequence[torch.dtype] = FLOATS
) -> torch.Tensor:
    """Ones that lie in some order of dims, with gaps or without."""
    dims = list(range(len(shape)))
    if draw.random() < 0.7:
        draw.shuffle(dims)
    held = torch.ones([shape[dim] * draw.choice((1, 1, 2)) for dim in dims])
    held = held.to(draw.choice(dtypes))[tuple(slice(0, shape[dim]) for dim in dims)]
    return held.permute([dims.index(at) for at in range(len(shape))])


def on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [on_meta(each) for each in value] if isinstance(value, list) else value


def form(x: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's form; the stride of a dim of one element is no matter."""
    return x.dtype, x.shape, [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def pointwise() -> Iterator[Any]:
    for name in dir(_aten):
        packet = getattr(_aten, name)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            if torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
                yield op


def drawn(op: Any, draw: random.Random) -> list[Any] | None:
    """Some arguments of an op by position; None for an op that takes others."""
    shape = [draw.choice((1, 2, 3, 5)) for _ in range(draw.randrange(5))]
    # A gradient has the dtype of what it is of.
    dtypes = [torch.float32] if op._schema.name.endswith("_backward") else DTYPES
    args: list[Any] = []
    for each in op._schema.arguments:
        kind = str(each.type)
        if each.kwarg_only or (each.has_default_value() and draw.random() < 0.6):
            break
        if kind == "Tensor":
            own = [draw.choice((n, n, n, 1)) for n in shape[draw.choice((0, 0, 0, 1)) :]]
            args.append(laid(own, draw, dtypes))
        elif kind in ("number", "float", "int", "bool"):
            args.append({"float": 0.5, "int": 1, "bool": True}.get(kind, draw.choice((2, 0.5))))
        else:
            return None
    return args


POINTWISE = list(pointwise())


@pytest.mark.parametrize("part", range(8))
def test_results_of_pointwise_ops_are_torchs(part: int) -> None:
    """As its kernels of the CPU make them, or as those of its meta device say."""
    known = 0
    for op in POINTWISE[part::8]:
        draw = random.Random(str(op))
        for _ in range(12):
            args = drawn(op, draw)
            mine = None if args is None else forms.elementwise(op, on_meta(args), {})
            if mine is None:
                continue
            allowed = []
            for given in (args, on_meta(args)):
                try:
                    allowed.append(form(op(*given)))
                except (RuntimeError, NotImplementedError):
                    continue
            if allowed:
                known += 1
                assert form(mine) in allowed, (op, [form(x) for x in args if hasattr(x, "dim")])
    assert known > 100


def test_ones_of_operands_have_their_dims_for_promotion() -> None:
    wide, narrow = torch.ones((), dtype=torch.float64), torch.ones(3, dtype=torch.float16)
    for args in ((narrow, wide), (wide, narrow), (narrow, 2.5), (narrow > 0, 2)):
        mine = forms.elementwise(_aten.add.Tensor, on_meta(list(args)), {})
        assert mine is not None and mine.dtype == _aten.add.Tensor(*args).dtype


def test_copies_to_a_layout_are_left_to_torch() -> None:
    x = on_meta(torch.ones(2, 3, 4, 5))
    for op in (_aten.clone.default, _aten._to_copy.default):
        made = meta.infer(op, x, memory_format=torch.channels_last)
        assert made.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("op", [_aten.any.dims, _aten.all.dims, _aten.mean.dim, _aten.std.dim])
def test_reductions_over_no_dims_are_torchs(op: Any) -> None:
    """All dims for some ops, none for others."""
    x = torch.ones(2, 3) if op in (_aten.mean.dim, _aten.std.dim) else torch.ones(2, 3) > 0
    assert form(meta.infer(op, on_meta(x), [])) == form(op(x, []))


def others(draw: random.Random) -> Iterator[tuple[Any, list[Any]]]:
    """Calls of ops that are no pointwise ones."""
    rank = draw.randrange(1, 5)
    shape = [draw.choice((1, 2, 3, 4)) for _ in range(rank)]
    dims, keep = draw.sample(range(rank), draw.randrange(1, rank + 1)), draw.random() < 0.5
    x, dim = laid(shape, draw, FLOATS[:3:2]), dims[0]
    yield _aten.mean.dim, [x, dims, keep]
    yield _aten.mean.default, [x]
    yield _aten.linalg_vector_norm.default, [x, 3.0, draw.choice((dims, None)), keep]
    yield _aten.std.correction, [x, dims]
    yield _aten.var.dim, [x, dims, False, keep]
    yield _aten.logsumexp.default, [x, dims, keep]
    yield _aten.any.dim, [x > 2, dim, keep]
    yield _aten.all.default, [x > 2]
    for op in (_aten.cumsum.default, _aten.cumprod.default, _aten.log_softmax.int):
        yield op, [x, dim]
    yield _aten.roll.default, [x, [1] * len(dims), dims]
    if rank > 1:
        yield _aten.tril.default, [x]
        yield _aten.triu.default, [x, 1]
        groups = draw.choice([n for n in (1, 2, 3, 4) if shape[1] % n == 0])
        yield _aten.group_norm.default, [x, groups, torch.ones(shape[1]).to(x.dtype)]
    twice = laid([2 * n if at == dim else n for at, n in enumerate(shape)], draw, FLOATS[:3:2])
    yield _aten.glu.default, [twice, dim]
    same = [laid(shape, draw, [x.dtype]) for _ in range(draw.randrange(1, 4))]
    yield _aten.stack.default, [same, draw.randrange(rank + 1)]
    sizes = (
        [draw.randrange(1, 4) if at == dim else n for at, n in enumerate(shape)] for _ in range(3)
    )
    yield _aten.cat.default, [[laid(each, draw, [x.dtype]) for each in sizes], dim]
    n, m, k = (draw.randrange(1, 5) for _ in range(3))
    given = [laid(each, draw, [torch.float32]) for each in ([m], [n, k], [k, m])]
    yield _aten.addmm.default, given
    yield _aten.rms_norm.default, [x, shape[-1:], draw.choice((None, torch.ones(shape[-1:])))]


def test_results_of_other_ops_are_torchs() -> None:
    draw, known = random.Random(0), set()
    for _ in range(300):
        for op, args in others(draw):
            name = op._schema.name
            mine = forms.FORMS[name](meta.bind_arguments(op, on_meta(args), {}))
            if mine is not None:
                known.add(name)
                assert form(mine) == form(op(*args)), (op, args)
    assert known == {op._schema.name for op, _ in others(random.Random(4))} | {
        "aten::tril",
        "aten::triu",
        "aten::group_norm",
    }


@pytest.mark.parametrize(
    "op, args",
    [
        (_aten.cumsum.default, [torch.ones(2, 3), 2]),
        (_aten.log_softmax.int, [torch.ones(2, 3), -3]),
        (_aten.roll.default, [torch.ones(2, 3), [1, 1], [0]]),
        (_aten.roll.default, [torch.ones(2, 3), [1], [2]]),
        (_aten.tril.default, [torch.ones(3)]),
        (_aten.group_norm.default, [torch.ones(2, 3, 4), 2]),
        (_aten.group_norm.default, [torch.ones(2, 4, 4), 2, torch.ones(2)]),
        (_aten.glu.default, [torch.ones(2, 3), 1]),
        (_aten.stack.default, [[torch.ones(2), torch.ones(3)], 0]),
        (_aten.addmm.default, [torch.ones(3), torch.ones(2, 4), torch.ones(4, 2)]),
        (_aten.rms_norm.default, [torch.ones(2, 4), [3]]),
        (_aten.mean.dim, [torch.ones(2, 4), [0, 0]]),
        (_aten.atan2.default, [torch.ones(2), torch.ones(3)]),
    ],
    ids=str,
)
def test_what_torch_refuses_has_no_form(op: Any, args: Any) -> None:
    """It is left to torch, which says why."""
    with pytest.raises((RuntimeError, IndexError)):
        op(*args)
    rule = forms.FORMS.get(op._schema.name)
    given = on_meta(args)
    assert rule is None or rule(meta.bind_arguments(op, given, {})) is None
    assert forms.elementwise(op, given, {}) is None


_FUSED = """
import sys
import torch
import torch.nn.functional as F
import cudnngraph as cg
from tests.models import Of
x = torch.rand(2, 6, 8, 8)
functions = (
    lambda m, x: torch.atan2(x.exp().log().neg().abs(), x) ** 2,
    lambda m, x: torch.where((x > 0.5) & ~(x < 0.1), x.sin(), x.clamp(0.1, 0.9)),
    lambda m, x: x.masked_fill(x > 0.5, 0.0) + x.mean(1, keepdim=True),
    lambda m, x: torch.addmm(x[0, 0, 0], x[0, 0], x[0, 1]),
    lambda m, x: F.glu(F.prelu(F.celu(x), torch.ones(6)), 1),
    lambda m, x: torch.cat([-x[..., 4:], x[..., :4]], -1) * x[..., :8],
    lambda m, x: F.group_norm(torch.stack([x, x], 1).flatten(1, 2), 3),
    lambda m, x: F.instance_norm(F.rms_norm(x, (8,))).cumsum(1).roll(1, 1).tril(),
    lambda m, x: F.log_softmax(x, 1) + x.logsumexp(1, keepdim=True) + x.std(1, keepdim=True),
    lambda m, x: F.normalize(x, dim=1) * (x > 2).any(1, keepdim=True),
)
for function in functions:
    cg.fuse(Of(function).eval(), x)
    assert not {"torch._dynamo", "sympy"} & set(sys.modules), function.__code__.co_firstlineno
"""


def test_fuse_does_not_import_torchs_compiler_for_these() -> None:
    done = python.run("-c", _FUSED)
    assert done.returncode == 0, done.stderr
