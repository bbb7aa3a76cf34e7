"""Random attention is right, forward and backward, and reads nothing of what is padding.

``tests/random_attention.py`` says how to make many more, or one.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from cudnngraph.executor import torch_steps
from tests import numerics
from tests.random_attention import Case, case
from tests.random_tensors import F64, Maker, Roundings, off
from tests.steps import inputs_of, outputs_of

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_ATTENTION", "240"))
PART = 40
WAYS = (3, 40)  # of rounding; more where those do not do


def wide(of: Case) -> dict[str, torch.Tensor]:
    """Copies in float64."""
    made = {}
    for name, tensor in of.tensors.items():
        floats = tensor.is_floating_point()
        made[name] = tensor.to(F64) if floats else tensor
        if name in of.trained:
            made[name] = tensor.detach().double().clone().requires_grad_()
    return made


def upstream(of: Case, like: torch.Tensor, seed: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=numbers, dtype=F64).to(of.dtype)


def by_torch(of: Case, seed: int, rounded: Roundings | None = None) -> dict[str, torch.Tensor]:
    """Results and gradients by loops over sequences."""
    given = wide(of)
    if rounded is None:
        results = of.right(given)
    else:
        with rounded:
            noisy = {n: t if n == "attn_mask" else rounded.rounded(t) for n, t in given.items()}
            results = of.right(noisy)
    found = dict(zip(("o", "lse"), results, strict=False))
    leaves = [given[name] for name in of.trained]
    if leaves:
        dy = upstream(of, results[0], seed).double()
        valid = ~results[0].isnan()
        loss = (results[0][valid] * dy[valid]).sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        for name, leaf, gradient in zip(of.trained, leaves, gradients, strict=True):
            found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: value.detach() for name, value in found.items()}


def by_us(of: Case, seed: int) -> dict[str, torch.Tensor]:
    """The same by the executor."""
    graph = of.graph()
    leaves = {n: t.detach().requires_grad_(n in of.trained) for n, t in of.tensors.items()}
    if not of.trained:
        made = graph.compile("cpu")(**of.tensors)
        return dict(zip(("o", "lse"), made if isinstance(made, tuple) else (made,), strict=False))
    made = graph.compile("cpu", training=True)(**leaves)
    results = made if isinstance(made, tuple) else (made,)
    found = {name: each.detach() for name, each in zip(("o", "lse"), results, strict=False)}
    dy = upstream(of, results[0], seed)
    gradients = torch.autograd.grad(results[0], [leaves[n] for n in of.trained], dy)
    for name, gradient in zip(of.trained, gradients, strict=True):
        found[f"gradient of {name}"] = gradient
    return found


def by_steps(of: Case) -> dict[str, torch.Tensor]:
    """The results by torch steps, as on a GPU without a plan."""
    spec = of.graph().spec()
    outputs = outputs_of(spec)
    torch_steps.launcher(spec, inputs_of(spec, of.tensors), outputs, allow_tf32=False)()
    return dict(zip(("o", "lse"), outputs, strict=False))


def compared(
    of: Case, found: dict[str, Any], right: dict[str, Any], yards: list[dict[str, Any]]
) -> str:
    for name, value in found.items():
        want, theirs = right[name], [each[name] for each in yards]
        if name in ("o", "lse") and of.kind == "packed":  # not behind the last sequence
            known = sum(of.rows)
            value, want, theirs = value[:known], want[:known], [each[:known] for each in theirs]
        if name.startswith("gradient") and of.kind == "packed":
            known = sum(of.rows if name.endswith("q") else of.keys)
            value, want, theirs = value[:known], want[:known], [each[:known] for each in theirs]
        if name.startswith("gradient") and not value.isfinite().all():
            return f"{name} is not finite"
        given = of.dtype if name.startswith("gradient") else value.dtype
        # A row of one key: dS is 0, by a difference of do * v and do * o.
        size = 1000.0 if name.startswith("gradient") else 0.0
        if near := off(value.to(given), want, theirs, of.dtype, of.terms, size):
            return f"{name} {near}"
    return ""


def one(seed: int) -> str:
    """What is wrong with the case of a seed, "" for nothing."""
    of = case(seed)
    right = by_torch(of, seed)
    for name, run in (("executor", lambda: by_us(of, seed)), ("steps", lambda: by_steps(of))):
        found = run()
        near, yards = compared(of, found, right, []), []
        for ways in WAYS if near else ():
            unit = 2 * numerics.ROUNDOFF[of.dtype]
            yards = [by_torch(of, seed, Roundings(way, unit)) for way in range(ways)]
            if not (near := compared(of, found, right, yards)):
                break
        if near:
            return f"{of}\n  by {name}: {near}"
    return ""


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_random_attention_is_right_forward_and_backward(first: int) -> None:
    told = {seed: one(seed) for seed in range(first, min(first + PART, FIRST + COUNT))}
    wrong = [f"seed {seed}: {what}" for seed, what in told.items() if what]
    assert not wrong, "\n".join(wrong)


def seeded(seed: int) -> str:
    """What is wrong with dropout by a seed: its mask, found by values that show the weights, has to
    be the forward's and the backward's."""
    of, m = case(seed), Maker(seed)
    if of.kind != "dense" or "dropout_mask" not in of.tensors or of.dtype != F64:
        return "-"
    del of.tensors["dropout_mask"]
    numbers = (torch.randint(2**40, (1,), generator=m.numbers) for _ in range(2))
    of.tensors["dropout_seed"], of.tensors["dropout_offset"] = numbers
    shown = case(seed)
    keys, heads = of.sizes["keys"], of.tensors["v"].shape[1]
    eye = torch.eye(keys, dtype=F64).expand(len(of.rows), heads, keys, keys)
    shown.tensors = {**of.tensors, "v": eye}
    shown.options = {**of.options, "return_lse": False}
    kept = shown.graph().compile("cpu")(**shown.tensors) > 0
    by_mask = case(seed)
    by_mask.tensors["dropout_mask"] = kept
    found, again, right = by_us(of, seed), by_us(of, seed), by_us(by_mask, seed)
    if any(not torch.equal(found[name], again[name]) for name in found):
        return f"{of}\n  drops others the second time"
    return compared(of, found, right, [])


def test_random_seeds_drop_the_same_forward_and_backward() -> None:
    told = {seed: seeded(seed) for seed in range(FIRST, FIRST + 3 * COUNT)}
    assert {seed: what for seed, what in told.items() if what not in ("", "-")} == {}
    assert COUNT < PART or "" in told.values()
