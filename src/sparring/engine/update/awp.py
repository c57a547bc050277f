"""The gradient of an update, taken where it is or at adversarially perturbed weights (AWP, Wu et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparring.engine.update.exchange import ALONE, Exchange


def gradients(
    loss_here: Callable[[], Tensor],
    statistics: list[Tensor],
    parameters: list[Tensor],
    leaves: list[Tensor],
    awp: Tensor | None,
    exchange: Exchange = ALONE,
) -> tuple[Tensor, list[Tensor]]:
    """The loss, detached, and its gradient; with `awp` both at the weights w + v.

    v = awp * ||w|| * g / ||g|| for every weight of more than one dimension, g the gradient at w: the direction in which
    the loss grows, at a length relative to the weight's. One step is taken along it, as its authors do. The pass that
    finds g leaves no trace in the batch-norm statistics. The update is then taken from w.

    Args:
        loss_here: the forward pass, at the present weights.
        statistics: the buffers that a forward pass moves.
        leaves: what is differentiated and perturbed: the parameters, or copies of them in another precision.
        awp: size of the perturbation, relative; None for none.
        exchange: makes g the mean over all processes.
    """
    if awp is None:
        loss = loss_here()
        # Not backward(): it goes through nodes that keep the stream of an earlier step, which breaks a capture.
        return loss.detach(), list(torch.autograd.grad(loss, leaves))
    kept = [tensor.clone() for tensor in statistics]
    weights = [(leaf, weight) for leaf, weight in zip(leaves, parameters, strict=True) if weight.dim() > 1]
    directions = torch.autograd.grad(loss_here(), [leaf for leaf, _ in weights])
    with torch.no_grad():
        exchange.mean(list(directions))
        before = [leaf.detach().clone() for leaf, _ in weights]
        for tensor, value in zip(statistics, kept, strict=True):
            tensor.copy_(value)
        for (leaf, weight), g in zip(weights, directions, strict=True):
            g = g.to(weight.dtype)
            torch.add(weight, awp * weight.norm() / (g.norm() + 1e-12) * g, out=leaf)
    loss, found = gradients(loss_here, statistics, parameters, leaves, None)
    with torch.no_grad():
        for (leaf, _), value in zip(weights, before, strict=True):
            leaf.copy_(value)
    return loss, found
