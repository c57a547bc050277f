"""The adapter to AutoAttack: what it promises for every part. The package itself is for its authors to test."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from sparring.attacks import pgd
from sparring.attacks.autoattack import PARTS, attack_part, is_stochastic, parts
from sparring.errors import UserError

EPS = 0.1


def net(classes: int = 5, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, classes)).to(dtype)


def batch(model: nn.Module, n: int = 12, dtype: torch.dtype = torch.float32):
    """Images that the model gets right."""
    x = torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)
    with torch.no_grad():
        return x, model(x).argmax(1)


@pytest.fixture(autouse=True)
def _short_search(monkeypatch):
    """Square queries the model 5000 times; here 50 are enough."""
    from pyautoattack import autoattack

    monkeypatch.setattr(autoattack.SquareAttack, "attack_single_run", _shortened(autoattack.SquareAttack))


def _shortened(square):
    whole = square.attack_single_run

    def some(self, x, y):
        self.n_queries = 50
        return whole(self, x, y)

    return some


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_part_stays_inside_and_leaves_no_trace(part, dtype):
    model = net(dtype=dtype).train()
    x, y = batch(model, dtype=dtype)
    state, weights = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # as callers must: FAB calls backward()
    found = attack_part(part, model, x, y, eps=EPS)
    assert found.x_adv.shape == x.shape and found.x_adv.dtype == dtype
    assert found.x_adv.min() >= 0 and found.x_adv.max() <= 1
    assert (found.x_adv - x).abs().max() <= EPS + 1e-6
    assert torch.equal(found.x_adv[~found.claimed], x[~found.claimed])
    with torch.no_grad():
        assert torch.equal(model(found.x_adv).argmax(1) != y, found.claimed)
    assert found.claimed.any() or part == "square"
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(weights, model.parameters(), strict=True))
    again = attack_part(part, model, x, y, eps=EPS)
    assert torch.equal(found.x_adv, again.x_adv)


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_the_fewest_classes(classes):
    model = net(classes).requires_grad_(False)
    x, y = batch(model, 4)
    for part in parts("standard", classes=classes):
        assert attack_part(part, model, x, y, eps=EPS).x_adv.shape == x.shape


def test_the_parts_of_the_standard_version():
    assert parts("standard", classes=10) == ("apgd-ce", "apgd-t", "fab-t", "square")
    assert parts("rand", classes=10) == ("apgd-ce", "apgd-dlr")
    assert parts("rand", classes=2) == ("apgd-ce",)


def test_randomness_is_detected():
    x, _ = batch(net())
    state = torch.get_rng_state()
    assert not is_stochastic(net(), x)
    assert is_stochastic(lambda x: x.flatten(1) + 0.1 * torch.randn_like(x.flatten(1)), x)
    assert is_stochastic(nn.Sequential(net(), nn.Dropout(0.1)).train(), x)
    assert torch.equal(state, torch.get_rng_state())


def test_one_image_or_none():
    model = net().requires_grad_(False)
    x, y = batch(model, 1)
    for part in PARTS:
        assert attack_part(part, model, x, y, eps=EPS).x_adv.shape == (1, 1, 4, 4)
        assert len(attack_part(part, model, x[:0], y[:0], eps=EPS).claimed) == 0


def test_apgd_and_our_pgd_agree_within_noise():
    """100 steps each on 200 images: the accuracies differ by 2 points at most."""
    model = net()
    x, y = batch(model, 200)
    ours = pgd(model, x, y, eps=EPS, step_size=EPS / 4, steps=100, start=None)
    theirs = attack_part("apgd-ce", model, x, y, eps=EPS).x_adv
    with torch.no_grad():
        mine, apgd = ((model(x_adv).argmax(1) == y).double().mean().item() for x_adv in (ours, theirs))
    assert 0.05 < mine < 0.95
    assert abs(mine - apgd) <= 0.02


@pytest.mark.parametrize(("part", "eps", "says"), [("apgd", EPS, "unknown part"), ("square", 8, "write 8/255")])
def test_bad_input(part, eps, says):
    x, y = batch(net())
    with pytest.raises(UserError, match=says):
        attack_part(part, net(), x, y, eps=eps)


def test_the_package_is_needed_only_when_it_runs():
    """Without pyautoattack every other attack works, and AutoAttack's error names the fix."""
    program = """
import sys
sys.modules["pyautoattack"] = None
import torch
from sparring.attacks import friendly_pgd
from sparring.attacks.autoattack import attack_part
from sparring.errors import UserError
model, x, y = torch.nn.Flatten(), torch.rand(2, 1, 2, 2), torch.zeros(2, dtype=torch.int64)
assert friendly_pgd(model, x, y).x_adv.shape == x.shape
try:
    attack_part("square", model, x, y, eps=0.1)
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install pyautoattack" in done.stdout
