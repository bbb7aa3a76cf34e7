"""Feed-forward layers as functions and as a module: numbers, gradients, state dicts, mistakes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph import functional
from tests.samples import BF16, F64

EXACT = 1e-9


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert float((a - b).detach().abs().max()) < EXACT


def leaves(*shapes: Sequence[int]) -> list[Any]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=gen, dtype=F64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 1, 3), (1, 2, 1, 3), ()], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
def test_linear_is_torchs_with_a_residual_and_an_activation(
    lead: tuple[int, ...], activation: str | None
) -> None:
    x, w, b, z = given = leaves((*lead, 8), (5, 8), (5,), (*lead, 5))
    act: Callable[[Any], Any] = {None: lambda y: y, "gelu": F.gelu, "relu": F.relu}[activation]
    y = functional.linear(x, w, b, residual=z, activation=activation)
    want = act(F.linear(x, w, b) + z)
    dy = torch.randn(want.shape, dtype=F64)
    same([y], [want])
    same(torch.autograd.grad(y, given, dy), torch.autograd.grad(want, given, dy))
    same([functional.linear(x, w)], [F.linear(x, w)])


ACTS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "gelu": ({}, F.gelu),
    "gelu_tanh": ({}, lambda x: F.gelu(x, approximate="tanh")),
    "silu": ({}, F.silu),
    "leaky_relu": ({"negative_slope": 0.2}, lambda x: F.leaky_relu(x, 0.2)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_the_module_and_its_gradients_are_torchs(act: str, gated: bool, bias: bool) -> None:
    torch.manual_seed(0)
    attrs, run = ACTS[act]
    module = cg.FusedMLP(8, 12, 5, act, gated, bias, dtype=F64, **attrs)
    x = torch.randn(2, 3, 8, dtype=F64, requires_grad=True)
    inner = run(module.gate_proj(x)) * module.up_proj(x) if gated else run(module.up_proj(x))
    want = module.down_proj(inner)
    y = module(x)
    of = [x, *module.parameters()]
    assert len(of) == 1 + (2 + gated) * (1 + bias)
    dy = torch.randn(want.shape, dtype=F64)
    same([y], [want])
    same(torch.autograd.grad(y, of, dy), torch.autograd.grad(want, of, dy))


def test_the_state_dict_has_the_names_that_are_documented() -> None:
    assert list(cg.FusedMLP(8, 12).state_dict()) == [
        *("up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias")
    ]
    gated = cg.FusedMLP(8, 12, activation="silu", gated=True, bias=False)
    assert sorted(gated.state_dict()) == [
        *("down_proj.weight", "gate_proj.weight", "up_proj.weight")
    ]
    assert gated(torch.randn(3, 8)).shape == (3, 8)


def test_a_sequential_is_taken_over_with_its_parameters() -> None:
    plain = nn.Sequential(
        nn.Linear(8, 12), nn.LeakyReLU(0.3), nn.Dropout(0.5), nn.Linear(12, 5), nn.Dropout(0.0)
    ).double()
    ours = cg.FusedMLP.from_torch(plain.eval())
    assert {id(p) for p in ours.parameters()} == {id(p) for p in plain.parameters()}
    assert not ours.training
    assert "activation='leaky_relu', negative_slope=0.3" in repr(ours)
    x = torch.randn(3, 8, dtype=F64)
    same([ours(x)], [plain(x)])
    same([copy.deepcopy(ours)(x)], [plain(x)])


def test_dropout_that_would_drop_is_no_part_of_the_module() -> None:
    plain = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.5), nn.Linear(12, 5))
    with pytest.raises(cg.GraphError) as error:
        cg.FusedMLP.from_torch(plain)
    says = "module: holds Linear, GELU, Dropout, Linear; expected Linear, an activation of a graph"
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (
            (nn.Linear(8, 12), nn.Linear(11, 8)),
            "down: has 11 inputs; expected 12, the outputs of up",
        ),
        ((nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 11)), "gate: has a weight (11, 8)"),
        ((nn.Linear(8, 12), nn.Identity()), "down: is a Identity; expected nn.Linear"),
    ],
    ids=["down", "gate", "kind"],
)
def test_layers_have_to_fit(layers: Any, says: str) -> None:
    with pytest.raises(cg.GraphError) as error:
        cg.FusedMLP.from_linears(*layers)
    assert says in str(error.value)


def test_an_activation_that_is_unknown_is_refused_at_once() -> None:
    with pytest.raises(cg.GraphError, match="'swish' is unknown; expected one of relu"):
        cg.FusedMLP(8, 12, activation="swish")


def test_autocast_runs_the_products_in_its_dtype() -> None:
    module = cg.FusedMLP(16, 32, activation="silu", gated=True)
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", BF16):
        y = module(x)
        want = module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x))
    assert y.dtype == want.dtype == BF16
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in module.parameters())
    assert float((y - want).detach().float().norm() / want.detach().float().norm()) < 2e-2


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("way", ["hook", "replaced"])
@pytest.mark.parametrize("gated", [False, True])
def test_layers_with_hooks_or_in_place_of_others_are_called(gated: bool, way: str) -> None:
    """Their weights alone are not what they compute."""
    module = cg.FusedMLP(8, 12, activation="silu", gated=gated, dtype=F64)
    x = torch.randn(3, 8, dtype=F64)
    before = module(x)
    if way == "hook":
        torch.nn.utils.weight_norm(module.up_proj)
        with torch.no_grad():
            module.up_proj.weight_g.mul_(-2)
    else:

        class Adapted(torch.nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + x.sum(-1, keepdim=True)

        module.down_proj = Adapted(12, 8, dtype=F64)
    up = module.up_proj(x)
    inner = F.silu(up) if module.gate_proj is None else F.silu(module.gate_proj(x)) * up
    same([module(x)], [module.down_proj(inner)])
    assert float((module(x) - before).abs().max()) > 1e-2


def test_the_module_compiles_without_a_break() -> None:
    module = cg.FusedMLP(8, 12, activation="silu", gated=True, dtype=F64)
    x = torch.randn(2, 3, 8, dtype=F64, requires_grad=True)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    of = [x, *module.parameters()]
    y, want = fast(x), module(x)
    same([y], [want])
    same(torch.autograd.grad(y.sum(), of), torch.autograd.grad(want.sum(), of))


def test_compositions_of_a_graph_are_the_same_sums() -> None:
    x, gate, up = leaves((3, 8), (8, 6), (8, 6))
    g = cg.Graph("glu")
    vx, vg, vu = (g.input(name, like=t) for name, t in {"x": x, "g": gate, "u": up}.items())
    g.output("a", g.swiglu(vx, vg, vu))
    g.output("b", g.geglu(vx, vg, vu))
    g.output("c", g.geglu(vx, vg, vu, "tanh"))
    found = g.compile("cpu")(x=x.detach(), g=gate.detach(), u=up.detach())
    open_ = x @ gate
    same(
        found,
        [
            F.silu(open_) * (x @ up),
            F.gelu(open_) * (x @ up),
            F.gelu(open_, approximate="tanh") * (x @ up),
        ],
    )


def test_an_activation_that_a_graph_has_not_is_refused() -> None:
    act = nn.Softplus(threshold=1)
    with pytest.raises(cg.GraphError, match="Softplus has threshold=1, not 20"):
        cg.FusedMLP.from_torch(nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4)))
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda module, given, y: 2 * y)
    with pytest.raises(cg.GraphError, match="ReLU has hooks"):
        cg.FusedMLP.from_torch(nn.Sequential(nn.Linear(4, 4), hooked, nn.Linear(4, 4)))
