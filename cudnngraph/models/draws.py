"""Random numbers of a traced graph, drawn outside of it: what is left has no state.

An op that reads no more of its operands than their form becomes an input of the graph, and a
:class:`Draw` makes that input's tensor anew for every run, by torch's own generator and in the
order of the model: on a CPU the numbers are those of eager torch. So it is with dropout: its mask
is such an input. An op that reads numbers and draws others stays in the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ops import meta as forms

_aten: Any = torch.ops.aten

#: Ops that read no more of their first operand than its form.
_OF_FORM = frozenset(
    (
        *("bernoulli.p", "cauchy", "exponential", "geometric", "log_normal", "normal_functional"),
        *("rand_like", "randn_like", "randint_like", "randint_like.low_dtype", "uniform"),
    )
)


@dataclass(frozen=True)
class Draw:
    """A random input of a graph: its name there, and what makes a tensor for it."""

    name: str
    make: Callable[[], torch.Tensor]


def take_out(module: torch.fx.GraphModule) -> list[Draw]:
    """Replace ops of random numbers by further inputs, and return how to draw those."""
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    last = inputs[-1] if inputs else None
    draws: list[Draw] = []

    def drawn(seen: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.fx.Node:
        nonlocal last
        if last is None:
            with graph.inserting_before(next(iter(graph.nodes))):
                last = graph.placeholder("drawn")
        else:
            with graph.inserting_after(last):
                last = graph.placeholder("drawn")
        last.meta["val"] = seen
        draws.append(Draw(last.name, make))
        return last

    for node in list(graph.nodes):
        target: Any = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if target is _aten.native_dropout.default:
            if is_random(node):
                _without_dropout(graph, node, drawn)
        elif (make := _maker(node)) is not None:
            node.replace_all_uses_with(drawn(node.meta["val"], make))
            graph.erase_node(node)
    if draws:
        graph.eliminate_dead_code()
    return draws


def is_random(node: torch.fx.Node) -> bool:
    """Whether a node draws random numbers."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return forms.is_random(target, node.args, node.kwargs)


def reads_numbers(node: torch.fx.Node) -> bool:
    """Whether a random op reads more of its operands than their form."""
    if node.target is _aten.native_dropout.default:
        return False
    given = (node.args[1:] if _is_of_form(node.target) else node.args, node.kwargs)
    read = (each.meta.get("val") for each in _nodes(given))
    return any(isinstance(each, torch.Tensor) for each in read)


def _is_of_form(target: Any) -> bool:
    return str(target).removeprefix("aten.").removesuffix(".default") in _OF_FORM


def _nodes(given: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(given, found.append)
    return found


def _maker(node: torch.fx.Node) -> Callable[[], torch.Tensor] | None:
    """What runs a random op by itself; None for another op, and for one that reads numbers."""
    target: Any = node.target
    seen = node.meta.get("val")
    if not isinstance(seen, torch.Tensor) or not _is_known(seen):
        return None
    if not is_random(node):
        return None
    rest: tuple[Any, ...] = tuple(node.args)
    like: torch.Tensor | None = None
    if _is_of_form(target):
        like = rest[0].meta["val"] if isinstance(rest[0], torch.fx.Node) else None
        if like is None or not _is_known(like):
            return None
        rest = rest[1:]
    if _nodes((rest, node.kwargs)):
        return None
    kwargs = dict(node.kwargs)
    if like is None:
        return partial(target, *rest, **kwargs)
    return partial(_run_like, target, _empty(like), rest, kwargs)


def _run_like(
    target: Any, empty: Callable[[], torch.Tensor], rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    made: torch.Tensor = target(empty(), *rest, **kwargs)
    return made


def _empty(seen: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes a tensor of a form whose memory nothing has written."""
    shape, stride = tuple(seen.shape), tuple(seen.stride())
    return partial(torch.empty_strided, shape, stride, dtype=seen.dtype, device=seen.device)


def _is_known(seen: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*seen.shape, *seen.stride()))


def _without_dropout(
    graph: torch.fx.Graph, node: torch.fx.Node, drawn: Callable[..., torch.fx.Node]
) -> None:
    """x * 1 / (1 - p) where a mask holds, and the mask, for ``native_dropout``."""
    x, p = node.args[0], float(node.args[1])  # type: ignore[arg-type]
    y, mask = node.meta["val"]
    if not _is_known(mask):
        return
    empty = _empty(mask)
    keep = drawn(mask, lambda: empty().bernoulli_(1.0 - p))
    with graph.inserting_before(node):
        scaled = graph.call_function(_aten.mul.Tensor, (x, 0.0 if p == 1 else 1.0 / (1.0 - p)))
        kept = graph.call_function(_aten.where.ScalarOther, (keep, scaled, 0.0))
    for each in (scaled, kept):
        each.meta.update(node.meta, val=y)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(keep if user.args[1] else kept)
        graph.erase_node(user)
    graph.erase_node(node)
