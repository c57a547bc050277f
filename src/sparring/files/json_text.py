"""JSON of our own files, read with bounds: what cannot be read and what is damaged are two different errors.

A read error says nothing about the file's content, so it never advises to replace or delete anything. What a value must
look like is declared with `schema`. Knows no file by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.errors import UserError
from sparring.files.regular import irregular, require_regular
from sparring.files.schema import Check

MOST = 64 * 2**20  # bytes: a result with the verdicts of 10,000 images has 0.5 MB
DEPTH = 32  # levels; our own files have at most 6
FIX = "Restore it from a copy."
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells half of a character: alone, it cannot be written again


class Unreadable(UserError):
    """The operating system refused to read a file: its content may be whole."""


class Damaged(UserError):
    """A file was read, and is not what it should be."""


def read_bytes(path: Path, *, most: int = MOST, fix: str = FIX) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        Unreadable: there is no such file, or reading it failed.
        Damaged: it is longer than that.
    """
    if irregular(path):
        try:
            require_regular(path)
        except UserError as error:
            raise Unreadable(str(error)) from None
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unreadable(f"cannot read {path}: {reason}. Check the disk and its permissions, and try again.") from None
    if len(content) > most:
        raise Damaged(f"{path} is damaged: it is longer than {most:,} bytes. {fix}")
    return content


def read_text(path: Path, *, most: int = MOST, errors: str = "strict", fix: str = FIX) -> str:
    """The text of a regular file; see `read_bytes`. What is not UTF-8 is damaged, unless `errors` says otherwise."""
    try:
        return read_bytes(path, most=most, fix=fix).decode("utf-8", errors)
    except UnicodeDecodeError:
        raise Damaged(f"{path} is damaged: it is not UTF-8. {fix}") from None


def parse(text: str, name: object, check: Check | None = None, *, fix: str = FIX) -> Any:
    """The value that a JSON text holds.

    Args:
        name: how an error calls the text, as the path of its file.
        check: what the value must look like.
        fix: how an error about damage ends: what the user can do.

    Raises:
        Damaged: the text is not JSON, is nested deeper than `DEPTH`, or does not pass the check.
    """
    try:
        value = json.loads(text)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Damaged(f"{name} is damaged: it holds half a character. {fix}") from None
    except (ValueError, RecursionError):
        raise Damaged(f"{name} is damaged: it is not JSON. {fix}") from None
    if deeper_than(value, DEPTH):
        raise Damaged(f"{name} is damaged: it is nested deeper than {DEPTH} levels. {fix}")
    if check is not None and (wrong := check(value)):
        raise Damaged(f"{name} is damaged: {wrong}. {fix}")
    return value


def read_json(path: Path, check: Check | None = None, *, most: int = MOST, fix: str = FIX) -> Any:
    """The value in a JSON file; see `read_text` and `parse` for what is refused."""
    return parse(read_text(path, most=most, fix=fix), path, check, fix=fix)


def deeper_than(value: object, levels: int) -> bool:
    """Whether lists and dicts are nested in more than `levels` levels."""
    layer = [value]
    for _ in range(levels):
        layer = [inner for outer in layer for inner in _inside(outer)]
        if not layer:
            return False
    return any(isinstance(item, dict | list) for item in layer)


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else ()
