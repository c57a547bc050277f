"""Operations of the folded network, one launch each: forward by cuDNN, backward to the input only.

Without CUDA or Triton the same functions run as plain operations, and so they are tested.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.engine.triton.available import convolutions_for, kernels_for, pointwise_for


def conv_relu(
    x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, stride: Any, padding: Any, *, twice: bool
) -> Any:
    """relu(conv(x) + bias [+ z]); the same twice, as a pair, where `twice`."""
    return _ConvReLU.apply(x, z, weight, bias, stride, padding, twice)  # type: ignore[no-untyped-call]


def split_in_one(x: Tensor, filled: int) -> Tensor:
    """`split`, in one launch."""
    pairs: Tensor = _Split.apply(x, filled)  # type: ignore[no-untyped-call]
    return pairs


def pool_dense(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The mean over the area of a feature map and the linear layer behind it; logits in fp32 (or the map's fp64)."""
    logits: Tensor = _PoolDense.apply(h, weight, bias)  # type: ignore[no-untyped-call]
    return logits


class _PoolDense(torch.autograd.Function):
    """Two launches where pooling, a small matrix product and their gradients are ten; backward to h only."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return pool_forward(h, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        h, weight = ctx.saved_tensors
        return pool_back(gradients[0], weight, h), None, None


def pool_forward(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`pool_dense` outside autograd."""
    kernels = _pooling(h)
    if kernels is not None:
        logits: Tensor = kernels.pool_dense(h, weight, bias)
        return logits
    wide = torch.promote_types(h.dtype, torch.float32)
    return F.linear(h.to(wide).mean((2, 3)), weight.to(wide), bias.to(wide))


def pool_back(
    gradient: Tensor, weight: Tensor, h: Tensor, *, masked: bool = False, among: Tensor | None = None
) -> Tensor:
    """Its gradient at h, or at h[among] from gradient[among]; where `masked` the one before the ReLU which made h."""
    kernels = _pooling(h)
    if kernels is not None:
        back: Tensor = kernels.pool_dense_back(gradient, weight, h, masked=masked, among=among)
        return back
    if among is not None:
        gradient, h = gradient[among], h[among]
    flat = gradient @ weight.to(gradient.dtype) / h[0, 0].numel()
    whole = flat.to(h.dtype)[:, :, None, None].expand_as(h)
    return torch.where(h > 0, whole, 0).contiguous(memory_format=torch.channels_last) if masked else whole


def _pooling(h: Tensor) -> ModuleType | None:
    """The kernels, where they can read h."""
    fits = h.dtype == torch.bfloat16 and h.is_contiguous(memory_format=torch.channels_last)
    found = convolutions_for(h.device) if fits else None
    return None if found is None else found[2]


class _ConvReLU(torch.autograd.Function):
    """relu(conv(x) + bias [+ z]) in one cuDNN call; backward to x and z only.

    Where two layers read it, it returns its output twice, so that the sum of their gradients and the ReLU's mask are
    one kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor | None, w: Tensor, b: Tensor, stride: Any, padding: Any, twice: bool
    ) -> Any:
        y = conv_forward(x, z, w, b, stride, padding)
        ctx.save_for_backward(x, w, y)
        ctx.conv, ctx.added = (stride, padding), z is not None
        return (y, y.view_as(y)) if twice else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        stride, padding = ctx.conv
        gradient = _relu_back(*gradients, y=y)
        of_x = input_gradient(gradient, x, w, stride, padding)
        return of_x, gradient if ctx.added else None, None, None, None, None, None


def conv_forward(x: Tensor, z: Tensor | None, w: Tensor, b: Tensor, stride: Any, padding: Any) -> Tensor:
    """relu(conv(x) + b [+ z]) in one cuDNN call, outside autograd."""
    if not x.is_cuda:  # the same function without cuDNN, for tests
        y = F.conv2d(x, w, b, stride, padding)
        return F.relu(y if z is None else y + z)
    if z is None:
        return torch.cudnn_convolution_relu(x, w, b, stride, padding, (1, 1), 1)
    return torch.cudnn_convolution_add_relu(x, w, z, 1.0, b, stride, padding, (1, 1), 1)


def back_to(
    y: Tensor,
    gradient: Tensor,
    w: Tensor,
    stride: Any,
    padding: Any,
    other: Tensor | None,
    among: Tensor | None = None,
) -> Tensor:
    """The gradient at a convolution's input y, or y[among], [+ other], before the ReLU which made y."""
    of_y = input_gradient(gradient, y[: len(gradient)], w, stride, padding)
    return _relu_back(of_y, *(() if other is None else (other,)), y=y, among=among)


def input_gradient(gradient: Tensor, x: Tensor, w: Tensor, stride: Any, padding: Any) -> Tensor:
    """The gradient at a convolution's input, in the memory format of x."""
    only_input = [True, False, False]
    of_x: Tensor = torch.ops.aten.convolution_backward(
        gradient, x, w, None, stride, padding, (1, 1), False, (0, 0), 1, only_input
    )[0]
    return of_x


def _relu_back(*gradients: Tensor, y: Tensor, among: Tensor | None = None) -> Tensor:
    """The sum of the gradients where y is positive, or where y[among] is."""
    if len(gradients) == 2 or among is not None:
        pointwise = pointwise_for(y.device)
        if pointwise is not None and all(gradient.stride() == y.stride() for gradient in gradients):
            both: Tensor = pointwise.relu_back(gradients[0], gradients[1] if len(gradients) == 2 else None, y, among)
            return both
    seen = y if among is None else y[among]
    gradient: Tensor = torch.ops.aten.threshold_backward(sum(gradients[1:], start=gradients[0]), seen, 0)
    return gradient


class _Split(torch.autograd.Function):
    """Pixels as pairs of bf16 numbers, channels last. Both halves meet the same weights: one has the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filled: int) -> Tensor:
        ctx.inputs = x.shape[1]
        kernels = kernels_for(x.device)
        if kernels is not None:
            pairs: Tensor = kernels.split(x, filled)
            return pairs
        return split(x, filled)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][:, : ctx.inputs].float().contiguous(), None


def split(x: Tensor, filled: int) -> Tensor:
    """(images, filled, height, width) in bf16: the rounded pixels, what rounding lost, and zeros."""
    high = x.to(torch.bfloat16)
    low = (x - high.float()).to(torch.bfloat16)
    pairs = F.pad(torch.cat([high, low], dim=1), (0, 0, 0, 0, 0, filled - 2 * x.shape[1]))
    return pairs.contiguous(memory_format=torch.channels_last)
