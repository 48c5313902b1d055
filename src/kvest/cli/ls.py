"""`kvest ls`: names, and the first line of what they do."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from kvest.grammar import TABLES
from kvest.named import NAMED


def ls(kind: str) -> None:
    """Print one table."""
    table = Table(box=None, show_header=False, pad_edge=False)
    if kind == "policies":
        for name, sentence in NAMED.items():
            table.add_row(name, f"{sentence}@BUDGET")
    else:
        for name, part in TABLES[kind.removesuffix("s")].items():
            module = sys.modules[part.__module__].__doc__ or ""
            several = part.__module__ == "kvest.correct"  # one file, several corrections
            table.add_row(name, ((part.__doc__ or "") if several else module).strip().splitlines()[0])
    Console().print(table, soft_wrap=True)
