"""Lines and tables on a rich console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]


def say(console: Console, text: str) -> None:
    """Print a line without wrapping it, because a wrapped path could not be copied."""
    console.print(Text(text), soft_wrap=True)


def new_table(title: str, *columns: str) -> Table:
    """Return a table; columns are right-aligned, except those whose heading starts with "<"."""
    heading = Text(title, style="bold")
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for column in columns:
        if column.startswith("<"):
            table.add_column(column.removeprefix("<"))
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def table_of(title: str, columns: Mapping[str, str], rows: Iterable[Row]) -> Table:
    """Return a table of rows.

    Args:
        title: the title.
        columns: the format string of each column's cells by its heading, such as
            ``{"ms": "{milliseconds:.1f}"}``. A cell whose value is None is empty.
        rows: the values by name.
    """
    table = new_table(title, *columns)
    for row in rows:
        table.add_row(*(_cell(form, row) for form in columns.values()))
    return table


def _cell(form: str, row: Row) -> str:
    try:
        return form.format_map(row)
    except TypeError:  # None takes no format
        return ""
