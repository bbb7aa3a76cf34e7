"""Write the tables that come from the code: `python docs/generate.py`.

README.md has its first numbers, docs/selection.md and docs/models.md what was measured, from the
JSON files in docs/results; docs/tuning.md has the thresholds. docs/environment.md has the
variables, docs/support.md what the sample graphs run as (from docs/coverage.json), docs/ops.md
the ops, docs/functions.md the fused functions, docs/versions.md the releases that the tests ran
with. Each table is between a pair of markers. A test holds that they say what the code and the
files say.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudnngraph import Graph, functional, settings
from cudnngraph.backend import tested
from cudnngraph.bench.zoo import results
from cudnngraph.device.rules import DeviceRules
from cudnngraph.ops.base import REQUIRED, Op
from cudnngraph.ops.table import OPS

ROOT = Path(__file__).parents[1]


def ops_table() -> str:
    """One row for each op: its inputs, its attributes with their defaults, its meaning."""
    rows = ["| Op | Inputs | Attributes | Meaning |", "|---|---|---|---|"]
    rows += [_row(op) for name, op in OPS.items() if name != "constant"]
    return "\n".join(rows) + "\n"


def _row(op: Op) -> str:
    attributes = ", ".join(
        f"`{name}`" if value is REQUIRED else f"`{name}={value!r}`"
        for name, value in op.attrs.items()
    )
    first_line = str(getattr(Graph, op.name).__doc__).splitlines()[0]
    meaning = first_line.replace("|", "\\|").replace("*", "\\*")
    return f"| `{op.name}` | {', '.join(op.inputs)} | {attributes} | {meaning} |"


_SEARCHED = {
    "import": "imports",
    "graph": "graphs",
    "cut": "cuts",
    "cudnn": "steps",
    "torch": "steps",
    "": "no",
}


def thresholds_table() -> str:
    """One row for each threshold that was measured on a GPU."""
    heads = ("Threshold", "Value", "Unit", "Decides", "Instead", "Searched", "Measured")
    rows = [f"| {' | '.join(heads)} |", "|---|---|---|---|---|---|---|"]
    for each in dataclasses.fields(DeviceRules):
        told, page = each.metadata, each.metadata["page"]
        source = f"[{page}](results/{page})" if page else "by hand"
        searched = _SEARCHED[told["stage"]]
        cells = (told["unit"], told["decides"], told["alternative"], searched, source)
        rows.append(f"| `{each.name}` | {_value(each.default)} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _value(value: Any) -> str:
    """A threshold as people write it: 2^20 for a large power of two."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(" x ".join(map(str, each)) for each in value)
    if isinstance(value, float):
        return f"{value:g}"
    power = value.bit_length() - 1
    return f"2^{power}" if value == 1 << power and power > 12 else str(value)


# -- what was measured -----------------------------------------------------------------------------

SELECTION = ROOT / "docs" / "results" / "h200-selection.json"
MODELS = ROOT / "docs" / "results" / "h200-models.json"
ZOO = ROOT / "docs" / "results" / "h200-zoo.json"
LATER = ROOT / "docs" / "results" / "h100-zoo.json"  # the same models on another GPU
OUTSIDERS = ROOT / "docs" / "results" / "h200-outsiders.json"  # models that nothing has seen
FIRST_SEEN = ROOT / "docs" / "results" / "h100-outsiders.json"  # before anything was mended
STARTUP = ROOT / "docs" / "results" / "h200-startup.json"
_KINDS = {
    "conv": "convolutions",
    "transpose": "transposed convolutions",
    "matmul": "matrix products",
    "norm": "norms",
    "pointwise": "pointwise ops",
    "sdpa": "attention",
}
_OURS = ("heuristic", "autotuned")
_WAYS = ("eager, CUDA graph", "torch.compile", "fused")


def performance(path: Path = SELECTION) -> str:
    """Speedups over eager torch, by suite, from a committed run."""
    run = json.loads(path.read_text(encoding="utf-8"))["warm"]
    rows = [row for row in run["rows"] if "times_us" in row]
    lines = [
        "How many times as fast as eager torch with `cudnn.benchmark`, and in the last two columns "
        "as the fastest",
        f"of eager and torch's fused calls, on one {run['gpu']} with cuDNN {_version(run)}: "
        "geometric means and worst cases.",
        "",
        '| what | cases | `"heuristic"` | worst | `"autotune"` | worst '
        '| `"autotune"`, fused calls | worst |',
        "|---|---|---|---|---|---|---|---|",
    ]
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    for suite in suites:
        lines.append(_ratios(_KINDS[suite], [row for row in rows if row["suite"] == suite]))
    lines.append(_ratios("all", rows))
    page = f"results/{path.stem}.md"
    lines += ["", f"Every case, in µs, is in [{page}]({page})."]
    return "\n".join(lines) + "\n"


def _version(run: Mapping[str, Any]) -> str:
    number = int(run["cudnn"])
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _ratios(what: str, rows: Sequence[Mapping[str, Any]]) -> str:
    times = [row["times_us"] for row in rows]
    found = [[t["eager"] / t[ours] for t in times] for ours in _OURS]
    found.append([min(us for n, us in t.items() if n not in _OURS) / t["autotuned"] for t in times])
    cells = [f"{math.exp(statistics.fmean(map(math.log, f))):.2f} | {min(f):.2f}" for f in found]
    return f"| {what} | {len(rows)} | {' | '.join(cells)} |"


def whole_models(path: Path = MODELS) -> str:
    """Times and errors of each model of a committed run, by torch and fused."""
    run = json.loads(path.read_text(encoding="utf-8"))
    page = f"results/{path.stem}.md"
    lines = [
        f"Whole models on one {run['device']} with torch {run['torch']}, float16, channels_last: "
        "ms a call, medians of",
        "calls in turn. The last number of a name is the side of the images, or the tokens of a "
        "sequence. Eager is",
        'with `cudnn.benchmark`, torch.compile with `mode="reduce-overhead"` and freezing, fused '
        "autotuned and captured,",
        "its input bound. Errors are relative, to the model in float64, with random weights.",
        "",
        "| model | eager, CUDA graph | torch.compile | fused | torch.compile / fused "
        "| eager, CUDA graph / fused | error, fused | error, torch |",
        "|---|---|---|---|---|---|---|---|",
        *map(_model, run["rows"]),
        "",
        f"Where the time goes is in [{page}]({page}).",
    ]
    return "\n".join(lines) + "\n"


_FIRST = {
    "ResNet-50 batch 32": "ResNet-50 batch 32",
    "ResNet-50 batch 1,": "ResNet-50 batch 1",
    "DeepLabV3": "DeepLabV3",
    "U-Net": "U-Net",
    "torchvision vit": "ViT-B/16",
    "torchvision convnext": "ConvNeXt-T",
    "GPT": "GPT",
    "torchvision swin_t": "Swin-T",
    "torchvision swin_v2_t": "Swin V2-T",
    "torchvision maxvit_t": "MaxViT-T",
}


def headline(
    zoo: Path = ZOO, later: Path = LATER, path: Path = MODELS, startup: Path = STARTUP
) -> str:
    """What the README begins with: the zoo, the models that it was built with, and the start."""
    found = results.loaded(zoo)
    rows = list(found.rows.values())
    beside = results.ratios(rows, "heuristic", "reduce-overhead", "us")
    mean, least, name = results.summarized(beside)
    right = sum(row["status"] == "done" for row in rows)
    other = results.loaded(later)
    others = list(other.rows.values())
    on_other = results.ratios(others, "heuristic", "reduce-overhead", "us")
    other_mean, other_least, other_name = results.summarized(on_other)
    other_right = sum(row["status"] == "done" for row in others)
    strange, before = (list(results.loaded(each).rows.values()) for each in (OUTSIDERS, FIRST_SEEN))
    beside_them, at_first = (
        results.ratios(each, "heuristic", "reduce-overhead", "us") for each in (strange, before)
    )
    their_mean, their_least, their_name = results.summarized(beside_them)
    first_mean, first_least, first_name = results.summarized(at_first)
    run = json.loads(path.read_text(encoding="utf-8"))
    ratios = []
    for start, title in _FIRST.items():
        (row,) = (row for row in run["rows"] if row["name"].startswith(start))
        compiled, fused = (row["times_us"][way] for way in ("torch.compile", "fused"))
        ratios.append(f"{title} {compiled / fused:.2f}")
    first = json.loads(startup.read_text(encoding="utf-8"))
    ours, theirs = (first[way]["first_s"] for way in ("fused", "torch.compile"))
    return (
        f"On one {found.device}, [published models](docs/results/h200-zoo.md) of timm, "
        "torchvision, transformers and diffusers, as they are, in 16 bits and\n"
        f"not tuned: **{mean:.2f} times as fast as `torch.compile`** with `reduce-overhead` and "
        f"freezing (geometric mean of {len(beside)}; the least is {least:.2f}, {name}).\n"
        f"The results of {right} of {len(rows)} are right. [{len(beside_them)} models]"
        "(docs/results/h200-outsiders.md) that no search and no seed here has seen: "
        f"{their_mean:.2f} times,\nthe least {their_least:.2f} ({their_name}). On one "
        f"{other.device}, [{len(others)} of the first and of others](docs/results/h100-zoo.md): "
        f"{other_mean:.2f} times,\nthe least {other_least:.2f} ({other_name}), {other_right} "
        f"of {len(others)} right; {len(at_first)} like the second, when they were [first measured]"
        f"(docs/results/h100-outsiders.md): {first_mean:.2f} times,\nthe least {first_least:.2f} "
        f"({first_name}; [what was done since](docs/results/h100-notes.md)).\n\n"
        f"Models that it was built with, in float16: {', '.join(ratios)}.\n"
        f"From a warm cache the first result of a ResNet-50 takes {ours:.1f} s, torch.compile's "
        f"{theirs:.1f} s. See\n[all of it](docs/models.md), "
        "[single convolutions, products and attention](docs/selection.md), and\n"
        "[the start](docs/results/h200-startup.md).\n"
    )


def _model(row: Mapping[str, Any]) -> str:
    """A model's row; "-" stands for what was not measured, and of several errors the largest."""
    graphed, compiled, fused = (row.get("times_us", {}).get(way) for way in _WAYS)
    ours, own = max(row.get("errors") or [(None, None)], key=lambda pair: pair[0])
    cells = ["-" if us is None else f"{us / 1e3:.3f}" for us in (graphed, compiled, fused)]
    cells += [f"{us / fused:.2f}" if us and fused else "-" for us in (compiled, graphed)]
    cells += ["-" if error is None else f"{error:.1e}" for error in (ours, own)]
    if ours is not None and own is None:  # the model did not run in float64
        cells[-2] += " to torch"
    return f"| {row['name']} | {' | '.join(cells)} |"


def coverage() -> str:
    """Table of the steps that the sample graphs of each feature run as."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tests.coverage import table

    return table()


def left() -> str:
    """Table of what torch still runs of the sample graphs."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tests.coverage import left_table

    return left_table()


def functions_table() -> str:
    """Table of the fused functions, with the first line of each docstring."""
    rows = ["| Function | Computes |", "|---|---|"]
    for name in functional.__all__:
        said = (inspect.getdoc(getattr(functional, name)) or "").splitlines()[0]
        said = re.sub(r":func:`([^`]+)`", r"`\1`", said.replace("``", "`"))
        rows.append(f"| `{name}` | {said} |")
    return "\n".join(rows) + "\n"


TABLES: Mapping[tuple[str, str], Callable[[], str]] = {
    ("docs/environment.md", "environment variables"): settings.markdown_table,
    ("README.md", "headline"): headline,
    ("docs/selection.md", "performance"): performance,
    ("docs/tuning.md", "thresholds"): thresholds_table,
    ("docs/models.md", "whole models"): whole_models,
    ("docs/support.md", "coverage"): coverage,
    ("docs/support.md", "left to torch"): left,
    ("docs/ops.md", "ops"): ops_table,
    ("docs/functions.md", "functions"): functions_table,
    ("docs/versions.md", "versions"): tested.markdown_table,
}


def with_tables(path: str) -> str:
    """The text of a file with every table of its own written anew; ValueError without markers."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for (file, name), table in TABLES.items():
        if file != path:
            continue
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        head, rest = text.split(begin)
        _, tail = rest.split(end)
        text = head + begin + table() + end + tail
    return text


def main() -> int:
    """Rewrite the files whose tables have changed."""
    for path in dict.fromkeys(file for file, _ in TABLES):
        text = with_tables(path)
        if text != (ROOT / path).read_text(encoding="utf-8"):
            (ROOT / path).write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
