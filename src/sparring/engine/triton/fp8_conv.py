"""3x3 convolutions in eight bits as Triton kernels, with what lies between two of them in the same launch.

Activations and weights are e4m3, gradients of the output e5m2, sums fp32. A kernel of the forward pass adds the
shortcut, applies the next layer's batch-norm and ReLU and rounds to e4m3; one of the backward pass multiplies by the
batch-norm's scale, masks, adds the shortcut's gradient and rounds to e5m2. No tensor is read only to be rounded.

A tap of the filter is a shifted box of the image. The tensor memory accelerator (TMA) reads boxes and fills in zeros
where they lie outside, so that there are neither addresses nor padding. The tensor cores want the channels of a sum
side by side in both operands: images are (images, lines, columns, channels), weights (outer, taps * inner), and the
backward pass has a copy of its own. manual/fp8_simulated.py has the same functions in torch's operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparring.engine.triton import tuning
from sparring.engine.triton.compile_ahead import launch
from sparring.engine.triton.tuning import Fp8Cut

RELU, SUM, RELU_BACK, SUM_BACK = range(4)  # what a kernel does with its sums: see `_write`
_BLOCK = 1024


@triton.jit
def _rounded(value, out):
    """The numbers in the precision of `out`; those beyond its largest become its largest."""
    if out.dtype.element_ty == tl.float8e4nv:
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    elif out.dtype.element_ty == tl.float8e5:
        value = tl.minimum(tl.maximum(value, -57344.0), 57344.0)
    return value.to(out.dtype.element_ty)


@triton.jit
def _write(
    acc,  # (places, channels)
    place,
    n,
    given,  # what `_conv` was given
    py,
    px,
    W: tl.constexpr,
    AREA: tl.constexpr,  # places of an image, before they are spread
    N: tl.constexpr,
    KIND: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Write a part of the result. f and u are numbers in memory.

    KIND 0: out = u * relu(f * acc + shift).
    KIND 1: total = f * acc [+ added]; out = u * relu(scale * total + shift).
    KIND 2: out = f * acc where seen > 0.
    KIND 3: total = (scale * f * acc where seen > 0) [+ added]; out = total.
    """
    places, out, total, added, seen, among, scale, shift, numbers, adds, keeps, chosen = given
    inside = n < N
    here = (place < places)[:, None] & inside[None, :]
    read = (place < places * adds)[:, None] & inside[None, :]
    kept = (place < places * keeps)[:, None] & inside[None, :]
    other = place < places * chosen
    image = place // AREA
    area = AREA
    if SPREAD:  # to every second line and column
        area = 4 * AREA
        place = (place // W * 2 + py) * (2 * W) + place % W * 2 + px
    at = place[:, None] * N + n[None, :]
    value = acc * tl.load(numbers + (2 if KIND >= 2 else 0))
    if KIND >= 2:
        row = tl.load(among + image, mask=other, other=0)
        there = place + (row - image) * (area * chosen)
        # Eight bits read as an integer are positive exactly where the number is.
        positive = tl.load(seen + there[:, None] * N + n[None, :], mask=here, other=0) > 0
        value = tl.where(positive, value, 0.0)
    if KIND == 3:
        value *= tl.load(scale + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if KIND % 2 == 1:
        value += tl.load(added + at, mask=read, other=0.0).to(tl.float32)
        rounded = value.to(tl.bfloat16)
        tl.store(total + at, rounded, mask=kept)
        value = rounded.to(tl.float32)
    if KIND == 1:
        value *= tl.load(scale + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if KIND < 2:
        value += tl.load(shift + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        value = tl.maximum(value, 0.0) * tl.load(numbers + 1)
    tl.store(out + at, _rounded(value, out), mask=here)


@triton.jit
def _part(
    acc,
    place,
    n,
    given,
    py,
    px,
    SWAPPED: tl.constexpr,
    W: tl.constexpr,
    AREA: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """`_write` of sums of shape (places, channels), or (channels, places) where SWAPPED, from `place` and `n` on."""
    if SWAPPED:
        places = place + tl.arange(0, acc.shape[1])
        _write(acc.T, places, n + tl.arange(0, acc.shape[0]), given, py, px, W, AREA, N, KIND, SPREAD)
    else:
        places = place + tl.arange(0, acc.shape[0])
        _write(acc, places, n + tl.arange(0, acc.shape[1]), given, py, px, W, AREA, N, KIND, SPREAD)


@triton.jit
def _half(
    acc,
    place,
    n,
    given,
    py,
    px,
    SWAPPED: tl.constexpr,
    W: tl.constexpr,
    AREA: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    SPREAD: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The same in two parts of half the columns, if these are more than WIDE: the sums leave few registers."""
    if acc.shape[1] > WIDE:
        HALF: tl.constexpr = acc.shape[1] // 2
        low, high = acc.reshape(acc.shape[0], 2, HALF).permute(0, 2, 1).split()
        _part(low, place, n, given, py, px, SWAPPED, W, AREA, N, KIND, SPREAD)
        if SWAPPED:
            place += HALF
        else:
            n += HALF
        _part(high, place, n, given, py, px, SWAPPED, W, AREA, N, KIND, SPREAD)
    else:
        _part(acc, place, n, given, py, px, SWAPPED, W, AREA, N, KIND, SPREAD)


@triton.jit
def _finish(
    acc,
    place,
    n,
    given,
    py,
    px,
    SWAPPED: tl.constexpr,
    W: tl.constexpr,
    AREA: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """The same in up to four parts."""
    WIDE: tl.constexpr = 32 if KIND == 1 else 64
    if acc.shape[1] > 2 * WIDE:
        HALF: tl.constexpr = acc.shape[1] // 2
        low, high = acc.reshape(acc.shape[0], 2, HALF).permute(0, 2, 1).split()
        _half(low, place, n, given, py, px, SWAPPED, W, AREA, N, KIND, SPREAD, WIDE)
        if SWAPPED:
            place += HALF
        else:
            n += HALF
        _half(high, place, n, given, py, px, SWAPPED, W, AREA, N, KIND, SPREAD, WIDE)
    else:
        _half(acc, place, n, given, py, px, SWAPPED, W, AREA, N, KIND, SPREAD, WIDE)


@triton.jit
def _box(x, image, line, tap, k, py, px, C: tl.constexpr, SPAN: tl.constexpr, BACK: tl.constexpr):
    """The image's numbers under a tap of the filter, and the tap's place in the weights."""
    there = tap
    if SPAN == 1:
        a = x.load([image, line + tap // 3 - 1, tap % 3 - 1, k])
        if BACK:
            there = 8 - tap
    elif SPAN == 2:  # lines and columns of x come in pairs
        ty = tap // 3
        tx = tap % 3
        a = x.load([image, line - (2 - ty) // 2, (ty + 1) % 2, -((2 - tx) // 2), (tx + 1) % 2 * C + k])
    else:  # results in even lines come from one line, in odd lines from two; so do columns
        ty = tap // (1 + px)
        tx = tap % (1 + px)
        there = (2 * py * ty + 1 - py) * 3 + 2 * px * tx + 1 - px
        a = x.load([image, line + py * (1 - ty), px * (1 - tx), k])
    return a, there


@triton.jit
def _dots(a, w1, w2, first, at, one, two, N1: tl.constexpr, N2: tl.constexpr, ORDER: tl.constexpr):
    b = w1.load([first, at])
    if ORDER == 0:
        one = tl.dot(a, b.T, one)
    else:
        one = tl.dot(b, a.T, one)
    if N2 > 0:
        c = w2.load([first + N1, at])
        if ORDER == 1:
            two = tl.dot(c, a.T, two)
        else:
            two = tl.dot(a, c.T, two)
    return one, two


# A kernel takes a second to compile: what can be a number in memory is one.
@triton.jit(do_not_specialize=["images", "adds", "keeps", "chosen"])
def _conv(
    x,  # descriptor of (images, lines, columns, C), in boxes (TI, TH, W, BK); SPAN 2: (images, H, 2, W, 2 * C)
    w1,  # descriptor of (N, 9 * C [+ CS]), in boxes (N1, BK)
    w2,  # the same in boxes (N2, BK)
    x_tail,  # the three in boxes of TAIL channels
    w1_tail,
    w2_tail,
    x_short,  # descriptor of the shortcut's input, and of the weights, in boxes of BS channels
    w1_short,
    w2_short,
    out,  # (images, lines, columns, N)
    total,  # the same in bf16; written where it `keeps`
    added,  # the same in bf16; read where it `adds`
    seen,  # (any, lines, columns, N), eight bits
    among,  # (images,): an image's row of seen, where `chosen`
    scale,  # (N,)
    shift,
    numbers,  # (3,): f forward, u, f back
    images,
    adds,
    keeps,
    chosen,
    H: tl.constexpr,  # lines and columns of the result; SPAN -2: of every second one
    W: tl.constexpr,
    C: tl.constexpr,
    CS: tl.constexpr,  # channels of the shortcut's input; 0: there is none
    N: tl.constexpr,
    TI: tl.constexpr,
    TH: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    BK: tl.constexpr,
    TAIL: tl.constexpr,  # channels of each tap that are left to a second loop
    BS: tl.constexpr,
    KIND: tl.constexpr,
    ORDER: tl.constexpr,  # 0: sums are (places, channels); 1: (channels, places); 2: N1 as in 1, N2 as in 0
    SPAN: tl.constexpr,  # 1: stride 1; 2: forward with stride 2; -2: back through stride 2
    STAGES: tl.constexpr,
):
    """A convolution [+ a 1x1 convolution with stride 2 of another input, or back through one], and `_write`."""
    BM: tl.constexpr = TI * TH * W
    OUTERS: tl.constexpr = (N + N1 + N2 - 1) // (N1 + N2)
    LINES: tl.constexpr = H // TH
    ROUNDS: tl.constexpr = (C - TAIL) // BK
    program = tl.program_id(0)
    py = 0
    px = 0
    taps = 9
    rounds = CS // BS
    if SPAN == -2:  # the longest sums first; the shortcut reaches even lines and columns only
        tiles = tl.num_programs(0) // 4
        py = 1 - program // tiles // 2
        px = 1 - program // tiles % 2
        taps = (1 + py) * (1 + px)
        rounds = rounds * (1 - py) * (1 - px)
        program = program % tiles
    first = program % OUTERS * (N1 + N2)
    tile = program // OUTERS
    image = tile // LINES * TI
    line = tile % LINES * TH
    one = tl.zeros((BM, N1) if ORDER == 0 else (N1, BM), dtype=tl.float32)
    two = tl.zeros((1, 1) if N2 == 0 else ((N2, BM) if ORDER == 1 else (BM, N2)), dtype=tl.float32)
    for r in tl.range(taps * ROUNDS, num_stages=STAGES):
        k = r % ROUNDS * BK
        a, tap = _box(x, image, line, r // ROUNDS, k, py, px, C, SPAN, KIND >= 2)
        one, two = _dots(a.reshape(BM, BK), w1, w2, first, tap * C + k, one, two, N1, N2, ORDER)
    if TAIL > 0:
        for t in tl.range(taps, num_stages=STAGES):
            a, tap = _box(x_tail, image, line, t, C - TAIL, py, px, C, SPAN, KIND >= 2)
            at = tap * C + C - TAIL
            one, two = _dots(a.reshape(BM, TAIL), w1_tail, w2_tail, first, at, one, two, N1, N2, ORDER)
    if CS > 0:
        for r in tl.range(rounds, num_stages=STAGES):
            if SPAN == -2:
                a = x_short.load([image, line, 0, r * BS])
            else:
                a = x_short.load([image, line, 0, 0, r * BS])
            at = 9 * C + r * BS
            one, two = _dots(a.reshape(BM, BS), w1_short, w2_short, first, at, one, two, N1, N2, ORDER)
    place = (image * H + line) * W
    given = (images * (H * W), out, total, added, seen, among, scale, shift, numbers, adds, keeps, chosen)
    _finish(one, place, first, given, py, px, ORDER > 0, W, H * W, N, KIND, SPAN == -2)
    if N2 > 0:
        _finish(two, place, first + N1, given, py, px, ORDER == 1, W, H * W, N, KIND, SPAN == -2)


@triton.jit
def _round(x, numbers, out, count, BLOCK: tl.constexpr):
    """u * x in the precision of out."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(numbers + 1)
    tl.store(out + at, _rounded(value, out), mask=at < count)


@triton.jit
def _first_back(
    gradient,  # (any, classes): at the logits
    weight,  # (classes, channels): of the linear layer
    o,  # (any, area, channels): what was pooled
    scale,  # (channels,)
    among,  # (images,): an image's row of the two, where CHOSEN
    total,  # (images, area, channels)
    out,  # the same in e5m2
    size,  # (images,)
    area,
    channels,
    classes,
    CHOSEN: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """size: the largest gradient at o of an image; total: the gradient at the sum before o, divided by it."""
    image = tl.program_id(0)
    row = image
    if CHOSEN:
        row = tl.load(among + image)
    k = tl.arange(0, CLASSES)[:, None]
    c = tl.arange(0, CHANNELS)
    inside = c < channels
    g = tl.load(gradient + row.to(tl.int64) * classes + k, mask=k < classes, other=0.0).to(tl.float32)
    w = tl.load(weight + k * channels + c[None, :], mask=(k < classes) & inside[None, :], other=0.0).to(tl.float32)
    flat = tl.sum(g * w, axis=0) / area
    most = tl.maximum(tl.max(tl.abs(flat), axis=0), 1e-30)  # no gradient stays none
    flat = flat / most * tl.load(scale + c, mask=inside, other=0.0).to(tl.float32)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    here = (place < area)[:, None] & inside[None, :]
    there = place[:, None] * channels + c[None, :]
    positive = tl.load(o + row.to(tl.int64) * area * channels + there, mask=here, other=0.0).to(tl.float32) > 0
    value = tl.where(positive, flat[None, :], 0.0)
    start = image.to(tl.int64) * area * channels
    tl.store(total + start + there, value.to(tl.bfloat16), mask=here)
    tl.store(out + start + there, _rounded(value, out), mask=here)
    tl.store(size + image, most)


@triton.jit
def _weights(
    weight,  # (outer, taps, inner)
    ahead,  # (outer, ...), from its column on
    back,  # (inner, ...), from its column on
    numbers,  # (5,): the last two are the factors of the two
    outer,
    inner,
    ahead_stride,
    back_stride,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """Round weights to e4m3, for the forward and the backward pass."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    tap, taps = tl.program_id(2), tl.num_programs(2)
    here = (n < outer) & (c < inner)
    value = tl.load(weight + (n * taps + tap) * inner + c, mask=here, other=0.0).to(tl.float32)
    forward = _rounded(value * tl.load(numbers + 3), ahead)
    tl.store(ahead + n * ahead_stride + tap * inner + c, forward, mask=here)
    turned = _rounded((value * tl.load(numbers + 4)).T, back)
    tl.store(back + c.T * back_stride + tap * outer + n.T, turned, mask=here.T)


def conv_relu(x: Tensor, weight: Tensor, numbers: Tensor, shift: Tensor, *, stride: int) -> Tensor:
    """u * relu(f * conv(x) + shift) in e4m3.

    Args:
        x: (images, lines, columns, inner) in e4m3.
        weight: (outer, 9 * inner) in e4m3.
        numbers: f and u.
    """
    out = _image(x, weight, x.shape[1] // stride, x.dtype)
    _launch(RELU, x, weight, out, numbers, stride, None, shift=shift)
    return out


def conv_sum(
    x: Tensor,
    weight: Tensor,
    numbers: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    added: Tensor | None = None,
    shortcut: Tensor | None = None,
    kept: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor]:
    """f * conv(x) + `added`, in bf16 where it is `kept`, and u * relu(scale * that + shift) in `dtype`.

    `shortcut` is the input of a 1x1 convolution with stride 2 that is added; its weights are the last columns.
    """
    out = _image(x, weight, x.shape[1], dtype)
    total = torch.empty_like(out, dtype=torch.bfloat16) if kept else None
    more = {"added": added, "total": total, "scale": scale, "shift": shift}
    _launch(SUM, x, weight, out, numbers, 1, shortcut, **more)
    return total, out


def conv_back_relu(
    g: Tensor, weight: Tensor, numbers: Tensor, seen: Tensor, *, among: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The gradient at a convolution's input where `seen`, or seen[among], is positive, in `dtype`.

    Args:
        g: (images, lines, columns, inner) in e5m2: the gradient at the output.
        weight: (outer, 9 * inner) in e4m3.
        numbers: the third is f.
        seen: (any, lines, columns, outer) in e4m3.
    """
    out = _image(g, weight, g.shape[1], dtype)
    _launch(RELU_BACK, g, weight, out, numbers, 1, None, seen=seen, among=among)
    return out


def conv_back_sum(
    g: Tensor,
    weight: Tensor,
    numbers: Tensor,
    seen: Tensor,
    scale: Tensor,
    *,
    among: Tensor | None,
    stride: int,
    added: Tensor | None = None,
    shortcut: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same through a convolution [and a shortcut] with this stride, times scale, plus `added`: in bf16 and e5m2."""
    out = _image(g, weight, g.shape[1] * stride, g.dtype)
    total = torch.empty_like(out, dtype=torch.bfloat16)
    more = {"seen": seen, "among": among, "added": added, "total": total, "scale": scale}
    _launch(SUM_BACK, g, weight, out, numbers, stride, shortcut, **more)
    return total, out


def rounded(x: Tensor, numbers: Tensor) -> Tensor:
    """u * x in e4m3."""
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    launch(_round, (triton.cdiv(x.numel(), _BLOCK),), x, numbers, out, x.numel(), _BLOCK)
    return out


def first_back(
    gradient: Tensor, weight: Tensor, o: Tensor, scale: Tensor, *, among: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient at the sum that relu(norm(.)) and pooling read, in bf16 and e5m2, divided by a size per image.

    Args:
        gradient: (any, classes), at the logits.
        weight: (classes, channels), of the linear layer.
        o: (any, lines, columns, channels): what is pooled.
        scale: (channels,), of the batch-norm.
        among: in int32, the rows of gradient and o.
    """
    images = len(o) if among is None else len(among)
    classes, channels = weight.shape
    area = o.shape[1] * o.shape[2]
    total = torch.empty((images, *o.shape[1:]), dtype=torch.bfloat16, device=o.device)
    out, size = torch.empty_like(total, dtype=torch.float8_e5m2), o.new_empty(images, dtype=torch.float32)
    chosen = gradient if among is None else among
    wide = triton.next_power_of_2(channels)
    places = max(1, min(triton.next_power_of_2(area), 8192 // wide))
    launch(
        _first_back,
        (images, triton.cdiv(area, places)),
        *(gradient, weight, o, scale, chosen, total, out, size, area, channels, classes),
        *(among is not None, places, wide, triton.next_power_of_2(classes)),
        num_warps=8,
    )
    return total, out, size


def round_weights(weight: Tensor, ahead: Tensor, back: Tensor, numbers: Tensor) -> None:
    """Round weights into columns of what the two passes read.

    Args:
        weight: (outer, taps, inner).
        ahead: (outer, taps * inner).
        back: (inner, taps * outer).
        numbers: the fourth and fifth are their factors.
    """
    outer, taps, inner = weight.shape
    grid = (triton.cdiv(outer, 32), triton.cdiv(inner, 32), taps)
    launch(_weights, grid, weight, ahead, back, numbers, outer, inner, ahead.stride(0), back.stride(0), 32, 32)


def _image(x: Tensor, weight: Tensor, side: int, dtype: torch.dtype) -> Tensor:
    """Room for a result with this many lines."""
    columns = x.shape[2] * side // x.shape[1]
    return torch.empty((len(x), side, columns, len(weight)), dtype=dtype, device=x.device)


def cut_of(x: Tensor, outer: int, places: int) -> Fp8Cut:
    """How to cut a convolution of x into this many channels at this many places (tuning.py has the numbers)."""
    inner = x.shape[3]
    for least, cut in tuning.of(x.device).fp8.get((outer, inner), ()):
        if places >= least:
            return cut
    return Fp8Cut("channels", 128, 64, 0, next(wide for wide in (128, 64, 32) if inner % wide == 0))


def _launch(
    kind: int,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    numbers: Tensor,
    stride: int,
    shortcut: Tensor | None,
    *,
    added: Tensor | None = None,
    total: Tensor | None = None,
    seen: Tensor | None = None,
    among: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> None:
    images, height, width, inner = x.shape
    outer, back = len(weight), kind in (RELU_BACK, SUM_BACK)
    if stride == 2 and not back:
        height, width = height // 2, width // 2
    cut = cut_of(x, outer, images * height * width)
    lines = min(height, max(1, cut.places // width))
    many = max(1, cut.places // (width * lines))
    channels = 0 if shortcut is None else shortcut.shape[3]
    short = 64 if channels % 64 == 0 and channels else 32

    def boxes(image: Tensor, inside: int, pairs: bool) -> TensorDescriptor:
        if not pairs:
            return TensorDescriptor.from_tensor(image, [many, lines, width, inside])
        view = image.view(images, height, 2, width, 2 * image.shape[3])
        return TensorDescriptor.from_tensor(view, [many, lines, 1, width, inside])

    def operands(image: Tensor, inside: int, pairs: bool) -> tuple[TensorDescriptor, ...]:
        rows = (cut.one, cut.two or cut.one)
        of_weight = (TensorDescriptor.from_tensor(weight, [row, inside]) for row in rows)
        return (boxes(image, inside, pairs), *of_weight)

    main = operands(x, cut.inner, stride == 2 and not back)
    tail = operands(x, cut.tail, stride == 2 and not back) if cut.tail else main
    beside = main if shortcut is None else operands(shortcut, short, not back)
    # What is absent is neither read nor written; its type is that of what else could stand there.
    half = out if scale is None else scale
    tensors = [half if tensor is None else tensor for tensor in (total, added)]
    tensors += [(numbers if seen is None else seen).view(torch.int8)]
    tensors += [numbers.view(torch.int32) if among is None else among]
    tensors += [numbers if tensor is None else tensor for tensor in (scale, shift)]
    tiles = triton.cdiv(images, many) * (height // lines) * triton.cdiv(outer, cut.one + cut.two)
    span = -2 if stride == 2 and back else stride
    launch(
        _conv,
        (tiles * (4 if span < 0 else 1),),
        *(*main, *tail, *beside, out, *tensors, numbers),
        *(images, int(added is not None), int(total is not None), int(among is not None)),
        H=height,
        W=width,
        C=inner,
        CS=channels,
        N=outer,
        TI=many,
        TH=lines,
        N1=cut.one,
        N2=cut.two,
        BK=cut.inner,
        TAIL=cut.tail,
        BS=short,
        KIND=kind,
        ORDER=("places", "channels", "mixed").index(cut.order),
        SPAN=span,
        STAGES=cut.stages,
        num_warps=cut.warps,
    )
