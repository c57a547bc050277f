"""What is no model, batch, number or generator is refused in one line, before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import sparring
from sparring.errors import UserError

ATTACKS = {
    "pgd": lambda **given: sparring.pgd(**given),
    "friendly_pgd": lambda **given: sparring.friendly_pgd(**given),
    "objective": lambda model, x, y, generator=None: sparring.FAT()(model, x, y, generator=generator),
}
NET = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


@pytest.fixture
def batch():
    return {"model": NET, "x": torch.full((2, 1, 2, 2), 0.5), "y": torch.tensor([0, 2])}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": None}, "model must map images to logits, .* got NoneType"),
        ({"model": "fat-digits"}, r"Load it first: sparring.load_model\('fat-digits'\)"),
        ({"model": nn.Linear}, r"model is the class Linear. Give a network of it: Linear\(...\)"),
        ({"model": lambda x: (x, x)}, "got tuple. Wrap it to return the logits alone"),
        ({"x": None}, "x must be a floating-point tensor in .0, 1., got NoneType"),
        ({"x": torch.full((2, 1, 2, 2), 0.5).double()}, "images are torch.float64, the model's weights torch.float32"),
        ({"x": torch.full((2, 1, 2, 2), 128.0)}, "Divide by 255"),
        ({"x": torch.full((2, 1, 2, 2), torch.nan)}, "found 8 of 8 values NaN or infinite. Look at the data"),
        ({"x": torch.full((2, 1, 2, 2), torch.inf)}, "found 8 of 8 values NaN or infinite. Look at the data"),
        ({"y": torch.eye(3)[[0, 2]].long()}, r"Of one-hot labels give y.argmax\(1\)"),
        ({"y": torch.tensor([1, 3])}, "subtract 1"),
        ({"y": np.array([0, 2])}, "y must be an int64 tensor of class numbers, got ndarray"),
        ({"generator": 3}, "generator must be a torch.Generator or None, got int"),
    ],
)
def test_wrong_batches(batch, attack, wrong, message):
    with pytest.raises(UserError, match=message) as caught:
        attack(**batch | wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"eps": True}, "eps must lie in"),
        ({"eps": "8/255"}, "eps must be a number, got the text '8/255'. Write it without quotes"),
        ({"eps": sparring.FAT(eps=0.3).eps}, r"eps must be a number, got a schedule \(0.3\). Give one of its values"),
        ({"step_size": True}, "step_size must lie in"),
        ({"steps": True}, "steps must be a whole number"),
        ({"loss": lambda logits: logits}, r"must take \(logits, y\)"),
        ({"start": np.zeros((2, 1, 2, 2))}, "or a tensor of points, got ndarray"),
    ],
)
def test_wrong_numbers(batch, wrong, message):
    for attack in (sparring.pgd, sparring.friendly_pgd):
        with pytest.raises(UserError, match=message) as caught:
            attack(**batch, **wrong)
        assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers(batch):
    given = {"eps": np.float32(0.1), "step_size": np.float64(0.05), "steps": np.int64(2)}
    plain = sparring.pgd(**batch, start=None, eps=float(given["eps"]), step_size=0.05, steps=2)
    assert torch.equal(sparring.pgd(**batch, start=None, **given), plain)


def test_a_models_own_error_is_the_cause(batch):
    own = RuntimeError("mine")

    def broken(x):
        raise own

    with pytest.raises(UserError, match="the model raised RuntimeError: mine") as caught:
        sparring.pgd(**batch | {"model": broken})
    assert caught.value.__cause__ is own  # Python shows its traceback too


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"y": [0, 1]}, "y must be class numbers, an int64 tensor .* got list"),
        ({"y": torch.tensor([0, 3])}, "the model has 3 classes, found label 3"),
        ({"classes": 0}, "classes must be a whole number of at least 2"),
        ({"classes": "10"}, "classes must be a whole number of at least 2"),
        ({"smoothing": None}, "smoothing must lie in"),
    ],
)
def test_wrong_soft_targets(wrong, message):
    with pytest.raises(UserError, match=message):
        sparring.soft_targets(**{"y": torch.tensor([0, 2]), "classes": 3} | wrong)
