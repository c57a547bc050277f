"""Mixture and losses on digits: the numbers agree with their points."""

from __future__ import annotations

import pytest
import torch

from sparring import weights
from sparring.data import load
from sparring.errors import UserError
from sparring.paper.measure import losses, mixture
from sparring.paper.specs import Losses, Mixture
from tests.paper.tiny import COURSE, planned

CPU = torch.device("cpu")
WHAT = Mixture(classes=("3", "8"), layers=(2, 4), images=12, eps=0.3, step_size=0.05, steps=4, neighbours=3)


@pytest.fixture(scope="module")
def model(measured):
    return weights.load_model(planned(COURSE, measured)[0].folder)


def test_mixture_of_layer_outputs(model):
    found = mixture.measure(WHAT, model, load("digits"), device=CPU, seed=0)
    assert found["n"] == 24 and found["labels"] == [0] * 12 + [1] * 12
    assert set(found["mixing"]) == set(found["points"]) == {"2", "4"}
    for layer in ("2", "4"):
        for method in ("pca", "tsne"):
            assert {name: len(points) for name, points in found["points"][layer][method].items()} == dict.fromkeys(
                ("natural", "pgd", "friendly"), 24
            )
    assert 0 < found["backprops"] <= 4
    assert found["wrong"]["natural"] <= found["wrong"]["friendly"] <= found["wrong"]["pgd"] + 0.2
    assert found == mixture.measure(WHAT, model, load("digits"), device=CPU, seed=0)


def test_mixture_refuses_unknown_classes_and_layers(model):
    with pytest.raises(UserError, match="no class 'bird'"):
        mixture.measure(Mixture(("bird", "3"), (2,), 5), model, load("digits"), device=CPU, seed=0)
    with pytest.raises(UserError, match="4 layers, so layer 8 does not exist"):
        mixture.measure(Mixture(("3", "8"), (8,), 5), model, load("digits"), device=CPU, seed=0)


def test_losses_and_the_theorem(model):
    found = losses.measure(Losses(images=60, eps=0.3, step_size=0.03), model, load("digits"), device=CPU)
    points = {name: torch.tensor(values) for name, values in found["points"].items()}
    mean, bound = found["mean_loss_bits"], found["bound"]
    assert found["n"] == 60 == len(points["natural"])
    assert mean["natural"] < mean["friendly"] < mean["pgd"]
    assert bound["risk"] <= bound["min_min"] < bound["min_max"]
    for values in points.values():  # cross-entropy in bits bounds the 0/1 loss
        margin, loss = values.T
        assert (loss[margin <= 0] >= 1 - 1e-3).all() and (loss >= 0).all()
    # Where the attack never succeeds both take all steps, so the data are equal.
    right = points["friendly"][:, 0] > 0
    assert torch.equal(points["friendly"][right], points["pgd"][right])
    assert bound["min_min"] == pytest.approx(mean["natural"] + mean["friendly"])
