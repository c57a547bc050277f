"""What an objective is: a search for training data, and a loss on what the search finds.

An objective is one frozen dataclass in a file of its own, and holds every number that the method has. It names itself
(`name`, as on the command line); the package finds it there. Knows no optimiser, no epoch loop and no data set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparring import schedules
from sparring.attacks import Found, friendly_pgd
from sparring.attacks.ball import Start
from sparring.attacks.checks import (
    Model,
    call,
    check_batch,
    check_generator,
    check_images,
    check_logits,
    check_model,
    check_not_negative,
    check_settings,
)
from sparring.attacks.eval_mode import fresh_generator
from sparring.attacks.losses import dominant
from sparring.attacks.threat import Norm, check_norm, check_radius, is_number, step_length
from sparring.errors import UserError
from sparring.schedules import Schedule, Scheduled

EpochMetrics = Mapping[str, Any]  # one finished epoch, as the run folder records it
_SHORT = 0.05  # an L2 radius below it is more likely one in L-infinity
_REACH = 0.999  # of the radius: steps that add up to less do not get there, rounding apart
_FINE = 10_000  # epochs that stand for a run of which only the finished fraction is known


@dataclass(frozen=True)
class Progress:
    """Where training stands: the epoch as a real number (1.0 is the beginning of epoch 1), of how many, after what."""

    epoch: float
    epochs: int
    history: Sequence[EpochMetrics] = ()

    @classmethod
    def at_fraction(cls, done: float, history: Sequence[EpochMetrics] = ()) -> Progress:
        """The place in a run of which the fraction `done` is finished; schedules must then be relative (0,1@40%)."""
        if not is_number(done) or not 0 <= done <= 1:
            raise UserError(f"progress must lie in [0, 1], got {done!r}. Write for example epoch / epochs.")
        return cls(round(1 + float(done) * _FINE, 6), _FINE, history)

    def value(self, schedule: Schedule) -> float:
        """What a schedule says here."""
        if self.epochs == _FINE and (start := schedules.absolute_start(schedule)):
            raise UserError(
                f"the schedule {schedule} changes at epoch {start}, but only the fraction of training is known. Write "
                "it in per cent, for example 0,1@40%."
            )
        return schedule.at(self.epoch, self.epochs)


class Search(Protocol):
    """Finds the data to train on, in the order of the batch. Runs the model in eval mode and leaves it as it was."""

    def __call__(self, model: Model, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        """The data for this batch."""


@dataclass(frozen=True)
class NoAttack:
    """The images themselves."""

    def __call__(self, model: Model, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        """x, after no back-propagation."""
        return Found(x, torch.zeros_like(y))


@dataclass(frozen=True)
class KTauPGD:
    """PGD-K-tau, the search that the engine can capture; tau >= K is plain PGD-K."""

    eps: float
    step_size: float
    steps: int
    tau: int
    loss: Literal["ce", "kl"]
    start: Start
    noise: float = 0.0
    project: bool = True
    norm: Norm = "linf"

    def __call__(self, model: Model, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        """The data for this batch, by the plain attack."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return friendly_pgd(model, x, y, generator=generator, **settings)


@dataclass(frozen=True)
class Step:
    """One training step in the caller's own loop."""

    loss: Tensor  # scalar; backward() gives the gradients of the weights
    x_adv: Tensor  # order, shape, dtype and device of x
    backprops: Tensor  # int64, one per example


class Objective(Protocol):
    """Search for data, then minimise a loss on them."""

    name: ClassVar[str]
    fixed_sizes: ClassVar[bool]  # whether the search runs at few batch sizes, as PGD-K-tau does in the engine

    @property
    def radius(self) -> float:
        """The largest eps of training; 0 for none."""

    @property
    def norm(self) -> Norm:
        """The norm in which eps is measured, in training and in validation."""

    @property
    def most_backprops(self) -> int:
        """The most back-propagations that an example can take."""

    def search(self, progress: Progress) -> Search:
        """The search for training data at this place of training."""

    def loss(self, model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """What the weights descend: a scalar, with the model in train mode. `y`: class numbers, or soft targets."""

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """What the objective's own schedules say at this place, for the run's records."""

    def own_attack(self, progress: Progress) -> dict[str, Any] | None:
        """Settings of a PGD under which held-out accuracy is recorded too (`own`), where the method depends on it."""

    def advice(self, epochs: int) -> list[str]:
        """Settings that are allowed but probably not intended in a run of `epochs` epochs, one line each."""


def training_step(
    self: Objective,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    progress: float = 0.0,
    generator: torch.Generator | None = None,
    history: Sequence[EpochMetrics] = (),
) -> Step:
    """Adversarial data for a batch and the loss on them, for a training loop of the caller's own.

    Args:
        model: maps pixels in [0, 1] to logits. The attack runs in eval mode, the loss in the mode the model is in. Of a
            `DistributedDataParallel` the attack runs the module inside, and the loss the wrapper.
        y: int64 class numbers, or soft targets: float class probabilities of shape (B, classes), as
            `sparring.soft_targets` makes them. Soft targets are for the loss: the attack is on the largest class.
        progress: the finished fraction of training, from 0 to 1; schedules follow it.
        generator: for randomness that can be repeated; without it the operating system seeds a fresh one.
        history: metrics of the finished epochs, for methods that adapt to them (CAT).
    """
    place = Progress.at_fraction(progress, history)
    check_model(model)
    check_generator(generator)
    check_images(x)
    check_targets(x, y)
    search, classes = self.search(place), dominant(y)
    if isinstance(search, NoAttack):  # every other search checks its input itself
        check_batch(x, classes)
    draws = fresh_generator(x) if generator is None else generator
    attacked = model.module if isinstance(model, DistributedDataParallel) else model
    found = search(attacked, x, classes, draws)
    try:
        loss = self.loss(model, x, found.x_adv, y)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        _check_output(attacked, found.x_adv, y)
        raise
    return Step(loss, found.x_adv, found.backprops)


@torch.no_grad()
def _check_output(model: Model, x: Tensor, y: Tensor) -> None:
    """Refuse a model that returns no logits in the mode it is in, or none for these targets."""
    logits = call(model, x)
    check_logits(logits, x, dominant(y))
    if y.is_floating_point() and y.shape[1] != logits.shape[1]:
        raise UserError(
            f"soft targets are of {y.shape[1]} classes, the model has {logits.shape[1]}. Make them with "
            f"sparring.soft_targets(y, {logits.shape[1]})."
        )


def check_targets(x: Tensor, y: Tensor) -> None:
    """Refuse soft targets that are not one row of probabilities per image; the attack checks class numbers."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return
    if y.dim() != 2 or len(y) != len(x):
        raise UserError(
            f"soft targets must have the shape (B, classes) with B = {len(x)}, got {tuple(y.shape)}. Class numbers are "
            "int64: y.long()."
        )
    if not bool((y >= 0).all()) or not bool(((y.sum(dim=1) - 1).abs() < 1e-3).all()):
        raise UserError("soft targets must be probabilities: at least 0, and 1 in sum for every image.")


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What every adversarial objective has: PGD inside an eps-ball."""

    fixed_sizes: ClassVar[bool] = False

    eps: Scheduled = Scheduled(8 / 255)
    """Radius of the ball, in [0, 1] pixels: 8/255, or a schedule such as ramp:0..8/255@50%. In L2 it may exceed 1."""
    step_size: float | str = 0.007
    """Length of one step (alpha), in [0, 1] pixels; or a part of eps, which moves with it: eps/4."""
    steps: int = 10
    """The most steps an example takes (K)."""
    start: Start = "uniform"
    """Where the attack begins: at the image (None), uniform in the ball, or normal (0.001 sigma)."""
    norm: Norm = "linf"
    """The norm of the ball, in training and in validation: linf, or l2."""

    def __post_init__(self) -> None:
        plain_numbers(self)
        check_norm(self.norm)
        if max(self.eps.values()) <= 0 or min(self.eps.values()) < 0:
            raise UserError(f"eps must not be negative and not be 0 throughout, got {self.eps}.")
        for eps in self.eps.values():
            if eps > 0:  # a ramp may begin at 0: the images themselves
                check_radius("eps", eps, self.norm)
        check_settings(
            eps=self.radius,
            step_size=self.step_size,
            steps=self.steps,
            loss="ce",
            start=self.start,
            norm=self.norm,
        )
        if isinstance(self.step_size, Tensor):
            raise UserError("the step_size of an objective must be one number, or a part of eps, got a tensor.")

    @property
    def radius(self) -> float:
        """The largest eps of training."""
        return max(self.eps.values())

    @property
    def most_backprops(self) -> int:
        """The most back-propagations that an example can take."""
        return self.steps

    def pgd(self, progress: Progress) -> dict[str, Any]:
        """The numbers that every PGD takes, at this place of training."""
        eps = progress.value(self.eps)
        step_size = step_length(self.step_size, eps)
        return {"eps": eps, "step_size": step_size, "steps": self.steps, "start": self.start, "norm": self.norm}

    def metrics(self, progress: Progress) -> dict[str, Any]:
        """eps."""
        return {"eps": progress.value(self.eps)}

    def own_attack(self, progress: Progress) -> dict[str, Any] | None:
        """None: nothing besides the usual validation."""
        return None

    def advice(self, epochs: int) -> list[str]:
        """A step longer than the ball; steps that cannot reach its edge; a schedule with a start behind the end."""
        found = []
        step_size, bounded = step_length(self.step_size, self.radius), getattr(self, "project", True)
        if step_size > self.radius:
            found.append(
                f"a step of {step_size:g} is longer than the ball ({self.radius:.3g}): lower step_size "
                "(--attack.step-size)."
            )
        far = self.radius / 2 if self.start == "uniform" else self.radius  # a uniform start is half-way out on average
        if bounded and self.steps * step_size < _REACH * far:
            found.append(
                f"{self.steps} steps of {step_size:.3g} reach {self.steps * step_size:.3g} from the start, eps is "
                f"{self.radius:.3g}: raise steps or step_size (--attack.step-size), for example to eps/4."
            )
        if self.norm == "l2" and self.radius < _SHORT:
            found.append(
                f"eps {self.radius:.3g} is the length of the whole change in L2, a short one: on CIFAR-10 the usual "
                "radius is 0.5 (--attack.eps)."
            )
        for name, value in vars(self).items():
            if isinstance(value, Schedule) and (late := schedules.start_after(value, epochs)):
                found.append(f"{name} {value} (--attack.{name}): @{late} lies after the last epoch ({epochs}).")
        return found


@dataclass(frozen=True, kw_only=True)
class KTauAttack(Attack):
    """What the objectives of PGD-K-tau have besides it: Madry, TRADES, MART and their friendly versions."""

    fixed_sizes: ClassVar[bool] = True

    noise: float = 0.0
    """Sigma of normal noise added at every step."""
    project: bool = True
    """Put every step back into the eps-ball."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.project) is not bool:
            raise UserError(f"project must be True or False, got {self.project!r}.")
        check_not_negative("noise", self.noise)

    def k_tau(self, progress: Progress, *, tau: int, loss: Literal["ce", "kl"] = "ce") -> Search:
        """PGD-K-tau at this place of training. A ball of radius 0 holds the images alone."""
        numbers = self.pgd(progress)
        if not numbers["eps"]:
            return NoAttack()
        return KTauPGD(**numbers, tau=tau, loss=loss, noise=self.noise, project=self.project)

    def advice(self, epochs: int) -> list[str]:
        """Besides the others: a tau with which the attack never stops early."""
        tau = vars(self).get("tau")
        most = max(tau.values()) if isinstance(tau, Schedule) else 0
        if most <= self.steps:  # at K it is Madry's training too, as the paper's figures have it on purpose
            return super().advice(epochs)
        never = (
            f"tau {most:g} is above K = {self.steps} steps, so no attack stops early there: that is Madry's PGD-K "
            "(--attack.tau, --attack.steps)."
        )
        return [*super().advice(epochs), never]


def plain_numbers(declared: object) -> None:
    """Turn numpy's numbers in the fields of a frozen dataclass into Python's, which JSON takes."""
    for name, value in vars(declared).items():
        if isinstance(value, np.generic):
            object.__setattr__(declared, name, value.item())


def check_tau(tau: Schedule) -> None:
    """Refuse a schedule of tau that holds anything but whole numbers from 0 on."""
    if any(not math.isfinite(value) or value != int(value) or value < 0 for value in tau.values()):
        raise UserError(f"tau must hold whole numbers of at least 0, got {tau}.")


def check_beta(beta: float) -> None:
    """Refuse a weight that is not finite and not negative."""
    check_not_negative("beta", beta)


def check_kl_start(objective: KTauAttack, name: str) -> None:
    """Refuse to ascend the KL to the clean prediction from the image itself, where it is flat."""
    if objective.start is None and not objective.noise:
        raise UserError(
            f"{name} ascends the KL to the clean prediction, which is flat at the image itself. Start beside it: "
            "start='normal' or 'uniform' (--attack.start normal)."
        )
