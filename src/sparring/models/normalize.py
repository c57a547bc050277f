"""Normalisation as the first layer of a network: (x - mean) / std, per channel.

It is part of the model, so that every attack works on pixels in [0, 1] and `eps` has one meaning. Mean and std are
buffers: saved with the weights, moved with the model, never trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparring.errors import UserError


class Normalize(nn.Module):
    """Subtract `mean` and divide by `std`, one number per channel, both on the [0, 1] scale of the pixels."""

    mean: Tensor  # (1, C, 1, 1)
    std: Tensor  # (1, C, 1, 1)

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        means, stds = [float(m) for m in mean], [float(s) for s in std]
        if len(means) != len(stds) or not means:
            raise UserError(
                f"normalize needs one mean and one std per channel, got {len(means)} and {len(stds)}. "
                "Give two lists of the same length."
            )
        if not all(math.isfinite(m) for m in means):
            raise UserError(f"the means of normalize must be finite, got {means}. For no shift write 0.0.")
        if not all(math.isfinite(s) and s > 0 for s in stds):
            raise UserError(f"the stds of normalize must be finite and above 0, got {stds}. For no scaling write 1.0.")
        self.register_buffer("mean", torch.tensor(means).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(stds).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised pixels, (N, C, H, W)."""
        # Without this check a grey image would silently be broadcast to the number of means.
        if x.shape[1] != self.mean.shape[1]:
            raise UserError(
                f"this model normalises {self.mean.shape[1]} channels, but the images have {x.shape[1]}. "
                "Give images with the model's channels, or build the model for these."
            )
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """The channel count, for print(model)."""
        return f"channels={self.mean.shape[1]}"
