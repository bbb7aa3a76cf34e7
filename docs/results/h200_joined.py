"""Measure generated kernels that join tensors at borders which no vector keeps, by each schedule,
and write the results page.

    python docs/results/h200_joined.py --out docs/results/h200-joined.md

Concatenations at odd places, padding of rows, rolls, blocks of pixels, and columns picked by data:
the elements of a thread go through branches of their own. One lane a thread is what had been
generated for all of them. The ways of a case are timed as in h200_reductions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from h200_reductions import Case, measure, report
from torch import nn

import cudnngraph as cg
from cudnngraph.kernels import patterns
from cudnngraph.kernels.rows import Schedule
from cudnngraph.models import export
from cudnngraph.models.convert import convert
from cudnngraph.rewrite.passes import legalize

BF16, F16 = torch.bfloat16, torch.float16
LANES = (1, 4, 8)
Function = Callable[..., torch.Tensor]


class _Called(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def _case(name: str, function: Function, *shapes: tuple[int, ...], **options: Any) -> Case:
    dtype, last = options.get("dtype", F16), options.get("last", False)
    inputs = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    if last:
        inputs = [each.contiguous(memory_format=torch.channels_last) for each in inputs]
    inputs += options.get("more", [])
    made = export.export(_Called(function), tuple(inputs))
    fused = convert(
        made.module,
        made.constants,
        made.placeholders,
        channels_last=last,
        on_gpu=True,
        kernels=True,
    )
    spec = legalize(fused.spec, cg.Policy())
    eager = lambda *given: [function(*given[: len(inputs)])]  # noqa: E731
    return Case(name, "joined", spec, eager, fused.constants)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """What a convolution of a window of seven reads that moves two pixels: blocks of two by two."""
    x = F.pad(x, (3, 3, 3, 3, 0, 1))
    n, c, rows, columns = x.shape
    x = x.reshape(n, c, rows // 2, 2, columns // 2, 2).permute(0, 3, 5, 1, 2, 4)
    x = x.reshape(n, 4 * c, rows // 2, columns // 2)
    return x.contiguous(memory_format=torch.channels_last)


def cases() -> Iterator[Case]:
    """All of them."""
    for parts in ((33, 31), (60, 4), (21, 21, 22), (3, 253)):
        name = f"channels {' + '.join(map(str, parts))} of 32x56x56"
        shapes = [(32, each, 56, 56) for each in parts]
        yield _case(name, lambda *x: torch.cat(x, 1).relu(), *shapes, last=True)
    yield _case("pixel blocks of 64x3x224x224", _blocks, (64, 3, 224, 224), last=True, dtype=BF16)
    yield _case("one pixel around 32x64x56x56", lambda x: F.pad(x, (1, 1, 1, 1)), (32, 64, 56, 56))
    yield _case("one pixel behind 32x64x56x56", lambda x: F.pad(x, (0, 1, 0, 1)), (32, 64, 56, 56))
    yield _case(
        "reflected 8x64x128x128", lambda x: F.pad(x, (3, 3, 3, 3), "reflect"), (8, 64, 128, 128)
    )
    yield _case("rolled 8x64x64x64", lambda x: x.roll((5, 5), (2, 3)), (8, 64, 64, 64))
    yield _case(
        "halves of 50 turned",
        lambda x: torch.cat([-x[..., 25:], x[..., :25]], -1),
        (8, 12, 512, 50),
    )
    yield _case(
        "two rows of 195 + 197", lambda a, b: torch.cat([a, b], -1) * 0.5, (8192, 195), (8192, 197)
    )
    columns = torch.randperm(1024)
    yield _case("columns of 4096x1024 picked", lambda x, at: x[:, at], (4096, 1024), more=[columns])


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    said = (
        "Microseconds of a call within a CUDA graph, on data in turn that no cache holds, "
        "medians, in turns. `copy` copies as many bytes as the case has to move, each input "
        "and output once; `of a copy` is the share of its speed. With one lane a thread "
        "writes one element at a time."
    )
    schedules = [patterns.choice_of(Schedule(lanes, 256)) for lanes in LANES]
    measured = partial(measure, schedules=schedules)
    report(arguments, cases(), measured, "What is joined at odd places", said, "h200_joined")


if __name__ == "__main__":
    main()
