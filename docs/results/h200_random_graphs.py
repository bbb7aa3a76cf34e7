"""Run random graphs, forward and backward, on a GPU and write the results page.

    python docs/results/h200_random_graphs.py --cases 3000 --out docs/results/h200-random-graphs.md

Needs the repository's root on PYTHONPATH. The cases are those of tests/random_graphs/; each
process takes many, one after another, in a cache directory of its own. ``--verify isolated`` runs
every plan under the guard first; else what heuristics pick runs as it is picked.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from h200_masks import write

from tests import random_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring. 1 if a case is wrong, fatal, or was not run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--seeds", default="", help="these alone, with commas between")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds of all")
    parser.add_argument("--seed-limit", type=float, default=random_runs.SEED_LIMIT_S)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--verify", default="off", choices=("off", "inprocess", "isolated"))
    parser.add_argument("--autotune", type=int, default=0, help="tune one seed of so many")
    parser.add_argument("--diagnose", action="store_true", help="say which steps were wrong")
    parser.add_argument("--log", type=Path, help="a file for every outcome, as it comes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)

    def heard(outcome: random_runs.Outcome) -> None:
        if args.log is not None:
            with args.log.open("a") as file:
                file.write(json.dumps(outcome.__dict__) + "\n")

    seeds: Sequence[int] = range(args.first, args.first + args.cases)
    if args.seeds:
        seeds = [int(seed) for seed in args.seeds.split(",")]
    start = time.monotonic()
    outcomes = random_runs.run(
        seeds,
        device=args.device,
        processes=args.processes,
        verify=args.verify,
        autotune=args.autotune,
        limit_s=args.limit,
        seed_limit_s=args.seed_limit,
        gpus=max(1, torch.cuda.device_count()),
        heard=heard,
    )
    wall_s = time.monotonic() - start
    wrong = [each.seed for each in outcomes if each.kind in ("wrong", "fatal") and each.seed >= 0]
    steps = random_runs.run(
        wrong if args.diagnose else [],
        device=args.device,
        processes=args.processes,
        limit_s=args.limit,
        seed_limit_s=args.seed_limit,
        gpus=max(1, torch.cuda.device_count()),
        function="tests.random_runs:diagnose",
    )
    found = random_runs.findings(outcomes)
    bad = [each for each in outcomes if each.kind in ("wrong", "fatal")]
    without = sum(each.without_digits > 0 for each in outcomes)
    typical_s = statistics.median([each.seconds for each in outcomes] or [0.0])
    cuda = args.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else "CPU, reference executor"
    cudnn = f", cuDNN {torch.backends.cudnn.version()}" if cuda else ""
    given = shlex.join(sys.argv[1:] if arguments is None else list(arguments))
    guilty = [f"- steps of {each.seed}: {each.kind} {each.text}" for each in steps]
    lines = [
        "# Random graphs, forward and backward",
        "",
        f"{name}, torch {torch.__version__}{cudnn}; {datetime.date.today()}.",
        "",
        "```",
        f"python docs/results/h200_random_graphs.py {given}".rstrip(),
        "```",
        "",
        f"{len(outcomes)} of {len(seeds)} graphs from seed {seeds[0]} on, in "
        f"{args.processes} processes and {wall_s:.0f} s; {typical_s * 1000:.0f} ms is the median "
        f"of a case. Verification: {args.verify}. Every result and gradient was compared with "
        "torch's own functions in float64, by the tolerances of tests/numerics.py; in "
        f"{without} graphs one or more is all rounding, by torch too, and was held to its size.",
        "",
        "A graph counts in every family that it has an op of.",
        "",
        *random_runs.table(outcomes),
        "",
        "Refused, wrong or fatal:",
        "",
        *(found or ["- none"]),
        *guilty,
    ]
    if args.out:
        write(lines, args.out)
    print("\n".join([lines[2], lines[8], "", *found, *guilty, "", *random_runs.table(outcomes)]))
    return bool(bad) or len(outcomes) < len(seeds)


if __name__ == "__main__":
    sys.exit(main())
