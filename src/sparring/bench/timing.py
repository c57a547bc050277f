"""Wall-clock times: a median with its spread; the clock is read after the device has finished."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timed:
    """Seconds of one piece of work, over several measurements."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timed:
        """The median and spread of these measurements."""
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
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    work: Callable[[], object], device: torch.device, *, repeats: int = 20, warm_up: int = 3, inner: int = 1
) -> Timed:
    """Seconds of one `work`, run `inner` times between two readings of the clock, `repeats` times."""
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
