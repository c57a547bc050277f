"""PGD until the model is wrong by a margin of probability: adversarial training with early stopping (ATES).

margin(x~) = max_{j != y} p_j(x~) - p_y(x~), in [-1, 1]; above 0 the model is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.attacks import ball, losses
from sparring.attacks.checks import Model
from sparring.attacks.friendly import Found
from sparring.attacks.stop_rules import pgd_until
from sparring.errors import UserError


def probability_margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{j != y} p_j - p_y, one per example."""
    return losses.margin(logits.softmax(dim=1), y)


def margin_pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    margin: float,
    start: ball.Start = "uniform",
    generator: torch.Generator | None = None,
) -> Found:
    """Each attack stops at the first point where the model is wrong by more than `margin`.

    Order of events: predict at the current point; wrong by more than `margin`: stop and take no step; else step.
    Nothing is checked after the last step. At 0 this is PGD-K-0 (`friendly_pgd`, tau = 0; ties apart), at 1 PGD-K.

    Args:
        margin: lambda, in [-1, 1].
    """
    if not -1 <= margin <= 1:
        raise UserError(f"margin must lie in [-1, 1], got {margin!r}. 0 stops where the model is first wrong.")
    return pgd_until(
        model,
        x,
        y,
        eps=eps,
        step_size=step_size,
        steps=steps,
        stop=lambda logits, label, gradient, shift: probability_margin(logits, label) > margin,
        start=start,
        generator=generator,
    )
