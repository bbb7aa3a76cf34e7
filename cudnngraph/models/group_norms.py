"""Group norms in the layout of their images, as one op each while AOTAutograd traces.

On a GPU torch's are contiguous, whatever their images are, and so is what a trace says of all that
reads them: a forward would save tensors of another layout than its convolutions make. :class:`Kept`
calls an op of this file instead. Results that a user gets have the layout that torch gives them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .whole import call_in_place_of, no_casts

Tensor = torch.Tensor
_aten: Any = torch.ops.aten
_RANKS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Kept:
    """The group norms of a graph of dynamo's, and of the graphs in it, as ops of this file."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self._module = module
        functions = dict.fromkeys((F.group_norm, torch.group_norm), inspect.signature(group_norm))
        self._norms = call_in_place_of(module, functions, group_norm, _is_image)
        self._results = _lay_out(module) if self._norms else []
        if self._results:
            module.recompile()

    def __bool__(self) -> bool:
        return bool(self._norms)

    def undo(self) -> None:
        """Put torch's in their places again: a model may ask a norm's result for views that there
        are of contiguous ones alone."""
        for node, target, args, kwargs in self._norms:
            node.target, node.args, node.kwargs = target, args, kwargs
        for node in self._results:
            node.replace_all_uses_with(node.all_input_nodes[0])
            self._module.graph.erase_node(node)
        for part in self._module.modules():
            if isinstance(part, torch.fx.GraphModule):
                part.recompile()


def _is_image(seen: Any) -> bool:
    return isinstance(seen, Tensor) and seen.dim() in _RANKS


def _lay_out(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Give the results of a graph the layouts that dynamo has seen; the nodes that do that."""
    output = module.graph.output_node()
    made: list[torch.fx.Node] = []

    def laid_out(node: torch.fx.Node) -> torch.fx.Node:
        seen = node.meta.get("example_value")
        if node.op == "placeholder" or not isinstance(seen, Tensor) or not _is_image(seen):
            return node
        for form in (torch.contiguous_format, _RANKS[seen.dim()]):
            if seen.is_contiguous(memory_format=form):
                with module.graph.inserting_before(output):
                    asked: dict[str, Any] = {"memory_format": form}
                    made.append(module.graph.call_method("contiguous", (node,), asked))
                return made[-1]
        return node

    output.args = torch.fx.map_arg(output.args, laid_out)
    return made


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """``torch.group_norm`` with a result of ``dtype``, which is the one that dynamo has recorded:
    autocast on a GPU computes it in float32."""
    mapped = torch._C._functorch.is_functorch_wrapped_tensor(input)
    if mapped or any(type(length) is int and not length for length in input.shape):
        return F.group_norm(input, num_groups, weight, bias, eps)
    if input.dtype != dtype:
        weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
    made: tuple[Tensor, ...] = torch.ops.cudnngraph.group_norm(
        input.to(dtype), weight, bias, num_groups, eps
    )
    return made[0]


# -- the ops --------------------------------------------------------------------------------------


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _statistics(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _as(x: Tensor, made: Tensor) -> Tensor:
    """A result in the layout of x."""
    return (
        made if made.stride() == x.stride() else torch.empty_like(x, dtype=made.dtype).copy_(made)
    )


def _group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    with no_casts(input):
        x = input.contiguous()
        y, *others = _aten.native_group_norm.default(x, weight, bias, *_sizes(x), group, eps)
        mean, deviation = (each.to(_statistics(x)) for each in others)
        return _as(input, y), mean, deviation


def _of_group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean = input.new_empty((input.shape[0], group), dtype=_statistics(input))
    return torch.empty_like(input), mean, torch.empty_like(mean)


def _group_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    with no_casts(input):
        dy, x = grad_out.contiguous(), input.to(grad_out.dtype).contiguous()
        if weight is None or weight.dtype == x.dtype:  # else torch takes statistics in float32
            mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
        mean, rstd = mean.contiguous(), rstd.contiguous()  # whose memory torch's kernels read
        dx, *others = _aten.native_group_norm_backward.default(
            dy, x, mean, rstd, weight, *_sizes(x), group, list(output_mask)
        )
        of_weight, of_bias = (x.new_empty(0) if each is None else each for each in others)
        return _as(input, dx), of_weight, of_bias


def _of_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    of_weight = input.new_empty(0) if weight is None else torch.empty_like(weight)
    dx = torch.empty_like(input, dtype=grad_out.dtype)
    return dx, of_weight, torch.empty_like(of_weight)


def _group_affine(input: Tensor, group: int, eps: float) -> tuple[Tensor, Tensor]:
    """A shift and a factor for each channel (N, C, 1, ...)."""
    n, c, _ = _sizes(input)
    x = input.to(_statistics(input)).reshape(n, group, -1)
    variance, mean = torch.var_mean(x, 2, correction=0)
    of_groups = (-mean, (variance + eps).rsqrt())
    column = (n, c, *(1 for _ in input.shape[2:]))
    shift, factor = (
        each.unsqueeze(2).expand(n, group, c // group).reshape(column) for each in of_groups
    )
    return shift, factor


def _of_affine(input: Tensor, group: int, eps: float) -> tuple[Tensor, Tensor]:
    shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
    shift = input.new_empty(shape, dtype=_statistics(input))
    return shift, torch.empty_like(shift)


_op = torch.library.custom_op("cudnngraph::group_norm", _group_norm, mutates_args=())
_op.register_fake(_of_group_norm)
FORWARD: Any = torch.ops.cudnngraph.group_norm.default
_affine = torch.library.custom_op("cudnngraph::group_affine", _group_affine, mutates_args=())
_affine.register_fake(_of_affine)
_gradient = torch.library.custom_op(
    "cudnngraph::group_norm_backward", _group_norm_backward, mutates_args=()
)
_gradient.register_fake(_of_backward)
BACKWARD: Any = torch.ops.cudnngraph.group_norm_backward.default


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, ctx.group, _ = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
    x, weight, mean, deviation = ctx.saved_tensors
    if dy is None:
        return None, None, None, None, None
    mask = [True, weight is not None, weight is not None]
    made = torch.ops.cudnngraph.group_norm_backward(dy, x, mean, deviation, weight, ctx.group, mask)
    wanted = zip(made, ctx.needs_input_grad, strict=False)
    return *(each if needed else None for each, needed in wanted), None, None


_op.register_autograd(_differentiated, setup_context=_save)
