"""MNIST and Fashion-MNIST from their four idx files, compressed or not, in a folder or an archive.

The counts of the classes must be those of the set. Must not know how the files were downloaded.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparring.data.archives import read_named
from sparring.data.dataset import Dataset
from sparring.data.stored import KEYS, Stored, as_dataset, read_stored
from sparring.errors import UserError

SIDE = 28  # pixels
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
CLASSES = {
    "mnist": tuple(str(digit) for digit in range(10)),
    "fashion-mnist": (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
}
COUNTS = {  # images of each class
    "mnist": {
        "train": (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        "test": (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    },
    "fashion-mnist": {"train": (6000,) * 10, "test": (1000,) * 10},
}
FILES = dict(
    zip(
        KEYS,
        (
            *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
            *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        ),
        strict=True,
    )
)
_MOST = 64 * 2**20  # bytes of one file, unpacked: the largest has 47 MB


def load_idx(name: str, path: Path) -> Dataset:
    """The stored file of `mnist` or `fashion-mnist` as a Dataset."""
    if not path.is_file():
        raise UserError(
            f"{TITLES[name]} is not at {path}. Get it with: sparring data fetch {name} --source FOLDER, "
            f"where FOLDER holds {FILES['x_train']}.gz and the three others."
        )
    return as_dataset(read_checked(name, path), name=name, classes=CLASSES[name])


def read_checked(name: str, path: Path) -> Stored:
    """The stored file; refused unless shapes and class counts are those of the set."""
    return _checked(name, read_stored(path), path)


def read_source(name: str, path: Path) -> Stored:
    """The set from a folder or an archive with the four files."""
    found = read_named(path, {*FILES.values(), *(f"{file}.gz" for file in FILES.values())})
    arrays: dict[str, NDArray[np.uint8]] = {}
    for key, file in FILES.items():
        if file not in found and f"{file}.gz" not in found:
            has = f"it has {', '.join(sorted(found))}" if found else "it has none of the files"
            raise UserError(f"{path} is not a complete {TITLES[name]}: {file} is missing ({has}). Give all four files.")
        data = found[file] if file in found else _unpacked(found[f"{file}.gz"], f"{file}.gz")
        arrays[key] = read_idx(data, file, 3 if key.startswith("x") else 1)
        if key.startswith("x"):
            arrays[key] = arrays[key][..., None]
    return _checked(name, Stored(arrays, f"{TITLES[name]}, from its idx files"), path)


def read_idx(data: bytes, name: str, dimensions: int) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, type 8, the number of dimensions, big-endian lengths, then the values."""
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < 4 + 4 * dimensions:
        raise UserError(f"{name} is not an idx file of bytes in {dimensions} dimensions. Get it again.")
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * dimensions)
    expected = math.prod(shape)
    if len(values) != expected or not expected:
        raise UserError(f"{name} is damaged: it has {len(values)} values, its header says {expected}. Get it again.")
    return values.reshape(shape)


def _unpacked(data: bytes, name: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            unpacked = file.read(_MOST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name} is damaged ({error}). Get it again.") from None
    if len(unpacked) > _MOST:
        raise UserError(f"{name} unpacks to more than {_MOST // 2**20} MiB. Get the official file.")
    return unpacked


def _checked(name: str, stored: Stored, path: Path) -> Stored:
    for part, counts in COUNTS[name].items():
        x, y = stored.arrays[f"x_{part}"], stored.arrays[f"y_{part}"]
        if x.shape != (sum(counts), SIDE, SIDE, 1) or y.shape != (sum(counts),):
            raise UserError(
                f"{path}: the {part} part has the shape {x.shape}, that of {TITLES[name]} is "
                f"{(sum(counts), SIDE, SIDE, 1)}. For other arrays use npz:PATH."
            )
        if tuple(np.bincount(y, minlength=10).tolist()) != counts:
            raise UserError(f"{path}: the {part} labels are not those of {TITLES[name]}. Get the official files.")
    return stored
