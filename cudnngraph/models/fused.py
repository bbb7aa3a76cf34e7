"""Whole models fused: :func:`fuse` makes a module of a model, for inference.

A model becomes one graph for each form of its inputs (:mod:`~cudnngraph.models.convert`), which is
compiled like any other: cut at its anchors into plans and torch steps, tensors between them in one
block. Parameters are bound once, inputs are copied into tensors of the graph's own, and a CUDA
graph of it all may be replayed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..arguments import LAZY, shown, unreadable
from ..errors import BindError, PolicyError, Problem
from ..policy import Policy
from ..runtime.compile import compile, generates
from .aten_ops import CONVOLUTIONS
from .bound import MAX_SHAPES, Bound
from .check import checked, copied, floats
from .convert import convert
from .export import Exported, export
from .report import Report

_CPU = torch.device("cpu")


class Fused(nn.Module):
    """A model that runs as fused graphs, one for each form of its inputs; see :func:`fuse`.

    ``report`` is that of the example's form; ``bound(*args)`` gives the graph that calls like this
    run. Weights are those of ``model`` when a form was first seen; :meth:`refresh` takes the
    present ones.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: Policy | None = None,
        channels_last: bool | None = None,
        dtype: torch.dtype | None = None,
        capture: bool = False,
        reuse_results: bool = False,
        max_shapes: int = MAX_SHAPES,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            what = f"the model is a {type(model).__name__}; expected a torch.nn.Module"
            if callable(model) and not isinstance(model, type):
                what += " (for a function: torch.compile(function, backend='cudnngraph'))"
            raise PolicyError(what)
        if model.training:
            raise PolicyError("the model is in training mode; call model.eval(), fuse is for use")
        if type(max_shapes) is not int or not 1 <= max_shapes < 1 << 31:
            expected = "a whole number >= 1 that fits 32 bits"
            raise PolicyError(f"max_shapes={shown(max_shapes)}; expected {expected}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise PolicyError(f"dtype={shown(dtype)}; expected a floating-point torch.dtype")
        if not (channels_last is None or type(channels_last) is bool):
            raise PolicyError(f"channels_last={shown(channels_last)}; expected True, False or None")
        for name, flag in (("capture", capture), ("reuse_results", reuse_results)):
            if type(flag) is not bool:
                raise PolicyError(f"{name}={shown(flag)}; expected True or False")
        self.model = model if dtype is None else copied(model).to(dtype)
        self._dtype = dtype
        self._policy = policy
        self._channels_last = channels_last
        self._capture = capture
        self._reuse = reuse_results
        self._max_shapes = max_shapes
        self._forms: OrderedDict[Hashable, tuple[Bound, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self.report: Report | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the model and the options; it compiles on its first call, from the cache."""
        return {**self.__dict__, "_forms": OrderedDict(), "_lock": None, "report": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    # -- calls -------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; results have no gradient."""
        leaves, form = self._flat(args, kwargs)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            bound, out_spec = self._form(form, args, kwargs)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            results = bound.run(tensors, reuse=self._reuse)
        return pytree.tree_unflatten(results, out_spec)

    def bound(self, *args: Any, **kwargs: Any) -> Bound:
        """Return the captured or bound call for arguments of this form, with its inputs set."""
        leaves, form = self._flat(args, kwargs)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            bound, _ = self._form(form, args, kwargs)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            bound.run(tensors, reuse=True)
        return bound

    def refresh(self) -> None:
        """Forget the weights that were bound; the plans stay in the cache."""
        with self._lock:
            self._forms.clear()

    def _flat(self, args: Any, kwargs: Any) -> tuple[list[Any], Hashable]:
        try:
            leaves, spec = pytree.tree_flatten((args, kwargs))
        except RecursionError:
            problem = Problem("arguments", "are nested too deeply, or hold themselves")
            raise BindError(type(self.model).__name__, [problem]) from None
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, Hashable)):
                raise PolicyError(_no_argument(leaf))
        casts = (
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
        parts: list[Hashable] = [str(spec), *casts]
        first: dict[int, int] = {}  # where a tensor stands: a model may ask which ones are the same
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if isinstance(leaf, LAZY):
                    where = f"tensor {place}"
                    raise BindError(type(self.model).__name__, unreadable(where, leaf))
                dtype = leaf.dtype if self._dtype is None or not floats(leaf) else self._dtype
                same = first.setdefault(id(leaf), place)
                parts.append((tuple(leaf.shape), dtype, leaf.device, leaf.layout, same))
            else:
                parts.append((type(leaf), leaf))
        return leaves, tuple(parts)

    def _form(self, form: Hashable, args: Any, kwargs: Any) -> tuple[Bound, Any]:
        try:
            found = self._forms.get(form)
        except Exception as error:
            problem = Problem("arguments", f"have no hash ({error})", "tensors and plain values")
            raise BindError(type(self.model).__name__, [problem]) from None
        if found is None:
            found = self._made(args, kwargs)
            self._forms[form] = found
            while len(self._forms) > self._max_shapes:
                self._forms.popitem(last=False)
        self._forms.move_to_end(form)
        return found

    # -- making ------------------------------------------------------------------------------------

    def _made(self, args: Any, kwargs: Any) -> tuple[Bound, Any]:
        leaves = enumerate(pytree.tree_leaves((args, kwargs)))
        given = [(f"tensor {at}", each) for at, each in leaves if isinstance(each, torch.Tensor)]
        if problems := [problem for where, each in given for problem in unreadable(where, each)]:
            raise BindError(type(self.model).__name__, problems)
        args, kwargs = self.cast(_detached_from(self.model, (args, kwargs)))
        device = _device_of((args, kwargs), self.model)
        exported = export(self.model, args, kwargs)
        last = self._channels_last
        if last is None:
            last = _has_images(exported)
        imported = convert(
            exported.module,
            exported.constants,
            exported.placeholders,
            name=type(self.model).__name__,
            channels_last=last,
            on_gpu=device.type == "cuda",
            kernels=generates(self._policy),
        )
        executable = None
        if imported.spec is not None:
            executable = compile(imported.spec, device, policy=self._policy)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            bound = Bound(imported, executable, device, capture=self._capture)
        if self.report is None:
            self.report = Report.of(
                type(self.model).__name__,
                imported,
                executable,
                device,
                channels_last=last,
                captured=bound.graph is not None,
            )
        return bound, exported.out_spec

    def cast(self, arguments: Any) -> Any:
        """Arguments with their floating tensors in the dtype that was asked for."""
        if self._dtype is None:
            return arguments
        return pytree.tree_map(
            lambda leaf: leaf.to(self._dtype) if floats(leaf) else leaf, arguments
        )

    def __len__(self) -> int:
        """Return the number of forms of inputs that are kept ready."""
        return len(self._forms)

    def extra_repr(self) -> str:
        """For torch's printed form of a module."""
        return f"{len(self)} of {self._max_shapes} forms" + (", captured" * self._capture)


def _no_argument(leaf: Any) -> str:
    """Why something cannot be an argument of a fused model, and what can."""
    kind = type(leaf).__name__
    if isinstance(leaf, Mapping):
        return (
            f"an argument is a {kind}, a mapping that torch does not take apart; give its tensors, "
            "as model(**inputs) does: fuse(model, (), kwargs=dict(inputs)), fused(**inputs)"
        )
    return f"an argument is a {kind}, which has no hash: forms are told apart by the arguments"


def _device_of(arguments: Any, model: nn.Module) -> torch.device:
    """The one device of the arguments and the model. Raises :class:`PolicyError` for several."""
    tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    devices = dict.fromkeys(x.device for x in (*tensors, *model.parameters(), *model.buffers()))
    if len(devices) > 1:
        listed = ", ".join(map(str, devices))
        raise PolicyError(f"arguments and model are on {listed}; expected one device")
    return next(iter(devices), _CPU)


def _has_images(exported: Exported) -> bool:
    """Whether a model convolves images: their channels are best the fastest dim."""
    return any(
        node.op == "call_function"
        and getattr(node.target, "overloadpacket", None) in CONVOLUTIONS
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node.meta["val"].dim() in (4, 5)
        for node in exported.module.graph.nodes
    )


def fuse(
    model: nn.Module,
    example_inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    channels_last: bool | None = None,
    dtype: torch.dtype | None = None,
    capture: bool = False,
    reuse_results: bool = False,
    max_shapes: int = MAX_SHAPES,
    check: bool = True,
) -> Fused:
    """``model`` as a module that runs fused, for inference, compiled for ``example_inputs``.

    ``example_inputs`` is the tuple of arguments, or one tensor. Another shape is compiled when it
    is first met; ``max_shapes`` of them are kept ready, each, with ``capture``, as a CUDA graph.

    - ``channels_last``: lay images and the weights of convolutions out so; None where there are
      such. Results keep the layout that their op passes on.
    - ``dtype``: run a copy of the model in it; floating inputs are converted.
    - ``reuse_results``: return the tensors that the next call of this shape overwrites, no copies.
    - ``check``: compare the results for the example with the model run in float64.

    Ops that we have not are torch steps; ``report`` of the result says which, and why. Raises
    :class:`CannotImport` for a model that is no single graph: control flow on numbers in tensors,
    state that changes, random numbers. Raises :class:`WrongResult` where the check fails.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    fused = Fused(
        model,
        policy=policy,
        channels_last=channels_last,
        dtype=dtype,
        capture=capture,
        reuse_results=reuse_results,
        max_shapes=max_shapes,
    )
    fused.eval()
    if not isinstance(kwargs, (Mapping, NoneType)):
        raise PolicyError(f"kwargs={shown(kwargs)}; expected a mapping of arguments by name")
    if type(check) is not bool:
        raise PolicyError(f"check={shown(check)}; expected True or False")
    results = fused(*args, **(kwargs or {}))
    if check and fused.report is not None:
        errors = checked(fused, args, dict(kwargs or {}), results)
        fused.report = Report(**{**fused.report.__dict__, "errors": errors})
    return fused


def _detached_from(model: nn.Module, arguments: Any) -> Any:
    """Arguments that the model itself holds, as tensors of their own: the next may be others."""
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    views: dict[int, torch.Tensor] = {}

    def apart(leaf: Any) -> Any:
        if id(leaf) not in held or not isinstance(leaf, torch.Tensor):
            return leaf
        return views.setdefault(id(leaf), leaf.detach())

    return pytree.tree_map(apart, arguments)
