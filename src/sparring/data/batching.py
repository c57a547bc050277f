"""Batches from images that already lie on the device: index, augment in uint8, then float32 in [0, 1].

Randomness is stateless: the order and the augmentation follow from (seed, epoch) alone, drawn once for the epoch, so
batch k is the same whether the epoch began at batch 0 or, after a resume, at batch k; and the same on CPU and CUDA.
Must not know where images come from, nor what a batch is used for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparring.data import augment as augmentation
from sparring.data.dataset import Split
from sparring.errors import UserError
from sparring.seeds import generator

_ORDER, _MOVES = 0x04DE4, 0x0A46  # what a draw is for
_TOGETHER = 2**23  # bytes of batches that a GPU makes at once


def count_batches(images: int, batch_size: int, *, drop_last: bool = False) -> int:
    """How many batches an epoch of `images` has."""
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
    """(x, y) from batch `start` on. Without a seed: in order, unaugmented. Bad arguments are refused at once."""
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
    """To move a batch takes some twenty launches, and on a GPU a launch costs more than the work: many go in one."""
    return 1 if batch.device.type == "cpu" else max(1, _TOGETHER // max(1, batch.nbytes))


def _finish(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.to(torch.float32).div_(255), y
