"""Stateless randomness: every draw is a function of the integers that identify it.

A seed is derived from (seed, epoch, purpose, ...), so a resumed run draws the same numbers as an uninterrupted one.
The global random state is left as it was. Nothing here knows what the numbers are for.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch

from sparring.errors import UserError


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
