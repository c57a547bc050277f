"""What a command measures: the model in a file or a run folder, and the images that it is tested on.

Says in notes what a user might not expect: an unfinished run, images that have changed, classes that are missing.
"""

from __future__ import annotations

import shlex
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparring import data, models, weights
from sparring.cli.arguments import name_model, named_again
from sparring.data import Dataset
from sparring.errors import UserError
from sparring.training import run_folder
from sparring.training.checkpoint import read_facts


def of_a_run(path: Path, which: weights.Which) -> tuple[Path, weights.Which]:
    """The run folder of a checkpoint that was named as a file: other runs have files of the same name."""
    own: dict[str, weights.Which] = {run_folder.LAST: "last", run_folder.BEST: "best"}
    if path.name in own and (path.parent / run_folder.CONFIG).is_file():
        return path.parent, own[path.name]
    return path, which


def open_subject(
    path: Path,
    *,
    which: weights.Which,
    data_name: str | None,
    device: torch.device,
    model: str | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> tuple[weights.Loaded, str, Dataset]:
    """Open what a command measures: the model, the name of its data set, the data set."""
    if bool(mean) != bool(std):
        raise UserError("--mean and --std go together. Give both, one number per channel in each.")
    name_model(model)
    _note_unfinished(path)
    loaded = weights.load(
        path,
        model=model,
        **sizes(path, which, model, data_name),
        normalize=(mean, std) if mean else None,
        which=which,
        device=device,
    )
    for note in loaded.notes:
        print(f"note: {note}")
    if mean and "recipe" in loaded.facts:
        raise UserError(f"{path} is Sparring's own file and contains its normalisation. Leave out --mean and --std.")
    spec = data_name or _where_now(path) or loaded.facts.get("data")
    if not isinstance(spec, str):
        raise UserError(f"{path} does not record which data it was trained on. Give it: --data cifar10.")
    try:
        images = data.load(spec)
    except UserError as error:
        if data_name is not None or spec.startswith("own:"):  # which says its own fix
            raise
        raise UserError(
            f"{error} ({path} was trained on {spec}; if that has moved, give its place with --data.)"
        ) from None
    _fit(loaded.facts["model"], images, path, sized="recipe" in loaded.facts)
    images = _for_testing(path, images, elsewhere=data_name is not None)
    if spec.startswith(("folder:", "npz:")):
        print(f"note: {images.note}.")
    return loaded, spec, images


def sizes(path: Path, which: weights.Which, model: str | None, data_name: str | None) -> dict[str, Any]:
    """What the user's own network is made for, where the file does not record it: that of the data."""
    if model is None or data_name is None or models.built_in(model):
        return {}
    about = weights.facts(path, which=which).get("model")
    known = about if isinstance(about, dict) else {}
    images = data.load(data_name)
    found = {"num_classes": images.num_classes, "channels": images.channels, "size": images.size}
    return {key: value for key, value in found.items() if known.get(key) is None}


def _for_testing(path: Path, images: Dataset, *, elsewhere: bool) -> Dataset:
    """The images to test on: all but the training images, where the data set has no test images of its own."""
    try:
        run = run_folder.open_run(path)
    except UserError:  # not a run, or its configuration cannot be read
        return images
    trained_on = run.images.partition("+")[0]  # without its extra images
    if not trained_on or trained_on == images.fingerprint:
        return images
    if not elsewhere:
        print(
            f"note: the images of {images.name} have changed since {path} was trained; the test images may include "
            "images it was trained on."
        )
        return images
    if not images.carved:
        return images
    try:
        own = data.load(run.config.data)
    except UserError:
        return images  # the training images are unknown
    return data.whole(images, without=data.in_memory(own.train)) if own.fingerprint == trained_on else images


def _where_now(path: Path) -> str | None:
    """The data of a run folder: its configuration is updated when the data move, its checkpoints are not."""
    try:
        return run_folder.open_run(path).config.data
    except UserError:
        return None


def note_classes(y: Tensor, n: int) -> None:
    """Print a note where the first n images lack classes, or where one class dominates."""
    first = Counter(y[:n].tolist())
    every = len(set(y.tolist()))
    if len(first) < every:
        print(f"note: the first {n} of {len(y)} test images hold {len(first)} of {every} classes.")
    most = max(first.values(), default=0) / max(1, sum(first.values()))
    if len(first) > 1 and most >= max(0.5, 1.5 / len(first)):
        print(f"note: {most:.1%} of these images are of one class: always predicting it reaches that accuracy.")


def _note_unfinished(path: Path) -> None:
    """Print a note where the run has not finished training."""
    with suppress(UserError):  # not a run, or its configuration cannot be read: the weights may be good
        config = run_folder.open_run(path).config
        epochs = config.epochs
        done = read_facts(path / run_folder.LAST).get("epoch")
        if done is not None and done < epochs:
            again = shlex.join(["sparring", "train", "--out", str(path), "--resume", *named_again(config.model)])
            print(f"note: {path} has trained {done} of {epochs} epochs. To finish it: {again}")


def _fit(model: dict[str, object], images: Dataset, path: Path, *, sized: bool) -> None:
    """Refuse images that do not fit the model; sizes are compared only where the file records its own (`sized`)."""
    for what, own, given in (
        ("classes", model.get("num_classes"), images.num_classes),
        ("colour channels", model.get("channels"), images.channels),
    ):
        if own is not None and own != given:
            raise UserError(
                f"{path} was made for {own} {what}, {images.name} has {given}. Give its own data set with --data."
            )

    size = model.get("size")
    if sized and isinstance(size, list) and tuple(size) != images.size:
        (height, width), other = size, "x".join(map(str, images.size))
        raise UserError(
            f"{path} was made for images of {height}x{width}, those of {images.name} are {other}. "
            f"A folder's are scaled with folder:PATH?size={height}."
        )
    own_names = model.get("classes")
    if isinstance(own_names, list) and own_names != list(images.classes):
        at = next(i for i, pair in enumerate(zip(own_names, images.classes, strict=True)) if pair[0] != pair[1])
        raise UserError(
            f"{path} was made for other classes: its class {at} is {own_names[at]!r}, that of {images.name} "
            f"{images.classes[at]!r}. Give its own data set with --data."
        )
