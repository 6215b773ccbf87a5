"""Text tables."""

from __future__ import annotations


def ruled(rows: list[tuple[str, ...]], totals: int = 0) -> list[str]:
    """Return the lines of a table with a rule below the header and above the last `totals` rows."""
    lines = aligned(rows)
    rule = "-" * max(map(len, lines))
    end = len(lines) - totals
    return [lines[0], rule, *lines[1:end], *([rule] if totals else []), *lines[end:]]


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table; the first two columns are left-aligned, the rest right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
