"""Randomness without state: every draw is named by the numbers it comes from.

A seed is derived from (seed, epoch, purpose, ...), so a run that starts again in the middle draws what it would have
drawn. Nothing here touches the global random state, and nothing here knows what the numbers are for.
"""

from __future__ import annotations

import hashlib

import torch

from sparring.errors import UserError


def check_seed(seed: int) -> None:
    """Refuse what torch's own generators would not take."""
    if not 0 <= seed < 2**63:
        raise UserError(f"a seed lies between 0 and 2^63 - 1, got {seed}.")


def derive_seed(*parts: int) -> int:
    """63 bits that depend on every part and on their order; equal on every machine and version."""
    text = ",".join(str(int(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "little") >> 1


def generator(device: torch.device | str, *parts: int) -> torch.Generator:
    """A fresh generator on `device` (a CUDA tensor needs a CUDA one), seeded by `derive_seed(*parts)`."""
    fresh = torch.Generator(device=device)
    fresh.manual_seed(derive_seed(*parts))
    return fresh
