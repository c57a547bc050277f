"""Read images from a folder: PATH/<class>/*.png, or PATH/train/<class> and PATH/test/<class>.

Two passes: headers first, so that bad files, mixed sizes and images too large for memory fail early; then pixels. The
order is by name, so the same folder gives the same data set. Must not know training.
"""

from __future__ import annotations

import io
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import track
from torch import Tensor

from sparring.data.cache import entry, mapped, new_array, stamp
from sparring.data.dataset import Dataset, Split, evenly, in_order, interleaved, tensor_split
from sparring.data.memory import host_room
from sparring.errors import UserError
from sparring.files.regular import irregular, shown

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"})  # 8 bits per channel
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")  # not EPS and others, whose decoders run programs
_MOST_PIXELS = 50_000_000  # of one file: with transparency it takes 16 bytes per pixel while it is scaled
_ORIENTATION = 0x0112  # EXIF tag
_TURNED = (5, 6, 7, 8)  # values that swap height and width
_BAR_FROM = 2_000  # files
_LARGEST = 512  # pixels per side: the networks are designed for 32, and batches of larger images exhaust memory
_SYSTEM_FILES = ("Thumbs.db", "desktop.ini")  # left in image folders by Windows
_TEST_FRACTION = 0.2


@dataclass(frozen=True)
class _Header:
    size: tuple[int, int]  # height, width, after the EXIF rotation
    grey: bool


@dataclass(frozen=True)
class _Listing:
    files: tuple[Path, ...]
    y: NDArray[np.int64]
    unused: Counter[str]  # counts by kind: files that are not images


def load_folder(path: Path, *, size: int | None = None, room: int | None = None) -> Dataset:
    """The images as a Dataset; with `size`, each is scaled and centre-cropped to size x size.

    Args:
        room: bytes that pixels may take in memory; more are unpacked once to the cache and read from there. Half of the
            available memory unless given.
    """
    if path.is_file():
        raise UserError(f"{path} is a file. Give the folder that holds a folder of images for each class.")
    if not path.is_dir():
        raise UserError(f"no such folder: {path}. Give one that holds a folder of images for each class.")
    train_dir, test_dir = path / "train", path / "test"
    has_train = bool(train_dir.is_dir() and _subfolders(train_dir))
    top = train_dir if has_train else path
    classes = tuple(folder.name for folder in _subfolders(top))
    if len(classes) < 2:
        raise UserError(
            f"{top} holds {len(classes)} class folder{'' if len(classes) == 1 else 's'}; two or more are needed. "
            f"Put the images of each class in a folder of its own: {top}/cat/1.png, {top}/dog/1.png."
        )
    listing, note = _list(top, classes), f"images from {path.resolve().name}"
    if has_train and test_dir.is_dir():
        unknown = [folder.name for folder in _subfolders(test_dir) if folder.name not in classes]
        if unknown:
            raise UserError(
                f"{test_dir} has a class {unknown[0]!r} that {train_dir} lacks. Add it there, or remove it."
            )
        present = tuple(folder.name for folder in _subfolders(test_dir))
        if not present:
            raise UserError(f"{test_dir} holds no class folders. Fill it like {train_dir}, or remove it.")
        test_listing = _list(test_dir, classes, present)
        unused = listing.unused + test_listing.unused
    else:
        test = evenly(listing.y, _TEST_FRACTION)
        if not test.any():
            raise UserError(f"{top} has one image per class, so none can be test data. Add more.")
        listing, test_listing = _where(listing, np.flatnonzero(~test)), _where(listing, np.flatnonzero(test))
        note += "; no test folder: a fifth of every class is test data"
        unused = listing.unused
    test_listing = _where(test_listing, interleaved(test_listing.y))
    others = [folder.name for folder in _subfolders(path) if has_train and folder not in (train_dir, test_dir)]
    others += [f"{count} x {kind}" for kind, count in unused.items()]
    if others:
        note += f"; not used: {', '.join(others)}"

    headers = _read_headers(listing.files + test_listing.files)
    grey = all(header.grey for header in headers)
    shape = (size, size) if size is not None else _one_size(path, headers)
    _check_size(path, shape)
    if size is not None:
        note += f"; scaled and cropped to {size}x{size}"
    if len(headers) * shape[0] * shape[1] * (1 if grey else 3) > (host_room() if room is None else room):
        train, test_split = _through_cache(path, listing, test_listing, shape, grey)
        note += "; read from a cache of their pixels, which are larger than half of the memory"
    else:
        train = tensor_split(_read_pixels(listing.files, shape, grey), listing.y)
        test_split = tensor_split(_read_pixels(test_listing.files, shape, grey), test_listing.y)
    return Dataset(
        name=path.resolve().name,
        classes=classes,
        train=train,
        test=test_split,
        note=note,
        carved=not (has_train and test_dir.is_dir()),
    )


def read_images(files: Sequence[Path], *, size: tuple[int, int], channels: int) -> Tensor:
    """Image files as `load_folder` reads them: uint8, (n, channels, *size), scaled and cropped where the size differs.

    Raises:
        UserError: some cannot be read; all of them are named.
    """
    if channels not in (1, 3):
        raise UserError(f"image files have 1 channel (grey) or 3 (RGB), not {channels}. Give the pixels from Python.")
    paths = tuple(files)
    _read_headers(paths)
    return in_order(torch.from_numpy(_read_pixels(paths, size, channels == 1).transpose(0, 3, 1, 2)))


def _subfolders(path: Path) -> list[Path]:
    return [child for child in _children(path) if child.is_dir()]


def _children(path: Path) -> list[Path]:
    """The contents of the folder by name, without hidden files."""
    try:
        return sorted(child for child in path.iterdir() if not child.name.startswith("."))
    except OSError as error:
        raise UserError(f"cannot read the folder {path} ({error.strerror}). Check its permissions.") from None


def _list(top: Path, classes: tuple[str, ...], present: tuple[str, ...] | None = None) -> _Listing:
    """The image files of the classes, by class and name."""
    files: list[Path] = []
    y: list[int] = []
    unused: Counter[str] = Counter()
    for label, name in enumerate(classes):
        if present is not None and name not in present:
            continue
        children = [child for child in _children(top / name) if child.name not in _SYSTEM_FILES]
        unused += Counter(_kind(child) for child in children if child.is_dir() or child.suffix.lower() not in _SUFFIXES)
        named = [child for child in children if child.suffix.lower() in _SUFFIXES]
        inside = [child for child in named if not child.is_dir()]  # a broken link or FIFO is reported as a bad file
        if not inside:
            deeper = next((child for child in children if child.is_dir()), None)
            raise UserError(
                f"the class folder {top / name} has no images directly in it ({', '.join(sorted(_SUFFIXES))}). "
                + ("Add some, or remove the folder." if deeper is None else f"Are they in {deeper}? Move them up.")
            )
        files += inside
        y += [label] * len(inside)
    return _Listing(tuple(files), np.asarray(y, dtype=np.int64), unused)


def _kind(child: Path) -> str:
    """The kind of an entry that is not an image."""
    if child.is_dir():
        return "folder inside a class"
    return child.suffix.lower() or "file without a suffix"


def _where(listing: _Listing, places: NDArray[np.int64]) -> _Listing:
    return _Listing(tuple(listing.files[i] for i in places), listing.y[places], listing.unused)


class _Clipped(io.BufferedReader):
    """A file that is never asked for more bytes than it has: Python would allocate what a chunk of a PNG claims."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self._size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """At most `size` bytes, and at most those of the file."""
        return super().read(size if size is None or size < 0 else min(size, self._size))


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image of a known format; a decompression bomb and what is not a regular file raise."""
    if kind := irregular(path):
        raise OSError(0, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with _Clipped(path) as file, Image.open(file, formats=_FORMATS) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise Image.DecompressionBombError
            yield image


def _read_headers(files: tuple[Path, ...]) -> list[_Header]:
    headers: list[_Header] = []
    bad: list[str] = []
    for path in _with_bar(files, "reading headers"):
        header = _header(path)
        if isinstance(header, _Header):
            headers.append(header)
        else:
            bad.append(f"{path} ({header})")
    if bad:
        raise _bad_files(bad)
    return headers


def _header(path: Path) -> _Header | str:
    """The file's header, or why it cannot be used."""
    try:
        with _opened(path) as image:
            if image.mode not in _MODES:
                return f"pixels of type {image.mode}: save it with 8 bits per channel"
            turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
            size = (image.width, image.height) if turned else (image.height, image.width)
            return _Header(size, image.mode in ("1", "L"))
    except Exception as error:  # decoders raise almost anything on a damaged image
        return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return "too many pixels: it may be a decompression bomb"
    return shown(str(error), 120) or type(error).__name__


def _bad_files(bad: list[str]) -> UserError:
    more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
    count = "1 file" if len(bad) == 1 else f"{len(bad)} files"
    return UserError(f"{count} cannot be used: {'; '.join(bad[:5])}{more}. Fix or remove them, then try again.")


def _one_size(path: Path, headers: list[_Header]) -> tuple[int, int]:
    sizes = Counter(header.size for header in headers)
    if len(sizes) > 1:
        seen = ", ".join(f"{height}x{width} ({count})" for (height, width), count in sizes.most_common(3))
        more = f" and {len(sizes) - 3} more" if len(sizes) > 3 else ""
        raise UserError(
            f"images under {path} differ in size: {seen}{more}. To scale and crop all, write 'folder:{path}?size=32'."
        )
    return headers[0].size


def _through_cache(
    path: Path, listing: _Listing, test_listing: _Listing, shape: tuple[int, int], grey: bool
) -> tuple[Split, Split]:
    """Both parts as mapped files, unpacked where the cache has them not."""
    parts = {"x_train": listing, "x_test": test_listing}

    def write(folder: Path) -> None:
        for name, part in parts.items():
            _read_pixels(part.files, shape, grey, folder / f"{name}.npy")

    files = listing.files + test_listing.files
    folder = entry(stamp("folder", 1, shape, grey, len(listing.files), files=files), write)
    train, test = (
        Split(mapped(folder / f"{name}.npy"), torch.from_numpy(part.y), mapped=True) for name, part in parts.items()
    )
    return train, test


def _check_size(path: Path, shape: tuple[int, int]) -> None:
    if max(shape) > _LARGEST:
        raise UserError(
            f"images of {shape[0]}x{shape[1]} are too large for these networks, designed for 32x32. "
            f"To scale them down, write 'folder:{path}?size=64'."
        )


def _read_pixels(
    files: tuple[Path, ...], shape: tuple[int, int], grey: bool, target: Path | None = None
) -> NDArray[np.uint8]:
    """The pixels, NHWC: in memory, or in a new file, where they are stored as NCHW."""
    channels = 1 if grey else 3
    if target is None:
        x = np.empty((len(files), *shape, channels), dtype=np.uint8)
    else:
        x = new_array(target, (len(files), channels, *shape)).transpose(0, 2, 3, 1)
    bad: list[str] = []
    for i, path in enumerate(_with_bar(files, "reading images")):
        try:
            with _opened(path) as image:
                upright = _on_white(ImageOps.exif_transpose(image)).convert("L" if grey else "RGB")
                if upright.size != (shape[1], shape[0]):
                    upright = ImageOps.fit(upright, (shape[1], shape[0]), method=Image.Resampling.BILINEAR)
                x[i] = np.asarray(upright).reshape(x.shape[1:])
        except Exception as error:  # as in _header: pixels can be damaged although the header is intact
            bad.append(f"{path} ({_reason(error)})")
    if bad:
        raise _bad_files(bad)
    return x


def _on_white(image: Image.Image) -> Image.Image:
    """The image on a white background: the colour of transparent pixels is arbitrary."""
    if not image.has_transparency_data:
        return image
    coloured = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured)


def _with_bar(files: tuple[Path, ...], what: str) -> Iterator[Path]:
    if len(files) <= _BAR_FROM:
        return iter(files)
    return iter(track(files, description=what, console=Console(stderr=True), transient=True))
