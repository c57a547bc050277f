"""Projected gradient descent (paper Eq. 5), and the one loop that every gradient attack of the package is a call of.

    x_adv <- project(x_adv + step_size * direction(gradient) + noise)

The loop knows no attack by name. What differs between attacks are its arguments: a start, a loss, a stop rule, the
direction of a step, and a hook that sees every iterate. A rule, a hook or a loss with a state of its own keeps it for
the whole batch and reads it at `rows`, the numbers of the examples that are still active. A model that has
`forward_back` (`passes`) computes the gradients of only those that go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.checks import (
    Back,
    Model,
    check_batch,
    check_generator,
    check_model,
    check_settings,
    check_start,
    check_target,
    checked,
)
from sparring.attacks.eval_mode import eval_mode, fresh_generator, input_gradient
from sparring.attacks.losses import InnerLoss, Loss
from sparring.attacks.passes import run
from sparring.attacks.threat import Norm, Radius, StepSize, of_rows, settle


@dataclass(frozen=True)
class Found:
    """What an attack found."""

    x_adv: Tensor  # order, shape, dtype and device of x
    backprops: Tensor  # int64, one per example: the steps it took


@dataclass(frozen=True, eq=False)
class Iterate:
    """The active examples at one point of the attack, in the caller's order."""

    step: int  # steps taken to come here
    rows: Tensor  # the examples' numbers in the batch
    images: Tensor  # the natural images of the whole batch
    y: Tensor  # labels of the active examples
    point: Tensor  # x_adv, filled up to a whole size; gradients are taken with respect to it
    output: Tensor  # of the model there, with its graph; of a model in two passes a leaf
    inner: InnerLoss
    back: Back | None = None  # the backward pass of a model in two passes

    @cached_property
    def x(self) -> Tensor:
        """Their natural images."""
        return at_rows(self.images, self.rows)

    @property
    def x_adv(self) -> Tensor:
        """Where the examples are."""
        return self.point.detach()[: len(self.rows)]

    @property
    def logits(self) -> Tensor:
        """What the model predicts there."""
        return self.output.detach()

    @cached_property
    def loss(self) -> Tensor:
        """One loss per example."""
        return self.inner(self.output, self.y, self.rows)

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient of each example's loss at its point; the backward pass runs when it is first read."""
        if self.back is None:
            return input_gradient(self.loss, self.point)[: len(self.rows)]
        return self.back(self.inner.gradient(self.output, self.y, self.rows), None)

    def gradient_of(self, going: Tensor) -> Tensor:
        """The gradient of the examples at these places, one after the other."""
        if self.back is None or len(going) == len(self.rows) or "gradient" in vars(self):
            return self.gradient if len(going) == len(self.rows) else self.gradient[going]
        return self.back(self.inner.gradient(self.output, self.y, self.rows), going)


StopRule = Callable[[Iterate], Tensor]  # bool, one per active example: whether it stops here and takes no step
Hook = Callable[[Iterate], None]
Direction = Callable[[Tensor, Tensor], Tensor]  # (gradient, rows) -> the step to take, before step_size scales it


def pgd_loop(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    start: Tensor,
    eps: Radius,
    step_size: Radius,
    steps: int | Tensor,
    loss: InnerLoss,
    norm: Norm = "linf",
    stop: StopRule | None = None,
    hook: Hook | None = None,
    direction: Direction | None = None,
    noise: Callable[[], Tensor] | None = None,
    project: bool = True,
) -> Found:
    """Take up to `steps` steps from `start`, on a set of active examples that shrinks as they stop.

    Order of events at every step: predict; the hook sees the iterate; the stop rule decides who steps; the input
    gradient; the step; the projection. One forward pass serves the rule and the gradient, so an example that stops
    beside others that go on wastes one gradient, unless the model runs in two passes. After the last step nothing is
    predicted, unless there is a hook.

    The model runs as it is given: eval mode and checked arguments are the caller's part. Without a rule no step waits
    for the device; with one, each step reads back how many examples go on.

    Args:
        eps: radius of the ball; as a tensor, with one entry per example in dimension 0 (`threat.settle`).
        step_size: length of one step, likewise.
        steps: the most steps of an example; as an int64 tensor, one number (from 0) per example.
        norm: of the ball; the direction of a step is the steepest in it, unless `direction` is given.
        hook: called with every iterate, that of the examples still active after the last step too.
        noise: draws what is added at a step, for the whole batch, so that an example's noise does not depend on when
            others stop.
        project: whether a step is put back into the eps-ball; [0, 1] always holds.
    """
    most, budget = (int(steps.max()), steps) if isinstance(steps, Tensor) else (int(steps), None)
    x_adv, backprops = start.clone(), torch.zeros_like(y)  # of an example: written when it stops
    rows = torch.arange(len(x), device=x.device)
    here = start  # where the active examples are: row i belongs to example rows[i]
    low, high = ball.corners(x, eps) if project and norm == "linf" else (None, None)
    fills = len(x) if stop is not None and hook is None and x.device.type == "cpu" else 0

    def keep(going: Tensor) -> tuple[Tensor, Tensor]:
        x_adv.index_copy_(0, rows, here)  # for those that stop here; the others write theirs again
        backprops.index_fill_(0, rows, step)
        return rows.index_select(0, going), here.index_select(0, going)

    for step in range(most + 1):
        kicks = noise() if noise is not None and step < most else None
        if budget is not None and step < most:
            rows, here = keep(torch.nonzero(at_rows(budget, rows) > step)[:, 0])
        if len(rows) == 0 or (step == most and hook is None):
            break
        point, output, back = run(model, here, fills, gradients=step < most)
        at = Iterate(step, rows, x, at_rows(y, rows), point, output, loss, back)
        if hook is not None:
            hook(at)
        if step == most:
            break
        if stop is None:
            gradient = at.gradient
        else:
            going = torch.nonzero(~stop(at))[:, 0]
            if len(going) == 0:
                break
            gradient = at.gradient_of(going)
            if len(going) < len(rows):
                rows, here = keep(going)
        way = ball.steepest(gradient, norm) if direction is None else direction(gradient, rows)
        length = of_rows(step_size, rows)
        here = here + length * way if isinstance(length, Tensor) else torch.add(here, way, alpha=float(length))
        if kicks is not None:
            here = here + at_rows(kicks, rows)
        if low is not None and high is not None:
            here = torch.clamp(here, at_rows(low, rows), at_rows(high, rows))
        elif project:
            here = ball.project(here, at_rows(x, rows), of_rows(eps, rows), norm)
        else:
            here = here.clamp(0.0, 1.0)
    x_adv.index_copy_(0, rows, here)
    backprops.index_fill_(0, rows, step)
    return Found(x_adv.detach(), backprops)


def at_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """The entries of these rows, which are in order and each there once: of all rows, the tensor itself."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, rows)


def first_point(
    x: Tensor,
    *,
    eps: Radius,
    start: ball.Start | Tensor,
    generator: torch.Generator,
    project: bool = True,
    norm: Norm = "linf",
) -> Tensor:
    """The point an attack starts from: the given tensor, or what `ball.random_start` draws."""
    if not isinstance(start, Tensor):
        return ball.random_start(x, eps=eps, start=start, generator=generator, inside=project, norm=norm)
    return ball.project(start.detach(), x, eps, norm) if project else start.detach().clone()


def pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Radius = 8 / 255,
    step_size: StepSize = 2 / 255,
    steps: int = 20,
    norm: Norm = "linf",
    loss: Loss = "ce",
    start: ball.Start | Tensor = "uniform",
    target: int | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The images after `steps` steps of PGD, in the order, shape, dtype and device of `x`.

    Args:
        model: maps pixels in [0, 1] to logits; normalisation is a layer of it. Runs in eval mode.
        eps: radius of the ball, in [0, 1] pixels (8/255, not 8); in L2 it may exceed 1. A tensor has one number per
            example, shape (B,) or (B, 1, 1, 1), or for "linf" per channel, (C, 1, 1).
        step_size: length of one step, in the same unit: a number, a tensor as `eps`, or a part of eps, "eps/4".
        steps: the number of steps (K).
        norm: "linf" (steps along the sign of the gradient) or "l2" (steps along the gradient over its length).
        loss: "ce", "kl" (to the clean prediction), "cw" (margin), or (logits, y) -> one loss per example.
        start: None (the image itself), "uniform" in the ball, "normal" (sigma 0.001), or a tensor of points in the
            ball, one per image.
        target: a class, or one per image (int64): the attack then descends the loss of that class instead of ascending
            that of `y`. An image whose label is the target only gets more certain.
        generator: for a start that can be repeated; without it the operating system seeds a fresh one.
    """
    check_settings(eps=eps, step_size=step_size, steps=steps, loss=loss, norm=norm)
    check_model(model)
    check_generator(generator)
    check_batch(x, y)
    towards = check_target(target, y, loss)
    radius, length = settle(eps, step_size, x, norm)
    check_start(start, x, eps=radius, norm=norm)
    if len(x) == 0:
        return x.clone()
    with eval_mode(model):
        x, y = x.detach().clone(), y.clone()  # plain tensors, also where the caller is in inference mode
        model = checked(model, y if towards is None else torch.maximum(y, towards))
        return pgd_loop(
            model,
            x,
            y,
            start=first_point(x, eps=radius, start=start, generator=generator or fresh_generator(x), norm=norm),
            eps=radius,
            step_size=length,
            steps=steps,
            norm=norm,
            loss=InnerLoss(loss, model, x, towards),
        ).x_adv
