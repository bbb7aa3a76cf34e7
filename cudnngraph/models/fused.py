"""Whole models fused: :func:`fuse` makes a module of a model, :func:`backend` is for torch.compile.

A model becomes one graph for each form of its inputs (:mod:`~cudnngraph.models.convert`), which is
compiled like any other: cut at its anchors into plans and torch steps, tensors between them in one
block. Parameters are bound once, inputs are copied into tensors of the graph's own, and a CUDA
graph of it all may be replayed.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import settings
from ..arguments import LAZY, shown, unreadable
from ..backend import env
from ..cache.codec import to_record
from ..device import files
from ..errors import BindError, CannotImport, GraphError, PolicyError, Problem
from ..ir.spec import TensorSpec, is_dense
from ..policy import Policy
from ..runtime import comparison, custom_ops
from ..runtime.bound import CapturedCall
from ..runtime.checks import ALIGNMENT_BYTES
from ..runtime.compile import compile
from ..runtime.executable import Executable, strided_copy
from ..runtime.state import Held, agree
from ..select.heuristic import FREE, Selection, StepPlan
from ..select.trial import relative_error
from .convert import CONVOLUTIONS, Imported, convert
from .export import Exported, export

_log = logging.getLogger(__name__)

MAX_SHAPES = 8
_CPU = torch.device("cpu")


# -- a model for one form of its inputs ------------------------------------------------------------


class _Turns:
    """Lets runs that share tensors wait for one another, whatever stream each is on."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._last = torch.cuda.current_stream(device)
        self._met = {self._last.cuda_stream}

    def follow(self, tensors: Iterable[Any]) -> None:
        """Let the current stream, if it is another, wait for the one of the last run; where it is
        new, ``tensors`` are known to be in use on it when they are freed."""
        raw = env.raw_stream(self._index)
        if raw == self._last.cuda_stream or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._index)
        stream.wait_stream(self._last)
        if raw not in self._met:
            self._met.add(raw)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)
        self._last = stream


class Bound:
    """A graph with every tensor bound: call it with nothing, as often as wanted.

    ``inputs`` are the tensors that a run reads, in the order of the model's tensors, None where
    nothing depends on one; ``results`` are what it makes: tensors that every run writes anew, or
    that never change, and values. ``tensors`` are all that are bound, by their names in the graph;
    ``graph`` is the CUDA graph, if it was captured.
    """

    def __init__(
        self,
        imported: Imported,
        executable: Executable | None,
        device: torch.device,
        *,
        capture: bool = False,
    ) -> None:
        self.imported = imported
        self.executable = executable
        self.inputs: list[torch.Tensor | None] = [None] * len(imported.inputs)
        self.written: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._gapped: set[str] = set()  # results
        self.graph: Any = None
        self.compared = False  # with eager
        self._call: Callable[[], None] = _nothing
        self._turns = _Turns(device) if device.type == "cuda" else None
        if executable is None or imported.spec is None:
            return
        tensors = imported.spec.tensors
        given = {name: _aligned(tensor) for name, tensor in imported.constants.items()}
        for place, name in enumerate(imported.inputs):
            if name is not None:
                given[name] = _empty(tensors[name], device).zero_()
                packed = imported.packed.get(name)
                self.inputs[place] = packed.image(given[name]) if packed else given[name]
        for name in imported.spec.outputs:
            self.written[name] = given[name] = _empty(tensors[name], device)
            if not is_dense(tensors[name].shape, tensors[name].stride):
                self._gapped.add(name)
        self.tensors = given
        self._call = executable.bind(**given)
        if capture:
            captured = CapturedCall(self._call, device)
            self._call, self.graph = captured, captured.graph

    def __call__(self) -> None:
        self._call()

    def run(self, tensors: Sequence[Any], *, reuse: bool = False) -> list[Any]:
        """The results for ``tensors``; with ``reuse`` those that the next run overwrites."""
        if self._turns is not None:
            kept = (result[1] for result in self.imported.results if not isinstance(result, str))
            self._turns.follow(chain(self.tensors.values(), kept))
        for mine, given in zip(self.inputs, tensors, strict=True):
            if mine is not None:
                mine.copy_(given)
        self()
        results: list[Any] = []
        for result in self.imported.results:
            if isinstance(result, str):
                made = self.written[result]
                copied = strided_copy if result in self._gapped else torch.clone
                results.append(made if reuse else copied(made))
            else:
                kind, value = result
                value = tensors[value] if kind == "input" else value
                results.append(value.clone() if kind == "copy" else value)
        return results


def _nothing() -> None:
    pass


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it begins at an address that plans do not take."""
    if tensor.data_ptr() % ALIGNMENT_BYTES == 0 or tensor.device.type == "cpu":
        return tensor
    return strided_copy(tensor)


def _empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)


# -- the report ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What became of a model for one form of its inputs; ``str()`` of it is a table.

    ``steps`` run in order, ``tier`` says what served their plans. ``folded`` batch norms are in
    weights. ``opaque`` are ops that stay torch's own, by (name, line of the model). ``errors``
    holds, where results were checked, the relative error to float64 of each, and the model's own.
    """

    model: str
    device: torch.device
    channels_last: bool
    captured: bool
    tier: str
    steps: tuple[StepPlan, ...]
    folded: int
    opaque: tuple[tuple[str, str], ...]
    workspace_bytes: int
    errors: tuple[tuple[float, float | None], ...] = ()
    executable: Executable | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """How many steps are plans of cuDNN, torch's, views, or the reference executor."""
        return Counter(self._kind(step) for step in self.steps)

    def _kind(self, step: StepPlan) -> str:
        if step.choice is not None:
            return "cuDNN"
        if FREE in step.decisions:
            return "view"
        return "reference" if self.device.type == "cpu" else "torch"

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Of each step: what runs it, its ops, its time in µs, and why it is no plan of cuDNN."""
        for step in self.steps:
            kind = self._kind(step)
            ops = [node.op for node in step.spec.nodes if node.op != "constant"]
            shown = " ".join(ops) if len(ops) < 9 else f"{' '.join(ops[:8])} … ({len(ops)} ops)"
            time = "" if step.time_us is None else f"{step.time_us:.1f}"
            reasons = [d.reason for d in step.decisions if not d.accepted]
            yield kind, shown, time, reasons[-1] if kind == "torch" and reasons else ""

    def __str__(self) -> str:
        layout = "channels_last" if self.channels_last else "as given"
        head = f"{self.model} on {self.device}: {len(self.steps)} steps ("
        head += ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        head += f"), images {layout}, {self.folded} batch norms folded"
        lines = [head, f"plans from: {self.tier}, workspace {self.workspace_bytes} bytes"]
        if self.captured:
            lines[-1] += ", in a CUDA graph"
        for number, (error, own) in enumerate(self.errors):
            beside = "" if own is None else f", the model's own {own:.1e}"
            lines.append(f"result {number}: relative error {error:.1e}{beside}")
        rows = [("step", "runs on", "ops", "µs", "why"), *self._numbered()]
        widths = [max(len(row[place]) for row in rows) for place in range(4)]
        lines += [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]
            ).rstrip()
            for row in rows
        ]
        for name, line in dict.fromkeys(self.opaque):
            lines.append(f"torch's own: {name}" + (f", {line}" if line else ""))
        return "\n".join(lines)

    def _numbered(self) -> Iterator[tuple[str, ...]]:
        for number, row in enumerate(self.rows(), 1):
            yield (str(number), *row)

    def svg(self) -> str:
        """The steps as a picture."""
        from ..backend.env import EnvKey
        from ..explain.draw import svg

        if self.executable is None:
            raise PolicyError("nothing of the model is left to run, so there is nothing to draw")
        exe = self.executable
        selection = Selection(self.steps, (None,) * len(self.steps))
        environment = EnvKey(0, "", str(self.device), (0, 0), 0, 0)
        return svg(to_record(exe.spec, exe.key, environment, exe.policy, selection))

    def save(self, path: str | Path) -> None:
        """Write the picture to a file, as SVG."""
        files.write(path, self.svg())


# -- fuse ------------------------------------------------------------------------------------------


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
            raise PolicyError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
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
        self.model = model if dtype is None else _copied(model).to(dtype)
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
        """What calls with arguments of this form run, their tensors copied into its inputs."""
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
                dtype = leaf.dtype if self._dtype is None or not _floats(leaf) else self._dtype
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
        args, kwargs = self.cast(_apart_from(self.model, (args, kwargs)))
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
        )
        executable = None
        if imported.spec is not None:
            executable = compile(imported.spec, device, policy=self._policy)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            bound = Bound(imported, executable, device, capture=self._capture)
        if self.report is None:
            self.report = Report(
                type(self.model).__name__,
                device,
                last,
                bound.graph is not None,
                "" if executable is None else executable.tier,
                () if executable is None else executable.steps,
                imported.folded,
                tuple((each.overload, each.line) for each in imported.opaque),
                0 if executable is None else executable.workspace_bytes,
                executable=executable,
            )
        return bound, exported.out_spec

    def cast(self, arguments: Any) -> Any:
        """Arguments with their floating tensors in the dtype that was asked for."""
        if self._dtype is None:
            return arguments
        return pytree.tree_map(
            lambda leaf: leaf.to(self._dtype) if _floats(leaf) else leaf, arguments
        )

    def __len__(self) -> int:
        """How many forms of inputs are kept ready."""
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


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


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

    What has no op of ours is a torch step; ``report`` of the result says which, and why. Raises
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
        errors = _checked(fused, args, dict(kwargs or {}), results)
        fused.report = Report(**{**fused.report.__dict__, "errors": errors})
    return fused


def _checked(
    fused: Fused, args: Any, kwargs: Any, results: Any
) -> tuple[tuple[float, float | None], ...]:
    """The errors of the results and of the model itself; raises where ours are too large."""
    args, kwargs = fused.cast((args, kwargs))
    name = type(fused.model).__name__
    held = Held(fused.model)
    try:
        with torch.no_grad():
            own, again = (_results(fused.model, args, kwargs) for _ in range(2))
            exact = _in_float64(fused.model, args, kwargs, own)
    finally:
        held.restore()
    for number, (first, second) in enumerate(zip(own, again, strict=True)):
        if not agree(second, first):
            raise CannotImport(
                f"{name}: result {number} is another in a second call with the same inputs, which "
                "a graph's is not: it depends on what is outside of the model"
            )
    assert fused.report is not None
    executable = fused.report.executable
    tf32 = executable is not None and executable.in_tf32
    floor = comparison.coarsest((step.spec for step in fused.report.steps), tf32=tf32)
    errors: list[tuple[float, float | None]] = []
    for number, (mine, theirs) in enumerate(zip(pytree.tree_leaves(results), own, strict=True)):
        wanted = None if exact is None else exact[number]
        yardstick = comparison.Yardstick(theirs, wanted, floor=floor)
        found = yardstick.check(f"{name}: result {number}", mine)
        if found is not None:
            errors.append(found)
    return tuple(errors)


def _apart_from(model: nn.Module, arguments: Any) -> Any:
    """Arguments that the model itself holds, as tensors of their own: the next may be others."""
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    views: dict[int, torch.Tensor] = {}

    def apart(leaf: Any) -> Any:
        if id(leaf) not in held or not isinstance(leaf, torch.Tensor):
            return leaf
        return views.setdefault(id(leaf), leaf.detach())

    return pytree.tree_map(apart, arguments)


def _results(model: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """What a model gives, in tensors that a later call does not write over."""
    made = pytree.tree_leaves(model(*args, **kwargs))
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in made]


def _copied(model: nn.Module) -> nn.Module:
    """A copy of a model, each module of it in evaluation if that of the model is: some are in
    training when they have been copied, and have other graphs then."""
    made = copy.deepcopy(model).eval()
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in made.named_modules():
        module.training = modes.get(name, False)
    return made


FARTHEST = 0.1  # from float64 that a model may be before the copy that is run in it is doubted


def _in_float64(model: nn.Module, args: Any, kwargs: Any, own: Sequence[Any]) -> list[Any] | None:
    """The results of the model in float64, which gives its ``own``; None for a model that does not
    run in it, or whose copy is another model."""
    try:
        wide = _copied(model).double()
        wide_args, wide_kwargs = pytree.tree_map(
            lambda leaf: leaf.double() if _floats(leaf) else leaf, (args, kwargs)
        )
        exact = _results(wide, wide_args, wide_kwargs)
        if any(map(_is_far, own, exact)):
            alike = _results(_copied(model), args, kwargs)
            if not all(map(agree, alike, own)):
                return None
        return exact
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


def _is_far(mine: Any, exact: Any) -> bool:
    if not _floats(mine) or not isinstance(exact, torch.Tensor):
        return False
    return mine.shape != exact.shape or not relative_error(mine, exact) <= FARTHEST


# -- torch.compile ---------------------------------------------------------------------------------

_OPTIONS = ("channels_last", "policy", "max_shapes", "check")
CHANGES = 3  # of the weights, after which they are inputs like others


def backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend of ``torch.compile(model, backend="cudnngraph")``.

    Each graph that dynamo finds is imported as a whole for each set of shapes it is called with;
    in training its forward and its backward are. Weights are bound, batch norms folded into them,
    for inference; weights that change are taken anew. What cannot be imported runs as torch's own
    graph, and the log says why. ``options``: ``channels_last`` (bool), ``policy``, ``max_shapes``,
    ``check`` (bool; by default as ``CUDNNGRAPH_CHECK`` says).

    With ``check`` the first call of each graph, for each set of shapes and of bound weights, is
    compared with torch's run of the same graph in float64: results, new values of buffers, what the
    gradient needs, and in the first backward the gradients. Raises :class:`WrongResult`, before any
    state has changed, if one is off by more than :func:`fuse` allows. Later calls are not compared.
    A gradient of which most cancels may be off by a part of what all gradients together may.
    """
    from torch._dynamo.backends.common import aot_autograd

    unknown = [name for name in options or {} if name not in _OPTIONS]
    if unknown or mode not in (None, "default"):
        what = f"option {', '.join(unknown)}" if unknown else f"mode={mode!r}"
        raise PolicyError(f"{what} is unknown to this backend; options are {', '.join(_OPTIONS)}")
    given = {"check": settings.current().check, **(options or {})}
    if type(given["check"]) is not bool:
        raise PolicyError(f"check={shown(given['check'])}; expected True or False")
    names = _input_names(module)

    def inference(traced: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        places = _static_places(len(examples))
        return _boxed(_Compiled(traced, places, given, _result_names(names)))

    def training(traced: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        return _boxed(_Compiled(traced, (), given, _result_names(names)))

    def backward(traced: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        return _boxed(_Compiled(traced, (), given, _gradient_names(names), gradients=True))

    make: Any = aot_autograd
    made: Callable[..., Any] = make(
        fw_compiler=training, bw_compiler=backward, inference_compiler=inference
    )(module, example_inputs)
    return made


Names = Callable[[int], "list[str]"]  # what each of so many results of a graph is


def _input_names(module: torch.fx.GraphModule) -> list[str]:
    """What the user calls the inputs of a graph of dynamo's, as AOTAutograd puts them in order."""
    held = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return held + [_source_name(n) for n in module.graph.nodes if n.op == "placeholder"]


_HELD = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")


def _source_name(node: torch.fx.Node) -> str:
    """ "layers.0.weight" of a parameter, "x" of an argument."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", str(node.target))
    text = str(name() if callable(name) else name)  # a method before torch 2.10
    return ".".join(_HELD.findall(text)) or re.sub(r"^[LG]\['([^']+)'\]", r"\1", text)


def _result_names(inputs: Sequence[str]) -> Names:
    """Of a forward: the new values of inputs, the results, then what the gradient needs."""
    context = torch._guards.TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    changed = list(getattr(metadata, "mutated_inp_runtime_indices", ()))
    tokens = len(getattr(metadata, "tokens", ()))
    many = getattr(metadata, "num_outputs", None)

    def names(count: int) -> list[str]:
        if many is None:
            return [f"result {at}" for at in range(count)]
        made = [f"token {at}" for at in range(tokens)]
        made += [
            f"the new '{inputs[at]}'" if at < len(inputs) else f"the new input {at}"
            for at in changed
        ]
        made += [f"result {at}" for at in range(many)]
        made += [f"tensor {at} for the gradient" for at in range(count - len(made))]
        return made[:count]

    return names


def _gradient_names(inputs: Sequence[str]) -> Names:
    def names(count: int) -> list[str]:
        if count != len(inputs):  # views of one tensor that is written count as one
            return [f"the gradient of input {at}" for at in range(count)]
        return [f"the gradient of '{name}'" for name in inputs]

    return names


def _static_places(count: int) -> tuple[int, ...]:
    """Which inputs of the graph being compiled are parameters and buffers."""
    context = torch._guards.TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    places = getattr(metadata, "static_input_indices", None) or ()
    return tuple(place for place in places if place < count)


def _boxed(function: Callable[..., Any]) -> Any:
    return import_module("functorch.compile").make_boxed_func(function)


class _Compiled:
    """A graph of torch.compile, run as ours for each form of its inputs, as itself where it cannot
    be."""

    def __init__(
        self,
        traced: torch.fx.GraphModule,
        static: Sequence[int],
        options: Mapping[str, Any],
        names: Names,
        *,
        gradients: bool = False,
    ) -> None:
        self._traced = traced
        self._names, self._gradients = names, gradients
        self._check = bool(options["check"])
        self._static = tuple(static)
        self._last = bool(options.get("channels_last", False))
        self._policy = options.get("policy")
        self._max_shapes = int(options.get("max_shapes", MAX_SHAPES))
        self._forms: dict[Hashable, Any] = {}
        self._weights: tuple[Any, ...] = ()
        self._alive: list[torch.Tensor] = []  # or other weights might come to lie in their memory
        self._changes = 0
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._notice_changes(args)
            form = tuple(map(_form_of, args))
            found = self._forms.get(form, False)
            if found is False:
                found = None
                if len(self._forms) < self._max_shapes:
                    found = self._made(args)
                else:
                    _log.warning("over %d shapes: this one runs by torch", self._max_shapes)
                self._forms[form] = found
            if found is None:
                return self._traced(*args)
            free = [arg for place, arg in enumerate(args) if place not in self._static]
            tensors = [arg for arg in free if isinstance(arg, torch.Tensor)]
            if self._check and not found.compared:
                return tuple(self._compared(found, args, tensors))
            return tuple(found.run(tensors))

    def _compared(self, bound: Bound, args: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """The first results of a graph, compared with eager's."""
        if not comparison.is_possible(each for each in args if isinstance(each, torch.Tensor)):
            return bound.run(tensors)  # the next call is compared
        subject = "torch.compile"
        run = comparison.fx_run(self._traced, custom_ops.by_reference)
        eager = comparison.expected(subject, run, args)
        results = bound.run(tensors)
        if eager is not None:
            executable = bound.executable
            steps = () if executable is None else executable.steps
            tf32 = executable is not None and executable.in_tf32
            found = eager.check(
                subject,
                self._names(len(results)),
                results,
                floor=comparison.coarsest((step.spec for step in steps), tf32=tf32),
                gradients=self._gradients,
            )
            _log.info(
                "%s: %d floating results are as near to float64 as eager", subject, len(found)
            )
        bound.compared = True
        return results

    def _notice_changes(self, args: Sequence[Any]) -> None:
        """Bind the weights anew that were written or exchanged since the last call."""
        if any(args[place].is_inference() for place in self._static):  # nobody counts writes
            self._static = tuple(p for p in self._static if not args[p].is_inference())
            self._forms.clear()
        if not self._static:
            return
        now = tuple((args[p].data_ptr(), args[p]._version) for p in self._static)
        if now == self._weights:
            return
        self._alive = [args[place].detach() for place in self._static]
        if self._weights:
            self._forms.clear()
            self._changes += 1
            if self._changes > CHANGES:
                self._static, self._alive = (), []
        self._weights = now

    def _made(self, args: Sequence[Any]) -> Bound | None:
        from torch.fx.experimental.proxy_tensor import make_fx

        device = next((a.device for a in args if isinstance(a, torch.Tensor)), _CPU)
        try:
            traced = make_fx(self._traced, tracing_mode="fake")(*args)
            names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
            constants = {names[place]: args[place].detach() for place in self._static}
            tensors = [
                name
                for place, name in enumerate(names)
                if place not in self._static and isinstance(args[place], torch.Tensor)
            ]
            imported = convert(
                traced,
                constants,
                tensors,
                name="compiled",
                channels_last=self._last,
                keep_strides=True,
            )
            executable = None
            if imported.spec is not None:
                executable = compile(imported.spec, device, policy=self._policy)
            return Bound(imported, executable, device)
        except (CannotImport, GraphError) as error:
            _log.warning("a graph of torch.compile runs by torch: %s", error)
            if self._check:
                _log.warning("torch.compile: that graph is left out of the comparison with eager")
            return None


def _form_of(arg: Any) -> Hashable:
    if isinstance(arg, torch.Tensor):
        return tuple(arg.shape), tuple(arg.stride()), arg.dtype, arg.device
    return arg  # type: ignore[no-any-return]
