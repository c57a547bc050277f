"""Data: from a name to uint8 images in memory, to batches on the device.

`load` reads, `fetch` downloads, `hold_out` splits, `batches` iterates. Must not know attacks, objectives or training.
"""

from sparring.data.augment import AUGMENTS
from sparring.data.batching import batches, count_batches
from sparring.data.dataset import Dataset, Split, hold_out, whole
from sparring.data.fetch import FETCHABLE, fetch
from sparring.data.registry import SOURCES, Availability, describe, load

__all__ = [
    "AUGMENTS",
    "FETCHABLE",
    "SOURCES",
    "Availability",
    "Dataset",
    "Split",
    "batches",
    "count_batches",
    "describe",
    "fetch",
    "hold_out",
    "load",
    "whole",
]
