"""The steps of AutoAttack's APGD in the L-infinity norm, without waiting for the device.

pyautoattack synchronizes with the device several times a step, for instance to learn which images are misclassified,
and differentiates its losses by autograd, the targeted one through a sort. Here no step synchronizes, and the losses
come with their gradients; the same points come out up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparring.attacks import ball

_LOSSES = ("ce", "dlr-targeted")
_MOMENTUM = 0.25  # of the last step


def fits(apgd: Any) -> bool:
    """Whether these settings of the package's attack are those that `run` knows."""
    return bool(apgd.norm == "Linf" and apgd.loss in _LOSSES and apgd.eot_iter == 1 and not apgd.use_largereps)


@torch.no_grad()
def run(apgd: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In place of the package's `attack_single_run`, with its settings.

    Args:
        apgd: the package's attack.
        x: (n, ...), in [0, 1].
        y: (n,), int64.

    Returns:
        The points of the largest loss, whether each image was classified correctly at every step, those losses, and the
        last misclassified point of each image.
    """
    low, high = ball.corners(x, apgd.eps)
    noise = 2 * torch.rand(x.shape).to(x.device) - 1
    noise /= ball.wide(noise.abs().flatten(1).amax(1), x) + 1e-12
    point = before = (x + apgd.eps * noise.to(x.dtype)).clamp(0, 1)
    withstands, loss, gradient = _look(apgd, point, y)
    found = best = point
    best_loss = seen = loss
    best_gradient = gradient
    losses = torch.zeros(apgd.n_iter, len(x), device=x.device)
    size = ball.wide(torch.full((len(x),), 2.0 * apgd.eps, device=x.device), x)
    halved = torch.ones(len(x), dtype=torch.bool, device=x.device)
    period, since = apgd.n_iter_2, 0  # steps between two looks at the step size
    for step in range(apgd.n_iter):
        moved = (point + size * gradient.sign()).clamp_(low, high)
        if step:
            moved.sub_(point).mul_(1 - _MOMENTUM).add_(point)
            moved.add_(point - before, alpha=_MOMENTUM).clamp_(low, high)
        before, point = point, moved
        right, loss, gradient = _look(apgd, point, y)
        withstands &= right
        found = torch.where(ball.wide(right, x), found, point)
        larger = loss > best_loss
        best = torch.where(ball.wide(larger, x), point, best)
        best_gradient = torch.where(ball.wide(larger, x), gradient, best_gradient)
        best_loss = torch.where(larger, loss, best_loss)
        losses[step] = loss
        since += 1
        if since == period:
            # Row -1, which stands before the first, is 0 until the end.
            grew = (losses > losses.roll(1, 0))[step + 1 - period : step + 1].sum(0)
            halve = (grew <= period * apgd.thr_decr) | (~halved & (seen >= best_loss))
            size = torch.where(ball.wide(halve, x), size / 2, size)
            point = torch.where(ball.wide(halve, x), best, point)
            gradient = torch.where(ball.wide(halve, x), best_gradient, gradient)
            halved, seen = halve, best_loss
            period, since = max(period - apgd.size_decr, apgd.n_iter_min), 0
    return best, withstands, best_loss, found


def _look(apgd: Any, point: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each image is classified correctly, its loss, and the loss's gradient."""
    with torch.enable_grad():
        given = point.clone().requires_grad_()  # a model may write into what it is given
        logits = apgd.model(given)
    seen = logits.detach()
    loss, at_logits = ce(seen, y) if apgd.loss == "ce" else targeted_dlr(seen, y, apgd.y_target)
    return seen.argmax(1) == y, loss, torch.autograd.grad(logits, given, at_logits)[0]


def ce(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each image, and its gradient at the logits."""
    log_p = logits.log_softmax(1)
    place = y[:, None]
    return -log_p.gather(1, place)[:, 0], log_p.exp().scatter_add_(1, place, -torch.ones_like(log_p[:, :1]))


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The targeted difference-of-logits ratio of each image, and its gradient at the logits.

    With the sorted logits z_1 >= z_2 >= ..., the ratio is -(z_y - z_target) / (z_1 - (z_3 + z_4) / 2).
    """
    top, places = logits.topk(4, dim=1)
    pair = torch.stack([y, target], 1)
    own, other = logits.gather(1, pair).unbind(1)
    below = top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + 1e-12
    ratio = (other - own) / below
    at_below = -ratio / below
    parts = torch.stack([-1 / below, 1 / below, at_below, -at_below / 2, -at_below / 2], 1)
    where = torch.cat([pair, places[:, [0, 2, 3]]], 1)
    return ratio, torch.zeros_like(logits).scatter_add_(1, where, parts)
