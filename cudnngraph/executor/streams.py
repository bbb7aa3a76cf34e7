"""Steps side by side in a CUDA graph.

A plan whose result is not read at once can run beside the steps that follow: the gradients of an
image and of a weight, the two branches of a residual block. A kernel seldom fills the GPU up to its
end, and what comes beside it fills the rest. On streams this costs the host more than it gains; in
a CUDA graph it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..backend import handles
from ..ops.table import OPS
from ..partition.memory import StepMemory

MAX_SIDE_STREAMS = 3  # how many steps may run beside the others at a time


def overlappable(steps: Sequence[StepMemory]) -> dict[int, int]:
    """The steps that may run beside later ones, by number: the last of those.

    Plans with an anchor alone: what is pointwise fills the memory's bandwidth.
    """
    found: dict[int, int] = {}
    for number, step in enumerate(steps):
        if not step.planned or all(OPS[node.op].pointwise for node in step.spec.nodes):
            continue
        if sum(last >= number for last in found.values()) >= MAX_SIDE_STREAMS:
            continue
        made = set(step.spec.outputs)
        last = number
        while last + 1 < len(steps) and made.isdisjoint(steps[last + 1].spec.inputs):
            last += 1
        if any(other.planned for other in steps[number + 1 : last + 1]):
            found[number] = last
    return found


def streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Streams for the steps that run beside others; made before a capture begins."""
    return [torch.cuda.Stream(device) for _ in range(MAX_SIDE_STREAMS)]  # type: ignore[no-untyped-call]


def run(
    calls: Mapping[int, Callable[[Any], None]],
    until: Mapping[int, int],
    sides: Sequence[torch.cuda.Stream],
    index: int,
    prepare: Callable[[int], None] | None = None,
) -> None:
    """Call steps, by number and in order, with this thread's handle, which is on the stream that
    they are to run on: the current one, or for those in ``until`` a side stream, which the current
    one waits for behind the step that ``until`` says. To be called during a capture.

    ``prepare(number)`` comes before each, on the current stream, which has waited by then.
    """
    main = torch.cuda.current_stream(index)
    free, away = list(sides), dict[int, torch.cuda.Stream]()

    def join(before: int) -> None:
        for number in [number for number in away if until[number] < before]:
            main.wait_stream(away[number])
            free.append(away.pop(number))

    for number, call in calls.items():
        join(number)
        if prepare is not None:
            prepare(number)
        if number not in until:
            call(handles.handle_on_current_stream(index))
            continue
        side = away[number] = free.pop()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            call(handles.handle_on_current_stream(index))
    join(1 + max(until.values(), default=0))
    handles.handle_on_current_stream(index)
