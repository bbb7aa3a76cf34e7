"""Whole results beside eager's: a graph run by torch in its own dtypes and in float64.

The yardstick is the model's own error. A result may be twice as far from float64 as eager torch is
in the dtypes of the model, or within the tolerance of its dtype, whichever is more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..backend.candidates import multiplies_float32
from ..errors import CudnnGraphError, WrongResult
from ..ir.spec import GraphSpec, overlaps_itself
from ..ops.aten import OF_ANY_STRIDES, OF_BITS
from ..ops.base import LOW_PRECISION
from ..select.tolerance import TF32_TOLERANCE, TOLERANCE, distance
from .state import agree

_log = logging.getLogger(__name__)

TORCH_FACTOR = 2.0  # how much farther from float64 than the model itself a result may be
EQUAL_SHARE = 0.99  # of whole numbers: an argmax of two near numbers may differ
SHARE = 0.5  # of what all gradients together may be off by: for one of which most cancels
DRAWS = 4  # inputs, a rounding apart, that a doubtful yardstick is taken from

_NARROWER = {
    torch.float64: (torch.float16, torch.bfloat16, torch.float32),
    torch.float32: (torch.float16, torch.bfloat16),
}
_FLOATS = (*_NARROWER[torch.float64], torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
#: What torch and we raise for what has no kernel, or no memory.
_REFUSED = (RuntimeError, TypeError, ValueError, NotImplementedError, CudnnGraphError)

#: Runs a graph by torch on its inputs: in the graph's own dtypes (None), or in a wider one.
Run = Callable[[Sequence[Any], "torch.dtype | None"], Sequence[Any]]
Errors = tuple[tuple[float, "float | None"], ...]


def coarsest(specs: Iterable[GraphSpec], *, tf32: bool) -> float:
    """Return the largest tolerance of what graphs work in; 0 if that is float64 alone.

    That is a 16-bit dtype, float32 where an op makes it, or ``tf32`` if their products may use it.
    """
    specs = list(specs)
    tensors = (tensor for spec in specs for tensor in spec.tensors.values())
    found = [TOLERANCE[tensor.dtype] for tensor in tensors if tensor.dtype in LOW_PRECISION]
    if any(map(_makes_float32, specs)):
        found.append(TOLERANCE[torch.float32])
    if tf32 and any(map(multiplies_float32, specs)):
        found.append(TF32_TOLERANCE)
    return max(found, default=0.0)


def _makes_float32(spec: GraphSpec) -> bool:
    """Whether an op makes float32 of numbers, in a graph that may give float64."""
    made = (name for node in spec.nodes if node.op != "constant" for name in node.results)
    return any(spec.tensors[name].dtype == torch.float32 for name in made)


# -- one result ------------------------------------------------------------------------------------


class Yardstick:
    """One result of the model: in its own dtype, and in float64 if there is such a run.

    ``floor`` is a tolerance that holds beside the one of the dtype. ``whole`` is the norm of all
    gradients in float64 if the result is one of them, else 0.
    """

    def __init__(self, own: Any, exact: Any, *, floor: float = 0.0, whole: float = 0.0) -> None:
        if not isinstance(exact, torch.Tensor) or exact.shape != getattr(own, "shape", None):
            exact = None
        self.own, self.exact = own, exact
        self._floor, self._whole = floor, whole
        self._off = 0.0 if exact is None else _off(own, exact)[0]

    def widen(self, own: Any, exact: Any) -> None:
        """Take the model's error from one more run, if that is larger."""
        self._off = max(self._off, _off(own, exact)[0])

    @property
    def is_doubtful(self) -> bool:
        """Whether the model itself is farther from float64 than the tolerance of its dtype."""
        if self.exact is None or not compared(self.own):
            return False
        return self._off > self._least * _off(self.exact, self.exact)[1]

    def _as_near(self, mine: torch.Tensor) -> bool:
        """Whether whole numbers differ from those of float64 in about as many places as the
        model's: of 16 bits many are alike, and of these any may be the largest."""
        if self.exact is None or self.exact.dtype != mine.dtype:
            return False
        return _differ(mine, self.exact) <= TORCH_FACTOR * _differ(self.own, self.exact)

    @property
    def _least(self) -> float:
        return max(_tolerance(self.own.dtype), self._floor)

    def check(self, subject: str, mine: Any) -> tuple[float, float | None] | None:
        """Return the relative errors of ``mine`` and of the model; None for what is no float.

        Raises :class:`WrongResult`, which begins with ``subject``, if ``mine`` is too far off.
        """
        own = self.own
        if not isinstance(own, torch.Tensor):
            if isinstance(mine, torch.Tensor) or mine != own:
                raise WrongResult(f"{subject} is {mine!r}, the model's {own!r}")
            return None
        if not isinstance(mine, torch.Tensor):
            raise WrongResult(f"{subject} is {mine!r}, the model's a tensor {tuple(own.shape)}")
        if mine.shape != own.shape or mine.dtype != own.dtype:
            raise WrongResult(
                f"{subject} is {mine.dtype} {tuple(mine.shape)}, the model's "
                f"{own.dtype} {tuple(own.shape)}"
            )
        if not compared(own):
            differ = _differ(mine, own)
            if differ > 1 - EQUAL_SHARE and not self._as_near(mine):
                raise WrongResult(f"{subject}: {differ:.1%} of it differ from the model's")
            return None
        floor = self._least
        if self.exact is None:
            off, size = _off(mine, own)
            most, yardstick = TORCH_FACTOR * floor * size, None
        else:
            off, size = _off(mine, self.exact)
            most = max(TORCH_FACTOR * self._off, floor * size)
            if self._off > floor * size:  # most of it cancels, and what is left is rounding
                most = max(most, SHARE * floor * self._whole)
            yardstick = _relative(self._off, size)
        if not off <= most:
            limit = _relative(most, size)
            raise WrongResult(
                f"{subject} is off by {_relative(off, size):.2g}, at most {limit:.2g} is right"
                + ("" if yardstick is None else f" (the model itself is off by {yardstick:.2g})")
            )
        return _relative(off, size), yardstick


def _differ(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of elements that differ."""
    return float((a != b.to(a.device)).double().mean()) if a.numel() else 0.0


def compared(value: Any) -> bool:
    """Whether a value is a tensor of numbers that are rounded."""
    return isinstance(value, torch.Tensor) and (
        value.dtype in TOLERANCE or value.dtype in (torch.float64, *_COMPLEX)
    )


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype.to_real() if dtype in _COMPLEX else dtype, 1e-12)


def _off(out: torch.Tensor, ref64: torch.Tensor) -> tuple[float, float]:
    """Return the distance of a tensor from one in float64, and the norm of that one."""
    if not compared(out) or out.shape != ref64.shape:
        return 0.0, 0.0
    if out.dtype in _COMPLEX:
        out, ref64 = (
            torch.view_as_real(each.resolve_conj()) for each in (out, ref64.to(torch.complex128))
        )
    off, size = distance(out, ref64)
    return (off if off == off else float("inf")), size


def _relative(off: float, size: float) -> float:
    if off == 0.0:
        return 0.0
    return off / size if size else float("inf")


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Graphs say what they cast."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


# -- all results of a graph ------------------------------------------------------------------------


class Expected:
    """Results of eager torch for a graph's inputs, computed before the graph runs on them.

    ``run`` is the graph by torch. The inputs must still hold the same numbers when
    :meth:`check` is called. The state of torch's random generators is left as it was.
    """

    def __init__(self, run: Run, inputs: Sequence[Any]) -> None:
        self._run, self._inputs = run, inputs
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        self._gpus = sorted({each.device.index for each in tensors if each.is_cuda})
        self.own = self._ran(inputs, None)
        self.exact = self._wide(inputs)

    def _ran(
        self, inputs: Sequence[Any], dtype: torch.dtype | None, *, again: bool = False
    ) -> list[Any]:
        """The results; with ``again`` by other random numbers."""
        with torch.random.fork_rng(self._gpus), torch.no_grad(), _no_autocast():
            for device in ("cpu", *(f"cuda:{index}" for index in self._gpus)) if again else ():
                torch.rand(1, device=device)
            return list(self._run(inputs, dtype))

    def _wide(self, inputs: Sequence[Any]) -> list[Any] | None:
        """The results in float64; in float32, or None, if no memory or kernel is there for that."""
        for dtype in _NARROWER:
            try:
                return self._ran(inputs, dtype)
            except _REFUSED as error:
                _log.info("not compared with %s: %s", dtype, error)
        return None

    @cached_property
    def _again(self) -> list[Any]:
        return self._ran(self._inputs, None, again=True)

    def _is_random(self, subject: str, at: int) -> bool:
        """Whether eager torch gives another result in a second run; the log says so."""
        if agree(self._again[at], self.own[at]):
            return False
        _log.warning(
            "%s is not compared with eager: it is another in a second run, as that of random "
            "numbers is",
            subject,
        )
        return True

    @cached_property
    def _draws(self) -> list[tuple[list[Any], list[Any] | None]]:
        """The results for inputs that are a rounding away, and those in float64."""
        return [
            (self._ran([moved(each, seed) for each in self._inputs], None), self.exact)
            for seed in range(DRAWS)
        ]

    def check(
        self,
        subject: str,
        names: Sequence[str],
        mine: Sequence[Any],
        *,
        floor: float = 0.0,
        gradients: bool = False,
    ) -> Errors:
        """Return the relative error of each result that floats, and the model's own beside it.

        ``names`` say what each result is, ``floor`` as of :class:`Yardstick`. Results that differ
        between two runs of eager torch are left out, and the log says so. Raises
        :class:`WrongResult`, with ``subject`` and the name of the result.
        """
        if len(mine) != len(self.own):
            raise WrongResult(f"{subject}: {len(mine)} results, the model has {len(self.own)}")
        exact: Sequence[Any] = self.exact or [None] * len(self.own)
        whole = 0.0
        if gradients:
            whole = math.hypot(*(_off(each, each)[1] for each in exact if compared(each)))
        errors = []
        for at, name in enumerate(names):
            yardstick = Yardstick(self.own[at], exact[at], floor=floor, whole=whole)
            found = self._checked(f"{subject}: {name}", at, yardstick, mine[at])
            if found is not None:
                errors.append(found)
        return tuple(errors)

    def _checked(
        self, subject: str, at: int, yardstick: Yardstick, mine: Any
    ) -> tuple[float, float | None] | None:
        """One result; before it is called wrong, the yardstick is looked at again."""
        if yardstick.is_doubtful and self._is_random(subject, at):
            return None
        try:
            return yardstick.check(subject, mine)
        except WrongResult:
            if self._is_random(subject, at):
                return None
            if yardstick.exact is None or not compared(yardstick.own):
                raise
        for own, exact in self._draws:
            assert exact is not None
            yardstick.widen(own[at], exact[at])
        return yardstick.check(subject, mine)


_HAS_MEMORY = torch.Tensor.__torch_dispatch__


def is_possible(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether numbers can be read: not while a CUDA stream is captured, nor of fakes."""
    on_gpu = False
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ is not _HAS_MEMORY:
            return False
        on_gpu = on_gpu or tensor.is_cuda
    return not (on_gpu and torch.cuda.is_current_stream_capturing())


def expected(subject: str, run: Run, inputs: Sequence[Any]) -> Expected | None:
    """Return what eager torch makes of the inputs; None, with a line in the log, if it cannot."""
    try:
        return Expected(run, inputs)
    except _REFUSED as error:
        _log.warning("%s is not compared with eager: %s", subject, error)
        return None


def moved(value: Any, seed: int) -> Any:
    """A tensor whose numbers are about a rounding away; else what is given."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _FLOATS:
        return value
    if overlaps_itself(tuple(value.shape), tuple(value.stride())):
        return value
    generator = torch.Generator(value.device).manual_seed(seed)
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device)
    eps = torch.finfo(value.dtype).eps
    numbers = value.detach().double() * (1.0 + eps * (noise - 0.5))
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).copy_(numbers)


# -- a graph of torch.fx ---------------------------------------------------------------------------

#: Gives the results of an op that is ours, in a dtype or in its own ones; None for torch's ops.
Known = Callable[[Any, Sequence[Any], "torch.dtype | None"], "Sequence[Any] | None"]


def _none(op: Any, args: Sequence[Any], dtype: torch.dtype | None) -> None:
    """No op is ours."""


def fx_run(module: torch.fx.GraphModule, known: Known = _none) -> Run:
    """Return ``module`` as a :data:`Run`. An op that has no kernel in the wide dtype runs in
    float32, or in its own dtypes; ``known`` runs ops that are no yardstick, being ours."""

    def run(inputs: Sequence[Any], dtype: torch.dtype | None) -> Sequence[Any]:
        if dtype is None:
            made = _Eager(module, known).run(*inputs)
        else:
            made = _Wide(module, dtype, known).run(*inputs)
        return list(made) if isinstance(made, (tuple, list)) else [made]

    return run


class _Eager(torch.fx.Interpreter):
    """Runs a graph of ATen ops as it is."""

    def __init__(self, module: torch.fx.GraphModule, known: Known) -> None:
        super().__init__(module)
        self._known = known

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = self._known(target, args, None)
        if found is not None:
            return list(found)
        return super().call_function(OF_ANY_STRIDES.get(target, target), args, kwargs)


class _Wide(torch.fx.Interpreter):
    """Runs a graph of ATen ops with every floating tensor in ``dtype``. Casts that the graph makes
    to a dtype of 16 or 32 bits are casts to ``dtype``."""

    def __init__(self, module: torch.fx.GraphModule, dtype: torch.dtype, known: Known) -> None:
        super().__init__(module)
        self._dtype, self._known = dtype, known
        self._node: Any = None

    def run_node(self, n: torch.fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._widened(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._widened(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        found = self._known(target, args, self._dtype)
        if found is not None:
            return list(found)
        target = OF_ANY_STRIDES.get(target, target)
        for dtype in () if target in OF_BITS else dict.fromkeys((self._dtype, torch.float32)):
            try:
                return self._widened(target(*_cast(args, dtype), **_cast(kwargs, dtype)))
            except torch.OutOfMemoryError:
                raise
            except _REFUSED:
                continue
        args, kwargs = torch.fx.node.map_arg((self._node.args, self._node.kwargs), self._as_traced)
        return self._widened(target(*args, **kwargs))

    def _as_traced(self, node: torch.fx.Node) -> Any:
        """Return the value of a node in the dtypes that it was traced in."""
        found, form = pytree.tree_flatten(self.env[node])
        seen = pytree.tree_leaves(node.meta.get("val"))
        if len(seen) == len(found):
            found = [
                each.to(as_traced.dtype)
                if isinstance(each, torch.Tensor) and isinstance(as_traced, torch.Tensor)
                else each
                for each, as_traced in zip(found, seen, strict=True)
            ]
        return pytree.tree_unflatten(found, form)

    def _widened(self, values: Any) -> Any:
        narrower = _NARROWER[self._dtype]

        def wide(value: torch.Tensor) -> torch.Tensor:
            return value.to(self._dtype) if value.dtype in narrower else value

        return pytree.tree_map_only(torch.Tensor, wide, values)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Arguments of an op with floating tensors, and the floating dtypes it is to give, as
    ``dtype``."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(dtype) if leaf.dtype in _FLOATS else leaf
        if isinstance(leaf, torch.dtype):
            if leaf in _COMPLEX:
                return dtype.to_complex()
            return dtype if leaf in _FLOATS else leaf
        return leaf

    return pytree.tree_map(cast, values)
