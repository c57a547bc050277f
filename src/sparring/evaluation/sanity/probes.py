"""The measurements behind the sanity checks: how PGD's loss grows, what the gradients are, what a blind search finds.

Each function runs the model, in the mode its caller put it in, and returns numbers; none judges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparring.attacks import Model, ball, friendly_pgd, losses, pgd
from sparring.attacks.eval_mode import eval_mode, input_gradient
from sparring.attacks.losses import InnerLoss
from sparring.attacks.pgd import Iterate, pgd_loop
from sparring.attacks.threat import Norm

MOMENTUM = 0.9  # of the smoothed gradient: the mean of about ten steps


@dataclass(frozen=True)
class Ascent:
    """PGD from the image itself."""

    first: Tensor  # the loss after one step, per image
    last: Tensor  # after the last
    correct: dict[int, Tensor]  # by number of steps: whether each image is classified correctly after them


def ascent(
    model: Model, x: Tensor, y: Tensor, *, eps: float, steps: int, check_after: int, norm: Norm = "linf"
) -> Ascent:
    """PGD in steps of eps/4, checked after one step, after `check_after` steps and at the end."""
    logits: dict[int, Tensor] = {}

    def collect(at: Iterate) -> None:
        if at.step in (1, check_after, steps):
            logits[at.step] = at.logits

    with eval_mode(model):
        inner = InnerLoss("ce", model, x)
        pgd_loop(model, x, y, start=x, eps=eps, step_size=eps / 4, steps=steps, norm=norm, loss=inner, hook=collect)
    correct = {count: logits[count].argmax(dim=1) == y for count in {check_after, steps}}
    return Ascent(_log_odds(logits[1], y), _log_odds(logits[steps], y), correct)


def _log_odds(logits: Tensor, y: Tensor) -> Tensor:
    """log (1 - p_y) / p_y: rises with the cross-entropy, and is exact where that rounds to 0."""
    z = logits.double()
    others = z.scatter(1, y[:, None], -torch.inf).logsumexp(dim=1)
    return others - z.gather(1, y[:, None])[:, 0]


def gradients(model: Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | str:
    """max |gradient| per image, of the cross-entropy and of the margin; or why there is none."""
    point = x.detach().clone().requires_grad_()
    try:
        logits = model(point)
        if not logits.requires_grad:
            return "The logits do not depend on the image by a differentiable path."
        sizes = []
        for loss in (losses.cross_entropy, losses.margin):
            (gradient,) = torch.autograd.grad(loss(logits, y).sum(), point, retain_graph=True, allow_unused=True)
            if gradient is None:
                return "The gradient stops before it reaches the image."
            sizes.append(gradient.flatten(1).abs().amax(dim=1))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"Back-propagation fails: {reason.rstrip('.')}."
    return sizes[0], sizes[1]


def standing(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    generator: torch.Generator,
    loss: Literal["ce", "cw"] = "ce",
    norm: Norm = "linf",
) -> Tensor:
    """Which images PGD leaves correctly classified. An image stops where it is first wrong, which saves time."""
    found = friendly_pgd(
        model,
        x,
        y,
        eps=eps,
        step_size=step_size,
        steps=steps,
        tau=0,
        norm=norm,
        loss=loss,
        start="uniform",
        generator=generator,
    )
    with torch.no_grad():
        return model(found.x_adv).argmax(dim=1) == y if len(x) else torch.zeros_like(y, dtype=torch.bool)


@torch.no_grad()
def square(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    queries: int,
    generator: torch.Generator,
    norm: Norm = "linf",
) -> Tensor:
    """Which images a small Square attack (Andriushchenko et al.) leaves correctly classified.

    Random search: squares of +-eps are tried and kept where the margin rises. No gradient is used. In L2 a square gets
    half of the perturbation's energy, and the whole keeps the length eps: simpler than the published L2 version.
    """
    stands = torch.ones_like(y, dtype=torch.bool)
    if len(x) == 0:
        return stands
    image = x if x.ndim == 4 else x.flatten(1)[:, None, None, :]
    channels, height, width = image.shape[1:]
    device = x.device

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=x.dtype)

    def gap(candidate: Tensor, rows: Tensor) -> Tensor:
        return losses.margin(model(candidate.view(len(rows), *x.shape[1:])), y[rows])

    rows = torch.arange(len(x), device=device)
    stripes = (rand(len(x), channels, 1, width) - 0.5).sign()
    best = ball.project(image + eps * ball.steepest(stripes.expand_as(image), norm), image, eps, norm)
    value = gap(best, rows)
    for query in range(queries):
        rows = torch.nonzero(value <= 0)[:, 0]  # a margin above 0 is a wrong prediction: these are done
        if len(rows) == 0:
            break
        share = 0.5 * 0.5 ** (6 * query / queries)  # of the area: from a half to a hundredth, as in the paper
        side = max(1, round(math.sqrt(share * height * width)))
        tall, wide = min(side, height), min(side, width)
        top = (rand(len(rows), 1, 1, 1) * (height - tall + 1)).floor()
        left = (rand(len(rows), 1, 1, 1) * (width - wide + 1)).floor()
        down = torch.arange(height, device=device).view(1, 1, -1, 1)
        across = torch.arange(width, device=device).view(1, 1, 1, -1)
        inside = (down >= top) & (down < top + tall) & (across >= left) & (across < left + wide)
        colour = (rand(len(rows), channels, 1, 1) - 0.5).sign()
        if norm == "linf":
            tried = torch.where(inside, ball.project(image[rows] + eps * colour, image[rows], eps), best[rows])
        else:
            patch = ball.steepest(torch.where(inside, colour, 0.0).expand_as(image[rows]), norm)
            rest = ball.steepest(torch.where(inside, 0.0, best[rows] - image[rows]), norm)
            moved = image[rows] + eps * ball.steepest(patch + rest, norm)
            tried = ball.project(moved, image[rows], eps, norm)
        reached = gap(tried, rows)
        better = reached > value[rows]
        best[rows[better]], value[rows[better]] = tried[better], reached[better]
    return value <= 0


def settled(model: Model, x: Tensor, y: Tensor, *, eps: float, steps: int, norm: Norm = "linf") -> Tensor:
    """Which images withstand many small steps: 2.5 eps in all, so that the last ones no longer overshoot."""
    x_adv = pgd(model, x, y, eps=eps, step_size=2.5 * eps / steps, steps=steps, start=None, norm=norm)
    with torch.no_grad():
        return model(x_adv).argmax(dim=1) == y


def smoothed(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    steps: int,
    samples: int,
    generator: torch.Generator,
    norm: Norm = "linf",
) -> Tensor:
    """Which images withstand PGD on a smoothed gradient: of the margin, averaged over the ball around every iterate.

    Each step follows the sum of the gradients at the iterate and at `samples` random points within eps of it, with
    momentum. Steps and ripples that are narrower than the ball average out; the slope of the function remains. An
    image stops where it is first wrong.
    """
    if len(x) == 0:
        return torch.ones_like(y, dtype=torch.bool)
    here, momentum = x, torch.zeros_like(x)

    def look(at: Iterate) -> None:
        nonlocal here
        here = here.index_copy(0, at.rows, at.x_adv)

    def direction(gradient: Tensor, rows: Tensor) -> Tensor:
        total = gradient.nan_to_num(0.0, 0.0, 0.0)
        for _ in range(samples):
            noise = eps * ball.draw_in_ball(x[rows], generator, norm)
            point = (here[rows] + noise).clamp(0.0, 1.0).requires_grad_()
            total += input_gradient(losses.margin(model(point), y[rows]), point).nan_to_num(0.0, 0.0, 0.0)
        size = total.abs().flatten(1).mean(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
        momentum[rows] = MOMENTUM * momentum[rows] + total / size.view(-1, *[1] * (x.ndim - 1))
        return ball.steepest(momentum[rows], norm)

    with eval_mode(model):
        found = pgd_loop(
            model,
            x,
            y,
            start=x,
            eps=eps,
            step_size=2.5 * eps / steps,
            steps=steps,
            norm=norm,
            loss=InnerLoss("cw", model, x),
            stop=lambda at: at.logits.argmax(dim=1) != at.y,
            hook=look,
            direction=direction,
        )
        with torch.no_grad():
            return model(found.x_adv).argmax(dim=1) == y
