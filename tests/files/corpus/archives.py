"""Archives and what they hold: tar, the pickles of CIFAR, the files of MNIST."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparring.data import idx
from tests.files.corpus.cases import (
    EITHER,
    MIB,
    READ,
    REFUSED,
    Asks,
    Case,
    damaged,
    deflated,
    not_regular,
    written,
    zeros,
)


def tar_header(name: str, size: int, kind: bytes = b"0") -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def tar_gz(blocks: list[bytes], mebibytes: int, after: bytes = b"") -> bytes:
    """A gzip stream of blocks, then zeros, then more; its checksum is wrong."""
    head = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
    return head + deflated(b"".join(blocks)) + zeros(mebibytes) + deflated(after, last=True) + bytes(8)


def tar_cases() -> Iterator[Case]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name, content in {"a/readme": b"hello", f"{'b' * 120}/train": b"1" * 700, "a/test": b"2" * 5000}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    whole = buffer.getvalue()
    yield "sound", READ, written("a.tar.gz", whole)
    yield from damaged("tar.gz", "a.tar.gz", whole, 10)
    yield from damaged("tar", "a.tar", gzip.decompress(whole), 14)
    file = tar_header("a/train", 3) + b"abc".ljust(512, b"\0")
    end = file + bytes(1024)
    big = 3000 * MIB
    for what, blocks in {
        "a pax header of 3 GB": [tar_header("pax", big, b"x")],
        "a global pax header of 3 GB": [tar_header("pax", big, b"g")],
        "a long name of 3 GB": [tar_header("././@LongLink", big, b"L")],
        "a long link of 3 GB": [tar_header("././@LongLink", big, b"K")],
        "a junk member of 3 GB": [tar_header("junk", big)],
        "a sparse member of 3 GB": [tar_header("train", big, b"S")],
        "a member of an unknown type of 3 GB": [tar_header("train", big, b"Z")],
        "a wanted member of 3 GB": [tar_header("train", big)],
        "a wanted member of 3 GB after a sound one": [file, tar_header("test", big)],
    }.items():
        yield what, REFUSED, written("a.tgz", tar_gz(blocks, 3000, end))
    pax = tar_gz([tar_header("pax", 300 * MIB, b"x")], 300, end)
    yield "a pax header of 300 MB", REFUSED, written("a.tgz", pax)
    # Sound but for their length, so that nothing else refuses them.
    for what, kind in {"a pax header of 20 kB": b"x", "a long name of 20 kB": b"L"}.items():
        header = tar_header("long", 20_000, kind) + b"1 path=train\n".ljust(20_480, b"\0")
        yield what, REFUSED, written("a.tar", header + end)
    kinds = (b"1", b"2", b"3", b"4", b"6")
    links = b"".join(tar_header(f"../../{number}/train", 2**30, kind) for number, kind in enumerate(kinds))
    yield "links, devices and a FIFO with ..", READ, written("a.tar", links + end)
    yield "an absolute name", READ, written("a.tar", tar_header("/etc/train", 3) + file[512:] + end)
    yield "zeros", READ, written("a.tgz", tar_gz([file], 3000))
    yield "zeros alone", REFUSED, written("a.tgz", tar_gz([], 3000))
    yield "20,000 members", REFUSED, written("a.tgz", gzip.compress(tar_header("junk", 0) * 20_000 + end))
    yield "20,000 pax headers", REFUSED, written("a.tgz", gzip.compress(tar_header("x", 0, b"x") * 20_000 + end))
    slow = tar_header("x", 15_000, b"x") + b"1" * 15_360
    yield "pax headers that are slow to search", EITHER, written("a.tgz", gzip.compress(slow * 200 + end))
    negative = bytearray(tar_header("train", 3))
    negative[124:136] = b"-0000000003\0"
    yield "a negative size", REFUSED, written("a.tar", bytes(negative) + end)
    binary = tarfile.TarInfo("train")
    binary.size = 2**70
    yield "a size of 2^70", REFUSED, written("a.tar", binary.tobuf(tarfile.GNU_FORMAT) + end)
    yield "names with ..", READ, written("a.tar", tar_header("../../train", 3) + b"abc".ljust(512, b"\0") + bytes(1024))
    yield "two of one name", REFUSED, written("a.tar", file + end)
    yield from not_regular("a.tgz")


def pickle_cases() -> Iterator[Case]:
    def pickled(content: bytes) -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            (folder / "train").write_bytes(content)
            (folder / "test").write_bytes(content)
            return folder

        return write

    nest: Any = [0] * 300
    for _ in range(8):
        nest = [nest] * 300
    for what, content in {
        "a key nested 300,000 times": b"\x80\x02}" + b")" + b"\x85" * 300_000 + b"K\x01s.",
        "endless references": pickle.dumps(nest, 2),
        "endless opcodes": b"\x80\x02" + b"N" * 2_500_000 + b".",
        "a memo of gigabytes": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "an array without its values": pickle.dumps(Asks(np.zeros, 10**12)),
        "code": pickle.dumps(Asks(os.system, "true")),
        "a name with control characters": b"cos\x1b[2J\nsystem\n)R.",
        "other counts": pickle.dumps(
            {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [0, 1], b"filenames": [b"a", b"b"]}, 2
        ),
    }.items():
        yield what, REFUSED, pickled(content)


def idx_cases() -> Iterator[Case]:
    def files(images: bytes, labels: bytes, suffix: str = "") -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            for key, name in idx.FILES.items():
                (folder / f"{name}{suffix}").write_bytes(images if key.startswith("x") else labels)
            return folder

        return write

    def header(*shape: int) -> bytes:
        return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)

    labels = header(4) + bytes(4)
    for what, images in {
        "other counts": header(4, 28, 28) + bytes(4 * 784),
        "a shape beyond the file": header(2**32 - 1, 2**32 - 1, 2**32 - 1) + bytes(8),
        "no images of endless size": header(0, 2**32 - 1, 2**32 - 1),
        "floats": bytes([0, 0, 13, 3]) + header(4, 28, 28)[4:] + bytes(100),
        "a short header": b"\0\0\x08\x03\0",
        "nothing": b"",
    }.items():
        yield what, REFUSED, files(images, labels)
        yield f"{what}, packed", REFUSED, files(gzip.compress(images), gzip.compress(labels), ".gz")
    bomb = b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + zeros(3000)
    yield "3 GB of zeros", REFUSED, files(bomb, bomb, ".gz")
    yield "not gzip", REFUSED, files(b"abc", b"abc", ".gz")
    rng = random.Random(0)
    for number in range(8):
        yield f"random {number}", REFUSED, files(header(4, 28, 28) + rng.randbytes(3000 + number), rng.randbytes(12))

    def fifos(folder: Path) -> Path:
        for name in idx.FILES.values():
            os.mkfifo(folder / name)
        return folder

    yield "FIFOs", REFUSED, fifos
