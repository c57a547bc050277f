"""Random crop (zero padding) and horizontal flip of uint8 images, vectorised, on the device that holds them.

Drawing and applying are separate: `draw` draws one move per image from a CPU generator, so a seed gives the same moves
on every device; `apply` is a pure function. Must not know batches, epochs or data sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.errors import UserError, unknown

AUGMENTS = ("none", "flip", "crop", "crop-flip")


@dataclass(frozen=True, eq=False)
class Moves:
    """One crop and flip per image: the corner of the crop in the padded image, and whether the crop is mirrored."""

    top: Tensor  # int64, 0..2*pad
    left: Tensor  # int64, 0..2*pad
    flip: Tensor  # bool
    pad: int

    def __getitem__(self, part: slice | Tensor) -> Moves:
        return Moves(self.top[part], self.left[part], self.flip[part], self.pad)

    def to(self, device: torch.device | str) -> Moves:
        """The same moves on `device`."""
        return Moves(self.top.to(device), self.left.to(device), self.flip.to(device), self.pad)


def check(augment: str, pad: int) -> None:
    """Refuse an unknown augmentation or a negative padding."""
    if augment not in AUGMENTS:
        raise unknown("augmentation", augment, AUGMENTS)
    if pad < 0:
        raise UserError(f"pad must be 0 or more pixels, got {pad}. The paper's crop uses 4.")


def draw(count: int, *, augment: str, pad: int, generator: torch.Generator) -> Moves:
    """Draw moves for `count` images; crop and flip only where `augment` names them."""
    check(augment, pad)
    corners = torch.randint(0, 2 * pad + 1, (2, count), generator=generator)
    flip = torch.randint(0, 2, (count,), generator=generator).bool()
    if "crop" not in augment:
        pad, corners = 0, torch.zeros_like(corners)
    if "flip" not in augment:
        flip = torch.zeros_like(flip)
    return Moves(corners[0], corners[1], flip, pad)


def apply(x: Tensor, moves: Moves) -> Tensor:
    """The cropped and flipped images, with the shape (NCHW), dtype and device of x."""
    n, channels, height, width = x.shape
    device = x.device
    padded = F.pad(x, (moves.pad,) * 4)
    rows = moves.top[:, None] + torch.arange(height, device=device)  # (n, height)
    across = torch.arange(width, device=device)
    columns = moves.left[:, None] + torch.where(moves.flip[:, None], width - 1 - across, across)  # (n, width)
    # One index for all channels of an image: advanced indexing would store one per dimension of every pixel.
    places = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).view(n, 1, height * width)
    return padded.flatten(2).gather(2, places.expand(n, channels, height * width)).view_as(x)
