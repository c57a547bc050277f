"""What can be compared: run folders, and results that `Result.save` wrote of any model. Only reads files."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparring.errors import UserError
from sparring.report import gather
from sparring.report.evaluations import Measured, measured_of_file
from sparring.training import run_folder
from sparring.training.config import Config


@dataclass(frozen=True, eq=False)
class Entry:
    """A run, or a result of a model that no run made."""

    path: Path
    measured: Mapping[str, Measured]  # on test data, by how it was measured
    config: Config | None = None  # None: of a result
    recipe: str = ""
    history: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # of `settings_of`
    damaged: Sequence[str] = ()  # why evaluations of it cannot be read

    @property
    def finished(self) -> bool:
        """Whether a run has trained all its epochs; a result is what it is."""
        return self.config is None or len(self.history) >= self.config.epochs

    @property
    def stage(self) -> str:
        """'2 of 30 epochs'."""
        return f"{len(self.history)} of {self.config.epochs} epochs" if self.config else ""

    @property
    def best(self) -> Mapping[str, Any]:
        """The record of the best epoch on validation data, as training chooses it; empty without records."""
        chosen = max(self.history, key=lambda r: (r["pgd10"], r["natural"], -r["epoch"]), default=None)
        return chosen or {}


def open_run(folder: Path) -> Entry:
    """The run in a folder.

    Raises:
        UserError: its files are damaged.
    """
    found = gather.open_run(folder)
    evaluations = found.evaluations
    return Entry(
        folder, evaluations.measured, found.config, found.run.recipe, found.history, found.settings, evaluations.damaged
    )


def open_result(path: Path) -> Entry:
    """The result in a file.

    Raises:
        UserError: the file holds no result.
    """
    return Entry(path, measured_of_file(path))


def run_folders(path: Path) -> list[Path]:
    """The folder itself if it is a run, otherwise the runs in it."""
    if (path / run_folder.CONFIG).is_file():
        return [path]
    return sorted(config.parent for config in path.glob(f"*/{run_folder.CONFIG}")) if path.is_dir() else []


def expanded(paths: Sequence[Path]) -> list[Path]:
    """The paths, with patterns (runs/fat-*) replaced by what they match.

    Raises:
        UserError: a pattern matches nothing.
    """
    found: list[Path] = []
    for path in paths:
        if path.exists() or not glob.has_magic(str(path)):
            found.append(path)
            continue
        matching = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        if not matching:
            raise UserError(f"no file or folder matches {path}. Check the pattern.")
        found += matching
    return found


def is_result(path: Path) -> bool:
    """Whether a path is meant as a result: a file that ends in .json."""
    return path.is_file() and path.suffix == ".json"
