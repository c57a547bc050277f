"""The paper's tables and figures, by name. Each row or point is one declaration, at two scales."""

from sparring.errors import unknown
from sparring.recipes.paper.figures import FIGURES
from sparring.recipes.paper.item import (
    Course,
    Item,
    Losses,
    Measure,
    Mixture,
    Motivation,
    Published,
    Robustness,
    Row,
    Scale,
)
from sparring.recipes.paper.pictures import PICTURES
from sparring.recipes.paper.tables import TABLES

ITEMS: dict[str, Item] = {item.name: item for item in (*TABLES, *FIGURES, *PICTURES)}


def find(name: str) -> Item:
    """The item of that name."""
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
    "Published",
    "Robustness",
    "Row",
    "Scale",
    "find",
]
