"""Fetched data sets on disk: one uncompressed .npz each in the data folder, written atomically.

The file holds x_train, y_train, x_test, y_test (uint8, images NHWC) and `note`, their origin. Must not know how they
are fetched or what they contain.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.data.cache import data_root
from sparring.data.dataset import Dataset, tensor_split
from sparring.data.npz import read_npz
from sparring.errors import UserError

KEYS = ("x_train", "y_train", "x_test", "y_test")
_STALE = 24 * 3600  # seconds after which the scratch folder of an interrupted fetch is removed


@dataclass(frozen=True, eq=False)
class Stored:
    """The four arrays of a data set and their origin."""

    arrays: dict[str, NDArray[np.uint8]]  # by KEYS
    note: str


def stored_path(name: str, root: Path | None = None) -> Path:
    """The file of a fetched data set."""
    return data_root(root) / name / f"{name}.npz"


def sha256(array: NDArray[Any]) -> str:
    """The sha256 of an array's raw bytes, in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A scratch folder next to the target (so that a rename is atomic), removed afterwards in any case."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob(".fetch-*"):
            with suppress(FileNotFoundError):  # another fetch has just removed it
                if time.time() - old.stat().st_mtime > _STALE:
                    shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    except OSError as error:
        raise _unwritable(target, error) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save(stored: Stored, target: Path, scratch_folder: Path) -> None:
    """Write the file in the scratch folder, then move it into place in one step."""
    written = scratch_folder / target.name
    arrays: dict[str, Any] = {**stored.arrays, "note": np.asarray(stored.note)}
    try:
        with written.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        written.replace(target)
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {target} ({error.strerror or error}). Free space, or choose another folder with SPARRING_DATA."
    )


def read_stored(path: Path) -> Stored:
    """Read a stored file; one with other contents is refused."""
    found = read_npz(path, (*KEYS, "note"))
    if any(key not in found or found[key].dtype != np.uint8 for key in KEYS):
        raise UserError(f"{path} lacks some of {', '.join(KEYS)} as uint8. Remove it and fetch it again.")
    note = found["note"] if "note" in found else np.asarray("")
    return Stored({key: found[key] for key in KEYS}, str(note) if note.dtype.kind == "U" else "")


def as_dataset(stored: Stored, *, name: str, classes: tuple[str, ...]) -> Dataset:
    """The stored arrays as a Dataset."""
    x_train, y_train, x_test, y_test = (stored.arrays[key] for key in KEYS)
    return Dataset(
        name=name,
        classes=classes,
        train=tensor_split(x_train, y_train.astype(np.int64)),
        test=tensor_split(x_test, y_test.astype(np.int64)),
        note=stored.note,
    )
