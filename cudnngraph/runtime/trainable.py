"""Executables that torch autograd differentiates: a graph and its gradient graph, each compiled."""

# mypy: disable-error-code="no-any-return"
# What a graph returns is known when it runs.
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic

import torch

from ..arguments import checked
from ..errors import BindError, FeatureMissing, WrongResult
from ..executor import reference
from ..grad.backward import Gradient
from ..grad.differentiate import differentiable, differentiate
from ..ir.spec import GraphSpec
from ..policy import Policy
from ..select.dropout_probe import has_seeded_dropout
from ..settings import current
from . import comparison
from .compile import compile as compile_spec
from .compile import device_of, resolve_policy
from .copies import Compiled
from .executable import Executable, Over, R, transforming
from .results import result_class
from .transforms import NO_SECOND, Transformed, check_dropout, laid_out

_log = logging.getLogger(__name__)

_is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
_NO_BATCHED = (
    "takes one gradient at a time, not several as of is_grads_batched=True or "
    "torch.autograd.functional.jacobian(vectorize=True); call torch.func.jacrev, or autograd for "
    "each"
)


@dataclass
class Pair:
    """A graph and its gradient for some of the inputs, compiled.

    ``forward`` returns the graph's outputs, of which there are ``count``, and behind them what else
    ``backward`` needs; the latter is compiled when it is first asked for, by the thread that runs
    it. The rest says by numbers what stands where: ``saved`` among the forward's inputs and
    outputs, ``flat`` among its outputs those without a gradient, ``taken`` for each input of the
    backward a place in ``saved`` or, from -1 downwards, an output whose gradient it is;
    ``given`` for each input of the forward the backward's output that is its gradient, or None.
    ``check_results`` and ``check_gradients`` say that those of the next call are compared with the
    reference executor's.
    """

    gradient: Gradient
    forward: Executable
    count: int
    check_results: bool = False
    check_gradients: bool = False

    def __post_init__(self) -> None:
        gradient, spec = self.gradient, self.gradient.forward
        own, outputs = (*spec.inputs, *spec.outputs), spec.outputs[: self.count]
        self.saved = tuple(own.index(name) for name in gradient.saved)
        self.flat = tuple(at for at, name in enumerate(outputs) if name not in gradient.incoming)
        sources = {name: at for at, name in enumerate(gradient.saved)}
        sources |= {
            gradient.incoming[name]: -1 - at
            for at, name in enumerate(outputs)
            if name in gradient.incoming
        }
        self.taken = tuple(sources[name] for name in gradient.backward.inputs)
        made = gradient.backward.outputs
        self.given = tuple(
            made.index(gradient.outgoing[name]) if name in gradient.outgoing else None
            for name in spec.inputs
        )

    @cached_property
    def backward(self) -> Executable:
        """From ``gradient.incoming`` and ``gradient.saved`` to ``gradient.outgoing``."""
        forward = self.forward
        backward = compile_spec(self.gradient.backward, forward.device, policy=forward.policy)
        check_dropout(forward, backward)
        return backward


class Trainable(Compiled, Generic[R]):
    """A compiled graph whose call torch autograd can differentiate; see ``Graph.compile``.

    Called like an :class:`~cudnngraph.Executable`, with which it shares ``spec``, ``device`` and
    ``policy``. Where a floating input requires grad and grad mode is on, the forward keeps what the
    gradient graph of just those inputs needs; else the plain graph runs, which keeps nothing. Each
    graph is compiled when it is first needed. May be used from several threads.

    With ``check`` the first results with and without a gradient, and the first gradients of each
    set of inputs, are compared with the reference executor's in float64; :class:`WrongResult` is
    raised where one is off by more than :func:`cudnngraph.fuse` allows. Dropout by a seed is left
    out, and the log says so; so are function transforms, and :meth:`run`.

    Statistics (an lse, the batch's mean, the next running statistics) are outputs without a
    gradient. A gradient has no gradient of its own: to ask for one raises
    :class:`~cudnngraph.FeatureMissing`.
    """

    def __init__(
        self, spec: GraphSpec, device: torch.device, policy: Policy, *, check: bool = False
    ) -> None:
        self.spec = spec
        self.device = device
        self.policy = policy
        self.check = check
        self._check_inference = check
        able = differentiable(spec)
        self._floating = tuple((at, name) for at, name in enumerate(spec.inputs) if name in able)
        self._pairs: dict[tuple[str, ...], Pair] = {}
        self._lock = threading.Lock()
        self._result: Callable[..., Any] = result_class(f"{spec.name}_result", spec.outputs)

    @cached_property
    def inference(self) -> Executable:
        """The plain graph, which keeps nothing for a gradient."""
        return compile_spec(self.spec, self.device, policy=self.policy)

    @cached_property
    def transformed(self) -> Transformed:
        """The graph as torch's function transforms call it."""
        return Transformed(self.spec, self.device, self.policy)

    def __call__(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> R:
        """Run on inputs given by name, or in the order of declaration; allocate the outputs.

        Returns the output, or a named tuple of them when there are several. Raises
        :class:`BindError` with every mistake.
        """
        names = self.spec.inputs
        if tensors and not args and tensors.keys() == set(names):
            args = tuple(tensors[name] for name in names)
        elif tensors or len(args) != len(names):
            return self._by_name(args, tensors)
        return self.call(args, checked=False)

    def _by_name(self, args: tuple[Any, ...], tensors: Mapping[str, Any]) -> Any:
        """Put in order what is given in both ways; what is wrong is said by the plain graph."""
        names = self.spec.inputs
        given = {**dict(zip(names, args, strict=False)), **tensors}
        if len(args) + len(tensors) == len(given) == len(names) and set(given) == set(names):
            return self.call(tuple(given[name] for name in names), checked=False)
        return self.inference(*args, **tensors)

    def call(
        self, tensors: Sequence[torch.Tensor], *, checked: bool = True, over: Over = ()
    ) -> Any:
        """Like a call, on inputs in order, that are known to fit where ``checked`` says so.

        ``over`` as of :meth:`Executable.outputs_for`; with it the first output alone is returned.
        """
        if transforming():
            results = self.transformed(self.inference.fitting(tensors, {}))
            return results[0] if len(results) == 1 else self._result(*results)
        wrt = self._wrt(tensors)
        if not wrt:
            if self._check_inference:
                return self._compared(tensors, checked, over)
            return self.inference.call(tensors, checked=checked, over=over)
        pair = self._pairs.get(wrt) or self.pair(wrt)
        results = _apply(pair, checked, over, *tensors)
        return results if over or pair.count == 1 else self._result(*results)

    def again(self, tensors: Sequence[torch.Tensor], over: Over = ()) -> Any:
        """:meth:`call` for inputs in order, outside of torch's function transforms; None if one is
        not exactly as declared."""
        wrt = self._wrt(tensors)
        if not wrt:
            return None if self._check_inference else self.inference.again(tensors, over)
        pair = self._pairs.get(wrt)
        if pair is None:
            return None
        try:
            results = _apply(pair, False, over, *tensors)
        except BindError:  # of another shape, or wrong: the long way finds out
            return None
        return results if over or pair.count == 1 else self._result(*results)

    def _compared(self, tensors: Sequence[torch.Tensor], checked: bool, over: Over) -> Any:
        """The first call without a gradient, compared with the reference executor."""
        kept = _kept(tensors, over)
        results = self.inference.outputs_for(tensors, checked=checked, over=over)
        self._check_inference = not _compare(self.inference, kept, results, over, tensors)
        return results[0] if over or len(results) == 1 else self._result(*results)

    def _wrt(self, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """The inputs that a gradient is wanted of."""
        if not torch.is_grad_enabled():
            return ()
        try:
            return tuple([name for at, name in self._floating if tensors[at].requires_grad])
        except Exception:  # no tensor; the plain graph says so
            return ()

    def run(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> None:
        """Run on inputs and into outputs, all given, without a gradient."""
        self.inference.run(*args, **tensors)

    @checked
    def pair(self, wrt: Sequence[str]) -> Pair:
        """The executables for gradients of the inputs ``wrt``.

        Raises :class:`GraphError` where an op on the way has no gradient.
        """
        key = tuple(wrt)
        found = self._pairs.get(key)
        if found is None:
            gradient = differentiate(self.spec, key)
            forward = compile_spec(gradient.forward, self.device, policy=self.policy)
            with self._lock:
                pair = Pair(gradient, forward, len(self.spec.outputs), self.check, self.check)
                found = self._pairs.setdefault(key, pair)
        return found

    def explain(self) -> str:
        """The plan of the graph, and of each gradient graph that has been needed."""
        parts = [self.inference.explain()]
        for pair in list(self._pairs.values()):
            parts += [pair.forward.explain(), pair.backward.explain()]
        return "\n\n".join(parts)

    def _checks(self) -> bool:
        return self.check

    def __repr__(self) -> str:
        made = [f"({', '.join(wrt)})" for wrt in self._pairs]
        return f"<Trainable {self.spec.name} on {self.device}, gradients of {', '.join(made)}>"


# -- the comparison with the reference executor ----------------------------------------------------


def _kept(tensors: Sequence[torch.Tensor], over: Over) -> list[torch.Tensor]:
    """The inputs of a run, with copies of those that it writes over."""
    places = {at for _, at in over}
    return [each.clone() if at in places else each for at, each in enumerate(tensors)]


def _compare(
    executable: Executable,
    inputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    over: Over = (),
    given: Sequence[torch.Tensor] = (),
    *,
    of: Mapping[str, str] | None = None,
) -> bool:
    """Whether results are right, or are not to be compared later either.

    ``inputs`` hold what they held before the run; what the run wrote over in ``given`` is put back
    where a result is wrong. ``of`` says of which inputs the results are gradients. Raises
    :class:`WrongResult`.
    """
    if not comparison.is_possible((*inputs, *results)):
        return False
    spec = executable.spec
    subject = f"graph '{spec.name}'"
    if has_seeded_dropout(spec):
        _log.warning("%s drops by a seed, and is left out of the comparison with eager", subject)
        return True
    with torch.no_grad():
        run = partial(reference.run, spec)
        eager = comparison.expected(subject, run, [tensor.detach() for tensor in inputs])
        if eager is None:
            return True
        named = {grad: f"the gradient of '{name}'" for name, grad in (of or {}).items()}
        names = [named.get(name, f"output '{name}'") for name in spec.outputs]
        floor = comparison.coarsest([spec], tf32=executable.in_tf32)
        try:
            eager.check(subject, names, results, floor=floor, gradients=bool(of))
        except WrongResult:
            for _, at in over:
                given[at].copy_(inputs[at])
            raise
    return True


# -- under autograd --------------------------------------------------------------------------------


class _Call(torch.autograd.Function):
    """The forward of a :class:`Pair`; its backward is the other half."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, checked: bool, over: Over, *tensors: torch.Tensor) -> Any:
        many = len(tensors)
        kept = _kept(tensors, over) if pair.check_results else tensors
        results = pair.forward.outputs_for(tensors, checked=checked, over=over)
        if pair.check_results:
            pair.check_results = not _compare(pair.forward, kept, results, over, tensors)
        ctx.save_for_backward(
            *[tensors[at] if at < many else results[at - many] for at in pair.saved]
        )
        ctx.set_materialize_grads(False)
        ctx.pair = pair
        if over:
            return results[0]
        if pair.flat:
            ctx.mark_non_differentiable(*[results[at] for at in pair.flat])
        return results[0] if pair.count == 1 else tuple(results[: pair.count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        pair: Pair = ctx.pair
        saved, backward = ctx.saved_tensors, pair.backward
        if any([grad is not None and _is_batched(grad) for grad in grads]):
            raise FeatureMissing(f"graph '{pair.forward.spec.name}' {_NO_BATCHED}")
        given: list[Any] = [saved[at] if at >= 0 else grads[-1 - at] for at in pair.taken]
        results = backward.outputs_if_fit(given)
        if results is None:
            with torch.no_grad():
                spec, device = backward.spec, backward.device
                given = [
                    laid_out(spec.tensors[name], tensor, device)
                    for name, tensor in zip(spec.inputs, given, strict=True)
                ]
            results = backward.outputs_for(given, checked=False)
        if pair.check_gradients:
            pair.check_gradients = not _compare(backward, given, results, of=pair.gradient.outgoing)
        if torch.is_grad_enabled():  # create_graph=True
            reached = [t for t in (*grads, *saved) if t is not None and t.requires_grad]
            if len(pair.forward.spec.outputs) > pair.count:  # of these nothing is known
                reached.append(torch.empty(0, requires_grad=True))
            results = _NoSecond.apply(pair.forward.spec.name, len(results), *results, *reached)  # type: ignore[no-untyped-call]
        return (None, None, None, *[None if at is None else results[at] for at in pair.given])


# What else Function.apply does is for function transforms, which do not come here.
_apply: Any = super(torch.autograd.Function, _Call).apply


class _NoSecond(torch.autograd.Function):
    """Hands gradients on, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> Any:
        ctx.name = name
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise FeatureMissing(f"graph '{ctx.name}': {NO_SECOND}")


def compile_graph(
    spec: GraphSpec,
    device: torch.device | str | int | None,
    *,
    policy: Policy | None,
    training: bool,
    check: bool | None,
    options: Mapping[str, Any],
) -> Executable | Trainable:
    """An :class:`Executable` for ``spec``, or with ``training`` a :class:`Trainable`.

    ``check`` is of the latter; None is as ``CUDNNGRAPH_CHECK`` says.
    """
    if not training:
        return compile_spec(spec, device, policy=policy, **options)
    place = device_of(device)
    check = current().check if check is None else check
    made = Trainable(spec, place, resolve_policy(policy, options, spec), check=check)
    if place.type != "cuda" or not torch.cuda.is_available():
        made.inference  # noqa: B018  compiled at once where that is cheap, or says what is missing
    return made
