"""Rectangles in images: Cutout, random erasing and CutMix, vectorised, on the device that holds the images.

Boxes are drawn on the CPU, one per image, so a seed gives the same boxes on every device; pixels are only copied or
overwritten, so the images are the same too, bit for bit. Must not know batches, epochs or data sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparring.seeds import derive_seed, generator

Drawn = tuple[Tensor, ...]  # one row per image in every tensor
_AREA = (0.02, 1 / 3)  # of the image, erased at random (Zhong et al., AAAI 2020)
_ASPECT = 10 / 3  # largest ratio of an erased box's sides, either way


@dataclass(frozen=True)
class Cutout:
    """Black out a square of `side` pixels around a pixel drawn at random; at the border less (DeVries & Taylor)."""

    side: int
    purpose = 0x0C07

    def draw(self, n: int, size: tuple[int, int], seed: int, epoch: int) -> Drawn:
        """(boxes,) of shape (n, 4): top, bottom, left, right."""
        drawn = generator("cpu", seed, epoch, self.purpose)
        rows, columns = (torch.randint(0, length, (n,), generator=drawn) for length in size)
        half = self.side // 2
        top, left = rows - half, columns - half
        return (torch.stack([top, top + self.side, left, left + self.side], dim=1),)

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        """The images with their squares blacked out."""
        return x.masked_fill(inside(drawn[0], x), 0)


@dataclass(frozen=True)
class Erasing:
    """Fill a box of 2 % to a third of the image with one random colour, with a probability (Zhong et al.)."""

    probability: float
    purpose = 0x0E5A

    def draw(self, n: int, size: tuple[int, int], seed: int, epoch: int) -> Drawn:
        """(boxes, colours): boxes are empty where nothing is erased; four levels each, repeated for more channels."""
        drawn = generator("cpu", seed, epoch, self.purpose)
        u = torch.rand(n, 5, generator=drawn, dtype=torch.float64)
        colours = torch.randint(0, 256, (n, 4), generator=drawn, dtype=torch.uint8)
        area = (_AREA[0] + (_AREA[1] - _AREA[0]) * u[:, 0]) * size[0] * size[1]
        ratio = torch.exp((2 * u[:, 1] - 1) * math.log(_ASPECT))
        tall = (area * ratio).sqrt().round().long().clamp(1, size[0])
        wide = (area / ratio).sqrt().round().long().clamp(1, size[1])
        top = (u[:, 2] * (size[0] - tall + 1)).long()
        left = (u[:, 3] * (size[1] - wide + 1)).long()
        kept = u[:, 4] >= self.probability
        tall = torch.where(kept, 0, tall)
        return torch.stack([top, top + tall, left, left + wide], dim=1), colours

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        """The images with their boxes filled."""
        boxes, colours = drawn
        filled = colours[:, torch.arange(x.shape[1], device=x.device) % 4, None, None]
        if x.dtype != torch.uint8:
            filled = filled.to(x.dtype) / 255
        return torch.where(inside(boxes, x), filled, x)


@dataclass(frozen=True)
class CutMix:
    """Paste a box of the next image of the batch into each; its area is Beta(alpha, alpha) (Yun et al., ICCV 2019).

    The order of an epoch is random, so the next image of the batch is a random one.
    """

    alpha: float
    purpose = 0x0C33

    def draw(self, n: int, size: tuple[int, int], seed: int, epoch: int) -> Drawn:
        """(boxes,) of shape (n, 4)."""
        # numpy's legacy generator: torch's public Beta draws from the global state, and this stream never changes.
        whole = derive_seed(seed, epoch, self.purpose)
        old = np.random.RandomState([whole & 0xFFFFFFFF, whole >> 32])
        side = torch.from_numpy(np.sqrt(1 - old.beta(self.alpha, self.alpha, n)))
        drawn = generator("cpu", seed, epoch, self.purpose)
        box: list[Tensor] = []
        for length in size:
            half = (side * length).long() // 2
            middle = torch.randint(0, length, (n,), generator=drawn)
            box += [(middle - half).clamp(min=0), (middle + half).clamp(max=length)]
        return (torch.stack(box, dim=1),)

    def apply(self, x: Tensor, y: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(images, y, other, share) of one batch: y is the class of the larger part, share its part of the image."""
        (boxes,) = drawn
        mixed = torch.where(inside(boxes, x), x.roll(-1, 0), x)
        top, bottom, left, right = boxes.unbind(1)
        pasted = ((bottom - top) * (right - left)).to(torch.float32) / (x.shape[2] * x.shape[3])
        others = y.roll(-1, 0)
        larger = pasted <= 0.5  # the image's own part
        share = torch.where(larger, 1 - pasted, pasted)
        return mixed, torch.where(larger, y, others), torch.where(larger, others, y), share


def inside(boxes: Tensor, x: Tensor) -> Tensor:
    """Which pixels of x lie in their image's box (top, bottom, left, right): bool, (n, 1, height, width)."""
    rows, columns = (torch.arange(length, device=x.device) for length in x.shape[2:])
    top, bottom, left, right = (edge[:, None] for edge in boxes.unbind(1))
    tall = (rows >= top) & (rows < bottom)
    wide = (columns >= left) & (columns < right)
    return tall[:, None, :, None] & wide[:, None, None, :]
