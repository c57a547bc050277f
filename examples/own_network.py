"""Train a network of your own with your own optimiser and loaders, and open the run again.

Any `nn.Module` from pixels in [0, 1] to logits will do; this one has GroupNorm, GELU and dropout. `sparring.train`
gives you a run folder, exact resume and validation under attack. The folder holds numbers and no code.

    python examples/own_network.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparring
from sparring import data

EPS = 0.1  # of the pixel range [0, 1]
EPOCHS = 4
IMAGES = 200  # test images to attack, so that this takes seconds


class Block(nn.Module):
    """A residual block with GroupNorm and GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the shape of x."""
        return x + nn.functional.gelu(self.norm(self.mix(x)))


class MyNet(nn.Module):
    """For 8x8 images of one channel."""

    def __init__(self, num_classes: int = 10, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.body = nn.Sequential(Block(width), nn.MaxPool2d(2), Block(width))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(width * 4 * 4, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes), and nothing else: a network with more outputs needs a wrapper."""
        return self.head(self.body(self.stem(2 * x - 1)))  # normalisation belongs inside: eps is then in pixels


def loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Loaders such as your code has. Images are floats in [0, 1] or uint8, labels class numbers from 0."""
    digits = data.load("digits")
    parts = [TensorDataset(part.x.float() / 255, part.y) for part in (digits.train, digits.test)]
    return DataLoader(parts[0], batch_size=128, shuffle=True), DataLoader(parts[1], batch_size=256)


def main(folder: Path) -> sparring.evaluation.Result:
    """Train, load the run again, and measure it on test images."""
    torch.manual_seed(0)
    net = MyNet()
    train_loader, test_loader = loaders()
    sparring.train(
        objective=sparring.FAT(eps=EPS, step_size="eps/4", steps=5, tau=1),
        model=net,  # a copy is trained, from the weights it has
        data=(train_loader, test_loader),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        out=folder,
        epochs=EPOCHS,
        validation=100,  # training images held out to choose the best epoch by
        validation_eps="eps",
        clip=1.0,
    )
    # The folder keeps weights and settings, never code: hand the network in again to open it.
    model = sparring.load_model(folder, model=MyNet(), which="best")
    result = sparring.evaluate(model, test_loader, protocol="quick", eps=EPS, limit=IMAGES)
    for attack in result:
        print(f"{attack.name:10} {100 * attack.accuracy:5.1f} %   of {attack.n} images")
    for doubt in result.doubts:
        print(f"Doubt: {doubt['name']}. {doubt['why']} {doubt['evidence']}")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as runs:
        main(Path(runs) / "mine")
