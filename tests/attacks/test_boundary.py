"""Friendly data by definition: least loss subject to a margin, by loss value and by class probability."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparring.attacks import friendliest_pgd, friendly_pgd
from sparring.attacks.boundary import Least
from sparring.attacks.losses import cross_entropy, probability_margin
from sparring.errors import UserError
from tests.attacks.conftest import images, network

COMMON = {"eps": 0.3, "step_size": 0.06, "steps": 6}
both = pytest.mark.parametrize(
    ("by", "rho"), [("loss", 0.02), ("loss", 0.2), ("probability", 0.005), ("probability", 0.05)]
)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def many():
    """Correct and wrong examples, some of which meet the margin under PGD and some not."""
    model = network()
    with torch.no_grad():
        model[-1].weight.mul_(8)  # margins of the order of a nat
    x, y = images(model, 60)
    y[:20] = (y[:20] + 1) % 4
    return model, x, y


def paper_margin(logits, y, by):
    """The constraint as the paper writes it, one example at a time."""
    found = []
    for z, c in zip(logits, y.tolist(), strict=True):
        losses = [-torch.log_softmax(z, dim=0)[k] for k in range(len(z))]
        p = torch.softmax(z, dim=0)
        found.append(losses[c] - min(losses) if by == "loss" else max(p) - p[c])
    return torch.stack(found)


@torch.no_grad()
def judged(model, x, y, by):
    logits = model(x)
    return paper_margin(logits, y, by), cross_entropy(logits, y)


def iterates(model, x, y, **common):
    """Every point of plain PGD, its start and its end included."""
    x_adv = (x + common["eps"] * (2 * torch.rand(x.shape, generator=seeded(), dtype=x.dtype) - 1)).clamp(0, 1)
    points = [x_adv]
    for _ in range(common["steps"]):
        here = points[-1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(here), y, reduction="sum"), here)
        step = here.detach() + common["step_size"] * gradient.sign()
        points.append(torch.clamp(step, x - common["eps"], x + common["eps"]).clamp(0, 1))
    return points


@both
def test_the_margin_is_met_wherever_pgd_meets_it(by, rho, many):
    model, x, y = many
    common = COMMON | {"eps": 0.12, "step_size": 0.03}  # a ball that not every example can be fooled in
    points = iterates(model, x, y, **common)
    met = torch.stack([judged(model, point, y, by)[0] >= rho for point in points]).any(dim=0)
    found = friendliest_pgd(model, x, y, rho=rho, by=by, generator=seeded(), **common)
    margin, _ = judged(model, found.x_adv, y, by)
    assert 0 < met.sum() < len(x)
    assert torch.equal(margin >= rho - 1e-12, met)
    # Where it is never met, the search ends where PGD-K ends.
    assert torch.allclose(found.x_adv[~met], points[-1][~met], rtol=0, atol=1e-12)
    assert (found.backprops[~met] == COMMON["steps"]).all()


@both
@pytest.mark.parametrize("downhill", [True, False])
def test_the_loss_is_not_above_that_of_stopping_early(by, rho, downhill, many):
    """Of the same examples, wherever PGD-K-0's point is allowed; and below it for those that overshot."""
    model, x, y = many
    zero = friendly_pgd(model, x, y, tau=0, start="uniform", generator=seeded(), **COMMON)
    found = friendliest_pgd(model, x, y, rho=rho, by=by, downhill=downhill, generator=seeded(), **COMMON)
    margin, early = judged(model, zero.x_adv, y, by)
    _, ours = judged(model, found.x_adv, y, by)
    allowed = (margin >= rho) | (zero.backprops == COMMON["steps"]) & (margin == 0)
    assert allowed.sum() > 10
    assert (ours <= early + 1e-12)[allowed].all()
    overshot = allowed & (zero.backprops > 0) & (margin >= 1.5 * rho)
    assert (ours < early)[overshot].all()


@both
def test_the_point_lies_on_the_constraint(by, rho, many):
    """Halved often enough, an example that crossed sits at the margin itself: that is what early stopping misses."""
    model, x, y = many
    found = friendliest_pgd(model, x, y, rho=rho, by=by, halvings=40, generator=seeded(), **COMMON)
    margin, _ = judged(model, found.x_adv, y, by)
    crossed = (margin >= rho - 1e-12) & (found.backprops > 0) & (found.backprops < COMMON["steps"])
    assert crossed.sum() > 5
    assert torch.allclose(margin[crossed], torch.full_like(margin[crossed], rho), rtol=0, atol=1e-9)


def linear() -> nn.Module:
    """Two classes; the margin z_1 - z_0 of class 0 has the gradient (4, -2): eps 0.1 moves it by 0.6 at most."""
    model = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-2.0, 1.0], [2.0, -1.0]]))
    return model.eval()


@pytest.mark.parametrize("by", ["loss", "probability"])
@pytest.mark.parametrize("start", [None, "uniform"])
@pytest.mark.parametrize("rho", [0.05, 0.3])
def test_closed_form_on_a_linear_model(by, start, rho):
    """The loss is log(1 + e^m) in the margin m: least at the smallest m allowed in [m_0 - 0.6, m_0 + 0.6].

    By probability p_1 - p_0 = tanh(m / 2), so rho asks for m >= 2 artanh(rho).
    """
    needed = rho if by == "loss" else 2 * math.atanh(rho)
    first = torch.tensor([-1.0, -0.6, -0.2, 0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)  # m_0 of each image
    x = torch.stack([(first + 1.0) / 4, torch.full_like(first, 0.5)], dim=1)  # m = 4 x_1 - 2 x_2
    y = torch.zeros(len(x), dtype=torch.int64)
    best = torch.where(first + 0.6 >= needed, torch.clamp(first - 0.6, min=needed), first + 0.6)
    inside = (x[:, 0] - 0.1 >= 0) & (x[:, 0] + 0.1 <= 1)  # where the pixel range does not cut the ball
    assert inside.sum() >= 6
    common = {"eps": 0.1, "step_size": 0.03, "steps": 10, "halvings": 50}
    found = friendliest_pgd(linear(), x, y, rho=rho, by=by, start=start, generator=seeded(), **common)
    loss = cross_entropy(linear()(found.x_adv), y).detach()
    assert torch.allclose(loss[inside], torch.log1p(best.exp())[inside], rtol=0, atol=1e-9)


def test_the_last_step_is_checked_and_bisected_too():
    """m_0 = -0.5, three steps of 0.18: -0.32, -0.14, 0.04. Only the last meets rho 0.01; bisection returns to it."""
    x, y = torch.tensor([[0.125, 0.5]], dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    common = {"eps": 0.1, "step_size": 0.03, "steps": 3, "rho": 0.01, "start": None}
    found = friendliest_pgd(linear(), x, y, halvings=50, **common)
    logits = linear()(found.x_adv)[0]
    assert found.backprops.tolist() == [3] and (logits[1] - logits[0]).item() == pytest.approx(0.01, abs=1e-9)


def test_a_descent_that_never_crosses_returns_its_end():
    """m_0 = 0.9 and 0.6 to go: every point on the way down meets rho 0.05, the last one has the least loss."""
    x, y = torch.tensor([[0.475, 0.5]], dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    common = {"eps": 0.1, "step_size": 0.03, "steps": 10, "rho": 0.05, "start": None}
    for downhill, margin in ((True, 0.3), (False, 0.9)):  # without: it stays, and so does its loss
        found = friendliest_pgd(linear(), x, y, downhill=downhill, **common)
        logits = linear()(found.x_adv)[0]
        assert (logits[1] - logits[0]).item() == pytest.approx(margin, abs=1e-9)


def test_least_keeps_the_least_whatever_the_order():
    seen = Least(torch.zeros(2, 1))
    rows, met = torch.tensor([0, 1]), torch.tensor([True, True])
    for loss in ([3.0, 1.0], [1.0, 2.0], [2.0, 3.0]):
        seen.enter(rows, torch.tensor(loss)[:, None], torch.tensor(loss), met)
    assert seen.or_else(torch.full((2, 1), 9.0)).flatten().tolist() == [1.0, 1.0]


def test_downhill_costs_steps_and_staying_costs_none(many):
    model, x, y = many
    wrong = model(x).argmax(dim=1) != y
    stays = friendliest_pgd(model, x, y, rho=1e-6, downhill=False, start=None, **COMMON)
    assert torch.equal(stays.x_adv[wrong], x[wrong])
    assert (stays.backprops[wrong] == 0).all() and (stays.backprops[~wrong] > 0).all()
    descends = friendliest_pgd(model, x, y, rho=1e-6, start=None, **COMMON)
    assert (descends.backprops > 0).all()
    assert (judged(model, descends.x_adv, y, "loss")[1] < judged(model, x, y, "loss")[1])[wrong].all()


def test_backprops_are_those_of_stopping_early(many):
    """With a margin that any wrong point meets, PGD-K-0's steps are taken; bisection costs forward passes only."""
    model, x, y = many
    zero = friendly_pgd(model, x, y, tau=0, start="uniform", generator=seeded(), **COMMON)
    found = friendliest_pgd(model, x, y, rho=1e-9, downhill=False, generator=seeded(), **COMMON)
    assert torch.equal(found.backprops, zero.backprops)


def test_bisection_runs_only_on_those_that_crossed(many):
    model, x, y = many
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    found = friendliest_pgd(model, x, y, rho=0.02, halvings=3, generator=seeded(), **COMMON)
    active, halved = seen[:-3], seen[-3:]
    assert len(active) == COMMON["steps"] + 1 and active == sorted(active, reverse=True)
    margin, _ = judged(model, found.x_adv, y, "loss")
    assert len(set(halved)) == 1 and halved[0] <= int((margin >= 0.02 - 1e-12).sum())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rho": 0.0}, "rho by loss must be finite and above 0"),
        ({"rho": -1.0}, "rho by loss"),
        ({"rho": math.inf}, "rho by loss"),
        ({"rho": math.nan}, "rho by loss"),
        ({"rho": 1.0, "by": "probability"}, "rho by probability must be above 0 and below 1"),
        ({"by": "los"}, "unknown margin 'los'. Did you mean 'loss'"),
        ({"halvings": -1}, "halvings must be"),
        ({"halvings": 2.5}, "halvings must be"),
    ],
)
def test_bad_values_are_refused_before_any_work(changes, message, batch):
    model, x, y = batch
    model.register_forward_pre_hook(lambda module, inputs: pytest.fail("the model was called"))
    with pytest.raises(UserError, match=message):
        friendliest_pgd(model, x, y, **(COMMON | {"rho": 0.1} | changes))


def test_the_two_cases_are_different(many):
    """One rho means one thing in nats and another in probability."""
    model, x, y = many
    one, other = (
        friendliest_pgd(model, x, y, rho=0.05, by=by, generator=seeded(), **COMMON) for by in ("loss", "probability")
    )
    assert not torch.equal(one.x_adv, other.x_adv)
    with torch.no_grad():
        assert (probability_margin(model(other.x_adv), y) >= 0.05).sum() < (
            probability_margin(model(one.x_adv), y) > 0
        ).sum()
