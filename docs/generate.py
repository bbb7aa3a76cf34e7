"""Write the tables that come from the code: `python docs/generate.py`.

README.md holds the table of environment variables, docs/ops.md the table of ops. Each stands
between a pair of markers; a test holds that they say what the code says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cudnngraph import Graph, settings
from cudnngraph.ops import OPS, REQUIRED, Op

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


TABLES: Mapping[tuple[str, str], Callable[[], str]] = {
    ("README.md", "environment variables"): settings.markdown_table,
    ("docs/ops.md", "ops"): ops_table,
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
