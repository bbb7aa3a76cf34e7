"""Run every engine that cuDNN offers for graphs in which an operand is repeated along some dims,
each graph in a process of its own; write which engines are right, and which are wrong where nothing
bars or refuses them.

    python docs/results/h200_broadcasts.py --out docs/results/h200-broadcasts.md

Needs the repository's root on PYTHONPATH. The first part is the test of the GPU tier with more
cases; the second lets through what is refused, behind a convolution.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from h200_masks import write

from tests import apart, broadcasts, engines

HARMLESS = ("right", "barred", "not built")
Said = list[tuple[int, str, Any]]


def run(function: str, cases: Sequence[broadcasts.Case], limit_s: float, log: Path | None) -> Said:
    """Run the cases within the limit and return their outcomes."""
    said: Said = []
    start = time.monotonic()
    sent = [broadcasts.described(case) for case in cases]
    heard = apart.run(
        function,
        sent,
        jobs=max(2, (os.cpu_count() or 4) - 8),
        limit_s=120.0,
        gpus=torch.cuda.device_count(),
    )
    for number, mark, outcome in heard:
        said.append((number, mark, outcome))
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps([str(cases[number]), mark, outcome]) + "\n")
        if time.monotonic() - start > limit_s:
            heard.close()
            break
    return said


def by_anchor(cases: Sequence[broadcasts.Case], said: Said) -> Iterator[str]:
    """A line for each anchor."""
    yield "| anchor | cases | plans right, by engine | barred | wrong | fatal |"
    yield "|---|---|---|---|---|---|"
    for anchor in broadcasts.ANCHORS:
        mine = [(number, m, o) for number, m, o in said if cases[number].anchor == anchor]
        right = Counter(mark.removeprefix("engine ") for _, mark, o in mine if o == "right")
        whole = right.pop(engines.WHOLE, 0)
        listed = " ".join(f"{e}: {n}" for e, n in sorted(right.items(), key=lambda i: int(i[0])))
        barred = sum(o == "barred" for *_, o in mine)
        fatal = len({(number, mark) for number, mark, o in mine if isinstance(o, dict)})
        wrong = sum(o not in HARMLESS and not isinstance(o, dict) for *_, o in mine)
        cells = (anchor, whole, listed or "none in one plan", barred, wrong, fatal)
        yield f"| {' | '.join(map(str, cells))} |"


def findings(cases: Sequence[broadcasts.Case], said: Said) -> list[str]:
    """A line for each wrong or fatal plan."""
    return [
        f"- {cases[number]}: {mark}: {outcome}"
        for number, mark, outcome in sorted(said, key=lambda each: (str(cases[each[0]]), each[1]))
        if outcome not in HARMLESS
    ]


def shown(outcome: Any) -> str:
    """An outcome as a cell of the table shows it."""
    if isinstance(outcome, dict):
        return "faults" if "misaligned" in outcome["died"] else f"dies ({outcome['died'][:60]})"
    if "off by" in outcome:
        return "off by " + outcome.split("off by ")[1].split(",")[0]
    return str(outcome)


def let_through(cases: Sequence[broadcasts.Case], said: Said) -> Iterator[str]:
    """A line for each way to repeat, chain and dtype."""
    yield "| anchor | operand | chain | dtype | what each engine made of it |"
    yield "|---|---|---|---|---|"
    for number, case in enumerate(cases):
        cells: dict[int, str] = {}
        for each, mark, outcome in said:
            if each == number and outcome != "not built":
                cells[int(mark.removeprefix("engine "))] = shown(outcome)
        dims = zip("NCHW", case.whole, strict=True)
        operand = "[" + ", ".join(d if way == "w" else "1" for d, way in dims) + "]"
        made = "; ".join(f"{engine}: {what}" for engine, what in sorted(cells.items()))
        yield f"| {case.anchor} | {operand} | `{case.chain}` | {case.dtype} | {made or 'none'} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=int, default=1200)
    parser.add_argument("--behind", type=int, default=0, help="leave out so many of the cases")
    parser.add_argument("--limit", type=float, default=330.0, help="seconds of the first part")
    parser.add_argument("--log", type=Path, help="a file for every outcome, as it comes")
    args = parser.parse_args(arguments)
    whole = broadcasts.drawn(args.cases)[args.behind :]
    first = run("tests.engines:broadcast", whole, args.limit, args.log)
    ways = ["".join(way) for way in itertools.product("w1", repeat=4)]
    more = [
        broadcasts.Case(anchor, way, chain, dtype, 320, (2, 16, 16))
        for anchor in ("conv 1x1", "conv 3x3", "conv_transpose")
        for way in ways
        for chain, dtype in (
            ("x + v", "float16"),
            ("x + v", "bfloat16"),
            ("x + silu(v)", "float16"),
        )
        if anchor == "conv 3x3" or (chain, dtype) == ("x + v", "float16")
    ]
    second = run("tests.engines:broadcast_let_through", more, 150.0, args.log)
    done = len({number for number, mark, _ in first if mark == engines.WHOLE})
    bad = findings(whole, first)
    lines = [
        "# Operands that are repeated, by every engine",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}; {datetime.date.today()}.",
        "",
        "```",
        "python docs/results/h200_broadcasts.py --out docs/results/h200-broadcasts.md",
        "```",
        "",
        f"{done} graphs, each in a process of its own: an anchor, and behind (or in front of) it a "
        "chain of ops with an operand that is repeated along some dims of its result; every way to "
        "repeat, 3 dtypes, 8, 64 and 320 channels, 5 sizes, both layouts. The first plan that "
        "builds of each engine ran on random data between guard bytes and was compared with the "
        "reference in float64, and so was the graph as heuristics compile it.",
        "",
        *by_anchor(whole, first),
        "",
        "Wrong or fatal:",
        "",
        *(bad or ["- none"]),
        "",
        "## What is refused",
        "",
        "The same with nothing barred and no way to repeat refused: 320 channels, 2 images of "
        "16 x 16, channels_last.",
        "",
        *let_through(more, second),
    ]
    print("\n".join(lines[10:]))
    if args.out:
        write(lines, args.out)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
