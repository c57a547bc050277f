"""Our numbers beside published ones: the rows of such a table, and the table in Markdown.

Our accuracies are fractions, one per seed; published ones are in per cent, as printed. Several seeds are summarised as
in the paper: median ± standard deviation. Knows neither recipes nor result files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal

import numpy as np

Published = tuple[float, float | None]  # per cent: value, and standard deviation if published


@dataclass(frozen=True)
class Ours:
    """One cell of a table: the same measurement under every seed."""

    values: tuple[float, ...]  # fractions, one per seed
    n: int  # images
    right: tuple[bytes, ...] = ()  # per seed, one byte per image: 1 = right. Empty unless known for every seed

    @property
    def median(self) -> float:
        """The median over seeds, in per cent."""
        return 100 * statistics.median(self.values)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, in points; None with one seed."""
        return 100 * statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def text(self) -> str:
        """'84.12', or '84.12 ± 0.21'."""
        return spell((self.median, self.spread))


@dataclass(frozen=True)
class TableRow:
    """One method: our numbers and the paper's."""

    label: str
    about: str  # what we trained: network, epochs, seeds
    ours: Mapping[str, Ours]  # column -> cell; empty if nothing is measured yet
    paper: Mapping[str, Published] = field(default_factory=dict)
    paper_about: str = ""  # the paper's network
    backprops: float | None = None  # mean per image in training


def rounded(number: float, *, sign: bool = False) -> str:
    """One decimal, rounded half up. Formatting a float rounds its binary value instead (79.3 for 79.35)."""
    exact = Decimal(f"{number:.6f}").quantize(Decimal("0.1"), ROUND_HALF_UP) + 0  # + 0: no -0.0
    return f"{exact:+f}" if sign else f"{exact:f}"


def noise_of(one: Ours, other: Ours) -> float:
    """Two standard errors of the difference, in percentage points: over images, and over seeds if there are several.

    Both methods are tested on the same images, and most images are right for both or wrong for both. Where the result
    of every image is known, the error is that of the paired difference. Otherwise the two accuracies are taken as
    independent, which overestimates it.
    """
    if one.right and other.right and one.n == other.n:
        shares = [
            np.frombuffer(b"".join(cell.right), np.uint8).reshape(-1, cell.n).mean(axis=0) for cell in (one, other)
        ]
        images = 100**2 * float(np.var(shares[0] - shares[1])) / one.n
    else:
        images = sum(cell.median * (100 - cell.median) / cell.n for cell in (one, other))
    return 2 * math.sqrt(images + _of_seeds(one, other) + _of_seeds(other, one))


def _of_seeds(cell: Ours, other: Ours) -> float:
    """Variance of a median over seeds. With a single seed, the other cell's spread is used."""
    spread = cell.spread if cell.spread is not None else other.spread or 0.0
    count = len(cell.values)
    return spread**2 / count * (math.pi / 2 if count > 2 else 1.0)  # a median varies more than a mean


def spell(value: Published) -> str:
    """'84.12', or '84.12 ± 0.21'."""
    number, spread = value
    return f"{number:.2f}" if spread is None else f"{number:.2f} ± {spread:.2f}"


def as_printed(value: Published) -> str:
    """'84.12 ± 0.221': as in the paper, which prints deviations with three decimals."""
    number, spread = value
    return f"{number:.2f}" if spread is None else f"{number:.2f} ± {spread:.3f}"


def best(rows: Sequence[TableRow], column: str) -> str | None:
    """The text of the best of our cells in a column, where there are at least two."""
    cells = [row.ours[column] for row in rows if column in row.ours]
    return max(cells, key=lambda cell: cell.median).text if len(cells) > 1 else None


def markdown(columns: Sequence[str], rows: Sequence[TableRow]) -> str:
    """The table in Markdown, two lines per method: ours, and the paper's. The best of ours is bold."""
    head = ["", "", *columns, "BPs"]
    lines = [head, ["---", "---", *(["---:"] * (len(columns) + 1))]]
    for row in rows:
        ours = []
        for column in columns:
            cell = row.ours.get(column)
            ours.append("" if cell is None else f"**{cell.text}**" if cell.text == best(rows, column) else cell.text)
        if row.ours:
            lines.append([row.label, f"ours, {row.about}", *ours, _backprops(row)])
        else:
            lines.append([row.label, "ours: not yet measured", *ours, ""])
        if row.paper:
            paper = [as_printed(row.paper[column]) if column in row.paper else "" for column in columns]
            lines.append(["", f"paper, {row.paper_about}", *paper, ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _backprops(row: TableRow) -> str:
    return "" if row.backprops is None else f"{row.backprops:.1f}"
