"""The functions as torch.library ops, so that ``torch.compile`` and ``torch.export`` see one op.

``cudnngraph::forward`` runs a function of :mod:`~cudnngraph.functional` by its name and returns the
results and behind them what its gradient needs; ``cudnngraph::backward`` runs the gradient graph.
Which graph that is stands in a text (the function, its options, the tensors' dtypes), in sizes
(their shapes and strides, and whole numbers among the options) and in numbers. So both ops have no
state, and the kernels for fake tensors give the real strides. Sizes that a compiler leaves open
stay open where that can be: a graph is then made for those that it has met, and it is asked which
of its results have which.
"""

from __future__ import annotations

import ast
import dataclasses
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from ..errors import BindError, FeatureMissing, GraphError
from ..executor import reference
from ..grad.backward import Gradient
from ..grad.differentiate import differentiable, differentiate
from ..ir.spec import DTYPE_NAMES, GraphSpec, TensorSpec, dense_strides, is_dense, memory_order
from ..ops.table import OPS
from ..policy import Policy
from ..runtime.transforms import check_dropout, folded, laid_out, stacked, taken, unfolded
from .checks import tensor_problems
from .compile import compile as compile_spec
from .executable import Executable
from .specialize import Build, Specialized

Tensor = torch.Tensor
_BUILDS: dict[str, Build] = {}
_BATCHED: dict[str, tuple[str, ...]] = {}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def function(*batched: str) -> Callable[[Build], Build]:
    """Make a function of a graph callable through the ops, under its own name.

    ``batched`` as of :class:`Specialized`. Raises :class:`ValueError` where another function has
    that name.
    """

    def add(build: Build) -> Build:
        if build.__name__ in _BUILDS:
            raise ValueError(f"two functions of graphs are named '{build.__name__}'")
        _BUILDS[build.__name__] = build
        _BATCHED[build.__name__] = batched
        return build

    return add


@cache
def specialized(build: Build, policy: Policy | None) -> Specialized:
    """The one :class:`Specialized` for a function and a policy."""
    return Specialized(build, policy, {"training": True}, _BATCHED[build.__name__])


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
    numbers: list[float] = []
    counts: list[int] = []
    options = _encode(tuple(static.items()), numbers, counts)
    fields = _policy_text(policy, numbers, counts)
    made: list[Tensor] = torch.ops.cudnngraph.forward(
        given, name, there, options, fields, numbers, counts, wrt
    )
    return made[:results]


def _encode(value: Any, numbers: list[float], counts: list[int]) -> str:
    """A Python literal; written out because a compiler traces it. What the compiler may leave open
    is kept apart: of a float the place in ``numbers`` stands in braces, of an int that in
    ``counts`` in brackets."""
    if isinstance(value, tuple):
        return "(" + "".join([_encode(item, numbers, counts) + "," for item in value]) + ")"
    if isinstance(value, str):
        return "'" + value + "'"
    if isinstance(value, (float, torch.SymFloat)):
        numbers.append(value)  # type: ignore[arg-type]
        return "{" + str(len(numbers) - 1) + "}"
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        counts.append(value)  # type: ignore[arg-type]
        return "[" + str(len(counts) - 1) + "]"
    return str(value)


def _decode(text: str, numbers: Sequence[float], counts: Sequence[int]) -> Any:
    """The value that :func:`_encode` wrote out."""

    def filled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(filled(item) for item in value)
        if isinstance(value, set):
            return numbers[value.pop()]
        return counts[value.pop()] if isinstance(value, list) else value

    return filled(ast.literal_eval(text))


def _policy_text(policy: Policy | None, numbers: list[float], counts: list[int]) -> str:
    if policy is None:
        return "None"
    values = tuple(getattr(policy, field.name) for field in dataclasses.fields(Policy))
    return _encode(values, numbers, counts)


# -- which graph -----------------------------------------------------------------------------------


# Functions that make no tensor larger for a whole number among their options, such as a window.
_OPEN_COUNTS = frozenset({"attention", "attention_varlen", "attention_paged"})


def _described(
    tensors: Sequence[Tensor],
    build: str,
    there: Sequence[bool],
    static: str,
    policy: str,
    numbers: Sequence[float],
    counts: Sequence[int],
    wrt: Sequence[bool],
) -> tuple[str, list[int], list[float]]:
    """The text, sizes and numbers of a call of the op. Sizes may be open, numbers are not."""
    forms = iter([(tensor.dim(), DTYPE_NAMES[tensor.dtype]) for tensor in tensors])
    places = [next(forms) if here else None for here in there]
    sizes = _sizes(tensors)
    sizes += counts if build in _OPEN_COUNTS else map(int, counts)
    text = repr((build, places, static, policy, [bool(flag) for flag in wrt]))
    return text, sizes, [float(number) for number in numbers]


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [size for tensor in tensors for size in (*tensor.shape, *tensor.stride())]


def _size_hint(size: Any) -> int:
    """A size, or the one that a compiler has met where it leaves it open."""
    hint = size if type(size) is int else getattr(size.node, "hint", None)
    return int(size if hint is None else hint)


def _split_sizes(
    sizes: Sequence[int], rank: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Shape and stride of the next tensor, and the sizes of the others."""
    return sizes[:rank], sizes[rank : 2 * rank], sizes[2 * rank :]


class _Compiled:
    """A described graph, compiled: its gradient, and executables by device."""

    def __init__(self, text: str, sizes: Sequence[int], numbers: Sequence[float]) -> None:
        build, places, static, policy, wrt = ast.literal_eval(text)
        like: list[Tensor | None] = []
        for form in places:
            if form is None:
                like.append(None)
                continue
            rank, dtype = form
            shape, stride, sizes = _split_sizes(sizes, rank)
            made = torch.empty_strided(shape, stride, dtype=_DTYPES[dtype], device="meta")
            like.append(made)
        counts = sizes  # what is left of them
        fields = _decode(policy, numbers, counts)
        self.policy = None if fields is None else Policy(*fields)
        options = dict(_decode(static, numbers, counts))
        graph = specialized(_BUILDS[build], self.policy).graph(*like, **options)
        self.spec: GraphSpec = graph.spec()
        self.gradient: Gradient | None = None
        wanted = [name for name, flag in zip(self.spec.inputs, wrt, strict=True) if flag]
        able = differentiable(self.spec) if wanted else ()
        names = [name for name in wanted if name in able]
        if names:
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
def _kept(text: str, sizes: tuple[int, ...], numbers: tuple[float, ...]) -> _Compiled:
    return _Compiled(text, sizes, numbers)


def _made(text: str, sizes: Sequence[int], numbers: Sequence[float]) -> _Compiled:
    """The compiled graph of a description; open sizes take the values that were met."""
    return _kept(text, tuple(map(_size_hint, sizes)), tuple(numbers))


def _empty(spec: GraphSpec, device: torch.device) -> list[Tensor]:
    """Return empty results of ``spec``."""
    return [spec.tensors[name].empty(device) for name in spec.outputs]


# Ops whose attributes hold sizes that torch does not compare with those of the operand.
def _shapes(spec: GraphSpec, tensors: Sequence[Tensor]) -> list[Any] | None:
    """The shapes of the outputs for tensors of open sizes; None where they cannot be left open."""
    if any(OPS[node.op].has("holds_sizes") for node in spec.nodes):
        return None
    try:
        results = reference.run(spec, tensors)
    except Exception:  # a rule that wants to know the sizes, or the numbers
        return None
    shapes = [result.shape for result in results]
    met = [tuple(map(_size_hint, shape)) for shape in shapes]
    return shapes if met == [spec.tensors[name].shape for name in spec.outputs] else None


def _like(tensor: TensorSpec, shape: Sequence[Any], device: torch.device) -> Tensor:
    """Return an empty dense tensor of an open shape."""
    stride = dense_strides(shape, memory_order(tensor.shape, tensor.stride))
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)


def _is_dense(spec: GraphSpec) -> bool:
    outputs = (spec.tensors[name] for name in spec.outputs)
    return all(is_dense(tensor.shape, tensor.stride) for tensor in outputs)


def _has_symbols(sizes: Sequence[Any]) -> bool:
    return any(type(size) is not int for size in sizes)


def _run(exe: Executable, tensors: Sequence[Tensor]) -> list[Tensor]:
    results = exe(*tensors)
    return [results] if len(exe.spec.outputs) == 1 else list(results)


def by_reference(op: Any, args: Sequence[Any], dtype: torch.dtype | None) -> list[Tensor] | None:
    """The results of a call of one of the ops below by the reference executor, in ``dtype`` or as
    declared; None for another op. What it takes may be wider than what it was traced with."""
    if op is torch.ops.cudnngraph.forward.default:
        spec = _made(*_described(*args)).forward
    elif op is torch.ops.cudnngraph.backward.default:
        spec = _made(*args[1:]).backward.backward
    else:
        return None
    results = reference.run(spec, args[0], dtype)
    outputs = _empty(spec, args[0][0].device)
    return [
        output.to(result.dtype).copy_(result)
        for output, result in zip(outputs, results, strict=True)
    ]


# -- the ops ---------------------------------------------------------------------------------------


@torch.library.custom_op("cudnngraph::forward", mutates_args=())
def forward(
    tensors: list[Tensor],
    build: str,
    there: list[bool],
    static: str,
    policy: str,
    numbers: list[float],
    counts: list[int],
    wrt: list[bool],
) -> list[Tensor]:
    """Results, then what the gradient of the inputs marked in ``wrt`` needs, if those have one."""
    made = _made(*_described(tensors, build, there, static, policy, numbers, counts, wrt))
    return _run(made.executable("forward", tensors[0].device), tensors)


@forward.register_fake
def _(
    tensors: list[Tensor],
    build: str,
    there: list[bool],
    static: str,
    policy: str,
    numbers: list[float],
    counts: list[int],
    wrt: list[bool],
) -> list[Tensor]:
    text, sizes, fixed = _described(tensors, build, there, static, policy, numbers, counts, wrt)
    device = tensors[0].device
    if _has_symbols(_sizes(tensors)):
        spec = _made(text, sizes, fixed).forward
        shapes = _shapes(spec, tensors) if _is_dense(spec) else None
        if shapes is not None:
            outputs = [spec.tensors[name] for name in spec.outputs]
            return [_like(*each, device) for each in zip(outputs, shapes, strict=True)]
        sizes = [int(size) for size in sizes]
    return _empty(_made(text, sizes, fixed).forward, device)


@torch.library.custom_op("cudnngraph::backward", mutates_args=())
def backward(
    tensors: list[Tensor], text: str, sizes: list[int], numbers: list[float]
) -> list[Tensor]:
    """Gradients, from those of the results and what was saved; the rest says of which graph."""
    made = _made(text, sizes, numbers)
    spec, device = made.backward.backward, tensors[0].device
    given = [
        laid_out(spec.tensors[name], tensor, device)
        for name, tensor in zip(spec.inputs, tensors, strict=True)
    ]
    return _run(made.executable("backward", device), given)


@backward.register_fake
def _(tensors: list[Tensor], text: str, sizes: list[int], numbers: list[float]) -> list[Tensor]:
    device = tensors[0].device
    fixed = [float(number) for number in numbers]
    made = _made(text, sizes, fixed)
    gradient = made.backward
    if _has_symbols(sizes) and _is_dense(gradient.backward):
        rest: Sequence[int] = sizes
        shapes = {}
        for name in made.spec.inputs:
            shapes[name], _, rest = _split_sizes(rest, len(made.spec.tensors[name].shape))
        of = {grad: shapes[name] for name, grad in gradient.outgoing.items()}
        spec = gradient.backward
        return [_like(spec.tensors[name], of[name], device) for name in spec.outputs]
    return _empty(_made(text, [int(size) for size in sizes], fixed).backward.backward, device)


def _check_out(out: Tensor, made: Tensor, name: str) -> None:
    """Raise :class:`BindError` where ``out`` has not the form of a result ``made``."""
    spec = TensorSpec("out", tuple(made.shape), made.stride(), made.dtype)
    problems = list(tensor_problems(spec, out, made.device, aligned=False))
    if problems:
        raise BindError(name, problems)


# An op, so that it runs where a compiler traces; having no result it is no part of what that makes.
check_out = torch.library.custom_op("cudnngraph::check_out", _check_out, mutates_args=())
check_out.register_fake(_check_out)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, *described = inputs
    ctx.described = _described(tensors, *described)
    # Of the arguments behind the tensors: torch takes an empty list for one of tensors.
    ctx.no_grads = [[] if given == [] else None for given in described]
    made = _made(*ctx.described)
    ctx.set_materialize_grads(False)
    if made.gradient is None:
        ctx.mark_non_differentiable(*output)
        return
    ctx.shapes = [result.shape for result in output]
    known = dict(zip(made.forward.inputs, tensors, strict=True))
    known |= dict(zip(made.forward.outputs, output, strict=True))
    ctx.save_for_backward(*(known[name] for name in made.gradient.saved))
    ctx.mark_non_differentiable(
        *(known[n] for n in made.forward.outputs if n not in made.gradient.incoming)
    )


def _differentiated(ctx: Any, grads: list[Tensor | None]) -> Any:
    text, sizes, numbers = ctx.described
    made = _made(text, sizes, numbers)
    gradient, saved = made.backward, ctx.saved_tensors
    given = dict(zip(gradient.saved, saved, strict=True))
    for output, shape, grad in zip(made.forward.outputs, ctx.shapes, grads, strict=True):
        name = gradient.incoming.get(output)
        if name is not None:
            dtype = gradient.backward.tensors[name].dtype
            given[name] = saved[0].new_zeros(shape, dtype=dtype) if grad is None else grad
    ordered = [given[name] for name in gradient.backward.inputs]
    results = torch.ops.cudnngraph.backward(ordered, text, sizes, numbers)
    made_grads = dict(zip(gradient.backward.outputs, results, strict=True))
    by_input = {name: made_grads[grad] for name, grad in gradient.outgoing.items()}
    first = [by_input.get(name) for name in made.spec.inputs]
    return first, *ctx.no_grads


def _no_second(ctx: Any, grads: Any) -> Any:
    name = _made(*ctx.described).spec.name
    raise FeatureMissing(
        f"graph '{name}': its gradient has no gradient of its own (double backward)"
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, *ctx.described = inputs


# -- mapped by torch.vmap --------------------------------------------------------------------------


@forward.register_vmap
def _(info: Any, in_dims: Any, tensors: list[Tensor], build: str, *described: Any) -> Any:
    many, dims = info.batch_size, in_dims[0]
    one = taken(tensors, dims, 0) if many else tensors
    made = _made(*_described(one, build, *described))
    forms = iter([(tuple(t.shape), t.stride(), t.dtype) for t in one])
    build_of = specialized(_BUILDS[build], made.policy)
    like = build_of.wider([next(forms) if here else None for here in described[0]], many)
    if like is not None:
        try:
            given = [tensor for tensor in like if tensor is not None]
            wide = _made(*_described(given, build, *described))
        except GraphError:  # the first dim is no batch here
            wide = None
        ready = wide and folded(made.forward, wide.forward, many, dims, tensors)
        if ready is not None:
            results = torch.ops.cudnngraph.forward(ready, build, *described)
            return [unfolded(each, many) for each in results], [0] * len(results)
    runs = [
        torch.ops.cudnngraph.forward(taken(tensors, dims, at), build, *described)
        for at in range(many)
    ]
    stack = stacked(runs, made.forward, tensors[0].device)
    return list(stack), [0] * len(stack)


@backward.register_vmap
def _(info: Any, in_dims: Any, tensors: list[Tensor], *described: Any) -> Any:
    dims = in_dims[0]
    runs = [
        torch.ops.cudnngraph.backward(taken(tensors, dims, at), *described)
        for at in range(info.batch_size)
    ]
    stack = stacked(runs, _made(*described).backward.backward, tensors[0].device)
    return list(stack), [0] * len(stack)


forward.register_autograd(_differentiated, setup_context=_save)
backward.register_autograd(_no_second, setup_context=_keep)
