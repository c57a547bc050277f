"""What lies between two convolutions, as Triton kernels of one launch each.

The way back may be that of fewer images than went forward: some have stopped in between. `among` then tells which of
the forward's images each of them was, so that nothing has to be copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _relu_back(
    first,  # (images, pixels): a gradient
    second,  # another, where TWO
    y,  # (any, pixels): what the ReLU gave
    among,  # (images,): an image's row of y, where CHOSEN
    out,
    count,
    pixels,
    TWO: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """first [+ second] where y is positive, else 0: the gradient before a ReLU."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.load(first + place, mask=inside, other=0.0).to(tl.float32)
    if TWO:
        total += tl.load(second + place, mask=inside, other=0.0).to(tl.float32)
    seen = place
    if CHOSEN:
        seen += (tl.load(among + place // pixels, mask=inside, other=0) - place // pixels) * pixels
    positive = tl.load(y + seen, mask=inside, other=0.0).to(tl.float32) > 0
    tl.store(out + place, tl.where(positive, total, 0.0), mask=inside)


def relu_back(first: Tensor, second: Tensor | None, y: Tensor, among: Tensor | None = None) -> Tensor:
    """first [+ second] where y > 0, of y[among] where that is given. All are laid out like y."""
    out = torch.empty_like(first)
    _relu_back[(triton.cdiv(out.numel(), _BLOCK),)](
        *(first, first if second is None else second, y, y if among is None else among, out),
        *(out.numel(), out[0].numel(), second is not None, among is not None, _BLOCK),
    )
    return out
