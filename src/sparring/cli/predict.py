"""`sparring predict`: the classes of image files, by a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.table import Column, Table
from torch import Tensor, nn

from sparring import data, schedules, weights
from sparring.attacks import pgd
from sparring.attacks.threat import Norm, check_radius
from sparring.cli.arguments import name_model, parse
from sparring.cli.console import WIDE, Screen
from sparring.cli.subject import sizes
from sparring.errors import UserError
from sparring.models.own import PARAMETERS
from sparring.seeds import generator
from sparring.training import run_folder
from sparring.training.distributed import pick_device
from sparring.weights.foreign import is_image

DESCRIPTION = """Predict the classes of image files. They are scaled and cropped as training on a folder does it.

Examples:
  sparring predict fat-digits digit.png
  sparring predict runs/fat one.png two.jpg --top 5
  sparring predict runs/fat one.png --eps 8/255 --json
  sparring predict model.pth.tar photo.png --data cifar10"""

_STEPS = 20  # of the attack that --eps asks for, each of eps/10, as in the protocol mart
_BATCH = 64


@dataclass(frozen=True)
class Options:
    """With which model, of which images."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run folder, an exported folder, a .safetensors or published .pth file, or a shipped model: fat-digits."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Image files: PNG, JPEG, BMP, WebP, GIF, TIFF or PPM, 8 bits per channel."""
    data: str | None = None
    """The data set that the model was made for, where its file does not record class names and image size."""
    top: int = 3
    """How many classes to show per image."""
    eps: float | None = None
    """Also attack each image within this radius, in [0, 1] pixels (8/255): does PGD-20 change the prediction?"""
    norm: Norm | None = None
    """The norm of that radius; that of the model's training unless given."""
    model: str | None = None
    """The network, where it is your own (package.module:make) or can be neither read nor identified."""
    json: bool = False
    """Print JSON."""
    which: Literal["last", "best"] = "last"
    """The checkpoint of a run folder."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class Prediction:
    """What the model says of one image."""

    file: Path
    top: tuple[tuple[str, float], ...]  # (class, probability), the likeliest first
    attacked: str | None  # the class that PGD-20 ends at; None where there was no attack

    @property
    def changed(self) -> bool:
        """Whether the attack changed the prediction."""
        return self.attacked is not None and self.attacked != self.top[0][0]


def run(argv: list[str]) -> int:
    """Run the command."""
    asked = parse(Options, argv, prog="sparring predict", description=DESCRIPTION)
    if not asked.images:
        raise UserError("no image given. Write for example: sparring predict fat-digits digit.png")
    if asked.top < 1:
        raise UserError(f"--top must be at least 1, got {asked.top}.")
    _refuse_image(asked.path)
    name_model(asked.model)
    loaded = weights.load(
        asked.path,
        model=asked.model,
        **sizes(asked.path, asked.which, asked.model, asked.data),
        which=asked.which,
        device=pick_device(asked.device),
    )
    norm = asked.norm or _trained_in(asked.path, loaded)
    if asked.eps is not None:
        check_radius("--eps", asked.eps, norm)
    described, notes = _described(asked, loaded)
    images = data.read_images(asked.images, size=described.size, channels=described.channels)
    found = predict(loaded.model, images, asked.images, described.classes, top=asked.top, eps=asked.eps, norm=norm)
    if asked.json:
        print(json.dumps(_as_json(asked, norm, found, notes), indent=1))
        return 0
    for note in notes:
        print(f"note: {note}")
    screen = Screen()
    (screen if screen.is_terminal else Screen(width=WIDE)).print(_table(found))
    if asked.eps is not None:
        changed = sum(each.changed for each in found)
        eps = schedules.radius_text(asked.eps, norm)
        screen.print(
            f"PGD-{_STEPS} within eps {eps} changed {changed} of {len(found)} predictions. An unchanged one is not "
            "proved robust: a stronger attack may change it.",
            highlight=False,
            soft_wrap=True,
        )
    return 0


def _refuse_image(path: Path) -> None:
    """Refuse an image in the place of the model."""
    if path.is_file():
        with suppress(OSError), path.open("rb") as file:  # what cannot be read is told by loading
            if is_image(file.read(16)):
                raise UserError(
                    f"{path} is an image, not a checkpoint. The model comes first, then the images: "
                    "sparring predict fat-digits digit.png"
                )


def _trained_in(path: Path, loaded: weights.Loaded) -> Norm:
    """The norm that a model was trained in, as its run or its exported file records it."""
    with suppress(UserError):
        return run_folder.open_run(path).config.objective.norm
    return "l2" if (loaded.facts.get("threat") or {}).get("norm") == "l2" else "linf"


@dataclass(frozen=True)
class _Described:
    classes: tuple[str, ...]
    size: tuple[int, int]
    channels: int


def _described(asked: Options, loaded: weights.Loaded) -> tuple[_Described, list[str]]:
    """Class names, image size and channels: of the file, else of --data; and notes on what is unknown."""
    model, notes = loaded.facts["model"], list(loaded.notes)
    unknown = [key for key in PARAMETERS if model.get(key) is None]
    if unknown:  # a network of the user's own, in a file of weights alone
        raise UserError(f"{asked.path} does not record {', '.join(unknown)}. Give its data set: --data digits.")
    count, channels = model["num_classes"], model["channels"]
    height, width = model["size"]
    if asked.data is not None:
        images = data.load(asked.data)
        if (images.num_classes, images.channels) != (count, channels):
            raise UserError(
                f"{asked.path} was made for {count} classes and {channels} colour channels, {images.name} has "
                f"{images.num_classes} and {images.channels}. Give its own data set with --data."
            )
        own = model.get("classes")
        if own is not None and own != list(images.classes):
            raise UserError(f"{asked.path} was made for other classes than those of {images.name}. Leave out --data.")
        if "recipe" not in loaded.facts:  # else the file's own size is what it was trained on
            height, width = images.size
        return _Described(images.classes, (height, width), channels), notes
    names = tuple(model.get("classes") or map(str, range(count)))
    if "recipe" not in loaded.facts and "classes" not in model:
        notes.append(
            f"{asked.path} records neither class names nor the size of its images: classes are numbers, images are "
            f"scaled to {height}x{width}. Give its data set with --data."
        )
    return _Described(names, (height, width), channels), notes


def predict(
    model: nn.Module,
    images: Tensor,
    files: Sequence[Path],
    classes: Sequence[str],
    *,
    top: int = 3,
    eps: float | None = None,
    norm: Norm = "linf",
) -> list[Prediction]:
    """The likeliest classes of uint8 images, and with `eps` the class that PGD-20 within it ends at."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    found: list[Prediction] = []
    for first in range(0, len(images), _BATCH):
        x = images[first : first + _BATCH].to(device).float() / 255
        probabilities = _logits(model, x).softmax(dim=1)
        best = probabilities.topk(min(top, len(classes)), dim=1)
        reached = _attacked(model, x, best.indices[:, 0], eps, norm, first) if eps is not None else None
        for row, file in enumerate(files[first : first + _BATCH]):
            likely = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            shown = tuple((classes[label], probability) for label, probability in likely)
            found.append(Prediction(file, shown, None if reached is None else classes[reached[row]]))
    return found


def _attacked(model: nn.Module, x: Tensor, y: Tensor, eps: float, norm: Norm, first: int) -> list[int]:
    """The classes of the images after PGD-20 away from the prediction, by a uniform start of a fixed seed."""
    draws = generator(x.device, 0, first)
    x_adv = pgd(model, x, y, eps=eps, step_size=eps / 10, steps=_STEPS, norm=norm, start="uniform", generator=draws)
    return [int(label) for label in _logits(model, x_adv).argmax(dim=1).tolist()]


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            logits: Tensor = model(x)
    except RuntimeError as error:
        shape = "x".join(map(str, x.shape[1:]))
        why = str(error).partition("\n")[0].rstrip(".")
        raise UserError(f"the model does not take images of {shape} ({why}). Give its own data set: --data.") from None
    return logits


def _table(found: Sequence[Prediction]) -> Table:
    table = Table(Column("image", overflow="fold"), "class", "probability", box=None, pad_edge=False)
    others = max(len(each.top) for each in found) > 1
    attacked = any(each.attacked is not None for each in found)
    for title in [*(["then"] if others else []), *(["under attack"] if attacked else [])]:
        table.add_column(title)
    for each in found:
        (name, probability), *rest = each.top
        cells = [str(each.file), name, f"{100 * probability:.1f} %"]
        cells += [", ".join(f"{other} {100 * share:.1f} %" for other, share in rest)] if others else []
        cells += [f"becomes {each.attacked}" if each.changed else "unchanged"] if attacked else []
        table.add_row(*cells)
    return table


def _as_json(asked: Options, norm: Norm, found: Sequence[Prediction], notes: Sequence[str]) -> dict[str, Any]:
    attack = None
    if asked.eps is not None:
        attack = {"name": f"pgd{_STEPS}", "norm": norm, "eps": asked.eps, "step_size": asked.eps / 10, "seed": 0}
    images = [
        {
            "file": str(each.file),
            "class": each.top[0][0],
            "probability": each.top[0][1],
            "top": [{"class": name, "probability": probability} for name, probability in each.top],
            **({} if each.attacked is None else {"attacked": each.attacked, "changed": each.changed}),
        }
        for each in found
    ]
    return {"model": str(asked.path), "notes": list(notes), "attack": attack, "images": images}
