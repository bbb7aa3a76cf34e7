"""Tensors of the CPU in a model that runs on a GPU.

Torch takes them beside those of the GPU where they are numbers (no dims) or indices, and a model
may copy its inputs there itself. All that a graph of ours reads and makes is on one device: what is
elsewhere is copied there before it runs, and what torch leaves on the CPU is copied back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..errors import CannotImport
from .results import results_in
from .retrace import inputs_of

if TYPE_CHECKING:
    from .convert import Imported

CPU = torch.device("cpu")


def device_of(given: Iterable[Any]) -> torch.device:
    """The device where a graph of these tensors runs: the GPU's, if any of them is on one."""
    found = [each.device for each in given if isinstance(each, torch.Tensor)]
    return next((each for each in found if each != CPU), CPU)


def traced_on(traced: torch.fx.GraphModule, given: Sequence[Any]) -> torch.device:
    """The device of a graph that was traced, by its inputs and what it makes of them.

    Raises :class:`CannotImport` where they are on several GPUs.
    """
    seen = [node.meta.get("val") for node in traced.graph.nodes]
    tensors = [each for each in (*given, *pytree.tree_leaves(seen)) if torch.is_tensor(each)]
    found = {each.device for each in tensors} - {CPU}
    if len(found) > 1:
        listed = ", ".join(sorted(map(str, found)))
        raise CannotImport(f"its tensors are on {listed}: a graph is on one device")
    return device_of(tensors)


def elsewhere(given: Sequence[Any], device: torch.device) -> tuple[int, ...]:
    """The places of tensors that are on the CPU where a graph is not."""
    return tuple(at for at, each in enumerate(given) if _is_apart(each, device))


def reads_elsewhere(graph: torch.fx.Graph, device: torch.device) -> bool:
    """Whether inputs of a traced graph are on the CPU where it is not."""
    return bool(elsewhere([node.meta.get("val") for node in inputs_of(graph)], device))


def _is_apart(given: Any, device: torch.device) -> bool:
    return isinstance(given, torch.Tensor) and given.device == CPU != device


def placed(
    imported: Imported, graph: torch.fx.Graph, device: torch.device, saved: Collection[int] = ()
) -> Imported:
    """The import of a traced graph with its constants on the device, which knows the results that
    torch has elsewhere. What is ``saved`` for a backward alone stays on the device."""
    seen = [
        None if at in saved else getattr(each, "meta", {}).get("val")
        for at, each in enumerate(results_in(graph))
    ]
    constants = {
        name: each.to(device) if _is_apart(each, device) else each
        for name, each in imported.constants.items()
    }
    return replace(imported, constants=constants, elsewhere=elsewhere(seen, device))
