"""Digits, and small networks trained on them within half a second, for the tests of the doubts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.attacks import pgd

Loss = Callable[[nn.Module, Tensor, Tensor, torch.Generator], Tensor]


@cache
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images[:, None] / 16).float(), torch.tensor(data.target).long()


def unseen() -> tuple[Tensor, Tensor]:
    """256 images that no network was trained on."""
    x, y = digits()
    return x[1300:1556], y[1300:1556]


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def of_pgd(eps: float) -> Loss:
    """Cross-entropy on what PGD finds; on the images themselves where eps is 0."""

    def loss(net: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        x = pgd(net, x, y, eps=eps, step_size=eps / 3, steps=5, generator=generator) if eps else x
        net.train()
        return F.cross_entropy(net(x), y)

    return loss


def train(seed: int, loss: Loss, *, make: Callable[[], nn.Module] = perceptron, lr: float = 0.05) -> nn.Module:
    """A network of 12 epochs, in eval mode. It is trained in float64, so that it is the same network on every CPU."""
    x, y = digits()
    x = x.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = make().double()
    optimiser = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(12):
        for batch in torch.randperm(1200, generator=generator).split(64):
            net.train()
            optimiser.zero_grad()
            loss(net, x[batch], y[batch], generator).backward()
            optimiser.step()
    net.zero_grad()
    return net.float().eval()


@cache
def robust(seed: int = 0) -> nn.Module:
    """Trained by PGD at eps 0.1."""
    return train(seed, of_pgd(0.1))
