"""Images: folders of them, one of them, and the lists of Tiny ImageNet."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tests.files.corpus.cases import (
    EITHER,
    MIB,
    READ,
    REFUSED,
    Case,
    damaged,
    device,
    fifo,
    loop,
    not_regular,
    written,
    zeros,
)


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
    claim = SOUND[:33] + struct.pack(">I", 2**32 - 300) + SOUND[37:]
    yield "a chunk that claims 4 GB", EITHER, among("c.png", written("c.png", claim))
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

    for what, name in {"control characters": b"n\x1b[2J", "null bytes": b"n\0", "..": b"../.."}.items():
        yield f"a class with {what}", REFUSED, lists(written("wnids.txt", ids.replace(b"n7\n", name + b"\n")))

    def annotations(folder: Path) -> Path:
        (folder / "wnids.txt").write_bytes(ids)
        for name in ids.decode().split():
            (folder / "train" / name / "images").mkdir(parents=True)
        (folder / "val").mkdir()
        os.mkfifo(folder / "val" / "val_annotations.txt")
        return folder

    yield "annotations that are a FIFO", REFUSED, lists(annotations)
