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
        {"momentum": "0.9"},
        {"weight_decay": None},
        {"ema": [0.9]},
        {"clip": -1.0},
        {"clip": float("nan")},
        {"clip": True},
        {"label_smoothing": 1.0},
        {"label_smoothing": "0.1"},
        {"optimizer": "adamx"},
        {"optimizer": object()},
        {"nesterov": 1},
        {"nesterov": True, "momentum": 0.0},
        {"optimizer": "adam", "momentum": 0.5},
        {"optimizer": "adamw", "momentum": 0.0},
        {"nesterov": True, "optimizer": "adamw"},
        {"no_decay": "yes"},
        {"augment": ["flip"]},
        {"precision": ["bf16"]},
        {"validation_eps": "8/255"},
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


def test_parts_of_eps_are_written_as_they_are_and_compared_as_numbers():
    part = Config(objective=Madry(eps=0.3, step_size="eps/4"), validation_eps="eps")
    number = Config(objective=Madry(eps=0.3, step_size=0.3 / 4), validation_eps=0.3)
    written = json.loads(json.dumps(to_json(part)))
    assert written["attack"]["step_size"] == "eps/4" and written["validation_eps"] == "eps"
    assert config.from_json(written) == part and part != number
    assert config.same(part, number) and config.differences(part, number) == []
    assert part.validation_radius == number.validation_radius == 0.3
    wider = with_objective(part, eps=0.2)
    assert wider.validation_radius == 0.2 and config.differences(part, wider) == [
        "validation_eps 0.3 -> 0.2",
        "attack.eps 0.3 -> 0.2",
        "attack.step_size 0.075 -> 0.05",
    ]
    ramp = with_objective(part, eps="ramp:0..0.3@50%")
    assert config.used(ramp)["attack"]["step_size"] == "eps/4"


def test_without_an_attack_the_validation_keeps_its_radius():
    part = Config(objective=Madry(eps=0.3, step_size="eps/4"), validation_eps="eps")
    assert with_objective(part, "standard").validation_eps == 0.3
    with pytest.raises(UserError, match=r"standard has none\. Give a number"):
        replace(part, objective=OBJECTIVES["standard"]())
    for wrong in ("eps/2", "x"):
        with pytest.raises(UserError, match="validation_eps must be a number or 'eps'"):
            replace(part, validation_eps=wrong)


def test_a_file_without_a_norm_is_linf_and_l2_radii_may_exceed_one():
    given = to_json(SOME)
    del given["attack"]["norm"]
    assert config.from_json(given) == SOME and SOME.objective.norm == "linf"
    far = Config(objective=Madry(eps=3.0, step_size="eps/4", norm="l2"), validation_eps=2.0)
    assert config.from_json(to_json(far)) == far
    with pytest.raises(UserError, match="validation_eps must lie"):
        Config(validation_eps=2.0)
    with pytest.raises(UserError, match="momentum must be a number"):
        Config(momentum="0.9")


def test_a_momentum_that_the_optimiser_does_not_have_is_refused():
    with pytest.raises(
        UserError, match=r"adam has no momentum, got 0\.5\. Leave --momentum out, or write --optimizer sgd"
    ):
        replace(SOME, optimizer="adam", momentum=0.5)
    assert replace(SOME, optimizer="rmsprop", momentum=0.5).momentum == 0.5
    kept = to_json(replace(SOME, optimizer="adamw")) | {"momentum": 0.5}
    assert config.from_json(kept) == replace(SOME, optimizer="adamw")


def test_flat_settings_are_those_in_force():
    fields = {"momentum", "nesterov", "weight_decay", "no_decay"}
    unused = {"sgd": set(), "rmsprop": {"nesterov"}, "adam": {"momentum", "nesterov"}, "own:AdamW": fields}
    unused["adamw"] = unused["adam"]
    for name, left_out in unused.items():
        made = replace(SOME, optimizer=name)
        assert to_json(made).keys() - config.flat_json(made).keys() == left_out | {"attack"}, name
    slow, fast = (replace(SOME, optimizer="own:AdamW", momentum=momentum) for momentum in (0.5, 0.9))
    assert config.flat_json(slow) == config.flat_json(fast)
    assert config.differences(slow, fast) == ["momentum 0.5 -> 0.9"] and not config.same(slow, fast)  # for resuming
