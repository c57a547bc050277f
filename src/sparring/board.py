"""Curves for TensorBoard, beside the run's own records. A convenience: no run ends because they cannot be written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Board:
    """The events of a run, from an epoch on."""

    def __init__(self, folder: Path, epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not needed by the library

        self.folder = folder
        self.writer: SummaryWriter | None = None
        self._try(lambda: setattr(self, "writer", SummaryWriter(str(folder), purge_step=epoch)))

    def add(self, record: Mapping[str, Any]) -> None:
        """The numbers of an epoch."""
        for name, value in record.items():
            if value is not None and self.writer is not None:
                self._try(lambda name=name, value=value: self.writer.add_scalar(name, value, record["epoch"]))  # type: ignore[misc]

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            self._try(self.writer.close)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self.writer = None
            print(f"note: no more events for TensorBoard in {self.folder}: {error.strerror or error}.", file=sys.stderr)
