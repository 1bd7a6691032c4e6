"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Rows as lines, the first `left` columns flush left and the others flush right.

    Example:
      >>> from jqobs.reporting.tables import table
      >>> print(table([["site", "seen"], ["conv", "2"]], left=1))
      site  seen
      conv     2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
