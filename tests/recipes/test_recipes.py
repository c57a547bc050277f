"""Every shipped recipe builds and round-trips."""

from __future__ import annotations

import json

import pytest
import torch

from sparring import config, models, recipes
from sparring.cli.train import _options
from sparring.errors import UserError
from sparring.objectives import OBJECTIVES

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
    name, options = _options([recipe.name])
    assert name == recipe.name
    assert options.config == recipe.config


@pytest.mark.parametrize("data", ["digits", "cifar10-resnet18"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_has_one(objective, data):
    assert recipes.find(f"{objective}-{data}").config.objective == objective


# facts, section 4: where the learning rate and tau change, epochs 1-based.
CHANGES = {
    "madry": ([60, 90, 110], []),
    "fat": ([60, 90, 110], [51, 91]),
    "trades": ([75], []),
    "fat-trades": ([75], [31, 51, 71]),
    "mart": ([60, 90], []),
    "fat-mart": ([60, 90], [21, 41, 61, 81]),
}


@pytest.mark.parametrize(("name", "changes"), CHANGES.items())
def test_the_schedules_change_where_the_authors_do(name, changes):
    found = recipes.find(f"{name}-cifar10-resnet18").config

    def starts(schedule):
        """Every change falls on the beginning of an epoch; looked for at each of its hundred parts."""
        places = [1 + hundredth / 100 for hundredth in range(100 * found.epochs)]
        values = [schedule.at(place, found.epochs) for place in places]
        return [places[i] for i in range(1, len(places)) if values[i] != values[i - 1]]

    assert (starts(found.lr), starts(found.attack.tau)) == changes


def test_unknown():
    with pytest.raises(UserError, match=r"unknown recipe 'fat-digit'. Did you mean 'fat-digits'"):
        recipes.find("fat-digit")
