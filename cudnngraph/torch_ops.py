"""The functions as torch.library ops, so that ``torch.compile`` and ``torch.export`` see one op.

``cudnngraph::forward`` runs a function of :mod:`~cudnngraph.functional` by its name and returns the
results and behind them what its gradient needs; ``cudnngraph::backward`` runs the gradient graph.
Which graph that is stands in a text: the function, its options, and shape, stride and dtype of
each tensor. So both ops have no state, and the kernels for fake tensors give the real strides.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Hashable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from .errors import FeatureMissing
from .grad import Gradient, differentiate
from .ir import DTYPE_NAMES, GraphSpec
from .policy import Policy
from .runtime import Executable
from .runtime import compile as compile_spec
from .specialize import Build, Specialized
from .training import check_dropout, laid_out

Tensor = torch.Tensor
_BUILDS: dict[str, Build] = {}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def function(build: Build) -> Build:
    """Make a function of a graph callable through the ops, under its own name.

    Raises :class:`ValueError` where another function has that name.
    """
    if build.__name__ in _BUILDS:
        raise ValueError(f"two functions of graphs are named '{build.__name__}'")
    _BUILDS[build.__name__] = build
    return build


@cache
def specialized(build: Build, policy: Policy | None) -> Specialized:
    """The one :class:`Specialized` for a function and a policy."""
    return Specialized(build, policy, {"training": True})


def call(
    name: str,
    tensors: Sequence[Tensor | None],
    static: dict[str, Hashable],
    policy: Policy | None,
    results: int,
) -> list[Tensor]:
    """The first ``results`` results of a function, through the op. Traced by torch.compile."""
    given = [tensor for tensor in tensors if tensor is not None]
    enabled = torch.is_grad_enabled()
    wrt = [enabled and tensor.requires_grad for tensor in given]
    there = [tensor is not None for tensor in tensors]
    options = _text(tuple(static.items()))
    made: list[Tensor] = torch.ops.cudnngraph.forward(
        given, name, there, options, _policy_text(policy), wrt
    )
    return made[:results]


def _text(value: Any) -> str:
    """A Python literal; written out because a compiler traces it."""
    if isinstance(value, tuple):
        return "(" + "".join([_text(item) + "," for item in value]) + ")"
    if isinstance(value, str):
        return "'" + value + "'"
    return str(value)


def _policy_text(policy: Policy | None) -> str:
    if policy is None:
        return "None"
    return _text(
        (
            policy.tune,
            policy.allow_tf32,
            policy.deterministic,
            policy.workspace_limit,
            policy.fallback,
            policy.exclude_engines,
            policy.max_candidates,
            policy.budget_s,
        )
    )


# -- which graph -----------------------------------------------------------------------------------


def _form(tensor: Tensor) -> tuple[Any, ...]:
    shape, stride = (tuple(int(n) for n in many) for many in (tensor.shape, tensor.stride()))
    return shape, stride, DTYPE_NAMES[tensor.dtype]


def _described(
    tensors: Sequence[Tensor],
    build: str,
    there: Sequence[bool],
    static: str,
    policy: str,
    wrt: Sequence[bool],
) -> str:
    forms = iter(tensors)
    places = [_form(next(forms)) if here else None for here in there]
    return repr((build, places, static, policy, [bool(flag) for flag in wrt]))


class _Made:
    """What a text describes: the graph and its gradient, and executables by device."""

    def __init__(self, text: str) -> None:
        build, places, static, policy, wrt = ast.literal_eval(text)
        fields = ast.literal_eval(policy)
        self.policy = None if fields is None else Policy(*fields)
        like = [
            None
            if form is None
            else torch.empty_strided(form[0], form[1], dtype=_DTYPES[form[2]], device="meta")
            for form in places
        ]
        options = dict(ast.literal_eval(static))
        graph = specialized(_BUILDS[build], self.policy).graph(*like, **options)
        self.spec: GraphSpec = graph.spec()
        self.gradient: Gradient | None = None
        if any(wrt):
            names = [name for name, flag in zip(self.spec.inputs, wrt, strict=True) if flag]
            self.gradient = differentiate(self.spec, names)
        self.forward: GraphSpec = self.spec if self.gradient is None else self.gradient.forward
        self._executables: dict[tuple[str, torch.device], Executable] = {}
        self._lock = threading.Lock()

    @property
    def backward(self) -> Gradient:
        """The gradient; there is one, for its op was called."""
        assert self.gradient is not None
        return self.gradient

    def executable(self, which: str, device: torch.device) -> Executable:
        """The forward or the backward, compiled on the first call."""
        found = self._executables.get((which, device))
        if found is None:
            spec = self.forward if which == "forward" else self.backward.backward
            found = compile_spec(spec, device, policy=self.policy)
            if which == "backward":
                check_dropout(self.executable("forward", device), found)
            with self._lock:
                found = self._executables.setdefault((which, device), found)
        return found


@lru_cache(maxsize=1024)
def _made(text: str) -> _Made:
    return _Made(text)


def _empty(spec: GraphSpec, device: torch.device) -> list[Tensor]:
    """What a run of ``spec`` returns, of no content."""
    outputs = (spec.tensors[name] for name in spec.outputs)
    return [torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=device) for t in outputs]


def _run(exe: Executable, tensors: Sequence[Tensor]) -> list[Tensor]:
    results = exe(*tensors)
    return [results] if len(exe.spec.outputs) == 1 else list(results)


# -- the ops ---------------------------------------------------------------------------------------


@torch.library.custom_op("cudnngraph::forward", mutates_args=())
def forward(
    tensors: list[Tensor],
    build: str,
    there: list[bool],
    static: str,
    policy: str,
    wrt: list[bool],
) -> list[Tensor]:
    """Results, then what the gradient of the inputs marked in ``wrt`` needs."""
    made = _made(_described(tensors, build, there, static, policy, wrt))
    return _run(made.executable("forward", tensors[0].device), tensors)


@forward.register_fake
def _(
    tensors: list[Tensor],
    build: str,
    there: list[bool],
    static: str,
    policy: str,
    wrt: list[bool],
) -> list[Tensor]:
    made = _made(_described(tensors, build, there, static, policy, wrt))
    return _empty(made.forward, tensors[0].device)


@torch.library.custom_op("cudnngraph::backward", mutates_args=())
def backward(tensors: list[Tensor], text: str) -> list[Tensor]:
    """Gradients, from those of the results and what was saved; ``text`` says of which graph."""
    made = _made(text)
    spec, device = made.backward.backward, tensors[0].device
    given = [
        laid_out(spec.tensors[name], tensor, device)
        for name, tensor in zip(spec.inputs, tensors, strict=True)
    ]
    return _run(made.executable("backward", device), given)


@backward.register_fake
def _(tensors: list[Tensor], text: str) -> list[Tensor]:
    return _empty(_made(text).backward.backward, tensors[0].device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, *described = inputs
    ctx.text = _described(tensors, *described)
    made = _made(ctx.text)
    ctx.set_materialize_grads(False)
    if made.gradient is None:
        return
    known = dict(zip(made.forward.inputs, tensors, strict=True))
    known |= dict(zip(made.forward.outputs, output, strict=True))
    ctx.save_for_backward(*(known[name] for name in made.gradient.saved))
    ctx.mark_non_differentiable(
        *(known[n] for n in made.forward.outputs if n not in made.gradient.incoming)
    )


def _differentiated(ctx: Any, grads: list[Tensor | None]) -> Any:
    made = _made(ctx.text)
    gradient, saved = made.backward, ctx.saved_tensors
    given = dict(zip(gradient.saved, saved, strict=True))
    for output, grad in zip(made.forward.outputs, grads, strict=True):
        name = gradient.incoming.get(output)
        if name is not None:
            spec = gradient.backward.tensors[name]
            given[name] = saved[0].new_zeros(spec.shape, dtype=spec.dtype) if grad is None else grad
    ordered = [given[name] for name in gradient.backward.inputs]
    results = torch.ops.cudnngraph.backward(ordered, ctx.text)
    made_grads = dict(zip(gradient.backward.outputs, results, strict=True))
    by_input = {name: made_grads[grad] for name, grad in gradient.outgoing.items()}
    return [by_input.get(name) for name in made.spec.inputs], None, None, None, None, None


def _no_second(ctx: Any, grads: Any) -> Any:
    raise FeatureMissing(
        f"graph '{_made(ctx.text).spec.name}': its gradient has no gradient of its own (double "
        "backward)"
    )


def _keep_text(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.text = inputs[1]


forward.register_autograd(_differentiated, setup_context=_save)
backward.register_autograd(_no_second, setup_context=_keep_text)
