"""A training that looks robust to PGD and is not: geometry-aware reweighting, and the doubt that names it.

Each adversarial example has the weight (1 + tanh(lambda + 5 (1 - 2 kappa / K))) / 2 (Zhang et al., "Geometry-aware
instance-reweighted adversarial training"), where kappa is the number of steps of PGD-K until the model is wrong. The
examples that PGD does not break lose nearly all of their weight, and the model learns margins that cross-entropy does
not see.

    python examples/geometry_reweighting.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparring
from sparring import data

EPS, STEPS, LAMBDA = 0.2, 10, -1.0
EPOCHS = 30
PROTOCOLS = ("dat", "autoattack")


def network() -> nn.Module:
    """A perceptron for 8x8 images."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def weights(kappa: Tensor) -> Tensor:
    """One weight per example, in (0, 1): large where few steps suffice."""
    return (1 + torch.tanh(LAMBDA + 5 * (1 - 2 * kappa / STEPS))) / 2


def train(x: Tensor, y: Tensor, *, reweighted: bool) -> nn.Module:
    """PGD training, with or without the weights."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(0.8 * EPOCHS)])
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(64):
            images, labels = x[rows], y[rows]
            start = images + EPS * (2 * torch.rand_like(images) - 1)
            attack = {"eps": EPS, "step_size": EPS / 4, "steps": STEPS, "start": start.clamp(0, 1)}
            x_adv = sparring.pgd(model, images, labels, **attack)
            weight = torch.ones(len(rows))
            if reweighted:  # from the same start PGD-K-tau with tau 0 stops where the model is first wrong
                weight = weights(sparring.friendly_pgd(model, images, labels, tau=0, **attack).backprops)
            loss = F.cross_entropy(model(x_adv), labels, reduction="none")
            optimizer.zero_grad()
            (weight * loss / weight.sum()).sum().backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def main() -> dict[str, sparring.Result]:
    """Train both ways, and print what the attacks say and what is doubted."""
    digits = data.load("digits")
    x, y = digits.train.x.float() / 255, digits.train.y
    results = {}
    for name in ("PGD training", "reweighted"):
        model = train(x, y, reweighted=name == "reweighted")
        result = results[name] = sparring.evaluate(model, digits, protocol=PROTOCOLS, eps=EPS)
        found = [f"{record.name} {100 * record.accuracy:.1f}" for record in result.records.values()]
        print(f"{name}, eps {EPS}, {result.n} images: {', '.join(found)} %")
        for doubt in result.doubts:
            print(f"  {doubt['name']}: {doubt['evidence']}")
    return results


if __name__ == "__main__":
    main()
