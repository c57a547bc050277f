"""`sparring recipes`: the list, the points of one figure, or one recipe in full."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.table import Table

from sparring import recipes
from sparring.cli.arguments import parse
from sparring.cli.console import Screen
from sparring.recipes import digits
from sparring.training import config

DESCRIPTION = """List the recipes, or show one in full.

Examples:
  sparring recipes
  sparring recipes fat-cifar10-resnet18
  sparring recipes no-projection"""


# Data set -> protocol of the expected accuracies; `sparring train` suggests the same protocol.
PROTOCOLS = {"digits": "mart", "cifar10": "dat"}


@dataclass(frozen=True)
class Options:
    """What to list or show."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe, or a group of recipes; all by default."""


def run(argv: list[str]) -> int:
    """The command."""
    name = parse(Options, argv, prog="sparring recipes", description=DESCRIPTION).name
    console = Screen()
    groups = recipes.groups()
    if name is None or name in groups:
        shown = groups[name] if name else [recipe for recipe in recipes.RECIPES.values() if not recipe.group]
        table = Table(box=None, pad_edge=False)
        table.add_column("recipe", no_wrap=True)
        table.add_column(
            "what; cost; expected natural / PGD-20 accuracy, % "
            f"(digits: protocol {PROTOCOLS['digits']}, CIFAR-10: {PROTOCOLS['cifar10']})"
        )
        for recipe in shown:
            table.add_row(recipe.name, f"{recipe.about}; {recipe.cost}; {recipe.expect}")
        for group, members in groups.items() if name is None else ():
            table.add_row(group, f"{len(members)} recipes, from {members[0].name}: sparring recipes {group}")
        console.print(table)
        if any(recipe.config.data == "digits" for recipe in shown):
            console.print(f"\nExpected on digits: {digits.MEASURED}", highlight=False)
        console.print("\nOne in full: sparring recipes NAME    Run one: sparring train NAME")
        return 0
    recipe = recipes.find(name)
    console.print(f"{recipe.name}: {recipe.about}\ncost: {recipe.cost}\nexpect: {recipe.expect}", highlight=False)
    if recipe.config.data == "digits":
        console.print(f"measured: protocol {PROTOCOLS['digits']}, {digits.MEASURED}", highlight=False)
    console.print(f"run it: {recipe.command}\n", highlight=False)
    console.print_json(json.dumps(config.to_json(recipe.config)))
    return 0
