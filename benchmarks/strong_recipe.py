"""A recipe for the most robustness without extra data, on one GPU: choose it on held-out images, then judge it once.

    SPARRING_DATA=DATA python3 benchmarks/strong_recipe.py trials OUT.json [--names base awp ...] [--epochs 60]
    SPARRING_DATA=DATA python3 benchmarks/strong_recipe.py final OUT.json --candidate all [--seeds 0 1 2]

The base is FAT by the FastAT Benchmark's protocol (ResNet-18, 100 epochs). Each candidate adds one ingredient to it,
and the last ones add several. `trials` measures them on 4,000 held-out training images: natural, PGD-10, -20 and -50,
and AutoAttack on the first 1,000. A later call adds to the file. `final` trains the chosen candidate seed after seed
and measures each on the test set once: the protocol fastat, and AutoAttack.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fast_recipe import Clock

from sparring.data import Dataset, hold_out, load
from sparring.evaluation import evaluate
from sparring.paper import specs
from sparring.schedules import parse
from sparring.seeds import Draw, derive_seed
from sparring.training import run_folder
from sparring.training.config import Config, to_json, with_objective
from sparring.training.loop import train

HELD, ATTACKED = 4000, 1000
RUNS = Path(tempfile.gettempdir()) / "strong"
BASE = next(row.configs["full"] for row in specs.find("fastat").rows if row.name == "fat")
POLICY = "crop-flip+jitter:0.4+erase:0.5"


def candidates(epochs: int | None) -> dict[str, Config]:
    """The configurations to try, each for `epochs`; by default for 100, or as its name says."""
    assert BASE is not None
    base = replace(BASE, epochs=epochs or BASE.epochs)
    awp = {"awp": parse("0,0.005@10%")}
    late = with_objective(base, tau="0,1@20%,2@40%,3@60%,10@85%")  # worst-case training at the end
    every: dict[str, Any] = {"label_smoothing": 0.1, "augment": POLICY} | awp
    return {
        "base": base,
        "smoothing": replace(base, label_smoothing=0.1),
        "policy": replace(base, augment=POLICY),
        "cutmix": replace(base, augment="crop-flip+cutmix:1.0"),
        "awp": replace(base, **awp),
        "late": late,
        "awp-smoothing": replace(base, label_smoothing=0.1, **awp),
        "all": replace(base, **every),
        "all-late": replace(late, **every),
        "all-late-200": replace(late, **every | {"epochs": epochs or 200}),
    }


def measured(model: Any, x: Any, y: Any, protocol: str, attacked: int) -> dict[str, float]:
    """Accuracies under a protocol on all images, and under AutoAttack on the first."""
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    found = evaluate(model, x, y, protocol, precision=precision, doubts=False)
    strongest = evaluate(model, x[:attacked], y[:attacked], "autoattack", precision=precision, doubts=False)
    row = {record.name: record.accuracy for record in found if record.name != "worst"}
    return row | {"autoattack": strongest["autoattack"].accuracy}


def run(config: Config, folder: Path, data: Dataset, device: torch.device, name: str) -> tuple[Any, dict[str, Any]]:
    """Train one run; the model, and what is recorded of the training."""
    clock = Clock(name)
    model = train(config, folder, device=device, data=data, tensorboard=False, overwrite=True, tracker=clock)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    facts = {"config": to_json(config), "seconds": clock.seconds, "start_up_s": clock.first - clock.began}
    return model, facts | {"peak_memory_gib": memory}


def trials(given: argparse.Namespace, device: torch.device) -> None:
    data = load(given.data)
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    found |= {"n": given.held, "n_autoattack": min(given.attacked, given.held), **run_folder.environment(device)}
    known = candidates(given.epochs)
    for name in given.names or known:
        config = replace(known[name], validation=given.held, **given.other)
        model, facts = run(config, RUNS / "trials" / name, data, device, name)
        _, held = hold_out(data.train, config.validation, seed=derive_seed(config.seed, Draw.HOLD_OUT))
        found[name] = facts | measured(model, held.x, held.y, "fastat", given.attacked)
        print(name, {key: value for key, value in found[name].items() if key != "config"}, flush=True)
        given.out.write_text(json.dumps(found, indent=1))


def final(given: argparse.Namespace, device: torch.device) -> None:
    data = load(given.data)
    config = replace(candidates(given.epochs)[given.candidate], **given.other)
    found = {"candidate": given.candidate, "config": to_json(config), **run_folder.environment(device), "seeds": {}}
    for seed in given.seeds:
        model, facts = run(replace(config, seed=seed), RUNS / "final" / str(seed), data, device, f"seed {seed}")
        facts |= {"n": len(data.test.x), "runs_at_once": 1}
        facts |= measured(model, data.test.x, data.test.y, "fastat", len(data.test.x))
        print(f"seed {seed}", {key: value for key, value in facts.items() if key != "config"}, flush=True)
        found["seeds"][seed] = facts | {"epochs": run_folder.read_metrics(RUNS / "final" / str(seed))}
        given.out.write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["trials", "final"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--names", nargs="*", default=[], choices=list(candidates(None)))
    parser.add_argument("--candidate", default="all", choices=list(candidates(None)))
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--held", type=int, default=HELD, help="training images held out and judged on")
    parser.add_argument("--attacked", type=int, default=ATTACKED, help="the first of them, under AutoAttack")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="resnet18")
    given = parser.parse_args()
    given.other = {"data": given.data, "model": given.model}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        given.other["precision"] = "fp32"
    (trials if given.what == "trials" else final)(given, device)


if __name__ == "__main__":
    main()
