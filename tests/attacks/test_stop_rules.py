"""PGD with a stop rule: FOSC, the probability margin, a number of steps per example."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparring.attacks import fosc_pgd, friendly_pgd, margin_pgd, pgd, pgd_until
from sparring.attacks.losses import probability_margin
from sparring.attacks.stop_rules import fosc
from sparring.errors import UserError

COMMON = {"eps": 0.12, "step_size": 0.03, "steps": 5}
ATTACKS = {
    "fosc": lambda *batch, **changes: fosc_pgd(*batch, **(COMMON | {"criterion": 0.02} | changes)),
    "margin": lambda *batch, **changes: margin_pgd(*batch, **(COMMON | {"margin": 0.0} | changes)),
    "mixed": lambda model, x, y, **changes: pgd_until(
        model, x, y, **(COMMON | {"steps": torch.arange(len(x)) % 5} | changes)
    ),
}


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear() -> nn.Module:
    """Two pixels, two classes. With logits (a, b): CE's gradient for class 0 is p_1 * (w_1 - w_0) = p_1 * (4, -2)."""
    model = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-2.0, 1.0], [2.0, -1.0]]))
    return model.eval()


def at_half() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (-0.5, 0.5) and (0, 0) for class 0."""
    return torch.tensor([[0.5, 0.5], [0.25, 0.5]], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)


def test_fosc_of_known_gradients():
    gradient = torch.tensor([[[[3.0, -1.0]]], [[[0.0, 2.0]]], [[[1.0, -1.0]]]])
    shift = torch.tensor([[[[0.1, 0.1]]], [[[0.1, -0.2]]], [[[0.2, -0.2]]]])
    # 0.2 * 4 - (0.3 - 0.1); 0.2 * 2 + 0.4; in the corner that the gradient points to: 0.2 * 2 - 0.4
    assert fosc(gradient, shift, 0.2).tolist() == pytest.approx([0.6, 0.8, 0.0])


def test_fosc_of_a_linear_model_decides_the_stop():
    """At the image the shift is 0, so FOSC = eps * p_1 * (4 + 2): 0.6 * 0.7311 = 0.4386 and 0.6 * 0.5 = 0.3."""
    model, (x, y) = linear(), at_half()
    p_1 = torch.sigmoid(torch.tensor(1.0)).item()
    for criterion, steps in [(0.6 * p_1 + 1e-6, [0, 0]), (0.6 * p_1 - 1e-6, [1, 0]), (0.3 - 1e-6, [1, 1])]:
        found = fosc_pgd(model, x, y, eps=0.1, step_size=0.1, steps=1, criterion=criterion, start=None)
        assert found.backprops.tolist() == steps
        moved = x + 0.1 * torch.tensor(steps)[:, None] * torch.tensor([1.0, -1.0])
        assert torch.allclose(found.x_adv, moved)
    # One step of eps reaches the corner, where FOSC is 0 but for rounding; nothing moves from there.
    found = fosc_pgd(model, x, y, eps=0.1, step_size=0.1, steps=5, criterion=1e-9, start=None)
    assert found.backprops.tolist() == [1, 1]


def test_an_attack_stops_where_fosc_is_just_the_criterion():
    """In a corner of a ball of 1/8 every number is exact: FOSC is 0 there, and 0 is allowed."""
    model, (x, y) = linear(), at_half()
    found = fosc_pgd(model, x, y, eps=0.125, step_size=0.125, steps=3, criterion=0.0, start=None)
    assert found.backprops.tolist() == [1, 1]


def test_a_margin_that_is_just_reached_is_not_exceeded():
    """Two equal logits: wrong by 0, which is not more than 0."""
    model, (x, y) = linear(), at_half()
    found = margin_pgd(model, x, y, eps=0.1, step_size=0.01, steps=2, margin=0.0, start=None)
    assert model(x)[1].tolist() == [0.0, 0.0] and found.backprops.tolist() == [0, 1]


def test_fosc_is_not_negative_in_the_ball(batch):
    model, x, y = batch
    point = (x + 0.1 * (2 * torch.rand(x.shape, generator=seeded(), dtype=x.dtype) - 1)).requires_grad_()
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(point), y, reduction="sum"), point)
    assert (fosc(gradient, point.detach() - x, 0.1) >= 0).all()


def literal(model, x, y, *, eps, step_size, steps, stop, seed=5):
    """One example at a time, in the order of events of the docstring."""
    start = (x + eps * (2 * torch.rand(x.shape, generator=seeded(seed), dtype=x.dtype) - 1)).clamp(0, 1)
    points, counts = [], []
    for i in range(len(x)):
        here, taken = start[i : i + 1], 0
        for _ in range(steps):
            here = here.detach().requires_grad_()
            logits = model(here)
            (g,) = torch.autograd.grad(nn.functional.cross_entropy(logits, y[i : i + 1]), here)
            if stop(logits[0].softmax(0), int(y[i]), g, here - x[i : i + 1]):
                break
            here = torch.clamp(here + step_size * g.sign(), x[i : i + 1] - eps, x[i : i + 1] + eps).clamp(0, 1)
            taken += 1
        points.append(here.detach())
        counts.append(taken)
    return torch.cat(points), torch.tensor(counts)


@pytest.mark.parametrize(("criterion", "margin"), [(0.0, -0.01), (0.01, 0.0), (0.02, 0.01), (0.05, 0.02)])
def test_equal_the_literal_loop(criterion, margin, batch):
    model, x, y = batch
    by_fosc = fosc_pgd(model, x, y, criterion=criterion, generator=seeded(), **COMMON)
    by_margin = margin_pgd(model, x, y, margin=margin, generator=seeded(), **COMMON)
    rules = [
        lambda p, c, g, shift: COMMON["eps"] * g.abs().sum() - (g * shift).sum() <= criterion,
        lambda p, c, g, shift: max(p[j] for j in range(len(p)) if j != c) - p[c] > margin,
    ]
    for found, rule in zip((by_fosc, by_margin), rules, strict=True):
        x_adv, backprops = literal(model, x, y, stop=rule, **COMMON)
        assert torch.equal(found.backprops, backprops)
        assert torch.allclose(found.x_adv, x_adv, rtol=0, atol=1e-12)


def test_the_extremes_of_the_rules(batch):
    """A criterion that every point meets leaves the start; margin 0 is PGD-K-0, margin 1 is PGD-K."""
    model, x, y = batch
    assert fosc_pgd(model, x, y, criterion=1e9, generator=seeded(), **COMMON).backprops.sum() == 0
    zero = friendly_pgd(model, x, y, tau=0, start="uniform", generator=seeded(), **COMMON)
    found = margin_pgd(model, x, y, margin=0.0, generator=seeded(), **COMMON)
    assert torch.equal(found.backprops, zero.backprops)
    assert torch.allclose(found.x_adv, zero.x_adv, rtol=0, atol=1e-12)
    whole = margin_pgd(model, x, y, margin=1.0, generator=seeded(), **COMMON)
    assert torch.equal(whole.x_adv, pgd(model, x, y, generator=seeded(), **COMMON))
    assert (whole.backprops == 5).all()


def test_the_probability_margin_of_known_probabilities():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]])
    assert probability_margin(p.log(), torch.tensor([0, 2])).tolist() == pytest.approx([-0.5, 0.6])


def test_every_example_has_its_own_number_of_steps(batch):
    """0 steps return the image itself, k steps what PGD-k returns."""
    model, x, y = batch
    steps = torch.arange(len(x)) % 4
    found = pgd_until(model, x, y, eps=0.12, step_size=0.03, steps=steps, generator=seeded())
    assert torch.equal(found.backprops, steps)
    assert torch.equal(found.x_adv[steps == 0], x[steps == 0])
    for k in (1, 2, 3):
        whole = pgd(model, x, y, eps=0.12, step_size=0.03, steps=k, generator=seeded())
        assert torch.allclose(found.x_adv[steps == k], whole[steps == k], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fosc", "margin", "mixed"])
def test_the_active_set_really_shrinks(name, batch):
    model, x, y = batch
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    found = ATTACKS[name](model, x, y, generator=seeded())
    assert len(set(found.backprops.tolist())) > 1
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < len(x)


@pytest.mark.parametrize(
    ("attack", "changes", "message"),
    [
        ("fosc", {"criterion": -0.1}, "criterion must be finite"),
        ("fosc", {"criterion": float("nan")}, "criterion must be finite"),
        ("margin", {"margin": 1.1}, r"margin must lie in \[-1, 1\]"),
        ("margin", {"margin": float("nan")}, r"margin must lie in \[-1, 1\]"),
        ("mixed", {"steps": torch.tensor([1, 2])}, "tensor of 24 numbers"),
        ("mixed", {"steps": torch.full((24,), -1)}, "at least 0"),
        ("mixed", {"steps": torch.ones(24)}, "int64 tensor"),
    ],
)
def test_bad_values_are_refused(attack, changes, message, batch):
    with pytest.raises(UserError, match=message):
        ATTACKS[attack](*batch, **changes)
