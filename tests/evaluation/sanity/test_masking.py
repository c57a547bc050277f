"""Models that mask their gradients raise a doubt; honest ones of many kinds raise none."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparring
from sparring.data import load
from sparring.evaluation.sanity import doubts
from tests.evaluation.sanity import networks

EPS = 0.2


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    return networks.unseen()


@pytest.fixture(scope="module")
def robust() -> nn.Module:
    return networks.robust(2)


class Masked(nn.Module):
    """A network behind, or in front of, something that hides its gradient."""

    def __init__(self, net: nn.Module, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.how = net, how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.net, x)


class Backward(torch.autograd.Function):
    """The identity, with a backward pass of its own: how(gradient, x)."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.save_for_backward(x)
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.how(gradient, *ctx.saved_tensors), None


def steps(c: Tensor) -> Tensor:
    """Rounding that is smooth: flat around whole numbers, steep in between."""
    for _ in range(3):
        c = c - torch.sin(2 * math.pi * c) / (2 * math.pi)
    return c


def staircase(net: nn.Module, x: Tensor) -> Tensor:
    return net(steps(10 * x) / 10)


def staircase_of_frequencies(net: nn.Module, x: Tensor) -> Tensor:
    """As JPEG rounds: the coefficients of a cosine transform."""
    k = torch.arange(8.0)
    cosines = torch.cos(math.pi / 8 * (k[None] + 0.5) * k[:, None])
    cosines = cosines / cosines.norm(dim=1, keepdim=True)
    return net(cosines.T @ (steps(4 * (cosines @ x @ cosines.T)) / 4) @ cosines)


def staircase_of_logits(net: nn.Module, x: Tensor) -> Tensor:
    return steps(2 * net(x)) / 2


def thermometer(net: nn.Module, x: Tensor) -> Tensor:
    thresholds = torch.arange(1, 8) / 8 - 0.05
    return net(torch.sigmoid(1000 * (x[..., None] - thresholds)).mean(dim=-1))


def squashed(net: nn.Module, x: Tensor) -> Tensor:
    return net(torch.sigmoid(300 * (x - 0.5)))


def winners_take_all(net: nn.Module, x: Tensor) -> Tensor:
    least = x.flatten(1).topk(24, dim=1).values[:, -1].view(-1, 1, 1, 1)
    return net(x * (x >= least))


def decoy(net: nn.Module, x: Tensor) -> Tensor:
    """The gradient of another network, on logits that are cut off from their own."""
    other = x.flatten(1) @ torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    return net(x).detach() + other - other.detach()


def switched_by_hash(net: nn.Module, x: Tensor) -> Tensor:
    """The gradient or its opposite, by the digits of the image."""
    sign = 1 - 2 * ((1e4 * x.detach()).flatten(1).sum(dim=1).floor() % 2).view(-1, 1, 1, 1)
    return net(Backward.apply(x, lambda gradient, x: sign * gradient))


def noisy_gradient(net: nn.Module, x: Tensor) -> Tensor:
    return net(Backward.apply(x, lambda gradient, x: gradient + 20 * gradient.abs().mean() * torch.sin(1e5 * x)))


def shuffled_gradient(net: nn.Module, x: Tensor) -> Tensor:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    return net(Backward.apply(x, lambda gradient, x: gradient.flatten(1)[:, order].view_as(gradient)))


def partial_gradient(net: nn.Module, x: Tensor) -> Tensor:
    """Seven of eight rows of the image are detached."""
    return net(torch.cat([x[..., :1, :], x[..., 1:, :].detach()], dim=-2))


def dropout(net: nn.Module, x: Tensor) -> Tensor:
    return net(F.dropout(x, 0.1, training=True))


def barrier(net: nn.Module, x: Tensor) -> Tensor:
    """Finite on the grid of the images, NaN off it."""
    off = (16 * x - (16 * x).round()).abs().flatten(1).sum(dim=1, keepdim=True)
    return net(x) + torch.log(1 - off)


def batch_statistics(net: nn.Module, x: Tensor) -> Tensor:
    """Batch-norm without running statistics: half a batch has nearly those of the whole."""
    return net(0.37 * F.batch_norm(x, None, None, training=True) + 0.3)


MASKED = {
    staircase: {"smoothing-beats-gradient", "square-beats-white-box"},
    staircase_of_frequencies: {"smoothing-beats-gradient"},
    staircase_of_logits: {"smoothing-beats-gradient"},
    thermometer: {"square-beats-white-box"},
    squashed: {"square-beats-white-box"},
    winners_take_all: {"square-beats-white-box"},
    decoy: {"square-beats-white-box"},
    switched_by_hash: {"loss-does-not-grow"},
    noisy_gradient: {"square-beats-white-box"},
    shuffled_gradient: {"square-beats-white-box", "noise-hurts-as-much"},
    partial_gradient: {"no-collapse-at-large-eps"},
    dropout: {"randomness-at-inference"},
    barrier: {"logits-not-finite"},
    batch_statistics: {"batch-dependence"},
}


@pytest.mark.parametrize("how", MASKED, ids=lambda how: how.__name__)
def test_a_masked_gradient_is_doubted(robust, images, how) -> None:
    found = {doubt.name: doubt.evidence for doubt in doubts(Masked(robust, how).eval(), *images, eps=EPS)}
    assert found.keys() >= MASKED[how], found


def test_a_staircase_is_doubted_in_l2(robust, images) -> None:
    found = {doubt.name for doubt in doubts(Masked(robust, staircase).eval(), *images, eps=1.0, norm="l2")}
    assert "smoothing-beats-gradient" in found


def test_masking_leaves_the_natural_accuracy(robust, images) -> None:
    """The models above are defences that someone could publish: what they lose is robustness, not accuracy."""
    x, y = images
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for how in MASKED:
            assert (Masked(robust, how)(x).argmax(dim=1) == y).float().mean() > 0.85, how


class Patches(nn.Module):
    """A small vision transformer: patches of 2x2, one block of attention, layer-norm, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Conv2d(1, 16, 2, stride=2), nn.Parameter(0.1 * torch.randn(1, 16, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.block(tokens).flatten(1))


def layers(*between: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """What makes a perceptron with these layers behind its first."""
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 96), *(one() for one in between), nn.Linear(96, 10))


def by(objective) -> networks.Loss:
    return lambda net, x, y, generator: objective(net, x, y, progress=0.5, generator=generator).loss


ATTACK: dict[str, Any] = {"eps": 0.1, "step_size": 0.03, "steps": 5}
PGD = networks.of_pgd(0.1)
HONEST: dict[str, tuple[Callable[[], nn.Module], networks.Loss]] = {
    "standard": (networks.perceptron, networks.of_pgd(0.0)),
    "Madry": (networks.perceptron, by(sparring.Madry(**ATTACK))),
    "FAT": (networks.perceptron, by(sparring.FAT(**ATTACK, tau=1))),
    "TRADES": (networks.perceptron, by(sparring.TRADES(**ATTACK, beta=6))),
    "transformer": (Patches, networks.of_pgd(0.0)),
    "dropout": (layers(nn.ReLU, lambda: nn.Dropout(0.3)), PGD),
    "layer-norm": (layers(lambda: nn.LayerNorm(96), nn.ReLU), PGD),
    "tanh": (layers(nn.Tanh), PGD),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_network_of_any_kind_raises_no_doubt(images, name) -> None:
    make, loss = HONEST[name]
    net = networks.train(1, loss, make=make)
    assert (net(images[0]).argmax(dim=1) == images[1]).float().mean() > 0.85
    assert doubts(net, *images, eps=0.1) == []


def test_precision_and_norm_raise_no_doubt(robust, images) -> None:
    x, y = images
    assert doubts(copy.deepcopy(robust).double(), x.double(), y, eps=0.1) == []
    assert doubts(robust, x, y, eps=1.0, norm="l2") == []


def test_the_shipped_model_raises_no_doubt() -> None:
    """At the radius of its training, where its loss has local maxima that a single start of PGD ends in."""
    test = load("digits").test
    assert doubts(sparring.load_model("fat-digits"), test.x[:128].float() / 255, test.y[:128], eps=0.3) == []


def test_a_model_that_needs_two_images_is_named(images) -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 10)).eval()
    (found,) = doubts(net, *images, eps=0.1)
    assert found.name == "batch-dependence"
    assert re.fullmatch(
        r"In a smaller batch it raises ValueError: Expected more than 1 value .*; no other check was run\.",
        found.evidence,
    )
