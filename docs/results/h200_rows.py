"""Measure norms of short rows and averages of images, by products and convolutions, and write the
results page.

    python docs/results/h200_rows.py --out docs/results/h200-rows.md

float16, autotuned, with empty caches; all contenders of a row are called in turn.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from h200_masks import page, sampler

import cudnngraph as cg
from cudnngraph.device import timing
from cudnngraph.device.rules import changed
from cudnngraph.settings import override

F16 = torch.float16
WIDTHS = ((786432, 16), (393216, 32), (196608, 64), (98304, 128), (49152, 256), (24576, 512))
ROWS = (*WIDTHS, (4096, 64), (1024, 128), (64, 256))
HEADS = ((2048, 3, 64, 32), (32, 24, 64, 32), (16, 16, 1024, 64), (8, 32, 2048, 128))  # B H L D
IMAGES = ((32, 64, 112, 3, 2, 1), (32, 64, 56, 3, 2, 1), (8, 256, 32, 2, 2, 0))  # N C H K S P
Tensors = dict[str, torch.Tensor]
Case = tuple[str, cg.Graph, Tensors, Callable[[], torch.Tensor], torch.Tensor]


def normed(shape: tuple[int, ...]) -> Case:
    """An RMS norm of dense rows."""
    x, w = torch.randn(shape, device="cuda", dtype=F16), torch.rand(shape[-1], device="cuda")
    t = {"x": x, "w": w.to(F16)}
    g = cg.Graph("rms_norm")
    g.output("y", g.rms_norm(*(g.input(name, like=each) for name, each in t.items()), eps=1e-6))
    exact = F.rms_norm(x.double(), shape[-1:], t["w"].double(), 1e-6)
    run = lambda: F.rms_norm(x, shape[-1:], t["w"], 1e-6)  # noqa: E731
    return f"rms_norm {'x'.join(map(str, shape))}", g, t, run, exact


def normalized(batch: int, heads: int, length: int, width: int) -> Case:
    """Queries by their norms and a number for each head, as they lie in what a projection makes."""
    made = torch.randn(batch, length, 3, heads, width, device="cuda", dtype=F16)
    x = made[:, :, 0].transpose(1, 2)
    f = torch.rand(1, heads, 1, 1, device="cuda").to(F16).expand(1, heads, 1, width).contiguous()
    t = {"x": x, "f": f}
    g = cg.Graph("normalize")
    given = [g.input(name, like=each) for name, each in t.items()]
    g.output("y", g.mul(g.normalize(given[0]), given[1]))
    exact = F.normalize(x.double(), dim=-1) * f
    run = lambda: F.normalize(x, dim=-1) * f  # noqa: E731
    return f"normalize, scale {batch}x{heads}x{length}x{width}", g, t, run, exact


def averaged(n: int, c: int, h: int, k: int, s: int, p: int) -> Case:
    """Average pooling, by the convolution that `cg.fuse` makes of it."""
    x = torch.randn(n, c, h, h, device="cuda").to(F16).to(memory_format=torch.channels_last)
    w = torch.full((c, 1, k, k), 1 / (k * k), device="cuda", dtype=F16)
    t = {"x": x, "w": w.to(memory_format=torch.channels_last)}
    g = cg.Graph("average")
    given = [g.input(name, like=each) for name, each in t.items()]
    g.output("y", g.conv(*given, stride=s, padding=p, groups=c))
    run = lambda: F.avg_pool2d(x, k, s, p)  # noqa: E731
    return f"avg_pool {n}x{c}x{h}² {k}x{k} / {s}", g, t, run, F.avg_pool2d(x.double(), k, s, p)


def bound(g: cg.Graph, t: Tensors, y: torch.Tensor, longest: int) -> tuple[Any, str]:
    """A call of the graph into y, where products sum up rows of ``longest`` at most; its steps."""
    limits = {"rms_norm_by_matmul_max_row": longest, "rms_norm_by_matmul_faster_row": longest}
    cg.cache_clear()
    with (
        tempfile.TemporaryDirectory() as folder,
        override(cache_dir=Path(folder)),
        changed(**limits),
    ):
        exe = g.compile(policy=cg.Policy(tune="autotune", verify="inprocess"))
    steps = " + ".join("torch" if s.choice is None else f"eng{s.choice.engine}" for s in exe.steps)
    return exe.bind(**t, y=y), steps


def line(case: Case) -> list[str]:
    """One line of the table."""
    name, g, t, run, exact = case
    y = torch.empty_strided(exact.shape, g.spec().tensors["y"].stride, device="cuda", dtype=F16)
    ours, steps = bound(g, t, y, 256)
    ours()

    def error(made: torch.Tensor) -> str:
        return f"{float((made - exact).norm() / exact.norm()):.1e}"

    errors = [error(y), error(run())]
    calls: list[Callable[[], object]] = [ours, run]
    other = "-"
    if name.startswith("rms_norm"):
        norm, other = bound(g, t, torch.empty_like(y), 0)
        calls.append(norm)
    times = timing.interleave([sampler(call) for call in calls], rounds=15, drop_over=math.inf)
    last = f"{times[2]:.1f}" if len(times) > 2 else "-"
    ratio = f"{times[1] / times[0]:.2f}"
    return [name, f"{times[0]:.1f}", steps, last, other, f"{times[1]:.1f}", ratio, *errors]


def cases() -> Iterator[Case]:
    """All of them, one at a time."""
    torch.manual_seed(0)
    yield from (normed(shape) for shape in ROWS)
    yield from (normalized(*shape) for shape in HEADS)
    yield from (averaged(*shape) for shape in IMAGES)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    head = (
        *("case", "product, or convolution", "by", "cuDNN's norm", "by", "torch"),
        *("torch / the first", "error of the first", "error, torch"),
    )
    text = (
        "Microseconds of a call in float16, autotuned, medians, and by which engine of cuDNN, or "
        "torch where no plan builds. Norms by a product of the rows' squares with ones, beside "
        "which stands cuDNN's own RMS norm; averages by a convolution of each channel. A call "
        "takes the host about 9 us. Errors are relative to float64."
    )
    title = "Norms of short rows, averages of images"
    page("rows", title, text, head, map(line, cases()), arguments)


if __name__ == "__main__":
    main()
