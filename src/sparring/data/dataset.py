"""A data set: images (NCHW), int64 labels, a training and a test split.

Images are uint8, or float32 in [0, 1] where they lie between the 256 levels. A split is in memory or maps a file
(`mapped`); training images may also be elsewhere, behind the protocol `Images` (`stream`, `loader`). Also the ways to
split: `hold_out` (by a seed), `evenly` (without randomness), `only` (by class). Must not know where images come from or
what they are used for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.errors import UserError, unknown
from sparring.seeds import generator

_HOLD_OUT = 0x401D  # distinguishes these draws from others with the same seed
_AT_ONCE = 2**26  # bytes that are hashed at once: a mapped file is not read into memory as a whole


class Digest(Protocol):
    """A hash that is being computed."""

    def update(self, data: Any, /) -> None:
        """Add bytes."""


class Images(Protocol):
    """Images to train on, wherever they are."""

    def __len__(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""

    def head(self, n: int) -> Split:
        """The first n images, in memory, or all where there are fewer."""

    def add_to(self, digest: Digest) -> None:
        """Add what identifies these images to a digest."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels, on one device."""

    x: Tensor  # uint8, or float32 in [0, 1], (n, channels, height, width)
    y: Tensor  # int64, (n,)
    mapped: bool = False  # x is a memory-mapped file, perhaps larger than memory

    def __post_init__(self) -> None:
        if self.x.dtype not in (torch.uint8, torch.float32) or self.x.ndim != 4:
            raise UserError(
                f"x must be uint8 or float32 of shape (n, c, h, w), got {self.x.dtype} {tuple(self.x.shape)}."
            )
        if self.y.dtype != torch.int64 or self.y.shape != self.x.shape[:1]:
            raise UserError(
                f"y must be int64 with one label for each of the {len(self.x)} images, "
                f"got {self.y.dtype} {tuple(self.y.shape)}."
            )

    def __len__(self) -> int:
        return len(self.x)

    def to(self, device: torch.device | str) -> Split:
        """The same images on `device`."""
        x = self.x.to(device)
        return Split(x, self.y.to(device), self.mapped and x.device.type == "cpu")

    def take(self, indices: Tensor) -> Split:
        """The images at `indices`, in that order."""
        indices = indices.to(self.x.device)
        return Split(self.x[indices], self.y[indices])

    def head(self, n: int) -> Split:
        """The first n images, or all where there are fewer."""
        if n < 0:
            raise UserError(f"head(n) needs n >= 0, got {n}.")
        return Split(self.x[:n], self.y[:n], self.mapped)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.x.shape[1], self.x.shape[2], self.x.shape[3]

    def add_to(self, digest: Digest) -> None:
        """Add shape, images and labels to a digest."""
        digest.update(repr(tuple(self.x.shape)).encode())
        step = max(1, _AT_ONCE // max(1, self.x[:1].nbytes))
        for first in range(0, len(self.x), step):
            digest.update(self.x[first : first + step].cpu().contiguous().numpy().data)
        digest.update(self.y.cpu().contiguous().numpy().data)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named data set; `note` says where it came from and belongs with every result on it."""

    name: str
    classes: tuple[str, ...]
    train: Images
    test: Split
    note: str
    carved: bool = False  # the source has no test images: they were split off the training images

    @property
    def channels(self) -> int:
        """Colour channels of an image."""
        return self.train.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image, in pixels."""
        return self.train.shape[1], self.train.shape[2]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    @property
    def fingerprint(self) -> str:
        """A digest of the training images, their labels and the classes."""
        sum_ = hashlib.blake2b("\0".join(self.classes).encode("utf-8", "replace"), digest_size=16)
        self.train.add_to(sum_)
        return sum_.hexdigest()


def in_memory(images: Images) -> Split:
    """The images as a Split; those that only pass by are refused."""
    if not isinstance(images, Split):
        raise UserError("these images are streamed, and this needs them in memory. Give tensors or arrays: (x, y).")
    return images


def as_pixels(x: Tensor) -> Tensor:
    """Images as float32 in [0, 1], in memory of their own."""
    return x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x.clone()


def hold_out(split: Split, count: int, *, seed: int) -> tuple[Split, Split]:
    """(rest, held out): `count` images chosen by `seed`, stratified by class; both keep the original order."""
    rest, held = hold_out_rows(split.y, count, seed=seed)
    return split.take(rest), split.take(held)


def hold_out_rows(y: Tensor, count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """The places of the rest and of the images held out, as in `hold_out`."""
    y = y.cpu()
    sizes = torch.bincount(y).numpy()
    most = len(y) - int((sizes > 0).sum())
    if not 0 <= count <= most:
        fix = f"Choose a count from 1 to {most}; in training with --validation." if most > 0 else "Give more images."
        raise UserError(f"cannot hold out {count} of {len(y)} images: every class keeps at least one. {fix}")
    held = torch.zeros(len(y), dtype=torch.bool)
    for label, quota in enumerate(_quotas(sizes, count)):
        members = (y == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator("cpu", seed, _HOLD_OUT, label))
        held[members[order[:quota]]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def only(data: Dataset, names: Sequence[str]) -> Dataset:
    """The data set reduced to these classes, relabelled in the order given."""
    for name in names:
        if name not in data.classes:
            raise unknown(f"class of {data.name}", name, data.classes)
    if len(set(names)) != len(names) or len(names) < 2:
        raise UserError(f"name at least two different classes of {data.name}, got {'+'.join(names)!r}.")
    labels = [data.classes.index(name) for name in names]

    def part(split: Split) -> Split:
        kept = split.take(torch.isin(split.y, torch.tensor(labels)).nonzero().flatten())
        return Split(kept.x, torch.tensor([labels.index(label) for label in kept.y.tolist()], dtype=torch.int64))

    return replace(data, classes=tuple(names), train=part(in_memory(data.train)), test=part(data.test))


def _quotas(sizes: NDArray[np.int64], count: int) -> list[int]:
    """Divide `count` among classes of these sizes by largest remainder; each class keeps at least one image."""
    total = max(int(sizes.sum()), 1)
    most = np.maximum(sizes - 1, 0)
    quotas = np.minimum(sizes * count // total, most)
    for _ in range(count - int(quotas.sum())):
        remainder = np.where(quotas < most, sizes * count - quotas * total, np.iinfo(np.int64).min)
        quotas[int(remainder.argmax())] += 1
    return [int(quota) for quota in quotas]


def evenly(y: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Mark `fraction` of every class, evenly spaced: at least one where a class has two or more."""
    marked = np.zeros(len(y), dtype=np.bool_)
    for label in np.unique(y):
        members = np.flatnonzero(y == label)
        n = len(members)
        if n >= 2:
            k = min(max(1, round(n * fraction)), n - 1)
            marked[members[(2 * np.arange(k) + 1) * n // (2 * k)]] = True
    return marked


def interleaved(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """An order whose every prefix has the classes in their proportions, so the first n images are representative."""
    position = np.empty(len(y))
    for label in np.unique(y):
        members = np.flatnonzero(y == label)
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.lexsort((y, position)).astype(np.int64)


def whole(data: Dataset, *, without: Split) -> Dataset:
    """All images as test data, except those that a model was trained on (`without`)."""
    train = in_memory(data.train)
    x, y = torch.cat([train.x, data.test.x]), torch.cat([train.y, data.test.y])
    known = (
        {image.numpy().tobytes() for image in without.x.contiguous()} if without.x.shape[1:] == x.shape[1:] else set()
    )
    new = torch.tensor([image.numpy().tobytes() not in known for image in x.contiguous()])
    if not new.any():
        return data
    note = f"all images of {data.name}" + ("" if new.all() else f" except {int((~new).sum())} used in training")
    x, y = x[new], y[new]
    order = torch.from_numpy(interleaved(y.numpy()))
    return replace(data, test=Split(x[order], y[order]), note=note, carved=False)


def tensor_split(x: NDArray[np.uint8], y: NDArray[np.int64]) -> Split:
    """A Split of NHWC arrays, the layout of files."""
    return Split(in_order(torch.from_numpy(x.transpose(0, 3, 1, 2))), torch.from_numpy(y))


def in_order(x: Tensor) -> Tensor:
    """The images in the order of their shape in memory.

    `contiguous` leaves the strides of a dimension of size 1 as they are. Of grey images (n, 1, height, width) they may
    be those of channels_last, in which convolutions then return their results, and a network's `view` fails.
    """
    return x.contiguous().flatten().view(x.shape)
