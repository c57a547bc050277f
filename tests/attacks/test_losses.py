"""Every loss and its gradient against the equation written out longhand, example by example."""

from __future__ import annotations

import math

import pytest
import torch

from sparring.attacks import losses
from sparring.errors import UserError


def draw(seed=0, examples=7, classes=5, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    natural, adversarial = (
        torch.randn(examples, classes, generator=generator, dtype=torch.float64) * scale for _ in range(2)
    )
    return natural.requires_grad_(), adversarial.requires_grad_(), torch.arange(examples) % classes


def p(z):
    total = sum(torch.exp(value) for value in z)
    return [torch.exp(value) / total for value in z]


def longhand_ce(z, y):
    return torch.stack([-torch.log(p(row)[int(c)]) for row, c in zip(z, y, strict=True)])


def longhand_kl(z_nat, z_adv):
    rows = []
    for a, b in zip(z_nat, z_adv, strict=True):
        pa, pb = p(a), p(b)
        rows.append(sum(pa[k] * torch.log(pa[k] / pb[k]) for k in range(len(pa))))
    return torch.stack(rows)


def longhand_margin(z, y):
    return torch.stack(
        [max(row[k] for k in range(len(row)) if k != c) - row[int(c)] for row, c in zip(z, y, strict=True)]
    )


def longhand_bce(z, y):
    rows = []
    for row, c in zip(z, y, strict=True):
        probabilities = p(row)
        wrong = max(probabilities[k] for k in range(len(row)) if k != c)
        rows.append(-torch.log(probabilities[int(c)]) - torch.log(1.0001 - wrong + 1e-12))
    return torch.stack(rows)


def longhand_mart_kl(z_nat, z_adv, y):
    rows = []
    for a, b, c in zip(z_nat, z_adv, y, strict=True):
        pa, pb = p(a), p(b)
        divergence = sum(pa[k] * (torch.log(pa[k]) - torch.log(pb[k] + 1e-12)) for k in range(len(pa)))
        rows.append(divergence * (1.0000001 - pa[int(c)]))
    return torch.stack(rows)


CASES = {
    "cross-entropy": (lambda n, a, y: losses.cross_entropy(a, y), lambda n, a, y: longhand_ce(a, y)),
    "kl": (lambda n, a, y: losses.kl(n, a), lambda n, a, y: longhand_kl(n, a)),
    "margin": (lambda n, a, y: losses.margin(a, y), lambda n, a, y: longhand_margin(a, y)),
    "bce": (lambda n, a, y: losses.boosted_cross_entropy(a, y), lambda n, a, y: longhand_bce(a, y)),
    "mart kl": (losses.mart_weighted_kl, longhand_mart_kl),
}


@pytest.mark.parametrize(("ours", "longhand"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_the_equation(ours, longhand, seed):
    natural, adversarial, y = draw(seed)
    one, other = ours(natural, adversarial, y), longhand(natural, adversarial, y)
    assert one.shape == y.shape
    assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
    for of_one, of_other in zip(
        *(torch.autograd.grad(value.sum(), (natural, adversarial), allow_unused=True) for value in (one, other)),
        strict=True,
    ):
        assert (of_one is None) == (of_other is None)
        if of_one is not None:
            assert torch.allclose(of_one, of_other, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("ours", "longhand"), CASES.values(), ids=CASES.keys())
def test_extreme_logits_stay_finite(ours, longhand):
    natural = torch.tensor([[800.0, -800.0, 0.0], [-800.0, 800.0, 0.0]], dtype=torch.float32, requires_grad=True)
    adversarial = torch.tensor([[-800.0, 800.0, 0.0], [800.0, -800.0, 0.0]], requires_grad=True)
    value = ours(natural, adversarial, torch.tensor([0, 1])).sum()
    assert math.isfinite(value.item())
    gradients = torch.autograd.grad(value, (natural, adversarial), allow_unused=True)
    assert all(gradient is None or torch.isfinite(gradient).all() for gradient in gradients)


def test_margin_tells_right_from_wrong():
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    assert losses.margin(logits, torch.tensor([0, 1])).tolist() == [-1.0, 1.0]


def test_kl_of_equals_is_zero():
    natural, _, _ = draw()
    assert torch.equal(losses.kl(natural, natural), torch.zeros(7, dtype=torch.float64))


def test_soft_targets_mix_and_smooth():
    y, other, share = torch.tensor([0, 2]), torch.tensor([1, 2]), torch.tensor([0.75, 0.6])
    assert losses.soft_targets(y, 3).tolist() == [[1, 0, 0], [0, 0, 1]]
    mixed = losses.soft_targets(y, 3, other=other, share=share)
    torch.testing.assert_close(mixed, torch.tensor([[0.75, 0.25, 0], [0, 0, 1.0]]))
    smooth = losses.soft_targets(y, 3, smoothing=0.3, other=other, share=share)
    torch.testing.assert_close(smooth, mixed * 0.7 + 0.1)
    assert losses.dominant(smooth).tolist() == y.tolist() and losses.dominant(y) is y
    for wrong in ({"smoothing": 1.0}, {"other": other}, {"share": share}):
        with pytest.raises(UserError, match=r"smoothing|belong together"):
            losses.soft_targets(y, 3, **wrong)
    with pytest.raises(UserError, match="class numbers"):
        losses.soft_targets(mixed, 3)


@pytest.mark.parametrize("name", ["cross_entropy", "boosted_cross_entropy", "mart_weighted_kl"])
def test_one_hot_targets_give_the_loss_of_class_numbers(name):
    natural, adversarial, y = draw()
    logits = (natural, adversarial) if name == "mart_weighted_kl" else (natural,)
    found = []
    for target in (y, losses.soft_targets(y, 5)):
        values = getattr(losses, name)(*logits, target)
        found.append((values, *torch.autograd.grad(values.sum(), logits)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_cross_entropy_of_smoothed_labels_is_torchs():
    logits, _, y = draw()
    expected = torch.nn.functional.cross_entropy(logits, y, label_smoothing=0.2, reduction="none")
    torch.testing.assert_close(
        losses.cross_entropy(logits, losses.soft_targets(y, 5, smoothing=0.2).double()), expected
    )
