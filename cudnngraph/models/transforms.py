"""Transforms of torch.func that an error has left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.autograd import forward_ad


@contextmanager
def transforms_ended() -> Iterator[None]:
    """End what an error leaves of transforms of torch.func. torch's export begins and ends those of
    a model's forward one by one, and in between they would hold for whatever runs next."""
    functorch: Any = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    writes = functorch.get_inplace_requires_grad_allowed()
    forward = torch._C._is_fwd_grad_enabled()
    try:
        yield
    except BaseException:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        functorch.set_inplace_requires_grad_allowed(writes)
        torch._C._set_fwd_grad_enabled(forward)
        _end_dual_level()
        raise


def _end_dual_level() -> None:
    """End the level of forward-mode gradients, of which there is one at most, that Python knows
    nothing of."""
    core: Any = torch._C
    if forward_ad._current_level < 0:
        level = 0
        with suppress(RuntimeError):  # it is nested in that one
            level = core._enter_dual_level()
        core._exit_dual_level(level=level)
