"""Damaged and hostile files for every reader, made by code from a seed, and a child process that reads them all.

`python -m tests.files.corpus FOLDER` forks one process per reader, limits its memory, reads each case and prints one
line of JSON per case. A case must be read, or refused by a UserError of one line.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import resource
import signal
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save as to_safetensors

from sparring import models
from sparring.data import archives, cifar100, extra, idx, image_folder, npz, tiny_imagenet
from sparring.data.mat5 import read_mat
from sparring.errors import UserError
from sparring.weights import load_model

ROOM = 2**30  # bytes over what the process has when the corpus begins
HANG = 60  # seconds: a guard, not a measurement
READ, REFUSED, EITHER = "read", "refused", "either"
MIB = 2**20
Case = tuple[str, str, Callable[[Path], Path]]  # (name, what must happen, writes the file into a folder)
Reader = Callable[[Path], object]


class Hangs(BaseException):
    """A case took too long; no reader may catch it."""


# --- damage and bombs -------------------------------------------------------------------------------------------------


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
    def write(folder: Path) -> Path:
        (folder / name).symlink_to("/dev/zero")
        return folder / name

    return write


def not_regular(name: str) -> Iterator[Case]:
    yield "a FIFO", REFUSED, fifo(name)
    yield "a loop of links", REFUSED, loop(name)
    yield "a device", REFUSED, device(name)
    yield "an empty file", REFUSED, written(name, b"")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(models.build("tiny_cnn", num_classes=2, channels=1, size=(4, 4)).state_dict())


def torch_bytes(content: object, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def with_pickle(whole: bytes, change: Callable[[bytes], bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zipped checkpoint with another pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return buffer.getvalue()


class Asks:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def torch_cases() -> Iterator[Case]:
    sound = state()
    many = {f"layer{i}.weight": torch.zeros(1).expand(2**16) for i in range(2_000)}
    nest: Any = [0] * 1000
    for _ in range(6):
        nest = [nest] * 1000
    contents: dict[str, Any] = {
        "expanded 1.5e9": {"fc.weight": torch.zeros(1).expand(1_500_000_000)},
        "expanded 1e12": {"fc.weight": torch.zeros(1).expand(10**12)},
        "expanded in half precision": {"fc.weight": torch.zeros(1).half().expand(2**31, 2)},
        "expanded beside sound weights": {**sound, "more.weight": torch.zeros(1).expand(10**10)},
        "many expanded": many,
        "overlapping windows": {"fc.weight": torch.zeros(2**17).as_strided((2**16, 2**16), (1, 1))},
        "endless references": {"net": nest, "state": [nest]},
        "a bytearray of gigabytes": {**sound, "x": Asks(bytearray, 6 * 2**30)},
        "a tensor by its class": {**sound, "x": Asks(torch.FloatTensor, 2 * 2**30)},
        "newlines in names": {**sound, "fc\n\x1b[2J.weight": torch.zeros(2)},
        "a long name": {**sound, "a" * 100_000 + ".weight": torch.zeros(2)},
        "whole numbers": {key: value.to(torch.int32) for key, value in sound.items()},
        "complex numbers": {key: value.to(torch.complex64) for key, value in sound.items()},
        "code": {**sound, "x": Asks(os.system, "true")},
        "no weights": {"epoch": 1},
    }
    for zipped in (True, False):
        kind, name = ("zip", "m.pt") if zipped else ("legacy", "m.pth.tar")
        whole = torch_bytes({"state_dict": sound, "epoch": 3}, zipped=zipped)
        yield f"{kind} sound", READ, written(name, whole)
        yield (
            f"{kind} expanded buffer",
            READ,
            written(
                name, torch_bytes({**sound, "normalize.mean": torch.zeros(1).expand(1), "normalize.std": torch.ones(1)})
            ),
        )
        for what, content in contents.items():
            must = EITHER if what in ("a bytearray of gigabytes", "a tensor by its class") else REFUSED
            yield f"{kind} {what}", must, written(name, torch_bytes(content, zipped=zipped))
        yield from damaged(kind, name, whole, 24)
        yield f"{kind} truncated", REFUSED, written(name, whole[:-300])
    whole = torch_bytes(sound)
    numbers = whole.rindex(sound["fc.weight"].numpy().tobytes())
    yield "zip CRC", REFUSED, written("m.pt", whole[:numbers] + b"\x01" + whole[numbers + 1 :])
    key = b"\x80\x02}" + b")" + b"\x85" * 300_000 + b"K\x01s."
    for what, content in {
        "a key nested 300,000 times": key,
        "a memo of gigabytes": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "a text of gigabytes": b"\x80\x02X\xff\xff\xff\xff.",
        "endless opcodes": b"\x80\x02" + b"N" * 2_500_000 + b".",
        "a pickle of 20 MB": b"\x80\x02X" + struct.pack("<I", 20 * MIB) + bytes(20 * MIB) + b".",
        "doubled texts": b"\x80\x02" + b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR" * 40 + b".",
    }.items():
        yield f"zip {what}", REFUSED, written("m.pt", with_pickle(whole, lambda _, new=content: new))
        if "endless" not in what:
            yield f"legacy {what}", REFUSED, written("m.pth", content)
    more = whole.replace(struct.pack("<I", 2**4), struct.pack("<I", 2**31 - 1))
    yield "zip storages of other sizes", EITHER, written("m.pt", more)
    yield "zip compressed", REFUSED, written("m.pt", with_pickle(whole, lambda data: data, zipfile.ZIP_DEFLATED))
    bomb = raw_zip([("a/data.pkl", zeros(3000), 3000 * MIB, 8), ("a/version", b"3\n", 2, 0)])
    yield "zip a pickle that unpacks to 3 GB", REFUSED, written("m.pt", bomb)
    escape = raw_zip([("../../data.pkl", b"N.", 2, 0), ("../../../etc/passwd", b"x", 1, 0)])
    yield "zip with ..", REFUSED, written("m.pt", escape)
    pax = tar_gz([tar_header("pax", 6 * 2**30 - 1, b"x")], 3000)
    yield "a tar with a header of gigabytes", REFUSED, written("m.pth.tar", pax)
    yield from not_regular("m.pt")


def safetensors_cases() -> Iterator[Case]:
    facts = {"model": {"name": "tiny_cnn", "num_classes": 2, "channels": 1, "size": [4, 4], "normalize": None}}

    def own(facts: object, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
        return to_safetensors(state() if tensors is None else tensors, {"sparring": json.dumps(facts)})

    def described(**changes: object) -> Callable[[Path], Path]:
        return written("m.safetensors", own({"model": {**facts["model"], **changes}}))

    whole = own(facts)
    yield "sound", READ, written("m.safetensors", whole)
    yield from damaged("safetensors", "m.safetensors", whole, 30, head=1500)
    yield "F32 renamed I32", REFUSED, written("m.safetensors", whole.replace(b'"F32"', b'"I32"'))
    yield "F32 renamed U32", REFUSED, written("m.safetensors", whole.replace(b'"F32"', b'"U32"'))
    yield "a network without end", REFUSED, described(name="wrn-60004-1")
    yield "a network without bounds", REFUSED, described(name="wrn-34-999999999")
    yield "a depth of 5,000 digits", REFUSED, described(name=f"wrn-{'9' * 5000}-1")
    yield "classes beyond numbers", REFUSED, described(num_classes=10**30)
    yield "channels beyond numbers", REFUSED, described(channels=10**30)
    yield "many classes", REFUSED, described(num_classes=10**12)
    yield "large images", REFUSED, described(size=[10**9, 10**9])
    yield "a size of words", REFUSED, described(size=["a", "b"])
    yield "a normalisation of words", REFUSED, described(normalize=["a", "b"])
    yield "a normalisation of nothing", REFUSED, described(normalize={"a": 1})
    yield "a name of lists", REFUSED, described(name=[1])
    yield "facts that are a list", REFUSED, written("m.safetensors", own([1]))
    deep = to_safetensors(state(), {"sparring": "[" * 100_000})
    yield "facts nested 100,000 times", REFUSED, written("m.safetensors", deep)
    yield "facts that are not JSON", REFUSED, written("m.safetensors", to_safetensors(state(), {"sparring": "{"}))
    newline = {**state(), "fc\n.weight": torch.zeros(2)}
    yield "newlines in names", REFUSED, written("m.safetensors", own(facts, newline))
    yield "a header of 2^63 bytes", REFUSED, written("m.safetensors", struct.pack("<Q", 2**63) + b"{}")
    yield "a header of 90 MB", REFUSED, written("m.safetensors", struct.pack("<Q", 90 * MIB) + bytes(90 * MIB))
    huge = json.dumps({"fc.weight": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    yield "numbers that are not there", REFUSED, written("m.safetensors", struct.pack("<Q", len(huge)) + huge)
    yield from not_regular("m.safetensors")


# --- arrays -----------------------------------------------------------------------------------------------------------


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


# --- archives ---------------------------------------------------------------------------------------------------------


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


# --- images -----------------------------------------------------------------------------------------------------------


def png(width: int, height: int, data: bytes = b"", color: int = 2) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def encoded(form: str) -> bytes:
    rng = np.random.default_rng(0)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(buffer, form)
    return buffer.getvalue()


def among(name: str, place: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """A folder of two classes with sound images, and one more."""

    def write(folder: Path) -> Path:
        for label in ("cat", "dog"):
            (folder / label).mkdir()
            for number in range(5):
                (folder / label / f"{number}.png").write_bytes(SOUND)
        place(folder / "cat")
        return folder

    return write


SOUND = encoded("PNG")


def image_cases() -> Iterator[Case]:
    large = struct.pack("<HH", 30_000, 30_000)
    jpeg = encoded("JPEG")
    place = jpeg.index(b"\xff\xc0") + 5
    side = struct.pack(">HH", 30_000, 30_000)
    webp = encoded("WEBP")
    vp8 = webp.index(b"\x9d\x01\x2a") + 3
    contents = {
        "large.png": png(30_000, 30_000),
        "wide.png": png(2**31 - 1, 1),
        "zero.png": png(0, 0),
        "eight.png": png(8_000, 8_000, b"\x78\xda" + zeros(200), color=6),
        "large.jpg": jpeg[:place] + side + jpeg[place + 4 :],
        "large.gif": b"GIF89a" + large + encoded("GIF")[10:],
        "large.webp": webp[:vp8] + struct.pack("<HH", 16_383, 16_383) + webp[vp8 + 4 :],
        "large.bmp": b"BM" + struct.pack("<IIIIiiHHIIIIII", 100, 0, 54, 40, 30_000, 30_000, 1, 24, 0, 0, 0, 0, 0, 0),
        "large.ppm": b"P6 30000 30000 255\n" + bytes(100),
        "program.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n",
        "text.png": b"hello",
        "nothing.png": b"",
    }
    yield "sound", READ, among("a.png", written("a.png", SOUND))
    for name, content in contents.items():
        yield name, REFUSED, among(name, written(name, content))
    for form, name in {"PNG": "d.png", "JPEG": "d.jpg", "GIF": "d.gif", "WEBP": "d.webp", "BMP": "d.bmp"}.items():
        whole = encoded(form)
        yield f"{form} truncated", REFUSED, among(name, written(name, whole[: len(whole) * 2 // 3]))
        for what, _, write in damaged(form, name, whole, 6, head=60):
            yield what, EITHER, among(name, write)
    yield "a FIFO", REFUSED, among("a.png", fifo("a.png"))
    yield "a loop of links", REFUSED, among("a.png", loop("a.png"))
    yield "a device", REFUSED, among("a.png", device("a.png"))

    def to_fifo(folder: Path) -> Path:
        os.mkfifo(folder / "pipe")
        (folder / "a.png").symlink_to("pipe")
        return folder

    yield "a link to a FIFO", REFUSED, among("a.png", to_fifo)

    def parent(folder: Path) -> Path:
        (folder / "up").symlink_to(folder.parent)
        return folder

    yield "a link to the folder above", READ, among("up", parent)


def one_image_cases() -> Iterator[Case]:
    yield "sound", READ, written("a.png", SOUND)
    yield "30,000 x 30,000", REFUSED, written("a.png", png(30_000, 30_000))
    yield from not_regular("a.png")


def tiny_imagenet_cases() -> Iterator[Case]:
    def lists(place: Callable[[Path], Path]) -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            place(folder)
            return folder

        return write

    yield "a list of 20 MB", REFUSED, lists(written("wnids.txt", b"a\n" * (10 * MIB)))
    yield "a FIFO", REFUSED, lists(fifo("wnids.txt"))
    ids = "".join(f"n{i}\n" for i in range(200)).encode()

    def annotations(folder: Path) -> Path:
        (folder / "wnids.txt").write_bytes(ids)
        for name in ids.decode().split():
            (folder / "train" / name / "images").mkdir(parents=True)
        (folder / "val").mkdir()
        os.mkfifo(folder / "val" / "val_annotations.txt")
        return folder

    yield "annotations that are a FIFO", REFUSED, lists(annotations)


# --- the child process ------------------------------------------------------------------------------------------------

OFFICIAL = {"X": 73_257 * 32 * 32 * 3, "y": 73_257 * 8}


def read_svhn(path: Path) -> object:
    found = read_mat(path, OFFICIAL)
    if set(found) != {"X", "y"}:
        raise UserError("it lacks X or y.")
    return found


READERS: dict[str, tuple[Reader, Callable[[], Iterator[Case]]]] = {
    "checkpoints": (load_model, torch_cases),
    "safetensors": (load_model, safetensors_cases),
    "npz": (lambda path: npz.load_npz(path, room=2**50), npz_cases),
    "npz, mapped": (lambda path: npz.load_npz(path, room=0), npz_cases),
    "npz, extra": (lambda path: extra.load_extra(f"npz:{path}", classes=2), npz_cases),
    "mat": (read_svhn, mat_cases),
    "tar": (lambda path: archives.read_named(path, {"train", "test"}), tar_cases),
    "pickle": (cifar100.read_source, pickle_cases),
    "idx": (lambda path: idx.read_source("mnist", path), idx_cases),
    "images": (image_folder.load_folder, image_cases),
    "images, scaled": (lambda path: image_folder.load_folder(path, size=8), image_cases),
    "one image": (lambda path: image_folder.read_images([path], size=(8, 8), channels=3), one_image_cases),
    "tiny-imagenet": (tiny_imagenet.read_source, tiny_imagenet_cases),
}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def outcome(reader: Reader, path: Path) -> tuple[str, str]:
    """("read" or "refused" or "failed", what was said)."""
    try:
        reader(path)
    except UserError as error:
        return REFUSED, str(error)
    except Hangs:
        return "failed", "it hangs"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return READ, ""


def stop(*_: object) -> None:
    raise Hangs


def carry_out(name: str, folder: Path) -> None:
    reader, cases = READERS[name]
    signal.signal(signal.SIGALRM, stop)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for number, (what, must, write) in enumerate(cases()):
        place = folder / f"{number}"
        place.mkdir(parents=True)
        path = write(place)
        before, began = peak(), time.perf_counter()
        resource.setrlimit(resource.RLIMIT_AS, (size + 3 * ROOM, resource.RLIM_INFINITY))
        signal.alarm(HANG)
        found, said = outcome(reader, path)
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        seconds, more = time.perf_counter() - began, peak() - before
        line = {"reader": name, "case": what, "must": must, "found": found, "said": said}
        print(json.dumps({**line, "seconds": round(seconds, 3), "bytes": more}), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["SPARRING_DATA"] = str(folder / "cache")
    chosen = sys.argv[2:] or list(READERS)
    for number, name in enumerate(chosen):
        child = os.fork()
        if child == 0:
            carry_out(name, folder / f"reader{number}")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"reader": name, "case": "the process", "must": READ, "found": f"status {status}"}))


if __name__ == "__main__":
    main()
