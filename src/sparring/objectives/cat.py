"""Curriculum adversarial training (CAT; paper Section 5.3, Table 1): the step count k of PGD-k grows as it is mastered.

min_f  1/n sum_i  CE(f(x~_i), y_i)  with x~_i from PGD-k_i, k_i drawn uniformly from 0..k for every example (batch
mixing, against forgetting). k grows by one, up to K, once the k-accuracy has not improved for `attack.patience` epochs.

Chosen where the paper is brief: k begins at 1, and 0 in the mix is the image itself. The k-accuracy is the accuracy on
the held-out images under PGD-k with the epoch's own eps and step size, which every record holds beside k (`own`,
`steps`), of the average where weights are averaged; after k has grown the watch begins anew. PGD-k begins at a random
point for k >= 1, as Madry's does. k is thus a function of the recorded epochs: there is no state to save, and a run
that was killed finds the same k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparring.attacks import Found, pgd_until
from sparring.objectives.base import Bout, Record, Setting
from sparring.objectives.madry import MADRY


def mastered_steps(accuracies: Sequence[float], patience: int, most: int) -> int:
    """The k of the epoch that follows these accuracies."""
    k, best, waited = 1, -1.0, 0
    for accuracy in accuracies:
        best, waited = (accuracy, 0) if accuracy > best else (best, waited + 1)
        if waited == patience:
            k, best, waited = k + 1, -1.0, 0
    return min(k, most)


def curriculum(setting: Setting, records: Sequence[Record]) -> Setting:
    """The setting with k steps instead of K."""
    k = mastered_steps([record["own"] for record in records], setting.patience, setting.steps)
    return replace(setting, steps=k)


def mixed(bout: Bout) -> Found:
    """PGD-k_i, k_i uniform in 0..k. The engine's walk takes one number of steps for all and is not used."""
    draws, most = bout.generator, bout.setting.steps
    steps = torch.randint(0, most + 1, (len(bout.x),), generator=draws, device=draws.device).to(bout.x.device)
    return pgd_until(bout.model, bout.x, bout.y, **{**bout.numbers, "steps": steps})


CAT = replace(MADRY, name="cat", search=mixed, walks=False, adapt=curriculum, reads=("attack.patience",), measured=True)
