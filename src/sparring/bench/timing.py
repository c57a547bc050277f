"""How long something takes: a median with its spread, and the device made to finish before the clock is read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timed:
    """Seconds of one piece of work, over several times it was done."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timed:
        """What these measurements say."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    @property
    def s(self) -> str:
        """For a table: median (low-high) in seconds."""
        return f"{self.median:.2f} s ({self.low:.2f}-{self.high:.2f}, n={self.n})"

    @property
    def ms(self) -> str:
        """For a table: median (low-high) in milliseconds."""
        return f"{1e3 * self.median:.3f} ms ({1e3 * self.low:.3f}-{1e3 * self.high:.3f}, n={self.n})"


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    work: Callable[[], object], device: torch.device, *, repeats: int = 20, warm_up: int = 3, inner: int = 1
) -> Timed:
    """`work` done `inner` times between two looks at the clock, so often; seconds of one."""
    for _ in range(warm_up):
        work()
    seconds = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        for _ in range(inner):
            work()
        wait(device)
        seconds.append((time.perf_counter() - began) / inner)
    return Timed.of(seconds)
