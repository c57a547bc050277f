"""The arrays of an .npz file, one by one: read, or mapped where they are, or unpacked once to the cache.

What a header says of an array must fit the bytes that the file has for it, before any is allocated. np.savez stores
arrays uncompressed, so their bytes can be mapped in place. Compressed ones, and a file without test images, which is
split, are unpacked row by row. Must not know what the images are for.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.data.cache import entry, mapped, new_array, stamp
from sparring.errors import UserError
from sparring.files.regular import shown

_LOCAL = 30  # bytes of a zip member's own header, before its name
_AT_ONCE = 2**26  # bytes that are unpacked at once
_LARGE, _RATIO = 2**30, 100  # bytes of an array from which it may unpack at most 100-fold: images do 20-fold at most
_DEFLATE = 1_100  # times that an array may unpack at all: deflate's limit is 1,032
_ENTRIES = 10_000  # arrays in a file: a data set has four


@dataclass(frozen=True)
class Member:
    """One array of the file: what its header says, and where its values begin if they are stored as they are."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    fortran: bool
    begins: int | None  # byte of the file; None where it is compressed


def member_keys(path: Path) -> list[str]:
    """The keys of the arrays; what is not an .npz file is refused."""
    with _readable(path):
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not a .npz file. Write it with np.savez(path, x_train=..., y_train=...).")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if len(names) > _ENTRIES:
            raise ValueError(f"{len(names)} arrays")
        if not all(name.isprintable() for name in names):  # a damaged length can hide the entries that follow
            raise ValueError("a name with control characters")
        return list(dict.fromkeys(name.removesuffix(".npy") for name in names if name.endswith(".npy")))


def image_bytes(path: Path) -> int:
    """The bytes of the images in the file, unpacked; 0 for what is not a readable .npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(info.file_size for info in archive.infolist() if info.filename in ("x_train.npy", "x_test.npy"))
    except Exception:  # a damaged archive can fail anywhere
        return 0


def read_array(path: Path, key: str) -> NDArray[Any]:
    """One array, in memory."""
    with _readable(path), zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{key}.npy")
        with archive.open(info) as file:
            member = _member(path, key, info, file)
            data = bytearray(math.prod(member.shape) * member.dtype.itemsize)
            view, place = memoryview(data), 0
            while chunk := file.read(_AT_ONCE // 16):  # to the end, so that the CRC-32 is compared
                view[place : place + len(chunk)] = chunk
                place += len(chunk)
        order: Literal["F", "C"] = "F" if member.fortran else "C"
        if not data:
            return np.empty(member.shape, member.dtype)
        return np.frombuffer(data, member.dtype).reshape(member.shape, order=order)


def read_member(path: Path, key: str) -> Member:
    """The header of one array."""
    with _readable(path), zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{key}.npy")
        with archive.open(info) as file:
            member = _member(path, key, info, file)
            values = file.tell()
        if info.compress_type != zipfile.ZIP_STORED:
            return member
        with path.open("rb") as whole:
            whole.seek(info.header_offset + 26)
            name, more = struct.unpack("<HH", whole.read(4))
        return replace(member, begins=info.header_offset + _LOCAL + name + more + values)


def _member(path: Path, key: str, info: zipfile.ZipInfo, file: IO[bytes]) -> Member:
    """What the header of an array says, where it fits the bytes that follow."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{shown(key)} is compressed as np.savez does not")
    packed, size = info.compress_size, info.file_size
    stored = info.compress_type == zipfile.ZIP_STORED
    if size > packed * (1 if stored else _DEFLATE) or (size > _LARGE and size > packed * _RATIO):
        raise UserError(
            f"{path}: {shown(key)} unpacks from {packed:,} to {size:,} bytes, as no images do. "
            "If they are so, write them uncompressed: np.savez."
        )
    shape, fortran, dtype = _header(file)
    if dtype.hasobject:
        raise UserError(
            f"{path} holds pickled objects, which are never loaded. "
            "Save plain arrays with np.savez: uint8 images and integer labels."
        )
    if math.prod(shape) * dtype.itemsize != size - file.tell() or any(length < 0 for length in shape):
        raise ValueError(f"the shape of {shown(key)} does not fit its {size} bytes")
    return Member(key, shape, dtype, fortran, None)


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
    except Exception as error:  # a damaged archive can fail anywhere
        reason = shown(str(error) or type(error).__name__, 120)
        raise UserError(f"{path} cannot be read as .npz ({reason}). Write it again with np.savez.") from None
