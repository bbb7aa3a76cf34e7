"""Tensors that torch has and our graphs do not: complex ones, with views that conjugate or negate
what memory holds, and sparse gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.models import dynamo
from tests import numerics
from tests.fused import compiled
from tests.models import Of
from tests.training import alike

Tensor = torch.Tensor

#: Steps of a random chain on a square complex matrix z, with a second one w.
STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conj": lambda z, w: z.conj(),
    "transposed conj": lambda z, w: z.mH,
    "turned": lambda z, w: z * 1j,
    "imaginary of conj": lambda z, w: torch.complex(z.conj().imag, w.real),
    "negative view": lambda z, w: torch.complex(z.real, z.conj().imag) + w,
    "product": lambda z, w: (z @ w) / 3,
    "product of conj": lambda z, w: (z.conj() @ w.mH) / 3,
    "elementwise": lambda z, w: z * w.conj(),
    "real pairs": lambda z, w: torch.view_as_complex(torch.view_as_real(z) * 0.5) + w,
    "angle": lambda z, w: torch.polar(z.abs() + 0.1, w.real),
    "half": lambda z, w: torch.cat([z[:, 2:].conj(), w[:, :2]], 1),
    "spectrum": lambda z, w: torch.fft.fft(z, norm="ortho") + w,
    "real spectrum": lambda z, w: torch.complex(torch.fft.irfft(z, 4), w.imag),
}


def chain(seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of two (2, 4, 4) tensors, of some steps."""
    generator = random.Random(seed)
    names = [generator.choice(sorted(STEPS)) for _ in range(generator.randint(2, 5))]

    def function(x: Tensor, y: Tensor) -> Tensor:
        z, w = torch.complex(x[0], x[1]), torch.complex(y[0], y[1])
        for name in names:
            z, w = STEPS[name](z, w), z
        z = z + 0.1 * w.conj() + 0.1 * torch.complex(y[1], y[0])
        return torch.view_as_real(z) if seed % 2 else z.abs() + w.imag

    return function


def two(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, 4, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("seed", range(24))
def test_random_chains_of_complex_steps_are_trained(seed: int) -> None:
    """What a forward saves may be a view that conjugates the rest of what it saves."""
    torch._dynamo.reset()
    alike(chain(seed), *two(seed), check=False)


def _lazy(x: Tensor, kind: str) -> tuple[Tensor, ...]:
    z = torch.complex(x, x.flip(0))
    return (z.conj(), z.mH, z) if kind == "conj" else (z.conj().imag, z.mH.imag, z.real)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", ["conj", "negative"])
@pytest.mark.parametrize("left", [None, "forward", "backward"])
def test_inputs_that_conjugate_what_memory_holds_are_read_as_numbers(
    kind: str, check: bool, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a graph that is left to torch, which asks how its inputs lie."""
    torch._dynamo.reset()
    real = dynamo._Compiled._made

    def made(graph: Any, args: Any) -> Any:
        return None if left and graph._title.startswith(left) else real(graph, args)

    monkeypatch.setattr(dynamo._Compiled, "_made", made)

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = (a @ b) * c
        return torch.view_as_real(y * 2) if y.is_complex() else y

    run = compiled(function, check=check)
    found = []
    for each in (run, function):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = each(*_lazy(x, kind))
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
    for mine, own in zip(*found, strict=True):
        torch.testing.assert_close(mine, own)


@pytest.mark.parametrize("kind", ["conj", "negative"])
def test_what_is_written_over_such_inputs_reaches_memory(kind: str) -> None:
    torch._dynamo.reset()

    def function(x: Tensor) -> Tensor:
        x.add_(1j if kind == "conj" else 1)
        return x * 2

    found = []
    for run in (compiled(function), function):
        z = torch.view_as_complex(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
        y = run(z.conj() if kind == "conj" else z.conj().imag)
        found.append((y.resolve_conj(), z))
    for mine, own in zip(*found, strict=True):
        assert torch.equal(mine, own)


class Chain(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.function = chain(seed)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


@pytest.mark.parametrize("seed", range(24))
def test_random_chains_of_complex_steps_are_fused(seed: int) -> None:
    model, given = Chain(seed).eval(), two(seed)
    made, exact = cg.fuse(model, tuple(given))(*given), model(*(x.double() for x in given))
    numerics.check(made, exact, torch.float32, model(*given), terms=64)


class Held(nn.Module):
    """A buffer, and views of it that conjugate and negate: all of them the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("z", torch.view_as_complex(torch.randn(4, 4, 2)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        z: Tensor = self.z
        return x * z.imag, x * z.conj().imag, (x * z).real, (x * z.conj()).imag, z.conj() * x


def test_constants_of_one_memory_are_told_apart() -> None:
    torch.manual_seed(0)
    model, x = Held().eval(), torch.randn(4, 4)
    for made, wanted in zip(cg.fuse(model, x)(x), model(x), strict=True):
        assert torch.equal(made, wanted.resolve_conj())


class Rotates(nn.Module):
    """A rotary embedding as a product of complex numbers; ``conj`` turns the other way."""

    def __init__(self, *, conj: bool = False, of_inputs: bool = False) -> None:
        super().__init__()
        self.conj, self.of_inputs = conj, of_inputs
        self.register_buffer("angles", torch.randn(5, 4))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """(N, 5, heads, 8), (5,) → (N, 5, heads, 8)."""
        angles = self.angles * places[:, None] if self.of_inputs else self.angles
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        turn = turn.conj() if self.conj else turn
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(turn * z).flatten(3)


@pytest.mark.parametrize("conj", [False, True])
@pytest.mark.parametrize("of_inputs", [False, True])
def test_rotations_are_real_products(conj: bool, of_inputs: bool) -> None:
    torch.manual_seed(0)
    model = Rotates(conj=conj, of_inputs=of_inputs).eval()
    given = torch.randn(2, 5, 3, 8), torch.randn(5)
    fused = cg.fuse(model, given)
    assert fused.report is not None
    left = {name for name, _ in fused.report.opaque}
    assert left <= ({"aten.polar.default", "aten._conj.default"} if of_inputs else set())
    exact = copy.deepcopy(model).double()(*(x.double() for x in given))
    numerics.check(fused(*given), exact, torch.float32, model(*given), terms=2)


def test_a_complex_product_that_is_read_twice_is_torchs() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x) * (1 + 2j)
        y: Tensor = torch.view_as_real(z) + z.abs()[..., None]
        return y

    model, x = Of(function).eval(), torch.randn(3, 4, 2)
    numerics.check(cg.fuse(model, x)(x), model(x.double()), torch.float32, model(x), terms=2)


def test_gradients_of_keys_that_were_rotated_are_pairs_side_by_side() -> None:
    """They are those of transposed keys, and so lie one row behind the other."""

    def function(x: Tensor) -> Tensor:
        q, k = x.view(2, 7, 2, 2, 4).transpose(1, 3).unbind(2)
        by = torch.polar(torch.ones(7, 2).to(x), torch.arange(14.0).view(7, 2).to(x))

        def rotated(each: Tensor) -> Tensor:
            pairs = torch.view_as_complex(each.reshape(*each.shape[:-1], 2, 2))
            return torch.view_as_real(pairs * by).flatten(-2)

        return rotated(q) @ rotated(k).mT

    torch._dynamo.reset()
    torch.manual_seed(0)
    alike(function, torch.randn(2, 7, 16))  # fails if a graph is refused


def test_sparse_gradients_are_torchs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    table, ids = nn.Embedding(10, 8, sparse=True), torch.tensor([[0, 1, 2], [3, 3, 4]])
    x = torch.randn(2, 8)
    found = []
    for run in (table, compiled(lambda ids: table(ids), check=False)):
        table.weight.grad = None
        (run(ids).mean(1) * x).sum().backward()
        grad = table.weight.grad
        assert grad is not None and grad.is_sparse
        found.append(grad.to_dense())
    assert torch.equal(*found)
    assert not any(each.refused for each in cg.reports())  # it is between graphs of ours
