"""Radii as tensors, steps as parts of eps, targets, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparring.attacks import fosc_pgd, friendliest_pgd, friendly_pgd, pgd
from sparring.attacks.checks import check_not_negative
from sparring.attacks.threat import step_length
from sparring.errors import UserError
from tests.attacks.conftest import images, network

HOW = {"step_size": 0.03, "steps": 4, "start": None}


@pytest.fixture
def coloured():
    model = network(3, (4, 4))
    return model, *images(model, 6, 3, (4, 4))


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("shape", [(6,), (6, 1, 1, 1)])
def test_a_radius_per_example_is_as_many_attacks(norm, shape, coloured):
    model, x, y = coloured
    eps = torch.linspace(0.02, 0.2, 6, dtype=torch.float64)
    whole = pgd(model, x, y, eps=eps.view(shape), step_size="eps/2", steps=4, start=None, norm=norm)
    friendly = friendly_pgd(model, x, y, eps=eps.view(shape), step_size=eps / 2, steps=4, norm=norm)
    for i in range(6):
        one = (model, x[i : i + 1], y[i : i + 1])
        how = {"eps": eps[i].item(), "step_size": eps[i].item() / 2, "steps": 4, "start": None, "norm": norm}
        assert torch.allclose(whole[i : i + 1], pgd(*one, **how), rtol=0, atol=1e-12)
        alone = friendly_pgd(*one, **how)
        assert torch.allclose(friendly.x_adv[i : i + 1], alone.x_adv, rtol=0, atol=1e-12)
        assert friendly.backprops[i] == alone.backprops[0]


def test_a_radius_per_channel(coloured):
    model, x, y = coloured
    eps = torch.tensor([0.0, 0.05, 0.2], dtype=torch.float64).view(3, 1, 1)
    x_adv = pgd(model, x, y, eps=eps, step_size="eps/4", steps=20)
    moved = (x_adv - x).abs().amax(dim=(0, 2, 3))
    assert moved[0] == 0 and 0.04 < moved[1] <= 0.05 + 1e-12 and 0.1 < moved[2] <= 0.2 + 1e-12


def test_a_tensor_of_one_radius_is_the_number(coloured):
    expected = pgd(*coloured, eps=0.1, **HOW)
    for eps in (torch.tensor(0.1, dtype=torch.float64), torch.full((6,), 0.1, dtype=torch.float64)):
        assert torch.equal(pgd(*coloured, eps=eps, **HOW), expected)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"eps": torch.full((5,), 0.1)}, r"eps of shape \(5,\) does not fit images of shape \(6, 3, 4, 4\)"),
        ({"eps": torch.full((4, 1, 1), 0.1)}, r"per channel, \(3, 1, 1\)"),
        ({"eps": torch.full((3, 1, 1), 0.1), "norm": "l2"}, "one number, or one per example, in the L2 norm"),
        ({"eps": torch.full((6,), 8.0)}, r"eps must lie in \[0, 1\]"),
        ({"eps": torch.zeros(6)}, "not be 0 throughout"),
        ({"eps": torch.full((6,), -1.0), "norm": "l2"}, "eps must be finite and at least 0"),
        ({"eps": torch.full((6,), torch.nan)}, "eps must lie"),
        ({"eps": torch.ones(6).long()}, "floating-point tensor"),
        ({"step_size": "eps/0"}, "a part of eps such as 'eps/4', got 'eps/0'"),
        ({"step_size": "a"}, "a part of eps such as 'eps/4', got 'a'"),
        ({"step_size": "eps/1e"}, "a part of eps"),
        ({"step_size": None}, "step_size must lie"),
        ({"eps": np.full((6, 1), 0.1)}, r"eps must be one number, got a ndarray. .*torch.as_tensor\(eps\)"),
        ({"eps": [0.1] * 6}, "eps must be one number, got a list"),
    ],
)
def test_bad_radii_and_steps_are_refused(how, message, coloured):
    for attack in (pgd, friendly_pgd):
        with pytest.raises(UserError, match=message):
            attack(*coloured, **how)


def test_attacks_with_a_rule_of_their_own_take_numbers(coloured):
    for attack, own in ((fosc_pgd, {"criterion": 0.1}), (friendliest_pgd, {"rho": 0.1})):
        for how in ({"eps": torch.full((6,), 0.1), "step_size": 0.1}, {"eps": 0.1, "step_size": "eps/4"}):
            with pytest.raises(UserError, match="must be one number here"):
                attack(*coloured, steps=2, **own, **how)


def test_a_part_of_eps_is_bitwise_the_quotient():
    assert step_length("eps/4", 0.3) == 0.3 / 4 and step_length("eps", 0.3) == 0.3
    assert step_length("eps / 10", 8 / 255) == 8 / 255 / 10 and step_length(0.007, 0.3) == 0.007
    assert step_length("eps/4", 8 / 255) == 2 / 255


@pytest.mark.parametrize(
    "loss", ["ce", "cw", lambda logits, y: nn.functional.cross_entropy(logits, y, reduction="none")]
)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_target_is_approached(loss, norm, batch):
    model, x, y = batch
    how = {"eps": 0.3 if norm == "linf" else 1.5, "step_size": "eps/4", "steps": 10, "loss": loss, "norm": norm}
    towards = (y + 1) % 4
    x_adv = pgd(model, x, y, target=towards, start=None, **how)
    before, after = (nn.functional.cross_entropy(model(point), towards) for point in (x, x_adv))
    untargeted = pgd(model, x, y, start=None, **how)
    assert after < before and after < nn.functional.cross_entropy(model(untargeted), towards)
    same = pgd(model, x, y, target=2, start=None, **how)
    assert torch.equal(same, pgd(model, x, y, target=torch.full_like(y, 2), start=None, **how))


def test_a_target_is_the_attack_on_the_negative_loss(batch):
    model, x, y = batch
    towards = (y + 1) % 4

    def away(logits, _):
        return -nn.functional.cross_entropy(logits, towards, reduction="none")

    how = {"eps": 0.2, "step_size": 0.05, "steps": 5, "start": None}
    assert torch.equal(pgd(model, x, y, target=towards, **how), pgd(model, x, y, loss=away, **how))


def test_a_target_may_be_a_number_of_numpy(batch):
    assert torch.equal(pgd(*batch, target=np.int64(3), start=None), pgd(*batch, target=3, start=None))


def test_friendly_data_with_a_target_stop_where_the_label_is_lost(batch):
    """Wrong stays: not y. So a stopped example need not have reached its target, and takes no step if wrong already."""
    model, x, y = batch
    towards = (y + 1) % 4
    found = friendly_pgd(model, x, y, target=towards, eps=0.4, step_size=0.02, steps=20)
    stopped = found.backprops < 20
    predicted = model(found.x_adv).argmax(dim=1)
    assert stopped.sum() > 5 and (predicted[stopped] != y[stopped]).all()
    assert found.backprops[0] == 0 and torch.equal(found.x_adv[0], x[0])  # wrong at its start
    whole = pgd(model, x, y, target=towards, eps=0.4, step_size=0.02, steps=20, start=None)
    late = friendly_pgd(model, x, y, target=towards, eps=0.4, step_size=0.02, steps=20, tau=20)
    assert torch.equal(late.x_adv, whole)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (-1, "target must be a class number"),
        (True, "target must be a class number"),
        ("3", "target must be a class number"),
        (torch.zeros(3).long(), "an int64 tensor of 24 of them"),
        (torch.zeros(24), "an int64 tensor of 24 of them"),
        (torch.full((24,), -2), "classes count from 0"),
        (4, "the model has 4 classes, found label 4"),
    ],
)
def test_bad_targets_are_refused(target, message, batch):
    for attack in (pgd, friendly_pgd):
        with pytest.raises(UserError, match=message):
            attack(*batch, target=target)
    with pytest.raises(UserError, match="'ce' or 'cw', got loss 'kl'"):
        pgd(*batch, target=1, loss="kl")


def test_numpy_arrays_one_based_labels_and_whole_pixels_are_named(batch):
    model, x, y = batch
    with pytest.raises(UserError, match=r"x must be a floating-point tensor .*got ndarray. Write torch.as_tensor\(x\)"):
        pgd(model, x.numpy(), y.numpy())
    with pytest.raises(UserError, match="x must be one batch of images, got a DataLoader"):
        pgd(model, DataLoader(TensorDataset(x, y)), y)
    with pytest.raises(UserError, match=r"y must be an int64 tensor .*got ndarray. Write torch.as_tensor\(y\)"):
        pgd(model, x, np.asarray(y))
    with pytest.raises(UserError, match=r"look like pixels from 0 to 255. Divide by 255: x / 255"):
        pgd(model, (255 * x).round(), y)
    everything = torch.arange(24) % 4
    with pytest.raises(UserError, match="labels run from 1 to 4, the model has 4 classes numbered 0 to 3: subtract 1"):
        friendly_pgd(model, x, everything + 1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_named(value, batch):
    model, x, y = batch

    def broken(points):
        logits = model(points)
        return torch.where(torch.arange(len(points))[:, None] < 5, value, logits)

    for attack in (pgd, friendly_pgd):
        with pytest.raises(UserError, match="logits are not finite for 5 of 24 images"):
            attack(broken, x, y)
    for noise in ("a", None):
        with pytest.raises(UserError, match="noise must be finite"):
            friendly_pgd(model, x, y, noise=noise)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_number_too_large_for_a_float_is_refused(norm, coloured):
    model, x, y = coloured
    for how in ({"eps": 10**400}, {"eps": 0.1, "step_size": 10**400}):
        with pytest.raises(UserError, match=r"must (lie in \(0, 1\]|be finite)"):
            pgd(model, x, y, **(HOW | how), norm=norm)
    with pytest.raises(UserError, match="must be finite and at least 0"):
        check_not_negative("noise", 10**400)
