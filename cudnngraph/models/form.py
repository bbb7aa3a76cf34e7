"""One form of the inputs of a fused model: how it is made, and how calls of it run."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..arguments import unreadable
from ..cache import lookup
from ..errors import BindError, CannotImport, PolicyError
from ..policy import Policy
from ..runtime.compile import generates, is_kept, start_workers
from .alternatives import Begins, Copied, compiled
from .aten_ops import CONVOLUTIONS
from .bound import Bound, cut_to
from .calls import CONSTANTS, Call, Pattern, called_by_leaves, check_untransformed, mapped
from .check import Ahead, Errors, floats
from .convert import Imported, convert
from .devices import CPU, placed
from .export import Exported, check_not_scripted, export, foreign
from .folding import why_not_folded
from .report import Report

_log = logging.getLogger(__name__)
#: The dims of results that have the size of an axis, by result and dim.
Cuts = Mapping[int, Mapping[int, int]]


@dataclass(frozen=True)
class Options:
    """How forms are made; see :func:`cudnngraph.fuse`. ``folds``: norms go into weights."""

    policy: Policy | None
    channels_last: bool | None
    dtype: torch.dtype | None
    capture: bool
    folds: bool = True

    def cast(self, arguments: Any) -> Any:
        """Arguments with their floating tensors in the dtype that was asked for."""
        if self.dtype is None:
            return arguments
        return mapped(lambda leaf: leaf.to(self.dtype) if floats(leaf) else leaf, arguments)


@dataclass
class Form:
    """A bound graph for calls of one pattern.

    ``numbers`` are those of the call that it was made for, ``inputs`` the places of those that are
    inputs of the graph. ``folds`` says whether norms may be in weights. ``cuts`` say which results
    are cut, by how a call is padded; ``errors`` are those of a padded call.
    """

    bound: Bound
    report: Report
    out_spec: Any
    pattern: Pattern
    numbers: Mapping[int, Any]
    inputs: frozenset[int]
    folds: bool = True
    cuts: dict[Hashable, Cuts] = field(default_factory=dict)
    errors: Errors = ()
    doubts: tuple[str, ...] = ()

    def given(self, call: Call) -> list[Any]:
        """What the graph reads of a call: tensors, as large as it takes them, and numbers."""
        return [
            leaf
            for place, leaf in enumerate(call.padded_leaves())
            if isinstance(leaf, torch.Tensor) or place in self.inputs
        ]

    def run(self, call: Call, *, reuse: bool) -> Any:
        """The results of a call, as the model gives them."""
        results = self.bound.run(self.given(call), reuse=reuse, sizes=self._sizes(call))
        return pytree.tree_unflatten(results, self.out_spec)

    def cut(self, results: Sequence[Any], call: Call) -> list[Any]:
        """Results at the sizes of a padded call, cut to those of the call."""
        sizes = self._sizes(call)
        return [cut_to(each, sizes.get(at, {})) for at, each in enumerate(results)]

    def _sizes(self, call: Call) -> dict[int, dict[int, int]]:
        cuts = self.cuts[call.padding] if call.is_padded else {}
        return {
            result: {dim: call.axes[axis][0] for dim, axis in dims.items()}
            for result, dims in cuts.items()
        }


def difference(old: Form, new: Form, names: Mapping[int, str]) -> str:
    """In what the calls of two forms differ, for a message; ``names`` are of the new one's."""
    if old.pattern[0] != new.pattern[0]:
        return "which arguments are given"
    parts = zip(old.pattern[1], new.pattern[1], strict=True)
    found = [at for at, (a, b) in enumerate(parts) if a != b]
    found += [at for at, n in new.numbers.items() if repr(old.numbers.get(at)) != repr(n)]
    return ", ".join(f"'{names[at]}'" for at in sorted(set(found))) or "autocast"


# -- making ----------------------------------------------------------------------------------------


def make(
    model: nn.Module,
    call: Call,
    inputs: frozenset[int],
    options: Options,
    ahead: Ahead | None = None,
) -> Form:
    """The form of a call, with the numbers at the places ``inputs`` as inputs of its graph.

    If ``ahead`` is given, it is made beside the builds; before them if memory is short and norms
    are folded. They are not if that puts results off. Raises :class:`CannotImport` for a model that
    is no single graph for such calls.
    """
    name = type(model).__name__
    check_untransformed(name, (*model.parameters(), *model.buffers()))
    tensors = [(at, each) for at, each in enumerate(call.leaves) if isinstance(each, torch.Tensor)]
    problems = [each for at, tensor in tensors for each in unreadable(f"tensor {at}", tensor)]
    if problems:
        raise BindError(name, problems)
    leaves = _detached_from(model, call.padded_leaves())
    device = _device_of(leaves, model)
    wide = any(x.dtype == torch.float64 for x in (*leaves, *model.parameters()) if floats(x))
    for at, leaf in enumerate(leaves):
        if at in inputs:
            leaves[at] = as_tensor(leaf, device, wide=wide)
        elif isinstance(leaf, torch.Tensor):
            leaves[at] = options.cast(leaf.to(device) if _is_scalar(leaf) else leaf)
    for leaf in leaves:
        if not isinstance(leaf, CONSTANTS):
            raise CannotImport(f"{name} {foreign(model, type(leaf).__name__, gives=False)}")
    if isinstance(model, torch.jit.ScriptModule):
        check_not_scripted(model)
    if ahead is not None:
        start_workers(device, options.policy)
    with called_by_leaves(model, call, leaves) as run:
        exported = export(model, run.args, run.kwargs)
        out_spec = exported.out_spec if run.out_spec is None else run.out_spec
    last = options.channels_last
    if last is None:
        last = _has_images(exported)

    folds = options.folds
    room = ahead is not None and ahead.has_room

    def import_with(folds: bool) -> Imported:
        found = convert(
            Copied(exported.module),
            exported.constants,
            exported.placeholders,
            name=name,
            channels_last=last,
            on_gpu=device.type == "cuda",
            kernels=generates(options.policy),
            folds=folds,
        )
        _check_results(name, found, leaves, inputs)
        return placed(found, exported.module.graph, device)

    def left_apart(found: Imported) -> Imported | None:
        """The import without folded norms if an earlier start has left them so: its plans are kept,
        and none with them are."""
        if not found.folded or found.spec is None or lookup.store().is_empty():
            return None
        if is_kept(found.spec, device, policy=options.policy):
            return None
        apart = import_with(folds=False)
        if apart.spec is None or not is_kept(apart.spec, device, policy=options.policy):
            return None
        return apart

    def settled(found: Imported, begins: Begins) -> Imported:
        """The import to run: without folded norms if these put results off, or did before."""
        nonlocal folds
        assert ahead is not None
        apart, why = left_apart(found), "as plans that are kept say"
        if apart is None:
            building = room and begins()
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            off = why_not_folded(name, found, tensors, ahead, device, options.policy)
            if off is None:
                if building:
                    ahead.early()
                return found
            apart, why = import_with(folds=False), f"since then {off}"
        _log.info("%s: norms are not folded into weights, %s", name, why)
        folds = False
        return apart

    imported, executable, instead = compiled(
        lambda: import_with(folds),
        device,
        policy=options.policy,
        meanwhile=None if ahead is None else settled,
    )
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        bound = Bound(imported, executable, device, capture=options.capture)
    captured = bound.graph is not None
    report = Report.of(
        name,
        imported,
        executable,
        device,
        channels_last=last,
        captured=captured,
        instead=instead,
    )
    numbers, doubts = dict(call.numbers), exported.doubts
    return Form(bound, report, out_spec, call.pattern, numbers, inputs, folds=folds, doubts=doubts)


def as_tensor(number: Any, device: torch.device, *, wide: bool) -> torch.Tensor:
    """A number as a tensor that gives ops of tensors the dtypes that the number gives them.

    That is int64, or float32, or float64 in a model that has it (``wide``).
    """
    if isinstance(number, Integral):
        return torch.tensor(int(number), dtype=torch.int64, device=device)
    dtype = torch.float64 if wide else torch.float32
    return torch.tensor(float(number), dtype=dtype, device=device)


def _check_results(
    name: str, imported: Imported, leaves: Sequence[Any], inputs: frozenset[int]
) -> None:
    """Raise :class:`CannotImport` for a result that is made of a number alone: the model's is a
    number then, and no tensor."""
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    numbers = {index for index, at in enumerate(places) if at in inputs}
    for result in imported.results:
        kind, value = ("output", result) if isinstance(result, str) else result
        if kind in ("view", "count") and value[0] in numbers:
            raise CannotImport(f"{name}: a result is made of a number alone")


def _is_scalar(leaf: Any) -> bool:
    """Whether a leaf is a tensor of the CPU that torch takes beside those of a GPU."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.device.type == "cpu"


def _device_of(leaves: Iterable[Any], model: nn.Module) -> torch.device:
    """The one device of the arguments and the model. Raises :class:`PolicyError` for several."""
    given = [x for x in leaves if isinstance(x, torch.Tensor) and not _is_scalar(x)]
    devices = dict.fromkeys(x.device for x in (*given, *model.parameters(), *model.buffers()))
    if len(devices) > 1:
        listed = ", ".join(map(str, devices))
        raise PolicyError(f"arguments and model are on {listed}; expected one device")
    return next(iter(devices), CPU)


def _has_images(exported: Exported) -> bool:
    """Whether a model convolves images: their channels are best the fastest dim."""
    return any(
        node.op == "call_function"
        and getattr(node.target, "overloadpacket", None) in CONVOLUTIONS
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node.meta["val"].dim() in (4, 5)
        for node in exported.module.graph.nodes
    )


def _detached_from(model: nn.Module, leaves: Sequence[Any]) -> list[Any]:
    """Leaves with tensors of their own for those that the model holds: the next may be others."""
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    views: dict[int, torch.Tensor] = {}

    def apart(leaf: Any) -> Any:
        if id(leaf) not in held or not isinstance(leaf, torch.Tensor):
            return leaf
        return views.setdefault(id(leaf), leaf.detach())

    return list(map(apart, leaves))
