"""The paper's tables and figures and a public benchmark by name. Each row or point is a declaration, at two scales."""

import re

from sparring.errors import unknown
from sparring.paper.specs.fastat import BENCHMARKS
from sparring.paper.specs.figures import FIGURES
from sparring.paper.specs.illustrations import PICTURES
from sparring.paper.specs.item import (
    Course,
    Item,
    Losses,
    Measure,
    Mixture,
    Motivation,
    PublishedMethod,
    Robustness,
    Row,
    Scale,
)
from sparring.paper.specs.tables import TABLES

ITEMS: dict[str, Item] = {item.name: item for item in (*TABLES, *PICTURES, *FIGURES, *BENCHMARKS)}


def find(name: str) -> Item:
    """An item by its name (table1, fig-tau) or by the number of its figure (figure1, fig-1)."""
    number = re.fullmatch(r"fig(?:ure)?[ -]?(\d+)", name.lower())
    if number:
        for item in FIGURES + PICTURES:
            if number[1] in re.findall(r"\d+", item.where.partition("(")[0]):  # "Figures 6, 7 (Sec. 6.1) and App. G"
                return item
    if name not in ITEMS:
        raise unknown("item", name, ITEMS)
    return ITEMS[name]


__all__ = [
    "ITEMS",
    "Course",
    "Item",
    "Losses",
    "Measure",
    "Mixture",
    "Motivation",
    "PublishedMethod",
    "Robustness",
    "Row",
    "Scale",
    "find",
]
