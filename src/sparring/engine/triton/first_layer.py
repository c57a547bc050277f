"""The first layer of an attack's network: forward, which gathers the active images, in one launch; backward to the
pixels, which takes the step, in two.

Pixels are fp32, channels first; what lies between is as in conv.py. Tested by Triton's interpreter
(tests/engine/triton/test_conv.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparring.engine.triton import tuning
from sparring.engine.triton.compile_ahead import launch


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
    """relu(3x3 convolution + bias) of pixels, each read as a sum of two 16-bit numbers."""
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


@triton.jit(do_not_specialize=["places"])
def _taps(
    g,  # (places, inner): the gradient before the first layer's ReLU
    weight,  # (inner, 9, filled)
    out,  # (9, CHANNELS, places), fp32
    places,
    inner,
    filled,
    CHANNELS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """What every place adds to each of the nine pixels around it: each gradient is read once, not nine times."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    known, used = m < places, n < 9 * CHANNELS
    columns = n // CHANNELS * filled + n % CHANNELS
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for piece in range(inner // BK):
        a = tl.load(g + m[:, None] * inner + piece * BK + k[None, :], mask=known[:, None], other=0.0)
        rows = (piece * BK + k) * (9 * filled)
        b = tl.load(weight + rows[:, None] + columns[None, :], mask=used[None, :], other=0.0)
        total = tl.dot(a, b, total)
    tl.store(out + n[None, :] * places + m[:, None], total, mask=known[:, None] & used[None, :])


@triton.jit(do_not_specialize=["images", "height", "width", "batch"])
def _to_pixels(
    taps,  # (9, CHANNELS, places), fp32
    out,  # (images, CHANNELS, height, width), fp32: the gradient; where MOVE (batch + 1, ...): x_adv, moved
    natural,  # as out, where MOVE: the centre of the ball
    target,  # (images,): an image's row of out; `batch` where it has stopped
    kicks,  # (steps, batch + 1, ...), where NOISE
    numbers,  # eps, step size, sigma of the noise
    step_index,
    images,
    height,
    width,
    batch,
    CHANNELS: tl.constexpr,
    MOVE: tl.constexpr,
    NOISE: tl.constexpr,
    PROJECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up what nine places contribute to a pixel, and take the step along its sign in the same launch."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = images * height * width
    known = m < places
    column, line = m % width, (m // width) % height
    image = m // (width * height)
    row = tl.load(target + image, mask=known, other=0) if MOVE else image
    here = known & (row < batch) if MOVE else known
    for channel in tl.static_range(CHANNELS):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for tap in tl.static_range(9):
            up, left = tap // 3 - 1, tap % 3 - 1
            high, wide = line - up, column - left
            inside = here & (high >= 0) & (high < height) & (wide >= 0) & (wide < width)
            there = (tap * CHANNELS + channel) * places + m - up * width - left
            total += tl.load(taps + there, mask=inside, other=0.0)
        at = ((row * CHANNELS + channel) * height + line) * width + column
        if MOVE:
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
    places, high = len(rows) * height * width, tuning.of(x.device).first_layer.places
    launch(
        _stem,
        (triton.cdiv(places, high), len(weight) // 64),
        *(x, rows, weight, bias, out, len(rows), height, width, len(weight), weight.shape[1], channels),
        *(high, 64, triton.next_power_of_2(9 * channels)),
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
    """Take the step along the sign of that gradient, in place, for the examples that have not stopped."""
    _launch_to_pixels(g, weight, x_adv, (x, target, kicks, numbers, step_index), True, project)


def _launch_to_pixels(
    g: Tensor, weight: Tensor, out: Tensor, state: tuple[Tensor | None, ...], move: bool, project: bool
) -> None:
    images, inner, height, width = g.shape
    natural, target, kicks, numbers, step_index = state
    places, channels = images * height * width, out.shape[1]
    taps = torch.empty(9 * channels * places, dtype=torch.float32, device=g.device)
    cut = tuning.of(g.device).first_layer
    block = 64 if places < cut.large_from else 128
    wide = max(16, triton.next_power_of_2(9 * channels))
    launch(
        _taps,
        (triton.cdiv(places, block),),
        *(g, weight, taps, places, inner, weight.shape[1], channels, block, wide, 64),
    )
    launch(
        _to_pixels,
        (triton.cdiv(places, cut.pixels),),
        *(taps, out, natural, target, natural if kicks is None else kicks, numbers, step_index),
        *(images, height, width, len(out) - 1, channels, move, kicks is not None, project, cut.pixels),
    )
