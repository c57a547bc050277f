"""One part of AutoAttack on awkward models, and what it leaves of the caller's."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn

from sparring.attacks import autoattack, friendly_pgd, pgd
from sparring.attacks.autoattack import attack_part


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10)).eval()


class Rough(nn.Module):
    """The same logits, and now and then a gradient that is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.inside(x)
        part = x.flatten(1)[:, :4].sum(1)
        rough = (part - 2) * (part > 2)  # for half of the images 0, where the root has no gradient
        return logits + 0 * rough.square().sqrt()[:, None]


def batch(model: nn.Module, count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return x, model(x).argmax(1)


def stands(model: nn.Module, part: str, eps: float, norm: str) -> torch.Tensor:
    x, y = batch(model)
    found = attack_part(part, model, x, y, eps=eps, norm=norm)
    assert found.x_adv.isfinite().all()
    with torch.no_grad():
        return model(found.x_adv).argmax(1) == y


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.05), ("l2", 0.15)])
@pytest.mark.parametrize("part", ["apgd-ce", "apgd-t", "fab-t"])
def test_gradients_that_are_nan_neither_break_an_image_nor_save_it(part, norm, eps):
    assert torch.autograd.functional.jacobian(lambda x: Rough()(x).sum(), torch.zeros(1, 1, 4, 4)).isnan().sum() == 4
    ours, smooth = stands(Rough(), part, eps, norm), stands(net(), part, eps, norm)
    assert 0 < smooth.sum() < 24
    assert abs(int(ours.sum()) - int(smooth.sum())) <= 2


def test_an_image_of_nan_is_no_success(monkeypatch):
    x, y = batch(net(), 4)
    spoilt = x.clone()
    spoilt[1] += 0.01
    spoilt[2, 0, 3, 3] = torch.nan
    monkeypatch.setattr(autoattack, "_perturb", lambda *_, **__: spoilt)
    found = attack_part("apgd-ce", net(), x, y, eps=0.05)
    assert found.claimed.tolist() == [False, True, False, False] and torch.equal(found.x_adv[2], x[2])


@pytest.mark.parametrize("attack", [pgd, friendly_pgd])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_pgd_stays_finite_too(attack, norm):
    x, y = batch(Rough())
    found = attack(Rough(), x, y, eps=0.3, step_size=0.1, steps=5, norm=norm)
    assert getattr(found, "x_adv", found).isfinite().all()


class OffTheGrid(nn.Module):
    """In float64: right where the first pixel is no number of float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[:, 0, 0, 0]
        right = (first != first.float().double()).double()
        return torch.stack([right, 1 - right, *torch.zeros(3, len(x))], dim=1) + 0 * x.sum()


@pytest.mark.parametrize("part", ["apgd-ce", "apgd-t", "fab-t", "square"])
def test_an_image_that_is_wrong_once_rounded_to_float32_is_broken(part):
    x = torch.rand(5, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    y = torch.zeros(5, dtype=torch.int64)
    assert (OffTheGrid()(x).argmax(1) == y).all()
    found = attack_part(part, OffTheGrid(), x, y, eps=0.01)
    assert found.claimed.all() and (found.x_adv - x).abs().max() < 1e-7
    assert (OffTheGrid()(found.x_adv).argmax(1) != y).all()


def test_the_caller_s_settings_stay():
    model, log = net(), logging.getLogger("auto-attack")
    x, y = batch(model, 6)
    level, state = log.level, torch.get_rng_state()
    given = [(part, net(), x, y) for part in ("fab-t", "fab-t", "square")]
    torch.set_default_dtype(torch.float64)
    try:
        for part in ("apgd-ce", "fab-t", "square"):
            attack_part(part, model, x, y, eps=0.05)
        assert torch.get_default_dtype() == torch.float64
        threads = [threading.Thread(target=attack_part, args=args, kwargs={"eps": 0.05}) for args in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert log.level == level and torch.equal(torch.get_rng_state(), state)


PARTS = [("standard", part) for part in ("apgd-ce", "apgd-t", "fab-t", "square")]


@pytest.mark.parametrize(("version", "part"), [*PARTS, ("rand", "apgd-ce"), ("rand", "apgd-dlr")])
def test_every_call_of_the_model_is_told_with_its_share(version, part):
    """Of images that withstand, the shares add up to almost 1; of those that break, to less."""
    model = net()
    x, y = batch(model, 3)
    shares, called = [], []

    def counted(images):
        called.append(len(images))
        return model(images)

    attack_part(part, counted, x, y, eps=1e-6, version=version, each_call=shares.append)
    assert 0.97 < sum(shares) <= 1 + 1e-6 and len(shares) == len(called) - 1  # one call asks for the classes
    if part == "square":
        broken = []
        attack_part(part, model, x, y, eps=1.0, version=version, each_call=broken.append)
        assert sum(broken) < 0.5
