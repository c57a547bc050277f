"""PGD-K-tau (paper Algorithm 1), batched over a set of active examples that really shrinks.

Per example: predict at the current point; wrong with no tau left: stop there and take no step; wrong with tau left:
spend one and step; right: step. Nothing is checked after step K. So tau >= K is plain PGD-K, bit for bit, and an
example that is wrong at its start stays there. An example that has stopped is not computed again, which saves time: on
a CPU a batch that needs b of K steps takes about (b + 1) / K of plain PGD (benchmarks/bench_attack.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.checks import (
    Model,
    check_batch,
    check_generator,
    check_model,
    check_settings,
    check_start,
    check_target,
    checked,
)
from sparring.attacks.eval_mode import eval_mode, fresh_generator
from sparring.attacks.losses import InnerLoss, Loss
from sparring.attacks.pgd import Found, Iterate, at_rows, first_point, pgd_loop
from sparring.attacks.threat import Norm, Radius, StepSize, settle


class TauLeft:
    """The stop rule of PGD-K-tau: a wrong prediction spends one of tau, and stops the example that has none left."""

    def __init__(self, tau: int, y: Tensor) -> None:
        self.left = torch.full_like(y, int(tau))

    def __call__(self, at: Iterate) -> Tensor:
        """Whether each active example stops here."""
        wrong = at.logits.argmax(dim=1) != at.y
        stops = wrong & (at_rows(self.left, at.rows) == 0)
        self.left.index_add_(0, at.rows, wrong.to(self.left.dtype), alpha=-1)
        return stops


def friendly_pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Radius = 8 / 255,
    step_size: StepSize = 0.007,
    steps: int = 10,
    tau: int = 0,
    norm: Norm = "linf",
    loss: Loss = "ce",
    start: ball.Start | Tensor = None,
    noise: float = 0.0,
    project: bool = True,
    target: int | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Found:
    """Friendly adversarial data: each attack stops once it has met `tau` + 1 points where the model is wrong.

    Args:
        model: maps pixels in [0, 1] to logits; run in eval mode, so examples are independent of one another.
        eps: radius of the ball, in [0, 1] pixels (8/255, not 8); in L2 it may exceed 1. A tensor has one number per
            example, shape (B,) or (B, 1, 1, 1), or for "linf" per channel, (C, 1, 1).
        step_size: length of one step, in the same unit: a number, a tensor as `eps`, or a part of eps, "eps/4".
        steps: the most steps an example takes (K).
        tau: steps still taken from points where the model is already wrong; they need not be consecutive.
        norm: "linf" (steps along the sign of the gradient) or "l2" (steps along the gradient over its length).
        loss: "ce", "kl" (to the clean prediction), "cw" (margin), or (logits, y) -> one loss per example.
        start: None (the image itself), "uniform" in the ball, "normal" (sigma 0.001), or a tensor of points in the
            ball, one per image. "kl" needs one of them or noise: at the image itself its gradient is 0.
        noise: sigma of normal noise added at every step (authors' code: 0.001; not in the paper).
        project: whether a step is put back into the eps-ball (paper Appendix B searches without); [0, 1] always holds.
        target: a class, or one per image (int64): the attack then descends the loss of that class. It still stops where
            the prediction is not `y`, whatever it is instead: friendly data are near the boundary of their own class.
        generator: for randomness that can be repeated; without it the operating system seeds a fresh one.
    """
    check_settings(eps=eps, step_size=step_size, steps=steps, loss=loss, tau=tau, noise=noise, norm=norm)
    check_model(model)
    check_generator(generator)
    check_batch(x, y)
    towards = check_target(target, y, loss)
    radius, length = settle(eps, step_size, x, norm)
    check_start(start, x, eps=radius if project else None, norm=norm)
    if len(x) == 0:
        return Found(x.clone(), torch.zeros_like(y))
    draws = generator or fresh_generator(x)
    with eval_mode(model):
        x, y = x.detach().clone(), y.clone()  # plain tensors, also where the caller is in inference mode
        model = checked(model, y if towards is None else torch.maximum(y, towards))
        return pgd_loop(
            model,
            x,
            y,
            start=first_point(x, eps=radius, start=start, generator=draws, project=project, norm=norm),
            eps=radius,
            step_size=length,
            steps=steps,
            norm=norm,
            loss=InnerLoss(loss, model, x, towards),
            stop=TauLeft(tau, y),
            noise=(lambda: noise * ball.draw_normal(x, draws)) if noise else None,
            project=project,
        )
