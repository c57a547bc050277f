"""Early-stopped PGD: PGD-K-tau (paper Algorithm 1), batched over a set of examples that really shrinks.

Per example: predict at the current point; wrong with no tau left: stop there and take no step; wrong with tau left:
spend one and step; right: step. Nothing is checked after step K. So tau >= K is plain PGD-K, and an example that is
wrong at its start stays there. An example that has stopped is not computed again, which is where the time goes:
on 2 CPU cores a batch that needs b of K steps takes about (b + 1) / K of plain PGD (benchmarks/bench_attack.py).
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Found:
    """What a search found."""

    x_adv: Tensor  # order, shape, dtype and device of x
    backprops: Tensor  # int64, one per example: the steps it took


def friendly_pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float = 8 / 255,
    step_size: float = 0.007,
    steps: int = 10,
    tau: int = 0,
    loss: Loss = "ce",
    start: ball.Start = None,
    noise: float = 0.0,
    project: bool = True,
    generator: torch.Generator | None = None,
) -> Found:
    """Friendly adversarial data: each attack stops as soon as it has fooled the model for `tau` + 1 checks.

    Args:
        model: maps pixels in [0, 1] to logits; run in eval mode, so examples are independent of one another.
        eps: radius of the ball, in [0, 1] pixels (8/255, not 8).
        step_size: length of one step, in [0, 1] pixels.
        steps: the most steps an example takes (K).
        tau: steps still taken from points where the model is already wrong; they need not be consecutive.
        loss: "ce", "kl" (to the clean prediction), "cw" (margin), or (logits, y) -> one loss per example.
        start: None, "uniform" in the ball, or "normal" (0.001 sigma). "kl" needs one or noise: it is flat at the image.
        noise: sigma of normal noise added at every step (authors' code: 0.001; not in the paper).
        project: whether a step is put back into the eps-ball (paper Appendix B searches without); [0, 1] always holds.
        generator: for randomness that can be repeated; without it the operating system seeds a fresh one.
    """
    check_settings(eps=eps, step_size=step_size, steps=steps, loss=loss, start=start, tau=tau, noise=noise)
    check_batch(x, y)
    if len(x) == 0:
        return Found(x.clone(), torch.zeros_like(y))
    generator = generator or fresh_generator(x)
    with quiet(model):
        x, y = x.detach().clone(), y.clone()  # plain tensors, also where the caller is in inference mode
        x_adv = ball.random_start(x, eps=eps, start=start, generator=generator, inside=project)
        inner = InnerLoss(loss, model, x)
        # The active examples, compact and in the caller's order: row i of each belongs to example rows[i].
        rows = torch.arange(len(x), device=x.device)
        here, natural, label = x_adv, x, y
        tau_left, backprops = torch.full_like(rows, int(tau)), torch.zeros_like(rows)
        for step in range(steps):
            # Drawn for the whole batch, so that an example's noise does not depend on when the others stop.
            kicks = noise * ball.draw_normal(x, generator) if noise else None
            point = here.detach().requires_grad_()
            logits = model(point)
            if step == 0:
                check_logits(logits, x, y)
            wrong = logits.detach().argmax(dim=1) != label
            going = torch.nonzero(~(wrong & (tau_left == 0)))[:, 0]
            if len(going) == 0:
                break
            if len(going) == len(rows):
                gradient = input_gradient(inner(logits, label), point)
            else:  # one forward serves the check and the gradient; those that stop here waste theirs, once
                gradient = input_gradient(inner(logits[going], label[going], going), point)[going]
                rows, here, natural, label = rows[going], here[going], natural[going], label[going]
                tau_left, wrong = tau_left[going], wrong[going]
                inner.keep(going)
            tau_left = tau_left - wrong.long()
            here = here + step_size * gradient.sign()
            if kicks is not None:
                here = here + kicks[rows]
            here = ball.project(here, natural, eps) if project else here.clamp(0.0, 1.0)
            backprops[rows] += 1
            x_adv[rows] = here
        return Found(x_adv.detach(), backprops)
