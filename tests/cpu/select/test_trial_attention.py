"""Trials of large attention: its corners are compared in place of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.ops.attention.dense import FP8_SCALES
from cudnngraph.select import trial
from cudnngraph.select.inputs import random_inputs
from tests.trials import CPU, F16, F32, Plan, attention, product, why


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "handle_on_current_stream", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


ATTENTIONS = {
    "gqa": attention(),
    "mqa": attention((4, 1)),
    "as_many": attention((4, 4)),
    "one_head": attention((1, 1)),
    "mask_2d": attention(mask=(8, 8)),
    "mask_heads": attention(mask=(1, 4, 8, 8)),
    "mask_batch": attention(mask=(3, 1, 8, 8)),
    "mask_all": attention(mask=(3, 4, 8, 8)),
    "mask_row": attention(mask=(3, 1, 1, 8)),
    "mask_all_mqa": attention((4, 1), mask=(3, 4, 8, 8)),
    "mask_bool": attention(mask=(3, 4, 8, 8), mask_dtype=torch.bool),
    "lengths": attention(lengths=True),
    "lse": attention(lse=True),
    "all": attention((6, 2), mask=(1, 6, 8, 8), lengths=True, lse=True),
}


def varied(spec: GraphSpec) -> list[torch.Tensor]:
    """Random inputs, lengths and masks that differ from batch to batch and head to head."""
    gen = torch.Generator().manual_seed(7)
    made = []
    for name, tensor in zip(spec.inputs, random_inputs(spec, CPU), strict=True):
        if name.startswith("seq"):
            tensor = torch.tensor([8, 3, 5], dtype=torch.int32).view(tensor.shape)
        elif tensor.dtype == torch.bool:
            tensor = torch.rand(tensor.shape, generator=gen) < 0.7
        made.append(tensor)
    return made


@pytest.mark.parametrize("spec", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_corner_of_attention_is_the_corner_of_the_whole(spec: GraphSpec) -> None:
    inputs = varied(spec)
    whole = reference.run(spec, inputs, torch.float64)
    k = spec.tensors["k"]
    for batch in range(3):
        for head in range(k.shape[1]):
            part = [
                trial._corner(spec, name, tensor, batch, head)
                for name, tensor in zip(spec.inputs, inputs, strict=True)
            ]
            made = reference.run(spec, part, torch.float64)
            for name, result, full in zip(spec.outputs, made, whole, strict=True):
                want = trial._corner(spec, name, full, batch, head)
                assert result.shape == want.shape
                assert want.numel() * 3 * k.shape[1] == full.numel(), "one part of that many"
                assert torch.allclose(result, want, rtol=1e-12, atol=0)


def test_small_attention_is_compared_whole() -> None:
    assert trial._corner_heads(ATTENTIONS["gqa"]) is None


def test_only_attention_alone_is_compared_by_corners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LARGE_SCORES", 0)
    assert trial._corner_heads(ATTENTIONS["gqa"]) == [(0, 0), (2, 1)]
    assert trial._corner_heads(product()) is None
    g = cg.Graph("g")
    q = g.input("q", (1, 1, 8, 16), F16)
    g.output("o", g.relu(g.sdpa(q, q, q)))
    assert trial._corner_heads(g.spec()) is None
    g = cg.Graph("g")
    q = g.input("q", (1, 1, 8, 16), F16)
    g.output("o", g.sdpa(q, q, q))
    assert trial._corner_heads(g.spec()) == [(0, 0)], "both ends are the same"


@pytest.mark.parametrize("spec", ATTENTIONS.values(), ids=ATTENTIONS)
def test_large_attention_is_checked_at_both_ends(
    spec: GraphSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LARGE_SCORES", 0)
    assert why(Plan(spec)) is None
    for place in (0, -1):

        def spoils(plan: Plan, pointers: Sequence[int], workspace: int, place: int = place) -> None:
            plan.result(pointers)[place, place].add_(1.0)

        said = why(Plan(spec, spoils))
        assert said is not None and said.startswith("wrong: 'o' is off by")


def test_large_attention_of_fp8_is_checked_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of all its weights is no part of an end, and is left alone."""
    monkeypatch.setattr(trial, "LARGE_SCORES", 0)
    g = cg.Graph("attention")
    q = g.input("q", (3, 4, 8, 16), torch.float8_e4m3fn)
    k, v = (g.input(name, (3, 2, 8, 16), torch.float8_e4m3fn) for name in "kv")
    scales = [g.input(name, (), F32) for name in FP8_SCALES]
    o, lse, amax_s, _ = g.sdpa_fp8(q, k, v, *scales, return_lse=True)
    for name, value in {"o": o, "lse": lse, "amax_s": amax_s}.items():
        g.output(name, value)
    spec = g.spec()
    assert trial._corner_heads(spec) == [(0, 0), (2, 1)]
    assert why(Plan(spec)) is None
    for place in (0, -1):

        def spoils(plan: Plan, pointers: Sequence[int], workspace: int, place: int = place) -> None:
            part = plan.result(pointers)[place, place]
            part.copy_(part.float() + 8.0)

        said = why(Plan(spec, spoils))
        assert said is not None and said.startswith("wrong: 'o' is off by")
