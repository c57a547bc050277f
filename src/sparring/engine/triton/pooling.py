"""Pooling, both ways, as Triton kernels: the mean over a feature map with the linear layer behind it; 2x2 maxima.

Feature maps are channels last. The first one's twin in torch's operations is in manual/fused_ops.py; both are tested
against torch by Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparring.engine.triton.compile_ahead import launch


@triton.jit
def _pool_dense(
    h,  # (images, area, channels): channels last
    weight,  # (classes, channels)
    bias,
    out,  # (images, classes), fp32
    area,
    channels,
    classes,
    AREA: tl.constexpr,
    BLOCK: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """One image: the mean over its area, and the last layer."""
    image = tl.program_id(0).to(tl.int64)
    place, k = tl.arange(0, AREA), tl.arange(0, CLASSES)
    logits = tl.load(bias + k, mask=k < classes, other=0.0).to(tl.float32)
    for start in range(0, channels, BLOCK):
        c = start + tl.arange(0, BLOCK)
        here = (place < area)[:, None] & (c < channels)[None, :]
        values = tl.load(h + (image * area + place[:, None]) * channels + c[None, :], mask=here, other=0.0)
        pooled = tl.sum(values.to(tl.float32), 0) / area
        known = (k < classes)[:, None] & (c < channels)[None, :]
        w = tl.load(weight + k[:, None] * channels + c[None, :], mask=known, other=0.0).to(tl.float32)
        logits += tl.sum(w * pooled[None, :], 1)
    tl.store(out + image * classes + k, logits, mask=k < classes)


@triton.jit
def _pool_dense_back(
    gradient,  # (any, classes), fp32
    weight,
    h,  # (any, area, channels)
    among,  # (images,): an image's row of both, where CHOSEN
    out,  # (images, area, channels)
    area,
    channels,
    classes,
    MASKED: tl.constexpr,
    CHOSEN: tl.constexpr,
    AREA: tl.constexpr,
    BLOCK: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """One image: the gradient at the logits back to every place of its area; where MASKED, 0 where h is."""
    image = tl.program_id(0).to(tl.int64)
    seen = image
    if CHOSEN:
        seen = tl.load(among + image).to(tl.int64)
    place, k = tl.arange(0, AREA), tl.arange(0, CLASSES)
    g = tl.load(gradient + seen * classes + k, mask=k < classes, other=0.0)
    for start in range(0, channels, BLOCK):
        c = start + tl.arange(0, BLOCK)
        known = (k < classes)[:, None] & (c < channels)[None, :]
        w = tl.load(weight + k[:, None] * channels + c[None, :], mask=known, other=0.0).to(tl.float32)
        back = tl.sum(w * g[:, None], 0) / area
        here = (place < area)[:, None] & (c < channels)[None, :]
        at = (image * area + place[:, None]) * channels + c[None, :]
        value = tl.broadcast_to(back[None, :], (AREA, BLOCK))
        if MASKED:
            was = (seen * area + place[:, None]) * channels + c[None, :]
            value = tl.where(tl.load(h + was, mask=here, other=0.0).to(tl.float32) > 0, value, 0.0)
        tl.store(out + at, value.to(tl.bfloat16), mask=here)


@triton.jit
def _max_pool(
    y,  # (any, 2 * height, 2 * width, channels)
    g,  # (images, height, width, channels), where BACK
    among,  # (images,): an image's row of y, where CHOSEN
    out,  # as g, or where BACK as y
    count,
    height,
    width,
    channels,
    BACK: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The maximum of 2x2 pixels; BACK: g to the first of the largest, if it is positive, else 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    channel, pixel = at % channels, at // channels
    column, line = pixel % width, pixel // width  # lines of all images in a row: each has an even number
    corner = ((2 * line * 2 * width) + 2 * column) * channels + channel
    down = 2 * width * channels
    seen = corner
    if CHOSEN:
        image = line // height
        seen += (tl.load(among + image, mask=inside, other=0) - image) * (4 * height * width * channels)
    a = tl.load(y + seen, mask=inside, other=0.0)
    b = tl.load(y + seen + channels, mask=inside, other=0.0)
    c = tl.load(y + seen + down, mask=inside, other=0.0)
    d = tl.load(y + seen + down + channels, mask=inside, other=0.0)
    a32, b32, c32, d32 = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    most = tl.maximum(tl.maximum(a32, b32), tl.maximum(c32, d32))
    if BACK:
        grad = tl.load(g + at, mask=inside & (most > 0), other=0.0)
        none = tl.zeros_like(grad)
        is_a = a32 == most
        is_b = (b32 == most) & (a32 < most)
        is_c = (c32 == most) & (a32 < most) & (b32 < most)
        is_d = (a32 < most) & (b32 < most) & (c32 < most)
        tl.store(out + corner, tl.where(is_a, grad, none), mask=inside)
        tl.store(out + corner + channels, tl.where(is_b, grad, none), mask=inside)
        tl.store(out + corner + down, tl.where(is_c, grad, none), mask=inside)
        tl.store(out + corner + down + channels, tl.where(is_d, grad, none), mask=inside)
    else:
        tl.store(out + at, most.to(out.dtype.element_ty), mask=inside)


def pool_dense(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Logits in fp32 of a feature map in bf16, channels last: mean over its area, then the linear layer."""
    images, channels, height, width = h.shape
    out = torch.empty((images, len(weight)), dtype=torch.float32, device=h.device)
    area = height * width
    blocks = _blocks(area, channels, len(weight))
    _pool_dense[(images,)](h, weight, bias, out, area, channels, len(weight), *blocks, num_warps=8)
    return out


def pool_dense_back(
    gradient: Tensor, weight: Tensor, h: Tensor, *, masked: bool = False, among: Tensor | None = None
) -> Tensor:
    """The gradient of `pool_dense` at h, or h[among]; where `masked` the one before the ReLU which made h."""
    _, channels, height, width = h.shape
    out = torch.empty_like(h if among is None else h[: len(among)])
    area = height * width
    chosen = h if among is None else among
    _pool_dense_back[(len(out),)](
        *(gradient.contiguous(), weight, h, chosen, out, area, channels, len(weight), masked, among is not None),
        *_blocks(area, channels, len(weight)),
        num_warps=8,
    )
    return out


def _blocks(area: int, channels: int, classes: int) -> tuple[int, int, int]:
    """The whole area and all classes, channels in pieces: about 8,192 values at a time."""
    wide, most = triton.next_power_of_2(area), triton.next_power_of_2(classes)
    piece = max(16, min(triton.next_power_of_2(channels), 8192 // max(wide, most)))
    return wide, piece, most


def max_pool(y: Tensor) -> Tensor:
    """The largest of every 2x2 pixels; height and width are even."""
    channels, height, width = y.shape[1:]
    shape = (len(y), channels, height // 2, width // 2)
    out = torch.empty(shape, dtype=y.dtype, device=y.device, memory_format=torch.channels_last)
    _launch_max_pool(y, y, out, out, None, back=False)
    return out


def max_pool_back(g: Tensor, y: Tensor, among: Tensor | None = None) -> Tensor:
    """Its gradient at y, or at y[among], before the ReLU which made y."""
    out = torch.empty_like(y[: len(g)])
    _launch_max_pool(y, g, out, g, among, back=True)
    return out


def _launch_max_pool(y: Tensor, g: Tensor, out: Tensor, small: Tensor, among: Tensor | None, *, back: bool) -> None:
    _, channels, height, width = small.shape
    block = 512
    grid = (triton.cdiv(small.numel(), block),)
    chosen = y if among is None else among
    numbers = (small.numel(), height, width, channels)
    launch(_max_pool, grid, y, g, chosen, out, *numbers, back, among is not None, block)
