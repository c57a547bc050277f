"""`sparring recipes`: the list, a group, and one recipe in full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparring.recipes import RECIPES, groups
from sparring.training import config

ROOT = Path(__file__).parents[2]


def test_the_list_names_every_recipe(sparring, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    said = sparring("recipes")
    assert said.code == 0
    named = {line.split()[0] for line in said.out.splitlines() if line}
    assert named >= {name for name, recipe in RECIPES.items() if not recipe.group} | set(groups())
    assert not named & {name for name, recipe in RECIPES.items() if recipe.group}  # forty recipes, in one line
    assert "sparring train NAME" in said.out


@pytest.mark.parametrize("group", groups())
def test_a_group_names_its_recipes(sparring, group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    said = sparring("recipes", group)
    assert said.code == 0
    assert {line.split()[0] for line in said.out.splitlines() if line} >= {recipe.name for recipe in groups()[group]}
    assert "fat-digits" not in said.out


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_in_full_is_its_configuration(sparring, name):
    said = sparring("recipes", name)
    assert said.code == 0 and f"run it: sparring train {name}\n" in said.out
    shown = json.loads(said.out[said.out.index("{") :])
    assert config.from_json(shown) == RECIPES[name].config


def test_the_list_says_how_the_expected_accuracies_were_measured(sparring, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    facts = json.loads((ROOT / "results" / "digits-recipes.json").read_text())
    seeds = [trial["seed"] for trial in facts["fat-digits"]["trials"]]
    text = (
        f"on the {facts['n']} test images, the range over seeds {seeds[0]}-{seeds[-1]}, each trained with "
        f"{facts['threads']} thread of an {facts['device']}. Another CPU or number of threads"
    )
    assert f"Expected on digits: {text}" in sparring("recipes").out
    assert f"\nmeasured: protocol mart, {text}" in sparring("recipes", "fat-digits").out
    for cifar10 in ("no-projection", "fat-cifar10-resnet18"):
        assert "threads" not in sparring("recipes", cifar10).out


def test_unknown_recipes_are_user_errors(sparring):
    said = sparring("recipes", "fat-cifar")
    said.user_error("unknown recipe 'fat-cifar'", "Did you mean", "Known: ates-cifar10-resnet18")
    sparring("recipes", "fat-digits", "madry-digits").user_error("madry-digits")
