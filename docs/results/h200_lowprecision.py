"""Measure int8 and FP8 against 16 bits on a GPU and print the table.

    python docs/results/h200_lowprecision.py --out docs/results/h200-lowprecision.md

Each case by the first plan and by plan selection, beside the same work in 16 bits (selected too)
and torch's own code for it. ``--only TEXT`` takes the cases whose name has the text.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
import tempfile
from pathlib import Path

import torch

import cudnngraph as cg
from cudnngraph import reference, timing
from cudnngraph.backend import env
from cudnngraph.bench.cases import Case
from cudnngraph.bench.lowprecision import lowprecision_suite
from cudnngraph.settings import override
from cudnngraph.trial import relative_error

ROUNDS = 21
HEAD = "| case | 8 bits, first plan | 8 bits, selected | 16 bits | torch | 8/16 | off by | plan |"


def row(case: Case) -> str:
    """One line of the table: times in us, the ratio to 16 bits, the error to the reference."""
    tensors = case.tensors(torch.device("cuda"))
    exes = [case.graph.compile("cuda", tune=tune) for tune in ("heuristic", "autotune")]
    contenders = {"first": exes[0].bind(**tensors), "selected": exes[1].bind(**tensors)}
    for name, run in case.others.items():
        run(tensors)
        contenders[name] = lambda run=run: run(tensors)
    case.eager(tensors)
    contenders["eager"] = lambda: case.eager(tensors)
    spec = exes[1].spec
    (name,) = spec.outputs
    wanted = reference.run(spec, [tensors[each] for each in spec.inputs], torch.float64)[0]
    contenders["selected"]()
    error = relative_error(tensors[name], wanted)
    del wanted
    took = timing.measure(
        list(contenders.values()), torch.cuda.Stream(), rounds=ROUNDS, drop_over=math.inf
    )
    us = dict(zip(contenders, took, strict=True))
    wide = us.get("fp16", us.get("bf16", math.nan))
    other = f"{us['eager']:.1f}"
    if "torch._scaled_mm" in us:
        other += f", _scaled_mm {us['torch._scaled_mm']:.1f}"
    plan = " \\| ".join(str(step.choice or "torch") for step in exes[1].steps)
    return (
        f"| {case.name} | {us['first']:.1f} | {us['selected']:.1f} | {wide:.1f} | {other} | "
        f"{us['selected'] / wide:.2f} | {error:.1e} | {plan} |"
    )


def main() -> int:
    """Measure with an empty plan cache, print each line as it comes, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    today = datetime.datetime.now(datetime.timezone.utc).date()
    lines = [
        "# Low precision",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {env.cudnn_version()}, "
        f"frontend {env.frontend_version()}; {today}.",
        "",
        "Times in µs, medians of CUDA-graph replays; 8/16 is selected over 16 bits, both with plan "
        "selection. Off by: relative error to the reference executor in float64, which rounds "
        "where the graph says so; 0 for int8 with no element off but next to a tie.",
        "",
        HEAD,
        "|---" * (HEAD.count("|") - 1) + "|",
    ]
    with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder)):
        for case in lowprecision_suite():
            if args.only not in case.name:
                continue
            try:
                lines.append(row(case))
            except (cg.CudnnGraphError, RuntimeError) as error:
                lines.append(f"| {case.name} | {type(error).__name__}: {str(error)[:300]} |")
            print(lines[-1], file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
