"""Plain PGD where the answer is known."""

from __future__ import annotations

import torch
from torch import nn

from sparring.attacks import pgd


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


def test_two_calls_without_a_generator_start_apart():
    """Restarts that repeat one another would overstate robustness."""
    model = linear()
    x, y = torch.full((4, 3, 2, 2), 0.5, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    tiny = {"eps": 0.1, "step_size": 1e-6, "steps": 1}
    assert not torch.equal(pgd(model, x, y, **tiny), pgd(model, x, y, **tiny))
