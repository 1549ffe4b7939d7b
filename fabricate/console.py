"""How things are shown: tables that fit a terminal and stay whole in a file, sizes, many names. Must not know what is in them."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: folded to the terminal's width, and as wide as it needs to be in a file or a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


def size_text(count: float) -> str:
    """Bytes for a reader: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def few(names: Sequence[str]) -> str:
    """Many names for a reader: the first four, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
