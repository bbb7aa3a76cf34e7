"""The cases that attention is measured on say the same in the graph and in torch."""

from __future__ import annotations

import pytest
import torch

from cudnngraph.bench.attention import attention_suite, decode, packed, variants
from cudnngraph.bench.cases import Case
from tests import numerics

CASES = [
    *variants(2, 4, 64, 32),
    packed(4, 32, (16, 5, 30)),
    decode(2, 4, 2, 64, 32),
    decode(2, 4, 2, 64, 32, page=16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_what_eager_torch_computes(case: Case) -> None:
    tensors = case.tensors(torch.device("cpu"))
    (name,) = case.graph.spec().outputs
    inputs = {key: value for key, value in tensors.items() if key != name}
    ours, theirs = case.graph.compile("cpu")(**inputs), case.eager(tensors)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.bfloat16
    if "dropout" not in case.name:  # which drop others
        assert numerics.relative_error(ours, theirs.double()) < 2 * numerics.bound(torch.bfloat16)


def test_the_cases_are_those_of_the_table() -> None:
    names = [case.name for case in attention_suite()]
    assert len(set(names)) == len(names)
    size = "attention B2 H16 S2048 D128"
    variants = ("full", "causal", "causal bottom right", "causal window 256", "causal ALiBi")
    variants += ("additive bias", "padding", "dropout", "sink", "softcap", "BSHD")
    assert {f"{size} {variant}" for variant in variants} <= set(names)
    assert "attention B4 H32 S4096 D128 causal" in names
    for kind in ("padded", "pages of 16", "pages of 64"):
        assert f"attention decode B8 H32/8 1x8192 D128 {kind}" in names


def test_every_case_but_the_sink_has_another_way_of_torchs() -> None:
    assert {case.name.split()[-1] for case in attention_suite() if not case.others} == {"sink"}
