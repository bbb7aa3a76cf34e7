"""Updates of optimizers by generated kernels, which run on the CPU here, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.errors import NotSupported
from cudnngraph.kernels import patterns
from cudnngraph.kernels.pieces import Pieces
from cudnngraph.runtime import updates
from cudnngraph.select.decision import StepPlan
from tests import generated, numerics

Make = Callable[[Any], torch.optim.Optimizer]
SHAPES = ((3, 5), (7,), (4, 4, 3, 3), (1,), (33, 65), (128,), ())
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw without decay": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.0, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "adam with decay": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, fused=True),
    "adam uphill": lambda p: torch.optim.Adam(p, 1e-2, (0.5, 0.9), maximize=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "sgd with decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "damped": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, fused=True),
    "sgd uphill": lambda p: torch.optim.SGD(p, 0.1, maximize=True, fused=True),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StepPlan]]:
    """The kernels that are made, of which none is known before."""
    monkeypatch.setattr(updates, "_updates", {})
    yield generated.install(monkeypatch)


class Trained:
    """Parameters that an optimizer of their own updates by the same gradients."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32) -> None:
        rng = torch.Generator().manual_seed(0)
        self.params = [
            torch.nn.Parameter(_last(torch.randn(shape, generator=rng)).to(dtype))
            for shape in SHAPES
        ]
        self.optimizer = make(self.params)
        self.rng = torch.Generator().manual_seed(1)

    def step(self, *, ours: bool = False) -> None:
        for param in self.params:
            grad = torch.randn(param.shape, generator=self.rng)
            param.grad = _last(grad).to(param.dtype)
        if not ours:
            self.optimizer.step()
            return
        with updates.by_kernels():
            self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """The parameters and all states."""
        states = [self.optimizer.state[param] for param in self.params]
        kept = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
        return [each.detach() for each in (*self.params, *kept)]


def _last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_updates_as_torch_does(name: str, kernels: list[StepPlan]) -> None:
    ours, torchs = Trained(OPTIMIZERS[name]), Trained(OPTIMIZERS[name])
    exact = Trained(OPTIMIZERS[name], torch.float64)
    for _ in range(5):
        ours.step(ours=True)
        torchs.step()
        exact.step()
    assert len(kernels) == 1
    assert isinstance(patterns.schedule_of(kernels[0].choice), Pieces)  # type: ignore[arg-type]
    for mine, other, wide in zip(ours.tensors(), torchs.tensors(), exact.tensors(), strict=True):
        assert mine.stride() == other.stride()
        off = (mine.double() - wide).norm()
        least = (
            2 * numerics.ROUNDOFF[torch.float32] * max(wide.norm(), wide.numel() ** 0.5)
        )  # of numbers of size 1
        assert off <= 2 * (other.double() - wide).norm() + least


def test_a_rate_that_changes_needs_no_other_kernel(kernels: list[StepPlan]) -> None:
    ours, torchs = Trained(OPTIMIZERS["momentum"]), Trained(OPTIMIZERS["momentum"])
    for number in range(6):
        for each in (ours, torchs):
            each.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        ours.step(ours=True)
        torchs.step()
    assert len(kernels) == 1
    torch.testing.assert_close(ours.tensors(), torchs.tensors())


def test_a_rate_may_be_a_tensor(kernels: list[StepPlan]) -> None:
    rate = torch.tensor(0.1)
    made = Trained(lambda p: torch.optim.AdamW(p, rate, fused=True))
    other = Trained(lambda p: torch.optim.AdamW(p, 0.1, fused=True))
    for number in range(3):
        rate.fill_(0.1 / (1 + number))
        other.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        made.step(ours=True)
        other.step()
    assert len(kernels) == 1
    torch.testing.assert_close(made.tensors(), other.tensors())


def test_many_parameters_take_several_kernels(kernels: list[StepPlan]) -> None:
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(2 * updates.AT_ONCE + 1)]
    optimizer = torch.optim.AdamW(params, 0.1, fused=True)
    for number, param in enumerate(params):
        param.grad = torch.full((8,), 1.0 + number)
    with updates.by_kernels():
        optimizer.step()
    assert len(kernels) == 2, "one of them twice"
    for param in params:  # the first step of Adam goes as far whatever the gradient is
        torch.testing.assert_close(param.detach(), torch.full((8,), 1 - 1e-3 - 0.1))


def test_torch_updates_what_no_kernel_does(kernels: list[StepPlan]) -> None:
    """Beside a parameter that is updated by a kernel."""
    plain = [torch.randn(16), torch.randn(16, dtype=torch.bfloat16), torch.randn(8, 4).t()[::2]]
    plain.append(torch.randn(17)[1:])  # not where vectors begin
    grads = [torch.randn(16), torch.randn(16, dtype=torch.bfloat16), torch.randn(2, 8)]
    grads.append(torch.randn(16))
    found = []
    for ours in (True, False):
        params = [torch.nn.Parameter(_apart(each)) for each in plain]
        optimizer = torch.optim.SGD(params, 0.1, weight_decay=0.1, fused=True)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        with updates.by_kernels() if ours else torch.no_grad():
            optimizer.step()
        found.append([param.detach() for param in params])
    (kernel,) = kernels
    (shape,) = {kernel.spec.tensors[name].shape for name in kernel.spec.outputs}
    assert shape == (16,) and len(kernel.spec.outputs) == 1
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies as it does."""
    base = torch.zeros(tensor.storage_offset() + 1024, dtype=tensor.dtype)
    made = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return made.copy_(tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, fused=True),
        lambda p: torch.optim.Adam(p, 0.1, (0.0, 0.9), fused=True),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
    ],
    ids=["amsgrad", "no average", "not fused", "another one"],
)
def test_other_updates_are_torchs(make: Make, kernels: list[StepPlan]) -> None:
    ours, torchs = Trained(make), Trained(make)
    for _ in range(2):
        ours.step(ours=True)
        torchs.step()
    assert kernels == []
    torch.testing.assert_close(ours.tensors(), torchs.tensors(), rtol=0, atol=0)


def test_an_update_that_a_scaler_may_leave_out_is_torchs(kernels: list[StepPlan]) -> None:
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([param], 0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for grad, wanted in ((4.0, 0.9), (float("inf"), 0.9), (2.0, 0.8)):
        param.grad = torch.full((8,), grad)
        scaler.scale(torch.ones(()))
        with updates.by_kernels():
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(param.detach(), torch.full((8,), wanted))
    assert kernels == []


def test_torch_updates_where_no_kernel_can_be_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise NotSupported("a generated kernel", ["there is no NVRTC"])

    monkeypatch.setattr(updates, "_updates", {})
    for compiled in (None, refuse):  # steps of another kind; a graph that does not compile
        if compiled is not None:
            monkeypatch.setattr(cg.Graph, "compile", compiled)
        updates._updates.clear()
        ours, torchs = Trained(OPTIMIZERS["adamw"]), Trained(OPTIMIZERS["adamw"])
        ours.step(ours=True)
        torchs.step()
        assert list(updates._updates.values()) == [None]
        torch.testing.assert_close(ours.tensors(), torchs.tensors(), rtol=0, atol=0)


def test_parameters_of_one_memory_are_torchs(kernels: list[StepPlan]) -> None:
    """No kernel writes over what another block of it reads."""
    found = []
    for ours in (True, False):
        whole = torch.linspace(0, 1, 32)
        params = [torch.nn.Parameter(whole[:16]), torch.nn.Parameter(whole[4:20])]
        optimizer = torch.optim.SGD(params, 0.5, fused=True)
        for param in params:
            param.grad = torch.ones(16)
        with updates.by_kernels() if ours else torch.no_grad():
            optimizer.step()
        found.append(whole)
    torch.testing.assert_close(*found)


def test_what_autograd_has_saved_of_a_parameter_is_known_to_be_changed(
    kernels: list[StepPlan],
) -> None:
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([param], 0.1, fused=True)
    loss = (param * param).sum()
    param.grad = torch.ones(8)
    with updates.by_kernels():
        optimizer.step()
    assert len(kernels) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torchs_functions_are_back_behind_the_last_context() -> None:
    before = torch._fused_adamw_  # type: ignore[attr-defined]
    with pytest.raises(KeyError), updates.by_kernels():
        with updates.by_kernels():
            assert torch._fused_adamw_ is not before  # type: ignore[attr-defined]
        assert torch._fused_adamw_ is not before  # type: ignore[attr-defined]
        raise KeyError
    assert torch._fused_adamw_ is before  # type: ignore[attr-defined]
