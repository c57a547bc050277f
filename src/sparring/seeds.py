"""Stateless randomness: every draw is a function of the integers that identify it.

A seed is derived from (seed, epoch, purpose, ...), so a resumed run draws the same numbers as an uninterrupted one.
Nothing here touches the global random state or knows what the numbers are for.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch

from sparring.errors import UserError


class Draw(IntEnum):
    """What a random draw of a training run is for: a part of its seed."""

    WEIGHTS = 1
    HOLD_OUT = 2
    ATTACK = 3
    VALIDATION = 4


def check_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not accept."""
    if not 0 <= seed < 2**63:
        raise UserError(f"a seed must lie between 0 and 2^63 - 1, got {seed}.")


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on every part and on their order; the same on every machine and version."""
    text = ",".join(str(int(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "little") >> 1


def generator(device: torch.device | str, *parts: int) -> torch.Generator:
    """A fresh generator on `device` (a CUDA tensor needs a CUDA one), seeded by `derive_seed(*parts)`."""
    fresh = torch.Generator(device=device)
    fresh.manual_seed(derive_seed(*parts))
    return fresh
