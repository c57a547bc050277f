"""Friendly adversarial training in a plain PyTorch loop, against standard training.

Everything here is yours to replace: the network, the data, the optimiser. Sparring's part is one call per batch, which
finds adversarial images and returns the loss on them.

    python examples/own_loop.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparring
from sparring import data

EPS = 0.1  # of the pixel range [0, 1]; digits are easy, so the radius is larger than the 8/255 of CIFAR-10
EPOCHS = 8


def network() -> nn.Module:
    """A small CNN for 8x8 images. If yours normalises its input, make that its first layer: attacks work on pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def train(x: Tensor, y: Tensor, objective: sparring.FAT | None) -> nn.Module:
    """Train with the objective, or with cross-entropy on the images as they are."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(128):
            if objective is None:
                loss = F.cross_entropy(model(x[rows]), y[rows])
            else:
                # progress moves the schedules: here tau, the steps that an attack still takes once it has succeeded.
                step = objective(model, x[rows], y[rows], progress=epoch / EPOCHS)
                loss = step.loss  # step.x_adv and step.backprops tell what the attack did
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The percentage of images that the model gets right."""
    with torch.no_grad():
        return 100 * (model(x).argmax(dim=1) == y).float().mean().item()


def main() -> None:
    """Train both ways, then compare on test images, clean and under attack."""
    digits = data.load("digits")
    x, y = digits.train.x.float() / 255, digits.train.y  # (n, 1, 8, 8) in [0, 1], int64
    x_test, y_test = digits.test.x.float() / 255, digits.test.y
    fat = sparring.FAT(eps=EPS, step_size=EPS / 4, steps=7, tau="0,1@50%", start="uniform")
    print(f"{len(y_test)} test images, eps {EPS}       natural    PGD-20")
    for name, objective in (("standard training", None), ("friendly training", fat)):
        model = train(x, y, objective)
        draws = torch.Generator().manual_seed(0)  # for a random start that can be repeated
        attacked = sparring.pgd(model, x_test, y_test, eps=EPS, step_size=EPS / 10, steps=20, generator=draws)
        natural, robust = accuracy(model, x_test, y_test), accuracy(model, attacked, y_test)
        print(f"{name:32} {natural:7.1f} % {robust:7.1f} %")
    print("PGD-20 is an upper bound on robustness. Before you quote a number, run sparring.evaluate with 'autoattack'.")


if __name__ == "__main__":
    main()
