"""The demo over five seeds: mean and range of every accuracy.

    python benchmarks/demo_seeds.py results/demo.json

Runs `sparring demo --seed K` for K = 0..4 (under a minute each on 2 cores) and writes every number it measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from sparring.cli import demo

SEEDS = range(5)


def main(out: Path) -> None:
    found = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            demo.run(["--seed", str(seed), "--out", folder])
            found.append(json.loads((Path(folder) / "demo.json").read_text()))
    common = {key: found[0][key] for key in ("n", "sparring", "torch", "python", "device", "threads")}
    trials = [{"seed": trial["seed"], "methods": trial["methods"]} for trial in found]
    command = "python benchmarks/demo_seeds.py results/demo.json"
    out.write_text(json.dumps({**common, "command": command, "trials": trials}, indent=1) + "\n")
    for name in found[0]["methods"]:
        rows = [trial["methods"][name] for trial in found]
        spread = {
            column: f"{100 * statistics.mean(values):.1f} ({100 * min(values):.1f}-{100 * max(values):.1f})"
            for column in demo.ATTACKS
            for values in [[row[column] for row in rows]]
        }
        print(name, spread, f"{statistics.mean(row['backprops'] for row in rows):.2f} BPs")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
