"""Data: from a name, or from what a caller hands in, to images and to batches on the device.

`load` reads, `fetch` downloads, `as_dataset` takes the caller's own, `hold_out` splits, `batches` iterates. Must not
know attacks, objectives or training.
"""

from sparring.data.augment import AUGMENTS
from sparring.data.batching import (
    Batch,
    Mixture,
    Training,
    batches,
    cannot_seek,
    count_batches,
    count_steps,
    training_batches,
)
from sparring.data.dataset import Dataset, Images, Split, as_pixels, hold_out, in_memory, whole
from sparring.data.extra import EXTRA_FRACTION, check_extra, load_extra
from sparring.data.fetch import FETCHABLE, fetch
from sparring.data.image_folder import read_images
from sparring.data.loader import Passing
from sparring.data.own import as_dataset, as_test_split
from sparring.data.policy import mixes_labels
from sparring.data.policy import parse as parse_augment
from sparring.data.registry import SOURCES, Availability, describe, load
from sparring.data.stream import Rows, divide, join, moments, place

__all__ = [
    "AUGMENTS",
    "EXTRA_FRACTION",
    "FETCHABLE",
    "SOURCES",
    "Availability",
    "Batch",
    "Dataset",
    "Images",
    "Mixture",
    "Passing",
    "Rows",
    "Split",
    "Training",
    "as_dataset",
    "as_pixels",
    "as_test_split",
    "batches",
    "cannot_seek",
    "check_extra",
    "count_batches",
    "count_steps",
    "describe",
    "divide",
    "fetch",
    "hold_out",
    "in_memory",
    "join",
    "load",
    "load_extra",
    "mixes_labels",
    "moments",
    "parse_augment",
    "place",
    "read_images",
    "training_batches",
    "whole",
]
