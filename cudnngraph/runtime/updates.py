"""Updates of optimizers by generated kernels, in place of torch's fused ones.

``torch.optim.SGD``, ``Adam`` and ``AdamW`` with ``fused=True`` end in one function of torch each,
which takes all tensors of a dtype. While :func:`by_kernels` holds, these are functions of this
module: what they can compute by generated kernels alone, in float32, they do, and torch does the
rest. A kernel takes as many parameters as one launch holds the addresses of.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import BindError, CudnnGraphError
from ..graph.builder import Graph
from ..graph.value import Value
from ..ir.spec import is_dense
from .executable import Executable

_log = logging.getLogger(__name__)
AT_ONCE = 48  # parameters of a kernel
MOST_KEPT = 64  # kernels of a process
F32 = torch.float32
_Tensors = Sequence[torch.Tensor]
_Key = tuple[Any, ...]


@contextmanager
def by_kernels() -> Iterator[None]:
    """Have torch's fused optimizers run generated kernels meanwhile, where they can."""
    with _lock:
        if not _within[0]:
            for name, ours in _OURS.items():
                _torchs[name] = getattr(torch, name)
                setattr(torch, name, partial(ours, _torchs[name]))
        _within[0] += 1
    try:
        yield
    finally:
        with _lock:
            _within[0] -= 1
            if not _within[0]:
                for name in _OURS:
                    setattr(torch, name, _torchs[name])


_lock = threading.Lock()
_within = [0]  # contexts of all threads
_torchs: dict[str, Any] = {}


# -- torch's functions -----------------------------------------------------------------------------


def _sgd(
    torchs: Callable[..., None],
    params: _Tensors,
    grads: _Tensors,
    momenta: _Tensors,
    **options: Any,
) -> None:
    """``torch._fused_sgd_``."""
    lists = [params, grads, *([momenta] if momenta else [])]
    if _plain(options) and not options.get("is_first_step"):
        names = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
        numbers = tuple((name, options[name]) for name in names)
        left = _updated(lists, (), options["lr"], "sgd", numbers)
    else:
        left = list(range(len(params)))
    if left:
        kept = ([each[at] for at in left] if each else [] for each in (params, grads, momenta))
        torchs(*kept, **options)


def _adam(
    torchs: Callable[..., None],
    params: _Tensors,
    grads: _Tensors,
    first: _Tensors,
    second: _Tensors,
    largest: _Tensors,
    steps: _Tensors,
    *,
    decoupled: bool,
    **options: Any,
) -> None:
    """``torch._fused_adam_``; with weight decay apart from the gradient ``torch._fused_adamw_``."""
    averages = all(0 < options[name] < 1 for name in ("beta1", "beta2"))
    if _plain(options) and averages and not options.get("amsgrad"):
        names = ("beta1", "beta2", "weight_decay", "eps", "maximize")
        numbers = (*((name, options[name]) for name in names), ("decoupled", decoupled))
        left = _updated([params, grads, first, second], steps, options["lr"], "adam", numbers)
    else:
        left = list(range(len(params)))
    if left:
        every = (params, grads, first, second, largest, steps)
        torchs(*([each[at] for at in left] if each else [] for each in every), **options)


_OURS: dict[str, Callable[..., None]] = {
    "_fused_sgd_": _sgd,
    "_fused_adam_": partial(_adam, decoupled=False),
    "_fused_adamw_": partial(_adam, decoupled=True),
}


def _plain(options: dict[str, Any]) -> bool:
    """Whether an update is one of numbers: none is scaled or left out, and nothing is traced."""
    if options.get("grad_scale") is not None or options.get("found_inf") is not None:
        return False
    lr = options["lr"]
    if isinstance(lr, torch.Tensor) and (lr.numel() != 1 or lr.dtype != F32):
        return False
    numbers = [value for name, value in options.items() if name != "lr"]
    known = all(value is None or isinstance(value, (bool, int, float)) for value in numbers)
    return known and not torch.compiler.is_compiling()


# -- kernels ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Update:
    """A kernel for some parameters, and the inputs that its outputs are written over."""

    executable: Executable
    over: dict[str, str]


def _updated(
    lists: Sequence[_Tensors],
    steps: _Tensors,
    lr: float | torch.Tensor,
    kind: str,
    numbers: tuple[tuple[str, Any], ...],
) -> list[int]:
    """Update the parameters that kernels can; return the places of the others.

    ``lists`` are parameters, gradients and states, of which all but the gradients are written.
    """
    device = lists[0][0].device
    rows = [[each[at] for each in lists] for at in range(len(lists[0]))]
    counts: Sequence[torch.Tensor | None] = steps or [None] * len(rows)
    if isinstance(lr, torch.Tensor) and lr.device != device:
        return list(range(len(rows)))
    fit: list[int] = []
    left: list[int] = []
    for at, row in enumerate(rows):
        (fit if _fits(row, counts[at], device) else left).append(at)
    rate: torch.Tensor | None = None
    for start in range(0, len(fit), AT_ONCE):
        places = fit[start : start + AT_ONCE]
        sizes = tuple(rows[at][0].numel() for at in places)
        update = _update(device, kind, numbers, sizes)
        if update is None:
            left += places
            continue
        if rate is None:
            made = lr if isinstance(lr, torch.Tensor) else torch.full((1,), lr, device=device)
            rate = made.detach().reshape(1)
        given = {"lr": rate}
        for number, at in enumerate(places):
            for tensor, name in zip(rows[at], _NAMES, strict=False):
                given[f"{name}{number}"] = _flat(tensor)
            if (count := counts[at]) is not None:
                given[f"step{number}"] = count.detach().reshape(1)
        written = {out: given[name] for out, name in update.over.items()}
        try:
            update.executable.run(**given, **written)
        except BindError as error:  # parameters that share memory
            _log.info("torch updates the parameters: %s", error)
            left += places
            continue
        torch.autograd.graph.increment_version(list(written.values()))
    return sorted(left)


_NAMES = ("param", "grad", "first", "second")


def _fits(row: _Tensors, count: torch.Tensor | None, device: torch.device) -> bool:
    """Whether a parameter, its gradient and states are runs of float32 of one order."""
    param = row[0]
    if count is not None and (count.device != device or count.dtype != F32 or count.numel() != 1):
        return False
    return (
        param.numel() > 0
        and all(
            type(each) in (torch.Tensor, torch.nn.Parameter)
            and each.layout == torch.strided
            and each.device == device
            and each.dtype == F32
            and each.shape == param.shape
            and each.stride() == param.stride()
            and each.data_ptr() % 16 == 0
            for each in row
        )
        and is_dense(param.shape, param.stride())
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _update(
    device: torch.device, kind: str, numbers: tuple[tuple[str, Any], ...], sizes: tuple[int, ...]
) -> _Update | None:
    """The kernel for parameters of some sizes; None where it is not one."""
    key = (str(device), kind, numbers, sizes)
    if key not in _updates:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # nothing is compiled then
        while len(_updates) >= MOST_KEPT:
            _updates.pop(next(iter(_updates)), None)
        _updates[key] = _compiled(device, kind, dict(numbers), sizes)
    return _updates[key]


_updates: dict[_Key, _Update | None] = {}


def _compiled(
    device: torch.device, kind: str, numbers: dict[str, Any], sizes: tuple[int, ...]
) -> _Update | None:
    g = Graph(kind)
    lr, over = g.input("lr", (1,), F32), {}
    for number, size in enumerate(sizes):
        made = (_sgd_of if kind == "sgd" else _adam_of)(g, lr, number, size, **numbers)
        for name, value in made.items():
            g.output(f"next_{name}", value)
            over[f"next_{name}"] = name
    try:
        executable = g.compile(device)
    except CudnnGraphError as error:
        _log.info("torch updates the parameters: %s", error)
        return None
    kinds = {step.kind for step in executable.steps}
    if kinds != {"kernel"}:
        _log.info("torch updates the parameters, which would be steps of %s", sorted(kinds))
        return None
    return _Update(executable, over)


def _sgd_of(
    g: Graph,
    lr: Value,
    number: int,
    size: int,
    *,
    weight_decay: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
) -> dict[str, Value]:
    """The tensors that a step of SGD writes, by what they are written over."""
    param, grad = (g.input(f"{name}{number}", (size,), F32) for name in ("param", "grad"))
    step = _ascending(g, param, grad, maximize, weight_decay)
    made = {}
    if momentum:
        name = f"first{number}"
        kept = g.mul(g.input(name, (size,), F32), momentum)
        made[name] = g.add(kept, g.mul(step, 1.0 - dampening) if dampening else step)
        step = g.add(step, g.mul(made[name], momentum)) if nesterov else made[name]
    return {f"param{number}": g.sub(param, g.mul(step, lr)), **made}


def _adam_of(
    g: Graph,
    lr: Value,
    number: int,
    size: int,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    decoupled: bool,
) -> dict[str, Value]:
    """The tensors that a step of Adam writes, by what they are written over."""
    param, grad, first, second = (g.input(f"{n}{number}", (size,), F32) for n in _NAMES)
    count = g.input(f"step{number}", (1,), F32)
    grad = _ascending(g, param, grad, maximize, 0.0 if decoupled else weight_decay)
    # 1 - beta ** count loses its digits where it is small; exp(x) - 1 of a small x does not.
    corrections = [g.neg(g.elu(g.mul(count, math.log(beta)))) for beta in (beta1, beta2)]
    made = g.adamw(
        param,
        grad,
        first,
        second,
        lr,
        *corrections,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay if decoupled else 0.0,
    )
    return dict(
        zip((f"{name}{number}" for name in ("param", "first", "second")), made, strict=True)
    )


def _ascending(g: Graph, param: Value, grad: Value, maximize: bool, weight_decay: float) -> Value:
    """The gradient with the weight decay that is part of it, uphill where that is wanted."""
    grad = g.neg(grad) if maximize else grad
    return g.add(grad, g.mul(param, weight_decay)) if weight_decay else grad
