"""Models as ATen ops: by a run of our own where that will do, else by torch.export."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from . import tracer
from .errors import CannotImport

_TORCH = Path(torch.__file__).parent


class HasGraph(Protocol):
    """A GraphModule, or anything else with a graph, and with what its ``get_attr`` nodes name."""

    graph: torch.fx.Graph


@dataclass(frozen=True)
class Exported:
    """A model as ATen ops: the graph, its constants by placeholder, and how it is called.

    ``placeholders`` are the names of those that stand for the caller's tensors, in the order of
    the tensors among the flattened arguments.
    """

    module: HasGraph
    constants: Mapping[str, torch.Tensor]
    placeholders: tuple[str, ...]
    out_spec: Any


def export(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Exported:
    """``model`` called with ``args`` as a graph of ATen ops, without a gradient.

    Raises :class:`CannotImport` for a model that changes its buffers or its inputs, and for one
    whose ops depend on the numbers in its tensors.
    """
    with _exporting():
        traced = tracer.trace(model, args, kwargs or {})
        if traced is not None:
            return Exported(traced, traced.constants, tuple(traced.placeholders), traced.out_spec)
        return by_torch(model, args, kwargs)


_exporters: list[int] = []


@contextmanager
def _exporting() -> Iterator[None]:
    _exporters.append(threading.get_ident())
    try:
        yield
    finally:
        _exporters.remove(threading.get_ident())


def is_exporting() -> bool:
    """Whether this thread is in :func:`export`: what is made of torch's modules calls those then,
    for a graph of their ops can do more than a call of ours in it."""
    return bool(_exporters) and threading.get_ident() in _exporters


def by_torch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Exported:
    """:func:`export`, by torch.export."""
    from torch.export.graph_signature import InputKind

    name = type(model).__name__
    try:
        with torch.no_grad():
            program = torch.export.export(model, tuple(args), dict(kwargs or {}), strict=False)
            program = program.run_decompositions({})
    except Exception as error:
        raise CannotImport(f"{name} cannot be exported: {_export_failure(error)}") from error
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    changed += getattr(signature, "parameters_to_mutate", {}).values()
    if changed:
        what = ", ".join(f"'{each}'" for each in changed)
        raise CannotImport(
            f"{name} changes {what} in place, which a graph does not (a batch norm in training "
            "mode, a counter, a cache?); call model.eval(), or return the new value"
        )
    constants: dict[str, torch.Tensor] = {}
    placeholders: list[str] = []
    for each in signature.input_specs:
        held = {**program.state_dict, **program.constants}
        if each.kind == InputKind.USER_INPUT:
            if type(each.arg).__name__ == "TensorArgument":
                placeholders.append(each.arg.name)
        elif each.target in held:
            constants[each.arg.name] = held[each.target].detach()
        else:
            raise CannotImport(f"{name} takes a {each.kind.name.lower()}, which no graph has")
    return Exported(
        program.graph_module, constants, tuple(placeholders), program.call_spec.out_spec
    )


def _export_failure(error: Exception) -> str:
    """Why torch.export gave up, in a line, and where."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    where = last_line(text)
    return f"{first} ({where})" if where else first


def last_line(trace: str) -> str:
    """The last line of a stack trace that is not torch's own, "" where there is none."""
    found = re.findall(r'File "([^"<]+)", line (\d+), in (\S+)\n\s*(.+)', trace)
    ours = [each for each in found if _TORCH not in Path(each[0]).parents] or found
    if not ours:
        return ""
    path, number, function, code = ours[-1]
    return f"{Path(path).name}:{number} in {function}: {code.strip()}"
