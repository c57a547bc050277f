"""Stateless randomness: every draw is a function of the integers that identify it.

A seed is derived from (seed, epoch, purpose, ...), so a resumed run draws the same numbers as an uninterrupted one.
The global random state is left as it was. Nothing here knows what the numbers are for.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from sparring.errors import UserError

_BLOCK = 1024  # images of a batch whose numbers one generator draws; another value would change what a seed means


class Draw(IntEnum):
    """What a random draw of a training run is for: a part of its seed."""

    WEIGHTS = 1
    HOLD_OUT = 2
    ATTACK = 3
    VALIDATION = 4
    NETWORK = 11  # what a network of the caller's own draws: dropout, stochastic depth


def check_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not accept."""
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise UserError(f"a seed must be a whole number from 0 to 2^63 - 1, got {seed!r}.")


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on every part and on their order; the same on every machine and version."""
    text = ",".join(str(int(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "little") >> 1


def generator(device: torch.device | str, *parts: int) -> torch.Generator:
    """A fresh generator on `device` (a CUDA tensor needs a CUDA one), seeded by `derive_seed(*parts)`."""
    fresh = torch.Generator(device=device)
    fresh.manual_seed(derive_seed(*parts))
    return fresh


class PartGenerator(torch.Generator):
    """A generator for some places of a batch: `per_image` gives them what they would get if all were drawn.

    Every block of 1,024 places has a generator of its own, so that a part of a large batch draws little beside its own.
    """

    def __init__(self, device: torch.device | str, parts: Sequence[int], part: slice, of: int) -> None:
        """`part` are the places of a batch of `of` images."""
        self.part, self.of = part, of
        blocks = range(part.start // _BLOCK, -(-part.stop // _BLOCK)) if part.stop > part.start else range(0)
        # The first block has the seed of the step itself: a batch of one block is drawn as by `generator`.
        self.blocks = {block: generator(device, *parts, *((block,) if block else ())) for block in blocks}

    def __new__(cls, device: torch.device | str, *_: object) -> PartGenerator:
        """Torch makes it from the device alone."""
        return super().__new__(cls, device=device)  # type: ignore[call-arg]

    def rows(self, draw: Callable[..., Tensor], shape: Sequence[int], **how: object) -> Tensor:
        """Numbers for every place of the part, `shape` each."""
        start, stop, drawn = self.part.start, self.part.stop, []
        for block, source in self.blocks.items():
            first = block * _BLOCK
            whole = draw((min(_BLOCK, self.of - first), *shape), generator=source, device=self.device, **how)
            drawn.append(whole[max(0, start - first) : stop - first])
        return torch.cat(drawn) if drawn else draw((0, *shape), device=self.device, **how)


def batch_generator(device: torch.device | str, *parts: int, part: slice, of: int) -> torch.Generator:
    """A generator for the places `part` of a batch of `of` images, for draws by `per_image`."""
    whole = part.start == 0 and part.stop == of
    return generator(device, *parts) if whole and of <= _BLOCK else PartGenerator(device, parts, part, of)


def per_image(draw: Callable[..., Tensor], shape: Sequence[int], generator: torch.Generator, **how: object) -> Tensor:
    """What `draw` (torch.rand, torch.randn) gives for `shape`, whose first dimension counts the images of a batch.

    Drawn on the generator's device. Of a `PartGenerator`, the numbers of its places.
    """
    if isinstance(generator, PartGenerator):
        return generator.rows(draw, shape[1:], **how)
    return draw(tuple(shape), generator=generator, device=generator.device, **how)


@contextmanager
def seeded(device: torch.device | str, *parts: int) -> Iterator[None]:
    """Seed the global generators (torch's, numpy's, Python's) inside a block, for code that draws from them.

    They are as they were afterwards.
    """
    seed, numbers, choices = derive_seed(*parts), np.random.get_state(), random.getstate()
    device = torch.device(device)
    cuda = [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for index in cuda:
            torch.cuda.default_generators[index].manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numbers)
            random.setstate(choices)
