"""The paper's machinery on digits: the same path in seconds. Two methods, one of them in two items."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparring.recipes import quickstart
from sparring.recipes.paper import Course, Item, Robustness, Row
from sparring.reproduce import Bench, carry_out, plan
from sparring.schedules import constant

_ATTACK = replace(quickstart.FAT.attack, steps=2, tau=constant(0))
FAT = replace(quickstart.FAT, epochs=2, batch_size=256, attack=_ATTACK)
MADRY = replace(FAT, objective="madry")
LIMIT = 24  # test images

TABLE = Item(
    name="table-tiny",
    where="Table 0",
    title="FAT against Madry on digits",
    see="FAT is more accurate.",
    kind="table",
    rows=(
        Row(
            "madry",
            "Madry",
            Robustness("mart"),
            {"lite": MADRY},
            {"Natural": (87.3, None), "PGD-20": (45.8, None)},
            "m",
        ),
        Row(
            "fat",
            "FAT",
            Robustness("mart"),
            {"lite": FAT, "full": replace(FAT, epochs=3)},
            {"Natural": (89.34, 0.221), "PGD-20": (46.13, 0.409)},
            "m",
        ),
    ),
    lite="two epochs",
    columns={"Natural": "natural", "FGSM": "fgsm", "PGD-20": "pgd20", "C&W": "cw30"},
    trials=3,
)
COURSE = Item(
    name="fig-tiny",
    where="Figure 0",
    title="Back-propagations",
    see="They grow.",
    kind="course",
    rows=(Row("fat", "tau 2", Course(), {"lite": FAT}, group="FAT, Tiny CNN"),),
    lite="two epochs",
    xlabel="epoch",
)


def planned(item, folder, **more):
    given = {"scale": "lite", "limit": LIMIT, **more}
    return plan(item, runs_folder=folder / "runs", results_folder=folder / "results", **given)


@pytest.fixture
def bench():
    return Bench(torch.device("cpu"))


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """A folder in which both items are measured; nobody writes to it."""
    folder = tmp_path_factory.mktemp("measured")
    bench = Bench(torch.device("cpu"))
    carry_out([*planned(TABLE, folder), *planned(COURSE, folder)], bench)
    return folder
