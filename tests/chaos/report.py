"""What was tried and what survived it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    tried: int
    survived: int
    note: str


@dataclass(slots=True)
class Report:
    """The table's lines, and the numbers of the JSON line."""

    rows: list[Row] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, tried: int, survived: int, note: str = "") -> None:
        """Add a line and show it."""
        self.rows.append(Row(what, tried, survived, note))
        self.progress(f"{what}: {survived} of {tried} survived")

    def progress(self, text: str) -> None:
        """Show what is being done."""
        print(text, file=sys.stderr, flush=True)

    @property
    def all_survived(self) -> bool:
        """Whether nothing that was tried did damage."""
        return all(row.tried == row.survived for row in self.rows)

    def table(self) -> str:
        """The lines as Markdown."""
        lines = [f"| {row.what} | {row.tried:,} | {row.survived:,} | {row.note} |" for row in self.rows]
        return "\n".join(["| what | tried | survived | |", "|---|--:|--:|---|", *lines])
