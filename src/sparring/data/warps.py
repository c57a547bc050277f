"""Augmentations that compute new pixel values: random resized crop and colour jitter, on the device.

They draw on the CPU, one row of numbers per image, so a seed gives the same draws on every device; the pixels, float32
in [0, 1], agree up to rounding. Must not know batches, epochs or data sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.data.dataset import as_pixels
from sparring.seeds import generator

Drawn = tuple[Tensor, ...]  # one row per image in every tensor
_ASPECT = 4 / 3  # largest ratio of a crop's sides, either way
_HUE = 0.1  # turns of the colour wheel at strength 1


@dataclass(frozen=True)
class ResizedCrop:
    """Crop `low` to `high` of the area, sides 3:4 to 4:3, and scale it back to the image's size, bilinear."""

    low: float
    high: float = 1.0
    purpose = 0x2E51

    def draw(self, n: int, size: tuple[int, int], seed: int, epoch: int) -> Drawn:
        """(boxes,) of shape (n, 4): top, height, left and width as fractions of the image."""
        u = torch.rand(n, 4, generator=generator("cpu", seed, epoch, self.purpose))
        area = self.low + (self.high - self.low) * u[:, 0]
        ratio = torch.exp((2 * u[:, 1] - 1) * math.log(_ASPECT))
        tall, wide = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        return (torch.stack([u[:, 2] * (1 - tall), tall, u[:, 3] * (1 - wide), wide], dim=1),)

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        """The crops, float32, with the shape of x."""
        top, tall, left, wide = (part[:, None] for part in drawn[0].unbind(1))
        down, across = ((2 * torch.arange(n, device=x.device) + 1) / n - 1 for n in x.shape[2:])  # centres in [-1, 1]
        rows = (tall * down + 2 * top + tall - 1)[:, :, None].expand(-1, -1, x.shape[3])
        columns = (wide * across + 2 * left + wide - 1)[:, None, :].expand(-1, x.shape[2], -1)
        grid = torch.stack([columns, rows], dim=3)
        return F.grid_sample(as_pixels(x), grid, padding_mode="border", align_corners=False).clamp_(0, 1)


@dataclass(frozen=True)
class Jitter:
    """Change brightness, contrast and saturation by a factor of 1 +- strength, and turn the hue a little.

    The hue turns by up to a tenth of `strength` of the colour wheel. Images that have not three channels change in
    brightness and contrast only.
    """

    strength: float
    purpose = 0x0C01

    def draw(self, n: int, size: tuple[int, int], seed: int, epoch: int) -> Drawn:
        """(changes,) of shape (n, 4): three factors, and the hue's angle in radians."""
        u = 2 * torch.rand(n, 4, generator=generator("cpu", seed, epoch, self.purpose)) - 1
        factors = 1 + self.strength * u[:, :3]
        return (torch.cat([factors, self.strength * _HUE * 2 * math.pi * u[:, 3:]], dim=1),)

    def apply(self, x: Tensor, drawn: Drawn) -> Tensor:
        """The images in other colours, float32."""
        bright, contrast, saturation, angle = (part[:, None, None, None] for part in drawn[0].unbind(1))
        x = (as_pixels(x) * bright).clamp_(0, 1)
        middle = _luma(x).mean(dim=(1, 2, 3), keepdim=True)
        x = (middle + contrast * (x - middle)).clamp_(0, 1)
        if x.shape[1] != 3:
            return x
        # In YIQ, saturation scales the two chroma axes and a change of hue rotates them.
        red, green, blue = (x[:, channel : channel + 1] for channel in range(3))
        luma = _luma(x)
        i = 0.595716 * red - 0.274453 * green - 0.321263 * blue
        q = 0.211456 * red - 0.522591 * green + 0.311135 * blue
        along, across = saturation * angle.cos(), saturation * angle.sin()
        i, q = along * i - across * q, across * i + along * q
        coloured = [luma + 0.9563 * i + 0.6210 * q, luma - 0.2721 * i - 0.6474 * q, luma - 1.1070 * i + 1.7046 * q]
        return torch.cat(coloured, dim=1).clamp_(0, 1)


def _luma(x: Tensor) -> Tensor:
    """The brightness of every pixel, (n, 1, height, width)."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
