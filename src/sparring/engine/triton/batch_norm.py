"""Batch-norm in train mode with the addition and the ReLU behind it, in two Triton launches each way.

Forward: the mean and variance of every channel; then relu((x - mean) * rstd * gain + shift [+ z]). Backward: the sums
of the gradient (alone, and times x) that batch-norm's own gradient needs; then the gradient at x. torch.compile makes
five or six kernels of each: it does not let the last program of a sum go on with what follows from it.

x is (images, channels, height, width), channels last, and may have more channels than the layer: these are zeros, and
stay so. Statistics and sums are fp32, and the parts of a sum are added in a fixed order, whichever comes last. Sums are
of x minus its first row, so that squares do not cancel. The layer that uses it is in update/fused_layers.py. Tested by
Triton's interpreter (tests/engine/triton/test_batch_norm.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparring.engine.triton import tuning
from sparring.engine.triton.compile_ahead import launch


@triton.jit
def _gather(parts, arrived, first, second, block, part, splits, BC: tl.constexpr, PARTS: tl.constexpr):
    """Store a part of two sums of BC channels; return whether it was the last part, and then both sums."""
    at = tl.arange(0, BC)
    mine = parts + (block * splits + part) * (2 * BC) + at
    tl.store(mine, first)
    tl.store(mine + BC, second)
    tl.debug_barrier()  # all of this part is written before it is counted
    last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == splits - 1
    if last:
        first = tl.zeros((BC,), dtype=tl.float32)
        second = tl.zeros((BC,), dtype=tl.float32)
        for start in range(0, splits, PARTS):
            which = start + tl.arange(0, PARTS)
            there = parts + (block * splits + which)[:, None] * (2 * BC) + at[None, :]
            mask = (which < splits)[:, None]
            first += tl.sum(tl.load(there, mask=mask, other=0.0, cache_modifier=".cg"), 0)
            second += tl.sum(tl.load(there + BC, mask=mask, other=0.0, cache_modifier=".cg"), 0)
        tl.store(arrived + block, 0)
    return last, first, second


@triton.jit
def _tile(rows, channels, BR: tl.constexpr, BC: tl.constexpr):
    """Indices and channels of a program that sums nothing, with their masks."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    known = c < channels
    return r[:, None] * channels + c[None, :], (r < rows)[:, None] & known[None, :], c, known


@triton.jit(do_not_specialize=["rows", "own", "span", "splits"])
def _statistics(
    x,  # (rows, channels)
    gain,
    shift,
    bias,  # what the convolution before would have added, where BIAS
    running_mean,  # in and out
    running_var,
    facts,  # out, (4, channels): mean of x, 1 / its deviation, scale and shift
    parts,
    arrived,  # zeros, and zeros again at the end
    rows,
    channels,
    own,  # channels that the layer has
    span,  # rows of a program
    splits,  # programs to a sum
    eps,
    momentum,
    BIAS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Mean and variance of BC channels; the last program also moves the running statistics."""
    block, part = tl.program_id(0), tl.program_id(1)
    c = block * BC + tl.arange(0, BC)
    known, ours = c < channels, c < own
    about = tl.load(x + c, mask=known, other=0.0).to(tl.float32)
    end = tl.minimum((part + 1) * span, rows)
    first = tl.zeros((BR, BC), dtype=tl.float32)
    second = tl.zeros((BR, BC), dtype=tl.float32)
    for start in tl.range(part * span, end, BR, num_stages=STAGES):
        r = start + tl.arange(0, BR)
        here = (r < end)[:, None] & known[None, :]
        value = tl.load(x + r[:, None] * channels + c[None, :], mask=here, other=0.0).to(tl.float32)
        value = tl.where(here, value - about[None, :], 0.0)
        first += value
        second += value * value
    last, total, squares = _gather(parts, arrived, tl.sum(first, 0), tl.sum(second, 0), block, part, splits, BC, PARTS)
    if last:
        off = total / rows
        variance = tl.maximum(squares / rows - off * off, 0.0)
        mean = about + off
        rstd = 1.0 / tl.sqrt(variance + eps)
        scale = tl.where(ours, tl.load(gain + c, mask=ours, other=0.0) * rstd, 0.0)
        tl.store(facts + c, mean, mask=known)
        tl.store(facts + channels + c, rstd, mask=known)
        tl.store(facts + 2 * channels + c, scale, mask=known)
        tl.store(facts + 3 * channels + c, tl.load(shift + c, mask=ours, other=0.0) - mean * scale, mask=known)
        before = tl.load(running_mean + c, mask=ours, other=0.0)
        if BIAS:
            mean += tl.load(bias + c, mask=ours, other=0.0)
        tl.store(running_mean + c, before + momentum * (mean - before), mask=ours)
        spread = tl.load(running_var + c, mask=ours, other=0.0)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_var + c, spread + momentum * (unbiased - spread), mask=ours)


@triton.jit(do_not_specialize=["rows"])
def _apply(
    x,  # (rows, channels)
    z,  # added, where ADD
    facts,
    out,
    rows,
    channels,
    ADD: tl.constexpr,
    RELU: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """relu(x * scale + shift [+ z])."""
    at, here, c, known = _tile(rows, channels, BR, BC)
    scale = tl.load(facts + 2 * channels + c, mask=known, other=0.0)
    shift = tl.load(facts + 3 * channels + c, mask=known, other=0.0)
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if ADD:
        value += tl.load(z + at, mask=here, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # NaN stays NaN and is noticed
    tl.store(out + at, value.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows", "span", "splits"])
def _back_sums(
    g,  # (rows, channels): the gradient at the output
    g2,  # that of a second reader of the output, where TWO
    x,
    y,  # the output, where MASK is 2
    facts,
    sums,  # out, (4, channels): gradients of gain and shift; dx = scale * g + sums[2] * x + sums[3]
    kept,  # out, (rows, channels), where KEEP: the gradient before the ReLU
    parts,
    arrived,
    rows,
    channels,
    span,
    splits,
    TWO: tl.constexpr,
    MASK: tl.constexpr,  # 0: no ReLU; 1: its mask follows from x; 2: from y
    KEEP: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sums over all rows that the gradient at x needs."""
    block, part = tl.program_id(0), tl.program_id(1)
    c = block * BC + tl.arange(0, BC)
    known = c < channels
    mean = tl.load(facts + c, mask=known, other=0.0)
    scale = tl.load(facts + 2 * channels + c, mask=known, other=0.0)
    shift = tl.load(facts + 3 * channels + c, mask=known, other=0.0)
    end = tl.minimum((part + 1) * span, rows)
    first = tl.zeros((BR, BC), dtype=tl.float32)
    second = tl.zeros((BR, BC), dtype=tl.float32)
    for start in tl.range(part * span, end, BR, num_stages=STAGES):
        r = start + tl.arange(0, BR)
        here = (r < end)[:, None] & known[None, :]
        at = r[:, None] * channels + c[None, :]
        grad = tl.load(g + at, mask=here, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        if TWO:
            grad += tl.load(g2 + at, mask=here, other=0.0).to(tl.float32)
        if MASK == 1:
            grad = tl.where(value * scale[None, :] + shift[None, :] > 0, grad, 0.0)
        if MASK == 2:
            grad = tl.where(tl.load(y + at, mask=here, other=0.0).to(tl.float32) > 0, grad, 0.0)
        if KEEP:
            narrow = grad.to(kept.dtype.element_ty)
            tl.store(kept + at, narrow, mask=here)
            grad = narrow.to(tl.float32)
        first += grad
        second += tl.where(here, grad * (value - mean[None, :]), 0.0)
    last, total, times = _gather(parts, arrived, tl.sum(first, 0), tl.sum(second, 0), block, part, splits, BC, PARTS)
    if last:
        rstd = tl.load(facts + channels + c, mask=known, other=0.0)
        by_x = -scale * rstd * rstd * times / rows
        tl.store(sums + c, times * rstd, mask=known)
        tl.store(sums + channels + c, total, mask=known)
        tl.store(sums + 2 * channels + c, by_x, mask=known)
        tl.store(sums + 3 * channels + c, -scale * total / rows - by_x * mean, mask=known)


@triton.jit(do_not_specialize=["rows"])
def _back_apply(
    g,  # (rows, channels): the gradient at the output; that before the ReLU, where MASK is 0
    x,
    facts,
    sums,
    more,  # added, where MORE: the gradient of another reader of x
    out,
    rows,
    channels,
    MASK: tl.constexpr,
    MORE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient at x."""
    at, here, c, known = _tile(rows, channels, BR, BC)
    scale = tl.load(facts + 2 * channels + c, mask=known, other=0.0)
    by_x = tl.load(sums + 2 * channels + c, mask=known, other=0.0)
    constant = tl.load(sums + 3 * channels + c, mask=known, other=0.0)
    grad = tl.load(g + at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    if MASK == 1:
        shift = tl.load(facts + 3 * channels + c, mask=known, other=0.0)
        grad = tl.where(value * scale[None, :] + shift[None, :] > 0, grad, 0.0)
    grad = grad * scale[None, :] + value * by_x[None, :] + constant[None, :]
    if MORE:
        grad += tl.load(more + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, grad.to(out.dtype.element_ty), mask=here)


def forward(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    running: tuple[Tensor, Tensor],
    arrived: Tensor,
    *,
    bias: Tensor | None,
    z: Tensor | None,
    relu: bool,
    eps: float,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """relu(batch-norm(x + bias) + z), and what `back` needs; moves the running mean and variance.

    Args:
        arrived: zeros in int32, one for every 32 channels, that no other stream uses at the same time.
    """
    rows, channels = _size(x)
    facts = torch.empty((4, channels), dtype=torch.float32, device=x.device)
    cut = tuning.of(x.device).batch_norm
    grid, span, parts = _cut(x, cut.rows)
    launch(
        _statistics,
        grid,
        *(x, gain, shift, gain if bias is None else bias, *running, facts, parts, arrived),
        *(rows, channels, len(gain), span, grid[1], eps, momentum, bias is not None),
        *(cut.rows, cut.channels, cut.parts, cut.stages),
    )
    out = torch.empty_like(x)
    tiles, block = _tiles(rows, channels, cut.tile)
    launch(_apply, tiles, x, x if z is None else z, facts, out, rows, channels, z is not None, relu, *block)
    return out, facts


def back(
    gradients: tuple[Tensor, ...],
    x: Tensor,
    y: Tensor | None,
    facts: Tensor,
    arrived: Tensor,
    *,
    relu: bool,
    keep: bool,
    more: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient at x, gradient before the ReLU where it is kept, rows of gradients of gain and shift).

    Args:
        gradients: at the output, from its one reader or two.
        y: the output, where something was added before the ReLU.
        more: the gradient of another reader of x, added to the result.
    """
    rows, channels = _size(x)
    sums = torch.empty_like(facts)
    g, two = gradients[0], len(gradients) == 2
    mask = 0 if not relu else 1 if y is None else 2
    keep = keep or two or mask == 2  # else it would be computed twice
    kept = torch.empty_like(x) if keep else x
    cut = tuning.of(x.device).batch_norm
    grid, span, parts = _cut(x, cut.rows_back)
    launch(
        _back_sums,
        grid,
        *(g, gradients[-1], x, x if y is None else y, facts, sums, kept, parts, arrived),
        *(rows, channels, span, grid[1], two, mask, keep, cut.rows_back, cut.channels, cut.parts, cut.stages),
    )
    out = torch.empty_like(x)
    tiles, block = _tiles(rows, channels, cut.tile)
    launch(
        _back_apply,
        tiles,
        *(kept if keep else g, x, facts, sums, x if more is None else more, out),
        *(rows, channels, 0 if keep else mask, more is not None, *block),
    )
    return out, kept, sums


def takes(x: Tensor) -> bool:
    """Whether the kernels can read it: channels last, more than one row, indices that fit into 32 bits."""
    fits = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.numel() < 2**31
    return fits and x.numel() > x.shape[1] and triton.cdiv(x.shape[1], tuning.of(x.device).batch_norm.channels) <= 256


def _size(x: Tensor) -> tuple[int, int]:
    """(rows, channels)."""
    channels = x.shape[1]
    return x.numel() // channels, channels


def _cut(x: Tensor, high: int) -> tuple[tuple[int, int], int, Tensor]:
    """The grid of programs that sum, `high` rows in a round; the rows of each, and memory for their parts."""
    rows, channels = _size(x)
    cut = tuning.of(x.device).batch_norm
    blocks = triton.cdiv(channels, cut.channels)
    rounds = triton.cdiv(rows, high)
    span = high * triton.cdiv(rounds, max(1, cut.programs // blocks))
    splits = triton.cdiv(rows, span)
    parts = torch.empty(blocks * splits * 2 * cut.channels, dtype=torch.float32, device=x.device)
    return (blocks, splits), span, parts


def _tiles(rows: int, channels: int, tile: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid of programs that sum nothing, and the rows and channels of each."""
    whole = channels & -channels  # the largest power of 2 that divides it: 32 for a wide ResNet's 160
    wide = min(256, whole if whole >= 32 else triton.next_power_of_2(channels))
    high = tile // wide
    return (triton.cdiv(rows, high), triton.cdiv(channels, wide)), (high, wide)
