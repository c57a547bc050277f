"""The bar of the commands: `TrainingBar` on standard output, where a closed pipe is the command's to report."""

from __future__ import annotations

from rich.console import Console

from sparring.cli.console import Screen
from sparring.training.progress import TrainingBar


def command_bar(console: Console | None = None, *, title: str = "", lines: bool = True) -> TrainingBar:
    """The progress of a training on the console of a command."""
    return TrainingBar(console or Screen(), title=title, lines=lines)
