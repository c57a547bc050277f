"""Batches of images: index, augment on the device, then convert to float32 in [0, 1].

Randomness is stateless: order and augmentation depend on (seed, epoch) alone and are drawn once per epoch, so batch k
is the same whether the epoch started at batch 0 or was resumed at batch k, the same on CPU and CUDA, and the same
whether the images are on the device or streamed to it. Of several processes each takes its part of every batch. Must
not know where images come from or what a batch is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparring.data import augment as moving
from sparring.data import policy
from sparring.data.dataset import Split, as_pixels
from sparring.data.loader import Passing
from sparring.data.policy import Draws, Policy
from sparring.data.stream import Rows
from sparring.errors import UserError
from sparring.seeds import generator
from sparring.shares import WHOLE, Share

_ORDER, _EXTRA = 0x04DE4, 0x0E847  # purposes of the draws
_AT_ONCE = 2**23  # bytes of batches that are augmented in one launch on a GPU


class Batch(NamedTuple):
    """Images in [0, 1] and their labels; where images are mixed, also the class mixed in and the share of y."""

    x: Tensor
    y: Tensor  # int64: of a mixed image, the class of its larger part
    other: Tensor | None = None  # int64
    share: Tensor | None = None  # float32
    part: slice = slice(0, 0)  # the places of these images in the batch of all processes
    of: int = 0  # images of that batch


@dataclass(frozen=True, eq=False)
class Mixture:
    """Training images followed by extra images, from which `fraction` of every batch is taken.

    An epoch has as many steps as it has without the extra images: its length is the number of training images.
    """

    images: Split | Rows  # both, one after the other
    own: int  # of these, training images
    fraction: float

    def __len__(self) -> int:
        return self.own


Training = Split | Rows | Mixture | Passing


def count_batches(images: int, batch_size: int, *, drop_last: bool = False) -> int:
    """The number of batches in an epoch of `images` images."""
    return images // batch_size if drop_last else -(-images // batch_size)


def count_steps(training: Training, batch_size: int) -> int:
    """The number of steps of an epoch: the loader's batches where they are used as they come."""
    return training.batches if isinstance(training, Passing) else count_batches(len(training), batch_size)


def batches(
    split: Split,
    batch_size: int,
    *,
    seed: int | None = None,
    epoch: int = 0,
    augment: str = "none",
    pad: int = 4,
    start: int = 0,
    drop_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (x, y) from batch `start` on; without a seed in order and unaugmented. Arguments are checked at once."""
    parts = _parts(len(split), batch_size, augment=augment, pad=pad, start=start, drop_last=drop_last)
    if policy.mixes_labels(augment):
        raise UserError(f"augment={augment!r} mixes labels, and (x, y) has one each. Use training_batches.")
    if seed is None:
        if augment != "none":
            raise UserError(f"augment={augment!r} draws at random and needs a seed. Pass seed=0, or augment='none'.")
        return ((as_pixels(split.x[part]), split.y[part]) for part in parts)
    order = _order(len(split), seed, epoch)
    shuffled = _shuffled(split, order, parts, augment, WHOLE, seed=seed, epoch=epoch, pad=pad)
    return ((batch.x, batch.y) for batch in shuffled)


def training_batches(
    training: Training,
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    augment: str = "none",
    start: int = 0,
    process: Share = WHOLE,
) -> Iterator[Batch]:
    """Yield the batches of an epoch on the device, from batch `start` on. Arguments are checked at once.

    Of several processes, each gets its part of every batch, which may be empty where the last batch is short.
    """
    if isinstance(training, Passing):
        chosen = policy.parse(augment)
        if start:
            raise cannot_seek()
        return _as_they_come(training, chosen, process, seed=seed, epoch=epoch)
    parts = _parts(len(training), batch_size, augment=augment, pad=0, start=start)
    if isinstance(training, Mixture):
        every = _parts(len(training), batch_size, augment=augment, pad=0, start=0)
        order = _mixed_order(training, every, seed=seed, epoch=epoch)
        return _shuffled(training.images, order, parts, augment, process, seed=seed, epoch=epoch)
    order = _order(len(training), seed, epoch)
    return _shuffled(training, order, parts, augment, process, seed=seed, epoch=epoch)


def cannot_seek() -> UserError:
    """The error for entering the middle of an epoch of batches that only pass by."""
    return UserError(
        "this run stopped in the middle of an epoch, and the loader's batches come one after the other: it cannot "
        "start there. Give a map-style Dataset, or start the run again with overwrite=True."
    )


def _parts(images: int, batch_size: int, *, augment: str, pad: int, start: int, drop_last: bool = False) -> list[slice]:
    """The places of every batch from `start` on; arguments are checked."""
    if batch_size < 1:
        raise UserError(f"batch_size must be 1 or more, got {batch_size}. The paper uses 128.")
    policy.parse(augment)
    moving.check("none", pad)
    total = count_batches(images, batch_size, drop_last=drop_last)
    if not 0 <= start <= total:
        raise UserError(f"start must lie between 0 and the epoch's {total} batches, got {start}.")
    return [slice(i * batch_size, min((i + 1) * batch_size, images)) for i in range(start, total)]


def _order(images: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(images, generator=generator("cpu", seed, epoch, _ORDER))


def _mixed_order(mixture: Mixture, parts: list[slice], *, seed: int, epoch: int) -> Tensor:
    """For every place of an epoch a row: in each batch first training images, then extra ones.

    Both are taken in a random order of the epoch; one that is used up starts again.
    """
    extra = len(mixture.images) - mixture.own
    own_order = _order(mixture.own, seed, epoch)
    extra_order = mixture.own + torch.randperm(extra, generator=generator("cpu", seed, epoch, _EXTRA))
    order: list[Tensor] = []
    used = taken = 0
    for part in parts:
        size = part.stop - part.start
        more = round(size * mixture.fraction)
        order += [own_order[torch.arange(used, used + size - more) % mixture.own]]
        order += [extra_order[torch.arange(taken, taken + more) % extra]]
        used, taken = used + size - more, taken + more
    return torch.cat(order)


def _shuffled(
    images: Split | Rows,
    order: Tensor,
    parts: list[slice],
    augment: str,
    process: Share,
    *,
    seed: int,
    epoch: int,
    pad: int = 4,
) -> Iterator[Batch]:
    device = images.x.device if isinstance(images, Split) else images.device
    chosen = policy.parse(augment)
    draws = policy.draw(chosen, len(order), images.shape[1:], seed=seed, epoch=epoch, pad=pad)
    sizes = [part.stop - part.start for part in parts]
    cuts = [process.cut(size) for size in sizes]
    if process.of > 1:
        taken = [_places(part, cut, chosen) for part, cut in zip(parts, cuts, strict=True)]
        places = torch.cat(taken) if taken else torch.empty(0, dtype=torch.int64)
        order, draws, parts = order[places], draws.take(places), _in_a_row([len(these) for these in taken])
    draws = draws.to(device)
    y = images.y.to(device)[order.to(device)]
    at_once = _batches_at_once(_bytes(images, parts[0]), device) if parts else 1
    groups = [parts[first : first + at_once] for first in range(0, len(parts), at_once)]
    wholes = [slice(group[0].start, group[-1].stop) for group in groups]
    if isinstance(images, Split):
        on_device, there = images.x, order.to(device)
        chunks: Iterator[Tensor] = (on_device[there[whole]] for whole in wholes)
    else:
        chunks = images.chunks([order[whole] for whole in wholes], seed=seed, epoch=epoch)
    rest = zip(cuts, sizes, strict=True)
    for group, whole, x in zip(groups, wholes, chunks, strict=True):
        x = draws.apply(x, whole)
        for part in group:
            cut, size = next(rest)
            yield _finish(x[part.start - whole.start : part.stop - whole.start], y[part], draws, part, cut, size)


def _places(part: slice, cut: slice, chosen: Policy) -> Tensor:
    """The places of an epoch that one process takes of a batch; where images are mixed, the next one as well."""
    places = torch.arange(part.start + cut.start, part.start + cut.stop)
    if chosen.cutmix is None or len(places) == 0:
        return places
    return torch.cat([places, torch.tensor([part.start + cut.stop % (part.stop - part.start)])])


def _in_a_row(sizes: list[int]) -> list[slice]:
    """Slices of these sizes, one after the other."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _as_they_come(training: Passing, chosen: Policy, process: Share, *, seed: int, epoch: int) -> Iterator[Batch]:
    most = training.batches * training.largest
    draws = policy.draw(chosen, most, training.shape[1:], seed=seed, epoch=epoch).to(training.device)
    place = 0
    for x, y in training.epoch(seed=seed, epoch=epoch):
        part, cut = slice(place, place + len(x)), process.cut(len(x))
        place += len(x)
        if process.of > 1:
            mine = _places(part, cut, chosen)
            here = (mine - part.start).to(x.device)
            own = draws.take(mine.to(training.device))
            yield _finish(own.apply(x[here], slice(None)), y[here], own, slice(None), cut, len(x))
        else:
            yield _finish(draws.apply(x, part), y, draws, part, cut, len(x))


def _bytes(images: Split | Rows, part: slice) -> int:
    channels, height, width = images.shape
    return int(part.stop - part.start) * channels * height * width


def _batches_at_once(size: int, device: torch.device) -> int:
    """The number of batches of `size` bytes to augment together: on a GPU launches for one cost more than the work."""
    return 1 if device.type == "cpu" else max(1, _AT_ONCE // max(1, size))


def _finish(x: Tensor, y: Tensor, draws: Draws, part: slice, cut: slice, size: int) -> Batch:
    """The batch: images mixed and in [0, 1], without the one that was only mixed in."""
    x, y, other, share = draws.mix(x, y, part)
    count = cut.stop - cut.start
    x, y = x[:count], y[:count]
    if other is not None and share is not None:
        other, share = other[:count], share[:count]
    return Batch(as_pixels(x), y, other, share, cut, size)
