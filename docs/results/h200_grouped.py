"""Measure grouped convolutions as they are and as dense ones of several groups each, and write the
results page.

    python docs/results/h200_grouped.py --out docs/results/h200-grouped.md

3x3 with bias and ReLU, float16, channels_last. The weight of a dense convolution holds zeros beside
those of its groups, once and for all. Microseconds of a call in CUDA graphs, in turns.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from h200_masks import measured_rows, page

import cudnngraph as cg
from cudnngraph.bench.measure import times_us
from cudnngraph.settings import override

F16 = torch.float16
LAST = torch.channels_last
MOST_WIDTH = 640  # channels of a dense convolution
Case = tuple[str, int, int, int, int, int]  # model, images, channels, side, groups, stride
CASES: tuple[Case, ...] = (
    ("ResNeXt-50", 32, 128, 56, 32, 1),
    ("ResNeXt-50", 32, 256, 28, 32, 1),
    ("ResNeXt-50", 32, 512, 14, 32, 1),
    ("ResNeXt-50", 32, 1024, 7, 32, 1),
    ("ResNeXt-50", 1, 512, 14, 32, 1),
    ("RegNetY-3.2GF", 32, 72, 56, 3, 1),
    ("RegNetY-3.2GF", 32, 216, 56, 9, 2),
    ("RegNetY-3.2GF", 32, 216, 28, 9, 1),
    ("RegNetY-3.2GF", 32, 576, 14, 24, 1),
    ("RegNetY-3.2GF", 32, 1512, 7, 63, 1),
    ("RegNetX-400MF", 32, 160, 14, 10, 1),
    ("RegNetY-16GF", 32, 448, 28, 4, 1),
    ("NFNet-F0", 32, 256, 24, 2, 1),
    ("NFNet-F0", 32, 768, 12, 6, 1),
)


def widths(channels: int, groups: int) -> list[int]:
    """Channels of a dense convolution: some groups together."""
    each = channels // groups
    found = [each * n for n in range(2, groups + 1) if groups % n == 0]
    fit = [width for width in found if 48 <= width <= MOST_WIDTH]
    return fit[:2] + fit[-2:] if len(fit) > 4 else fit


def dense(weight: torch.Tensor, width: int) -> torch.Tensor:
    """(K, C / groups, R, S) -> (K, width, R, S), zeros beside each group."""
    count, each = weight.shape[:2]
    wide = weight.new_zeros(count, width, *weight.shape[2:])
    for channel in range(count):
        first = channel // each * each % width
        wide[channel, first : first + each] = weight[channel]
    return wide.to(memory_format=LAST)


def graph(tensors: dict[str, torch.Tensor], stride: int, width: int | None) -> cg.Graph:
    """The convolution, by slices of ``width`` channels if that is given."""
    g = cg.Graph("grouped")
    x, w, b = (g.input(name, like=each) for name, each in tensors.items())
    channels = x.shape[1]
    if width is None:
        y = g.conv(x, w, stride=stride, padding=1, groups=channels // w.shape[1])
        g.output("y", g.relu(g.bias(y, b)))
        return g
    parts = []
    for first in range(0, channels, width):
        taken = [g.slice(each, dim, first, first + width) for each, dim in ((x, 1), (w, 0), (b, 0))]
        parts.append(g.relu(g.bias(g.conv(taken[0], taken[1], stride=stride, padding=1), taken[2])))
    g.output("y", parts[0] if len(parts) == 1 else g.concat(parts, 1))
    return g


def row(case: Case) -> list[str]:
    """One line of the table."""
    model, n, c, side, groups, stride = case
    torch.manual_seed(0)
    x = torch.randn(n, c, side, side, device="cuda").to(F16).to(memory_format=LAST)
    w = torch.randn(c, c // groups, 3, 3, device="cuda").to(F16).to(memory_format=LAST)
    w /= math.sqrt(9 * c // groups)
    b = torch.randn(c, device="cuda").to(F16)
    exact = F.conv2d(x.double(), w.double(), b.double(), stride, 1, 1, groups).relu()
    labels, calls, errors = [], [], []
    ways: list[tuple[str, int | None, str]] = [("heuristic", None, "heuristic")]
    ways += [("autotuned", None, "autotune")]
    ways += [(f"dense, {width}", width, "heuristic") for width in widths(c, groups)]
    for label, width, tune in ways:
        tensors = {"x": x, "w": w if width is None else dense(w, width), "b": b}
        y = torch.empty_like(exact, dtype=F16, memory_format=LAST)
        cg.cache_clear()
        try:
            with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder)):
                exe = graph(tensors, stride, width).compile(
                    policy=cg.Policy(tune=tune, verify="inprocess", budget_s=3.0)  # type: ignore[arg-type]
                )
            call: Callable[[], object] = exe.bind(**tensors, y=y)
            call()
            torch.cuda.synchronize()
        except Exception as error:  # a cell with the reason
            labels.append(f"{label}: {str(error).splitlines()[0][:60]}")
            continue
        errors.append(float((y - exact).norm() / exact.norm()))
        labels.append(label)
        calls.append(call)
    torch.backends.cudnn.benchmark = True
    eager = lambda: F.conv2d(x, w, b, stride, 1, 1, groups).relu_()  # noqa: E731
    eager()
    found = times_us([*calls, eager], "gpu", torch.device("cuda", 0))
    *ours, theirs = found
    each = iter(ours)
    cells = [f"{label} {next(each):.1f}" if ":" not in label else label for label in labels]
    flops = 2 * exact.numel() * 9 * c // groups
    return [
        f"{model} {n} x {c} x {side}² / {stride}, {groups} groups",
        *(cells[:2]),
        "; ".join(cells[2:]),
        f"{theirs:.1f}",
        f"{flops / 1e9:.1f}",
        f"{max(errors):.1e}",
    ]


def main() -> None:
    """See the module's docstring."""
    head = ("convolution", "as it is", "as it is", "dense, channels of each", "eager")
    text = (
        "Microseconds of a call, float16, channels_last, 3x3 with bias and ReLU. A dense "
        "convolution of so many channels takes the place of the groups among them; their results "
        "lie side by side in one tensor. The error is relative to float64, the largest of all ways."
    )
    page(
        "grouped",
        "Grouped convolutions, and dense ones in their place",
        text,
        (*head, "GFLOP of the groups", "error"),
        measured_rows(CASES, row),
    )


if __name__ == "__main__":
    main()
