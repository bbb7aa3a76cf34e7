"""Resized images, as one op each while AOTAutograd traces, forward and backward.

torch's dispatcher in Python takes ``F.interpolate`` apart into gathers of neighbours, whose
gradients scatter. :func:`keep` calls an op of this file instead, which nothing takes apart;
:func:`as_torch` puts torch's own in its place in what was traced. Nothing of torch's is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from ..ops.pooling import UPSAMPLE

Tensor = torch.Tensor
_aten: Any = torch.ops.aten


#: Calls in a graph: each node with its function, arguments and keywords.
Calls = list[tuple[torch.fx.Node, Any, Any, Any]]


def keep(module: torch.fx.GraphModule) -> None:
    """Let a graph of dynamo's, and the graphs in it, resize images by the op of this file."""
    call_in_place_of(module, _SIGNATURES, interpolate, _is_image)


def call_in_place_of(
    module: torch.fx.GraphModule,
    functions: Mapping[Any, inspect.Signature],
    own: Callable[..., Tensor],
    takes: Callable[[Any], bool],
) -> Calls:
    """Let a graph of dynamo's, and the graphs in it, call ``own`` in place of functions of torch's
    whose results it takes; what they called.

    ``own`` is given the arguments by name, and as ``dtype`` that of the result that dynamo saw.
    """
    called: Calls = []
    for part in module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        before = len(called)
        for node in part.graph.nodes:
            seen = node.meta.get("example_value")
            signature = functions.get(node.target) if node.op == "call_function" else None
            if signature is not None and takes(seen):
                called.append((node, node.target, node.args, node.kwargs))
                bound = signature.bind_partial(*node.args, **node.kwargs).arguments
                node.target, node.args = own, ()
                node.kwargs = {**bound, "dtype": seen.dtype}
        if len(called) > before:
            part.recompile()
    return called


_SIGNATURES: dict[Any, inspect.Signature] = {
    function: inspect.signature(function) for function in (F.interpolate, F.upsample)
}


def _is_image(seen: Any) -> bool:
    return isinstance(seen, Tensor) and seen.is_floating_point()


def interpolate(input: Tensor, *, dtype: torch.dtype, **options: Any) -> Tensor:
    """``F.interpolate`` with a result of ``dtype``, which is the one that dynamo has recorded.

    Autocast on a GPU would cast to float32 what is not taken apart.
    """
    size, scale, rank = options.get("size"), options.get("scale_factor"), input.dim() - 2
    name = UPSAMPLE.get((options.get("mode", "nearest"), rank))
    scales = None if scale is None else _each_dim(scale, rank)
    numbers = scales is None or all(type(each) in (int, float) for each in scales)
    empty = any(type(length) is int and not length for length in input.shape)
    mapped = torch._C._functorch.is_functorch_wrapped_tensor(input)
    if name is None or options.get("antialias") or not numbers or empty or mapped:
        return F.interpolate(input, **options)
    if scales is None:
        sizes = _each_dim(size, rank)
    else:
        lengths = zip(input.shape[2:], scales, strict=True)
        sizes = [torch.sym_int(length * each) for length, each in lengths]  # type: ignore[no-untyped-call]
        scales = None if options.get("recompute_scale_factor") else [float(s) for s in scales]
    corners = bool(options.get("align_corners"))
    made: Tensor = torch.ops.cudnngraph.resize(input.to(dtype), name, sizes, corners, scales)
    return made


def _each_dim(given: Any, rank: int) -> list[Any]:
    return list(given) if isinstance(given, (tuple, list)) else [given] * rank


# -- the ops --------------------------------------------------------------------------------------


def _behind(name: str, rank: int, corners: bool, scales: Sequence[float] | None) -> list[Any]:
    """The arguments of torch's op behind the sizes."""
    return [*([] if "nearest" in name else [corners]), *(scales or (None,) * rank)]


def no_casts(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast on the device of x."""
    if not torch.amp.is_autocast_available(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _resize(
    x: Tensor, name: str, size: list[int], corners: bool, scales: list[float] | None
) -> Tensor:
    with no_casts(x):
        more = _behind(name, len(size), corners, scales)
        made: Tensor = getattr(_aten, name).default(x, size, *more)
        return made


def _resize_backward(
    dy: Tensor,
    name: str,
    size: list[int],
    image: list[int],
    corners: bool,
    scales: list[float] | None,
) -> Tensor:
    with no_casts(dy):
        more = _behind(name, len(size), corners, scales)
        made: Tensor = getattr(_aten, f"{name}_backward").default(dy, size, image, *more)
        return made


def _open(x: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """The form of a result with symbols among its sizes, which some of torch's ops do not take."""
    shape = (*x.shape[:2], *sizes)
    if all(type(length) is int for length in (*x.shape, *shape)):
        return None
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    lies_last = last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    order = last if last is not None and lies_last else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order)


def _of_resize(
    x: Tensor, name: str, size: list[int], corners: bool, scales: list[float] | None
) -> Tensor:
    made = _open(x, size)
    return _resize(x, name, size, corners, scales) if made is None else made


def _of_backward(
    dy: Tensor,
    name: str,
    size: list[int],
    image: list[int],
    corners: bool,
    scales: list[float] | None,
) -> Tensor:
    made = _open(dy, image[2:])
    return _resize_backward(dy, name, size, image, corners, scales) if made is None else made


resize = torch.library.custom_op("cudnngraph::resize", _resize, mutates_args=())
resize.register_fake(_of_resize)
resize_backward = torch.library.custom_op(
    "cudnngraph::resize_backward", _resize_backward, mutates_args=()
)
resize_backward.register_fake(_of_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.options = inputs
    ctx.image = list(x.shape)


def _differentiated(ctx: Any, dy: Tensor) -> Any:
    name, size, corners, scales = ctx.options
    dx = torch.ops.cudnngraph.resize_backward(dy, name, size, ctx.image, corners, scales)
    return dx, *(None for _ in ctx.options)


resize.register_autograd(_differentiated, setup_context=_save)


def as_torch(graph: torch.fx.Graph) -> None:
    """Put torch's ops in the places of this file's."""
    ours: Any = torch.ops.cudnngraph
    for node in graph.nodes:
        if node.target is ours.resize.default:
            x, name, size, corners, scales = node.args
            node.target = getattr(_aten, name).default
            node.args = (x, size, *_behind(name, len(size), corners, scales))
        elif node.target is ours.resize_backward.default:
            dy, name, size, image, corners, scales = node.args
            node.target = getattr(_aten, f"{name}_backward").default
            node.args = (dy, size, image, *_behind(name, len(size), corners, scales))
