"""The backend of torch.compile, :func:`backend`: each graph of dynamo's is converted and compiled.

There is one graph of ours for each form of the inputs; torch's own runs what cannot be converted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from .. import settings
from ..arguments import shown
from ..errors import CannotImport, GraphError, PolicyError
from ..ops.meta import as_held
from ..runtime import comparison, custom_ops
from ..runtime.compile import compile, generates
from . import (
    again,
    called,
    cut,
    effects,
    forward_backward,
    group_norms,
    known_masks,
    margins,
    recurrent,
    report,
    saved,
    whole,
    written,
)
from .bound import MAX_SHAPES, Direct
from .convert import convert
from .devices import device_of, elsewhere, placed, reads_elsewhere, traced_on
from .draws import Draw, take_out
from .garbage import new_collected
from .options import check_options, policy_of
from .replay import Replayed, ReplayedBackward, Steps
from .report import Report
from .results import Places, results_in
from .retrace import (
    fits,
    is_known,
    lazily,
    lazy_places,
    of_any_strides,
    retraced,
    strides_of_images,
)

_log = logging.getLogger(__name__)
_numbers = count(1)
_OPTIONS = ("channels_last", "policy", "max_shapes", "check", "activation_memory_budget")
_MODES = ("default", "reduce-overhead")
MAX_WEIGHT_CHANGES = 3  # of the weights, after which they are inputs like others


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
    for inference; weights that change are taken anew. Random numbers are torch's, drawn
    anew for each call. What cannot be imported runs as torch's own graph, and the log and
    :func:`cudnngraph.reports` say why. ``options``: ``channels_last`` (bool), ``policy``
    or fields of one (``tune``), ``max_shapes``, ``check`` (bool; by default as ``CUDNNGRAPH_CHECK``
    says), and ``activation_memory_budget`` (0 to 1; by default torch's setting of that name, 1):
    the part of the bytes, of those that a forward would keep for its backward, that it may keep;
    the backward computes the rest again. ``mode="reduce-overhead"`` has forward and backward run
    as CUDA graphs (:mod:`~cudnngraph.models.replay`); :func:`cudnngraph.capture_step` takes the
    optimizer too.

    With ``check`` the first call of each graph, for each set of shapes and of bound weights, is
    compared with torch's run of the same graph in float64: results, new values of buffers, what the
    gradient needs, and in the first backward the gradients. Raises :class:`WrongResult`, before any
    state has changed, if one is off by more than :func:`fuse` allows. Later calls are not compared.
    A gradient of which most cancels may be off by a part of what all gradients together may.
    """
    from torch._dynamo.backends.common import aot_autograd

    given: dict[str, Any] = {"check": settings.current().check, "max_shapes": MAX_SHAPES}
    given |= options or {}
    others = {name: given.pop(name) for name in list(given) if name not in _OPTIONS}
    policy = policy_of(given.get("policy"), others, "this backend", _OPTIONS)
    if mode not in (None, *_MODES):
        raise PolicyError(f"mode={mode!r} is unknown to this backend; it has {', '.join(_MODES)}")
    given |= {"policy": policy, "mode": mode}
    check_options(given["max_shapes"], given.get("channels_last"), check=given["check"])
    budget = given.get("activation_memory_budget")
    if budget is not None and not (type(budget) in (int, float) and 0 <= budget <= 1):
        raise PolicyError(f"activation_memory_budget={shown(budget)}; expected 0 to 1, or None")
    names, number = called.input_names(module), next(_numbers)
    known_masks.flag(module)
    whole.keep(module)
    margins.write_out(module)
    kept = group_norms.Kept(module)
    cut.write_out(module)

    def built(
        traced: torch.fx.GraphModule,
        static: tuple[int, ...],
        names_of: called.Names,
        title: str,
        **more: Any,
    ) -> _Compiled | cut.Cut:
        if not cut.is_needed(traced):
            return _Compiled(traced, static, given, names_of, title, **more)

        def part(module: torch.fx.GraphModule, static: tuple[int, ...], number: int) -> _Compiled:
            options, name = {**given, "mode": None}, f"{title}, part {number}"
            return _Compiled(module, static, options, called.part_names, name, **more)

        kinds = names_of(len(results_in(traced.graph)), ())
        kept_back = [at for at, kind in enumerate(kinds) if kind.startswith(called.SAVED)]
        return cut.Cut(traced, static, kept_back, title, part)

    def inference(traced: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        places = _static_places(len(examples))
        return built(traced, places, called.result_names(names), f"graph {number}", shares=True)

    forwards: list[_Compiled | cut.Cut] = []

    def training(traced: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        forwards.append(built(traced, (), called.result_names(names), f"forward {number}"))
        return forwards[-1]

    def backward(traced: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        saved.pool_again(traced)
        saved.without_running(traced)
        saved.without_states(traced)
        again.find_again(traced)
        steps = None
        if forwards:
            forward = forwards.pop()
            steps = forward.steps if isinstance(forward, _Compiled) else None
            saved.compute_again(traced, forward.traced)
            forward.leave_out(saved.unread(traced))
            if isinstance(forward, _Compiled) and is_known(traced) and not cut.is_needed(traced):
                forward.let_lie_as_made(saved.in_any_order(traced))
        saved.allow_again()
        title = f"backward {number}"
        return built(traced, (), called.gradient_names(names), title, gradients=True, steps=steps)

    make: Any = aot_autograd
    compiled: Callable[..., Callable[..., Any]] = make(
        fw_compiler=training,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=forward_backward.fewest_bytes(kernels=generates(policy)),
        keep_inference_input_mutations=True,
    )
    fewer_bytes = saved.within(given.get("activation_memory_budget"))
    with saved.backward_first(), fewer_bytes, recurrent.traced_in_cells(module):
        try:
            return compiled(module, example_inputs)
        except Exception as error:
            if not kept:
                raise
            _log.info("group norms are torch's own, with whose layout it traces: %s", error)
            kept.undo()
            forwards.clear()
        return compiled(module, example_inputs)


# torch._dynamo.reset() and torch.compiler.reset() call it.
backend.reset = report.forget  # type: ignore[attr-defined]


def _static_places(count: int) -> tuple[int, ...]:
    """The numbers of the inputs that are parameters and buffers of the compiled graph."""
    context = torch._guards.TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    places = getattr(metadata, "static_input_indices", None) or ()
    return tuple(place for place in places if place < count)


@dataclass(frozen=True)
class _Made:
    """A graph for one form of its inputs: bound, its random inputs, as torch runs it, and the
    places of results that nothing reads."""

    bound: Direct
    run: Callable[[list[Any]], list[Any]]
    device: torch.device
    draws: Sequence[Draw]
    traced: torch.fx.GraphModule
    left_out: frozenset[int]
    as_traced: bool  # it is given images in the order that was traced
    mixed: bool  # some tensors are on the CPU beside those of a GPU


class _Compiled:
    """A graph of torch.compile, run as ours for each form of its inputs, as itself where it cannot
    be. It is called with a list of these, which it empties."""

    def __init__(
        self,
        traced: torch.fx.GraphModule,
        static: Sequence[int],
        options: Mapping[str, Any],
        names: called.Names,
        title: str,
        *,
        gradients: bool = False,
        shares: bool = False,
        steps: Steps | None = None,
    ) -> None:
        self._boxed_call = True  # as AOTAutograd asks, of the instance
        self._written, self._exchanged = written.take_out(traced)
        self._effects = effects.take_out(traced)
        self._lazy = lazy_places(traced)
        self.traced, self._title = traced, title
        self._by_torch: torch.fx.GraphModule | None = None  # where it is not ours
        self._names, self._gradients, self._shares = names, gradients, shares
        self._unread: tuple[int, ...] = ()  # results
        self._as_made: frozenset[str] = frozenset()  # images that are saved
        self._strides = strides_of_images(traced) if gradients else {}
        self._check = bool(options["check"])
        self._static = tuple(place for place in static if place not in self._written)
        self._last = bool(options.get("channels_last", False))
        self._policy = options["policy"]
        self._replays = options.get("mode") == "reduce-overhead"
        self.steps = Steps() if steps is None else steps
        self._max_shapes = int(options["max_shapes"])
        self._forms: dict[Hashable, Any] = {}
        self._weights: tuple[Any, ...] = ()
        self._alive: list[torch.Tensor] = []  # or other weights might come to lie in their memory
        self._changes = 0
        self._lock = threading.Lock()
        self._refused: dict[str, Report] = {}
        report.watch(self)

    def reports(self) -> Iterator[Report]:
        """A report for each form of the inputs, of those left to torch at last."""
        found = [made for made in self._forms.values() if made is not None]
        for made in found:
            bound = made.bound
            yield Report.of(
                self._title,
                bound.imported,
                bound.executable,
                made.device,
                channels_last=self._last,
            )
        yield from self._refused.values()

    def _left_to_torch(self, args: Sequence[Any], reason: str) -> None:
        """Report that a form of the inputs runs by torch."""
        form = (device_of(args), self._last, False, "", (), 0, (), 0)
        self._refused[reason] = Report(self._title, *form, refused=reason)

    def leave_out(self, unread: frozenset[str]) -> None:
        """Make no results that the backward's inputs of these names would be and that it does not
        read."""
        results = results_in(self.traced.graph)
        self._unread = tuple(
            at for at in self._saved(self.traced) if getattr(results[at], "name", None) in unread
        )

    def let_lie_as_made(self, names: frozenset[str]) -> None:
        """Save images in the order in which they are made, where the backward's inputs of these
        names would be that."""
        self._as_made = names

    def make_none(self, places: Iterable[int]) -> None:
        """Make no results in these places, behind those that are written: nothing reads them."""
        self._unread = tuple(len(self._written) + at for at in places)

    def _made_so(self, traced: torch.fx.GraphModule) -> list[int]:
        """The places of results that lie as they are made."""
        names = [getattr(each, "name", None) for each in results_in(traced.graph)]
        return [at for at in self._saved(traced) if names[at] in self._as_made]

    def _places(self, traced: torch.fx.GraphModule, known: bool) -> Places:
        """Where results stand. In training AOTAutograd itself makes views of what is returned."""
        first = len(self._written)
        returned = [first + at for at in self._returned(traced)] if self._shares else ()
        return Places(self._saved(traced), self._made_so(traced) if known else (), returned)

    def _named(self, count: int) -> list[str]:
        read = [f"number {at} that is checked" for at in range(self._effects.reads)]
        return [*self._names(count - len(read), self._written), *read]

    def _returned(self, traced: torch.fx.GraphModule) -> list[int]:
        """The places of results that the user gets, behind those that are written."""
        names = self._named(len(results_in(traced.graph)))[len(self._written) :]
        return [at for at, name in enumerate(names) if name.startswith("result")]

    def _saved(self, traced: torch.fx.GraphModule) -> list[int]:
        """The places of results that the backward alone reads."""
        names = self._named(len(results_in(traced.graph)))
        return [at for at, name in enumerate(names) if name.startswith(called.SAVED)]

    def __call__(self, args: list[Any]) -> Any:
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._notice_changes(args)
            form = tuple(map(_form_of, args))
            found = self._forms.get(form, False)
            if found is False:
                found = None
                if len(self._forms) < self._max_shapes:
                    with new_collected():  # what was built may hold these tensors in cycles
                        found = self._made(args)
                else:
                    _log.warning("over %d shapes: this one runs by torch", self._max_shapes)
                    self._left_to_torch(args, f"over {self._max_shapes} shapes")
                self._forms[form] = found
            if found is None:
                if self._by_torch is None:
                    self._by_torch = of_any_strides(self.traced)
                results = self._effects.split(list(self._by_torch(*self._as_traced(args))))
                targets = [args[at] for at in self._written]
                written.write(targets, results[: len(targets)], self._exchanged)
                return results[len(self._written) :]
            if found.as_traced:
                args[:] = self._as_traced(args)
            tensors = [
                as_held(arg) if place in self._lazy else arg
                for place, arg in enumerate(args)
                if place not in self._static and isinstance(arg, torch.Tensor)
            ]
            tensors += [draw.make() for draw in found.draws]
            for place in elsewhere(tensors, found.device) if found.mixed else ():
                tensors[place] = tensors[place].to(found.device)
            if self._check and not found.bound.compared:
                return tuple(self._compared(found, self._as_traced(args), tensors))
            args.clear()
            return tuple(found.run(tensors))

    def _compared(self, made: _Made, args: Sequence[Any], tensors: list[Any]) -> list[Any]:
        """The first results of a graph, compared with eager's."""
        bound = made.bound
        if not comparison.is_possible(each for each in args if isinstance(each, torch.Tensor)):
            return bound.run(tensors)  # the next call is compared
        targets = [tensors[at] for at in bound.written]
        subject = "torch.compile"
        run = comparison.fx_run(made.traced, custom_ops.by_reference)
        drawn = tensors[len(tensors) - len(made.draws) :]
        eager = comparison.expected(subject, run, [*args, *drawn])
        results = bound.results(tensors)
        if eager is not None:
            executable = bound.executable
            steps = () if executable is None else executable.steps
            tf32 = executable is not None and executable.in_tf32
            found = eager.check(
                subject,
                self._named(len(results)),
                [None if at in made.left_out else each for at, each in enumerate(results)],
                floor=comparison.coarsest((step.spec for step in steps), tf32=tf32),
                gradients=self._gradients,
            )
            _log.info(
                "%s: %d floating results are as near to float64 as eager", subject, len(found)
            )
        bound.compared = True
        return bound.write(targets, results)

    def _as_traced(self, args: Sequence[Any]) -> list[Any]:
        """The inputs, conjugates and negatives as those views of memory that were traced, and
        images in the order that was: torch's own ops ask."""
        held = [
            lazily(arg, *self._lazy[place]) if place in self._lazy else arg
            for place, arg in enumerate(args)
        ]
        for place, stride in self._strides.items():
            arg = held[place]
            if arg.dim() == len(stride) and arg.stride() != stride:
                held[place] = arg.new_empty_strided(arg.shape, stride).copy_(arg)
        return held

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
            if self._changes > MAX_WEIGHT_CHANGES:
                self._static, self._alive = (), []
        self._weights = now

    def _made(self, args: Sequence[Any]) -> _Made | None:
        try:
            device = traced_on(self.traced, args)
            if not self._lazy.keys().isdisjoint(self._written):
                raise CannotImport("it writes over a view that conjugates or negates")
            if not set(elsewhere(args, device)).isdisjoint(self._written):
                raise CannotImport("it writes over a tensor of the CPU beside those of a GPU")
            as_traced = self._gradients and not fits(self.traced, args, any_order=True)
            args = self._as_traced(args) if as_traced else args
            traced = retraced(self.traced, args, any_order=self._gradients)
            forms = saved.without(traced, self._unread)
            names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
            draws = take_out(traced)
            constants = {names[place]: args[place].detach() for place in self._static}
            tensors = [
                name
                for place, name in enumerate(names)
                if place not in self._static and isinstance(args[place], torch.Tensor)
            ]
            imported = convert(
                traced,
                constants,
                [*tensors, *(draw.name for draw in draws)],
                name="compiled",
                channels_last=self._last,
                keep_strides=True,
                on_gpu=device.type == "cuda",
                kernels=generates(self._policy),
                random=True,
                places=self._places(traced, is_known(self.traced)),
            )
            results = list(imported.results)
            for place, form in forms.items():
                results[place] = ("value", saved.stand_in(form, device))
            imported = replace(imported, results=tuple(results))
            imported = placed(imported, traced.graph, device, self._saved(traced))
            executable = None
            if imported.spec is not None:
                executable = compile(imported.spec, device, policy=self._policy)
            places = [tensors.index(names[at]) for at in self._written]
            bound = Direct(imported, executable, places, self._effects, self._exchanged)
            run = bound.run
            if self._replays and not imported.elsewhere and not self._exchanged:
                kind = ReplayedBackward if self._gradients else Replayed
                run = kind(bound, device, self._returned(traced), self.steps).run
            mixed = reads_elsewhere(traced.graph, device)
            return _Made(bound, run, device, draws, traced, frozenset(forms), as_traced, mixed)
        except (CannotImport, GraphError) as error:
            _log.warning("a graph of torch.compile runs by torch: %s", error)
            self._left_to_torch(args, str(error))
            if self._check:
                _log.warning("torch.compile: that graph is left out of the comparison with eager")
            return None


def _form_of(arg: Any) -> Hashable:
    if isinstance(arg, torch.Tensor):
        return arg.shape, arg.stride(), arg.dtype, arg.device
    return arg  # type: ignore[no-any-return]
