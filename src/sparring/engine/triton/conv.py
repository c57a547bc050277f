"""A convolution as one Triton kernel, with everything around it in the same launch.

Forward: relu(conv(x) + bias [+ z] [+ a 1x1 convolution of another input, the shortcut of a residual block]). Backward
to the input: (conv'(g) [+ g2] [+ the shortcut's gradient]) where y > 0, which is the gradient before the ReLU that made
the input y. cuDNN has part of the first and nothing of the second; and on few images its kernels leave most of the GPU
idle while each computes a long sum. Here several programs share one sum: each computes a part of it, and the last to
finish adds the parts in a fixed order, so that the result does not depend on which was last.

Images are channels last and even in height and width; weights (out, in, side, side), channels last. Sums are fp32.
Tested against torch by Triton's interpreter (tests/engine/triton/test_conv.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparring.engine.triton import tuning
from sparring.engine.triton.compile_ahead import launch


# A kernel takes a second to compile: what can be a number in memory is one.
@triton.jit(do_not_specialize=["images", "height", "width", "out_height", "out_width", "adds", "chosen", "split"])
def _conv(
    x,  # (images, height, width, inner): the input
    weight,  # forward (outer, taps, inner); back (inner, taps, outer)
    x2,  # (images, height2, width2, inner2): the input of the shortcut, where SECOND
    weight2,  # forward (outer, inner2); back (inner2, outer)
    bias,  # (outer,), where BIAS
    z,  # (places, outer): added, if it `adds`
    y,  # (any, outer): where it is not positive the result is 0, where MASK
    among,  # (images,): an image's row of y, if `chosen`
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
    chosen,
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
    """BM places times BN output channels, and of the sum over taps and input channels one part of `split`.

    Backward through a stride of 2, the taps that reach a place depend on whether its line and column are odd: every
    program takes places of one of these four kinds, and the kinds with most taps come first.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_n = outer // BN
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
        tl.debug_barrier()  # all of this part is written before it is counted
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == split - 1
        if last:
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for other_part in range(split):
                total += tl.load(first + other_part * (BM * BN) + inside_tile, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if last:
        place = (image * out_height + line * STEP + odd_line) * out_width + column * STEP + odd_column
        at = place[:, None] * outer + n[None, :]
        here = known[:, None]
        if BIAS:
            total += tl.load(bias + n).to(tl.float32)[None, :]
        if adds:
            total += tl.load(z + at, mask=here, other=0.0).to(tl.float32)
        if RELU:
            total = tl.maximum(total, 0.0)
        if MASK:
            seen = place
            if chosen:
                seen += (tl.load(among + image, mask=known, other=0) - image) * (out_height * out_width)
            positive = tl.load(y + seen[:, None] * outer + n[None, :], mask=here, other=0.0).to(tl.float32) > 0
            total = tl.where(positive, total, 0.0)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=here)


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: places and output channels of a program, channels of a round, programs per sum."""

    places: int
    outer: int
    inner: int
    split: int = 1
    warps: int = 4
    stages: int = 3


def tiling(x: Tensor, weight: Tensor, *, stride: int, back: bool) -> Tiling:
    """How to cut a convolution (tuning.py has the numbers)."""
    places, outer, rounds, kinds = _size(x, weight, stride, back)
    cut, strided = tuning.of(x.device).conv, int(kinds > 1)
    tiles = kinds * triton.cdiv(places, 64) * (outer // 64)
    if outer % 128 == 0 and tiles > cut.large[strided]:
        return Tiling(128, 128, 64)
    if outer % 128 == 0 and tiles >= cut.medium[strided]:
        return Tiling(64, 128, 64, split=2 if tiles <= cut.medium_shared and rounds >= 64 else 1)
    small_rounds = triton.cdiv(tiles, cut.small_resident) - (tiles > cut.small_resident)
    if tiles >= cut.tall and triton.cdiv(tiles // 2, cut.tall_resident) <= small_rounds:
        return Tiling(128, 64, 64)
    # Where there are few programs they share their sums, until the GPU is full or a part is too short to be worth it.
    split = 1
    while 2 * tiles * split <= (
        cut.shared_long if rounds >= 36 * split else cut.shared_short if rounds >= 18 * split else 0
    ):
        split *= 2
    return Tiling(64, 64, 64, split)


def cudnn_is_faster(x: Tensor, weight: Tensor, stride: int, *, back: bool) -> bool:
    """Whether cuDNN runs a convolution without a shortcut, though sums and masks cost launches then."""
    places, _, rounds, _ = _size(x, weight, stride, back)
    cut = tuning.of(x.device).conv
    if back:
        rows = cut.cudnn_back_strided if stride == 2 else cut.cudnn_back
    else:
        rows = cut.cudnn_forward_strided if stride == 2 else cut.cudnn_forward
    return next((places >= least for long, least in rows if rounds >= long), False)


def _size(x: Tensor, weight: Tensor, stride: int, back: bool) -> tuple[int, int, int, int]:
    """Places and channels of the result, rounds of its sums, and the number of kinds of places (see _conv)."""
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
    """relu(conv(x) + bias + z + shortcut), padded by side // 2; what is None is left out.

    Args:
        arrived: 256 zeros in int32 that no other stream uses at the same time.
        cut: the tiling, unless `tiling` chooses it.
        shortcut: an image, the weight of a 1x1 convolution of it, and its stride.
    """
    cut = cut or tiling(x, weight, stride=stride, back=False)
    out = _image(x, len(weight), x.shape[2] // stride, x.shape[3] // stride)
    _launch(x, weight, out, stride, False, shortcut, bias, z, relu, None, None, cut, arrived)
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
    among: Tensor | None = None,
) -> Tensor:
    """The gradient at a convolution's input + z + that of a shortcut of the same stride, where y > 0.

    Args:
        among: in int32, the rows in y of g's images, where these are fewer.
    """
    cut = cut or tiling(g, weight, stride=stride, back=True)
    out = _image(g, weight.shape[1], g.shape[2] * stride, g.shape[3] * stride)
    if shortcut is not None:  # it contributes to places of even line and column, each from one place
        shortcut = (shortcut[0], shortcut[1], 1)
    _launch(g, weight, out, stride, True, shortcut, None, z, False, y, among, cut, arrived)
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
    among: Tensor | None,
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
    given.append(arrived if among is None else among)  # both are int32: one kernel for the two
    flags = (int(z is not None), int(among is not None))
    numbers = (images, height, width, inner, x2.shape[1], out_height, out_width, outer, *flags, cut.split)
    launch(
        _conv,
        (tiles, cut.split),
        *(x, weight, x2, weight2, *given, out, parts, arrived),
        *numbers,
        STRIDE=stride,
        STRIDE2=stride2,
        SIDE=weight.shape[2],
        BACK=back,
        SECOND=shortcut is not None,
        BIAS=bias is not None,
        RELU=relu,
        MASK=y is not None,
        BM=cut.places,
        BN=cut.outer,
        BK=cut.inner,
        SHARED=cut.split > 1,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
