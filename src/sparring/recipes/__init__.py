"""Recipes: named configurations, each one readable declaration with its cost and what to expect."""

from sparring.errors import UserError, unknown
from sparring.recipes.cifar10 import CIFAR10
from sparring.recipes.digits import DIGITS
from sparring.recipes.no_projection import APPENDIX_B
from sparring.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*DIGITS, *CIFAR10, *APPENDIX_B)}


def find(name: str) -> Recipe:
    """The recipe of that name."""
    if name in groups():
        raise UserError(f"{name!r} is a group of {len(groups()[name])} recipes. Choose one: sparring recipes {name}.")
    if name not in RECIPES:
        listed = [recipe.name for recipe in RECIPES.values() if not recipe.group]
        raise unknown("recipe", name, [*listed, *groups()])
    return RECIPES[name]


def groups() -> dict[str, list[Recipe]]:
    """The recipes that are points of one figure, by the name of their group."""
    found: dict[str, list[Recipe]] = {}
    for recipe in RECIPES.values():
        if recipe.group:
            found.setdefault(recipe.group, []).append(recipe)
    return found


__all__ = ["RECIPES", "Recipe", "find", "groups"]
