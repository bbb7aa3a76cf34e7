"""Calls from Python as the op that each is takes its arguments."""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F

from ..ops.pooling import UPSAMPLE

_aten: Any = torch.ops.aten

_NORMS: frozenset[Any] = frozenset({F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm})
_POOLS: frozenset[Any] = frozenset({F.max_pool1d, F.max_pool2d, F.max_pool3d})
#: Those that are written in Python: their arguments may have other places than the op's.
_BY_NAME: frozenset[Any] = (
    _NORMS | _POOLS | {F.rms_norm, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d}
)


def as_declared(packet: Any, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call as the op takes them. Raises TypeError where they are others."""
    if isinstance(function, FunctionType):
        if function not in _BY_NAME:
            raise TypeError
        if function not in _POOLS:
            kwargs = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
            args = (kwargs.pop("input"),)
            if function in _NORMS:
                last = packet.default._schema.arguments[-1].name
                kwargs[last] = torch.backends.cudnn.enabled
        elif kwargs.get("return_indices") or len(args) > len(packet.default._schema.arguments):
            raise TypeError
    if function is torch.Tensor.reshape and all(isinstance(each, int) for each in args[1:]):
        args = args if "shape" in kwargs else (args[0], list(args[1:]))
    kwargs = {key: value for key, value in kwargs.items() if key != "return_indices"}
    if "default" not in packet.overloads():
        return args, kwargs
    arguments, names, may_be_none, counts = _schema_of(packet)
    if len(args) > len(arguments):
        raise TypeError
    kwargs = {k: v for k, v in kwargs.items() if v is not None or k in may_be_none}

    def spread(name: str, value: Any) -> Any:
        """A list where Python also takes its only number."""
        return [value] * counts[name] if type(value) is int and counts.get(name) else value

    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given = {name: spread(name, value) for name, value in given.items()}
    placed = []
    for name, each in zip(names, arguments, strict=True):  # what comes first by place
        if name not in given or each.kwarg_only:
            break
        placed.append(given.pop(name))
    while placed and _is_default(arguments[len(placed) - 1], placed[-1]) and not given:
        placed.pop()
    return tuple(placed), given


@cache
def _schema_of(packet: Any) -> tuple[list[Any], list[str], set[str], dict[str, Any]]:
    """The arguments of an op, their names, those that may be None, and lengths of lists."""
    arguments = list(packet.default._schema.arguments)
    names = [each.name for each in arguments]
    may_be_none = {each.name for each in arguments if "Optional" in str(each.real_type)}
    return arguments, names, may_be_none, {each.name: each.N for each in arguments}


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value() or isinstance(value, torch.Tensor):
        return False
    return type(argument.default_value) is type(value) and argument.default_value == value


def interpolation(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op that F.interpolate is, and its arguments. Raises KeyError or TypeError for others."""
    rank = input.dim() - 2
    packet = getattr(_aten, UPSAMPLE[mode, rank])
    if recompute_scale_factor or antialias or (size is None) == (scale_factor is None):
        raise TypeError
    size, scales = (
        None if each is None else list(each) if isinstance(each, (tuple, list)) else [each] * rank
        for each in (size, scale_factor)
    )
    corners = () if "nearest" in mode else (bool(align_corners),)
    return packet.vec, (input, size, *corners, scales and [float(each) for each in scales]), {}


def product(equation: Any, *operands: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The matrices whose product is what torch.einsum gives, None where it is something else.

    torch takes an einsum apart into views that are copied, and a product of three dims.
    """
    if not isinstance(equation, str) or not all(isinstance(x, torch.Tensor) for x in operands):
        return None
    terms = equation.replace(" ", "").replace("->", ",").split(",")
    if len(terms) != 3 or len(operands) != 2 or operands[0].dim() != operands[1].dim():
        return None
    more = all(term.startswith("...") for term in terms)
    one, two, out = terms = [term[3:] if more else term for term in terms]
    if operands[0].dim() < len(one) or (operands[0].dim() > len(one) and not more):
        return None
    if len({*map(len, terms)}) > 1 or len(out) < 2 or len({one[:-2], two[:-2], out[:-2]}) > 1:
        return None
    if not "".join(terms).isalpha() or any(len({*term}) < len(term) for term in terms):
        return None
    summed = ({*one[-2:]} & {*two[-2:]}) - {*out}
    if len(summed) != 1 or {*one[-2:], *two[-2:]} != {*out[-2:], *summed}:
        return None
    pair: list[torch.Tensor] = []
    for label in out[-2:]:
        place = int(label not in one)
        x, term = operands[place], terms[place]
        first = label if not pair else summed.copy().pop()
        pair.append(x if term[-2] == first else x.transpose(-2, -1))
    return (pair[0], pair[1]) if pair[0].shape[-1] == pair[1].shape[-2] else None
