"""Every shipped recipe builds and round-trips."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest
import torch

from sparring import models, recipes
from sparring.cli.train import options_of
from sparring.errors import UserError
from sparring.objectives import OBJECTIVES, Attack
from sparring.schedules import constant
from sparring.training import config
from sparring.training.config import with_objective

SHAPES = {"digits": (1, (8, 8)), "cifar10": (3, (32, 32))}


@pytest.mark.parametrize("recipe", recipes.RECIPES.values(), ids=lambda recipe: recipe.name)
def test_builds_and_round_trips(recipe):
    assert config.from_json(json.loads(json.dumps(config.to_json(recipe.config)))) == recipe.config
    channels, size = SHAPES[recipe.config.data]
    with torch.device("meta"):
        models.build(recipe.config.model, num_classes=10, channels=channels, size=size)
    assert recipe.about
    assert recipe.cost
    assert recipe.expect
    name, options = options_of([recipe.name])
    assert name == recipe.name
    assert options.config == recipe.config


@pytest.mark.parametrize("data", ["digits", "cifar10-resnet18"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_has_a_recipe(objective, data):
    assert recipes.find(f"{objective}-{data}").config.objective.name == objective


# Where the learning rate and tau change in the authors' code; epochs 1-based.
CHANGES = {
    "madry": ([60, 90, 110], []),
    "fat": ([60, 90, 110], [51, 91]),
    "trades": ([75], []),
    "fat-trades": ([75], [31, 51, 71]),
    "mart": ([60, 90], []),
    "fat-mart": ([60, 90], [21, 41, 61, 81]),
}


@pytest.mark.parametrize(("name", "changes"), CHANGES.items())
def test_schedules_change_at_the_authors_epochs(name, changes):
    found = recipes.find(f"{name}-cifar10-resnet18").config

    def starts(schedule):
        """The places of all changes, in steps of a hundredth of an epoch; they are starts of epochs."""
        places = [1 + hundredth / 100 for hundredth in range(100 * found.epochs)]
        values = [schedule.at(place, found.epochs) for place in places]
        return [places[i] for i in range(1, len(places)) if values[i] != values[i - 1]]

    assert (starts(found.lr), starts(getattr(found.objective, "tau", constant(0)))) == changes


def test_other_methods_have_their_published_settings():
    """All other settings equal Madry's."""
    of = {name: recipes.find(f"{name}-cifar10-resnet18").config for name in ("madry", "fat", "dat", "cat", "ates")}
    madry, dat, ates = of["madry"], of["dat"], of["ates"]
    own = {"dat": {"step_size": "eps/4"}, "cat": {"step_size": "eps/4", "patience": 10}, "ates": {}}
    for name, changes in own.items():
        for field in dataclasses.fields(Attack):
            expected = changes.get(field.name, getattr(madry.objective, field.name))
            assert getattr(of[name].objective, field.name) == expected, (name, field.name)
        assert replace(of[name], objective=madry.objective) == madry
    assert of["cat"].objective.patience == 10
    values = [dat.objective.fosc.at(place, 120) for place in (1, 51, 101, 120)]  # c_t = max(0, 0.5 (1 - t / 100))
    assert values == pytest.approx([0.5, 0.25, 0.0, 0.0], abs=2e-4)
    assert [ates.objective.margin.at(place, 120) for place in (1, 121)] == [0.0, 1.0]


@pytest.mark.parametrize("data", ["digits", "cifar10-resnet18"])
def test_ema_and_awp_recipes_are_fat_with_one_change(data):
    fat, ema, awp = (recipes.find(f"{name}-{data}").config for name in ("fat", "fat-ema", "fat-awp"))
    assert 0.9 < ema.ema < 1 and replace(ema, ema=fat.ema) == fat
    assert awp.awp.at(awp.epochs, awp.epochs) == 0.005 and replace(awp, awp=fat.awp) == fat


def test_no_projection_recipe_does_not_project():
    found = recipes.find("no-projection-digits").config
    assert not found.objective.project and found.objective.start is None


def test_every_curriculum_can_reach_its_last_step_count():
    """CAT's k grows after patience + 1 epochs at the earliest."""
    for name in ("cat-digits", "cat-cifar10-resnet18"):
        found = recipes.find(name).config
        assert 1 + (found.epochs - 1) // (found.objective.patience + 1) >= found.objective.steps, name


def test_appendix_b_is_the_grid_of_the_paper():
    """FAT at tau 0, 1, 3 and Madry, alpha 0.003 to 0.015, both networks; two points differ in nothing else."""
    found = [recipe.config for recipe in recipes.groups()["no-projection"]]
    assert len(found) == 2 * 4 * 5
    points = {
        (c.model, c.objective.name, getattr(c.objective, "tau", constant(0)).first, c.objective.step_size)
        for c in found
    }
    assert len(points) == len(found)
    assert {model for model, *_ in points} == {"small_cnn", "resnet18"}
    assert {(objective, tau) for _, objective, tau, _ in points} == {("fat", 0), ("fat", 1), ("fat", 3), ("madry", 0)}
    assert min(alpha for *_, alpha in points) == 0.003 and max(alpha for *_, alpha in points) == 0.015
    for c in found:
        assert not c.objective.project and c.objective.start is None and c.objective.steps == 10 and c.epochs == 80
        assert (c.lr.at(59.9, 80), c.lr.at(60, 80)) == (0.01, 0.001)
        one = found[0]
        assert with_objective(replace(c, model=one.model), "fat", step_size=one.objective.step_size, tau=0) == one


def test_group_is_not_a_recipe():
    with pytest.raises(UserError, match=r"a group of 40 recipes. Choose one: sparring recipes no-projection"):
        recipes.find("no-projection")


def test_unknown_recipe_is_refused():
    with pytest.raises(UserError, match=r"unknown recipe 'fat-digit'. Did you mean 'fat-digits'"):
        recipes.find("fat-digit")
