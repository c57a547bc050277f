"""What an objective is made of, and the three searches for training data: none, worst-case, friendly.

An objective is declared, not derived: the friendly objectives are the originals with another search. Nothing here knows
an optimiser, an epoch loop or a data set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparring import schedules
from sparring.attacks import Found, friendly_pgd
from sparring.attacks.ball import Start
from sparring.attacks.checks import Model, check_radius, check_settings
from sparring.errors import UserError
from sparring.schedules import Ramp, Schedule, constant


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
    fosc: float
    margin: float
    rho: float
    downhill: bool
    patience: int
    share: float


@dataclass(frozen=True)
class Attack:
    """The search for training data: what PGD-K-tau needs, and what single objectives need beside it."""

    eps: Schedule = constant(8 / 255)  # noqa: RUF009 (a frozen value)
    """Radius of the ball, in [0, 1] pixels: 8/255, or a schedule such as ramp:0..8/255@50%."""
    step_size: float = 0.007
    """Length of one step (alpha), in [0, 1] pixels."""
    steps: int = 10
    """The most steps an example takes (K)."""
    tau: Schedule = constant(0)  # noqa: RUF009
    """Steps still taken once the model is fooled, e.g. 1, or 0,1@51,2@91. For the friendly objectives; fat-paced and
    fat-patient find their own."""
    start: Start = "uniform"
    """Where the attack begins: at the image (None), uniform in the ball, or normal (0.001 sigma)."""
    noise: float = 0.0
    """Sigma of normal noise added at every step."""
    project: bool = True
    """Put every step back into the eps-ball."""
    fosc: Schedule = Ramp(0.5, 0.0, 0.833)  # noqa: RUF009
    """FOSC at which an attack stops (c_t), in nats. Only dat uses it."""
    margin: Schedule = Ramp(0.0, 1.0)  # noqa: RUF009
    """Margin of probability above which an attack stops (lambda_t): 0 at the boundary, 1 never. Only ates uses it."""
    patience: int = 10
    """Epochs without a better validation accuracy before PGD gets one more step (cat: accuracy under PGD at its present
    steps), or tau (fat-patient: under PGD-10)."""
    rho: Schedule = constant(0.1)  # noqa: RUF009
    """Margin by which friendly data are wrong: in nats for fat-by-loss, in probability for fat-by-probability."""
    downhill: bool = False
    """Make data that are wrong by rho from the start friendlier too, at the price of steps. For the same two."""
    share: float = 0.25
    """Steps beyond the boundary as a part of the mean steps of the last epoch: tau of fat-paced."""

    def __post_init__(self) -> None:
        for name in ("eps", "tau", "fosc", "margin", "rho"):  # in Python a number or a line will do
            object.__setattr__(self, name, schedules.of(getattr(self, name)))
        if max(self.eps.values()) <= 0 or min(self.eps.values()) < 0:
            raise UserError(f"attack.eps must not be negative and not be 0 throughout, got {self.eps}.")
        for eps in self.eps.values():
            if eps > 0:  # a ramp may begin at 0; the search then stays at the image
                check_radius("attack.eps", eps)
        for tau in self.tau.values():
            if tau != int(tau) or tau < 0:
                raise UserError(f"attack.tau must hold whole numbers of at least 0, got {self.tau}.")
        for criterion in self.fosc.values():
            if not 0 <= criterion < float("inf"):
                raise UserError(f"attack.fosc must be finite and at least 0, got {self.fosc}. Write ramp:0.5..0@83.3%.")
        for margin in self.margin.values():
            if not -1 <= margin <= 1:
                raise UserError(f"attack.margin must lie in [-1, 1], got {self.margin}. Write for example ramp:0..1.")
        for rho in self.rho.values():
            if not 0 < rho < float("inf"):
                raise UserError(f"attack.rho must be finite and above 0, got {self.rho}. Write for example 0.1.")
        if not 0 <= self.share <= 1:
            raise UserError(f"attack.share must lie in [0, 1], got {self.share}. Write for example 1/4.")
        if self.patience < 1:
            raise UserError(f"attack.patience must be at least 1, got {self.patience}.")
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
            fosc=self.fosc.at(place, epochs),
            margin=self.margin.at(place, epochs),
            rho=self.rho.at(place, epochs),
            downhill=self.downhill,
            patience=self.patience,
            share=self.share,
        )


# What not every objective reads: of the attack, and of the configuration.
SPECIAL = (
    "attack.tau",
    "attack.fosc",
    "attack.margin",
    "attack.patience",
    "attack.rho",
    "attack.downhill",
    "attack.share",
    "beta",
)

InnerLoss = Literal["ce", "kl"]
Walk = Callable[..., Found]  # the call of attacks.friendly_pgd, or an engine's
Record = Mapping[str, Any]  # one epoch of the run, as its folder records it
OuterLoss = Callable[[nn.Module, Tensor, Tensor, Tensor, float], Tensor]  # (model, x, x_adv, y, beta) -> scalar


@dataclass(frozen=True)
class Bout:
    """One batch against one model: what a search is given."""

    model: Model
    x: Tensor
    y: Tensor
    inner: InnerLoss  # what to climb
    setting: Setting
    generator: torch.Generator
    walk: Walk = friendly_pgd

    @property
    def numbers(self) -> dict[str, Any]:
        """What every attack takes."""
        s = self.setting
        return {"eps": s.eps, "step_size": s.step_size, "steps": s.steps, "start": s.start, "generator": self.generator}


# Finds the data to train on, in the order of the batch. Runs the model in eval mode and leaves it as it was.
Search = Callable[[Bout], Found]


def as_scheduled(setting: Setting, records: Sequence[Record]) -> Setting:
    """What happened so far changes nothing."""
    return setting


@dataclass(frozen=True)
class Objective:
    """Search for data, then minimise a loss on them."""

    name: str
    search: Search
    inner: InnerLoss  # what the search climbs
    loss: OuterLoss  # what the weights descend, in train mode
    reads: tuple[str, ...] = ()  # which of SPECIAL mean anything to it
    friendly: bool = False  # whether it stops by tau, its own or a scheduled one
    measured: bool = False  # whether a record also holds the accuracy under the epoch's own attack (`own`, at `steps`)
    walks: bool = True  # whether the search uses `walk`, with its noise and its search without projection
    rho_below: float = float("inf")  # what `attack.rho` must not reach
    # The setting after the epochs recorded so far. A pure function of them: what it knows survives a resume by itself.
    adapt: Callable[[Setting, Sequence[Record]], Setting] = as_scheduled

    def find(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        setting: Setting,
        generator: torch.Generator,
        walk: Walk = friendly_pgd,
    ) -> Found:
        """The data to train on for this batch. A ball of radius 0 holds the images alone."""
        bout = Bout(model, x, y, self.inner, setting, generator, walk)
        return natural(bout) if setting.eps == 0 else self.search(bout)


def natural(bout: Bout) -> Found:
    """No search: the images themselves."""
    return Found(bout.x, torch.zeros_like(bout.y))


def friendly(bout: Bout) -> Found:
    """PGD-K-tau."""
    s = bout.setting
    return bout.walk(
        bout.model, bout.x, bout.y, tau=s.tau, loss=bout.inner, noise=s.noise, project=s.project, **bout.numbers
    )


def worst_case(bout: Bout) -> Found:
    """Plain PGD-K, which is PGD-K-tau at tau = K."""
    return friendly(replace(bout, setting=replace(bout.setting, tau=bout.setting.steps)))
