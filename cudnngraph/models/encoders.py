"""torch's transformers, which in evaluation ask for the numbers in masks and leave padding out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import transformer

_DETECTS = "_detect_is_causal_mask"


@contextmanager
def told_by_masks_alone(model: nn.Module) -> Iterator[None]:
    """Have torch's transformers do the same for all numbers in their masks.

    They ask whether a mask is causal, which says what the mask says. And nn.TransformerEncoder
    packs sequences without their padding, if all of that stands at the end, and fills the result up
    with zeros. A graph has no such tensors: padding is computed, and then set to what they give.
    """
    packs: list[Any] = [
        each
        for each in model.modules()
        if isinstance(each, nn.TransformerEncoder)
        and type(each).forward is nn.TransformerEncoder.forward
        and getattr(each, "use_nested_tensor", False)
    ]
    hooks = []
    detects = getattr(transformer, _DETECTS, None)
    try:
        if detects is not None:
            setattr(transformer, _DETECTS, _is_causal)
        for each in packs:
            each.use_nested_tensor = False
            hooks.append(each.register_forward_hook(_filled, prepend=True, with_kwargs=True))
        yield
    finally:
        if detects is not None:
            setattr(transformer, _DETECTS, detects)
        for hook in hooks:
            hook.remove()
        for each in packs:
            each.use_nested_tensor = True


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _filled(module: Any, args: Any, kwargs: Any, result: torch.Tensor) -> torch.Tensor | None:
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    padding = given.get("src_key_padding_mask")
    if padding is None or given.get("mask") is not None or given["src"].dim() != 3:
        return None
    slow = not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled()
    if slow or module.layers[0].training:
        return None
    hidden: torch.Tensor = padding.bool()
    if getattr(module, "mask_check", True):
        hidden = hidden & (hidden[:, :-1] <= hidden[:, 1:]).all()
    zeros = torch.zeros(result.shape[-1:], dtype=result.dtype, device=result.device)
    filler = zeros if module.norm is None else module.norm(zeros)
    return torch.where(hidden[..., None], filler, result)
