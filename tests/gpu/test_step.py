"""Training steps as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.models.dynamo import backend
from cudnngraph.runtime import updates

STEPS = 9
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, capturable=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "fused adam": lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.1, fused=True),
}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        # Without a bias: in front of a batch norm its gradient is rounding, and Adam's step is not.
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.mean((2, 3))))  # type: ignore[no-any-return]


def data(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 3, 16, 16, device="cuda")
    return x, torch.randint(10, (n,), device="cuda")


def trained(make: Make, *, capture: bool, compiled: bool = False, n: int = STEPS) -> Any:
    """The losses of some steps, and the state after them."""
    torch.manual_seed(0)
    net = Net().cuda()
    model: Any = torch.compile(net, backend=backend) if compiled else net
    optimizer = make(net.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss

    run: Any = cg.capture_step(step, optimizers=optimizer) if capture else step
    losses = []
    for number in range(n):
        if number == 6:
            for group in optimizer.param_groups:
                group["lr"] = 0.01
        losses.append(run(*data()).detach())
    if capture:
        assert run.captures == 1
    return torch.stack(losses), {k: v.clone() for k, v in net.state_dict().items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_without_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_updates", {})
    losses, state = trained(OPTIMIZERS[name], capture=True)
    if "fused" in name:
        assert any(updates._updates.values()), "a generated kernel updates the parameters"
    wanted, expected = trained(OPTIMIZERS[name], capture=False)
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    for key, value in state.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-5)


def test_a_compiled_model_is_captured_with_its_optimizer() -> None:
    losses, _ = trained(OPTIMIZERS["sgd"], capture=True, compiled=True)
    wanted, _ = trained(OPTIMIZERS["sgd"], capture=False)
    torch.testing.assert_close(losses, wanted, rtol=1e-2, atol=1e-3)


def test_scaled_gradients_are_captured() -> None:
    def run(capture: bool) -> tuple[torch.Tensor, float]:
        torch.manual_seed(0)
        net = Net().cuda()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        call: Any = cg.capture_step(step, optimizers=[optimizer]) if capture else step
        return torch.stack([call(*data()).detach() for _ in range(STEPS)]), scaler.get_scale()

    (losses, scale), (wanted, expected) = run(True), run(False)
    torch.testing.assert_close(losses, wanted, rtol=1e-2, atol=1e-3)
    assert scale == expected == 2.0**13


def test_each_step_drops_other_elements() -> None:
    net = Net(dropout=0.5).cuda().requires_grad_(False)
    call = cg.capture_step(lambda x: net(x), warm_up=1)
    x, _ = data()
    made = [call(x) for _ in range(5)]
    assert not any(torch.equal(a, b) for a, b in pairwise(made))


def test_a_graph_for_each_form_and_results_of_ones_own() -> None:
    call = cg.capture_step(lambda x, scale: x * scale, warm_up=1)
    x, y = torch.ones(3, device="cuda"), torch.ones(2, 2, device="cuda")
    made = [call(each, factor) for _ in range(3) for each in (x, y) for factor in (2.0, 3.0)]
    assert call.captures == 4
    assert [each.flatten()[0].item() for each in made] == [2.0, 3.0, 2.0, 3.0] * 3
    again = cg.capture_step(lambda x: x + 1, warm_up=1, reuse_results=True)
    first = [again(x) for _ in range(3)]
    assert first[1].data_ptr() == first[2].data_ptr()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_a_step_exchanges_are_let_go_before_the_capture(to_none: bool) -> None:
    net = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(8, 4096, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=to_none)
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def peak(call: Any, calls: int) -> int:
        """The most memory of some calls, beyond what there was before them."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(calls):
            call(x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    peak(step, 2)
    eager = peak(step, 2)
    call = cg.capture_step(step, optimizers=optimizer, warm_up=2)
    peak(call, 2)
    assert peak(call, 2) <= eager + net.weight.nbytes // 4
    last = net.weight.grad
    assert last is not None
    call(x)
    wanted = torch.autograd.grad(net(x).square().mean(), net.weight)[0]
    call(x)
    torch.testing.assert_close(last, wanted, rtol=1e-3, atol=1e-6)


def test_a_step_that_reads_on_the_host_is_refused_with_its_line() -> None:
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    call = cg.capture_step(step, optimizers=optimizer, warm_up=1)
    assert isinstance(call(*data()), float)
    with pytest.raises(cg.CaptureError, match=r"test_step\.py, line \d+: return loss\.item\(\)"):
        call(*data())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
    assert isinstance(step(*data()), float), "torch's generator or stream was left capturing"


def test_a_tensor_on_the_cpu_is_refused() -> None:
    call = cg.capture_step(lambda x, y: x * y)
    with pytest.raises(cg.CaptureError, match=r"a tensor \(2,\) of its arguments lies on the CPU"):
        call(torch.ones(2, device="cuda"), torch.ones(2))
