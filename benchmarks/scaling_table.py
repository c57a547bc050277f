"""The predictions of docs/scaling.md, from the times of one H200 in results/engine: python benchmarks/scaling_table.py

ResNet-18 and WRN-34-10 were measured. ResNet-50 at 224 pixels was not: its times are its arithmetic at RATE.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sparring.bench.scaling import SIZES, Costs, predict
from sparring.models import build

RESULTS = Path(__file__).parent.parent / "results" / "engine"
RATE = 300e12  # FLOP/s: what ResNet-18 reaches at 128 images (311); WRN-34-10 reaches 464
IMAGENET = {"images": 1_281_167, "epochs": 90, "steps": 3, "batch": 64}
RESNET50 = {"parameters": 25_557_032, "statistics": 53_120, "forward": 2 * 4.089e9}  # at 224 x 224; FLOPs


def measured(model: str) -> Costs:
    """The costs of a network with K = 10 and 128 images, from its file."""
    found = json.loads((RESULTS / f"bench-{model}-h200.json").read_text())
    network = build(model, num_classes=10, channels=3, size=(32, 32))
    floats = [tensor for tensor in network.state_dict().values() if tensor.is_floating_point()]
    exchanged = 4 * sum(tensor.numel() for tensor in floats) + 12
    return Costs(128, 10 * found["steps"]["128"]["median"], found["update"]["median"], exchanged)


def resnet50() -> Costs:
    """The costs by arithmetic: a step is a forward pass and as much again, an update three forward passes."""
    forward = IMAGENET["batch"] * RESNET50["forward"] / RATE
    exchanged = 4 * (RESNET50["parameters"] + RESNET50["statistics"]) + 12
    return Costs(IMAGENET["batch"], IMAGENET["steps"] * 2 * forward, 3 * forward, exchanged)


def rows() -> list[str]:
    """The table in Markdown."""
    table = [
        "| network | one GPU: attack, update | exchanged | GPUs | all-reduce | efficiency |",
        "|---|---|---|---|---|---|",
    ]
    for name, costs in (
        ("ResNet-18", measured("resnet18")),
        ("WRN-34-10", measured("wrn-34-10")),
        ("ResNet-50", resnet50()),
    ):
        for gpus in SIZES:
            found = predict(costs, gpus)
            times = f"{1e3 * costs.attack:.2f}, {1e3 * costs.update:.2f} ms"
            begin = f"| {name} | {times} | {costs.exchanged / 1e6:.1f} MB" if gpus == SIZES[0] else "| | |"
            table.append(f"{begin} | {gpus} | {found['all_reduce_ms']:.2f} ms | {found['efficiency']:.1%} |")
    return table


def imagenet() -> list[str]:
    """Hours of a training on ImageNet, in Markdown."""
    table = ["| GPUs | batch | learning rate | hours |", "|---|---|---|---|"]
    seen = IMAGENET["images"] * IMAGENET["epochs"]
    for gpus in (1, *SIZES):
        found = predict(resnet50(), gpus)
        batch = gpus * IMAGENET["batch"]
        hours = seen / found["images_per_second"] / 3600
        table.append(f"| {gpus} | {batch:,} | {0.1 * batch / 256:.4g} | {hours:.2g} |")
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("\n".join([*rows(), "", *imagenet()]))
