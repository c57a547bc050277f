"""PGD with a rule to stop by: FOSC, the probability margin, a count per example."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparring.attacks import fosc_pgd, friendliest_pgd, friendly_pgd, margin_pgd, pgd, pgd_until
from sparring.attacks.fosc import fosc
from sparring.attacks.margin import probability_margin
from sparring.errors import UserError
from tests.attacks.conftest import images, network

COMMON = {"eps": 0.12, "step_size": 0.03, "steps": 5}
ATTACKS = {
    "fosc": lambda *batch, **changes: fosc_pgd(*batch, **(COMMON | {"criterion": 0.02} | changes)),
    "margin": lambda *batch, **changes: margin_pgd(*batch, **(COMMON | {"margin": 0.0} | changes)),
    "friendliest": lambda *batch, **changes: friendliest_pgd(*batch, **(COMMON | {"rho": 0.01} | changes)),
    "mixed": lambda model, x, y, **changes: pgd_until(
        model, x, y, **(COMMON | {"steps": torch.arange(len(x)) % 5} | changes)
    ),
}
attacks = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())


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


def test_fosc_by_hand():
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


def test_a_margin_that_is_just_reached_is_not_passed():
    """Both classes alike: wrong by 0, which is not more than 0."""
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
    begun = (x + eps * (2 * torch.rand(x.shape, generator=seeded(seed), dtype=x.dtype) - 1)).clamp(0, 1)
    points, counts = [], []
    for i in range(len(x)):
        here, taken = begun[i : i + 1], 0
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


def test_the_ends_of_the_rules(batch):
    """A criterion nobody misses leaves the start; margin 0 is PGD-K-0, margin 1 is PGD-K."""
    model, x, y = batch
    assert fosc_pgd(model, x, y, criterion=1e9, generator=seeded(), **COMMON).backprops.sum() == 0
    zero = friendly_pgd(model, x, y, tau=0, start="uniform", generator=seeded(), **COMMON)
    found = margin_pgd(model, x, y, margin=0.0, generator=seeded(), **COMMON)
    assert torch.equal(found.backprops, zero.backprops)
    assert torch.allclose(found.x_adv, zero.x_adv, rtol=0, atol=1e-12)
    whole = margin_pgd(model, x, y, margin=1.0, generator=seeded(), **COMMON)
    assert torch.equal(whole.x_adv, pgd(model, x, y, generator=seeded(), **COMMON))
    assert (whole.backprops == 5).all()


def test_the_probability_margin_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]])
    assert probability_margin(p.log(), torch.tensor([0, 2])).tolist() == pytest.approx([-0.5, 0.6])


def test_every_example_has_its_own_count(batch):
    """0 steps is the image itself, k steps what PGD-k makes of it."""
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


@attacks
def test_stays_inside_and_leaves_the_model_as_it_was(attack, batch):
    model, x, y = batch
    x = x.round(decimals=1)  # pixels at 0 and 1 too
    model.train()
    model[1].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    state = torch.get_rng_state()
    for eps in (0.001, 0.12, 1.0):
        x_adv = attack(model, x, y, eps=eps).x_adv
        assert (x_adv - x).abs().max() <= eps + 1e-12
        assert x_adv.min() >= 0 and x_adv.max() <= 1
        assert (x_adv.shape, x_adv.dtype, x_adv.requires_grad) == (x.shape, x.dtype, False)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@attacks
def test_seeds_no_grad_and_nothing_at_all(attack, batch):
    one, same, other = (attack(*batch, generator=seeded(seed)).x_adv for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with torch.inference_mode():
        assert torch.equal(attack(*batch, generator=seeded(1)).x_adv, one)
    model, x, y = batch
    assert attack(model, x[:0], y[:0]).backprops.shape == (0,)


def test_any_image_size_and_class_count():
    model = network(3, (5, 7), 2)
    x, y = images(model, 9, 3, (5, 7))
    for attack in ATTACKS.values():
        assert attack(model, x, y).x_adv.shape == x.shape


@pytest.mark.parametrize(
    ("attack", "changes", "message"),
    [
        ("fosc", {"criterion": -0.1}, "criterion must be finite"),
        ("fosc", {"criterion": float("nan")}, "criterion must be finite"),
        ("fosc", {"steps": 0}, "steps must be"),
        ("fosc", {"steps": 2.5}, "steps must be"),
        ("fosc", {"eps": 8}, "For 8/255 write 8/255"),
        ("margin", {"margin": 1.1}, r"margin must lie in \[-1, 1\]"),
        ("margin", {"margin": float("nan")}, r"margin must lie in \[-1, 1\]"),
        ("mixed", {"steps": torch.tensor([1, 2])}, "tensor of 24 numbers"),
        ("mixed", {"steps": torch.full((24,), -1)}, "at least 0"),
        ("mixed", {"start": "here"}, "start must be"),
    ],
)
def test_bad_values_are_refused(attack, changes, message, batch):
    with pytest.raises(UserError, match=message):
        ATTACKS[attack](*batch, **changes)
