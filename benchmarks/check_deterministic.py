"""Check that `--deterministic` gives the same weights bit for bit, in two processes, and what it costs.

    PYTHONPATH=src python3 benchmarks/check_deterministic.py OUT.json [RECIPE] [EPOCHS] [DIGEST ...]

Trains a recipe three times, one process after the other: twice with `--deterministic`, once without. Digests are of the
weights after the last epoch; those given on the command line, of the same training on other machines, are compared too.
The cost is the ratio of the seconds of all epochs but the first. Exit status 1 where digests differ.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from sparring.training import run_folder

SEED = 5


def digest(run: Path) -> str:
    """The first 16 digits of the SHA-256 of all weights and statistics."""
    state = load_file(run / run_folder.LAST)
    values = [state[name].float().contiguous() for name in sorted(state) if state[name].is_floating_point()]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()[:16]


def main(argv: list[str]) -> int:
    """Print a line for each run, then the verdict."""
    out, recipe, epochs = Path(argv[0]), *(argv[1:3] or ("fat-cifar10-resnet18", "3"))
    elsewhere, found = argv[3:], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in {"first": ["--deterministic"], "second": ["--deterministic"], "default": []}.items():
            run = Path(folder) / name
            command = [sys.executable, "-m", "sparring", "train", recipe, "--epochs", epochs, "--seed", str(SEED)]
            subprocess.run([*command, *flags, "--out", str(run)], check=True, stdout=subprocess.DEVNULL)
            records = run_folder.read_metrics(run)
            found[name] = {"digest": digest(run), "seconds": [record["seconds"] for record in records]}
            print(name, found[name], flush=True)
    once, default = (sum(found[name]["seconds"][1:]) for name in ("first", "default"))
    digests = {found["first"]["digest"], found["second"]["digest"], *elsewhere}
    same, cost = len(digests) == 1, once / default
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"recipe": recipe, "epochs": int(epochs), "seed": SEED, "runs": found, "digests_elsewhere": elsewhere}
    facts |= {"same_bits": same, "seconds_over_default": cost, **run_folder.environment(device)}
    facts["command"] = f"python3 benchmarks/check_deterministic.py OUT.json {recipe} {epochs}"
    out.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{'the same bits' if same else f'DIFFERENT BITS: {sorted(digests)}'}; {cost:.3f} of the default's time")
    return int(not same)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
