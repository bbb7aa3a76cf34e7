"""The page of the zoo's results in Markdown, its picture, and its last lines on a terminal.

All are made of the results alone, so that they can be made again without a GPU.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from ..report import dots
from .results import (
    Results,
    Row,
    our_ways,
    ratios,
    summarized,
    timed,
    warm_start,
    warm_starts,
    worst_error,
)
from .ways import WAYS

NOTES = "\n## Notes\n"
LONGEST = 4  # kernels of a model that are named
_GIB = 2**30


def picture(results: Results) -> str | None:
    """A picture of how many times as fast as the other ways ours is, as SVG; None without times."""
    rows = list(results.rows.values())
    ours = our_ways(rows)
    return dots(timed(rows, ours[0])) if ours else None


def with_notes(text: str, before: str) -> str:
    """A page, with what a person wrote under "Notes" in the one that was there before."""
    _, mark, notes = before.partition(NOTES)
    return text + mark + notes


def page(results: Results, image: str = "") -> str:
    """The page; ``image`` is the name of the picture beside it."""
    rows = list(results.rows.values())
    lines = ["# The zoo", "", *_head(results), ""]
    if image:
        lines += [f"![Times as fast as the other ways, by models]({image})", ""]
    shown = summary_lines(results)
    lines += ["## Summary", "", *(f"- {line}" for line in shown), ""]
    if our_ways(rows):
        lines += _times(rows) + _kernels(rows) + _starts(rows) + _memory(rows)
    lines += _parity(rows) + _models(rows) + _refused(rows)
    lines += _reasons(rows)
    return "\n".join(lines).rstrip() + "\n"


def _head(results: Results) -> list[str]:
    """Where and when it was measured, and how."""
    by = "small models in float32 by the reference executor" if results.tiny else "real sizes"
    if results.device == "CPU" and not results.tiny:
        by = "real sizes in float32 by the reference executor"
    lines = [f"{results.device}; {by}, random weights.", ""]
    commands: dict[str, list[str]] = {}  # by dates and versions
    for run in results.to_dict()["runs"]:
        versions = ", ".join(f"{name} {value}" for name, value in run.get("versions", {}).items())
        called = commands.setdefault(f"- {run.get('date', '')}: {versions}", [])
        called.append(f"  - `{run.get('command', '')}`")
    for told, called in commands.items():
        lines += [told, *called]
    text = "Each model has processes of its own. Parity is the relative error to a wide dtype."
    if our_ways(list(results.rows.values())):
        text += (
            " All ways are called in turn in one of them. torch.compile has freezing. A cold start "
            "is the time from a model on the GPU to its first result, with empty caches, in a "
            "process that runs one way only; a warm start is the same with the caches filled, of "
            "the first way of torch.compile's and of ours in the process of the times."
        )
    return [*lines, "", text]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows),
        "",
    ]


# -- what it comes to ------------------------------------------------------------------------------


def summary_lines(results: Results) -> list[str]:
    """The results in a few lines: ratios, worst rows, starts, parity."""
    rows = list(results.rows.values())
    counts = Counter(row["status"] for row in rows)
    lines = [
        f"{len(rows)} models: " + ", ".join(f"{n} {status}" for status, n in counts.most_common())
    ]
    ours = our_ways(rows)
    for mine in ours:
        for name, way in WAYS.items():
            if not way.ours:
                lines += _line_of(rows, mine, name, "us", f"{way.title} / {WAYS[mine].title}")
    if len(ours) == 2:
        tuned, quick = ours
        titles = f"{WAYS[quick].title} / {WAYS[tuned].title}"
        found = ratios(rows, tuned, quick, "us")
        if found:
            mean, _, _ = summarized(found)
            most, name = max(found)
            text = f"{mean:.2f} (geometric mean of {len(found)}), at most {most:.2f} ({name})"
            lines.append(f"{titles}: {text}")
    for mine in [name for name, way in WAYS.items() if way.ours]:
        for name, way in WAYS.items():
            if way.mode:
                title = f"cold start, {way.title} / {WAYS[mine].title}"
                lines += _line_of(rows, mine, name, "cold_s", title)
    for name, way in WAYS.items():
        starts = warm_starts(rows, name) if way.compiles else []
        if starts:
            middle = statistics.median(seconds for seconds, _ in starts)
            most, slowest = max(starts)
            lines.append(
                f"warm start, {way.title}: {middle:.1f} s (median of {len(starts)}), "
                f"at most {most:.1f} s ({slowest})"
            )
    return lines + _parity_line(rows)


def _line_of(rows: Sequence[Row], ours: str, other: str, number: str, title: str) -> list[str]:
    found = ratios(rows, ours, other, number)
    if not found:
        return []
    mean, worst, name = summarized(found)
    return [f"{title}: {mean:.2f} (geometric mean of {len(found)}), at worst {worst:.2f} ({name})"]


def _parity_line(rows: Sequence[Row]) -> list[str]:
    """The number of models of which every way of ours was right."""
    compared = [row for row in rows if any("errors" in w for n, w in _ours(row))]
    right = [row for row in compared if not any("error" in w for n, w in _ours(row))]
    wide = Counter(row.get("wide") or "torch's own dtype" for row in right)
    beside = ", ".join(f"{n} beside {kind}" for kind, n in wide.most_common())
    return [f"right: {len(right)} of {len(rows)} models" + (f" ({beside})" if beside else "")]


def _ours(row: Row) -> list[tuple[str, Row]]:
    return [(n, way) for n, way in row["ways"].items() if n in WAYS and WAYS[n].ours]


# -- tables ----------------------------------------------------------------------------------------


def _present(rows: Sequence[Row], number: str) -> list[str]:
    """The ways that have a number in some row."""
    return [n for n in WAYS if any(number in row["ways"].get(n, {}) for row in rows)]


def _cells(row: Row, ways: Sequence[str], number: str, scale: float, digits: int) -> list[str]:
    """A number of each way; "failed" if the way did."""
    cells = []
    for name in ways:
        way = row["ways"].get(name, {})
        if number in way:
            cells.append(f"{way[number] / scale:.{digits}f}")
        else:
            cells.append("failed" if "error" in way else "-")
    return cells


def _times(rows: Sequence[Row]) -> list[str]:
    """Milliseconds of a call, and the ratios to ours."""
    ways, ours = _present(rows, "us"), our_ways(rows)[0]
    others = [name for name in ways if WAYS[name].mode]
    body = []
    for row in rows:
        if not any("us" in way for way in row["ways"].values()):
            continue
        mine = row["ways"].get(ours, {}).get("us")
        theirs = [row["ways"].get(name, {}).get("us") for name in others]
        parts = [f"{us / mine:.2f}" if us and mine else "-" for us in theirs]
        body.append([row["name"], *_cells(row, ways, "us", 1e3, 3), *parts])
    head = ["model", *(WAYS[name].title for name in ways)]
    head += [f"{name} / {ours}" for name in others]
    return ["## Times", "", "Milliseconds of a call.", "", *table(head, body)]


def _kernels(rows: Sequence[Row]) -> list[str]:
    """The kernels of a call of our best way that take longest, and how many others launch."""
    ways = _present(rows, "kernels")
    mine = next((name for name in our_ways(rows) if name in ways), None)
    if mine is None:
        return []
    body = []
    for row in rows:
        found = {n: row["ways"][n]["kernels"] for n in ways if "kernels" in row["ways"].get(n, {})}
        if mine in found:
            *longest, (_, _, total) = found[mine]
            parts = [f"{name} {us / total:.0%}" for name, _, us in longest[:LONGEST] if total]
            counts = [str(found[name][-1][1]) if name in found else "-" for name in ways]
            body.append([row["name"], *counts, "; ".join(parts)])
    text = f"Kernels of a call, and the {LONGEST} that take longest of {WAYS[mine].title}."
    head = ["model", *(WAYS[name].title for name in ways), "the longest, of the time of all"]
    return ["## Kernels", "", text, "", *table(head, body)]


def _starts(rows: Sequence[Row]) -> list[str]:
    """Seconds until the first result."""
    ways = _present(rows, "cold_s")
    if not ways:
        return []
    beside = {w.get("beside", 1) for row in rows for w in row["ways"].values() if "cold_s" in w}
    text = "Seconds until the first result, with empty caches and with filled ones."
    if max(beside) > 1:
        text += f" Up to {max(beside)} cold starts ran side by side, those that measure nothing."
    warm = [way.get("warm_beside", 1) for row in rows for way in row["ways"].values()]
    if max(warm, default=1) > 1:
        text += f" Up to {max(warm)} processes started warm side by side."
    head = ["model", *(f"{WAYS[n].title}, {kind}" for n in ways for kind in ("cold", "warm"))]
    body = []
    for row in rows:
        cells = []
        for name in ways:
            way = row["ways"].get(name, {})
            for seconds in (way.get("cold_s"), warm_start(way)):
                cells.append("-" if seconds is None else f"{seconds:.1f}")
        if any(cell != "-" for cell in cells):
            body.append([row["name"], *cells])
    return ["## Starts", "", text, "", *table(head, body)]


def _memory(rows: Sequence[Row]) -> list[str]:
    """Memory that a process holds while it runs a model one way."""
    ways = _present(rows, "reserved_bytes")
    if not ways:
        return []
    text = "GiB that torch's allocator holds while a model runs one way, its weights among them."
    body = [
        [row["name"], *_cells(row, ways, "reserved_bytes", _GIB, 2)]
        for row in rows
        if any("reserved_bytes" in way for way in row["ways"].values())
    ]
    return ["## Memory", "", text, "", *table(["model", *(WAYS[n].title for n in ways)], body)]


def _parity(rows: Sequence[Row]) -> list[str]:
    """The largest relative error of each way."""
    ways = [n for n in _present(rows, "errors") if n != "graph"]
    body = []
    for row in rows:
        found = [worst_error(row["ways"].get(name, {})) for name in ways]
        if any(found):
            cells = [f"{pair[0]:.1e}" if pair else "-" for pair in found]
            body.append([row["name"], row.get("wide") or "-", *cells])
    if not body:
        return []
    text = "Relative error of the result that is farthest off, beside the model in a wide dtype."
    head = ["model", "beside", *(WAYS[name].title for name in ways)]
    return ["## Parity", "", text, "", *table(head, body)]


def _models(rows: Sequence[Row]) -> list[str]:
    """What the models are."""
    body = []
    for row in rows:
        opaque: Counter[str] = Counter()
        steps: Counter[str] = Counter()
        for _, way in _ours(row):
            opaque |= Counter(way.get("opaque", {}))
            steps = steps or Counter(way.get("steps", {}))
        count = f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else "-"
        left = ", ".join(f"{n} {op}" for op, n in opaque.most_common()) or "-"
        made = ", ".join(f"{n} {kind}" for kind, n in steps.items()) or "-"
        what = ", ".join(filter(None, (row["inputs"], row["cut"])))
        body.append([row["name"], row["library"], row["dtype"], what, count, made, left])
    head = ["model", "library", "dtype", "inputs", "parameters", "steps", "ops of torch's own"]
    return ["## Models", "", *table(head, body)]


def _refused(rows: Sequence[Row]) -> list[str]:
    """The generated kernels that their check has refused."""
    found = [
        f"- {row['name']}, {WAYS[name].title}: {count} x {reason}"
        for row in rows
        for name, way in _ours(row)
        for reason, count in way.get("refused", {}).items()
    ]
    text = "What they compute runs by plans or op by op."
    return ["## Kernels that were refused", "", text, "", *found, ""] if found else []


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why a model, or a way of one, has no numbers."""
    found = []
    for row in rows:
        ways = {WAYS[n].title: w["error"] for n, w in row["ways"].items() if "error" in w}
        if row.get("error") and row["error"] not in ways.values():
            found.append((row["name"], row["error"]))
        found += [(f"{row['name']}, {title}", error) for title, error in ways.items()]
    if not found:
        return []
    lines = [f"- {name}: {' '.join(error.split())}" for name, error in found]
    return ["## What has no numbers", "", *lines, ""]
