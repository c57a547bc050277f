"""The engine of a training step: one call for the attack, one for the update. `select.prepare` makes it.

Capturing happens at the first call of an attack or an update; where it fails there, the next path is taken and `line`
says so. Knows no method: it is handed searches and a loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparring.attacks import Found
from sparring.attacks.checks import Model
from sparring.engine.attack.folded import Folded
from sparring.engine.attack.runner import CapturedAttack
from sparring.engine.cuda_graphs import NotCapturable, reason
from sparring.engine.ema import WeightAverage
from sparring.engine.update.exchange import ALONE, Exchange
from sparring.engine.update.step import FastUpdate, Update
from sparring.objectives.base import KTauPGD, Search

_log = logging.getLogger(__name__)
CAPTURED = ", captured"


@dataclass(frozen=True)
class Judged:
    """What validation needs."""

    model: nn.Module  # the model that counts: the average where one is kept
    gradients: Model  # what to take gradients of its input from


class Engine:
    """One call for the attack, one for the update."""

    def __init__(
        self,
        model: nn.Module,
        update: Update,
        gradients: Model,
        *,
        head: str,
        attack_how: str = "",
        update_how: str = "",
        runner: CapturedAttack | None = None,
        average: WeightAverage | None = None,
        average_folded: Folded | None = None,
        refresh: Callable[[], None] = lambda: None,
        fixed_sizes: bool = False,
        check_every: int = 1,
        parts: tuple[str, ...] = (),
        exchange: Exchange = ALONE,
    ) -> None:
        """Made by `prepare`."""
        self.exchange = exchange
        self.model, self.step, self.gradients, self.runner = model, update, gradients, runner
        self.average, self.average_folded, self.refresh = average, average_folded, refresh
        self.fixed_sizes, self.parts = fixed_sizes, parts
        self.check_every = check_every  # steps between two calls of `failed`, which waits for the GPU
        self.head, self.attack_how, self.update_how = head, attack_how, update_how

    @property
    def line(self) -> str:
        """Which path runs, and why, in one line."""
        paths = [f"{name}: {how}" for name, how in (("attack", self.attack_how), ("update", self.update_how)) if how]
        return "; ".join([self.head, *paths])

    def attack(self, search: Search, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        """The training data that `search` finds. Of a captured attack they are valid until the next call."""
        if len(x) == 0:
            return Found(x, torch.zeros_like(y))
        if isinstance(search, KTauPGD) and self.runner is not None:
            self._capture(self.runner, search)  # which drops the runner where it cannot run the attack
            if self.runner is not None:
                return self.runner(search, x, y, generator)
        return search(self.gradients, x, y, generator)

    def _capture(self, runner: CapturedAttack, search: KTauPGD) -> None:
        """Capture the steps of an attack at its first call; where that fails, take the next path."""
        try:
            runner.capture(search)
        except (NotCapturable, torch.OutOfMemoryError) as error:
            runner.uncapture()
            self.attack_how = f"{self.attack_how.removesuffix(CAPTURED)}, uncaptured ({_short(error)})"
            _log.warning(self.line)
        except Exception as error:
            self.runner = None
            self.attack_how = f"plain ({reason(error)})"
            _log.warning(self.line)

    def update(self, x: Tensor, x_adv: Tensor, y: Tensor, lr: float, awp: float = 0.0) -> Tensor:
        """Move the weights one step and return the loss, detached. `awp`: relative size of a weight perturbation."""
        loss = self.step(x, x_adv, y, lr, awp)
        if isinstance(self.step, FastUpdate) and self.step.not_captured and self.update_how.endswith(CAPTURED):
            self.update_how = f"{self.update_how.removesuffix(CAPTURED)}, uncaptured ({self.step.not_captured})"
            _log.warning(self.line)
        return loss

    def release(self) -> None:
        """Drop the captured updates: NCCL does not end while a graph holds one of its collectives."""
        if isinstance(self.step, FastUpdate):
            self.step.graphs.clear()

    def failed(self) -> bool:
        """Whether a loss or gradient was not finite, so that a step was not taken. Waits for the GPU."""
        return self.step.failed()

    def judged(self) -> Judged:
        """The model that counts and what to take its input gradients from, up to date."""
        if self.average is None:
            return Judged(self.model, self.gradients)
        averaged = self.average.read()
        if self.average_folded is None:
            return Judged(averaged, averaged)
        self.average_folded.refresh()
        return Judged(averaged, self.average_folded)

    @contextmanager
    def tuned(self) -> Iterator[None]:
        """Let cuDNN tune each of the few batch sizes once, inside a block; any other attack has too many sizes."""
        with tuned_sizes(self.runner is not None and self.fixed_sizes):
            yield


@contextmanager
def tuned_sizes(tune: bool) -> Iterator[None]:
    """Let cuDNN tune every batch size it meets inside the block, where `tune`; never where bits must be repeated."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or (tune and not torch.backends.cudnn.deterministic)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _short(error: BaseException) -> str:
    return str(error) if isinstance(error, NotCapturable) else reason(error)
