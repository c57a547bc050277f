"""Batch-norm over the images of all processes: the same statistics as those of one process with the whole batch.

A layer is run as a subclass of its own class, so parameters, their names and what eval mode does stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparring.training.distributed import World


class _Sum(torch.autograd.Function):
    """The sum over all processes, of which each has `weight` of the images.

    A process differentiates the mean loss of its own images, and the update weighs the result by `weight`. So what the
    losses of the others contribute is weighted by theirs, and divided by the process's own.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.weight, ctx.group = weight, group
        return _added(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _added(gradients[0] * ctx.weight, ctx.group) / ctx.weight, None, None


def _added(values: Tensor, group: Any) -> Tensor:
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def normalised(layer: nn.modules.batchnorm._BatchNorm, x: Tensor, group: Any) -> Tensor:
    """`x` normalised by the mean and variance over all processes, which the running statistics follow."""
    channels, others = x.shape[1], [0, *range(2, x.ndim)]
    count = x.new_full((), x.numel() / channels)
    total = _added(count, group)
    weight = count / total
    shape = (1, channels, *[1] * (x.ndim - 2))
    mean: Tensor = _Sum.apply(x.sum(others), weight, group) / total  # type: ignore[no-untyped-call]
    centred = x - mean.view(shape)
    # In two passes: the mean of squares minus the square of the mean loses what they have in common.
    variance = _Sum.apply(centred.square().sum(others), weight, group) / total  # type: ignore[no-untyped-call]
    if layer.running_mean is not None and layer.running_var is not None:
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked += 1
        rate = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        with torch.no_grad():
            layer.running_mean.lerp_(mean, rate)
            layer.running_var.lerp_(variance * total / (total - 1).clamp(min=1), rate)
    out: Tensor = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.weight is not None:
        out = out * layer.weight.view(shape) + layer.bias.view(shape)
    return out


def synchronise(model: nn.Module, world: World) -> None:
    """Let every batch-norm layer of the model take its statistics over all processes in train mode. In place."""
    if not world.grouped:
        return
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.__class__ = _synchronised(type(module), world.group)


def separate(*models: nn.Module) -> None:
    """Make the layers what they were before `synchronise`, for the time after the group."""
    for model in models:
        for module in model.modules():
            module.__class__ = getattr(type(module), "separate", type(module))


def _synchronised(kind: type[Any], group: Any) -> type[Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return normalised(self, x, group) if self.training else kind.forward(self, x)

    return type(kind.__name__, (kind,), {"forward": forward, "separate": kind})
