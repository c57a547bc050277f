"""Validation: accuracies on the held-out images, natural and under PGD, after every epoch.

The attack starts at the same points every time, so that epochs compare. Gradients come from the engine's network where
there is one; what counts as right is the model's own prediction. Knows no objective and no run folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparring.attacks import pgd
from sparring.attacks.checks import Model, NotFinite
from sparring.attacks.threat import Norm
from sparring.data import Split, batches
from sparring.seeds import Draw, generator

BATCH = 500


def validate(
    model: nn.Module, split: Split, *, eps: float, seed: int, norm: Norm = "linf", gradients: Model | None = None
) -> tuple[float, float]:
    """Natural and PGD-10 accuracy (steps of eps/4, uniform start), as fractions.

    Args:
        norm: of the ball of radius `eps`.
        gradients: what to take gradients of the input from; the model itself unless given.
    """
    pgd10 = {"eps": eps, "step_size": eps / 4, "steps": 10, "start": "uniform", "norm": norm}
    natural, robust = accuracies(model, split, [None, pgd10], seed=seed, gradients=gradients)
    return natural, robust


def accuracies(
    model: nn.Module,
    split: Split,
    attacks: Sequence[dict[str, Any] | None],
    *,
    seed: int,
    gradients: Model | None = None,
) -> list[float]:
    """The accuracy under each attack, given as settings of `pgd`; None is no attack."""
    right = torch.zeros(len(attacks), dtype=torch.int64, device=split.x.device)
    was_training = model.training
    model.eval()
    for index, (x, y) in enumerate(batches(split, BATCH)):
        for place, attack in enumerate(attacks):
            draws = generator(x.device, seed, Draw.VALIDATION, index)
            try:
                points = x if attack is None else pgd(gradients or model, x, y, generator=draws, **attack)
            except NotFinite:  # no prediction can be right: nothing to count
                continue
            with torch.no_grad():
                right[place] += (model(points).argmax(dim=1) == y).sum()
    model.train(was_training)
    return [float(count) for count in (right.double() / len(split)).tolist()]


def predicts_one_class(model: nn.Module, split: Split) -> bool:
    """Whether it predicts the same for images of several classes, as a network does whose units are dead."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(x).argmax(dim=1) for x, _ in batches(split, BATCH)])
    model.train(was_training)
    return bool((predicted == predicted[0]).all() and (split.y != split.y[0]).any())
