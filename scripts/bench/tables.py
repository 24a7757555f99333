"""Tables that are Markdown, and text as well."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, padded so that it reads as text, too; the bar inside a layout is escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for place, row in enumerate(cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if place == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
