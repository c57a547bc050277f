"""The threat model: the eps-ball around an image, intersected with the pixel range [0, 1].

Knows tensors only: no model, no loss, no attack. Every function is pure and keeps shape, dtype and device.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Start = Literal["uniform", "normal"] | None
START_SIGMA = 0.001  # standard deviation of the "normal" start, in [0, 1] pixels (TRADES, MART)


def project(x_adv: Tensor, x: Tensor, eps: float) -> Tensor:
    """The nearest point to `x_adv` that lies in the eps-ball around `x` (L-infinity) and in [0, 1]."""
    return torch.minimum(torch.maximum(x_adv, x - eps), x + eps).clamp(0.0, 1.0)


def draw_uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [-1, 1), drawn on the generator's device: the same for every device of `like`."""
    drawn = torch.rand(like.shape, generator=generator, device=generator.device, dtype=like.dtype)
    return drawn.mul_(2.0).sub_(1.0).to(like.device)


def draw_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, drawn on the generator's device."""
    drawn = torch.randn(like.shape, generator=generator, device=generator.device, dtype=like.dtype)
    return drawn.to(like.device)


def random_start(x: Tensor, *, eps: float, start: Start, generator: torch.Generator, inside: bool = True) -> Tensor:
    """The point an attack starts from: `x` itself, a uniform point of the ball, or `x` plus a little normal noise.

    With `inside=False` (an attack without projection) the point is clamped to [0, 1] only.
    """
    if start is None:
        return x.clone()
    if start == "uniform":
        point = x + eps * draw_uniform(x, generator)
    else:
        point = x + START_SIGMA * draw_normal(x, generator)
    return project(point, x, eps) if inside else point.clamp(0.0, 1.0)
