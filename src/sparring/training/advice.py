"""Notes on a run before it begins: settings that are allowed but probably not intended.

Each is one sentence that names the field of `Config` and the command's option. Knows no folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from sparring import models, schedules
from sparring.data import Dataset, Passing, parse_augment
from sparring.training.config import Config

_ADAM = {"adam": "Adam", "adamw": "AdamW"}
_HIGH_FOR_ADAM = 0.02


def notes(config: Config, data: Dataset, device: torch.device) -> Iterator[str]:
    """What looks unintended in training `config` on `data`."""
    eps = config.objective.radius
    yield from config.objective.advice(config.epochs)
    if eps and not 0.49 * eps < config.validation_radius < 2.01 * eps:  # the paper trains at 16/255, measures at 8/255
        yield (
            f"validation and the best epoch are judged at eps {config.validation_radius:.3g}, training is at "
            f"{eps:.3g}; another: validation_eps (--validation-eps)."
        )
    if late := schedules.start_after(config.lr, config.epochs):
        yield f"lr {config.lr} (--lr): @{late} lies after the last epoch ({config.epochs})."
    if config.optimizer in _ADAM and (rate := max(config.lr.values())) > _HIGH_FOR_ADAM:
        name = _ADAM[config.optimizer]
        yield f"a learning rate of {rate:g} is SGD's: {name} usually takes about 0.001 (lr, --lr)."
    yield from _on_images(config, data)
    days = _days_on_a_cpu(config, data)
    if device.type == "cpu" and days > 1:
        yield (
            f"on a CPU this takes about {days:,.0f} days. Use a GPU, fewer epochs (--epochs), or a smaller model "
            "(--model)."
        )


def _on_images(config: Config, data: Dataset) -> Iterator[str]:
    """What does not fit the number of images, or their size."""
    total, held = len(data.train), config.validation
    if total / 5 < held < total and not isinstance(data.train, Passing):  # a loader's batches are all trained on
        fewer = _round_tenth(total)
        yield (
            f"{held:,} of {total:,} training images are held out for validation, {total - held:,} are trained on; "
            f"fewer: validation={fewer} (--validation {fewer})."
        )
    eps, values = config.objective.radius, data.channels * math.prod(data.size)
    if config.objective.norm == "l2" and eps > math.sqrt(values):
        yield (
            f"eps {eps:.3g} is longer than the diagonal of an image in L2 ({math.sqrt(values):.3g}, the root of its "
            f"{values:,} values), so the ball holds every image: lower eps (--attack.eps)."
        )
    padding, side = parse_augment(config.augment).padding, min(data.size)
    if 2 * padding >= side:
        yield (
            f"a crop after a padding of {padding} pixels can leave a quarter or less of an image of "
            f"{data.size[0]}x{data.size[1]}; less padding: crop:{max(1, side // 8)} in augment (--augment)."
        )


def _round_tenth(total: int) -> int:
    """A tenth of the images, rounded down to one digit and zeros; at least 1."""
    tenth = max(1, total // 10)
    unit = int("1" + "0" * (len(str(tenth)) - 1))
    return tenth // unit * unit


def _days_on_a_cpu(config: Config, data: Dataset) -> float:
    """A rough estimate: an input gradient costs two forward passes, an update three."""
    if not models.built_in(config.model):
        return 0.0  # unknown
    forward = models.seconds_on_a_cpu(config.model, data.channels, data.size, data.num_classes)
    return config.epochs * len(data.train) * forward * (2 * config.objective.most_backprops + 3) / 86400
