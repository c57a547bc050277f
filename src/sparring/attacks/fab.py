"""The steps of AutoAttack's targeted FAB in the L-infinity norm, with few synchronizations.

pyautoattack sorts every pixel for each projection, and asks at every step which images are misclassified. Here nothing
is sorted (hyperplane.py) and all images are treated alike; the same points come out up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparring.attacks import ball
from sparring.attacks.hyperplane import steps_to_hyperplane


def fits(fab: Any) -> bool:
    """Whether these settings of the package's attack are those that `run` knows."""
    return bool(fab.norm == "Linf" and fab.targeted and fab.n_restarts == 1)


@torch.no_grad()
def run(fab: Any, x: Tensor, y: Tensor, use_rand_start: bool = False, is_targeted: bool = True) -> Tensor:
    """In place of the package's `attack_single_run`, with its settings: the nearest misclassified points it finds.

    Args:
        fab: the package's attack; `target_class` is the place of the target among the sorted logits, from the end.
        x: (n, ...), in [0, 1].
        y: (n,), int64.
    """
    assert is_targeted and not use_rand_start
    logits = fab.predict(x.clone())
    rows = torch.nonzero(logits.argmax(1) == y)[:, 0]
    natural, labels = x[rows], y[rows]
    targets = logits.sort(dim=1)[1][rows, -fab.target_class]
    point, nearest = natural, natural
    least = torch.full((len(rows),), torch.inf, device=x.device)
    for _ in range(fab.n_iter if len(rows) else 0):
        difference, normals = _difference(fab.predict, point, labels, targets)
        offsets = (normals * point).flatten(1).sum(1) - difference
        both = torch.stack([point.flatten(1), natural.flatten(1)])
        step, first = steps_to_hyperplane(both, normals.flatten(1), offsets).view(2, *point.shape)
        far, farther = (_size(each).clamp(min=1e-8) for each in (step, first))
        bias = ball.wide(far / (far + farther), x).clamp(0, fab.alpha_max)
        point = (point + fab.eta * step) * (1 - bias) + (natural + fab.eta * first) * bias
        point = point.clamp(0, 1)
        wrong = fab.predict(point.clone()).argmax(1) != labels  # a model may write into what it is given
        away = _size(point - natural)
        nearer = wrong & (away < least)
        nearest = torch.where(ball.wide(nearer, x), point, nearest)
        least = torch.where(nearer, away, least)
        point = torch.where(ball.wide(wrong, x), natural + (point - natural) * fab.beta, point)
    found = x.clone()
    found[rows] = nearest
    return found


@torch.enable_grad()
def _difference(predict: Any, x: Tensor, labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The target's logit minus the label's, and its gradient."""
    point = x.detach().clone().requires_grad_()
    own, other = predict(point).gather(1, torch.stack([labels, targets], 1)).unbind(1)
    difference = other - own
    return difference.detach(), torch.autograd.grad(difference.sum(), point)[0]


def _size(steps: Tensor) -> Tensor:
    """The largest number of each image."""
    return steps.abs().flatten(1).amax(1)
