"""Read files by their base names from a folder or a tar archive into memory.

Nothing is unpacked to disk, so no member can escape its folder. Links in an archive are not followed, and a member is
read only up to a limit. Must not know what the files mean.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import IO

from sparring.errors import UserError

_LARGEST = 64 * 2**20  # bytes; the largest file of CIFAR-10 has 31 MB


def read_named(path: Path, wanted: Collection[str], *, largest: int | None = None) -> dict[str, bytes]:
    """The wanted files that exist: in the folder or its subfolders, or anywhere in the archive.

    Args:
        largest: bytes that one file may have; 64 MiB unless given.
    """
    largest = _LARGEST if largest is None else largest
    if path.is_dir():
        return _from_folder(path, wanted, largest)
    if path.is_file():
        return _from_tar(path, wanted, largest)
    raise UserError(f"no such file or folder: {path}. Give the archive you downloaded, or the folder it unpacks to.")


def _from_folder(folder: Path, wanted: Collection[str], largest: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        for place in (folder, *sorted(child for child in folder.iterdir() if child.is_dir())):
            for name in wanted:
                if name not in found and (place / name).is_file():
                    with (place / name).open("rb") as file:
                        found[name] = _read(file, place / name, largest)
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error}. Check its permissions.") from None
    return found


def _from_tar(path: Path, wanted: Collection[str], largest: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:  # one pass: seeking back in a compressed file means starting over
            for member in archive:
                inside = PurePosixPath(member.name)
                if not member.isreg() or inside.is_absolute() or ".." in inside.parts or inside.name not in wanted:
                    continue
                if inside.name in found:
                    raise UserError(f"{path} holds {inside.name} twice. Give the official archive.")
                file = archive.extractfile(member)
                if file is not None:
                    found[inside.name] = _read(file, path / inside, largest)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UserError(
            f"{path} is not a complete tar archive ({error}). If its download was interrupted, download it again."
        ) from None
    return found


def _read(file: IO[bytes], where: Path, largest: int) -> bytes:
    data = file.read(largest + 1)
    if len(data) > largest:
        raise UserError(
            f"{where} is larger than {largest // 2**20} MiB, the limit for one file. Give the official archive."
        )
    return data
