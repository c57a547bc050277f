"""Friendly adversarial training by its definition (paper Section 3.1, Appendix A), without tau.

min_f  1/n sum_i  CE(f(x~_i), y_i)  with  x~_i = argmin_{x~ in ball} CE(f(x~), y_i)  subject to  margin(x~) >= rho

By loss value (case 1) the margin is CE(f(x~), y) - min_k CE(f(x~), k), by class probability (case 2) max_k p_k - p_y.
rho is a schedule. PGD-K-tau approximates it by stopping early; here a point that was right is carried onto the margin,
of the network that gradients are taken from: with `precision` bf16 the model may see a little less.

Chosen where the definition leaves it open, or costs too much. A point that meets the margin where the search begins
stays there, as in PGD-K-0, though its loss is not the least: leading it downhill (`downhill`) is nearer to the
definition, costs steps, and did not pay (docs/what-did-not-work.md). Where no point seen meets the margin, wrong by
less or not at all, the constraint cannot be met and the data are PGD-K's, the nearest to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparring.attacks import Found, friendliest_pgd
from sparring.attacks.ball import Start
from sparring.attacks.boundary import MOST_RHO, By
from sparring.attacks.checks import Model
from sparring.attacks.threat import Norm
from sparring.errors import UserError
from sparring.objectives.base import Attack, NoAttack, Progress, Search, training_step
from sparring.objectives.madry import adversarial_loss
from sparring.schedules import Schedule, Scheduled


@dataclass(frozen=True)
class FriendliestPGD:
    """The wrong points of least loss."""

    eps: float
    step_size: float
    steps: int
    start: Start
    rho: float
    by: By
    downhill: bool
    norm: Norm = "linf"

    def __call__(self, model: Model, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        """The data for this batch."""
        return friendliest_pgd(
            model,
            x,
            y,
            eps=self.eps,
            step_size=self.step_size,
            steps=self.steps,
            rho=self.rho,
            by=self.by,
            downhill=self.downhill,
            start=self.start,
            norm=self.norm,
            generator=generator,
        )


@dataclass(frozen=True, kw_only=True)
class FATByLoss(Attack):
    """Friendly data by definition, case 1: wrong by rho in loss value, with the least loss."""

    name: ClassVar[str] = "fat-by-loss"
    by: ClassVar[By] = "loss"
    __call__ = training_step

    rho: Scheduled = Scheduled(0.1)
    """Margin by which friendly data are wrong: in nats by loss, in probability by probability."""
    downhill: bool = False
    """Make data that are wrong by rho from the start friendlier too, at the price of steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_margin(self.rho, self.by, self.name)
        check_downhill(self.downhill)

    def search(self, progress: Progress) -> Search:
        """The wrong points of least loss at the rho of this place."""
        return friendliest(self, progress)

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """CE(f(x~), y)."""
        return adversarial_loss(model, x_adv, y)

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps and rho."""
        return super().metrics(progress) | {"rho": progress.value(self.rho)}


@dataclass(frozen=True, kw_only=True)
class FATByProbability(FATByLoss):
    """Friendly data by definition, case 2: wrong by rho (below 1) in class probability, with the least loss."""

    name: ClassVar[str] = "fat-by-probability"
    by: ClassVar[By] = "probability"


def friendliest(objective: FATByLoss, progress: Progress) -> Search:
    """The search of both cases."""
    numbers = objective.pgd(progress)
    if not numbers["eps"]:
        return NoAttack()
    rho = progress.value(objective.rho)
    return FriendliestPGD(**numbers, rho=rho, by=objective.by, downhill=objective.downhill)


def check_margin(rho: Schedule, by: By, name: str) -> None:
    """Refuse a margin that no point, or every point, meets."""
    if not all(0 < value < float("inf") for value in rho.values()):
        raise UserError(f"rho must be finite and above 0, got {rho}. Write for example 0.1.")
    if max(rho.values()) >= MOST_RHO[by]:
        raise UserError(f"rho must stay below {MOST_RHO[by]:g} for {name}, got {rho}.")


def check_downhill(downhill: bool) -> None:
    """Refuse anything but a yes or a no."""
    if type(downhill) is not bool:
        raise UserError(f"downhill must be True or False, got {downhill!r}.")
