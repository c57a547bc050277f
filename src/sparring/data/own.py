"""Data that a caller hands in, as a Dataset: tensors, arrays, a torch Dataset, a DataLoader, a name, or two of them.

What fits in memory is read once, into uint8 where the pixels are its levels. A Dataset that is random or too large is
read by index (`items`). A DataLoader stands for its Dataset: order, batch size and seeds are the run's own, so a
resumed run repeats them; where that would change what it gives (an IterableDataset, an own sampler or collate
function), its batches are used as they come (`loader`). Must not know training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from sparring.data import items
from sparring.data.dataset import Dataset, Images, Split, as_pixels
from sparring.data.global_random import seeded
from sparring.data.items import Workers
from sparring.data.loader import Passing, checked, drawn, passing
from sparring.data.memory import host_room
from sparring.data.pixels import as_images, as_labels, classes_from, count_classes
from sparring.data.registry import load
from sparring.data.stream import Rows
from sparring.errors import UserError

KINDS = (
    "tensors or arrays (x, y), a torch Dataset, a DataLoader, a sparring.data.Dataset, a name such as 'cifar10', "
    "or (train, test) of these"
)


@dataclass(frozen=True, eq=False)
class Part:
    """Images of one kind that were handed in, and what is known of their classes."""

    images: Images
    kind: str  # tensors, arrays, dataset or loader
    names: tuple[str, ...] = ()  # of the classes, where they are known
    notes: tuple[str, ...] = ()


def as_dataset(given: Any, *, room: int | None = None) -> tuple[Dataset, str]:
    """The data as a Dataset, and what to call them in a configuration: `own:KIND`, or the name that was given.

    Args:
        room: bytes of host memory that images may take; more are read from their Dataset, batch by batch.
    """
    if isinstance(given, Dataset):
        return given, "own:dataset"
    if isinstance(given, str | Path):
        name = _source(given)
        return load(name), name
    room = host_room() if room is None else room
    train, test = _two(given)
    if isinstance(train, str | Path | Dataset):
        data, name = as_dataset(train)
        held = data.test if test is None else _test(test, data.train.shape, data.num_classes, room)
        return replace(data, test=held), name if test is None else "own:dataset"
    part = _part(train, "the training data", room)
    classes, notes = _classes(part), list(part.notes)
    shape = part.images.shape
    if test is None:
        held = Split(torch.empty(0, *shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
        notes.append("no test part: give data=(train, test) to have one")
    else:
        held = _test(test, shape, len(classes), room)
    note = "; ".join([f"images handed in as {part.kind}", *notes])
    return Dataset(f"own {part.kind}", classes, part.images, held, note), f"own:{part.kind}"


def as_test_split(given: Any, *, limit: int | None = None) -> Split:
    """Images to evaluate on, in memory: of a name or a Dataset with two parts the test part."""
    if isinstance(given, Split):
        return given
    if isinstance(given, Dataset):
        return _not_empty(given.test)
    if isinstance(given, str | Path):
        return _not_empty(load(_source(given)).test)
    train, test = _two(given)
    if test is not None:
        raise UserError("evaluate takes one set of images, got (train, test). Give the test part.")
    if isinstance(train, DataLoader):
        return _all(train, limit)
    images = _part(train, "the data", host_room()).images
    if isinstance(images, Rows):
        images = (images if limit is None else images.take(torch.arange(min(limit, len(images))))).read()
    assert isinstance(images, Split)
    return images


def _two(given: Any) -> tuple[Any, Any]:
    """(train, test), or (data, None). A pair that begins with a tensor or an array is (x, y)."""
    if isinstance(given, Tensor | np.ndarray):
        raise UserError("these are images without labels. Give both: data=(x, y).")
    if not isinstance(given, tuple | list):
        return given, None
    if len(given) == 4 and all(isinstance(part, Tensor | np.ndarray) for part in given):
        raise UserError("four arrays: give them as data=((x_train, y_train), (x_test, y_test)).")
    if len(given) != 2:
        raise UserError(f"data is a {type(given).__name__} of {len(given)} parts. Give {KINDS}.")
    if isinstance(given[0], Tensor | np.ndarray) or _is_numbers(given[1]):
        return given, None
    if isinstance(given[0], DataLoader) and isinstance(given[1], Tensor | np.ndarray):
        raise UserError("a DataLoader gives images and labels. Give it alone: data=loader, or data=(train, test).")
    return given[0], given[1]


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def _part(given: Any, name: str, room: int) -> Part:
    """One set of images, by its kind."""
    if isinstance(given, Split):
        return Part(given, "tensors")
    if isinstance(given, tuple | list) and len(given) == 2:
        return _pair(given[0], given[1], name)
    if isinstance(given, DataLoader):
        return _of_loader(given, room)
    if isinstance(given, IterableDataset):
        raise UserError(
            "an IterableDataset has no batches of its own. Give a DataLoader: DataLoader(dataset, batch_size=128)."
        )
    if isinstance(given, torch.utils.data.Dataset) or (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
        if isinstance(given, dict | list | str | bytes):
            raise UserError(f"data is a {type(given).__name__}. Give {KINDS}.")
        return _of_items(given, Workers(), room, "dataset")
    if isinstance(given, Iterable):
        raise UserError(
            f"data is a {type(given).__name__}, which can be read only once or has no length. Give {KINDS}."
        )
    raise UserError(f"data is a {type(given).__name__}. Give {KINDS}.")


def _pair(x: Any, y: Any, name: str) -> Part:
    array = isinstance(x, np.ndarray)
    if isinstance(y, DataLoader):
        raise UserError("a DataLoader gives images and labels. Give it alone: data=loader, or data=(train, test).")
    images = as_images(x, name, channels_first=None if array else True)
    labels = as_labels(y, name)
    if len(images) != len(labels):
        raise UserError(f"{name} has {len(images)} images and {len(labels)} labels. Give one label per image.")
    return Part(Split(images, labels), "arrays" if array else "tensors")


def _of_items(dataset: Any, workers: Workers, room: int, kind: str) -> Part:
    images = items.read(dataset, workers, room=room)
    notes: tuple[str, ...] = ()
    if isinstance(images, Rows):
        why = "its transforms are random" if items.is_random(dataset) else "it is larger than half of the memory"
        notes = (f"items are read as they are needed, as {why}",)
    return Part(images, kind, _names(dataset), notes)


def _of_loader(loader: DataLoader[Any], room: int) -> Part:
    own = _own_ways(loader)
    if own:
        found = passing(loader)
        again = "" if found.repeats else "; a second pass differs although it was seeded: a resumed run will differ too"
        note = f"the loader's batches are used as they come, because of its {own}; a run resumes at epochs{again}"
        return Part(found, "loader", _names(loader.dataset), (note,))
    workers = Workers(loader.num_workers, loader.worker_init_fn, loader.multiprocessing_context)
    part = _of_items(loader.dataset, workers, room, "loader")
    return replace(
        part, notes=(*part.notes, "of the loader its dataset and workers are used; order and batch size are the run's")
    )


def _own_ways(loader: DataLoader[Any]) -> str:
    """What makes a loader's batches other than those of its Dataset in random order; "" for nothing."""
    if isinstance(loader.dataset, IterableDataset):
        return "IterableDataset"
    if type(loader.batch_sampler) is not BatchSampler:
        return "batch_sampler" if loader.batch_sampler is not None else "batch_size=None"
    if type(loader.sampler) is not SequentialSampler:
        if type(loader.sampler) is not RandomSampler:
            return "sampler"
        if loader.sampler.replacement or len(loader.sampler) != len(loader.dataset):  # type: ignore[arg-type]
            return "sampler"
    return "" if loader.collate_fn is default_collate else "collate_fn"


def _all(loader: DataLoader[Any], limit: int | None) -> Split:
    """The images of a loader in its own order, or the first `limit`."""
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    count = 0
    with seeded(0):  # of its workers and samplers: the caller's random state is left alone
        for number, batch in enumerate(drawn(loader), 1):
            x, y = checked(batch, f"batch {number} of the loader")
            xs, ys, count = [*xs, x], [*ys, y], count + len(x)
            if limit is not None and count >= limit:
                break
    if not xs:
        raise UserError("the loader gives no batches. Give at least one image.")
    if len({tuple(x.shape[1:]) for x in xs}) > 1:
        raise UserError("the loader's images differ in size. Scale them to one size in its transform.")
    if len({x.dtype for x in xs}) > 1:
        xs = [as_pixels(x) for x in xs]
    return Split(torch.cat(xs), torch.cat(ys))


def _test(given: Any, shape: tuple[int, int, int], classes: int, room: int) -> Split:
    """The test part, in memory, checked against the training images."""
    if given is None:
        raise UserError("the test part is None. Give data=train alone, or data=(train, test).")
    found = as_test_split(given)
    if found.shape != shape:
        raise UserError(
            f"the training images have the shape {shape} and the test images {found.shape} (channels, height, width). "
            "Give both the same."
        )
    if int(found.y.max()) >= classes:
        raise UserError(
            f"the test part has the label {int(found.y.max())}, the training part only 0 to {classes - 1}. "
            "Train on every class that is tested."
        )
    return found


def _not_empty(split: Split) -> Split:
    if len(split) == 0:
        raise UserError("these data have no test images. Give them: evaluate(model, x, y).")
    return split


def _classes(part: Part) -> tuple[str, ...]:
    images = part.images
    if isinstance(images, Passing):
        count = classes_from(*images.labels, images.images, "the loader")
    else:
        assert isinstance(images, Split | Rows)
        count = count_classes(images.y, "the training data")
    return part.names if len(part.names) >= count else tuple(map(str, range(count)))


def _names(dataset: Any) -> tuple[str, ...]:
    """Class names, where the Dataset has them as torchvision's do."""
    names = getattr(dataset, "classes", None)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()


def _source(given: str | Path) -> str:
    """The name of a source; a path to images as the source that reads it."""
    text = str(given)
    path = Path(text).expanduser()
    if isinstance(given, Path) or (("/" in text or path.suffix) and ":" not in text):
        if not path.exists():
            raise UserError(f"no such file or folder: {text}. Give {KINDS}.")
        return f"folder:{path}" if path.is_dir() else f"npz:{path}"
    return text
