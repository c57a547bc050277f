"""A table and a figure on digits that take seconds. Two methods, one of them in both items."""

from __future__ import annotations

from dataclasses import replace

from sparring.paper import plan
from sparring.paper.specs import Course, Item, Robustness, Row
from sparring.recipes import digits
from sparring.training.config import with_objective

FAT = with_objective(replace(digits.FAT, epochs=2, batch_size=256), steps=2, tau=0)
MADRY = with_objective(FAT, "madry")
IMAGES = 450  # test images

TABLE = Item(
    name="table-tiny",
    where="Table 0",
    title="FAT against Madry on digits",
    claim="FAT is more accurate.",
    kind="table",
    rows=(
        Row(
            "madry",
            "Madry",
            Robustness("quick"),
            {"lite": MADRY},
            {"Natural": (87.3, None), "PGD-20": (45.8, None)},
            "m",
        ),
        Row(
            "fat",
            "FAT",
            Robustness("quick"),
            {"lite": FAT, "full": replace(FAT, epochs=3)},
            {"Natural": (89.34, 0.221), "PGD-20": (46.13, 0.409)},
            "m",
            against="madry",
        ),
    ),
    lite="two epochs",
    columns={"Natural": "natural", "PGD-20": "pgd10"},  # ten steps are enough here
    trials=3,
)
COURSE = Item(
    name="fig-tiny",
    where="Figure 0",
    title="Back-propagations",
    claim="They grow.",
    kind="course",
    rows=(Row("fat", "tau 2", Course(), {"lite": FAT}, group="FAT, Tiny CNN"),),
    lite="two epochs",
    xlabel="epoch",
)


def planned(item, folder, **more):
    return plan(item, runs_folder=folder / "runs", results_folder=folder / "results", **{"scale": "lite", **more})
