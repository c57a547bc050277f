"""Projected gradient descent (paper Eq. 5): K signed steps uphill, each put back into the eps-ball and [0, 1].

Runs the model in eval mode. `attacks.friendly` stops early; with tau >= K it gives bitwise what this gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.checks import (
    InnerLoss,
    Loss,
    Model,
    check_batch,
    check_logits,
    check_settings,
    fresh_generator,
    input_gradient,
    quiet,
)


def pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float = 8 / 255,
    step_size: float = 2 / 255,
    steps: int = 20,
    loss: Loss = "ce",
    start: ball.Start = "uniform",
    generator: torch.Generator | None = None,
) -> Tensor:
    """The images after `steps` steps of PGD, in the order, shape, dtype and device of `x`.

    Args:
        model: maps pixels in [0, 1] to logits; normalisation is a layer of it.
        eps: radius of the ball, in [0, 1] pixels (8/255, not 8).
        step_size: length of one step, in [0, 1] pixels.
        steps: how many steps (K).
        loss: "ce", "kl" (to the clean prediction), "cw" (margin), or (logits, y) -> one loss per example.
        start: None, "uniform" in the ball, or "normal" (0.001 sigma).
        generator: for a start that can be repeated; without it the operating system seeds a fresh one.
    """
    check_settings(eps=eps, step_size=step_size, steps=steps, loss=loss, start=start)
    check_batch(x, y)
    if len(x) == 0:
        return x.clone()
    with quiet(model):
        x, y = x.detach().clone(), y.clone()  # plain tensors, also where the caller is in inference mode
        x_adv = ball.random_start(x, eps=eps, start=start, generator=generator or fresh_generator(x))
        inner = InnerLoss(loss, model, x)
        for step in range(steps):
            point = x_adv.detach().requires_grad_()
            logits = model(point)
            if step == 0:
                check_logits(logits, x, y)
            gradient = input_gradient(inner(logits, y), point)
            x_adv = ball.project(x_adv + step_size * gradient.sign(), x, eps)
        return x_adv.detach()
