"""Memory layout: a tensor brought to the precision and strides that a kernel reads."""

from __future__ import annotations

import torch
from torch import Tensor


def like(gradient: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient in this precision, laid out like its weight, for a kernel walks both as memory. It nearly always is.

    Autograd does not promise it: images of one channel may count as channels_last, and then gradients come so.
    """
    sides = zip(weight.shape, weight.stride(), gradient.stride(), strict=True)
    if gradient.dtype == dtype and all(size == 1 or ours == theirs for size, ours, theirs in sides):
        return gradient
    return torch.empty_like(weight, dtype=dtype).copy_(gradient)
