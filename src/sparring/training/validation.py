"""Validation: accuracies on the held-out images, natural and under PGD, after every epoch.

The attack starts at the same points every time, so that epochs compare. Gradients come from the engine's network where
there is one; what counts as right is the model's own prediction. Knows no objective and no run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparring.attacks import pgd
from sparring.attacks.checks import Model, NotFinite
from sparring.attacks.threat import Norm
from sparring.data import Split, batches
from sparring.seeds import Draw, batch_generator
from sparring.shares import WHOLE, Share

BATCH = 500


def validate(
    model: nn.Module, split: Split, *, eps: float, seed: int, norm: Norm = "linf", **how: Any
) -> tuple[float, float]:
    """Natural and PGD-10 accuracy (steps of eps/4, uniform start), as fractions.

    Args:
        norm: of the ball of radius `eps`.
        how: further arguments of `accuracies`.
    """
    pgd10 = {"eps": eps, "step_size": eps / 4, "steps": 10, "start": "uniform", "norm": norm}
    natural, robust = accuracies(model, split, [None, pgd10], seed=seed, **how)
    return natural, robust


def accuracies(
    model: nn.Module,
    split: Split,
    attacks: Sequence[dict[str, Any] | None],
    *,
    seed: int,
    gradients: Model | None = None,
    share: Share = WHOLE,
    total: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> list[float]:
    """The accuracy under each attack, given as settings of `pgd`; None is no attack.

    Args:
        gradients: what to take gradients of the input from; the model itself unless given.
        share: the part of every batch that this process judges.
        total: adds up counts over all processes.
    """
    right = torch.zeros(len(attacks), dtype=torch.int64, device=split.x.device)
    was_training = model.training
    model.eval()
    for index, (x, y) in enumerate(batches(split, BATCH)):
        of, part = len(x), share.cut(len(x))
        x, y = x[part], y[part]
        for place, attack in enumerate(attacks if len(x) else ()):
            draws = batch_generator(x.device, seed, Draw.VALIDATION, index, part=part, of=of)
            try:
                points = x if attack is None else pgd(gradients or model, x, y, generator=draws, **attack)
            except NotFinite:  # no prediction can be right: nothing to count
                continue
            with torch.no_grad():
                right[place] += (model(points).argmax(dim=1) == y).sum()
    model.train(was_training)
    return [float(count) for count in (total(right).double() / len(split)).tolist()]


def predicts_one_class(model: nn.Module, split: Split) -> bool:
    """Whether it predicts the same for images of several classes, as a network does whose units are dead."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(x).argmax(dim=1) for x, _ in batches(split, BATCH)])
    model.train(was_training)
    return bool((predicted == predicted[0]).all() and (split.y != split.y[0]).any())
