"""Models that ask whether their numbers are finite before they clamp them, as transformers' do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.errors import CannotImport
from tests import numerics

Tensor = torch.Tensor
Asks = Callable[[Tensor], Tensor | bool]

CLAMPS: dict[str, Asks] = {
    "not all finite": lambda y: not torch.isfinite(y).all(),
    "any infinite": lambda y: torch.isinf(y).any(),
    "any infinite or nan": lambda y: torch.isinf(y).any() or torch.isnan(y).any(),
    "either": lambda y: (torch.isinf(y) | torch.isnan(y)).any(),
    "logical not": lambda y: torch.logical_not(torch.isfinite(y).all()),
    "written out": lambda y: (y.abs() == math.inf).any(),
}
OTHERS: dict[str, Asks] = {
    "positive": lambda y: (y > 0).all(),
    "finite along a dim": lambda y: torch.isfinite(y).all(1)[0],
    "sum": lambda y: y.sum() == math.inf,
    "equal to another": lambda y: (y == y.abs()).all(),
}


class Clamped(nn.Module):
    """A linear layer whose results are changed if a question says so."""

    def __init__(self, question: Asks, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.question, self.change = nn.Linear(8, 8), question, change

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) → (N, 8)."""
        y: Tensor = self.linear(x)
        if self.question(y):
            y = self.change(y)
        return y.relu()


def clamped(y: Tensor) -> Tensor:
    most = torch.finfo(y.dtype).max - 1000
    return torch.clamp(y, min=-most, max=most)


@pytest.mark.parametrize("name", CLAMPS)
@pytest.mark.parametrize("check", [True, False])
def test_what_has_overflowed_is_clamped_as_by_the_model(name: str, check: bool) -> None:
    model = Clamped(CLAMPS[name], clamped).half().eval()
    x = torch.randn(3, 8).half()
    fused = cg.fuse(model, (x,), check=check)
    with torch.no_grad():
        for given in (x, 2 * x, torch.full((3, 8), 60000.0).half()):
            want = model(given)
            assert bool(want.isfinite().all())
            torch.testing.assert_close(fused(given), want, rtol=2e-3, atol=2e-3)
    numerics.check(fused(x), model.double()(x.double()), torch.float16, terms=8)


@pytest.mark.parametrize("check", [True, False])
def test_a_model_that_does_something_else_then_is_refused(check: bool) -> None:
    model = Clamped(CLAMPS["not all finite"], torch.zeros_like).half().eval()
    words = r"Clamped asks for the numbers in a tensor.*test_finite.py:\d+ in"
    with pytest.raises(CannotImport, match=words):
        cg.fuse(model, (torch.randn(3, 8).half(),), check=check)


@pytest.mark.parametrize("name", OTHERS)
def test_other_questions_are_refused(name: str) -> None:
    model = Clamped(OTHERS[name], clamped).half().eval()
    with pytest.raises(CannotImport, match="asks for the numbers in a tensor"):
        cg.fuse(model, (torch.randn(3, 8).half(),))


def test_a_model_that_raises_then_is_refused() -> None:
    def change(y: Tensor) -> Tensor:
        raise ValueError("overflow")

    model = Clamped(CLAMPS["any infinite"], change).half().eval()
    with pytest.raises(CannotImport, match="asks for the numbers in a tensor"):
        cg.fuse(model, (torch.randn(3, 8).half(),))


def test_bart_in_float16_is_one_graph() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "vocab_size": 90}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 40}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "use_cache": False}
    torch.manual_seed(0)
    model = transformers.BartModel(transformers.BartConfig(**sizes)).half().eval()
    ids = torch.randint(3, 90, (2, 12))
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "decoder_input_ids": ids.clone(),
    }
    fused = cg.fuse(model, (), kwargs=given)
    with torch.no_grad():
        own, made = model(**given), fused(**given)
        wide = model.double()(**given)
    exact = wide.last_hidden_state
    numerics.check(made.last_hidden_state, exact, torch.float16, own.last_hidden_state, terms=64)
