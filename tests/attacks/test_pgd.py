"""Plain PGD where the answer is known, and from given points."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparring.attacks import ball, pgd
from sparring.errors import UserError


def linear(classes: int = 2, pixels: int = 12) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, classes)).double()
    generator = torch.Generator().manual_seed(3)
    model[1].weight.data = torch.randn(classes, pixels, generator=generator, dtype=torch.float64)
    return model


def test_closed_form_on_a_linear_model():
    """With two classes the worst point is x + eps * sign(w_wrong - w_y), cut to [0, 1]."""
    model = linear()
    x = torch.rand(20, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(20) % 2
    weight = model[1].weight
    direction = (weight[1 - y] - weight[y]).sign().reshape(x.shape)
    best = (x + 0.1 * direction).clamp(0, 1)
    for loss in ("ce", "cw"):
        x_adv = pgd(model, x, y, eps=0.1, step_size=0.03, steps=10, loss=loss)
        assert torch.allclose(x_adv, best, rtol=0, atol=1e-12)


def test_fgsm_is_one_step_of_eps():
    model = linear()
    x = torch.rand(6, 3, 2, 2, dtype=torch.float64)
    y = torch.arange(6) % 2
    at = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(at), y), at)
    expected = (x + 0.05 * gradient.sign()).clamp(0, 1)
    assert torch.allclose(pgd(model, x, y, eps=0.05, step_size=0.05, steps=1, start=None), expected, atol=1e-15)


def test_two_calls_without_a_generator_draw_different_starts():
    """Restarts that repeat one another would overstate robustness."""
    model = linear()
    x, y = torch.full((4, 3, 2, 2), 0.5, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    tiny = {"eps": 0.1, "step_size": 1e-6, "steps": 1}
    assert not torch.equal(pgd(model, x, y, **tiny), pgd(model, x, y, **tiny))


SETTINGS = {"eps": 0.1, "step_size": 0.02}


def test_a_start_is_where_the_attack_begins(batch):
    model, x, y = batch
    drawn = ball.random_start(x, eps=0.1, start="uniform", generator=torch.Generator().manual_seed(3))
    named = pgd(model, x, y, steps=5, start="uniform", generator=torch.Generator().manual_seed(3), **SETTINGS)
    assert torch.equal(pgd(model, x, y, steps=5, start=drawn, **SETTINGS), named)
    at_image, none = (pgd(model, x, y, steps=5, start=start, **SETTINGS) for start in (x, None))
    assert torch.equal(at_image, none)


def test_an_attack_goes_on_from_where_another_ended(batch):
    model, x, y = batch
    half = pgd(model, x, y, steps=3, start=None, **SETTINGS)
    whole = pgd(model, x, y, steps=5, start=None, **SETTINGS)
    assert torch.equal(pgd(model, x, y, steps=2, start=half, **SETTINGS), whole)


def test_a_start_beyond_the_ball_by_rounding_is_projected():
    model, y = linear().float(), torch.zeros(1, dtype=torch.int64)
    x = torch.full((1, 3, 2, 2), 0.3)
    start = torch.nextafter(x + 0.1, torch.tensor(1.0))
    x_adv = pgd(model, x, y, steps=1, start=start, eps=0.1, step_size=1e-9)
    assert x_adv.max() <= (x + 0.1).max() < start.max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], "start must have the shape of x"),
        (lambda x: x.float(), r"start must be torch.float64 on cpu as x is, got torch.float32.*start\.to\(x\)"),
        (lambda x: x.to("meta"), "got torch.float64 on meta"),
        (lambda x: x + 1.5, r"start must be finite and lie in \[0, 1\]"),
        (lambda x: torch.where(x > 0.5, torch.nan, x), "start must be finite"),
        (lambda x: (x + 0.11).clamp(0, 1), "start must lie in the eps-ball around x: eps is 0.1, found a distance of"),
    ],
)
def test_bad_starts_are_refused_before_the_model_runs(change, message, batch):
    model, x, y = batch
    model.register_forward_pre_hook(lambda module, inputs: pytest.fail("the model was called"))
    with pytest.raises(UserError, match=message):
        pgd(model, x, y, steps=2, start=change(x), **SETTINGS)
