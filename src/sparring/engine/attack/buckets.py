"""Buckets: the few batch sizes for which a step is captured.

The active set of an attack only shrinks, so a step may run on any bucket that is at least as large as the last known
count; the rows between count and bucket are computed for nothing. Pure arithmetic; knows no device.
"""

from __future__ import annotations

from bisect import bisect_left


def bucket_sizes(batch: int, *, every: int = 16) -> tuple[int, ...]:
    """The multiples of `every` below `batch`, and `batch` itself; up to half of it twice as many.

    FAT's late steps, of which there are most, have small sets.
    """
    fine = max(1, every // 2)
    return tuple(sorted({*range(fine, batch // 2 + 1, fine), *range(every, batch, every), batch}))


def fitting(sizes: tuple[int, ...], count: int) -> int:
    """The smallest bucket that holds `count` examples."""
    return sizes[bisect_left(sizes, count)]
