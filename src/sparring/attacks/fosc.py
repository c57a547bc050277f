"""PGD until the first-order stationary condition holds: the search of dynamic adversarial training (DAT).

FOSC(x~) = eps * ||g||_1 - <x~ - x, g>, with g the gradient of the cross-entropy at x~: how much the loss (in nats)
could still grow inside the ball if it were linear. It is never negative there, and 0 in the corner that the gradient
points to; small means strongly adversarial. The pixel range [0, 1] does not enter it, as published.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.checks import Model
from sparring.attacks.friendly import Found
from sparring.attacks.stop_rules import pgd_until
from sparring.errors import UserError


def fosc(gradient: Tensor, shift: Tensor, eps: float) -> Tensor:
    """eps * ||g||_1 - <x~ - x, g>, one per example; `shift` is x~ - x."""
    g = gradient.flatten(1)
    return eps * g.abs().sum(dim=1) - (shift.flatten(1) * g).sum(dim=1)


def fosc_pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    criterion: float,
    start: ball.Start = "uniform",
    generator: torch.Generator | None = None,
) -> Found:
    """Adversarial data of the wanted strength: each attack stops at the first point where FOSC <= `criterion`.

    Order of events: the gradient at the current point; FOSC there; at most `criterion`: stop and take no step; else
    step. Nothing is checked after the last step. So a large criterion leaves the start, and 0 is plain PGD but for
    examples in a corner that the next step would not leave either.

    Args:
        criterion: c_t, at least 0; DAT lets it fall from 0.5 to 0 over training.
    """
    if not math.isfinite(criterion) or criterion < 0:
        raise UserError(f"criterion must be finite and at least 0, got {criterion!r}. DAT begins at 0.5.")
    return pgd_until(
        model,
        x,
        y,
        eps=eps,
        step_size=step_size,
        steps=steps,
        stop=lambda logits, label, gradient, shift: fosc(gradient, shift, eps) <= criterion,
        start=start,
        generator=generator,
    )
