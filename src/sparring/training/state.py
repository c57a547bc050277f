"""The state of a training run, and the checkpoints that keep it.

Every random draw is derived from (seed, epoch, step), so weights, what the optimiser remembers, the epoch's sums and a
place are the whole state.
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
from sparring.files.digests import chained
from sparring.files.json_text import Damaged
from sparring.models.keys import in_words, masks, not_finite, problems, shapes_of
from sparring.training import optimiser_state, run_folder
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
    optimizer: torch.optim.Optimizer
    tally: Tally
    epoch: int = 1
    step: int = 0
    best: dict[str, Any] | None = None  # the record of the best epoch so far
    classes: int = 0  # of the model's output
    made: list[dict[str, Any]] | None = None  # settings that a caller's own optimiser began with; None for a named one
    history: str = ""  # digest of the records of the epochs before

    def close_epoch(self, record: dict[str, Any], *, best: bool) -> None:
        """Go on to the next epoch, once this one has its record; `best`: it is the one to beat."""
        self.epoch, self.step, self.tally = self.epoch + 1, 0, Tally.empty(self.tally.loss.device)
        self.history = chained(self.history, record)
        if best:
            self.best = record


File = tuple[str, dict[str, Tensor], dict[str, Any]]  # name, tensors, facts


class Saver:
    """Writes checkpoints in the background: the best model so far, and everything the run needs to continue.

    Both are written together, the best one first, so that no checkpoint names a best model that does not exist. The
    run waits for a copy of the tensors, not for the disk. As a context manager it ends once everything is on the disk.
    A failed write is tried again by the next save, or at the end, and raised if that fails too.
    """

    def __init__(
        self, run: run_folder.RunFolder, state: State, facts: dict[str, Any], average: WeightAverage | None
    ) -> None:
        self.run, self.state, self.facts, self.average = run, state, facts, average
        self.saved = float("-inf")
        self.pending: File | None = None  # the best model, to be written with the next checkpoint
        self.kept: File | None = None  # the best model that was handed to the writer last
        self.handed: list[File] = []  # everything handed to the writer, until it is on the disk
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
        """Remember a copy of the best model so far."""
        weights = {name: tensor.detach().clone() for name, tensor in _weights("model", model).items()}
        self.pending = run_folder.BEST, weights, {"model": self.facts, "epoch": record["epoch"], "metrics": record}

    def save(self) -> None:
        """Start writing both. Part "model" of the run's file is the model to use: the average, where one is kept."""
        failed = self._settle() is not None
        last = (run_folder.LAST, self._tensors(), self._place())
        files = [
            (name, {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}, facts)
            for name, tensors, facts in ([self.pending, last] if self.pending else [last])
        ]
        self.handed = files
        if failed:  # there may be room again; if not, raise here
            self._write(files)
        else:
            self.writing = self.writer.submit(self._write, files)
        self.kept, self.pending = self.pending, None
        self.saved = time.perf_counter()

    def finish(self) -> None:
        """Wait until everything is on the disk; a failed write is tried once more."""
        if self._settle() is not None:
            self._write(self.handed)

    def _settle(self) -> BaseException | None:
        """Wait, and return the failure, if any. A best model that may not have been written is pending again."""
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
        remembered = optimiser_state.tensors(state.optimizer, state.model)
        return weights | remembered | {"tally.loss": state.tally.loss, "tally.backprops": state.tally.backprops}

    def _place(self) -> dict[str, Any]:
        state = self.state
        return {
            "model": self.facts,
            "epoch": state.epoch - 1,  # complete ones
            "step": state.step,
            "best": state.best,
            "history": state.history,
            "images": state.tally.images,
            "seconds": state.tally.seconds,
            "optimizer": optimiser_state.facts(state.optimizer, state.model, state.made),
        }


class NoSaver:
    """Writes nothing: the first process does it for all."""

    idle = 0.0

    def keep(self, model: nn.Module, record: dict[str, Any]) -> None:
        """Remember nothing."""

    def save(self) -> None:
        """Write nothing."""

    def finish(self) -> None:
        """There is nothing to wait for."""


def restore(state: State, saved: Checkpoint) -> None:
    """Continue from a checkpoint. The average of the weights, if any, is restored by the engine."""
    try:
        state.model.load_state_dict(saved.part("live") or saved.part("model"))
    except RuntimeError:  # another network was named, or one of the two files was edited
        weights = saved.part("live") or saved.part("model")
        wrong = in_words(problems(weights, shapes_of(state.model.state_dict())))
        raise UserError(
            f"the checkpoint holds another network than {type(state.model).__name__}. {wrong} Name the network that "
            "was trained, or restore config.json."
        ) from None
    free = {f"{part}.{name}" for part in ("model", "live", "average") for name in masks(state.model)}
    if wrong := in_words(not_finite(saved.tensors, free)):
        raise Damaged(f"the checkpoint cannot be trained on. {wrong} Restore it from a copy, or train anew: --out.")
    optimiser_state.restore(state.optimizer, state.model, saved.part("optimizer"), saved.facts["optimizer"], state.made)
    tally = saved.part("tally")
    state.tally = Tally(tally["loss"], tally["backprops"], saved.facts["images"], saved.facts["seconds"])
    state.epoch, state.step, state.best = saved.facts["epoch"] + 1, saved.facts["step"], saved.facts["best"]
    state.history = saved.facts["history"]


def _weights(part: str, model: nn.Module) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for name, tensor in model.state_dict().items()}
