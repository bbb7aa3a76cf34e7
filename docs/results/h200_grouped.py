"""Measure grouped convolutions as they are and as dense ones of several groups each, and write the
results page.

    python docs/results/h200_grouped.py --out docs/results/h200-grouped.md

3x3 with bias and ReLU, float16, channels_last. The weight of a dense convolution holds zeros beside
those of its groups, once and for all. Microseconds of a call in CUDA graphs, in turns. ``--train``
measures steps in place of that: forward and backward of a convolution, in bfloat16, whose dense
weight is made anew in each.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from h200_masks import measured_rows, page
from torch import nn

import cudnngraph as cg
from cudnngraph.bench.measure import captured, times_us
from cudnngraph.device import rules
from cudnngraph.models import dynamo
from cudnngraph.models.rules.conv_forms import dense_weight
from cudnngraph.settings import override

F16 = torch.float16
LAST = torch.channels_last
MOST_WIDTH = 640  # channels of a dense convolution
Case = tuple[str, int, int, int, int, int]  # model, images, channels, side, groups, stride
MORE: dict[str, int] = {"ResNeSt-50": 2}  # results for each channel
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
    ("ResNeSt-50", 32, 64, 56, 2, 1),
    ("ResNeSt-50", 32, 128, 56, 2, 1),
    ("ResNeSt-50", 32, 128, 28, 2, 1),
    ("ResNeSt-50", 32, 256, 14, 2, 1),
    ("ResNeSt-50", 32, 512, 7, 2, 1),
)


def widths(channels: int, groups: int) -> list[int]:
    """Channels of a dense convolution: some groups together."""
    each = channels // groups
    found = [each * n for n in range(2, groups + 1) if groups % n == 0]
    fit = [width for width in found if 48 <= width <= MOST_WIDTH]
    return fit[:2] + fit[-2:] if len(fit) > 4 else fit


def dense(weight: torch.Tensor, width: int, channels: int) -> torch.Tensor:
    """(K, C / groups, R, S) -> (K, width, R, S), zeros beside each group."""
    groups = channels // weight.shape[1]
    whole = dense_weight(weight, groups, groups * width // channels)
    return whole.to(memory_format=LAST)


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
        rows = slice(*(at * w.shape[0] // channels for at in (first, first + width)))
        taken = [
            g.slice(x, 1, first, first + width),
            *(g.slice(each, 0, rows.start, rows.stop) for each in (w, b)),
        ]
        parts.append(g.relu(g.bias(g.conv(taken[0], taken[1], stride=stride, padding=1), taken[2])))
    g.output("y", parts[0] if len(parts) == 1 else g.concat(parts, 1))
    return g


def name_of(case: Case) -> str:
    """A case as the table has it."""
    model, n, c, side, groups, stride = case
    results = f" → {c * MORE[model]}" if model in MORE else ""
    return f"{model} {n} x {c}{results} x {side}² / {stride}, {groups} groups"


def step_row(case: Case) -> list[str]:
    """One line of the table of steps."""
    model, n, c, side, groups, stride = case
    torch.manual_seed(0)
    k = c * MORE.get(model, 1)
    x = torch.randn(n, c, side, side, device="cuda", dtype=torch.bfloat16).to(memory_format=LAST)
    conv = nn.Conv2d(c, k, 3, stride, 1, groups=groups, bias=False, device="cuda")
    conv = conv.to(torch.bfloat16).to(memory_format=LAST)
    by = torch.randn_like(conv(x))
    leaves = [x.requires_grad_(), conv.weight]
    wide = copy.deepcopy(conv).double()
    wide_x = x.detach().double().requires_grad_()
    exact = torch.autograd.grad(wide(wide_x), [wide_x, wide.weight], by.double())
    calls, errors = [], []
    torch.backends.cudnn.benchmark = True
    for limit in (None, 0, 512, 1536):
        narrow = () if limit == 0 else rules.rules().narrow_groups
        torch._dynamo.reset()
        run: Callable[..., torch.Tensor] = conv
        if limit is not None:
            run = torch.compile(conv, backend=dynamo.backend)

        def call(run: Callable[..., torch.Tensor] = run) -> object:
            return torch.autograd.grad(run(x), leaves, by)

        limits = {"grouped_as_dense_max_channels": limit, "narrow_groups": narrow}
        rule = {} if limit is None else limits
        with (
            tempfile.TemporaryDirectory() as folder,
            override(cache_dir=Path(folder)),
            rules.changed(**rule),
        ):
            cg.cache_clear()
            call()
            calls.append(captured(call))
        found = calls[-1]()
        pairs = zip(found, exact, strict=True)
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))
    eager, *ours = times_us(calls, "gpu", torch.device("cuda", 0))
    cells = [f"{us:.1f}" for us in (*ours, eager)]
    return [name_of(case), *cells, f"{max(errors[1:]):.1e}", f"{errors[0]:.1e}"]


def row(case: Case) -> list[str]:
    """One line of the table."""
    model, n, c, side, groups, stride = case
    torch.manual_seed(0)
    x = torch.randn(n, c, side, side, device="cuda").to(F16).to(memory_format=LAST)
    k = c * MORE.get(model, 1)
    w = torch.randn(k, c // groups, 3, 3, device="cuda").to(F16).to(memory_format=LAST)
    w /= math.sqrt(9 * c // groups)
    b = torch.randn(k, device="cuda").to(F16)
    exact = F.conv2d(x.double(), w.double(), b.double(), stride, 1, 1, groups).relu()
    labels, calls, errors = [], [], []
    ways: list[tuple[str, int | None, str]] = [("heuristic", None, "heuristic")]
    ways += [("autotuned", None, "autotune")]
    ways += [(f"dense, {width}", width, "heuristic") for width in widths(c, groups)]
    for label, width, tune in ways:
        tensors = {"x": x, "w": w if width is None else dense(w, width, c), "b": b}
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
        name_of(case),
        *(cells[:2]),
        "; ".join(cells[2:]),
        f"{theirs:.1f}",
        f"{flops / 1e9:.1f}",
        f"{max(errors):.1e}",
    ]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases of models whose name has this text")
    parser.add_argument("--train", action="store_true")
    args, rest = parser.parse_known_args()
    cases = [case for case in CASES if args.only in case[0]]
    if args.train:
        text = (
            "Microseconds of the forward and the backward of a convolution, bfloat16, "
            "channels_last, in a CUDA graph, plans by heuristics: as it is, and as dense ones of "
            "at most so many channels, or of wider groups, whose weights are made anew. The errors "
            "are those of the "
            "worse gradient, relative to float64."
        )
        head = ("convolution", "as it is", "dense, 512", "dense, 1536", "eager", "error", "eager's")
        title = "Steps of grouped convolutions, and of dense ones in their place"
        rows, command = measured_rows(cases, step_row), "h200_grouped.py --train"
        page("grouped-steps", title, text, head, rows, rest, command)
        return
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
        measured_rows(cases, row),
        rest,
    )


if __name__ == "__main__":
    main()
