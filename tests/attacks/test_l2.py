"""The L2 ball: closed forms on linear models, the literal oracle, and what holds for every attack."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparring.attacks import ball, fosc_pgd, friendliest_pgd, friendly_pgd, margin_pgd, pgd, pgd_until
from sparring.attacks.stop_rules import fosc
from sparring.errors import UserError
from tests.attacks.conftest import images, network
from tests.attacks.oracle import literal_friendly_pgd

ATTACKS = {
    "pgd": lambda *given, **how: pgd(*given, **how),
    "friendly": lambda *given, **how: friendly_pgd(*given, tau=1, start="uniform", noise=0.01, **how).x_adv,
    "until": lambda *given, **how: pgd_until(*given, **how).x_adv,
    "fosc": lambda *given, **how: fosc_pgd(*given, criterion=0.05, **how).x_adv,
    "margin": lambda *given, **how: margin_pgd(*given, margin=0.2, **how).x_adv,
    "friendliest": lambda *given, **how: friendliest_pgd(*given, rho=0.1, **how).x_adv,
}


def length(shift):
    return shift.flatten(1).pow(2).sum(dim=1).sqrt()


class Linear(nn.Module):
    """Two classes whose gap is <w, x>."""

    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        gap = (x * self.w).flatten(1).sum(dim=1)
        return torch.stack([gap, torch.zeros_like(gap)], dim=1)


def weights(seed=0):
    return torch.randn(1, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("start", [None, "uniform", "normal"])
@pytest.mark.parametrize("loss", ["ce", "cw"])
def test_reaches_the_optimum_of_a_linear_model(start, loss):
    """Away from the pixels' bounds the largest loss of a linear model is at x - eps * w / ||w||."""
    w, x, y = weights(), torch.full((3, 1, 5, 5), 0.5, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    how = {"eps": 0.4, "step_size": 0.1, "steps": 200, "norm": "l2", "loss": loss, "start": start}
    expected = x - 0.4 * w / w.pow(2).sum().sqrt()
    assert torch.allclose(pgd(Linear(w), x, y, **how), expected, rtol=0, atol=1e-6)
    if start is None:  # straight there: in four steps
        assert torch.allclose(pgd(Linear(w), x, y, **(how | {"steps": 4})), expected, rtol=0, atol=1e-12)


def test_one_step_has_the_length_of_the_step():
    w, x, y = weights(), torch.full((3, 1, 5, 5), 0.5, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    moved = pgd(Linear(w), x, y, eps=0.4, step_size=0.1, steps=1, norm="l2", start=None)
    assert torch.allclose(length(moved - x), torch.full((3,), 0.1, dtype=torch.float64))


def test_fosc_is_zero_at_the_optimum_and_the_gap_elsewhere():
    g = torch.randn(4, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    size = length(g)
    best = 0.7 * g / size.view(-1, 1, 1, 1)
    assert torch.allclose(fosc(g, best, 0.7, "l2"), torch.zeros(4, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(fosc(g, torch.zeros_like(g), 0.7, "l2"), 0.7 * size)
    assert torch.allclose(fosc(g, -best, 0.7, "l2"), 1.4 * size)


def test_the_projection_shortens_and_keeps_what_is_inside():
    x = torch.full((2, 1, 1, 2), 0.5, dtype=torch.float64)
    far = x + torch.tensor([[0.3, 0.4], [0.03, 0.04]], dtype=torch.float64).view(2, 1, 1, 2)
    near = ball.project(far, x, 0.1, "l2")
    assert torch.allclose(near[0].flatten(), torch.tensor([0.56, 0.58], dtype=torch.float64))
    assert torch.equal(near[1], far[1])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999), eps=st.floats(1e-3, 20), scale=st.floats(1e-6, 50), size=st.integers(1, 6))
def test_a_projected_point_lies_in_the_ball_and_the_pixel_range_and_stays(seed, eps, scale, size):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(4, 2, size, size, generator=generator, dtype=torch.float64).round(decimals=1)
    point = x + scale * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    near = ball.project(point, x, eps, "l2")
    assert (length(near - x) <= eps + 1e-9).all() and near.min() >= 0 and near.max() <= 1
    assert torch.allclose(ball.project(near, x, eps, "l2"), near, rtol=0, atol=1e-9)
    assert (length(near - x) <= length(point - x) + 1e-9).all()


def test_a_uniform_start_fills_the_ball():
    """In two dimensions half of the points lie outside 1/sqrt(2) of the radius, and no direction is preferred."""
    like = torch.zeros(4000, 1, 1, 2, dtype=torch.float64)
    drawn = ball.draw_in_ball(like, torch.Generator().manual_seed(0), "l2")
    assert length(drawn).max() <= 1
    assert abs((length(drawn) > math.sqrt(0.5)).double().mean().item() - 0.5) < 0.03
    assert drawn.mean(dim=0).abs().max() < 0.03


def test_a_gradient_of_zero_takes_no_step_and_a_tiny_one_a_whole_step():
    gradient = torch.zeros(3, 1, 2, 2)
    gradient[1, 0, 0, 0], gradient[2, 0, 0] = 1e-30, torch.tensor([3e-25, -4e-25])  # their squares are 0 in float32
    step = ball.steepest(gradient, "l2")
    assert torch.allclose(length(step), torch.tensor([0.0, 1.0, 1.0]))
    assert torch.allclose(step[2, 0, 0], torch.tensor([0.6, -0.8]))


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_every_attack_stays_inside_and_does_harm(attack, batch):
    model, x, y = batch
    x = x.round(decimals=1)
    y = model(x).argmax(dim=1)
    for eps in (0.01, 0.8, 4.0):
        x_adv = attack(model, x, y, eps=eps, step_size=eps / 4, steps=5, norm="l2")
        assert (length(x_adv - x) <= eps + 1e-9).all() and x_adv.min() >= 0 and x_adv.max() <= 1
    assert (model(x_adv).argmax(dim=1) != y).double().mean() > 0.3


@pytest.mark.parametrize("tau", [0, 2, 9])
@pytest.mark.parametrize("loss", ["ce", "kl", "cw"])
@pytest.mark.parametrize(
    ("start", "noise", "project"), [("uniform", 0.0, True), ("normal", 0.01, True), (None, 0.02, False)]
)
def test_equals_the_literal_oracle(tau, loss, start, noise, project, batch):
    if loss == "kl" and start is None:
        pytest.skip("at the image the gradient of the KL is rounding alone, and so is its direction")
    model, x, y = batch
    how = {"eps": 0.6, "step_size": 0.15, "steps": 6, "tau": tau, "loss": loss, "start": start, "noise": noise}
    how |= {"project": project, "norm": "l2"}
    expected, counts = literal_friendly_pgd(model, x, y, seed=3, **how)
    found = friendly_pgd(model, x, y, generator=torch.Generator().manual_seed(3), **how)
    assert torch.equal(found.backprops, counts)
    assert torch.allclose(found.x_adv, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_the_precision(dtype):
    model = network().to(dtype)
    x, y = images(network(), 5)
    x_adv = pgd(model, x.to(dtype), y, eps=0.5, step_size=0.1, steps=3, norm="l2")
    assert x_adv.dtype == dtype and (length(x_adv - x.to(dtype)) <= 0.52).all()


def test_a_radius_may_exceed_one_only_in_l2(batch):
    pgd(*batch, eps=3.0, step_size=1.0, steps=1, norm="l2")
    with pytest.raises(UserError, match=r"Only an L2 radius may exceed 1: norm='l2'"):
        pgd(*batch, eps=3.0)
    for wrong in (0.0, -1.0, math.inf, math.nan, None):
        with pytest.raises(UserError, match=r"eps must be finite and above 0 \(in L2 it may exceed 1\)"):
            pgd(*batch, eps=wrong, norm="l2")
    with pytest.raises(UserError, match=r"unknown norm 'l1'. Did you mean"):
        pgd(*batch, norm="l1")
    with pytest.raises(UserError, match="unknown norm '2'"):
        pgd(*batch, norm=2)


def test_a_start_is_checked_in_the_norm(batch):
    model, x, y = batch
    near = ball.project(x + 0.1 * torch.ones_like(x), x, 0.5, "l2")
    pgd(model, x, y, eps=0.5, step_size=0.1, steps=1, norm="l2", start=near)
    with pytest.raises(UserError, match=r"eps is 0\.1, found a distance of"):
        pgd(model, x, y, eps=0.1, step_size=0.1, steps=1, norm="l2", start=near)
