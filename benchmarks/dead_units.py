"""Share of active units in Small CNN's dense layer at the paper's learning rate, on a CPU, in fp32.

    python benchmarks/dead_units.py OUT.json --seeds 0 1 2 --updates 40

Worst-case training on CIFAR-10 (K 10, eps 8/255, batch 128, crops and flips) from fresh weights. Reports after every
update the loss and the share of the 256 units that are active for any image of the batch. Nothing normalises this
layer: once no unit is active, no gradient passes it, and the network predicts one class for every image.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.nn import functional as F

from sparring import models
from sparring.attacks import pgd
from sparring.data import batches, load
from sparring.paper.specs.figures import TAU
from sparring.seeds import generator
from sparring.training import run_folder


def course(seed: int, updates: int, lr: float) -> list[dict[str, float]]:
    """Loss and share of active units by update."""
    torch.manual_seed(seed)
    model = models.build("small_cnn", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=TAU.momentum, weight_decay=TAU.weight_decay)
    outputs: list[torch.Tensor] = []
    model.get_submodule("relu_fc1").register_forward_hook(lambda module, given, made: outputs.append(made))
    records = []
    for step, (x, y) in enumerate(batches(load("cifar10").train, 128, seed=seed, epoch=1, augment=TAU.augment)):
        if step == updates:
            break
        model.eval()
        draws = generator(x.device, seed, step)
        x_adv = pgd(model, x, y, eps=8 / 255, step_size=TAU.objective.step_size, steps=10, generator=draws)
        outputs.clear()
        loss = F.cross_entropy(model.train()(x_adv), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        living = (outputs[-1] > 0).any(dim=0).double().mean().item()
        records.append({"loss": round(loss.item(), 4), "living": round(living, 4)})
        if step % 5 == 4:
            print(f"seed {seed}, update {step + 1}: loss {loss:.3f}, {living:.1%} of the units are active", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.1)
    given = parser.parse_args()
    found = {**run_folder.environment(torch.device("cpu")), "lr": given.lr, "seeds": {}}
    for seed in given.seeds:
        found["seeds"][seed] = course(seed, given.updates, given.lr)
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
