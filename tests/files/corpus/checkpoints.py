"""Checkpoints: what torch.save writes, zipped or not, and safetensors."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from sparring import models
from sparring.training.checkpoint import metadata
from tests.files.corpus.archives import tar_gz, tar_header
from tests.files.corpus.cases import (
    EITHER,
    MIB,
    READ,
    REFUSED,
    Asks,
    Case,
    damaged,
    not_regular,
    raw_zip,
    written,
    zeros,
)


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
    end = struct.pack("<4sHH", b"PK\6\7", 1, 0) + bytes(8) + struct.pack("<I", 5)  # of ZIP64: five disks
    place = whole.rindex(b"PK\5\6")
    yield "zip on five disks", REFUSED, written("m.pt", whole[:place] + end + whole[place:])
    pax = tar_gz([tar_header("pax", 6 * 2**30 - 1, b"x")], 3000)
    yield "a tar with a header of gigabytes", REFUSED, written("m.pth.tar", pax)
    yield from not_regular("m.pt")


def signed(facts: str, tensors: dict[str, torch.Tensor]) -> bytes:
    """A checkpoint whose sums are right, whatever its facts are."""
    return to_safetensors(tensors, metadata(facts, tensors))


def safetensors_cases() -> Iterator[Case]:
    facts = {"model": {"name": "tiny_cnn", "num_classes": 2, "channels": 1, "size": [4, 4], "normalize": None}}

    def own(facts: object, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
        return signed(json.dumps(facts), state() if tensors is None else tensors)

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
    deep = signed("[" * 100_000, state())
    yield "facts nested 100,000 times", REFUSED, written("m.safetensors", deep)
    yield "facts that are not JSON", REFUSED, written("m.safetensors", signed("{", state()))
    yield "facts without a checksum", REFUSED, written("m.safetensors", to_safetensors(state(), {"sparring": "{}"}))
    edited = whole.replace(b'\\"channels\\": 1', b'\\"channels\\": 3')
    assert edited != whole
    yield "facts that were edited", REFUSED, written("m.safetensors", edited)
    newline = {**state(), "fc\n.weight": torch.zeros(2)}
    yield "newlines in names", REFUSED, written("m.safetensors", own(facts, newline))
    yield "a header of 2^63 bytes", REFUSED, written("m.safetensors", struct.pack("<Q", 2**63) + b"{}")
    yield "a header of 90 MB", REFUSED, written("m.safetensors", struct.pack("<Q", 90 * MIB) + bytes(90 * MIB))
    huge = json.dumps({"fc.weight": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    yield "numbers that are not there", REFUSED, written("m.safetensors", struct.pack("<Q", len(huge)) + huge)
    yield from not_regular("m.safetensors")
