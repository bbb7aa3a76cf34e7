"""Measure attention by masks whose rows start at odd elements, and write the results page.

    python docs/results/h200_masks.py --out docs/results/h200-masks.md

float16, autotuned, with empty caches; all contenders of a row are called in turn.
"""

from __future__ import annotations

import argparse
import datetime
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.device import timing
from cudnngraph.device.rules import changed
from cudnngraph.ir.spec import aligned_rows
from cudnngraph.settings import override

F16 = torch.float16
Shape = tuple[int, ...]
CASES: tuple[tuple[Shape, Shape, torch.dtype], ...] = (  # of q; of the mask
    ((16, 16, 577, 64), (1, 16, 577, 577), F16),
    ((16, 16, 577, 64), (16, 1, 577, 577), F16),
    ((16, 16, 577, 64), (577, 577), torch.bool),
    ((16, 16, 577, 64), (16, 1, 577, 577), torch.bool),
    ((16, 16, 576, 64), (16, 1, 576, 576), torch.bool),
    ((32, 12, 197, 64), (1, 12, 197, 197), F16),
    ((32, 12, 197, 64), (32, 1, 197, 197), F16),
    ((8, 12, 197, 64), (1, 12, 197, 197), F16),
    ((5, 12, 197, 64), (1, 12, 197, 197), F16),
    ((2048, 3, 49, 32), (1, 3, 49, 49), F16),
    ((32, 24, 49, 32), (1, 24, 49, 49), F16),
)


def compiled(shape: Shape, mask: torch.Tensor, *, copied: bool) -> cg.Executable:
    """Attention by a mask that lies so, with or without the copy in front."""
    g = cg.Graph("attention")
    q, k, v = (g.input(name, shape, F16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, g.input("mask", like=mask)))
    limits = {} if copied else {"mask_copy_min_scores": 1 << 62}
    cg.cache_clear()
    with (
        tempfile.TemporaryDirectory() as folder,
        override(cache_dir=Path(folder)),
        changed(**limits),
    ):
        return g.compile(policy=cg.Policy(tune="autotune", verify="inprocess"))


def row(shape: Shape, of_mask: Shape, dtype: torch.dtype) -> list[str]:
    """One line of the table."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", dtype=F16) for _ in range(3))
    if dtype == torch.bool:
        mask = torch.rand(of_mask, device="cuda") < 0.9
    else:
        mask = torch.randn(of_mask, device="cuda", dtype=dtype)
    apart = torch.empty_strided(of_mask, aligned_rows(of_mask), device="cuda", dtype=dtype)
    apart.copy_(mask)
    ways: dict[str, tuple[torch.Tensor, bool]] = {"as it lies": (mask, False), "": (mask, True)}
    if dtype != torch.bool:
        ways["given aligned"] = apart, False
    exact = F.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), mask.double() if dtype != torch.bool else mask
    )
    calls: list[Callable[[], object]] = []
    steps, errors = [], []
    for given, copied in ways.values():
        exe = compiled(shape, given, copied=copied)
        steps.append(len(exe.steps))
        o = torch.empty_like(q)
        calls.append(exe.bind(q=q, k=k, v=v, mask=given, o=o))
        calls[-1]()
        errors.append(float((o - exact).abs().max() / exact.abs().max()))
    calls.append(lambda: F.scaled_dot_product_attention(q, k, v, mask))
    times = timing.interleave([sampler(call) for call in calls], rounds=15, drop_over=math.inf)
    given_aligned = f"{times[2]:.1f}" if dtype != torch.bool else "-"
    named = "x".join(map(str, of_mask)) + (" bool" if dtype == torch.bool else "")
    return [
        "x".join(map(str, shape)),
        named,
        f"{times[0]:.1f}",
        f"{times[1]:.1f}",
        str(steps[1] - steps[0]),
        given_aligned,
        f"{times[-1]:.1f}",
        f"{times[0] / times[1]:.2f}",
        f"{max(errors):.1e}",
    ]


def sampler(call: Callable[[], object]) -> timing.Sample:
    """Microseconds of one call, of as many one after the other as take long on the GPU."""

    def once() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(100):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 10

    return once


def main() -> None:
    """See the module's docstring."""
    head = (
        "q, k, v",
        "mask",
        "as it lies",
        "by the engine",
        "copies",
        "given aligned",
        "torch",
        "as it lies / by the engine",
        "largest error",
    )
    text = (
        "Microseconds of a call in float16, autotuned, medians. The engine copies a mask to rows "
        "that start at multiples of 16 bytes where that pays; given aligned: by the caller, so "
        "that there is nothing to copy. The error is relative to the largest result, to float64."
    )
    page(
        "masks",
        "Masks of attention whose rows start at odd elements",
        text,
        head,
        (row(*case) for case in CASES),
    )


def page(
    name: str,
    title: str,
    text: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    arguments: Sequence[str] | None = None,
    command: str = "",
) -> None:
    """Print the rows of a table as they come, and write the page of the script h200_NAME.py, or of
    ``command``, to ``--out``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    lines = [
        f"# {title}",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}; {datetime.date.today()}.",
        "",
        "```",
        f"python docs/results/{command or f'h200_{name}.py'} --out docs/results/h200-{name}.md",
        "```",
        "",
        text,
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
    if args.out:
        write(lines, args.out)


def measured_rows(
    cases: Iterable[Any], line: Callable[[Any], Sequence[str]]
) -> Iterator[Sequence[str]]:
    """The row of each case, or what went wrong in it: the others are worth having."""
    for case in cases:
        try:
            yield line(case)
        except Exception as error:
            yield str(case), f"{type(error).__name__}: {str(error)[:200]}"


def write(lines: Sequence[str], path: Path) -> None:
    """Write a page; what a person wrote under "Notes" stays."""
    _, mark, notes = (path.read_text() if path.exists() else "").partition("\n## Notes\n")
    path.write_text("\n".join(lines) + "\n" + mark + notes)


if __name__ == "__main__":
    main()
