"""What the paper shows, as declarations: an item is a table or a figure, a row is one line of it or one point.

A row names what is trained at each scale, what is measured on it, and what the paper printed. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparring.training.config import Config

Scale = Literal["lite", "full"]
Kind = Literal["table", "lines", "course", "mixture", "motivation", "loss"]  # how it is drawn
Published = tuple[float, float | None]  # as printed, in per cent: value, and deviation where there is one


@dataclass(frozen=True)
class Robustness:
    """Accuracy on the test data under a protocol; and under AutoAttack (8/255) on the first so many images."""

    protocol: str
    autoattack: int = 0


@dataclass(frozen=True)
class Course:
    """Nothing beside what training records itself: accuracies and back-propagations by epoch."""


@dataclass(frozen=True)
class Mixture:
    """Where a network's layers put natural, worst-case and friendly data of some classes (Sec. 4.2, App. C)."""

    classes: tuple[str, ...]
    layers: tuple[int, ...]
    images: int  # of each class, the first of the test data
    eps: float = 0.031
    step_size: float = 0.007
    steps: int = 20
    neighbours: int = 10  # that are asked for their class


@dataclass(frozen=True)
class Motivation:
    """Two classes of points in the unit square, a small network, and PGD step by step (Sec. 1)."""

    points: int = 60  # of each class
    gap: float = 0.24  # between the middles of the two bands
    wave: float = 0.09  # how far a band swings
    blur: float = 0.03  # sigma of the points around their band
    hidden: int = 32
    updates: int = 300
    eps: float = 0.24  # the gap: the ball reaches the other class, so PGD can walk into it
    step_size: float = 0.024
    steps: int = 10
    shown: tuple[int, ...] = (0, 2, 4, 6, 8, 10)  # steps that are drawn
    neighbours: int = 10


@dataclass(frozen=True)
class Losses:
    """The loss that each formulation trains on: min-max (PGD) and min-min (early-stopped PGD) (Sec. 3)."""

    images: int
    eps: float
    step_size: float
    steps: int = 10


Measure = Robustness | Course | Mixture | Motivation | Losses


@dataclass(frozen=True)
class Row:
    """One line of a table or one point of a figure."""

    name: str  # unique within the item; also a file name
    label: str  # as it is printed: the method, or the line that a point belongs to
    measure: Measure
    configs: Mapping[Scale, Config | None]  # what is trained at a scale; None: nothing has to be
    paper: Mapping[str, Published] = field(default_factory=dict)  # column -> what the paper printed
    group: str = ""  # the part of the table, or the picture of the figure, that it belongs to
    x: float | None = None  # its place in a figure
    against: str = ""  # the row that it is an improvement on, by the paper


@dataclass(frozen=True)
class Item:
    """A table or a figure of the paper."""

    name: str
    where: str  # in the paper
    title: str
    see: str  # what to look for: what the paper claims with it
    kind: Kind
    rows: tuple[Row, ...]
    lite: str  # what the short scale is
    columns: Mapping[str, str] = field(default_factory=dict)  # as printed -> the attack's name in a result
    xlabel: str = ""
    claim: Literal["", "tau", "radius"] = ""  # of a figure of lines: what is checked on it (reproduce/claims.py)
    marks: tuple[float, ...] = ()  # places that are told in words, beside the first and the last
    together: bool = False  # all groups in one picture, a line each
    trials: int = 1  # the paper's repetitions
    note: str = ""  # where the paper's figures come from, and what others published


def published(text: str, columns: Mapping[str, str]) -> dict[str, Published]:
    """A line of a table as it is printed: '89.34±0.221 65.52 -', one entry a column, - where there is none."""
    found: dict[str, Published] = {}
    for column, entry in zip(columns, text.split(), strict=True):
        value, _, spread = entry.partition("±")
        if value != "-":
            found[column] = (float(value), float(spread) if spread else None)
    return found
