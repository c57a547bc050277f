"""What a page shows, as data: methods, drawings, pictures, and the paper's tables and figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from sparring.report.board import Board
from sparring.report.comparison import TableRow


@dataclass(frozen=True)
class Method:
    """One row of the table of methods, and one line in each of its figures."""

    name: str
    about: str
    accuracies: Mapping[str, float]  # fractions, on test data: "Natural", "FGSM", "PGD-20", ...
    backprops: float | None  # mean backward passes per training image; None: unknown
    seconds: float | None
    history: Sequence[Mapping[str, Any]]  # the records of metrics.jsonl; may be empty
    measured: str = ""  # how the accuracies were measured: eps, images, protocol. Only equal ones are compared
    doubts: Sequence[str] = ()  # reasons not to believe them
    task: str = ""  # data, network, epochs. Costs are compared only where it is equal
    held_out: int = 0  # validation images behind the history; 0: unknown
    images: str = ""  # the data set. Training curves share a drawing only where it is equal
    validated_at: str = ""  # the radius of the history's PGD-10, likewise
    spread: Mapping[str, float] = field(default_factory=dict)  # of accuracies over seeds, where there are several
    bands: Sequence[Mapping[str, float]] = ()  # of the history's numbers over seeds, one per record
    by_class: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # column -> class -> accuracy


@dataclass(frozen=True)
class Sweep:
    """What differs between the methods of a page, and what they share."""

    columns: Sequence[str]  # the settings that differ
    rows: Sequence[tuple[str, Sequence[str]]]  # a method's name and its values; '' where it has none
    common: str = ""  # the other settings, in one line
    drawings: Sequence[Drawing] = ()


@dataclass(frozen=True)
class Drawing:
    """A figure as inline SVG, with its caption."""

    svg: Markup  # drawn by `charts`: text is paths, or escaped
    caption: str
    heading: str = ""  # of the group of drawings that starts with this one


@dataclass(frozen=True)
class Picture:
    """A figure as PNG, for what has too many points for SVG."""

    png: bytes
    alt: str
    caption: str
    narrow: bytes = b""  # the same with its panels stacked, for a phone


@dataclass(frozen=True)
class Exhibit:
    """A table or a figure of the paper, or a benchmark, with our numbers beside the published ones."""

    name: str  # short, for links within the page
    where: str  # in the paper
    title: str
    claim: str  # what the paper claims with it; of a benchmark, the question
    findings: Sequence[str] = ()  # what our numbers say, a sentence or two each
    columns: Sequence[str] = ()
    rows: Sequence[TableRow] = ()
    drawings: Sequence[Drawing] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()
    board: Board | None = None  # of a benchmark: its methods and ours
