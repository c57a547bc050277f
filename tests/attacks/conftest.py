from __future__ import annotations

import pytest
import torch
from torch import nn


def network(channels: int = 1, size: tuple[int, int] = (6, 6), classes: int = 4, seed: int = 0) -> nn.Module:
    """A small network with batch-norm whose running statistics are not the trivial ones, in double precision."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1, stride=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(6 * ((size[0] + 1) // 2) * ((size[1] + 1) // 2), classes),
        ).double()
        model(torch.rand(32, channels, *size, dtype=torch.float64))
        nn.init.normal_(model[-1].bias, std=0.3)
    return model.eval()


def images(model: nn.Module, count: int, channels: int = 1, size: tuple[int, int] = (6, 6), seed: int = 0):
    """Random images; most carry the label the model gives them, the first (if there are several) another."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, channels, *size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(dim=1)
        if count > 1:
            y[0] = (y[0] + 1) % model(x).shape[1]
    return x, y


@pytest.fixture
def batch():
    model = network()
    return model, *images(model, 24)
