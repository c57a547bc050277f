"""Arrays: .npz and MATLAB 5."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.files.corpus.cases import (
    EITHER,
    MIB,
    READ,
    REFUSED,
    Case,
    damaged,
    deflated,
    not_regular,
    raw_zip,
    written,
    zeros,
)


def npy(shape: tuple[int, ...], dtype: str, values: bytes = b"") -> bytes:
    head = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + values


def npz_cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 4, 4, 3), dtype=np.uint8), np.arange(20) % 2
    sound: dict[str, Any] = {"x_train": x, "y_train": y, "x_test": x[:4], "y_test": y[:4]}

    def saved(pack: Callable[..., None] = np.savez, **more: Any) -> bytes:
        buffer = io.BytesIO()
        pack(buffer, **{**sound, **more})
        return buffer.getvalue()

    def members(**parts: tuple[bytes, int, int]) -> bytes:
        return raw_zip([(f"{name}.npy", *part) for name, part in parts.items()])

    for kind, pack in (("npz", np.savez), ("npz packed", np.savez_compressed)):
        yield f"{kind} sound", READ, written("a.npz", saved(pack))
        yield from damaged(kind, "a.npz", saved(pack), 16)
    hidden = bytearray(saved())
    hidden[hidden.rindex(b"x_test.npy") - 18] += 46 + len("y_test.npy")  # the length of a name
    yield "a name that hides the next array", REFUSED, written("a.npz", bytes(hidden))
    y_part = (npy((20,), "<i8", y.tobytes()), len(npy((20,), "<i8")) + 160, 0)
    x_head = npy((3000 * 256, 64, 64), "|u1")
    packed = deflated(x_head) + zeros(3000)
    arrays = {key: npy(value.shape, value.dtype.str, value.tobytes()) for key, value in sound.items()}
    unused = members(
        **{key: (content, len(content), 0) for key, content in arrays.items()},
        unused=(packed, len(x_head) + 3000 * MIB, 8),
    )
    yield "3 GB of zeros that are not wanted", READ, written("a.npz", unused)
    yield (
        "3 GB of zeros",
        REFUSED,
        written("a.npz", members(x_train=(packed, len(x_head) + 3000 * MIB, 8), y_train=y_part)),
    )
    for what, (shape, dtype) in {
        "a shape beyond the file": ((10**12, 32, 32, 3), "|u1"),
        "a shape beyond numbers": ((2**62, 2**62), "|u1"),
        "a negative shape": ((-1, -3, 4), "|u1"),
        "a shape of words": (("a",), "|u1"),
        "a type of gigabytes": ((1,), "<U2000000000"),
        "objects": ((3,), "|O"),
        "a type of nothing": ((3,), "|q9"),
        "no images": ((0, 10**15, 4, 3), "|u1"),
    }.items():
        content = npy(shape, dtype, bytes(100))
        yield what, REFUSED, written("a.npz", members(x_train=(content, len(content), 0), y_train=y_part))
    nested = b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000
    yield "a header of brackets", REFUSED, written("a.npz", members(x_train=(nested, len(nested), 0), y_train=y_part))
    yield "newlines in keys", REFUSED, written("a.npz", raw_zip([("a\nb.npy", b"", 0, 0), ("c\x1b[2J.npy", b"", 0, 0)]))
    yield "names with ..", REFUSED, written("a.npz", raw_zip([("../x_train.npy", b"x", 1, 0)]))
    bzipped = io.BytesIO()
    with zipfile.ZipFile(bzipped, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("x_train.npy", npy((4, MIB), "|u1", bytes(4 * MIB)))
        archive.writestr("y_train.npy", npy((20,), "<i8", y.tobytes()))
    yield "bzip2", REFUSED, written("a.npz", bzipped.getvalue())
    yield "many members", REFUSED, written("a.npz", raw_zip([(f"{i}.npy", b"", 0, 0) for i in range(20_000)]))
    yield "a bare .npy", REFUSED, written("a.npz", npy((4,), "|u1", bytes(4)))
    yield "a pickle", REFUSED, written("a.npz", pickle.dumps([1]))
    yield from not_regular("a.npz")


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def mat_array(name: str, shape: tuple[int, ...], values: bytes, *, code: int = 9, stored: int = 2) -> bytes:
    head = element(6, struct.pack("<II", code, 0)) + element(5, struct.pack(f"<{len(shape)}i", *shape))
    return head + element(1, name.encode()) + element(stored, values)


def mat(*arrays: bytes, packed: bool = True) -> bytes:
    body = b""
    for array in arrays:
        plain = struct.pack("<II", 14, len(array)) + array
        body += struct.pack("<II", 15, len(zlib.compress(plain))) + zlib.compress(plain) if packed else plain
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + body


def mat_cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, 32 * 32 * 3 * 4, dtype=np.uint8).tobytes()
    x, y = mat_array("X", (32, 32, 3, 4), pixels), mat_array("y", (4, 1), b"\1\2\3\4")
    for packed in (True, False):
        kind = "packed" if packed else "plain"
        yield f"{kind} sound", READ, written("a.mat", mat(x, y, packed=packed))
        yield from damaged(f"mat {kind}", "a.mat", mat(x, y, packed=packed), 25, head=400)
    bomb = (
        struct.pack("<II", 14, 2**32 - 8)
        + mat_array("X", (32, 32, 3, 10**6), b"")[:-8]
        + struct.pack("<II", 2, 3_072_000_000)
    )
    stream = b"\x78\xda" + deflated(bomb) + zeros(3000)
    head = mat()
    yield "3 GB of zeros", REFUSED, written("a.mat", head + struct.pack("<II", 15, len(stream)) + stream)
    other = bomb.replace(b"X", b"Z", 1)
    stream = b"\x78\xda" + deflated(other) + zeros(3000)
    unused = head + struct.pack("<II", 15, len(stream)) + stream + mat(x, y)[128:]
    yield "3 GB that are not wanted", READ, written("a.mat", unused)
    long = b"\x78\xda" + deflated(struct.pack("<II", 14, 2**31) + x) + zeros(3000)
    yield (
        "an array with a tail of 3 GB",
        REFUSED,
        written("a.mat", head + struct.pack("<II", 15, len(long)) + long + mat(y)[128:]),
    )
    for what, array in {
        "a shape beyond the file": mat_array("X", (32, 32, 3, 73_257), b"abc"),
        "a shape beyond numbers": mat_array("X", (2**31 - 1,) * 20, b"abc"),
        "a negative shape": mat_array("X", (-32, 32, -3, 4), pixels),
        "40 dimensions": mat_array("X", (1,) * 40, b"a"),
        "a long name": mat_array("X" * 10_000, (1,), b"a"),
        "a cell": mat_array("X", (1, 1), b"", code=1),
        "a cell in a cell": mat_array("X", (1, 1), mat_array("X", (1, 1), b"", code=1), code=1, stored=14),
        "a structure": mat_array("X", (1, 1), b"", code=2),
        "sparse": mat_array("X", (2**30, 2**30), b"", code=5),
        "text": mat_array("X", (1, 3), b"abc", code=4, stored=16),
        "numbers of no type": mat_array("X", (4, 1), b"abcd", stored=99),
        "wide numbers": mat_array("X", (4, 1), bytes(32), stored=9),
        "a function": mat_array("X", (1, 1), b"", code=16),
    }.items():
        must = EITHER if what == "a long name" else REFUSED
        yield what, must, written("a.mat", mat(array, y))
    yield "a compressed element in itself", EITHER, written("a.mat", mat(mat(x)[128:], y))
    yield "many variables", REFUSED, written("a.mat", head + mat_empty() * 5000)
    yield "an element of 4 GB", REFUSED, written("a.mat", head + struct.pack("<II", 14, 2**32 - 1) + bytes(100))
    yield "X twice", REFUSED, written("a.mat", mat(x, x, y))
    yield "MATLAB 7.3", REFUSED, written("a.mat", b"MATLAB 7.3 MAT-file".ljust(512) + b"\x89HDF\r\n\x1a\n")
    yield "MATLAB 4", REFUSED, written("a.mat", struct.pack("<IIIII", 0, 4, 1, 0, 2) + b"X\0" + bytes(200))
    yield from not_regular("a.mat")


def mat_empty() -> bytes:
    array = mat_array("Z", (0,), b"")
    return struct.pack("<II", 14, len(array)) + array
