"""The cost of a network: its parameters, and the floating-point operations of a forward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from sparring.models.registry import build

_CPU = 1e11  # FLOP/s, roughly: ResNet-18 and its input gradient reach 180 GFLOP/s on two EPYC cores


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, trainable and frozen; buffers (batch-norm statistics, normalisation) do not count."""
    return sum(p.numel() for p in model.parameters())


def forward_flops(model: nn.Module, x_shape: Sequence[int]) -> int:
    """FLOPs of one forward pass on images of shape (N, C, H, W): two per multiply-add of convolutions and products.

    Nothing is computed: the model runs on shapes alone, on the meta device.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    images, *image = x_shape
    # Two images, scaled: in train mode batch-norm refuses a single one whose feature map has shrunk to 1x1.
    x = torch.empty((2, *image), dtype=dtype, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        functional_call(model, shapes, (x,))
    flops: int = counter.get_total_flops()
    return flops // 2 * images


@functools.cache
def seconds_on_a_cpu(name: str, channels: int, size: tuple[int, int], num_classes: int = 10) -> float:
    """A rough estimate for the forward pass of one image, to warn before a run that would take days."""
    with torch.device("meta"):
        model = build(name, num_classes=num_classes, channels=channels, size=size)
    return forward_flops(model, (1, channels, *size)) / _CPU
