"""Data sets by name: `load("digits")`, `load("npz:arrays.npz")`, `load("folder:photos?size=32")`.

`load("cifar10:bird+deer")` takes these classes of a built-in set. This module knows the names and nothing of formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sparring.data.cifar import load_cifar10
from sparring.data.cifar100 import load_cifar100
from sparring.data.dataset import Dataset, only
from sparring.data.digits import load_digits
from sparring.data.idx import load_idx
from sparring.data.image_folder import load_folder
from sparring.data.npz import load_npz
from sparring.data.stored import stored_path
from sparring.data.svhn import load_svhn
from sparring.data.tiny_imagenet import load_tiny_imagenet
from sparring.errors import UserError, unknown

SOURCES = {
    "digits": "scikit-learn's handwritten digits, 8x8; the default, always present",
    "cifar10": "CIFAR-10, 32x32, ten classes",
    "svhn": "SVHN, cropped house numbers, 32x32",
    "cifar100": "CIFAR-100, 32x32, a hundred classes",
    "mnist": "MNIST, handwritten digits, 28x28, grey",
    "fashion-mnist": "Fashion-MNIST, clothes, 28x28, grey",
    "tiny-imagenet": "Tiny ImageNet, 64x64, 200 classes",
    "npz": "npz:PATH, your arrays: x_train, y_train, x_test, y_test",
    "folder": "folder:PATH, your images, one folder per class; ?size=32 scales them",
}


class Availability(NamedTuple):
    """A row of `sparring data list`."""

    name: str
    present: bool
    where: str
    how: str  # how to get it, or how to use it


def load(spec: str, *, root: Path | None = None) -> Dataset:
    """The data set of that name; `root` is the folder of fetched ones ($SPARRING_DATA or ~/.cache/sparring)."""
    name, colon, rest = spec.partition(":")
    if name == "own":
        raise UserError(
            f"the data of this run ({spec}) were handed in from Python and have no name. Hand them in again: "
            "sparring.train(..., data=..., resume=True), sparring.evaluate(model, data); or name a source: --data."
        )
    if name not in SOURCES:
        raise _no_such(spec, name)
    if name in ("npz", "folder"):
        if not rest:
            raise UserError(f"{spec!r} lacks its path. Write {name}:PATH.")
        return load_npz(Path(rest).expanduser()) if name == "npz" else _load_folder(rest)
    if colon and (not rest or "/" in rest):
        raise UserError(
            f"{name} takes no path, got {spec!r}. Write {name}, or {name}:CLASS+CLASS for some of its classes; "
            "for your own data npz:PATH or folder:PATH."
        )
    data = _built_in(name, root)
    return only(data, rest.split("+")) if rest else data


def _built_in(name: str, root: Path | None) -> Dataset:
    if name == "digits":
        return load_digits()
    path = stored_path(name, root)
    if name in ("mnist", "fashion-mnist"):
        return load_idx(name, path)
    if name == "tiny-imagenet":
        return load_tiny_imagenet(path)
    readers = {"cifar10": load_cifar10, "svhn": load_svhn, "cifar100": load_cifar100}
    return readers[name](path)


def _no_such(spec: str, name: str) -> UserError:
    """The error for an unknown name, or for a path without its prefix."""
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return UserError(f"{spec!r} is a folder. To use the images in it write folder:{spec}.")
    if path.suffix == ".npz" or path.is_file():
        return UserError(f"{spec!r} is a file. To use the arrays in it write npz:{spec}.")
    return unknown("data source", name, SOURCES)


def _load_folder(rest: str) -> Dataset:
    whole = Path(rest).expanduser()
    path, mark, query = rest.rpartition("?")
    if not mark or whole.is_dir():  # the name of a folder may contain a question mark
        return load_folder(whole)
    key, _, value = query.partition("=")
    if key != "size":
        raise UserError(f"folder: has no option {key!r}, only size. Write 'folder:{path}?size=32'.")
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 512):
        right = f"'folder:{path}?size=32'"
        raise UserError(f"size must be a number of pixels from 1 to 512, got {value!r}. Write {right}.")
    return load_folder(Path(path).expanduser(), size=int(value))


def describe(*, root: Path | None = None) -> list[Availability]:
    """Every source: whether it is present, where, and how to get it."""
    fetched = []
    for name in ("cifar10", "svhn", "cifar100", "mnist", "fashion-mnist", "tiny-imagenet"):
        path, source = stored_path(name, root), "" if name.startswith("cifar") else " --source FOLDER"
        fetched.append(Availability(name, path.is_file(), str(path), f"sparring data fetch {name}{source}"))
    return [
        Availability("digits", True, "in scikit-learn", "nothing to do"),
        *fetched,
        Availability("npz:PATH", True, "your file", "np.savez(PATH, x_train=..., y_train=..., x_test=..., y_test=...)"),
        Availability("folder:PATH", True, "your folder", "PATH/<class>/*.png or PATH/{train,test}/<class>/*.png"),
    ]
