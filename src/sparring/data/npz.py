"""Read arrays from an .npz file: x_train, y_train and, optionally, x_test, y_test.

x is uint8, (n, h, w, c), (n, c, h, w) or (n, h, w), with 1, 3 or 4 channels; y numbers classes from 0. Any other
content is refused with the line that fixes it; nothing is guessed or silently rescaled, and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparring.data.dataset import Dataset, Split, evenly, interleaved, tensor_split
from sparring.data.mapped_npz import (
    Member,
    image_bytes,
    map_images,
    member_keys,
    read_array,
    read_member,
    unpack_images,
)
from sparring.data.memory import host_room
from sparring.errors import UserError
from sparring.files.regular import require_regular, shown

_CHANNELS = (1, 3, 4)
_TEST_FRACTION = 0.2
_KEYS = ("x_train", "y_train", "x_test", "y_test")
_SHOWN = 8  # keys in a message


def read_npz(path: Path, wanted: Collection[str]) -> dict[str, NDArray[Any]]:
    """The wanted arrays that the file has, by key. Others are not read."""
    return {key: read_array(path, key) for key in npz_keys(path) if key in wanted}


def npz_keys(path: Path) -> list[str]:
    """The keys of the file; what is not an .npz file is refused."""
    if not path.exists():
        raise UserError(f"no such file: {path}. Give a .npz file with x_train, y_train, x_test, y_test.")
    require_regular(path)
    return member_keys(path)


def load_npz(path: Path, *, room: int | None = None) -> Dataset:
    """The arrays of the file as a Dataset; without x_test, a fifth of every class becomes test data.

    Args:
        room: bytes that images may take in memory; larger files are mapped. Half of the available memory unless given.
    """
    _check_keys(path, npz_keys(path))
    if image_bytes(path) > (host_room() if room is None else room):
        return _load_mapped(path)
    arrays = read_npz(path, _KEYS)
    x, y = images(arrays["x_train"], "x_train"), labels(arrays["y_train"], "y_train")
    _check_count(x, y, "train")
    classes = _class_count(y)
    note = f"arrays from {path.name}"
    if "x_test" in arrays:
        x_test, y_test = images(arrays["x_test"], "x_test"), labels(arrays["y_test"], "y_test")
        _check_count(x_test, y_test, "test")
        if x_test.shape[1:] != x.shape[1:]:
            raise UserError(
                f"x_train holds images of {_shape(x)} and x_test of {_shape(x_test)} (height x width x channels). "
                "Give both the same shape."
            )
        if y_test.max() >= classes:
            raise _untrained(y_test, classes)
    else:
        test = evenly(y, _TEST_FRACTION)
        if not test.any():
            raise UserError("x_train has one image per class, so none can be test data. Add images, or x_test.")
        x, y, x_test, y_test = x[~test], y[~test], x[test], y[test]
        order = interleaved(y_test)
        x_test, y_test = x_test[order], y_test[order]
        note += "; no x_test in it: a fifth of every class of x_train is test data"
    return Dataset(
        name=path.stem,
        classes=tuple(str(label) for label in range(classes)),
        train=tensor_split(x, y),
        test=tensor_split(x_test, y_test),
        note=note,
        carved="x_test" not in arrays,
    )


def _load_mapped(path: Path) -> Dataset:
    """The same data set as from memory, with images that stay in the file, or in the cache."""
    labelled = read_npz(path, ("y_train", "y_test"))
    shapes = {key: read_member(path, key) for key in ("x_train", "x_test") if f"y_{key[2:]}" in labelled}
    for key, member in shapes.items():
        _check_member(path, key, member)
    y = labels(labelled["y_train"], "y_train")
    classes = _class_count(y)
    note = f"arrays from {path.name}, read as they are needed: they are larger than half of the memory"
    every = np.arange(len(y))
    if "x_test" in shapes:
        y_test = labels(labelled["y_test"], "y_test")
        if y_test.max() >= classes:
            raise UserError(
                f"y_test has the label {y_test.max()}, but y_train only 0 to {classes - 1}. Train on every class."
            )
        parts = {"x_train": {"x_train": every}, "x_test": {"x_test": np.arange(len(y_test))}}
        whole = all(member.begins is not None for member in shapes.values())
        found = (
            {key: map_images(path, member) for key, member in shapes.items()} if whole else unpack_images(path, parts)
        )
    else:
        test = evenly(y, _TEST_FRACTION)
        if not test.any():
            raise UserError("x_train has one image per class, so none can be test data. Add images, or x_test.")
        rows = np.flatnonzero(test)[interleaved(y[test])]
        found = unpack_images(path, {"x_train": {"x_train": np.flatnonzero(~test), "x_test": rows}})
        y, y_test = y[~test], y[rows]
        note += "; no x_test in it: a fifth of every class of x_train is test data"
    for key, count in (("x_train", len(y)), ("x_test", len(y_test))):
        if len(found[key]) != count:
            raise UserError(
                f"{key} has {len(found[key])} images but y_{key[2:]} {count} labels. Give one label per image."
            )
    return Dataset(
        name=path.stem,
        classes=tuple(str(label) for label in range(classes)),
        train=Split(found["x_train"], torch.from_numpy(y), mapped=True),
        test=Split(found["x_test"], torch.from_numpy(y_test), mapped=True),
        note=note,
        carved="x_test" not in shapes,
    )


def _untrained(y_test: NDArray[np.int64], classes: int) -> UserError:
    return UserError(
        f"y_test has the label {y_test.max()}, but y_train only 0 to {classes - 1}. "
        "Train on every class that is tested."
    )


def _check_member(path: Path, key: str, member: Member) -> None:
    shape = member.shape
    fits = len(shape) == 3 or (len(shape) == 4 and (shape[3] in _CHANNELS or shape[1] in _CHANNELS))
    if member.dtype != np.uint8 or member.fortran or not fits or 0 in shape:
        raise UserError(
            f"{key} of {path} is {member.dtype} of shape {shape}. A file larger than half of the memory must hold "
            "uint8 images, (n, height, width, channels), with 1, 3 or 4 channels."
        )


def _check_keys(path: Path, keys: Collection[str]) -> None:
    needed = ["x_train", "y_train"] + ["x_test", "y_test"] * ("x_test" in keys or "y_test" in keys)
    missing = [key for key in needed if key not in keys]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)} (it has {listed_keys(keys)}). "
            "Save it with np.savez(path, x_train=..., y_train=..., x_test=..., y_test=...)."
        )


def listed_keys(keys: Collection[str]) -> str:
    """The keys of a file for a message; the first of many."""
    some = [shown(key) for key in sorted(keys)[:_SHOWN]]
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{', '.join(some)}{more}" or "nothing"


def images(x: NDArray[Any], key: str) -> NDArray[np.uint8]:
    """The images as uint8 NHWC. Where both layouts fit, 1, 3 or 4 in the last place means NHWC."""
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and x.shape[3] not in _CHANNELS and x.shape[1] in _CHANNELS:
        x = x.transpose(0, 2, 3, 1)
    elif x.ndim != 4 or x.shape[3] not in _CHANNELS:
        raise UserError(
            f"{key} has the shape {x.shape}. Images must be (n, height, width, channels), "
            "(n, channels, height, width) or (n, height, width), with 1, 3 or 4 channels."
        )
    if 0 in x.shape:
        raise UserError(f"{key} is empty (shape {x.shape}). Put at least one image in it.")
    if x.dtype == np.uint8:
        if x.max() == 1:
            raise UserError(f"{key} is uint8 with no value above 1, of 255. Save {key} * 255 if 1 means white.")
        return x
    if np.issubdtype(x.dtype, np.floating):
        return _levels(x, key)
    raise UserError(f"{key} is {x.dtype}; images must be uint8, 0 to 255. Save {key}.astype(np.uint8).")


def _levels(x: NDArray[Any], key: str) -> NDArray[np.uint8]:
    """Floats in [0, 1] that are multiples of 1/255 (within float32 rounding) as uint8; others are refused."""
    low, high = float(x.min()), float(x.max())
    if not (low >= 0 and high <= 1):  # also refuses NaN
        raise UserError(
            f"{key} is {x.dtype} from {low:g} to {high:g}; floats must lie in [0, 1]. "
            "Save uint8 images, 0 to 255, before any normalisation."
        )
    scaled = x.astype(np.float64) * 255
    whole = np.rint(scaled)
    if np.abs(scaled - whole).max() > 255 * np.finfo(np.float32).eps:
        raise UserError(
            f"{key} is {x.dtype} with values between the 256 levels of uint8. "
            f"Accept the rounding by saving np.rint({key} * 255).astype(np.uint8)."
        )
    return whole.astype(np.uint8)


def labels(y: NDArray[Any], key: str) -> NDArray[np.int64]:
    """The labels as int64, (n,); a column (n, 1) is flattened."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise UserError(f"{key} has the shape {y.shape}; give one class number per image, shape (n,).")
    if y.dtype.kind in "US":
        raise UserError(f"{key} holds words; labels must be integers. Save np.unique({key}, return_inverse=True)[1].")
    if not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"{key} is {y.dtype}; labels must be integers from 0. Save {key}.astype(np.int64).")
    y = y.astype(np.int64)
    if len(y) and y.min() < 0:
        raise UserError(f"{key} has the negative label {y.min()}; number the classes from 0.")
    return y


def _check_count(x: NDArray[np.uint8], y: NDArray[np.int64], part: str) -> None:
    if len(x) != len(y):
        raise UserError(f"x_{part} has {len(x)} images but y_{part} {len(y)} labels. Give one label per image.")


def _class_count(y: NDArray[np.int64]) -> int:
    present = np.unique(y)
    absent = np.setdiff1d(np.arange(min(int(present[-1]), len(y) + 1)), present)
    if len(absent):
        raise UserError(
            f"y_train has labels up to {present[-1]} but none is {absent[0]}. Number the classes from 0 without gaps: "
            "np.unique(y, return_inverse=True)[1]."
        )
    if len(present) < 2:
        raise UserError("y_train has one class only. Give two or more.")
    return len(present)


def _shape(x: NDArray[np.uint8]) -> str:
    return "x".join(str(length) for length in x.shape[1:])
