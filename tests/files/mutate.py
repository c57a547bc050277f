"""Change the content of a file, by its format: bytes anywhere, or parts inside of a container that stays whole.

A container whose checksums are made right again lets the damage reach what lies behind them.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import zipfile
import zlib
from contextlib import suppress

from tests.files.corpus.records import mutated

BYTES, INSIDE = "bytes", "inside"  # of the file as it is; of what a container holds
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def changed(name: str, content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """(BYTES or INSIDE, the new content)."""
    if rng.random() < 0.5:
        with suppress(Exception):  # not a whole container: its bytes are changed
            return INSIDE, _inside(name, content, rng)
    return BYTES, _bytes(content, rng)


def _bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        size = len(data)
        if not size:
            return rng.randbytes(rng.randrange(64))
        # Headers stand at the start, directories of archives at the end.
        place = rng.choice(
            (rng.randrange(size), rng.randrange(min(size, 200)), size - 1 - rng.randrange(min(size, 300)))
        )
        match rng.randrange(8):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place] = rng.randrange(256)
            case 2:
                del data[place:]
            case 3:
                del data[place : place + rng.randrange(1, 40)]
            case 4:
                data[place:place] = rng.randbytes(rng.randrange(1, 40))
            case 5:
                start = rng.randrange(size)
                data[place:place] = data[start : start + rng.randrange(1, 300)]
            case 6:
                start = rng.randrange(size)
                part = data[start : start + rng.randrange(1, 16)]
                data[place : place + len(part)] = part
            case _:
                number = rng.choice(_NUMBERS)
                form = rng.choice([form for form in "BHIQ" if number < 256 ** struct.calcsize(f"<{form}")])
                new = struct.pack(rng.choice("<>") + form, number)
                data[place : place + len(new)] = new
    return bytes(data)


def _inside(name: str, content: bytes, rng: random.Random) -> bytes:
    if name.endswith((".json", ".jsonl")):
        return mutated(content.decode(), rng)[1].encode()
    if name.endswith(".safetensors"):
        return _safetensors(content, rng)
    if content[:2] == b"PK":
        return _zip(content, rng)
    if content[:2] == b"\x1f\x8b":
        return gzip.compress(_tar(gzip.decompress(content), rng), 1)
    if content[:8] == b"\x89PNG\r\n\x1a\n":
        return _png(content, rng)
    if content[257:262] == b"ustar":
        return _tar(content, rng)
    if content[126:128] == b"IM":
        return _mat(content, rng)
    raise ValueError(name)


def _safetensors(content: bytes, rng: random.Random) -> bytes:
    """Another header: a value of its JSON, or of the JSON in its metadata."""
    (size,) = struct.unpack("<Q", content[:8])
    text = content[8 : 8 + size].decode()
    header = json.loads(text)
    if "__metadata__" in header and rng.random() < 0.5:
        key = rng.choice(sorted(header["__metadata__"]))
        inner = header["__metadata__"][key]
        header["__metadata__"][key] = mutated(inner, rng)[1] if inner[:1] in "{[" else _bytes(inner.encode(), rng).hex()
        text = json.dumps(header)
    else:
        text = mutated(json.dumps(header), rng)[1]
    return struct.pack("<Q", len(text.encode())) + text.encode() + content[8 + size :]


def _zip(content: bytes, rng: random.Random) -> bytes:
    """One member changed, with its CRC-32 right."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        infos = old.infolist()
        chosen = rng.choice(infos)
        with zipfile.ZipFile(packed, "w", infos[0].compress_type) as new:
            for info in infos:
                data = old.read(info)
                new.writestr(info.filename, _bytes(data, rng) if info is chosen else data)
    return packed.getvalue()


def _tar(content: bytes, rng: random.Random) -> bytes:
    """A header changed, with its checksum right; or any bytes."""
    data = bytearray(_bytes(content, rng)) if rng.random() < 0.5 else bytearray(content)
    headers = [place for place in range(0, len(data) - 511, 512) if data[place + 257 : place + 262] == b"ustar"]
    if headers:
        place = rng.choice(headers)
        for _ in range(rng.randrange(1, 4)):
            data[place + rng.choice((rng.randrange(500), rng.randrange(124, 136), 156))] = rng.choice(
                b"01234567 \0xgLK"
            )
        data[place + 148 : place + 156] = b" " * 8
        data[place + 148 : place + 156] = b"%06o\0 " % sum(data[place : place + 512])
    return bytes(data)


def _png(content: bytes, rng: random.Random) -> bytes:
    """The content of a chunk changed, with its CRC-32 right."""
    chunks, place = [], 8
    while place < len(content):
        (size,) = struct.unpack(">I", content[place : place + 4])
        chunks.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + size]))
        place += 12 + size
    number = rng.randrange(len(chunks))
    kind, data = chunks[number]
    if kind == b"IDAT" and rng.random() < 0.7:
        data = zlib.compress(_bytes(zlib.decompress(data), rng))
    else:
        data = _bytes(data, rng)
    chunks[number] = (rng.choice((kind, kind, kind, b"tEXt", b"zTXt", b"iCCP", b"eXIf", b"acTL", b"PLTE")), data)
    body = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return content[:8] + b"".join(body)


def _mat(content: bytes, rng: random.Random) -> bytes:
    """The content of a compressed variable changed."""
    kind, size = struct.unpack("<II", content[128:136])
    if kind != 15:
        raise ValueError("not compressed")
    packed = zlib.compress(_bytes(zlib.decompress(content[136 : 136 + size]), rng))
    return content[:128] + struct.pack("<II", 15, len(packed)) + packed + content[136 + size :]
