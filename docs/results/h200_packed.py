"""Measure attention within packed sequences, with and without the promise of finite numbers, and
write the results page.

    python docs/results/h200_packed.py --out docs/results/h200-packed.md

bfloat16, autotuned, with empty caches; all contenders of a row are called in turn.
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
from cudnngraph.rewrite import packed
from cudnngraph.settings import override

BF16 = torch.bfloat16
MIXED = (256, 512, 1024, 2048, 1536, 768, 640, 1408)
# Lengths of the sequences, heads of q, of k and v, their width, causal, with the lse.
CASES: tuple[tuple[tuple[int, ...], int, int, int, bool, bool], ...] = (
    (MIXED, 16, 16, 128, True, False),
    (MIXED, 16, 16, 128, True, True),
    (MIXED, 16, 16, 128, False, False),
    (MIXED, 16, 16, 64, True, False),
    (MIXED, 32, 8, 128, True, False),
    ((4096, 4096), 16, 16, 128, True, False),
    ((16384,), 8, 8, 128, True, False),
    (tuple(30 + 7 * n for n in range(16)) * 4, 12, 12, 64, False, False),
    ((77,) * 64, 12, 12, 64, True, False),
    ((17, 40), 4, 4, 64, True, False),
    (MIXED, 4, 4, 256, True, False),
)


def compiled(
    case: tuple[Any, ...], *, finite: bool = False, flash: bool = True
) -> tuple[cg.Executable, list[str]]:
    """Packed attention; without ``flash`` by cuDNN's engines for what nothing is promised of."""
    lengths, heads, shared, width, causal, lse = case
    g, tokens, longest = cg.Graph("packed"), sum(lengths), max(lengths)
    q = g.input("q", (tokens, heads, width), BF16)
    k, v = (g.input(name, (tokens, shared, width), BF16) for name in "kv")
    ends = g.input("ends", (len(lengths) + 1,), torch.int32)
    options = {"is_causal": causal, "finite_padding": finite, "return_lse": lse}
    made = g.sdpa_varlen(q, k, v, ends, ends, longest, longest, **options)
    for name, value in zip(("o", "lse"), made if lse else (made,), strict=False):
        g.output(name, value)
    before = packed.FLASH_WIDTH
    packed.FLASH_WIDTH = before if flash else 0
    cg.cache_clear()
    try:
        with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder)):
            exe = g.compile(policy=cg.Policy(tune="autotune"))
    finally:
        packed.FLASH_WIDTH = before
    return exe, [str(step.choice or "torch") for step in exe.steps]


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: tuple[Any, ...]) -> Any:
    """In float64."""
    lengths, heads, shared, _, causal, _ = case
    done = []
    for each in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True):
        a, b, c = (part.double().transpose(0, 1)[None] for part in each)
        done.append(
            F.scaled_dot_product_attention(a, b, c, is_causal=causal, enable_gqa=heads != shared)
        )
    return torch.cat([o[0].transpose(0, 1) for o in done])


def line(case: tuple[Any, ...]) -> list[str]:
    """One line of the table."""
    lengths, heads, shared, width, causal, lse = case
    torch.manual_seed(0)
    tokens, longest = sum(lengths), max(lengths)
    q = torch.randn(tokens, heads, width, device="cuda").to(BF16)
    k, v = (torch.randn(tokens, shared, width, device="cuda").to(BF16) for _ in range(2))
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    exact = one_by_one(q, k, v, case)
    calls: list[Callable[[], object]] = []
    steps, errors = [], []
    for finite, flash in ((False, True), (False, False), (True, True)):
        exe, how = compiled(case, finite=finite, flash=flash)
        o = torch.empty_like(q)
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "ends": ends, "o": o}
        given |= {"lse": torch.empty(tokens, heads, device="cuda")} if lse else {}
        calls.append(exe.bind(**given))
        calls[-1]()
        errors.append(float((o - exact).norm() / exact.norm()))
        steps.append(" + ".join(how))
    calls.append(
        lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, longest, longest, 0.0, causal, False
        )
    )
    times = timing.interleave([sampler(call) for call in calls], rounds=11, drop_over=math.inf)
    name = f"{len(lengths)} of {min(lengths)} to {longest}, H {heads}/{shared}, D {width}"
    name += ", causal" * causal + ", lse" * lse
    return [
        name,
        *(f"{time:.1f}" for time in times),
        f"{times[1] / times[0]:.2f}",
        f"{times[3] / times[0]:.2f}",
        steps[0],
        steps[1],
        steps[2],
        " ".join(f"{error:.1e}" for error in errors),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    head = (
        *("sequences", "nothing promised", "by cuDNN", "finite", "torch flash"),
        *("cuDNN / the first", "torch / the first", "by", "by", "by", "errors"),
    )
    text = (
        "Microseconds of a call in bfloat16, autotuned, medians: where nothing is promised of "
        "other sequences' numbers, as it runs, and by the engines of cuDNN that keep NaN in its "
        "sequence; with `finite_padding=True`; torch's own call of its flash attention. Then what "
        "the first three ran by, and their relative errors to float64."
    )
    page(
        "packed",
        "Attention within packed sequences",
        text,
        head,
        measured_rows(CASES, line),
        arguments,
    )


if __name__ == "__main__":
    main()
