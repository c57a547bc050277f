"""Errors that end in the fix.

`UserError` is what the caller can fix: the command line prints it as one line and exits 2. `RunFailed` is a run that
failed through no fault of the call (a loss that is not finite): one line, exit 1; `Cancelled` by Ctrl-C: exit 130.
Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the caller can fix. The message says what was given, what is allowed and what to do."""

    elsewhere: bool | None = None  # of a failure that all processes share: whether another one reports it

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(r"\s*\n\s*", " ", message))  # one line, also where an array is quoted


class RunFailed(RuntimeError):
    """The run failed although the call was correct."""

    elsewhere: bool | None = None  # of a failure that all processes share: whether another one reports it


class Cancelled(RunFailed):
    """The user pressed Ctrl-C."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the nearest known name, or an empty string."""
    nearest = difflib.get_close_matches(given.lower(), list(known), n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def unknown(kind: str, given: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not a known one."""
    names = sorted(known)
    return UserError(f"unknown {kind} {given!r}.{did_you_mean(given, names)} Known: {', '.join(names)}.")
