"""Entries of the zoo: a published model as data, and what builds it from a configuration.

Nothing is downloaded: the sizes are the published ones, the weights are random. ``tiny`` is the
same architecture with small widths, few layers and small inputs, for a CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

Library = Literal["torch", "timm", "torchvision", "transformers", "diffusers"]
Build = Callable[[], nn.Module]

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def said(error: BaseException) -> str:
    """An error as text, its first cause in front: libraries hide that behind imports of theirs."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = f"{type(cause).__name__}: {cause}".strip()
    return text if cause is error else f"{text}, so {type(error).__name__}: {error}".strip()


@dataclass(frozen=True)
class Input:
    """A tensor that a model is called with: normal numbers in the model's dtype, or whole numbers
    below ``below`` if that is not 0. Each channel of an image has a mean of its own, since noise
    alone has the same mean everywhere, and so have features that are pooled."""

    name: str
    shape: tuple[int, ...]
    below: int = 0

    def make(self, device: torch.device, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """Return numbers of a seed, the same on every device; images are channels_last."""
        generator = torch.Generator().manual_seed(seed)
        if self.below:
            whole = torch.randint(self.below, self.shape, generator=generator)
            return whole.to(device)
        made = torch.randn(self.shape, generator=generator)
        if made.dim() > 3:
            ones = (1,) * (made.dim() - 2)
            made += torch.randn(*self.shape[:2], *ones, generator=generator)
        made = made.to(device, dtype)
        last = CHANNELS_LAST.get(made.dim())
        return made if last is None else made.contiguous(memory_format=last)

    def __str__(self) -> str:
        return f"{self.name} {' x '.join(map(str, self.shape))}"


@dataclass(frozen=True)
class Size:
    """A model of one size: what builds it, and its inputs."""

    build: Build
    inputs: tuple[Input, ...]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    ``parameters_m`` are the millions of parameters of ``real``, which ``--check`` holds. ``cut``
    says what of the published model is left out, and is "" if it is whole.
    """

    name: str
    library: Library
    dtype: torch.dtype
    parameters_m: float
    real: Size
    tiny: Size
    cut: str = ""

    def size(self, *, tiny: bool) -> Size:
        """The model of one of its two sizes."""
        return self.tiny if tiny else self.real

    def why_missing(self) -> str:
        """Return why the library of the model is not here, or ""."""
        found = importlib.util.find_spec(self.library)
        return "" if found is not None else f"{self.library} is not installed"

    def load(self) -> None:
        """Import the library; none of them may ask a hub for anything."""
        os.environ["HF_HUB_OFFLINE"] = "1"
        importlib.import_module(self.library)


# -- how a model is called -------------------------------------------------------------------------


class Called(nn.Module):
    """A model that takes tensors by place and returns tensors.

    ``names`` are its arguments, "conditions.text" one that goes into a dict, none for tensors by
    place; ``results`` are the attributes of what it returns, none if that is a tensor; ``fixed``
    are further arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str] = (),
        results: Sequence[str] = (),
        fixed: Mapping[str, Any] | None = None,
        method: str = "forward",
    ) -> None:
        super().__init__()
        self.model = model
        self.names, self.results, self.method = tuple(names), tuple(results), method
        self.fixed = dict(fixed or {})

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Tensors in the order of ``names`` → a tensor, or a tuple of them."""
        call = self.model if self.method == "forward" else getattr(self.model, self.method)
        if not self.names:
            return call(*tensors)
        named: dict[str, Any] = dict(self.fixed)
        for name, tensor in zip(self.names, tensors, strict=True):
            outer, _, inner = name.partition(".")
            if inner:
                named[outer] = {**named.get(outer, {}), inner: tensor}
            else:
                named[name] = tensor
        made = call(**named)
        found = tuple(getattr(made, name) for name in self.results)
        return made if not found else found[0] if len(found) == 1 else found


def images(batch: int, side: int, high: int | None = None) -> tuple[Input, ...]:
    """RGB images, square unless ``high`` says their height."""
    return (Input("images", (batch, 3, high or side, side)),)


def tokens(batch: int, length: int, below: int) -> Input:
    """Tokens of texts."""
    return Input("input_ids", (batch, length), below)


def vision(
    name: str,
    library: Library,
    model: str,
    parameters_m: float,
    batch: int,
    side: int,
    tiny: Mapping[str, Any] | None = None,
    *,
    tiny_side: int = 64,
    method: str = "forward",
) -> Entry:
    """An entry of timm or torchvision: their model of that name on images. ``tiny`` are arguments
    of the small one."""

    def build(options: Mapping[str, Any]) -> nn.Module:
        if library == "timm":
            made = importlib.import_module("timm").create_model(model, **options)
        else:
            made = getattr(importlib.import_module("torchvision.models"), model)(
                weights=None, **options
            )
        return made if method == "forward" else Called(made, method=method)

    return Entry(
        name,
        library,
        torch.float16,
        parameters_m,
        Size(partial(build, {}), images(batch, side)),
        Size(partial(build, tiny or {}), images(2, tiny_side)),
    )


def configured(
    library: Library,
    model: str,
    config: str,
    options: Mapping[str, Any],
    inputs: tuple[Input, ...],
    results: Sequence[str] = (),
    *,
    part: str = "",
    **fixed: Any,
) -> Size:
    """A size of a model of transformers or diffusers. ``config`` is the class of its configuration,
    "" if the model takes the options itself; ``part`` is the submodule that is called."""

    def build() -> nn.Module:
        package = importlib.import_module(library)
        kind = getattr(package, model)
        made = kind(getattr(package, config)(**options)) if config else kind(**options)
        for name in filter(None, part.split(".")):
            made = getattr(made, name)
        return Called(made, [each.name for each in inputs], results, fixed)

    return Size(build, inputs)
