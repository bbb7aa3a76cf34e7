"""Whole models fused: :func:`fuse` makes a module of a model, for inference.

A model becomes one graph for each form of its inputs (:mod:`~cudnngraph.models.convert`), which is
compiled like any other: cut at its anchors into plans and torch steps, tensors between them in one
block. Parameters are bound once, inputs are copied into tensors of the graph's own, and a CUDA
graph of it all may be replayed.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..arguments import items
from ..cache.distributed import is_distributed
from ..errors import (
    BindError,
    CannotImport,
    CudnnGraphError,
    GraphError,
    NotSupported,
    PolicyError,
    Problem,
    WrongResult,
)
from ..policy import Policy
from .bound import MAX_SHAPES, Bound
from .buckets import Buckets, cuts_of
from .calls import Call, flat, in_order, parameters
from .changes import Parts, say
from .check import Ahead, Errors, Wanted, copied
from .export import asks, is_recording
from .form import Form, Options, difference, make
from .garbage import old_left_alone
from .numbers import Numbers, warn_of
from .options import check_dtype, check_kwargs, check_options, policy_of
from .report import Report
from .stand_in import StandIn, called_apart, check_mode, first_floating_dtype, warn_of_gradients

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..policy import PolicyOptions

_log = logging.getLogger(__name__)
#: What says that a number cannot be an input of the graph.
_REFUSED = (CannotImport, WrongResult, GraphError, NotSupported)


class Fused(StandIn):
    """A model that runs as fused graphs, one for each form of its inputs; see :func:`fuse`.

    It stands for the model, which is ``unfused``: attributes and methods that this class has not
    are the model's, and methods of the model run it as it is. ``report`` is that of the example's
    form; ``bound(*args)`` gives the graph that calls like this run, for the weights as they are.
    Weights and hooks that have changed are noticed at the next call, which compiles anew;
    :meth:`refresh` has it do so after other changes.
    """

    report: Report | None = None

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
        dynamic: Mapping[str | int, Mapping[Any, Any]] | None = None,
        check: bool = True,
    ) -> None:
        _check_model(model)
        flags = {"capture": capture, "reuse_results": reuse_results, "check": check}
        check_options(max_shapes, channels_last, **flags)
        check_dtype(dtype)
        buckets = None if dynamic is None else Buckets(model, dynamic)
        super().__init__(model if dtype is None else copied(model).to(dtype))
        self._options = Options(policy, channels_last, dtype, capture)
        self._reuse = reuse_results
        self._max_shapes = max_shapes
        self._buckets = buckets
        self._check = check
        self._numbers = Numbers()
        self._forms: OrderedDict[Hashable, Form] = OrderedDict()
        self._parts: Parts | None = None  # of the model, as forms have them
        self._dropped = 0  # forms
        self._changes = 0  # of the model, between calls
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the model and the options; it compiles on its first call, from the cache."""
        fresh: dict[str, Any] = {
            "_forms": OrderedDict(),
            "_lock": None,
            "_parts": None,
            "_numbers": Numbers(),
            "report": None,
        }
        return {**super().__getstate__(), **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.Lock()

    @property
    def _name(self) -> str:
        return type(self.unfused).__name__

    # -- calls -------------------------------------------------------------------------------------

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; results have no gradient."""
        if is_recording():  # as a part of another model
            return self.unfused(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return called_apart(self, args, kwargs)
        call = self._call(args, kwargs)
        warn_of_gradients(self._name, call.leaves)
        with self._running():
            return self._ran(call, reuse=self._reuse)[1]

    def bound(self, *args: Any, **kwargs: Any) -> Bound:
        """Return the captured or bound call for arguments of this form, with its inputs set."""
        call = self._call(args, kwargs)
        with self._running():
            return self._ran(call, reuse=True)[0].bound

    def _ran(self, call: Call, *, reuse: bool) -> tuple[Form, Any]:
        """The form for a call, and its results, by the weights as they are now."""
        form = self._ready(call)
        results = form.run(call, reuse=reuse)
        if self._forgets():  # asked while a GPU computes
            del form, results  # and their memory
            form = self._ready(call)
            results = form.run(call, reuse=reuse)
        return form, results

    def _forgets(self) -> bool:
        """Forget the graphs if the model's parts or weights have changed since they were made; say
        whether."""
        changed = "" if self._parts is None else self._parts.changed()
        if not changed:
            return False
        self._changes += 1
        say(self._name, changed, self._changes)
        self._forget()
        return True

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._lock, torch.inference_mode(False), torch.no_grad():
            yield

    def refresh(self) -> None:
        """Forget the weights that were bound; the plans stay in the cache."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._forms.clear()
        self._parts = None

    @old_left_alone()
    def _first(self, args: Any, kwargs: Any) -> None:
        """Make the form of an example, and compare its results with the model's."""
        call = self._call(args, kwargs)
        ahead = Ahead(self.unfused, partial(self._wanted, call))
        early = ahead if self._check and not (call.is_padded or is_distributed()) else None
        with self._running():
            form = self._ready(call, early)
            results = form.run(call, reuse=self._reuse)
        if self.report is None or not (self._check or form.doubts):
            return
        errors = form.errors
        if not errors:
            wanted = ahead.now(late=self.report.kept)
            try:
                errors = self._checked_first(wanted, form, results, args, kwargs)
            except WrongResult as error:
                if form.doubts:
                    raise CannotImport(f"{self._name} {asks(form.doubts[0])}") from error
                raise
        self.report = replace(self.report, errors=errors)
        self._parts = Parts(self.unfused)  # its runs may have changed what it keeps

    def _checked_first(
        self, wanted: Wanted, form: Form, results: Any, args: Any, kwargs: Any
    ) -> Errors:
        """The errors of the first form, or of one without folded norms if these put it off."""
        try:
            return self._checked(wanted, form, results)
        except WrongResult as error:
            if self.report is None or not self.report.folded:
                raise
            return self._unfolded(wanted, args, kwargs, error)

    def _unfolded(self, wanted: Wanted, args: Any, kwargs: Any, error: WrongResult) -> Errors:
        """Make the form anew with norms that stay behind their convolutions, and check it: weights
        of 16 bits that take a norm in are rounded once more."""
        self._options = replace(self._options, folds=False)
        self.refresh()
        self.report = None
        results = self(*args, **kwargs)
        errors = self._checked(wanted, next(reversed(self._forms.values())), results)
        _log.info("%s: norms are not folded into weights, since then %s", self._name, error)
        return errors

    def _apply(self, fn: Any, recurse: bool = True) -> Fused:
        super()._apply(fn, recurse)
        if self._options.dtype is not None:
            dtype = first_floating_dtype(self.unfused)
            self._options = replace(self._options, dtype=dtype)
        return self

    def _call(self, args: Any, kwargs: Any) -> Call:
        call = Call(self._name, args, in_order(self.unfused, kwargs))
        if self._buckets is not None:
            self._buckets.pad(call, self.unfused)
        call.read(self._options.dtype)
        return call

    def _wanted(self, call: Call, *, late: bool = False, whole: bool = False) -> Wanted:
        """What the model gives for a call; ``late`` and ``whole`` as of :class:`~.check.Wanted`."""
        arguments = self._options.cast(call.arguments())
        return Wanted(self.unfused, arguments, wide=self._check, late=late, whole=whole)

    @staticmethod
    def _checked(wanted: Wanted, form: Form, results: Any) -> Errors:
        """The errors of a form's results, and of the model itself."""
        bound = form.bound
        return wanted.check(bound.executable, flat(results)[0], routes=bound.routes)

    # -- forms -------------------------------------------------------------------------------------

    def _ready(self, call: Call, ahead: Ahead | None = None) -> Form:
        """The form for a call, which is made and checked if it is the first of its kind.

        ``ahead`` is for :func:`~.form.make`.
        """
        try:
            inputs = self._numbers.inputs(call)
            key = call.key(inputs)
            form = self._forms.get(key)
        except Exception as error:
            problem = Problem("arguments", f"have no hash ({error})", "tensors and plain values")
            raise BindError(self._name, [problem]) from None
        if form is None:
            self._forgets()
            form = self._new(call, inputs, ahead)
            key = call.key(form.inputs)
            self._keep(key, form, call)
        self._forms.move_to_end(key)
        self._cut(form, call)
        return form

    def _keep(self, key: Hashable, form: Form, call: Call) -> None:
        for old, other in list(self._forms.items()):
            if other.pattern == form.pattern and other.inputs < form.inputs:
                del self._forms[old]  # no call runs it any more
        self._forms[key] = form
        self._parts = self._parts or Parts(self.unfused)
        while len(self._forms) > self._max_shapes:
            _, last = self._forms.popitem(last=False)
            self._dropped += 1
            if self._dropped == max(self._max_shapes, 2):
                _log.warning(
                    "%s: %d forms of its inputs were compiled and max_shapes=%d are kept, so what "
                    "comes again is compiled again; the last differs from one that was dropped in "
                    "%s; raise max_shapes=, pad to a few sizes by dynamic=, or give values that "
                    "change as tensors",
                    self._name,
                    self._max_shapes + self._dropped,
                    self._max_shapes,
                    difference(last, form, call.names(self.unfused)),
                )

    def _new(self, call: Call, inputs: frozenset[int], ahead: Ahead | None) -> Form:
        """A form for a call that none is there for: numbers that change are inputs if they can."""
        wanted = inputs.union(self._numbers.changed(call, self._forms.values()))
        if not wanted:
            return self._made(call, wanted, ahead)
        form, reason = self._tried(call, wanted)
        taken: frozenset[int] = frozenset()
        for place in sorted(wanted) if form is None else ():
            one = None
            if len(wanted) > 1:
                one, reason = self._tried(call, taken | {place})
            if one is None:
                self._fix(call, place, reason)
            else:
                form, taken = one, one.inputs
        return self._made(call, taken) if form is None else form

    def _fix(self, call: Call, place: int, reason: str) -> None:
        """Let each value of a number have a form of its own, and say so once."""
        if not self._numbers.fix(call, place):
            return
        pattern, name = call.pattern, call.names(self.unfused)[place]
        count = 1 + sum(each.pattern == pattern for each in self._forms.values())
        warn_of(self._name, name, call.numbers[place], reason, count)

    def _tried(self, call: Call, inputs: frozenset[int]) -> tuple[Form | None, str]:
        """A form with numbers as inputs, if it gives what the model gives; else why not."""
        try:
            form = self._made(call, inputs)
            pattern = call.pattern
            alike = (each for each in self._forms.values() if each.pattern == pattern)
            for numbers in (call.numbers, *(each.numbers for each in alike)):
                leaves = [numbers[at] if at in inputs else x for at, x in enumerate(call.leaves)]
                self._compare(form, self._call(*call.arguments(leaves)))
        except _REFUSED as error:
            return None, str(error).splitlines()[0]
        self._numbers.take(call, inputs)
        return form, ""

    def _compare(self, form: Form, call: Call) -> None:
        """Raise :class:`WrongResult` if a form gives other results than the model."""
        self._cut(form, call)
        self._checked(self._wanted(call), form, form.run(call, reuse=True))

    def _cut(self, form: Form, call: Call) -> None:
        """Find how results of a padded call are cut, and check that padding changes nothing."""
        if not call.is_padded or call.padding in form.cuts:
            return
        try:
            form.errors = self._check_padded(form, call, self._wanted(call))
            self._check_shorter(form, call)
        except CudnnGraphError:
            form.cuts.pop(call.padding, None)
            raise

    def _check_padded(self, form: Form, call: Call, wanted: Wanted) -> Errors:
        """Compare the model's results for the padded tensors, and then the form's, with those that
        are ``wanted``; return the errors of the form's."""
        assert self._buckets is not None
        said, executable = self._buckets.said(call), form.bound.executable
        arguments = self._options.cast(call.arguments(call.padded_leaves()))
        try:
            padded = Wanted(self.unfused, arguments, wide=False).own
        except Exception as error:
            raise CannotImport(f"{self._name}: {error} ({self._mend(call)})") from error
        subject = f"{self._name} ({said})"
        cuts = cuts_of(subject, call, wanted.own, padded)
        if form.cuts.setdefault(call.padding, cuts) != cuts:
            raise WrongResult(f"{subject}: other dims of results follow the argument's than before")
        try:
            wanted.check(executable, form.cut(padded, call))
        except WrongResult as error:
            raise WrongResult(
                f"{error}; dynamic= pads {said}, and the model's results depend on the padding: it "
                "attends to it, averages over it or takes the last position. Give a mask that "
                "hides it (attention_mask, in dynamic= too), or leave the argument out of dynamic="
            ) from error
        return self._checked(wanted, form, form.run(call, reuse=True))

    def _check_shorter(self, form: Form, call: Call) -> None:
        """Compare a call of which more is padding, if the model takes one so short."""
        assert self._buckets is not None
        leaves = self._buckets.shorter(call)
        if leaves is None:
            return
        shorter = self._call(*call.arguments(leaves))
        if shorter.key(form.inputs) != call.key(form.inputs) or shorter.padding != call.padding:
            return
        try:
            wanted = self._wanted(shorter)
        except Exception as error:
            _log.info("%s is not checked at a shorter size: %s", self._name, error)
            return
        self._check_padded(form, shorter, wanted)

    # -- making ------------------------------------------------------------------------------------

    def _made(self, call: Call, inputs: frozenset[int], ahead: Ahead | None = None) -> Form:
        """A form with the numbers at the places ``inputs`` as inputs of its graph."""
        _check_model(self.unfused)
        try:
            with old_left_alone():
                form = make(self.unfused, call, inputs, self._options, ahead)
        except CannotImport as error:
            mend = self._mend(call)
            if not mend:
                raise
            raise CannotImport(f"{error} ({mend})") from error
        if self.report is None:
            self.report = form.report
        if not form.folds:  # nor in those to come
            self._options = replace(self._options, folds=False)
        return form

    def _mend(self, call: Call) -> str:
        """What may be wrong with a call that the model does not take; "" if nothing is known."""
        if call.is_padded and self._buckets is not None:
            said = self._buckets.said(call)
            return f"dynamic= pads {said}: name every argument of that size in it"
        (args, kwargs), own = call.arguments(), parameters(self.unfused)
        alone = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(alone, list):
            return "the list is one argument; give several as a tuple, as to a call: fused(*inputs)"
        if not isinstance(alone, Mapping) or not alone or any(key not in own for key in alone):
            return ""
        kind = type(alone).__name__
        return f"the {kind} is one argument; give its items by name: fused(**inputs)"

    def __len__(self) -> int:
        """Return the number of forms of inputs that are kept ready."""
        return len(self._forms)

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the model, as it is, where the model has parts by index or by key."""
        model: Any = self.unfused
        return model[index]

    def __bool__(self) -> bool:
        """As a model: true, also if no form is ready."""
        return True

    def extra_repr(self) -> str:
        """For torch's printed form of a module."""
        forms = f"{self._name}, {len(self)} of {self._max_shapes} forms"
        return forms + (", captured" * self._options.capture)


def _check_model(model: Any) -> None:
    """Raise :class:`PolicyError` for what is no model in evaluation mode."""
    check_mode(model)
    if isinstance(model, Fused):
        raise PolicyError("the model is fused; expected the model itself, which is its unfused")


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
    dynamic: Mapping[str | int, Mapping[Any, Any]] | None = None,
    check: bool = True,
    **options: Unpack[PolicyOptions],
) -> Fused:
    """``model`` as a module that runs fused, for inference, compiled for ``example_inputs``.

    ``example_inputs`` is the tuple of arguments, or one tensor. Another shape is compiled when it
    is first met; ``max_shapes`` of them are kept ready, each, with ``capture``, as a CUDA graph.

    - ``kwargs``: the example's arguments by name.
    - ``policy``: how plans are chosen. Its fields may be given as keywords: ``tune="autotune"``.
    - ``channels_last``: lay images and the weights of convolutions out so; None where there are
      such. Results keep the layout that their op passes on.
    - ``dtype``: run a copy of the model in it; floating inputs are converted.
    - ``reuse_results``: return the tensors that the next call of this shape overwrites, no copies.
    - ``dynamic``: pad arguments, by name or position, up to sizes by dim, and cut results back:
      ``{"input_ids": {1: (128, 512), "pad": 0}}``, or "pow2" for the sizes.
    - ``check``: compare the results for the example with the model run in float64; where plans are
      kept from an earlier run, only if they are not near those of the model as it is.

    A number among the arguments that changes from call to call becomes an input of the graph if
    the model takes a tensor there; the log says if it does not.

    Ops that we have not are torch steps; ``report`` of the result says which, and why. Raises
    :class:`CannotImport` for a model that is no single graph: control flow on numbers in tensors,
    state that changes, random numbers. Raises :class:`WrongResult` where the check fails.
    """
    several = isinstance(example_inputs, tuple)
    args = tuple(items(example_inputs)) if several else (example_inputs,)
    fused = Fused(
        model,
        policy=policy_of(policy, options, "fuse", tuple(fuse.__kwdefaults__ or ())),
        channels_last=channels_last,
        dtype=dtype,
        capture=capture,
        reuse_results=reuse_results,
        max_shapes=max_shapes,
        dynamic=dynamic,
        check=check,
    )
    fused.eval()
    check_kwargs(kwargs)
    fused._first(args, dict(kwargs or {}))
    return fused
