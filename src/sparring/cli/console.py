"""The console that commands print to; its reader may close the pipe (`sparring recipes | head`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

WIDE = 10_000  # columns of a console that no table reaches: output in a file is not wrapped


class Screen(Console):
    """rich's console without markup, so that a [ in a path is printed as it is.

    A closed pipe raises BrokenPipeError, as it does in `print`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, **options})

    def on_broken_pipe(self) -> None:
        """Raise, where rich would exit with code 1."""
        raise BrokenPipeError


def let_go() -> None:
    """Redirect standard output to nowhere: flushing the buffer at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def silent_unless(speaks: bool) -> Iterator[None]:
    """Drop what a block prints, unless this process is the one that speaks for all."""
    if speaks:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield
