"""Layers as an update runs them: convolutions, batch-norm with the addition and ReLU behind it, pooling.

Each stands for layers of the model, whose tensors it uses, and has a plain twin in torch's operations for what the
kernels cannot read. Who puts them in their places is fusing.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparring.engine.manual.fused_ops import split_in_one
from sparring.engine.update.weight_gradients import WeightGradientStream

WHOLE = 16  # channels: cuDNN wants whole eights in bf16, and norm.py reads whole sixteens at once
FILLED = 8  # channels that a first layer is given


class Bare(nn.Module):
    """A convolution without its bias. Where `wide`, channels of zeros fill its output up to whole sixteens.

    Else cuDNN does that by launches of its own. It may be given such channels, too; where `fill`, it gives them to
    itself, up to eight: a first layer's three channels send cuDNN to a slow kernel. In bf16 they are not all zeros:
    pixels come as two numbers each, for one would be off by up to 1/512 near 1, a quarter of a step.
    """

    def __init__(self, conv: nn.Conv2d, *, wide: bool) -> None:
        super().__init__()
        self.of = (conv,)  # in a tuple: its weights stay the model's
        self.more = -conv.out_channels % WHOLE if wide else 0
        self.fill = False
        self.weight_stream: WeightGradientStream | None = None  # computes the weight's gradient, if not autograd

    def forward(self, x: Tensor) -> Tensor:
        """As the convolution, but for the bias."""
        (conv,) = self.of
        weight, copies = conv.weight, 1
        if self.fill and x.shape[1] == conv.in_channels:
            x, copies = self._filled(x)
            weight = weight if copies == 1 else torch.cat([weight] * copies, dim=1)
        given = x.shape[1] - copies * conv.in_channels
        if given or self.more:
            weight = F.pad(weight, (0, 0, 0, 0, 0, given, 0, self.more))
        if (
            self.weight_stream is not None and conv.weight.requires_grad
        ):  # a frozen one is not in the precision of the others
            return self.weight_stream.convolution(x, conv, weight, copies)
        out: Tensor = conv._conv_forward(x, weight, None)
        return out

    def _filled(self, x: Tensor) -> tuple[Tensor, int]:
        """Eight channels, and in how many numbers each pixel comes."""
        dtype = self.of[0].weight.dtype
        if dtype == torch.bfloat16 and x.dtype == torch.float32 and 2 * x.shape[1] <= FILLED:
            return split_in_one(x, FILLED), 2
        x = x.to(dtype, memory_format=torch.channels_last)
        return F.pad(x, (0, 0, 0, 0, 0, FILLED - x.shape[1])), 1


class NormUnit(nn.Module):
    """relu(batch-norm(x + bias) + z), as far as there is a ReLU, a bias and a z."""

    def __init__(self, norm: nn.BatchNorm2d, bias: Tensor | None, kernels: ModuleType, arrived: Tensor) -> None:
        super().__init__()
        self.of, self.bias_of = (norm,), (bias,)
        self.of_bias = None if bias is None else torch.zeros_like(bias)  # its gradient
        self.kernels, self.arrived = kernels, arrived
        self.relu, self.twice, self.through = False, False, False
        self.dry = False  # see compile_for

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        """The output; twice where two layers read it, so that each brings its gradient; and x, where it goes through.

        As a tuple, where it is more than one.
        """
        (norm,), (bias,) = self.of, self.bias_of
        given = (x,) if z is None else (x, z)
        alike = all(t.dtype == x.dtype and t.shape == x.shape and self.kernels.takes(t) for t in given)
        if not norm.training or not alike:
            return self.plain(x, z)
        both = _Norm.dry if self.dry else _Norm.apply
        return both(x, norm.weight, norm.bias, bias, z, self)

    def plain(self, x: Tensor, z: Tensor | None = None) -> Any:
        """The same by torch's operations."""
        (norm,), (bias,) = self.of, self.bias_of
        x = x[:, : norm.num_features]
        y = norm(x if bias is None else x + bias.to(x.dtype)[:, None, None])
        y = y if z is None else y + z
        y = F.relu(y) if self.relu else y
        return self.given_out(y, y, x)

    def given_out(self, y: Tensor, again: Tensor, x: Tensor) -> Any:
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
        return unit.given_out(y, y.view_as(y), x.view_as(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, facts, y = ctx.saved_tensors
        laid = [_like(gradient, x) for gradient in gradients]
        more = laid.pop() if ctx.unit.through else None
        how = {"relu": ctx.unit.relu, "keep": ctx.added, "more": more}
        dx, kept, slopes = ctx.unit.kernels.back(tuple(laid), x, y, facts, ctx.unit.arrived, **how)
        gain, shift = slopes[:2, : ctx.unit.of[0].num_features]
        return dx, gain, shift, ctx.unit.of_bias, kept if ctx.added else None, None

    @staticmethod
    def dry(x: Tensor, *given: Any) -> Any:
        """Both ways, one behind the other: autograd goes back in a thread that does not know what is going on."""
        ctx = _Dry()
        out = _Norm.forward(ctx, x, *given)
        _Norm.backward(ctx, *(out if isinstance(out, tuple) else (out,)))
        return out


class _Dry:
    """What a Function keeps for the way back."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class PoolUnit(nn.Module):
    """The largest of every 2x2 pixels of what a ReLU has passed."""

    def __init__(self, kernels: ModuleType, channels: int) -> None:
        """`channels` are kept; what is given beyond them are zeros."""
        super().__init__()
        self.kernels, self.channels = kernels, channels
        self.dry = False

    def forward(self, x: Tensor) -> Tensor:
        """Half as high and wide."""
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
    """In x's precision, channels last: a mean's gradient is spread out over nothing."""
    return gradient.to(x.dtype).contiguous(memory_format=torch.channels_last)
