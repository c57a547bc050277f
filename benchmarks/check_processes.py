"""Check that two processes that share a device over gloo train and measure as one process does.

    PYTHONPATH=src python3 benchmarks/check_processes.py OUT.json RECIPE [FLAGS of sparring train ...]
    PYTHONPATH=src python3 benchmarks/check_processes.py OUT.json fat-digits --epochs 1 --engine plain --sync-bn

Trains a recipe with one process, with one again, with two, and with one from another seed, and measures the first model
with one process and with two. Distances are those of the weights from the first run's, relative to their norm: `again`
is what rounding does on this device, `other_seed` what another run is. With --sync-bn, two processes should be near.
Without, each process normalises by its own images, which is another run after some updates.
Exit status 1 where the two evaluations differ in an image, or where two processes with --sync-bn are no nearer than a
quarter of the other seed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from sparring.training import run_folder

SEED = 7
ONE = [sys.executable, "-m", "sparring"]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sparring"]
GLOO = ["--backend", "gloo"]


def weights(run: Path) -> torch.Tensor:
    """All floating-point weights and statistics after the last epoch, as one vector."""
    state = load_file(run / run_folder.LAST)
    return torch.cat([state[name].double().flatten() for name in sorted(state) if state[name].is_floating_point()])


def sparring(begin: list[str], *words: str) -> None:
    """Run a command; where it fails it has said why, and this ends."""
    gloo = GLOO if begin is TWO else []
    if subprocess.run([*begin, *words, *gloo], stdout=subprocess.DEVNULL).returncode:
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
        first = trained(folder / "one", given.recipe, flags)
        distances = {}
        for name in ("again", "two", "other_seed"):
            distances[name] = float((trained(folder / name, given.recipe, flags) - first).norm() / first.norm())
            print(f"{name}: {distances[name]:.3g} from one process", flush=True)
        one, two = (measured(folder / "one", begin, name) for name, begin in (("one", ONE), ("two", TWO)))
    same, near = one == two, distances["two"] < distances["other_seed"] / 4
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    accuracy = {attack: correct.count("1") / len(correct) for attack, correct in two.items()}
    facts = {"recipe": given.recipe, "flags": flags, "seed": SEED, "distances": distances, "accuracy": accuracy}
    facts |= {"n": len(two["natural"]), "same_verdicts": same, **run_folder.environment(device)}
    facts["command"] = f"python3 benchmarks/check_processes.py OUT.json {shlex.join([given.recipe, *flags])}"
    given.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"the verdicts {'are the same' if same else 'DIFFER'}: {accuracy}")
    return int(not (same and (near or "--sync-bn" not in flags)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
