"""A convolution as one Triton kernel, with everything around it in the same launch.

Forward: relu(conv(x) + bias [+ z] [+ a 1x1 convolution of something else, the shortcut of a residual block]). Back to
the input: (conv'(g) [+ g2] [+ the shortcut's share]) where y > 0, which is the gradient before the ReLU that made the
input y. cuDNN has part of the first and nothing of the second; and on few images its kernels leave most of the GPU idle
while each walks all of a long sum. Here several programs share one sum: each adds up a part of it, and the last to
finish adds the parts, in a fixed order, so that the result does not depend on who was last.

Images are channels last and even in height and width; weights (out, in, side, side), channels last. Sums are fp32.
Tested against torch on the CPU by Triton's interpreter (tests/engine/test_conv.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_STEM = 128  # places of a program in the first layer, forward


# A kernel takes a second to compile: whatever can be a number is one.
@triton.jit(do_not_specialize=["images", "height", "width", "out_height", "out_width", "adds", "split"])
def _conv(
    x,  # (images, height, width, inner): what is read
    weight,  # forward (outer, taps, inner); back (inner, taps, outer)
    x2,  # (images, height2, width2, inner2): the shortcut reads it, where SECOND
    weight2,  # forward (outer, inner2); back (inner2, outer)
    bias,  # (outer,), where BIAS
    z,  # (places, outer): added, if it `adds`
    y,  # (places, outer): where it is not positive the result is 0, where MASK
    out,  # (places, outer)
    parts,  # (tiles, split, BM, BN) in fp32: the parts of sums that are shared
    arrived,  # (tiles,): zeros, and zeros again at the end
    images,
    height,
    width,
    inner,
    inner2,
    out_height,
    out_width,
    outer,
    adds,  # whether z is added
    split,  # programs to a sum, where SHARED
    STRIDE: tl.constexpr,
    STRIDE2: tl.constexpr,  # of the shortcut, forward
    SIDE: tl.constexpr,  # of the kernel
    BACK: tl.constexpr,
    SECOND: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    MASK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """BM places times BN output channels; of the sum over taps and input channels one part of `split`.

    Back through a stride of 2, the taps that reach a place depend on whether its line and column are odd: every program
    takes places of one of these four kinds, and the kinds with most taps come first.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_n = tl.cdiv(outer, BN)
    block_n = tile % tiles_n
    block_m = tile // tiles_n
    STEP: tl.constexpr = STRIDE if BACK else 1  # between the places of a program
    lines, columns = out_height // STEP, out_width // STEP
    if BACK and STRIDE == 2:
        blocks = tl.num_programs(0) // (4 * tiles_n)
        kind = 3 - block_m // blocks
        block_m = block_m % blocks
    else:
        kind = 0
    odd_line, odd_column = kind // 2, kind % 2
    m = block_m * BM + tl.arange(0, BM)
    n = block_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    known = m < images * lines * columns
    column = m % columns
    line = (m // columns) % lines
    image = m // (columns * lines)
    if BACK and STRIDE == 2:
        top, left = line, column
        across = 1 + odd_column
        taps = (1 + odd_line) * across
    elif BACK:
        top, left = line - SIDE // 2, column - SIDE // 2
        across = SIDE
        taps = SIDE * SIDE
    else:
        top, left = line * STRIDE - SIDE // 2, column * STRIDE - SIDE // 2
        across = SIDE
        taps = SIDE * SIDE
    corner = ((image * height + top) * width + left) * inner  # may lie outside; what is read never does

    pieces = inner // BK
    rounds = taps * pieces
    every = rounds
    if SECOND:
        every += tl.where(kind == 0, inner2 // BK, 0)
    share = tl.cdiv(every, split)
    begin = part * share
    end = tl.minimum(begin + share, every)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for index in range(begin, tl.minimum(end, rounds)):
        tap, piece = index // pieces, index % pieces
        a_line, a_column = tap // across, tap % across
        if BACK and STRIDE == 2:  # the mirrored taps of this kind: 1; or 0 and 2
            down, right = odd_line * (1 - a_line), odd_column * (1 - a_column)
            of = (1 - odd_line + odd_line * 2 * a_line) * SIDE + 1 - odd_column + odd_column * 2 * a_column
        elif BACK:  # the taps mirrored
            down, right = a_line, a_column
            of = SIDE * SIDE - 1 - tap
        else:
            down, right = a_line, a_column
            of = tap
        inside = known & (top + down >= 0) & (top + down < height) & (left + right >= 0) & (left + right < width)
        there = corner + (down * width + right) * inner + piece * BK
        a = tl.load(x + there[:, None] + k[None, :], mask=inside[:, None], other=0.0)
        if BACK:
            rows = (piece * BK + k) * (SIDE * SIDE * outer) + of * outer
            b = tl.load(weight + rows[:, None] + n[None, :])
        else:
            b = tl.load(weight + (n * (SIDE * SIDE * inner) + of * inner + piece * BK)[None, :] + k[:, None])
        total = tl.dot(a, b, total)
    if SECOND:
        where = ((image * lines * STRIDE2 + line * STRIDE2) * columns * STRIDE2 + column * STRIDE2) * inner2
        for index in range(tl.maximum(begin, rounds), end):
            piece = index - rounds
            a = tl.load(x2 + where[:, None] + piece * BK + k[None, :], mask=known[:, None], other=0.0)
            if BACK:
                b = tl.load(weight2 + ((piece * BK + k) * outer)[:, None] + n[None, :])
            else:
                b = tl.load(weight2 + (n * inner2 + piece * BK)[None, :] + k[:, None])
            total = tl.dot(a, b, total)

    last = True
    if SHARED:
        inside_tile = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        first = parts + tile.to(tl.int64) * (split * BM * BN)
        tl.store(first + part * (BM * BN) + inside_tile, total)
        tl.debug_barrier()  # all of this part is written before it is said to be there
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == split - 1
        if last:
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for other_part in range(split):
                total += tl.load(first + other_part * (BM * BN) + inside_tile, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if last:
        place = (image * out_height + line * STEP + odd_line) * out_width + column * STEP + odd_column
        at = place[:, None] * outer + n[None, :]
        here = known[:, None] & (n < outer)[None, :]
        if BIAS:
            total += tl.load(bias + n).to(tl.float32)[None, :]
        if adds:
            total += tl.load(z + at, mask=here, other=0.0).to(tl.float32)
        if RELU:
            total = tl.maximum(total, 0.0)
        if MASK:
            total = tl.where(tl.load(y + at, mask=here, other=0.0).to(tl.float32) > 0, total, 0.0)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=here)


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


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: places and output channels of a program, channels of one round, programs to a sum."""

    places: int
    outer: int
    inner: int
    split: int = 1
    warps: int = 4
    stages: int = 3


# The two rules below are what was fastest, or nearly, for every layer of ResNet-18 at 8 to 128 images on an H200
# (benchmarks/gpu_conv_tilings.py, results/engine/conv-tilings-h200.json). It has 132 processors; three programs of
# 128x64 or 64x128 fit into one, or four of 64x64. Anywhere they are right; there they are fast.


def tiling(x: Tensor, weight: Tensor, *, stride: int, back: bool) -> Tiling:
    """How to cut a convolution."""
    places, outer, rounds, kinds = _size(x, weight, stride, back)
    tiles = kinds * triton.cdiv(places, 64) * (outer // 64)
    if outer % 128 == 0 and tiles > (792 if kinds == 1 else 1000):
        return Tiling(128, 128, 64)
    if outer % 128 == 0 and tiles >= (160 if kinds == 1 else 448):
        return Tiling(64, 128, 64, split=2 if tiles <= 264 and rounds >= 64 else 1)
    if tiles >= 480 and triton.cdiv(tiles // 2, 396) <= triton.cdiv(tiles, 528) - (tiles > 528):
        return Tiling(128, 64, 64)
    # Few programs share their sums, until the GPU is full or a part too short to be worth the sharing.
    split = 1
    while 2 * tiles * split <= (256 if rounds >= 36 * split else 160 if rounds >= 18 * split else 0):
        split *= 2
    return Tiling(64, 64, 64, split)


def cudnn_is_faster(x: Tensor, weight: Tensor, stride: int, *, back: bool) -> bool:
    """Whether to leave a convolution without a shortcut to cuDNN, though sums and masks cost launches then."""
    places, _, rounds, _ = _size(x, weight, stride, back)
    if back:
        return stride == 1 and rounds >= 36 and places >= 512
    if stride == 2:
        return rounds >= 18 and places >= 384
    return places >= (512 if rounds >= 36 else 20_000 if rounds >= 18 else 100_000)


def _size(x: Tensor, weight: Tensor, stride: int, back: bool) -> tuple[int, int, int, int]:
    """Places and channels of the result, rounds of its sums, and how many kinds of places there are (see _conv)."""
    images, inner, height, width = x.shape
    rounds = weight.shape[2] * weight.shape[3] * inner // 64
    if not back:
        return images * (height // stride) * (width // stride), weight.shape[0], rounds, 1
    return images * height * width, weight.shape[1], rounds // stride, stride * stride


def conv(
    x: Tensor,
    weight: Tensor,
    *,
    stride: int,
    arrived: Tensor,
    cut: Tiling | None = None,
    shortcut: tuple[Tensor, Tensor, int] | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """relu(conv(x) + bias + z + shortcut), padded by side // 2; what is not given is left out.

    Args:
        arrived: 256 zeros in int32 that no other stream uses in the meantime.
        cut: instead of the one that `tiling` chooses.
        shortcut: an image, the weight of a 1x1 convolution of it, and its stride.
    """
    cut = cut or tiling(x, weight, stride=stride, back=False)
    out = _image(x, len(weight), x.shape[2] // stride, x.shape[3] // stride)
    _launch(x, weight, out, stride, False, shortcut, bias, z, relu, None, cut, arrived)
    return out


def conv_back(
    g: Tensor,
    weight: Tensor,
    *,
    stride: int,
    arrived: Tensor,
    cut: Tiling | None = None,
    shortcut: tuple[Tensor, Tensor, int] | None = None,
    z: Tensor | None = None,
    y: Tensor | None = None,
) -> Tensor:
    """The gradient at a convolution's input, + z + the share of a shortcut of the same stride, where y > 0."""
    cut = cut or tiling(g, weight, stride=stride, back=True)
    out = _image(g, weight.shape[1], g.shape[2] * stride, g.shape[3] * stride)
    if shortcut is not None:  # it reaches places of even line and column, each from one place
        shortcut = (shortcut[0], shortcut[1], 1)
    _launch(g, weight, out, stride, True, shortcut, None, z, False, y, cut, arrived)
    return out


def _image(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    shape = (len(like), channels, height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    stride: int,
    back: bool,
    shortcut: tuple[Tensor, Tensor, int] | None,
    bias: Tensor | None,
    z: Tensor | None,
    relu: bool,
    y: Tensor | None,
    cut: Tiling,
    arrived: Tensor,
) -> None:
    images, inner, height, width = x.shape
    outer, out_height, out_width = out.shape[1:]
    kinds = stride * stride if back else 1
    places = images * out_height * out_width // kinds
    tiles = kinds * triton.cdiv(places, cut.places) * (outer // cut.outer)
    parts = arrived
    if cut.split > 1:
        room = tiles * cut.split * cut.places * cut.outer
        parts = torch.empty(room, dtype=torch.float32, device=x.device)
    x2, weight2, stride2 = (x, weight, 1) if shortcut is None else shortcut
    given = [x if tensor is None else tensor for tensor in (bias, z, y)]
    numbers = (images, height, width, inner, x2.shape[1], out_height, out_width, outer, int(z is not None), cut.split)
    ways = (back, shortcut is not None, bias is not None, relu, y is not None)
    _conv[(tiles, cut.split)](
        *(x, weight, x2, weight2, *given, out, parts, arrived),
        *numbers,
        *(stride, stride2, weight.shape[2], *ways),
        *(cut.places, cut.outer, cut.inner, cut.split > 1),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


def stem(x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(conv(x[rows]) + bias) for pixels x in fp32: 3x3, stride 1, padded by 1. `weight` may have spare channels."""
    _, channels, height, width = x.shape
    out = torch.empty(
        (len(rows), len(weight), height, width), dtype=weight.dtype, device=x.device, memory_format=torch.channels_last
    )
    places = len(rows) * height * width
    _stem[(triton.cdiv(places, _STEM), len(weight) // 64)](
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
    _to_pixels[(triton.cdiv(places, block),)](
        *(g, weight, out, natural, target, natural if kicks is None else kicks, numbers, step_index),
        *(images, height, width, inner, weight.shape[1], len(out) - 1, out.shape[1]),
        *(move, kicks is not None, project, block, 16, 64),
    )


@triton.jit
def _max_pool(y, g, out, count, height, width, channels, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """One value for 2x2 pixels; BACK: their gradient g to the first of the largest, if it is positive, else 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    channel, pixel = at % channels, at // channels
    column, line = pixel % width, pixel // width  # lines of all images in a row: none has an odd number
    corner = ((2 * line * 2 * width) + 2 * column) * channels + channel
    down = 2 * width * channels
    a = tl.load(y + corner, mask=inside, other=0.0)
    b = tl.load(y + corner + channels, mask=inside, other=0.0)
    c = tl.load(y + corner + down, mask=inside, other=0.0)
    d = tl.load(y + corner + down + channels, mask=inside, other=0.0)
    a32, b32, c32, d32 = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    most = tl.maximum(tl.maximum(a32, b32), tl.maximum(c32, d32))
    if BACK:
        slope = tl.load(g + at, mask=inside & (most > 0), other=0.0)
        none = tl.zeros_like(slope)
        is_a = a32 == most
        is_b = (b32 == most) & (a32 < most)
        is_c = (c32 == most) & (a32 < most) & (b32 < most)
        is_d = (a32 < most) & (b32 < most) & (c32 < most)
        tl.store(out + corner, tl.where(is_a, slope, none), mask=inside)
        tl.store(out + corner + channels, tl.where(is_b, slope, none), mask=inside)
        tl.store(out + corner + down, tl.where(is_c, slope, none), mask=inside)
        tl.store(out + corner + down + channels, tl.where(is_d, slope, none), mask=inside)
    else:
        tl.store(out + at, most.to(out.dtype.element_ty), mask=inside)


def max_pool(y: Tensor) -> Tensor:
    """The largest of every 2x2 pixels; height and width are even."""
    _, channels, height, width = y.shape
    out = _image(y, channels, height // 2, width // 2)
    _launch_max_pool(y, y, out, out, back=False)
    return out


def max_pool_back(g: Tensor, y: Tensor) -> Tensor:
    """Its gradient at y, before the ReLU which made y."""
    out = torch.empty_like(y)
    _launch_max_pool(y, g, out, g, back=True)
    return out


def _launch_max_pool(y: Tensor, g: Tensor, out: Tensor, small: Tensor, *, back: bool) -> None:
    _, channels, height, width = small.shape
    block = 512
    grid = (triton.cdiv(small.numel(), block),)
    _max_pool[grid](y, g, out, small.numel(), height, width, channels, back, block)
