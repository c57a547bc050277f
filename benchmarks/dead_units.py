"""How many units of Small CNN's dense layer are left, at the learning rate of the paper? On a CPU, in fp32.

python benchmarks/dead_units.py OUT.json --seeds 0 1 2 --updates 40

Worst-case training on CIFAR-10 (K 10, eps 8/255, batch 128, flips) from fresh weights. Told after every update: the
loss, and the share of the 256 units that answered to any image of the batch. Nothing normalises this layer: once no
unit answers, no gradient passes it any more, and the network says one class for ever (docs/LOG.md, ninth session).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.nn import functional as F

from sparring import models, runs
from sparring.attacks import pgd
from sparring.data import batches, load
from sparring.recipes.paper.figures import TAU
from sparring.seeds import generator


def course(seed: int, updates: int, lr: float) -> list[dict[str, float]]:
    """Loss and share of living units by update."""
    torch.manual_seed(seed)
    model = models.build("small_cnn", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=TAU.momentum, weight_decay=TAU.weight_decay)
    answers: list[torch.Tensor] = []
    model.get_submodule("relu_fc1").register_forward_hook(lambda module, given, made: answers.append(made))
    told = []
    for step, (x, y) in enumerate(batches(load("cifar10").train, 128, seed=seed, epoch=1, augment=TAU.augment)):
        if step == updates:
            break
        model.eval()
        draws = generator(x.device, seed, step)
        x_adv = pgd(model, x, y, eps=8 / 255, step_size=TAU.attack.step_size, steps=10, generator=draws)
        answers.clear()
        loss = F.cross_entropy(model.train()(x_adv), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        living = (answers[-1] > 0).any(dim=0).double().mean().item()
        told.append({"loss": round(loss.item(), 4), "living": round(living, 4)})
        if step % 5 == 4:
            print(f"seed {seed}, update {step + 1}: loss {loss:.3f}, {living:.1%} of the units answer", flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.1)
    given = parser.parse_args()
    found = {**runs.environment(torch.device("cpu")), "lr": given.lr, "seeds": {}}
    for seed in given.seeds:
        found["seeds"][seed] = course(seed, given.updates, given.lr)
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
