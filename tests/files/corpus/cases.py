"""What the files of every format share: damage, bombs, and paths that are not regular files."""

from __future__ import annotations

import os
import random
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

READ, REFUSED, EITHER = "read", "refused", "either"
MIB = 2**20
Case = tuple[str, str, Callable[[Path], Path]]  # (name, what must happen, writes the file into a folder)


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def damaged(kind: str, name: str, whole: bytes, count: int, head: int = 3000) -> Iterator[Case]:
    """Copies of a sound file with a few bytes changed, mostly near its start, or without their end."""
    rng = random.Random(kind)
    for number in range(count):
        content = bytearray(whole)
        if number % 5 == 4:
            del content[rng.randrange(len(content)) :]
        for _ in range(rng.randrange(1, 5) if number % 5 < 4 else 0):
            content[rng.randrange(min(len(content), head) if rng.random() < 0.7 else len(content))] = rng.randrange(256)
        yield f"{kind} damaged {number}", EITHER, written(name, bytes(content))


def zeros(mebibytes: int) -> bytes:
    """Deflated zeros, about 1 kB per MiB, to be placed between other parts of a stream that were flushed."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)) * mebibytes


def deflated(content: bytes, *, last: bool = False) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(content) + packer.flush(zlib.Z_FINISH if last else zlib.Z_FULL_FLUSH)


def raw_zip(members: list[tuple[str, bytes, int, int]]) -> bytes:
    """A zip archive of (name, packed bytes, claimed size, method); the checksums of packed members are wrong."""
    body, directory, place = [], [], 0
    for name, packed, size, method in members:
        crc = 0 if method else zlib.crc32(packed)
        common = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 0, crc, len(packed), size, len(name.encode()), 0)
        entry = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, place)
        directory.append(entry + name.encode())
        body.append(b"PK\3\4" + common + name.encode() + packed)
        place += len(body[-1])
    listed, count = b"".join(directory), len(members)
    return b"".join([*body, listed, b"PK\5\6", struct.pack("<HHHHIIH", 0, 0, count, count, len(listed), place, 0)])


def fifo(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        os.mkfifo(folder / name)
        return folder / name

    return write


def loop(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).symlink_to("other")
        (folder / "other").symlink_to(name)
        return folder / name

    return write


def device(name: str) -> Callable[[Path], Path]:
    return link(name, "/dev/zero")


def unreadable(name: str) -> Callable[[Path], Path]:
    """A regular file that opens, and whose every read fails: the memory of this process, at address 0."""
    return link(name, "/proc/self/mem")


def forbidden(name: str) -> Callable[[Path], Path]:
    """A regular file that may not be opened for reading, not even by root, whom permissions do not stop."""
    return link(name, "/proc/sys/vm/drop_caches")


def link(name: str, target: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).symlink_to(target)
        return folder / name

    return write


def a_socket(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        here = os.open(".", os.O_RDONLY)
        os.chdir(folder)  # the path of a socket has at most 107 bytes
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(name)
        finally:
            os.fchdir(here)
            os.close(here)
        return folder / name

    return write


def not_regular(name: str) -> Iterator[Case]:
    yield "a FIFO", REFUSED, fifo(name)
    yield "a loop of links", REFUSED, loop(name)
    yield "a device", REFUSED, device(name)
    yield "a socket", REFUSED, a_socket(name)
    yield "an empty file", REFUSED, written(name, b"")
    yield "a file that cannot be read", REFUSED, unreadable(name)
    yield "a file that must not be opened", REFUSED, forbidden(name)


class Asks:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call
