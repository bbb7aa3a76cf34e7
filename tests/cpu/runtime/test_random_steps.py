"""Random training steps by :func:`capture_step` on a CPU do as the same steps called by themselves.

``RANDOM_STEPS=2000 pytest tests/cpu/runtime/test_random_steps.py`` makes so many;
``RANDOM_FIRST=123 RANDOM_STEPS=1`` that one.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import cudnngraph as cg
from tests.random_tensors import F32, F64, Maker

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_STEPS", "100"))
PART, CALLS = 50, 6
Pair = namedtuple("Pair", "x extra")
OPTIMIZERS: tuple[Any, ...] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
    *(torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adadelta, torch.optim.Rprop),
)


class Own:
    """An argument that pytree knows nothing of."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Loop:
    """A model with its optimizers, and a step over it."""

    def __init__(self, seed: int) -> None:
        m = Maker(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
        self.model = self.model.double()
        parts = [list(self.model[:2].parameters()), list(self.model[3:].parameters())]
        parts = parts if m.chance(0.4) else [parts[0] + parts[1]]
        rate: Any = torch.tensor(0.01, dtype=F64) if m.chance(0.2) else 0.01
        kinds = [torch.optim.Adam] if isinstance(rate, torch.Tensor) else OPTIMIZERS
        self.optimizers = [m.pick(*kinds)(params, lr=rate) for params in parts]
        kind = m.pick(None, "step", "cosine")
        make: Any = {
            "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
            "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        }.get(kind)
        self.schedulers = [make(o) for o in self.optimizers] if make else []
        self.scaler = torch.amp.GradScaler("cpu") if m.chance(0.3) else None
        self.clip = m.chance(0.4)
        self.fails = m.pick(None, None, None, "value", "shape")

    def step(self, batch: Any, *more: Any, factor: float = 1.0, own: Any = None) -> Any:
        """A step, by what is nested in its arguments."""
        tensors = [t for t in pytree.tree_leaves((batch, more)) if isinstance(t, torch.Tensor)]
        x = tensors[0]
        if self.fails == "value" and len(x) == 5:
            raise ValueError("no batch of five")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        x = x[:, :3] if self.fails == "shape" and len(x) == 5 else x
        loss = self.model(x.double()).square().mean() * factor * (own.factor if own else 1.0)
        loss = loss + sum(t.double().sum() * 0.0 for t in tensors[1:])
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        return {"loss": loss.detach(), "more": [factor, None, (x.shape,)]}


def arguments(m: Maker) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch, nested in a random way."""
    x = m.tensor((m.pick(2, 3, 5), 4), m.pick(F32, F64))
    extra = m.tensor((2,), F32)
    batch = m.pick(
        *(x, [x], (x, extra), {"x": x, "name": "text"}, OrderedDict(x=x), Pair(x, extra)),
        *([[x, {"deep": (extra, None)}]], Pair({"x": x}, [])),
    )
    more = m.pick((), (extra,), (None, 3, "text"), ({1, 2},), (slice(2),))
    words: dict[str, Any] = {"factor": m.pick(1.0, 0.5, True)} if m.chance(0.5) else {}
    return (batch, *more), {**words, **({"own": Own(2.0)} if m.chance(0.2) else {})}


def one(seed: int) -> str:
    """What is wrong with the steps of a seed, "" for nothing."""
    ours, theirs, m = Loop(seed), Loop(seed), Maker(seed + 1)
    several = ours.optimizers
    given = m.pick(several, tuple(several), iter(several), several[0], ())
    call = cg.capture_step(
        ours.step, optimizers=given, warm_up=m.pick(1, 3), max_shapes=1, reuse_results=m.chance(0.3)
    )
    for _ in range(CALLS):
        args, words = arguments(m)
        made, wrong = [], []
        for run, held in ((call, args), (theirs.step, copy.deepcopy(args))):
            try:
                made.append(run(*held, **words))
            except Exception as error:
                wrong.append((type(error), str(error)))
        if len(wrong) == 1 or (wrong and wrong[0] != wrong[1]):
            return f"raises {wrong} for {args}"
        for loop in (ours, theirs):
            for scheduler in loop.schedulers if not wrong else ():
                scheduler.step()
        results = [pytree.tree_leaves(each) for each in made]
        for a, b in zip(*results, strict=True) if made else ():
            if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b):
                return f"gives {a}, not {b}"
        states = zip(
            ours.model.state_dict().items(), theirs.model.state_dict().items(), strict=True
        )
        for (name, a), (_, b) in states:
            if not torch.equal(a, b):
                return f"{name} is {a}, not {b}"
    return "" if call.captures == 0 else "captures"


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_random_steps_do_as_by_themselves(first: int) -> None:
    told = {seed: one(seed) for seed in range(first, min(first + PART, FIRST + COUNT))}
    assert {seed: what for seed, what in told.items() if what} == {}
