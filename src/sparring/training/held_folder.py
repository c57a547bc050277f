"""A folder that one process holds for itself: locked against others, and noticed when it is no longer the same folder.

The lock is the operating system's, on the folder itself: it ends with the process, however that ends. On file systems
without locks there is none. Knows nothing of what is in the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparring.errors import RunFailed, UserError

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.EBADF)


class InUse(UserError):
    """Another process holds the folder."""


@dataclass(frozen=True)
class Held:
    """A folder that this process holds."""

    folder: Path
    descriptor: int

    def check(self) -> None:
        """Refuse to write on where the path leads to another folder, or to none: it was removed or replaced."""
        try:
            here = self.folder.stat()
        except OSError:
            here = None
        held = os.fstat(self.descriptor)
        if here is None or (here.st_dev, here.st_ino) != (held.st_dev, held.st_ino):
            raise RunFailed(
                f"{self.folder} was {'removed' if here is None else 'replaced'} while this run was writing to it. "
                "Nothing more is written. Start again, in a folder that nothing else writes to: --out."
            )


@contextmanager
def claimed(folder: Path, *, by: str = "training process") -> Iterator[Held]:
    """Create the folder and lock it against other processes (what they are: `by`) for the time of the block."""
    make(folder)
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot open the folder {folder}: {error.strerror}. Check its permissions.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InUse(f"{folder} is in use by another {by}. Wait for it, or stop it.") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield Held(folder.absolute(), descriptor)
    finally:
        os.close(descriptor)


def make(folder: Path) -> None:
    """Create a folder, if it is not there."""
    if str(folder) != str(folder).encode("utf-8", "replace").decode():
        raise UserError(f"the name of {folder} is not UTF-8, which checkpoints need. Choose another with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}. Choose another with --out.") from None
