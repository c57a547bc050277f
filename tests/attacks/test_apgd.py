"""APGD's steps: the package's own, image by image."""

from __future__ import annotations

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from torch import nn

from sparring.attacks import apgd
from sparring.attacks.autoattack import attack_part

EPS = 0.01


class Bent(nn.Module):
    """Bent enough that the step size is halved often, and not for all images at once."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Conv2d(3, 8, 3), nn.Softplus(), nn.Flatten(), nn.Linear(8 * 5 * 5, 6)
            self.net = nn.Sequential(*layers).eval().requires_grad_(False)

    def forward(self, x):
        return 3 * self.net(x) + torch.sin(40 * self.net(x.flip(3)))


def problem(count: int = 24):
    """In double precision, so that rounding turns no sign."""
    model = Bent().double()
    x = torch.rand(count, 3, 7, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return model, x, model(x).argmax(1)


def search(predict, loss: str, /, steps: int = 60, **changes) -> APGDAttack:
    kind = APGDAttack_targeted if loss == "dlr-targeted" else APGDAttack
    found = kind(predict, n_iter=steps, eps=EPS, seed=0, device=torch.device("cpu"))
    for name, value in {"loss": loss, "orig_dim": [3, 7, 7], "ndims": 3, **changes}.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize("steps", [1, 2, 21, 22, 23, 60, 100])
@pytest.mark.parametrize("loss", ["ce", "dlr-targeted"])
def test_they_find_the_points_of_the_package(loss, steps):
    model, x, y = problem()
    attack = search(model, loss, steps, y_target=model(x).sort(dim=1)[1][:, -3])
    assert apgd.fits(attack)
    torch.manual_seed(3)
    theirs = attack.attack_single_run(x, y)
    torch.manual_seed(3)
    ours = apgd.run(attack, x, y)
    assert torch.equal(ours[1], theirs[1].bool())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=0, atol=1e-9)
    assert (ours[3] - x).abs().max() <= EPS + 1e-12 and ours[3].min() >= 0 and ours[3].max() <= 1


def test_the_comparison_sees_images_break_and_steps_halved():
    """For some images and not for others, or it would say little."""
    model, x, y = problem()
    attack = search(model, "ce", 60)
    torch.manual_seed(3)
    assert 0 < int((~apgd.run(attack, x, y)[1]).sum()) < len(x)
    torch.manual_seed(3)
    whole = apgd.run(attack, x, y)[0]
    attack.thr_decr = 0.0  # halved only where the loss never grew
    torch.manual_seed(3)
    apart = (apgd.run(attack, x, y)[0] != whole).flatten(1).any(1)
    assert 0 < int(apart.sum()) < len(x)


@pytest.mark.parametrize("part", ["apgd-ce", "apgd-t"])
def test_the_whole_attack_breaks_what_the_package_s_breaks(monkeypatch, part):
    model, x, y = problem(60)
    model, x = model.float(), x.float()
    ours = attack_part(part, model, x, y, eps=EPS)
    monkeypatch.setattr(apgd, "fits", lambda attack: False)
    theirs = attack_part(part, model, x, y, eps=EPS)
    assert torch.equal(ours.claimed, theirs.claimed) and 5 < int(ours.claimed.sum()) < 55
    assert (model(ours.x_adv).argmax(1) != y).equal(ours.claimed)


def by_autograd(loss: str, logits, y, target):
    """The package's own loss, differentiated."""
    attack = search(None, loss, y_target=target)
    logits = logits.clone().requires_grad_()
    values = nn.functional.cross_entropy(logits, y, reduction="none") if loss == "ce" else None
    values = attack.dlr_loss_targeted(logits, y) if values is None else values
    return values, torch.autograd.grad(values.sum(), logits)[0]


@pytest.mark.parametrize("classes", [4, 10])
@pytest.mark.parametrize("loss", ["ce", "dlr-targeted"])
def test_losses_come_with_their_gradients(loss, classes):
    """Also where the label or the target is among the logits of the denominator, in any place."""
    logits = torch.randn(400, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = logits.sort(dim=1, descending=True)[1]
    y, target = order[:, 0].clone(), order[:, 1].clone()
    for place in range(4):
        y[100 * place : 100 * place + 100] = order[100 * place : 100 * place + 100, place]
    target[y == target] = order[y == target, 3]
    target[::7] = order[torch.arange(0, 400, 7), (y[::7] == order[::7, 2]).long() + 2]
    ours = apgd.ce(logits, y) if loss == "ce" else apgd.targeted_dlr(logits, y, target)
    for mine, other in zip(ours, by_autograd(loss, logits, y, target), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_nan_is_no_larger_loss():
    """Of logits that are NaN after the start, the start is the best point, and gradients stay numbers."""
    model, x, y = problem(6)
    calls = []

    def failing(images):
        calls.append(len(images))
        return model(images) * (1 if len(calls) == 1 else torch.nan)

    torch.manual_seed(3)
    best, _, loss, _ = apgd.run(search(failing, "ce"), x, y)
    torch.manual_seed(3)
    start = apgd.run(search(model, "ce", 0), x, y)
    assert torch.equal(best, start[0]) and torch.equal(loss, start[2])


def test_a_model_that_writes_into_its_input_does_no_harm():
    model, x, y = problem(6)

    def greedy(images):
        logits = model(images * 1.0)
        images.data.zero_()
        return logits

    given = x.clone()
    torch.manual_seed(3)
    ours = apgd.run(search(greedy, "ce"), given, y)
    torch.manual_seed(3)
    assert torch.equal(ours[0], apgd.run(search(model, "ce"), x, y)[0]) and torch.equal(given, x)


def test_autoattack_steps_so(monkeypatch):
    model, x, y = problem(8)
    model, x = model.float(), x.float()
    used, own = [], apgd.run
    monkeypatch.setattr(apgd, "run", lambda *given: used.append(len(given[1])) or own(*given))
    attack_part("apgd-ce", model, x, y, eps=1e-5)
    assert used == [8]
    attack_part("apgd-t", model, x, y, eps=1e-5)
    assert used == [8] * 6  # one for each of five targets
    used.clear()
    attack_part("apgd-ce", model, x, y, eps=0.5, norm="l2")
    attack_part("apgd-ce", model, x, y, eps=1e-5, version="rand")
    attack_part("apgd-dlr", model, x, y, eps=1e-5)
    assert not used


@pytest.mark.parametrize("changes", [{"norm": "L2"}, {"eot_iter": 20}, {"use_largereps": True}, {"loss": "dlr"}])
def test_other_settings_are_left_to_the_package(changes):
    assert not apgd.fits(search(Bent(), "ce", **changes))
