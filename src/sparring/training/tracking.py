"""Who follows a training: the protocol of a tracker, several as one, and logs that never end a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from sparring.training.config import Config


class Tracker(Protocol):
    """Follows a training: a progress bar, a log. An exception of a caller's own tracker ends the run."""

    def begin(self, config: Config, *, steps: int, epoch: int, engine: str) -> None:
        """Training begins, or goes on, at this epoch; `steps` make an epoch; `engine` says in a line what runs."""

    def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None:
        """A step is done. `backprops()` gives the epoch's mean so far, and makes a GPU wait."""

    def epoch(self, record: dict[str, Any], *, best: bool) -> None:
        """An epoch is done, and its record on the disk."""

    def end(self) -> None:
        """Training stops, for whatever reason."""


class Together:
    """Several trackers as one, called in order; each of them is told the end."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def begin(self, config: Config, *, steps: int, epoch: int, engine: str) -> None:
        """Training begins."""
        for tracker in self.trackers:
            tracker.begin(config, steps=steps, epoch=epoch, engine=engine)

    def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None:
        """A step is done."""
        for tracker in self.trackers:
            tracker.step(epoch, step, backprops)

    def epoch(self, record: dict[str, Any], *, best: bool) -> None:
        """An epoch is done."""
        for tracker in self.trackers:
            tracker.epoch(record, best=best)

    def end(self) -> None:
        """Training stops."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.end)


class Log(Protocol):
    """Takes the numbers of one epoch after another."""

    def add(self, record: Mapping[str, Any]) -> None:
        """The numbers of an epoch."""

    def close(self) -> None:
        """Write what is left."""


class NoLog(Exception):
    """A log cannot be kept, and that is no failure; the message is the note."""


class EpochLog:
    """A tracker that keeps a log of the epochs. A log that fails is given up with one note; the run goes on.

    Args:
        name: how the note calls it.
        start: opens the log at an epoch; the records of earlier epochs are in it, or beside it.
    """

    def __init__(self, name: str, start: Callable[[Config, int], Log]) -> None:
        self.name, self.start = name, start
        self.log: Log | None = None

    def begin(self, config: Config, *, steps: int, epoch: int, engine: str) -> None:
        """Open the log, unless the run is finished."""
        if epoch <= config.epochs:
            self._try(partial(self._open, config, epoch))

    def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None:
        """Nothing: reading the mean would make a GPU wait."""

    def epoch(self, record: dict[str, Any], *, best: bool) -> None:
        """Log the epoch."""
        if self.log is not None:
            self._try(partial(self.log.add, record))

    def end(self) -> None:
        """Close the log."""
        if self.log is not None:
            self._try(self.log.close)
        self.log = None

    def _open(self, config: Config, epoch: int) -> None:
        self.log = self.start(config, epoch)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except NoLog as reason:
            print(f"note: {reason}", file=sys.stderr)
        except Exception as error:  # whatever a third party's package raises
            self.log = None
            why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            line = " ".join(str(why).split()).rstrip(".")
            print(f"note: nothing more goes to {self.name}: {line}. The run goes on.", file=sys.stderr)
