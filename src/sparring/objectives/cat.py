"""Curriculum adversarial training (CAT; paper Section 5.3, Table 1): the step count k of PGD-k grows as it is mastered.

min_f  1/n sum_i  CE(f(x~_i), y_i)  with x~_i from PGD-k_i, k_i drawn uniformly from 0..k for every example (batch
mixing, against forgetting). k grows by one, up to K, once the k-accuracy has not improved for `patience` epochs.

Chosen where the paper is brief: k begins at 1, and 0 in the mix is the image itself. The k-accuracy is the accuracy on
the held-out images under PGD-k with the epoch's own eps and step size, which every record holds beside k (`own`,
`steps`), of the average where weights are averaged; after k has grown the count of epochs begins anew. PGD-k begins at
a random point for k >= 1, as Madry's does. k is thus a function of the recorded epochs: there is no state to save, and
a run that was killed finds the same k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparring.attacks import Found, pgd_until
from sparring.attacks.ball import Start
from sparring.attacks.checks import Model
from sparring.attacks.threat import Norm
from sparring.errors import UserError
from sparring.objectives.base import Attack, NoAttack, Progress, Search, training_step
from sparring.objectives.madry import adversarial_loss
from sparring.seeds import per_image


def mastered_steps(accuracies: Sequence[float], patience: int, most: int) -> int:
    """The k of the epoch that follows these accuracies."""
    k, best, waited = 1, -1.0, 0
    for accuracy in accuracies:
        best, waited = (accuracy, 0) if accuracy > best else (best, waited + 1)
        if waited == patience:
            k, best, waited = k + 1, -1.0, 0
    return min(k, most)


def check_patience(patience: int) -> None:
    """Refuse a patience of less than one epoch."""
    if type(patience) is not int or patience < 1:
        raise UserError(f"patience must be at least 1, in whole epochs, got {patience!r}.")


@dataclass(frozen=True)
class MixedPGD:
    """PGD-k_i, k_i uniform in 0..`steps` for every example."""

    eps: float
    step_size: float
    steps: int
    start: Start
    norm: Norm = "linf"

    def __call__(self, model: Model, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        """The data for this batch."""
        drawn = per_image(partial(torch.randint, 0, self.steps + 1), (len(x),), generator)
        return pgd_until(
            model,
            x,
            y,
            eps=self.eps,
            step_size=self.step_size,
            steps=drawn.to(x.device),
            start=self.start,
            norm=self.norm,
            generator=generator,
        )


@dataclass(frozen=True, kw_only=True)
class CAT(Attack):
    """Curriculum adversarial training: cross-entropy on a mix of PGD-0 to PGD-k, with k growing."""

    name: ClassVar[str] = "cat"
    __call__ = training_step

    patience: int = 10
    """Epochs without a better validation accuracy under PGD-k before k grows by one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_patience(self.patience)

    def k(self, progress: Progress) -> int:
        """The step count of this epoch."""
        try:
            accuracies = [metrics["own"] for metrics in progress.history]
        except (TypeError, KeyError, IndexError):
            raise UserError('history must hold {"own": accuracy} for every finished epoch, or be left out.') from None
        return mastered_steps(accuracies, self.patience, self.steps)

    def search(self, progress: Progress) -> Search:
        """PGD-0 to PGD-k, mixed."""
        numbers = self.pgd(progress)
        return MixedPGD(**{**numbers, "steps": self.k(progress)}) if numbers["eps"] else NoAttack()

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x~), y)."""
        return adversarial_loss(model, x_adv, y)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps and k."""
        return super().metrics(progress) | {"steps": self.k(progress)}

    def own_attack(self, progress: Progress) -> dict[str, Any] | None:
        """PGD-k: the accuracy under it decides when k grows."""
        return {**self.pgd(progress), "steps": self.k(progress)}

    def advice(self, epochs: int) -> list[str]:
        """A patience with which k cannot reach K."""
        most = 1 + (epochs - 1) // (self.patience + 1)
        if most >= self.steps:
            return super().advice(epochs)
        slow = (
            f"k grows at most every {self.patience + 1} epochs and cannot pass {most} of {self.steps} in {epochs}; "
            "use less patience (--attack.patience)."
        )
        return [*super().advice(epochs), slow]
