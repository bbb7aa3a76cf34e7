"""A record as a picture: its steps as boxes with their ops, tensors as arrows; SVG or Graphviz.

Steps stand below each other in the order in which they run. What the graph is given comes in from
the left, what it gives leaves on the right, and what skips a step runs around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from xml.sax.saxutils import escape, quoteattr

from plans_cache import PlanRecord, StepRecord

from .text import bytes_text, clean, ops_of, plan_text, time_text

_CHAR = 7.3  # width of a character of the font at 12 px
_LINE = 18
_PAD = 12
_GAP = 48  # between two steps, and between a column and the next
_LANE = 10  # between two arrows that run around steps
_COLORS = {"cudnn": ("#e8f3e2", "#5b8c3a"), "torch": ("#fdebd9", "#c56a1a")}


def _title(number: int, step: StepRecord) -> str:
    return f"step {number}: {'cuDNN' if step.kind == 'cudnn' else 'torch'}"


def _facts(step: StepRecord) -> list[str]:
    """The lines below the ops of a step."""
    lines = [plan_text(step)] if step.kind == "cudnn" else []
    time = "not measured" if step.time_us is None else time_text(step.time_us)
    return [*lines, f"{time}, workspace {bytes_text(step.workspace_bytes)}"]


def _producers(record: PlanRecord) -> dict[str, int]:
    """Tensor → the step that makes it."""
    return {name: index for index, step in enumerate(record.steps) for name, _ in step.outputs}


def _results(record: PlanRecord) -> dict[str, int]:
    """Tensor → its step, of those that no later step reads."""
    read = {name for step in record.steps for name, _ in step.inputs}
    return {name: index for name, index in _producers(record).items() if name not in read}


# -- SVG -------------------------------------------------------------------------------------------


def _text(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    more = f" {style}" if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#tip)"/>'


def _width(texts: list[str]) -> float:
    return max((len(text) for text in texts), default=0) * _CHAR + 2 * _PAD


def svg(record: PlanRecord) -> str:
    """The picture as an SVG document."""
    producers, results = _producers(record), _results(record)
    made_before: list[list[tuple[str, str]]] = []
    given: list[list[tuple[str, str]]] = []
    for index, step in enumerate(record.steps):
        inner = [pair for pair in step.inputs if producers.get(pair[0], index) < index]
        made_before.append(inner)
        given.append([pair for pair in step.inputs if pair not in inner])
    gives = [[pair for pair in step.outputs if pair[0] in results] for step in record.steps]

    def label(pair: tuple[str, str]) -> str:
        return clean(f"{pair[0]}: {pair[1]}")

    between = [
        (pair, index - producers[pair[0]])
        for index, pairs in enumerate(made_before)
        for pair in pairs
    ]
    skips = [label(pair) for pair, steps in between if steps > 1]
    straight = [label(pair) for pair, steps in between if steps == 1]
    left = max(_width([label(pair) for pairs in given for pair in pairs]), _width(straight) - _GAP)
    right = _width([label(pair) for pairs in gives for pair in pairs])
    box = _width(
        [
            text
            for number, step in enumerate(record.steps, 1)
            for text in (_title(number, step), *ops_of(step), *_facts(step))
        ]
    )
    x0 = left + _GAP
    out = x0 + box + _GAP + _LANE * len(skips)  # where what stands right of the boxes begins
    heading = clean(record.summary)
    body: list[str] = []
    tops: list[float] = []
    bottoms: list[float] = []
    y = 3.0 * _LINE
    for number, step in enumerate(record.steps, 1):
        ops, facts = ops_of(step), _facts(step)
        passing = len(made_before[number - 1]) + 1.2 * len(gives[number - 1])
        rows = max(1 + len(ops) * 1.5 + len(facts), len(given[number - 1]) * 1.2, passing)
        height = rows * _LINE + 2 * _PAD
        fill, stroke = _COLORS[step.kind]
        tops.append(y)
        bottoms.append(y + height)
        body.append(
            f'<g class={quoteattr(f"step {step.kind}")}><rect class="box" x="{x0:.1f}" '
            f'y="{y:.1f}" width="{box:.1f}" height="{height:.1f}" rx="8" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="2"/>'
        )
        line = y + _PAD + _LINE * 0.7
        bold = 'font-weight="bold"'
        body.append(_text(x0 + box / 2, line, _title(number, step), style=bold))
        line += _LINE * 0.5
        for op in ops:
            body.append(
                f'<rect class="op" x="{x0 + _PAD:.1f}" y="{line:.1f}" '
                f'width="{box - 2 * _PAD:.1f}" height="{_LINE * 1.2:.1f}" rx="3" fill="#fff" '
                f'stroke="{stroke}"/>'
            )
            body.append(_text(x0 + box / 2, line + _LINE * 0.85, op))
            line += _LINE * 1.5
        for fact in facts:
            line += _LINE * 0.9
            body.append(_text(x0 + box / 2, line, fact, style='fill="#555"'))
        body.append("</g>")
        for place, pair in enumerate(given[number - 1]):
            at = y + _PAD + _LINE * (0.6 + 1.2 * place)
            body.append(_text(left, at + 4, label(pair), "end"))
            body.append(_arrow(f"M{left + 4:.1f} {at:.1f} H{x0 - 2:.1f}"))
        for place, pair in enumerate(gives[number - 1]):
            at = y + height - _PAD - _LINE * (0.6 + 1.2 * place)
            body.append(_text(out, at + 4, label(pair), "start"))
            body.append(_arrow(f"M{x0 + box:.1f} {at:.1f} H{out - 4:.1f}"))
        y += height + _GAP
    lane = 0
    arrived: Counter[int] = Counter()
    for index, pairs in enumerate(made_before):
        for place, pair in enumerate(pairs):
            source = producers[pair[0]]
            if source == index - 1:
                x = x0 + box * (place + 1) / (len(pairs) + 1)
                body.append(_arrow(f"M{x:.1f} {bottoms[source]:.1f} V{tops[index] - 2:.1f}"))
                middle = (bottoms[source] + tops[index]) / 2 + 4
                body.append(_text(x - 6, middle + _LINE * (place % 2 - 0.5), label(pair), "end"))
                continue
            x = x0 + box + _PAD + _LANE * lane
            start = bottoms[source] - 4 - 3 * (lane % 4)
            stop = tops[index] + 8 + _LINE * arrived[index]
            body.append(
                _arrow(f"M{x0 + box:.1f} {start:.1f} H{x:.1f} V{stop:.1f} H{x0 + box + 2:.1f}")
            )
            beside = x0 + box + _PAD + _LANE * len(skips)
            body.append(_text(beside, stop + 4, label(pair), "start"))
            lane += 1
            arrived[index] += 1
    width = max(
        out + max(right, _width(skips)),
        len(heading) * _CHAR + 2 * _PAD,
        len(record.id) * _CHAR + 2 * _PAD,
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
            f'viewBox="0 0 {width:.0f} {y:.0f}" font-family="DejaVu Sans Mono, monospace" '
            'font-size="12">',
            f"<title>{escape(heading)}</title>",
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>',
            '<rect class="paper" width="100%" height="100%" fill="#fff"/>',
            _text(_PAD, _LINE * 1.2, heading, "start", 'font-weight="bold"'),
            _text(_PAD, _LINE * 2.2, record.id, "start", 'fill="#777"'),
            *body,
            "</svg>",
            "",
        ]
    )


# -- Graphviz --------------------------------------------------------------------------------------


def _quoted(text: str) -> str:
    return '"' + clean(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def dot(record: PlanRecord) -> str:
    """The picture as a graph for Graphviz: a cluster for each step, its ops in a row within it."""
    lines = ["digraph plan {", "  compound=true;", f"  label={_quoted(record.summary)};"]
    lines += ["  labelloc=t;", "  node [shape=box, style=filled, fillcolor=white];"]
    producers = _producers(record)
    for number, step in enumerate(record.steps, 1):
        fill, stroke = _COLORS[step.kind]
        label = ", ".join([_title(number, step), *_facts(step)])
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(label)};"]
        lines.append(f'    style="filled,rounded"; fillcolor="{fill}"; color="{stroke}";')
        names = [f"s{number}_{place}" for place in range(max(1, len(ops_of(step))))]
        for name, op in zip(names, ops_of(step) or ["nothing"], strict=True):
            lines.append(f"    {name} [label={_quoted(op)}];")
        if len(names) > 1:
            lines.append(f"    {' -> '.join(names)} [style=dotted, arrowhead=none];")
        lines.append("  }")
    for number, step in enumerate(record.steps, 1):
        for name, kind in step.inputs:
            to = f"s{number}_0"
            if producers.get(name, number) < number - 1:
                source = producers[name] + 1
                last = max(0, len(ops_of(record.steps[source - 1])) - 1)
                ends = f"ltail=cluster_{source}, lhead=cluster_{number}"
                lines.append(f"  s{source}_{last} -> {to} [label={_quoted(kind)}, {ends}];")
            else:
                tensor = _quoted(f"{name}: {kind}")
                lines.append(f"  {tensor} [shape=plain, fillcolor=none];")
                lines.append(f"  {tensor} -> {to} [lhead=cluster_{number}];")
    for name, index in _results(record).items():
        step = record.steps[index]
        tensor = _quoted(f"{name}: {dict(step.outputs)[name]}")
        last = max(0, len(ops_of(step)) - 1)
        lines.append(f"  {tensor} [shape=plain, fillcolor=none];")
        lines.append(f"  s{index + 1}_{last} -> {tensor} [ltail=cluster_{index + 1}];")
    return "\n".join([*lines, "}", ""])


FORMATS: Mapping[str, Callable[[PlanRecord], str]] = {".svg": svg, ".dot": dot}
