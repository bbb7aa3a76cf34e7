"""One way to print a table: drawn by rich on a terminal, plain aligned text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print ``rows`` under ``columns`` on standard output.

    ``styles`` gives rich's style ("bold red") to cells by their text; plain text has none. Plain
    columns are separated by two spaces, and the last one is not padded; a terminal folds it.
    """
    if sys.stdout.isatty():
        _print_rich(columns, rows, title, styles or {})
    else:
        print(plain_table(columns, rows, title), end="")


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """The table as aligned text, one line for each row, to be read by people and by ``grep``."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    text = [title] if title else []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text) + "\n"


def _print_rich(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, styles: Mapping[str, str]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    Console().print(table)
