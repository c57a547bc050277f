"""A table with one line per method, ours and others', and the same table in Markdown. Knows no result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BoardLine:
    """One method, with its numbers as they are printed."""

    name: str
    about: str  # whose it is, and what was trained
    numbers: Mapping[str, str]  # by column; empty: not yet measured
    ours: bool


@dataclass(frozen=True)
class Board:
    """The lines in the order in which they are printed."""

    columns: Sequence[str]
    lines: Sequence[BoardLine]


def markdown(board: Board) -> str:
    """The table in Markdown; our lines are bold."""
    rows = [["", "", *board.columns], ["---", "---", *["---:"] * len(board.columns)]]
    for line in board.lines:
        name = f"**{line.name}**" if line.ours else line.name
        rows.append([name, line.about, *(line.numbers.get(column, "") for column in board.columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
