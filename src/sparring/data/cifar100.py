"""CIFAR-100 from its official Python archive: the files `train`, `test` and `meta`, read without running any code.

The classes are the 100 fine ones. Shapes and class counts must be CIFAR-100's. Must not know how the file was
downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.data import safe_pickle
from sparring.data.archives import read_named
from sparring.data.dataset import Dataset
from sparring.data.stored import Stored, as_dataset, read_stored
from sparring.errors import UserError

_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""
CLASSES = tuple(_NAMES.split())
PER_CLASS = {"train": 500, "test": 100}  # images
_FILES = ("train", "test", "meta")


def load_cifar100(path: Path) -> Dataset:
    """The stored file as a Dataset."""
    if not path.is_file():
        raise UserError(f"CIFAR-100 is not at {path}. Get it with: sparring data fetch cifar100")
    return as_dataset(read_checked(path), name="cifar100", classes=CLASSES)


def read_checked(path: Path) -> Stored:
    """The stored file; refused unless shapes and class counts are CIFAR-100's."""
    return _checked(read_stored(path), path)


def read_source(path: Path) -> Stored:
    """CIFAR-100 from the archive cifar-100-python.tar.gz, or from the folder it unpacks to."""
    files = read_named(path, _FILES, largest=256 * 2**20)
    missing = [name for name in ("train", "test") if name not in files]
    if missing:
        raise UserError(
            f"{path} is not a complete CIFAR-100: {' and '.join(missing)} missing. Give cifar-100-python.tar.gz, or "
            "the folder it unpacks to."
        )
    if "meta" in files and _names(files["meta"]) != CLASSES:
        raise UserError(f"{path}: the class names in meta are not CIFAR-100's. Give the official archive.")
    arrays: dict[str, NDArray[np.uint8]] = {}
    for part in ("train", "test"):
        arrays[f"x_{part}"], arrays[f"y_{part}"] = _part(files[part], part)
    return _checked(Stored(arrays, "CIFAR-100, from the official Python archive"), path)


def _part(data: bytes, name: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A pickled dict: data (n, 3072), planes of red, green and blue; fine_labels, a list."""
    fields = _fields(data, name)
    x, y, count = fields.get("data"), fields.get("fine_labels"), 100 * PER_CLASS[name]
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.shape != (count, 3072):
        raise UserError(f"{name} has no images of {count} x 3072 bytes. Give the official archive.")
    if not isinstance(y, list) or len(y) != count or not all(type(label) is int and 0 <= label < 100 for label in y):
        raise UserError(f"{name} does not hold {count} labels from 0 to 99. Get it again.")
    planes = x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(planes), np.asarray(y, dtype=np.uint8)


def _fields(data: bytes, name: str) -> dict[str, Any]:
    found: Any = safe_pickle.loads(data, name=name)
    items = found.items() if isinstance(found, dict) else ()
    return {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in items}


def _names(data: bytes) -> tuple[str, ...]:
    names = _fields(data, "meta").get("fine_label_names")
    if not isinstance(names, list):
        return ()
    return tuple(name.decode("latin-1") if isinstance(name, bytes) else str(name) for name in names)


def _checked(stored: Stored, path: Path) -> Stored:
    for part, count in PER_CLASS.items():
        x, y = stored.arrays[f"x_{part}"], stored.arrays[f"y_{part}"]
        if x.shape != (100 * count, 32, 32, 3) or np.bincount(y, minlength=100).tolist() != [count] * 100:
            raise UserError(f"{path} is damaged: its {part} part is not CIFAR-100's. Get the official archive again.")
    return stored
