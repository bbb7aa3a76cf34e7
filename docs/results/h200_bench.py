"""Join what several runs of ``cudnngraph bench --json`` measured; write the page and the picture.

    python docs/results/h200_bench.py --out docs/results/h200-bench a.json b.json

So all suites fit machines that are lent for minutes, and several GPUs. The runs are to be of one
device and the same versions; a row that an earlier file has too is that of the later one. Ceilings
are the highest of the runs, by which the rows' shares are told anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cudnngraph.bench.measure import Ceilings, Row, with_shares
from cudnngraph.bench.report import JSON_SCHEMA, Report, to_html, to_json, to_picture
from cudnngraph.bench.suites import SUITES

SAME = ("schema", "device", "versions", "reference", "quick")


def joined(runs: Sequence[dict[str, Any]]) -> Report:
    """The runs as one. Raises ValueError where they are of different devices, versions or sizes."""
    first = runs[0]
    for run in runs:
        differ = [name for name in SAME if run[name] != first[name]]
        if differ or run["schema"] != JSON_SCHEMA:
            raise ValueError(f"the runs differ in {', '.join(differ) or 'schema'}")
    rows = {(row["suite"], row["name"]): Row(**row) for run in runs for row in run["rows"]}
    products: dict[str, float] = {}
    for run in runs:
        for dtype, rate in run["ceilings"]["matmul_tflop_s"].items():
            products[dtype] = max(rate, products.get(dtype, 0.0))
    copy = max(run["ceilings"]["copy_gb_s"] for run in runs)
    cache = max(run["ceilings"].get("cache_bytes", 0) for run in runs)
    ceilings, known = with_shares(Ceilings(copy, products, cache), list(rows.values()))
    order = list(SUITES)
    return Report(
        device=first["device"],
        versions=first["versions"],
        reference=first["reference"],
        quick=first["quick"],
        ceilings=ceilings,
        rows=sorted(known, key=lambda row: order.index(row.suite)),
        notes=list(dict.fromkeys(note for run in runs for note in run["notes"])),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="of .json, .html and .svg")
    args = parser.parse_args(arguments)
    report = joined([json.loads(file.read_text()) for file in args.files])
    args.out.with_suffix(".json").write_text(json.dumps(to_json(report), indent=1) + "\n")
    args.out.with_suffix(".html").write_text(to_html(report))
    to_picture(report, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
