"""What an objective is made of, and the three searches for training data: none, worst-case, friendly.

An objective is declared, not derived: the friendly objectives are the originals with another search. Nothing here knows
an optimiser, an epoch loop or a data set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from sparring.attacks import Found, friendly_pgd
from sparring.attacks.setting import check_radius, check_settings
from sparring.errors import UserError
from sparring.schedules import Schedule, constant
from sparring.threat import Start


@dataclass(frozen=True)
class Setting:
    """The attack's numbers at one place in training."""

    eps: float
    step_size: float
    steps: int
    tau: int
    start: Start
    noise: float
    project: bool


@dataclass(frozen=True)
class Attack:
    """The attack that makes training data: PGD-K-tau and its schedules."""

    eps: Schedule = constant(8 / 255)  # noqa: RUF009 (a frozen value)
    """Radius of the ball, in [0, 1] pixels: 8/255, or a schedule such as ramp:0..8/255@50%."""
    step_size: float = 0.007
    """Length of one step (alpha), in [0, 1] pixels."""
    steps: int = 10
    """The most steps an example takes (K)."""
    tau: Schedule = constant(0)  # noqa: RUF009
    """Steps still taken once the model is fooled, e.g. 1, or 0,1@51,2@91. Only the friendly objectives use it."""
    start: Start = "uniform"
    """Where the attack begins: at the image (None), uniform in the ball, or normal (0.001 sigma)."""
    noise: float = 0.0
    """Sigma of normal noise added at every step."""
    project: bool = True
    """Put every step back into the eps-ball."""

    def __post_init__(self) -> None:
        if max(self.eps.values()) <= 0 or min(self.eps.values()) < 0:
            raise UserError(f"attack.eps must not be negative and not be 0 throughout, got {self.eps}.")
        for eps in self.eps.values():
            if eps > 0:  # a ramp may begin at 0; the search then stays at the image
                check_radius("attack.eps", eps)
        for tau in self.tau.values():
            if tau != int(tau) or tau < 0:
                raise UserError(f"attack.tau must hold whole numbers of at least 0, got {self.tau}.")
        check_settings(
            eps=max(self.eps.values()),
            step_size=self.step_size,
            steps=self.steps,
            loss="ce",
            start=self.start,
            noise=self.noise,
        )

    def at(self, place: float, epochs: int) -> Setting:
        """The numbers at a place in a run of so many epochs."""
        return Setting(
            eps=self.eps.at(place, epochs),
            step_size=self.step_size,
            steps=self.steps,
            tau=int(self.tau.at(place, epochs)),
            start=self.start,
            noise=self.noise,
            project=self.project,
        )


InnerLoss = Literal["ce", "kl"]
Walk = Callable[..., Found]  # the call of attacks.friendly_pgd, or an engine's
OuterLoss = Callable[[nn.Module, Tensor, Tensor, Tensor, float], Tensor]  # (model, x, x_adv, y, beta) -> scalar


class Search(Protocol):
    """Finds the data to train on, by walking where it walks. Runs the model in eval mode and leaves it as it was."""

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        loss: InnerLoss,
        setting: Setting,
        generator: torch.Generator,
        walk: Walk = friendly_pgd,
    ) -> Found:
        """The data found for (x, y), in their order."""


@dataclass(frozen=True)
class Objective:
    """Search for data, then minimise a loss on them."""

    name: str
    search: Search
    inner: InnerLoss  # what the search climbs
    loss: OuterLoss  # what the weights descend, in train mode
    friendly: bool = False  # whether tau means anything


def natural(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: InnerLoss,
    setting: Setting,
    generator: torch.Generator,
    walk: Walk = friendly_pgd,
) -> Found:
    """No search: the images themselves."""
    return Found(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))


def worst_case(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: InnerLoss,
    setting: Setting,
    generator: torch.Generator,
    walk: Walk = friendly_pgd,
) -> Found:
    """Plain PGD-K, which is PGD-K-tau at tau = K."""
    return friendly(model, x, y, loss, replace(setting, tau=setting.steps), generator, walk)


def friendly(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: InnerLoss,
    setting: Setting,
    generator: torch.Generator,
    walk: Walk = friendly_pgd,
) -> Found:
    """PGD-K-tau."""
    if setting.eps == 0:
        return natural(model, x, y, loss, setting, generator, walk)
    return walk(
        model,
        x,
        y,
        eps=setting.eps,
        step_size=setting.step_size,
        steps=setting.steps,
        tau=setting.tau,
        loss=loss,
        start=setting.start,
        noise=setting.noise,
        project=setting.project,
        generator=generator,
    )
