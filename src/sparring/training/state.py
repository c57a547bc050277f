"""Where a run stands, and how that is kept: the state of the training loop and its checkpoints.

Every random draw is named by (seed, epoch, step), so weights, momentum, the epoch's sums and a place are all there is.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparring.engine import WeightAverage
from sparring.errors import UserError
from sparring.training import run_folder
from sparring.training.checkpoint import Checkpoint


@dataclass
class Tally:
    """Running sums of the epoch, kept on the device so that no step waits for them."""

    loss: Tensor
    backprops: Tensor
    images: int = 0
    seconds: float = 0.0

    @classmethod
    def empty(cls, device: torch.device) -> Tally:
        """Nothing seen yet."""
        zero = torch.zeros((), device=device)
        return cls(loss=zero.double(), backprops=zero.long())


@dataclass
class State:
    """Where a run stands. `step` steps of `epoch` (1-based) are done."""

    model: nn.Module
    optimizer: torch.optim.SGD
    tally: Tally
    epoch: int = 1
    step: int = 0
    best: dict[str, Any] | None = None  # the record of the best epoch so far


File = tuple[str, dict[str, Tensor], dict[str, Any]]  # name, tensors, facts


class Saver:
    """Writes checkpoints while the run goes on: the best model so far, and everything the run needs to go on.

    Both are written at the same moments, the best one first, so that no checkpoint knows of a best that is not there.
    What is written is a copy of that moment; a run waits for a copy, not for a disk. As a context it does not end
    before everything is on the disk. What could not be written is tried again by the next save, or at the end, and
    raised if that fails too.
    """

    def __init__(self, run: run_folder.Run, state: State, facts: dict[str, Any], average: WeightAverage | None) -> None:
        self.run, self.state, self.facts, self.average = run, state, facts, average
        self.saved = float("-inf")
        self.pending: File | None = None  # the best model, to be written with the next checkpoint
        self.kept: File | None = None  # the one that was handed to the writer last
        self.handed: list[File] = []  # all that was, until it is on the disk
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self.finish()
        finally:
            self.writer.shutdown()

    @property
    def idle(self) -> float:
        """Seconds since the last checkpoint."""
        return time.perf_counter() - self.saved

    def keep(self, model: nn.Module, record: dict[str, Any]) -> None:
        """This is the best model so far: remember it as it is now."""
        weights = {name: tensor.detach().clone() for name, tensor in _weights("model", model).items()}
        self.pending = run_folder.BEST, weights, {"model": self.facts, "epoch": record["epoch"], "metrics": record}

    def save(self) -> None:
        """Begin to write both. Part "model" of the run's file is the one to use: the average, where one is kept."""
        failed = self._settle() is not None
        last = (run_folder.LAST, self._tensors(), self._place())
        files = [
            (name, {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}, facts)
            for name, tensors, facts in ([self.pending, last] if self.pending else [last])
        ]
        self.handed = files
        if failed:  # perhaps there is room again; if not, it is said here
            self._write(files)
        else:
            self.writing = self.writer.submit(self._write, files)
        self.kept, self.pending = self.pending, None
        self.saved = time.perf_counter()

    def finish(self) -> None:
        """Wait until what was begun is on the disk; what failed is tried once more."""
        if self._settle() is not None:
            self._write(self.handed)

    def _settle(self) -> BaseException | None:
        """Wait, and say what went wrong. A best model that may not have been written is pending again."""
        writing, self.writing = self.writing, None
        failure = None if writing is None else writing.exception()
        if failure is not None:
            self.pending = self.pending or self.kept
        return failure

    def _write(self, files: list[File]) -> None:
        for file in files:
            self.run.save(*file)
        self.handed = []

    def _tensors(self) -> dict[str, Tensor]:
        state = self.state
        weights = _weights("model", state.model)
        if self.average is not None:
            sums = {f"average.{name}": tensor for name, tensor in self.average.state().items()}
            weights = _weights("model", self.average.read()) | _weights("live", state.model) | sums
        momentum = {
            f"momentum.{name}": state.optimizer.state[parameter]["momentum_buffer"]
            for name, parameter in state.model.named_parameters()
            if state.optimizer.state[parameter].get("momentum_buffer") is not None
        }
        return weights | momentum | {"tally.loss": state.tally.loss, "tally.backprops": state.tally.backprops}

    def _place(self) -> dict[str, Any]:
        state = self.state
        return {
            "model": self.facts,
            "epoch": state.epoch - 1,  # complete ones
            "step": state.step,
            "best": state.best,
            "images": state.tally.images,
            "seconds": state.tally.seconds,
        }


def restore(state: State, saved: Checkpoint) -> None:
    """Go on from a checkpoint; the average of the weights, if any, is the engine's to restore."""
    try:
        state.model.load_state_dict(saved.part("live") or saved.part("model"))
    except RuntimeError:  # somebody has changed one of the two
        raise UserError("the checkpoint is of another network than config.json says. Put config.json back.") from None
    momentum = saved.part("momentum")
    for name, parameter in state.model.named_parameters():
        if name in momentum:
            state.optimizer.state[parameter]["momentum_buffer"] = momentum[name]
    tally = saved.part("tally")
    state.tally = Tally(tally["loss"], tally["backprops"], saved.facts["images"], saved.facts["seconds"])
    state.epoch, state.step, state.best = saved.facts["epoch"] + 1, saved.facts["step"], saved.facts["best"]


def _weights(part: str, model: nn.Module) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for name, tensor in model.state_dict().items()}
