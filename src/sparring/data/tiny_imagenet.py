"""Tiny ImageNet from its folder: train/CLASS/images/*.JPEG, val/images with val_annotations.txt, wnids.txt, words.txt.

The validation images are the test part: the official test images have no labels. Classes are in the order of wnids.txt
and have their first word from words.txt as name. Must not know how the folder was downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track

from sparring.data.dataset import Dataset, interleaved
from sparring.data.stored import Stored, as_dataset, read_stored
from sparring.errors import UserError
from sparring.files.regular import require_regular, shown

CLASSES, SIDE = 200, 64
PER_CLASS = {"train": 500, "test": 50}  # images
_BAR_FROM = 2_000  # files
_TEXT = 2**24  # characters of a list: words.txt has 2.6 million


def load_tiny_imagenet(path: Path) -> Dataset:
    """The stored file as a Dataset."""
    if not path.is_file():
        raise UserError(
            f"Tiny ImageNet is not at {path}. Get it with: sparring data fetch tiny-imagenet --source FOLDER, "
            "where FOLDER is tiny-imagenet-200, unpacked."
        )
    stored = read_checked(path)
    note, _, names = stored.note.partition("; classes: ")
    classes = tuple(names.split(", "))
    if len(classes) != CLASSES:
        raise UserError(f"{path} lacks the names of its classes. Remove it and fetch it again.")
    return as_dataset(Stored(stored.arrays, note), name="tiny-imagenet", classes=classes)


def read_checked(path: Path) -> Stored:
    """The stored file; refused unless shapes and class counts are Tiny ImageNet's."""
    return _checked(read_stored(path), path)


def read_source(path: Path) -> Stored:
    """Tiny ImageNet from its unpacked folder, or from the folder that contains it."""
    folder = next((place for place in (path, path / "tiny-imagenet-200") if (place / "wnids.txt").is_file()), None)
    if folder is None:
        raise UserError(
            f"no Tiny ImageNet in {path}: wnids.txt is missing. Give the folder that tiny-imagenet-200.zip unpacks to."
        )
    ids = _lines(folder / "wnids.txt")
    if len(ids) != CLASSES or len(set(ids)) != CLASSES:
        raise UserError(f"{folder / 'wnids.txt'} names {len(set(ids))} classes, expected {CLASSES}. Get it again.")
    if not all(name.isascii() and name.isalnum() for name in ids):  # they become parts of paths
        raise UserError(f"{folder / 'wnids.txt'} is damaged: it holds a name that no class has. Get it again.")
    number = {name: label for label, name in enumerate(ids)}
    train = [(file, number[name]) for name in ids for file in _images(folder / "train" / name / "images")]
    places = [line.split("\t")[:2] for line in _lines(folder / "val" / "val_annotations.txt")]
    if not all(len(place) == 2 and place[0].isprintable() and place[1] in number for place in places):
        raise UserError(
            f"{folder / 'val' / 'val_annotations.txt'} names a class that wnids.txt lacks, or no file. Get it again."
        )
    test = sorted((folder / "val" / "images" / Path(file).name, number[name]) for file, name in places)
    labels = np.asarray([label for _, label in test], dtype=np.int64)
    test = [test[place] for place in interleaved(labels)] if test else []
    arrays: dict[str, NDArray[np.uint8]] = {}
    for part, files in (("train", train), ("test", test)):
        if len(files) != CLASSES * PER_CLASS[part]:
            raise UserError(
                f"{folder} has {len(files)} {part} images, Tiny ImageNet has {CLASSES * PER_CLASS[part]}. "
                "Unpack the archive again."
            )
        arrays[f"x_{part}"] = _pixels([file for file, _ in files])
        arrays[f"y_{part}"] = np.asarray([label for _, label in files], dtype=np.uint8)
    names = ", ".join(_names(folder / "words.txt", ids))
    note = f"Tiny ImageNet, from its folder; its validation images are the test part; classes: {names}"
    return _checked(Stored(arrays, note), path)


def _names(path: Path, ids: Sequence[str]) -> list[str]:
    """The first word of every class, with its number where two classes share it; without words.txt, the numbers."""
    words: dict[str, str] = {}
    if path.is_file():
        for line in _lines(path):
            key, _, text = line.partition("\t")
            words[key] = text.split(",")[0].strip()
    names = [words.get(name) or name for name in ids]
    return [f"{word} ({name})" if names.count(word) > 1 else word for word, name in zip(names, ids, strict=True)]


def _lines(path: Path) -> list[str]:
    try:
        require_regular(path)
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_TEXT + 1)
        if len(text) > _TEXT:
            raise UserError(f"{path} has more than {_TEXT:,} characters. Unpack the archive again.")
        return [line for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}). Unpack the archive again.") from None


def _images(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix.lower() in (".jpeg", ".jpg"))
    except OSError as error:
        raise UserError(f"cannot read {folder} ({error.strerror}). Unpack the archive again.") from None


def _pixels(files: Sequence[Path]) -> NDArray[np.uint8]:
    x = np.empty((len(files), SIDE, SIDE, 3), dtype=np.uint8)
    bar = track(files, "reading images", console=Console(stderr=True), transient=True, disable=len(files) < _BAR_FROM)
    for i, path in enumerate(bar):
        try:
            require_regular(path)
            with Image.open(path, formats=("JPEG",)) as image:
                if image.size != (SIDE, SIDE):
                    raise UserError(f"{path} has {image.size} pixels, expected {(SIDE, SIDE)}. Get it again.")
                x[i] = np.asarray(image.convert("RGB"))  # some are grey
        except UserError:
            raise
        except Exception as error:  # decoders raise almost anything on a damaged image
            raise UserError(f"{path} cannot be read ({shown(str(error), 120)}). Unpack the archive again.") from None
    return x


def _checked(stored: Stored, path: Path) -> Stored:
    for part, count in PER_CLASS.items():
        x, y = stored.arrays[f"x_{part}"], stored.arrays[f"y_{part}"]
        if (
            x.shape != (CLASSES * count, SIDE, SIDE, 3)
            or np.bincount(y, minlength=CLASSES).tolist() != [count] * CLASSES
        ):
            raise UserError(f"{path} is damaged: its {part} part is not Tiny ImageNet's. Fetch it again.")
    return stored
