"""Dropout by a seed: the reference's generator, and what can be told of another one's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.ops.attention.dropout import dropout_keep, philox
from cudnngraph.runtime.trainable import check_dropout
from cudnngraph.select.decision import Decision, StepPlan
from cudnngraph.select.dropout_probe import has_seeded_dropout, recover_mask, with_mask
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.rules import why_split
from tests.samples import F16, F32, F64

B, H, S, D = 2, 4, 13, 8
CPU = torch.device("cpu")


# Known answers of the authors' Random123 for philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: Sequence[int], key: Sequence[int], answer: Sequence[int]
) -> None:
    words = philox(list(map(torch.tensor, counter)), list(map(torch.tensor, key)))
    assert tuple(map(int, words)) == tuple(answer)


def test_the_share_that_is_kept_is_1_less_p_and_rows_differ() -> None:
    seed, offset = torch.tensor([-3]), torch.tensor(7)
    keep = dropout_keep((64, 1024), 0.3, seed, offset)
    assert abs(float(keep.double().mean()) - 0.7) < 4 * (0.21 / 65536) ** 0.5
    assert len({tuple(row.tolist()) for row in keep[:, :64]}) == 64
    other = dropout_keep((64, 1024), 0.3, seed, offset + 1)
    assert 0.5 < float((keep == other).double().mean()) < 0.66  # 0.7^2 + 0.3^2 = 0.58


def build(backward: bool, dtype: torch.dtype = F64, **options: Any) -> GraphSpec:
    g = cg.Graph("g")
    heads = options.pop("kv_heads", H)
    q = g.input("q", (B, H, S, D), dtype)
    k, v = (g.input(name, (B, heads, S, D), dtype) for name in "kv")
    numbers = [g.input(name, (1,), torch.int64) for name in ("seed", "offset")]
    given = {"dropout_p": 0.4, "dropout_seed": numbers[0], "dropout_offset": numbers[1]}
    if options.pop("slopes", False):
        given["alibi_slopes"] = g.input("slopes", (H,), F64 if dtype == F64 else F32)
    if not backward:
        g.output("o", g.sdpa(q, k, v, **given, **options))
        return g.spec()
    do, o = (g.input(name, (B, H, S, D), dtype) for name in ("do", "o"))
    lse = g.input("lse", (B, H, S), F64 if dtype == F64 else F32)
    grads = g.sdpa_backward(do, q, k, v, o, lse, **given, **options)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        g.output(name, grad)
    return g.spec()


def runner(spec: GraphSpec) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A plan with a generator of its own: the reference's for an offset further on."""
    place = spec.inputs.index("offset")

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        moved = [tensor + 1 if n == place else tensor for n, tensor in enumerate(inputs)]
        return reference.run(spec, moved)

    return run


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "shared heads": {"kv_heads": 2},
    "alibi": {"alibi": True, "is_causal": True},
    "slopes": {"slopes": True},
    "softcap": {"softcap": 0.8, "window": (4, 3)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_a_plan_drops_is_recovered_and_makes_the_reference_agree(
    backward: bool, options: dict[str, Any]
) -> None:
    spec = build(backward, **options)
    inputs = random_inputs(spec, CPU)
    assert has_seeded_dropout(spec)
    keep = recover_mask(spec, inputs, runner(spec))
    whole = dropout_keep((B, H, S, S), 0.4, torch.tensor([1]), torch.tensor([2]))
    reach = torch.ones(S, S, dtype=torch.bool)
    if options.get("is_causal"):
        reach = reach.tril()
    if "window" in options:
        reach = reach.tril(3).triu(-4)
    assert torch.equal(keep, whole & reach)
    other, given = with_mask(spec, inputs, keep)
    assert not has_seeded_dropout(other) and not {"seed", "offset"} & set(other.inputs)
    for ours, theirs in zip(reference.run(other, given), runner(spec)(inputs), strict=True):
        assert float((ours - theirs).abs().max()) < 1e-12
    plain = reference.run(spec, inputs)
    assert float((plain[0] - runner(spec)(inputs)[0]).abs().max()) > 1e-2, "another generator"


def test_attention_that_draws_shares_no_plan_with_what_follows() -> None:
    g = cg.Graph("g")
    q, k, v = (g.input(name, (B, H, S, D), F16) for name in "qkv")
    seed, offset = (g.input(name, (1,), torch.int64) for name in ("seed", "offset"))
    dropout = {"dropout_p": 0.1, "dropout_seed": seed, "dropout_offset": offset}
    g.output("y", g.relu(g.sdpa(q, k, v, **dropout)))
    assert (
        why_split(g.spec()) == "what attention drops by a seed can be told of its own result alone"
    )


class Stub:
    """An executable as far as the check looks at it."""

    def __init__(self, spec: GraphSpec, on_cudnn: bool) -> None:
        self.spec = spec
        choice: Any = "a plan" if on_cudnn else None
        self.steps = (StepPlan(spec, choice, 0, (Decision("x", True, ""),)),)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_an_attention_and_its_gradient_draw_from_one_generator(
    forward: bool, backward: bool
) -> None:
    pair: Any = Stub(build(False), forward), Stub(build(True), backward)
    if forward == backward:
        check_dropout(*pair)
        return
    with pytest.raises(NotSupported, match="which would drop different weights: give it a dropout"):
        check_dropout(*pair)
