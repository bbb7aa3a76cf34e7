"""Measure residual blocks of group norms and convolutions by ``cudnngraph.fuse``, with our group
norms and with torch's, and write the results page.

    python docs/results/h200_residual.py --out docs/results/h200-residual.md

float16, plans by heuristics, with empty caches; all contenders of a row are called in turn.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from h200_groups import captured
from h200_masks import measured_rows, page, sampler

import cudnngraph as cg
from cudnngraph.bench.models import Residual
from cudnngraph.device import timing
from cudnngraph.device.rules import changed, rules
from cudnngraph.models.fused import Fused
from cudnngraph.settings import override

SHAPES = (  # N, C, H and W
    *((2, 1280, 8), (1, 1280, 16), (2, 1280, 16), (1, 640, 32), (2, 640, 32), (1, 320, 64)),
    *((2, 320, 64), (1, 512, 64), (8, 320, 64), (1, 512, 128), (1, 256, 256)),
)
LAYOUTS = ("channels_last", "contiguous")


def fused(block: Residual, x: torch.Tensor, layout: str, fewest: float) -> Fused:
    """The block, with our group norms of images of at least ``fewest`` elements."""
    limits = {f"group_norm_min_elements_{each}": fewest for each in LAYOUTS}
    cg.cache_clear()
    with (
        tempfile.TemporaryDirectory() as folder,
        override(cache_dir=Path(folder)),
        changed(**limits),
    ):
        made = cg.fuse(block, (x,), channels_last=layout == "channels_last")
        made(x)
    return made


def line(shape: tuple[int, int, int], layout: str) -> list[str]:
    """One line of the table."""
    n, c, size = shape
    torch.manual_seed(0)
    kind = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}[layout]
    block = Residual(c, c).eval().cuda().half().to(memory_format=kind)
    x = torch.randn(n, c, size, size, device="cuda").half().contiguous(memory_format=kind)
    calls, steps = [], []
    with torch.no_grad():
        for fewest in (0, math.inf):
            made = fused(block, x, layout, fewest)
            calls.append(captured(lambda made=made: made(x)))  # type: ignore[misc]
            steps.append(str(len([row for row in made.report.rows() if row[0] != "view"])))
        calls.append(captured(lambda: block(x)))
    times = timing.interleave([sampler(call) for call in calls], rounds=11, drop_over=math.inf)
    ours = x.numel() >= getattr(rules(), f"group_norm_min_elements_{layout}")
    return [
        "x".join(map(str, (n, c, size, size))),
        layout,
        *(f"{time:.1f}" for time in times),
        f"{times[1] / times[0]:.2f}",
        " and ".join(steps),
        "ours" if ours else "torch's",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    head = ("images", "layout", "ours", "torch's", "eager", "torch's / ours", "steps", "taken")
    text = (
        "Microseconds in a CUDA graph, medians, of twice a group norm of 32 groups, SiLU and a "
        "3 x 3 convolution, and what came in added, in float16, by `fuse` with plans by heuristics "
        "and our group norms or torch's, and of torch itself. Then how many steps each has that "
        "run something, and whose group norms `fuse` takes by itself."
    )
    rows = measured_rows(product(SHAPES, LAYOUTS), lambda case: line(*case))
    page("residual", "Residual blocks of group norms", text, head, rows, arguments)


if __name__ == "__main__":
    main()
