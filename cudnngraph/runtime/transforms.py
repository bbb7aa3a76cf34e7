"""Graphs under torch's function transforms: ``torch.func.grad``, ``jacrev``, ``vmap`` and others.

A transform takes calls apart level by level. So a graph runs as a function whose context is set up
apart from its forward, and which has a rule for mapped tensors: the mapped dim becomes part of the
batch, where the graph has one and nothing else is mapped, else the graph runs once for each
element. Calls outside of transforms take a shorter way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import FeatureMissing, NotSupported
from ..grad.backward import Gradient
from ..grad.differentiate import differentiable, differentiate
from ..ir.spec import GraphSpec, TensorSpec, same_layout
from ..ops.table import OPS, by_port
from ..policy import Policy
from ..select.dropout_probe import has_seeded_dropout
from .compile import compile as compile_spec
from .executable import Executable

Tensor = torch.Tensor

NO_SECOND = (
    "its gradient has no gradient of its own (double backward); call autograd without "
    "create_graph=True, or use torch's own ops where second derivatives are needed"
)
_NO_FORWARD_MODE = (
    "has no forward-mode derivative (jvp, jacfwd, dual numbers); use torch.func.vjp or jacrev, or "
    "torch's own ops"
)


class Transformed:
    """A graph as transforms see it, on one device.

    ``wider`` gives it for a batch that is so many times as long, or None; ``trains`` says whether
    it may be differentiated.
    """

    def __init__(
        self,
        spec: GraphSpec,
        device: torch.device,
        policy: Policy | None,
        *,
        trains: bool = True,
        wider: Callable[[int], Transformed | None] | None = None,
    ) -> None:
        self.spec = spec
        self.device = device
        self.policy = policy
        self.trains = trains
        self._able = frozenset(differentiable(spec)) if trains else frozenset[str]()
        self._wider = wider
        self._made: dict[tuple[str, ...], Halves] = {}

    def wrt(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """The inputs that a gradient is wanted of, by any of the transforms that are at work."""
        if not torch.is_grad_enabled():
            return ()
        named = zip(self.spec.inputs, tensors, strict=True)
        return tuple([name for name, t in named if name in self._able and _is_tracked(t)])

    def halves(self, wrt: tuple[str, ...]) -> Halves:
        """The graph and its gradient for the inputs ``wrt``."""
        found = self._made.get(wrt)
        return found if found is not None else self._made.setdefault(wrt, Halves(self, wrt))

    def wider(self, many: int) -> Transformed | None:
        """The graph for a batch ``many`` times as long; None where it has none."""
        return None if self._wider is None else self._wider(many)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for the inputs in order."""
        apply: Any = _Forward.apply
        results = apply(self.halves(self.wrt(tensors)), *tensors)
        return list(results[: len(self.spec.outputs)])


def _is_tracked(tensor: Tensor) -> bool:
    """Whether a tensor requires grad, or what a transform has wrapped in it."""
    functorch: Any = torch._C._functorch
    while not tensor.requires_grad:
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return True


class Halves:
    """A graph and its gradient for some inputs, each compiled when it first runs."""

    def __init__(self, whole: Transformed, wrt: tuple[str, ...]) -> None:
        self.whole = whole
        self.wrt = wrt
        self.gradient: Gradient | None = differentiate(whole.spec, wrt) if wrt else None
        self.forward: GraphSpec = whole.spec if self.gradient is None else self.gradient.forward
        self._executables: dict[bool, Executable] = {}
        self._lock = threading.RLock()

    def spec(self, back: bool) -> GraphSpec:
        """The forward, or ``back`` the gradient."""
        return self.gradient.backward if back and self.gradient is not None else self.forward

    def run(self, back: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of one half for tensors of any strides."""
        executable, spec = self._executable(back), self.spec(back)
        device = self.whole.device
        given = [
            laid_out(spec.tensors[name], tensor, device)
            for name, tensor in zip(spec.inputs, tensors, strict=True)
        ]
        return tuple(executable.outputs_for(given, checked=False))

    def _executable(self, back: bool) -> Executable:
        with self._lock:
            if back not in self._executables:
                whole = self.whole
                made = compile_spec(self.spec(back), whole.device, policy=whole.policy)
                if back:
                    check_dropout(self._executable(False), made)
                self._executables[back] = made
            return self._executables[back]


class _Forward(torch.autograd.Function):
    """The forward of :class:`Halves`: the graph's outputs, then what else its gradient needs."""

    @staticmethod
    def forward(halves: Halves, *tensors: Tensor) -> Any:
        return halves.run(False, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        halves, *tensors = inputs
        ctx.halves = halves
        gradient, spec = halves.gradient, halves.forward
        if gradient is not None:
            known = dict(zip((*spec.inputs, *spec.outputs), (*tensors, *output), strict=True))
            ctx.save_for_backward(*[known[name] for name in gradient.saved])
            ctx.mark_non_differentiable(
                *[known[name] for name in spec.outputs if name not in gradient.incoming]
            )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        halves: Halves = ctx.halves
        gradient, spec = halves.gradient, halves.forward
        if gradient is None:
            if halves.whole.trains:  # of inputs that have no gradient
                return (None,) * (1 + len(spec.inputs))
            raise FeatureMissing(
                f"graph '{spec.name}' was compiled for inference; compile(training=True) makes one "
                "that has gradients"
            )
        given = dict(zip(gradient.saved, ctx.saved_tensors, strict=True))
        for output, grad in zip(spec.outputs, grads, strict=True):
            if output in gradient.incoming:
                given[gradient.incoming[output]] = grad
        apply: Any = _Backward.apply
        results = apply(halves, *[given[name] for name in gradient.backward.inputs])
        made = dict(zip(gradient.backward.outputs, results, strict=True))
        return (None, *[made.get(gradient.outgoing.get(name, "")) for name in spec.inputs])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise FeatureMissing(f"graph '{ctx.halves.forward.name}' {_NO_FORWARD_MODE}")

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], halves: Halves, *tensors: Tensor) -> Any:
        return _mapped(_Forward.apply, False, info.batch_size, in_dims[1:], halves, tensors)


class _Backward(torch.autograd.Function):
    """The other half; it cannot be differentiated."""

    @staticmethod
    def forward(halves: Halves, *tensors: Tensor) -> Any:
        return halves.run(True, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.halves = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise FeatureMissing(f"graph '{ctx.halves.forward.name}': {NO_SECOND}")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise FeatureMissing(f"graph '{ctx.halves.forward.name}' {_NO_FORWARD_MODE}")

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], halves: Halves, *tensors: Tensor) -> Any:
        return _mapped(_Backward.apply, True, info.batch_size, in_dims[1:], halves, tensors)


# -- mapped tensors --------------------------------------------------------------------------------


def _mapped(
    run: Any,
    back: bool,
    many: int,
    dims: Sequence[int | None],
    halves: Halves,
    tensors: Sequence[Tensor],
) -> Any:
    """The outputs of one half for tensors of which some are mapped, and their mapped dims."""
    spec = halves.spec(back)
    whole = halves.whole.wider(many)
    if whole is not None:
        wide = whole.halves(halves.wrt)
        given = folded(spec, wide.spec(back), many, dims, tensors)
        if given is not None:
            results = run(wide, *given)
            return tuple([unfolded(each, many) for each in results]), (0,) * len(results)
    each = [run(halves, *taken(tensors, dims, at)) for at in range(many)]
    results = stacked(each, spec, halves.whole.device)
    return results, (0,) * len(results)


def taken(tensors: Iterable[Tensor], dims: Iterable[int | None], at: int) -> list[Tensor]:
    """The tensors of one element of the mapped dim."""
    pairs = zip(tensors, dims, strict=True)
    return [t if dim is None else t.select(dim, at) for t, dim in pairs]


def stacked(
    each: Sequence[Sequence[Tensor]], spec: GraphSpec, device: torch.device
) -> tuple[Tensor, ...]:
    """The outputs of ``spec`` for every element, behind one another; also for none."""
    if each:
        return tuple([torch.stack(list(results)) for results in zip(*each, strict=True)])
    forms = [spec.tensors[name] for name in spec.outputs]
    return tuple([torch.empty((0, *t.shape), dtype=t.dtype, device=device) for t in forms])


# Ops whose results for one image depend on the others.
def folded(
    spec: GraphSpec,
    wide: GraphSpec,
    many: int,
    dims: Sequence[int | None],
    tensors: Sequence[Tensor],
) -> list[Tensor] | None:
    """The tensors with the mapped dim in the batch, for ``wide``, which is ``spec`` for a batch
    ``many`` times as long; None where that is not the same: something without a batch is mapped,
    or an output has none."""
    if has_seeded_dropout(wide) or any(OPS[node.op].has("across_images") for node in wide.nodes):
        return None
    if not all(_grows(spec.tensors[name], wide.tensors[name], many) for name in spec.outputs):
        return None
    given = []
    for name, tensor, dim in zip(spec.inputs, tensors, dims, strict=True):
        if not _grows(spec.tensors[name], wide.tensors[name], many):
            if dim is not None:
                return None
            given.append(tensor)
        elif dim is None:
            given.append(tensor.unsqueeze(0).expand(many, *tensor.shape).flatten(0, 1))
        else:
            given.append(tensor.movedim(dim, 0).flatten(0, 1))
    return given


def unfolded(tensor: Tensor, many: int) -> Tensor:
    """Undo :func:`folded`: split the batch into a dim of its own."""
    return tensor.reshape(many, tensor.shape[0] // many, *tensor.shape[1:])


def _grows(narrow: TensorSpec, wide: TensorSpec, many: int) -> bool:
    """Whether a tensor has a batch, which is so many times as long. One that is as long has none,
    unless there is but one element."""
    if len(narrow.shape) != len(wide.shape) or not narrow.shape:
        return False
    return wide.shape == (many * narrow.shape[0], *narrow.shape[1:])


# -- what both ways to call a graph share ----------------------------------------------------------


def check_dropout(forward: Executable, backward: Executable) -> None:
    """Raise :class:`NotSupported` where an attention and its gradient, which drop by one seed, run
    one on cuDNN and the other as a torch step: they would drop different weights."""
    places: dict[tuple[str | None, ...], bool] = {}
    for step in (*forward.steps, *backward.steps):
        for node in step.spec.nodes if has_seeded_dropout(step.spec) else ():
            names = by_port(node)
            if "dropout_seed" not in names:
                continue
            seeds = (names["dropout_seed"], names["dropout_offset"])
            if places.setdefault(seeds, step.choice is not None) != (step.choice is not None):
                raise NotSupported(
                    f"graph '{forward.spec.name}'",
                    [
                        "attention that drops by a seed has a plan one way and is a torch step the "
                        "other way, which would drop different weights: give it a dropout_mask"
                    ],
                )


def laid_out(spec: TensorSpec, grad: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """An incoming gradient in the strides that the gradient graph declares; zeros for None.

    autograd's may be expanded (stride 0, of ``y.sum().backward()``) or lie in another order.
    """
    if grad is not None and same_layout(spec.shape, grad.stride(), spec.stride):
        return grad
    made = spec.empty(device)
    return made.zero_() if grad is None else made.copy_(grad)
