"""Friendly adversarial data by their definition (paper Section 3.1, Appendix A): the least loss that is wrong enough.

    x~ = argmin_{x~ in ball} CE(f(x~), y)   subject to   margin(x~) >= rho

Case 1, by loss value: margin = CE(f(x~), y) - min_k CE(f(x~), k), in nats. The normaliser of the softmax cancels, so
it is max_k z_k - z_y. Case 2, by class probability: margin = max_k p_k - p_y. For rho > 0 the best class may be sought
among the wrong ones, as `losses.margin` and `probability_margin` do.

PGD-K-0 stops at the first point that is wrong and overshoots by up to a step. Here PGD finds two neighbouring points,
one on each side of the constraint, and the segment between them is halved until the point lies on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.checks import (
    Model,
    check_batch,
    check_logits,
    check_settings,
    fresh_generator,
    input_gradient,
    quiet,
)
from sparring.attacks.friendly import Found
from sparring.attacks.losses import cross_entropy, margin
from sparring.attacks.margin import probability_margin
from sparring.errors import UserError, unknown

By = Literal["loss", "probability"]
MARGINS = {"loss": margin, "probability": probability_margin}
MOST_RHO = {"loss": math.inf, "probability": 1.0}


def friendliest_pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    rho: float,
    by: By = "loss",
    halvings: int = 5,
    downhill: bool = True,
    start: ball.Start = "uniform",
    generator: torch.Generator | None = None,
) -> Found:
    """The wrong points of least loss that PGD and a bisection find.

    Order of events, per example: below the margin at its start it climbs the loss, else it descends it; after every
    step, the last one too, the margin is looked at; once it is crossed the walk ends, and the segment between the last
    two points is halved `halvings` times. Of all points seen that meet the margin the one of least loss is returned; an
    example that never meets it ends where PGD-K does.

    So the margin is met wherever PGD-K passes a point that meets it, and the loss is not above that of PGD-K-0 wherever
    the point of PGD-K-0 meets the margin.

    Cost beside the counted steps: one forward of what still walks after the last step, and `halvings` forwards of what
    crossed. They are no back-propagations and are not counted; a forward is about a third of a step.

    Args:
        rho: the margin, above 0; in nats by loss, below 1 by probability.
        by: "loss" (the paper's case 1) or "probability" (case 2).
        halvings: 5 place the point within a thirty-second of a step.
        downhill: whether an example that is wrong enough from the start is made friendlier, which costs it steps.
            Without it such an example stays, as in PGD-K-0.
    """
    check_settings(eps=eps, step_size=step_size, steps=steps, loss="ce", start=start)
    check_rho(rho, by)
    if not isinstance(halvings, int) or halvings < 0:
        raise UserError(f"halvings must be a whole number of at least 0, got {halvings!r}.")
    check_batch(x, y)
    if len(x) == 0:
        return Found(x.clone(), torch.zeros_like(y))
    generator = generator or fresh_generator(x)
    with quiet(model):
        x, y = x.detach().clone(), y.clone()  # plain tensors, also where the caller is in inference mode
        x_adv = ball.random_start(x, eps=eps, start=start, generator=generator)
        before = x_adv.clone()  # each example's last point but one
        seen = Least(x_adv)
        crossed, backprops = torch.zeros_like(y, dtype=torch.bool), torch.zeros_like(y)
        climbs = torch.ones_like(crossed)
        rows = torch.arange(len(x), device=x.device)  # the active examples, in the caller's order
        for step in range(steps + 1):
            natural, label = x[rows], y[rows]
            point = x_adv[rows].requires_grad_(step < steps)
            logits = model(point)
            if step == 0:
                check_logits(logits, x, y)
            loss, here = cross_entropy(logits, label), point.detach()
            met = MARGINS[by](logits.detach(), label) >= rho
            seen.enter(rows, here, loss.detach(), met)
            if step == 0:
                climbs = ~met
            crossed[rows] = met == climbs[rows]
            if step == steps:
                break
            going = torch.nonzero(~crossed[rows] & (climbs[rows] | downhill))[:, 0]
            if len(going) == 0:
                break
            gradient = input_gradient(loss[going], point)[going]
            rows, here, natural = rows[going], here[going], natural[going]
            uphill = _wide(torch.where(climbs[rows], 1.0, -1.0).to(x.dtype), x)
            before[rows] = here
            x_adv[rows] = ball.project(here + step_size * uphill * gradient.sign(), natural, eps)
            backprops[rows] += 1
        rows = torch.nonzero(crossed)[:, 0]
        up = _wide(climbs[rows], x)
        ends = torch.where(up, x_adv[rows], before[rows]), torch.where(up, before[rows], x_adv[rows])
        for middle, loss, met in bisect(model, *ends, y[rows], rho=rho, by=by, halvings=halvings):
            seen.enter(rows, middle, loss, met)
        return Found(seen.or_else(x_adv).detach(), backprops)


def check_rho(rho: float, by: str) -> None:
    """Refuse a margin that no point, or every point, meets."""
    if by not in MARGINS:
        raise unknown("margin", by, MARGINS)
    if not 0 < rho < MOST_RHO[by]:
        allowed = "finite and above 0 (nats)" if by == "loss" else "above 0 and below 1"
        raise UserError(f"rho by {by} must be {allowed}, got {rho!r}. Write for example 0.1.")


class Least:
    """Of the points seen that meet the margin, each example's of least loss."""

    def __init__(self, x_adv: Tensor) -> None:
        self.point = x_adv.clone()
        self.loss = torch.full((len(x_adv),), torch.inf, device=x_adv.device, dtype=x_adv.dtype)

    def enter(self, rows: Tensor, point: Tensor, loss: Tensor, met: Tensor) -> None:
        """These points of the examples `rows` were seen."""
        better = met & (loss < self.loss[rows])
        self.loss[rows] = torch.where(better, loss.to(self.loss.dtype), self.loss[rows])
        self.point[rows] = torch.where(_wide(better, point), point, self.point[rows])

    def or_else(self, x_adv: Tensor) -> Tensor:
        """The points kept, and `x_adv` where no point met the margin."""
        return torch.where(_wide(self.loss < torch.inf, x_adv), self.point, x_adv)


@torch.no_grad()
def bisect(
    model: Model, meets: Tensor, violates: Tensor, y: Tensor, *, rho: float, by: By, halvings: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Halve the segments between points that meet the margin and points that do not; yields (point, loss, met)."""
    for _ in range(halvings if len(y) else 0):
        middle = (meets + violates) / 2  # inside the box that holds both, in floating point too
        logits = model(middle)
        met = MARGINS[by](logits, y) >= rho
        yield middle, cross_entropy(logits, y), met
        chosen = _wide(met, middle)
        meets, violates = torch.where(chosen, middle, meets), torch.where(chosen, violates, middle)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """One value per example, shaped to meet whole images."""
    return values.view(-1, *[1] * (like.ndim - 1))
