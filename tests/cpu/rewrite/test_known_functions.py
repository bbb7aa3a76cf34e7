"""GELU and SiLU written out in the ways that models do, and what is nearly so."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.models.convert import import_model
from cudnngraph.rewrite.known_functions import name_functions
from cudnngraph.rewrite.passes import legalize
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics
from tests.models import Of

Written = Callable[[torch.Tensor], torch.Tensor]
ROOT = math.sqrt(2 / math.pi)

WAYS: dict[str, tuple[str, Written]] = {
    "gelu_new": (
        "gelu_tanh",
        lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    ),
    "gelu_fast": (
        "gelu_tanh",
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    ),
    "bloom": (
        "gelu_tanh",
        lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    ),
    "halved at the end": (
        "gelu_tanh",
        lambda x: (torch.tanh((x**3 * 0.044715 + x) * ROOT) + 1) * x / 2,
    ),
    "by sigmoid": ("gelu_tanh", lambda x: x * torch.sigmoid(2 * ROOT * (x + 0.044715 * x**3))),
    "gelu_python": ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "erf first": ("gelu", lambda x: (0.5 + 0.5 * torch.erf(x * 0.7071067811865475)) * x),
    "silu": ("silu", lambda x: torch.sigmoid(x) * x),
    "silu by tanh": ("silu", lambda x: x * 0.5 * (1 + torch.tanh(x / 2))),
}
OTHERS: dict[str, Written] = {
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "another constant": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.0447 * x**3))),
    "no half": lambda x: x * (1 + torch.erf(x / math.sqrt(2.0))),
    "of another": lambda x: x.flip(0) * 0.5 * (1 + torch.erf(x / math.sqrt(2.0))),
    "its slope": lambda x: torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x))),
}


def spec_of(function: Written, dtype: torch.dtype = torch.float32, rows: int = 8) -> GraphSpec:
    """A function behind a product with a bias."""
    model = Of(lambda m, x: function(m.a(x)), a=torch.nn.Linear(16, 24)).to(dtype)
    found = import_model(model, (torch.zeros(rows, 16, dtype=dtype),)).spec
    assert found is not None
    return found


def ops(spec: GraphSpec) -> list[str]:
    return [node.op for node in spec.nodes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_it_becomes_one_op_with_the_same_values(name: str, dtype: torch.dtype) -> None:
    op, function = WAYS[name]
    spec = spec_of(function, dtype)
    named = name_functions(spec)
    assert ops(named) == ["matmul", "add", op]
    torch.manual_seed(0)
    given = [named.tensors[each].empty("cpu").normal_() for each in named.inputs]
    mine = compile_spec(named, "cpu")(*given)
    x, weight, bias = (each.double() for each in given)
    numerics.check(mine, function(x @ weight + bias), dtype, terms=16)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_nearly_so_stays(name: str) -> None:
    spec = spec_of(OTHERS[name])
    assert name_functions(spec) is spec


def test_what_something_else_reads_stays() -> None:
    g = cg.Graph("shared")
    x = g.input("x", (4, 8), torch.float16)
    s = g.sigmoid(x)
    g.output("y", g.relu(g.mul(x, s)))
    g.output("s", s)
    assert name_functions(g.spec()) is not None and "silu" not in ops(name_functions(g.spec()))


def test_infinities_are_kept() -> None:
    g = cg.Graph("infinite")
    x = g.input("x", (4,), torch.float32)
    g.output("y", g.mul(x, g.sigmoid(x)))
    spec = legalize(g.spec(), cg.Policy(allow_tf32=False))
    assert ops(spec) == ["silu"]
    data = torch.tensor([torch.inf, torch.nan, 0.0, 3.0])
    mine = g.compile("cpu")(data)
    assert torch.equal(mine.isnan(), F.silu(data).isnan()) and mine[0] == torch.inf


def test_constants_with_few_digits_are_not_taken_for_exact_ones_in_float64() -> None:
    assert "gelu_tanh" in ops(name_functions(spec_of(WAYS["gelu_new"][1], torch.float64)))
    spec = spec_of(WAYS["bloom"][1], torch.float64)
    assert name_functions(spec) is spec
    rough = spec_of(lambda x: 0.5 * x * (1 + torch.tanh(0.797884 * (x + 0.044715 * x**3))))
    assert name_functions(rough) is rough  # off by more than float32 rounds


def test_two_of_one_graph() -> None:
    spec = spec_of(lambda x: WAYS["gelu_new"][1](WAYS["silu"][1](x) + 1))
    assert ops(name_functions(spec)) == ["matmul", "add", "silu", "constant", "add", "gelu_tanh"]
