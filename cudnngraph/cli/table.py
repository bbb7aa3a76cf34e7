"""One way to print a table: drawn by rich on a terminal, plain aligned text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

FOLDED = 24  # characters to which a cell may be folded on a terminal


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    styles: Mapping[str, str] | None = None,
    expendable: Sequence[str] = (),
) -> None:
    """Print ``rows`` under ``columns`` on standard output.

    ``styles`` gives rich's style ("bold red") to cells by their text; plain text has none. Plain
    columns are separated by two spaces, and the last one is not padded. A terminal folds the last
    column; one that is too narrow goes without those that are ``expendable``, first come first
    gone, which a line says, and then folds every wide column, and at last every column.
    """
    if sys.stdout.isatty():
        _print_rich(columns, rows, title, styles or {}, expendable)
    else:
        print(plain_table(columns, rows, title), end="")


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """The table as aligned text, one line for each row, to be read by people and by ``grep``."""
    widths = _widths(columns, rows)
    text = [title] if title else []
    for line in (columns, *rows):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text) + "\n"


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Characters of the widest cell of each column."""
    return [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]


def _drawn_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Characters that the table takes when it is drawn, the last column folded."""
    *others, last = _widths(columns, rows)
    return sum(others) + min(last, FOLDED) + 3 * len(columns) + 1


def _print_rich(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str,
    styles: Mapping[str, str],
    expendable: Sequence[str],
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    left_out = []
    for name in expendable:
        if _drawn_width(columns, rows) <= console.width:
            break
        at = list(columns).index(name)
        left_out.append(name)
        columns = [*columns[:at], *columns[at + 1 :]]
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    tight = _drawn_width(columns, rows) > console.width
    widths = _widths(columns, rows)
    # rich cuts off what is not wrapped and has no room, without a sign of it.
    folded = sum(min(width, FOLDED) for width in widths) + 3 * len(columns) + 1
    whole = folded <= console.width
    table = Table(title=title or None, title_justify="left")
    for column, width in zip(columns[:-1], widths, strict=False):
        table.add_column(column, no_wrap=whole and not (tight and width > FOLDED), overflow="fold")
    no_wrap = whole and tight and widths[-1] <= FOLDED
    table.add_column(columns[-1], no_wrap=no_wrap, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    console.print(table)
    if left_out:
        print(f"too narrow for {', '.join(left_out)}: pipe it, or --json")
