"""Results of a benchmark as text, as JSON and as a page with plots."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..device import files
from ..errors import FeatureMissing
from .measure import MEMORY, Ceilings, Row

JSON_SCHEMA = 1
"""Of the object that ``--json`` writes; raised when a field goes or changes its meaning."""

COLUMNS = ("case", "µs", "TFLOP/s", "GB/s", "% of ceiling", "times as fast as", "notes")
PICTURES = (".svg", ".png")
CLOCKS = {
    "gpu": "time on the GPU, launches replayed in CUDA graphs",
    "wall": "time until the work is finished, as a caller waits",
    "host": "what a call costs the host",
    "process": "a new process",
}


@dataclass(frozen=True)
class Report:
    """A run of ``cudnngraph bench``: its rows, the device's ceilings, what was left out."""

    device: str
    versions: Mapping[str, str]
    reference: bool
    quick: bool
    ceilings: Ceilings
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @property
    def suites(self) -> list[str]:
        """The suites that have rows, in order."""
        return list(dict.fromkeys(row.suite for row in self.rows))

    def of(self, suite: str) -> list[Row]:
        """The rows of a suite."""
        return [row for row in self.rows if row.suite == suite]


def _others(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(n for row in rows for n in row.times_us if n != row.ours))


def summary(rows: Sequence[Row]) -> list[tuple[str, int, float, float, str]]:
    """For each baseline: its name, the number of rows that have it, how many times faster ours is
    (geometric mean), the least of these, and its row."""
    made = []
    for other in _others(rows):
        found = [(f, row.name) for row in rows if (f := row.times_faster(other)) is not None]
        ratios = [ratio for ratio, _ in found]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        made.append((other, len(found), mean, *min(found)))
    return made


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table under :data:`COLUMNS`."""
    rate = f"{row.flops / row.us / 1e6:.3g}" if row.flops else ""
    moved = f"{row.moved_bytes / row.us / 1e3:.3g}" if row.moved_bytes else ""
    part = "" if row.part_of_ceiling is None else f"{100 * row.part_of_ceiling:.0f}"
    others = [f"{name} {row.times_faster(name):.2f}" for name in row.times_us if name != row.ours]
    what = row.name if row.ours == row.name else f"{row.name}: {row.ours}"
    return (what, f"{row.us:.1f}", rate, moved, part, ", ".join(others), "; ".join(row.notes))


def heading(report: Report) -> list[str]:
    """Return the lines above the tables."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [f"{report.device}; {versions}"]
    if report.reference:
        lines.append(
            "on a CPU graphs run by the reference executor, which is there to be right: "
            "these times, by one thread, say nothing about cuDNN"
        )
    if report.quick or report.reference:
        lines.append("small data")
    products = ", ".join(
        f"{kind} products {rate:.3g} TFLOP/s"
        for kind, rate in report.ceilings.matmul_tflop_s.items()
    )
    if report.ceilings.copy_gb_s:
        measured = f"memory {report.ceilings.copy_gb_s:.3g} GB/s" + (products and f", {products}")
        lines.append(f"ceilings, measured in this run: {measured}")
    if report.ceilings.beaten:
        beaten = " and ".join(report.ceilings.beaten)
        lines.append(
            f"a row is faster than the ceiling of {beaten}: that is none, so no share of it is told"
        )
    return [*lines, *report.notes]


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """The geometric mean and the worst row against each baseline, a line each."""
    return [
        f"{mean:.2f} times as fast as {other} (geometric mean of {count}), at worst {worst:.2f} "
        f"({name})"
        for other, count, mean, worst, name in summary(rows)
    ]


def to_json(report: Report) -> dict[str, Any]:
    """The report as one object; ``summary`` by suite."""
    rows = [{**asdict(row), "times_us": dict(row.times_us)} for row in report.rows]
    return {
        "schema": JSON_SCHEMA,
        "device": report.device,
        "versions": dict(report.versions),
        "reference": report.reference,
        "quick": report.quick,
        "ceilings": {
            "copy_gb_s": report.ceilings.copy_gb_s,
            "matmul_tflop_s": dict(report.ceilings.matmul_tflop_s),
            "cache_bytes": report.ceilings.cache_bytes,
            "beaten": list(report.ceilings.beaten),
        },
        "rows": rows,
        "summary": {
            suite: {
                other: {"rows": count, "geomean": mean, "worst": worst, "worst_row": name}
                for other, count, mean, worst, name in summary(report.of(suite))
            }
            for suite in report.suites
        },
        "notes": list(report.notes),
    }


# -- the page --------------------------------------------------------------------------------------

_STYLE = (
    ":root{color-scheme:light dark;--text:#222;--back:#fff;--line:#ddd;--weak:#666}"
    "@media(prefers-color-scheme:dark){"
    ":root{--text:#ddd;--back:#161616;--line:#444;--weak:#999}}"
    "body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:var(--text);"
    "background:var(--back)}.table{overflow-x:auto}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.25em .7em;text-align:left;border-bottom:1px solid var(--line);"
    "vertical-align:top}th button{all:unset;cursor:pointer}th button:focus-visible{outline:auto}"
    "figure{margin:1em 0;background:#fff;border-radius:.3em}svg{max-width:100%;height:auto}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}.note{color:var(--weak)}"
)
# A click on a column's head sorts by it, numbers by their size; a second click turns the order.
_SORT = """
for (const table of document.querySelectorAll("table"))
  table.querySelectorAll("th button").forEach((button, column) => button.onclick = () => {
    const head = button.parentElement, down = head.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("th").forEach(each => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const of = row => row.cells[column].textContent, number = row => parseFloat(of(row));
    const rows = [...table.tBodies[0].rows].sort((a, b) =>
      (number(a) - number(b)) || of(a).localeCompare(of(b)));
    table.tBodies[0].append(...(down ? rows.reverse() : rows));
  });
"""


def to_html(report: Report) -> str:
    """The report as one page that needs no other file: tables, bars and a roofline as SVG.

    Raises :class:`FeatureMissing` without matplotlib.
    """
    check_matplotlib("the page")
    import matplotlib

    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8"><title>cudnngraph bench</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>",
        "<h1>cudnngraph bench</h1>",
        *(f"<p>{escape(line)}</p>" for line in heading(report)),
    ]
    with matplotlib.rc_context(_DRAWN):
        for suite in report.suites:
            rows = report.of(suite)
            parts.append(f"<h2>{escape(suite)}</h2>")
            parts.append(f'<p class="note">{escape(CLOCKS[rows[0].clock])}</p>')
            parts.append(_html_table(rows, suite))
            lines = summary_lines(rows)
            parts += [f"<p>{escape(line)}</p>" for line in lines]
            label = f"{suite}: bars of how many times as fast as others; {'; '.join(lines)}"
            parts.append(_figure(_bars(rows, _others(report.rows)), label))
        if any(row.flops for row in report.rows):
            label = "Roofline: operations a second over operations a byte, below the ceilings"
            parts += ["<h2>Roofline</h2>", _figure(_roofline(report), label)]
    return "\n".join([*parts, f"<script>{_SORT}</script>", "</html>", ""])


def _figure(svg: str, label: str) -> str:
    return f'<figure role="img" aria-label="{escape(label)}">{svg}</figure>'


def check_matplotlib(what: str) -> None:
    """Raise :class:`FeatureMissing` where ``what`` cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and "matplotlib" in str(error):
            mend = "; pip install matplotlib"
        else:
            mend = f", and it does not load ({error}); pip install --force-reinstall matplotlib"
        raise FeatureMissing(f"{what} has plots, which need matplotlib{mend}") from None


def _html_table(rows: Sequence[Row], suite: str) -> str:
    numbers = {"µs", "TFLOP/s", "GB/s", "% of ceiling"}
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in COLUMNS
    )
    body = []
    for row in rows:
        pairs = zip(COLUMNS, cells(row), strict=True)
        made = [
            f"<td{' class=n' if name in numbers else ''}>{escape(cell)}</td>"
            for name, cell in pairs
        ]
        body.append(f"<tr>{''.join(made)}</tr>")
    return (
        f'<div class="table"><table aria-label="{escape(suite)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


# Text stays text, and ids do not change from run to run.
_DRAWN: Any = {"svg.fonttype": "none", "svg.hashsalt": "cudnngraph"}


def dots(rows: Sequence[Row]) -> str:
    """Return a picture of its own, SVG: for each row how many times as fast as the baselines ours
    is, a dot each, and their geometric means in the legend.

    Raises :class:`FeatureMissing` without matplotlib.
    """
    check_matplotlib("the picture")
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.25 * len(rows)))
    axes = figure.subplots()
    for other, count, mean, _, _ in summary(rows):
        found = [
            (place, ratio)
            for place, row in enumerate(rows)
            if (ratio := row.times_faster(other)) is not None
        ]
        label = f"over {other}: {mean:.2f} ({count})"
        axes.scatter([ratio for _, ratio in found], [place for place, _ in found], label=label)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", color="#ddd", linewidth=0.5)
    axes.set_axisbelow(True)
    _ratio_axis(axes)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize="small")
    with matplotlib.rc_context(_DRAWN):
        return _svg(figure)


def _ratio_axis(axes: Any) -> None:
    """Ratios from left to right, a line at 1."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.axvline(1.0, color="#222", linewidth=1)
    axes.set_xlabel("times as fast")


def _svg(figure: Any) -> str:
    """A figure as an element of a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _bars(rows: Sequence[Row], everyone: Sequence[str]) -> str:
    """Each row's bars from 1: how many times as fast as the baselines; slower to the left.

    A baseline has the same color in every chart of a page, by its place in ``everyone``.
    """
    from matplotlib.figure import Figure

    others = _others(rows)
    height = 0.8 / max(1, len(others))
    figure = Figure(figsize=(9, 1.0 + (0.2 + 0.22 * len(others)) * len(rows)))
    axes = figure.subplots()
    for number, other in enumerate(others):
        found = [
            (place, ratio)
            for place, row in enumerate(rows)
            if (ratio := row.times_faster(other)) is not None
        ]
        axes.barh(
            [place + (number - (len(others) - 1) / 2) * height for place, _ in found],
            [ratio - 1.0 for _, ratio in found],
            left=1.0,
            height=height,
            color=f"C{everyone.index(other) % 10}",
            label=f"over {other}",
        )
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.margins(y=0.02)
    _ratio_axis(axes)
    axes.legend(loc="best", fontsize="small")
    return _svg(figure)


def _roofline(report: Report) -> str:
    """TFLOP/s over operations per byte, under the ceilings of this run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5))
    _draw_roofline(figure.subplots(), report)
    return _svg(figure)


def _draw_roofline(axes: Any, report: Report) -> None:
    shown = [row for row in report.rows if row.flops and row.moved_bytes]
    places = [row.flops / row.moved_bytes for row in shown]
    for suite in dict.fromkeys(row.suite for row in shown):
        mine = [row for row in shown if row.suite == suite]
        axes.scatter(
            [row.flops / row.moved_bytes for row in mine],
            [row.flops / row.us / 1e6 for row in mine],
            label=suite,
        )
    left, right = min(places) / 2, max(places) * 2
    beaten = report.ceilings.beaten
    for kind, peak in report.ceilings.matmul_tflop_s.items():
        if kind in beaten:
            continue
        knee = min(max(peak * 1e3 / report.ceilings.copy_gb_s, left), right)
        line = sorted({knee if MEMORY in beaten else left, knee, right})
        axes.plot(
            line,
            [min(peak, at * report.ceilings.copy_gb_s / 1e3) for at in line],
            label=f"ceiling, {kind}",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend(loc="best", fontsize="small")


def _over_eager(row: Row) -> float | None:
    """Speedup over eager torch, or over the fastest baseline of a row without it."""
    known = [ratio for other in _others([row]) if (ratio := row.times_faster(other)) is not None]
    return row.times_faster("eager") or min(known, default=None)


def to_picture(report: Report, file: Path) -> None:
    """The report at a glance, in the format of the file's name (svg, png): each row's ratio to
    eager torch by suite, their geomean and how many beside the name; and the roofline.

    Raises :class:`FeatureMissing` without matplotlib.
    """
    check_matplotlib("the picture")
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = []
    for place, suite in enumerate(report.suites):
        found = [ratio for row in report.of(suite) if (ratio := _over_eager(row))]
        left.scatter(found, [place] * len(found), alpha=0.6)
        mean = f"{statistics.geometric_mean(found):.2f}" if found else "-"
        names.append(f"{suite}: {mean} ({len(found)})")
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    left.axvline(1.0, color="#222", linewidth=1)
    left.set_xlabel("times as fast as eager torch, or as the fastest baseline where there is none")
    if any(row.flops for row in report.rows):
        _draw_roofline(right, report)
    figure.suptitle(heading(report)[0])
    kind = file.suffix.lower().removeprefix(".")
    drawn = io.BytesIO()  # matplotlib needs a stream in which it can go back
    with matplotlib.rc_context(_DRAWN):
        figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    files.write(file, drawn.getvalue())
