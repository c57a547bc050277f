"""What the tests of networks in eight bits share."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gradients(network, x, output_gradient):
    point = x.clone().requires_grad_()
    logits = network(point)
    return logits.detach().float(), torch.autograd.grad(logits, point, output_gradient)[0]


def turned(one, other):
    """How far two gradients point apart, image by image."""
    return 1 - F.cosine_similarity(one.flatten(1), other.flatten(1)).mean()


def same_up_to_size(unsized, sized):
    """Whether each image's gradient is the same but for a positive factor, and the factor is not 1 for all."""
    factors = sized.flatten(1).norm(dim=1) / unsized.flatten(1).norm(dim=1)
    again = unsized * factors[:, None, None, None]
    return bool((factors != 1).any()) and float((again - sized).norm() / sized.norm()) < 0.01


def drawn(images=5, side=8):
    draw = torch.Generator().manual_seed(0)
    return torch.rand(images, 3, side, side, generator=draw), torch.randn(images, 10, generator=draw)
