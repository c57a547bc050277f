"""The two ends of an attack's step as one Triton kernel each: the first layer forward, which gathers the active images;
and back through it to the pixels, which takes the step.

Pixels are fp32, channels first; what lies between is as in conv.py. Tested by Triton's interpreter
(tests/engine/test_conv.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparring.engine.compiling import launch

_STEM = 128  # places of a program in the first layer, forward


@triton.jit(do_not_specialize=["images", "height", "width"])
def _stem(
    x,  # (any, CHANNELS, height, width), fp32
    rows,  # (images,): which of x to read
    weight,  # (outer, 9, filled)
    bias,
    out,  # (images, height, width, outer)
    images,
    height,
    width,
    outer,
    filled,
    CHANNELS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """relu(3x3 convolution + bias) of pixels, each taken as a sum of two 16-bit numbers."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    known = m < images * height * width
    column, line = m % width, (m // width) % height
    image = m // (width * height)
    tap, channel = k // CHANNELS, k % CHANNELS
    down, right = tap // 3 - 1, tap % 3 - 1
    used = k < 9 * CHANNELS
    w = tl.load(weight + (n * 9 * filled)[None, :] + (tap * filled + channel)[:, None], mask=used[:, None], other=0.0)
    row = tl.load(rows + image, mask=known, other=0)
    high, wide = line[:, None] + down[None, :], column[:, None] + right[None, :]
    inside = known[:, None] & used[None, :] & (high >= 0) & (high < height) & (wide >= 0) & (wide < width)
    at = ((row[:, None] * CHANNELS + channel[None, :]) * height + high) * width + wide
    pixel = tl.load(x + at, mask=inside, other=0.0)
    coarse = pixel.to(w.dtype)
    fine = (pixel - coarse.to(tl.float32)).to(w.dtype)
    total = tl.dot(coarse, w)
    total = tl.dot(fine, w, total) + tl.load(bias + n).to(tl.float32)[None, :]
    here = m[:, None] * outer + n[None, :]
    tl.store(out + here, tl.maximum(total, 0.0).to(out.dtype.element_ty), mask=known[:, None])


@triton.jit(do_not_specialize=["images", "height", "width", "batch"])
def _to_pixels(
    g,  # (images, height, width, inner): the gradient before the first layer's ReLU
    weight,  # (inner, 9, filled)
    out,  # (images, CHANNELS, height, width), fp32: the gradient; where MOVE (batch + 1, ...): the walk, moved on
    natural,  # as out, where MOVE: around it the ball lies
    target,  # (images,): an image's row of out; `batch` where it has stopped
    kicks,  # (steps, batch + 1, ...), where NOISE
    numbers,  # eps, step size, sigma of the noise
    step_index,
    images,
    height,
    width,
    inner,
    filled,
    batch,
    CHANNELS: tl.constexpr,
    MOVE: tl.constexpr,
    NOISE: tl.constexpr,
    PROJECT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Back through the first layer, and the step along the gradient's sign in the same launch."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    known = m < images * height * width
    column, line = m % width, (m // width) % height
    image = m // (width * height)
    corner = ((image * height + line - 1) * width + column - 1) * inner
    pieces = inner // BK
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for index in range(9 * pieces):
        tap, piece = index // pieces, index % pieces
        down, right = tap // 3, tap % 3
        high, wide = line + down - 1, column + right - 1
        inside = known & (high >= 0) & (high < height) & (wide >= 0) & (wide < width)
        there = corner + (down * width + right) * inner + piece * BK
        a = tl.load(g + there[:, None] + k[None, :], mask=inside[:, None], other=0.0)
        rows = (piece * BK + k) * (9 * filled) + (8 - tap) * filled
        b = tl.load(weight + rows[:, None] + n[None, :], mask=(n < CHANNELS)[None, :], other=0.0)
        total = tl.dot(a, b, total)
    row = tl.load(target + image, mask=known, other=0) if MOVE else image
    at = ((row[:, None] * CHANNELS + n[None, :]) * height + line[:, None]) * width + column[:, None]
    here = known[:, None] & (n < CHANNELS)[None, :]
    if MOVE:
        here = here & (row < batch)[:, None]
        eps, step_size = tl.load(numbers), tl.load(numbers + 1)
        sign = (total > 0).to(tl.float32) - (total < 0).to(tl.float32)
        total = tl.load(out + at, mask=here, other=0.0) + step_size * sign
        if NOISE:
            image_size = CHANNELS * height * width
            past = tl.load(step_index) * (batch + 1) * image_size
            total += tl.load(numbers + 2) * tl.load(kicks + past + at, mask=here, other=0.0)
        if PROJECT:
            middle = tl.load(natural + at, mask=here, other=0.0)
            total = tl.minimum(tl.maximum(total, middle - eps), middle + eps)
        total = tl.minimum(tl.maximum(total, 0.0), 1.0)
    tl.store(out + at, total, mask=here)


def stem(x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(conv(x[rows]) + bias) for pixels x in fp32: 3x3, stride 1, padded by 1. `weight` may have spare channels."""
    _, channels, height, width = x.shape
    out = torch.empty(
        (len(rows), len(weight), height, width), dtype=weight.dtype, device=x.device, memory_format=torch.channels_last
    )
    places = len(rows) * height * width
    launch(
        _stem,
        (triton.cdiv(places, _STEM), len(weight) // 64),
        *(x, rows, weight, bias, out, len(rows), height, width, len(weight), weight.shape[1], channels),
        *(_STEM, 64, triton.next_power_of_2(9 * channels)),
    )
    return out


def to_pixels(g: Tensor, weight: Tensor, channels: int) -> Tensor:
    """The gradient at the pixels, in fp32."""
    images, _, height, width = g.shape
    out = torch.empty((images, channels, height, width), dtype=torch.float32, device=g.device)
    _launch_to_pixels(g, weight, out, (out, out, None, out, out), False, False)
    return out


def move_pixels(
    g: Tensor,
    weight: Tensor,
    x_adv: Tensor,
    x: Tensor,
    target: Tensor,
    kicks: Tensor | None,
    numbers: Tensor,
    step_index: Tensor,
    *,
    project: bool,
) -> None:
    """The step along the sign of that gradient, in place, for those that have not stopped: see kernels.move."""
    _launch_to_pixels(g, weight, x_adv, (x, target, kicks, numbers, step_index), True, project)


def _launch_to_pixels(
    g: Tensor, weight: Tensor, out: Tensor, walk: tuple[Tensor | None, ...], move: bool, project: bool
) -> None:
    images, inner, height, width = g.shape
    natural, target, kicks, numbers, step_index = walk
    places = images * height * width
    block = 64 if places < 45_000 else 128
    launch(
        _to_pixels,
        (triton.cdiv(places, block),),
        *(g, weight, out, natural, target, natural if kicks is None else kicks, numbers, step_index),
        *(images, height, width, inner, weight.shape[1], len(out) - 1, out.shape[1]),
        *(move, kicks is not None, project, block, 16, 64),
    )
