"""Build the entries at their real sizes without memory, and run them on tensors without memory.

It finds what a configuration has wrong before a GPU is lent for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from .entries import Entry, said

TOLERANCE = 0.005  # of the stated number of parameters


@dataclass(frozen=True)
class Built:
    """A model of real size: its parameters, and the shapes of its results; or what is wrong."""

    entry: Entry
    parameters_m: float = 0.0
    results: tuple[tuple[int, ...], ...] = ()
    error: str = ""
    missing: bool = False


def built(entry: Entry) -> Built:
    """Build an entry without memory, and call it."""
    why = entry.why_missing()
    if why:
        return Built(entry, error=why, missing=True)
    try:
        entry.load()
        with _without_memory():
            model = entry.real.build().eval()
        count = sum(each.numel() for each in model.parameters()) / 1e6
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            fake: Any = model
            fake._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
            given = [
                torch.zeros(each.shape, dtype=torch.int64)
                if each.below
                else torch.randn(each.shape)
                for each in entry.real.inputs
            ]
            results = fake(*given)
    except Exception as error:  # whatever a library raises is what is to be told
        return Built(entry, error=said(error))
    shapes = tuple(
        tuple(each.shape) for each in pytree.tree_leaves(results) if isinstance(each, FakeTensor)
    )
    wrong = ""
    if not shapes:
        wrong = f"it returns no tensor but {type(results).__name__}"
    elif not math.isclose(count, entry.parameters_m, rel_tol=TOLERANCE):
        wrong = f"it has {count:.3f} M parameters, and is stated to have {entry.parameters_m:g}"
    return Built(entry, count, shapes, wrong)


@contextmanager
def _without_memory() -> Iterator[None]:
    """Let parameters of modules be made without memory; buffers keep their numbers."""
    module: Any = nn.Module
    register = module.register_parameter

    def registered(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None and not parameter.is_meta:
            self._parameters[name] = nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )

    module.register_parameter = registered
    try:
        yield
    finally:
        module.register_parameter = register
