"""Where a command prints to: a console whose reader may go away (`sparring recipes | head`)."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


class Screen(Console):
    """rich's console, for which a [ in a path is a letter and no markup.

    A reader that has gone raises BrokenPipeError, as it does in `print`, and does not end Python.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, **options})

    def on_broken_pipe(self) -> None:
        """What rich does instead is leave with 1."""
        raise BrokenPipeError


def let_go() -> None:
    """Print to nowhere from now on: what is still buffered would fail once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
