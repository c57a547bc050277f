"""The kernels of convolutions in eight bits; fp8_conv.py launches them and says what they are for.

A tap of the filter is a shifted box of the image. The tensor memory accelerator (TMA) reads boxes and fills in zeros
where they lie outside, so that there are neither addresses nor padding. The tensor cores want the channels of a sum
side by side in both operands: images are (images, lines, columns, channels), weights (outer, taps * inner), and the
backward pass has a copy of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a kernel does with its sums: see `_write`.
RELU, SUM, RELU_BACK, SUM_BACK, SUM_RELU, SUM_RELU_BACK = range(6)


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
    KIND 4: total = relu(f * acc + shift [+ added]); out = u * total.
    KIND 5: total = f * acc [+ added] where seen > 0; out = total.
    """
    BACK: tl.constexpr = KIND == 2 or KIND == 3 or KIND == 5
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
    value = acc * tl.load(numbers + (2 if BACK else 0))
    if KIND >= 4:
        value += tl.load(added + at, mask=read, other=0.0).to(tl.float32)
    if BACK:
        row = tl.load(among + image, mask=other, other=0)
        there = place + (row - image) * (area * chosen)
        # Eight bits read as an integer are positive exactly where the number is.
        positive = tl.load(seen + there[:, None] * N + n[None, :], mask=here, other=0) > 0
        value = tl.where(positive, value, 0.0)
    if KIND == 3:
        value *= tl.load(scale + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if KIND == 1 or KIND == 3:
        value += tl.load(added + at, mask=read, other=0.0).to(tl.float32)
    if KIND == 4:
        value += tl.load(shift + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        value = tl.maximum(value, 0.0)
    if KIND == 1 or KIND >= 3:
        rounded = value.to(tl.bfloat16)
        tl.store(total + at, rounded, mask=kept)
        value = rounded.to(tl.float32)
    if KIND == 1:
        value *= tl.load(scale + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if KIND < 2:
        value += tl.load(shift + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        value = tl.maximum(value, 0.0)
    if KIND < 2 or KIND == 4:
        value *= tl.load(numbers + 1)
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
    WIDE: tl.constexpr = 32 if KIND == 1 or KIND == 4 else 64
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
def conv(
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
    BACK: tl.constexpr = KIND == 2 or KIND == 3 or KIND == 5
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
        a, tap = _box(x, image, line, r // ROUNDS, k, py, px, C, SPAN, BACK)
        one, two = _dots(a.reshape(BM, BK), w1, w2, first, tap * C + k, one, two, N1, N2, ORDER)
    if TAIL > 0:
        for t in tl.range(taps, num_stages=STAGES):
            a, tap = _box(x_tail, image, line, t, C - TAIL, py, px, C, SPAN, BACK)
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
def round_numbers(x, numbers, out, count, BLOCK: tl.constexpr):
    """u * x in the precision of out."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(numbers + 1)
    tl.store(out + at, _rounded(value, out), mask=at < count)


@triton.jit
def first_back(
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
def weights(
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
