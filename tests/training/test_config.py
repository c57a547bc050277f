from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparring.data import load
from sparring.errors import UserError
from sparring.objectives import FAT, OBJECTIVES, TRADES, Madry
from sparring.schedules import constant, parse
from sparring.training import config
from sparring.training.config import Config, to_json, with_objective

SOME = Config(
    objective=FAT(eps="ramp:0..8/255@50%", tau="0,1@51", start="normal"),
    lr="one-cycle:0.2",
    ema=0.99,
    awp="0,0.005@10%",
    seed=3,
)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_round_trip_through_json(name):
    made = with_objective(SOME, name)
    assert made.objective.name == name
    assert config.from_json(json.loads(json.dumps(to_json(made)))) == made


def test_file_with_the_parameters_of_all_objectives_is_read():
    """It held the parameters of all objectives and, outside them, beta; unused ones are dropped."""
    attack = {"eps": "0.1", "step_size": 0.02, "steps": 7, "tau": "0,1@40%", "start": "normal", "noise": 0.0}
    attack |= {"project": True, "fosc": "ramp:0.5..0@83.3%", "margin": "ramp:0..1@100%", "patience": 10}
    attack |= {"rho": "0.1", "downhill": False, "share": 0.25}
    rest = {key: value for key, value in to_json(SOME).items() if key not in ("objective", "attack")}
    trades = config.from_json({"objective": "trades", "attack": attack, "beta": 3.0, **rest})
    assert trades == replace(SOME, objective=TRADES(eps=0.1, step_size=0.02, steps=7, start="normal", beta=3.0))
    madry = config.from_json({"objective": "madry", "attack": attack, "beta": 3.0, **rest})
    assert madry == replace(SOME, objective=Madry(eps=0.1, step_size=0.02, steps=7, start="normal"))


def test_differences_name_the_fields():
    other = with_objective(replace(SOME, seed=4), steps=20)
    assert config.differences(SOME, other) == ["seed 3 -> 4", "attack.steps 10 -> 20"]
    assert config.differences(SOME, SOME) == []
    assert config.differences(SOME, with_objective(SOME, "madry")) == ["objective fat -> madry"]


def test_changing_the_objective_keeps_common_parameters():
    assert with_objective(SOME, "mart", beta=2).objective.start == "normal"
    assert with_objective(SOME, "mart", beta=2).objective.beta == 2


def test_unknown_field_is_refused():
    with pytest.raises(UserError, match="not written by this version of Sparring: it has a 'tua'"):
        config.from_json(to_json(SOME) | {"tua": 1})
    given = to_json(SOME)
    with pytest.raises(UserError, match="it has a 'esp'"):
        config.from_json(given | {"attack": given["attack"] | {"esp": 1}})
    with pytest.raises(UserError, match=r"unknown objective 'fta'\. Did you mean 'fat'"):
        config.from_json(given | {"objective": "fta"})


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"validation": 0},
        {"seed": -1},
        {"weight_decay": float("nan")},
        {"momentum": 1.0},
        {"ema": 1.0},
        {"ema": -0.1},
        {"awp": parse("0,5@10%")},
        {"lr": parse("0")},
        {"lr": parse("-0.1")},
        {"validation_eps": 8.0},
        {"objective": "fat"},
        {"objective": None},
        {"objective": FAT},
        {"epochs": "3"},
        {"epochs": True},
        {"batch_size": 12.5},
        {"seed": 1.5},
        {"normalize": "no"},
        {"precision": "fp16"},
        {"augment": "rotate"},
        {"model": object()},
        {"data": None},
    ],
)
def test_impossible_values_are_refused(changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        replace(SOME, **changes)


def test_normalisation_uses_the_training_data():
    data = load("digits")
    assert config.model_facts(SOME, data)["normalize"] is None
    (mean,), (deviation,) = config.model_facts(replace(SOME, normalize=True), data)["normalize"]
    pixels = data.train.x.double() / 255
    assert mean == pytest.approx(pixels.mean().item())
    assert deviation == pytest.approx(pixels.std().item())


def test_schedules_may_be_numbers_or_strings():
    made = Config(lr=0.1, awp="0,0.005@10%", objective=FAT(eps=0.2, tau="0,1@40%"))
    assert made.lr == constant(0.1) and made.awp == parse("0,0.005@10%")
    assert made.objective.eps == constant(0.2) and made.objective.tau == parse("0,1@40%")
    for wrong in ({"lr": "fast"}, {"lr": float("nan")}, {"lr": None}):
        with pytest.raises(UserError, match="is not a number"):
            Config(**wrong)
