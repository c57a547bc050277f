"""The training objectives: FAT, the methods it is compared with, and `contrib/`, what did not beat it.

`OBJECTIVES` maps every objective's name to its dataclass. It is found, not listed: a new method is one new module here
that holds a dataclass with a `name`.
"""

import dataclasses
import importlib
import pkgutil
from typing import Any

from sparring.objectives import contrib
from sparring.objectives.ates import ATES
from sparring.objectives.base import (
    Attack,
    EpochMetrics,
    KTauAttack,
    KTauPGD,
    NoAttack,
    Objective,
    Progress,
    Search,
    Step,
)
from sparring.objectives.cat import CAT
from sparring.objectives.dat import DAT
from sparring.objectives.fat import FAT
from sparring.objectives.fat_for_mart import FATForMART
from sparring.objectives.fat_for_trades import FATForTRADES
from sparring.objectives.madry import Madry
from sparring.objectives.mart import MART
from sparring.objectives.standard import Standard
from sparring.objectives.trades import TRADES

_IN_ORDER = (Standard, Madry, FAT, TRADES, FATForTRADES, MART, FATForMART, CAT, DAT, ATES)  # as lists show them


def _found() -> dict[str, type[Any]]:
    """Every dataclass with a `name` in the modules of this package and of contrib, the paper's first."""
    found: dict[str, type[Any]] = {objective.name: objective for objective in _IN_ORDER}
    for package in (__name__, contrib.__name__):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, type) and dataclasses.is_dataclass(value) and "name" in vars(value):
                    found.setdefault(value.name, value)  # type: ignore[attr-defined]
    return found


OBJECTIVES: dict[str, type[Any]] = _found()

__all__ = [
    "ATES",
    "CAT",
    "DAT",
    "FAT",
    "MART",
    "OBJECTIVES",
    "TRADES",
    "Attack",
    "EpochMetrics",
    "FATForMART",
    "FATForTRADES",
    "KTauAttack",
    "KTauPGD",
    "Madry",
    "NoAttack",
    "Objective",
    "Progress",
    "Search",
    "Standard",
    "Step",
]
