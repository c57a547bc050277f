"""A model and its engine, trained by the real loop under a clock: what every part of the benchmark times."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparring.attacks import Found
from sparring.bench.start_up import start_up
from sparring.bench.timing import wait
from sparring.data import Dataset, Split, batches, count_batches, hold_out, in_memory
from sparring.engine import Engine, EngineKind
from sparring.errors import UserError
from sparring.models import forward_flops
from sparring.objectives import FAT, KTauPGD, Progress
from sparring.schedules import constant
from sparring.seeds import generator
from sparring.training import loop, start
from sparring.training.config import Config, model_facts
from sparring.training.state import State, Tally


class TimedTraining:
    """One configuration of FAT on one device, ready after its first step."""

    def __init__(
        self,
        config: Config,
        data: Dataset,
        device: torch.device,
        *,
        images: int = 0,
        kind: EngineKind = "auto",
        without: Collection[str] = (),
    ) -> None:
        """Make model and engine and take one step, timed.

        Args:
            images: of an epoch; 0 for all.
            without: hand-written parts of the engine to leave out (engine.PARTS).
        """
        given = time.time()
        self.config, self.data, self.device = config, data, device
        self.objective = fat_of(config)
        training, _ = hold_out(in_memory(data.train), config.validation, seed=0)
        count = images or len(training)
        self.training = Split(training.x[:count], training.y[:count]).to(device)
        self.facts = model_facts(config, data)
        self.awp = max(config.awp.values())
        self.state = start.begin(config, self.facts, device)
        began = time.time()
        self.engine = engine_for(config, self.state, data, device, kind, without)
        x, y = self.batch(0)
        with self.engine.tuned():
            self.attack(self.engine, x, y, tau=0, step=0)
            wait(device)
            attacked = time.time()
            self.engine.update(x, x, y, 0.0, self.awp)
        wait(device)
        self.start = start_up(given, began, attacked, time.time())
        self.flops = forward_flops(self.state.model, (1, data.channels, *data.size))

    def search(self, tau: int) -> KTauPGD:
        """The recipe's PGD-K-tau, with this tau."""
        found = replace(self.objective, tau=constant(tau)).search(Progress(1, 1))
        assert isinstance(found, KTauPGD)
        return found

    def attack(self, engine: Engine, x: Tensor, y: Tensor, *, tau: int, step: int) -> Found:
        """The data that an engine finds; the same start and noise for the same step."""
        return engine.attack(self.search(tau), x, y, generator(self.device, self.config.seed, step))

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """One full batch, where there are as many images."""
        size = self.config.batch_size
        begin = index * size % max(1, len(self.training) - size + 1)
        part = slice(begin, begin + size)
        return next(iter(batches(Split(self.training.x[part], self.training.y[part]), size)))

    def last_batch(self) -> None:
        """Update with as many images as an epoch's last batch has: cuDNN tunes, and then a graph is captured."""
        x, y = self.batch(0)
        rest = len(self.training) % self.config.batch_size
        if rest:
            with self.engine.tuned():
                for _ in range(2):
                    self.engine.update(x[:rest], x[:rest], y[:rest], 0.0, self.awp)

    def epoch(self, epoch: int, tau: int) -> dict[str, Any]:
        """Train one epoch of the real loop at a fixed tau and rate: seconds, images, back-propagations, TFLOP/s."""
        # Schedules are constant: every epoch is an epoch of as long a run.
        objective = replace(self.objective, tau=constant(tau))
        config = replace(self.config, objective=objective, awp=constant(self.awp), lr=constant(0.05), epochs=epoch)
        state, runner = self.state, self.engine.runner
        state.epoch, state.step, state.tally = epoch, 0, Tally.empty(self.device)
        before = dict(runner.launched) if runner is not None else {}
        steps = count_batches(len(self.training), config.batch_size)
        wait(self.device)
        began = time.perf_counter()
        with self.engine.tuned():
            loop.one_epoch(state, config, self.engine, self.training, steps, [], lambda: None, None, lambda: False)
        wait(self.device)
        seconds = time.perf_counter() - began
        tally = state.tally
        backprops = tally.backprops.item() / tally.images
        row: dict[str, Any] = {
            "seconds": seconds,
            "images": tally.images,
            "backprops": backprops,
            "tflops": tally.images * self.flops * (2 * backprops + (6 if self.awp else 3)) / seconds / 1e12,
        }
        if runner is not None:
            row["launched"] = {size: runner.launched[size] - before[size] for size in runner.sizes}
        return row


def fat_of(config: Config) -> FAT:
    """The configuration's objective, which must be FAT: its tau is what the benchmark varies."""
    if not isinstance(config.objective, FAT):
        raise UserError(f"bench times FAT against Madry; the recipe is {config.objective.name}. Write fat-digits.")
    return config.objective


def engine_for(
    config: Config,
    state: State,
    data: Dataset,
    device: torch.device,
    kind: EngineKind,
    without: Collection[str] = (),
    *,
    rehearse: bool = True,
) -> Engine:
    """The engine of a training run; or the same without some of its hand-written parts, or without its update."""
    return start.engine_for(config, state, data, device, kind, without=without, rehearse=rehearse)
