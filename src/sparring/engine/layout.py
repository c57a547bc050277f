"""Memory layout: a tensor brought to the precision and strides that a kernel reads."""

from __future__ import annotations

import torch
from torch import Tensor


def like(gradient: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient in this precision, with the strides of its weight: a kernel reads both as flat memory.

    It nearly always has them, but autograd does not guarantee it: images of one channel may count as channels_last, and
    then so do the gradients.
    """
    sides = zip(weight.shape, weight.stride(), gradient.stride(), strict=True)
    if gradient.dtype == dtype and all(size == 1 or ours == theirs for size, ours, theirs in sides):
        return gradient
    return torch.empty_like(weight, dtype=dtype).copy_(gradient)


def resting(state: dict[str, Tensor], name: str, weight: Tensor) -> Tensor:
    """An optimiser's tensor of a weight, with its strides, in a place where it stays: zeros, or what `state` has.

    A checkpoint's has other strides where the weight is channels_last.
    """
    made = torch.zeros_like(weight, requires_grad=False)
    before = state.get(name)
    if before is not None:
        made.copy_(before)
    state[name] = made
    return made
