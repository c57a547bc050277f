"""Read what torch.save wrote, zipped or in its older format, without torch.load: sizes are checked before any number.

The pickle is read as data (`files.opcodes`), so a tensor is first a description: type, shape, strides, place. Only the
tensors that the caller asks for are then read, each storage once and against its CRC-32 where the file has one. Must
not know networks or their keys.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from sparring.files import opcodes
from sparring.files.opcodes import Call, Name, Refused

PICKLE_BYTES = 2**24  # of the pickle in a file: that of a network with 1,000 tensors has 0.1 MB
_EXPANDED = 2**16  # numbers that a tensor may repeat from a smaller storage: buffers are sometimes saved expanded
_COPIES = 4  # times that the tensors of a file may show its bytes: weights are shared, or saved twice
_SPARE = 2**26  # bytes that small files may show beyond that
_DIMENSIONS = 64  # of a tensor, torch's own limit
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the older format
_CHUNK = 2**20  # bytes read at once
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), torch.uint8),
    "QInt32Storage": torch.int32,
}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_V1, _V2, _V3 = (Name("torch._utils", f"_rebuild_tensor{version}") for version in ("", "_v2", "_v3"))
_FROM_TYPE = Name("torch._tensor", "_rebuild_from_type_v2")
_PARAMETERS = (
    Name("torch._utils", "_rebuild_parameter"),
    Name("torch._utils", "_rebuild_parameter_with_state"),
    Name("torch.nn.parameter", "Parameter"),
)
_OTHER_TENSORS = frozenset(
    Name("torch._utils", f"_rebuild_{kind}")
    for kind in (
        *("qtensor", "sparse_tensor", "meta_tensor_no_storage", "nested_tensor", "wrapper_subclass"),
        *("device_tensor_from_numpy", "device_tensor_from_cpu_tensor"),
    )
)
# Saved with weights, needed by none: they are neither looked up nor called.
_INERT = frozenset(
    Name(*name.rsplit(".", 1))
    for name in (
        *("collections.OrderedDict", "collections.Counter", "_codecs.encode", "argparse.Namespace"),
        *(f"builtins.{name}" for name in ("bytes", "bytearray", "set", "complex")),
        *("torch.Size", "torch.Tensor", "torch.device", "torch.serialization._get_layout"),
        *(f"numpy{core}.multiarray.{name}" for core in (".core", "._core") for name in ("scalar", "_reconstruct")),
        *("numpy.dtype", "numpy.ndarray"),
        *(f"pathlib{local}.{name}" for local in ("", "._local") for name in ("PosixPath", "WindowsPath", "Path")),
        *(f"datetime.{name}" for name in ("datetime", "date", "timedelta")),
    )
)


class NotReadable(Exception):
    """A file that torch.save did not write, or wrote otherwise; the message says what it is, and the fix."""


@dataclass(frozen=True)
class Storage:
    """Numbers of the file, one after the other."""

    key: str
    dtype: torch.dtype
    elements: int
    start: int = 0  # element of the stored ones where it begins: older files have views

    @property
    def bytes(self) -> int:
        """Bytes that must be read for it."""
        return (self.start + self.elements) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the file describes it; nothing of it has been read or checked."""

    dtype: torch.dtype
    storage: Any
    offset: Any
    shape: Any
    stride: Any


@dataclass(frozen=True)
class OtherTensor:
    """A tensor that is not dense: sparse, quantised or without numbers."""


@dataclass(frozen=True)
class TorchFile:
    """The content of a file, with tensors as descriptions: see `tensor`."""

    path: Path
    content: Any
    prefix: str | None  # of the names in the zip archive; None in the older format
    places: Mapping[str, tuple[int, int]]  # of a storage in the older format: its first byte, its bytes

    def tensors(self, wanted: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """The numbers of these tensors, on the CPU."""
        size = self.path.stat().st_size
        shown, needed = 0, dict[str, int]()
        for name, stored in wanted.items():
            storage = _checked(name, stored)
            shown += math.prod(stored.shape) * stored.dtype.itemsize
            needed[storage.key] = max(storage.bytes, needed.get(storage.key, 0))
        if shown > _COPIES * size + _SPARE or sum(needed.values()) > size:
            raise Refused(f"tensors of {shown:,} bytes in a file of {size:,}")
        with self.path.open("rb") as file:
            found = self._from_zip(file, needed) if self.prefix is not None else self._from_file(file, needed)
        return {name: _view(stored, found) for name, stored in wanted.items()}

    def _from_zip(self, file: IO[bytes], needed: Mapping[str, int]) -> dict[str, Tensor]:
        with zipfile.ZipFile(file) as archive:
            return {key: _bytes(_member(archive, f"{self.prefix}data/{key}", n), n) for key, n in needed.items()}

    def _from_file(self, file: IO[bytes], needed: Mapping[str, int]) -> dict[str, Tensor]:
        found = {}
        for key, count in needed.items():
            begins, there = self.places[key]
            if there < count:
                raise Refused("a storage that is shorter than its tensors")
            file.seek(begins)
            found[key] = _bytes(file, count)
        return found


def read(path: Path) -> TorchFile:
    """The content of a file of torch.save; no number of a tensor is read.

    Raises:
        ForbiddenName: its pickle names an object that is neither a tensor nor known to be harmless.
        NotReadable: it is another kind of file.
        Exception: it is damaged, in any of many ways.
    """
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            return _read_zip(path, file)
        file.seek(0)
        return _read_older(path, io.BytesIO(file.read(PICKLE_BYTES)))


def tensor(value: object) -> StoredTensor | OtherTensor | None:
    """The tensor that a value of the content describes; None where it is something else."""
    for _ in range(4):  # a parameter of a subclass holds a tensor, three calls deep
        if not isinstance(value, Call):
            return None
        args, name = value.args, value.name
        if name in _OTHER_TENSORS:
            return OtherTensor()
        if name in (_V1, _V2) and len(args) >= 4 and isinstance(args[0], Storage):
            return StoredTensor(args[0].dtype, *args[:4])
        if name == _V3 and len(args) >= 7 and isinstance(args[6], Name) and args[6].name in _DTYPES:
            return StoredTensor(_DTYPES[args[6].name], *args[:4])
        if name in _PARAMETERS and args:
            value = args[0]
        elif name == _FROM_TYPE and len(args) >= 3 and isinstance(args[0], Name) and isinstance(args[2], tuple):
            value = Call(args[0], args[2])
        else:
            return None
    return None


def _read_zip(path: Path, file: IO[bytes]) -> TorchFile:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        pickles = [name for name in names if name == "data.pkl" or name.endswith("/data.pkl")]
        if not pickles:
            raise NotReadable("is a zip archive, but not one that torch.save wrote. Unpack it, or give another file.")
        prefix = pickles[0].removesuffix("data.pkl")
        if f"{prefix}constants.pkl" in names:
            raise NotReadable("is a TorchScript program, not a checkpoint.")
        if f"{prefix}byteorder" in names:
            with _member(archive, f"{prefix}byteorder", 0) as order:
                if order.read(8) == b"big":
                    raise NotReadable("has big-endian numbers. Save it again on a little-endian machine.")
        info = archive.getinfo(pickles[0])
        if info.file_size > PICKLE_BYTES:
            raise Refused(f"a pickle of {info.file_size:,} bytes")
        with _member(archive, pickles[0], info.file_size) as member:
            data = member.read(PICKLE_BYTES + 1)
        storages: dict[str, Storage] = {}
        content = opcodes.load(
            io.BytesIO(data), allowed=_allowed, persistent=lambda reference: _storage(reference, storages)
        )
        return TorchFile(path, content, prefix, {})


def _read_older(path: Path, file: io.BytesIO) -> TorchFile:
    """Five pickles: magic number, protocol, system, content, order of the storages; then the storages."""
    storages: dict[str, Storage] = {}

    def load() -> Any:
        return opcodes.load(file, allowed=_allowed, persistent=lambda reference: _storage(reference, storages))

    if load() != _MAGIC or load() != _PROTOCOL:
        raise Refused("another magic number or protocol")
    system = load()
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise NotReadable("has big-endian numbers. Save it again on a little-endian machine.")
    content, order = load(), load()
    if not isinstance(order, list):
        raise Refused("no list of its storages")
    size, place = path.stat().st_size, file.tell()
    places: dict[str, tuple[int, int]] = {}
    with path.open("rb") as whole:
        for key in map(_text, order):
            whole.seek(place)
            (elements,) = struct.unpack("<q", whole.read(8))
            if key not in storages or not 0 <= elements <= size:
                raise Refused("a storage that no tensor has")
            count = elements * storages[key].dtype.itemsize
            places[key] = (place + 8, count)
            place += 8 + count
    if place > size:
        raise Refused(f"{size:,} bytes of {place:,}")
    return TorchFile(path, content, None, places)


def _allowed(name: Name) -> bool:
    rebuilds = {_V1, _V2, _V3, _FROM_TYPE, *_PARAMETERS}
    if name in rebuilds or name in _OTHER_TENSORS or name in _INERT:
        return True
    if name.module in ("torch", "torch.cuda", "torch.storage"):
        quantised = name.name.startswith(("per_tensor_", "per_channel_"))
        return name.name in _STORAGES or name.name in _DTYPES or name.name.endswith("Tensor") or quantised
    return False


def _storage(reference: Any, found: dict[str, Storage]) -> Storage:
    """The storage of a reference: ('storage', its type, key, device, elements[, (view's key, offset, elements)])."""
    if not isinstance(reference, tuple) or not 5 <= len(reference) <= 6 or _text(reference[0]) != "storage":
        raise Refused("a reference that is not a storage")
    kind, key, elements = reference[1], _text(reference[2]), reference[4]
    dtype = _STORAGES.get(kind.name) if isinstance(kind, Name) else None
    if dtype is None or type(elements) is not int or elements < 0:
        raise Refused("a storage of unknown type or size")
    whole = Storage(key, dtype, elements)
    known = found.setdefault(key, whole)
    if known.elements * known.dtype.itemsize != elements * dtype.itemsize:
        raise Refused("a storage of two sizes")
    view = reference[5] if len(reference) == 6 else None
    if view is None:
        return whole
    _, start, count = view
    if type(start) is not int or type(count) is not int or not 0 <= start <= start + count <= elements:
        raise Refused("a view outside of its storage")
    return Storage(key, dtype, count, start)


def _text(value: object) -> str:
    text = value.decode("ascii") if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise Refused("a key that is not text")
    return text


def _checked(name: str, stored: StoredTensor) -> Storage:
    """The storage of a tensor, where every number of the tensor lies inside it and none is repeated without need."""
    storage, offset, shape, stride = stored.storage, stored.offset, stored.shape, stored.stride
    if not isinstance(storage, Storage) or not _whole(shape) or not _whole(stride) or not _whole((offset,)):
        raise Refused(f"a tensor of impossible shape ({name})")
    there = storage.elements * storage.dtype.itemsize // stored.dtype.itemsize
    numbers = math.prod(shape)
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    if numbers and last >= there:
        raise Refused(f"a tensor that reaches beyond its storage ({name})")
    if numbers > max(there, _EXPANDED):
        raise Refused(f"a tensor of {numbers:,} numbers in a storage of {there:,} ({name})")
    return storage


def _whole(values: object) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= _DIMENSIONS
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _member(archive: zipfile.ZipFile, name: str, count: int) -> IO[bytes]:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size < count:
        raise Refused(f"{name[:60]!r} compressed, encrypted or too short, as torch.save writes none")
    return archive.open(info)


def _bytes(file: IO[bytes], count: int) -> Tensor:
    """The next bytes of a file, as a tensor; to the end of a zip member, so that its CRC-32 is checked."""
    data = bytearray(count)
    view, place = memoryview(data), 0
    while place < count:
        chunk = file.read(min(_CHUNK, count - place))
        if not chunk:
            raise Refused("fewer bytes than its tensors need")
        view[place : place + len(chunk)] = chunk
        place += len(chunk)
    if isinstance(file, zipfile.ZipExtFile):
        while file.read(_CHUNK):
            pass
    return torch.frombuffer(data, dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)


def _view(stored: StoredTensor, found: Mapping[str, Tensor]) -> Tensor:
    storage = stored.storage
    assert isinstance(storage, Storage)
    begins, size = storage.start * storage.dtype.itemsize, stored.dtype.itemsize
    data = found[storage.key][begins : storage.bytes]
    numbers = data[: len(data) // size * size].view(stored.dtype)
    first = numbers.storage_offset() + stored.offset
    return numbers.as_strided(stored.shape, stored.stride, first)
