"""Training by the backend in two processes, with checkpoints, and with scaled gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import cudnngraph as cg
from tests import numerics
from tests.fused import compiled
from tests.ranks import on_two_ranks


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


def test_two_processes_train_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker compares parameters and buffers with float64."""
    monkeypatch.setenv("CUDNNGRAPH_CHECK", "0")
    for told in on_two_ranks("shared_training_worker.py", tmp_path):
        assert len(told) == 8
        for way, found in told.items():
            assert found["refused"] == [], way
            if "FSDP" in way:
                assert found["graphs"] == 6 and found["log"] == ["graph"] * 3, way
                continue
            assert found["graphs"] == 4, way
            overlapping = ["graph", "bucket", "graph", "bucket"]
            assert found["log"] == overlapping, f"{way}: a bucket is reduced during the backward"


# -- checkpoints -----------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(16, 64), nn.Linear(64, 16), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.p)


class Deep(nn.Module):
    """Layers whose activations a backward computes again, if they are checkpointed."""

    def __init__(self, reentrant: bool | None, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(p) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)  # type: ignore[no-untyped-call]
        return x


def trained(model: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """The result and all gradients; the random numbers are those of a seed."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = run(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [y.detach(), *(each for each in found if each is not None)]


def near(made: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    assert len(made) == len(exact)
    for mine, own, wanted in zip(made, eager, exact, strict=True):
        numerics.check(mine, wanted, torch.float32, own, terms=4096)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [True, False], ids=["compiled whole", "compiled parts"])
def test_checkpoints(reentrant: bool, inside: bool) -> None:
    torch.manual_seed(0)
    model, x = Deep(reentrant), torch.randn(32, 16)
    wide = copy.deepcopy(model).double()
    eager, exact = trained(model, model, x), trained(wide, wide, x.double())
    run: Any = model
    if inside:
        run = compiled(model)
    else:
        for layer in model.layers:
            layer.compile(backend="cudnngraph")
    near(trained(model, run, x), eager, exact)
    assert not any(each.refused for each in cg.reports())


def _saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = compiled(model)(x)
    y.sum().backward()
    return sum(held.values())


def test_what_is_checkpointed_is_not_saved() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 16, requires_grad=True)
    plain = Deep(None)
    less = Deep(False)
    less.load_state_dict(plain.state_dict())
    hidden = 512 * 64 * 4
    assert _saved_bytes(plain, x) >= _saved_bytes(less, x) + 3 * hidden


def test_a_checkpoint_drops_the_same_elements_again() -> None:
    """The gradient of the input is nonzero exactly where the forward let elements through."""

    class Dropping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def inner(x: torch.Tensor) -> torch.Tensor:
                return F.dropout(x.exp(), 0.5)

            made: torch.Tensor = checkpoint(inner, x, use_reentrant=False)  # type: ignore[no-untyped-call]
            return made

    run = compiled(Dropping(), check=False)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(64, 16, requires_grad=True)
        y = run(x)
        y.sum().backward()
        assert x.grad is not None
        numerics.check(x.grad, y.detach().double(), torch.float32)
        assert 0.3 < float((y == 0).float().mean()) < 0.7


# -- scaled gradients ------------------------------------------------------------------------------


def _scaled(
    model: nn.Module, run: Callable[..., Any], dtype: torch.dtype
) -> tuple[torch.Tensor, list[float]]:
    """All parameters behind six steps, of which one overflows, and the scale behind each."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    told = []
    for step in range(6):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        if step == 3:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float64):
            loss = run(x).to(dtype).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        told.append(scaler.get_scale())
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]), told


def test_a_gradient_scaler_skips_steps_that_overflow() -> None:
    """Scaled, unscaled, clipped and skipped as in eager torch; as near to float64, by twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 4))
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    start = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    exact, _ = _scaled(wide, wide, torch.float64)
    eager, scales = _scaled(own, own, torch.float32)
    made, told = _scaled(model, compiled(model), torch.float32)
    assert told == scales == [256.0, 512.0, 512.0, 256.0, 256.0, 512.0]
    moved = float((exact - start).norm())
    off, theirs = (float((each - exact).norm()) / moved for each in (made, eager))
    assert off <= 2 * theirs < 0.05
