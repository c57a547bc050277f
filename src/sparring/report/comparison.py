"""Our numbers beside published ones: the lines of such a table, and the table in Markdown.

An accuracy of ours is a fraction a seed; a published one is in per cent, as printed. Several seeds are told as the
paper tells its trials: median ± standard deviation. Knows neither recipes nor results' files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal

import numpy as np

Published = tuple[float, float | None]  # in per cent: value, and deviation where there is one


@dataclass(frozen=True)
class Ours:
    """One cell: the same measurement under every seed."""

    values: tuple[float, ...]  # fractions
    n: int  # images
    right: tuple[bytes, ...] = ()  # a byte an image: 1 where it is right; empty where that is not known of every seed

    @property
    def middle(self) -> float:
        """The median over seeds, in per cent."""
        return 100 * statistics.median(self.values)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, in points; None with one seed."""
        return 100 * statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def text(self) -> str:
        """'84.12', or '84.12 ± 0.21'."""
        return spell((self.middle, self.spread))


@dataclass(frozen=True)
class Line:
    """One method."""

    label: str
    about: str  # what was trained here: network, epochs, seeds
    ours: Mapping[str, Ours]  # column -> cell; empty where nothing is measured yet
    paper: Mapping[str, Published] = field(default_factory=dict)
    paper_about: str = ""  # the paper's network
    backprops: float | None = None  # mean per image in training


def rounded(number: float, *, sign: bool = False) -> str:
    """To one decimal, half up as a reader would; binary fractions would decide by chance (79.3 for 79.35)."""
    exact = Decimal(f"{number:.6f}").quantize(Decimal("0.1"), ROUND_HALF_UP) + 0  # + 0: no -0.0
    return f"{exact:+f}" if sign else f"{exact:f}"


def noise_of(one: Ours, other: Ours) -> float:
    """Two standard errors of the difference, in points: of the images, and of the seeds where there are several.

    Both methods see the same images, most of which both get right or both wrong: where the verdicts are known, only the
    rest is noise. Else they are taken as independent, which finds a difference late.
    """
    if one.right and other.right and one.n == other.n:
        shares = [
            np.frombuffer(b"".join(cell.right), np.uint8).reshape(-1, cell.n).mean(axis=0) for cell in (one, other)
        ]
        images = 100**2 * float(np.var(shares[0] - shares[1])) / one.n
    else:
        images = sum(cell.middle * (100 - cell.middle) / cell.n for cell in (one, other))
    return 2 * math.sqrt(images + _of_seeds(one, other) + _of_seeds(other, one))


def _of_seeds(cell: Ours, other: Ours) -> float:
    """The variance of a median over seeds. Where there is one seed, the other's stand for how far seeds lie apart."""
    spread = cell.spread if cell.spread is not None else other.spread or 0.0
    count = len(cell.values)
    return spread**2 / count * (math.pi / 2 if count > 2 else 1.0)  # a median scatters more than a mean


def spell(value: Published) -> str:
    """Two decimals, and the deviation where there is one."""
    number, spread = value
    return f"{number:.2f}" if spread is None else f"{number:.2f} ± {spread:.2f}"


def as_printed(value: Published) -> str:
    """As the paper prints it: a deviation has three decimals there."""
    number, spread = value
    return f"{number:.2f}" if spread is None else f"{number:.2f} ± {spread:.3f}"


def best(lines: Sequence[Line], column: str) -> str | None:
    """The text of the best of our cells, where there are two or more to compare."""
    cells = [line.ours[column] for line in lines if column in line.ours]
    return max(cells, key=lambda cell: cell.middle).text if len(cells) > 1 else None


def markdown(columns: Sequence[str], lines: Sequence[Line]) -> str:
    """Two rows a method: ours, and the paper's; the best of ours is bold."""
    head = ["", "", *columns, "BPs"]
    rows = [head, ["---", "---", *(["---:"] * (len(columns) + 1))]]
    for line in lines:
        ours = []
        for column in columns:
            cell = line.ours.get(column)
            ours.append("" if cell is None else f"**{cell.text}**" if cell.text == best(lines, column) else cell.text)
        if line.ours:
            rows.append([line.label, f"ours, {line.about}", *ours, _backprops(line)])
        else:
            rows.append([line.label, "ours: not yet measured", *ours, ""])
        if line.paper:
            paper = [as_printed(line.paper[column]) if column in line.paper else "" for column in columns]
            rows.append(["", f"paper, {line.paper_about}", *paper, ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _backprops(line: Line) -> str:
    return "" if line.backprops is None else f"{line.backprops:.1f}"
