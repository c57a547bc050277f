"""The images of a run: those to train on, placed on the device or streamed to it, and those held out to validate on.

Knows configurations and data; knows no model and no folder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparring.data import (
    Dataset,
    Images,
    Mixture,
    Passing,
    Rows,
    Split,
    Training,
    divide,
    hold_out,
    join,
    load_extra,
    place,
)
from sparring.data.policy import check_size
from sparring.errors import UserError
from sparring.seeds import Draw, derive_seed
from sparring.training.config import Config


@dataclass(frozen=True, eq=False)
class RunImages:
    """What a run trains on and validates on."""

    training: Training
    held: Split
    fingerprint: str  # of the training images; those of extra images follow after a +

    @property
    def seekable(self) -> bool:
        """Whether an epoch can be entered in the middle."""
        return not isinstance(self.training, Passing)


def images_of(config: Config, data: Dataset, device: torch.device, *, room: int | None = None) -> RunImages:
    """Hold out validation images, and put the rest on the device, or make it ready to be streamed there.

    Args:
        room: bytes that images may take on the device; half of the free memory of a GPU unless given.
    """
    check_size(config.augment, data.size)
    train: Images = data.train
    if isinstance(train, Passing):
        if config.extra:
            raise UserError("extra images need a map-style Dataset; this loader's batches are used as they come.")
        return RunImages(train.to(device), _held_elsewhere(train, data.test, config).to(device), data.fingerprint)
    if not isinstance(train, Split | Rows):
        raise UserError(f"data.train is a {type(train).__name__}. Give a sparring.data.Split.")
    rest, held = divide(train, config.validation, seed=derive_seed(config.seed, Draw.HOLD_OUT))
    if not config.extra:
        return RunImages(place(rest, device, room=room), held.to(device), data.fingerprint)
    extra, digest = load_extra(config.extra, classes=data.num_classes)
    both = join(rest, extra, device, room=room)
    mixture = Mixture(both, len(rest), config.extra_fraction)
    return RunImages(mixture, held.to(device), f"{data.fingerprint}+{digest}")


def _held_elsewhere(train: Passing, test: Split, config: Config) -> Split:
    """Validation images where none can be held out of batches that pass by.

    They come from the test part, which should then not be used to report; without one, they are the first images, which
    are trained on as well.
    """
    if len(test) == 0:
        return train.head(config.validation)
    if len(test) <= config.validation:
        return test
    return hold_out(test, config.validation, seed=derive_seed(config.seed, Draw.HOLD_OUT))[1]
