"""Friendly adversarial data by their definition (paper Section 3.1, Appendix A): the least loss that is wrong enough.

    x~ = argmin_{x~ in ball} CE(f(x~), y)   subject to   margin(x~) >= rho

Case 1, by loss value: margin = CE(f(x~), y) - min_k CE(f(x~), k), in nats. The normaliser of the softmax cancels, so
it is max_k z_k - z_y. Case 2, by class probability: margin = max_k p_k - p_y. For rho > 0 the maximum may be taken over
the wrong classes only, as `losses.margin` and `losses.probability_margin` do.

PGD-K-0 stops at the first point that is wrong and overshoots by up to a step. Here PGD finds two consecutive points,
one on each side of the constraint, and the segment between them is bisected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.checks import Model, check_batch, check_settings, checked
from sparring.attacks.eval_mode import eval_mode, fresh_generator
from sparring.attacks.losses import InnerLoss, cross_entropy, margin, probability_margin
from sparring.attacks.pgd import Found, Iterate, pgd_loop
from sparring.attacks.threat import Norm, refuse_tensors
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
    norm: Norm = "linf",
    start: ball.Start = "uniform",
    generator: torch.Generator | None = None,
) -> Found:
    """The wrong points of least loss that PGD and a bisection find.

    Order of events, per example: below the margin at its start it ascends the loss, else it descends it; the margin is
    checked after every step, the last one too; once it is crossed the example stops, and the segment between its last
    two points is halved `halvings` times. Of all points seen that meet the margin the one of least loss is returned; an
    example that never meets it ends where PGD-K does.

    So the margin is met wherever PGD-K passes a point that meets it, and the loss is not above that of PGD-K-0 wherever
    the point of PGD-K-0 meets the margin.

    Cost besides the counted steps: one forward pass of the examples still active after the last step, and `halvings`
    forward passes of those that crossed. They are not back-propagations and are not counted.

    Args:
        rho: the margin, above 0; in nats by loss, below 1 by probability.
        by: "loss" (the paper's case 1) or "probability" (case 2).
        halvings: 5 place the point within 1/32 of a step.
        downhill: whether an example that is wrong enough at its start descends the loss, which costs it steps. Without
            it such an example stays, as in PGD-K-0.
        norm: of the ball, "linf" or "l2".
    """
    check_settings(eps=eps, step_size=step_size, steps=steps, loss="ce", start=start, norm=norm)
    refuse_tensors(eps=eps, step_size=step_size)
    check_rho(rho, by)
    if not isinstance(halvings, int) or halvings < 0:
        raise UserError(f"halvings must be a whole number of at least 0, got {halvings!r}.")
    check_batch(x, y)
    if len(x) == 0:
        return Found(x.clone(), torch.zeros_like(y))
    draws = generator or fresh_generator(x)
    with eval_mode(model):
        x, y = x.detach().clone(), y.clone()  # plain tensors, also where the caller is in inference mode
        begin = ball.random_start(x, eps=eps, start=start, generator=draws, norm=norm)
        crossing = _Crossing(begin, y, rho=rho, by=by, downhill=downhill, norm=norm)
        found = pgd_loop(
            checked(model, y),
            x,
            y,
            start=begin,
            eps=eps,
            step_size=step_size,
            steps=steps,
            norm=norm,
            loss=InnerLoss("ce", model, x),
            hook=crossing.see,
            stop=crossing.stop,
            direction=crossing.direction,
        )
        rows, meets, violates = crossing.segments(found.x_adv)
        for middle, loss, met in bisect(model, meets, violates, y[rows], rho=rho, by=by, halvings=halvings):
            crossing.least.enter(rows, middle, loss, met)
        return Found(crossing.least.or_else(found.x_adv).detach(), found.backprops)


def check_rho(rho: float, by: str) -> None:
    """Refuse a margin that no point, or every point, meets."""
    if by not in MARGINS:
        raise unknown("margin", by, MARGINS)
    if not isinstance(rho, int | float) or not 0 < rho < MOST_RHO[by]:
        allowed = "finite and above 0 (nats)" if by == "loss" else "above 0 and below 1"
        raise UserError(f"rho by {by} must be {allowed}, got {rho!r}. Write for example 0.1.")


class _Crossing:
    """Which way each example goes, whether it has crossed the margin, and the best point it has seen."""

    def __init__(self, begin: Tensor, y: Tensor, *, rho: float, by: By, downhill: bool, norm: Norm) -> None:
        self.rho, self.by, self.downhill, self.norm = rho, by, downhill, norm
        self.least = Least(begin)
        self.previous = begin.clone()  # each example's last point but one
        self.ascends = torch.ones_like(y, dtype=torch.bool)
        self.crossed = torch.zeros_like(y, dtype=torch.bool)

    def see(self, at: Iterate) -> None:
        met = MARGINS[self.by](at.logits, at.y) >= self.rho
        self.least.enter(at.rows, at.x_adv, at.loss.detach(), met)
        if at.step == 0:
            self.ascends = ~met
        self.crossed[at.rows] = met == self.ascends[at.rows]

    def stop(self, at: Iterate) -> Tensor:
        stops = self.crossed[at.rows] | ~(self.ascends[at.rows] | self.downhill)
        self.previous[at.rows] = torch.where(ball.wide(stops, at.x), self.previous[at.rows], at.x_adv)
        return stops

    def direction(self, gradient: Tensor, rows: Tensor) -> Tensor:
        way = ball.steepest(gradient, self.norm)
        return torch.where(ball.wide(self.ascends[rows], gradient), way, -way)

    def segments(self, x_adv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the examples that crossed: their numbers, points that meet the margin, and points that do not."""
        rows = torch.nonzero(self.crossed)[:, 0]
        after, previous, up = x_adv[rows], self.previous[rows], ball.wide(self.ascends[rows], x_adv)
        return rows, torch.where(up, after, previous), torch.where(up, previous, after)


class Least:
    """The point of least loss that each example has seen among those that meet the margin."""

    def __init__(self, x_adv: Tensor) -> None:
        self.point = x_adv.clone()
        self.loss = torch.full((len(x_adv),), torch.inf, device=x_adv.device, dtype=x_adv.dtype)

    def enter(self, rows: Tensor, point: Tensor, loss: Tensor, met: Tensor) -> None:
        """Record points of the examples number `rows`."""
        better = met & (loss < self.loss[rows])
        self.loss[rows] = torch.where(better, loss.to(self.loss.dtype), self.loss[rows])
        self.point[rows] = torch.where(ball.wide(better, point), point, self.point[rows])

    def or_else(self, x_adv: Tensor) -> Tensor:
        """The recorded points, and `x_adv` where no point met the margin."""
        return torch.where(ball.wide(self.loss < torch.inf, x_adv), self.point, x_adv)


@torch.no_grad()
def bisect(
    model: Model, meets: Tensor, violates: Tensor, y: Tensor, *, rho: float, by: By, halvings: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Halve the segments between points that meet the margin and points that do not; yield (point, loss, met)."""
    for _ in range(halvings if len(y) else 0):
        middle = (meets + violates) / 2  # inside the ball and the box that hold both
        logits = model(middle)
        met = MARGINS[by](logits, y) >= rho
        yield middle, cross_entropy(logits, y), met
        chosen = ball.wide(met, middle)
        meets, violates = torch.where(chosen, middle, meets), torch.where(chosen, violates, middle)
