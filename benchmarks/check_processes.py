"""Check that two processes that share a device over gloo train and measure as one process does.

    PYTHONPATH=src python3 benchmarks/check_processes.py OUT.json RECIPE [FLAGS of sparring train ...]
    PYTHONPATH=src python3 benchmarks/check_processes.py OUT.json fat-digits --epochs 1 --engine plain --sync-bn

Trains a small network in float64, with its batch-norm over all processes, for 45 updates: with one process and with
two, whose weights may differ by 1e-9 (`float64`, relative to their norm).

Then trains a recipe with one process, with one again, with two, and with one from another seed, in fp32 without TF32,
and measures the first model with one process and with two. Distances are those of the weights from the first run's:
`again` is what rounding does on this device, `other_seed` what another run is. With --sync-bn, two processes should be
near. Without, each process normalises by its own images, which is another run after some updates.
Exit status 1 where float64 differs, where the two evaluations differ in an image, or where two processes with --sync-bn
are no nearer than a quarter of the other seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparring.recipes.digits import FAT
from sparring.training import loop, run_folder
from sparring.training.distributed import joined

SEED = 7
PYTHON = [sys.executable]
TOGETHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ONE, TWO = [*PYTHON, "-m", "sparring"], [*TOGETHER, "-m", "sparring"]
GLOO = ["--backend", "gloo"]
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT = replace(FAT, epochs=3, batch_size=90, validation=20, sync_bn=True, seed=SEED)


class Exact(nn.Module):
    """A small network in float64."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(512, 10)]
        self.layers = nn.Sequential(*layers).double()

    def forward(self, x: Tensor) -> Tensor:
        """Pixels to logits, both in float64."""
        logits: Tensor = self.layers(x.double())
        return logits


def member(file: Path) -> None:
    """Train `Exact`, as one process or as one of two, and write its weights."""
    torch.manual_seed(0)
    loop.models.check_network = lambda *_, **__: None  # type: ignore[attr-defined]  # it refuses float64
    with joined(DEVICE, "gloo") as world:
        given = {"device": DEVICE, "engine": "plain", "world": world, "tensorboard": False}
        model = loop.train(EXACT, file.with_suffix(""), model=Exact(), **given)
        if world.first:
            save_file({name: value.double() for name, value in model.state_dict().items()}, file)


def in_float64(folder: Path) -> float:
    """How far the weights of two processes are from those of one, relative to their norm."""
    found = []
    for begin in (PYTHON, TOGETHER):
        file = folder / f"exact-{len(begin)}.safetensors"
        if subprocess.run([*begin, __file__, "--member", str(file)], stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(2)
        found.append(torch.cat([value.flatten() for _, value in sorted(load_file(file).items())]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def weights(run: Path) -> torch.Tensor:
    """All floating-point weights and statistics after the last epoch, as one vector."""
    state = load_file(run / run_folder.LAST)
    return torch.cat([state[name].double().flatten() for name in sorted(state) if state[name].is_floating_point()])


def sparring(begin: list[str], *words: str) -> None:
    """Run a command; where it fails it has said why, and this ends."""
    gloo = GLOO if begin is TWO else []
    if subprocess.run([*begin, *words, *gloo], stdout=subprocess.DEVNULL, env=os.environ | NO_TF32).returncode:
        raise SystemExit(2)


def trained(run: Path, recipe: str, flags: list[str]) -> torch.Tensor:
    """The weights of one run; its name says how it is trained."""
    seed = SEED + (run.name == "other_seed")
    begin = TWO if run.name == "two" else ONE
    sparring(begin, "train", recipe, *flags, "--seed", str(seed), "--no-tensorboard", "--out", str(run))
    return weights(run)


def measured(run: Path, begin: list[str], name: str) -> dict[str, str]:
    """For every attack, the images that a model classifies as their label, 1 or 0 each, by one process or by two."""
    out = run / f"{name}.json"
    flags = ["--protocol", "trades", "--limit", "400", "--batch-size", "100", "--no-doubts", "--json", str(out)]
    sparring(begin, "evaluate", str(run), *flags, "--out", str(run / name))
    found = json.loads(out.read_text())
    return {record["name"]: record["runs"][0]["correct"] for record in found["records"]}


def main(argv: list[str]) -> int:
    """Print a line for each run, then the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("recipe")
    given, flags = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        exact = in_float64(folder)
        print(f"two processes in float64: {exact:.3g} from one", flush=True)
        first = trained(folder / "one", given.recipe, flags)
        distances = {}
        for name in ("again", "two", "other_seed"):
            distances[name] = float((trained(folder / name, given.recipe, flags) - first).norm() / first.norm())
            print(f"{name}: {distances[name]:.3g} from one process", flush=True)
        one, two = (measured(folder / "one", begin, name) for name, begin in (("one", ONE), ("two", TWO)))
    same, near = one == two, distances["two"] < distances["other_seed"] / 4
    accuracy = {attack: correct.count("1") / len(correct) for attack, correct in two.items()}
    facts = {"recipe": given.recipe, "flags": flags, "seed": SEED, "float64": exact, "distances": distances}
    facts |= {"accuracy": accuracy, "n": len(two["natural"]), "same_verdicts": same}
    facts |= run_folder.environment(DEVICE)
    facts["command"] = f"python3 benchmarks/check_processes.py OUT.json {shlex.join([given.recipe, *flags])}"
    given.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"the verdicts {'are the same' if same else 'DIFFER'}: {accuracy}")
    return int(not (exact < 1e-9 and same and (near or "--sync-bn" not in flags)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        member(Path(sys.argv[2]))
        raise SystemExit
    raise SystemExit(main(sys.argv[1:]))
