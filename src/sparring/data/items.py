"""The items of a torch Dataset: read into memory, or by index, batch by batch, where they are random or too many.

Every item is read with the global random states seeded by (seed, epoch, item), so that a random transform gives the
same image whenever it is read, in this process or in a worker. That holds for transforms that draw from torch, numpy or
`random`; one with a generator of its own is random beyond our reach. Must not know batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sparring.data.dataset import Digest, Split, as_pixels
from sparring.data.global_random import have_moved, read_states, seeded
from sparring.data.pixels import in_levels, one_image, one_label
from sparring.data.prefetch import Filled
from sparring.data.stream import Rows
from sparring.errors import UserError
from sparring.seeds import derive_seed

_ITEM = 0x17E3  # purpose of an item's draws
_PROBED = 8  # items that are read twice, to see whether reading is random
_SAMPLE = 32  # items that identify a stream
_AT_ONCE = 256  # items that are read at once


@dataclass(frozen=True)
class Workers:
    """How a DataLoader reads its items."""

    count: int = 0
    begin: Any = None  # its worker_init_fn
    context: Any = None  # its multiprocessing context

    def read(self, items: Any, rows: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, int]]]:
        """The items of every chunk of rows, in order."""
        own = torch.Generator()  # a DataLoader without one draws from the global state
        loader: DataLoader[Any] = DataLoader(
            items,
            batch_sampler=[these.tolist() for these in rows],
            collate_fn=_as_list,
            num_workers=self.count,
            worker_init_fn=self.begin,
            multiprocessing_context=self.context if self.count else None,
            generator=own,
        )
        return iter(loader)


@dataclass(frozen=True)
class Seeded:
    """A Dataset whose items are read with seeded random states and checked; a worker process gets a copy of it."""

    dataset: Any
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with seeded(derive_seed(self.seed, self.epoch, index, _ITEM)):
            return item(self.dataset, index)


@dataclass(frozen=True)
class Checked:
    """A Dataset whose items are checked."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return item(self.dataset, index)


@dataclass(frozen=True, eq=False)
class Items:
    """A map-style Dataset as a source of images."""

    dataset: Any
    shape: tuple[int, int, int]
    workers: Workers

    def chunks(self, rows: Sequence[Tensor], *, seed: int, epoch: int, pin: bool) -> Iterator[Filled]:
        """The images of every chunk, read by index."""
        for found in self.workers.read(Seeded(self.dataset, seed, epoch), rows):
            x = _stacked([image for image, _ in found], self.shape)
            yield Filled(x.pin_memory() if pin else x)

    def add_to(self, digest: Digest) -> None:
        """Add a sample of the items, read with a fixed seed."""
        places = _spread(len(self.dataset), _SAMPLE)
        for filled in self.chunks([places], seed=0, epoch=0, pin=False):
            digest.update(filled.x.contiguous().numpy().data)


def read(dataset: Any, workers: Workers, *, room: int, name: str = "the Dataset") -> Split | Rows:
    """A map-style Dataset: in memory where it takes at most `room` bytes and is not random, otherwise by index."""
    total = _length(dataset, name)
    random = is_random(dataset)
    first, _ = Seeded(dataset, 0, 0)[0]
    shape = (first.shape[0], first.shape[1], first.shape[2])
    if random or total * first.nbytes > room:
        return Rows(Items(dataset, shape, workers), _labels(dataset, workers), torch.arange(total))
    x = torch.empty(total, *shape, dtype=first.dtype)
    y = torch.empty(total, dtype=torch.int64)
    done = 0
    with seeded(derive_seed(total, _ITEM)):  # once for all: items without randomness need no seed each
        for found in workers.read(Checked(dataset), _in_order(total)):
            part = _stacked([image for image, _ in found], shape)
            if part.dtype != x.dtype and x.dtype == torch.uint8:
                x = as_pixels(x)
            x[done : done + len(part)] = as_pixels(part) if part.dtype != x.dtype else part
            y[done : done + len(part)] = torch.tensor([label for _, label in found])
            done += len(part)
    return Split(in_levels(x, name), y)


def is_random(dataset: Any) -> bool:
    """Whether reading an item draws random numbers, seen on a few items."""
    for index in _spread(len(dataset), _PROBED).tolist():
        with seeded(derive_seed(index, _ITEM)):
            before = read_states()
            one = item(dataset, index)
            if have_moved(before):
                return True
            again = item(dataset, index)
        if one[1] != again[1] or one[0].shape != again[0].shape or not torch.equal(one[0], again[0]):
            return True  # it has a generator of its own
    return False


def item(dataset: Any, index: int) -> tuple[Tensor, int]:
    """One item, checked: (image, label)."""
    where = f"item {index} of the Dataset"
    try:
        found: Any = dataset[index]
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where} cannot be read ({type(error).__name__}: {error}). Check the Dataset.") from None
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise UserError(
            f"{where} is a {type(found).__name__}, expected (image, label). Wrap the Dataset in one that is."
        )
    return one_image(found[0], where), one_label(found[1], where)


def _length(dataset: Any, name: str) -> int:
    try:
        total = len(dataset)
    except TypeError:
        raise UserError(f"{name} has no length. Define __len__, or give a DataLoader of it.") from None
    if total == 0:
        raise UserError(f"{name} is empty. Give at least one image.")
    return total


def _labels(dataset: Any, workers: Workers) -> Tensor:
    """All labels: from `targets` where the Dataset has it and it is right on a sample, otherwise by reading all."""
    total = len(dataset)
    given = getattr(dataset, "targets", None)
    if isinstance(given, list | Tensor | np.ndarray) and len(given) == total:
        try:
            y = torch.as_tensor(given, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            y = torch.empty(0)
        places = _spread(total, _PROBED).tolist()
        if y.ndim == 1 and len(y) and all(Seeded(dataset, 0, 0)[place][1] == int(y[place]) for place in places):
            return y
    parts = workers.read(Seeded(dataset, 0, 0), _in_order(total))
    return torch.tensor([label for found in parts for _, label in found], dtype=torch.int64)


def _stacked(images: list[Tensor], shape: tuple[int, int, int]) -> Tensor:
    for image in images:
        if tuple(image.shape) != shape:
            raise UserError(
                f"the images of the Dataset differ in size: {shape} and {tuple(image.shape)} (channels, height, "
                "width). Scale them to one size in its transform."
            )
    if len({image.dtype for image in images}) > 1:
        images = [as_pixels(image) for image in images]
    return torch.stack(images) if images else torch.empty(0, *shape, dtype=torch.uint8)


def _in_order(total: int) -> list[Tensor]:
    """All places, in chunks."""
    return [torch.arange(first, min(first + _AT_ONCE, total)) for first in range(0, total, _AT_ONCE)]


def _spread(total: int, count: int) -> Tensor:
    """Up to `count` places, evenly spaced."""
    return torch.linspace(0, total - 1, min(total, count)).round().long()


def _as_list(found: list[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
    return found
