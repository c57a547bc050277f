"""The paper's tables and figures as declarations: an item is a table or a figure, a row is one line or one point of it.

A row declares what is trained at each scale, what is measured on it, and what the paper printed. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparring.report.comparison import Published
from sparring.training.config import Config

Scale = Literal["lite", "full"]
ItemKind = Literal["table", "lines", "course", "mixture", "motivation", "loss", "benchmark"]  # how an item is drawn


@dataclass(frozen=True)
class Robustness:
    """Accuracy on the test data under a protocol, and under AutoAttack (8/255) on the first images."""

    protocol: str
    autoattack: int = 0  # number of images; 0: no AutoAttack


@dataclass(frozen=True)
class Course:
    """Only what training itself records: accuracies and backward passes by epoch."""


@dataclass(frozen=True)
class Mixture:
    """Layer outputs of a network on natural, worst-case and friendly data of some classes (Sec. 4.2, App. C)."""

    classes: tuple[str, ...]
    layers: tuple[int, ...]
    images: int  # per class, the first of the test data
    eps: float = 0.031
    step_size: float = 0.007
    steps: int = 20
    neighbours: int = 10  # nearest neighbours whose classes are counted


@dataclass(frozen=True)
class Motivation:
    """Two classes of points in the unit square, a small network, and PGD step by step (Sec. 1)."""

    points: int = 60  # per class
    gap: float = 0.24  # between the centres of the two bands
    wave: float = 0.09  # amplitude of the bands
    blur: float = 0.03  # standard deviation of the points around their band
    hidden: int = 32
    updates: int = 300
    eps: float = 0.24  # equal to the gap, so that PGD can reach the other class
    step_size: float = 0.024
    steps: int = 10
    shown: tuple[int, ...] = (0, 2, 4, 6, 8, 10)  # the steps drawn
    neighbours: int = 10


@dataclass(frozen=True)
class Losses:
    """The training loss of each formulation: min-max (PGD) and min-min (early-stopped PGD) (Sec. 3)."""

    images: int
    eps: float
    step_size: float
    steps: int = 10


Measure = Robustness | Course | Mixture | Motivation | Losses


@dataclass(frozen=True)
class Row:
    """One line of a table or one point of a figure."""

    name: str  # unique within the item; also a file name
    label: str  # as printed: the method, or the line that a point belongs to
    measure: Measure
    configs: Mapping[Scale, Config | None]  # what is trained at each scale; None: nothing
    paper: Mapping[str, Published] = field(default_factory=dict)  # column -> what the paper printed
    group: str = ""  # its part of the table, or its picture of the figure
    x: float | None = None  # its x in a figure
    against: str = ""  # its baseline in the paper: the name of a row


@dataclass(frozen=True)
class PublishedMethod:
    """A method that others trained and measured, as they printed it; accuracies in per cent."""

    name: str
    natural: float
    pgd10: float
    pgd20: float
    pgd50: float
    autoattack: float
    autoattack_spread: float  # standard deviation over the seeds
    seconds: float  # of the whole training
    memory_gib: float


@dataclass(frozen=True)
class Item:
    """A table or a figure of the paper, or a benchmark of others."""

    name: str
    where: str  # in the paper
    title: str
    claim: str  # what the paper claims with it; of a benchmark, the question
    kind: ItemKind
    rows: tuple[Row, ...]
    lite: str  # what is shorter at lite scale
    columns: Mapping[str, str] = field(default_factory=dict)  # as printed -> name of the attack in a result
    xlabel: str = ""
    check: Literal["", "tau", "radius", "best"] = ""  # of a line figure: the claim that `paper.claims` checks
    marks: tuple[float, ...] = ()  # x values that findings report, in addition to the first and the last
    together: bool = False  # all groups share one picture
    trials: int = 1  # seeds in the paper
    note: str = ""  # the source of the paper's numbers, and what others published
    others: tuple[PublishedMethod, ...] = ()  # of a benchmark: its own methods


def published(text: str, columns: Mapping[str, str]) -> dict[str, Published]:
    """Parse a line of a table as printed: '89.34±0.221 65.52 -', one entry per column, '-' for none."""
    found: dict[str, Published] = {}
    for column, entry in zip(columns, text.split(), strict=True):
        value, _, spread = entry.partition("±")
        if value != "-":
            found[column] = (float(value), float(spread) if spread else None)
    return found
