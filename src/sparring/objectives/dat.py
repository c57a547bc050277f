"""Dynamic adversarial training (DAT; paper Section 5.3, Table 1): CE on adversarial data of a strength that grows.

min_f  1/n sum_i  CE(f(x~_i), y_i)  with x~_i the first point of PGD-K where FOSC <= c_t = max(0, c_max (1 - t/T')).

The schedule is `fosc`, a ramp from c_max to 0 over the fraction T' of the run. Chosen where the paper is brief: t
counts from 0 and moves within an epoch too; the start is random, as Madry's; nothing is checked after step K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparring.attacks import Found, fosc_pgd
from sparring.attacks.ball import Start
from sparring.attacks.checks import Model
from sparring.attacks.threat import Norm
from sparring.errors import UserError
from sparring.objectives.base import Attack, NoAttack, Progress, Search, training_step
from sparring.objectives.madry import adversarial_loss
from sparring.schedules import Ramp, Scheduled


@dataclass(frozen=True)
class FOSCPGD:
    """PGD until FOSC falls to a criterion."""

    eps: float
    step_size: float
    steps: int
    start: Start
    criterion: float
    norm: Norm = "linf"

    def __call__(self, model: Model, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        """The data for this batch."""
        return fosc_pgd(
            model,
            x,
            y,
            eps=self.eps,
            step_size=self.step_size,
            steps=self.steps,
            criterion=self.criterion,
            start=self.start,
            norm=self.norm,
            generator=generator,
        )


@dataclass(frozen=True, kw_only=True)
class DAT(Attack):
    """Dynamic adversarial training: cross-entropy on data whose convergence (FOSC) tightens over training."""

    name: ClassVar[str] = "dat"
    __call__ = training_step

    fosc: Scheduled = Scheduled(Ramp(0.5, 0.0, 0.833))
    """FOSC at which an attack stops (c_t), in nats."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= criterion < float("inf") for criterion in self.fosc.values()):
            raise UserError(f"fosc must be finite and at least 0, got {self.fosc}. Write ramp:0.5..0@83.3%.")

    def search(self, progress: Progress) -> Search:
        """PGD until FOSC <= c_t."""
        numbers = self.pgd(progress)
        return FOSCPGD(**numbers, criterion=progress.value(self.fosc)) if numbers["eps"] else NoAttack()

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x~), y)."""
        return adversarial_loss(model, x_adv, y)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps and the criterion."""
        return super().metrics(progress) | {"fosc": progress.value(self.fosc)}
