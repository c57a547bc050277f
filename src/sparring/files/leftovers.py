"""Temporary files that a killed process left behind: which are safe to remove, and their removal.

`training.checkpoint.replacing` writes NAME by way of .NAME.PID.tmp beside it. A process that is killed in between
leaves that file, and nobody renames it any more. A command that writes NAME removes it when it starts, once no process
can be at it any more. The PID alone does not say so: on a disk that hosts or containers share it may be a process of
another one, so that a file goes only where this host has no such process and nothing was written for a minute; and a
number may have been given to another process since, so that after a day without a write it goes in any case.

Must not know which files a command writes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

STALE = 24 * 3600.0  # seconds without a write after which no process is still at it: a file takes seconds
FRESH = 60.0  # seconds in which a process that is not seen here may still be at it: from the last write to the rename
_PATTERN = re.compile(r"\.(?P<name>.+)\.(?P<pid>[1-9]\d{0,9})\.tmp", re.DOTALL)


def target(path: Path) -> tuple[str, int] | None:
    """(NAME, PID) of a temporary file; None of any other file."""
    found = _PATTERN.fullmatch(path.name)
    return (found["name"], int(found["pid"])) if found else None


def sweep(folder: Path, ours: Callable[[str], bool], *, alone: bool = False) -> list[Path]:
    """Remove the leftovers in a folder, not in those below it, and return them.

    Args:
        ours: whether the caller writes files of this NAME; other temporary files are left alone.
        alone: the caller holds a lock that keeps all other writers of these files out, so that any leftover is dead.
    """
    removed = []
    for path, pid in _candidates(folder, ours):
        if alone or _dead(path, pid):
            with suppress(OSError):  # gone, or not ours to remove
                path.unlink()
                removed.append(path)
    return removed


def _candidates(folder: Path, ours: Callable[[str], bool]) -> Iterable[tuple[Path, int]]:
    try:
        entries = [Path(entry.path) for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except OSError:  # no such folder, or one that cannot be listed
        return
    for path in sorted(entries):
        found = target(path)
        if found and ours(found[0]):
            yield path, found[1]


def _dead(path: Path, pid: int) -> bool:
    """Whether no process can still be writing a file."""
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return False
    if pid == os.getpid():
        return False  # this process, in another thread
    return age > (STALE if _alive(pid) else FRESH)


def _alive(pid: int) -> bool:
    """Whether this host has a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # not permitted: it is another user's
        return True
    return True
