"""Recipes: named configurations, each one readable declaration with its cost and what to expect."""

from sparring.errors import unknown
from sparring.recipes.cifar10 import CIFAR10
from sparring.recipes.quickstart import DIGITS
from sparring.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*DIGITS, *CIFAR10)}


def find(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


__all__ = ["RECIPES", "Recipe", "find"]
