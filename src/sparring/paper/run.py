"""Carry out jobs: train what is missing, go on with what was interrupted, measure, write the result.

A stop never loses work: training saves its place, an evaluation its verdicts, and the same jobs given again continue.
Even a run that did not get to its end leaves a result behind, with its course so far and what an epoch costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sparring import weights
from sparring.data import Dataset, load
from sparring.paper import results
from sparring.paper.measure import losses, mixture, motivation, robustness
from sparring.paper.plan import Job, State, state, wanting
from sparring.paper.specs import Course, Losses, Mixture, Motivation, Robustness
from sparring.training import checkpoint, run_folder
from sparring.training.config import Config
from sparring.training.loop import Diverged, Interrupted, train
from sparring.training.tracking import Tracker

_SESSION = ("started", "device", "torch", "at_once")  # what a result keeps of a session


class Stopped(Exception):
    """The work was asked to stop, and has saved its place."""


def _silent(line: str) -> None:
    """Nobody is told."""


class Nobody:
    """Looks on and does nothing."""

    def begin(self, config: Config, *, steps: int, epoch: int, engine: str) -> None:
        """Training begins."""

    def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None:
        """A step is done."""

    def epoch(self, record: dict[str, Any], *, best: bool) -> None:
        """An epoch is done."""

    def end(self) -> None:
        """Training stops."""


def _untracked(job: Job) -> Tracker:
    return Nobody()


@dataclass
class Bench:
    """Where the work is done, and who looks on."""

    device: torch.device
    stop: Callable[[], bool] = lambda: False  # asked between steps and between jobs
    # Around a measurement, which keeps what it has: may break it off with a KeyboardInterrupt.
    breakable: Callable[[], AbstractContextManager[None]] = nullcontext
    tracker: Callable[[Job], Tracker] = _untracked
    tell: Callable[[str], None] = _silent
    progress: bool = False
    data: dict[str, Dataset] = field(default_factory=dict)  # loaded once

    def dataset(self, spec: str) -> Dataset:
        """A data set by its name."""
        if spec not in self.data:
            self.data[spec] = load(spec)
        return self.data[spec]


def carry_out(jobs: Sequence[Job], bench: Bench) -> None:
    """Have every job's result, in order; those that are there are left alone. A run that diverges is a result too.

    Raises:
        Stopped: once `bench.stop` said so; everything so far is on disk.
    """
    for job in jobs:
        if not wanting([job]):
            continue
        if bench.stop():
            raise Stopped(f"before {job.name}")
        if state(job) in ("missing", "interrupted"):
            train_run(job, bench)
        if state(job) == "trained":
            if bench.stop():  # asked for in the last epoch's validation, say
                raise Stopped(f"before measuring {job.name}")
            _have(job, bench)


def train_run(job: Job, bench: Bench) -> None:
    """Bring a job's run to its end. The one place where this package trains.

    However it ends, a run that has finished an epoch leaves a result behind with its course so far.
    """
    assert job.config is not None and job.folder is not None
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    done = len(run_folder.read_metrics(job.folder)) if state(job) == "interrupted" else 0
    bench.tell(f"{f'continuing after epoch {done}:' if done else 'training'} {job.name} -> {job.folder}")
    epoch = 0
    try:
        train(
            job.config,
            job.folder,
            device=bench.device,
            stop=bench.stop,
            tracker=bench.tracker(job),
            recipe=job.item,
            resume=True,
            data=bench.dataset(job.config.data),
            tensorboard=False,
        )
    except Interrupted as interrupted:
        raise Stopped(f"in training ({job.name}): {interrupted}") from None
    except Diverged as diverged:
        epoch = diverged.epoch
    finally:
        how_far: State = "diverged" if epoch else state(job)
        if epoch or (how_far != "missing" and run_folder.read_metrics(job.folder)):
            facts = _facts(job, bench, how_far, memory=_memory(bench.device))
            results.write(job.path, facts | ({"diverged_in_epoch": epoch} if epoch else {}))
    if epoch:
        bench.tell(f"{job.name}: the loss was not finite in epoch {epoch}. Noted in {job.path}")


def _have(job: Job, bench: Bench) -> None:
    """Measure what is trained, and write it."""
    try:
        with bench.breakable():
            began = time.perf_counter()
            found = _measure(job, bench)
            seconds = round(time.perf_counter() - began, 2)
    except KeyboardInterrupt:
        raise Stopped(f"while measuring {job.name}; its verdicts so far are kept") from None
    results.write(job.path, {**_facts(job, bench, "measured"), "found": found, "measuring_seconds": seconds})
    bench.tell(f"wrote {job.path}")


def _memory(device: torch.device) -> float | None:
    """The most that was in use on the GPU, in GiB."""
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None


def _measure(job: Job, bench: Bench) -> dict[str, Any]:
    """What the row asks for, of the model at its last epoch."""
    what = job.row.measure
    if isinstance(what, Motivation):
        return motivation.measure(what, job.seed)
    if isinstance(what, Course):
        return {}
    assert job.config is not None and job.folder is not None
    model: nn.Module = weights.load_model(job.folder, device=bench.device)
    data = bench.dataset(job.config.data)
    if isinstance(what, Mixture):
        return mixture.measure(what, model, data, device=bench.device, seed=job.seed)
    if isinstance(what, Losses):
        return losses.measure(what, model, data, device=bench.device)
    assert isinstance(what, Robustness)
    same: dict[str, Any] = {"device": bench.device, "seed": job.seed, "limit": job.limit, "progress": bench.progress}
    same["folder"] = job.folder / run_folder.EVALUATION
    about: dict[str, Any] = {"model": job.folder.name, "which": "last", "data": job.config.data, "data_note": data.note}
    found = robustness.measure(what, model, data, about={**about, "facts": {"epoch": job.config.epochs}}, **same)
    best = checkpoint.read_facts(job.folder / run_folder.BEST).get("epoch")
    if what.autoattack and best != job.config.epochs:  # a table: robust accuracy may fall after its best epoch
        model = weights.load_model(job.folder, which="best", device=bench.device)
        protocol = replace(what, autoattack=0)
        about |= {"which": "best", "facts": {"epoch": best}}
        found["best"] = {"epoch": best, **robustness.measure(protocol, model, data, about=about, **same)}
    return found


def _facts(job: Job, bench: Bench, how_far: State, memory: float | None = None) -> dict[str, Any]:
    """What a result says beside its findings. The memory of earlier sessions is known from what they wrote."""
    before = results.read(job.path) or {}
    if results.trained_by(before, job.config):
        memory = max(memory or 0.0, before.get("peak_memory_gib") or 0.0) or None
    facts: dict[str, Any] = {
        "item": job.item,
        "row": job.row.name,
        "scale": job.scale,
        "seed": job.seed,
        "state": how_far,
        **job.declared,
        "environment": run_folder.environment(bench.device),
    }
    if job.folder is not None:
        history = run_folder.whole_history(job.folder)
        facts["history"] = results.columns(history)
        facts["training_seconds"] = round(sum(record["seconds"] for record in history), 2)
        facts["sessions"] = len(sessions := run_folder.read_environment(job.folder))
        facts["trained_on"] = [{key: session.get(key) for key in _SESSION} for session in sessions]
        facts["peak_memory_gib"] = memory
    return facts
