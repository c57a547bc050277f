"""Who follows a training: the protocol of a tracker, and TensorBoard, whose absence never ends a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparring.training.config import Config

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Tracker(Protocol):
    """Follows a training: a progress bar, a log."""

    def begin(self, config: Config, *, steps: int, epoch: int, engine: str) -> None:
        """Training begins, or goes on, at this epoch; `steps` make an epoch; `engine` says in a line what runs."""

    def step(self, epoch: int, step: int, backprops: Callable[[], float]) -> None:
        """A step is done. `backprops()` gives the epoch's mean so far, and makes a GPU wait."""

    def epoch(self, record: dict[str, Any], *, best: bool) -> None:
        """An epoch is done, and its record on the disk."""

    def end(self) -> None:
        """Training stops, for whatever reason."""


class TensorBoard:
    """Writes an epoch's numbers as TensorBoard events beside the run's own records, from an epoch on."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.folder = folder
        self.writer: SummaryWriter | None = None
        with self._trying():
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and not needed by the library

            self.writer = SummaryWriter(str(folder), purge_step=epoch)

    def add(self, record: Mapping[str, Any]) -> None:
        """The numbers of an epoch."""
        with self._trying():
            for name, value in record.items():
                if value is not None and self.writer is not None:
                    self.writer.add_scalar(name, value, record["epoch"])

    def close(self) -> None:
        """Write what is left."""
        with self._trying():
            if self.writer is not None:
                self.writer.close()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except ImportError:
            self.writer = None
            print(
                "note: no TensorBoard events: the package tensorboard is not installed (pip install tensorboard).",
                file=sys.stderr,
            )
        except OSError as error:
            self.writer = None
            print(f"note: no more events for TensorBoard in {self.folder}: {error.strerror or error}.", file=sys.stderr)
