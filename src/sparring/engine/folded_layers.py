"""The layers of a folded network: each stands for layers of the model and reads their weights again on `refresh`.

A convolution takes the batch-norm behind it, an addition and a ReLU into itself; a batch-norm with no convolution
before it (wide ResNets) is a scale and a shift; a linear layer may take the pooling before it. Weights are in the
precision of the attack. attack/folded.py decides which layer takes what.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparring.engine.manual.fused_ops import conv_relu, pool_dense, split, split_in_one


class ConvUnit(nn.Module):
    """A convolution with what is folded into it: batch-norm, an addition, a ReLU."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None, *, first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        # Held in a tuple so that the parameters stay the model's and are not registered here.
        self.source = (conv, norm)
        self.stride, self.padding, self.dilation, self.groups = conv.stride, conv.padding, conv.dilation, conv.groups
        # bf16 keeps 8 bits: a pixel near 1 would be rounded to 1/256. The first layer reads each pixel as a sum of two
        # bf16 numbers in two channels, which keeps 16 bits; zeros fill the channels up to a power of 2.
        self.split = first and dtype == torch.bfloat16
        shape = list(conv.weight.shape)
        self.inputs = shape[1]  # channels of its input
        if self.split:
            shape[1] = max(8, 1 << (2 * self.inputs - 1).bit_length())
        like = conv.weight
        self.register_buffer("weight", torch.zeros(shape, dtype=dtype, device=like.device))
        self.register_buffer("bias", torch.zeros(shape[0], dtype=dtype, device=like.device))
        self.relu, self.fused, self.twice, self.bias_is_shared = False, False, False, False

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's weights again."""
        conv, norm = self.source
        weight = conv.weight
        bias = conv.bias
        if norm is not None:
            assert norm.running_mean is not None and norm.running_var is not None
            scale = torch.rsqrt(norm.running_var + norm.eps)
            if norm.weight is not None:
                scale = scale * norm.weight
            weight = weight * scale[:, None, None, None]
            shift = norm.running_mean if bias is None else norm.running_mean - bias
            bias = -shift * scale
            if norm.bias is not None:
                bias = bias + norm.bias
        # Zero has to be written too: a shared bias was added to the last one (attack/folded.py).
        self.bias.copy_(bias) if bias is not None else self.bias.zero_()
        if self.split:
            self.weight[:, : self.inputs].copy_(weight)
            self.weight[:, self.inputs : 2 * self.inputs].copy_(weight)
        else:
            self.weight.copy_(weight)

    @property
    def in_a_row(self) -> bool:
        """Whether `attack_step.FoldAll` can refresh it: fp32 to bf16, with batch-norm, both channels last."""
        conv, norm = self.source
        return (
            norm is not None
            and norm.affine
            and conv.groups == 1
            and self.weight.dtype == torch.bfloat16
            and conv.weight.dtype == torch.float32
            and conv.weight.is_contiguous(memory_format=torch.channels_last)
            and self.weight.is_contiguous(memory_format=torch.channels_last)
        )

    def addresses(self) -> tuple[list[Tensor], Tensor | None, float]:
        """What `attack_step.FoldAll` reads and writes."""
        conv, norm = self.source
        assert norm is not None and norm.running_mean is not None and norm.running_var is not None
        read = [conv.weight, norm.running_mean, norm.running_var, norm.weight, norm.bias]
        own = None if conv.bias is None else conv.bias.detach()
        return [tensor.detach() for tensor in (*read, self.weight, self.bias)], own, norm.eps

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        """relu(conv(x) [+ z]), or without the ReLU; twice, as a pair, where two layers read it."""
        if self.split:
            filled = self.weight.shape[1]
            x = split_in_one(x, filled) if self.fused else split(x, filled)
        if self.fused and self.relu:
            return conv_relu(x, z, self.weight, self.bias, self.stride, self.padding, twice=self.twice)
        bias = None if self.bias_is_shared else self.bias  # the layer that adds this output adds the bias too
        out = F.conv2d(x, self.weight, bias, self.stride, self.padding, self.dilation, self.groups)
        if z is not None:
            out = out + z
        if self.relu:
            out = F.relu(out)
        return (out, out) if self.twice else out


class ScaleShift(nn.Module):
    """A batch-norm in eval mode with no convolution before it."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d, *, dtype: torch.dtype) -> None:
        super().__init__()
        assert norm.running_mean is not None
        self.source = (norm,)
        shape = (1, norm.num_features, 1, 1)
        self.register_buffer("scale", torch.zeros(shape, dtype=dtype, device=norm.running_mean.device))
        self.register_buffer("shift", torch.zeros(shape, dtype=dtype, device=norm.running_mean.device))

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's statistics again."""
        (norm,) = self.source
        assert norm.running_mean is not None and norm.running_var is not None
        scale = torch.rsqrt(norm.running_var + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight
        shift = -norm.running_mean * scale
        if norm.bias is not None:
            shift = shift + norm.bias
        self.scale.copy_(scale.reshape(self.scale.shape))
        self.shift.copy_(shift.reshape(self.shift.shape))

    @property
    def in_a_row(self) -> bool:
        """Whether `pointwise.ScaleAll` can refresh it, with many others in one launch."""
        (norm,) = self.source
        read = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        exact = all(tensor is not None and tensor.dtype == torch.float32 for tensor in read)
        return exact and self.scale.dtype in (torch.float32, torch.bfloat16)

    def addresses(self) -> tuple[list[Tensor], float]:
        """What `pointwise.ScaleAll` reads and writes."""
        (norm,) = self.source
        assert norm.running_mean is not None and norm.running_var is not None
        read = [norm.running_mean, norm.running_var, norm.weight.detach(), norm.bias.detach()]
        return [*read, self.scale, self.shift], norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """x * scale + shift."""
        return torch.addcmul(self.shift, x.to(self.scale.dtype), self.scale)


class Dense(nn.Module):
    """A linear layer."""

    weight: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear, *, first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.source = (linear,)
        self.gives, self.pools = dtype, False
        dtype = torch.float32 if first and dtype == torch.bfloat16 else dtype  # it reads pixels: see ConvUnit
        self.register_buffer("weight", torch.zeros_like(linear.weight, dtype=dtype))
        self.register_buffer("bias", torch.zeros(linear.out_features, dtype=dtype, device=linear.weight.device))

    def widen(self) -> None:
        """Compute in fp32 from here on: logits in bf16 would be rounded to 8 bits."""
        self.gives, self.weight, self.bias = torch.float32, self.weight.float(), self.bias.float()

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's weights again."""
        (linear,) = self.source
        self.weight.copy_(linear.weight)
        if linear.bias is not None:
            self.bias.copy_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The affine map; of the mean over a feature map where it `pools`."""
        if self.pools:
            return pool_dense(x, self.weight, self.bias)
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(self.gives)


Unit = ConvUnit | ScaleShift | Dense
