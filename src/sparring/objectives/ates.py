"""Adversarial training with early stopping (ATES; cited in paper Section 5 as found independently of FAT).

min_f  1/n sum_i  CE(f(x~_i), y_i)  with x~_i the first point of PGD-K where max_{j != y} p_j - p_y > lambda_t.

The paper says no more than that it exists, and its authors' abstract that the attack stops at a level of difficulty
which rises over training. The reading here: difficulty is the margin of probability by which the model is wrong, and
lambda_t is the schedule `margin`, our own numbers. At lambda 0 it is FAT with tau = 0, at 1 Madry's training; it
differs from FAT in going on by confidence instead of by tau further steps. The start is random, and nothing is checked
after step K. It does not claim to be its authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparring.attacks import Found, margin_pgd
from sparring.attacks.ball import Start
from sparring.attacks.checks import Model
from sparring.attacks.threat import Norm
from sparring.errors import UserError
from sparring.objectives.base import Attack, NoAttack, Progress, Search, training_step
from sparring.objectives.madry import adversarial_loss
from sparring.schedules import Ramp, Scheduled


@dataclass(frozen=True)
class MarginPGD:
    """PGD until the model is wrong by more than a margin of probability."""

    eps: float
    step_size: float
    steps: int
    start: Start
    margin: float
    norm: Norm = "linf"

    def __call__(self, model: Model, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        """The data for this batch."""
        return margin_pgd(
            model,
            x,
            y,
            eps=self.eps,
            step_size=self.step_size,
            steps=self.steps,
            margin=self.margin,
            start=self.start,
            norm=self.norm,
            generator=generator,
        )


@dataclass(frozen=True, kw_only=True)
class ATES(Attack):
    """Adversarial training with early stopping: cross-entropy on data that are wrong by a margin that grows."""

    name: ClassVar[str] = "ates"
    __call__ = training_step

    margin: Scheduled = Scheduled(Ramp(0.0, 1.0))
    """Margin of probability above which an attack stops (lambda_t): 0 at the boundary, 1 never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(-1 <= margin <= 1 for margin in self.margin.values()):
            raise UserError(f"margin must lie in [-1, 1], got {self.margin}. Write for example ramp:0..1.")

    def search(self, progress: Progress) -> Search:
        """PGD until the model is wrong by more than lambda_t."""
        numbers = self.pgd(progress)
        return MarginPGD(**numbers, margin=progress.value(self.margin)) if numbers["eps"] else NoAttack()

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x~), y)."""
        return adversarial_loss(model, x_adv, y)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps and the margin."""
        return super().metrics(progress) | {"margin": progress.value(self.margin)}
