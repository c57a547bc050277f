"""Layers as an update runs them: convolutions, batch-norm with the addition and ReLU behind it, pooling.

Each stands for layers of the model, whose tensors it uses, and has a twin in torch's operations for inputs that the
kernels cannot read. fuse_bn.py puts them in their places.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparring.engine.manual.fused_ops import split_in_one

WHOLE = 16  # channels: cuDNN needs multiples of 8 in bf16, and batch_norm.py reads 16 at once
FILLED = 8  # channels of a first layer's input


class Bare(nn.Module):
    """A convolution without its bias. Where `wide`, channels of zeros fill its output up to a multiple of 16.

    Otherwise cuDNN pads by launches of its own. Its input may have such channels too; where `fill`, it adds them
    itself, up to eight: with three channels cuDNN takes a slow kernel for a first layer. In bf16 they are not all
    zeros: a pixel is two numbers, because one would be off by up to 1/512 near 1, a quarter of a step.
    """

    def __init__(self, conv: nn.Conv2d, *, wide: bool) -> None:
        super().__init__()
        self.of = (conv,)  # in a tuple: its weights stay the model's
        self.more = -conv.out_channels % WHOLE if wide else 0
        self.fill = False

    def forward(self, x: Tensor) -> Tensor:
        """The convolution without its bias."""
        (conv,) = self.of
        weight, copies = conv.weight, 1
        if self.fill and x.shape[1] == conv.in_channels:
            x, copies = self._filled(x)
            weight = weight if copies == 1 else torch.cat([weight] * copies, dim=1)
        given = x.shape[1] - copies * conv.in_channels
        if given or self.more:
            weight = F.pad(weight, (0, 0, 0, 0, 0, given, 0, self.more))
        out: Tensor = conv._conv_forward(x, weight, None)
        return out

    def _filled(self, x: Tensor) -> tuple[Tensor, int]:
        """The input in eight channels, and the numbers per pixel."""
        dtype = self.of[0].weight.dtype
        if dtype == torch.bfloat16 and x.dtype == torch.float32 and 2 * x.shape[1] <= FILLED:
            return split_in_one(x, FILLED), 2
        x = x.to(dtype, memory_format=torch.channels_last)
        return F.pad(x, (0, 0, 0, 0, 0, FILLED - x.shape[1])), 1


class NormUnit(nn.Module):
    """relu(batch-norm(x + bias) + z); ReLU, bias and z are optional."""

    def __init__(self, norm: nn.BatchNorm2d, bias: Tensor | None, kernels: ModuleType, arrived: Tensor) -> None:
        super().__init__()
        self.of, self.bias_of = (norm,), (bias,)
        self.of_bias = None if bias is None else torch.zeros_like(bias)  # its gradient
        self.kernels, self.arrived = kernels, arrived
        self.relu, self.twice, self.through = False, False, False
        self.dry = False  # see compile_for

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        """The output; twice where two layers read it, so that each has its gradient; and x, where another reads it.

        A tuple, where it is more than one.
        """
        (norm,), (bias,) = self.of, self.bias_of
        given = (x,) if z is None else (x, z)
        alike = all(t.dtype == x.dtype and t.shape == x.shape and self.kernels.takes(t) for t in given)
        if not norm.training or not alike:
            return self.plain(x, z)
        both = _Norm.dry if self.dry else _Norm.apply
        return both(x, norm.weight, norm.bias, bias, z, self)

    def plain(self, x: Tensor, z: Tensor | None = None) -> Any:
        """The same in torch's operations."""
        (norm,), (bias,) = self.of, self.bias_of
        x = x[:, : norm.num_features]
        y = norm(x if bias is None else x + bias.to(x.dtype)[:, None, None])
        y = y if z is None else y + z
        y = F.relu(y) if self.relu else y
        return self.outputs(y, y, x)

    def outputs(self, y: Tensor, again: Tensor, x: Tensor) -> Any:
        """What `forward` returns."""
        outs = (y, *((again,) if self.twice else ()), *((x,) if self.through else ()))
        return outs if len(outs) > 1 else y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, bias: Tensor | None, z: Tensor | None, unit: NormUnit
    ) -> Any:
        (norm,) = unit.of
        running = (norm.running_mean, norm.running_var)
        how = {"relu": unit.relu, "eps": norm.eps, "momentum": norm.momentum}
        y, facts = unit.kernels.forward(x, gain, shift, running, unit.arrived, bias=bias, z=z, **how)
        ctx.save_for_backward(x, facts, y if unit.relu and z is not None else None)
        ctx.unit, ctx.added = unit, z is not None
        return unit.outputs(y, y.view_as(y), x.view_as(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, facts, y = ctx.saved_tensors
        laid = [_like(gradient, x) for gradient in gradients]
        more = laid.pop() if ctx.unit.through else None
        how = {"relu": ctx.unit.relu, "keep": ctx.added, "more": more}
        dx, kept, sums = ctx.unit.kernels.back(tuple(laid), x, y, facts, ctx.unit.arrived, **how)
        gain, shift = sums[:2, : ctx.unit.of[0].num_features]
        return dx, gain, shift, ctx.unit.of_bias, kept if ctx.added else None, None

    @staticmethod
    def dry(x: Tensor, *given: Any) -> Any:
        """Forward and backward, one after the other: autograd's backward runs in a thread without the context."""
        ctx = _Dry()
        out = _Norm.forward(ctx, x, *given)
        _Norm.backward(ctx, *(out if isinstance(out, tuple) else (out,)))
        return out


class _Dry:
    """Keeps what a Function saves for its backward pass."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class PoolUnit(nn.Module):
    """The maximum of every 2x2 pixels of a ReLU's output."""

    def __init__(self, kernels: ModuleType, channels: int) -> None:
        """`channels` are kept; the input's further channels are zeros."""
        super().__init__()
        self.kernels, self.channels = kernels, channels
        self.dry = False

    def forward(self, x: Tensor) -> Tensor:
        """The maxima: half the height and width."""
        even = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
        if not even or not x.is_contiguous(memory_format=torch.channels_last):
            return F.max_pool2d(x[:, : self.channels], 2)
        out: Tensor = _Pool.apply(x, self.kernels)  # type: ignore[no-untyped-call]
        if self.dry:
            self.kernels.max_pool_back(out, x)
        return out if out.shape[1] == self.channels else out[:, : self.channels]


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: ModuleType) -> Any:
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return kernels.max_pool(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.kernels.max_pool_back(_like(gradients[0], x), x), None


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient in x's precision, channels last: that of a mean is an expanded view."""
    return gradient.to(x.dtype).contiguous(memory_format=torch.channels_last)
