"""Accuracy of FAT on digits trained by the fast engine in fp32 and in bf16, on a CPU, seed by seed.

    OMP_NUM_THREADS=1 python benchmarks/precision_digits.py OUT.json FIRST LAST

One thread; `fat-digits`, seeds FIRST to LAST - 1, each in both precisions. Natural accuracy and PGD-20 (eps 0.3, steps
of 0.03, uniform start) on the 450 test images, by the fp32 weights in fp32. Seeds that are in OUT.json are not trained
again. Eager torch replaces the GPU's kernels, so this measures bf16 and how the engine uses it
(copies of the weights, the folded network), not Triton.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from sparring import recipes
from sparring.attacks import pgd
from sparring.data import load
from sparring.training import run_folder
from sparring.training.loop import train

CPU = torch.device("cpu")


def measured(seed: int, precision: str) -> dict[str, float]:
    """Natural and PGD-20 accuracy of one run."""
    data = load("digits")
    config = replace(recipes.find("fat-digits").config, seed=seed, precision=precision, validation=120)
    with tempfile.TemporaryDirectory() as folder:
        model = train(config, Path(folder) / "run", data=data, tensorboard=False, engine="fast")
    x, y = data.test.x.float() / 255, data.test.y
    draws = torch.Generator().manual_seed(0)
    attacked = pgd(model, x, y, eps=0.3, step_size=0.03, steps=20, start="uniform", generator=draws)
    with torch.no_grad():
        return {
            name: round(float((model(points).argmax(dim=1) == y).double().mean()), 6)
            for name, points in (("natural", x), ("pgd20", attacked))
        }


def main(out: Path, first: int, last: int) -> None:
    torch.set_num_threads(1)
    rows = json.loads(out.read_text())["rows"] if out.exists() else {}
    for seed in range(first, last):
        if str(seed) not in rows:
            rows[str(seed)] = {precision: measured(seed, precision) for precision in ("fp32", "bf16")}
        found = {"n": 450, "rows": rows, "means": means(rows), **run_folder.environment(CPU)}
        found["command"] = f"python benchmarks/precision_digits.py OUT.json {first} {last}"
        out.write_text(json.dumps(found) + "\n")
        print(seed, rows[str(seed)], flush=True)
    print(json.dumps(means(rows), indent=1))


def means(rows: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Both means, their paired difference and its standard error in points, and the number of seeds."""
    summary = {}
    for name in ("natural", "pgd20"):
        fp32, bf16 = ([100 * row[precision][name] for row in rows.values()] for precision in ("fp32", "bf16"))
        gaps = [b - a for a, b in zip(fp32, bf16, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        numbers = {"fp32": fp32, "bf16": bf16, "bf16 - fp32": gaps}
        summary[name] = {what: statistics.mean(values) for what, values in numbers.items()}
        summary[name] |= {"standard error": error, "seeds": len(gaps)}
    return summary


def kept(text: str) -> Path:
    """The path of a result of this script, or of a new file."""
    path = Path(text)
    try:
        if path.exists():
            json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        raise argparse.ArgumentTypeError(f"{path} is no result of this script. Name another file.") from None
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=kept)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    given = parser.parse_args()
    if not 0 <= given.first < given.last:
        parser.error(f"FIRST must be below LAST and neither below 0, got {given.first} and {given.last}.")
    main(given.out, given.first, given.last)
