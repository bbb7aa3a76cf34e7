"""Packed attention by torch's flash attention: the reference's results, and its bounds."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference, torch_steps
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.packed import prefers_flash
from tests import numerics
from tests.flash import flash_attention_forward
from tests.samples import Case, make_inputs
from tests.steps import BF16, CASES, CPU, F16, inputs_of, outputs_of

PACKED = [case for case in CASES if case.family == "sdpa_varlen"]


def flash_run(monkeypatch: pytest.MonkeyPatch, spec: GraphSpec) -> torch_steps.Run | None:
    """The torch step on a GPU, with a flash attention that runs here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fake = SimpleNamespace(_flash_attention_forward=flash_attention_forward)
    monkeypatch.setattr(torch_steps, "_aten", fake)
    return torch_steps._run_packed(spec, spec.nodes[0], torch.device("cuda"))


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_attention_by_flash_attention_is_the_references(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = case.build().spec()
    inputs = inputs_of(spec, make_inputs(case))
    run = flash_run(monkeypatch, spec)
    narrow = case.dtype in (F16, BF16)
    assert (run is not None) == (narrow and prefers_flash(spec.nodes[0], spec.tensors))
    if run is None:
        assert not narrow or not {"plain", "cross", "own", "bottom_right"} & {case.id.split("-")[1]}
        return
    outputs = outputs_of(spec)
    run(inputs, outputs)
    wanted = reference.run(spec, inputs, torch.float64)
    for out, want in zip(outputs, wanted, strict=True):
        ends = torch.isneginf(want)
        assert torch.equal(torch.isneginf(out), ends)
        error = numerics.relative_error(out.masked_fill(ends, 0.0), want.masked_fill(ends, 0.0))
        assert error <= numerics.bound(case.dtype, terms=case.terms)
    low = [torch.empty_like(out, dtype=F16) for out in outputs]
    run(inputs, low)
    assert all(torch.equal(each, out.to(F16)) for each, out in zip(low, outputs, strict=True))


def test_flash_attention_is_for_what_it_takes_and_where_nothing_is_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def takes(
        width: int = 64,
        own: bool = True,
        longest: int | tuple[int, int] = 32,
        stride: int = 256,
        v_width: int | None = None,
        tokens: int = 64,
        **options: Any,
    ) -> bool:
        g = cg.Graph("packed")
        q = g.input("q", (tokens, 4, width), F16, stride=(stride, stride // 4, 1))
        v = g.input("v", (tokens, 4, v_width or width), F16)
        ends = g.input("ends", (5,), torch.int32)
        other = ends if own else g.input("other", (5,), torch.int32)
        most = longest if isinstance(longest, tuple) else (longest, longest)
        g.output("o", g.sdpa_varlen(q, q, v, ends, other, *most, **options))
        (node,) = g.spec().nodes
        return prefers_flash(node, g.spec().tensors)

    assert takes() and takes(is_causal=True) and takes(window=(3, 0))
    with monkeypatch.context() as built:  # for a GPU, without it
        built.setattr(torch.version, "cuda", "13.0")
        built.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
        assert not takes()
        built.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        assert takes()
    assert not takes(finite_padding=True)  # a plan is faster
    assert not takes(longest=1)  # torch folds heads into rows there
    assert takes(own=False) and not takes(own=False, is_causal=True)
    assert not takes(own=False, window=(3, None))
    right = {"own": False, "diagonal_alignment": "bottom_right"}
    assert takes(is_causal=True, **right) and takes(window=(3, None), **right)
    assert not takes(longest=(40, 32), window=(3, None), **right)  # torch widens it to all keys
    assert takes(longest=(40, 32), is_causal=True, window=(3, None), **right)
    assert takes(width=256, stride=1024) and not takes(width=264, stride=1056)
    assert not takes(width=60, stride=240) and not takes(v_width=32) and not takes(stride=260)
    assert not takes(tokens=0)


def test_without_flash_attention_packed_attention_is_the_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(case for case in PACKED if case.id == "sdpa_varlen-own-fp16")
    spec = case.build().spec()
    assert flash_run(monkeypatch, spec) is not None
    assert torch_steps._run_packed(spec, spec.nodes[0], CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert torch_steps._run_packed(spec, spec.nodes[0], torch.device("cuda")) is None


@pytest.mark.parametrize("odd", range(3))
def test_what_lies_at_an_odd_address_or_apart_is_copied_for_flash_attention(
    odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k or v at an odd element; where sequences end in every second number."""
    case = next(case for case in PACKED if case.id == "sdpa_varlen-own-fp16")
    spec = case.build().spec()
    run = flash_run(monkeypatch, spec)
    assert run is not None
    inputs, outputs = inputs_of(spec, make_inputs(case)), outputs_of(spec)
    apart = torch.empty(inputs[odd].numel() + 1, dtype=F16)[1:].view(inputs[odd].shape)
    assert apart.data_ptr() % 16
    ends = torch.stack([inputs[3], inputs[3]], 1)[:, 0]
    given = [apart.copy_(x) if at == odd else x for at, x in enumerate(inputs[:3])]
    run([*given, ends], outputs)
    want = reference.run(spec, inputs, torch.float64)[0]
    assert numerics.relative_error(outputs[0], want) <= numerics.bound(F16, terms=case.terms)


def test_the_lse_of_a_row_of_nan_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in PACKED if case.id == "sdpa_varlen-own-fp16")
    spec = case.build().spec()
    run = flash_run(monkeypatch, spec)
    assert run is not None
    inputs, outputs = inputs_of(spec, make_inputs(case)), outputs_of(spec)
    inputs[0][50] = math.nan
    run(inputs, outputs)
    assert outputs[1][50].isnan().all() and outputs[1].isnan().sum() == 4
