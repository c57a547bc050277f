"""One small adversarially trained model for every test here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sparring import models
from sparring.attacks import pgd


@dataclass(frozen=True)
class Trained:
    model: nn.Module
    x: Tensor  # 200 held-out digits
    y: Tensor


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Networks this small are slower with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained() -> Trained:
    digits = load_digits()
    x, y = torch.tensor(digits.images[:, None] / 16).float(), torch.tensor(digits.target).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = models.build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        batch = torch.randint(0, 1200, (64,), generator=generator)
        x_adv = pgd(model, x[batch], y[batch], eps=0.15, step_size=0.1, steps=2, generator=generator)
        model.train()
        optimiser.zero_grad()
        F.cross_entropy(model(x_adv), y[batch]).backward()
        optimiser.step()
    model.zero_grad()
    return Trained(model.eval(), x[1300:1500], y[1300:1500])


@pytest.fixture
def untouched(trained: Trained):
    """A test must not change the global random state or the model."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())
    assert not trained.model.training
    assert all(p.grad is None and p.requires_grad and p.dtype == torch.float32 for p in trained.model.parameters())
