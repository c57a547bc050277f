"""Carry out jobs: train what is missing, resume what was interrupted, measure, write the result.

A stop loses no work: training saves a checkpoint, an evaluation its verdicts, and the same jobs given again continue.
An unfinished run leaves a result as well, with its course so far and the time per epoch.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparring import weights
from sparring.data import Dataset, load
from sparring.paper import results
from sparring.paper.measure import losses, mixture, motivation, robustness
from sparring.paper.plan import Job, JobState, remaining, state
from sparring.paper.specs import Course, Losses, Mixture, Motivation, Robustness
from sparring.training import checkpoint, run_folder
from sparring.training.config import Config
from sparring.training.held_folder import InUse, claimed
from sparring.training.loop import Diverged, Interrupted, train
from sparring.training.tracking import Tracker

_POLL = 0.5  # seconds between looks at a run that another process holds
_OF_A_START = ("device", "torch", "at_once")  # what a result keeps of each start of the training


class Stopped(Exception):
    """The work was asked to stop, and has saved its state."""


class _Silent:
    """A tracker that reports nothing."""

    def begin(self, config: Config, *, steps: int, epoch: int, engine: str) -> None:
        """Training begins."""

    def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None:
        """A step is done."""

    def epoch(self, record: dict[str, Any], *, best: bool) -> None:
        """An epoch is done."""

    def end(self) -> None:
        """Training stops."""


def _silent(job: Job) -> Tracker:
    return _Silent()


@dataclass
class Workspace:
    """What jobs run with: the device, callbacks for stopping and reporting, and the data sets loaded so far."""

    device: torch.device
    stop: Callable[[], bool] = lambda: False  # called between steps and between jobs
    # Context of a measurement, which loses no work: it may end the measurement by a KeyboardInterrupt.
    breakable: Callable[[], AbstractContextManager[None]] = nullcontext
    tracker: Callable[[Job], Tracker] = _silent
    log: Callable[[str], None] = lambda line: None
    progress: bool = False
    data: dict[str, Dataset] = field(default_factory=dict)  # by name

    def dataset(self, spec: str) -> Dataset:
        """A data set by its name, loaded once."""
        if spec not in self.data:
            self.data[spec] = load(spec)
        return self.data[spec]


def carry_out(jobs: Sequence[Job], workspace: Workspace) -> None:
    """Produce the result of every job, in order, unless it exists. A run that diverges is a result too.

    A run that another process is training or measuring comes last: what that process leaves is taken over.

    Raises:
        Stopped: when `workspace.stop` returns True; all work so far is on disk.
    """
    waiting = [job for job in jobs if not _tried(job, workspace)]
    if waiting:
        workspace.log(f"waiting for another process at {', '.join(job.name for job in waiting)}")
    while waiting:
        if workspace.stop():
            raise Stopped(f"while another process was at {waiting[0].name}")
        time.sleep(_POLL)
        waiting = [job for job in waiting if not _tried(job, workspace)]


def _tried(job: Job, workspace: Workspace) -> bool:
    """Carry out a job; False where another process holds its run."""
    if not remaining([job]):
        return True
    if workspace.stop():
        raise Stopped(f"before {job.name}")
    if job.folder is not None and _held(job.folder):
        return False
    try:
        if state(job) in ("missing", "interrupted"):
            train_run(job, workspace)
        if state(job) == "trained":
            if workspace.stop():  # for example during the last validation
                raise Stopped(f"before measuring {job.name}")
            if job.folder is None:
                _measure_and_write(job, workspace)
                return True
            with claimed(job.folder):
                if remaining([job]):
                    _measure_and_write(job, workspace)
    except InUse:
        return False
    return True


def _held(folder: Path) -> bool:
    """Whether another process has locked a run folder (`run_folder.claimed`). It may lock it a moment later."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # there is none yet
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def train_run(job: Job, workspace: Workspace) -> None:
    """Train a job's run to its end. The only place where `paper` trains.

    However training ends, a run with a finished epoch leaves a result with its course so far.
    """
    assert job.config is not None and job.folder is not None
    if workspace.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(workspace.device)
    done = len(run_folder.read_metrics(job.folder)) if state(job) == "interrupted" else 0
    workspace.log(f"{f'resuming after epoch {done}:' if done else 'training'} {job.name} -> {job.folder}")
    epoch, began, ours = 0, time.perf_counter(), True
    try:
        train(
            job.config,
            job.folder,
            device=workspace.device,
            stop=workspace.stop,
            tracker=workspace.tracker(job),
            recipe=job.item,
            resume=True,
            data=workspace.dataset(job.config.data),
            tensorboard=False,
        )
    except Interrupted as interrupted:
        raise Stopped(f"in training ({job.name}): {interrupted}") from None
    except Diverged as diverged:
        epoch = diverged.epoch
    except InUse:
        ours = False
        raise
    finally:
        how_far: JobState = "diverged" if epoch else state(job)
        if epoch or (ours and how_far != "missing" and run_folder.read_metrics(job.folder)):
            wall = time.perf_counter() - began
            facts = _facts(job, workspace, how_far, memory=_memory(workspace.device), wall=wall)
            results.write(job.path, facts | ({"diverged_in_epoch": epoch} if epoch else {}))
    if epoch:
        workspace.log(f"{job.name}: the loss was not finite in epoch {epoch}. Recorded in {job.path}")


def _measure_and_write(job: Job, workspace: Workspace) -> None:
    """Measure a trained run and write its result."""
    try:
        with workspace.breakable():
            began = time.perf_counter()
            found = _measure(job, workspace)
            seconds = round(time.perf_counter() - began, 2)
    except KeyboardInterrupt:
        raise Stopped(f"while measuring {job.name}; its verdicts so far are saved") from None
    results.write(job.path, {**_facts(job, workspace, "measured"), "found": found, "measuring_seconds": seconds})
    workspace.log(f"wrote {job.path}")


def _memory(device: torch.device) -> float | None:
    """Peak memory of the GPU, in GiB."""
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None


def _measure(job: Job, workspace: Workspace) -> dict[str, Any]:
    """What the row declares, measured on the model of the last epoch."""
    what = job.row.measure
    if isinstance(what, Motivation):
        return motivation.measure(what, job.seed)
    if isinstance(what, Course):
        return {}
    assert job.config is not None and job.folder is not None
    model: nn.Module = weights.load_model(job.folder, device=workspace.device)
    data = workspace.dataset(job.config.data)
    if isinstance(what, Mixture):
        return mixture.measure(what, model, data, device=workspace.device, seed=job.seed)
    if isinstance(what, Losses):
        return losses.measure(what, model, data, device=workspace.device)
    assert isinstance(what, Robustness)
    same: dict[str, Any] = {
        "device": workspace.device,
        "seed": job.seed,
        "limit": job.limit,
        "progress": workspace.progress,
    }
    same["folder"] = job.folder / run_folder.EVALUATION
    about: dict[str, Any] = {"model": job.folder.name, "which": "last", "data": job.config.data, "data_note": data.note}
    found = robustness.measure(what, model, data, about={**about, "facts": {"epoch": job.config.epochs}}, **same)
    best = checkpoint.read_facts(job.folder / run_folder.BEST).get("epoch")
    if what.autoattack and best != job.config.epochs:  # for tables: robust accuracy may fall after its best epoch
        model = weights.load_model(job.folder, which="best", device=workspace.device)
        protocol = replace(what, autoattack=0)
        about |= {"which": "best", "facts": {"epoch": best}}
        found["best"] = {"epoch": best, **robustness.measure(protocol, model, data, about=about, **same)}
    return found


def _facts(
    job: Job, workspace: Workspace, how_far: JobState, memory: float | None = None, wall: float = 0.0
) -> dict[str, Any]:
    """Everything in a result but its measurements.

    Peak memory is the maximum over all starts of the training, wall-clock time their sum: with the data's loading,
    compilation, validation and checkpoints, which `training_seconds` (the sum over epochs) leaves out.
    """
    written = results.read(job.path) or {}
    if results.trained_by(written, job.config):
        memory = max(memory or 0.0, written.get("peak_memory_gib") or 0.0) or None
        wall += written.get("wall_seconds") or 0.0
    facts: dict[str, Any] = {
        "item": job.item,
        "row": job.row.name,
        "scale": job.scale,
        "seed": job.seed,
        "state": how_far,
        **job.declared,
        "environment": run_folder.environment(workspace.device),
    }
    if job.folder is not None:
        history = run_folder.whole_history(job.folder)
        facts["history"] = results.columns(history)
        facts["training_seconds"] = round(sum(record["seconds"] for record in history), 2)
        facts["wall_seconds"] = round(wall, 2) or None  # None: trained by another item
        starts = run_folder.read_environment(job.folder)
        facts["starts"] = len(starts)
        facts["trained_on"] = [{key: start.get(key) for key in _OF_A_START} for start in starts]
        facts["peak_memory_gib"] = memory
    return facts
