"""PGD that each example leaves by its own rule: FOSC (DAT), a probability margin (ATES), a number of steps (CAT).

Order of events, per example: no step left: stop; predict at the current point; the rule decides: stop and take no step;
else step. Nothing is checked after the last step. The loss is always the cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.checks import Model, check_batch, check_settings, checked
from sparring.attacks.eval_mode import eval_mode, fresh_generator
from sparring.attacks.losses import InnerLoss, probability_margin
from sparring.attacks.pgd import Found, Iterate, StopRule, pgd_loop
from sparring.attacks.threat import Norm, refuse_tensors
from sparring.errors import UserError

# (logits, y, gradient, x_adv - x), all of the active examples -> bool, one per example: whether it stops here
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def pgd_until(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int | Tensor,
    stop: Rule | None = None,
    norm: Norm = "linf",
    start: ball.Start = "uniform",
    generator: torch.Generator | None = None,
) -> Found:
    """PGD that each example leaves when `stop` returns True for it.

    Args:
        steps: the most steps an example takes; as an int64 tensor, one number (from 0) per example. An example without
            a step is returned as it is, without a random start.
        stop: called at every point before a step from it, with the gradient there; None never stops.
    """
    rule = None if stop is None else _rule(stop)
    how: _How = {"norm": norm, "start": start, "generator": generator}
    return _until(model, x, y, eps=eps, step_size=step_size, steps=steps, stop=rule, **how)


def fosc_pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    criterion: float,
    norm: Norm = "linf",
    start: ball.Start = "uniform",
    generator: torch.Generator | None = None,
) -> Found:
    """Adversarial data of a given strength (DAT): each attack stops at the first point where FOSC <= `criterion`.

    The rule needs the gradient, so an example that it stops has paid for one gradient more than it took steps. A large
    criterion leaves the start; 0 is plain PGD but for examples in a corner that the next step would not leave either.

    Args:
        criterion: c_t, at least 0; DAT lowers it from 0.5 to 0 over training.
    """
    if not isinstance(criterion, int | float) or not 0 <= criterion < math.inf:
        raise UserError(f"criterion must be finite and at least 0, got {criterion!r}. DAT begins at 0.5.")

    def stationary(at: Iterate) -> Tensor:
        return fosc(at.gradient, at.x_adv - at.x, eps, norm) <= criterion

    how: _How = {"norm": norm, "start": start, "generator": generator}
    return _until(model, x, y, eps=eps, step_size=step_size, steps=steps, stop=stationary, **how)


def margin_pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    margin: float,
    norm: Norm = "linf",
    start: ball.Start = "uniform",
    generator: torch.Generator | None = None,
) -> Found:
    """Adversarial training with early stopping (ATES): each attack stops where the model is wrong by over `margin`.

    margin(x_adv) = max_{k != y} p_k - p_y. At 0 this is PGD-K-0 (`friendly_pgd`, tau = 0; ties apart), at 1 PGD-K.

    Args:
        margin: lambda, in [-1, 1].
    """
    if not isinstance(margin, int | float) or not -1 <= margin <= 1:
        raise UserError(f"margin must lie in [-1, 1], got {margin!r}. 0 stops where the model is first wrong.")

    def wrong_enough(at: Iterate) -> Tensor:
        return probability_margin(at.logits, at.y) > margin

    how: _How = {"norm": norm, "start": start, "generator": generator}
    return _until(model, x, y, eps=eps, step_size=step_size, steps=steps, stop=wrong_enough, **how)


def fosc(gradient: Tensor, shift: Tensor, eps: float, norm: Norm = "linf") -> Tensor:
    """The first-order stationary condition eps * ||g||_1 - <x_adv - x, g>, one per example; `shift` is x_adv - x.

    It is how much the loss (in nats) could still grow inside the ball if it were linear: never negative there, and 0 in
    the corner that the gradient points to. The pixel range [0, 1] does not enter it, as published. In the L2 ball the
    norm of the gradient is ||g||_2, and the point where it is 0 the one that the gradient points to.
    """
    g = gradient.flatten(1)
    size = g.abs().sum(dim=1) if norm == "linf" else torch.linalg.vector_norm(g, dim=1)
    return eps * size - (shift.flatten(1) * g).sum(dim=1)


class _How(TypedDict):
    """What all three attacks hand on."""

    norm: Norm
    start: ball.Start
    generator: torch.Generator | None


def _until(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int | Tensor,
    stop: StopRule | None,
    norm: Norm,
    start: ball.Start,
    generator: torch.Generator | None,
) -> Found:
    check_batch(x, y)
    _check_steps(steps, y)
    most = 1 if isinstance(steps, Tensor) else steps
    check_settings(eps=eps, step_size=step_size, steps=most, loss="ce", start=start, norm=norm)
    refuse_tensors(eps=eps, step_size=step_size)
    if len(x) == 0:
        return Found(x.clone(), torch.zeros_like(y))
    draws = generator or fresh_generator(x)
    with eval_mode(model):
        x, y = x.detach().clone(), y.clone()  # plain tensors, also where the caller is in inference mode
        begin = ball.random_start(x, eps=eps, start=start, generator=draws, norm=norm)
        if isinstance(steps, Tensor):
            begin = torch.where(ball.wide(steps > 0, x), begin, x)
        return pgd_loop(
            checked(model, y),
            x,
            y,
            start=begin,
            eps=eps,
            step_size=step_size,
            steps=steps,
            norm=norm,
            loss=InnerLoss("ce", model, x),
            stop=stop,
        )


def _rule(stop: Rule) -> StopRule:
    return lambda at: stop(at.logits, at.y, at.gradient, at.x_adv - at.x)


def _check_steps(steps: int | Tensor, y: Tensor) -> None:
    if isinstance(steps, Tensor) and (steps.shape != y.shape or steps.dtype != torch.int64 or bool((steps < 0).any())):
        raise UserError(
            f"steps must be an int or an int64 tensor of {len(y)} numbers of at least 0, "
            f"got {steps.dtype} of shape {tuple(steps.shape)}."
        )
