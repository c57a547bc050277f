"""The bookkeeping of an attack step in few launches: some fifty operations of torch as a few Triton kernels.

At a small active set a step costs what its launches cost. Every kernel has a twin in torch's operations
(attack/active_set.py, manual/fused_ops.py, folded_layers.py), which runs where Triton is missing and which the kernels
are tested against by Triton's interpreter (tests/engine/triton/test_attack_step.py). Knows no model and no method.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _begin(
    given,  # (count, pixels): the images
    drawn,  # (count, pixels): numbers in [0, 1) where UNIFORM, standard normal ones where NORMAL
    x,  # out, (batch + 1, pixels)
    x_adv,  # out: the starting points
    total,
    eps,
    sigma,
    UNIFORM: tl.constexpr,
    NORMAL: tl.constexpr,
    INSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the images in place and draw the start: `ball.random_start`, bit for bit."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    natural = tl.load(given + place, mask=inside, other=0.0)
    begun = natural
    if UNIFORM:
        begun = natural + eps * (tl.load(drawn + place, mask=inside, other=0.0) * 2.0 - 1.0)
    if NORMAL:
        begun = natural + sigma * tl.load(drawn + place, mask=inside, other=0.0)
    if UNIFORM or NORMAL:
        if INSIDE:
            begun = tl.minimum(tl.maximum(begun, natural - eps), natural + eps)
        begun = tl.minimum(tl.maximum(begun, 0.0), 1.0)
    tl.store(x + place, natural, mask=inside)
    tl.store(x_adv + place, begun, mask=inside)


@triton.jit(do_not_specialize=["count", "batch", "tau"])
def _reset(
    given,  # (count,): the labels
    label,
    tau_left,
    backprops,
    rows,
    step_index,
    numbers,
    count,
    batch,
    tau,
    eps,
    step_size,
    noise,
    BLOCK: tl.constexpr,
):
    """Make all examples active, with all of tau left; behind them the sink. One program for all."""
    place = tl.arange(0, BLOCK)
    inside = place <= batch
    tl.store(label + place, tl.load(given + place, mask=place < count, other=0), mask=place < count)
    nothing = tl.zeros((BLOCK,), dtype=tl.int64)
    tl.store(tau_left + place, nothing + tau, mask=inside)
    tl.store(backprops + place, nothing, mask=inside)
    tl.store(rows + place, tl.where(place < count, place, batch).to(tl.int64), mask=inside)
    tl.store(step_index, -1)
    tl.store(numbers, eps)
    tl.store(numbers + 1, step_size)
    tl.store(numbers + 2, noise)


@triton.jit
def _judge(
    logits,  # (size, classes), fp32
    natural,  # (batch + 1, classes): the clean prediction, where KL is
    rows,
    label,
    wrong,  # out, (size,): 1 where the prediction is not the label
    gradient,  # out, (size, classes): of the loss with respect to the logits
    classes,
    KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One example: whether it is misclassified, and the gradient of its loss at the logits."""
    example = tl.program_id(0)
    row = tl.load(rows + example)
    right = tl.load(label + row)
    place = tl.arange(0, BLOCK)
    inside = place < classes
    z = tl.load(logits + example * classes + place, mask=inside, other=-float("inf"))
    tl.store(wrong + example, (tl.argmax(z, 0) != right).to(tl.int32))
    p = tl.exp(z - tl.max(z, 0))
    p = p / tl.sum(p, 0)
    if KL:  # KL(q || p) grows along p - q
        q = tl.load(natural + row * classes + place, mask=inside, other=-float("inf"))
        q = tl.exp(q - tl.max(q, 0))
        towards = q / tl.sum(q, 0)
    else:  # cross-entropy grows along p - 1_y
        towards = (place == right).to(tl.float32)
    tl.store(gradient + example * classes + place, p - towards, mask=inside)


@triton.jit
def _compact(
    wrong,
    rows,  # in and out: the active examples in order; behind them the sink
    target,  # out: where an example's move is written; the sink where it has stopped
    slots,  # out: the places of those that go on, in order; behind them the first place
    tau_left,
    backprops,
    serial,
    report,
    step_index,
    size,
    batch,
    steps,
    BLOCK: tl.constexpr,
):
    """List the examples that go on, in order; update their counts; report to the host. One program for all."""
    place = tl.arange(0, BLOCK)
    inside = place < size
    row = tl.load(rows + place, mask=inside, other=batch)
    fooled = tl.load(wrong + place, mask=inside, other=0)
    left = tl.load(tau_left + row, mask=inside, other=0)
    going = inside & (row < batch) & ((fooled == 0) | (left > 0))
    step = going.to(tl.int32)
    before = tl.cumsum(step, 0) - step
    count = tl.sum(step, 0)
    taken = tl.load(serial) + 1
    tl.store(serial, taken)
    tl.store(report, taken * (batch + 1) + count)
    tl.store(step_index, (tl.load(step_index) + 1) % steps)
    done = tl.load(backprops + row, mask=going, other=0)
    tl.debug_barrier()  # all reads come before all writes
    tl.store(backprops + row, done + 1, mask=going)
    tl.store(tau_left + row, left - fooled, mask=going)
    tl.store(target + place, tl.where(going, row, batch), mask=inside)
    tl.store(rows + before, row, mask=going)
    tl.store(rows + place, tl.full((BLOCK,), 0, tl.int64) + batch, mask=inside & (place >= count))
    tl.store(slots + before, place, mask=going)
    tl.store(slots + place, tl.zeros((BLOCK,), dtype=tl.int32), mask=inside & (place >= count))


@triton.jit
def _move(
    x_adv,  # in and out, (batch + 1, pixels)
    x,
    kicks,  # (steps, batch + 1, pixels), where NOISE
    gradient,  # (size, pixels)
    target,
    numbers,  # eps, step size, sigma of the noise
    step_index,
    pixels,
    batch,
    NOISE: tl.constexpr,
    PROJECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step of some pixels of one example, unless it has stopped."""
    example = tl.program_id(0).to(tl.int64)
    row = tl.load(target + example)
    if row < batch:
        eps, step_size = tl.load(numbers), tl.load(numbers + 1)
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < pixels
        g = tl.load(gradient + example * pixels + place, mask=inside, other=0.0)
        sign = (g > 0).to(tl.float32) - (g < 0).to(tl.float32)
        natural = tl.load(x + row * pixels + place, mask=inside, other=0.0)
        moved = tl.load(x_adv + row * pixels + place, mask=inside, other=0.0) + step_size * sign
        if NOISE:
            step = tl.load(step_index)
            kick = tl.load(kicks + (step * (batch + 1) + row) * pixels + place, mask=inside, other=0.0)
            moved = moved + tl.load(numbers + 2) * kick
        if PROJECT:
            moved = tl.minimum(tl.maximum(moved, natural - eps), natural + eps)
        moved = tl.minimum(tl.maximum(moved, 0.0), 1.0)
        tl.store(x_adv + row * pixels + place, moved, mask=inside)


@triton.jit
def _split(
    x,  # (images, channels, area) in fp32, contiguous
    out,  # (images, area, filled) in bf16: channels last
    area,
    CHANNELS: tl.constexpr,
    FILLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each pixel as the sum of two bf16 numbers, in channels of their own; the rest of the channels are 0."""
    image = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, FILLED)
    inside = (place < area)[:, None]
    source = channel % CHANNELS
    known = inside & (channel < 2 * CHANNELS)[None, :]
    pixel = tl.load(x + (image * CHANNELS + source[None, :]) * area + place[:, None], mask=known, other=0.0)
    high = pixel.to(tl.bfloat16)
    low = (pixel - high.to(tl.float32)).to(tl.bfloat16)
    value = tl.where((channel < CHANNELS)[None, :], high, low)
    tl.store(out + (image * area + place[:, None]) * FILLED + channel[None, :], value, mask=inside)


@triton.jit
def _fold(
    table,  # (units, 12): eight addresses (see FoldAll), a channel's length, inputs, inputs with spare ones, copies
    units,  # (programs,): which unit a program works for
    channels,  # (programs,): and which output channel of it
    eps,  # (units,): of each batch-norm
    BLOCK: tl.constexpr,
):
    """Fold one output channel of one convolution: scale * weight, and the bias, in the precision of the attack."""
    program = tl.program_id(0)
    unit, channel = tl.load(units + program), tl.load(channels + program)
    entry = table + unit * 12
    source = tl.load(entry).to(tl.pointer_type(tl.float32))
    mean = tl.load(tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + channel)
    variance = tl.load(tl.load(entry + 2).to(tl.pointer_type(tl.float32)) + channel)
    gain = tl.load(tl.load(entry + 3).to(tl.pointer_type(tl.float32)) + channel)
    shift = tl.load(tl.load(entry + 4).to(tl.pointer_type(tl.float32)) + channel)
    target = tl.load(entry + 5).to(tl.pointer_type(tl.bfloat16))
    bias = tl.load(entry + 6).to(tl.pointer_type(tl.bfloat16))
    own = tl.load(entry + 7)
    length, inputs, filled, copies = tl.load(entry + 8), tl.load(entry + 9), tl.load(entry + 10), tl.load(entry + 11)
    if own != 0:
        mean -= tl.load(own.to(tl.pointer_type(tl.float32)) + channel)
    scale = gain / tl.sqrt(variance + tl.load(eps + unit))
    tl.store(bias + channel, (shift - mean * scale).to(tl.bfloat16))
    row = target + channel * (length // inputs * filled)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(source + channel * length + place, mask=place < length, other=0.0)
        value = (value * scale).to(tl.bfloat16)
        at = place // inputs * filled + place % inputs
        tl.store(row + at, value, mask=place < length)
        if copies == 2:
            tl.store(row + at + inputs, value, mask=place < length)


def begin(
    given: Tensor,
    drawn: Tensor | None,
    x: Tensor,
    x_adv: Tensor,
    *,
    eps: float,
    sigma: float,
    start: str | None,
    inside: bool,
) -> None:
    """Put images and their starting points in place."""
    given = given.contiguous()
    grid = (triton.cdiv(given.numel(), _BLOCK),)
    kinds = (start == "uniform", start == "normal", inside)
    noise = given if drawn is None else drawn
    # Products are rounded before they are added, as in torch.
    _begin[grid](given, noise, x, x_adv, given.numel(), eps, sigma, *kinds, _BLOCK, enable_fp_fusion=False)


def reset(
    given: Tensor,
    label: Tensor,
    tau_left: Tensor,
    backprops: Tensor,
    rows: Tensor,
    step_index: Tensor,
    numbers: Tensor,
    *,
    tau: int,
    eps: float,
    step_size: float,
    noise: float,
) -> None:
    """Reset the bookkeeping for a new batch."""
    state = (given.contiguous(), label, tau_left, backprops, rows, step_index, numbers)
    block = triton.next_power_of_2(len(label))
    _reset[(1,)](*state, len(given), len(label) - 1, tau, float(eps), float(step_size), float(noise), block)


def judge(logits: Tensor, natural: Tensor | None, rows: Tensor, label: Tensor, wrong: Tensor) -> Tensor:
    """Fill `wrong`; return the gradient of the loss (cross-entropy, or KL to `natural`) at the logits."""
    size, classes = logits.shape
    logits = logits.contiguous()
    gradient = torch.empty_like(logits)
    block = triton.next_power_of_2(classes)
    reference = logits if natural is None else natural
    _judge[(size,)](logits, reference, rows, label, wrong, gradient, classes, natural is not None, block)
    return gradient


def compact(
    wrong: Tensor,
    rows: Tensor,
    target: Tensor,
    slots: Tensor,
    tau_left: Tensor,
    backprops: Tensor,
    serial: Tensor,
    report: Tensor,
    step_index: Tensor,
    *,
    size: int,
    batch: int,
    steps: int,
) -> None:
    """Update `rows`, `target`, `slots`, `tau_left` and `backprops`, and `report` to the host."""
    state = (wrong, rows, target, slots, tau_left, backprops, serial, report, step_index)
    _compact[(1,)](*state, size, batch, steps, triton.next_power_of_2(size))


def move(
    x_adv: Tensor,
    x: Tensor,
    kicks: Tensor | None,
    gradient: Tensor,
    target: Tensor,
    numbers: Tensor,
    step_index: Tensor,
    *,
    project: bool,
) -> None:
    """Take a step along the sign of the gradient, in place, for the examples that have not stopped."""
    size, batch = len(gradient), len(x) - 1
    gradient = gradient.contiguous()
    pixels = x[0].numel()
    grid = (size, triton.cdiv(pixels, _BLOCK))
    noise = x if kicks is None else kicks
    _move[grid](
        x_adv, x, noise, gradient, target, numbers, step_index, pixels, batch, kicks is not None, project, _BLOCK
    )


def split(x: Tensor, filled: int) -> Tensor:
    """fp32 pixels as pairs of bf16 numbers: (images, filled, height, width), channels last, `filled` a power of 2."""
    images, channels, height, width = x.shape
    out = torch.empty(
        (images, filled, height, width), dtype=torch.bfloat16, device=x.device, memory_format=torch.channels_last
    )
    block = 128
    _split[(images, triton.cdiv(height * width, block))](x.contiguous(), out, height * width, channels, filled, block)
    return out


class FoldAll:
    """Folds every batch-norm into its convolution in one launch. It keeps addresses: the tensors must stay in place."""

    def __init__(self, entries: list[tuple[list[Tensor], Tensor | None, float]]) -> None:
        """Per unit: (source, mean, variance, weight, bias, target, target bias), the source's bias, batch-norm's eps.

        Where the target has more input channels than the source, its weights go into the first ones, twice.
        """
        device = entries[0][0][0].device
        self.kept = [(*tensors, own) for tensors, own, _ in entries]
        table = []
        for tensors, own, _ in entries:
            inputs, filled = tensors[0].shape[1], tensors[5].shape[1]
            addresses = [tensor.data_ptr() for tensor in tensors] + [0 if own is None else own.data_ptr()]
            table.append([*addresses, tensors[0][0].numel(), inputs, filled, 1 if filled == inputs else 2])
        widths = [len(tensors[0]) for tensors, _, _ in entries]
        self.table = torch.tensor(table, dtype=torch.int64, device=device)
        self.units = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths)).to(device)
        self.channels = torch.cat([torch.arange(width) for width in widths]).to(device)
        self.eps = torch.tensor([eps for _, _, eps in entries], dtype=torch.float32, device=device)

    def __call__(self) -> None:
        """Fold all."""
        _fold[(len(self.units),)](self.table, self.units, self.channels, self.eps, _BLOCK)
