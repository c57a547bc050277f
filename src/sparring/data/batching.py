"""Batches of images that are already on the device: index, augment in uint8, then convert to float32 in [0, 1].

Randomness is stateless: order and augmentation depend on (seed, epoch) alone and are drawn once per epoch, so batch k
is the same whether the epoch started at batch 0 or was resumed at batch k, and the same on CPU and CUDA. Must not know
where images come from or what a batch is used for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparring.data import augment as augmentation
from sparring.data.dataset import Split
from sparring.errors import UserError
from sparring.seeds import generator

_ORDER, _MOVES = 0x04DE4, 0x0A46  # purposes of the draws
_AT_ONCE = 2**23  # bytes of batches that are augmented in one launch on a GPU


def count_batches(images: int, batch_size: int, *, drop_last: bool = False) -> int:
    """The number of batches in an epoch of `images` images."""
    return images // batch_size if drop_last else -(-images // batch_size)


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
    if batch_size < 1:
        raise UserError(f"batch_size must be 1 or more, got {batch_size}. The paper uses 128.")
    augmentation.check(augment, pad)
    if seed is None and augment != "none":
        raise UserError(f"augment={augment!r} draws at random and needs a seed. Pass seed=0, or augment='none'.")
    total = count_batches(len(split), batch_size, drop_last=drop_last)
    if not 0 <= start <= total:
        raise UserError(f"start must lie between 0 and the epoch's {total} batches, got {start}.")
    parts = [slice(i * batch_size, min((i + 1) * batch_size, len(split))) for i in range(start, total)]
    if seed is None:
        return (_finish(split.x[part], split.y[part]) for part in parts)
    return _shuffled(split, parts, seed=seed, epoch=epoch, augment=augment, pad=pad)


def _shuffled(
    split: Split, parts: list[slice], *, seed: int, epoch: int, augment: str, pad: int
) -> Iterator[tuple[Tensor, Tensor]]:
    device = split.x.device
    order = torch.randperm(len(split), generator=generator("cpu", seed, epoch, _ORDER)).to(device)
    drawn = generator("cpu", seed, epoch, _MOVES)
    moves = augmentation.draw(len(split), augment=augment, pad=pad, generator=drawn).to(device)
    at_once = _batches_at_once(split.x[parts[0]]) if parts else 1
    for first in range(0, len(parts), at_once):
        several = parts[first : first + at_once]
        here = slice(several[0].start, several[-1].stop)
        x, y = split.x[order[here]], split.y[order[here]]
        x = x if augment == "none" else augmentation.apply(x, moves[here])
        for part in several:
            of = slice(part.start - here.start, part.stop - here.start)
            yield _finish(x[of], y[of])


def _batches_at_once(batch: Tensor) -> int:
    """The number of batches to augment together: on a GPU the launches for one batch cost more than the work."""
    return 1 if batch.device.type == "cpu" else max(1, _AT_ONCE // max(1, batch.nbytes))


def _finish(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.to(torch.float32).div_(255), y
