"""What torch says of an op: its arguments by name, and its result on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from .forms import FORMS, elementwise

#: ATen ops that change no number (in evaluation), and those that change no more than the shape.
IDENTITIES = (
    *("alias", "clone", "contiguous", "detach", "detach_", "dropout", "feature_dropout"),
    *("alpha_dropout", "lift_fresh_copy", "lift_fresh", "_to_copy"),
)
RESHAPES = (
    *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("_reshape_alias", "view_as", "reshape_as"),
)


def bind_arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an op by name."""
    names, defaults = _schema_of(op)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _schema_of(op: Any) -> tuple[list[str], dict[str, Any]]:
    """The names of an op's arguments, and the values of those that may be left out."""
    arguments = op._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return [each.name for each in arguments], defaults


def op_name(node: Any) -> str:
    """ "softmax" of a graph's node of aten.softmax.int, "users::softmax" of another's op of that
    name, "" of what is no op."""
    op = node.target
    return op._schema.name.removeprefix("aten::") if isinstance(op, torch._ops.OpOverload) else ""


def is_random(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op draws random numbers, given these arguments: attention and recurrent layers do
    so for dropout alone, and the latter in training alone."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = bind_arguments(op, args, kwargs)
    chances = ("dropout_p", "dropout", "train", "training")
    return all(given[name] for name in chances if name in given)


def default_eps(dtype: torch.dtype) -> float:
    """The eps of torch's RMS norm if none is given: that of the dtype it computes in."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def as_held(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its very numbers: no conjugates of them, and no negatives."""
    if not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg()


def infer(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an overload on meta tensors and return its results."""
    name = op._schema.name
    rule = FORMS.get(name)
    result = None if rule is None else rule(bind_arguments(op, args, kwargs))
    if result is None:
        result = elementwise(op, args, kwargs)
    made = op(*args, **kwargs) if result is None else result
    if isinstance(made, torch.Tensor):
        return as_held(made)
    if not isinstance(made, tuple):
        return made
    given = [each.dtype for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    return tuple(
        each.to(dtype_made(op, number, each.dtype, given))
        if isinstance(each, torch.Tensor)
        else each
        for number, each in enumerate(made)
    )


#: Ops that give statistics behind their first result.
_GIVE_STATISTICS = frozenset(
    f"aten::{name}"
    for name in (
        *("native_layer_norm", "native_group_norm", "native_batch_norm"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        "_native_batch_norm_legit_no_training",
    )
)


def dtype_made(
    op: Any, number: int, traced: torch.dtype, given: Sequence[torch.dtype]
) -> torch.dtype:
    """The dtype of result ``number`` of an op of operands of the dtypes ``given``, where torch's
    meta kernels say ``traced``. They are wrong of the norms of a weight norm, float32 for float16
    weights, and of the statistics of 16-bit data, float32 beside weights of float32; gradients
    take no others."""
    norms = op is torch.ops.aten._weight_norm_interface.default and number == 1
    if norms and traced == torch.float16:
        return torch.float32
    statistics = op._schema.name in _GIVE_STATISTICS and number in (1, 2)
    return torch.float32 if statistics and torch.float32 in given else traced
