"""What lies between two convolutions, as Triton kernels of one launch each.

The backward pass may be that of fewer images than went forward: some have stopped in between. `among` then lists their
rows in the forward pass, so that nothing has to be copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparring.engine.triton.compile_ahead import launch

_BLOCK = 1024


@triton.jit
def _where(pixels, BLOCK: tl.constexpr):
    """A program's image, its pixels (in all channels), and their mask."""
    blocks = tl.cdiv(pixels, BLOCK)
    program = tl.program_id(0)  # one axis for both: only the first one goes beyond 65,535
    pixel = program % blocks * BLOCK + tl.arange(0, BLOCK)
    return (program // blocks).to(tl.int64), pixel, pixel < pixels


@triton.jit
def _relu_back(
    first,  # (images, pixels): a gradient
    second,  # another, where TWO
    y,  # (any, pixels): the output of the ReLU
    among,  # (images,): an image's row of y, where CHOSEN
    out,
    pixels,
    TWO: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """first [+ second] where y is positive, else 0: the gradient before a ReLU."""
    image, pixel, inside = _where(pixels, BLOCK)
    here = image * pixels + pixel
    seen = here
    if CHOSEN:
        seen = tl.load(among + image).to(tl.int64) * pixels + pixel
    total = tl.load(first + here, mask=inside, other=0.0).to(tl.float32)
    if TWO:
        total += tl.load(second + here, mask=inside, other=0.0).to(tl.float32)
    positive = tl.load(y + seen, mask=inside, other=0.0).to(tl.float32) > 0
    tl.store(out + here, tl.where(positive, total, 0.0), mask=inside)


@triton.jit
def _norm_relu(
    first,  # (images, pixels), channels last; where KEPT, the sum is written here
    second,  # another, added to it, where TWO
    scale,  # (CHANNELS,)
    shift,
    out,
    pixels,
    TWO: tl.constexpr,
    KEPT: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """relu(scale * (first [+ second]) + shift)."""
    image, pixel, inside = _where(pixels, BLOCK)
    here = image * pixels + pixel
    channel = pixel % CHANNELS
    total = tl.load(first + here, mask=inside, other=0.0)
    if TWO:
        total = (total.to(tl.float32) + tl.load(second + here, mask=inside, other=0.0).to(tl.float32)).to(total.dtype)
    if KEPT:
        tl.store(first + here, total, mask=inside)
    factor, offset = tl.load(scale + channel).to(tl.float32), tl.load(shift + channel).to(tl.float32)
    tl.store(out + here, tl.maximum(total.to(tl.float32) * factor + offset, 0.0), mask=inside)


@triton.jit
def _norm_relu_back(
    first,  # (images, pixels), channels last: a gradient at the output of `_norm_relu`
    second,  # another, where TWO
    other,  # (images, pixels): a gradient at the sum that it read, where MORE
    o,  # (any, pixels): that output
    among,  # (images,): an image's row of o, where CHOSEN
    scale,  # (CHANNELS,)
    out,
    pixels,
    TWO: tl.constexpr,
    MORE: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scale * (first [+ second]) where o is positive [+ other]: the gradient at the sum."""
    image, pixel, inside = _where(pixels, BLOCK)
    here = image * pixels + pixel
    seen = here
    if CHOSEN:
        seen = tl.load(among + image).to(tl.int64) * pixels + pixel
    total = tl.load(first + here, mask=inside, other=0.0).to(tl.float32)
    if TWO:
        total += tl.load(second + here, mask=inside, other=0.0).to(tl.float32)
    positive = tl.load(o + seen, mask=inside, other=0.0).to(tl.float32) > 0
    total = tl.where(positive, total * tl.load(scale + pixel % CHANNELS).to(tl.float32), 0.0)
    if MORE:
        total += tl.load(other + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, total, mask=inside)


@triton.jit
def _scale(
    table,  # (norms, 7): addresses of mean, variance, weight, bias, scale, shift; number of channels
    eps,  # (norms,)
    BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one batch-norm in eval mode as a scale and a shift."""
    entry = table + tl.program_id(0) * 7
    number = tl.float32
    gives = tl.bfloat16 if BF16 else tl.float32
    channels = tl.load(entry + 6)
    for start in range(0, channels, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < channels
        mean = tl.load(tl.load(entry).to(tl.pointer_type(number)) + c, mask=inside, other=0.0)
        variance = tl.load(tl.load(entry + 1).to(tl.pointer_type(number)) + c, mask=inside, other=1.0)
        weight = tl.load(tl.load(entry + 2).to(tl.pointer_type(number)) + c, mask=inside, other=0.0)
        bias = tl.load(tl.load(entry + 3).to(tl.pointer_type(number)) + c, mask=inside, other=0.0)
        scale = weight / tl.sqrt(variance + tl.load(eps + tl.program_id(0)))
        tl.store(tl.load(entry + 4).to(tl.pointer_type(gives)) + c, scale.to(gives), mask=inside)
        tl.store(tl.load(entry + 5).to(tl.pointer_type(gives)) + c, (bias - mean * scale).to(gives), mask=inside)


def relu_back(first: Tensor, second: Tensor | None, y: Tensor, among: Tensor | None = None) -> Tensor:
    """first [+ second] where y > 0, or where y[among] > 0. All have the strides of y."""
    out = torch.empty_like(first)
    given = (first, first if second is None else second, y, y if among is None else among, out)
    _relu_back[_grid(out)](*given, _pixels(out), second is not None, among is not None, _BLOCK)
    return out


def norm_relu(first: Tensor, second: Tensor | None, scale: Tensor, shift: Tensor, *, kept: bool = False) -> Tensor:
    """relu(scale * (first [+ second]) + shift) by channel, channels last. Where `kept`, the sum is left in `first`."""
    out = torch.empty_like(first)
    given = (first, first if second is None else second, scale, shift, out)
    launch(_norm_relu, _grid(out), *given, _pixels(out), second is not None, kept, out.shape[1], _BLOCK)
    return out


def norm_relu_back(
    first: Tensor,
    second: Tensor | None,
    o: Tensor,
    scale: Tensor,
    *,
    other: Tensor | None = None,
    among: Tensor | None = None,
) -> Tensor:
    """The gradient at the sum that `norm_relu` read when it returned o, or o[among]; plus `other`."""
    out = torch.empty_like(first)
    given = [first if tensor is None else tensor for tensor in (first, second, other)]
    chosen = o if among is None else among
    flags = (second is not None, other is not None, among is not None)
    launch(_norm_relu_back, _grid(out), *given, o, chosen, scale, out, _pixels(out), *flags, out.shape[1], _BLOCK)
    return out


def _grid(out: Tensor) -> tuple[int]:
    return (triton.cdiv(_pixels(out), _BLOCK) * len(out),)


def _pixels(images: Tensor) -> int:
    """Numbers of one image; there may be no image."""
    return images.shape[1:].numel()


class ScaleAll:
    """Every batch-norm as a scale and a shift, in one launch. It keeps addresses: the tensors must stay in place."""

    def __init__(self, entries: list[tuple[list[Tensor], float]]) -> None:
        """Per norm: (mean, variance, weight, bias, scale, shift), the first four in fp32; and its eps."""
        self.kept = entries
        rows = [[*(tensor.data_ptr() for tensor in tensors), tensors[0].numel()] for tensors, _ in entries]
        device = entries[0][0][0].device
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.eps = torch.tensor([eps for _, eps in entries], dtype=torch.float32, device=device)
        self.half = entries[0][0][4].dtype == torch.bfloat16

    def __call__(self) -> None:
        """Read the statistics again."""
        _scale[(len(self.table),)](self.table, self.eps, self.half, 256)
