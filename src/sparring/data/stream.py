"""Images that stay on the host and are read by index, batch by batch: from memory, from a mapped file, from a Dataset.

`Rows` is some rows of a source, with their labels: what hold-out, shuffling and exact resume need. Order and
augmentations are those of images on the device, so the batches are the same, bit for bit. Must not know batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sparring.data.dataset import Digest, Images, Split, as_pixels, hold_out, hold_out_rows
from sparring.data.prefetch import Filled, gathered, on_device
from sparring.errors import UserError

CPU = torch.device("cpu")
_READ = 2**26  # bytes that are read at once into memory
_SAMPLE = 4096  # images of a stream that its channels' mean is taken from
_SHARE = 0.5  # of the free memory of a device that images may take: the rest is for the network


class Source(Protocol):
    """Images on the host, by number."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""

    def chunks(self, rows: Sequence[Tensor], *, seed: int, epoch: int, pin: bool) -> Iterator[Filled]:
        """The images of every chunk of rows, in order. Where reading is random, it depends on (seed, epoch, row)."""

    def add_to(self, digest: Digest) -> None:
        """Add what identifies the images to a digest."""


@dataclass(frozen=True, eq=False)
class Held:
    """Images in host memory, or in a mapped file."""

    x: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.x.shape[1], self.x.shape[2], self.x.shape[3]

    def chunks(self, rows: Sequence[Tensor], *, seed: int, epoch: int, pin: bool) -> Iterator[Filled]:
        """The images of every chunk, gathered by a thread."""
        return gathered(self.x, rows, pin=pin)

    def add_to(self, digest: Digest) -> None:
        """Add the images to a digest."""
        Split(self.x, torch.zeros(len(self.x), dtype=torch.int64)).add_to(digest)


@dataclass(frozen=True, eq=False)
class Joined:
    """Two sources of one shape, one after the other; `first` is the number of rows of `one`."""

    one: Source
    other: Source
    first: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.one.shape

    def chunks(self, rows: Sequence[Tensor], *, seed: int, epoch: int, pin: bool) -> Iterator[Filled]:
        """Both sources' chunks, merged."""
        near = [these < self.first for these in rows]
        one = self.one.chunks(
            [these[where] for these, where in zip(rows, near, strict=True)], seed=seed, epoch=epoch, pin=False
        )
        other = self.other.chunks(
            [these[~where] - self.first for these, where in zip(rows, near, strict=True)],
            seed=seed,
            epoch=epoch,
            pin=False,
        )
        for where, a, b in zip(near, one, other, strict=True):
            x, y = (a.x, b.x) if a.x.dtype == b.x.dtype else (as_pixels(a.x), as_pixels(b.x))
            merged = torch.empty(len(where), *self.shape, dtype=x.dtype, pin_memory=pin)
            merged[where], merged[~where] = x, y
            yield Filled(merged)

    def add_to(self, digest: Digest) -> None:
        """Add both to a digest."""
        self.one.add_to(digest)
        self.other.add_to(digest)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a source with their labels; batches of them go to `device`."""

    source: Source
    y: Tensor  # int64, on the CPU, one per row
    rows: Tensor  # int64, on the CPU
    device: torch.device = CPU

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.source.shape

    def take(self, indices: Tensor) -> Rows:
        """The rows at `indices`, in that order; nothing is read."""
        return Rows(self.source, self.y[indices], self.rows[indices], self.device)

    def to(self, device: torch.device | str) -> Rows:
        """The same rows, for batches on `device`."""
        return Rows(self.source, self.y, self.rows, torch.device(device))

    def chunks(self, places: Sequence[Tensor], *, seed: int, epoch: int) -> Iterator[Tensor]:
        """The images at these places, chunk by chunk, on the device."""
        pin = self.device.type == "cuda"
        return on_device(
            self.source.chunks([self.rows[p] for p in places], seed=seed, epoch=epoch, pin=pin), self.device
        )

    def head(self, n: int) -> Split:
        """The first n images, read into memory."""
        return self.take(torch.arange(min(n, len(self)))).read()

    def read(self, device: torch.device = CPU) -> Split:
        """These rows, read into memory; random transforms are applied once, with a seed of their own."""
        if not len(self):
            raise UserError("there are no images. Give at least one.")
        x, done = torch.empty(0, dtype=torch.uint8), 0
        for part in self.passes():
            if not done:
                x = torch.empty(len(self), *self.shape, dtype=part.dtype, device=device)
            if part.dtype != x.dtype:  # images with and without values between the levels
                x, part = (each if each.is_floating_point() else as_pixels(each) for each in (x, part))
            x[done : done + len(part)] = part.to(device)
            done += len(part)
        return Split(x, self.y.to(device))

    def passes(self) -> Iterator[Tensor]:
        """All images once, in order, in chunks on the CPU."""
        places = torch.arange(len(self))
        step = max(1, _READ // int(np.prod(self.shape)))
        chunks = [places[first : first + step] for first in range(0, len(places), step)]
        return self.to("cpu").chunks(chunks, seed=0, epoch=0)

    def add_to(self, digest: Digest) -> None:
        """Add the source and the labels to a digest."""
        digest.update(f"{len(self)} {self.shape}".encode())
        digest.update(self.y.numpy().data)
        self.source.add_to(digest)


def rows_of(split: Split, device: torch.device | str = "cpu") -> Rows:
    """A split on the host as rows, whose batches go to `device`."""
    return Rows(Held(split.x), split.y, torch.arange(len(split)), torch.device(device))


def divide(images: Split | Rows, count: int, *, seed: int) -> tuple[Split | Rows, Split]:
    """(rest, held out), as `hold_out`; of images that are not in memory only those held out are read."""
    if isinstance(images, Split) and not images.mapped:
        return hold_out(images, count, seed=seed)
    rows = rows_of(images) if isinstance(images, Split) else images
    rest, held = hold_out_rows(rows.y, count, seed=seed)
    return rows.take(rest), rows.take(held).read()


def place(images: Split | Rows, device: torch.device, *, room: int | None = None) -> Split | Rows:
    """The images on the device where they take no more than `room` bytes, otherwise on the host, to be streamed.

    Args:
        room: half of the free memory of a GPU unless given; on a CPU images stay where they are.
    """
    if isinstance(images, Split) and images.mapped:
        images = rows_of(images)
    if isinstance(images, Rows) and not isinstance(images.source, Held):
        return images.to(device)
    held = images.source if isinstance(images, Rows) else images
    assert isinstance(held, Held | Split)
    need = len(images) * int(np.prod(images.shape)) * held.x.itemsize
    if device.type == "cuda" or room is not None:
        fits = need <= (device_room(device) if room is None else room)
    else:
        fits = isinstance(images, Split)
    if fits:
        return images.to(device) if isinstance(images, Split) else images.read(device)
    return rows_of(images, device) if isinstance(images, Split) else images.to(device)


def device_room(device: torch.device) -> int:
    """Bytes that images may take on a GPU: half of what is free."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _SHARE)


def join(own: Split | Rows, extra: Split, device: torch.device, *, room: int | None = None) -> Split | Rows:
    """The images and then the extra images, placed on the device or streamed to it, all together."""
    if own.shape != extra.shape:
        raise UserError(
            f"the extra images are {_words(extra.shape)}, the training images {_words(own.shape)} "
            "(channels x height x width). Give both the same shape."
        )
    y = torch.cat([own.y, extra.y])
    if isinstance(own, Split) and not own.mapped and not extra.mapped:
        x, more = (own.x, extra.x) if own.x.dtype == extra.x.dtype else (as_pixels(own.x), as_pixels(extra.x))
        return place(Split(torch.cat([x, more]), y), device, room=room)
    rows = rows_of(own) if isinstance(own, Split) else own
    total = rows.rows.max().item() + 1 if len(rows) else 0
    both = Joined(rows.source, Held(extra.x), int(total))
    return Rows(both, y, torch.cat([rows.rows, int(total) + torch.arange(len(extra))]), device)


def moments(images: Images) -> list[list[float]]:
    """The mean and the deviation of every channel, in [0, 1]."""
    if isinstance(images, Split) and not images.mapped:
        scale = 255 if images.x.dtype == torch.uint8 else 1
        rows = [row.double() / scale for row in images.x.transpose(0, 1).flatten(1)]  # one row per channel
        return [[row.mean().item() for row in rows], [row.std().item() for row in rows]]
    channels = images.shape[0]
    count, first, second = 0, torch.zeros(channels).double(), torch.zeros(channels).double()
    for chunk in _passes(images):
        values = as_pixels(chunk).double().transpose(0, 1).flatten(1)
        count += values.shape[1]
        first += values.sum(dim=1)
        second += values.square().sum(dim=1)
    mean = first / count
    return [mean.tolist(), ((second / count - mean.square()).clamp(min=0) * count / max(1, count - 1)).sqrt().tolist()]


def _passes(images: Images) -> Iterator[Tensor]:
    """All images once, in chunks on the CPU."""
    if isinstance(images, Split):
        images = rows_of(images)
    return images.passes() if isinstance(images, Rows) else iter([images.head(_SAMPLE).x])


def _words(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))
