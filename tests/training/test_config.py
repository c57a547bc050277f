from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparring.data import load
from sparring.errors import UserError
from sparring.objectives import OBJECTIVES, SPECIAL, Attack
from sparring.schedules import constant, parse
from sparring.training import config
from sparring.training.config import Config, to_json

SOME = Config(
    attack=Attack(eps=parse("ramp:0..8/255@50%"), tau=parse("0,1@51"), start="normal"),
    lr=parse("one-cycle:0.2"),
    ema=0.99,
    awp=parse("0,0.005@10%"),
    seed=3,
)


def test_round_trip_through_json():
    assert config.from_json(json.loads(json.dumps(config.to_json(SOME)))) == SOME


def test_every_objective_can_be_named():
    for name in OBJECTIVES:
        assert replace(SOME, objective=name).objective == name
    assert set(config.ObjectiveName.__args__) == set(OBJECTIVES)


def test_differences_name_the_fields():
    other = replace(SOME, seed=4, attack=replace(SOME.attack, steps=20))
    assert config.differences(SOME, other) == ["seed 3 -> 4", "attack.steps 10 -> 20"]
    assert config.differences(SOME, SOME) == []


def test_an_unknown_field_is_refused():
    with pytest.raises(UserError, match="not written by this version of Sparring: it has a 'tua'"):
        config.from_json(config.to_json(SOME) | {"tua": 1})
    given = config.to_json(SOME)
    with pytest.raises(UserError, match="it has a 'esp'"):
        config.from_json(given | {"attack": given["attack"] | {"esp": 1}})


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"validation": 0},
        {"seed": -1},
        {"beta": -1.0},
        {"weight_decay": float("nan")},
        {"momentum": 1.0},
        {"ema": 1.0},
        {"ema": -0.1},
        {"awp": parse("0,5@10%")},
        {"lr": parse("0")},
        {"lr": parse("-0.1")},
        {"validation_eps": 8.0},
        {"objective": "fta"},
        {"epochs": "3"},
        {"epochs": True},
        {"batch_size": 12.5},
        {"seed": 1.5},
        {"normalize": "no"},
        {"precision": "fp16"},
        {"attack": {"eps": 0.1}},
        {"attack": replace(SOME.attack, project="no")},
        {"attack": replace(SOME.attack, downhill=1)},
    ],
)
def test_impossible_values_are_refused(changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        replace(SOME, **changes)


@pytest.mark.parametrize("objective", ["cat", "dat", "ates", "fat-by-loss", "fat-by-probability"])
def test_what_an_objective_cannot_do_is_refused(objective):
    for changes in ({"noise": 0.001}, {"project": False}):
        with pytest.raises(UserError, match=f"{objective} searches inside the ball and without noise"):
            replace(SOME, objective=objective, attack=replace(SOME.attack, **changes))


def test_kl_does_not_begin_at_the_image():
    """Its gradient is zero there: what moves is rounding."""
    attack = replace(SOME.attack, start=None, noise=0.0)
    with pytest.raises(UserError, match="flat at the image"):
        replace(SOME, objective="trades", attack=attack)
    for able in (replace(attack, start="normal"), replace(attack, noise=0.001)):
        assert replace(SOME, objective="fat-trades", attack=able).attack == able
    assert replace(SOME, objective="mart", attack=attack).attack == attack  # climbs the cross-entropy


def test_every_special_setting_is_read_by_somebody_and_exists():
    known = {f"attack.{name}" for name in to_json(SOME)["attack"]} | set(to_json(SOME))
    read = {name for objective in OBJECTIVES.values() for name in objective.reads}
    assert read == set(SPECIAL) <= known


def test_a_margin_of_probability_stays_below_one():
    attack = replace(SOME.attack, rho=parse("ramp:0.1..1"))
    assert replace(SOME, objective="fat-by-loss", attack=attack).attack.rho == attack.rho
    with pytest.raises(UserError, match=r"attack\.rho must stay below 1 for fat-by-probability"):
        replace(SOME, objective="fat-by-probability", attack=attack)


def test_normalisation_is_of_the_training_data():
    data = load("digits")
    assert config.model_facts(SOME, data)["normalize"] is None
    (mean,), (deviation,) = config.model_facts(replace(SOME, normalize=True), data)["normalize"]
    pixels = data.train.x.double() / 255
    assert mean == pytest.approx(pixels.mean().item())
    assert deviation == pytest.approx(pixels.std().item())


def test_in_python_schedules_are_numbers_or_lines():
    made = Config(lr=0.1, awp="0,0.005@10%", attack=Attack(eps=0.2, tau="0,1@40%", rho=1))
    assert made.lr == constant(0.1) and made.awp == parse("0,0.005@10%")
    assert made.attack.eps == constant(0.2) and made.attack.tau == parse("0,1@40%")
    assert config.from_json(to_json(made)) == made
    for wrong in ({"lr": "fast"}, {"lr": float("nan")}, {"lr": None}):
        with pytest.raises(UserError, match="is not a number"):
            Config(**wrong)
