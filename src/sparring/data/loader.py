"""A DataLoader whose batches are used as they come: an IterableDataset, an own sampler, an own collate function.

One pass at the start counts its batches and checks them. Its random draws are seeded by (seed, epoch), so an epoch can
be repeated where the loader draws from torch, numpy or `random`; it cannot be entered in the middle. Must not know
augmentations or training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sparring.attacks.failures import quoted
from sparring.data.dataset import Digest, Split, as_pixels
from sparring.data.global_random import Swapped
from sparring.data.pixels import as_images, as_labels
from sparring.errors import UserError
from sparring.seeds import derive_seed

CPU = torch.device("cpu")
_DRAWS = 0x10AD  # purpose of the loader's draws
_MOST = 10**6  # batches of an epoch
_SAMPLE = 4096  # images that are kept: to check the network on, and to identify the data


@dataclass(frozen=True, eq=False)
class Passing:
    """The batches of a DataLoader, as they come."""

    loader: DataLoader[Any]
    images: int  # of one pass
    batches: int
    smallest: int  # images in a batch
    largest: int
    first: Split  # the first images, at most _SAMPLE
    labels: tuple[int, int]  # the least and the greatest
    repeats: bool  # whether a second pass with the same seed begins with the same batch
    device: torch.device = CPU

    def __len__(self) -> int:
        return self.images

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.first.shape

    def head(self, n: int) -> Split:
        """The first images of the first pass."""
        return self.first.head(n)

    def add_to(self, digest: Digest) -> None:
        """Add the number of images, shape, range of labels and, where a pass can be repeated, the first images."""
        digest.update(f"{self.images} {self.batches} {self.shape} {self.labels}".encode())
        if self.repeats:
            self.first.add_to(digest)

    def to(self, device: torch.device | str) -> Passing:
        """The same batches, on `device`."""
        return replace(self, device=torch.device(device))

    def epoch(self, *, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch, on the device. One that differs from the first pass is refused."""
        given = 0
        for x, y in _passes(self.loader, derive_seed(seed, epoch, _DRAWS)):
            if given == self.batches:
                return
            if tuple(x.shape[1:]) != self.shape or len(x) > self.largest:
                raise UserError(
                    f"batch {given + 1} of epoch {epoch} has the shape {tuple(x.shape)}; the loader's first pass had "
                    f"at most {self.largest} images of {self.shape}. Give batches of one shape."
                )
            given += 1
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        if given < self.batches:
            raise UserError(
                f"the data ended early: {given} of {self.batches} batches in epoch {epoch}. A generator runs only "
                "once; give an iterable that starts anew for every epoch, such as a DataLoader."
            )


def passing(loader: DataLoader[Any]) -> Passing:
    """The loader, counted and checked by one pass over it."""
    images, batches, smallest, largest = 0, 0, 2**62, 0
    low, high = 2**62, -1
    kept: list[tuple[Tensor, Tensor]] = []
    shape: tuple[int, ...] | None = None
    for x, y in _passes(loader, derive_seed(0, 0, _DRAWS)):
        shape = shape or tuple(x.shape[1:])
        if tuple(x.shape[1:]) != shape:
            raise UserError(
                f"the loader's images differ in size: {shape} and, in batch {batches + 1}, {tuple(x.shape[1:])}. "
                "Scale them to one size in its transform."
            )
        if images < _SAMPLE:
            kept.append((x[: _SAMPLE - images], y[: _SAMPLE - images]))
        images, batches, smallest, largest = images + len(x), batches + 1, min(smallest, len(x)), max(largest, len(x))
        low, high = min(low, int(y.min())), max(high, int(y.max()))
        if batches == _MOST:
            raise UserError(f"the loader does not end within {_MOST:,} batches. Give one that ends after an epoch.")
    if not kept:
        raise UserError("the loader gives no batches. Give at least one image.")
    xs = [x for x, _ in kept]
    if len({x.dtype for x in xs}) > 1:
        xs = [as_pixels(x) for x in xs]
    first = Split(torch.cat(xs), torch.cat([y for _, y in kept]))
    again = next(_passes(loader, derive_seed(0, 0, _DRAWS)), None)
    repeats = again is not None and torch.equal(again[0], kept[0][0]) and torch.equal(again[1], kept[0][1])
    return Passing(loader, images, batches, smallest, largest, first, (low, high), repeats)


def _passes(loader: DataLoader[Any], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One pass over the loader, checked, with random states of its own."""
    own = Swapped(seed)
    kept = None if loader.generator is None else loader.generator.get_state()
    if loader.generator is not None:
        loader.generator.manual_seed(seed)
    try:
        batches, number = drawn(loader), 0
        while True:
            with own:
                batch = next(batches, None)
            if batch is None:
                return
            number += 1
            yield checked(batch, f"batch {number} of the loader")
    finally:
        if loader.generator is not None and kept is not None:
            loader.generator.set_state(kept)


def drawn(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader. What its Dataset or collate function raises is one line."""
    number = 0
    try:
        for number, batch in enumerate(loader, 1):  # noqa: B007
            yield batch
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"batch {number + 1} of the loader cannot be read ({quoted(error)}). Check its Dataset and collate_fn."
        ) from error


def checked(batch: Any, where: str) -> tuple[Tensor, Tensor]:
    """Images and labels of a batch, or why it is none."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise UserError(
            f"{where} is {_kind(batch)}, expected (images, labels). Give a collate_fn that returns these two."
        )
    x, y = as_images(batch[0], where, channels_first=True), as_labels(batch[1], where)
    if len(x) != len(y):
        raise UserError(f"{where} has {len(x)} images and {len(y)} labels. Give one label per image.")
    return x, y


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
