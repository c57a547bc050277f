"""Does a run that was interrupted end as one that was left alone, on a GPU? Prints and writes the difference.

    PYTHONPATH=src:site SPARRING_DATA=DATA python3 benchmarks/gpu_resume.py OUT.json --model resnet18 --stops 3
    PYTHONPATH=src:site SPARRING_DATA=DATA python3 benchmarks/gpu_resume.py OUT.json --model wrn-34-10 --images 3200

FAT for TRADES (a row of Table 2), two epochs of some images. Trained whole, whole once more (what the GPU itself does
not repeat), and in parts, stopped at even distances, the first within an epoch. Told: the largest difference of a
weight, relative to the largest weight, and of the epochs' records. 0 is bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparring import runs
from sparring.config import Config
from sparring.data import Dataset, Split, load
from sparring.recipes import cifar10
from sparring.train import Interrupted, train
from sparring.weights import load_model

TOLD = ("loss", "natural", "pgd10", "backprops")


def trained(config: Config, folder: Path, data: Dataset, stops: list[int], device: str) -> dict[str, Any]:
    """Train to the end, stopped after these numbers of steps (of each stretch); weights, records and seconds."""
    began = time.perf_counter()
    for stop in [*stops, -1]:
        steps = itertools.count(1)
        try:
            train(
                config,
                folder,
                data=data,
                device=device,
                resume=True,
                tensorboard=False,
                stop=lambda steps=steps, stop=stop: next(steps) == stop,
            )
        except Interrupted:
            continue
    metrics = runs.read_metrics(folder)
    weights = load_model(folder, device="cpu").state_dict()
    return {
        "weights": weights,
        "records": [{key: record[key] for key in TOLD} for record in metrics],
        "seconds": time.perf_counter() - began,
        "sessions": len(runs.read_environment(folder)),
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    floats = [name for name, value in one["weights"].items() if value.is_floating_point()]
    largest = max(one["weights"][name].abs().max().item() for name in floats)
    apart = max((one["weights"][name] - other["weights"][name]).abs().max().item() for name in floats)
    return {
        "weights": apart / largest,
        **{
            key: max(abs(a[key] - b[key]) for a, b in zip(one["records"], other["records"], strict=True))
            for key in TOLD
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--images", type=int, default=12_800)
    parser.add_argument("--stops", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    whole = load(given.data)
    count = given.images + 1000
    data = replace(whole, train=Split(whole.train.x[:count], whole.train.y[:count]))
    config = replace(cifar10.FAT_FOR_TRADES, data=given.data, model=given.model, epochs=2, validation=1000)
    steps = 2 * -(-given.images // config.batch_size)
    # Even distances, all moved on by a quarter of one: the middle of two epochs is the end of the first.
    places = [steps * (4 * number + 5) // (4 * given.stops + 4) for number in range(given.stops)]
    stops = [place - before for before, place in itertools.pairwise([0, *places])]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, each in (("whole", []), ("again", []), ("parts", stops)):
            found[name] = trained(config, Path(folder) / name, data, each, given.device)
            print(f"{name}: {found[name]['seconds']:.1f} s, {found[name]['records'][-1]}", flush=True)
    told = {
        "model": given.model,
        "objective": config.objective,
        "batch_size": config.batch_size,
        "images": given.images,
        "steps": steps,
        "stopped after steps": places,
        "sessions": found["parts"]["sessions"],
        "whole against whole again": difference(found["whole"], found["again"]),
        "whole against parts": difference(found["whole"], found["parts"]),
        **runs.environment(torch.device(given.device)),
    }
    print(json.dumps(told, indent=1), flush=True)
    given.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
