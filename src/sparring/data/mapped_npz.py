"""An .npz file that is larger than memory: its arrays are mapped where they are, or unpacked once to the cache.

np.savez stores arrays uncompressed, so their bytes can be mapped in place. Compressed ones, and a file without test
images, which is split, are unpacked row by row. Must not know what the images are for.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.data.cache import entry, mapped, new_array, stamp
from sparring.errors import UserError

_LOCAL = 30  # bytes of a zip member's own header, before its name
_AT_ONCE = 2**26  # bytes that are unpacked at once
_ERRORS = (OSError, EOFError, ValueError, KeyError, struct.error, zipfile.BadZipFile, zlib.error, NotImplementedError)


@dataclass(frozen=True)
class Member:
    """One array of the file: what its header says, and where its values begin if they are stored as they are."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    fortran: bool
    begins: int | None  # byte of the file; None where it is compressed


def image_bytes(path: Path) -> int:
    """The bytes of the images in the file, unpacked; 0 for what is not a readable .npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(info.file_size for info in archive.infolist() if info.filename in ("x_train.npy", "x_test.npy"))
    except _ERRORS:
        return 0


def read_member(path: Path, key: str) -> Member:
    """The header of one array."""
    with _readable(path), zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{key}.npy")
        with archive.open(info) as file:
            shape, fortran, dtype = _header(file)
            values = file.tell()
        begins = None
        if info.compress_type == zipfile.ZIP_STORED:
            with path.open("rb") as whole:
                whole.seek(info.header_offset + 26)
                name, more = struct.unpack("<HH", whole.read(4))
            begins = info.header_offset + _LOCAL + name + more + values
        return Member(key, shape, dtype, fortran, begins)


def map_images(path: Path, member: Member) -> Tensor:
    """The images of an uncompressed array as an NCHW tensor that reads the file when it is used."""
    with _readable(path):
        shape = (*member.shape, 1) if len(member.shape) == 3 else member.shape
        x = np.memmap(path, dtype=np.uint8, mode="c", offset=member.begins or 0, shape=shape)
        return _channels_first(torch.from_numpy(x))


def unpack_images(path: Path, targets: dict[str, dict[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
    """Arrays of some rows each, as NCHW tensors on files of the cache.

    Args:
        targets: for every array of the file, the rows of it that each new array has, in order.
    """

    def write(folder: Path) -> None:
        with _readable(path), zipfile.ZipFile(path) as archive:
            for key, parts in targets.items():
                with archive.open(f"{key}.npy") as file:
                    _unpack(file, folder, parts)

    members = {
        name: [key, rows.tolist()[:1], len(rows)] for key, parts in targets.items() for name, rows in parts.items()
    }
    folder = entry(stamp("npz", 1, members, files=[path.resolve()]), write)
    return {name: mapped(folder / f"{name}.npy") for parts in targets.values() for name in parts}


def _unpack(file: IO[bytes], folder: Path, parts: dict[str, NDArray[np.int64]]) -> None:
    shape, _, _ = _header(file)
    shape = (*shape, 1) if len(shape) == 3 else shape
    step = max(1, _AT_ONCE // int(np.prod(shape[1:])))
    outs: dict[str, NDArray[np.uint8]] = {}
    places = {name: np.full(shape[0], -1, dtype=np.int64) for name in parts}
    for name, rows in parts.items():
        places[name][rows] = np.arange(len(rows))
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        data = file.read(count * int(np.prod(shape[1:])))
        block = _channels_first(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, *shape[1:])).numpy()
        for name, rows in parts.items():
            if name not in outs:
                outs[name] = new_array(folder / f"{name}.npy", (len(rows), *block.shape[1:]))
            there = places[name][first : first + count]
            outs[name][there[there >= 0]] = block[there >= 0]


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2) if x.shape[3] in (1, 3, 4) else x


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except _ERRORS as error:
        raise UserError(f"{path} cannot be read as .npz ({error}). Write it again with np.savez.") from None
