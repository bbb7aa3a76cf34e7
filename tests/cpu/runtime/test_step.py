"""Captured training steps, where no CUDA graph can be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.runtime import step as steps


def test_on_a_cpu_a_call_is_a_call() -> None:
    seen = []

    def step(x: torch.Tensor, *, times: float) -> torch.Tensor:
        seen.append(times)
        return x * times

    call = cg.capture_step(step)
    made = [call(torch.ones(2), times=number) for number in range(5)]
    assert seen == list(range(5)) and [each[0] for each in made] == seen
    assert call.captures == 0


def test_a_loop_trains_on_a_cpu() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((weight - x) ** 2).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = cg.capture_step(step, optimizers=optimizer)
    losses = [call(torch.ones(3)) for _ in range(20)]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"step": 3}, "step=3; expected a function"),
        ({"warm_up": 0}, "warm_up=0; expected a whole number >= 1"),
        ({"max_shapes": 1.5}, "max_shapes=1.5; expected a whole number >= 1"),
        ({"reuse_results": 1}, "reuse_results=1; expected True or False"),
        ({"optimizers": "adam"}, "optimizers: 'a' is no torch.optim.Optimizer"),
    ],
)
def test_what_is_no_step_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(cg.PolicyError, match=said):
        cg.capture_step(**{"step": lambda: None, **given})


def test_numbers_of_an_optimizer_are_what_a_capture_fixes() -> None:
    weight = torch.zeros(3, requires_grad=True)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([weight], lr=rate, capturable=False)
    call = steps.CapturedStep(lambda: None, optimizers=optimizer)
    before = call._numbers()
    rate.fill_(0.2)
    assert call._numbers() == before, "a tensor is read by the graph"
    optimizer.param_groups[0]["weight_decay"] = 0.5
    assert call._numbers() != before


def test_an_error_is_told_with_the_line_that_made_it() -> None:
    def inner() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nlong text")

    try:
        try:
            inner()
        finally:
            raise RuntimeError("operation failed due to a previous error")
    except RuntimeError as error:
        said = steps._said(error)
    assert said.startswith("operation not permitted when stream is capturing (")
    assert "test_step.py" in said and "raise RuntimeError(" in said
    assert said.endswith("; what reads a tensor on the host, such as .item(), cannot be captured")
