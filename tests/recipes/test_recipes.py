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


def test_the_papers_schedules():
    """facts: Table 1, 2 and 4, epochs 1-based."""
    tau = {name: recipes.find(f"{name}-cifar10-resnet18").config for name in ("fat", "fat-trades", "fat-mart")}
    changes = {
        name: [
            epoch
            for epoch in range(2, found.epochs + 1)
            if found.attack.at(epoch, found.epochs).tau != found.attack.at(epoch - 1, found.epochs).tau
        ]
        for name, found in tau.items()
    }
    assert changes == {"fat": [52, 91], "fat-trades": [32, 51, 71], "fat-mart": [21, 41, 61, 81]}


def test_unknown():
    with pytest.raises(UserError, match=r"unknown recipe 'fat-digit'. Did you mean 'fat-digits'"):
        recipes.find("fat-digit")
