"""Dynamic adversarial training (DAT; paper Section 4.3, Table 1): CE on adversarial data of a strength that grows.

min_f  1/n sum_i  CE(f(x~_i), y_i)  with x~_i the first point of PGD-K where FOSC <= c_t = max(0, c_max (1 - t/T')).

The schedule is `attack.fosc`, a ramp from c_max to 0 over the share T' of the run. Chosen where the paper is brief: t
counts from 0 and moves within an epoch too; nothing is checked after step K.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from sparring.attacks import Found, fosc_pgd, friendly_pgd
from sparring.objectives.madry import MADRY
from sparring.objectives.search import InnerLoss, Setting, Walk, natural


def to_the_criterion(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: InnerLoss,
    setting: Setting,
    generator: torch.Generator,
    walk: Walk = friendly_pgd,
) -> Found:
    """PGD until FOSC <= c_t. `walk` knows no such rule and is not used."""
    if setting.eps == 0:
        return natural(model, x, y, loss, setting, generator, walk)
    return fosc_pgd(
        model,
        x,
        y,
        eps=setting.eps,
        step_size=setting.step_size,
        steps=setting.steps,
        criterion=setting.fosc,
        start=setting.start,
        generator=generator,
    )


DAT = replace(MADRY, name="dat", search=to_the_criterion, walks=False)
