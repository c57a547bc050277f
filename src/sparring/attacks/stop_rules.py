"""PGD that each example leaves by a rule of its own, batched over a set of examples that really shrinks.

Order of events, per example: no step left: stop; the gradient at the current point; the rule, asked there, says so:
stop and take no step; else step. Nothing is asked after the last step. The rule may look at the gradient (FOSC), so an
example that it stops has paid for one gradient more than it took steps. `attacks.fosc` and `attacks.margin` are rules;
no rule, and a count of steps for each example, is the mixed batch of curriculum training. The loss is always CE.
"""

from __future__ import annotations

from collections.abc import Callable

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
from sparring.attacks.losses import cross_entropy
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
    start: ball.Start = "uniform",
    generator: torch.Generator | None = None,
) -> Found:
    """The images after PGD that each example leaves when `stop` says so.

    Args:
        steps: the most steps an example takes; as an int64 tensor, one number (from 0) per example.
        stop: asked at every point before a step from it; None never stops.
    """
    check_batch(x, y)
    most = _most(steps, y)
    check_settings(
        eps=eps, step_size=step_size, steps=max(most, 1) if isinstance(steps, Tensor) else steps, loss="ce", start=start
    )
    if len(x) == 0:
        return Found(x.clone(), torch.zeros_like(y))
    generator = generator or fresh_generator(x)
    with quiet(model):
        x, y = x.detach().clone(), y.clone()  # plain tensors, also where the caller is in inference mode
        left = steps.clone() if isinstance(steps, Tensor) else torch.full_like(y, steps)
        x_adv = ball.random_start(x, eps=eps, start=start, generator=generator)
        # No step allowed is no attack: not even its random start.
        x_adv = torch.where((left > 0).view(-1, *[1] * (x.ndim - 1)), x_adv, x)
        backprops = torch.zeros_like(y)
        rows = torch.arange(len(x), device=x.device)  # the active examples, in the caller's order
        for step in range(most):
            rows = rows[left[rows] > step]
            if len(rows) == 0:
                break
            natural, label = x[rows], y[rows]
            point = x_adv[rows].requires_grad_()
            logits = model(point)
            if step == 0:
                check_logits(logits, point, y)
            gradient = input_gradient(cross_entropy(logits, label), point)
            here = point.detach()
            if stop is not None:
                going = ~stop(logits.detach(), label, gradient, here - natural)
                rows, here, natural, gradient = rows[going], here[going], natural[going], gradient[going]
            x_adv[rows] = ball.project(here + step_size * gradient.sign(), natural, eps)
            backprops[rows] += 1
        return Found(x_adv.detach(), backprops)


def _most(steps: int | Tensor, y: Tensor) -> int:
    """The most steps of all; refuses a tensor that does not hold one count per example."""
    if not isinstance(steps, Tensor):
        return steps
    if steps.shape != y.shape or steps.dtype != torch.int64 or bool((steps < 0).any()):
        raise UserError(
            f"steps must be an int or an int64 tensor of {len(y)} numbers of at least 0, "
            f"got {steps.dtype} of shape {tuple(steps.shape)}."
        )
    return int(steps.max()) if len(steps) else 0
