"""The threat model: the eps-ball around an image, intersected with the pixel range [0, 1].

In the L-infinity norm every pixel moves by at most eps, in the L2 norm the whole image by a length of at most eps. As
the field does it, a point is projected onto the ball and then clamped to [0, 1]; the image lies in [0, 1], so clamping
moves every pixel towards it and never leaves the ball. Knows tensors only: no model, no loss, no attack. Every function
is pure and keeps shape, dtype and device.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparring.attacks.threat import Norm, Radius
from sparring.seeds import per_image

Start = Literal["uniform", "normal"] | None
START_SIGMA = 0.001  # standard deviation of the "normal" start, in [0, 1] pixels (TRADES, MART)


def project(x_adv: Tensor, x: Tensor, eps: Radius, norm: Norm = "linf") -> Tensor:
    """`x_adv` put into the eps-ball around `x` and then into [0, 1]; for L-infinity this is the nearest point."""
    if norm == "linf":
        return torch.clamp(x_adv, *corners(x, eps))
    shift = x_adv - x
    length = lengths(shift)
    outside = length > eps
    shrink = torch.where(outside, eps / torch.where(outside, length, 1.0), 1.0)
    return torch.where(outside, x + shift * shrink, x_adv).clamp(0.0, 1.0)


def outward(x_adv: Tensor, x: Tensor, eps: Radius, norm: Norm = "linf") -> Tensor:
    """`x_adv` moved on along its line from `x` to the edge of the ball, and then into [0, 1]; `x` itself stays."""
    shift = x_adv - x
    size = wide(shift.flatten(1).abs().amax(dim=1), x) if norm == "linf" else lengths(shift)
    return project(x + shift * (eps / torch.where(size > 0, size, 1.0)), x, eps, norm)


def corners(x: Tensor, eps: Radius) -> tuple[Tensor, Tensor]:
    """The lowest and the highest point of the L-infinity ball in [0, 1]: it is the box between them."""
    return (x - eps).clamp(min=0.0), (x + eps).clamp(max=1.0)


def steepest(gradient: Tensor, norm: Norm = "linf") -> Tensor:
    """The step of length 1 along which a linear loss grows most: the sign, or in L2 the gradient over its length.

    An image without a gradient gets no step, nor does a pixel whose gradient is NaN. The largest entry is divided out
    first, so that a gradient whose squares underflow (a confident model) still has a direction.
    """
    if norm == "linf":
        return gradient.sign()  # of NaN it is 0
    gradient = gradient.nan_to_num(0.0)
    largest = wide(gradient.flatten(1).abs().amax(dim=1), gradient)
    scaled = gradient / torch.where(largest > 0, largest, 1.0)
    length = lengths(scaled)
    return scaled / torch.where(length > 0, length, 1.0)


def wide(of_image: Tensor, like: Tensor) -> Tensor:
    """One number of each image, in a shape that goes with images like these."""
    return of_image.view(-1, *[1] * (like.ndim - 1))


def lengths(shift: Tensor) -> Tensor:
    """The L2 norm of each example, in the dimensions of `shift`."""
    length: Tensor = torch.linalg.vector_norm(shift, dim=tuple(range(1, shift.ndim)), keepdim=True)
    return length


def draw_uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [-1, 1), drawn on the generator's device: the same for every device of `like`."""
    drawn = per_image(torch.rand, like.shape, generator, dtype=like.dtype)
    return drawn.mul_(2.0).sub_(1.0).to(like.device)


def draw_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, drawn on the generator's device."""
    drawn = per_image(torch.randn, like.shape, generator, dtype=like.dtype)
    return drawn.to(like.device)


def draw_in_ball(like: Tensor, generator: torch.Generator, norm: Norm = "linf") -> Tensor:
    """One uniform point of the ball of radius 1 per example.

    In L2 a normal direction, and a length whose d-th power is uniform: the volume grows with the d-th power.
    """
    if norm == "linf":
        return draw_uniform(like, generator)
    direction = steepest(draw_normal(like, generator), norm)
    length = per_image(torch.rand, (len(like),), generator, dtype=like.dtype).to(like.device)
    dimensions = max(1, like[0].numel()) if len(like) else 1
    return direction * wide(length ** (1.0 / dimensions), like)


def random_start(
    x: Tensor,
    *,
    eps: Radius,
    start: Start,
    generator: torch.Generator,
    inside: bool = True,
    norm: Norm = "linf",
) -> Tensor:
    """The point an attack starts from: `x` itself, a uniform point of the ball, or `x` plus a little normal noise.

    With `inside=False` (an attack without projection) the point is clamped to [0, 1] only.
    """
    if start is None:
        return x.clone()
    if start == "uniform":
        point = x + eps * draw_in_ball(x, generator, norm)
    else:
        point = x + START_SIGMA * draw_normal(x, generator)
    return project(point, x, eps, norm) if inside else point.clamp(0.0, 1.0)
