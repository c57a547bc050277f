"""Theorem 1: the surrogate, the terms in closed form on a linear model, the intervals, the findings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparring.attacks import autoattack
from sparring.errors import UserError
from sparring.paper import extremes
from sparring.paper.bound import bootstrap, conclude, estimate
from sparring.paper.extremes import Extremes, bits

NUMBERS = {"eps": 0.1, "strongest": "pgd", "seed": 0, "resamples": 200}


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=6), st.data())
def test_the_surrogate_bounds_the_zero_one_loss(z, data):
    """Never negative, and at least 1 where the model is wrong; a tie of two classes is exactly 1."""
    logits = torch.tensor([z], dtype=torch.float64)
    y = torch.tensor([data.draw(st.integers(0, len(z) - 1))])
    loss = bits(logits, y).item()
    assert loss >= 0
    if logits.argmax().item() != y.item():
        assert loss >= 1 - 1e-12
    assert bits(torch.zeros(1, 2), torch.tensor([0])).item() == pytest.approx(1.0)
    assert bits(torch.tensor([[math.nan, 0.0]]), torch.tensor([0])).item() == math.inf


def linear() -> nn.Module:
    """Two classes; the margin z_1 - z_0 has the gradient (4, -2), so eps 0.1 changes it by up to 0.6."""
    model = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-2.0, 1.0], [2.0, -1.0]]))
    return model


MARGINS = torch.tensor([-0.59, -0.55, -0.2, -0.05, 0.05, 0.3, 0.59, 1.0, 1.5, -0.595], dtype=torch.float64)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Images of class 0 with these margins, away from the ends of the pixel range; the last two cannot be fooled."""
    first = torch.cat([MARGINS, MARGINS[:2] - 0.4])
    x = torch.stack([(first + 1.2) / 4, torch.full_like(first, 0.6)], dim=1)
    assert x[:, 0].min() >= 0.05 and x.max() <= 0.9
    return x, torch.zeros(len(x), dtype=torch.int64)


@pytest.mark.parametrize("strongest", ["pgd", "autoattack"])
@pytest.mark.parametrize("rho", [0.0, 0.25])
def test_closed_form_on_a_linear_model(strongest, rho):
    """The margin covers [m - 0.6, m + 0.6]: wrong if m + 0.6 > 0, least at max(m - 0.6, 0), most at m + 0.6."""
    x, y = images()
    if strongest == "autoattack":
        x = x[:, None, None, :]  # Square needs images
    m = torch.cat([MARGINS, MARGINS[:2] - 0.4])
    cut = torch.minimum(x.flatten(1)[:, 0], torch.tensor(0.1))  # the pixel range cuts the ball from below
    low, high = m - 4 * cut - 0.2, m + 0.6
    loss = [torch.log2(1 + torch.exp(value)) for value in (m, low.clamp(min=0), high)]
    wrong = high > 0
    friendly = torch.where(wrong, loss[1] + rho, loss[2])
    model = nn.Sequential(nn.Flatten(), linear())
    found = estimate(model, x, y, rho=rho, **(NUMBERS | {"strongest": strongest}))
    assert found.n == len(x)
    assert found.natural.value == pytest.approx(loss[0].mean().item())
    assert found.risk.value == pytest.approx(wrong.double().mean().item())
    assert found.worst_term.value == pytest.approx(loss[2].mean().item(), abs=1e-9)
    assert found.friendly_term.value == pytest.approx(friendly.mean().item(), abs=2e-4)
    assert found.friendly.value == pytest.approx(found.natural.value + found.friendly_term.value)
    assert found.conventional.value == pytest.approx(found.natural.value + found.worst_term.value)
    assert found.above_risk.value == pytest.approx(found.friendly.value - found.risk.value)
    assert found.tighter.value == pytest.approx(found.conventional.value - found.friendly.value)


def test_autoattack_runs_on_images_that_are_still_right_and_its_points_count(monkeypatch):
    """A point that only AutoAttack finds makes its image wrong, and enters both losses, moved towards the image."""
    x, y = images()
    x = x[:, None, None, :]
    model = nn.Sequential(nn.Flatten(), linear())
    asked = []

    def part(name, model, x, y, **_):
        asked.append(len(x))
        # Margin 4 * 0.8 - 2 * 0 = 3.2: misclassified, and (unlike a real attack) outside the ball.
        return autoattack.Claim(torch.tensor([0.8, 0.0]).expand_as(x).to(x), torch.ones(len(x), dtype=torch.bool))

    monkeypatch.setattr(extremes, "attack_part", part)
    without = estimate(model, x, y, **NUMBERS)
    with_it = estimate(model, x, y, **(NUMBERS | {"strongest": "autoattack"}))
    right = round((1 - without.risk.value) * len(x))
    assert asked == [right] and right > 0
    assert with_it.risk.value == 1.0
    assert with_it.worst_term.value > without.worst_term.value
    pulled = (with_it.friendly_term.value - without.friendly_term.value) * len(x) / right
    assert pulled < 0.5  # from below 1 bit to 1 + rho; the loss at AutoAttack's own point is 4.7


def test_the_parts_of_autoattack_run_in_turn(monkeypatch):
    """Each runs on what the previous ones left; here the second finds one image, the third all others."""
    x, y = images()
    x = x[:, None, None, :]
    asked = []

    def part(name, model, x, y, **_):
        asked.append((name, len(x)))
        found = torch.zeros(len(x), dtype=torch.bool)
        found[: {1: 1, 2: len(x)}.get(len(asked) - 1, 0)] = True
        far = torch.tensor([0.8, 0.0]).expand_as(x).to(x)
        return autoattack.Claim(torch.where(found[:, None, None, None], far, x), found)

    monkeypatch.setattr(extremes, "attack_part", part)
    without = estimate(nn.Sequential(nn.Flatten(), linear()), x, y, **NUMBERS)
    with_it = estimate(nn.Sequential(nn.Flatten(), linear()), x, y, **(NUMBERS | {"strongest": "autoattack"}))
    right = round((1 - without.risk.value) * len(x))
    assert [name for name, _ in asked] == list(autoattack.parts("standard", classes=2))[: len(asked)]
    assert [count for _, count in asked] == [right, right, right - 1] and with_it.risk.value == 1.0


def test_pgd_also_maximises_the_margin(monkeypatch):
    """Where the gradient of the cross-entropy vanishes, as with a logit of a thousand, that of the margin does not."""
    losses = []
    real = extremes.pgd_from
    monkeypatch.setattr(
        extremes, "pgd_from", lambda *a, loss, **more: losses.append(loss) or real(*a, loss=loss, **more)
    )
    x, y = images()
    estimate(linear(), x, y, **NUMBERS)
    assert losses == ["ce", "cw"]


def test_a_model_without_finite_losses_is_refused():
    x, y = images()

    class Broken(nn.Module):
        def forward(self, x):
            return linear()(x) / (x[:, :1] > 0.3)

    with pytest.raises(UserError, match=r"not finite for \d+ of 12 images"):
        estimate(Broken(), x, y, **NUMBERS)
    with pytest.raises(UserError, match="a seed must be a whole number from 0"):
        estimate(linear(), x, y, **(NUMBERS | {"seed": -1}))


def found(wrong: list[bool], least: list[float], most: list[float]) -> Extremes:
    numbers = [torch.tensor(values, dtype=torch.float64) for values in ([0.5] * len(wrong), least, most)]
    return Extremes(numbers[0], torch.tensor(wrong), numbers[1], numbers[2])


def test_the_findings():
    holds, fails = "holds", "does not hold"
    some = found([True, True, False, False], [1.0, 1.2, math.inf, math.inf], [2.0, 3.0, 0.9, 0.2])
    result = conclude(some, rho=0.1, **NUMBERS)
    assert result.friendly_term.value == pytest.approx((1.1 + 1.3 + 0.9 + 0.2) / 4)
    assert result.worst_term.value == pytest.approx((2.0 + 3.0 + 0.9 + 0.2) / 4)
    assert list(result.findings().values()) == [holds, holds]
    assert result.largest_rho == pytest.approx((1.0 + 1.8) / 2)  # the mean of most - least over the wrong ones
    assert conclude(some, rho=result.largest_rho, **NUMBERS).tighter.value == pytest.approx(0.0)
    # A rho above every difference makes the friendly bound the larger one.
    assert list(conclude(some, rho=5.0, **NUMBERS).findings().values())[1] != holds
    all_wrong = found([True] * 4, [1.0] * 4, [2.0] * 4)
    assert list(conclude(all_wrong, rho=5.0, **NUMBERS).findings().values()) == [holds, fails]
    # One image for, one against.
    mixed = found([True, True], [1.0, 1.0], [1.0, 1.3])
    assert list(conclude(mixed, rho=0.1, **NUMBERS).findings().values()) == [holds, "undecided with 2 images"]
    # Without misclassified points the two bounds are equal.
    right = found([False, False], [math.inf] * 2, [0.3, 0.4])
    result = conclude(right, rho=0.1, **NUMBERS)
    assert result.largest_rho is None
    assert result.tighter.value == result.tighter.low == 0 and list(result.findings().values()) == [holds, holds]


def test_a_loss_that_is_no_surrogate_is_detected():
    """A loss below 1 on misclassified points (as in nats) breaks the first inequality, and the finding reports it."""
    broken = replace(found([True] * 3, [0.2] * 3, [0.3] * 3), natural=torch.full((3,), 0.1, dtype=torch.float64))
    assert conclude(broken, rho=0.0, **NUMBERS).findings()["risk <= friendly bound"] == "does not hold"


def test_the_intervals_are_those_of_a_mean():
    """1.96 standard errors on either side; paired, so that what two columns share cancels in their difference."""
    draws = torch.Generator().manual_seed(0)
    values = torch.rand(400, generator=draws, dtype=torch.float64)
    columns = {"one": values, "same": values + 1.0, "difference": torch.full_like(values, 1.0)}
    got = bootstrap(columns, resamples=2000, seed=3)
    reach = 1.96 * values.std().item() / 20
    assert got["one"].value == pytest.approx(values.mean().item())
    assert got["one"].low == pytest.approx(values.mean().item() - reach, rel=0.02)
    assert got["one"].high == pytest.approx(values.mean().item() + reach, rel=0.02)
    assert (got["difference"].low, got["difference"].high) == (1.0, 1.0)
    assert got["same"].low - got["one"].low == pytest.approx(1.0)
    assert bootstrap(columns, resamples=200, seed=3) == bootstrap(columns, resamples=200, seed=3)
    assert bootstrap(columns, resamples=200, seed=4)["one"] != bootstrap(columns, resamples=200, seed=3)["one"]


def test_batches_do_not_matter_and_the_callers_model_and_random_state_are_unchanged():
    x, y = images()
    model = linear().train()
    state = torch.get_rng_state()
    reported: list[tuple[str, float, int]] = []
    whole = estimate(model, x, y, **NUMBERS)
    parts = estimate(
        model, x, y, batch_size=5, progress=lambda what, done, n: reported.append((what, done, n)), **NUMBERS
    )
    assert parts.friendly.value == pytest.approx(whole.friendly.value, abs=1e-9)
    assert [(done, n) for what, done, n in reported if what == "images"] == [(4, 12), (8, 12), (12, 12)]
    places = [done for _, done, _ in reported]
    assert places == sorted(places) and {"CE, 100 steps", "friendliest"} <= {what for what, _, _ in reported}
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert estimate(model, x, y, limit=3, **NUMBERS).n == 3


def test_a_stochastic_model_is_repeatable_and_the_callers_random_state_is_unchanged():
    x, y = images()

    class Noisy(nn.Module):
        def forward(self, x):
            return linear()(x) + 0.3 * torch.randn(len(x), 2, dtype=x.dtype)

    one = estimate(Noisy(), x, y, **(NUMBERS | {"seed": 1}))
    with torch.random.fork_rng():
        torch.rand(1)  # another global state
        state = torch.get_rng_state()
        same, other = (estimate(Noisy(), x, y, **(NUMBERS | {"seed": seed})) for seed in (1, 2))
        assert torch.equal(torch.get_rng_state(), state)
    assert one == same and one.natural.value != other.natural.value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps": 8}, "For 8/255 write 8/255"),
        ({"rho": -0.1}, "rho must be finite and at least 0"),
        ({"rho": math.nan}, "rho must be finite"),
        ({"strongest": "autoatack"}, "unknown attack 'autoatack'. Did you mean 'autoattack'"),
        ({"limit": 0}, "limit must be at least 1 image"),
        ({"resamples": 10}, "resamples must be at least 100"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        estimate(linear(), *images(), **(NUMBERS | changes))
