"""SVHN, cropped digits: from the official .mat files, from an .npz, or from lossless sheets rebuilt from format 1.

For every source the counts of the classes must be SVHN's, and digit 0 has label 0. The note names the source; results
on the rebuilt images must say so. Must not know how the files were downloaded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sparring.data.dataset import Dataset
from sparring.data.mat5 import read_mat
from sparring.data.npz import images, labels, read_npz
from sparring.data.stored import KEYS, Stored, as_dataset, read_stored, sha256
from sparring.errors import UserError
from sparring.files.regular import irregular, shown

CLASSES = tuple(str(digit) for digit in range(10))
COUNTS = {  # images of each digit, 0 to 9
    "train": (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
    "test": (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
}
SHEETS = {"train": 4, "test": 2}  # files of the rebuilt images
REBUILT_SHA256 = {  # of the raw uint8 NHWC arrays
    "x_train": "70ccea0ab5749c854004d7ad423f8c665698265daa5a54bd3004ceea491c9e7b",
    "x_test": "5c2f9cb4e5d097cfab0ffcc04865b4616cc87ae4de4b65e8f3570d73e1c6f76e",
}
REBUILT_NOTE = "SVHN, rebuilt from format 1"
_TILE = 32  # pixels
_SHEET_PIXELS = 2**25  # of one sheet: the largest has 19 million


def load_svhn(path: Path) -> Dataset:
    """The stored file as a Dataset."""
    if not path.is_file():
        raise UserError(
            f"SVHN is not at {path}. Get it with: sparring data fetch svhn --source FOLDER, "
            "where FOLDER holds train_32x32.mat and test_32x32.mat."
        )
    return as_dataset(read_checked(path), name="svhn", classes=CLASSES)


def read_checked(path: Path) -> Stored:
    """The stored file; refused unless shapes and class counts are SVHN's."""
    return _checked(read_stored(path), path)


def read_source(path: Path) -> Stored:
    """SVHN from a folder of .mat files or sheets, or from an .npz file."""
    if (path / "train_32x32.mat").is_file() and (path / "test_32x32.mat").is_file():
        return _checked(_from_mat(path), path)
    if (path / "labels.npz").is_file() and (path / "train_0.webp").is_file():
        return _checked(_from_sheets(path), path)
    if path.suffix == ".npz" and path.is_file():
        return _checked(_from_npz(path), path)
    raise UserError(
        f"no SVHN in {path}. Give a folder with train_32x32.mat and test_32x32.mat, "
        "or an .npz file with x_train, y_train, x_test, y_test."
    )


def _checked(stored: Stored, path: Path) -> Stored:
    for part, counts in COUNTS.items():
        x, y = stored.arrays[f"x_{part}"], stored.arrays[f"y_{part}"]
        if x.shape != (sum(counts), _TILE, _TILE, 3) or y.shape != (sum(counts),):
            raise UserError(
                f"{path}: the {part} part has shape {x.shape}, SVHN's is {(sum(counts), _TILE, _TILE, 3)}. "
                "For other arrays use npz:PATH."
            )
        if tuple(np.bincount(y, minlength=10).tolist()) != counts:
            raise UserError(
                f"{path}: the {part} labels are not SVHN's (digit 0 must have label 0). For other arrays use npz:PATH."
            )
    return stored


def _from_mat(folder: Path) -> Stored:
    arrays: dict[str, NDArray[np.uint8]] = {}
    for part in ("train", "test"):
        path, count = folder / f"{part}_32x32.mat", sum(COUNTS[part])
        # The official sizes are the bounds: nothing larger is unpacked. Labels may be doubles.
        found = read_mat(path, {"X": count * _TILE * _TILE * 3, "y": count * 8})
        x, y = found.get("X"), found.get("y")
        if x is None or y is None or x.dtype != np.uint8 or x.ndim != 4 or y.size != x.shape[3]:
            raise UserError(f"{path} lacks X (uint8, 32x32x3xn) or y (n). Get the official file.")
        if not ((y >= 1) & (y <= 10)).all():
            raise UserError(f"{path} has labels outside of 1 to 10, where 10 is the digit 0. Get the official file.")
        arrays[f"x_{part}"] = np.ascontiguousarray(x.transpose(3, 0, 1, 2))  # HWCN
        arrays[f"y_{part}"] = (y.reshape(-1) % 10).astype(np.uint8)  # label 10 is the digit 0
    return Stored(arrays, "SVHN, from the official .mat files")


def _from_npz(path: Path) -> Stored:
    found = read_npz(path, (*KEYS, "note"))
    missing = [key for key in KEYS if key not in found]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}. SVHN as .npz has {', '.join(KEYS)}.")
    arrays: dict[str, NDArray[np.uint8]] = {}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = np.ascontiguousarray(images(found[f"x_{part}"], f"x_{part}"))
        y = labels(found[f"y_{part}"], f"y_{part}")
        if len(y) and y.max() > 9:
            raise UserError(f"{path}: y_{part} has the label {y.max()}. SVHN's are 0 to 9, digit 0 has label 0.")
        arrays[f"y_{part}"] = y.astype(np.uint8)
    rebuilt = all(sha256(arrays[key]) == expected for key, expected in REBUILT_SHA256.items())
    note = str(found["note"]) if "note" in found and found["note"].dtype.kind == "U" else ""
    return Stored(arrays, REBUILT_NOTE if rebuilt else note or f"SVHN, from {path.name}")


def _from_sheets(folder: Path) -> Stored:
    """Sheets of 32x32 tiles, row by row; the images are divided evenly, the first sheets having one more."""
    found = read_npz(folder / "labels.npz", ("y_train", "y_test"))
    arrays: dict[str, NDArray[np.uint8]] = {}
    for part, sheets in SHEETS.items():
        total, y = sum(COUNTS[part]), found.get(f"y_{part}")
        if y is None or y.dtype != np.uint8:
            raise UserError(f"{folder / 'labels.npz'} lacks y_{part} as uint8. Get the folder again.")
        counts = [total // sheets + (i < total % sheets) for i in range(sheets)]
        tiles = [_tiles(folder / f"{part}_{i}.webp", count) for i, count in enumerate(counts)]
        arrays[f"x_{part}"], arrays[f"y_{part}"] = np.concatenate(tiles), y
    for key, expected in REBUILT_SHA256.items():
        if sha256(arrays[key]) != expected:
            raise UserError(f"the sheets in {folder} are damaged: the sha256 of {key} differs. Get the folder again.")
    return Stored(arrays, REBUILT_NOTE)


def _tiles(path: Path, count: int) -> NDArray[np.uint8]:
    try:
        if kind := irregular(path):
            raise OSError(kind)
        with Image.open(path, formats=("WEBP",)) as image:
            if image.width * image.height > _SHEET_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels")
            sheet = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read ({shown(str(error), 120)}). Get the folder again.") from None
    rows, columns = sheet.shape[0] // _TILE, sheet.shape[1] // _TILE
    if rows * columns < count:
        raise UserError(f"{path} has {rows * columns} tiles, expected {count}. Get the folder again.")
    grid = sheet[: rows * _TILE, : columns * _TILE].reshape(rows, _TILE, columns, _TILE, 3)
    return grid.swapaxes(1, 2).reshape(-1, _TILE, _TILE, 3)[:count]
