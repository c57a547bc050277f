"""Read arrays of numbers by name from a MATLAB 5 .mat file, as SVHN's: uncompressed elements, or zlib's.

Of every variable the header is read first: name, type and shape. Only wanted ones are read further, and only where they
fit in the bytes that the caller allows, so that a small file cannot unpack to gigabytes. Cells, structures, sparse and
complex arrays are refused. Must not know what the arrays are for.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from sparring.errors import UserError
from sparring.files.regular import require_regular, shown

_MATRIX, _COMPRESSED = 14, 15  # types of an element
_TYPES = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}  # of stored numbers
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}  # of arrays
_COMPLEX = 0x0800  # flag of an array
_HEADER = 128  # bytes at the start of the file
_NAME = 64  # bytes of a variable's name: MATLAB's limit is 63
_DIMENSIONS = 32  # of an array: NumPy's limit was 32 for long; SVHN's has 4
_ELEMENTS = 1_000  # variables of a file: SVHN's has 2
_CHUNK = 2**18  # bytes that are read or unpacked at once


class _Damaged(Exception):
    """The file is not as its format says; the message says where."""


_Read = Callable[[int], bytes]  # exactly n bytes, or _Damaged


@dataclass(frozen=True)
class _Variable:
    name: str
    kind: str  # NumPy's code
    shape: tuple[int, ...]


def read_mat(path: Path, wanted: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """The wanted arrays that the file has.

    Args:
        wanted: the bytes that each array may take.
    """
    require_regular(path)
    try:
        with path.open("rb") as file:
            return _read(file, path.stat().st_size, path, wanted)
    except (OSError, _Damaged, zlib.error, struct.error, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path} cannot be read ({shown(str(error), 120)}). If the download broke off, repeat it."
        ) from None


def _read(file: IO[bytes], size: int, path: Path, wanted: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    head = file.read(_HEADER)
    if head[:8] == b"\x89HDF\r\n\x1a\n" or head[:19] == b"MATLAB 7.3 MAT-file":
        raise _Damaged("a MATLAB 7.3 file; save it with -v7")
    if len(head) < _HEADER or head[126:] not in (b"IM", b"MI"):
        raise _Damaged("not a MATLAB 5 file")
    order = "<" if head[126:] == b"IM" else ">"
    found: dict[str, NDArray[Any]] = {}
    place, elements = _HEADER, 0
    while place < size:
        elements += 1
        if elements > _ELEMENTS:
            raise _Damaged(f"more than {_ELEMENTS} variables")
        file.seek(place)
        kind, count = struct.unpack(f"{order}II", _exactly(file)(8))
        place += 8 + count
        if place > size:
            raise _Damaged(f"it ends after {size:,} of {place:,} bytes")
        if kind == _COMPRESSED:
            unpack = _Inflated(file, count)
            inner, _ = struct.unpack(f"{order}II", unpack.read(8))
            array = _matrix(unpack.read, order, path, wanted) if inner == _MATRIX else None
            if array is not None:
                unpack.end()
        else:
            array = _matrix(_exactly(file), order, path, wanted) if kind == _MATRIX else None
        if array is not None:
            name, values = array
            if name in found:
                raise _Damaged(f"{name} twice")
            found[name] = values
        if found.keys() == wanted.keys():
            break
    return found


def _matrix(read: _Read, order: str, path: Path, wanted: Mapping[str, int]) -> tuple[str, NDArray[Any]] | None:
    """A wanted variable and its numbers; None for another variable, of which only the header is read."""
    variable = _header(read, order)
    if variable is None or variable.name not in wanted:
        return None
    if variable.kind not in _CLASSES.values():
        raise _Damaged(f"{variable.name} is not an array of real numbers")
    most, bytes_ = wanted[variable.name], math.prod(variable.shape) * np.dtype(variable.kind).itemsize
    if bytes_ > most:
        shape = "x".join(str(length) for length in variable.shape)
        raise UserError(
            f"{path}: {variable.name} is {shape} and takes {bytes_:,} bytes, more than the {most:,} of the official "
            "file. Get that file."
        )
    kind, count, small = _tag(read, order)
    if kind not in _TYPES:
        raise _Damaged(f"{variable.name} has numbers of type {kind}")
    stored = np.dtype(f"{order}{_TYPES[kind]}")  # MATLAB stores doubles that are small integers as bytes
    if count != math.prod(variable.shape) * stored.itemsize or stored.itemsize > np.dtype(variable.kind).itemsize:
        raise _Damaged(f"the shape of {variable.name} does not fit its {count} bytes")
    data = bytearray(small[:count])
    while len(data) < count:
        data += read(min(_CHUNK, count - len(data)))
    values = np.frombuffer(data, dtype=stored).astype(variable.kind, copy=False)
    return variable.name, values.reshape(variable.shape, order="F")


def _header(read: _Read, order: str) -> _Variable | None:
    """Flags, shape and name of a variable; None where it is not an array of numbers."""
    flags = _element(read, order, (6,), 8)
    (word,) = struct.unpack(f"{order}I", flags[:4])
    shape_bytes = _element(read, order, (5,), 4 * _DIMENSIONS)
    shape = struct.unpack(f"{order}{len(shape_bytes) // 4}i", shape_bytes[: len(shape_bytes) // 4 * 4])
    name = _element(read, order, (1, 2), _NAME).decode("latin-1")
    if any(length < 0 for length in shape):
        raise _Damaged("a negative length")
    kind = "" if word & _COMPLEX else _CLASSES.get(word & 0xFF, "")
    return _Variable(name, kind, shape)


def _element(read: _Read, order: str, kinds: tuple[int, ...], most: int) -> bytes:
    """A short element of one of these types, without its padding."""
    kind, count, small = _tag(read, order)
    if kind not in kinds or count > most:
        raise _Damaged(f"an element of type {kind} and {count} bytes in a header")
    if small or not count:
        return small[:count]
    return read(-(-count // 8) * 8)[:count]


def _tag(read: _Read, order: str) -> tuple[int, int, bytes]:
    """The type and length of an element; at most four bytes of content stand in the tag itself."""
    head = read(8)
    first, second = struct.unpack(f"{order}II", head)
    if first >> 16:
        if first >> 16 > 4:
            raise _Damaged("a short element that is not short")
        return first & 0xFFFF, first >> 16, head[4:]
    return first, second, b""


def _exactly(file: IO[bytes]) -> _Read:
    def read(count: int) -> bytes:
        data = file.read(count)
        if len(data) != count:
            raise _Damaged("it ends early")
        return data

    return read


class _Inflated:
    """A zlib stream inside a file, unpacked as far as it is read."""

    def __init__(self, file: IO[bytes], count: int) -> None:
        self._file, self._left, self._stream = file, count, zlib.decompressobj()

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        parts: list[bytes] = []
        while count:
            part = self._stream.decompress(self._more(), count)
            if not part and (self._stream.eof or not (self._left or self._stream.unconsumed_tail)):
                raise _Damaged("a compressed variable ends early")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def end(self) -> None:
        """Read the rest, a padding, so that zlib compares its checksum."""
        for _ in range(4):
            if self._stream.eof:
                return
            if len(self._stream.decompress(self._more(), 8)) > 7:
                break
        raise _Damaged("a compressed variable does not end with its array")

    def _more(self) -> bytes:
        if self._stream.unconsumed_tail:
            return self._stream.unconsumed_tail
        data = self._file.read(min(_CHUNK, self._left))
        self._left -= len(data)
        if not data and self._left:
            raise _Damaged("it ends early")
        return data
