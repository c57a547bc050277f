"""Read files by their base names from a folder or a tar archive (plain, .gz or .bz2) into memory.

Nothing is unpacked to disk, so no member can escape its folder. Links in an archive are not followed. An archive is
read in one pass, and what it unpacks to is bounded: in one file, in headers and in all. Must not know what the files
mean.
"""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from sparring.errors import UserError
from sparring.files.regular import irregular, require_regular, shown

_LARGEST = 64 * 2**20  # bytes of one file; the largest of CIFAR-10 has 31 MB
_WHOLE = 512 * 2**20  # bytes of an archive, unpacked, wanted or not: those of CIFAR have 186 MB
_MEMBERS = 10_000  # files and headers of an archive: those of CIFAR have 10
_HEADER = 2**14  # bytes of a header with a long name
_BLOCK = 512  # bytes: tar's unit
_CHUNK = 2**20  # bytes that are skipped at once
_FILE, _LONG_NAME, _PAX = (b"0", b"\0", b"7"), b"L", b"x"  # types of members
_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders: no bytes follow, whatever the header says


class _Broken(Exception):
    """The archive is not one; the message says where."""


def read_named(path: Path, wanted: Collection[str], *, largest: int | None = None) -> dict[str, bytes]:
    """The wanted files that exist: in the folder or its subfolders, or anywhere in the archive.

    Args:
        largest: bytes that one file may have; 64 MiB unless given.
    """
    largest = _LARGEST if largest is None else largest
    if path.is_dir():
        return _from_folder(path, wanted, largest)
    if path.exists():
        require_regular(path)
        return _from_tar(path, wanted, largest)
    raise UserError(f"no such file or folder: {path}. Give the archive you downloaded, or the folder it unpacks to.")


def _from_folder(folder: Path, wanted: Collection[str], largest: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        for place in (folder, *sorted(child for child in folder.iterdir() if child.is_dir())):
            for name in wanted:
                if name not in found and not irregular(place / name):
                    with (place / name).open("rb") as file:
                        found[name] = _read(file, place / name, largest)
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error}. Check its permissions.") from None
    return found


def _from_tar(path: Path, wanted: Collection[str], largest: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with _unpacked(path) as file:
            for name, size, is_file in _members(file):
                inside = PurePosixPath(name)
                if not is_file or inside.is_absolute() or ".." in inside.parts or inside.name not in wanted:
                    _skip(file, size)
                    continue
                if inside.name in found:
                    raise UserError(f"{path} holds {inside.name} twice. Give the official archive.")
                if size > largest:
                    raise _too_large(path / inside.name, largest)
                found[inside.name] = _exactly(file, size)
            file.read(_CHUNK)  # the padding at the end, so that a checksum of the compression is compared
    except (_Broken, EOFError, OSError, zlib.error) as error:
        raise UserError(
            f"{path} is not a complete tar archive ({shown(str(error), 120)}). If its download was interrupted, "
            "download it again."
        ) from None
    return found


def _unpacked(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        head = file.read(3)
    if head[:2] == b"\x1f\x8b":
        return gzip.open(path)  # type: ignore[return-value]
    return bz2.open(path) if head == b"BZh" else path.open("rb")


def _members(file: IO[bytes]) -> Iterator[tuple[str, int, bool]]:
    """(name, bytes, whether it is a regular file) of each member; the caller reads or skips the bytes."""
    name, whole = "", 0
    for number in range(_MEMBERS):
        block = file.read(_BLOCK)
        if number and (not block or not block.strip(b"\0")):
            return
        kind = block[156:157]
        size = _checked(block) * (kind not in _EMPTY)
        padded = -(-size // _BLOCK) * _BLOCK
        whole += _BLOCK + padded
        if whole > _WHOLE:
            raise _Broken(f"it unpacks to more than {_WHOLE // 2**20} MiB")
        if kind in (_LONG_NAME, _PAX):
            if size > _HEADER:
                raise _Broken(f"a header of {size} bytes")
            data = _exactly(file, size)
            name = _text(data) if kind == _LONG_NAME else _pax_path(data) or name
        else:
            yield name or _own_name(block), size, kind in _FILE
            name = ""
        _skip(file, padded - size)
    raise _Broken(f"more than {_MEMBERS} members")


def _checked(block: bytes) -> int:
    """The size in a member's header, where its checksum is right."""
    if len(block) < _BLOCK:
        raise _Broken("it ends early")
    expected = sum(block[:148]) + sum(block[156:]) + 8 * 32
    size = block[124:136].strip(b" \0")
    digits = block[148:156].strip(b" \0")
    if not all(set(part) <= set(b"01234567") for part in (size, digits)) or int(digits or b"0", 8) != expected:
        raise _Broken("a header that is not tar's")
    return int(size or b"0", 8)


def _own_name(block: bytes) -> str:
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{_text(block[:100])}" if prefix else _text(block[:100])


def _pax_path(data: bytes) -> str:
    """The path of a pax header, lines of 'LENGTH KEY=VALUE'; "" where it has none."""
    for line in data.split(b"\n"):
        _, _, text = line.partition(b" ")
        if text.startswith(b"path="):
            return _text(text.removeprefix(b"path="))
    return ""


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")


def _exactly(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise _Broken("it ends early")
    return data


def _skip(file: IO[bytes], count: int) -> None:
    while count:
        count -= len(_exactly(file, min(_CHUNK, count)))


def _read(file: IO[bytes], where: Path, largest: int) -> bytes:
    data = file.read(largest + 1)
    if len(data) > largest:
        raise _too_large(where, largest)
    return data


def _too_large(where: Path, largest: int) -> UserError:
    return UserError(
        f"{where} is larger than {largest // 2**20} MiB, the limit for one file. Give the official archive."
    )
