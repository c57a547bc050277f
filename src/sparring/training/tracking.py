"""Curves for TensorBoard, beside the run's own records. A convenience: no run ends because they cannot be written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Board:
    """The events of a run, from an epoch on."""

    def __init__(self, folder: Path, epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not needed by the library

        self.folder = folder
        self.writer: SummaryWriter | None = None
        with self._trying():
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
        except OSError as error:
            self.writer = None
            print(f"note: no more events for TensorBoard in {self.folder}: {error.strerror or error}.", file=sys.stderr)
