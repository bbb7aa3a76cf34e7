"""Random calls of the functional API are right or refused in the project's words, as torch has it.

``tests/random_functions.py`` says how to make many more, or one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph import functional
from tests import numerics
from tests.random_functions import Call, call
from tests.random_tensors import F32, F64, Maker, Roundings, off, told, widened

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_CALLS", "300"))
PART = 50
WAYS = (4, 40)  # more where those do not do


def leaves(case: Call, m: Maker) -> dict[str, Any]:
    """The tensors of a call, some of which require grad."""
    made: dict[str, Any] = {}
    for name, tensor in case.tensors.items():
        floats = tensor is not None and tensor.is_floating_point()
        wanted = floats and not name.startswith("running") and m.chance(0.7)
        given = tensor.clone() if name in case.written and tensor is not None else tensor
        made[name] = given.detach().requires_grad_() if wanted else given  # type: ignore[union-attr]
    return made


def run(
    function: Any, tensors: dict[str, Any], seed: int, written: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """Results, gradients, and tensors that were written to, by name."""
    made = function(tensors)
    results = made if isinstance(made, tuple) else (made,)
    found = {f"result {at}": each for at, each in enumerate(results)}
    found |= {name: tensors[name] for name in written}
    wanted = {name: t for name, t in tensors.items() if t is not None and t.requires_grad}
    for at, each in enumerate(results):
        found[f"requires_grad {at}"] = torch.tensor(each.requires_grad)
    results = tuple(each for each in results if each.requires_grad)
    if wanted and results:
        numbers = torch.Generator().manual_seed(seed)
        given = [
            torch.randn(each.shape, generator=numbers, dtype=F64).to(F32).to(each.dtype)
            for each in results
        ]
        gradients = torch.autograd.grad(
            list(results), list(wanted.values()), given, allow_unused=True
        )
        for name, gradient in zip(wanted, gradients, strict=True):
            assert gradient is not None, f"{name} has no gradient"
            found[f"gradient of {name}"] = gradient
    return found


def wide(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: widened(t).requires_grad_() if t is not None and t.requires_grad else widened(t)
        for name, t in tensors.items()
    }


def copied(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if t is None else t.detach().clone().requires_grad_(t.requires_grad)
        for name, t in tensors.items()
    }


def yardsticks(case: Call, tensors: dict[str, Any], seed: int, ways: int) -> list[dict[str, Any]]:
    """What torch makes in the dtype itself, and rounding at random behind each function."""
    made = []
    itself, _ = told(lambda: run(case.theirs, copied(tensors), seed, case.written))
    if itself is not None:
        made.append(itself)
    for way in range(ways):
        mode = Roundings(way, 2 * numerics.ROUNDOFF[case.dtype])

        def rounded(given: dict[str, Any], mode: Roundings = mode) -> Any:
            with mode:
                return case.theirs(
                    {
                        name: t if name in case.written else mode.rounded(t)
                        for name, t in given.items()
                    }
                )

        made.append(run(rounded, wide(tensors), seed, case.written))
    return made


def compared(
    case: Call, found: dict[str, Any], right: dict[str, Any], yards: list[dict[str, Any]]
) -> str:
    for name, value in found.items():
        # Gradients of float32 parameters have the digits of the data that come back.
        given = case.dtype if value.dtype == F32 and name.startswith("gradient") else value.dtype
        theirs = [each[name] for each in yards if name in each]
        if near := off(value.to(given), right[name], theirs, case.dtype, case.terms):
            return f"{name} {near}"
    return ""


def one(seed: int) -> str:
    """What is wrong with the call of a seed, "" for nothing; "-" where it is refused."""
    case, m = call(seed), Maker(seed + 1)
    mine = leaves(case, m)
    exact = wide(mine)
    right, refused = told(lambda: run(case.theirs, exact, seed, case.written))
    function = getattr(functional, case.name)
    found, error = told(
        lambda: run(lambda t: function(**t, **case.options), mine, seed, case.written)
    )
    if error is not None:
        if isinstance(error, cg.CudnnGraphError) and (refused or case.spoilt):
            return "-"
        return f"{case}\n  raises {type(error).__name__}: {error}"
    if not case.judged:
        return ""
    if refused is not None:
        return "" if case.spoilt else f"{case}\n  torch raises {refused}"
    for ways in WAYS:
        near = compared(case, found, right, yardsticks(case, mine, seed, ways))
        if not near:
            break
    if near:
        return f"{case}\n  {near}"
    return ""


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_random_calls_are_torchs_or_refused(first: int) -> None:
    told = {seed: one(seed) for seed in range(first, min(first + PART, FIRST + COUNT))}
    wrong = [f"seed {seed}: {what}" for seed, what in told.items() if what not in ("", "-")]
    assert not wrong, "\n".join(wrong)
    assert list(told.values()).count("-") < len(told) / 2 or len(told) < PART


# -- what they found -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["weight", "bias"])
def test_an_instance_norm_takes_one_of_weight_and_bias(given: str) -> None:
    m = Maker(0)
    x, vector = m.tensor((2, 3, 4, 5), F64), m.tensor((3,), F64, plain=True)
    leaves = [x.requires_grad_(), vector.requires_grad_()]
    found = functional.instance_norm(x, **{given: vector})
    want = F.instance_norm(x, None, None, **{given: vector})  # type: ignore[arg-type]
    dy = m.tensor(x.shape, F64)
    found, want = ((y, *torch.autograd.grad(y, leaves, dy)) for y in (found, want))
    for a, b in zip(found, want, strict=True):
        numerics.check(a.detach(), b.detach(), F64)


@pytest.mark.parametrize("bias", [(0,), (5,), (3, 4)], ids=str)
def test_the_bias_of_a_product_does_not_widen_it(bias: tuple[int, ...]) -> None:
    x, weight = torch.ones(3, 8), torch.ones(1, 8)
    said = rf"bias 'bias' has shape \({bias[0]},.*; expected \(N,\) = \(1,\)"
    with pytest.raises(cg.GraphError, match=said):
        functional.linear(x, weight, torch.ones(bias))
    numerics.check(
        functional.linear(x, weight, torch.ones(1)), torch.full((3, 1), 9.0, dtype=F64), F32
    )


def test_a_bias_is_of_the_channels_beside_a_residual_of_more_dims() -> None:
    m = Maker(0)
    x, w, b = (m.tensor(shape, F64) for shape in ((4, 4, 5, 5), (4, 4, 3, 3), (4,)))
    residual = m.tensor((2, 4, 4, 3, 3), F64)
    found = functional.conv_bias_act(x, w, b, residual=residual)
    numerics.check(found, torch.relu(F.conv2d(x, w, b) + residual), F64)


@pytest.mark.parametrize("wrong", [True, 1.0])
def test_a_wrong_option_spoils_no_later_call_of_an_equal_one(wrong: Any) -> None:
    """True is equal to 1, and so were the options that are made once."""
    m = Maker(0)
    x, w = m.tensor((2, 4, 7, 7), F64), m.tensor((5, 4, 3, 3), F64)
    with pytest.raises(cg.GraphError, match="stride="):
        functional.conv2d(x, w, stride=wrong, dilation=2)
    numerics.check(functional.conv2d(x, w, stride=1, dilation=2), F.conv2d(x, w, dilation=2), F64)
