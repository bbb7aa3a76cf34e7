"""Writes over tensors that see one memory, as ops of a graph that has none."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cudnngraph as cg
from cudnngraph.errors import CannotImport
from cudnngraph.models import trace
from tests import numerics
from tests.converted import check
from tests.models import Of, image

Tensor = torch.Tensor
SHAPE = (4, 6, 8)


def traced(model: nn.Module, *args: Tensor) -> trace.Traced:
    found = trace.trace(model.eval(), args, {})
    assert found is not None
    return found


def replayed(found: trace.Traced, *args: Tensor) -> Any:
    """What the graph of a run gives."""
    given = {**found.constants, **dict(zip(found.placeholders, args, strict=True))}
    env: dict[Any, Any] = {}
    for node in found.graph.nodes:
        filled, named = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = given[node.name]
        elif node.op == "call_function":
            env[node] = node.target(*filled, **named)
    return filled[0]


# -- random programs -------------------------------------------------------------------------------


def _cut(t: Tensor, r: random.Random) -> Tensor:
    dim = r.randrange(t.dim())
    start, step = r.randrange(t.shape[dim]), r.choice([1, 1, 2, 3])
    stop = r.randint(start + 1, t.shape[dim])
    return t[(slice(None),) * dim + (slice(start, stop, step),)]


def _split(t: Tensor, r: random.Random) -> Tensor:
    dim, size = (n := r.randrange(t.dim())), t.shape[n]
    first = r.randint(1, size)
    sizes = [first] if first == size else [first, size - first]
    parts = r.choice([t.split(first, dim), t.split(sizes, dim), t.chunk(2, dim), t.unbind(dim)])
    return r.choice(list(parts))


def _view(t: Tensor, r: random.Random) -> Tensor:
    return t.view(r.choice([(-1,), (t.shape[0], -1), (1, *t.shape)])) if t.is_contiguous() else t


#: Views for certain, and ops that give a view or a copy.
VIEWS: Mapping[str, Callable[[Tensor, random.Random], Tensor]] = {
    "cut": _cut,
    "split": _split,
    "view": _view,
    "select": lambda t, r: t.select(
        n := r.randrange(t.dim()), r.randrange(-t.shape[n], t.shape[n])
    ),
    "transpose": lambda t, r: t.transpose(r.randrange(t.dim()), -1),
    "permute": lambda t, r: t.permute(r.sample(range(t.dim()), t.dim())),
    "unsqueeze": lambda t, r: t.unsqueeze(r.randint(-t.dim() - 1, t.dim())),
    "squeeze": lambda t, r: t.squeeze() if r.random() < 0.5 else t.squeeze(r.randrange(t.dim())),
    "narrow": lambda t, r: t.narrow(n := r.randrange(t.dim()), 0, r.randint(1, t.shape[n])),
    "diagonal": lambda t, r: (
        t.diagonal(r.choice([0, 1]), 0, -1) if min(t.shape) > 1 < t.dim() else t
    ),
    "detach": lambda t, r: t.detach(),
}
PERHAPS: Mapping[str, Callable[[Tensor, random.Random], Tensor]] = {
    "reshape": lambda t, r: t.reshape(r.choice([(-1,), tuple(t.shape)])),
    "flatten": lambda t, r: t.flatten(),
    "contiguous": lambda t, r: t.contiguous(),
    "as_strided": lambda t, r: t.as_strided((2,), (1,), t.storage_offset()),
}
WRITES: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda t, other: t.add_(other),
    "scaled": lambda t, other: t.mul_(0.5).sub_(1),
    "copied": lambda t, other: t.copy_(other),
    "filled": lambda t, other: t.fill_(3),
    "zeros": lambda t, other: t.zero_(),
    "activated": lambda t, other: F.relu(t, inplace=True),
    "masked": lambda t, other: t.masked_fill_(t > 0.5, -2),
    "indexed": lambda t, other: t.index_put_((torch.tensor([0]),), other),
    "set": lambda t, other: t.__setitem__(0, other),
}


#: What changes how a tensor lies over its memory, in place.
RESHAPES: Mapping[str, Callable[[Tensor, random.Random], Any]] = {
    "unsqueezed": lambda t, r: t.unsqueeze_(r.randint(-t.dim() - 1, t.dim())),
    "squeezed": lambda t, r: t.squeeze_() if r.random() < 0.5 else t.squeeze_(0),
    "transposed": lambda t, r: t.transpose_(r.randrange(t.dim()), -1),
    "swapped": lambda t, r: t.swapaxes_(0, -1),
    "turned": lambda t, r: t.t_() if t.dim() <= 2 else t,
}


def _program(
    seed: int, *, perhaps: bool, reshapes: bool = False
) -> Callable[[Any, Tensor], list[Tensor]]:
    """Views of one tensor and of what is computed of it, written and read in a random order."""
    views = {**VIEWS, **PERHAPS} if perhaps else VIEWS

    def run(_: Any, x: Tensor) -> list[Tensor]:
        r = random.Random(seed)
        there, shown = [x * 1.5], []
        for _ in range(r.randint(4, 14)):
            t = r.choice(there)
            if reshapes and t.dim() and r.random() < 0.3:
                RESHAPES[r.choice(list(RESHAPES))](t, r)
            kind = r.random()
            if kind < 0.05:  # only read: elements that are one in memory
                shown.append(t.unsqueeze(0).expand(2, *t.shape))
            elif kind < 0.5 and t.dim() and t.numel():
                there.append(views[r.choice(list(views))](t, r))
            elif kind < 0.85 and t.dim() and t.numel():
                WRITES[r.choice(list(WRITES))](t, r.choice(there).amax())
            else:
                there.append(t * 0.5 + 1)
        return [*there, *shown]

    return run


@pytest.mark.parametrize("part", range(8))
def test_random_writes_over_random_views_are_those_of_eager(part: int) -> None:
    x = image(*SHAPE)
    for seed in range(40 * part, 40 * part + 40):
        model = Of(_program(seed, perhaps=False)).eval()
        want = model(x)
        for mine, theirs in zip(replayed(traced(model, x), x), want, strict=True):
            assert torch.equal(mine, theirs), seed


@pytest.mark.parametrize("part", range(8))
def test_tensors_that_change_their_shape_in_place_are_those_of_eager(part: int) -> None:
    x = image(*SHAPE)
    for seed in range(40 * part, 40 * part + 40):
        model = Of(_program(seed, perhaps=False, reshapes=True)).eval()
        want = model(x)
        for mine, theirs in zip(replayed(traced(model, x), x), want, strict=True):
            assert mine.shape == theirs.shape and torch.equal(mine, theirs), seed


@pytest.mark.parametrize("part", range(8))
def test_what_may_be_a_view_is_right_or_left_to_torch(part: int) -> None:
    x, taken = image(*SHAPE), 0
    for seed in range(40 * part, 40 * part + 40):
        model = Of(_program(seed, perhaps=True)).eval()
        found = trace.trace(model, (x,), {})
        if found is None:
            continue
        taken += 1
        for mine, theirs in zip(replayed(found, x), model(x), strict=True):
            assert torch.equal(mine, theirs), seed
    assert 10 <= taken < 40


@pytest.mark.parametrize("seed", range(12))
def test_random_writes_become_graphs(seed: int) -> None:
    check(Of(_program(1000 + seed, perhaps=False)), image(*SHAPE))


# -- forms that models have ------------------------------------------------------------------------


def _adds_to_a_part(m: Any, x: Tensor) -> Tensor:
    """As MViT adds the position of a query to the scores of all but the first token."""
    y = x * 2
    y[:, 1:, 1:] += m.c[:5].view(5, 1)
    return y


def _interleaves(m: Any, x: Tensor) -> Tensor:
    """As rotary embeddings of pairs that stand side by side."""
    y = torch.empty_like(x)
    y[..., ::2], y[..., 1::2] = x[..., ::2] * 2 - x[..., 1::2], x[..., 1::2] * 3
    return y


def _shifts(m: Any, x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape)
    y[:, 1:] = x[:, :-1].clone()
    y[:, 0] = 7.0
    return y


def _adds_to_what_is_seen(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    before = y.transpose(0, 1)
    y += x
    return before * 3


def _writes_parts(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = (x + 1).view(4, 2, 24)
    a, b = y.unbind(1)
    a.mul_(b)
    y.view(4, 48).chunk(3, 1)[1].neg_()
    return a, y


def _lstm_cell(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Torch's own writes its gates over parts of what it has computed."""
    weight = torch.cat([x[1], x[2]])[:8]
    return torch.lstm_cell(x[0], [x[1, :, :2], x[2, :, :2]], weight, weight[:, :2])


def _writes_unsafe_parts(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    y.unsafe_chunk(2, 1)[0].neg_()
    y.unsafe_split_with_sizes([2, 6], 2)[1].mul_(3)
    seen = y.unsafe_split(4, 2)
    seen[0].add_(1)
    return y, *seen


def _of_constants(m: Any, x: Tensor) -> Tensor:
    """As ConViT makes the distances of its patches."""
    made = torch.zeros(1, 4, 4, 3)
    along = torch.arange(4).view(1, -1) - torch.arange(4).view(-1, 1)
    made[:, :, :, 2] = (along**2).unsqueeze(0)
    made[:, :, :, 0] = along.unsqueeze(0)
    return x[:, :4, :3] + made[0].sum(0)


def _in_another_dtype(m: Any, x: Tensor) -> Tensor:
    y = (x * 2).to(torch.float64).to(torch.float32)
    y[1:] += torch.ones(8, dtype=torch.float64)
    return y


def _through_a_reshape(m: Any, x: Tensor) -> Tensor:
    """Of which nothing else is read: whether it is a view or a copy does not matter."""
    y = (x * 2).transpose(0, 1).reshape(6, 32)
    y += 1
    return y * y


#: Each with ops that its graph must have, and ones that it must not.
FORMS: Mapping[str, tuple[Callable[..., Any], set[str], set[str]]] = {
    "part": (_adds_to_a_part, {"add", "concat"}, {"aten"}),
    "pairs": (_interleaves, {"concat"}, {"aten"}),
    "shifted": (_shifts, {"concat"}, {"aten"}),
    "seen": (_adds_to_what_is_seen, {"add", "transpose"}, {"aten", "concat"}),
    "parts": (_writes_parts, {"mul", "neg", "concat"}, {"aten"}),
    "lstm_cell": (_lstm_cell, {"matmul", "sigmoid", "tanh"}, {"aten"}),
    "unsafe_parts": (_writes_unsafe_parts, {"neg", "mul", "concat"}, {"aten"}),
    "constants": (_of_constants, {"add"}, {"aten", "concat"}),
    "dtype": (_in_another_dtype, {"concat"}, set()),
    "reshaped": (_through_a_reshape, {"add", "mul"}, {"aten", "concat"}),
    "filled": (lambda m, x: (x * 2).fill_(3) + x, {"add"}, {"aten"}),
    "a_part_filled": (lambda m, x: ((y := x * 2)[:, 2].fill_(3), y)[1], {"concat"}, {"aten"}),
    "a_part_cleared": (lambda m, x: ((y := x * 2)[:, 2].zero_(), y)[1], {"concat"}, {"aten"}),
    "masked": (lambda m, x: ((y := x * 2).__setitem__(y > 0, 5.0), y)[1], {"where"}, {"aten"}),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_models_write_are_ops_of_the_graph(name: str) -> None:
    function, there, not_there = FORMS[name]
    model = Of(function, c=image(8)).eval()
    assert trace.trace(model, (image(*SHAPE),), {}) is not None
    imported = check(model, image(*SHAPE))
    found = set() if imported.spec is None else {node.op for node in imported.spec.nodes}
    assert there <= found and not not_there & found, found


def _writes_a_held_tensor(m: Any, x: Tensor) -> Tensor:
    m.c[1:].mul_(0.5)
    return x + m.c


def _reshapes_what_it_is_given(m: Any, x: Tensor) -> Tensor:
    x.unsqueeze_(0)
    return x * 2


THEN_RESHAPED: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "quantile": lambda m, x: torch.quantile(x, 0.3),  # both, in torch's own code
    "quantiles of rows": lambda m, x: torch.nanquantile(x, torch.tensor([0.1, 0.5]).to(x), dim=1),
    "gathered": lambda m, x: x.gather(2, x.long() * 0).lerp_(x, 0.25).unsqueeze_(0).mul_(2),
    "one of several": lambda m, x: x.sort(1)[0].cumsum_(1).transpose_(1, 2),
}


@pytest.mark.parametrize("name", THEN_RESHAPED)
def test_what_is_written_over_and_then_reshaped_had_its_own_shape(name: str) -> None:
    function, x = THEN_RESHAPED[name], torch.randn(SHAPE)
    fused = cg.fuse(Of(function).eval(), x)
    assert fused.report is not None
    numerics.check(fused(x), function(None, x.double()), x.dtype, function(None, x), terms=64)


def test_an_argument_does_not_change_its_shape() -> None:
    x = image(*SHAPE)
    with pytest.raises(CannotImport):
        cg.fuse(Of(_reshapes_what_it_is_given).eval(), x)
    assert x.shape == SHAPE


REFUSED: Mapping[str, tuple[Callable[..., Any], str]] = {
    "argument": (lambda m, x: (x[:, 1].add_(1), x)[1], "changes 'args_0' in place"),
    "reshaped_argument": (lambda m, x: x.reshape(-1).add_(1), "changes 'args_0' in place"),
    "held": (_writes_a_held_tensor, "changes 'c' in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_writes_over_what_is_given_are_refused(name: str) -> None:
    function, text = REFUSED[name]
    x, c = image(*SHAPE), image(8)
    model = Of(function, c=c).eval()
    before = x.clone(), model.c.clone()
    with pytest.raises(CannotImport, match=text):
        cg.fuse(model, x)
    assert torch.equal(x, before[0]) and torch.equal(model.c, before[1])


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: ((y := x * 2), z := y.reshape(-1), z.add_(1), y)[3],
        lambda m, x: ((y := x * 2), z := y.flatten(1), y.add_(1), z)[3],
        lambda m, x: ((y := x * 2), z := y.as_strided((3,), (1,)), z.add_(1), y)[3],
        lambda m, x: ((y := x * 2), z := y.transpose(0, 1).contiguous(), z.add_(1), y)[3],
    ],
)
def test_what_is_a_view_or_a_copy_is_left_to_torch_if_both_are_read(
    function: Callable[..., Any],
) -> None:
    model, x = Of(function).eval(), image(*SHAPE)
    assert trace.trace(model, (x,), {}) is None
    torch.testing.assert_close(cg.fuse(model, x, check=False)(x), model(x))


def test_a_view_of_another_dtype_is_no_view_of_ours() -> None:
    """Ops are told apart by themselves, not by how their names begin."""
    model = Of(lambda m, x: ((y := x * 2), y.view(torch.int32).fill_(0), y)[2]).eval()
    assert trace.trace(model, (image(*SHAPE),), {}) is None
