"""The check of a fused model: its results are compared with the model run in float64."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CannotImport, WrongResult
from ..ops.aten import OF_BITS
from ..ops.base import LOW_PRECISION
from ..ops.matmul import multiplied_by_groups
from ..runtime import comparison
from ..runtime.executable import Executable
from ..runtime.state import Held, agree
from ..select.tolerance import relative_error
from . import compiler
from .calls import flat, mapped

_log = logging.getLogger(__name__)

#: The relative error to float64 of each result that floats, and the model's own.
Errors = tuple[tuple[float, float | None], ...]


def floats(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


class Wanted:
    """What a model gives for arguments: its own results, and those in float64 if there are any.

    With ``wide=False`` the model is not run in float64, and with ``late`` only once results are not
    near its own. Where memory is short that run is left out; with ``whole`` this raises
    torch.OutOfMemoryError. Raises :class:`CannotImport` for a model whose results are others in a
    second call.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Any,
        *,
        wide: bool = True,
        late: bool = False,
        whole: bool = False,
    ) -> None:
        args, kwargs = self._arguments = arguments
        self._model, self._name = model, type(model).__name__
        held = Held(model)
        try:
            with torch.no_grad():
                self.own, again = (results_of(model, args, kwargs) for _ in range(2))
                self._exact, self._late = None, wide and late
                if wide and not late:
                    self._exact = in_wide(model, args, kwargs, self.own, whole=whole)
        finally:
            held.restore()
        for number, (first, second) in enumerate(zip(self.own, again, strict=True)):
            if not agree(second, first):
                raise CannotImport(
                    f"{self._name}: result {number} is another in a second call with the same "
                    "inputs, which a graph's is not: it depends on what is outside of the model"
                )

    def check(
        self,
        executable: Executable | None,
        results: Sequence[Any],
        *,
        routes: bool = False,
    ) -> Errors:
        """The errors of results, and of the model itself; raises where ours are too large.

        A graph that ``routes`` chooses by what it computes. A rounding may change a choice, ours
        or the model's own, and results are far off then. So before they are called wrong, the
        model's own error is taken from runs with its parameters a rounding away too.
        """
        steps = () if executable is None else executable.steps
        tf32 = executable is not None and executable.in_tf32
        floor = comparison.coarsest((step.spec for step in steps), tf32=tf32)
        return self.compare(results, floor=floor, routes=routes)

    def compare(self, results: Sequence[Any], *, floor: float, routes: bool = False) -> Errors:
        """:meth:`check`, with the tolerance that holds beside those of the results' dtypes."""
        if len(results) != len(self.own):
            raise WrongResult(
                f"{self._name}: {len(results)} results, the model has {len(self.own)}"
            )
        try:
            return self._compared(results, floor, routes)
        except WrongResult:
            if not self._late:
                raise
        self._late, (args, kwargs) = False, self._arguments
        with torch.no_grad():
            self._exact = in_wide(self._model, args, kwargs, self.own)
        return self._compared(results, floor, routes)

    def _compared(self, results: Sequence[Any], floor: float, routes: bool) -> Errors:
        errors: list[tuple[float, float | None]] = []
        for number, (mine, theirs) in enumerate(zip(results, self.own, strict=True)):
            wanted = None if self._exact is None else self._exact[number]
            yardstick = comparison.Yardstick(theirs, wanted, floor=floor)
            subject = f"{self._name}: result {number}"
            try:
                found = yardstick.check(subject, mine)
            except WrongResult:
                if not routes or not floats(theirs) or wanted is None:
                    raise
                for draw in self._draws:
                    yardstick.widen(draw[number], wanted)
                found = yardstick.check(subject, mine)
            if found is not None:
                errors.append(found)
        return tuple(errors)

    @cached_property
    def _draws(self) -> list[list[Any]]:
        """The model's results with parameters that are a rounding away."""
        args, kwargs = self._arguments
        found = []
        for seed in range(comparison.DRAWS):
            near = copied(self._model)
            with torch.no_grad():
                for parameter in near.parameters():
                    parameter.copy_(comparison.moved(parameter, seed))
                found.append(results_of(near, args, kwargs))
        return found


MOST_BESIDE = 0.25  # of the free memory, for weights in float64 beside plans that are being built


class Ahead:
    """:class:`Wanted` of an example, made before it is needed if there is memory for that.

    ``make`` gives it; with ``whole`` it raises torch.OutOfMemoryError rather than leave the run in
    float64 out. That run has the modes of torch that were set when this was made.
    """

    def __init__(self, model: nn.Module, make: Callable[..., Wanted]) -> None:
        self._model, self._make = model, make
        self._made: Wanted | None = None
        self._inference = torch.is_inference_mode_enabled()

    def now(self, *, late: bool = False) -> Wanted:
        """What the model gives, made now at the latest; ``late`` as of :class:`Wanted`."""
        if self._made is None:
            self._made = self._make(late=late)
        return self._made

    def early(self) -> Wanted | None:
        """What the model gives; None if memory is short, for :meth:`now` to try again later."""
        if self._made is None:
            try:
                with torch.inference_mode(self._inference):
                    self._made = self._make(whole=True)
            except torch.OutOfMemoryError as error:
                _log.info("the model is run for its check when plans are built: %s", error)
            torch.cuda.empty_cache()  # for the processes that build plans
        return self._made

    @property
    def has_room(self) -> bool:
        """Whether there is memory for it beside the processes that build plans."""
        sizes: dict[int, int] = {}  # in float64, by GPU
        for tensor in chain(self._model.parameters(), self._model.buffers()):
            if tensor.is_cuda and tensor.is_floating_point():
                sizes[tensor.device.index] = sizes.get(tensor.device.index, 0) + 8 * tensor.numel()
        free = {index: torch.cuda.mem_get_info(index)[0] for index in sizes}
        return all(sizes[index] <= MOST_BESIDE * free[index] for index in sizes)


class _DepthwiseByTorch(TorchFunctionMode):
    """Has torch's own kernels run depthwise convolutions of 16 bits, not cuDNN, which compiles each
    shape at its first run: 0.1 s each, for a model that may be run here and nowhere else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What torch.compile traces stays as it is: a flag that is set there ends a graph.
        if func in _CONVOLUTIONS and not torch.compiler.is_compiling():
            x = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            channels = x.shape[1 - weight.dim()]
            with _cudnn_left_out() if weight.shape[1] == 1 < channels else nullcontext():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_CONVOLVES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_left_out: list[bool] = []  # what torch's flag was, for each thread that leaves cuDNN out now
_left_out_lock = threading.Lock()


@contextmanager
def _cudnn_left_out() -> Iterator[None]:
    """Have torch run without cuDNN, in all threads, until the last such run ends."""
    cudnn = torch.backends.cudnn
    with _left_out_lock:
        _left_out.append(cudnn.enabled if not _left_out else _left_out[0])
        cudnn.enabled = False
    try:
        yield
    finally:
        with _left_out_lock:
            cudnn.enabled = _left_out.pop() and not _left_out


def results_of(model: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """Return the results of a model, in tensors that a later call does not write over."""
    convolutions = (each for each in model.modules() if isinstance(each, _CONVOLVES))
    depthwise = any(1 < each.groups == each.in_channels for each in convolutions)
    with _DepthwiseByTorch() if depthwise else nullcontext():
        made, _ = flat(model(*args, **kwargs))
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in made]


def copied(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a model, with what floats of its parameters and buffers in a ``dtype`` if one is
    given. Each module of it is in evaluation if that of the model is: some are in training when
    they have been copied, and have other graphs then."""
    instead: dict[int, Any] = {}  # of a tensor, by its id, so that none is copied and then cast
    for tensor in chain(model.parameters(), model.buffers()) if dtype is not None else ():
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and not vars(tensor)
        if plain and tensor.is_floating_point():
            wide = tensor.detach().to(dtype, copy=True)
            if isinstance(tensor, nn.Parameter):
                wide = nn.Parameter(wide, requires_grad=tensor.requires_grad)
            instead[id(tensor)] = wide
    made = copy.deepcopy(model, instead).eval()
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in made.named_modules():
        module.training = modes.get(name, False)
    return made


MAX_MODEL_ERROR = (
    0.1  # from float64 that a model may be before the copy that is run in it is doubted
)


class _Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a model in a wide dtype: what it casts to 16 bits, and what it makes of 16 bits, is of
    the wide dtype, as such casts round nothing within a graph. A model that rounds so is off by
    that itself. Products of groups of rows, for which torch has no kernel in float64, have one."""

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to be hidden from dynamo imports it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            x, y, ends = args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None)
            if (x.dim(), y.dim()) == (2, 3) and ends is not None:
                return multiplied_by_groups(x, y, ends)
        if func not in OF_BITS:
            args = tuple(map(self._widened, args))
            kwargs = {name: self._widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _widened(self, value: Any) -> Any:
        """An argument, which is the wide dtype where it is a dtype of 16 bits."""
        return self._dtype if type(value) is torch.dtype and value in LOW_PRECISION else value


def in_wide(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    own: Sequence[Any],
    dtype: torch.dtype = torch.float64,
    *,
    whole: bool = False,
) -> list[Any] | None:
    """The results in a wide dtype of the model that gives its ``own``; None for a model that does
    not run in it, or whose copy is another model. ``whole`` raises torch.OutOfMemoryError."""
    try:
        wide = copied(model, dtype).to(dtype)
        wide_args, wide_kwargs = mapped(
            lambda leaf: leaf.to(dtype) if floats(leaf) else leaf, (args, kwargs)
        )
        # One that its own run has not imported is none that it needs.
        with compiler.aside() if compiler.is_there() else nullcontext(), _Wide(dtype):
            exact = results_of(wide, wide_args, wide_kwargs)
        if any(map(_is_far, own, exact)):
            alike = results_of(copied(model), args, kwargs)
            if not all(map(agree, alike, own)):
                return None
        return exact
    except torch.OutOfMemoryError:
        if whole:
            raise
        return None
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


def _is_far(mine: Any, exact: Any) -> bool:
    if not floats(mine) or not isinstance(exact, torch.Tensor):
        return False
    return mine.shape != exact.shape or not relative_error(mine, exact) <= MAX_MODEL_ERROR
