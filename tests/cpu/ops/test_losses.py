"""Softmax, cross entropy, dropout, AdamW and pixels: torch's own numbers, mistakes, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.executor import torch_steps
from tests.samples import F32, F64


def graph(**given: torch.Tensor) -> tuple[cg.Graph, list[cg.Value]]:
    g = cg.Graph("g")
    return g, [g.input(name, like=tensor) for name, tensor in given.items()]


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 3}], ids=str)
def test_cross_entropy_and_its_gradient_are_torchs(options: dict[str, Any]) -> None:
    x = torch.randn(32, 7, 4, dtype=F64, requires_grad=True)
    t = torch.randint(0, 7, (32, 4))
    g, (vx, vt) = graph(x=x.detach(), t=t)
    g.output("loss", g.cross_entropy(vx, vt, **options))
    loss = g.compile("cpu", training=True)(x=x, t=t)
    want = F.cross_entropy(x, t, **options)
    assert abs(float(loss.detach() - want.detach())) < 1e-12
    (found,) = torch.autograd.grad(loss * 2.0, x)
    (right,) = torch.autograd.grad(want * 2.0, x)
    assert float((found - right).abs().max()) < 1e-12


def test_classes_that_are_ignored_may_be_outside_the_range() -> None:
    x, t = torch.randn(4, 3), torch.tensor([0, -100, 2, -100])
    g, (vx, vt) = graph(x=x, t=t)
    g.output("loss", g.cross_entropy(vx, vt, reduction="none"))
    loss = g.compile("cpu")(x=x, t=t)
    assert torch.allclose(loss, F.cross_entropy(x, t, reduction="none"))
    assert loss[1] == loss[3] == 0


def test_a_mean_over_no_row_is_nan_as_torchs() -> None:
    x, t = torch.randn(2, 3), torch.tensor([-100, -100])
    g, (vx, vt) = graph(x=x, t=t)
    g.output("loss", g.cross_entropy(vx, vt))
    assert bool(g.compile("cpu")(x=x, t=t).isnan()) and bool(F.cross_entropy(x, t).isnan())


Declare = Callable[[cg.Graph, cg.Value], Any]
MISTAKES: dict[str, tuple[Declare, str]] = {
    "dim": (
        lambda g, x: g.softmax(x, 2, name="s"),
        "softmax 's': dim=2 is no dim of x; expected -2 to 1",
    ),
    "target's shape": (
        lambda g, x: g.cross_entropy(x, g.input("t", (8, 1), torch.int64)),
        "target 't' has shape (8, 1); expected (8,), a class for each row of x (8, 5)",
    ),
    "target's dtype": (
        lambda g, x: g.cross_entropy(x, g.input("t", (8,), torch.int32)),
        "target 't' is int32; expected int64 (convert it)",
    ),
    "reduction": (
        lambda g, x: g.cross_entropy(x, g.input("t", (8,), torch.int64), "max"),
        "reduction='max' is unknown; expected 'mean' or 'sum' or 'none'",
    ),
    "ignore_index": (
        lambda g, x: g.cross_entropy(x, g.input("t", (8,), torch.int64), ignore_index=None),  # type: ignore[arg-type]
        "ignore_index=None; expected a whole number",
    ),
    "gradient's shape": (
        lambda g, x: g.nll_loss_backward(x, g.input("t", (8,), torch.int64), (8, 5), "none"),
        "dy 'x' has shape (8, 5); expected (8,), the loss's",
    ),
    "p": (
        lambda g, x: g.dropout(x, g.input("k", (8, 5), torch.bool), 1.0),
        "dropout: p=1.0; expected 0 <= p < 1",
    ),
    "keep": (
        lambda g, x: g.dropout(x, x, 0.5),
        "condition 'x' is float32; expected bool",
    ),
    "pixels": (
        lambda g, x: g.to_float(x, name="f"),
        "to_float 'f': x 'x' is float32; expected uint8, int8 or int32",
    ),
    "images": (
        lambda g, x: g.normalize_images(x, x, x),
        "normalize_images: x 'x' has shape (8, 5); expected (N, H, W, C)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    declare, says = MISTAKES[name]
    g = cg.Graph("g")
    made = declare(g, g.input("x", (8, 5), F32))
    g.output("y", made)
    with pytest.raises(cg.GraphError) as error:
        g.compile("cpu")
    assert says in str(error.value)
    assert str(error.value).count("\n  - ") <= 2


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax_writes_through_torchs_out_variant_and_into_gaps(op: str) -> None:
    x = torch.randn(6, 8).half()
    want = getattr(torch, op)(x, 1)
    for wide in (torch.full((6, 8), 77.0).half(), torch.full((6, 20), 77.0).half()):
        out = wide[:, :8]
        g, (vx,) = graph(x=x)
        g.output("y", getattr(g, op)(vx, 1), stride=out.stride())
        torch_steps.launcher(g.spec(), [x], [out], allow_tf32=False)()
        assert torch.equal(out, want)
        assert bool((wide[:, 8:] == 77).all())


def test_dropout_keeps_what_the_mask_keeps_and_its_gradient_too() -> None:
    x = torch.randn(64, 32, dtype=F64, requires_grad=True)
    keep = torch.rand(64, 32) < 0.75
    g, (vx, vk) = graph(x=x.detach(), k=keep)
    g.output("y", g.dropout(vx, vk, 0.25))
    y = g.compile("cpu", training=True)(x=x, k=keep)
    assert torch.allclose(y, x * keep / 0.75, rtol=1e-12)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(found, keep.double() / 0.75, rtol=1e-12)


# -- AdamW -----------------------------------------------------------------------------------------


def adamw(shape: tuple[int, ...]) -> cg.Executable:
    g = cg.Graph("adamw")
    given = [g.input(name, shape, F32) for name in ("p", "grad", "m", "v")]
    numbers = [g.input(name, (1,), F32) for name in ("lr", "c1", "c2")]
    for name, value in zip(("p_", "m_", "v_"), g.adamw(*given, *numbers), strict=True):
        g.output(name, value)
    return g.compile("cpu")


def test_ten_steps_in_place_are_torchs_adamw() -> None:
    torch.manual_seed(0)
    theirs = torch.randn(40, 50, requires_grad=True)
    p, m, v = theirs.detach().clone(), torch.zeros(40, 50), torch.zeros(40, 50)
    optimizer = torch.optim.AdamW([theirs], lr=1e-2)
    exe = adamw((40, 50))
    for step in range(1, 11):
        lr = 1e-2 / step
        grad = theirs.grad = torch.randn(40, 50)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        numbers = {"lr": lr, "c1": 1.0 - 0.9**step, "c2": 1.0 - 0.999**step}
        given = {name: torch.tensor([value]) for name, value in numbers.items()}
        exe.run(p=p, grad=grad, m=m, v=v, **given, p_=p, m_=m, v_=v)
    state = optimizer.state[theirs]
    for ours, right in ((p, theirs.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert float((ours - right).norm() / right.norm()) < 2e-6


def test_an_update_that_crosses_its_inputs_is_refused() -> None:
    exe = adamw((8, 8))
    grad, m, v = (torch.rand(8, 8) for _ in range(3))
    buffer = torch.rand(9, 8)
    p = buffer[:8]
    numbers = {name: torch.ones(1) for name in ("lr", "c1", "c2")}
    with pytest.raises(cg.BindError) as error:
        exe.run(p=p, grad=grad, m=m, v=v, **numbers, p_=buffer[1:], m_=m, v_=v)
    assert "output 'p_': overlaps input 'p'; expected memory of its own" in str(error.value)
    with pytest.raises(cg.BindError) as error:
        exe.run(p=p, grad=grad, m=m, v=v, **numbers, p_=p, m_=p, v_=v)
    assert "output 'm_': overlaps output 'p_'; expected memory of its own" in str(error.value)
