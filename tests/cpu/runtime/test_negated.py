"""Tensors whose memory holds the negatives of their numbers, as of ``torch._neg_view``.

Kernels read memory, torch negates as it reads. Kernels run on the CPU here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg
from tests import generated, numerics

SHAPE = (24, 64)


def imaginary_part() -> torch.Tensor:
    """Of a conjugate; it begins at an address that kernels do not take."""
    return torch.randn(*SHAPE, dtype=torch.complex64).conj().imag


def negative() -> torch.Tensor:
    return torch._neg_view(torch.randn(SHAPE))


def expanded() -> torch.Tensor:
    return torch._neg_view(torch.randn(1, SHAPE[1])).expand(SHAPE)


KINDS: tuple[Callable[[], torch.Tensor], ...] = (imaginary_part, negative, expanded)


def compiled(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> cg.Executable:
    """An executable that is one kernel, for tensors that lie as x does."""
    kernels = generated.install(monkeypatch)
    g = cg.Graph("scaled")
    y = g.input("y", SHAPE, torch.float32)
    g.output("z", g.add(g.input("x", like=x), g.mul(y, 2.0)))
    made = g.compile("cpu")
    assert len(kernels) == 1
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_reads_the_numbers_and_not_their_negatives(
    kind: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = kind(), torch.randn(SHAPE)
    assert x.is_neg()
    wanted = x.double() + 2.0 * y.double()
    call = compiled(x, monkeypatch)
    names = call.spec.inputs
    ordered = [{"x": x, "y": y}[name] for name in names]
    for found in (call(*ordered), call(x=x, y=y), *call.stepwise(list(ordered))):
        numerics.check(found, wanted, torch.float32)
    assert x.is_neg()


def test_what_binds_memory_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, z = negative(), torch.randn(SHAPE), torch.empty(SHAPE)
    call = compiled(torch.randn(SHAPE), monkeypatch)
    said = "tensor '{}': is negated as it is read; expected memory .* numbers .resolve_neg.. it"
    for bound in (call.run, call.bind, call.capture):
        with pytest.raises(cg.BindError, match=said.format("x")):
            bound(x=x, y=y, z=z)
        with pytest.raises(cg.BindError, match=said.format("z")):
            bound(x=y, y=y, z=torch._neg_view(z))
    call.run(x=x.resolve_neg(), y=y, z=z)
    numerics.check(z, x.double() + 2.0 * y.double(), torch.float32)
