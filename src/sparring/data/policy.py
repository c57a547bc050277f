"""What happens to training images, written as one text: "crop-flip+cutout:8", "crop-flip+cutmix:1.0".

    none                 as they are
    crop, crop:6         random crop after zero padding of 4, or 6, pixels
    flip                 mirror half of the images
    resized-crop:0.25    random crop of 25 % to 100 % of the area, scaled back
    jitter:0.4           change brightness, contrast, saturation and hue
    cutout:8             black out a square of 8 pixels
    erase:0.5            fill a random box with one colour, in half of the images
    cutmix:1.0           paste a box of another image, labels mixed

Parts are joined by + and applied in the order crop, flip, jitter, cutout, erase, cutmix, however they are written.
`crop-flip` is crop+flip. Draws depend on (seed, epoch) and the place in the epoch's order, so a resumed run repeats
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparring.data import augment as moving
from sparring.data.boxes import CutMix, Cutout, Drawn, Erasing
from sparring.data.warps import Jitter, ResizedCrop
from sparring.errors import UserError, unknown
from sparring.seeds import generator

PARTS = ("none", "flip", "crop", "crop-flip", "resized-crop", "jitter", "cutout", "erase", "cutmix")
_MOVES = 0x0A46  # purpose of the draws of crop and flip
_PAD = 4  # pixels


class Step(Protocol):
    """One augmentation: draws for n images, then changes them."""

    def draw(self, n: int, size: tuple[int, int], seed: int, epoch: int) -> Drawn:
        """One row per image in every tensor, on the CPU."""

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        """The changed images."""


@dataclass(frozen=True)
class Policy:
    """The parts of an augmentation text."""

    moves: str = "none"  # of crop and flip
    pad: int | None = None  # pixels; None: the caller's default
    steps: tuple[Step, ...] = ()
    cutmix: CutMix | None = None

    @property
    def padding(self) -> int:
        """Pixels of padding before a crop in training; 0 without a crop."""
        return 0 if "crop" not in self.moves else _PAD if self.pad is None else self.pad


@dataclass(frozen=True, eq=False)
class Draws:
    """What was drawn for every image of an epoch, in its order."""

    policy: Policy
    moves: moving.Moves | None
    steps: tuple[Drawn, ...]
    boxes: Drawn  # of CutMix; empty without

    def to(self, device: torch.device | str) -> Draws:
        """The same draws on `device`."""
        return Draws(
            self.policy,
            None if self.moves is None else self.moves.to(device),
            tuple(tuple(part.to(device) for part in drawn) for drawn in self.steps),
            tuple(part.to(device) for part in self.boxes),
        )

    def take(self, places: Tensor) -> Draws:
        """What was drawn for these places of the epoch, in this order."""
        return Draws(
            self.policy,
            None if self.moves is None else self.moves[places],
            tuple(tuple(rows[places] for rows in drawn) for drawn in self.steps),
            tuple(rows[places] for rows in self.boxes),
        )

    def apply(self, x: Tensor, part: slice) -> Tensor:
        """The images at these places of the epoch, changed; images are not mixed here."""
        if len(x) == 0:
            return x
        if self.moves is not None:
            x = moving.apply(x, self.moves[part])
        for step, drawn in zip(self.policy.steps, self.steps, strict=True):
            x = step.apply(x, tuple(rows[part] for rows in drawn))
        return x

    def mix(self, x: Tensor, y: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(x, y, other, share) of the batch at these places; other and share are None without CutMix."""
        if self.policy.cutmix is None:
            return x, y, None, None
        if len(x) == 0:
            return x, y, y, y.float()
        return self.policy.cutmix.apply(x, y, tuple(rows[part] for rows in self.boxes))


def draw(policy: Policy, n: int, size: tuple[int, int], *, seed: int, epoch: int, pad: int = _PAD) -> Draws:
    """Draw for `n` images of height x width `size`, on the CPU."""
    moves = None
    if policy.moves != "none":
        drawn = generator("cpu", seed, epoch, _MOVES)
        pad = pad if policy.pad is None else policy.pad
        moves = moving.draw(n, augment=policy.moves, pad=pad, generator=drawn)
    steps = tuple(step.draw(n, size, seed, epoch) for step in policy.steps)
    boxes = () if policy.cutmix is None else policy.cutmix.draw(n, size, seed, epoch)
    return Draws(policy, moves, steps, boxes)


def mixes_labels(augment: str) -> bool:
    """Whether images of two classes are mixed."""
    return parse(augment).cutmix is not None


def parse(augment: str) -> Policy:
    """The policy that a text describes."""
    if not isinstance(augment, str):
        raise UserError(f"augment must be a text such as 'crop-flip+cutout:8', got {augment!r}.")
    given = _parts(augment)
    if "none" in given and len(given) > 1:
        raise UserError(f"augment={augment!r} says none and something else. Leave out none.")
    crop, flip = "crop" in given, "flip" in given
    if crop and "resized-crop" in given:
        raise UserError(f"augment={augment!r} crops twice. Keep crop or resized-crop.")
    steps: list[Step] = []
    if "resized-crop" in given:
        low, high = _range(given["resized-crop"])
        steps.append(ResizedCrop(low, high))
    if "jitter" in given:
        steps.append(Jitter(_number("jitter", given["jitter"], 0, 1, "0.4")))
    if "cutout" in given:
        steps.append(Cutout(_pixels("cutout", given["cutout"], 1)))
    if "erase" in given:
        steps.append(Erasing(_number("erase", given["erase"], 0, 1, "0.5")))
    cutmix = CutMix(_number("cutmix", given["cutmix"], 0, 100, "1.0")) if "cutmix" in given else None
    pad = _pixels("crop", given["crop"], 0) if crop and given["crop"] else None
    return Policy(("crop-flip" if flip else "crop") if crop else "flip" if flip else "none", pad, tuple(steps), cutmix)


def check_size(augment: str, size: tuple[int, int]) -> None:
    """Refuse a square that blacks out whole images of height x width `size`."""
    for step in parse(augment).steps:
        if isinstance(step, Cutout) and step.side >= max(size):
            raise UserError(
                f"cutout:{step.side} is as large as the images of {size[0]}x{size[1]}: of many nothing is left. "
                f"Write for example cutout:{max(1, min(size) // 2)}."
            )


def _parts(augment: str) -> dict[str, str]:
    """The parts by name, with what follows the colon."""
    given: dict[str, str] = {}
    for part in augment.split("+"):
        name, _, value = part.strip().partition(":")
        if name not in PARTS:
            raise unknown("augmentation", name, PARTS)
        if value and name in ("none", "flip"):
            raise UserError(f"{name} takes no number, got {part!r} in augment={augment!r}.")
        for each in ("crop", "flip") if name == "crop-flip" else (name,):
            if each in given:
                raise UserError(f"augment={augment!r} names {each} twice. Name it once.")
            given[each] = value if each != "flip" else ""
    return given


def _number(name: str, value: str, least: float, most: float, example: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not least < number <= most:
        raise UserError(f"{name} needs a number in ({least:g}, {most:g}], got {value!r}. Write {name}:{example}.")
    return number


def _pixels(name: str, value: str, least: int) -> int:
    if not (value.isascii() and value.isdigit() and least <= int(value) <= 512):
        raise UserError(f"{name} needs a number of pixels from {least} to 512, got {value!r}. Write {name}:8.")
    return int(value)


def _range(value: str) -> tuple[float, float]:
    ends: Sequence[str] = value.split("-") if value else ("",)
    low = _number("resized-crop", ends[0], 0, 1, "0.25")
    high = _number("resized-crop", ends[1], 0, 1, "0.25-1.0") if len(ends) == 2 else 1.0
    if len(ends) > 2 or low > high:
        raise UserError(f"resized-crop needs a range of areas, got {value!r}. Write resized-crop:0.25-1.0.")
    return low, high
