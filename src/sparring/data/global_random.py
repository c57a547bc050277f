"""The caller's code run with random states of our own: its Dataset or DataLoader may draw from the global ones.

The states of torch (CPU), numpy and `random` are seeded, and the caller's are put back afterwards, so that nothing else
sees the draws. Only for the main thread or a worker process: the states belong to the whole process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

States = tuple[torch.Tensor, Any, Any]


def read_states() -> States:
    """The global random states: torch's, numpy's and Python's."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def write_states(states: States) -> None:
    """Set the global random states."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def have_moved(states: States) -> bool:
    """Whether something has drawn from a global random state since."""
    drawn, (_, keys, *place), python_state = read_states()
    same = np.array_equal(keys, states[1][1]) and tuple(place) == states[1][2:]
    return not same or not torch.equal(drawn, states[0]) or python_state != states[2]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global random states seeded by `seed` inside, and as they were outside."""
    before = read_states()
    try:
        _seed(seed)
        yield
    finally:
        write_states(before)


class Swapped:
    """Random states of its own for work in pieces: inside the context they are in place, outside the caller's are."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self.own = read_states()
        self.before: States | None = None

    def __enter__(self) -> None:
        self.before = read_states()
        write_states(self.own)

    def __exit__(self, *raised: object) -> None:
        self.own = read_states()
        assert self.before is not None
        write_states(self.before)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # the CPU's; CUDA's is untouched
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
