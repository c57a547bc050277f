"""Refuse what is not a regular file before it is opened: a FIFO hangs, and a device has no end."""

from __future__ import annotations

import stat
from pathlib import Path

from sparring.errors import UserError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def irregular(path: Path) -> str:
    """What a path leads to, where it is not a regular file: 'a FIFO'; "" for a regular file. Links are followed."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:  # a null byte in the name
        return "no possible name of a file"
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def require_regular(path: Path) -> None:
    """Refuse a path that does not lead to a regular file."""
    kind = irregular(path)
    if kind.startswith(("a ", "no")):
        raise UserError(f"{path} is {kind}, where a regular file is needed. Copy its content to a file and give that.")
    if kind:
        raise UserError(f"cannot read {path}: {kind}. Check the path and its permissions.")


def shown(text: str, most: int = 60) -> str:
    """A name from a file as it may stand in a message of one line: short, and without control characters."""
    short = text if len(text) <= most else f"{text[:most]}…"
    return short if short.isprintable() else ascii(short)
