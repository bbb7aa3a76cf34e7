"""A training step as one CUDA graph, :func:`capture_step`."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from ..arguments import shown
from ..errors import CaptureError, PolicyError
from .bound import CapturedCall
from .process import PROCESS
from .updates import by_kernels

_log = logging.getLogger(__name__)
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
MAX_SHAPES = 8

Step = Callable[..., Any]


def capture_step(
    step: Step,
    *,
    optimizers: Any = (),
    warm_up: int = 3,
    max_shapes: int = MAX_SHAPES,
    reuse_results: bool = False,
) -> CapturedStep:
    """``step`` as one CUDA graph: forward, loss, backward, clipping, scaling and the optimizer.

    Call what comes back in place of ``step``: every call is one step. For each form of the
    arguments (shapes, dtypes, other values) the first ``warm_up`` calls run as they are; the next
    one is captured, and replayed from then on. Tensors among the arguments are copied into the
    graph's own, results are copied out; with ``reuse_results`` they are the graph's own tensors,
    which the next call overwrites. On a CPU a call is a call.

    What Python does in ``step`` happens once, when it is captured: counters, printing, learning
    rates. Gradients that it exchanges for others (``zero_grad(set_to_none=True)``) are let go for
    the capture: it finds None there, as in its first call. ``optimizers`` (one or several) are made
    ready for a capture, and a step is captured anew when one of their numbers has changed; a
    learning rate that changes at every step has to be a tensor. SGD, Adam and AdamW that are
    ``fused=True`` run as generated kernels where their tensors are float32. Forms beyond
    ``max_shapes`` are not captured.

    Calls raise :class:`CaptureError`, with the line at fault, for a step that cannot be captured:
    one that reads a tensor on the host (``.item()``, ``if tensor``), or is given one that lies
    there.
    """
    return CapturedStep(
        step,
        optimizers=optimizers,
        warm_up=warm_up,
        max_shapes=max_shapes,
        reuse_results=reuse_results,
    )


class _Form:
    """The step for one form of its arguments."""

    def __init__(self) -> None:
        self.calls = 0
        self.captured: CapturedCall | None = None
        self.numbers: Hashable = None  # of the optimizers, when it was captured
        self.given: list[Any] = []
        self.made: Any = None
        self.held: list[torch.Tensor] = []  # gradients that the graph writes
        self.anew: list[torch.Tensor] = []  # parameters that a step gives a gradient of its own


class CapturedStep:
    """A step that runs as a CUDA graph; see :func:`capture_step`."""

    def __init__(
        self,
        step: Step,
        *,
        optimizers: Any = (),
        warm_up: int = 3,
        max_shapes: int = MAX_SHAPES,
        reuse_results: bool = False,
    ) -> None:
        if not callable(step):
            raise PolicyError(f"step={shown(step)}; expected a function")
        for name, number, least in (("warm_up", warm_up, 1), ("max_shapes", max_shapes, 1)):
            if type(number) is not int or number < least:
                raise PolicyError(f"{name}={shown(number)}; expected a whole number >= {least}")
        if type(reuse_results) is not bool:
            raise PolicyError(f"reuse_results={shown(reuse_results)}; expected True or False")
        several = optimizers if isinstance(optimizers, Iterable) else (optimizers,)
        self._optimizers: Sequence[Any] = tuple(several)
        for each in self._optimizers:
            if not isinstance(getattr(each, "param_groups", None), list):
                raise PolicyError(f"optimizers: {shown(each)} is no torch.optim.Optimizer")
        self._step = step
        self._warm_up, self._max_shapes, self._reuse = warm_up, max_shapes, reuse_results
        self._forms: dict[Hashable, _Form] = {}
        self._lock = threading.Lock()
        self._stream: Any = None
        self._warned = False

    @property
    def captures(self) -> int:
        """How many forms of the arguments run as a CUDA graph by now."""
        return sum(form.captured is not None for form in self._forms.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. Raises :class:`CaptureError` for a step that cannot be captured."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        devices |= {p.device for p in self._parameters()}
        device = next((each for each in devices if each.type == "cuda"), None)
        if device is None:
            return self._step(*args, **kwargs)
        with self._lock, torch.cuda.device(device):
            form = self._form(leaves, tree)
            if form is None:
                return self._step(*args, **kwargs)
            if form.calls < self._warm_up:
                form.calls += 1
                found = [(p, p.grad) for p in self._parameters()]
                before = [(p, TensorWeakRef(grad)) for p, grad in found if grad is not None]
                del found  # else they would live on while new ones are made
                made = self._warmed(args, kwargs)
                form.anew = [p for p, old in before if p.grad is not old()]
                return made
            numbers = self._numbers()
            if form.captured is None or form.numbers != numbers:
                if form.captured is not None:
                    _log.info("an optimizer's numbers have changed: the step is captured anew")
                self._capture(form, leaves, tree, device)
                form.numbers = numbers
            for own, leaf in zip(form.given, leaves, strict=True):
                if isinstance(own, torch.Tensor) and own.data_ptr() != leaf.data_ptr():
                    own.detach().copy_(leaf.detach(), non_blocking=True)
            assert form.captured is not None
            form.captured()
            if self._reuse:
                return form.made
            return pytree.tree_map_only(torch.Tensor, torch.clone, form.made)

    # -- forms -------------------------------------------------------------------------------------

    def _form(self, leaves: Sequence[Any], tree: Any) -> _Form | None:
        """The form of arguments; None if there are too many, which are not captured."""
        key = (tree, tuple(map(_form_of, leaves)))
        try:
            form = self._forms.get(key)
        except TypeError:
            (bad, *_) = [leaf for leaf in leaves if not _hashable(leaf)]
            raise CaptureError(
                f"the step cannot be captured: {shown(bad)} is neither a tensor nor hashable"
            ) from None
        if form is not None:
            return form
        if len(self._forms) >= self._max_shapes:
            if not self._warned:
                _log.warning(
                    "a step was called in over %d forms: others are not captured", self._max_shapes
                )
            self._warned = True
            return None
        return self._forms.setdefault(key, _Form())

    def _parameters(self) -> list[torch.Tensor]:
        groups = [group for each in self._optimizers for group in each.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def _numbers(self) -> Hashable:
        """What a capture fixes: the numbers of the optimizers; of tensors, which one it is."""
        return tuple(
            (name, id(value) if isinstance(value, torch.Tensor) else repr(value))
            for each in self._optimizers
            for group in each.param_groups
            for name, value in group.items()
            if name != "params"
        )

    # -- running -----------------------------------------------------------------------------------

    def _warmed(self, args: Any, kwargs: Any) -> Any:
        """A step as it is, on the stream of the captures: allocations settle, states are made."""
        self._prepare()
        if self._stream is None:
            make: Any = torch.cuda.Stream
            self._stream = make()
        outer = torch.cuda.current_stream()
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream), by_kernels():
            made = self._step(*args, **kwargs)
        outer.wait_stream(self._stream)
        pytree.tree_map_only(torch.Tensor, lambda each: each.record_stream(outer), made)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)

    def _prepare(self) -> None:
        """Have the optimizers count their steps on the GPU."""
        for each in self._optimizers:
            for group in each.param_groups:
                if "capturable" in group:
                    group["capturable"] = True
            for parameter, state in each.state.items():
                count = state.get("step") if isinstance(state, dict) else None
                if isinstance(count, torch.Tensor) and parameter.is_cuda and not count.is_cuda:
                    state["step"] = count.to(parameter.device)

    def _capture(self, form: _Form, leaves: Sequence[Any], tree: Any, device: torch.device) -> None:
        """Capture the step for a form; nothing is computed."""
        self._prepare()
        form.captured, form.made, form.held = None, None, []
        form.given = [_own(leaf) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(form.given, tree)
        if self._stream is not None:  # the graph has memory of its own
            self._stream.synchronize()
            PROCESS.workspace.release(torch.cuda.current_device(), self._stream.cuda_stream)
        for parameter in form.anew:
            parameter.grad = None
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters]

        def call() -> None:
            made = self._step(*args, **kwargs)
            form.made = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)

        try:
            with by_kernels():
                form.captured = CapturedCall(call, device, warm=False)
        except Exception as error:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            del self._forms[next(key for key, each in self._forms.items() if each is form)]
            raise CaptureError(f"the step cannot be captured: {_said(error)}") from error
        form.held = [each for each in gradients if each is not None]
        form.held += [p.grad for p in parameters if p.grad is not None]


def _form_of(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        if not leaf.is_cuda:
            raise CaptureError(
                f"the step cannot be captured: a tensor {tuple(leaf.shape)} of its arguments lies "
                "on the CPU, and a CUDA graph would keep its present numbers; move it to the GPU"
            )
        form = (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        return form
    return type(leaf), leaf


def _hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return isinstance(leaf, torch.Tensor)
    return True


def _own(leaf: Any) -> Any:
    """A tensor of the graph's for an argument; another value as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _said(error: BaseException) -> str:
    """What went wrong first, and the line of the user's that did it."""
    while error.__context__ is not None:
        error = error.__context__
    why = str(error).strip().partition("\n")[0] or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_INSIDE)]
    where = f" ({own[-1].filename}, line {own[-1].lineno}: {own[-1].line})" if own else ""
    hint = ""
    if "captur" in why:
        hint = "; what reads a tensor on the host, such as .item(), cannot be captured"
    return f"{why}{where}{hint}"
