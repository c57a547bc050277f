"""A unit of work: one command that runs on its own and continues where it was stopped."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """One command, such as `sparring train fat-digits --out runs/a --resume`."""

    name: str  # as printed, and as it is known to have been submitted by; no two units share one
    words: tuple[str, ...]  # what follows `sparring`

    @property
    def command(self) -> list[str]:
        """The command as a new process of this Python."""
        return [sys.executable, "-m", "sparring", *self.words]
