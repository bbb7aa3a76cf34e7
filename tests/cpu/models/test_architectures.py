"""Models of many architectures, trained on a CPU: each parameter's gradient against float64.

Through torch.compile, contiguous and channels last, in float32 and under autocast to bfloat16; and
with their layers replaced by ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from cudnngraph import settings
from cudnngraph.nn import replace
from tests import numerics
from tests.architectures import ARCHITECTURES, Architecture

pytestmark = pytest.mark.usefixtures("forgotten")

#: A gradient sums what all layers above have rounded: of a small one, most of which cancels, the
#: error is as large as that of the others. So it may be off by this part of what all gradients
#: together may.
SHARE = 0.5

#: Inputs that torch's own errors are taken of: those of a few channels are a few random numbers,
#: one draw of which says little of another.
DRAWS = 4


def laid(x: torch.Tensor, last: bool) -> torch.Tensor:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return x.to(memory_format=form) if last and form is not None else x


def built(architecture: Architecture, last: bool) -> nn.Module:
    model = architecture.built()
    for parameter in model.parameters():
        parameter.data = laid(parameter.data, last)
    return model


def inputs(architecture: Architecture, last: bool, draw: int = 0) -> list[torch.Tensor]:
    return [laid(x, last) for x in architecture.inputs(1 + draw)]


Step = tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def trained(
    model: nn.Module,
    call: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    bf16: bool = False,
    change: Callable[[nn.Module], object] = id,
) -> Step:
    """One step of training of a model that is changed first.

    Returns its result, the gradients of its parameters as they were before the change, and its
    buffers after the step.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    change(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        y = call(*inputs)
    scale = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (y * scale.to(y.dtype)).sum().backward()
    gradients = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.dtype == parameter.dtype
        gradients[name] = parameter.grad
    return y.detach(), gradients, {name: each.clone() for name, each in buffers.items()}


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


Errors = tuple[float, dict[str, float], dict[str, float]]


def off(found: Step, exact: Step) -> Errors:
    """The distance of a step from float64: results and buffers as parts of themselves, gradients
    as parts of all of them together."""
    whole = float(torch.cat([gradient.flatten() for gradient in exact[1].values()]).norm())

    def distance(mine: torch.Tensor, ref: torch.Tensor, size: float = 0.0) -> float:
        if not mine.is_floating_point():
            return 0.0 if torch.equal(mine, ref) else float("inf")
        if not size:
            return numerics.relative_error(mine, ref)
        return float((mine.double() - ref).norm()) / size

    return (
        distance(found[0], exact[0]),
        {name: distance(found[1][name], ref, whole) for name, ref in exact[1].items()},
        {name: distance(found[2][name], ref) for name, ref in exact[2].items()},
    )


@cache
def in_float64(name: str, draw: int) -> Step:
    architecture = ARCHITECTURES[name]
    model = built(architecture, last=False).double()
    return trained(model, model, list(map(wide, inputs(architecture, False, draw))))


@cache
def torchs_errors(
    name: str, last: bool, dtype: torch.dtype
) -> tuple[tuple[torch.Size, torch.dtype], list[Errors]]:
    """The shape and dtype of torch's result, and how far torch is from float64 on each draw."""
    architecture, errors = ARCHITECTURES[name], []
    for draw in range(DRAWS):
        model = built(architecture, last)
        own = trained(model, model, inputs(architecture, last, draw), dtype == torch.bfloat16)
        errors.append(off(own, in_float64(name, draw)))
        form = own[0].shape, own[0].dtype
    return form, errors


def compare(name: str, last: bool, dtype: torch.dtype, found: Step) -> None:
    """Everything is as near to float64 as what torch computes."""
    form, errors = torchs_errors(name, last, dtype)
    assert (found[0].shape, found[0].dtype) == form
    mine = off(found, in_float64(name, 0))
    floor = numerics.floor(dtype, dtype, terms=numerics.LONG_REDUCTION_TERMS)

    def near(what: str, error: float, torchs: list[float], least: float) -> None:
        limit = max(numerics.TORCH_FACTOR * max(torchs), least)
        assert error <= limit, f"{what}: off by {error:.2g}, {limit:.2g} is right, torch {torchs}"

    near("the result", mine[0], [each[0] for each in errors], floor)
    for key, error in mine[1].items():
        torchs = [each[1][key] for each in errors]
        near(f"the gradient of {key}", error, torchs, SHARE * floor)
    for key, error in mine[2].items():
        near(f"the buffer {key}", error, [each[2][key] for each in errors], floor)


CASES = [
    (name, layout, dtype)
    for name, architecture in ARCHITECTURES.items()
    for layout in ("contiguous", "channels_last")[: 1 + architecture.has_images]
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("name", "layout", "dtype"), CASES)
def test_a_model_that_torch_compile_trains_has_the_gradients_of_float64(
    name: str, layout: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    architecture, last = ARCHITECTURES[name], layout == "channels_last"
    mine = built(architecture, last)
    with settings.override(check=False), caplog.at_level(logging.WARNING, "cudnngraph"):
        call = torch.compile(mine, backend="cudnngraph")
        found = trained(mine, call, inputs(architecture, last), dtype == "bfloat16")
    said = [r.getMessage() for r in caplog.records if r.name.startswith("cudnngraph")]
    assert said == [], "a graph runs by torch"
    compare(name, last, getattr(torch, dtype), found)


def stepped(model: nn.Module, call: Callable[..., torch.Tensor], data: list[torch.Tensor]) -> Step:
    """The last result, the parameters and the buffers after three steps with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        y = call(*data)
        y.square().mean().backward()
        optimizer.step()
    return y.detach(), dict(model.named_parameters()), dict(model.named_buffers())


@pytest.mark.parametrize("name", ["ResNet-18", "MobileNet", "GPT", "BERT"])
def test_three_steps_with_momentum_leave_the_model_as_near_to_float64(name: str) -> None:
    architecture, steps = ARCHITECTURES[name], []
    for compiles, wider in ((True, False), (False, False), (False, True)):
        model = built(architecture, last=False)
        model, data = (model.double(), wide) if wider else (model, torch.Tensor.clone)
        given = list(map(data, inputs(architecture, False)))
        call = torch.compile(model, backend="cudnngraph") if compiles else model
        with settings.override(check=False):
            steps.append(stepped(model, call, given))
    found, own, exact = steps
    mine, torchs = off(found, exact), off(own, exact)
    floor = numerics.floor(torch.float32, torch.float32, terms=numerics.LONG_REDUCTION_TERMS)
    for ours, yardsticks in zip(mine[1:], torchs[1:], strict=True):
        for key, error in ours.items():
            limit = max(numerics.TORCH_FACTOR * yardsticks[key], floor)
            assert error <= limit, f"{key}: off by {error:.2g}, {limit:.2g} is right"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_whose_layers_are_replaced_has_the_gradients_of_float64(name: str) -> None:
    architecture = ARCHITECTURES[name]
    mine, given = (
        built(architecture, architecture.has_images),
        inputs(architecture, architecture.has_images),
    )
    layers = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
    convolves = any(isinstance(each, layers) for each in mine.modules())

    def change(model: nn.Module) -> None:
        report = replace(model)
        assert report.swapped or not convolves, f"nothing is replaced:\n{report}"

    found = trained(mine, mine, given, change=change)
    compare(name, architecture.has_images, torch.float32, found)


def test_there_are_at_least_sixteen_architectures() -> None:
    assert len(ARCHITECTURES) >= 16
