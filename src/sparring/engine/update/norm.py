"""The global norm of a gradient: whether it is finite, and clipping to a length. All on the device: nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor


def checked(loss: Tensor, gradients: list[Tensor], clip: float = 0.0) -> tuple[Tensor, list[Tensor]]:
    """Whether loss and gradient are finite, as a tensor; and the gradient, scaled down to the norm `clip` if it is set.

    The rule of clipping is that of `torch.nn.utils.clip_grad_norm_`.
    """
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if clip:
        gradients = list(torch._foreach_mul(gradients, torch.clamp(clip / (norm + 1e-6), max=1.0)))
    return torch.isfinite(loss.detach() + norm), gradients


def ratios(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each parameter group relative to the first one's: under a schedule they keep it."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return [1.0 if rate == rates[0] else rate / rates[0] for rate in rates]
