"""Every field of a configuration and of an objective refuses what it cannot use, by its name and in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import sparring
from sparring.errors import UserError
from sparring.objectives import OBJECTIVES
from sparring.training.config import Config, to_json

WRONG = (-1, "x", None, [1], True, float("nan"), {"a": 1}, torch.tensor(1.0), b"x", float("inf"), Path("x"))
ARRAYS = (np.eye(3), torch.eye(3))  # their text is of several lines
# What of these is right.
ALLOWED = {
    "normalize": True,
    "nesterov": True,
    "no_decay": True,
    "sync_bn": True,
    "project": True,
    "downhill": True,
    "start": None,
}
TEXTS = ("data", "model", "init")  # any text may be a name; it is looked up later


@pytest.mark.parametrize("kind", [Config, *OBJECTIVES.values()], ids=lambda kind: kind.__name__)
def test_wrong_values(kind):
    for field in dataclasses.fields(kind):
        for value in (*WRONG, *ARRAYS):
            allowed = field.name in ALLOWED and value is ALLOWED[field.name]
            if allowed or (field.name in TEXTS and isinstance(value, str)):
                continue
            if field.name == "margin" and value is WRONG[0]:
                continue  # a margin may be negative
            with pytest.raises(UserError) as caught:
                kind(**{field.name: value})
            said = str(caught.value)
            named = field.name in said or field.name.replace("_", "-") in said or "unknown" in said or "flat at" in said
            assert named and "\n" not in said and said.endswith("."), (field.name, value, said)


def test_numbers_of_numpy_are_kept_as_plain_ones():
    objective = sparring.TRADES(beta=np.float32(6), steps=np.int64(3), step_size=np.float32(0.5), eps=np.float64(0.5))
    config = Config(objective=objective, epochs=np.int64(2), momentum=np.float32(0.5), validation_eps=np.float32(0.25))
    kept = json.loads(json.dumps(to_json(config)))
    assert (kept["epochs"], kept["momentum"], kept["validation_eps"], kept["attack"]["beta"]) == (2, 0.5, 0.25, 6.0)
    assert (kept["attack"]["steps"], kept["attack"]["step_size"], kept["attack"]["eps"]) == (3, 0.5, "0.5")


def test_an_objective_is_written_as_it_is_made():
    fat = sparring.FAT(eps=0.1, tau="0,1@40%")
    assert "eps=0.1," in repr(fat) and "tau='0,1@40%'" in repr(fat)
    assert eval(repr(fat), {"FAT": sparring.FAT}) == fat


def test_a_short_l2_radius_is_noted():
    assert any("on CIFAR-10 the usual radius is 0.5" in line for line in sparring.FAT(norm="l2").advice(10))
    assert not any("usual radius" in line for line in sparring.FAT(norm="l2", eps=0.5, step_size="eps/4").advice(10))
