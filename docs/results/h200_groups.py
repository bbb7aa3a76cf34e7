"""Measure group norms with SiLU behind them, of images in both layouts, and write the results page.

    python docs/results/h200_groups.py --out docs/results/h200-groups.md

float16, autotuned, with empty caches; all contenders of a row are called in turn, in CUDA graphs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from h200_masks import measured_rows, page, sampler

import cudnngraph as cg
from cudnngraph.device import timing
from cudnngraph.settings import override

F16, LAST = torch.float16, torch.channels_last
GROUPS = 32
SHAPES = (  # N, C, H and W
    *((8, 320, 64), (2, 320, 64), (2, 640, 32), (2, 1280, 16), (2, 1280, 8)),
    *((1, 512, 64), (1, 512, 128), (1, 256, 256), (1, 128, 512)),
)


def declared(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, way: str) -> cg.Graph:
    """As ``Graph.group_norm`` is for this layout; "affine": by each channel's factor and shift,
    whatever the layout, as :func:`cudnngraph.fuse` does."""
    g = cg.Graph("group_norm")
    given = {name: g.input(name, like=each) for name, each in (("x", x), ("w", w), ("b", b))}
    if way == "affine":
        shift, factor = g.group_affine(given["x"], GROUPS, given["w"])
        y = g.bias(g.scale(g.bias(given["x"], shift), factor), given["b"])
    else:
        y = g.group_norm(given["x"], GROUPS, given["w"], given["b"])
    g.output("y", g.silu(y))
    return g


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call in a CUDA graph, which keeps what the call holds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept, call

    return replay


def line(shape: tuple[int, int, int]) -> list[str]:
    """One line of the table."""
    n, c, size = shape
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = (torch.randn(n, c, size, size, device="cuda") * 2 + 1).to(F16)
    w, b = (torch.randn(c, device="cuda").to(F16) for _ in range(2))
    exact = F.silu(F.group_norm(x.double(), GROUPS, w.double(), b.double()))
    norm: Any = torch.compile(lambda x: F.silu(F.group_norm(x, GROUPS, w, b)), dynamic=False)
    calls: dict[str, Callable[[], object]] = {}
    steps, errors = [], []
    for layout, ways in (("last", ("affine",)), ("contiguous", ("", "affine"))):
        images = x.contiguous(memory_format=LAST) if layout == "last" else x
        for way in ways:
            cg.cache_clear()
            added = b.repeat(n).view(n, c, 1, 1) if way else b
            with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder)):
                graph = declared(images, w, added, way)
                exe = graph.compile(policy=cg.Policy(tune="autotune"))
            y = torch.empty_like(images)
            call = exe.bind(x=images, w=w, b=added, y=y)
            call()
            errors.append(float((y - exact).norm() / exact.norm()))
            steps.append(
                " + ".join(str(step.choice or step.spec.nodes[-1].op) for step in exe.steps)
            )
            calls[f"ours {layout} {way}"] = captured(call)
        eager = lambda images=images: F.silu(F.group_norm(images, GROUPS, w, b))  # noqa: E731
        calls[f"eager {layout}"] = captured(eager)
        calls[f"compile {layout}"] = captured(lambda images=images: norm(images))  # type: ignore[misc]
    times = timing.interleave(
        [sampler(call) for call in calls.values()], rounds=11, drop_over=math.inf
    )
    copy = x.numel() * 4 / 4.2e6  # read and written once, at 4.2 TB/s, in us
    return [
        "x".join(map(str, (n, c, size, size))),
        *(f"{time:.1f}" for time in times),
        f"{copy:.1f}",
        "; ".join(steps),
        " ".join(f"{error:.1e}" for error in errors),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    head = (
        *("images", "ours, channels last", "eager", "torch.compile"),
        *("ours, contiguous", "by its affine", "eager", "torch.compile"),
        *("one pass", "steps of ours", "errors"),
    )
    text = (
        f"Microseconds of a group norm of {GROUPS} groups with weights, and SiLU, in float16, in a "
        "CUDA graph, medians; of channels_last images, then of contiguous ones. One pass: what "
        "reading and writing the images once takes at 4.2 TB/s. Errors are relative to float64."
    )
    page("groups", "Group norms", text, head, measured_rows(SHAPES, line), arguments)


if __name__ == "__main__":
    main()
