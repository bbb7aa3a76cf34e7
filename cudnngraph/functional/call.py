"""Run the graph of a function on tensors: directly, or as an op under torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from ..errors import BindError, Problem
from ..policy import Policy
from ..runtime import custom_ops
from ..runtime.executable import Over
from ..runtime.specialize import Build, LastCall, Specialized, Static

Tensor = torch.Tensor

_DETERMINISTIC = Policy(deterministic=True)


def _policy(given: Policy | None) -> Policy | None:
    if given is None and torch.are_deterministic_algorithms_enabled():
        return _DETERMINISTIC
    return given


def _compiled(build: Build, policy: Policy | None) -> Specialized:
    return custom_ops.specialized(build, _policy(policy))


def run_graph(
    build: Build,
    policy: Policy | None,
    tensors: Sequence[Tensor | None],
    static: Static,
    results: int = 1,
    over: Over = (),
) -> Any:
    """Run a graph's function: as an op where torch.compile traces, else directly, which is
    cheaper. A tensor, or several; ``over`` as of :meth:`Executable.call`."""
    if torch.compiler.is_compiling():
        made = custom_ops.call(build.__name__, tensors, static.values, _policy(policy), results)
        return made[0] if results == 1 else made
    return _compiled(build, policy).call(tensors, static, over)


def run_into(
    build: Build,
    policy: Policy | None,
    out: Tensor,
    tensors: Sequence[Tensor | None],
    static: Static,
) -> Tensor:
    """Run into ``out``, which gets no gradient: what requires one is refused, as by torch."""
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        problem = Problem(
            "out", "is given where a tensor requires grad", "torch.no_grad(), or no out"
        )
        raise BindError(build.__name__, [problem])
    if torch.compiler.is_compiling():
        made = run_graph(build, policy, tensors, static)
        torch.ops.cudnngraph.check_out(out, made, build.__name__)
        out.copy_(made)
    else:
        _compiled(build, policy).find(tensors, static).run(*given, out)
    return out


def needed_out(out: Tensor | None, function: str) -> Tensor:
    """The tensor that ``function`` writes to. Raises :class:`BindError` for None."""
    if out is None:
        raise BindError(function, [Problem("argument 'out'", "is None", "a torch.Tensor")])
    return out


def remember(
    recent: LastCall | None,
    build: Build,
    policy: Policy | None,
    tensors: Sequence[Tensor | None],
    given: Sequence[Tensor | None],
    static: Static,
) -> None:
    """Note what served a call, where that was given the very tensors that the call came with."""
    if recent is None or torch.compiler.is_compiling():
        return
    if all(map(is_, tensors, given)):
        recent.remember(static, policy, tensors, _compiled(build, policy).find(given, static))


def product_options(activation: str | None, attrs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The options of :func:`linear_act` and :func:`gated_mlp`."""
    return {"activation": activation, "attrs": attrs}


def sorted_attrs(attrs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The attributes of an activation by name, as options hold them."""
    return tuple([(name, attrs[name]) for name in sorted(attrs)])


def cast(*tensors: Tensor | None) -> Sequence[Any]:
    """The tensors in autocast's dtype where autocast is on, as torch casts what it multiplies."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type if tensors[0] is not None else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [
        tensor.to(dtype)
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    ]
