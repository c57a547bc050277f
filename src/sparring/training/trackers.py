"""Trackers by name: csv, tensorboard, wandb, trackio. Each needs its package only when it is asked for.

A missing package is refused before training begins; a tracker that fails later costs one note (`tracking.EpochLog`).
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sparring.errors import UserError, unknown
from sparring.training import run_folder
from sparring.training.checkpoint import write_text
from sparring.training.config import Config, flat_json
from sparring.training.tracking import EpochLog, Log, NoLog, Together, Tracker

Trackers = Tracker | str | Sequence[Tracker | str] | None
PROJECT = "sparring"  # unless WANDB_PROJECT or TRACKIO_PROJECT names another


class CSV:
    """metrics.csv beside metrics.jsonl, written anew with every epoch: columns may come late, and a kill may come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, record: Mapping[str, Any]) -> None:
        """The numbers of an epoch, which metrics.jsonl has already."""
        records = run_folder.read_metrics(self.folder)
        text = io.StringIO()
        columns = list(dict.fromkeys(name for each in records for name in each))
        table = csv.DictWriter(text, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(records)
        write_text(self.folder / run_folder.CSV, text.getvalue())

    def close(self) -> None:
        """Nothing is left to write."""


class TensorBoard:
    """TensorBoard's events in the run folder, from an epoch on: later ones of an earlier start are hidden.

    Written at once and unbuffered, an epoch at a time: TensorBoard's own writer has a thread, whose failure is printed
    as a traceback and found out an epoch later.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # slow to import

        name = f"events.out.tfevents.{time.time_ns() / 1e9:020.9f}.{os.getpid()}"
        self.file = (folder / name).open("xb", buffering=0)
        hidden = SessionLog(status=SessionLog.START)
        first = Event(step=epoch, file_version="brain.Event:2")
        self._write([first, Event(step=epoch, session_log=hidden)])

    def add(self, record: Mapping[str, Any]) -> None:
        """The numbers of an epoch."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in _numbers(record).items()]
        self._write([Event(step=record["epoch"], summary=Summary(value=[value])) for value in values])

    def _write(self, events: Sequence[Any]) -> None:
        """Append the events, all or none; a file that cannot be written is closed."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        spelled = io.BytesIO()
        for event in events:
            event.wall_time = time.time()
            RecordWriter(spelled).write(event.SerializeToString())
        end, rest = self.file.tell(), spelled.getvalue()
        try:
            while rest:
                rest = rest[self.file.write(rest) or 0 :]
        except OSError:
            with suppress(OSError), self.file:  # half a record would end a reader there
                self.file.truncate(end)
            raise

    def close(self) -> None:
        """Nothing is left to write."""
        self.file.close()


class Service:
    """A run of a package with the interface of wandb: `log(numbers, step)` and `finish()`."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def add(self, record: Mapping[str, Any]) -> None:
        """The numbers of an epoch."""
        self.run.log(_numbers(record), step=record["epoch"])

    def close(self) -> None:
        """Send what is left."""
        self.run.finish()


def _csv(folder: Path, config: Config, epoch: int) -> Log:
    return CSV(folder)


def _tensorboard(folder: Path, config: Config, epoch: int) -> Log:
    return TensorBoard(folder, epoch)


def _wandb(folder: Path, config: Config, epoch: int) -> Log:
    """A run of Weights & Biases; a resumed training continues it."""
    run = importlib.import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=folder.resolve().name,
        id=identity(folder),
        resume="allow",
        dir=str(folder),
        config=flat_json(config),
    )
    return Service(run)


def _trackio(folder: Path, config: Config, epoch: int) -> Log:
    """A run of Trackio; a resumed training continues it. Its runs are known by name, so the name holds the identity."""
    run = importlib.import_module("trackio").init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=f"{folder.resolve().name}-{identity(folder)[:6]}",
        resume="allow",
        config=flat_json(config),
    )
    return Service(run)


# Name -> (how the log is opened, the module it needs, the package that has it).
TRACKERS: dict[str, tuple[Callable[[Path, Config, int], Log], str, str]] = {
    "csv": (_csv, "", ""),
    "tensorboard": (_tensorboard, "tensorboard.summary.writer.record_writer", "tensorboard"),
    "wandb": (_wandb, "wandb", "wandb"),
    "trackio": (_trackio, "trackio", "trackio"),
}


def follow(given: Trackers, folder: Path, *, tensorboard: bool = False) -> Together:
    """The trackers of a run as one.

    Args:
        given: a tracker, a name (csv, tensorboard, wandb, trackio), or several of both.
        tensorboard: TensorBoard's events beside them, where the package is there; without it one note is printed.

    Raises:
        UserError: an unknown name, a package that is not installed, or an object that is no tracker.
    """
    several: Sequence[Any] = given if isinstance(given, list | tuple) else [] if given is None else [given]
    names = list(dict.fromkeys(one for one in several if isinstance(one, str)))
    own = [one for one in several if not isinstance(one, str)]
    for one in own:
        if isinstance(one, type) or not _tracks(one):
            raise _no_tracker(one)
    for name in names:
        _check(name)
    # Logs come first: what their packages print on starting would break a progress bar.
    logs = [EpochLog(name, partial(_start, name, folder)) for name in names]
    if tensorboard and "tensorboard" not in names:
        logs.append(EpochLog("tensorboard", partial(_tensorboard_if_there, folder)))
    return Together([*logs, *own])


def _start(name: str, folder: Path, config: Config, epoch: int) -> Log:
    _check(name)
    return TRACKERS[name][0](folder, config, epoch)


def _tensorboard_if_there(folder: Path, config: Config, epoch: int) -> Log:
    """TensorBoard's events where nobody asked for them by name."""
    try:
        return _start("tensorboard", folder, config, epoch)
    except UserError:
        raise NoLog(
            "no TensorBoard events: the package tensorboard is not installed (pip install tensorboard)."
        ) from None


def identity(folder: Path) -> str:
    """An identifier of the run in a folder: the same when it is resumed, another once it is overwritten."""
    starts = run_folder.read_environment(folder)
    first = starts[0].get("started", "") if starts else ""
    return hashlib.sha256(f"{folder.resolve().name} {first}".encode()).hexdigest()[:16]


def _check(name: str) -> None:
    """Refuse an unknown tracker, and one whose package is missing."""
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    _, module, package = TRACKERS[name]
    try:
        if module:
            importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"the tracker {name} needs the package {package}, which is not installed. Install it: pip install {package}"
        ) from None


def _tracks(given: object) -> bool:
    return all(callable(getattr(given, name, None)) for name in ("begin", "step", "epoch", "end"))


def _no_tracker(given: object) -> UserError:
    what = given.__name__ if isinstance(given, type) else type(given).__name__
    return UserError(
        f"tracker takes a name ({', '.join(TRACKERS)}), an object with the methods begin, step, epoch and end, or a "
        f"list of them; got {'the class ' if isinstance(given, type) else ''}{what}."
    )


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn as a curve."""
    return {name: value for name, value in record.items() if isinstance(value, int | float)}
